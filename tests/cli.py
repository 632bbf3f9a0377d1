"""A script as a user runs it, and a tiny language: an answer repeats its prompt and adds a vowel,
in demonstrations any; of two answers, people prefer the earlier vowel."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

from data.rows import write_jsonl

ROOT = Path(__file__).parents[1]
PROMPTS = ["a", "ab", "a b", "é", "b a", "cab", "c", "b c b a"]
VOWELS = "eiou"


def write_data(folder, prompts=PROMPTS):
    rows = {"sft": [], "pref": [], "prompts": []}
    for x in prompts:
        rows["sft"] += [{"prompt": x, "completion": f" {x}{vowel}"} for vowel in VOWELS]
        for a, b in combinations(VOWELS, 2):
            rows["pref"].append({"prompt": x, "chosen": f" {x}{a}", "rejected": f" {x}{b}"})
        rows["prompts"].append({"prompt": x})
    for task in rows:
        for split in ("train", "val"):
            write_jsonl(folder / f"{task}_{split}.jsonl", rows[task])


def run(script, *flags):
    """In a terminal without Unicode -> status, errors."""
    words = [sys.executable, ROOT / script, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=env, capture_output=True, encoding="utf-8", timeout=120)
    return done.returncode, done.stderr
