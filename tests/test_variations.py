"""The specification of variations/: the expected step, the loss of any batch, flags, programs.
Run: python -m pytest tests/test_variations.py (the last test needs trl)
"""

import importlib
import itertools
import json
import math
import random
import re
import shutil
import signal
import sys
from dataclasses import astuple, fields
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data.files import UserError
import minippo
from cli import CPU, FLAGS, PPO, ROOT, metrics, run, stage, write_data, write_models, write_rows
from data.rows import load_rows
from minippo import PPOConfig, evaluate_actions, frozen_copy, generate, row_lengths
from plumbing import packing
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.flags import RunConfig, explanations
from plumbing.models import load_algorithm, load_models
from plumbing.rows import batch_of, pad_completions, read_ids
from plumbing.tokenizer import texts_of
from tiny import all_responses, assert_equal, gradient, padded_otherwise, random_batch, stir
from tiny import tiny_gpt, weights
from train_ppo import StageConfig
from train_sft import sft_loss
from variations import ensemble, iterate


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


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
        algorithm, total = load_algorithm(name), 0.0
        settings = {"temperature": HEAT, "kl_coef": BETA, "vf_coef": 0.0} | settings
        config, k = algorithm.Settings(whiten=False, **settings), settings.get("k", 1)
        for rows in self.groups.tolist():
            for group in map(list, itertools.product(rows, repeat=k)):
                some = part(self.batch, group)
                some |= algorithm.compute_advantages(some, config)
                loss, _ = algorithm.loss(self.policy, some, config)
                total = total + self.p.detach()[group].prod() * count(some) * loss / k
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
    ("best_of_n", lambda x: (x["credit"] > 0).sum(), {"k": 2}, best_of_two),
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
    extra = c.kl_loss_coef * 0.5 * (x.log_p - x.ref_logprobs) ** 2 - c.entropy_coef * x.entropy
    return -x.ratio * A + c.baseline * errors(x, x.logged["returns"], c) + extra


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
    return -x.ratio * x.credit + c.penalty * kl + errors(x, x.returns, c)


def best_of_n(x, c):
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
    (best_of_n, {"k": 3}),
]


def read_rows(policy, batch, c):
    """Six responses, three to a prompt, and their numbers; credit and returns are PPO's."""
    now = evaluate_actions(policy, batch["tokens"], batch["mask"], c.temperature, True)
    numbers = batch | minippo.compute_advantages(batch, c) | {"tokens": batch["mask"]}
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
    batch, policy, algorithm = random_batch(seed), tiny_gpt(), load_algorithm(terms.__name__)
    batch["scores"][:3] *= seed != 5  # equal ones
    settings = {"kl_coef": 0.3, "temperature": 0.7, "vf_coef": 0.5, "value_clip": 0.1, "lam": 0.8}
    settings |= {"gamma": 0.9, "entropy_coef": 0.2, "kl_loss_coef": 0.1} | own
    if "clip_eps" not in algorithm.UNREAD:
        settings["clip_eps"] = 0.15
    config = algorithm.Settings(**settings)  # some are not read
    rows = read_rows(policy, batch, config)
    exact = torch.cat([terms(x, config) for x in rows]).mean()
    for some in (batch, padded_otherwise(batch, 2, 1, 1e9)):
        some |= algorithm.compute_advantages(some, config)
        loss, stats = algorithm.loss(policy, some, config)
        assert_equal(loss, exact, 1e-6)
        assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
        assert stats["loss"] == loss.item()
        pieces = [part(some, rows) for rows in torch.arange(6).split(4)]
        cut = sum(tokens(x) * algorithm.loss(policy, x, config)[0] for x in pieces)
        assert_equal(cut / tokens(some), exact, 1e-6)
        for i, x in enumerate(rows):
            for title, numbers in getattr(x, "logged", {}).items():
                assert_equal(some[title][i][some["mask"][i]], numbers)


# Flags


