"""The specification of data/convert.py. Run: python -m pytest tests/test_convert.py"""

import csv
import gzip
import io
import json
import os
import random
import subprocess
import sys
import zlib

import pytest

from cli import ROOT, run
from data.convert import cut, finished, split, written
from plumbing.text import KEYS, load_jsonl, read_rows

SFT, PREF = ("--prompt", "q", "--completion", "a"), ("--prompt", "q", "--chosen", "good", "--rejected", "bad")
CHATS, CHAT_PAIRS = ("--messages", "m"), ("--chosen", "good", "--rejected", "bad")


def convert(tmp_path, content, *flags, name="rows.jsonl"):
    """What the command does with a file of this content, or of these rows -> exit status, stdout, stderr."""
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content).encode()
    (tmp_path / name).write_bytes(content)
    return run("data/convert.py", tmp_path / name, "--out", tmp_path / "out", *flags)


def rows_of(tmp_path, task, splits=("train", "val")):
    """The rows that the command wrote, as the scripts read them."""
    return [row for split in splits for row in load_jsonl(tmp_path / "out" / f"{task}_{split}.jsonl", KEYS[task])]


def converted(tmp_path, content, *flags, name="rows.jsonl"):
    """The rows of a content, in order, with nothing held out."""
    status, out, err = convert(tmp_path, content, "--val", 0, *flags, name=name)
    assert (status, err) == (0, "")
    (path,) = (tmp_path / "out").iterdir()
    return rows_of(tmp_path, path.name.split("_")[0], ["train"])


def chat(*contents, system=None):
    """User and assistant by turns."""
    roles = ["user", "assistant"] * len(contents)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": role, "content": content} for role, content in zip(roles, contents)]


# The three kinds of file

ROWS = [{"q": "What is 1, 1?", "a": 'It is "2".\nOr é.'}, {"q": "b", "a": "\u2028c"}]
EXPECTED = [("What is 1, 1?", ' It is "2".\nOr é.'), ("b", "\u2028c")]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
ARRAY = json.dumps(ROWS, indent=1, ensure_ascii=False)
CSV = 'x,q,a\r\n1,"What is 1, 1?","It is ""2"".\nOr é."\r\n2,b,\u2028c'
BOM = "\ufeff"


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("name, text", [
    ("rows.jsonl", LINES), ("rows.jsonl", LINES + "\n"), ("rows.jsonl", BOM + LINES.replace("\n", "\r\n") + "\r\n"),
    ("rows", "\n \n" + LINES.replace("\n", "\n\r\n\t\n") + "\n\n"), ("rows.json", LINES),
    ("rows.json", ARRAY), ("rows.jsonl", BOM + "\r\n " + ARRAY.replace("\n", "\r\n") + "\r\n"),
    ("rows.csv", CSV), ("ROWS.CSV", CSV + "\r\n"), ("rows.csv", BOM + CSV), ("rows.csv", CSV.replace("\r\n", "\n") + "\n\n"),
    ("rows.csv.gz", "\r\n" + CSV.replace("\r\n", "\r\n\r\n")), ("rows.csv", CSV.replace("\r\n", "\r")), ("rows.jsonl.gz", LINES),
])  # fmt: skip
def test_json_lines_a_json_array_and_csv_say_the_same_gzipped_or_not(tmp_path, name, text, zipped):
    data = text.encode()
    assert converted(tmp_path, gzip.compress(data) if zipped else data, *SFT, name=name) == EXPECTED


def test_csv_takes_what_the_csv_module_writes_and_values_of_any_length(tmp_path):
    rows = [("a,b", ' say "c"'), (" x ", "long " * 100_000), ("two\nlines\n", ",\r\n,"), ("[1]", " {}"), ("q\u2028", "\x85'")]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("q", "a"), *rows])
    assert converted(tmp_path, text.getvalue().encode(), *SFT, name="rows.csv") == rows


def test_rows_keep_their_order_and_other_keys_are_left_behind(tmp_path):
    rows = [{"q": f"q{i}", "a": f"a{i}", "other": [i]} for i in range(300)]
    assert converted(tmp_path, rows, *SFT) == [(f"q{i}", f" a{i}") for i in range(300)]
    assert list(json.loads((tmp_path / "out" / "sft_train.jsonl").read_text().splitlines()[0])) == ["prompt", "completion"]


