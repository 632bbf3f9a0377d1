"""The specification of variations/: the expected step, the loss of any batch, programs."""

import importlib
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import minippo
from cli import FLAGS, PPO, metrics, run
from data.rows import load_rows
from minippo import PPOConfig, evaluate_actions, frozen_copy, rollout
from plumbing.models import load_checkpoint
from plumbing.settings import RunConfig
from plumbing.text import pad_completions, read_ids
from test_exact import Task
from tiny import assert_equal, gradient, inf, padded_otherwise, random_batch, tiny_gpt, weights
from train_sft import sft_loss


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def algorithm(name, own):
    """-> its module, its settings"""
    module = importlib.import_module(f"variations.{name}")
    return module, module.Settings(kl_coef=0.3, temperature=0.7, **own)


UNBIASED = [
    ("reinforce", {}),
    ("reinforce", {"total": True, "baseline": True, "vf_coef": 0.0}),
    ("rloo", {"k": 2}),
]


@pytest.mark.parametrize("name, own", UNBIASED)
def test_the_expected_step_is_the_gradient_of_j(name, own):
    task, (module, config) = Task(3, 2, temperature=0.7, kl_coef=0.3), algorithm(name, own)
    record, p, total = task.record(), task.chances()[:, 0], 0.0
    for rows in torch.arange(len(p)).view(3, -1).tolist():  # the responses to a prompt
        for group in map(list, itertools.product(rows, repeat=config.k)):
            batch = part(record, group)
            batch |= module.compute_advantages(batch, config)
            loss, _ = module.loss(task.policy, batch, config)
            total += p[group].prod() * batch["mask"].sum() * loss / config.k
    exact = gradient(task.objective(), task.policy)
    assert_equal(gradient(total, task.policy), -exact, 1e-9)


# The terms whose mean over tokens is the loss, once more, row by row


def clipped(ratio, A, c):
    return -torch.min(ratio * A, ratio.clamp(1 - c.clip_eps, 1 + c.clip_eps) * A)


def reinforce(x, c):
    A = (x.reward.sum() if c.total else x.returns) - c.baseline * x.old_values
    return -x.ratio * A + c.baseline * c.vf_coef * x.error


def rloo(x, c):
    others = [y.R for y in x.group if y is not x]
    return clipped(x.ratio, x.R - sum(others) / len(others), c)


def grpo(x, c):
    scores, q = torch.stack([y.scores for y in x.group]), (x.ref_logprobs - x.log_p).exp()
    A = (x.scores - scores.mean()) / (scores.std() + 1e-4 if c.std else 1)
    return (clipped(x.ratio, A, c) + c.kl_coef * (q - 1 - q.log())) * (x.weight if c.length else 1)


def ppo_penalty(x, c):
    return -x.ratio * x.white + c.penalty * (x.ratio - 1 - x.ratio.log()) + c.vf_coef * x.error


GROUPS = {"k": 3, "clip_eps": 0.15}
PLAIN = [
    (reinforce, {}),
    (reinforce, {"total": True, "baseline": True, "vf_coef": 0.5}),
    (reinforce, {"baseline": True, "vf_coef": 0.5}),
    (rloo, GROUPS),
    (grpo, GROUPS),
    (grpo, GROUPS | {"std": False, "length": False}),
    (ppo_penalty, {"penalty": 1.7, "vf_coef": 0.5, "value_clip": inf}),
]


