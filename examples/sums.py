"""Your own reward, one that cannot be gamed: is the sum right?

    python -m examples.sums
    python train_sft.py --data data/sums --out out/sums --vocab_size 270 --steps 1500 --lr 1e-3
    python train_ppo.py --data data/sums --out out/sums --reward examples.sums:score
    python sample.py out/sums/ppo.pt "36 + 31 ="

The first command writes demonstrations of sums of two numbers below 100. Two in five are right; the
others are off by 1, 2, 9, 10 or 11, up or down (and written without a sign). SFT imitates them,
errors included. The reward is 1 for the right sum and 0 for any other text, so there is no reward
model to train, and nothing to hack. One addition in ten is in the validation files only, so the
report shows whether PPO has learned to add.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from data.files import UserError, write_jsonl
from plumbing.settings import read_flags, script


@dataclass
class SumsConfig:
    out: Path = Path("data/sums")  # a new folder for the files
    seed: int = 0  # of all that is random


def score(prompts, responses):
    """Texts -> 1.0 for each right sum, else 0.0."""
    sums = [sum(map(int, re.findall(r"\d+", prompt))) for prompt in prompts]
    return [float(text == f" {right}") for right, text in zip(sums, responses)]


def demonstration(rng, a, b):
    """A row of SFT; two in five are right."""
    error = rng.choice((1, 2, 9, 10, 11)) * rng.choice((1, -1)) if rng.random() >= 0.4 else 0
    return {"prompt": f"{a} + {b} =", "completion": f" {abs(a + b + error)}"}


def make_rows(seed):
    """seed -> {name of the file: rows}."""
    rng = random.Random(seed)
    additions = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(additions)
    rows = {}
    for split, part, times in (("train", additions[1000:], 4), ("val", additions[:1000], 1)):
        rows[f"sft_{split}"] = [demonstration(rng, *pair) for pair in part for _ in range(times)]
        rows[f"prompts_{split}"] = [{"prompt": f"{a} + {b} ="} for a, b in part]
    return rows


@script
def main():
    config = read_flags(__doc__, SumsConfig, run=False)
    if config.out.exists():
        raise UserError(f"{config.out}: already exists; choose another --out, or remove it")
    for name, rows in make_rows(config.seed).items():
        write_jsonl(config.out / f"{name}.jsonl", rows)
        print(f"{config.out}/{name}.jsonl: {len(rows):,} rows")


if __name__ == "__main__":
    main()
