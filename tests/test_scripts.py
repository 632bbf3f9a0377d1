"""The three scripts: do they compute what minippo.py says, and does an interruption change nothing?

Run: python -m pytest tests/test_scripts.py
"""

import contextlib
import json
import math
import random
import re
import shutil
import signal
from functools import partial
from itertools import product, zip_longest

import pytest
import torch

import minippo
import plumbing.report
import train_ppo
import train_rm
import train_sft
from cli import (
    CPU,
    FLAGS,
    PPO,
    edited,
    metrics,
    run,
    same_weights,
    stage,
    start,
    wait_for,
    write_data,
    write_models,
)
from minippo import PPOConfig
from plumbing import fast, state, training
from plumbing.checkpoints import load_checkpoint
from plumbing.rows import read_prompts
from tiny import EOS, marks, tiny_gpt, tiny_reward_model

# --------------------------------------------------------------------------------------------------
# The same steps in plain code: row by row, a loss, a gradient, AdamW. What comes out are the lines
# of the log, and at the end the weights; a script must arrive there with its batches, its padding
# left out and its cache. Each flag has another value than its default, and must be seen to act.


def values_of(words):
    words = words.split()
    return dict(zip(words[::2], map(json.loads, words[1::2])))


FIT = values_of("batch_size 8 epochs 1 lr 0.01 warmup 1 weight_decay 3.0 max_grad_norm 0.5 seed 3")
TEXT = values_of(
    "steps 3 batch_size 8 minibatches 3 group_size 2 epochs 2 max_new_tokens 6 temperature 0.8 "
    "gamma 0.9 lam 0.8 whiten false kl_coef 0.3 length_penalty 0.05 missing_eos_penalty 0.5 "
    "clip_eps 0.02 value_clip 0.03 vf_coef 0.2 entropy_coef 0.02 kl_loss_coef 0.5 "
    "max_grad_norm 0.3 lr 0.02 warmup 2 head_lr 5.0 adam_eps 0.01 kl_target 0.01 "
    "kl_horizon 20.0 ref_update_every 2 seed 10"
)
SHAPE = "--layers 2 --heads 2 --channels 16 --context 48 --vocab_size 300".split()
CRITIC = {"separate_critic": True, "critic_lr": 0.05, "clip_eps": math.inf}


def flags_of(values):
    flags = {True: "--{}", False: "--no_{}"}
    return " ".join(
        flags[x].format(name) if type(x) is bool else f"--{name} {x}" for name, x in values.items()
    ).split()


def plain_adamw(groups, eps=1e-8):
    groups = [{"params": p, "peak": lr, "weight_decay": decay} for p, lr, decay in groups if p]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps)


