"""Put each bug of bugs.txt back, one at a time, and demand that the test named there fails.

    make mutants

Each mutant is a copy of the project in a temporary folder. Its test runs in a fork of this process,
which has imported torch but nothing of the project: faster than a new interpreter.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FOLDERS = "plumbing", "variations", "examples", "tests"
TEXT = (HERE / "bugs.txt").read_text(encoding="utf-8")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("CI", None)  # with it, pytest would find and print all that differs, for minutes


def mutants():
    """bugs.txt -> (name, file, right, wrong, killer) each."""
    for part in re.split(r"(?m)^## ", TEXT)[1:]:
        head, *bugs = part.strip().split("\n\n")
        file, killer = head.split(", ")
        for bug in bugs:
            right, wrong = re.findall(r"(?m)^    [-+] (.*)", bug)
            yield bug.partition(": ")[0], file, right, wrong, killer


MUTANTS = list(mutants())


def mutate(file, right, wrong, folder):
    """A copy of the project with the bug put back."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    (folder / "data").mkdir()  # without the folders that scripts have made there
    for pattern in "*.py", "pyproject.toml", "data/*.*":
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder / path.relative_to(ROOT))
    source = (folder / file).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{right!r} should occur once in {file}"
    (folder / file).write_text(source.replace(right, wrong), encoding="utf-8")


def run_in_fork(folder, tests, log):
    """-> pytest's exit status: 0 all passed, 1 a test failed, else a mistake of the list."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        options = "-x -p no:cacheprovider -p no:xdist -c pyproject.toml".split()
        os._exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(file, right, wrong, killers, folder):
    """-> the exit status of these tests on a copy with this change, and what they printed."""
    assert not {"minippo", "train_sft", "tiny"} & set(sys.modules) and torch.get_num_threads() == 1
    mutate(file, right, wrong, folder)
    status = run_in_fork(folder, killers, folder / "log.txt")
    log = (folder / "log.txt").read_text(errors="replace")
    shutil.rmtree(folder)
    return status, log[-3000:]


def test_the_killers_pass_on_the_code_as_it_is(tmp_path):
    right, killers = "import math\n", sorted({killer for *_, killer in MUTANTS})
    status, log = outcome("minippo.py", right, right, killers, tmp_path)
    assert status == 0, log


@pytest.mark.parametrize("name, file, right, wrong, killer", MUTANTS, ids=[x[0] for x in MUTANTS])
def test_the_bug_is_caught(name, file, right, wrong, killer, tmp_path):
    status, log = outcome(file, right, wrong, [killer], tmp_path)
    assert status == 1, f"{killer} ended with {status}, not 1:\n{log}"
