"""A GPU that is pretended, for test_device.py: a second device, cuda:0, on a machine that has none.

Its tensors are ordinary ones of the CPU. A mark on the memory of each says that it lies on the GPU, so views, parameters and
gradients are where their memory is. Two modes of PyTorch do the rest. `Devices` sees each call in Python: it turns device="cuda"
into a mark on the result, lets `.device` tell what the mark says, and refuses .numpy(). `Mixing` sees each operation below that,
the backward pass and the optimizer included: it marks what is computed from marked tensors, and raises RuntimeError where a GPU
would. As in PyTorch, operands may be on two devices only so:

    gpu.copy_(cpu), gpu[1:] = cpu, .to(), .cpu()     copying is what they are for
    gpu + cpu, where the latter has no dimensions    element by element; one such operand, in torch.where any number. It is not
                                                     the one that is changed: cpu += gpu fails
    gpu[cpu]                                         an index or a mask, but not cpu[gpu]; so too on the left of an assignment,
                                                     where also a value without dimensions may be on the CPU

A few rare operations allow more than this says (index_fill, for instance); nothing here uses them.

What it cannot see: an operation that has no CUDA kernel, or one with demands of its own (the fused AdamW, say); other numbers,
since sums have another order there and random numbers another generator; autocast, which is off; errors that come late, because a
GPU works while Python goes on; memory, speed, waiting; several GPUs; whether a file of a GPU's tensors can be read on a machine
without one. And where the backward pass computes a block again (--grad_checkpoint), .device in it says cpu.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plumbing import progress, settings

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def on_gpu(x):
    return getattr(x.untyped_storage(), "on_gpu", False)


def place_of(x):
    return GPU if on_gpu(x) else CPU


def tensors(tree):
    """The tensors among arguments or results, however nested."""
    found = []
    for x in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else [tree]:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple, dict)):
            found += tensors(x)
    return found


def memory(tree):
    return {x.untyped_storage()._cdata for x in tensors(tree)}


class Devices(TorchFunctionMode):
    """Calls in Python. `gpu_at_work`: the one that runs has a tensor of the GPU, so what PyTorch makes inside it is there too."""

    gpu_at_work = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, args = dict(kwargs or {}), list(args)
        place, second = kwargs.get("device"), args[1] if len(args) > 1 else None
        if func == Tensor.device.__get__:
            return place_of(args[0])
        if func in (Tensor.numpy, Tensor.__array__) and on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        # Where should the result be? None: where PyTorch puts it anyway.
        if place:
            kwargs["device"] = CPU
        elif func is Tensor.cpu:
            place = CPU
        elif func is Tensor.to and isinstance(second, (str, torch.device)):
            place, args[1] = second, CPU
        elif func is Tensor.to and isinstance(second, Tensor):
            place, args[1] = place_of(second), second.dtype
        elif func in (torch.tensor, Tensor.new_tensor, Tensor.__deepcopy__) and isinstance(args[0], Tensor):
            place = place_of(args[0])  # what these make, Mixing does not see
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
    """Operations. `on_cpu` gets the names of those that have no tensor of the GPU."""

    def __init__(self, devices):
        super().__init__()
        self.devices, self.on_cpu = devices, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands, name = tensors((args, kwargs)), func._schema.name.removeprefix("aten::")
        gpu = any(map(on_gpu, operands)) if operands else self.devices.gpu_at_work
        if gpu:
            self.check(func, name, args, [x for x in operands if not on_gpu(x)])
        else:
            self.on_cpu.add(name)
        result = func(*args, **kwargs or {})
        for x in tensors(result) if gpu else ():
            if not memory(x) & memory(operands):  # otherwise it is a view, or what was changed in place
                x.untyped_storage().on_gpu = True
        return result

    def check(self, func, name, args, strangers):
        """The table at the top; strangers: those operands that are on the CPU."""
        if name == "copy_":
            return
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and on_gpu(args[0]):
            strangers = [x for x in args[2:3] if x.dim() and not on_gpu(x)]
        elif torch.Tag.pointwise in func.tags or name.startswith(("fill_", "masked_fill", "_foreach_")):
            changed = args[0] if func._schema.is_mutable else None
            scalars = [x for x in strangers if x.dim() == 0 and x is not changed]
            strangers = [] if len(scalars) == len(strangers) and (len(scalars) < 2 or name == "where") else strangers
        if strangers:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")


@contextlib.contextmanager
def pretended_gpu():
    """-> the Mixing in force; its `restored` gets the random states given to the GPU. The scripts find the GPU by themselves."""
    devices, restored = Devices(), []
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    cuda.get_rng_state_all, cuda.set_rng_state_all = lambda: [torch.ones(1)], restored.extend
    with pytest.MonkeyPatch.context() as patch, devices, Mixing(devices) as mixing:
        for module in (settings, progress):
            patch.setattr(module, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
        mixing.restored = restored
        yield mixing
