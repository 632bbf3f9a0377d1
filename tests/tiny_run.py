"""Programs as a user starts them, small models of the default task, and a tiny language: an answer
repeats its prompt and adds a vowel, in demonstrations any; of two answers, people prefer the
earlier vowel."""

import os
import random
import sys
from itertools import combinations
from pathlib import Path
from subprocess import PIPE, Popen

import train_ppo
import train_rm
import train_sft
from data import zoo
from data.rows import write_jsonl

ROOT = Path(__file__).parents[1]
PROMPTS = ["a", "ab", "a b", "é", "b a", "cab", "c", "b c b a"]
VOWELS = "eiou"


def start(script, *flags):
    words = [sys.executable, str(ROOT / script), *map(str, flags)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, encoding="utf-8")


def write_data(folder, prompts=PROMPTS):
    """The tiny language."""
    rows = {"sft": [], "pref": []}
    for x in prompts:
        rows["sft"] += [{"prompt": x, "completion": f" {x}{vowel}"} for vowel in VOWELS]
        for a, b in combinations(VOWELS, 2):
            rows["pref"].append({"prompt": x, "chosen": f" {x}{a}", "rejected": f" {x}{b}"})
    for task in rows:
        for split in ("train", "val"):
            part = rows[task] if split == "train" else rows[task][len(rows[task]) // 2 :]
            write_jsonl(folder / f"{task}_{split}.jsonl", part)


def write_models(folder):
    """The default task: writes data/ and out/ -> out/."""
    rng = random.Random(0)
    prompts = sorted(zoo.PROMPTS, key=len)
    rows = {
        "sft_train": [zoo.demonstration(rng, x) for x in 3 * prompts[:20]],
        "pref_train": [zoo.preference(rng, x) for x in 3 * prompts[:20]],
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
