"""Put each bug of bugs.txt back, one at a time, and demand that the test named there fails.

    make mutants

It runs in a copy, in a fork of this process (which has imported torch, but not the project): faster
than a new interpreter.
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
IGNORED = [".*", "__pycache__", "out*", "*.pt", "*.jsonl"]
OPTIONS = "-x -p no:cacheprovider -p no:unraisableexception -p no:xdist".split()
sys.dont_write_bytecode = True  # the next mutant might be taken for this one
os.environ.pop("CI", None)  # with it, pytest would find and print all that differs, for minutes


def read_bugs():
    """bugs.txt -> (file, right, wrong, killer) each."""
    text = (HERE / "bugs.txt").read_text(encoding="utf-8")
    for part in text.split("\n# ")[1:]:
        head, *sections = part.split("\n## ")
        file, tests = head.strip().split(", ")
        for section in sections:
            killer, *bugs = section.strip().split("\n\n")
            for bug in bugs:
                name, right, wrong = re.split("\n[-+] ", bug)
                case = file, right, wrong, f"tests/{tests}::{killer}"
                yield pytest.param(*case, id=name.partition(":")[0])


BUGS = list(read_bugs())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    copy = tmp_path_factory.mktemp("project") / "copy"
    return shutil.copytree(HERE.parents[1], copy, ignore=shutil.ignore_patterns(*IGNORED))


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
        os._exit(pytest.main([*OPTIONS, *tests]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, (folder / "log.txt").read_text(errors="replace")[-3000:]


def test_the_killers_pass_on_the_code_as_it_is(folder):
    status, log = run_in_fork(sorted({bug.values[-1] for bug in BUGS}), folder)
    assert status == 0, log


@pytest.mark.parametrize("file, right, wrong, killer", BUGS)
def test_the_bug_is_caught(file, right, wrong, killer, folder):
    source = (folder / file).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{right!r} should occur once in {file}"
    (folder / file).write_text(source.replace(right, wrong), encoding="utf-8")
    status, log = run_in_fork([killer], folder)
    (folder / file).write_text(source, encoding="utf-8")
    assert status == 1, f"{killer} ended with {status}, not 1:\n{log}"
