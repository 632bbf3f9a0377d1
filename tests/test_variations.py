"""The specification of variations/: the expected step, the loss of any batch, settings, programs."""

import importlib
import itertools
import math
import re
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import minippo
from cli import FLAGS, PPO, metrics, run
from data.rows import load_rows
from minippo import PPOConfig, evaluate_actions, frozen_copy
from plumbing import settings
from plumbing.models import load_checkpoint
from plumbing.text import pad_completions, read_ids
from test_exact import Task
from tiny import assert_equal, gradient, padded_otherwise, random_batch, tiny_gpt, weights
from train_sft import sft_loss
from variations import GroupConfig


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def algorithm_of(name, values):
    """-> its settings, with those of the values that it has; compute_advantages; loss"""
    module = importlib.import_module(f"variations.{name}")
    kind = GroupConfig if name == "raft" else module.Settings
    names = {field.name for field in fields(kind)}
    config = kind(**{field: x for field, x in values.items() if field in names})
    return config, module.compute_advantages, module.loss


def expected_loss(task, name, own):
    """The losses, as sums over tokens, of all groups of k responses to a prompt, each times the
    probability of the group."""
    values = {"temperature": task.temperature, "kl_coef": task.kl_coef} | own
    config, compute_advantages, loss_of = algorithm_of(name, values)
    record, p, total = task.record(), task.chances()[:, 0], 0.0
    for rows in torch.arange(len(p)).view(3, -1).tolist():
        for group in map(list, itertools.product(rows, repeat=config.k)):
            batch = part(record, group)
            batch |= compute_advantages(batch, config)
            terms = batch["advantages"] > 0 if name == "raft" else batch["mask"]
            loss, _ = loss_of(task.policy, batch, config)
            total = total + p[group].prod() * terms.sum() * loss / config.k
    return total


def by_prompt(task):
    """log p, score and score - beta KL of the responses to each prompt: (3, 7) each."""
    log_p, log_ref = (task.evaluate(x)[0].sum(1) for x in (task.policy, task.ref))
    rewards = task.scores - task.kl_coef * (log_p - log_ref).detach()
    return (x.view(3, -1) for x in (log_p, task.scores, rewards))


def k3(task):
    """- beta KL(ref || pi)"""
    a, b = (x(task.tokens[:, :-1])[0] / task.temperature for x in (task.ref, task.policy))
    kl = (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)
    return -task.kl_coef * task.in_states_visited(kl)


def wins(task):
    """P(win) - P(lose) against another sample."""
    log_p, scores, _ = by_prompt(task)
    gap, p = scores[:, :, None] - scores[:, None], log_p.exp()
    sign = gap / (gap.abs() + 1e-4 * math.sqrt(2))  # nearly
    return math.sqrt(0.5) * (p[:, :, None] * p.detach()[:, None] * sign).sum() + k3(task)


def best_of_two(task):
    """p_2 log pi"""
    log_p, _, rewards = by_prompt(task)
    p = log_p.detach().exp()
    at_most = (p[:, None] * (rewards[:, None] <= rewards[:, :, None])).sum(2)
    return ((at_most**2 - (at_most - p) ** 2) * log_p).sum() / 2


CLAIMS = [  # algorithm, its settings, and what the step is the gradient of
    ("reinforce", {}, Task.objective),
    ("reinforce", {"total": True, "baseline": True, "vf_coef": 0.0}, Task.objective),
    ("rloo", {"k": 2}, Task.objective),
    ("grpo", {"k": 2, "length": False}, wins),
    ("raft", {"k": 2}, best_of_two),
]


@pytest.mark.parametrize("name, own, claim", CLAIMS)
def test_the_expected_step_is_the_gradient_of_what_the_docstring_says(name, own, claim):
    task = Task(vocab_size=3, horizon=2, temperature=0.7, kl_coef=0.3)
    exact = gradient(claim(task), task.policy)
    assert exact.norm() > 1e-2
    assert_equal(gradient(expected_loss(task, name, own), task.policy), -exact, 1e-9)


# The loss of any batch is a mean over tokens of terms: here they are once more, row by row.


def clipped(ratio, A, c):
    return -torch.min(ratio * A, ratio.clamp(1 - c.clip_eps, 1 + c.clip_eps) * A)


