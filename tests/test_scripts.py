"""The three scripts and sample.py: do they compute what minippo.py says?

Run: python -m pytest tests/test_scripts.py
"""

import copy
import json
import math
import re
import shutil
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data.zoo
import minippo
import plumbing.report
import train_ppo
from cli import CPU, FLAGS, ROOT, edited, metrics, run, stage, write_data, write_models
from data.files import printable, read_log
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, row_lengths
from plumbing import models, run as room
from plumbing.models import add_critic, fingerprint, load_checkpoint, text_reward
from plumbing.page import likely_tokens
from plumbing.text import Tokenizer
from variations import rloo

# --------------------------------------------------------------------------------------------------
# Twins: the same stages in plain code. Stages 1 and 2 go row by row; nothing is cut into pieces. Out
# come the lines of the log, then the contents of the model's file. No setting has its default, and
# each must be seen to act.


def values_of(text):
    words = text.split()
    return dict(zip(words[::2], map(json.loads, words[1::2])))


SFT = values_of(
    "steps 99 epochs 10 batch_size 8 micro_batch 3 lr 0.2 warmup 2 max_grad_norm 0.5 seed 3"
)
RM = values_of(
    "steps 21 epochs 9 batch_size 6 micro_batch 2 lr 0.02 warmup 2 max_grad_norm 0.7 seed 4 "
    "max_new_tokens 6"
)
PPO = values_of(
    "steps 20 batch_size 8 minibatches 3 epochs 2 micro_batch 3 max_new_tokens 6 temperature 0.8 "
    "gamma 0.9 lam 0.8 whiten false kl_coef 0.3 length_penalty 0.05 missing_eos_penalty 0.5 "
    "clip_eps 0.02 value_clip 0.03 vf_coef 0.2 entropy_coef 0.02 kl_loss_coef 0.5 "
    "max_grad_norm 0.3 lr 0.005 warmup 1 adam_eps 0.01 kl_target 0.01 "
    "ref_update_every 2 seed 10 k 2"
)
CRITIC = {name: x for name, x in PPO.items() if name not in ("micro_batch", "k")}
CRITIC |= {"separate_critic": True, "clip_eps": math.inf, "ref_update_every": 3, "steps": 4}
RLOO = values_of(
    'k 2 steps 2 batch_size 6 minibatches 1 lr 0.01 max_new_tokens 5 reward "taste:score" '
    "kl_target 5"
)
TASTE = "def score(prompts, responses):\n    return [len(x) / 9 for x in responses]\n"


