"""Where things stand: imports that point one way, files that stay short. Run: python -m pytest tests/test_house.py"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train_sft.py", "train_rm.py", "train_ppo.py", "sample.py")
LADDER = ["reinforce", "rloo", "grpo", "sequence_ppo", "ppo_penalty", "best_of_n", "dpo", "ensemble", "iterate", "outgrow"]
VARIATIONS = sorted((ROOT / "variations").glob("*.py"))
FILES = [path for folder in (".", "plumbing", "bench", "data", "variations") for path in sorted((ROOT / folder).glob("*.py"))]


def imported(path):
    """The modules that a file imports, anywhere in it, as their first names: {"torch", "plumbing", ...}."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.split(".")[0] for name in names}, names


def may_import(path):
    """What of this project a file may import: bench -> variations -> scripts -> plumbing -> minippo."""
    scripts = {Path(name).stem for name in SCRIPTS}
    if path.name == "minippo.py":
        return set()
    if path.parent.name == "data":
        return {"data"}
    if path.parent.name == "plumbing":
        return {"minippo", "plumbing"} | ({"data"} if path.name in ("report.py", "text.py") else set())
    if path.name in SCRIPTS:
        return {"minippo", "plumbing"} | ({"data"} if path.name == "train_sft.py" else set())
    below = {"bench", "variations"} if path.parent.name == "bench" else {"variations"}
    return {"minippo", "plumbing", "data", *below, *scripts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = {"minippo", "plumbing", "data", "bench", "variations", "tests", *(Path(name).stem for name in SCRIPTS)}
    assert imported(path)[0] & own <= may_import(path)


def test_of_the_data_only_the_zoo_and_the_rule_of_what_is_held_out_are_imported():
    for name, module in (("train_sft.py", "zoo"), ("plumbing/report.py", "zoo"), ("plumbing/text.py", "convert")):
        assert {x for x in imported(ROOT / name)[1] if x.split(".")[0] == "data"} == {f"data.{module}"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_fits_on_the_screen(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("path", VARIATIONS, ids=lambda path: path.name)
def test_a_variation_is_shorter_than_a_script(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 70 and max(map(len, lines)) <= 100


def blocks(path, size=6):
    """Every `size` lines of a file that follow each other, without blank lines and without the space around them."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {tuple(lines[i : i + size]) for i in range(len(lines) - size + 1)}


def test_no_six_lines_of_a_script_stand_in_a_variation_too():
    assert len(VARIATIONS) > 10 and len(blocks(ROOT / "train_ppo.py")) > 50
    for name in ("minippo.py", *SCRIPTS):
        for path in VARIATIONS:
            assert not blocks(ROOT / name) & blocks(path), (name, path.name)


def test_the_text_of_the_variations_names_them_all():
    text = (ROOT / "variations" / "__init__.py").read_text(encoding="utf-8")
    assert re.findall(r"^(\w+)   +\w", text, re.M) == LADDER
    assert {path.stem for path in VARIATIONS} == {*LADDER, "__init__"}


@pytest.mark.parametrize("name", ["train_sft.py", "train_rm.py"])
def test_the_training_loop_stands_in_the_open(name):
    """Batch, loss, backward, step, log: each in the loop of main(), and no longer than a screen."""
    (main,) = [node for node in ast.parse((ROOT / name).read_text()).body if getattr(node, "name", "") == "main"]
    (loop,) = [node for node in main.body if isinstance(node, ast.For)]
    text = ast.unparse(loop)
    for word in ("batch = ", "zero_grad()", ".backward()", "gradient_step(", "end_step("):
        assert word in text
    assert loop.end_lineno - loop.lineno < 30


def test_no_function_is_longer_than_a_screen():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 40, (path.name, node.name)
