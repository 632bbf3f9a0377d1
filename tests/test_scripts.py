"""The three scripts and sample.py: do they compute what minippo.py says?"""

import copy
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data.zoo
import minippo
import plumbing.report
import train_ppo
import train_rm
import train_sft
from cli import FLAGS, ROOT, metrics, read, run, write_data
from data.files import printable, read_log
from data.rows import load_rows
from minippo import GPT, GPTConfig, RewardModel, row_lengths
from plumbing import models, run as run_module
from plumbing.models import fingerprint, load_checkpoint, load_models
from plumbing.page import likely_tokens
from plumbing.settings import RunConfig
from plumbing.text import Tokenizer, chunks, read_ids, read_prompts, texts_of
from variations import rloo

# Twins: the same stages in plain code. Stages 1 and 2 go row by row; no gradient is computed in
# pieces. Out come the lines of the log, then the contents of the model's file. In the first three
# no setting has its default.

SFT = """--steps 99 --epochs 9 --batch_size 8 --micro_batch 3 --lr 0.05 --warmup 5 --max_grad_norm 0.5
    --seed 3 --layers 1 --heads 2 --channels 16 --context 44 --vocab_size 290"""
RM = """--steps 99 --epochs 6 --batch_size 6 --micro_batch 2 --lr 0.03 --warmup 2 --max_grad_norm 0.7
    --seed 4 --max_new_tokens 6"""
PPO = """--steps 20 --batch_size 8 --minibatches 3 --epochs 2 --micro_batch 3 --max_new_tokens 6
    --temperature 0.8 --gamma 0.9 --lam 0.8 --no_whiten --kl_coef 0.3 --length_penalty 0.05
    --missing_eos_penalty 0.5 --clip_eps 0.02 --value_clip 0.03 --vf_coef 0.2 --entropy_coef 0.02
    --kl_loss_coef 0.5 --max_grad_norm 0.3 --lr 0.005 --warmup 1 --adam_eps 0.01 --kl_target 0.1
    --ref_update_every 2 --seed 10 --k 2"""
CRITIC = """--resume --separate_critic --steps 4 --batch_size 8 --minibatches 3 --max_new_tokens 6
    --lr 0.005 --warmup 1 --clip_eps inf --kl_target 0.01 --ref_update_every 3"""
RLOO = """--no_report --k 2 --steps 2 --batch_size 6 --minibatches 1 --lr 0.01 --max_new_tokens 5
    --kl_target 5 --reward test_scripts:taste --policy {made}/ppo.pt"""


def taste(prompts, responses):
    return [len(x) / 9 for x in responses]


@pytest.fixture(scope="module", autouse=True)
def other_network():
    """In float64, so that scripts and twins differ by 1e-12, and with another forward pass: both of
    them compute whatever minippo.py says."""
    forward = minippo.Trunk.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minippo.Trunk, "forward", lambda *x, **more: 1.1 * forward(*x, **more))
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


def plain_adam(*groups, eps=1e-8):
    groups = [{"params": [*p], "peak": lr} for p, lr in groups]
    return torch.optim.Adam(groups, betas=(0.9, 0.99), eps=eps)


