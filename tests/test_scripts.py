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
from torch.nn.utils.rnn import pad_sequence

from data.files import UserError
import data.zoo
import minippo
import plumbing.hf
import plumbing.report
import sample
import train_rm
import train_sft
from cli import CPU, FLAGS, ROOT, metrics, run, stage, write_data, write_models
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, row_lengths
from plumbing import training
from plumbing.checkpoints import fingerprint, load_checkpoint
from plumbing.errors import printable
from plumbing.models import add_critic, load_algorithm, load_models, text_reward
from plumbing.packing import PackedTrunk
from plumbing.tokenizer import Tokenizer
from plumbing.training import FitConfig
from plumbing.watch import doubts_about
from tiny import EOS, tiny_gpt, tiny_reward_model
from train_ppo import StageConfig

# --------------------------------------------------------------------------------------------------
# Twins: the same stages in plain code. Stages 1 and 2 go row by row; nothing is packed, or cut into
# pieces but for the draws of a rollout. Out come the lines of the log, then the contents of the
# model's file. No flag has its default, and each must be seen to act.


def values_of(text):
    words = text.split()
    return dict(zip(words[::2], map(json.loads, words[1::2])))


SFT = values_of(
    "steps 99 epochs 5 batch_size 8 micro_batch 3 lr 0.2 warmup 4 weight_decay 0.2 "
    "max_grad_norm 0.5 seed 3"
)
RM = values_of(
    "steps 11 epochs 4 batch_size 6 micro_batch 2 lr 0.02 warmup 11 weight_decay 3.0 "
    "max_grad_norm 0.7 seed 4 answers 12 cap_quantile 0.8 max_new_tokens 6"
)
PPO = values_of(
    "steps 4 batch_size 8 minibatches 3 epochs 2 micro_batch 3 max_new_tokens 6 temperature 0.8 "
    "gamma 0.9 lam 0.8 whiten false kl_coef 0.3 length_penalty 0.05 missing_eos_penalty 0.5 "
    "clip_eps 0.02 value_clip 0.03 vf_coef 0.2 entropy_coef 0.02 kl_loss_coef 0.5 "
    "max_grad_norm 0.3 lr 0.02 warmup 2 head_lr_factor 5.0 adam_eps 0.01 kl_target 0.01 "
    "kl_horizon 20.0 ref_update_every 2 seed 10"
)
CRITIC = {name: x for name, x in PPO.items() if name not in ("head_lr_factor", "micro_batch")}
CRITIC |= {"separate_critic": True, "clip_eps": math.inf, "ref_update_every": 3}
RLOO = values_of(
    'algorithm "rloo" k 2 steps 2 batch_size 6 minibatches 1 lr 0.01 max_new_tokens 5 '
    'reward "taste:score" kl_horizon 50'
)
TASTE = "def score(prompts, responses):\n    return [len(x) / 9 for x in responses]\n"
VALIDATED_AT = {"sft": [2, 3, 4, 6, 7, 8, 10, 11, 12, 13], "rm": [*range(2, 12)]}


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
    groups = [{"params": [*p], "peak": lr, "weight_decay": decay} for p, lr, decay in groups]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=eps)


def set_plain_lr(optimizer, step, steps, warmup):
    share = (step + 1) / (warmup + 1) if step < warmup else (steps - step) / (steps - warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return optimizer.param_groups[0]["lr"]


def plain_batch(rows, step, size, seed):
    passes = [np.random.default_rng([seed, i]).permutation(len(rows)) for i in range(9)]
    return [rows[i] for i in np.concatenate(passes)[step * size : (step + 1) * size]]


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
    figures = {"val_loss": loss, "val_accuracy": right, "val_pairs": len(rows)}
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
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) == x] for x in (True, False))
    optimizer = plain_adamw((matrices, it.lr, it.weight_decay), (rest, it.lr, 0.0))
    steps, lowest = min(it.steps, math.ceil(it.epochs * len(rows) / it.batch_size)), math.inf
    for step in range(steps):
        lr = set_plain_lr(optimizer, step, steps, it.warmup)
        optimizer.zero_grad()
        loss, row, _ = plain_loss(kind, model, plain_batch(rows, step, it.batch_size, it.seed))
        loss.backward()
        norm = minippo.gradient_step(optimizer, it.max_grad_norm)
        if step + 1 in VALIDATED_AT[kind]:
            figures = plain_loss(kind, model, val[::4])[2]  # at most 3 of 10
            row |= figures
            if figures["val_loss"] < lowest:
                lowest, best = figures["val_loss"], copy.deepcopy(model.state_dict())
                best_step = step + 1
        yield row | {"step": step + 1, "lr": lr, "grad_norm": norm}
    model.load_state_dict(best)
    facts = plain_loss(kind, model, val)[2]
    if kind == "rm":
        prompts, scores = ids_in(folder, "prompts_train", tokenizer)[::2], []  # at most 12 of 20
        asked, size = [x for (x,) in (prompts + prompts)[: it.answers]], it.micro_batch or 256
        for i in range(0, it.answers, size):
            tokens, mask, _, _ = minippo.generate(sft, asked[i : i + size], it.max_new_tokens)
            scores.append(model(tokens, row_lengths(mask)))
        mean, std = torch.cat(scores).mean(), torch.cat(scores).std()
        cap = (torch.cat(scores).quantile(it.cap_quantile) - mean) / std
        facts |= {"mean": mean, "std": std, "cap": cap}
        facts |= {"max_new_tokens": it.max_new_tokens, "sft": fingerprint(sft)}
    yield model.state_dict() | facts | {"best_step": best_step}


