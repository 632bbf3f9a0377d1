"""The specification of examples/, less with_transformers.py."""

import random
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cli import CPU, FLAGS, PPO, run, shell, stage
from data.files import UserError
from data.rows import load_rows
from examples import ensemble, sums
from minippo import generate, row_lengths
from plumbing.models import load_checkpoint, load_models, save_checkpoint
from plumbing.text import chunks, pad_completions, texts_of
from tiny import assert_equal, stir, weights


def texts(folder, name):
    return load_rows(folder / f"{name}.jsonl", name.split("_")[0])


def test_two_in_five_sums_are_right_and_score(tmp_path):
    folder = tmp_path / "sums"
    assert run("examples/sums.py", "--out", folder, "--seed", 3)[::2] == (0, "")
    rows = {path.stem: texts(folder, path.stem) for path in folder.iterdir()}
    counts = {"sft_train": 36_000, "sft_val": 1000, "prompts_train": 9000, "prompts_val": 1000}
    assert {name: len(x) for name, x in rows.items()} == counts
    prompts = {name: {prompt for prompt, *_ in x} for name, x in rows.items()}
    train, val = prompts["sft_train"], prompts["sft_val"]
    assert (train, val) == (prompts["prompts_train"], prompts["prompts_val"])
    assert (len(train), len(val), len(train | val)) == (9000, 1000, 10_000)
    assert len({prompt.split()[0] for prompt in val}) == 100  # of all numbers
    errors = Counter()
    for prompt, answer in rows["sft_train"]:
        numbers = re.fullmatch(r"(\d\d?) \+ (\d\d?) = (\d+)", prompt + answer).groups()
        a, b, total = map(int, numbers)
        errors[total - a - b] += 1
    assert sum(sums.score(*zip(*rows["sft_train"]))) == errors[0]
    shares = {error: n / 36_000 for error, n in errors.items() if n > 100}  # few end below 0
    expected = {i * sign: 0.06 for i in (1, 2, 9, 10, 11) for sign in (1, -1)} | {0: 0.4}
    assert shares == pytest.approx(expected, abs=0.01)
    assert sums.score(["23 + 48 ="] * 5, [" 71", "71", " 071", " 71 ", ""]) == [1.0] + [0.0] * 4
    assert "already exists" in run("examples/sums.py", "--out", folder)[2]


def test_an_ensemble_gives_the_lowest_score(made, tmp_path, capsys):
    folder = shutil.copytree(made, tmp_path / "models")
    config, expected = SimpleNamespace(models=folder), []
    ids, mask, *_ = generate(load_checkpoint(made / "sft.pt", ["sft"])[0], [[1, 2], [3, 4]] * 4, 8)
    model, tokenizer, metadata = load_checkpoint(made / "rm.pt", ["rm"])
    for i in (1, 2, 10):
        stir(model, 0.1)
        save_checkpoint(folder / f"ensemble/{i}/rm.pt", "rm", model, tokenizer, **metadata)
        expected.append(model(ids, row_lengths(mask)).detach())
    expected = torch.stack(expected)
    assert len({*expected.argmin(0).tolist()}) > 1
    state = torch.get_rng_state()
    assert_equal(ensemble.minimum(ids, mask, config), expected.amin(0), 1e-6)
    assert capsys.readouterr().out == f"3 reward models: {folder}/ensemble/*/rm.pt\n"
    assert torch.equal(torch.get_rng_state(), state)
    flags = "--models", folder, "--reward", "examples.ensemble:minimum"
    assert stage("ppo", made / "data", tmp_path / "out", *flags)[::2] == (0, "")
    save_checkpoint(folder / "ensemble/2/rm.pt", "rm", model, tokenizer, sft="another")
    ensemble.members.cache_clear()
    with pytest.raises(UserError, match="should be made from"):
        ensemble.minimum(ids, mask, config)


def label(rng, prompt, a, b):
    return {"prompt": prompt, "chosen": f"{a}|{rng.random()}", "rejected": b}


