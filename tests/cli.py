"""The scripts as a user runs them, on small data. run() stays in this process, which saves the
import of torch; shell() starts one."""

import contextlib
import io
import json
import os
import random
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import zoo
from data.files import write_jsonl
from data.rows import KEYS, load_rows
from minippo import GPT, GPTConfig, RewardModel
from plumbing.models import fingerprint, save_checkpoint
from plumbing.settings import read_flags
from plumbing.text import Tokenizer
from tiny import stir

ROOT = Path(__file__).parents[1]


def shell(*words):
    words = [sys.executable, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    more = {"capture_output": True, "encoding": "utf-8", "timeout": 120}
    return subprocess.run(words, cwd=ROOT, env=env, **more)


def run(script, *args, stdin="", root=ROOT):
    """-> status, stdout, stderr."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, args)])
        patch.setattr(sys, "stdin", typed)
        patch.chdir(root)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                runpy.run_path(script, run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    return status, out.buffer.getvalue().decode(), err.getvalue()


def read(flags, *classes, **more):
    """-> the settings, as a script reads them; this seeds the random numbers too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x", *shlex.split(flags)])
        return read_flags("Text.", *classes, **more)


def metrics(path):
    """The lines of a log, without what the clock says."""
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


CPU = ["--device", "cpu"]
FIT = [*CPU, *"--epochs 1 --batch_size 16 --warmup 1".split()]
SMALL = "--layers 1 --heads 2 --channels 16 --context 48 --vocab_size 300".split()
PPO = [*CPU, *"--steps 3 --batch_size 8 --minibatches 2 --max_new_tokens 8 --warmup 1".split()]
FLAGS = {"sft": [*FIT, *SMALL], "rm": [*FIT, "--max_new_tokens", "8"], "ppo": [*PPO, "--no_report"]}


def write_rows(folder, **files):
    """write_rows(folder, pref_train=[("a", "b", "c"), ...]) writes pref_train.jsonl."""
    for name, rows in files.items():
        keys = KEYS[name.split("_")[0]]
        write_jsonl(folder / f"{name}.jsonl", [dict(zip(keys, row, strict=True)) for row in rows])


def write_data(folder):
    """Questions that the judge of the default data knows, with answers of its crowd."""
    rng = random.Random(0)
    prompts = rng.sample(sorted(x for x in zoo.PROMPTS if len(x) < 30), 24)
    for split, part in (("train", prompts[:20]), ("val", prompts[14:])):
        rows = [(x, *rng.sample(sorted(zoo.crowd(x), key=len)[:30], 2)) for x in part]
        for task, keys in KEYS.items():
            write_rows(folder, **{f"{task}_{split}": [row[: len(keys)] for row in rows]})
    return folder


def stage(kind, data, out, *flags, **more):
    """run() for a stage on these data."""
    words = "--data", data, "--out", out, *FLAGS[kind], *flags
    return run(f"train_{kind}.py", *words, **more)


def write_models(folder):
    """data/, sft.pt and rm.pt for stage 3, and a ppo.pt. Half of the responses end."""
    write_data(folder / "data")
    torch.manual_seed(1)
    rows = load_rows(folder / "data" / "prompts_train.jsonl", "prompts")
    tokenizer = Tokenizer.train((x for (x,) in rows), 300)
    sft = stir(GPT(GPTConfig(tokenizer.vocab_size, 48, layers=2, heads=2, channels=16)), 0.1)
    sft.trunk.norm.bias.data[0], sft.lm_head.weight.data[tokenizer.eos, 0] = 5.0, 0.6
    model = stir(RewardModel(sft), 0.1)
    model.mean.fill_(0.3), model.std.fill_(0.4)
    save_checkpoint(folder / "sft.pt", "sft", sft, tokenizer, val_loss=5.0)
    metadata = {"val_loss": 0.6, "val_accuracy": 0.7, "sft": fingerprint(folder / "sft.pt")}
    save_checkpoint(folder / "rm.pt", "rm", model, tokenizer, **metadata)
    save_checkpoint(folder / "ppo.pt", "ppo", stir(sft, 0.1), tokenizer, sft=metadata["sft"])
    return folder
