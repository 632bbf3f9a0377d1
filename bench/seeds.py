"""Trains and evaluates all three stages for each seed, and writes the table of RESULTS.md.

    python -m bench.seeds 0 1 2
    python -m bench.seeds           only the table, from results.jsonl

An interrupted command goes on where it was stopped. Set OMP_NUM_THREADS=1 and run two commands side
by side, in two checkouts, to use two cores.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

PAGE = Path("RESULTS.md")
RESULTS = Path(__file__).with_name("results.jsonl")
COLUMNS = "judge", "score", "optimality", "kl", "distinct"


def python(*words):
    subprocess.run([sys.executable, *words], check=True)


def commit():
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def train_and_evaluate(seed, out):
    """-> what evaluate.py found."""
    for stage in ("sft", "rm", "ppo"):
        python(f"train_{stage}.py", "--seed", str(seed), "--out", str(out), "--resume")
    python("evaluate.py", str(out))
    return json.loads((out / "report.json").read_text())


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


def table(results):
    """A dict for each row and seed -> the lines of the table."""
    columns = [name for name in COLUMNS if any(name in result for result in results)]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for label in dict.fromkeys(result["row"] for result in results):
        row = [result for result in results if result["row"] == label]
        cells = [cell([result[name] for result in row if name in result]) for name in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    commits = sorted({result["commit"] for result in results})
    seeds = sorted({result["seed"] for result in results})
    return "\n".join([*lines, "", f"Seeds {seeds}, commit {', '.join(commits)}."])


def read_results():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def main(seeds):
    for seed in seeds:
        if any(result["seed"] == seed for result in read_results()):
            continue  # measured before
        code = commit()
        report = train_and_evaluate(seed, Path(f"out/{code}/{seed}"))
        with open(RESULTS, "a") as file:
            for row, numbers in rows_of(report).items():
                result = {"row": row, "seed": seed, "commit": code}
                result |= {name: round(numbers[name], 4) for name in COLUMNS if name in numbers}
                file.write(json.dumps(result) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition("<!-- seeds -->\n")
    _, end, after = rest.partition("<!-- /seeds -->")
    lines = table(read_results())
    PAGE.write_text(before + begin + lines + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
