"""Each of the three scripts learns all that its data allow; killed and resumed, it ends with the
same bytes."""

import json
import math
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import train_ppo
import train_rm
import train_sft
from cli import PROMPTS, VOWELS, run, write_data
from data import zoo
from data.rows import UserError
from minippo import generate, row_lengths
from plumbing.files import Record
from plumbing.models import load_checkpoint

STAGES = {"sft": train_sft, "rm": train_rm, "ppo": train_ppo}
SETTINGS = {
    "sft": {"epochs": 40, "batch_size": 12, "lr": 0.01, "layers": 2, "channels": 32},
    "rm": {"epochs": 10, "batch_size": 10, "lr": 0.005, "answers": 512},
    "ppo": {"steps": 60, "batch_size": 64, "minibatches": 1, "lr": 0.0015, "value_lr": 0.03},
}
SETTINGS["ppo"] |= {"kl_coef": 0.5, "group_size": 2, "reward": "vowels:score"}
# A constant, 1 for an e, and 1 for three of the eight prompts
REWARD = """
def score(prompts, completions, **kwargs):
    assert prompts[::2] == prompts[1::2]
    return [10.0 + ("e" in y) + (x[0] == "a") for x, y in zip(prompts, completions)]
"""
for_each_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A new folder in which the scripts have run, and the tests go on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("user"))
        write_data(Path("data"))
        Path("vowels.py").write_text(REWARD)
        for stage, settings in SETTINGS.items():
            flags = [f"--{name}={value}" for name, value in settings.items()]
            flags += ["--data=data", "--out=out", "--device=cpu"]
            assert run(f"train_{stage}.py", *flags) == (0, "")
        yield


def config(stage, out="out", **changes):
    settings = {"data": Path("data"), "out": Path(out), "device": "cpu", **SETTINGS[stage]}
    return STAGES[stage].Config(**settings | changes)


