"""Put each bug of catalogue.py and script_mutants.py back, one at a time, and demand that the test named there fails. Run: make mutants

Each mutant is a copy of the project in a temporary folder. Its test runs in a fork of this process, which has imported torch
already but nothing of the project; that takes a second where a new interpreter would take three.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from catalogue import MUTANTS
from script_mutants import SCRIPT_MUTANTS

MUTANTS = [*MUTANTS, *SCRIPT_MUTANTS]
ROOT = Path(__file__).parents[2]
SOURCES = [*(path.name for path in ROOT.glob("*.py")), "pyproject.toml", "plumbing", "variations", "bench", "tests"]
os.environ["OMP_NUM_THREADS"] = "1"


def mutate(mutant, folder):
    """A copy of the project with the bug put back."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "data").mkdir()
    for path in (ROOT / "data").glob("*.*"):  # not the folders of data that scripts have made there
        shutil.copy(path, folder / "data")
    source = (folder / mutant.file).read_text(encoding="utf-8")
    for right, wrong in mutant.changes:
        assert source.count(right) == 1, f"{right!r} should occur once in {mutant.file}"
        source = source.replace(right, wrong)
    (folder / mutant.file).write_text(source, encoding="utf-8")


def run_in_fork(folder, test, log):
    """pytest's exit status: 0 all passed, 1 a test failed, anything else is a mistake in the catalogue."""
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if not path.startswith(str(ROOT / "tests")) and path != str(ROOT))]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", f"tests/{test}"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_the_bug_is_caught(mutant, tmp_path, capsys):
    mutate(mutant, tmp_path)
    assert not {"minippo", "train_sft", "tiny"} & set(sys.modules) and torch.get_num_threads() == 1
    status = run_in_fork(tmp_path, mutant.killer, tmp_path / "log.txt")
    log = (tmp_path / "log.txt").read_text(errors="replace")
    with capsys.disabled():
        print(f"\n{mutant.name}\n    seen    {mutant.where}\n    effect  {mutant.effect}\n    killed  {mutant.killer}", end=" ")
    assert status == 1, f"{mutant.killer} ended with {status} where 1, a failed test, was due:\n{log[-3000:]}"


def test_every_mutant_has_a_name_of_its_own_and_there_are_enough():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 75
