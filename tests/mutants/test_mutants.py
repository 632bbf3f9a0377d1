"""Put each bug of bugs.txt back, one at a time, and demand that the test named there fails.

    make mutants

The bug is in a copy of the project. Its test runs in a fork of this process, which has imported
torch but nothing of the project: faster than a new interpreter.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # slow: an optimizer would import it in every fork

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ["*.py", "*.toml", "data/*.py", "plumbing/*.*", "variations/*.py", "tests/*.py"]
OPTIONS = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "pyproject.toml"]
OPTIONS += ["-p", "no:unraisableexception"]  # it spends half a second on collecting garbage
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("CI", None)  # with it, pytest would find and print all that differs, for minutes


def read_bugs():
    """bugs.txt -> (name, file, right, wrong, killer) each."""
    text = (HERE / "bugs.txt").read_text(encoding="utf-8")
    for section in re.split(r"(?m)^## ", text)[1:]:
        head, *bugs = section.strip().split("\n\n")
        file, killer = head.split(", ")
        for bug in bugs:
            right, wrong = re.findall(r"(?m)^    [-+] (.*)", bug)
            yield bug.partition(": ")[0], file, right, wrong, killer


BUGS = list(read_bugs())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the project."""
    folder = tmp_path_factory.mktemp("project")
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(path, copy)
    return folder


def run_in_fork(tests, folder):
    """-> pytest's exit status (0 all passed, 1 a test failed) and what it printed."""
    assert "minippo" not in sys.modules and torch.get_num_threads() == 1
    child = os.fork()
    if child == 0:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os._exit(pytest.main([*OPTIONS, *(f"tests/{test}" for test in tests)]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, (folder / "log.txt").read_text(errors="replace")[-3000:]


def test_the_killers_pass_on_the_code_as_it_is(folder):
    status, log = run_in_fork(sorted({killer for *_, killer in BUGS}), folder)
    assert status == 0, log


@pytest.mark.parametrize("name, file, right, wrong, killer", BUGS, ids=[bug[0] for bug in BUGS])
def test_the_bug_is_caught(name, file, right, wrong, killer, folder):
    source = (folder / file).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{right!r} should occur once in {file}"
    (folder / file).write_text(source.replace(right, wrong), encoding="utf-8")
    shutil.rmtree((folder / file).parent / "__pycache__", ignore_errors=True)  # of other mutants
    status, log = run_in_fork([killer], folder)
    (folder / file).write_text(source, encoding="utf-8")
    assert status == 1, f"{killer} ended with {status}, not 1:\n{log}"
