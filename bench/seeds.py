"""Trains and evaluates all three stages for each seed, and prints the table of RESULTS.md.

    python -m bench.seeds 0 1 2

An interrupted command goes on where it was stopped. Set OMP_NUM_THREADS=1 and run two commands side
by side to use two cores.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

COLUMNS = "judge", "score", "optimality", "kl", "distinct"


def python(*words):
    subprocess.run([sys.executable, *words], check=True)


def train_and_evaluate(seed):
    """-> what evaluate.py found."""
    out = f"out/seeds/{seed}"
    report = Path(out, "report.json")
    if not report.exists():
        for stage in ("sft", "rm", "ppo"):
            python(f"train_{stage}.py", "--seed", seed, "--out", out, "--resume")
        python("evaluate.py", out)
    return json.loads(report.read_text())


def rows_of(report):
    """{name of the row: its numbers}"""
    rows = {"SFT": report["sft"]}
    for n, numbers in report["best_of_n"].items():
        rows[f"best of {n}"] = numbers
    return rows | {"PPO": report["policy"], "PPO, unseen prompts": report["unseen"]}


def cell(numbers):
    """The mean of the seeds ± its standard error, or the number of a single seed."""
    if not numbers:
        return ""
    mean = f"{statistics.mean(numbers):.3f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}"


def table(reports):
    """The reports of all seeds -> the lines of the table."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
    rows = [rows_of(report) for report in reports]
    for name in rows[0]:
        line = f"| {name} |"
        for column in COLUMNS:
            numbers = [row[name][column] for row in rows if column in row[name]]
            line += f" {cell(numbers)} |"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([train_and_evaluate(seed) for seed in sys.argv[1:]]))
