"""Each of the three scripts learns all that its data allow; killed and resumed, it ends with the
same bytes."""

import functools
import os
import random
import signal
import time
from math import exp, inf, log
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import minippo
import train_ppo
import train_rm
import train_sft
from data import zoo
from data.rows import UserError
from minippo import compute_advantages, generate, row_lengths
from plumbing.files import Record, read_log
from plumbing.models import load_checkpoint
from tiny_run import PROMPTS, VOWELS, start, write_data

STAGES = {"sft": train_sft, "rm": train_rm, "ppo": train_ppo}
SETTINGS = {
    "sft": {"epochs": 40, "batch_size": 12, "lr": 0.01, "layers": 2, "channels": 32},
    "rm": {"epochs": 10, "batch_size": 10, "lr": 0.005, "answers": 512, "temperature": 3.0},
    "ppo": {"steps": 60, "batch_size": 64, "group_size": 16, "lr": 0.0015, "value_lr": 0.03},
}
SETTINGS["rm"] |= {"max_new_tokens": 4}
SETTINGS["ppo"] |= {"minibatches": 1, "kl_coef": 0.5, "reward": "vowel_reward:vowels"}
# A constant, 1 for an e, and 1 for three of the eight prompts
REWARD = """
def vowels(prompts, completions, **_):
    return [10.0 + ("e" in y) + (x[0] == "a") for x, y in zip(prompts, completions)]

def broken(**_):
    return []
"""
for_each_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A new folder in which the scripts have run, and the tests go on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("user"))
        patch.setenv("PYTHONIOENCODING", "ascii")  # a terminal without Unicode
        write_data(Path("data"))
        Path("vowel_reward.py").write_text(REWARD)
        for stage, settings in SETTINGS.items():
            flags = [f"--{name}={value}" for name, value in settings.items()]
            process = start(f"train_{stage}.py", "--data=data", "--device=cpu", *flags)
            _, errors = process.communicate()
            assert (process.returncode, errors) == (0, "")
        yield


def lines_of(stage, out="out"):
    """The log without what the clock says."""
    lines = read_log(Path(out, f"{stage}.jsonl"))
    for line in lines:
        assert line.pop("seconds") >= 0
    return lines


def train(stage, out, functions=None, **changes):
    settings = {"data": Path("data"), "out": Path(out), "device": "cpu", **SETTINGS[stage]}
    STAGES[stage].train(STAGES[stage].Config(**settings | changes), **functions or {})
    return lines_of(stage, out)


def last(lines, n):
    """The means of the last lines."""
    return {name: sum(line[name] for line in lines[-n:]) / n for name in lines[0]}


def contents(out):
    return {path.name: path.read_bytes() for path in Path(out).glob("*.*")}


def refused(words, stage, out="out", **changes):
    """Refused, and nothing is touched."""
    before = contents(out)
    with pytest.raises(UserError, match=words):
        train(stage, out, **changes)
    assert contents(out) == before


# What is learned


def test_sft_learns_the_distribution_of_the_demonstrations():
    _, tokenizer, metadata = load_checkpoint("out/sft.pt", ["sft"])
    assert b"cab" in tokenizer.tokens and b" ae" in tokenizer.tokens
    answers = [tokenizer.encode(f" {x}{vowel}") for x in PROMPTS for vowel in VOWELS]
    tokens = [len(ids) + 1 for ids in answers]
    entropy = 32 * log(4) / sum(tokens)  # that of the vowels
    val_entropy = 16 * log(4) / sum(tokens[16:])
    assert val_entropy < metadata["val_loss"] < 1.03 * val_entropy
    assert abs(val_entropy - entropy) > 0.05 * entropy
    lines = lines_of("sft")
    assert lines[99]["val_loss"] == pytest.approx(metadata["val_loss"], rel=0.01)
    assert last(lines, 30)["loss"] == pytest.approx(entropy, rel=0.05)


def test_the_reward_model_learns_the_pairs():
    _, _, metadata = load_checkpoint("out/rm.pt", ["rm"])
    assert metadata["val_accuracy"] == 1 and metadata["val_loss"] < 0.03
    lines = lines_of("rm")
    assert lines[-1]["val_loss"] == pytest.approx(metadata["val_loss"])
    means = last(lines, 5)
    assert means["loss"] < 0.03 and means["accuracy"] > 0.999 and means["grad_norm"] < 0.3


