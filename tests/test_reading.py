"""minippo.py with its numbers beside it. Run: python -m pytest tests/test_reading.py"""

import ast
import html
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import minippo
from cli import edited, run
from plumbing import reading
from test_minippo import drawing

SOURCE = Path(minippo.__file__).read_text(encoding="utf-8")
LINES = SOURCE.splitlines()


@pytest.fixture(scope="module")
def notes():
    return reading.all_notes(SOURCE)


def said(notes, text, source=SOURCE):
    """What stands beside the one line of code that begins so -> {name: its numbers}."""
    (number,) = [i for i, x in enumerate(source.splitlines(), 1) if x.strip().startswith(text)]
    return dict(reading.beside(notes[number]))


def test_every_assignment_in_sections_2_to_6_has_its_numbers(notes):
    first, last = (SOURCE[: SOURCE.index(x)].count("\n") for x in ("# 2. Log-", "\ndef main():"))
    without = []
    for function in ast.walk(ast.parse(SOURCE)):
        if isinstance(function, ast.FunctionDef) and first < function.lineno < last:
            for node in ast.walk(function):
                sets = isinstance(node, (ast.Assign, ast.AugAssign, ast.Return))
                if sets and not reading.beside(notes.get(node.lineno, [])):
                    without.append(LINES[node.lineno - 1].strip())
    # A network, and a list of weights.
    assert len(without) == 2 and without[0].startswith("return copy.deepcopy(model)")
    assert without[1].startswith("parameters = [p for group")


def test_the_numbers_are_those_of_the_header(notes):
    rows = drawing()
    for line, name, row in (
        ("rewards[torch.arange", "rewards", "reward"),
        ("rewards, values = torch.where(mask, rewards", "values", "value"),
        ("advantages = torch.where(mask, advantages", "advantages", "advantage"),
        ("return torch.where(mask, whitened, 0.0)", "->", "whitened"),
        ("ratio = log_ratio.exp()", "ratio", "ratio"),
        ("unclipped = ratio", "unclipped", "ratio * A"),
        ("clipped = ratio.clamp", "clipped", "clipped * A"),
    ):
        numbers = [float(x) for x in said(notes, line)[name].split()]
        assert numbers[-4:-1] == rows[row][1:4] or numbers == rows[row][1:4], line
    (value,) = {said(notes, "clipped = old_values +")["clipped"].split()[0]}
    assert value == "1.00" and said(notes, "margin = chosen_scores")["margin"] == "1.20"


def test_the_lines_of_the_readme_are_those_of_the_page(notes):
    readme = (Path(minippo.__file__).parent / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ {4,}(\S.*?) {3,}(\w+) +((?:[\d.]+[ |]*)+)$", readme, re.MULTILINE)
    assert [name for _, name, _ in lines] == ["t", "delta", "advantage", "advantages"]
    for code, name, numbers in lines:
        assert said(notes, code)[name] == numbers


def test_a_loop_has_a_column_for_each_turn_and_a_mask_is_drawn(notes):
    assert said(notes, "for t in reversed(")["t"] == "4 | 3 | 2 | 1 | 0"
    assert said(notes, "delta = rewards[:, t]")["delta"] == "0.00 | 0.18 | 0.22 | 0.15 | 0.80"
    turns = said(notes, "advantages[:, t], next_value")["advantages"].split(" | ")
    assert (
        turns[0] == "0.00 0.00 0.00 0.00 0.00"
        and turns[3] == "0.00 0.55 0.40 0.18 0.00"
        and len(turns) == 5
    )
    assert said(notes, "return (action >= prompt_lengths")["->"] == ". x x x ."
    assert said(notes, "lengths += unfinished")["lengths"] == "2 2 | 3 3 | 4 4 | 5 5 | 5 6 | 5 7"
    assert said(notes, "ended = tokens.gather")["ended"] == "x ."
    for line, example in (("def gae", "the header"), ("def compute_advantages", "a tiny GPT")):
        assert said(notes, line)["example:"] == example


def test_the_second_step_of_the_tiny_gpt_differs_from_the_reference_and_entropy_is_shown(notes):
    ref = said(notes, "ref_logprobs, _, _ = evaluate_actions(ref")["ref_logprobs"]
    assert ref != said(notes, "tokens, mask, old_logprobs, old_values = generate(")["old_logprobs"]
    assert said(notes, "entropy = -(log_p.exp()")["entropy"].count(" ") == 1  # of two actions
    assert said(notes, "return [blank.masked_scatter")["->"].startswith("0.00 -")
    assert said(notes, "norm = nn.utils.clip_grad_norm_")["norm"] != "0.00"


@pytest.mark.parametrize(
    "value, text",
    [
        (torch.tensor([[True, False], [False, True]]), "x . / . x"),
        (torch.tensor([1.234, -0.001, -0.0]), "1.23 -1e-03 0.00"),
        (torch.zeros(5, 5), "(5, 5)"),
        (torch.tensor(3), "3"),
        ({"loss": 0.5, "count": 3, "mask": torch.zeros(2)}, "loss 0.50, count 3, mask"),
        ((torch.tensor([2]), None, "ab"), "2; ab"),
        ("x" * 60, "x" * 48 + "…"),
        ([1] * 9, ""),
        (torch.nn.Linear(1, 1), ""),
    ],
)
def test_values_are_shown_so(value, text):
    assert reading.show(value) == text


def test_more_than_eight_turns_are_cut():
    turns = [{"i": str(i)} for i in range(10)]
    assert reading.beside(turns) == [("i", "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | …")]
    assert reading.beside([{"a": "1"}, {"b": "2"}]) == [("a", "1 | -"), ("b", "- | 2")]
    assert reading.beside(turns[:8]) == [("i", "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7")]


def test_the_page_holds_the_file_as_it_stands_and_needs_no_network(tmp_path):
    status, printed, error = run("plumbing/reading.py", "--out", tmp_path / "new")
    assert (status, error) == (0, "") and str(tmp_path / "new" / "minippo.html") in printed
    page = (tmp_path / "new" / "minippo.html").read_text(encoding="utf-8")
    assert len(page) < 400_000 and "<script" not in page and "http" not in page.split("<main>")[0]
    rows = re.findall(r'class="(line c|line)"><span class="i">(\d+)</span><span>(.*?)</span>', page)
    body = re.findall(r'<span class="i">\d+</span><span>(.*)</span>', page)
    code = [
        html.unescape(re.sub("<[^>]*>", "", re.sub(r'<span class="n">.*', "", x))) for x in body
    ]
    assert len(rows) == len(LINES) and code == LINES
    kinds = {int(number): kind for kind, number, _ in rows}
    comment = LINES.index("# 1. The networks") + 1
    assert (
        kinds[1] == kinds[comment] == "line c" and kinds[LINES.index("import copy") + 1] == "line"
    )
    assert '<span class="c"># pi / old</span>' in page and "<eos>" not in page


def test_after_an_edit_of_gae_the_page_shows_the_edit(tmp_path):
    line = "delta = rewards[:, t] + gamma * next_value - values[:, t]"
    with edited(tmp_path, ("minippo.py", line, line.replace("- v", "- 2 * v"))):
        other = importlib.import_module("plumbing.reading")
        source = Path(other.minippo.__file__).read_text(encoding="utf-8")
        deltas = said(other.all_notes(source), "delta = rewards", source)["delta"]
    assert deltas == "0.00 | -1.02 | -0.78 | -0.65 | 0.80"


def test_tracing_ends_when_what_is_recorded_fails(notes):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError):
        reading.record(fail, SOURCE, {}, set(), "")
    assert sys.gettrace() is None
