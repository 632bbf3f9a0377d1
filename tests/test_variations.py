"""The specification of variations/: the expected step, the loss of any batch, settings, programs.
Run: python -m pytest tests/test_variations.py
"""

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
import train_ppo
from cli import FLAGS, PPO, metrics, run, write_data, write_models
from data.rows import load_rows
from minippo import PPOConfig, evaluate_actions, frozen_copy
from plumbing.models import fingerprint, load_checkpoint, save_checkpoint
from plumbing import settings
from plumbing.text import pad_completions, read_ids
from tiny import all_responses, assert_equal, gradient, padded_otherwise, random_batch, stir
from tiny import tiny_gpt, weights
from train_sft import sft_loss
from variations import GroupConfig, dpo
from variations import grpo as group_relative


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def algorithm_of(name):
    """-> settings, compute_advantages, loss"""
    module = importlib.import_module(f"variations.{name}") if name != "ppo" else train_ppo
    advantages = getattr(module, "compute_advantages", minippo.compute_advantages)
    settings = GroupConfig if name == "raft" else module.Settings
    return settings, advantages, getattr(module, "loss", minippo.ppo_loss)


def settings_of(kind, values):
    """Those of the values that these settings have."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: x for name, x in values.items() if name in names})


# The expected step: the losses, as sums, of all groups of k responses to a prompt are added up,
# times the probabilities of the groups.

BETA, HEAT = 0.3, 0.7


class Task:
    """Three tokens, the last of which ends a response. Every response is a row."""

    def __init__(self):
        self.policy, self.ref = tiny_gpt(3), frozen_copy(tiny_gpt(3))
        rows = [(prompt, y) for prompt in ([1, 0, 1], [0, 1]) for y in all_responses(3, 2)]
        self.tokens, self.mask = pad_completions(rows)
        self.groups = torch.arange(len(rows)).view(2, -1)  # the rows of each prompt
        self.scores = torch.randn(len(rows), dtype=torch.float64)
        now, values, _ = evaluate_actions(self.policy, self.tokens, self.mask, HEAT)
        then, *_ = evaluate_actions(self.ref, self.tokens, self.mask, HEAT)
        self.log_p, self.p = now.sum(1), now.sum(1).exp()  # (B,), with gradients
        self.rewards = self.scores - BETA * (now - then).sum(1)
        batch = {"tokens": self.tokens, "mask": self.mask, "scores": self.scores}
        batch |= {"old_logprobs": now, "ref_logprobs": then, "old_values": values}
        self.batch = {name: x.detach() for name, x in batch.items()}

    def expected_loss(self, name, count, settings):
        kind, compute_advantages, loss_of = algorithm_of(name)
        values = {"temperature": HEAT, "kl_coef": BETA, "vf_coef": 0.0, "whiten": False}
        config, total, k = settings_of(kind, values | settings), 0.0, settings.get("k", 1)
        for rows in self.groups.tolist():
            for group in map(list, itertools.product(rows, repeat=k)):
                batch = part(self.batch, group)
                batch |= compute_advantages(batch, config)
                loss, _ = loss_of(self.policy, batch, config)
                total = total + self.p.detach()[group].prod() * count(batch) * loss / k
        return total


def tokens(batch):
    return int(batch["mask"].sum())


def objective(task):
    """J"""
    return (task.p * task.rewards).sum()


def k3(task):
    """- beta KL(ref || pi), summed over the states; which are visited counts as given."""
    a, b = (x(task.tokens[:, :-1])[0] / HEAT for x in (task.ref, task.policy))
    kl = (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)
    return -BETA * (task.mask * task.p.detach()[:, None] * kl).sum()


def half_of_the_score(task):
    return (task.p * task.scores).sum() / 2 + k3(task)  # (k - 1) / k


def wins(task):
    """P(win) - P(lose) against another sample."""
    p, scores = task.p[task.groups], task.scores[task.groups]
    sign = (scores[:, :, None] - scores[:, None]).sign()
    return math.sqrt(0.5) * (p[:, :, None] * p.detach()[:, None] * sign).sum() + k3(task)


def best_of_two(task):
    """p_2 log pi"""
    rewards, log_p = task.rewards[task.groups], task.log_p[task.groups]
    p = log_p.detach().exp()
    at_most = (p[:, None] * (rewards[:, None] <= rewards[:, :, None])).sum(2)
    return ((at_most**2 - (at_most - p) ** 2) * log_p).sum() / 2


CLAIMS = [  # algorithm, count, its settings, and what the step is the gradient of
    ("reinforce", tokens, {}, objective),
    ("reinforce", tokens, {"baseline": True}, objective),
    ("reinforce", tokens, {"total": True}, objective),
    ("reinforce", tokens, {"total": True, "baseline": True}, objective),
    ("rloo", tokens, {"k": 2}, objective),
    ("ppo_penalty", tokens, {}, objective),
    ("gspo", lambda x: len(x["mask"]), {"mean": False}, objective),
    ("grpo", tokens, {"k": 2, "length": False, "std": False}, half_of_the_score),
    ("grpo", tokens, {"k": 2, "length": False}, wins),
    ("raft", lambda x: (x["advantages"] > 0).sum(), {"k": 2}, best_of_two),
]


@pytest.mark.parametrize("name, count, own, claim", CLAIMS)
def test_the_expected_step_is_the_gradient_of_what_the_docstring_says(name, count, own, claim):
    task = Task()
    exact = gradient(claim(task), task.policy)
    assert exact.norm() > 1e-2
    assert_equal(gradient(task.expected_loss(name, count, own), task.policy), -exact, 1e-9)


# The loss of any batch is a mean over tokens of terms: here they are once more, row by row.


def clipped(ratio, A, c):
    return -torch.min(ratio * A, ratio.clamp(1 - c.clip_eps, 1 + c.clip_eps) * A)


def errors(x, returns, c):
    near = x.old_values + (x.value - x.old_values).clamp(-c.value_clip, c.value_clip)
    return c.vf_coef * 0.5 * torch.max((x.value - returns) ** 2, (near - returns) ** 2)


def reinforce(x, c):
    x.logged = {"rewards": x.reward, "returns": x.reward.flip(0).cumsum(0).flip(0)}
    A = (x.reward.sum() if c.total else x.logged["returns"]) - c.baseline * x.old_values
    return -x.ratio * A + c.baseline * c.vf_coef * 0.5 * (x.value - x.logged["returns"]) ** 2


def rloo(x, c):
    others = [y.R for y in x.group if y is not x]
    return clipped(x.ratio, x.R - sum(others) / len(others), c)


def grpo(x, c):
    scores, q = torch.stack([y.scores for y in x.group]), (x.ref_logprobs - x.log_p).exp()
    A = (x.scores - scores.mean()) / (scores.std().clamp(min=1e-4) if c.std else 1)
    terms = clipped(x.ratio, A, c) + c.kl_coef * (q - 1 - q.log())
    return terms * (x.weight if c.length else 1)


def gspo(x, c):
    n, A = len(x.ratio), x.R - x.old_values[0]
    x.logged = {"returns": x.R.expand(n), "old_values": x.old_values[0].expand(n)}
    if c.whiten:
        all_A = torch.stack([y.R - y.old_values[0] for y in x.rows])
        A = (A - all_A.mean()) / all_A.std(correction=0)
    loss = clipped(x.ratio.prod() ** (1 / n if c.mean else 1), A, c)
    return (loss + c.vf_coef * 0.5 * (x.value[0] - x.R) ** 2).expand(n) * x.weight


def ppo_penalty(x, c):
    kl = x.ratio - 1 - x.ratio.log()
    return -x.ratio * x.white + c.penalty * kl + errors(x, x.returns, c)


def raft(x, c):
    best = [max(y.group, key=lambda z: z.R) for y in x.rows[::3]]
    share = sum(len(y.ratio) for y in x.rows) / sum(len(y.ratio) for y in best)
    return -x.log_p * share * any(x is y for y in best)


PLAIN = [
    (reinforce, {}),
    (reinforce, {"total": True, "baseline": True}),
    (reinforce, {"baseline": True}),
    (rloo, {"k": 3}),
    (grpo, {"k": 3}),
    (grpo, {"k": 3, "std": False, "length": False}),
    (gspo, {}),
    (gspo, {"mean": False, "whiten": False}),
    (ppo_penalty, {"penalty": 1.7}),
    (raft, {"k": 3}),
]


def read_rows(policy, batch, c):
    """Six responses, three to a prompt, and their numbers; `white` and returns are PPO's."""
    now = evaluate_actions(policy, batch["tokens"], batch["mask"], c.temperature, True)
    ppo = PPOConfig(kl_coef=c.kl_coef, gamma=0.9, lam=0.8)
    numbers = batch | minippo.compute_advantages(batch, ppo) | {"tokens": batch["mask"]}
    numbers["white"] = numbers["advantages"]
    numbers |= dict(zip(("log_p", "value", "entropy"), now))
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


