"""Trains on the sums of examples/sums.py, and prints a table of RESULTS.md.

    python -m bench.sums 1 2 3

The score is the share of right sums, less 1 for an answer that was cut off.
"""

import json
import sys
from pathlib import Path

from bench.seeds import python, table

ALGORITHMS = {"PPO": "train_ppo.py", "RLOO": "-m variations.rloo", "GRPO": "-m variations.grpo"}


def train_and_evaluate(command, seed, out):
    """-> what evaluate.py found."""
    flags = "--data", "data/sums", "--seed", seed, "--resume"
    sft = f"out/bench_sums/sft/{seed}"
    python("train_sft.py", *"--vocab_size 270 --steps 1500 --lr 1e-3".split(), "--out", sft, *flags)
    stage_3 = "--reward", "examples.sums:score", "--models", sft, "--out", out
    python(*command.split(), *stage_3, *flags)
    python("evaluate.py", out)
    return json.loads(Path(out, "report.json").read_text())


def main(*seeds):
    if not Path("data/sums").exists():
        python("-m", "examples.sums")
    rows = {"SFT": []}
    for name, command in ALGORITHMS.items():
        reports = [
            train_and_evaluate(command, seed, f"out/bench_sums/{name}/{seed}") for seed in seeds
        ]
        rows[name] = [report["policy"] for report in reports]
    rows["SFT"] = [report["sft"] for report in reports]
    print(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