@pytest.fixture(scope="module", autouse=True)
def float64():
    """So that scripts and twins differ by 1e-12, and not by 1e-3."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def texts_in(folder, name):
    lines = (folder / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [list(json.loads(line).values()) for line in lines]


def ids_in(folder, name, tokenizer):
    encode, end = tokenizer.encode, [tokenizer.eos]
    return [[encode(x), *(encode(y) + end for y in ys)] for x, *ys in texts_in(folder, name)]


def plain_adamw(*groups, eps=1e-8):
    groups = [{"params": [*p], "peak": lr, "weight_decay": 0.0} for p, lr in groups]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=eps)


def set_plain_lr(optimizer, step, steps, warmup):
    share = (step + 1) / (warmup + 1) if step < warmup else (steps - step) / (steps - warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return optimizer.param_groups[0]["lr"]


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
    figures = {"val_loss": loss, "val_accuracy": right}
    figures["val_accuracy_se"] = (right * (1 - right) / len(rows)) ** 0.5
    return loss, {"loss": loss, "accuracy": right, "margin": margins.mean()}, figures


def plain_fit(kind, folder, values):
    it = SimpleNamespace(**values)
    torch.manual_seed(it.seed)
    if kind == "sft":
        tokenizer = Tokenizer.train(sum(texts_in(folder, "sft_train"), []), 290)
        model = GPT(GPTConfig(tokenizer.vocab_size, 44, layers=1, heads=2, channels=16))
    else:
        sft, tokenizer, _ = load_checkpoint(folder / "sft.pt", ["sft"])
        model = RewardModel(sft)
    task = {"sft": "sft", "rm": "pref"}[kind]
    rows, val = (ids_in(folder, f"{task}_{x}", tokenizer) for x in ("train", "val"))
    optimizer = plain_adamw((model.parameters(), it.lr))
    steps, lowest = min(it.steps, math.ceil(it.epochs * len(rows) / it.batch_size)), math.inf
    for step in range(steps):
        lr = set_plain_lr(optimizer, step, steps, it.warmup)
        optimizer.zero_grad()
        loss, row, _ = plain_loss(kind, model, plain_batch(rows, step, it.batch_size, it.seed))
        loss.backward()
        norm = minippo.gradient_step(optimizer, it.max_grad_norm)
        if int((step + 1) / steps * 10 + 1e-9) > int(step / steps * 10 + 1e-9):
            val = sorted(val, key=lambda row: sum(map(len, row)))
            figures = plain_loss(kind, model, val[::4])[2]  # at most 3 of 10
            row |= figures
            if figures["val_loss"] < lowest:
                lowest, best = figures["val_loss"], copy.deepcopy(model.state_dict())
                best_step = step + 1
        yield row | {"step": step + 1, "lr": lr, "grad_norm": norm}
    model.load_state_dict(best)
    facts = plain_loss(kind, model, val)[2]
    if kind == "rm":
        prompts, scores = ids_in(folder, "prompts_train", tokenizer), []
        prompts, size = [prompts[i % 20][0] for i in range(64)], 16 * it.micro_batch
        for i in range(0, 64, size):
            tokens, mask, _, _ = minippo.generate(sft, prompts[i : i + size], it.max_new_tokens)
            scores.append(model(tokens, row_lengths(mask)))
        mean, std = torch.cat(scores).mean(), torch.cat(scores).std()
        cap = (torch.cat(scores).quantile(0.99) - mean) / std
        facts |= {"mean": mean, "std": std, "cap": cap, "sft": fingerprint(folder / "sft.pt")}
    yield model.state_dict() | facts | {"best_step": best_step}


def plain_ppo(folder, values, random_state, policy="", algorithm=minippo):
    """random_state: after the check of the start."""
    it = vars(train_ppo.TrainConfig()) | {"k": 1, "seed": 0, "micro_batch": 0} | values
    it = SimpleNamespace(**{"separate_critic": False, "adam_eps": 1e-4} | it)
    kind = rloo.Settings if algorithm is rloo else PPOConfig
    config = kind(**{name: x for name, x in values.items() if hasattr(kind, name)})
    sft, tokenizer, _ = load_checkpoint(folder / "sft.pt", ["sft"])
    reward_model, _, _ = load_checkpoint(folder / "rm.pt", ["rm"])
    ref, policy = minippo.frozen_copy(sft), load_checkpoint(policy, ["ppo"])[0] if policy else sft

    def score(tokens, mask):
        return reward_model(tokens, row_lengths(mask))

    if it.reward:
        exec(TASTE, taste := {})
        score = text_reward(taste["score"], tokenizer, "")
    if it.separate_critic:
        add_critic(policy, reward_model)
    prompts = [x for (x,) in ids_in(folder, "prompts_train", tokenizer)]
    head = {*policy.value_head.parameters()}
    factor = 1 if it.separate_critic else 30
    groups = ({*policy.parameters()} - head, it.lr), (head, factor * it.lr)
    optimizer = plain_adamw(*groups, eps=it.adam_eps)
    torch.set_rng_state(random_state)
    batch = minippo.rollout(policy, ref, score, prompts[: it.batch_size], config)
    minippo.center_values(policy, batch)
    loss_of = getattr(algorithm, "loss", minippo.ppo_loss)
    for step in range(it.steps):
        lr = set_plain_lr(optimizer, step, it.steps, min(it.warmup, it.steps // 10))
        rows = plain_batch(prompts, step, it.batch_size // it.k, it.seed)
        rows = [x for x in rows for _ in range(it.k)]
        batch = minippo.rollout(policy, ref, score, rows, config)
        batch |= algorithm.compute_advantages(batch, config)
        stats = []
        for _ in range(config.epochs):
            for rows in torch.randperm(it.batch_size).tensor_split(config.minibatches):
                optimizer.zero_grad()
                part = {name: x[rows] for name, x in batch.items()}
                loss, more = loss_of(policy, part, config)
                loss.backward()
                norm = minippo.gradient_step(optimizer, config.max_grad_norm)
                stats.append(more | {"grad_norm": norm})
        row = {name: sum(x[name] for x in stats) / len(stats) for name in stats[0]}
        row["ratio_max"] = max(x["ratio_max"] for x in stats)
        row |= minippo.batch_metrics(batch, config) | {"step": step + 1, "lr": lr}
        yield row
        if it.kl_target:
            error = min(max(row["kl"] / it.kl_target - 1, -0.2), 0.2)
            config.kl_coef *= 1 + error * it.batch_size / 10_000
        if it.ref_update_every and (step + 1) % it.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)
    yield policy.state_dict() | {"sft": fingerprint(folder / "sft.pt")}


def agree(folder, kind, twin):
    """Do the log and the model's file hold what the twin computes?"""
    contents = torch.load(folder / f"{kind}.pt")
    rows = [*metrics(folder / f"{kind}.jsonl"), contents["model"] | contents["figures"]]
    return all(same(row, plain) for row, plain in zip_longest(rows, twin, fillvalue={}))


