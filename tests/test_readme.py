"""The README says what was measured. Run: python -m pytest tests/test_readme.py"""

import json
import re
from pathlib import Path

import pytest

from bench import real
from bench.results import splice, tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "bench" / "results.json").read_text())


def numbers_in(x):
    """Every number in nested lists and dicts, and in the strings among them."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list):
        return [number for item in x for number in numbers_in(item)]
    if isinstance(x, str):
        return [float(number) for number in re.findall(r"-?\d+\.\d+", x)]
    return [float(x)] if isinstance(x, (int, float)) else []


TABLES = ["systems", "seeds", "ablations", "no_penalty", "hacked", "real", "reviews", "memory", "speed", "growth"]


@pytest.mark.parametrize("name", TABLES)
def test_each_table_is_the_one_that_the_results_give(name):
    assert splice(README, name, tables(RESULTS)[name]) == README


def test_every_line_that_the_readme_shows_was_printed():
    block = README.split("lines are left out):\n")[1].split("\nThen talk to it")[0]
    printed = {line.strip() for line in RESULTS["make_run"]}
    shown = [line.strip() for line in block.splitlines() if line.strip() not in ("", "...")]
    assert len(shown) > 40 and [line for line in shown if line not in printed] == []


def test_the_settings_shown_for_other_data_are_those_that_were_measured():
    for name, folder in (("reviews", "data/rt"), ("dialogues", "data/hh")):
        for script, flags in real.SETTINGS[name].items():
            assert f"    python {script} --data {folder} --out out/{name} {flags}\n" in README


def test_memory_is_what_was_predicted_within_a_fifth():
    predicted, measured = RESULTS["memory"]["rows"][0]["total"], RESULTS["memory"]["measured"]
    assert 0.8 < measured / predicted < 1.2


def test_every_measured_number_in_the_text_about_the_results_is_among_the_results():
    text = README.split("## Results\n")[1].split("## An accident")[0]
    for name in set(TABLES) - {"memory"}:  # which stands elsewhere
        text = splice(text, name, "")
    known = numbers_in({**RESULTS, "make_run": []})
    for number in re.findall(r"(?<![\w.])-?\d+\.\d{2,}", text):
        digits = len(number.split(".")[1])
        assert any(round(x, digits) == float(number) for x in known), number


def test_the_pictures_are_there():
    for path in re.findall(r"\]\((bench/[\w.]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_table_of_files_has_their_lengths():
    rows = re.findall(r"^\| `([\w/.]+)` \| ([\d,]+) \|", README, re.M)
    assert len(rows) >= 8
    for path, lines in rows:
        assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) == int(lines.replace(",", "")), path