def reinforce(x, c):
    returns = x.reward.flip(0).cumsum(0).flip(0)
    A = (x.reward.sum() if c.total else returns) - c.baseline * x.old_values
    return -x.ratio * A + c.baseline * c.vf_coef * 0.5 * (x.value - returns) ** 2


def rloo(x, c):
    others = [y.R for y in x.group if y is not x]
    return clipped(x.ratio, x.R - sum(others) / len(others), c)


def grpo(x, c):
    scores, q = torch.stack([y.scores for y in x.group]), (x.ref_logprobs - x.log_p).exp()
    A = (x.scores - scores.mean()) / (scores.std() + 1e-4 if c.std else 1)
    ratio = x.ratio.prod() ** (1 / len(x.ratio)) if c.sequence else x.ratio
    return (clipped(ratio, A, c) + c.kl_coef * (q - 1 - q.log())) * (x.weight if c.length else 1)


def ppo_penalty(x, c):
    return -x.ratio * x.white + c.penalty * (x.ratio - 1 - x.ratio.log())


def raft(x, c):
    best = [max(y.group, key=lambda z: z.R) for y in x.rows[::3]]
    share = sum(len(y.ratio) for y in x.rows) / sum(len(y.ratio) for y in best)
    return -x.log_p * share * any(x is y for y in best)


