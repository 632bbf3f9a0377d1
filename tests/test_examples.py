"""The specification of examples/ that run by themselves. Run: python -m pytest tests/test_examples.py
(with_transformers.py has tests of its own; the last test needs trl)
"""

import json
import random
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cli import CPU, PPO, run, stage, write_data, write_models
from data.files import UserError
from data.rows import load_rows
from examples import ensemble, sums
from minippo import generate, row_lengths
from plumbing.models import fingerprint, load_checkpoint, load_models, save_checkpoint
from plumbing.text import pad_completions, texts_of
from tiny import assert_equal, stir, weights


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """-> a folder with data/, sft.pt and rm.pt."""
    folder = tmp_path_factory.mktemp("made") / "out"
    write_data(folder / "data")
    return write_models(folder)


def texts(folder, name):
    return load_rows(folder / "data" / f"{name}.jsonl", name.split("_")[0])


def test_sums_are_right_in_two_of_five_demonstrations_and_known_to_the_score(tmp_path):
    assert run("examples/sums.py", "--out", tmp_path / "sums", "--seed", 3)[::2] == (0, "")
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "sums").iterdir()
    }
    assert {name: len(x) for name, x in rows.items()} == {
        "sft_train": 36_000, "sft_val": 1000, "prompts_train": 9000, "prompts_val": 1000
    }  # fmt: skip
    errors = Counter()
    for row in rows["sft_train"]:
        a, b = re.fullmatch(r"(\d+) \+ (\d+) =", row["prompt"]).groups()
        errors[int(row["completion"]) - int(a) - int(b)] += 1
    shares = {error: n / 36_000 for error, n in errors.items() if n > 100}
    assert shares.pop(0) == pytest.approx(0.4, abs=0.01)
    assert {*map(abs, shares)} == {1, 2, 9, 10, 11} and len(shares) == 10
    assert all(x == pytest.approx(0.06, abs=0.006) for x in shares.values())
    prompts = {name: {row["prompt"] for row in x} for name, x in rows.items()}
    assert prompts["sft_train"] == prompts["prompts_train"] and len(prompts["sft_train"]) == 9000
    assert prompts["sft_val"] == prompts["prompts_val"]
    assert not prompts["sft_train"] & prompts["sft_val"]
    right = [float(sums.score([x["prompt"]], [x["completion"]])[0]) for x in rows["sft_train"]]
    assert sum(right) == errors[0]
    assert all(re.fullmatch(r" \d+", row["completion"]) for row in rows["sft_train"])
    answers = " 71", "71", " 071", " 71 ", " 72", " +71", "", " 7"
    assert sums.score(["23 + 48 ="] * 8, answers) == [1.0] + [0.0] * 7
    assert "is there already" in run("examples/sums.py", "--out", tmp_path / "sums")[2]