def set_plain_lr(optimizer, step, steps, warmup):
    share = (step + 1) / (warmup + 1) if step < warmup else (steps - step) / (steps - warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return optimizer.param_groups[0]["lr"]


def length(row):
    return len(row[0]) + max(len(answer) for answer in row[1:])


def plain_batch(rows, step, size, seed):
    orders = [np.random.default_rng([seed, i]).permutation(len(rows)) for i in range(50)]
    return [rows[i] for i in np.concatenate(orders)[step * size : (step + 1) * size]]


def plain_loss(kind, model, rows):
    """-> the loss, what the log says of it, what a validation says."""
    if kind == "sft":
        nats = []
        for prompt, y in rows:
            logits = model(torch.tensor([prompt + y]))[0][0, len(prompt) - 1 : -1]
            nats += F.cross_entropy(logits, torch.tensor(y), reduction="none")
        loss = torch.stack(nats).mean()
        return loss, {"loss": loss}, {"val_loss": loss}

    def score(ids):
        return model(torch.tensor([ids]), torch.tensor([len(ids)]))

    margins = torch.cat([score(x + a) - score(x + b) for x, a, b in rows])
    loss, right = (1 + (-margins).exp()).log().mean(), (margins > 0).double().mean()
    stats = {"loss": loss, "accuracy": right, "margin": margins.mean()}
    return loss, stats, {f"val_{name}": x for name, x in stats.items()}


def plain_fit(kind, it):  # it: the settings
    if kind == "sft":
        texts = load_rows(it.data / "sft_train.jsonl", "sft")
        tokenizer = Tokenizer.train(sum(texts, ()), 290)
        model = GPT(GPTConfig(tokenizer.vocab_size, 44, layers=1, heads=2, channels=16))
    else:
        sft, tokenizer, _ = load_checkpoint(it.out / "sft.pt", ["sft"])
        model = RewardModel(sft)
    task = {"sft": "sft", "rm": "pref"}[kind]
    rows, val = (read_ids(it.data, task, split, tokenizer, 44) for split in ("train", "val"))
    val.sort(key=length)
    optimizer = plain_adam((model.parameters(), it.lr))
    steps, lowest = min(it.steps, math.ceil(it.epochs * len(rows) / it.batch_size)), math.inf
    for step in range(steps):
        lr = set_plain_lr(optimizer, step, steps, min(it.warmup, steps // 10))
        optimizer.zero_grad()
        if kind == "sft":
            batch = plain_batch(rows, step, it.batch_size, it.seed)
        else:  # of 20 pairs in 4 batches by length
            order = np.random.default_rng(it.seed).permutation(20)
            ranked = sorted([rows[i] for i in order], key=length)
            (i,) = plain_batch(range(4), step, 1, it.seed)
            batch = ranked[6 * i : 6 * i + 6]
        loss, row, _ = plain_loss(kind, model, batch)
        loss.backward()
        norm = minippo.gradient_step(optimizer, it.max_grad_norm)
        if (step + 1) * 10 // steps > step * 10 // steps:
            figures = plain_loss(kind, model, val[::4])[2]  # at most 3 of 10
            row |= figures
            if figures["val_loss"] < lowest:
                lowest, best = figures["val_loss"], copy.deepcopy(model.state_dict())
        yield row | {"step": step + 1, "lr": lr, "grad_norm": norm}
    assert figures["val_loss"] > lowest  # the last weights are not the best
    model.load_state_dict(best)
    figures = plain_loss(kind, model, val)[2]
    if kind == "rm":
        prompts, scores = read_prompts(it.data, "train", tokenizer, 44), []
        for part in chunks([prompts[i % 20] for i in range(64)], 16 * it.micro_batch):
            tokens, mask, _, _ = minippo.generate(sft, part, it.max_new_tokens)
            scores.extend(model(tokens, row_lengths(mask)))
        scores = torch.stack(scores)
        figures |= {"mean": scores.mean(), "std": scores.std()}
        figures["cap"] = (scores.quantile(0.99) - figures["mean"]) / figures["std"]
        figures["sft"] = fingerprint(it.out / "sft.pt")
    yield model.state_dict() | figures


def plain_ppo(it, algorithm=minippo):  # it: the settings
    policy, ref, score, tokenizer = load_models(it)
    prompts = read_prompts(it.data, "train", tokenizer, 48)
    plumbing.report.check_start(policy, ref, score, prompts, it)
    batch = minippo.rollout(policy, ref, score, prompts[: it.batch_size], it)
    minippo.center_values(policy, batch)
    head, factor = {*policy.value_head.parameters()}, 30 if policy.value_trunk is None else 1
    groups = ({*policy.parameters()} - head, it.lr), (head, factor * it.lr)
    optimizer = plain_adam(*groups, eps=it.adam_eps)
    loss_of = getattr(algorithm, "loss", minippo.ppo_loss)
    for step in range(it.steps):
        lr = set_plain_lr(optimizer, step, it.steps, min(it.warmup, it.steps // 10))
        rows = plain_batch(prompts, step, it.batch_size // it.k, it.seed)
        rows = [x for x in rows for _ in range(it.k)]
        batch = minippo.rollout(policy, ref, score, rows, it)
        batch |= algorithm.compute_advantages(batch, it)
        whole = copy.copy(it)
        whole.micro_batch = 0
        row = minippo.ppo_update(policy, optimizer, batch, whole, loss_of)
        texts = texts_of(tokenizer, batch["tokens"], batch["mask"])
        row["judge"] = sum(map(data.zoo.judge, *texts)) / it.batch_size
        row |= minippo.batch_metrics(batch, it) | {"step": step + 1, "lr": lr}
        yield row
        if it.kl_target:
            error = min(max(row["kl"] / it.kl_target - 1, -0.2), 0.2)
            it.kl_coef *= 1 + error * it.batch_size / 10_000
        if it.ref_update_every and (step + 1) % it.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)
    yield policy.state_dict() | {"sft": fingerprint(it.models / "sft.pt")}


def agree(folder, kind, twin):
    """Do the log and the model's file hold what the twin computes?"""
    contents = torch.load(folder / f"{kind}.pt")
    rows = [*metrics(folder / f"{kind}.jsonl"), contents["model"] | contents["metadata"]]
    for row, plain in zip(rows, twin, strict=True):
        assert row.pop("sft", "") == plain.pop("sft", "")
        row, plain = ({x: torch.as_tensor(y).double() for x, y in z.items()} for z in (row, plain))
        torch.testing.assert_close(row, plain, rtol=1e-6, atol=1e-9)


def watched_run(script, flags):
    """-> what it printed, the most rows of a forward pass with and without gradients, the calls of
    report()."""
    rows, reports, forward = {True: 0, False: 0}, [], minippo.Trunk.forward

    def watched(trunk, tokens, *rest, **more):
        kind = torch.is_grad_enabled()
        rows[kind] = max(rows[kind], len(tokens))
        return forward(trunk, tokens, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minippo.Trunk, "forward", watched)
        patch.setattr(
            plumbing.report, "report", lambda *x, trained_on: reports.append((*x, trained_on))
        )
        status, printed, error = run(script, *shlex.split(flags))
    assert (status, error) == (0, "")
    return printed, rows, reports


def test_sft_and_reward_model_are_trained_as_their_twins(tmp_path, monkeypatch):
    write_data(tmp_path / "data")
    monkeypatch.setattr(run_module, "VALIDATION_ROWS", 3)
    monkeypatch.setattr(models, "ANSWERS", 64)
    for kind, flags, stage, most, steps in (
        ("sft", SFT, train_sft, {True: 3, False: 3}, "23 steps, not 99: --epochs 9"),
        ("rm", RM, train_rm, {True: 2 * 2, False: 16 * 2}, "20 steps, not 99: --epochs 6"),
    ):
        flags += f" --device cpu --data {tmp_path}/data --out {tmp_path}"
        printed, rows, _ = watched_run(f"train_{kind}.py", flags)
        agree(tmp_path, kind, plain_fit(kind, read(flags, stage.TrainConfig)))
        assert rows == most
        assert f"{steps} of 20 rows\n" in printed
        figures = torch.load(tmp_path / f"{kind}.pt")["metadata"]
        *_, saved, result = printed.splitlines()
        assert saved == f"saved {tmp_path}/{kind}.pt"
        if kind == "sft":
            assert f" loss {figures['val_loss']:.4f} nats" in result
        else:
            right = figures["val_accuracy"]
            error = (right * (1 - right) / 10) ** 0.5
            assert f"{100 * right:.1f} % ± {100 * error:.1f} of" in result


def test_ppo_trains_as_its_twin(made, tmp_path):
    flags = f"{PPO} --device cpu --data {made}/data --models {made} --out {tmp_path}"
    _, rows, ((trained, score, prompts),) = watched_run("train_ppo.py", flags)
    agree(tmp_path, "ppo", plain_ppo(read(flags, train_ppo.Settings, train_ppo.TrainConfig)))
    assert rows == {True: 3, False: 8}  # the first check takes up to 16 times 3
    assert prompts == read_prompts(made / "data", "train", trained.tokenizer, 48)
    assert score(torch.ones(2, 5).long(), torch.ones(2, 4).bool()).shape == (2,)
    traces = read_log(tmp_path / "ppo_traces.jsonl")
    assert [line["step"] for line in traces] == [1, 2, 5, 10, 20]
    for response in sum((line["responses"] for line in traces), []):
        columns = map(response["columns"].get, ("action", "log pi", "log ref", "log pi now"))
        for likely, action, *logs in zip(response["likely"], *columns):
            p = {text: chances for text, *chances in likely}[action]
            # by the policy that sampled, the reference at that time, the policy after the update
            assert [math.log(x) for x in p] == pytest.approx(logs)


@pytest.mark.parametrize(
    "script, flags, stage, algorithm",
    [("train_ppo.py", CRITIC, train_ppo, minippo), ("variations/rloo.py", RLOO, rloo, rloo)],
)
def test_so_do_a_critic_and_rloo(made, tmp_path, script, flags, stage, algorithm):
    flags = flags.format(made=made)
    flags += f" --device cpu --data {made}/data --models {made} --out {tmp_path}"
    watched_run(script, flags)
    twin = plain_ppo(read(flags, stage.Settings, train_ppo.TrainConfig), algorithm)
    agree(tmp_path, "ppo", twin)


def test_the_defaults_are_those_that_were_measured():
    stages = RunConfig, *(stage.TrainConfig for stage in (train_sft, train_rm, train_ppo))
    assert [[*vars(stage()).values()] for stage in (*stages, train_ppo.Settings)] == [
        [Path("data/zoo"), Path("out"), "auto", 0, False, False, False],
        [1024, 128, 4, 4, 96, False, 1300, 12, 64, 16, 0.003, 20, 1.0, ""],
        [1950, 2, 64, 16, 0.001, 20, 1.0, 48, ""],
        [450, 128, 0.0008, 5, 0.0001, "", "", "", False, 0.0, 0],
        [48, 1, 0, 1, 0.1, 1, 1, 4, 0, 1, 1, 1, True, 0.2, 0.2, 0.1, 0, 0, False],
    ]


def test_the_reward_model_is_on_the_device_of_the_run(made, tmp_path, monkeypatch):
    # The models of the other stages: tests/test_models.py
    def stop(model, config):
        assert all(x.is_meta for x in model.state_dict().values())
        raise KeyboardInterrupt

    monkeypatch.setattr("plumbing.settings.device_of", lambda _: "meta")
    monkeypatch.setattr("plumbing.run.adam", stop)
    flags = "--data", made / "data", "--models", made, "--out", tmp_path
    assert run("train_rm.py", *flags)[0] == 130


def test_the_default_data_are_made_once_and_no_other(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(data.zoo, "write_data", lambda folder: folders.append(write_data(folder)))
    for flags, status in (([], 0), (["--overwrite"], 0), (["--data", "other"], 2)):
        ended, printed, _ = run(f"{ROOT}/train_sft.py", *FLAGS["sft"], *flags, root=tmp_path)
        assert ended == status and ("making the default data" in printed) == (not flags)
        assert [str(x) for x in folders] == ["data/zoo"]


# sample.py

TEXTS = "What does", "Where \x1b"
SAMPLE = "--n 2 --temperature 0.7 --max_new_tokens 9 --seed 2".split()


def draws(folder):
    """-> what sample.py prints, and what generate() has returned for the last answer."""
    policy, tokenizer, _ = load_checkpoint(folder / "ppo.pt", ["ppo"])
    said = ""
    torch.manual_seed(2)
    for text in TEXTS:
        said += f"{printable(text)}\n"
        for _ in range(2):
            sampled = minippo.generate(policy, [tokenizer.encode(text)], 9, 0.7)
            _, (answer,) = texts_of(tokenizer, *sampled[:2])
            said += f"  {printable(answer.strip())}\n"
    return said, sampled


def test_the_sampler_prints_its_draws(made):
    said, _ = draws(made)
    words = "sample.py", made / "ppo.pt", *SAMPLE
    assert run(*words, *TEXTS) == (0, said, "")
    status, printed, error = run(*words, stdin=f"{TEXTS[0]}\n\n{TEXTS[1]}\r\n{'x' * 48}\n")
    assert (status, printed) == (2, said)
    assert "the prompt '': it has 0 tokens, not 1 to 47" in error
    assert "it has 48 tokens" in error and run(*words, stdin="x" * 47)[0] == 0
    assert run(*words, stdin=" What \r\n")[1].startswith(" What \n")


def test_the_sampler_traces_the_numbers_of_ppo(made, tmp_path):
    # Those of trace(), table() and likely_tokens(), which have tests
    _, sampled = draws(made)
    tokens, mask, logprobs, values = sampled
    kinds = ("ppo", "sft", "rm")
    models, (tokenizer, *_), _ = zip(*(load_checkpoint(made / f"{x}.pt", [x]) for x in kinds))
    with torch.no_grad():
        score = models[2](tokens, row_lengths(mask))[0]
        ref_logprobs, _, _ = minippo.evaluate_actions(models[1], tokens, mask, 0.7)
    words = *SAMPLE, *TEXTS, "--trace"
    said = run("sample.py", made / "ppo.pt", *words)[1]
    numbers, _, rest = said.rpartition("    score ")[2].partition("\n\n    the likeliest")
    head, _, *rows = numbers.splitlines()
    assert head == f"{score:.2f}  KL {(logprobs - ref_logprobs).sum():.2f}"
    last = logprobs[mask][-1], ref_logprobs[mask][-1], values[mask][-1]
    assert [rows[-1].split()[i] for i in (-4, -3, -1)] == [f"{x:z.2f}" for x in last]
    assert len(rows) == mask.sum()
    likely = likely_tokens(models[:2], tokens[0], mask[0], 0.7, tokenizer.spell)
    shown = [re.findall(r"(\S+) -> (\S+)", row) for row in rest.splitlines()[1:]]
    assert shown == [[(f"{ref:.2f}", f"{p:.2f}") for _, p, ref in row] for row in likely]
    _, (answer,) = texts_of(tokenizer, tokens, mask)
    words = shutil.copy(made / "ppo.pt", tmp_path), *words, "--models", made
    said = run("sample.py", *words, "--reward", "test_scripts:taste")[1]
    assert f"    score {len(answer) / 9:.2f}  KL" in said
