"""Where things stand: imports point one way, and minippo.py is read from top to bottom."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train_sft", "train_rm", "train_ppo", "sample")
FOLDERS = ("bench", "variations", "plumbing", "data", "tests")
# The files of a floor import those of lower floors, and files of their own that are no circle.
FLOORS = {"bench": 5, "variations": 4, **dict.fromkeys(SCRIPTS, 3), "plumbing": 2, "minippo": 1}
FILES = [path for x in (".", *FOLDERS[:4]) for path in sorted((ROOT / x).glob("*.py"))]


def imported(path):
    """The modules that a file imports, anywhere in it, by their full names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {
                x if (ROOT / f"{x.replace('.', '/')}.py").exists() else node.module for x in inner
            }
    return names


def place_of(path):
    return path.parent.name if path.parent != ROOT else path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    place, names = place_of(path), imported(path)
    inside = {name for name in names if name.split(".")[0] in {*FLOORS, *FOLDERS}}
    if place == "minippo":
        assert not inside and all(
            x.split(".")[0] in {"torch", *sys.stdlib_module_names} for x in names
        )
    elif place == "data":
        assert {x.split(".")[0] for x in inside} <= {"data"}
    else:
        for name in inside - {"data", "data.zoo", "data.convert"}:
            other = name.split(".")[0]
            same_folder = other == place and place not in SCRIPTS
            assert same_folder or FLOORS[other] < FLOORS[place], f"{place} imports {name}"


@pytest.mark.parametrize("folder", ["plumbing", "variations", "data"])
def test_the_files_of_a_folder_are_no_circle(folder):
    graph = {f"{folder}.{x.stem}": imported(x) for x in (ROOT / folder).glob("*.py")}
    graph = {name: {x for x in names if x in graph} for name, names in graph.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert folder != "plumbing" or not graph["plumbing.errors"] and len(order) >= 10


def test_nothing_in_minippo_is_used_above_its_definition():
    body = ast.parse((ROOT / "minippo.py").read_text(encoding="utf-8")).body
    seen, names = set(), {node.name for node in body if hasattr(node, "name")}
    for node in body:
        seen |= {getattr(node, "name", "")}
        used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} & names
        assert used <= seen, f"{used - seen} above its definition"


@pytest.mark.parametrize("name", ["train_sft", "train_rm", "train_ppo"])
def test_a_loop_is_the_algorithm_and_what_watches_is_its_last_line(name):
    body = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")).body
    (main,) = [node for node in body if getattr(node, "name", "") == "main"]
    (loop,) = [node for node in main.body if isinstance(node, ast.For)]
    assert "state.steps_left(" in ast.unparse(loop.iter)
    assert ".end_step(" in ast.unparse(loop.body[-1]) and "print(" not in ast.unparse(loop)


def test_the_file_that_is_made_to_be_copied_needs_minippo_alone_of_this_project():
    names = imported(ROOT / "variations" / "with_transformers.py")
    outside = {"minippo", "torch", "transformers", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in names} <= outside
