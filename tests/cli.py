"""The scripts as a user runs them, and a small data folder for them.

run() executes a script inside this process, which saves importing torch each time; shell() starts a
process. edited() is a copy of the project in which a line has been changed.
"""

import contextlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
PROJECT = ("minippo", "train_sft", "train_rm", "train_ppo", "sample", "plumbing", "data")


def command(script, *args):
    return [sys.executable, script, *map(str, args)]


def shell(script, *args):
    return subprocess.run(
        command(script, *args),
        cwd=ROOT,
        env=ONE_THREAD,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


@contextlib.contextmanager
def start(script, *args):
    """A process that is at work; at the end it is gone."""
    process = subprocess.Popen(
        command(script, *args), cwd=ROOT, env=ONE_THREAD, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def wait_for(log, lines):
    """Until the log has so many lines."""
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < deadline, f"{log} does not grow"
        time.sleep(0.005)


def run(script, *args, stdin="", root=ROOT):
    """-> exit status, stdout, stderr. Whatever else it raises, a user would see as a traceback."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err, status = io.StringIO(), 0
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", [script, *map(str, args)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        patch.chdir(root)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return status, out.buffer.getvalue().decode(), err.getvalue()


@contextlib.contextmanager
def edited(folder, *changes):
    """For its length, `import minippo` and run(..., root=folder) mean a copy of the project in
    `folder`, in which (file, text, what stands there instead) have been changed."""
    for name in PROJECT:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("zoo", "*.pyc"))
        else:
            shutil.copy(f"{path}.py", folder)
    for file, old, new in changes:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} should stand in {file} once"
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    modules = (*PROJECT, "tiny")
    before = {name: x for name, x in sys.modules.items() if name.split(".")[0] in modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for name in before:
            del sys.modules[name]
        try:
            yield folder
        finally:
            for name in [x for x in sys.modules if x.split(".")[0] in modules]:
                del sys.modules[name]
            sys.modules.update(before)


def metrics(path):
    """The lines of a log, without what the clock says."""
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    clock = ("tokens_per_second", "seconds")
    return [{name: x for name, x in row.items() if name not in clock} for row in rows]


def same_weights(a, b):
    a, b = (torch.load(path, weights_only=True)["model"] for path in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# A small data folder, and flags for small models

CPU = ["--device", "cpu"]
SMALL = "--layers 1 --heads 2 --channels 16 --context 48 --vocab_size 300 --dropout 0.1".split()
SFT = [*CPU, *SMALL, *"--epochs 1 --batch_size 16 --warmup 1".split()]
RM = [*CPU, *"--epochs 1 --batch_size 16 --warmup 1 --answers 64 --max_new_tokens 8".split()]
PPO = [*CPU, *"--steps 3 --batch_size 8 --minibatches 2 --max_new_tokens 8 --warmup 1".split()]
FLAGS = {"sft": SFT, "rm": RM, "ppo": [*PPO, "--no_report"]}


def write_rows(folder, **files):
    """write_rows(folder, pref_train=[("a", "b", "c"), ...]) writes pref_train.jsonl."""
    from plumbing.rows import KEYS

    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        keys = KEYS[name.split("_")[0]]
        lines = [json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_data(folder, judge=False):
    """Questions of the default data with answers of its crowd; judge: with ceilings.json too, so
    that the report grades them."""
    from data import zoo

    rng = random.Random(0)
    short = [x for x in sorted(zoo.PROMPTS) if len(x) < 30]
    prompts, texts = rng.sample(short, 24), {}
    for split, some in (("train", prompts[:20]), ("val", prompts[14:])):
        crowd = {x: zoo.crowd(x) for x in some}
        asked = {x: rng.sample(sorted(crowd[x], key=len)[:30], 2) for x in some}
        texts[f"sft_{split}"] = [(x, y) for x in some for y in asked[x][:1]]
        texts[f"pref_{split}"] = [(x, *ys) for x, ys in asked.items()]
        texts[f"prompts_{split}"] = [(x,) for x in some]
    write_rows(folder, **texts)
    if judge:
        nats = {"val_nats": 50.0, "label_accuracy": 0.9, "label_loss": 0.2, "best_judge": 3.0}
        (folder / "ceilings.json").write_text(json.dumps(nats))
    return folder


def stage(kind, data, out, *flags, **more):
    """run() for a stage on some data."""
    script = f"train_{kind}.py"
    return run(script, "--data", data, "--out", out, *FLAGS[kind], *flags, **more)


def write_models(folder):
    """sft.pt and rm.pt, hardly trained, for stage 3. About half of the responses end."""
    from minippo import GPT, GPTConfig, RewardModel
    from plumbing.checkpoints import save_checkpoint
    from plumbing.tokenizer import Tokenizer
    from tiny import stir

    torch.manual_seed(1)
    texts = [json.loads(x)["prompt"] for x in open(folder / "data" / "prompts_train.jsonl")]
    tokenizer = Tokenizer.train(texts, 300)
    shape = GPTConfig(tokenizer.vocab_size, 48, layers=2, heads=2, channels=16, dropout=0.1)
    sft = stir(GPT(shape), 0.1)
    with torch.no_grad():
        sft.trunk.norm.bias[0], sft.lm_head.weight[tokenizer.eos, 0] = 5.0, 0.6
    model = stir(RewardModel(sft), 0.1)
    model.mean.fill_(0.3), model.std.fill_(0.4)
    nats = {"val_loss": 5.0, "val_loss_se": 0.1, "val_tokens": 100}
    save_checkpoint(folder / "sft.pt", "sft", sft, tokenizer, **nats)
    right = {"val_loss": 0.6, "val_accuracy": 0.7, "val_accuracy_se": 0.01, "max_new_tokens": 8}
    save_checkpoint(folder / "rm.pt", "rm", model, tokenizer, **right, sft=nats)
    return folder
