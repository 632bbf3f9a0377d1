"""Files and rows: data/files.py, data/rows.py."""

import os

import pytest

from cli import write_rows
from data import files
from data.files import UserError
from data.rows import held_out, load_rows, read_rows


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path, new, full, synced = tmp_path / "new" / "er" / "x", b"\xc3\xa9\n", "No space left", []

    def fail(file):
        file.write(b"half")
        assert sorted(os.listdir(path.parent)) == [".x.tmp", "x"]
        raise errors.pop()

    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    for contents in ("é\n", new, lambda file: file.write(new)):
        files.write_file(str(path), contents)
        assert path.read_bytes() == new and synced.pop() == 3
    # torch.save hides the system's error behind its own.
    errors = [KeyboardInterrupt(), OSError(28, full), RuntimeError(full + "\nat"), RuntimeError()]
    errors[1].__context__, errors[3].__context__ = KeyError(), OSError(28, full)
    for _ in range(3):
        with pytest.raises(
            UserError, match=rf"x: cannot be written \({full}\); any old file is intact"
        ):
            files.write_file(path, fail)
    with pytest.raises(KeyboardInterrupt):
        files.write_file(path, fail)
    assert path.read_bytes() == new and os.listdir(path.parent) == ["x"]


def test_lines_are_read_and_a_fault_is_named(tmp_path):
    path, rows = tmp_path / "x", [{"a": "é\u2028\x85 \n"}, {"a": "\ud83d"}, {}]
    files.write_jsonl(path, rows)
    assert path.read_bytes() == '{"a": "é\u2028\x85 \\n"}\n{"a": "\\ud83d"}\n{}\n'.encode()
    path.write_bytes(b"\xef\xbb\xbf\r\n \n" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert files.parse_lines(path, files.read_text(path)) == dict(zip((3, 4, 5), rows))
    for data, says in (
        (b"{}\n\xc3\xa9\n\xff\n", r"x, line 3: not UTF-8 \(.*\); save"),
        (b"{}\n{", r"x, line 2: not JSON \("),
        (b"[" * 100_000, r"x, line 1: not JSON \("),
        (b"\n[1]", "x, line 2: 'prompt' is null; expected one JSON object per line with prompt"),
        (b'{"prompt": "a"}', "x, line 1: 'completion' is null"),
        (b'{"completion": "", "prompt": 7}', "x, line 1: 'prompt' is 7"),
        (b'{"completion": "", "prompt": "", "label": 0}', "x, line 1: .label. is false"),
        (b"\n", "x: no rows"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=says):
            load_rows(path, "sft")
    path.write_text('{"completion": "b", "label": true, "prompt": "a"}\n')
    assert load_rows(path, "sft") == [("a", "b")]
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')  # the last line of a log, half written
    assert files.read_log(path) == [{"step": 1}, {"step": 2}]
    assert files.read_log(tmp_path / "no") == []


def test_a_hash_holds_out_one_prompt_in_twenty():
    numbers = [*map(str, range(1000))]
    assert held_out(numbers[:40] * 2) == held_out(numbers[39::-1]) == {"39"}
    assert len(held_out(numbers)) == 55
    assert held_out(["\ud83d", "b", "c"]) == {"c"}
    assert held_out(["39", "51"]) == {"51"}  # not both
    assert held_out("aa") == held_out([]) == set()


def test_without_a_file_other_rows_serve_or_are_held_out(tmp_path, capsys):
    def read(task, **written):
        write_rows(tmp_path, **written)
        return [read_rows(tmp_path, task, split) for split in ("train", "val")]

    sft = [("9", "1"), ("39", "2"), ("39", "3"), ("9", "4")]
    pref = [("5", "a", "b"), ("39", "c", "d"), ("5", "a", "f")]
    assert read("sft", sft_train=sft) == [[sft[0], sft[3]], sft[1:3]]
    assert "sft_train.jsonl: 2 rows for val; there is no sft_val.jsonl" in capsys.readouterr().out
    # Demonstrations serve for prompts; pairs serve for all, and come first.
    assert read("prompts") == [[("9",)], [("39",)]]
    with pytest.raises(UserError, match="pref_train.jsonl: not found; --data"):
        read("pref")
    assert read("prompts", pref_train=pref) == [[("5",)], [("39",)]]
    assert "no prompts_train.jsonl: pref_train.jsonl serves" in capsys.readouterr().out
    (tmp_path / "sft_train.jsonl").unlink()
    assert read("sft") == [[("5", "a"), ("5", "a")], [("39", "c")]]
    assert read("pref", pref_val=pref[:1]) == [pref, pref[:1]]
    assert capsys.readouterr().out.endswith("pref_val.jsonl: 1 rows\n")
    with pytest.raises(UserError, match="too few prompts .* write a prompts_val"):
        read("prompts", prompts_train=[("5",)])
