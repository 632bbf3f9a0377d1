"""Trains and evaluates all three stages for each seed, and prints the table of RESULTS.md.

    python -m bench.seeds 0 1 2

Models that are there, in out/seeds, are not trained again. Set OMP_NUM_THREADS=1 and run two
commands side by side to use two cores.
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
    for stage in ("sft", "rm", "ppo"):
        python(f"train_{stage}.py", "--seed", seed, "--out", out, "--resume")
    python("evaluate.py", out)
    return json.loads(Path(out, "report.json").read_text())


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


def table(rows):
    """{name: the numbers of each seed, dicts} -> the lines of the table."""
    known = {name for seeds in rows.values() for seed in seeds for name in seed}
    columns = [name for name in COLUMNS if name in known]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, seeds in rows.items():
        cells = [cell([seed[x] for seed in seeds if x in seed]) for x in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(*seeds):
    reports = [rows_of(train_and_evaluate(seed)) for seed in seeds]
    print(table({name: [report[name] for report in reports] for name in reports[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