def plain_step(optimizer, loss, share, most):
    """One step down -> the norm of the gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norm = sum((g**2).sum() for g in gradients if g is not None).sqrt().item()
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = None if gradient is None else gradient * min(1.0, most / norm)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    optimizer.step()
    return norm


def plain_share(step, steps, warmup):
    return min((step + 1) / (warmup + 1), (steps - step) / max(1, steps - warmup))


def plain_sft_loss(model, rows):
    nats = []
    for prompt, completion in rows:
        logits = model(torch.tensor([prompt + completion]))[0][0].log_softmax(-1)
        nats += [-logits[len(prompt) - 1 + i, token] for i, token in enumerate(completion)]
    return torch.stack(nats).mean(), {}


def plain_rm_loss(model, rows):
    def score(ids):
        return model(torch.tensor([ids]), torch.tensor([len(ids)]))[0]

    margins = torch.stack([score(prompt + a) - score(prompt + b) for prompt, a, b in rows])
    loss = (1 + (-margins).exp()).log().mean()
    return loss, {"accuracy": (margins > 0).float().mean().item(), "margin": margins.mean().item()}


def plain_fit(kind, folder, values):
    """The lines of the log of stage 1 or 2, then the weights. So few rows are validated after each
    of three steps."""
    import minippo
    from plumbing import fast
    from plumbing.checkpoints import load_checkpoint
    from plumbing.rows import read_ids
    from plumbing.training import batch_of

    fast.uninstall()
    tokenizer = load_checkpoint(folder / "sft.pt", ["sft"])[1]
    loss_of = {"sft": plain_sft_loss, "rm": plain_rm_loss}[kind]
    torch.manual_seed(values["seed"])
    if kind == "sft":
        model = minippo.GPT(minippo.GPTConfig(tokenizer.vocab_size, 48, 2, 2, 16))
    else:
        model = minippo.RewardModel(load_checkpoint(folder / "sft.pt", ["sft"])[0])
    rows, val = (
        read_ids(folder / "data", {"sft": "sft", "rm": "pref"}[kind], split, tokenizer, 48)
        for split in ("train", "val")
    )
    heavy, light = ([p for p in model.parameters() if (p.dim() > 1) == x] for x in (True, False))
    optimizer = plain_adamw(
        [(heavy, values["lr"], values["weight_decay"]), (light, values["lr"], 0)]
    )
    steps, lowest = math.ceil(values["epochs"] * len(rows) / values["batch_size"]), math.inf
    for step in range(steps):
        share = plain_share(step, steps, values["warmup"])
        loss, stats = loss_of(model, batch_of(rows, step, values["batch_size"], values["seed"]))
        norm = plain_step(optimizer, loss, share, values["max_grad_norm"])
        row = {"loss": loss.item(), "grad_norm": norm, "lr": share * values["lr"], **stats}
        with torch.no_grad():
            loss, stats = loss_of(model, val)
        row |= {"val_loss": loss.item()}
        row |= {f"val_{name}": stats[name] for name in stats if name == "accuracy"}
        yield row
        if loss <= lowest:
            lowest, best = loss, {name: x.clone() for name, x in model.state_dict().items()}
    yield best


def plain_ppo(folder, batches, values):
    """The same for stage 3; batches: (tokens, mask, random state before the update) as sampled."""
    import minippo
    from plumbing import fast
    from plumbing.checkpoints import load_checkpoint
    from plumbing.training import add_critic

    fast.uninstall()
    policy, reward_model = (load_checkpoint(folder / f"{x}.pt", [x])[0] for x in ("sft", "rm"))
    ref, lr = minippo.frozen_copy(policy), values["lr"]
    names = minippo.PPOConfig.__dataclass_fields__
    config = minippo.PPOConfig(**{name: x for name, x in values.items() if name in names})
    beta = config.kl_coef
    value_lr = values["head_lr"] * lr
    if values.get("separate_critic"):
        add_critic(policy, reward_model)
        value_lr = values["critic_lr"]
    parameters = dict(policy.named_parameters())
    fast_ones = {x for x in parameters if x.startswith(("value_head.", "critic."))}
    slow = [p for x, p in parameters.items() if x not in fast_ones]
    groups = [(slow, lr, 0.0), ([parameters[x] for x in fast_ones], value_lr, 0.0)]
    optimizer = plain_adamw(groups, values["adam_eps"])

    def score(tokens, mask):
        return reward_model(tokens, minippo.row_lengths(mask))

    for step, (tokens, mask, random_state) in enumerate(batches):
        batch = {"tokens": tokens, "mask": mask}
        with torch.no_grad():
            for model, kind in ((policy, "old"), (ref, "ref")):
                x = minippo.evaluate_actions(model, tokens, mask, config.temperature)
                batch |= {f"{kind}_logprobs": x[0], f"{kind}_values": x[1]}
        eos = policy.config.eos
        batch["scores"], batch["ended"] = minippo.score_responses(score, tokens, mask, config, eos)
        batch |= minippo.compute_advantages(batch, config, beta)
        torch.set_rng_state(random_state)
        share, stats = plain_share(step, values["steps"], values["warmup"]), []
        for _ in range(config.epochs):
            for rows in torch.randperm(len(tokens)).tensor_split(config.minibatches):
                part = {name: x[rows] for name, x in batch.items()}
                loss, more = minippo.ppo_loss(policy, part, config)
                norm = plain_step(optimizer, loss, share, config.max_grad_norm)
                stats.append(more | {"loss": loss.item(), "grad_norm": norm})
        row = {name: sum(x[name] for x in stats) / len(stats) for name in stats[0]}
        row["ratio_max"] = max(x["ratio_max"] for x in stats)
        row |= minippo.batch_metrics(batch, beta) | {"lr": share * lr}
        names = batch.keys() - {"tokens", "ref_values"}
        yield row | {f"sum of {name}": batch[name].sum().item() for name in names}
        error = min(max(row["kl"] / values["kl_target"] - 1, -0.2), 0.2)
        beta *= 1 + error * min(1, len(tokens) / values["kl_horizon"])
        if values["ref_update_every"] and (step + 1) % values["ref_update_every"] == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)
    yield policy.state_dict()


def run_and_watch(folder, values, *flags, **more):
    """train_ppo.py -> what plain_ppo() needs, the log with what update() was given, the text."""
    import minippo

    batches, seen, update = [], [], minippo.ppo_update

    def watched(policy, optimizer, batch, *rest):
        batches.append((batch["tokens"], batch["mask"], torch.get_rng_state()))
        names = batch.keys() - {"tokens"}
        seen.append({f"sum of {name}": batch[name].sum().item() for name in names})
        return update(policy, optimizer, batch, *rest)

    minippo.ppo_update = watched
    try:
        given = [*CPU, "--no_report", "--data", folder / "data", "--out", folder, *flags_of(values)]
        status, printed, error = run("train_ppo.py", *given, *flags, **more)
    finally:
        minippo.ppo_update = update
    assert (status, error) == (0, ""), error
    return batches, [a | b for a, b in zip(metrics(folder / "ppo.jsonl"), seen)], printed


def agree(folder, kind, made, log=None):
    """Do lines and weights hold the same numbers, wherever both have one? (A bias of the keys
    changes no attention, so its gradient is mere rounding, which Adam enlarges.)"""
    log = log or metrics(folder / f"{kind}.jsonl")
    for row, plain in zip_longest([*log, saved_weights(folder / f"{kind}.pt")], made, fillvalue={}):
        names = [name for name in plain if name in row and "qkv.bias" not in name]
        if not names or not all(close(row[name], plain[name]) for name in names):
            return False
    return True


def close(a, b):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return torch.allclose(a, b, rtol=2e-3, atol=1e-3)


def saved_weights(path):
    return {x: w for x, w in torch.load(path)["model"].items() if x not in ("mean", "std", "cap")}


def run_fits(folder, **more):
    """Stages 1 and 2 with the flags of FIT -> what they printed."""
    for kind, own in (("sft", SHAPE), ("rm", ["--answers", 32, "--max_new_tokens", 6])):
        given = [*CPU, "--data", folder / "data", "--out", folder, *flags_of(FIT), *own]
        status, printed, error = run(f"train_{kind}.py", *given, **more)
        assert (status, error) == (0, "")
        yield printed


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """-> a folder with data, and what stages 1 and 2 made of it."""
    folder = tmp_path_factory.mktemp("fitted")
    write_data(folder / "data")
    list(run_fits(folder))
    return folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """-> a folder with data and models for stage 3."""
    folder = tmp_path_factory.mktemp("begun")
    write_data(folder / "data")
    return write_models(folder)


@pytest.fixture(scope="module")
def watched(begun):
    return run_and_watch(begun, TEXT)


def test_sft_and_reward_model_are_trained_as_the_plain_code_says(fitted):
    for kind in ("sft", "rm"):
        made, log = list(plain_fit(kind, fitted, FIT)), metrics(fitted / f"{kind}.jsonl")
        assert [row["step"] for row in log] == [1, 2, 3]
        assert all(row.keys() <= logged.keys() for row, logged in zip(made, log))
        assert agree(fitted, kind, made)


@pytest.mark.parametrize("name", FIT)
def test_each_flag_of_a_fit_acts(fitted, name):
    """With another value the plain code would not arrive there."""
    other = {"epochs": 2, "batch_size": 10, "max_grad_norm": math.inf, "seed": 0}
    other = other.get(name, getattr(training.FitConfig(), name, 0))
    for kind in ("sft", "rm"):
        assert not agree(fitted, kind, plain_fit(kind, fitted, FIT | {name: other}))


def test_ppo_trains_as_the_plain_code_says(begun, watched):
    batches, log, _ = watched
    made = list(plain_ppo(begun, batches, TEXT))
    assert made[0].keys() == log[0].keys() - {"step", "passes"}
    assert agree(begun, "ppo", made, log)
    assert abs(log[0]["kl"]) < 1e-4 < abs(log[1]["kl"]) and 0 < log[0]["eos_rate"] < 1
    assert log[0]["clip_frac"] > 0 and len(log[0]["passes"]) == 2


def test_ppo_asks_each_prompt_group_size_times_in_the_order_of_the_seed(begun, watched):
    tokenizer = load_checkpoint(begun / "sft.pt", ["sft"])[1]
    prompts = read_prompts(begun / "data", "train", tokenizer, 48)
    for step, (tokens, mask, _) in enumerate(watched[0]):
        asked = [row[: int(m.int().argmax()) + 1].tolist() for row, m in zip(tokens, mask)]
        expected = training.batch_of(prompts, step, 4, TEXT["seed"])
        assert asked == [prompt for prompt in expected for _ in range(2)]
        assert mask.sum(1).max() == TEXT["max_new_tokens"]


ELSEWHERE = ("steps", "batch_size", "max_new_tokens", "group_size", "seed")  # see above


@pytest.mark.parametrize("name", [x for x in TEXT if x not in ELSEWHERE])
def test_each_flag_of_ppo_acts(begun, watched, name):
    default = (vars(train_ppo.StageConfig()) | vars(PPOConfig()))[name]
    batches, log, _ = watched
    assert not agree(begun, "ppo", plain_ppo(begun, batches, TEXT | {name: default}), log)


def test_a_separate_critic_starts_as_the_reward_model_and_has_a_learning_rate(begun, tmp_path):
    write_data(tmp_path / "data")
    batches, log, _ = run_and_watch(tmp_path, TEXT | CRITIC, "--models", begun)
    assert agree(tmp_path, "ppo", plain_ppo(begun, batches, TEXT | CRITIC), log)
    for other in ({"critic_lr": 0.02}, {"separate_critic": False}, {"clip_eps": 0.02}):
        assert not agree(tmp_path, "ppo", plain_ppo(begun, batches, TEXT | CRITIC | other), log)


# --------------------------------------------------------------------------------------------------
# What you read is what runs: a line of minippo.py is changed, and every script computes with it.

EDITS = {
    "block": ("return x + self.dropout(self.mlp(", "return 1.2 * x + self.dropout(self.mlp("),
    "relu": ('nn.GELU("tanh")', "nn.ReLU()"),
    "attend": ("scaled_dot_product_attention(q, k,", "scaled_dot_product_attention(3 * q, k,"),
    "sampling": ("limits = (prompt_lengths + max_new_tokens)", "limits = (prompt_lengths + 4)"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_changed_line_changes_what_all_scripts_do(fitted, begun, watched, tmp_path, name):
    plain, sampling = name in ("attend", "sampling"), name == "sampling"
    with edited(tmp_path, ("minippo.py", *EDITS[name])):
        write_data(tmp_path / "data")
        said = list(run_fits(tmp_path, root=tmp_path))
        for kind in ("sft", "rm"):
            assert agree(tmp_path, kind, plain_fit(kind, tmp_path, FIT))
            before, after = (metrics(x / f"{kind}.jsonl")[0]["loss"] for x in (fitted, tmp_path))
            assert sampling == (after == pytest.approx(before, rel=2e-5))
        for file in ("sft.pt", "rm.pt"):
            shutil.copy(begun / file, tmp_path)
        batches, log, text = run_and_watch(tmp_path, TEXT, root=tmp_path)
        assert agree(tmp_path, "ppo", plain_ppo(tmp_path, batches, TEXT), log)
        before = watched[1][0]
        assert log[0]["entropy"] != pytest.approx(before["entropy"], rel=1e-4)
        assert (max(row["response_length"] for row in log) <= 4) == sampling
        assert [("so the plain code runs" in x) for x in (*said, text)] == [plain] * 3
        greedy_samples_are_those_of_the_plain_code(tmp_path)


def greedy_samples_are_those_of_the_plain_code(folder):
    """As sample.py asks for them."""
    import minippo
    from plumbing import fast
    from plumbing.checkpoints import load_checkpoint

    def likeliest(logits):
        return logits.argmax(-1)

    arguments = load_checkpoint(folder / "ppo.pt", ["ppo"])[0], [[65, 66], [67]], 6, 1.0, likeliest
    fast.install()
    tokens, mask, logprobs, _ = fast.generate(*arguments)
    fast.uninstall()
    expected = minippo.generate(*arguments)
    assert torch.equal(tokens, expected[0]) and torch.equal(mask, expected[1])
    assert torch.allclose(logprobs, expected[2], atol=1e-4)


# --------------------------------------------------------------------------------------------------
# Interruptions: Ctrl-C, SIGTERM or a kill in any step, then --resume, and all files are those of a
# run that was left alone. Stages 1 and 2 end by themselves here, earlier than --max_steps.

LENGTHS = {"FIRST_CHECK": 2, "SHORTEST": 4, "LEAST_GAIN": 0.5}  # of a Schedule, else 50, 200, ...
ADAPTS = "--kl_horizon 100 --kl_target 1 --ref_update_every 2 --report_prompts 3 --seed 4"
STAGES = {
    "sft": "--dropout 0.3 --max_steps 20",
    "rm": "--max_steps 20 --answers 16",
    "ppo": f"--steps 6 {ADAPTS}",
    "ppo with a critic": f"--steps 5 --separate_critic {ADAPTS}",
}


def kind_of(name):
    return name.split()[0]


@pytest.fixture
def short(monkeypatch):
    for name, x in LENGTHS.items():
        monkeypatch.setattr(state.Schedule, name, x)
    monkeypatch.setattr(plumbing.report, "OPTIMUM_SAMPLES", 64)


def go(name, begun, out, *flags):
    """Run a stage with the models of `begun` in the folder `out`."""
    kind = kind_of(name)
    more = [*SHAPE, *"--batch_size 8".split()] if kind == "sft" else ["--batch_size", 8]
    more += ["--minibatches", 2, "--max_new_tokens", 6] if kind == "ppo" else []
    given = [*CPU, "--data", begun / "data", "--out", out, "--save_every", 2]
    return run(f"train_{kind}.py", *given, *more, *STAGES[name].split(), *flags)


def new_folder(begun, folder, kind):
    """With the models that this stage starts from."""
    folder.mkdir()
    for file in {"sft": [], "rm": ["sft.pt"], "ppo": ["sft.pt", "rm.pt"]}[kind]:
        shutil.copy(begun / file, folder)
    return folder


def results(folder, kind):
    """What must not depend on interruptions."""
    report = json.loads((folder / "report.json").read_text()) if kind == "ppo" else {}
    report.pop("seconds", None)
    contents = torch.load(folder / f"{kind}.pt")
    weights = {name: x.tolist() for name, x in contents.pop("model").items()}
    return metrics(folder / f"{kind}.jsonl"), weights, contents, report


class Killed(BaseException):
    """As kill -9 would, it leaves everything as it is at that moment."""


def stop_in(monkeypatch, call, error):
    """Something happens in that call of gradient_step, counted from 1."""
    calls, step = [], minippo.gradient_step

    def stopping(*args):
        calls.append(1)
        if len(calls) == call:
            error()
        return step(*args)

    monkeypatch.setattr(minippo, "gradient_step", stopping)


def kill():
    raise Killed


STOPS = {
    "Ctrl-C": partial(signal.raise_signal, signal.SIGINT),
    "SIGTERM": partial(signal.raise_signal, signal.SIGTERM),
    "kill": kill,
}


@pytest.fixture(scope="module")
def whole(begun, tmp_path_factory):
    """-> {stage: its results without any interruption}."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        short.__wrapped__(patch)
        for name in STAGES:
            folder = new_folder(begun, tmp_path_factory.mktemp("whole") / "out", kind_of(name))
            status, printed, error = go(name, begun, folder)
            assert (status, error) == (0, "")
            assert ("no longer fell at step" in printed) == (kind_of(name) != "ppo")
            found[name] = results(folder, kind_of(name))
    return found


