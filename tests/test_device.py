"""All three stages on a GPU that is pretended: is every tensor on the right device?

A tensor of the "GPU" is one of the CPU with a mark on its memory, so views, parameters and gradients
are where their memory is. Two modes of PyTorch do the rest. `Devices` sees each call in Python: it
turns device="cuda" into a mark on the result, and lets `.device` tell what the mark says. `Mixing`
sees each operation below that, the backward pass and the optimizer included: it marks what is
computed from marked tensors, and raises RuntimeError where a GPU would, that is, unless

    gpu.copy_(cpu), .to(), .cpu()    copying is what they are for
    gpu + cpu, torch.where           the latter has no dimensions, and is not what is changed
    gpu[cpu]                         an index or a mask, but not cpu[gpu]

It cannot see kernels that CUDA lacks, other rounding, autocast, waiting, memory.
"""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cli import FLAGS, metrics, run, same_weights, write_data
from plumbing import report, settings, state

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
NETWORK = {"mm", "addmm", "bmm", "embedding", "native_layer_norm"}
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


def on_gpu(x):
    return getattr(x.untyped_storage(), "on_gpu", False)


def tensors(tree):
    """The tensors among arguments or results, however nested."""
    tree = list(tree.values()) if isinstance(tree, dict) else tree
    if isinstance(tree, list | tuple):
        return [x for part in tree for x in tensors(part)]
    return [tree] if isinstance(tree, Tensor) else []


def memory(tree):
    return {x.untyped_storage()._cdata for x in tensors(tree)}


class Devices(TorchFunctionMode):
    gpu_at_work = False  # the call that runs has a tensor of the GPU; what it makes is there too

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, args = dict(kwargs or {}), list(args)
        place, second = kwargs.get("device"), args[1] if len(args) > 1 else None
        if func == Tensor.device.__get__:
            return GPU if on_gpu(args[0]) else CPU
        if func in (Tensor.numpy, Tensor.__array__) and on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if place:
            kwargs["device"] = CPU
        elif func is Tensor.cpu:
            place = CPU
        elif func is Tensor.to and isinstance(second, str | torch.device):
            place, args[1] = second, CPU
        elif func in (torch.tensor, Tensor.new_tensor, Tensor.__deepcopy__) and tensors(args[:1]):
            place = GPU if on_gpu(args[0]) else CPU  # what these make, Mixing does not see
        before, self.gpu_at_work = self.gpu_at_work, any(map(on_gpu, tensors((args, kwargs))))
        try:
            result = func(*args, **kwargs)
            if place and on_gpu(result) != (torch.device(place).type == "cuda"):
                result = result.clone() if memory(result) & memory(args) else result
                result.untyped_storage().on_gpu = not on_gpu(result)
            return result
        finally:
            self.gpu_at_work = before


class Mixing(TorchDispatchMode):
    def __init__(self, devices):
        super().__init__()
        self.devices, self.on_cpu = devices, set()  # names of operations on the CPU

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands, name = tensors((args, kwargs)), func._schema.name.removeprefix("aten::")
        gpu = any(map(on_gpu, operands)) if operands else self.devices.gpu_at_work
        if gpu:
            self.check(func, name, args, [x for x in operands if not on_gpu(x)])
        else:
            self.on_cpu.add(name)
        result = func(*args, **kwargs or {})
        for x in tensors(result) if gpu else ():
            if not memory(x) & memory(operands):  # else a view, or what was changed in place
                x.untyped_storage().on_gpu = True
        return result

    def check(self, func, name, args, strangers):
        pointwise = torch.Tag.pointwise in func.tags
        if name == "copy_":
            return
        if name in INDEXING and on_gpu(args[0]):
            strangers = [x for x in args[2:3] if x.dim() and not on_gpu(x)]
        elif pointwise or name.startswith(("fill_", "masked_fill", "_foreach_")):
            changed = args[0] if func._schema.is_mutable else None
            strangers = [x for x in strangers if x.dim() or x is changed]
        if strangers:
            raise RuntimeError(f"Expected all tensors to be on the same device ({func})")


@contextlib.contextmanager
def pretended_gpu():
    """-> the Mixing in force; its `restored` gets the random states given to the GPU."""
    devices, restored = Devices(), []
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    cuda.get_rng_state_all, cuda.set_rng_state_all = lambda: [torch.ones(1)], restored.extend
    here = SimpleNamespace(**vars(torch) | {"cuda": cuda})
    with pytest.MonkeyPatch.context() as patch, devices, Mixing(devices) as mixing:
        for module in (settings, state):
            patch.setattr(module, "torch", here)
        mixing.restored = restored
        yield mixing


MORE = {
    "sft": "--micro_batch 9",
    "rm": "--micro_batch 9",
    "ppo": "--separate_critic --ref_update_every 1 --entropy_coef 0.01 --micro_batch 3 "
    "--report_prompts 2 --rollout_batch 100",
}


def chain(data, out, device):
    for kind, more in MORE.items():
        flags = [x for x in FLAGS[kind] if x not in ("--no_report", "--device", "cpu")]
        given = ["--data", data, "--out", out, "--device", device, *flags, *more.split()]
        status, _, error = run(f"train_{kind}.py", *given)
        assert (status, error) == (0, "")


def test_on_a_gpu_no_devices_mix_no_network_runs_on_the_cpu_and_the_results_are_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "OPTIMUM_SAMPLES", 64)
    data = write_data(tmp_path / "data", judge=True)
    chain(data, tmp_path / "cpu", "cpu")
    with pretended_gpu() as gpu:
        chain(data, tmp_path / "gpu", "auto")
        monkeypatch.setitem(
            sys.modules, "taste", SimpleNamespace(score=lambda _, texts: [*map(len, texts)])
        )
        for script, more in (
            ("train_ppo.py", "--policy {gpu}/ppo.pt --reference {gpu}/sft.pt --reward taste:score"),
            ("variations/dpo.py", "--samples 4"),
            ("variations/best_of_n.py", "--n 4"),
        ):
            given = ["--data", data, "--models", tmp_path / "gpu", "--out", tmp_path / script]
            flags = [*given, *FLAGS["ppo"][2:], *more.format(gpu=tmp_path / "gpu").split()]
            assert run(script, *flags)[::2] == (0, "")
        assert not gpu.on_cpu & NETWORK
        state.set_random_state(state.random_state())
        assert [x.tolist() for x in gpu.restored] == [[1.0]]
    for kind in MORE:
        a, b = (tmp_path / place for place in ("cpu", "gpu"))
        assert metrics(a / f"{kind}.jsonl") == metrics(b / f"{kind}.jsonl")
        assert same_weights(a / f"{kind}.pt", b / f"{kind}.pt")
    a, b = (json.loads((x / "report.json").read_text()) | {"seconds": 0} for x in (a, b))
    assert a == b and {"above_entropy", "below_ceiling"} <= {*a["sft"], *a["rm"]}


@pytest.mark.parametrize("code", ["gpu + cpu", "cpu[j]", "c.add_(g)", "cpu.to(gpu.device) + cpu"])
def test_what_a_gpu_would_refuse_is_refused_here(code):
    with pretended_gpu(), pytest.raises(RuntimeError, match="same device"):
        cpu, gpu = torch.ones(3), torch.ones(3, device="cuda")
        assert (gpu + gpu[0].cpu()).device == gpu[cpu > 0].device == GPU and gpu.cpu().device == CPU
        j, c, g = torch.arange(3, device="cuda"), torch.ones(()), torch.ones((), device="cuda")
        eval(code, {"cpu": cpu, "gpu": gpu, "j": j, "c": c, "g": g})
