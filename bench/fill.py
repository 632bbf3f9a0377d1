"""Fills the tables of RESULTS.md from results.jsonl: means over the seeds ± standard errors."""

import re
import statistics
from pathlib import Path

from bench.run import COLUMNS, read_results

PAGE = Path(__file__).parents[1] / "RESULTS.md"


def cell(numbers):
    """The mean of the seeds ± its standard error, or the number of a single seed."""
    if not numbers:
        return ""
    mean = f"{statistics.mean(numbers):.3f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}"


def table(results):
    """The results of a table, as read_results() gives them -> its lines."""
    columns = [name for name in COLUMNS if any(name in result for result in results)]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for label in dict.fromkeys(result["row"] for result in results):
        row = [result for result in results if result["row"] == label]
        cells = [cell([result[name] for result in row if name in result]) for name in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    commits = sorted({result["commit"] for result in results})
    seeds = sorted({result["seed"] for result in results})
    return "\n".join([*lines, "", f"Seeds {seeds}, commit {', '.join(commits)}."])


def main():
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall("<!-- (\\w+) -->", text):
        results = [result for result in read_results() if result["table"] == name]
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        text = before + begin + table(results) + "\n" + end + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