def log(stage, out="out"):
    """The lines, without what the clock says."""
    lines = [json.loads(line) for line in Path(out, f"{stage}.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["tokens_per_second"]
    return lines


def train(stage, out="out", **changes):
    STAGES[stage].train(config(stage, out, **changes))
    return log(stage, out)


def mean(lines, name):
    return sum(line[name] for line in lines) / len(lines)


# What is learned


def test_sft_learns_the_distribution_of_the_demonstrations():
    _, tokenizer, metadata = load_checkpoint("out/sft.pt", ["sft"])
    assert b"cab" in tokenizer.tokens and b" ae" in tokenizer.tokens
    answers = [tokenizer.encode(f" {x}{vowel}") for x in PROMPTS for vowel in VOWELS]
    entropy = 32 * math.log(4) / sum(len(ids) + 1 for ids in answers)  # that of the vowels
    assert entropy < metadata["val_loss"] < 1.03 * entropy
    lines = log("sft")
    assert lines[0]["loss"] == pytest.approx(math.log(tokenizer.vocab_size), abs=0.8)
    assert mean(lines[-30:], "loss") == pytest.approx(entropy, rel=0.05)
    assert mean(lines[-30:], "grad_norm") < 0.8
    assert lines[99]["val_loss"] == pytest.approx(metadata["val_loss"], rel=0.01)


def test_the_reward_model_learns_the_pairs():
    _, _, metadata = load_checkpoint("out/rm.pt", ["rm"])
    assert metadata["val_accuracy"] == 1 and metadata["val_loss"] < 0.03
    lines = log("rm")
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=0.2)
    assert mean(lines[-5:], "loss") < 0.03 and mean(lines[-5:], "accuracy") > 0.999
    assert mean(lines[-5:], "grad_norm") < 0.3
    assert lines[-1]["val_loss"] == pytest.approx(metadata["val_loss"])


def test_the_scores_of_sft_answers_have_mean_0_and_std_1():
    train("rm", "out/scaled", temperature=3.0, max_new_tokens=4, steps=20)
    model, tokenizer, _ = load_checkpoint("out/scaled/rm.pt", ["rm"])
    sft, _, _ = load_checkpoint("out/sft.pt", ["sft"])
    prompts = [tokenizer.encode(x) for x in PROMPTS]
    tokens, mask = generate(sft, 250 * prompts, 4, 3.0)
    cap = model.cap.item()
    model.cap.fill_(math.inf)
    scores = model(tokens, row_lengths(mask))
    assert scores.mean().item() == pytest.approx(0, abs=0.15)
    assert scores.std().item() == pytest.approx(1, abs=0.1)
    assert (scores > cap + 0.01).double().mean() < 0.03  # one in a hundred
    assert (scores > cap - 0.2).double().mean() > 0.003


def test_ppo_finds_the_best_policy_for_its_reward_and_beta():
    lines = log("ppo")
    e = math.exp(1 / 0.5)  # the best policy: ref * exp(reward / beta), normalised
    share = e / (e + 3)
    score = 10 + 3 / 8 + share
    kl = share * math.log(4 * share) + (1 - share) * math.log(4 / 3 * (1 - share))
    assert mean(lines[-20:], "score") == pytest.approx(score, abs=0.08)
    assert mean(lines[-20:], "kl") == pytest.approx(kl, abs=0.13)
    assert mean(lines[-20:], "objective") == pytest.approx(score - kl / 2, abs=0.04)
    assert mean(lines[-20:], "explained_variance") > 0.2
    assert abs(lines[0]["explained_variance"]) < 0.001
    assert lines[0]["value_loss"] < 0.5


def test_ppo_raises_the_scores_of_the_reward_model():
    settings = {"reward": "", "steps": 20, "kl_coef": 0.05, "lr": 0.003}
    lines = train("ppo", "out/rewarded", **settings)
    assert lines[0]["score"] < 0.4 and lines[-1]["score"] > 0.8
    Path("out/other_rm").mkdir()
    shutil.copy("out/sft.pt", "out/other_rm")
    train("rm", "out/other_rm", steps=1)
    refused("score = ", "ppo", "out/rewarded", resume=True, models="out/other_rm", **settings)


def test_a_second_round_starts_from_the_first_and_keeps_the_reference():
    (line,) = train("ppo", "out/second", policy="out/ppo.pt", steps=1)
    for name in ("kl", "score"):
        assert line[name] == pytest.approx(mean(log("ppo")[-20:], name), abs=0.2)


# How it is learned


@for_each_stage
def test_rates_climb_to_their_peaks_and_fall_to_0(stage):
    lines = log(stage)
    steps = {"sft": math.ceil(40 * 32 / 12), "rm": 48, "ppo": 60}[stage]
    warmup = min(config(stage).warmup, steps // 10)
    assert lines[-1]["step"] == len(lines) == steps
    rates = [lines[i]["lr"] / SETTINGS[stage]["lr"] for i in (0, warmup, -1)]
    assert rates == pytest.approx([1 / (warmup + 1), 1, 1 / (steps - warmup)])
    state = torch.load(f"out/{stage}_state.pt")
    assert state["step"] == steps
    assert all(group["betas"] == (0.9, 0.99) for group in state["optimizer"]["param_groups"])


def moved(path):
    """Which weights differ from those of the SFT model."""
    sft = torch.load("out/sft.pt")["model"]
    return {name for name, x in torch.load(path)["model"].items() if not x.equal(sft[name])}


def test_the_value_head_has_a_rate_of_its_own():
    train("ppo", "out/head", steps=1, lr=0.0)
    assert moved("out/head/ppo.pt") == {"value_head.weight", "value_head.bias"}
    train("ppo", "out/trunk", steps=1, value_lr=0.0)
    names = moved("out/trunk/ppo.pt")
    assert names > {"lm_head.weight", "trunk.norm.bias"} and "value_head.weight" not in names


@for_each_stage
def test_the_size_of_micro_batches_changes_nothing(stage):
    logs = [train(stage, f"out/{stage}_{n}", steps=3, micro_batch=n) for n in (1, 3, 64)]
    for line, *others in zip(*logs, strict=True):
        for other in others:
            assert line == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_a_gradient_clipped_to_0_teaches_nothing():
    for stage in ("sft", "rm"):
        lines = train(stage, "out/clipped", steps=3, max_grad_norm=0.0)
        assert len({line["val_loss"] for line in lines}) == 1


def test_the_default_data_are_made_once(monkeypatch):
    monkeypatch.setattr(zoo, "ROWS", {"sft_train": 20, "sft_val": 5})
    for overwrite in (False, True):
        train("sft", "out/zoo", data=Path("data/zoo"), steps=1, overwrite=overwrite)


# Runs that are stopped


@for_each_stage
def test_a_run_killed_at_random_ends_with_the_same_bytes(stage, monkeypatch):
    monkeypatch.setattr(Record, "save_if_due", Record.save)
    train_stage = STAGES[stage].train
    settings = config(stage, f"out/killed_{stage}", resume=True)
    settings.out.mkdir()
    for number in random.sample([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 3):
        process = get_context("fork").Process(target=train_stage, args=[settings])
        process.start()
        time.sleep(random.uniform(0.1, 0.6))
        os.kill(process.pid, number)
        process.join()
        with open(settings.out / f"{stage}.jsonl", "a") as file:
            file.write('{"step": 999}\n{"step": 1, "lo\0\0')
    name = f"{stage}.pt"
    with ThreadPoolExecutor() as threads:
        for _ in range(2):  # the second time, the run is finished
            threads.submit(train_stage, settings).result()
            assert Path(settings.out, name).read_bytes() == Path("out", name).read_bytes()
            assert log(stage, settings.out) == log(stage)
    names = {path.name for path in settings.out.iterdir()}
    assert names == {name, f"{stage}.jsonl", f"{stage}_state.pt"}


def test_an_overwritten_run_and_a_moving_beta_are_resumed(monkeypatch):
    def double(kl_coef, kl, config):
        return 2 * kl_coef

    def stop(record, step, **numbers):
        if step == 2:
            record.save(step, **numbers)
            raise KeyboardInterrupt

    out = "out/beta"
    train("ppo", out, steps=3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Record, "save_if_due", stop)
        train_ppo.train(config("ppo", out, steps=4, overwrite=True), next_kl_coef=double)
    refused("steps = 4", "ppo", out, steps=3, resume=True)
    train_ppo.train(config("ppo", out, steps=4, resume=True), next_kl_coef=double)
    assert [line["kl_coef"] for line in log("ppo", out)] == [0.5, 1, 2, 4]


def refused(words, stage, out="out", **changes):
    """Refused, and nothing is touched."""
    before = {path: path.read_bytes() for path in Path(out).glob("*.*")}
    with pytest.raises(UserError, match=words):
        train(stage, out, **changes)
    assert before == {path: path.read_bytes() for path in Path(out).glob("*.*")}


@for_each_stage
def test_an_existing_run_is_not_touched_unasked(stage):
    refused("give one of them", stage, resume=True, overwrite=True)
    for name in (f"{stage}.pt", f"{stage}_state.pt"):
        Path("out/one", name).mkdir(parents=True)
        shutil.copy(Path("out", name), Path("out/one", name))
        refused("--resume continues the run, --overwrite", stage, f"out/one/{name}")


def test_resume_refuses_other_settings_data_and_models():
    for stage, name, x in (("sft", "layers", 1), ("rm", "temperature", 0.5), ("ppo", "reward", "")):
        refused(f"{name} = .*--overwrite", stage, resume=True, **{name: x})
        refused("seed = 0", stage, resume=True, seed=1)
    write_data(Path("fewer"), PROMPTS[1:])
    write_data(Path("renamed"), [f"x{x}" for x in PROMPTS])
    for stage, words in (("sft", "rows = 32"), ("rm", "pairs = 48"), ("ppo", "prompts = 8")):
        refused(words, stage, resume=True, data=Path("fewer"))
    refused("vocabulary = ", "sft", resume=True, data=Path("renamed"))
    train("sft", "out/other", steps=1)
    refused("sft = ", "rm", resume=True, models="out/other")
    shutil.copy("out/rm.pt", "out/other")
    refused("rm.pt: was trained from another sft.pt", "ppo", "out/other", reward="")
    refused("ppo.pt: was trained from another sft.pt", "ppo", "out/other", policy="out/ppo.pt")