@pytest.mark.parametrize("seed", [5, 6, 10])
@pytest.mark.parametrize("terms, own", PLAIN)
def test_the_loss_is_the_mean_of_these_terms_however_it_is_cut_and_padded(terms, own, seed):
    batch, policy = random_batch(seed), tiny_gpt()
    kind, compute_advantages, loss_of = algorithm_of(terms.__name__)
    batch["scores"][:3] *= seed != 5  # equal ones
    settings = {"kl_coef": 0.3, "temperature": 0.7, "vf_coef": 0.5, "value_clip": 0.1, "lam": 0.8}
    settings |= {"gamma": 0.9, "clip_eps": 0.15} | own
    config = settings_of(kind, settings)
    rows = read_rows(policy, batch, config)
    exact = torch.cat([terms(x, config) for x in rows]).mean()
    for x in (batch, padded_otherwise(batch, 2, 1, 1e9)):
        x |= compute_advantages(x, config)
        loss, stats = loss_of(policy, x, config)
        assert_equal(loss, exact, 1e-6)
        assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
        assert stats["loss"] == loss.item()
        pieces = [part(x, rows) for rows in torch.arange(6).split(4)]
        cut = sum(tokens(piece) * loss_of(policy, piece, config)[0] for piece in pieces)
        assert_equal(cut / tokens(x), exact, 1e-6)
        for i, row in enumerate(rows):
            for title, numbers in getattr(row, "logged", {}).items():
                assert_equal(x[title][i][x["mask"][i]], numbers)