def test_the_scores_of_sft_answers_have_mean_0_and_std_1():
    model, tokenizer, _ = load_checkpoint("out/rm.pt", ["rm"])
    sft, _, _ = load_checkpoint("out/sft.pt", ["sft"])
    tokens, mask = generate(sft, 250 * [tokenizer.encode(x) for x in PROMPTS], 4, 3.0)
    cap = model.cap.item()
    model.cap.fill_(inf)
    scores = model(tokens, row_lengths(mask))
    assert scores.mean().item() == pytest.approx(0, abs=0.15)
    assert scores.std().item() == pytest.approx(1, abs=0.1)
    assert 0.003 < (scores > cap).double().mean() < 0.03  # one in a hundred


def test_the_scale_is_set_on_prompts_from_all_over_the_file(monkeypatch):
    def generate(sft, prompts, *_):
        seen.extend(prompts)
        return minippo.generate(sft, prompts, 1)

    seen = []
    monkeypatch.setattr(train_rm, "generate", generate)
    sft, _, _ = load_checkpoint("out/sft.pt", ["sft"])
    prompts = [[i] * (9 - i) for i in range(9)]
    train_rm.set_score_scale(minippo.RewardModel(sft), sft, prompts, train_rm.Config(answers=3))
    assert seen == [prompts[6], prompts[3], prompts[0]]


def test_ppo_finds_the_best_policy_for_its_reward_and_beta():
    lines = lines_of("ppo")
    means = last(lines, 20)
    e = exp(1 / 0.5)  # the best policy: ref * exp(reward / beta), normalised
    share = e / (e + 3)
    score = 10 + 3 / 8 + share
    kl = share * log(4 * share) + (1 - share) * log(4 / 3 * (1 - share))
    assert means["score"] == pytest.approx(score, abs=0.08)
    assert means["kl"] == pytest.approx(kl, abs=0.13)
    assert means["objective"] == pytest.approx(score - kl / 2, abs=0.04)
    assert means["explained_variance"] > 0.2
    assert lines[0]["value_loss"] < 0.5  # the values begin at the mean score
    (line,) = train("ppo", "out/second", policy="out/ppo.pt", steps=1)  # a second round
    for name in ("score", "kl"):
        assert line[name] == pytest.approx(means[name], abs=0.2)


def test_ppo_raises_the_scores_of_the_reward_model():
    settings = {"reward": "", "steps": 20, "kl_coef": 0.05, "lr": 0.003}
    lines = train("ppo", "out/rm", **settings)
    assert lines[-1]["score"] > lines[0]["score"] + 1
    train("rm", "out/rm", steps=1)  # the next PPO in this folder is for this one
    refused("rm = ", "ppo", "out/rm", resume=True, **settings)
    Path("out/rm/rm.pt").unlink()
    refused("train_rm.py has not ended", "ppo", "out/rm", resume=True, **settings)


def test_the_default_data_are_made_and_judged(monkeypatch):
    monkeypatch.setattr(zoo, "ROWS", {"sft_train": 20, "sft_val": 5})
    train("sft", "out/zoo", data=Path("data/zoo"), steps=1)
    (line,) = train("ppo", "out/zoo", data=Path("data/zoo"), steps=1)
    assert -3 <= line["judge"] < -1  # of nonsense


# How it is learned


@for_each_stage
def test_rates_climb_to_their_peaks_and_fall_to_0(stage):
    steps, warmup = {"sft": (107, 10), "rm": (48, 4), "ppo": (60, 5)}[stage]
    rates = [line["lr"] / SETTINGS[stage]["lr"] for line in lines_of(stage)]
    assert [rates[0], rates[warmup]] == pytest.approx([1 / (warmup + 1), 1])
    assert rates[-1] == pytest.approx(1 / (steps - warmup))
    state = torch.load(f"out/{stage}_state.pt")
    assert len(rates) == state["step"] == steps
    assert state["optimizer"]["param_groups"][-1]["betas"] == (0.9, 0.99)


def test_the_value_head_has_a_rate_of_its_own():
    old = torch.load("out/sft.pt")["model"]
    head = {"value_head.weight", "value_head.bias"}
    for rate, unmoved in (("lr", old.keys() - head), ("value_lr", {"value_head.weight"})):
        train("ppo", f"out/{rate}", steps=1, **{rate: 0.0})
        new = torch.load(f"out/{rate}/ppo.pt")["model"]
        assert {name for name in old if old[name].equal(new[name])} == unmoved


