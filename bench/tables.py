"""bench/results.json, and the tables of RESULTS.md that are written from it.

    python -m bench.tables      writes the tables into RESULTS.md

results.json is {section: {name: figures}}, with four digits. A figure is a number, [mean, standard
error] or flags. The section "made" says of which commit and machine each of the others is. In
RESULTS.md a table stands between <!-- section --> and <!-- /section -->.
"""

import json
import math
import os
import platform
import re
import statistics
import subprocess
from pathlib import Path

from data.files import write_file
from plumbing.page import json_safe
from plumbing.settings import read_flags, script

ROOT = Path(__file__).parents[1]
PATH, TEXT = ROOT / "bench" / "results.json", ROOT / "RESULTS.md"
# What decides what is computed
CODE = "--", "*.py", ":!tests", ":!bench/results.py", ":!bench/tables.py", ":!bench/pictures.py"


def provenance():
    """The last commit of the code, with a + where that has been changed since, and the machine."""

    def git(*words):  # nothing in no clone
        process = subprocess.run(["git", *words, *CODE], cwd=ROOT, text=True, capture_output=True)
        return process.stdout.strip()

    commit = git("log", "-1", "--format=%h") + "+" * bool(git("status", "--porcelain"))
    info = Path("/proc/cpuinfo")
    model = info.exists() and re.search(r"model name\s*: (.+)", info.read_text())
    return f"{commit}, {model[1] if model else platform.machine()}, {os.cpu_count()} cores"


def mean_and_error(numbers):
    """Over seeds: the mean and its standard error, or None where there is one seed."""
    n = len(numbers)
    error = statistics.stdev(numbers) / math.sqrt(n) if n > 1 else None
    return [statistics.fmean(numbers), error]


def load():
    return json.loads(PATH.read_text(encoding="utf-8"))


def store(sections, source):
    """Put these sections, of this commit and machine, in place of those in results.json, and the
    tables into RESULTS.md."""
    results = load()
    made = results["made"] | dict.fromkeys(sections, source)
    write_file(PATH, dumps(results | sections | {"made": made}))
    write_tables()


def dumps(results):
    """The text of results.json: what is two levels down stands on one line."""
    sections = []
    for name, rows in json_safe(results, 4).items():
        lines = (f"{json.dumps(row)}: {json.dumps(x)}" for row, x in rows.items())
        sections.append(json.dumps(name) + ": {\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def cell(x):
    """A number with three digits; [mean, error] with as many as the error leaves; a count;
    flags."""
    if isinstance(x, str):
        return f"`{x}`" if x else ""
    mean, error = x if isinstance(x, list) else (x, None)
    if error:
        digits = max(0, -math.floor(math.log10(error / 2)))
        return f"{mean:.{digits}f}±{error:.{digits}f}"
    return "" if mean is None else f"{mean:.3g}" if isinstance(mean, float) else str(mean)


def table(rows):
    """{name: {title of a column: figure}} -> Markdown."""
    titles = dict.fromkeys(title for row in rows.values() for title in row)
    lines = [["", *titles], ["---", *["---:"] * len(titles)]]
    for name, row in rows.items():
        lines.append([name, *(cell(row.get(title)) for title in titles)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(text, results):
    """The text with a new table between the markers of each section."""

    def between(markers):
        return f"{markers[1]}{table(results[markers[2]])}\n{markers[3]}"

    return re.sub(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", between, text, flags=re.DOTALL)


def write_tables():
    write_file(TEXT, fill(TEXT.read_text(encoding="utf-8"), load()))


@script
def main():
    read_flags(__doc__, run=False)
    write_tables()


if __name__ == "__main__":
    main()