@pytest.mark.parametrize("size", [0.0, 1000.3, -1e6 / 3, 1e-6 / 3])
def test_equal_scores_of_a_group_give_no_advantage(size):
    batch = random_batch(5)
    batch = part(batch, [0] * 6) | {"scores": torch.full((6,), size)}
    batch["scores"][3] += 1 + abs(size)  # of the other group
    x = group_relative.compute_advantages(batch, group_relative.Settings(k=3))["advantages"]
    assert not x[:3].any() and x[3:].abs().max() > 1 and x.isfinite().all()


def test_a_policy_far_from_the_reference_has_a_finite_loss():
    batch, policy = random_batch(5), tiny_gpt()
    batch["ref_logprobs"] = batch["old_logprobs"] + 1000.0 * batch["mask"]
    config = group_relative.Settings(k=3)
    loss, _ = group_relative.loss(
        policy, batch | group_relative.compute_advantages(batch, config), config
    )
    assert gradient(loss, policy).isfinite().all()


def test_a_tie_is_half_a_hit_for_dpo():
    assert dpo.dpo_loss(torch.zeros(2), torch.zeros(2), 0.1)[1]["accuracy"] == 0.5


# As programs

NAMES = "ppo rloo grpo gspo reinforce ppo_penalty ppo_ptx raft dpo".split()
SCRIPTS = {x: "train_ppo.py" if x == "ppo" else f"variations/{x}.py" for x in NAMES}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """-> a folder named out, with data/, sft.pt and rm.pt."""
    folder = tmp_path_factory.mktemp("made") / "out"
    write_data(folder / "data")
    return write_models(folder)


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_and_shows_no_setting_that_it_does_not_read(made, tmp_path, monkeypatch, name):
    reads, prepare = set(), settings.prepare

    def prepare_and_note(config):
        prepare(config)

        class Noted(type(config)):
            def __getattribute__(self, field):
                reads.add(field)
                return super().__getattribute__(field)

        config.__class__ = Noted

    monkeypatch.setattr(settings, "prepare", prepare_and_note)
    flags = [*FLAGS["ppo"], "--data", made / "data", "--models", made, "--out", tmp_path]
    assert run(SCRIPTS[name], *flags)[::2] == (0, "")
    printed = run(SCRIPTS[name], "-h")[1]
    shown = {*re.findall(r"(?m)^  --(\w+)", printed)} - {"overwrite"}  # which prepare() reads
    assert not {x for x in shown if not {x, x.removeprefix("no_")} & reads} and len(shown) > 15
    assert name == "ppo" or f"(out/{name})" in printed
    rows = metrics(tmp_path / "ppo.jsonl")  # all numbers are finite
    assert len(rows) == 3 and abs(rows[0]["kl"]) < 1e-3 < abs(rows[2]["kl"])
    heads = [load_checkpoint(x, ["ppo", "sft"])[0] for x in (made / "sft.pt", tmp_path / "ppo.pt")]
    start, end = (torch.cat([p.flatten() for p in x.value_head.parameters()]) for x in heads)
    trains_values = name not in ("rloo", "grpo", "raft", "reinforce", "dpo")
    assert (
        torch.equal(start[:-1], end[:-1]) != trains_values
    )  # the bias, the last, is centred in all


