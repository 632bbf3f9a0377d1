"""Every tensor is on the right device, checked without a GPU: pretended.py says how, and what that cannot see.

Run: python -m pytest tests/test_device.py
"""

import ast
import copy
import inspect
import json
import shutil
import signal
import sys

import pytest
import torch

import minippo
import train_ppo
import train_rm
import train_sft
from cli import metrics, same_weights
from data import zoo
from plumbing import checkpoints, fast, progress, report, rewards, settings, text, traces, training, watch
from pretended import CPU, GPU, pretended_gpu
from tiny import EOS, tiny_gpt, tiny_reward_model

# The pretended GPU itself. cpu and gpu are tensors of three numbers, i and j indices of them there, c and g single numbers.


def names():
    made = {"torch": torch, "F": torch.nn.functional, "copy": copy}
    for place, single, three, indices in ((CPU, "c", "cpu", "i"), (GPU, "g", "gpu", "j")):
        made |= {single: torch.ones((), device=place), three: torch.ones(3, device=place)}
        made[indices] = torch.arange(3, device=place)
    return made


@pytest.mark.parametrize("code", [
    "gpu + cpu", "cpu + gpu", "cpu + g", "gpu == cpu", "torch.where(gpu > 0, cpu, 0.0)", "torch.where(cpu > 0, gpu, 0.0)",
    "c += g", "cpu *= gpu", "cpu.add_(g)", "torch.addcmul(gpu, c, c)", "gpu.masked_fill(cpu > 0, 0)", "cpu[j]", "cpu[gpu > 0]",
    "gpu[i] = cpu", "cpu[j] = 1.0", "gpu.gather(0, i)", "gpu.index_select(0, i)", "gpu.index_add(0, i, gpu)",
    "torch.cat([gpu, cpu])", "torch.stack([g, c])", "torch.equal(gpu, cpu)", "torch.isin(gpu, cpu)", "torch.searchsorted(gpu, cpu)",
    "F.embedding(j, cpu[:, None])", "F.linear(gpu, cpu[None])", "F.cross_entropy(gpu, i[0])", "gpu.masked_scatter(gpu > 0, cpu)",
    "gpu + torch.arange(3)", "gpu + torch.tensor([1, 2, 3])", "gpu * torch.zeros_like(cpu)", "gpu + cpu.new_zeros(3)",
    "gpu + gpu.cpu()", "gpu + gpu.to('cpu')", "gpu + gpu.new_zeros(3, device='cpu')", "gpu + copy.deepcopy(cpu)",
])  # fmt: skip
def test_tensors_of_two_devices_do_not_mix(code):
    with pretended_gpu(), pytest.raises(RuntimeError, match="same device"):
        exec(code, names())


@pytest.mark.parametrize("code", [
    "gpu + c", "c + gpu", "gpu + 2.0", "torch.where(gpu > 0, c, c)", "torch.where(gpu > 0, gpu, 0.0)", "gpu.clamp(max=c)",
    "gpu.add_(c)", "gpu[i]", "gpu[cpu > 0]", "gpu[j]", "gpu[i, None]", "gpu.index_put_((i,), c)", "gpu.copy_(cpu)",
    "gpu.masked_fill(gpu > 0, c)",
    "cpu.to('cuda')", "cpu.to(gpu)", "cpu.to(device='cuda')", "cpu.to('cuda', torch.int64)", "gpu.double()", "gpu[1:].view(2, 1)",
    "gpu.new_zeros(2)", "gpu.new_tensor([1.0])", "torch.zeros_like(gpu)", "torch.full_like(gpu, 2.0)", "copy.deepcopy(gpu)",
    "torch.zeros_like(cpu, device='cuda')", "torch.arange(3, device='cuda:0')", "torch.rand(2, device='cuda')",
    "torch.tensor([1.0], device='cuda')", "torch.tensor(3, device=gpu.device)", "gpu.unique()", "gpu.max(0).indices", "g.expand(3)",
    "F.scaled_dot_product_attention(*[gpu.view(1, 3, 1)] * 3, is_causal=True)",
])  # fmt: skip
def test_what_is_made_on_the_gpu_or_from_its_tensors_is_there(code):
    with pretended_gpu():
        assert eval(code, names()).device == GPU