@pytest.mark.parametrize("name, how", list(product(STAGES, STOPS))[::2] + [("rm", "kill")])
def test_a_run_stopped_in_any_step_ends_as_if_it_had_not_been(
    begun, whole, short, tmp_path, monkeypatch, name, how
):
    kind = kind_of(name)
    folder = new_folder(begun, tmp_path / "out", kind)
    calls = 2 if kind == "ppo" else 1  # gradient steps in a step
    call = random.Random(f"{name} {how}").randint(1, calls * len(whole[name][0]))
    with monkeypatch.context() as patch:
        stop_in(patch, call, STOPS[how])
        if how == "kill":
            with pytest.raises(Killed):
                go(name, begun, folder)
        else:
            status, printed, error = go(name, begun, folder)
            step = (call - 1) // calls + 1
            assert status == 130 and "stopping after this step" in printed
            assert (
                error
                == f"train_{kind}.py: stopped; step {step} is saved, --resume goes on from there\n"
            )
            assert len(metrics(folder / f"{kind}.jsonl")) == step
    status, printed, error = go(name, begun, folder, "--resume")
    assert (status, error) == (0, "") and results(folder, kind) == whole[name]
    assert ("is not there, so this run starts at the beginning" in printed) == (
        how == "kill" and call <= calls
    )