@for_each_stage
def test_the_size_of_micro_batches_changes_nothing(stage):
    logs = [train(stage, f"out/{stage}_{n}", steps=3, micro_batch=n) for n in (3, 64)]
    for line, other in zip(*logs, strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_gradient_clipped_to_0_teaches_nothing_and_another_seed_begins_elsewhere():
    for stage in ("sft", "rm"):
        losses = []
        for seed in (0, 1):
            lines = train(stage, f"out/seed_{seed}", seed=seed, steps=2, max_grad_norm=0.0)
            losses += [line["val_loss"] for line in lines]
        assert losses[0] == losses[1] != losses[2] == losses[3]


# Runs that are stopped


def last_step(path):
    return max((line["step"] for line in read_log(path)), default=-1)


@for_each_stage
def test_a_run_killed_at_random_ends_with_the_same_bytes(stage, monkeypatch):
    monkeypatch.setattr(Record, "save_if_due", Record.save)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    out = Path(f"out/killed_{stage}")
    out.mkdir()
    resume = functools.partial(train, stage, out, resume=True)
    for number, steps in ((signal.SIGKILL, range(20)), (signal.SIGINT, range(20, 40))):
        process = get_context("fork").Process(target=resume)
        process.start()
        step = random.choice(steps)
        while process.is_alive() and last_step(out / f"{stage}.jsonl") not in range(step, 999):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.05))
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode < 0 or process.exitcode == 1  # killed, or stopped by Ctrl-C
        with open(out / f"{stage}.jsonl", "a") as file:
            file.write('{"step": 999}\n{"step": 1, "lo\0\0')
    assert not (out / f"{stage}.pt").exists()
    assert resume() == lines_of(stage)
    path = out / f"{stage}.pt"
    assert path.read_bytes() == Path("out", path.name).read_bytes()
    path.write_bytes(b"finished")  # and left alone
    assert resume() == lines_of(stage)
    assert path.read_bytes() == b"finished"
    assert set(contents(out)) == {f"{stage}.pt", f"{stage}.jsonl", f"{stage}_state.pt"}


def test_an_overwritten_run_is_resumed_in_other_pieces(monkeypatch):
    def phase_3(batch, config):
        steps.append(config.overwrite)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return compute_advantages(batch, config)

    steps = []
    monkeypatch.setattr(Record, "save_if_due", Record.save)
    settings = {"functions": {"compute_advantages": phase_3}, "steps": 4}
    train("ppo", "out/again", steps=3)
    with pytest.raises(KeyboardInterrupt):
        train("ppo", "out/again", overwrite=True, **settings)
    assert not Path("out/again/ppo.pt").exists()  # it was that of the run before
    settings |= {"policy": "out/ppo.pt", "micro_batch": 9, "sample_batch": 8}  # these may change
    lines = train("ppo", "out/again", resume=True, **settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert steps == [True, True, True, False, False]


def test_an_existing_run_is_not_touched_unasked():
    refused("give one of them", "sft", resume=True, overwrite=True)
    # Found before the old run is replaced
    refused("a finite number", "ppo", overwrite=True, reward="vowel_reward:broken")
    for stage in STAGES:
        for name in (f"{stage}.pt", f"{stage}_state.pt"):
            out = Path("out/one", name)
            out.mkdir(parents=True)
            (out / name).touch()
            refused(f"{name}: exists already", stage, out)


def test_resume_refuses_other_settings_data_and_models():
    fewer, renamed = Path("fewer"), Path("renamed")
    write_data(fewer, PROMPTS[1:])
    write_data(renamed, [x.replace("c", "d") for x in PROMPTS])
    train("sft", "out/other", steps=1)
    for words, stage, changes in (
        ("layers = 2, not 1", "sft", {"layers": 1}),
        ("rows = 32", "sft", {"data": fewer}),
        ("vocabulary = ", "sft", {"data": renamed}),
        ("pairs = 48", "rm", {"data": fewer}),
        ("prompts = 8", "ppo", {"data": fewer}),
        ("sft = ", "rm", {"models": "out/other"}),
        ("sft = ", "ppo", {"models": "out/other"}),
    ):
        refused(words, stage, resume=True, **changes)
    (Path("out/other") / "rm.pt").write_bytes(contents("out")["rm.pt"])
    for name, changes in (
        ("rm", {"reward": ""}),
        ("ppo", {"policy": "out/ppo.pt"}),
        ("sft", {"policy": "out/sft.pt"}),
    ):
        refused(f"{name}.pt: was trained from another sft.pt", "ppo", "out/other", **changes)
    state = torch.load("out/other/sft_state.pt")
    state["settings"]["penalty"] = 1.0  # of another algorithm
    torch.save(state, "out/other/sft_state.pt")
    refused("penalty = 1.0, not None", "sft", "out/other", resume=True, steps=1)
    Path("out/other/sft_state.pt").unlink()
    refused("sft.pt: there is no sft_state.pt", "sft", "out/other", resume=True, steps=1)
