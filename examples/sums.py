"""Your own reward, one that cannot be gamed: is the sum right?

    python -m examples.sums
    python train_sft.py --data data/sums --out out/sums --vocab_size 270 --steps 1500 --lr 1e-3
    python train_ppo.py --data data/sums --out out/sums --reward examples.sums:score
    python sample.py out/sums/ppo.pt "36 + 31 ="

The first command writes demonstrations of sums of two numbers below 100. Two in five are right; the
others are off by 1, 2, 9, 10 or 11, up or down (and written without a sign). SFT imitates them,
errors included. The reward is 1 for the right sum and 0 for any other text, so there is no reward
model to train, and nothing to hack. One sum in ten, a + b as well as b + a, is in the validation
files only, so `python evaluate.py out/sums` shows whether PPO has learned to add.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from data.rows import UserError, write_jsonl
from plumbing.settings import run_script


@dataclass
class Config:
    out: Path = Path("data/sums")  # a new folder for the files
    seed: int = 0  # of all that is random


def score(prompts, completions, **columns):
    """Texts -> 1.0 for each right sum, else 0.0."""
    scores = []
    for prompt, completion in zip(prompts, completions):
        a, _, b, _ = prompt.split()
        scores.append(float(completion == f" {int(a) + int(b)}"))
    return scores


def demonstration(rng, a, b):
    """A row of SFT."""
    error = 0
    if rng.random() >= 0.4:
        error = rng.choice((1, 2, 9, 10, 11)) * rng.choice((1, -1))
    return {"prompt": f"{a} + {b} =", "completion": f" {abs(a + b + error)}"}


def make_rows(seed):
    """seed -> {name of the file: rows}."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    rng.shuffle(pairs)
    parts = {"train": pairs[500:], "val": pairs[:500]}
    times = {"train": 4, "val": 1}  # demonstrations of each addition
    rows = {}
    for split, part in parts.items():
        part = list(dict.fromkeys([*part, *((b, a) for a, b in part)]))  # a + b and b + a
        rows[f"sft_{split}"] = [demonstration(rng, *x) for x in part for _ in range(times[split])]
        rows[f"prompts_{split}"] = [{"prompt": f"{a} + {b} ="} for a, b in part]
    return rows


def main(config):
    if config.out.exists():
        raise UserError(f"{config.out}: exists already; choose another --out, or remove it")
    for name, rows in make_rows(config.seed).items():
        write_jsonl(config.out / f"{name}.jsonl", rows)
        print(f"{config.out}/{name}.jsonl: {len(rows):,} rows")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