def same(row, plain):
    def close(a, b):
        if isinstance(a, str):
            return a == b
        a, b = (torch.as_tensor(x).double() for x in (a, b))
        return torch.allclose(a, b, rtol=1e-6, atol=1e-9)

    if (row.keys() ^ plain.keys()) - {"judge", "best_step"}:
        return False
    return all(close(row[name], plain[name]) for name in row.keys() & plain.keys())


def watched_run(script, values, *flags):
    """-> what it printed; the modes of the networks and the rows in memory; the random state after
    the check of the start; what the report was asked for."""
    calls, states, reports = [], [], []
    forward, generate = minippo.Trunk.forward, minippo.generate

    def watched(trunk, tokens, *rest, **more):
        calls.append((torch.is_grad_enabled(), trunk.training, len(tokens)))
        return forward(trunk, tokens, *rest, **more)

    def watched_generate(*arguments, **more):
        returned = generate(*arguments, **more)
        states.append(torch.get_rng_state())
        return returned

    named = {"True": "--{}", "False": "--no_{}"}
    words = [named.get(str(x), "--{} {}").format(name, x) for name, x in values.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minippo.Trunk, "forward", watched)
        patch.setattr(minippo, "generate", watched_generate)
        patch.setattr(plumbing.report, "generate", watched_generate)
        patch.setattr(plumbing.report, "report", lambda *x: reports.append(x))
        status, printed, error = run(script, *CPU, *" ".join(words).split(), *flags)
    assert (status, error) == (0, "")
    it = SimpleNamespace(printed=printed, state=states and states[0], reports=reports)
    it.modes = {x[:2] for x in calls}
    it.rows = [max(x[2] for x in calls if x[0] == gradients) for gradients in (True, False)]
    return it


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """-> a folder with data and what stages 1 and 2 made of it; how they went."""
    folder = tmp_path_factory.mktemp("fitted")
    write_data(folder / "data")
    flags = ["--data", folder / "data", "--out", folder]
    shape = "--layers 1 --heads 2 --channels 16 --context 44 --vocab_size 290".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "VALIDATED", 3), patch.setattr(models, "ANSWERS", 64)
        sft = watched_run("train_sft.py", SFT, *flags, *shape)
        return folder, {"sft": sft, "rm": watched_run("train_rm.py", RM, *flags)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """-> a folder with data, models for stage 3 and what PPO made of them; how it went."""
    folder = tmp_path_factory.mktemp("begun")
    write_data(folder / "data")
    write_models(folder)
    (folder / "taste.py").write_text(TASTE)
    return folder, watched_run("train_ppo.py", PPO, "--data", folder / "data", "--out", folder)


@pytest.mark.parametrize("kind, values, rows", [("sft", SFT, 3), ("rm", RM, 2 * 2)])
def test_sft_and_reward_model_are_trained_as_their_twins(fitted, kind, values, rows):
    folder, it = fitted[0], fitted[1][kind]
    *log, end = plain_fit(kind, folder, values)
    assert agree(folder, kind, [*log, end])
    best = end["best_step"]
    assert best < len(log) and not (folder / f"{kind}_best.pt").exists()
    assert it.modes == {(True, True), (False, False)} and it.rows[0] == rows
    lines = [f"the validation loss was lowest at step {best}: saving that model"]
    lines += [f"saved {folder}/{kind}.pt", f"validation loss {end['val_loss']:.4f} nats/token"]
    if kind == "rm":
        right, error = 100 * end["val_accuracy"], 100 * end["val_accuracy_se"]
        lines[2] = f"{right:.1f} % ± {error:.1f} of the validation pairs right"
        assert ("are the labels noise?" in it.printed) == (right < 50 + 2 * error)
    assert [line for line in it.printed.splitlines() if line in lines] == lines
    other = {"steps": 7, "epochs": 1, "batch_size": 64, "lr": 1e-3, "warmup": 20}
    other |= {"seed": 0, "max_new_tokens": 48, "max_grad_norm": 1.0, "micro_batch": 16}
    for name in values.keys() - {"sft": {"micro_batch", "steps"}, "rm": {"epochs"}}[kind]:
        change = {name: other.get(name, 0)}
        assert not agree(folder, kind, plain_fit(kind, folder, values | change)), name


def test_ppo_trains_as_its_twin(begun):
    folder, it = begun
    assert agree(folder, "ppo", plain_ppo(folder, PPO, it.state))
    default = vars(train_ppo.TrainConfig()) | vars(PPOConfig()) | {"seed": 0}
    for name in PPO:
        twin = plain_ppo(folder, PPO | {name: default[name]}, it.state)
        assert not agree(folder, "ppo", twin), name
    assert it.modes == {(True, False), (False, False)}
    assert it.rows == [3, 6]  # there is a trace of 6
    start = "checked: before the first update the ratio is 1 and the KL to the reference is 0"
    assert start in it.printed and f"saved {folder}/ppo.pt" in it.printed
    ((trained, score, prompts),) = it.reports
    saved = load_checkpoint(folder / "ppo.pt", ["ppo"])[0].state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in trained.model.state_dict().items())
    assert [[x] for x in prompts] == ids_in(folder, "prompts_train", trained.tokenizer)
    assert score(torch.ones(2, 5).long(), torch.ones(2, 4).bool()).shape == (2,)
    for response in [
        x for line in read_log(folder / "ppo_traces.jsonl") for x in line["responses"]
    ]:
        columns = response["columns"]
        for i, rows in enumerate(response["likely"]):
            p = {text: chances for text, *chances in rows}[columns["action"][i]]
            logs = [math.log(x) for x in p]  # by the policy that sampled, the reference, and now
            assert logs == pytest.approx(
                [columns[x][i] for x in ("log pi", "log ref", "log pi now")]
            )