def test_a_run_killed_in_its_report_makes_that_alone(begun, whole, short, tmp_path, monkeypatch):
    folder = new_folder(begun, tmp_path / "out", "ppo")
    with monkeypatch.context() as patch:
        patch.setattr(plumbing.report, "make_report", lambda *_: kill())
        with pytest.raises(Killed):
            go("ppo", begun, folder)
    stop_in(monkeypatch, 1, kill)  # there is no further step
    assert go("ppo", begun, folder, "--resume")[0] == 0
    assert results(folder, "ppo") == whole["ppo"]


def test_a_finished_stage_is_not_trained_again_by_resume(begun, short, tmp_path, monkeypatch):
    folder = new_folder(begun, tmp_path / "out", "rm")
    assert go("rm", begun, folder)[0] == 0
    before = (folder / "rm.pt").read_bytes()
    stop_in(monkeypatch, 1, kill)
    status, printed, _ = go("rm", begun, folder, "--resume")
    assert status == 0 and "rm.pt is finished; --overwrite makes it again" in printed
    assert (folder / "rm.pt").read_bytes() == before


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no such signal")
def test_a_process_that_is_killed_unlocks_its_folder_and_can_be_resumed(begun, tmp_path):
    folder = new_folder(begun, tmp_path / "out", "rm")
    flags = ["--data", begun / "data", "--out", folder, *CPU, "--batch_size", 8, "--save_every", 3]
    flags += ["--epochs", 10, "--answers", 16]
    with start("train_rm.py", *flags) as process:
        wait_for(folder / "rm.jsonl", 5)
        status, _, error = run("train_rm.py", *flags)
        assert status == 2 and "another run is writing there" in error
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    assert run("train_rm.py", *flags, "--resume")[0] == 0
    assert run("train_rm.py", *flags, "--out", new_folder(begun, tmp_path / "whole", "rm"))[0] == 0
    assert results(folder, "rm") == results(tmp_path / "whole", "rm")


