"""Fills the tables of RESULTS.md from results.json: means over the seeds ± standard errors."""

import json
from pathlib import Path

from bench.run import RESULTS

PAGE = Path(__file__).parents[1] / "RESULTS.md"
COLUMNS = "judge", "score", "optimality", "kl", "distinct"


def cell(numbers):
    """The mean of the seeds ± its standard error, or the number of a single seed."""
    if not numbers:
        return ""
    mean = sum(numbers) / len(numbers)
    if len(numbers) == 1:
        return f"{mean:.3f}"
    variance = sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return f"{mean:.3f} ± {(variance / len(numbers)) ** 0.5:.3f}"


def table(rows):
    """{label: {seed: {name: number}}} -> the lines of a table."""
    reports = [report for row in rows.values() for report in row.values()]
    columns = [name for name in COLUMNS if any(name in report for report in reports)]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for label, row in rows.items():
        cells = []
        for name in columns:
            cells.append(cell([report[name] for report in row.values() if name in report]))
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows_of(name, results):
    """The rows of a table: the policy of each command; of seeds and sums, what it began as too."""
    rows = {}
    if name in ("seeds", "sums"):
        first = next(iter(results.values()))
        rows["SFT"] = {seed: report["sft"] for seed, report in first.items()}
    for label, reports in results.items():
        rows[label] = {seed: report["policy"] for seed, report in reports.items()}
        if name == "seeds":
            for n in ("4", "16", "64"):
                rows[f"best of {n}"] = {s: x["best_of_n"][n] for s, x in reports.items()}
            unseen = {seed: report["unseen"] for seed, report in reports.items()}
            rows[f"{label}, unseen prompts"] = unseen
    return rows


def main():
    text = PAGE.read_text(encoding="utf-8")
    for name, results in json.loads(RESULTS.read_text()).items():
        commits = sorted({x["commit"] for reports in results.values() for x in reports.values()})
        if f"<!-- {name} -->" not in text:
            continue
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        filled = f"{table(rows_of(name, results))}\n\nCommit {', '.join(commits)}.\n"
        text = before + begin + filled + end + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