@pytest.mark.parametrize("values", [CRITIC, RLOO])
def test_so_do_other_networks_and_another_algorithm(begun, tmp_path, monkeypatch, values):
    folder, policy = begun[0], begun[0] / "ppo.pt" if values is RLOO else ""
    monkeypatch.syspath_prepend(folder)
    flags = "--models", folder, "--data", folder / "data", "--out", tmp_path, "--policy", policy
    script = "variations/rloo.py" if values is RLOO else "train_ppo.py"
    it = watched_run(script, values, *flags)
    twin = plain_ppo(folder, values, it.state, policy, rloo if values is RLOO else minippo)
    assert agree(tmp_path, "ppo", twin)


# --------------------------------------------------------------------------------------------------
# One implementation: what is edited in minippo.py is what all scripts compute.


def numbers(folder, root):
    """What the three scripts and sample.py compute in a few steps."""
    data, out, lines = write_data(folder / "data"), folder / "out", {}
    for kind in FLAGS:
        more = [] if kind == "ppo" else ["--steps", 2]
        assert stage(kind, data, out, *more, root=root)[::2] == (0, "")
        lines[kind] = metrics(out / f"{kind}.jsonl")
    lines["sample"] = run("sample.py", out / "ppo.pt", "Where?", "--trace", "--n", 3, root=root)
    return lines


