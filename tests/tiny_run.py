"""The scripts on a few rows of the default task, and a script as a user starts it."""

import os
import random
import sys
from subprocess import PIPE, Popen

import train_ppo
import train_rm
import train_sft
from cli import ROOT
from data.rows import write_jsonl
from data.zoo import PROMPTS, demonstration, preference


def write_models(folder):
    """Writes data/ and out/ -> out/."""
    rng = random.Random(0)
    prompts = sorted(PROMPTS, key=len)
    rows = {
        "sft_train": [demonstration(rng, x) for x in 3 * prompts[:20]],
        "pref_train": [preference(rng, x) for x in 3 * prompts[:20]],
        "prompts_train": [{"prompt": x} for x in prompts[:20]],
        "prompts_val": [{"prompt": x} for x in prompts[12:24]],
    }
    for name in rows:
        write_jsonl(folder / "data" / f"{name}.jsonl", rows[name])
    common = {"data": folder / "data", "out": folder / "out", "device": "cpu", "batch_size": 16}
    size = {"layers": 1, "channels": 32, "context": 64}
    train_sft.train(train_sft.Config(**common, **size, epochs=200, steps=100))
    train_rm.train(train_rm.Config(**common, epochs=100, steps=30, answers=64))
    train_ppo.train(train_ppo.Config(**common, steps=2, max_new_tokens=16))
    return common["out"]


def start(*words):
    words = [sys.executable, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
    return Popen(words, cwd=ROOT, env=env, encoding="utf-8", **pipes)