def test_what_is_read_or_copied_from_the_gpu_is_on_the_cpu_and_numpy_cannot_read_there():
    with pretended_gpu():
        x = torch.arange(3, device="cuda")
        assert x.tolist() == [0, 1, 2] and x[1].item() == 1 and "ab"[x[1]] == "b" and f"{x[2]:.1f}" == "2.0"
        assert x.cpu().device == x.to("cpu").device == torch.zeros_like(x, device="cpu").device == CPU and x.device == GPU
        assert x.cpu().numpy().sum() == 3
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


def test_a_model_moves_with_its_shared_weights_and_its_gradients_and_optimizer_state_are_there():
    with pretended_gpu():
        policy = tiny_gpt().to("cuda")
        assert policy.lm_head.weight is policy.trunk.token_embedding.weight
        optimizer = training.adamw(policy, 1e-3)
        policy(torch.tensor([[1, 2]], device="cuda"))[0].logsumexp(-1).sum().backward()
        optimizer.step()
        state = [x for one in optimizer.state.values() for x in one.values()]
        for x in [*policy.parameters(), *minippo.frozen_copy(policy).parameters(), policy.lm_head.weight.grad, *state]:
            assert x.device == GPU


# minippo.py on it, by itself, and all that the scripts do

NETWORK = {"mm", "addmm", "bmm", "embedding", "native_layer_norm"}  # the operations that a network consists of


def plain():
    """Iterations of minippo.py, with a reward model and with a reward of texts -> all tensors of their batches."""
    policy, reward_model = tiny_gpt().to("cuda"), tiny_reward_model().to("cuda")
    tokenizer, ref = text.Tokenizer([bytes([i]) for i in range(EOS)]), minippo.frozen_copy(policy)
    config = minippo.PPOConfig(max_new_tokens=4, batch_size=4, minibatches=2, entropy_coef=0.1, kl_loss_coef=0.1)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    made = []
    for score in (
        lambda tokens, mask: reward_model(tokens, minippo.row_lengths(mask)),
        rewards.text_reward(lambda prompts, responses: list(map(len, responses)), tokenizer),
    ):
        batch, _ = minippo.ppo_iteration(policy, ref, score, [[1], [2, 3], [4], [5]], optimizer, config, 0.1)
        made += batch.values()
    return made


SCRIPTS = {
    train_sft: "--layers 1 --heads 2 --channels 16 --context 128 --vocab_size 280 --dropout 0.1 "
    "--epochs 1 --batch_size 16 --micro_batch 9",
    train_rm: "--epochs 1 --batch_size 16 --micro_batch 9 --max_new_tokens 8 --answers 256",
    train_ppo: "--steps 2 --batch_size 8 --minibatches 2 --max_new_tokens 8 --rollout_batch 100 --micro_batch 3 "
    "--separate_critic --ref_update_every 1 --entropy_coef 0.01 --grad_checkpoint",
}


def run(script, folder, *flags):
    flags += ("--reference", str(folder / "sft.pt")) * (script is train_ppo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", "--data", str(folder / "zoo"), "--out", str(folder), *SCRIPTS[script].split(), *flags])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(settings, "lock", lambda folder: None)  # run_script() would unlock it
        try:
            script.main()
        finally:
            settings.AT_ERROR.clear()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """-> the folder of a run on the CPU; few rows, and few samples for the scale of the scores and the report."""
    folder = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (zoo, "ROWS", dict.fromkeys(zoo.ROWS, 40)), (zoo, "FACTS", zoo.FACTS[:20]), (zoo, "HELD_OUT", 10),
            (minippo.PPOConfig, "max_new_tokens", 8), (report, "MANY", 64), (report, "PROMPTS", (8, 8)),
        ):  # fmt: skip
            patch.setattr(module, name, value)
        zoo.write_data(folder / "zoo", seed=0)
        for script in SCRIPTS:
            run(script, folder, "--device", "cpu")
        yield folder


@pytest.fixture
def folder(finished, tmp_path):
    """-> a folder with the data of that run, and nothing else."""
    shutil.copytree(finished / "zoo", tmp_path / "zoo")
    return tmp_path


def assert_same_results(a, b):
    for name in ("sft", "rm", "ppo"):
        assert same_weights(a / f"{name}.pt", b / f"{name}.pt")
        assert metrics(a / f"{name}.jsonl") == metrics(b / f"{name}.jsonl")