GROUPS = {"k": 3, "clip_eps": 0.15}
PLAIN = [
    (reinforce, {}),
    (reinforce, {"total": True, "baseline": True}),
    (reinforce, {"baseline": True}),
    (rloo, GROUPS),
    (grpo, GROUPS),
    (grpo, GROUPS | {"std": False, "length": False}),
    (grpo, GROUPS | {"sequence": True}),
    (ppo_penalty, {"penalty": 1.7, "vf_coef": 0.0}),
    (raft, GROUPS),
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
        x.weight, x.rows = batch["mask"].sum() / 6 / mask.sum(), rows
        rows.append(x)
    for i, x in enumerate(rows):
        x.group = rows[i // 3 * 3 :][:3]
    return rows


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("terms, own", PLAIN)
def test_the_loss_is_the_mean_of_these_terms_however_it_is_cut_and_padded(terms, own, seed):
    batch, policy = random_batch(seed), tiny_gpt()
    batch["scores"][:3] *= seed != 5  # equal ones
    values = {"kl_coef": 0.3, "temperature": 0.7, "vf_coef": 0.5} | own
    config, compute_advantages, loss_of = algorithm_of(terms.__name__, values)
    rows = read_rows(policy, batch, config)
    exact = torch.cat([terms(x, config) for x in rows]).mean()
    for x in (batch, padded_otherwise(batch, 2, 1, 1e9)):
        x |= compute_advantages(x, config)
        loss, stats = loss_of(policy, x, config)
        assert_equal(loss, exact, 1e-6)
        assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
        assert stats["loss"] == loss.item()
        pieces = [part(x, rows) for rows in torch.arange(6).split(4)]
        cut = sum(piece["mask"].sum() * loss_of(policy, piece, config)[0] for piece in pieces)
        assert_equal(cut / x["mask"].sum(), exact, 1e-6)
        if terms is reinforce:
            assert_equal(x["rewards"][x["mask"]], torch.cat([row.reward for row in rows]))


def test_a_policy_far_from_the_reference_has_a_finite_loss():
    batch = random_batch(5)
    batch["ref_logprobs"] = batch["old_logprobs"] + 1000.0 * batch["mask"]
    config, compute_advantages, loss_of = algorithm_of("grpo", {"k": 3})
    assert loss_of(tiny_gpt(), batch | compute_advantages(batch, config), config)[0].isfinite()


# As programs

NAMES = "ppo rloo grpo reinforce ppo_penalty ppo_ptx raft dpo".split()


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_and_shows_no_setting_that_it_does_not_read(made, tmp_path, monkeypatch, name):
    reads, prepare = set(), settings.prepare
    script = "train_ppo.py" if name == "ppo" else f"variations/{name}.py"

    def prepare_and_note(config):
        prepare(config)

        class Noted(type(config)):
            def __getattribute__(self, field):
                reads.add(field)
                return super().__getattribute__(field)

        config.__class__ = Noted

    monkeypatch.setattr(settings, "prepare", prepare_and_note)
    flags = [*FLAGS["ppo"], "--data", made / "data", "--models", made, "--out", tmp_path]
    assert run(script, *flags)[::2] == (0, "")
    printed = run(script, "-h")[1]
    shown = {*re.findall(r"(?m)^  --(\w+)", printed)} - {"overwrite"}  # which prepare() reads
    assert not {x for x in shown if not {x, x.removeprefix("no_")} & reads} and len(shown) > 15
    assert name == "ppo" or f"(out/{name})" in printed
    rows = metrics(tmp_path / "ppo.jsonl")  # all numbers are finite
    assert len(rows) == 3 and abs(rows[0]["kl"]) < 1e-3 < abs(rows[2]["kl"])
    heads = [load_checkpoint(x, ["ppo", "sft"])[0] for x in (made / "sft.pt", tmp_path / "ppo.pt")]
    start, end = (x.value_head.weight for x in heads)
    assert torch.equal(start, end) != name.startswith("ppo")  # which trains the values


def test_ptx_adds_the_loss_of_as_many_demonstrations_of_the_run(made):
    policy, tokenizer, _ = load_checkpoint(made / "sft.pt", ["sft"])
    config, compute_advantages, loss_of = algorithm_of("ppo_ptx", {"ptx_coef": 0.7})
    config.models, config.data = made, made / "data"
    rows = read_ids(config.data, "sft", "train", tokenizer, 48)
    batch = minippo.rollout(policy, policy, lambda x, _: x[:, -1], [[1, 2], [3]] * 3, config)
    batch |= compute_advantages(batch, config)
    torch.manual_seed(7)
    sft, _ = sft_loss(policy, [rows[i] for i in torch.randint(20, (6,)).tolist()])
    exact = minippo.ppo_loss(policy, batch, config)[0] + 0.7 * sft
    torch.manual_seed(7)
    loss, stats = loss_of(policy, batch, config)
    assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
    assert (stats["loss"], stats["sft_loss"]) == (exact.item(), sft.item())


@pytest.mark.parametrize("ipo", [False, True])
def test_dpo_is_these_steps(made, tmp_path, monkeypatch, ipo):
    flags = ["--models", made, "--data", made / "data", "--out", tmp_path, *PPO, *["--ipo"] * ipo]
    flags += "--lr 0.01 --kl_coef 0.4 --micro_batch 2 --temperature 0.8 --batch_size 9".split()
    flags += "--seed 5 --max_grad_norm 0.5 --adam_eps 0.01 --steps 4 --minibatches 4".split()
    reported = []
    monkeypatch.setattr("plumbing.report.report", lambda *x: reported.append(x))
    assert run("variations/dpo.py", *flags)[::2] == (0, "")

    policy, tokenizer, _ = load_checkpoint(made / "sft.pt", ["sft"])
    ref, rows = frozen_copy(policy), read_ids(made / "data", "pref", "train", tokenizer, 48)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), eps=0.01, weight_decay=0)
    order = np.concatenate([np.random.default_rng([5, i]).permutation(20) for i in range(2)])

    def log_ratio(answers):
        ids, mask = pad_completions(answers)
        now, then = (evaluate_actions(x, ids, mask, 0.8)[0] for x in (policy, ref))
        return (now - then).sum(1)

    for step, row in enumerate(metrics(tmp_path / "ppo.jsonl")):
        lr = optimizer.param_groups[0]["lr"] = 0.01 * (4 - step) / 4
        batch, steps = [rows[i] for i in order[9 * step : 9 * step + 9]], []
        for pairs in (batch[:3], batch[3:5], batch[5:7], batch[7:]):
            h = log_ratio([x[:2] for x in pairs]) - log_ratio([x[::2] for x in pairs])
            loss = ((h - 1.25) ** 2 if ipo else F.softplus(-0.4 * h)).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            right = (h > 0).float().mean() + 0.5 * (h == 0).float().mean()
            steps.append([loss.item(), 0.4 * h.mean().item(), norm.item(), right.item()])
        means = (sum(x) / 4 for x in zip(*steps))
        exact = dict(zip(("loss", "margin", "grad_norm", "accuracy"), means)) | {"lr": lr}
        assert {x: row[x] for x in exact} == pytest.approx(exact, rel=1e-3, abs=1e-4)
    assert step == 3
    trained, *_ = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    assert_equal(weights(trained), weights(policy), 1e-3)
    ((_, _, prompts),) = reported
    texts = [x for x, *_ in load_rows(made / "data/pref_train.jsonl", "pref")]
    assert [tokenizer.decode(ids) for ids in prompts] == texts