def test_an_ensemble_scores_by_the_mean_or_the_lowest_of_its_members(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "models")
    config, expected = SimpleNamespace(models=folder), []
    ids, mask, *_ = generate(load_checkpoint(made / "sft.pt", ["sft"])[0], [[1, 2], [3, 4]] * 4, 8)
    model, tokenizer, figures = load_checkpoint(made / "rm.pt", ["rm"])
    with pytest.raises(UserError, match="should be made from"):
        ensemble.mean(ids, mask, config)
    for i in (1, 2, 10):
        stir(model, 0.1)
        save_checkpoint(folder / f"ensemble/{i}/rm.pt", "rm", model, tokenizer, **figures)
        expected.append(model(ids, row_lengths(mask)).detach())
    expected = torch.stack(expected)
    assert len({*expected.argmin(0).tolist()}) > 1
    state = torch.get_rng_state()
    assert_equal(ensemble.mean(ids, mask, config), expected.mean(0), 1e-6)
    assert_equal(ensemble.minimum(ids, mask, config), expected.amin(0), 1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    flags = "--models", folder, "--reward", "examples.ensemble:minimum"
    assert stage("ppo", made / "data", tmp_path / "out", *flags)[::2] == (0, "")
    save_checkpoint(folder / "ensemble/2/rm.pt", "rm", model, tokenizer, sft="another")
    ensemble.members.cache_clear()
    with pytest.raises(UserError, match="should be made from"):
        ensemble.mean(ids, mask, config)


def bad_label(*arguments):
    return arguments


def label(rng, prompt, a, b):
    return {"prompt": prompt, "chosen": f"{a}|{rng.random()}", "rejected": b}


def test_iterated_labels_are_of_both_models(made, tmp_path, monkeypatch):
    data, first = shutil.copytree(made / "data", tmp_path / "data"), tmp_path / "1"
    assert stage("ppo", data, first, "--temperature=0.2", "--lr=0.02", "--models", made)[0] == 0
    flags = "--models", made, "--data", data, "--out", first, "--seed", 3, *CPU
    flags += "--pairs", 300, "--label", "test_examples:label"
    with monkeypatch.context() as patch:  # a wrong label is seen before anything is sampled
        patch.setattr("minippo.generate", None)
        error = run("examples/iterate.py", *flags[:-1], "test_examples:bad_label")[2]
    assert "should return a dict of texts, prompt, chosen, rejected, not (" in error
    assert run("examples/iterate.py", *flags)[::2] == (0, "")
    config = SimpleNamespace(models=made, policy=first / "ppo.pt", reward="", device="cpu")
    policy, ref, _, tokenizer = load_models(config)
    rng, answers = random.Random(3), []
    prompts = rng.choices([x for (x,) in texts(made, "prompts_train")], k=300)
    ids = [tokenizer.encode(x) for x in prompts]
    torch.manual_seed(3)
    for model in (policy, ref):
        batches = [generate(model, x, 8, 0.2)[:2] for x in (ids[:256], ids[256:])]
        answers.append([text for x in batches for text in texts_of(tokenizer, *x)[1]])
    new = [label(rng, x, a, b) for x, a, b in zip(prompts, *answers) if a != b]
    pairs = texts(made, "pref_train") + [tuple(row.values()) for row in new]
    assert texts(first, "pref_train") == pairs and 0 < len(new) < 300
    assert (first / "sft.pt").read_bytes() == (made / "sft.pt").read_bytes()
    for name in ("pref_val.jsonl", "prompts_train.jsonl"):
        assert (first / "data" / name).read_bytes() == (data / name).read_bytes()
    assert "--overwrite replaces it" in run("examples/iterate.py", *flags)[2]
    assert texts(first, "pref_train") == pairs
    # The next round
    assert stage("rm", first / "data", first, "--steps", 1)[0] == 0
    assert stage("ppo", data, tmp_path / "2", "--models", first)[0] == 0


TRL = """per_device_train_batch_size=4 steps_per_generation=2 num_iterations=2 max_steps=12
warmup_steps=4 learning_rate=0.03 adam_epsilon=0.02 adam_beta2=0.99 max_grad_norm=0.7 seed=6
num_generations=4 temperature=0.8 max_completion_length=8 beta=0.2 epsilon=0.3 logging_steps=4
scale_rewards=none loss_type=dapo use_bias_correction_kl=False disable_dropout=True bf16=False
gradient_checkpointing=False use_cpu=True"""


def test_what_trl_trains_with_means_what_ours_does(made, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    trainers, reports, trainer = [], [], trl.GRPOTrainer
    monkeypatch.setattr(trl, "GRPOTrainer", lambda *x: trainers.append(x) or trainer(*x))
    monkeypatch.setattr("plumbing.report.report", lambda *x: reports.append(x))
    flags = ["--data", made / "data", "--models", made, "--out", tmp_path, *PPO]
    flags += "--epochs 2 --k 4 --kl_coef 0.2 --clip_eps 0.3 --max_grad_norm 0.7 --lr 0.03".split()
    flags += "--temperature 0.8 --missing_eos_penalty 0.5 --adam_eps 0.02 --seed 6 --no_std".split()
    assert run("examples/outgrow.py", *flags, "--no_length")[0] == 0
    model, reward, arguments, rows = trainers[0]
    settings = [f"{x}={getattr(arguments, x)}" for x in re.findall(r"(\w+)=", TRL)]
    assert settings == TRL.split()
    assert (model, arguments.output_dir) == (str(tmp_path / "sft"), str(tmp_path))
    ((it, score, prompts),) = reports
    assert rows["prompt"] == [x for (x,) in texts(made, "prompts_train")]
    assert [it.tokenizer.decode(ids) for ids in prompts] == rows["prompt"]
    answers = [5, it.tokenizer.eos], [5, 6, 7]
    scores = score(*pad_completions([*zip(prompts, answers)])) - torch.tensor([0.0, 0.5])
    rewards = reward(rows["prompt"][:2], completion_ids=answers, more=0)
    assert rewards == pytest.approx(scores.tolist())
    trained, _, figures = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    assert_equal(weights(trained), weights(it.model))
    assert figures["sft"] == fingerprint(made / "sft.pt")
    ref = load_checkpoint(made / "sft.pt", ["sft"])[0]
    assert 0.01 < (weights(trained.trunk) - weights(ref.trunk)).norm() < 10
    assert "a run is there" in run("examples/outgrow.py", *flags)[2]
    for minibatches, size in ((2, 6), (8, 12)):
        wrong = "--overwrite", "--minibatches", minibatches, "--batch_size", size
        assert "no multiple" in run("examples/outgrow.py", *flags, *wrong)[2]