def plain_ppo(folder, values, random_state, policy=""):
    """random_state: before the first rollout."""
    it = vars(StageConfig()) | {"k": 1, "seed": 0, "micro_batch": 0} | values
    it, algorithm = SimpleNamespace(**it), load_algorithm(it["algorithm"])
    own = {name: x for name, x in values.items() if hasattr(algorithm.Settings, name)}
    config = algorithm.Settings(**own)
    sft, tokenizer, _ = load_checkpoint(folder / "sft.pt", ["sft"])
    reward_model, _, _ = load_checkpoint(folder / "rm.pt", ["rm"])
    ref, made_from = minippo.frozen_copy(sft), fingerprint(sft)
    policy = load_checkpoint(policy, ["ppo"])[0] if policy else sft

    def score(tokens, mask):
        return reward_model(tokens, row_lengths(mask))

    if it.reward:
        exec(TASTE, taste := {})
        score = text_reward(taste["score"], tokenizer, "")
    if it.separate_critic:
        add_critic(policy, reward_model)
        it.head_lr_factor = 1.0
    prompts = [x for (x,) in ids_in(folder, "prompts_train", tokenizer)]
    head = {*policy.value_head.parameters()}
    groups = ({*policy.parameters()} - head, it.lr, 0.0), (head, it.head_lr_factor * it.lr, 0.0)
    optimizer = plain_adamw(*groups, eps=it.adam_eps)
    torch.set_rng_state(random_state)
    for step in range(it.steps):
        lr = set_plain_lr(optimizer, step, it.steps, it.warmup)
        asked = plain_batch(prompts, step, it.batch_size // it.k, it.seed)
        asked, size = [x for x in asked for _ in range(it.k)], it.micro_batch or it.batch_size
        pieces = [
            minippo.rollout(policy, ref, score, asked[i : i + size], config)
            for i in range(0, len(asked), size)
        ]
        batch = {
            name: pad_sequence([x.view(-1) for y in pieces for x in y[name]], True).squeeze(-1)
            for name in pieces[0]
        }
        batch |= algorithm.compute_advantages(batch, config)
        stats = []
        for _ in range(config.epochs):
            for rows in torch.randperm(len(asked)).tensor_split(config.minibatches):
                optimizer.zero_grad()
                part = {name: x[rows] for name, x in batch.items()}
                loss, more = algorithm.loss(policy, part, config)
                loss.backward()
                norm = minippo.gradient_step(optimizer, config.max_grad_norm)
                stats.append(more | {"grad_norm": norm})
        row = {name: sum(x[name] for x in stats) / len(stats) for name in stats[0]}
        if it.micro_batch:
            del row["ratio_max"]  # depends on the pieces
        row |= minippo.batch_metrics(batch, config) | {"step": step + 1, "lr": lr}
        yield row
        error = min(max(row["kl"] / it.kl_target - 1, -0.2), 0.2)
        config.kl_coef *= 1 + error * min(1, it.batch_size / it.kl_horizon)
        if it.ref_update_every and (step + 1) % it.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)
    yield policy.state_dict() | {"sft": made_from}


def agree(folder, kind, made):
    """Do the log and the model's file hold what the twin has made?"""
    contents = torch.load(folder / f"{kind}.pt")
    rows = [*metrics(folder / f"{kind}.jsonl"), contents["model"] | contents["facts"]]
    return all(same(row, plain) for row, plain in zip_longest(rows, made, fillvalue={}))


