"""The specification of plumbing/files.py. Run: python -m pytest tests/test_files.py"""

import json
import os

import pytest

from plumbing import files
from plumbing.errors import UserError


CONTENTS = {
    "text": "é\n",
    "bytes": "é\n".encode(),
    "function": lambda file: file.write("é\n".encode()),
}


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
def test_a_file_is_written_whole_beside_its_place_by_one_process_alone(
    tmp_path, monkeypatch, contents
):
    path, replace, synced, names = tmp_path / "new" / "folder" / "x", os.replace, [], []

    def watched(beside, goal):
        assert os.path.dirname(beside) == os.path.dirname(goal)
        assert synced == [(os.stat(beside)[1], 3)]  # what a power failure must not take
        names.append(str(beside))
        replace(beside, goal)

    monkeypatch.setattr(os, "replace", watched)
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append((os.fstat(number)[1], os.fstat(number)[6]))
    )
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        synced.clear()
        files.write_file(str(path), contents)
        assert path.read_text(encoding="utf-8") == "é\n" and os.listdir(path.parent) == ["x"]
    assert len(set(names)) == 2 and all(
        os.path.basename(name).startswith(".") and name.endswith(".tmp") for name in names
    )


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("No space left on device\nat 0x1")],
)
@pytest.mark.parametrize("tidy", [False, True])
def test_a_file_that_cannot_be_written_leaves_the_old_one_as_it_was(tmp_path, error, tidy):
    def full_disk(file):
        file.write(b"half")
        if tidy:  # another run in this folder may remove what is half written
            os.unlink(file.name)
        raise error

    files.write_file(tmp_path / "x", "old")
    with pytest.raises(UserError) as refused:
        files.write_file(tmp_path / "x", full_disk)
    says = "cannot be written (No space left on device); what was there before is still there"
    assert str(refused.value) == f"{tmp_path / 'x'}: {says}"
    assert (tmp_path / "x").read_text() == "old" and os.listdir(tmp_path) == ["x"]
    with pytest.raises(UserError, match="directory"):
        files.write_file(tmp_path, "new")


def test_the_reason_of_an_error_is_what_the_system_said_or_else_its_first_line():
    try:
        try:
            raise PermissionError(13, "Permission denied")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos")
    except RuntimeError as error:
        assert files.reason(error) == "Permission denied"
    try:
        try:
            raise ValueError("before")
        except ValueError:
            raise PermissionError(13, "Permission denied")
    except PermissionError as error:
        assert files.reason(error) == "Permission denied"
    assert (
        files.reason(RuntimeError()) == ""
        and files.reason(OSError("its own words\nand more")) == "its own words"
    )


def test_a_log_is_read_without_the_lines_that_are_none(tmp_path):
    rows = [{"step": 1, "loss": 0.5}, {"step": 2.5, "text": "é"}, {"step": 3}]
    first, *others = (json.dumps(row, ensure_ascii=False) for row in rows)
    no_rows = ["", '{"step"', "{}", "[1]", '"step"', "3", "[" * 10**5]
    no_rows += ['{"step": true}', '{"step": "4"}', '{"step": null}']
    path = tmp_path / "log.jsonl"
    assert files.read_log(path) == []
    path.write_bytes(
        "\n".join([first, *no_rows, *others, '{"step": 5, "lo']).encode() + b"\n\xff{}"
    )
    assert files.read_log(str(path)) == rows
