"""bench/results.json, and the tables of RESULTS.md that are written from it.

    python -m bench.tables      writes the tables, and prints them all

results.json is {section: {name: figures}}, with one line for each name and five digits. A figure is
a number or [mean, standard error]. Some sections are tables: the figures have the titles of their
columns, and each row says of which commit and machine it is; a table of several is refused. In a
text it stands between <!-- section --> and <!-- /section -->.
"""

import json
import math
import os
import platform
import re
import statistics
import subprocess
from pathlib import Path

from data.files import UserError, write_file
from plumbing.errors import run_script
from plumbing.page import rounded

ROOT = Path(__file__).parents[1]
PATH = ROOT / "bench" / "results.json"
TEXTS = ("RESULTS.md",)
CODE = ("--", "*.py", ":!tests", ":!bench")  # what decides what a run computes
TABLES = {  # section: title of the first column
    "systems": "",
    "seeds": "seed",
    "settings": "setting",
    "hacked": "prompt and response",
    "neighbours": "",
    "accident": "changed in the run",
    "pretrained": "",
    "pretrained_speed": "",
    "speed": "",
}
DIGITS = {  # of a column, if not 2
    **dict.fromkeys(("SFT above the entropy, nats/token", "RM below its ceiling"), 4),
    **dict.fromkeys(("optimality", "optimality on seen prompts", "on unseen prompts"), 3),
    **dict.fromkeys(("less the default's", "less PPO's"), 3),
    **dict.fromkeys(("tokens", "jumps of the KL"), 1),
    **dict.fromkeys(("an iteration, s", "minutes", "of these PPO", "peak, GB"), 1),
    "seconds to a judge of 2.5": 0,
}


def made():
    """The commit that changed the code last (with a + where that has been changed since), and the
    machine."""

    def git(*words):  # nothing where this is no clone
        found = subprocess.run(["git", *words, *CODE], cwd=ROOT, text=True, capture_output=True)
        return found.stdout.strip()

    commit = git("log", "-1", "--format=%h") + "+" * bool(git("status", "--porcelain"))
    info = Path("/proc/cpuinfo")
    found = info.exists() and re.search(r"model name\s*: (.+)", info.read_text())
    return f"{commit}, {found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def mean_and_error(numbers):
    """Over seeds: the mean and its standard error, or None where there is one seed."""
    n = len(numbers)
    error = statistics.stdev(numbers) / math.sqrt(n) if n > 1 else None
    return [statistics.fmean(numbers), error]


def dumps(results):
    """The text of results.json: what is two levels down stands on one line."""

    def lines(section):
        rows = (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in section.items())
        return "{\n" + ",\n".join(rows) + "\n}"

    sections = (f"{json.dumps(name)}: {lines(x)}" for name, x in rounded(results).items())
    return "{\n" + ",\n".join(sections) + "\n}\n"


def load():
    return json.loads(PATH.read_text(encoding="utf-8"))


def keep(sections):
    """Put these sections into results.json, beside the others, and the tables into the texts -> all
    that is there."""
    results = rounded(load() | sections)
    tables(results)  # what is refused is not written
    write_file(PATH, dumps(results))
    write_tables()
    return results


def write_tables():
    found = tables(load())
    for name in TEXTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for marker, lines in found.items():
            text = splice(text, marker, lines)
        write_file(ROOT / name, text)
    return found


def splice(text, name, lines):
    """The text with these lines between the markers of that name, if it has them."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in text:
        return text
    before, rest = text.split(begin)
    return before + begin + lines + "\n" + end + rest.split(end, 1)[1]


def cell(x, digits=2):
    """A number, [mean, error], a count, flags, or nothing."""
    if isinstance(x, str):
        return f"`{x.strip()}`" if x else ""
    if isinstance(x, int):
        return str(x)
    numbers = x if isinstance(x, list) else [x]
    # A last digit of 5 is rounded up, whatever binary makes of it.
    return "±".join(f"{n * (1 + 1e-9):.{digits}f}" for n in numbers if n is not None)


def table(head, rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(results):
    """results.json -> {section: its table}, of those that are there, and of what they are made.
    UserError unless all rows of a table are of one commit and one machine."""
    found, sources = {}, {}
    for section in [section for section in TABLES if section in results]:
        rows = results[section]
        source, *others = sorted({row["made"] for row in rows.values()})
        if others:
            several = "; ".join([source, *others])
            raise UserError(f"{section}: its rows are of several commits or machines ({several})")
        sources.setdefault(source, []).append(section)
        columns = [title for title in next(iter(rows.values())) if title != "made"]
        found[section] = table(
            [TABLES[section], *columns],
            [
                [name, *(cell(x.get(y), DIGITS.get(y, 2)) for y in columns)]
                for name, x in rows.items()
            ],
        )
    rows = [[", ".join(names), source] for source, names in sources.items()]
    return found | {"made": table(["tables", "commit and machine"], rows)}


def main():
    for name, lines in write_tables().items():
        print(f"{name}\n\n{lines}\n")


if __name__ == "__main__":
    run_script(main)