def test_iterated_labels_are_of_both_models(made, tmp_path):
    data, first = made / "data", tmp_path / "1"
    assert stage("ppo", data, first, "--temperature=0.2", "--lr=0.02", "--models", made)[0] == 0
    flags = "--models", made, "--data", data, "--out", first, "--seed", 3, *CPU
    flags += "--pairs", 300, "--label", "test_examples:label"
    assert run("examples/iterate.py", *flags)[::2] == (0, "")
    config = SimpleNamespace(models=made, policy=first / "ppo.pt", reward="", device="cpu")
    policy, ref, _, tokenizer = load_models(config)
    rng, pairs = random.Random(3), texts(data, "pref_train")
    prompts = rng.choices([x for (x,) in texts(data, "prompts_train")], k=300)
    torch.manual_seed(3)
    for part in chunks(prompts, 256):
        ids = [tokenizer.encode(x) for x in part]
        both = [texts_of(tokenizer, *generate(x, ids, 8, 0.2)[:2])[1] for x in (policy, ref)]
        new = [label(rng, *row) for row in zip(part, *both) if row[1] != row[2]]
        pairs += [tuple(row.values()) for row in new]
    assert texts(first / "data", "pref_train") == pairs and 20 < len(pairs) < 320
    copied, wanted = (first / "data").iterdir(), data.glob("pr*")
    assert {path.name for path in copied} == {path.name for path in wanted}
    assert "remove it to make it again" in run("examples/iterate.py", *flags)[2]
    # The next round
    assert stage("rm", first / "data", first, "--steps", 1)[0] == 0
    assert stage("ppo", first / "data", tmp_path / "2", "--models", first)[0] == 0


TRL = """per_device_train_batch_size=4 steps_per_generation=2 num_iterations=2 max_steps=12
warmup_steps=4 learning_rate=0.03 adam_epsilon=0.02 adam_beta2=0.99 max_grad_norm=0.7 seed=6
num_generations=4 temperature=0.8 max_completion_length=ROOM beta=0.2 epsilon=0.3 bf16=False
scale_rewards=none loss_type=dapo use_bias_correction_kl=False
use_cpu=True"""


def test_trl_is_told_what_our_flags_mean(made, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    trainers, reports, trainer = [], [], trl.GRPOTrainer
    monkeypatch.setattr(trl, "GRPOTrainer", lambda *x: trainers.append(x) or trainer(*x))
    monkeypatch.setattr("plumbing.report.report", lambda *x: reports.append(x))
    flags = ["--data", made / "data", "--models", made, "--out", tmp_path, *PPO]
    flags += "--epochs 2 --k 4 --kl_coef 0.2 --clip_eps 0.3 --max_grad_norm 0.7 --lr 0.03".split()
    flags += "--temperature 0.8 --missing_eos_penalty 0.5 --adam_eps 0.02 --seed 6".split()
    flags += "--no_std --no_length --max_new_tokens 44".split()  # more than there is room for
    for wrong, says in (
        ("--policy x", "leave them out"),
        ("--micro_batch 1", "leave them out"),
        ("--resume", "leave them out"),
        ("--kl_target 5", "leave them out"),
        ("--ref_update_every 5", "leave them out"),
        ("--tensorboard", "leave them out"),
        ("--batch_size 6", "--batch_size 6: should be a multiple of --k 4 "),
        ("--minibatches 16", " x processes, 16"),
    ):
        assert says in run("examples/outgrow.py", *flags, *wrong.split())[2]
    assert run("examples/outgrow.py", *flags)[0] == 0
    _, reward, arguments, rows = trainers[0]
    ((it, score, prompts),) = reports
    expected = TRL.replace("ROOM", str(48 - max(map(len, prompts))))
    settings = [f"{x}={getattr(arguments, x)}" for x in re.findall(r"(\w+)=", expected)]
    assert settings == expected.split() and arguments.output_dir == str(tmp_path)
    assert rows["prompt"] == [x for (x,) in texts(made / "data", "prompts_train")]
    assert [it.tokenizer.decode(ids) for ids in prompts] == rows["prompt"]
    answers = [5, it.tokenizer.eos], [5, 6, 7]
    scores = score(*pad_completions([*zip(prompts, answers)])) - torch.tensor([0.0, 0.5])
    rewards = reward(rows["prompt"][:2], completion_ids=answers, more=0)
    assert rewards == pytest.approx(scores.tolist())
    ref = load_checkpoint(made / "sft.pt", ["sft"])[0]
    trained = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])[0]
    assert_equal(weights(trained), weights(it.model))
    assert 0.01 < (weights(trained.trunk) - weights(ref.trunk)).norm() < 10


def test_two_processes_share_the_responses_of_an_iteration(made, tmp_path):
    pytest.importorskip("trl")
    flags = "--data", made / "data", "--models", made, "--out", tmp_path, *FLAGS["ppo"]
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2
    ended = shell(*torchrun, "-m", "examples.outgrow", *flags)
    assert ended.returncode == 0 and ended.stdout.count("saved ") == 1, ended.stderr
    words = "'train_runtime': '([^']+)', 'train_samples_per_second': '([^']+)'"
    seconds, rate = map(float, re.search(words, ended.stdout).groups())
    assert seconds * rate == pytest.approx(3 * 8, rel=0.01)