NO_CRITIC = (
    "gamma lam vf_coef value_clip separate_critic head_lr_factor whiten entropy_coef kl_loss_coef"
)
STEADY = "algorithm kl_target kl_horizon ref_update_every"
NOT_TRL = "policy reward dtype micro_batch grad_checkpoint resume tensorboard"
FLAGS_OF = {  # their own with default and range; those that they do not read
    "reinforce": ("clip_eps=inf[0, inf] total=False baseline=False", "gamma lam clip_eps whiten"),
    "rloo": ("k=4[2, inf]", NO_CRITIC),
    "grpo": ("k=4[2, inf] std=True length=True", NO_CRITIC),
    "gspo": ("mean=True", "gamma lam value_clip entropy_coef kl_loss_coef"),
    "ppo_penalty": (
        "clip_eps=inf[0, inf] penalty=1.0[0, inf]",
        "clip_eps entropy_coef kl_loss_coef",
    ),
    "ppo_ptx": ("ptx_coef=0.02[0, inf] demonstrations= sft=", ""),
    "best_of_n": ("clip_eps=inf[0, inf] k=4[2, inf]", f"{NO_CRITIC} clip_eps"),
    "dpo": (
        "kl_coef=0.1[1e-6, 1e6] clip_eps=inf[0, inf] ipo=False samples=32[1, inf]",
        f"{NO_CRITIC} {STEADY} clip_eps epochs",
    ),
    "outgrow": ("k=4[2, inf] std=True length=True", f"{NO_CRITIC} {STEADY} {NOT_TRL}"),
}
ALGORITHMS = [*FLAGS_OF][:-2]


@pytest.mark.parametrize("name", FLAGS_OF)
def test_their_own_flags_and_those_that_are_refused(name, tmp_path):
    script = ["train_ppo.py", "--algorithm", name]
    script = script if name in ALGORITHMS else [f"variations/{name}.py"]
    settings = importlib.import_module(f"variations.{name}").Settings
    shared, own, unread = {x.name for x in fields(PPOConfig)}, [], FLAGS_OF[name][1].split()
    for field in fields(settings):
        if field.name not in shared or field.name in settings.__annotations__:
            interval = re.findall(r"\[.*", explanations(settings)[field.name][0])
            own.append(f"{field.name}={field.default}{''.join(interval)}")
    assert " ".join(own) == FLAGS_OF[name][0]
    status, printed, _ = run(*script, "-h")
    flags = {x.name for config in (PPOConfig, StageConfig, RunConfig) for x in fields(config)}
    shown = {x for x in flags if f"  --{x} " in printed or f"  --no_{x} " in printed}
    assert (flags - shown, status) == ({*unread}, 0) and f"(out/{name})" in printed
    for flag in unread:
        assert run(*script, f"--{flag}=1")[0] == 2
    if name == "dpo" or name == "outgrow" and find_spec("trl"):
        assert f"{tmp_path}/sft.pt: not found" in run(*script, "--out", tmp_path / "x")[2]


# As programs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """-> a folder named out, with data/, sft.pt and rm.pt."""
    folder = tmp_path_factory.mktemp("made") / "out"
    write_data(folder / "data")
    return write_models(folder)


@pytest.fixture
def reported(monkeypatch):
    found = []
    monkeypatch.setattr("plumbing.report.make_report", lambda *x: found.extend(x))
    monkeypatch.setattr("plumbing.report.print_report", lambda _: None)
    return found


def load_sft(made):
    return load_checkpoint(made / "sft.pt", ["sft"])