def read_rows(policy, batch, c):
    """Six responses, three to a prompt, and their numbers; `white`: PPO's advantages."""
    log_p, value, _ = evaluate_actions(policy, batch["tokens"], batch["mask"], c.temperature)
    white = minippo.compute_advantages(batch, PPOConfig(kl_coef=c.kl_coef))["advantages"]
    numbers = batch | {"log_p": log_p, "value": value, "white": white, "tokens": batch["mask"]}
    rows = []
    for i, mask in enumerate(batch["mask"]):
        x = SimpleNamespace(**{n: y[i][mask] if y.dim() > 1 else y[i] for n, y in numbers.items()})
        kl = x.old_logprobs - x.ref_logprobs
        x.R, x.ratio = x.scores - c.kl_coef * kl.sum(), (x.log_p - x.old_logprobs).exp()
        x.reward = torch.cat([-c.kl_coef * kl[:-1], x.scores - c.kl_coef * kl[-1:]])
        x.returns = x.reward.flip(0).cumsum(0).flip(0)
        x.error = 0.5 * (x.value - x.returns) ** 2
        x.weight = batch["mask"].sum() / 6 / mask.sum()
        rows.append(x)
    for i, x in enumerate(rows):
        x.group = rows[i // 3 * 3 :][:3]
    return rows


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("terms, own", PLAIN)
def test_the_loss_is_the_mean_of_these_terms(terms, own, seed):
    batch, policy = random_batch(seed), tiny_gpt()
    batch["scores"][:3] *= seed != 5  # equal ones
    module, config = algorithm(terms.__name__, own)
    rows = read_rows(policy, batch, config)
    exact = torch.cat([terms(x, config) for x in rows]).mean()
    for x in (batch, padded_otherwise(batch, 2, 1, 1e9)):
        x |= module.compute_advantages(x, config)
        loss, stats = module.loss(policy, x, config)
        assert_equal(loss, exact, 1e-6)
        assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
        assert stats["loss"] == loss.item()
        pieces = [part(x, rows) for rows in torch.arange(6).split(4)]
        cut = sum(piece["mask"].sum() * module.loss(policy, piece, config)[0] for piece in pieces)
        assert_equal(cut / x["mask"].sum(), exact, 1e-6)
        if terms is reinforce:
            assert_equal(x["rewards"][x["mask"]], torch.cat([row.reward for row in rows]))
    far = {"ref_logprobs": x["ref_logprobs"] + 1e3, "old_logprobs": x["old_logprobs"] - 1e3}
    assert module.loss(policy, x | far, config)[0].isfinite()


# As programs


DEFAULTS = {  # of its own settings
    "rloo": [0.2],
    "grpo": [0.2, True, True],
    "reinforce": [False, False, 0.1],
    "ppo_penalty": [inf, 1.0],
    "ppo_ptx": [0.02],
    "dpo": [450, 128, 4, 0, 8e-4, 5, 1e-4, 1.0, 0.1, False, 1.0, 48, 0.0, 1.0, *[""] * 3, False],
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_trains_and_reads_the_settings_that_it_shows(made, tmp_path, monkeypatch, name):
    reads, script = set(), f"variations/{name}.py"

    def note(config, field):
        reads.add(field)
        return object.__getattribute__(config, field)

    monkeypatch.setattr(RunConfig, "__getattribute__", note, raising=False)
    flags = [*FLAGS["ppo"], "--data", made / "data", "--models", made, "--out", tmp_path]
    assert run(script, *flags)[::2] == (0, "")
    printed = run(script, "-h")[1]
    shown = {*re.findall(r"(?m)^  --(\w+)", printed)} - {"overwrite"}  # read if a run is there
    assert not {x for x in shown if not {x, x.removeprefix("no_")} & reads} and len(shown) > 15
    assert f"(out/{name})" in printed
    own = vars(algorithm(name, {})[1].__class__)
    assert [own[x] for x in own["__annotations__"]] == DEFAULTS[name]
    rows = metrics(tmp_path / "ppo.jsonl")  # all numbers are finite
    assert len(rows) == 3 and abs(rows[0]["kl"]) < 1e-3 < abs(rows[2]["kl"])


def test_ptx_adds_the_loss_of_as_many_demonstrations(made):
    policy, tokenizer, _ = load_checkpoint(made / "sft.pt", ["sft"])
    module, config = algorithm("ppo_ptx", {"ptx_coef": 0.7})
    config.models, config.data = made, made / "data"
    rows, batch = read_ids(config.data, "sft", "train", tokenizer, 48), random_batch(5)
    batch |= minippo.compute_advantages(batch, config)
    torch.manual_seed(7)
    sft, _ = sft_loss(policy, [rows[i] for i in torch.randint(20, (6,)).tolist()])
    exact = minippo.ppo_loss(policy, batch, config)[0] + 0.7 * sft
    torch.manual_seed(7)
    loss, stats = module.loss(policy, batch, config)
    assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
    assert (stats["loss"], stats["sft_loss"]) == (exact.item(), sft.item())


@pytest.mark.parametrize("ipo", [False, True])
def test_dpo_is_these_steps(made, tmp_path, monkeypatch, ipo):
    flags = ["--models", made, "--data", made / "data", "--out", tmp_path, *PPO, *["--ipo"] * ipo]
    flags += "--lr 0.01 --kl_coef 0.4 --micro_batch 3 --temperature 0.8 --batch_size 20".split()
    flags += "--seed 5 --max_grad_norm 0.5 --adam_eps 0.01 --steps 4 --minibatches 3".split()
    sampled, reported = [], []
    monkeypatch.setattr("minippo.rollout", lambda *x: sampled.append(x[3]) or rollout(*x))
    monkeypatch.setattr("plumbing.report.report", lambda *x: reported.append(x))
    assert run("variations/dpo.py", *flags)[::2] == (0, "")

    policy, tokenizer, _ = load_checkpoint(made / "sft.pt", ["sft"])
    ref, rows = frozen_copy(policy), read_ids(made / "data", "pref", "train", tokenizer, 48)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), eps=0.01, weight_decay=0)

    def log_ratio(answers):
        ids, mask = pad_completions(answers)
        now, then = (evaluate_actions(x, ids, mask, 0.8)[0] for x in (policy, ref))
        return (now - then).sum(1)

    for step, row in enumerate(metrics(tmp_path / "ppo.jsonl")):
        optimizer.param_groups[0]["lr"] = 0.01 * (4 - step) / 4
        order, steps = np.random.default_rng([5, step]).permutation(20), []
        assert [x for x in sampled if len(x) == 20][step] == [rows[i][0] for i in order]
        for indices in np.array_split(order, 3):
            pairs = [rows[i] for i in indices]
            h = log_ratio([x[:2] for x in pairs]) - log_ratio([x[::2] for x in pairs])
            loss = ((h - 1.25) ** 2 if ipo else F.softplus(-0.4 * h)).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            steps.append([loss.item(), 0.4 * h.mean().item(), norm.item()])
        exact = [sum(x) / 3 for x in zip(*steps)]
        found = [row[x] for x in ("loss", "margin", "grad_norm")]
        assert found == pytest.approx(exact, rel=1e-3, abs=1e-4)
    assert step == 3
    trained, *_ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    assert_equal(weights(trained), weights(policy), 1e-3)
    ((_, _, prompts),) = reported
    texts = [x for x, *_ in load_rows(made / "data/pref_train.jsonl", "pref")]
    assert [tokenizer.decode(ids) for ids in prompts] == texts