def test_text_is_written_as_it_is_and_half_a_surrogate_pair_survives(tmp_path):
    assert converted(tmp_path, b'{"q": "\\u00e9", "a": "\\ud83d\\n\\\\"}', *SFT) == [("é", " \ud83d\n\\")]
    assert (tmp_path / "out" / "sft_train.jsonl").read_bytes() == '{"prompt": "é", "completion": " \\ud83d\\n\\\\"}\n'.encode()


# What becomes of a row


@pytest.mark.parametrize("flags, task, row, expected", [
    (SFT, "sft", {"q": "b", "a": "c"}, ("b", " c")), (PREF, "pref", {"q": "b", "good": "c", "bad": "d"}, ("b", " c", " d")),
    (("--prompt", "q"), "prompts", {"q": "b"}, ("b",)), (CHATS, "sft", {"m": chat("b", "c")}, ("User: b\nAssistant:", " c")),
    (CHAT_PAIRS, "pref", {"good": chat("b", "c"), "bad": chat("b", "d")}, ("User: b\nAssistant:", " c", " d")),
], ids=["sft", "pref", "prompts", "chats", "pairs of chats"])  # fmt: skip
def test_each_use_writes_its_two_files_and_says_how_many_rows(tmp_path, flags, task, row, expected):
    second = json.loads(json.dumps(row).replace('"b"', '"e"'))
    status, out, err = convert(tmp_path, [row, second], *flags)
    assert (status, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{task}_train.jsonl", f"{task}_val.jsonl"]
    assert sorted(rows_of(tmp_path, task)) == [expected, (expected[0].replace("b", "e"), *expected[1:])]
    assert f"{tmp_path / 'rows.jsonl'}: 2 rows read, 0 skipped\n" in out
    for name in ("train", "val"):
        assert f"{tmp_path / 'out' / f'{task}_{name}.jsonl'}: 1 rows written\n" in out
        assert len(read_rows(tmp_path / "out", task, name)) == 1


@pytest.mark.parametrize("prompt, answer, expected", [
    ("a", "b", " b"), ("a", " b", " b"), ("a", "\nb", "\nb"), ("a ", "b", "b"), ("a\n", "b", "b"), ("a ", " b", " b"),
    ("a", "b ", " b "),
])  # fmt: skip
def test_an_answer_gets_a_leading_space_where_neither_side_has_white_space(prompt, answer, expected):
    assert finished(prompt, answer) == (prompt, expected)
    assert finished(prompt, "x y", answer) == (prompt, finished(prompt, "x y")[1], expected)


def test_a_chat_is_written_out_with_its_roles_up_to_the_last_reply():
    turns = [("system", "Be kind."), ("user", " Hi\n"), ("assistant", "Hello"), ("user", "1 + 1?\nThink."), ("assistant", "\n2 ")]
    prompt = "System: Be kind.\nUser: Hi\nAssistant: Hello\nUser: 1 + 1?\nThink.\nAssistant:"
    assert cut([turns]) == (prompt, "\n2 ")
    assert cut([turns, [*turns[:-1], ("assistant", "3")]]) == (prompt, "\n2 ", "3")


def test_a_chat_in_which_nobody_asks_has_an_empty_prompt():
    assert written([]) == written([("user", ""), ("system", " \n")]) == ""
    assert written([("user", ""), ("system", "x")]) != ""


def test_messages_may_hold_other_keys_which_do_not_tell_two_beginnings_apart(tmp_path):
    good, bad = chat("b", "c"), chat("b", "d")
    good[0]["id"], bad[0]["id"] = 1, [2]
    assert converted(tmp_path, [{"good": good, "bad": bad}], *CHAT_PAIRS) == [("User: b\nAssistant:", " c", " d")]


def test_how_chats_are_written_is_printed_and_only_for_chats(tmp_path):
    for flags in (CHATS, SFT):
        _, out, _ = convert(tmp_path, [{"m": chat("b", "c"), "q": "b", "a": "c"}], *flags)
        template = r"'System: ...\nUser: ...\nAssistant: ...\nUser: ...\nAssistant:'"
        assert (f"chats are written as {template}\n" in out) == ("written as" in out) == (flags == CHATS)


@pytest.mark.parametrize("flags, row, reason", [
    (SFT, {"q": "", "a": "c"}, "empty prompt"), (("--prompt", "q"), {"q": " \n"}, "empty prompt"),
    (SFT, {"q": "b", "a": " "}, "empty answer"), (PREF, {"q": "b", "good": "", "bad": "c"}, "empty answer"),
    (PREF, {"q": "b", "good": "c", "bad": "\n"}, "empty answer"), (PREF, {"q": "", "good": "c", "bad": ""}, "empty prompt"),
    (PREF, {"q": "b", "good": "c", "bad": "c"}, "equal answers"), (PREF, {"q": "b", "good": "c", "bad": " c\n"}, "equal answers"),
    (CHATS, {"m": []}, "no reply at the end"), (CHATS, {"m": chat("b")}, "no reply at the end"),
    (CHATS, {"m": chat("b", "c", "d")}, "no reply at the end"), (CHATS, {"m": chat(" ", "c")}, "empty prompt"),
    (CHATS, {"m": chat("b", "c")[1:]}, "empty prompt"), (CHATS, {"m": chat("b", "")}, "empty answer"),
    (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b")}, "no reply at the end"),
    (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("e", "d")}, "chats differ before the last message"),
    (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b", "c", "d", "e")}, "chats differ before the last message"),
    (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b", "d", system="x")}, "chats differ before the last message"),
    (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b", "c")}, "equal answers"),
])  # fmt: skip
def test_a_row_that_teaches_nothing_is_skipped_and_counted_by_reason(tmp_path, flags, row, reason):
    sound = {"q": "x", "a": "y", "good": "y", "bad": "z"} if "--prompt" in flags else {"m": chat("x", "y")}
    sound = {"good": chat("x", "y"), "bad": chat("x", "z")} if flags == CHAT_PAIRS else sound
    status, out, err = convert(tmp_path, [row, sound, row], *flags, "--val", 0)
    assert (status, err) == (0, "") and f"rows.jsonl: 3 rows read, 2 skipped; {reason}: 2\n" in out
    status, out, err = convert(tmp_path, [row, row], *flags)
    assert (status, out) == (2, "") and err.endswith(f"no row to write (2 rows read, 2 skipped; {reason}: 2)\n")


def test_a_row_that_came_before_is_a_duplicate_and_the_same_prompt_with_another_answer_is_none(tmp_path):
    rows = [{"q": "b", "a": "c"}, {"q": "b", "a": "d"}, {"q": "b", "a": " c"}, {"q": "e", "a": "c"}, {"q": "b", "a": "c"}]
    assert converted(tmp_path, rows, *SFT) == [("b", " c"), ("b", " d"), ("e", " c")]
    assert "5 rows read, 2 skipped; duplicate: 2\n" in convert(tmp_path, rows, *SFT)[1]


# What is held out


def test_no_prompt_is_in_train_and_val_and_the_share_is_about_what_was_asked():
    rows = [(f"q{i % 2000}", f"a{i}") for i in range(6000)]
    for share in (0.01, 0.05, 0.5, 0.9):
        parts = split(rows, share)
        train, val = ({row[0] for row in parts[name]} for name in ("train", "val"))
        assert not train & val and sorted(parts["train"] + parts["val"]) == sorted(rows)
        assert len(val) == pytest.approx(2000 * share, abs=4 * (2000 * share * (1 - share)) ** 0.5)
        assert parts["val"] == [row for row in rows if row[0] in val] and parts["train"] == [row for row in rows if row[0] in train]


def test_one_prompt_in_twenty_is_held_out_unless_asked_otherwise(tmp_path):
    convert(tmp_path, [{"q": f"q{i}"} for i in range(2000)], "--prompt", "q")
    assert 60 < len(rows_of(tmp_path, "prompts", ["val"])) < 140


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.5, 1 - 1e-9])
def test_two_prompts_are_enough_for_both_files(share):
    for i in range(50):
        parts = split([(f"a{i}", "x"), (f"b{i}", "x"), (f"a{i}", "y")], share)
        assert parts["train"] and parts["val"]


def test_a_share_of_0_writes_the_train_file_alone_and_1_the_val_file(tmp_path):
    rows = [{"q": f"q{i}"} for i in range(9)]
    for share, name in ((0, "train"), (1, "val")):
        (tmp_path / name).mkdir()
        convert(tmp_path / name, rows, "--prompt", "q", "--val", share)
        assert [path.name for path in (tmp_path / name / "out").iterdir()] == [f"prompts_{name}.jsonl"]
        assert len(rows_of(tmp_path / name, "prompts", [name])) == 9


def test_a_single_prompt_goes_to_train(tmp_path):
    status, out, err = convert(tmp_path, [{"q": "b", "a": "c"}, {"q": "b", "a": "d"}], *SFT)
    assert (status, err) == (0, "") and "2 rows written" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sft_train.jsonl"]


def test_the_same_prompts_are_held_out_of_every_file_in_any_order():
    prompts = [f"q{i}" for i in range(500)]
    val = {row[0] for row in split([(prompt,) for prompt in prompts], 0.1)["val"]}
    assert val == {prompt for prompt in prompts if zlib.crc32(prompt.encode()) < 0.1 * 2**32}
    random.Random(0).shuffle(prompts)
    assert {row[0] for row in split([(prompt, "a", "b") for prompt in prompts], 0.1)["val"]} == val
    assert {row[0] for row in split([(prompt, "a") for prompt in prompts[:250]], 0.1)["val"]} == val & set(prompts[:250])
    assert len(split([("\ud83d",), ("b",)], 0.5)["val"]) == 1


# Files


def test_other_files_stay_and_one_of_the_same_name_is_replaced(tmp_path):
    rows = [{"q": f"q{i}", "a": "x", "good": "y", "bad": "z"} for i in range(20)]
    convert(tmp_path, rows, *PREF)
    pref = rows_of(tmp_path, "pref")
    for answer in ("x", "new"):
        convert(tmp_path, [{**row, "a": answer} for row in rows], *SFT)
        assert sorted(rows_of(tmp_path, "sft")) == sorted((row["q"], f" {answer}") for row in rows)
    assert rows_of(tmp_path, "pref") == pref and len(list((tmp_path / "out").iterdir())) == 4


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    convert(tmp_path, [{"q": "old"}, {"q": "older"}], "--prompt", "q")
    before = rows_of(tmp_path, "prompts")

    def fail(*paths):
        raise OSError(28, "No space left on device", str(paths[0]))

    monkeypatch.setattr(os, "replace", fail)
    status, _, err = convert(tmp_path, [{"q": "new"}, {"q": "newer"}], "--prompt", "q")
    assert status == 2 and err.count("\n") == 1 and "No space left" in err and rows_of(tmp_path, "prompts") == before


def test_the_command_runs_from_any_folder_and_makes_the_folders_it_needs(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    command = [sys.executable, str(ROOT / "data" / "convert.py"), "rows.json", *SFT, "--out", "new/folder"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "") and len(list((tmp_path / "new" / "folder").iterdir())) == 2


# What is refused

GOOD = '{"q": "a", "a": "b"}'
MESSAGES = '{"m": [{"role": "user", "content": "b"}, %s]}'


@pytest.mark.parametrize("name, content, flags, says", [
    # JSON lines, as plumbing/text.py has it
    ("r.jsonl", b"", SFT, ["no row to write", "0 rows read", "JSON lines"]),
    ("r.jsonl", b"\n \n", SFT, ["no row to write"]),
    ("r.jsonl", GOOD.encode() + b'\n{"q": "a",', SFT, ["line 2", "cannot be read", "JSON lines"]),
    ("r.jsonl", b'\n\n{"q": "a"} {"q": "b"}', SFT, ["line 3", "cannot be read"]),
    ("r.jsonl", GOOD.encode() + b"\n" + b'{"a":' * 100_000, SFT, ["line 2", "cannot be read"]),
    ("r.jsonl", b"q,a\n1,2\n", SFT, ["line 1", "CSV", ".csv"]),
    ("r.jsonl", GOOD.encode() + b"\nnull", SFT, ["line 2", "found NoneType", "objects"]),
    ("r.jsonl", GOOD.encode() + b'\n["a"]', SFT, ["line 2", "found list"]),
    ("r.jsonl", b'{"a": "b", "question": 1}', SFT, ["line 1", "no key 'q'", "'a', 'question'"]),
    ("r.jsonl", b'{"q": "b"}', SFT, ["line 1", "no key 'a'", "found 'q'"]),
    ("r.jsonl", b"{}", SFT, ["line 1", "no key 'q'", "no key at all"]),
    ("r.jsonl", b'{"q": 7, "a": "b"}', SFT, ["line 1", "'q' should be a string, found 7\n"]),
    ("r.jsonl", b'\n{"q": "a", "a": null}', SFT, ["line 2", "'a' should be a string, found null\n"]),
    ("r.jsonl", b'{"q": "a", "good": [{"role": "user"}], "bad": "c"}', PREF, ["'good'", '[{"role"', "leave --prompt"]),
    ("r.jsonl", json.dumps({"q": ["x" * 99]}).encode(), ("--prompt", "q"), ['["' + "x" * 38 + ";"]),
    ("r.jsonl", GOOD.encode() + b'\n{"q": "\xff"}', SFT, ["line 2", "not UTF-8", "save the file as UTF-8"]),
    ("r.jsonl", "\ufeffé\né".encode()[:-1], SFT, ["line 2", "not UTF-8"]),
    ("r.jsonl", GOOD.encode("utf-16"), SFT, ["line 1", "not UTF-8"]),
    # A JSON array
    ("r.json", b"[]", SFT, ["no row to write", "0 rows read"]),
    ("r.json", b"[" + GOOD.encode() + b",\n{", SFT, ["r.json: cannot be read", "line 2"]),
    ("r.json", b"[" * 100_000, SFT, ["r.json: cannot be read"]),
    ("r.json", b"[" + GOOD.encode() + b", 7]", SFT, ["row 2", "found int"]),
    ("r.json", b"[[], " + GOOD.encode() + b"]", SFT, ["row 1", "found list"]),
    ("r.json", b"[" + GOOD.encode() + b",\n\n{}]", SFT, ["row 2", "no key 'q'"]),
    ("r.json", b"[\n" + GOOD.encode() + b'\n, "\xff"]', SFT, ["line 3", "not UTF-8"]),
    ("r.json", b'{\n"data": []}', SFT, ["line 1", "cannot be read", "JSON array"]),
    # CSV
    ("r.csv", b"", SFT, ["no row to write"]),
    ("r.csv", b"q,a\n", SFT, ["no row to write", "header"]),
    ("r.csv", b"question,answer\n1,2", SFT, ["row 2", "no key 'q'", "'question', 'answer'"]),
    ("r.csv", b"q;a\n1;2", SFT, ["row 2", "no key 'q'", "'q;a'"]),
    ("r.csv", b"q, a\n1,2", SFT, ["row 2", "no key 'a'; found 'q', ' a'"]),
    ("r.csv", b"q,a\n1,2\n\nwell, yes,2", SFT, ["row 4", "3 values for 2 names", "quotes"]),
    ("r.csv", b"q,a\n1,2\n1", SFT, ["row 3", "1 values for 2 names"]),
    ("r.csv", b'q,a\n1,"2\n3"\n4,5,6', SFT, ["row 3", "3 values"]),
    ("r.csv", b'q,a\n1,"2\n3,4\n', SFT, ["row 2", "cannot be read"]),
    ("r.csv", b'q,a\n1,2\n"3"x,4\n', SFT, ["row 3", "cannot be read"]),
    ("r.csv", '"q\n",a\n1,é'.encode("latin-1"), SFT, ["line 3", "not UTF-8"]),
    ("r.csv", b"m\nx", CHATS, ["row 2", "'m'", "list of messages"]),
    # gzip
    ("r.gz", gzip.compress(GOOD.encode() * 99)[:-9], SFT, ["r.gz: cannot be read"]),
    ("r.gz", gzip.compress(GOOD.encode() * 99)[:10] + b"\xff" * 30, SFT, ["r.gz: cannot be read"]),
    ("r.gz", gzip.compress(GOOD.encode()) + b"more", SFT, ["r.gz: cannot be read"]),
    ("r.gz", gzip.compress(b"\n{}"), SFT, ["r.gz, line 2"]),
    # Chats
    ("r.jsonl", b'{"m": "Human: b"}', CHATS, ["'m'", "list of messages", '"Human: b"', "hh_rlhf.py"]),
    ("r.jsonl", b'{"chosen": 1}', CHAT_PAIRS, ["no key 'good'", "'chosen'"]),
    ("r.jsonl", b'{"good": [], "bad": null}', CHAT_PAIRS, ["'bad' should be a list of messages, found null\n"]),
    ("r.jsonl", b"\n" + (MESSAGES % '"c"').encode(), CHATS, ["line 2", 'found "c"', "'role' and 'content'"]),
    ("r.jsonl", (MESSAGES % '{"from": "gpt", "value": "c"}').encode(), CHATS, ['found {"from": "gpt"', "'role' and 'content'"]),
    ("r.jsonl", (MESSAGES % '{"role": "assistant"}').encode(), CHATS, ['found {"role": "assistant"}', "'content'"]),
    ("r.jsonl", (MESSAGES % '{"role": "assistant", "content": ["c"]}').encode(), CHATS, ['["c"]', "strings"]),
    ("r.jsonl", (MESSAGES % '{"role": 1, "content": "c"}').encode(), CHATS, ['{"role": 1', "strings"]),
    ("r.jsonl", (MESSAGES % json.dumps({"x": "y" * 99})).encode(), CHATS, ['found {"x": "' + "y" * 73 + "\n"]),
], ids=lambda value: str(value)[:50])  # fmt: skip
def test_what_is_no_row_ends_the_run_with_one_line_and_no_file(tmp_path, name, content, flags, says):
    status, out, err = convert(tmp_path, content, *flags, name=name)
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.startswith(f"convert.py: {tmp_path / name}")
    assert all(part in err for part in says) and not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_or_a_folder_in_the_way_is_named(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        status, _, err = run("data/convert.py", path, "--out", tmp_path / "out", *SFT)
        assert status == 2 and err.count("\n") == 1 and f"{path}: cannot be read" in err and "Errno" not in err
    (tmp_path / "out").write_text("a file")
    status, _, err = convert(tmp_path, [{"q": "b"}], "--prompt", "q")
    assert status == 2 and err.count("\n") == 1 and str(tmp_path / "out") in err


@pytest.mark.parametrize("flags, says", [
    ((), "give --prompt, or --prompt --completion, or"), (("--completion", "a"), "give --prompt"), (("--chosen", "a"), "give"),
    ((*SFT, "--messages", "m"), "or --messages"), ((*SFT, "--chosen", "m"), "--chosen --rejected"),
    ((*PREF, "--completion", "a"), "give"), ((*SFT, "--val", "-0.1"), "between 0 and 1"), ((*SFT, "--val", "5"), "between 0 and 1"),
    ((*SFT, "--val", "nan"), "between 0 and 1"), ((*SFT, "--val", "x"), "--val"), (("--prom", "q"), "--prom"),
    (("--prompt",), "--prompt"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_refused_in_one_line(tmp_path, flags, says):
    status, out, err = convert(tmp_path, [{"q": "a", "a": "b"}], *flags)
    assert (status, out) == (2, "") and err.count("\n") == 1 and says in err and "-h explains" in err
    assert not (tmp_path / "out").exists()


def test_without_a_file_or_a_folder_one_line_says_so():
    for args, says in ((("x.jsonl", "--prompt", "q"), "--out"), (("--out", "x", "--prompt", "q"), "FILE")):
        status, _, err = run("data/convert.py", *args)
        assert status == 2 and err.count("\n") == 1 and says in err


def test_help_shows_every_flag_and_how_to_use_them():
    status, out, _ = run("data/convert.py", "-h")
    assert status == 0 and "--prompt question --completion answer" in out and "leading space" in out
    for text in ("where a row has its rejected", "share of the prompts to hold out (default: 0.05)", "folder to write into"):
        assert text in out


def test_a_key_may_be_empty_as_the_first_column_of_some_tables_is(tmp_path):
    assert converted(tmp_path, b",q\n7,8", "--prompt", "", name="rows.csv") == [("7",)]