EMBEDDING = "x = self.token_embedding(tokens) + self.position_embedding(positions)"
GATE = "        self.norm = nn.LayerNorm(config.channels)\n        std ="
EDITS = {  # of minippo.py, and the stages whose metrics they leave as they were
    "draw": ([("searchsorted(ends, u, right=True)", "argmax(logits, 1, True)")], ["sft", "rm"]),
    "noise": (
        [(EMBEDDING, f"{EMBEDDING} + 0.1 * self.training * torch.randn(self.config.channels)")],
        [],
    ),
    "gate": (
        [
            (EMBEDDING, f"{EMBEDDING} * (1 + self.gate)"),
            (
                GATE,
                GATE.replace("std =", "self.gate = nn.Parameter(torch.zeros(()))\n        std ="),
            ),
        ],
        [],
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_edited_in_minippo_is_computed_by_all_scripts(tmp_path, before, name):
    changes, unmoved = EDITS[name]
    (tmp_path / "root").mkdir()
    with edited(tmp_path / "root", *(("minippo.py", *change) for change in changes)) as root:
        after = numbers(tmp_path, root)
    assert [kind for kind in before if before[kind] == after[kind]] == unmoved
    if name == "gate":  # it starts at 0, so the first step is the same; then it is trained
        assert before["sft"][0]["loss"] == after["sft"][0]["loss"]
        assert torch.load(tmp_path / "out/sft.pt")["model"]["trunk.gate"] != 0


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return numbers(tmp_path_factory.mktemp("before"), ROOT)


# --------------------------------------------------------------------------------------------------
# What the twins do not reach


def test_the_default_data_are_made_once_and_no_other(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(data.zoo, "write_data", lambda folder: folders.append(write_data(folder)))
    for flags, status in (([], 0), (["--overwrite"], 0), (["--data", "other"], 2)):
        ended, printed, _ = run(f"{ROOT}/train_sft.py", *FLAGS["sft"], *flags, root=tmp_path)
        assert ended == status and ("making the default data" in printed) == (not flags)
        assert [str(x) for x in folders] == ["data/zoo"]


def test_bfloat16_is_a_property_of_the_model_and_changes_the_rounding_alone(tmp_path):
    torch.set_default_dtype(torch.float32)
    write_data(tmp_path / "data")
    first = {}
    for name, flags in (("full", []), ("half", ["--bfloat16"])):
        for kind, number in (("sft", "loss"), ("rm", "loss"), ("ppo", "entropy")):
            more = flags if kind == "sft" else []
            assert stage(kind, tmp_path / "data", tmp_path / name, *more)[0] == 0
            first[name, kind] = metrics(tmp_path / name / f"{kind}.jsonl")[0][number]
    for kind in FLAGS:
        full, half = first["full", kind], first["half", kind]
        assert full != half == pytest.approx(full, rel=0.02)
    assert (tmp_path / "full/report.html").exists()
    torch.set_default_dtype(torch.float64)


def test_a_validation_loss_that_is_no_number_ends_the_run(tmp_path):
    folder = write_data(tmp_path / "data")
    status, _, error = stage("sft", folder, tmp_path, "--lr", 1e300, "--steps", 1)
    assert status == 2 and "step 1: the validation loss is" in error


def test_a_reward_model_within_two_errors_of_chance_is_called_so(begun, tmp_path, monkeypatch):
    for right, doubted in ((0.49, True), (0.53, True), (0.539, True), (0.541, False)):
        figures = {"val_accuracy": right, "val_accuracy_se": 0.02}
        monkeypatch.setattr(room.Run, "load_best", lambda run, figures=figures: figures)
        flags = "--models", begun[0], "--steps", 1, "--overwrite"
        status, printed, error = stage("rm", begun[0] / "data", tmp_path, *flags)
        assert (status, error) == (0, "")
        assert ("barely better than chance" in printed) == doubted


def test_beta_follows_the_kl_by_a_fifth_at_most_in_10_000_responses():
    config = SimpleNamespace(kl_coef=0.5, batch_size=1000, kl_target=3.0)
    for kl, share in ((3.0, 0), (3.3, 0.1), (2.7, -0.1), (9.0, 0.2), (-5.0, -0.2)):
        assert train_ppo.adapted_kl_coef(kl, config) == pytest.approx(0.5 * (1 + share / 10))


# --------------------------------------------------------------------------------------------------
# sample.py


def test_the_sampler_prints_its_draws_and_the_numbers_of_ppo(begun, tmp_path, monkeypatch, capsys):
    folder, texts, said = begun[0], ("What does", "Where \x1b"), ""
    models = [load_checkpoint(folder / f"{kind}.pt", [kind]) for kind in ("ppo", "sft", "rm")]
    (policy, sft, reward_model), (tokenizer, *_), _ = zip(*models)
    torch.manual_seed(2)
    for text in texts:
        said, prompt = f"{said}{printable(text)}\n", tokenizer.encode(text)
        for _ in range(2):
            tokens, mask, logprobs, values = minippo.generate(policy, [prompt], 9, 0.7)
            answer = tokenizer.decode(tokens[0, 1:][mask[0]].tolist())
            said += f"  {printable(answer.strip())}\n"
    flags = "--n 2 --temperature 0.7 --max_new_tokens 9 --seed 2".split()
    words = "sample.py", folder / "ppo.pt", *flags
    assert run(*words, *texts) == (0, said, "")
    status, printed, error = run(*words, stdin=f"{texts[0]}\n\n{texts[1]}\r\n{'x' * 48}\n")
    assert (status, printed) == (2, said)
    assert "the prompt '': it has 0 tokens, not 1 to 47" in error
    assert "it has 48 tokens" in error and run(*words, stdin="x" * 47)[0] == 0
    assert run(*words, stdin=" What \r\n")[1].startswith(" What \n")

    # --trace: the numbers are those of trace(), table() and likely_tokens(), which have tests
    with torch.no_grad():
        (score,) = reward_model(tokens, row_lengths(mask))
        ref_logprobs, _, _ = minippo.evaluate_actions(sft, tokens, mask, 0.7)
    assert all(x.isprintable() for x in run(*words, "A", "--trace", "--n", 20)[1].split("\n"))
    _, said, _ = run(*words, *texts, "--trace")
    numbers, _, rest = said.rpartition("    score ")[2].partition("\n\n    the likeliest tokens")
    head, columns, *rows = numbers.splitlines()
    assert head == f"{score:.2f}  KL {(logprobs - ref_logprobs).sum():.2f}"
    assert columns.split() == "action log pi log ref KL value".split()
    last = logprobs[mask][-1], ref_logprobs[mask][-1], values[mask][-1]
    assert [rows[-1].split()[i] for i in (-4, -3, -1)] == [f"{x:z.2f}" for x in last]
    assert len(rows) == mask.sum()
    likely = likely_tokens((policy, sft), tokens[0], mask[0], 0.7, tokenizer.spell)
    shown = [re.findall(r"(\S+) -> (\S+)", row) for row in rest.splitlines()[1:]]
    assert shown == [[(f"{ref:.2f}", f"{p:.2f}") for _, p, ref in row] for row in likely]
    monkeypatch.syspath_prepend(folder)
    policy = shutil.copy(folder / "ppo.pt", tmp_path)
    more = "--trace", "--models", folder, "--reward", "taste:score"
    _, said, _ = run("sample.py", policy, *texts, *flags, *more)
    shutil.copytree(folder, tmp_path / "a/b"), shutil.copy(folder / "sft.pt", tmp_path / "a")
    assert run("sample.py", tmp_path / "a/b/ppo.pt", "What", "--trace")[0] == 0  # beside it first
    assert f"    score {len(answer) / 9:.2f}  KL" in said
    _, printed, error = run("sample.py", policy, " " * 1_000_000, "a" * 900)
    assert error.count("without a break") == 1 and error.count("\n") == 2