# --------------------------------------------------------------------------------------------------
# Less memory, another dtype: the same run, to rounding


def numbers(rows):
    return [{x: y for x, y in row.items() if isinstance(y, float)} for row in rows]


@pytest.mark.parametrize(
    "flags, tolerance",
    [("--micro_batch 3", 2e-3), ("--grad_checkpoint", 1e-4), ("--dtype bfloat16", 0.1)],
)
def test_options_that_save_memory_change_rounding_alone(tmp_path, monkeypatch, flags, tolerance):
    make, made = training.rollout_in_pieces, []
    monkeypatch.setattr(
        training, "rollout_in_pieces", lambda *x, **y: made.append(y) or make(*x, **y)
    )
    write_data(tmp_path / "data")
    for kind in FLAGS:
        dropout = ["--dropout", 0] * (kind == "sft")
        logs = []
        for more in ([], flags.split()):
            given = [tmp_path / "data", tmp_path, "--overwrite", *dropout, *more]
            assert stage(kind, *given)[0] == 0
            logs.append(numbers(metrics(tmp_path / f"{kind}.jsonl")))
        one, other = (rows[:1] if kind == "ppo" else rows for rows in logs)
        rounding = 0.0 if flags == "--grad_checkpoint" else 1e-12  # does it act?
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
            assert (a["loss"], a["grad_norm"]) != (b["loss"], b["grad_norm"]) or not rounding
    assert made[1:] == [{"recompute_logprobs": flags == "--dtype bfloat16"}]
    assert fast.OPTIONS["recompute"] == (flags == "--grad_checkpoint")
    assert fast.OPTIONS["dtype"] == (torch.bfloat16 if "bfloat16" in flags else None)