def test_minippo_by_itself_works_on_the_gpu_and_leaves_everything_there():
    with pretended_gpu() as gpu:
        assert {x.device for x in plain()} == {GPU} and not gpu.on_cpu & NETWORK


def test_the_scripts_work_on_the_gpu_with_the_results_of_the_cpu_and_compute_no_network_elsewhere(finished, folder):
    with pretended_gpu() as gpu:
        for script in SCRIPTS:
            run(script, folder)
    assert not gpu.on_cpu & NETWORK
    assert_same_results(folder, finished)
    a, b = (json.loads((x / "report.json").read_text()) | {"seconds": 0} for x in (folder, finished))
    assert a == b and {"above_entropy", "below_ceiling", "optimality"} <= {*a["sft"], *a["rm"], *a["ppo"]}


def test_a_run_on_the_gpu_that_was_stopped_goes_on_there_as_if_it_had_not_been(finished, folder, monkeypatch):
    def end_step_and_stop(it, *args, **more):
        it.asked.append(signal.SIGINT)
        end_step(it, *args, **more)

    end_step = progress.Progress.end_step
    for script in SCRIPTS:
        with pretended_gpu(), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="step 1 is saved"):
            patch.setattr(progress.Progress, "end_step", end_step_and_stop)
            run(script, folder)
        with pretended_gpu() as gpu:
            run(script, folder, "--resume")
        assert [x.tolist() for x in gpu.restored] == [[1.0]]  # the random numbers of the GPU go on too
        assert not gpu.on_cpu & NETWORK
    assert_same_results(folder, finished)


# And every device in the code is needed: put the CPU in place of one, and a run fails.


def with_the_cpu():
    """For each argument of a call that is a device: the module and the function that it stands in, and the function's code with
    the CPU in its place; under the name of the call."""
    for module in (minippo, checkpoints, fast, progress, report, rewards, text, traces, training, watch, *SCRIPTS):
        tree = ast.parse(inspect.getsource(module))
        owners = [(module, tree)] + [(getattr(module, x.name), x) for x in tree.body if isinstance(x, ast.ClassDef)]
        for owner, node in ((owner, x) for owner, parent in owners for x in parent.body if isinstance(x, ast.FunctionDef)):
            function = inspect.unwrap(getattr(owner, node.name))
            node.decorator_list = []
            for call in (x for x in ast.walk(node) if isinstance(x, ast.Call)):
                name = f"{module.__name__}.{function.__qualname__}: {ast.unparse(call)}"
                for holder, key in [(call.args, i) for i in range(len(call.args))] + [(vars(x), "value") for x in call.keywords]:
                    device = holder[key]
                    if ast.unparse(device).split(".")[-1] == "device":
                        holder[key] = ast.copy_location(ast.Constant("cpu"), device)
                        scope = dict(vars(module))
                        exec(compile(ast.Module([node], []), name, "exec"), scope)
                        holder[key] = device
                        yield pytest.param(module, function, scope[node.name].__code__, id=name)


# Each of these makes an index and nothing else, and an index of a tensor of the GPU may lie on the CPU.
INDICES = ("kl_adjusted_rewards: torch.arange(", "ppo_update: torch.randperm(", "decode: torch.arange(len(token)")
CHANGES = [x for x in with_the_cpu() if not any(name in x.id for name in INDICES)]


@pytest.fixture
def models(finished, folder):
    """-> a folder with the data and the models that stages 1 and 2 have made of them."""
    for name in ("sft.pt", "rm.pt"):
        shutil.copy(finished / name, folder)
    return folder


@pytest.mark.parametrize("module, function, code", CHANGES)
def test_with_the_cpu_in_place_of_a_device_a_run_fails(module, function, code, models, monkeypatch):
    monkeypatch.setattr(function, "__code__", code)
    with pretended_gpu(), pytest.raises(RuntimeError, match="same device"):
        if module not in (*SCRIPTS, report):
            plain()
        for script in [module] if module in SCRIPTS else [train_ppo] if module is report else SCRIPTS:
            run(script, models)


def test_with_indices_from_the_cpu_a_run_does_not_fail(models, monkeypatch):
    found = [x.values for x in with_the_cpu() if any(name in x.id for name in INDICES)]
    assert len(found) == len(INDICES)
    for _, function, code in found:
        monkeypatch.setattr(function, "__code__", code)
    with pretended_gpu():
        plain()
        run(train_ppo, models)