def test_ptx_adds_the_loss_of_as_many_demonstrations_of_the_run(made):
    (policy, tokenizer, _), (kind, compute_advantages, loss_of) = (
        load_sft(made),
        algorithm_of("ppo_ptx"),
    )
    rows = read_ids(made / "data", "sft", "train", tokenizer, 48)
    config = kind(ptx_coef=0.7)
    config.models, config.data = made, made / "data"
    batch = minippo.rollout(policy, policy, lambda x, _: x[:, -1], [[1, 2], [3]] * 3, config)
    batch |= compute_advantages(batch, config)
    torch.manual_seed(7)
    sft, _ = sft_loss(policy, [rows[i] for i in torch.randint(20, (6,)).tolist()])
    exact = minippo.ppo_loss(policy, batch, config)[0] + 0.7 * sft
    torch.manual_seed(7)
    loss, stats = loss_of(policy, batch, config)
    assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
    assert (stats["loss"], stats["sft_loss"]) == (exact.item(), sft.item())


def load_sft(made):
    return load_checkpoint(made / "sft.pt", ["sft"])


@pytest.mark.parametrize("ipo", [False, True])
def test_dpo_is_these_steps(made, tmp_path, monkeypatch, ipo):
    flags = ["--models", made, "--out", tmp_path, *PPO, *["--ipo"] * ipo, "--samples", 2]
    flags += "--lr 0.01 --kl_coef 0.4 --micro_batch 3 --temperature 0.8 --batch_size 9".split()
    flags += "--seed 5 --max_grad_norm 0.5 --adam_eps 0.01 --warmup 1 --steps 10".split()
    flags += ["--policy", tmp_path / "first.pt", "--data", made / "data"]
    (policy, tokenizer, _), (ref, *_), reported = load_sft(made), load_sft(made), []
    sft = fingerprint(made / "sft.pt")
    save_checkpoint(tmp_path / "first.pt", "ppo", stir(policy, 0.1), tokenizer, sft=sft)

    monkeypatch.setattr("plumbing.report.report", lambda *x: reported.append(x))
    assert run("variations/dpo.py", *flags)[::2] == (0, "")

    rows = read_ids(made / "data", "pref", "train", tokenizer, 48)
    settings = {"betas": (0.9, 0.99), "eps": 0.01, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(policy.parameters(), **settings)

    def log_ratio(answers):
        ids, mask = pad_completions(answers)
        now, then = (evaluate_actions(x, ids, mask, 0.8)[0] for x in (policy, ref))
        return (now - then).sum(1)

    orders = [np.random.default_rng([5, i]).permutation(len(rows)) for i in range(9)]
    rates = [0.005, *(0.01 * (10 - i) / 9 for i in range(1, 10))]
    for step, (lr, row) in enumerate(zip(rates, metrics(tmp_path / "ppo.jsonl"), strict=True)):
        optimizer.param_groups[0]["lr"] = lr
        batch, parts = [rows[i] for i in np.concatenate(orders)[9 * step : 9 * step + 9]], []
        for pairs in (batch[:5], batch[5:]):
            h = log_ratio([x[:2] for x in pairs]) - log_ratio([x[::2] for x in pairs])
            loss = ((h - 1.25) ** 2 if ipo else F.softplus(-0.4 * h)).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            right = (h > 0).double().mean().item()
            parts.append([loss.item(), h.mean().item(), norm.item(), right])
        means = (sum(x) / 2 for x in zip(*parts))
        exact = dict(zip(("loss", "margin", "grad_norm", "accuracy"), means))
        exact |= {"lr": lr, "kl_coef": 0.4}
        assert {x: row[x] for x in exact} == pytest.approx(exact, rel=1e-3, abs=1e-4)
        assert row["eos_rate"] in (0.0, 0.5, 1.0)  # two samples
    trained, _, figures = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    assert_equal(weights(trained), weights(policy), 1e-3)
    assert figures["sft"] == sft
    texts = [tokenizer.decode(ids) for ids in reported[0][2]]
    assert texts == [x for x, *_ in load_rows(made / "data/pref_train.jsonl", "pref")]