def test_no_more_rows_are_in_memory_than_the_flags_allow(begun, tmp_path, monkeypatch):
    rows, read_states = [], fast.read_states

    def watched(trunk, tokens, *rest):
        rows.append(len(tokens))
        return read_states(trunk, tokens, *rest)

    monkeypatch.setattr(fast, "read_states", watched)
    folder = new_folder(begun, tmp_path / "out", "ppo")
    write_data(tmp_path / "data")
    for kind, most, flags in (
        ("ppo", 4, "--micro_batch 2 --rollout_batch 4 --report_prompts 8"),
        ("rm", 8, "--micro_batch 2"),  # pairs are two rows; answers are sampled four times as many
        ("sft", 2, "--micro_batch 2"),
    ):
        given = ["--data", tmp_path / "data", "--out", folder, "--overwrite"]
        own = [x for x in FLAGS[kind] if x != "--no_report"]
        assert run(f"train_{kind}.py", *given, *own, *flags.split())[0] == 0
        assert max(rows) == most
        rows.clear()


# --------------------------------------------------------------------------------------------------
# Where a run of PPO starts, and what it is measured by


def ppo(begun, out, *flags, **more):
    return stage("ppo", begun / "data", out, "--models", begun, *flags, **more)


def test_a_second_round_starts_from_a_policy_and_may_have_another_reference(begun, tmp_path):
    assert ppo(begun, tmp_path, "--lr", 0.05)[0] == 0
    last, policy = tmp_path / "ppo.pt", ["--policy", tmp_path / "ppo.pt"]
    for name, flags, moved in (
        ("from sft", ["--policy", begun / "sft.pt"], False),
        ("to sft", policy, True),
        ("to itself", [*policy, "--reference", last], False),
        ("from sft to last", ["--reference", last], True),
    ):
        status, printed, _ = ppo(begun, tmp_path / name, *flags, "--lr", 0)
        start = begun / "sft.pt" if name.startswith("from") else last
        assert status == 0 and same_weights(tmp_path / name / "ppo.pt", start)
        assert "the ratio is 1" in printed
        assert "the KL to the reference is 0" not in printed
        assert (metrics(tmp_path / name / "ppo.jsonl")[0]["kl_k3"] > 1e-4) == moved
    assert ppo(begun, tmp_path / "again", *policy, "--separate_critic")[0] == 0
    model = load_checkpoint(tmp_path / "again" / "ppo.pt", ["ppo"])[0]
    assert model.critic is not None
    third = "--policy", tmp_path / "again" / "ppo.pt", "--separate_critic"
    assert ppo(begun, tmp_path / "third", *third)[0] == 0
    # A reference that has been made again is not the one that the run was measured against.
    assert ppo(begun, tmp_path, "--lr", 0.07, "--overwrite")[0] == 0
    again = ppo(begun, tmp_path / "from sft to last", "--reference", last, "--lr", 0, "--resume")
    assert again[0] == 2 and "--reference has been made again" in again[2]