def texts(made, name):
    return load_rows(made / "data" / f"{name}.jsonl", name.split("_")[0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_they_run_and_write_to_a_folder_of_their_own(made, name):
    flags = [*FLAGS["ppo"], "--data", "out/data", "--algorithm", name]
    if name == "ppo_ptx":
        error = run(str(ROOT / "train_ppo.py"), *flags, root=made.parent)[2]
        assert "ppo_ptx needs --sft out/sft.pt --demonstrations data/zoo" in error
        flags += ["--demonstrations", "out/data", "--sft", "out/sft.pt", "--overwrite"]
    assert run(str(ROOT / "train_ppo.py"), *flags, root=made.parent)[::2] == (0, "")
    rows = metrics(made / name / "ppo.jsonl")  # all numbers are finite
    assert len(rows) == 3 and abs(rows[0]["kl"]) < 1e-3 < abs(rows[2]["kl"])
    networks = load_sft(made)[0], load_checkpoint(made / name / "ppo.pt", ["ppo"])[0]
    same = torch.equal(*(weights(x.value_head) for x in networks))
    assert same == ("vf_coef" in FLAGS_OF[name][1] or name == "reinforce")


def test_ptx_adds_the_loss_of_as_many_demonstrations(made):
    (policy, tokenizer, _), algorithm = load_sft(made), load_algorithm("ppo_ptx")
    rows = read_ids(made / "data", "sft", "train", tokenizer, 48)
    data, sft = str(made / "data"), str(made / "sft.pt")
    config = algorithm.Settings(ptx_coef=0.7, demonstrations=data, sft=sft)
    batch = minippo.rollout(policy, policy, lambda x, _: x[:, -1], [[1, 2], [3]] * 3, config)
    batch |= algorithm.compute_advantages(batch, config)
    torch.manual_seed(7)
    sft, _ = sft_loss(policy, [rows[i] for i in torch.randint(20, (6,)).tolist()])
    exact = minippo.ppo_loss(policy, batch, config)[0] + 0.7 * sft
    torch.manual_seed(7)
    loss, stats = algorithm.loss(policy, batch, config)
    assert_equal(gradient(loss, policy), gradient(exact, policy), 1e-6)
    assert (stats["loss"], stats["sft_loss"]) == (exact.item(), sft.item())


@pytest.mark.parametrize("ipo", [False, True])
def test_dpo_is_these_steps_even_if_interrupted(made, tmp_path, monkeypatch, reported, ipo):
    flags = ["--models", made, "--out", tmp_path, *PPO, *["--ipo"] * ipo, "--samples", 2]
    flags += "--lr 0.01 --kl_coef 0.4 --micro_batch 3 --temperature 0.8 --batch_size 9".split()
    flags += "--seed 5 --max_grad_norm 0.5 --adam_eps 0.01 --dtype bfloat16".split()
    flags += ["--grad_checkpoint", "--policy", tmp_path / "first.pt", "--data"]
    (policy, tokenizer, _), (ref, *_), steps, given = load_sft(made), load_sft(made), [], []
    facts = {"sft": load_checkpoint(made / "rm.pt", ["rm"])[2]["sft"]}
    save_checkpoint(tmp_path / "first.pt", "ppo", stir(policy, 0.1), tokenizer, **facts)

    def press_ctrl_c(*arguments, step=minippo.gradient_step):
        steps.append(arguments)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(*arguments)

    def packed(models, *more, function=packing.packed):
        given.append(more)
        return function(models)

    monkeypatch.setattr(packing, "packed", packed)
    monkeypatch.setattr(minippo, "gradient_step", press_ctrl_c)
    assert "step 2 is saved" in run("variations/dpo.py", *flags, made / "data")[2]
    assert run("variations/dpo.py", *flags, made / "data", "--resume")[::2] == (0, "")

    assert given == [("bfloat16", True)] * 2
    rows = read_ids(made / "data", "pref", "train", tokenizer, 48)
    settings = {"betas": (0.9, 0.99), "eps": 0.01, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(policy.parameters(), **settings)

    def log_ratio(answers):
        ids, mask = pad_completions(answers)
        now, then = (evaluate_actions(x, ids, mask, 0.8)[0] for x in (policy, ref))
        return (now - then).sum(1)

    for step, (lr, row) in enumerate(zip((0.005, 0.01, 0.005), metrics(tmp_path / "ppo.jsonl"))):
        optimizer.param_groups[0]["lr"] = lr
        batch, parts = batch_of(rows, step, 9, 5), []
        for some in (batch[:5], batch[5:]):
            h = log_ratio([x[:2] for x in some]) - log_ratio([x[::2] for x in some])
            loss = ((h - 1.25) ** 2 if ipo else F.softplus(-0.4 * h)).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            parts.append(
                [loss.item(), h.mean().item(), norm.item(), (h > 0).double().mean().item()]
            )
        means = (sum(x) / 2 for x in zip(*parts))
        exact = dict(zip(("loss", "margin", "grad_norm", "accuracy"), means))
        exact |= {"lr": lr, "kl_coef": 0.4}
        assert {x: row[x] for x in exact} == pytest.approx(exact, rel=1e-3, abs=1e-5)
        assert row["eos_rate"] in (0.0, 0.5, 1.0)  # two samples
    trained = load_models(made, "cpu", policy=tmp_path / "ppo.pt").policy
    assert_equal(weights(trained), weights(policy), 1e-4)
    assert (tmp_path / ".lock").exists()
    found = [[tokenizer.decode(ids) for ids in prompts] for prompts in reported[1:3]]
    assert found == [[x for x, *_ in texts(made, y)] for y in ("pref_train", "prompts_val")]
    assert reported[5].algorithm == ("ipo" if ipo else "dpo")
    write_rows(tmp_path / "data", pref_train=texts(made, "pref_train")[1:])
    assert "with other data; " in run("variations/dpo.py", *flags, tmp_path / "data", "--resume")[2]


def test_an_ensemble_scores_by_the_mean_or_the_lowest_of_its_members(made, tmp_path, monkeypatch):
    ids, mask, *_ = generate(load_sft(made)[0], [[1, 2], [3, 4, 5]] * 4, 8)
    model, tokenizer, facts = load_checkpoint(made / "rm.pt", ["rm"])
    monkeypatch.setenv("ENSEMBLE", str(tmp_path))
    with pytest.raises(UserError, match="made from this run's sft.pt"):
        ensemble.mean(ids, mask, facts["sft"])
    expected = []
    for i in (1, 2, 3):
        stir(model, 0.1)
        save_checkpoint(tmp_path / f"{i}" / "rm.pt", "rm", model, tokenizer, **facts)
        expected.append(model(ids, row_lengths(mask)).detach())
    expected = torch.stack(expected)
    assert len({*expected.argmin(0).tolist()}) > 1
    state = torch.get_rng_state()
    assert_equal(ensemble.mean(ids, mask, facts["sft"]), expected.mean(0), 1e-6)
    assert_equal(ensemble.minimum(ids, mask, facts["sft"]), expected.min(0).values, 1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("mean", "minimum"):
        flags = "--models", made, "--reward", f"variations.ensemble:{name}"
        assert stage("ppo", made / "data", tmp_path / name, *flags)[::2] == (0, "")
    with pytest.raises(UserError, match="made from this run's sft.pt"):
        ensemble.mean(ids, mask, "another")
    save_checkpoint(tmp_path / "2" / "rm.pt", "rm", model, tokenizer, sft="another")
    ensemble.members.cache_clear()
    with pytest.raises(UserError, match="made from this run's sft.pt"):
        ensemble.mean(ids, mask, facts["sft"])
    monkeypatch.delenv("ENSEMBLE")
    with pytest.raises(UserError, match="^out/ensemble/"):
        ensemble.mean(ids, mask, "another")


def bad_label(*given):
    return given


def label(rng, prompt, a, b):
    return {"prompt": prompt, "chosen": f"{a}|{rng.random()}", "rejected": b}


def test_iterated_labels_are_of_both_models(made, tmp_path):
    data, first = shutil.copytree(made / "data", tmp_path / "data"), tmp_path / "1"
    with open(data / "prompts_train.jsonl", "a") as file:  # one is empty, one leaves no room
        file.writelines(json.dumps({"prompt": x}) + "\n" for x in ("", "~" * 48))
    assert stage("ppo", data, first, "--temperature=0.8", "--lr=0.02", "--models", made)[0] == 0
    flags = "--models", made, "--data", data, "--out", first, "--seed", 3, *CPU
    flags += "--pairs", 300, "--label", "test_variations:label"
    bad = *flags[:-1], "test_variations:bad_label"
    assert (
        "a dict of texts, prompt, chosen, rejected, not (" in run("variations/iterate.py", *bad)[2]
    )
    assert run("variations/iterate.py", *flags)[::2] == (0, "")
    defaults = "data/zoo", "out", "out/1", "auto", "data.zoo:label", 8000, 0
    assert astuple(iterate.IterateConfig()) == defaults
    loaded, rng = load_models(made, "cpu", policy=first / "ppo.pt"), random.Random(3)
    asked, answers = rng.choices([x for (x,) in texts(made, "prompts_train")], k=300), []
    ids = [loaded.tokenizer.encode(x) for x in asked]
    torch.manual_seed(3)
    for model in (loaded.policy, loaded.ref):
        batches = [generate(model, x, 8, 0.8)[:2] for x in (ids[:256], ids[256:])]
        answers.append([text for x in batches for text in texts_of(loaded.tokenizer, *x)[1]])
    new = [label(rng, x, a, b) for x, a, b in zip(asked, *answers) if a != b]
    pairs = texts(made, "pref_train") + [tuple(row.values()) for row in new]
    assert texts(first, "pref_train") == pairs and len(new) < 300
    assert (first / "sft.pt").read_bytes() == (made / "sft.pt").read_bytes()
    for name in ("pref_val.jsonl", "prompts_train.jsonl"):
        assert (first / "data" / name).read_bytes() == (data / name).read_bytes()
    # The next round
    assert stage("rm", first / "data", first, "--steps", 1)[0] == 0
    assert stage("ppo", data, tmp_path / "2", "--models", first)[0] == 0


TRL = """per_device_train_batch_size=4 steps_per_generation=2 num_iterations=2 max_steps=12
warmup_steps=4 learning_rate=0.03 adam_epsilon=0.02 adam_beta2=0.99 max_grad_norm=0.7 seed=6
num_generations=4 temperature=0.8 max_completion_length=8 beta=0.2 epsilon=0.3 logging_steps=4
scale_rewards=none loss_type=grpo use_bias_correction_kl=False disable_dropout=True bf16=False
gradient_checkpointing=False use_cpu=True"""


def test_what_trl_trains_with_means_what_ours_does(made, tmp_path, monkeypatch, reported):
    trl = pytest.importorskip("trl")
    trainers, trainer = [], trl.GRPOTrainer
    monkeypatch.setattr(trl, "GRPOTrainer", lambda *x: trainers.append(x) or trainer(*x))
    flags = ["--data", made / "data", "--models", made, "--out", tmp_path, *PPO]
    flags += "--epochs 2 --k 4 --kl_coef 0.2 --clip_eps 0.3 --max_grad_norm 0.7 --lr 0.03".split()
    flags += "--temperature 0.8 --missing_eos_penalty 0.5 --adam_eps 0.02 --seed 6 --no_std".split()
    assert run("variations/outgrow.py", *flags)[0] == 0
    model, reward, arguments, rows = trainers[0]
    found = [f"{x}={getattr(arguments, x)}" for x in re.findall(r"(\w+)=", TRL)]
    assert found == TRL.split()
    assert (model, arguments.output_dir) == (str(tmp_path / "sft"), str(tmp_path))
    assert not [*tmp_path.glob("checkpoint*")] and (tmp_path / "trainer_state.json").exists()
    models, prompts, *_ = reported
    found = [[models.tokenizer.decode(ids) for ids in x] for x in reported[1:3]]
    assert found == [[x for (x,) in texts(made, f"prompts_{y}")] for y in ("train", "val")]
    assert rows["prompt"] == found[0] and reported[5].algorithm == "grpo_of_trl"
    answers = [5, models.tokenizer.eos], [5, 6, 7]
    scores = models.score(*pad_completions([*zip(prompts, answers)])) - torch.tensor([0.0, 0.5])
    found = reward(found[0][:2], completion_ids=answers, more=0)
    assert found == pytest.approx(scores.tolist())
    trained = load_models(made, "cpu", policy=tmp_path / "ppo.pt").policy
    assert_equal(weights(trained), weights(models.policy))
    assert 0.01 < (weights(trained.trunk) - weights(models.ref.trunk)).norm() < 10
    assert "is not empty" in run("variations/outgrow.py", *flags)[2]
    for wrong in (6, 12):
        flags += ["--overwrite", "--minibatches", wrong - 4, "--batch_size", wrong]
        assert "no multiple" in run("variations/outgrow.py", *flags)[2]
    flags[flags.index("--no_std")] = "--no_length"
    monkeypatch.setattr(trl, "GRPOTrainer", lambda *x: trainers.append(x) or sys.exit(3))
    assert run("variations/outgrow.py", *flags, "--minibatches", 2, "--batch_size", 8)[0] == 3
    assert (trainers[-1][2].scale_rewards, trainers[-1][2].loss_type) == ("group", "dapo")
    monkeypatch.setitem(sys.modules, "trl", None)
    assert "pip install trl" in run("variations/outgrow.py", *flags)[2]
