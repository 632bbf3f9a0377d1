"""Put each bug of the *_mutants.py files and of catalogue.py back, one at a time, and demand that the
test named there fails. Run: make mutants

Each mutant is a copy of the project in a temporary folder. Its test runs in a fork of this process,
which has imported torch already but nothing of the project: that takes a second where a new
interpreter would take three.
"""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from catalogue import MUTANTS, Mutant

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FOLDERS = "plumbing", "variations", "bench", "tests"
os.environ["OMP_NUM_THREADS"] = "1"

for path in sorted(HERE.glob("*_mutants.py")):
    if path.stem != "test_mutants":
        lists = vars(importlib.import_module(path.stem)).values()
        found = [x for x in lists if isinstance(x, list) and x and isinstance(x[0], Mutant)]
        MUTANTS = MUTANTS + [mutant for x in found if x is not MUTANTS for mutant in x]


def mutate(mutant, folder):
    """A copy of the project with the bug put back."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.md"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    (folder / "data").mkdir()
    for path in (ROOT / "data").glob("*.*"):  # not the folders that scripts have made there
        shutil.copy(path, folder / "data")
    source = (folder / mutant.file).read_text(encoding="utf-8")
    for right, wrong in mutant.changes:
        assert source.count(right) == 1, f"{right!r} should occur once in {mutant.file}"
        source = source.replace(right, wrong)
    (folder / mutant.file).write_text(source, encoding="utf-8")


def run_in_fork(folder, test, log):
    """pytest's exit status: 0 all passed, 1 a test failed, anything else is a mistake of the list."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(folder)
        tests = str(ROOT / "tests")
        others = [x for x in sys.path if not x.startswith(tests) and x != str(ROOT)]
        sys.path[:] = [str(folder), *others]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "pyproject.toml"]
        os._exit(pytest.main([*options, f"tests/{test}"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def name_and_killer(mutant):
    return f"{mutant.name} | {mutant.killer.partition('::')[2]}".replace(" ", "_")


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_and_killer)
def test_the_bug_is_caught(mutant, tmp_path):
    assert not {"minippo", "train_sft", "tiny"} & set(sys.modules) and torch.get_num_threads() == 1
    mutate(mutant, tmp_path)
    status = run_in_fork(tmp_path, mutant.killer, tmp_path / "log.txt")
    log = (tmp_path / "log.txt").read_text(errors="replace")
    shutil.rmtree(tmp_path)
    story = f"{mutant.name}\n    seen    {mutant.where}\n    effect  {mutant.effect}"
    reason = f"{mutant.killer} ended with {status} where 1, a failed test, was due"
    assert status == 1, f"{story}\n{reason}:\n{log[-3000:]}"


def test_every_mutant_has_a_name_of_its_own_and_there_are_enough():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 110