def test_a_function_of_texts_serves_as_reward(begun, tmp_path, monkeypatch):
    (tmp_path / "taste.py").write_text(
        "seen = []\n"
        "def score(prompts, responses):\n"
        "    seen.append((prompts, responses))\n"
        "    return [float(len(x)) for x in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(begun / "sft.pt", tmp_path)  # and no rm.pt
    flags = ["--reward", "taste:score", "--missing_eos_penalty", 0, "--report_prompts", 2]
    given = ["--data", begun / "data", "--out", tmp_path, *PPO, *flags]
    status, printed, _ = run("train_ppo.py", *given)
    assert status == 0
    import taste

    first, (prompts, responses) = metrics(tmp_path / "ppo.jsonl")[0], taste.seen[1]
    texts = [json.loads(x)["prompt"] for x in open(begun / "data" / "prompts_train.jsonl")]
    assert set(prompts) <= set(texts) and len(prompts) == 8
    assert first["score"] == pytest.approx(sum(map(len, responses)) / 8)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (
        report["rm"] == {}
        and report["ppo"]["score"] > 1
        and report["seconds"].keys() == {"ppo", "report"}
    )


@pytest.mark.parametrize("count", [8, 15])
def test_a_reward_that_is_always_the_same_has_a_report_without_optimality(
    begun, tmp_path, monkeypatch, count
):
    (tmp_path / "alike.py").write_text("def score(prompts, responses): return [0.5] * len(prompts)")
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--reward", "alike:score", "--missing_eos_penalty", 0, "--report_prompts", count
    given = ["--data", begun / "data", "--out", tmp_path, "--models", begun, "--lr", 0]
    status, printed, _ = run("train_ppo.py", *PPO, *given, *flags)
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert status == 0 and "optimality" not in report["ppo"] | report["ppo_unseen"]
    assert "there is no optimality" in report["notes"][-1] and report["notes"][-1] in printed
    assert "rm" not in report["seconds"]  # a function scores


def test_an_interrupted_run_of_ppo_is_ended_early_with_fewer_steps(begun, tmp_path, monkeypatch):
    flags = "--report_prompts", 2, "--data", begun / "data", "--out", tmp_path, "--models", begun
    with monkeypatch.context() as patch:
        stop_in(patch, 3, STOPS["Ctrl-C"])  # two steps of gradients in each iteration
        assert run("train_ppo.py", *PPO, *flags, "--steps", 9)[0] == 130
    for steps, says in ((0, "between 1"), (1, "step 2 is done"), (10, "saved with steps = 9")):
        status, _, error = run("train_ppo.py", *PPO, *flags, "--resume", "--steps", steps)
        assert status == 2 and says in error
    assert run("train_ppo.py", *PPO, *flags, "--resume", "--steps", 3)[0] == 0
    assert (tmp_path / "ppo.pt").exists() and (tmp_path / "report.json").exists()
    shares = [row["lr"] / train_ppo.StageConfig.lr for row in metrics(tmp_path / "ppo.jsonl")]
    assert shares == pytest.approx([1 / 2, 1.0, 1 / 2])  # of 9 steps, the last is of 3


def test_the_reference_of_the_report_does_not_move(begun, tmp_path):
    reports = []
    for more in ([], ["--ref_update_every", 1]):
        given = ["--data", begun / "data", "--models", begun, "--out", tmp_path, *PPO, "--lr", 0.05]
        more += ["--overwrite", "--report_prompts", 4]
        assert run("train_ppo.py", *given, *more)[0] == 0
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    still, moves = reports
    assert moves["sft"] == still["sft"] and abs(moves["ppo"]["kl"]) > 1e-3
    assert abs(metrics(tmp_path / "ppo.jsonl")[-1]["kl_k3"]) < 1e-6  # to the one that moves


def test_each_script_says_what_it_does_and_what_came_of_it(fitted, begun, tmp_path):
    said = {}
    for kind in ("sft", "rm"):
        status, said[kind], _ = stage(kind, begun / "data", tmp_path)
    own = ["--data", begun / "data", "--out", tmp_path, *PPO, "--report_prompts", 2]
    status, said["ppo"], _ = run("train_ppo.py", *own)
    assert "ppo.pt; now the report" in said["ppo"]
    assert "ppo.pt\n" in ppo(begun, tmp_path / "without_report")[1]
    lines = {kind: text.splitlines() for kind, text in said.items()}
    assert re.fullmatch(r"training a GPT of 0\.01 M parameters on cpu: 20 rows", lines["sft"][3])
    assert re.fullmatch(
        r"saved \S+/sft.pt: validation loss [\d.]+ ± [\d.]+ nats/token", lines["sft"][-1]
    )
    assert "all 2 steps of --epochs are done" in lines["sft"][-2] + lines["rm"][-4]
    assert "training a reward model on cpu: 20 pairs" in lines["rm"]
    right = r"saved \S+/rm.pt: it gets [\d.]+ % ± [\d.]+ of the validation pairs right"
    assert re.fullmatch(right, lines["rm"][-3])
    report = json.loads((tmp_path / "report.json").read_text())
    for i, doubt in ((-2, "at no step"), (-1, "than chance")):
        assert doubt in lines["rm"][i] and doubt in said["ppo"] and doubt in report["notes"][2 + i]
    assert said["ppo"].count(report["notes"][0]) == 2  # before the training, and in the report
    model, _, facts = load_checkpoint(tmp_path / "rm.pt", ["rm"])
    assert facts["max_new_tokens"] == 8 and model.mean != 0 and model.std != 1
    for kind in ("sft", "rm"):
        assert any("val_loss" in line and "tokens/s" in line for line in lines[kind])
    assert "training on cpu: 20 prompts" in lines["ppo"]
    assert re.fullmatch("seconds: sft 0, rm 0, ppo [0-9]+, report [0-9]+", lines["ppo"][-2])
    assert lines["ppo"][-1] == f"open {tmp_path / 'report.html'} in a browser to see the run"
    names = {path.name for path in tmp_path.iterdir() if path.name != ".lock"} - {"without_report"}
    made = {f"{kind}{end}" for kind in said for end in (".pt", ".jsonl", "_state.pt")}
    assert names == made | {"ppo_traces.jsonl", "report.json", "report.html"}
    common = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    for kind, more in {
        "sft": {"val_loss"},
        "rm": {"val_loss", "val_accuracy", "accuracy"},
        "ppo": common,
    }.items():
        rows = [json.loads(x) for x in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
        assert all(common <= row.keys() for row in rows) and more <= rows[-1].keys()


# --------------------------------------------------------------------------------------------------
# Validation, and the best model


def random_rows(count, parts, longest=10):
    rng = random.Random(0)

    def ids():
        return [rng.randrange(EOS) for _ in range(rng.randint(1, longest // parts))]

    return [tuple(ids() for _ in range(parts)) for _ in range(count)]


@contextlib.contextmanager
def no_gradients(head):
    """A validation that kept what gradients need would run out of memory."""
    calls = []
    handle = head.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    yield
    handle.remove()
    assert calls and not any(calls)


@pytest.mark.parametrize("size", [0, 3])
def test_the_validation_of_sft_is_over_all_tokens_with_its_error(size):
    model, rows = tiny_gpt(dropout=0.5).train(), random_rows(12, 2)
    with no_gradients(model.lm_head):
        facts = train_sft.validate(model, rows, "cpu", size)
    assert model.training  # as the loop needs it
    model.eval()
    with torch.no_grad():
        nats = [plain_sft_loss(model, [row])[0].item() * len(row[1]) for row in rows]
    counts = [len(completion) for _, completion in rows]
    loss = sum(nats) / sum(counts)
    assert facts["val_loss"] == pytest.approx(loss) and facts["val_tokens"] == sum(counts)
    # By the delta method: the error of nats - loss x tokens, a sum over rows.
    rest = torch.tensor([x - loss * n for x, n in zip(nats, counts)])
    assert facts["val_loss_se"] == pytest.approx(
        rest.std().item() * 12**0.5 / sum(counts), rel=1e-4
    )
    assert train_sft.validate(model, rows[:1], "cpu", size)["val_loss_se"] is None


@pytest.mark.parametrize("size", [0, 7])
def test_the_validation_of_the_reward_model_is_over_all_pairs(size):
    model, rows = tiny_reward_model(dropout=0.5).train(), random_rows(40, 3)
    with no_gradients(model.score_head):
        facts = train_rm.validate(model, rows, "cpu", size)
    assert model.training
    model.eval()
    with torch.no_grad():
        loss, stats = plain_rm_loss(model, rows)
    right = stats["accuracy"]
    assert facts["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert facts["val_accuracy"] == pytest.approx(right) and 0.2 < right < 0.8
    assert facts["val_accuracy_se"] == pytest.approx((right * (1 - right) / 40) ** 0.5)
    assert facts["val_pairs"] == 40
    assert train_rm.validate(model, rows[:1], "cpu", size)["val_accuracy_se"] is None


@pytest.mark.parametrize("count, asked", [(5, {*range(5)}), (39, {*range(0, 39, 2)})])
def test_the_scores_of_answers_to_prompts_spread_over_all_get_mean_0_and_spread_1(
    monkeypatch, count, asked
):
    seen, answers = [], []

    def watched(policy, prompts, max_new_tokens):
        assert policy == "sft" and max_new_tokens == 7 and len(prompts) <= 12
        seen.extend(prompt[0] for prompt in prompts)
        answers.append(torch.randint(EOS, (len(prompts), 9)))
        return answers[-1], marks(*["...xxx.."] * len(prompts))

    monkeypatch.setattr(train_rm, "generate", watched)
    model, answer = tiny_reward_model(), train_rm.AnswerConfig(answers=20, max_new_tokens=7)
    answer.cap_quantile = 0.8
    train_rm.normalise(model, "sft", [[i] for i in range(count)], answer, 3)
    assert len(seen) == 20 and set(seen) == asked
    cap, _ = model.cap.item(), model.cap.fill_(math.inf)
    scores = torch.cat([model(tokens, torch.full((len(tokens),), 7)) for tokens in answers])
    assert abs(scores.mean()) < 1e-5 and scores.std().item() == pytest.approx(1, abs=1e-5)
    assert (scores > cap).sum() == 4 and cap == pytest.approx(scores.quantile(0.8).item())
    assert train_rm.AnswerConfig().cap_quantile == 0.99


@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_the_model_of_the_lowest_validation_loss_is_saved(
    begun, short, tmp_path, monkeypatch, kind
):
    """The fifth validation gets a worse loss than the third. The last validation, whose loss is
    printed and saved, is on all rows."""
    script, losses, seen = (
        {"sft": train_sft, "rm": train_rm}[kind],
        iter([3, 2, 1, 2, 2, 2, 2.5]),
        [],
    )
    validate, end_step, counts, tokens = script.validate, state.State.end_step, [], []

    def watched_end(it, metrics, count, show):
        tokens.append(count)
        end_step(it, metrics, count, show)

    monkeypatch.setattr(state.State, "end_step", watched_end)
    monkeypatch.setattr(script, "spread_over", lambda rows, n: rows[:3])
    monkeypatch.setattr(script, "count_tokens", lambda batch: 100 * len(batch))

    def watched(model, rows, *rest):
        counts.append(len(rows))
        seen.append({name: x.clone() for name, x in model.state_dict().items()})
        return validate(model, rows, *rest) | {"val_loss": float(next(losses))}

    if kind == "rm":
        normalise = script.normalise

        def without_dropout(model, *rest):
            assert not model.training
            return normalise(model, *rest)

        monkeypatch.setattr(script, "normalise", without_dropout)
    monkeypatch.setattr(script, "validate", watched)
    folder = new_folder(begun, tmp_path / "out", kind)
    flags = [*SHAPE] if kind == "sft" else ["--answers", "16"]
    more = ["--data", begun / "data", "--out", folder, *CPU, "--batch_size", 8, "--max_steps", 9]
    monkeypatch.setattr("sys.argv", ["x", *map(str, [*more, *flags])])
    for name in ("SHORTEST", "RISE"):  # nothing ends the run before its last step
        monkeypatch.setattr(state.Schedule, name, math.inf)
    script.main()
    saved = torch.load(folder / f"{kind}.pt")
    assert len(seen) == 7 and saved["facts"]["val_loss"] == 2.5  # after 1, 2, 3, 5, 8, 9 steps
    assert counts[:6] == [3] * 6 and counts[6] > 3 and tokens == [800] * 9
    assert not (folder / f"{kind}_best.pt").exists()
    for name, x in saved_weights(folder / f"{kind}.pt").items():
        assert torch.equal(x, seen[2][name]) and torch.equal(x, seen[6][name])
    assert not torch.equal(seen[2]["trunk.norm.weight"], seen[4]["trunk.norm.weight"])