def same(row, plain):
    def close(a, b):
        if isinstance(a, str):
            return a == b
        a, b = (torch.as_tensor(x).double() for x in (a, b))
        return torch.allclose(a, b, rtol=1e-6, atol=1e-9)

    if (row.keys() ^ plain.keys()) - {"judge", "ratio_max", "best_step"}:
        return False
    return all(close(row[name], plain[name]) for name in row.keys() & plain.keys())


def watched_run(kind, values, *given):
    """-> what it said, and what was seen of it."""
    calls, states, ends = [], [], []
    forward, rollout = PackedTrunk.forward, minippo.rollout

    def watched(trunk, tokens, *rest, **more):
        mode = torch.is_grad_enabled(), trunk.training, trunk.grad_checkpoint
        calls.append((mode, len(tokens), trunk))
        return forward(trunk, tokens, *rest, **more)

    def watched_rollout(*args):
        states.append(torch.get_rng_state())
        return rollout(*args)

    named = {"True": "--{}", "False": "--no_{}"}
    flags = [named.get(str(x), "--{} {}").format(name, x) for name, x in values.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedTrunk, "forward", watched)
        patch.setattr(minippo, "rollout", watched_rollout)
        patch.setattr(plumbing.report, "finish_run", lambda *args: ends.append(args))
        flags = [*CPU, "--grad_checkpoint", *" ".join(flags).split(), *given]
        status, said, error = run(f"train_{kind}.py", *flags)
    assert (status, error) == (0, "")
    it = SimpleNamespace(said=said.splitlines(), ends=ends, state=states and states[0])
    it.modes, it.trunks = {x[0] for x in calls}, len({x[2] for x in calls})
    it.rows = [max(x[1] for x in calls if x[0][0] == gradients) for gradients in (True, False)]
    return it


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """-> a folder with data and what stages 1 and 2 made of it; how they went."""
    folder = tmp_path_factory.mktemp("fitted")
    write_data(folder / "data")
    given = ["--data", folder / "data", "--out", folder]
    shape = "--layers 1 --heads 2 --channels 16 --context 44 --vocab_size 290".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "VALIDATED", 3)
        patch.setattr(PPOConfig, "max_new_tokens", 4)
        sft = watched_run("sft", SFT, *given, *shape)
        return folder, {"sft": sft, "rm": watched_run("rm", RM, *given)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """-> a folder with data, models for stage 3 and what PPO made of them; how it went."""
    folder = tmp_path_factory.mktemp("begun")
    write_data(folder / "data")
    write_models(folder)
    (folder / "taste.py").write_text(TASTE)
    return folder, watched_run("ppo", PPO, "--data", folder / "data", "--out", folder)


@pytest.mark.parametrize("kind, values, rows", [("sft", SFT, 3), ("rm", RM, 2 * 2)])
def test_sft_and_reward_model_are_trained_as_their_twins(fitted, kind, values, rows):
    folder, it = fitted[0], fitted[1][kind]
    *log, end = plain_fit(kind, folder, values)
    assert agree(folder, kind, [*log, end])
    best = end["best_step"]
    assert best < len(log) and not (folder / f"{kind}_best.pt").exists()
    # with gradients, dropout, activations computed twice: in training, in validation
    assert it.modes == {(True, True, True), (False, False, True)} and it.rows == [rows, rows]
    said = [
        "training a GPT of 0.01 M parameters on cpu: 20 rows",
        f"the validation loss was lowest at step {best} of {len(log)}: saved is that",
        f"saved {folder}/sft.pt: validation loss {end['val_loss']:.4f} nats/token",
    ]
    if kind == "rm":
        right, error = 100 * end["val_accuracy"], 100 * end["val_accuracy_se"]
        said[0] = "training a reward model on cpu: 20 pairs"
        said[2] = f"saved {folder}/rm.pt: {right:.1f} % ± {error:.1f} of the validation pairs right"
        said += doubts_about(end)
    assert [line for line in it.said if line in said] == said
    shown = [x for x in ("loss", "accuracy", "val_loss", "val_accuracy") if x in log[1]]
    lines = "\n".join(it.said)
    assert "  ".join(f"{x} {log[1][x]:.3g}" for x in shown) in lines
    assert ("of the completions exceed 4 tokens" in lines) == (kind == "sft")
    other = vars(FitConfig()) | {"steps": 7, "epochs": 1, "seed": 0, "answers": 9}
    other |= {"cap_quantile": 0.9, "max_new_tokens": 48}
    for name in values.keys() - {"sft": {"micro_batch"}, "rm": {"epochs"}}[kind]:
        twin = plain_fit(kind, folder, values | {name: other[name]})
        assert not agree(folder, kind, twin), name


def test_ppo_trains_as_its_twin(begun):
    folder, it = begun
    assert agree(folder, "ppo", plain_ppo(folder, PPO, it.state))
    default = vars(StageConfig()) | vars(PPOConfig()) | {"seed": 0}
    for name in PPO:
        twin = plain_ppo(folder, PPO | {name: default[name]}, it.state)
        assert not agree(folder, "ppo", twin), name
    assert it.modes == {(True, False, True), (False, False, True)}
    assert it.rows == [3, 6]  # there is a trace of 6
    assert it.trunks == 4  # policy, reference, one that moves, reward model
    drawn = re.findall(r"\bppo\.(\w+)", (ROOT / "plumbing" / "page.html").read_text())
    assert {*drawn} - {"judge"} <= metrics(folder / "ppo.jsonl")[0].keys()
    start = "checked: before the first update the ratio is 1 and the KL to the reference is 0"
    assert {start, "training on cpu: 20 prompts", f"saved {folder}/ppo.pt"} <= {*it.said}


def test_the_report_is_about_a_reference_that_did_not_move(begun):
    folder, it = begun
    ((models, *prompts, _, _, _),) = it.ends
    for model, kind in ((models.policy, "ppo"), (models.ref, "sft")):
        assert fingerprint(model) == fingerprint(load_checkpoint(folder / f"{kind}.pt", [kind])[0])
    for ids, split in zip(prompts, ("train", "val"), strict=True):
        assert [[x] for x in ids] == ids_in(folder, f"prompts_{split}", models.tokenizer)


@pytest.mark.parametrize("values, trunks", [(CRITIC, 5), (RLOO, 2)])
def test_so_do_other_networks_and_another_algorithm(begun, tmp_path, monkeypatch, values, trunks):
    folder, policy = begun[0], begun[0] / "ppo.pt" if values is RLOO else ""
    monkeypatch.syspath_prepend(folder)
    flags = "--models", folder, "--data", folder / "data", "--out", tmp_path, "--policy", policy
    it = watched_run("ppo", values, *flags)
    assert agree(tmp_path, "ppo", plain_ppo(folder, values, it.state, policy))
    assert it.trunks == trunks
    assert ("scale of the scores" in str(it.said)) == ("reward" not in values)


# --------------------------------------------------------------------------------------------------
# Flags: the default of each, and its range

RUN = """data=data/zoo out=out dtype=float32 grad_checkpoint=False seed=0[0,2147483648] resume=False
    overwrite=False tensorboard=False """
GPTS = """vocab_size=1024[257,1e6] context=128[8,inf] layers=4[1,inf] heads=4[1,inf]
    channels=96[1,inf] dropout=0.0[0,0.9] init= """
FIT = """batch_size=64[1,inf] micro_batch=0[0,inf] warmup=20[0,inf] weight_decay=0.0[0,inf]
    max_grad_norm=1.0[1e-6,inf] """
ANSWERS = "answers=2048[2,inf] cap_quantile=0.99[0.5,1] max_new_tokens=48[1,inf] "
STAGE = """max_new_tokens=48[1,inf] temperature=1.0[0.01,inf] length_penalty=0.0[0,1e6]
    missing_eos_penalty=1.0[0,1e6] kl_coef=0.1[0,1e6] epochs=1[1,inf] minibatches=4[1,inf]
    micro_batch=0[0,inf] max_grad_norm=1.0[1e-6,inf] clip_eps=0.2[0,inf] algorithm=ppo
    steps=450[1,inf] batch_size=128[1,inf] lr=0.0008[0,inf] warmup=5[0,inf] adam_eps=0.0001[1e-12,1]
    kl_target=3.0[1e-6,inf] kl_horizon=inf[1,inf] ref_update_every=0[0,inf] policy= reward=
    no_report=False """
NOT_RLOO = """gamma=1.0[0,1] lam=1.0[0,1] no_whiten=True value_clip=0.2[0,inf] vf_coef=0.1[0,inf]
    entropy_coef=0.0[0,inf] kl_loss_coef=0.0[0,1e6] head_lr_factor=30.0[0,inf] separate_critic=False """
SAMPLE = """n=1[1,inf] temperature=1.0[0.01,inf] max_new_tokens=64[1,inf] seed=0[0,2147483648]
    trace=False kl_coef=0.1[0,1e6] models= reward="""


@pytest.mark.parametrize(
    "command, flags",
    [
        ("train_sft.py", RUN + FIT + GPTS + "steps=1300[1,inf] epochs=12[1,inf] lr=0.003[0,inf]"),
        ("train_rm.py", RUN + FIT + ANSWERS + "steps=1950[1,inf] epochs=2[1,inf] lr=0.001[0,inf]"),
        ("train_ppo.py", RUN + STAGE + NOT_RLOO + "models="),
        ("train_ppo.py --algorithm rloo", RUN + STAGE + "k=4[2,inf] models="),
        ("sample.py", SAMPLE),
    ],
)
def test_the_flags_have_these_defaults_and_ranges(monkeypatch, command, flags):
    assert training.VALIDATED == 1000
    monkeypatch.setenv("COLUMNS", "500")
    status, text, _ = run(*command.split(), "-h")
    assert status == 0 and ("(out/rloo)" in text) == ("rloo" in command)
    text = re.sub(r"\n {24}", " ", text).replace("out/rloo", "out")
    found = re.findall(r"^  --(\w+).*?(?: \[(\S+), (\S+)\])? \((\S*)\)$", text, re.M)
    found = {f"{name}={x}" + f"[{low},{high}]" * bool(low) for name, low, high, x in found}
    assert found - {"device=cpu", "device=cuda"} == {*flags.split()}


# --------------------------------------------------------------------------------------------------
# What the twins do not reach


def test_the_default_data_are_made_once_and_no_other(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(data.zoo, "write_data", lambda folder: made.append(write_data(folder)))
    for flags, status in (([], 0), (["--overwrite"], 0), (["--data", "other"], 2)):
        found, said, _ = run(f"{ROOT}/train_sft.py", *FLAGS["sft"], *flags, root=tmp_path)
        assert found == status and ("making the default data" in said) == (not flags)
        assert [str(x) for x in made] == ["data/zoo"]


def test_bfloat16_changes_the_rounding_alone(tmp_path):
    torch.set_default_dtype(torch.float32)
    write_data(tmp_path / "data")
    for kind, number in (("sft", "loss"), ("rm", "loss"), ("ppo", "entropy")):
        found = []
        for dtype in ("float32", "bfloat16"):
            given = tmp_path / "data", tmp_path, "--overwrite", "--dtype", dtype
            assert stage(kind, *given)[0] == 0
            found.append(metrics(tmp_path / f"{kind}.jsonl")[0][number])
        assert found[0] != found[1] == pytest.approx(found[0], rel=0.02)
    assert (tmp_path / "report.html").exists() and not (tmp_path / "report.json").exists()
    torch.set_default_dtype(torch.float64)


def test_a_step_is_logged_with_its_tokens_unless_the_validation_loss_is_infinite(tmp_path):
    seen, run = [], SimpleNamespace(out=tmp_path)
    state = SimpleNamespace(run=run, kind="sft", step=0, count=20, values={})
    state.end_step = lambda *given: seen.append(given[1])
    fit = training.Fit(state, None, None, lambda *_: {"val_loss": math.inf}, [1], 0)
    fit.end_step({}, [([1, 2], [3]), ([4], [5, 6])])
    state.step = 1  # the next one is validated
    with pytest.raises(FloatingPointError, match="step 2: the validation loss is inf"):
        fit.end_step({}, [])
    assert seen == [6]


def test_a_validation_loss_that_is_no_number_ends_the_run_and_a_large_one_is_said(tmp_path):
    folder = write_data(tmp_path / "data")
    status, _, error = stage("sft", folder, tmp_path, "--lr", 1e300, "--steps", 1)
    assert status == 2 and "step 1: the validation loss is" in error
    said = stage("sft", folder, tmp_path, "--lr", 30, "--steps", 2, "--overwrite")[1]
    assert "warning: at no time was the model better than guessing (loss 5." in said


@pytest.mark.parametrize(
    "kind, script, make", [("sft", train_sft, tiny_gpt), ("rm", train_rm, tiny_reward_model)]
)
def test_a_validation_is_over_all_rows(kind, script, make):
    rows = [torch.randint(EOS, (2 + (kind == "rm"), 3 + i % 3)).tolist() for i in range(70)]
    model = make(dropout=0.5).train()
    figures = script.validate(model, rows, 9)
    assert model.training and same(plain_loss(kind, model.eval(), rows)[2], figures)


def test_beta_follows_the_kl_by_a_fifth_at_most_in_a_horizon():
    for kl, share in ((3.0, 0), (3.3, 0.1), (2.7, -0.1), (9.0, 0.2), (-5.0, -0.2)):
        for horizon, part in ((100.0, 0.1), (1.0, 1.0), (math.inf, 0)):
            beta = training.adapt_kl_coef(
                0.5, kl, StageConfig(batch_size=10, kl_target=3.0, kl_horizon=horizon)
            )
            assert beta == pytest.approx(0.5 * (1 + share * part))


def test_equal_scores_are_not_divided_by_0():
    model, config = tiny_reward_model(), train_rm.AnswerConfig(answers=4, max_new_tokens=2)
    torch.nn.init.zeros_(model.score_head.weight)
    train_rm.normalise(model, tiny_gpt(), [[1]], config, 0)
    assert model.std == 1e-6 and model.cap == 0


def test_completions_longer_than_ppo_writes_are_warned_of(capsys):
    for long, says in ((1, ""), (2, "max_new_tokens 60 would hold 95 %")):
        rows = [([1], [2] * 48)] * (20 - long) + [([1], [2] * 60)] * long
        training.warn_of_long_answers(rows)
        said = capsys.readouterr().out
        assert says in said and ("warning" in said) == bool(says)


def test_a_first_model_may_be_a_gpt2(monkeypatch):
    monkeypatch.setattr(plumbing.hf, "read_gpt2", lambda *given: given)
    assert training.first_model([], GPTConfig(dropout=0.1), "gpt2") == ("gpt2", 0.1)
    shape = GPTConfig(300, 16, layers=1, heads=2, channels=8, dropout=0.1)
    assert training.first_model([("a", "b")], shape, "")[0].config.dropout == 0.1
    with pytest.raises(UserError, match="--init brings its own size and vocabulary"):
        training.first_model([], GPTConfig(context=64), "gpt2")


# --------------------------------------------------------------------------------------------------
# sample.py


def test_the_sampler_prints_its_draws_and_the_numbers_of_ppo(begun, tmp_path, monkeypatch, capsys):
    folder, texts, said = begun[0], ("What does", "Where \x1b"), ""
    found = [load_checkpoint(folder / f"{kind}.pt", [kind]) for kind in ("ppo", "sft", "rm")]
    (policy, sft, reward_model), (tokenizer, *_), _ = zip(*found)
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
    status, found, error = run(*words, stdin=f"{texts[0]}\n\n{texts[1]}\r\n{'x' * 48}\n")
    assert (status, found) == (2, said)
    assert "'' has 0 tokens, not 1 to 47" in error
    assert "has 48 tokens" in error and run(*words, stdin="x" * 47)[0] == 0
    assert run(*words, stdin=None) == (0, "", "")

    with torch.no_grad():  # the response did not end
        scores = reward_model(tokens, row_lengths(mask)) - 1.0
        ref_logprobs, _, _ = minippo.evaluate_actions(sft, tokens, mask, 0.7)
    batch = {"tokens": tokens, "mask": mask, "scores": scores, "old_logprobs": logprobs}
    batch |= {"old_values": values, "ref_logprobs": ref_logprobs}
    batch |= minippo.compute_advantages(batch, PPOConfig(kl_coef=0.3))
    columns = minippo.trace(batch, 0, lambda i: printable(tokenizer.spell(i)).replace(" ", "·"))
    lines = [f"score {scores[0]:.2f}  KL {sum(columns['KL']):.2f}  beta 0.3"]
    _, said, _ = run(*words, *texts, "--trace", "--kl_coef", 0.3)
    assert said.endswith("".join(f"    {x}\n" for x in lines + minippo.table(columns)))

    monkeypatch.syspath_prepend(folder)
    policy = shutil.copy(folder / "ppo.pt", tmp_path)
    more = "--trace", "--models", folder, "--reward", "taste:score"
    _, said, _ = run("sample.py", policy, *texts, *flags, *more)
    assert f"    score {len(answer) / 9 - 1:.2f}  KL" in said
    tokens[0, -1] = tokenizer.encode("\n")[0]
    models = load_models(folder, "cpu")
    sample.print_trace((tokens, mask, logprobs, values), models, sample.SampleConfig())
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == r"\n"
