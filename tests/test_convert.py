"""The specification of data/convert.py and data/rt_polarity.py. Run: python -m pytest tests/test_convert.py"""

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
from data.convert import held_out, make_row, write_rows
from data.rt_polarity import make_rows
from plumbing.rows import KEYS, load_jsonl, read_rows

SFT = ("--prompt", "q", "--completion", "a")
PREF = ("--prompt", "q", "--chosen", "good", "--rejected", "bad")
PROMPTS, CHATS, CHAT_PAIRS = PREF[:2], ("--messages", "m"), PREF[2:]


def convert(tmp_path, content, *flags, name="rows.jsonl"):
    """What the command does with a file of this content, or of these rows -> status, stdout, stderr."""
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content).encode()
    (tmp_path / name).write_bytes(content)
    return run("data/convert.py", tmp_path / name, "--out", tmp_path / "out", *flags)


def rows_of(folder, task, splits=("train", "val")):
    """The rows that a command wrote, as the scripts read them."""
    paths = [folder / f"{task}_{split}.jsonl" for split in splits]
    return [row for path in paths for row in load_jsonl(path, KEYS[task])]


def converted(tmp_path, content, *flags, name="rows.jsonl"):
    """The rows of a content, in order, with nothing held out."""
    status, out, err = convert(tmp_path, content, "--val", 0, *flags, name=name)
    assert (status, err) == (0, "")
    (path,) = (tmp_path / "out").iterdir()
    return rows_of(tmp_path / "out", path.name.split("_")[0], ["train"])


def chat(*contents):
    """User and assistant by turns."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def sharegpt(*contents):
    """The same with the names of ShareGPT."""
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[x["role"]], "value": x["content"]} for x in chat(*contents)]


def talk(*contents):
    """The same as a transcript."""
    names = ["Human", "Assistant"] * len(contents)
    return "".join(f"\n\n{name}: {content}" for name, content in zip(names, contents))


# The three kinds of file

ROWS = [{"q": "What is 1, 1?", "a": 'It is "2".\nOr é.'}, {"q": "b", "a": "\u2028c"}]
EXPECTED = [("What is 1, 1?", ' It is "2".\nOr é.'), ("b", "\u2028c")]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
ARRAY = json.dumps(ROWS, indent=1, ensure_ascii=False)
TABLE = 'x,q,a\r\n1,"What is 1, 1?","It is ""2"".\nOr é."\r\n2,b,\u2028c'
BOM = "\ufeff"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
@pytest.mark.parametrize(
    "name, text",
    [
        ("rows.jsonl", BOM + LINES.replace("\n", "\r\n") + "\r\n"),
        ("rows", "\n \n" + LINES.replace("\n", "\n\r\n\t\n") + "\n\n"),
        ("rows.json", LINES),
        ("rows.json", ARRAY),
        ("rows.jsonl", BOM + "\r\n " + ARRAY.replace("\n", "\r\n") + "\r\n"),
        ("ROWS.CSV", TABLE + "\r\n"),
        ("rows.csv", BOM + TABLE.replace("\r\n", "\n") + "\n\n"),
        ("rows.csv", TABLE.replace("\r\n", "\r")),
        ("rows.csv.gz", "\r\n" + TABLE.replace("\r\n", "\r\n\r\n")),
    ],
)
def test_json_lines_a_json_array_and_csv_say_the_same_gzipped_or_not(tmp_path, name, text, pack):
    assert converted(tmp_path, pack(text.encode()), *SFT, name=name) == EXPECTED


def test_csv_takes_what_the_csv_module_writes_and_values_of_any_length(tmp_path):
    rows = [("a,b", ' say "c"'), (" x ", "long " * 100_000), ("two\nlines\n", ",\r\n,")]
    rows += [("[1]", " {}"), ("q\u2028", "\x85'")]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("q", "a"), *rows])
    assert converted(tmp_path, text.getvalue().encode(), *SFT, name="rows.csv") == rows
    flags = ["--prompt", "", *SFT[2:], "--overwrite"]
    assert converted(tmp_path, b",a\n7,8", *flags, name="rows.csv") == [("7", " 8")]


def test_text_is_written_as_it_is_and_half_a_surrogate_pair_survives(tmp_path):
    content = b'{"x": 1, "a": "\\ud83d\\n\\\\", "q": "\\u00e9"}'
    assert converted(tmp_path, content, *SFT) == [("é", " \ud83d\n\\")]
    written = (tmp_path / "out" / "sft_train.jsonl").read_bytes()
    assert written == '{"prompt": "é", "completion": " \\ud83d\\n\\\\"}\n'.encode()


# What becomes of a row


@pytest.mark.parametrize(
    "flags, task, row, expected",
    [
        (SFT, "sft", {"q": "1", "a": "c"}, ("1", " c")),
        (PREF, "pref", {"q": "1", "good": "c", "bad": "d"}, ("1", " c", " d")),
        (PROMPTS, "prompts", {"q": "1"}, ("1",)),
        (CHATS, "sft", {"m": chat("1", "c")}, ("User: 1\nAssistant:", " c")),
        (
            CHAT_PAIRS,
            "pref",
            {"good": chat("1", "c"), "bad": [{"id": 7, **chat("1")[0]}, chat("1", "d")[1]]},
            ("User: 1\nAssistant:", " c", " d"),
        ),
        (CHATS, "sft", {"m": sharegpt("1", "c")}, ("User: 1\nAssistant:", " c")),
        (
            CHAT_PAIRS,
            "pref",
            {"good": sharegpt("1", "c"), "bad": chat("1", "d")},
            ("User: 1\nAssistant:", " c", " d"),
        ),
        (CHATS, "sft", {"m": talk("1", "c \n")}, ("\n\nHuman: 1\n\nAssistant:", " c")),
        (
            CHAT_PAIRS,
            "pref",
            {"good": talk("h", "i", "1", "c"), "bad": talk("h", "i", "1", "d\n\nHuman: ")},
            (talk("h", "i", "1") + "\n\nAssistant:", " c", " d\n\nHuman:"),
        ),
    ],
)
def test_each_use_writes_its_two_files_and_says_how_many_rows(tmp_path, flags, task, row, expected):
    status, out, err = convert(
        tmp_path, [row, json.loads(json.dumps(row).replace("1", "2"))], *flags
    )
    folder = tmp_path / "out"
    assert (status, err) == (0, "")
    assert {path.name for path in folder.iterdir()} == {f"{task}_train.jsonl", f"{task}_val.jsonl"}
    assert sorted(rows_of(folder, task)) == [expected, tuple(x.replace("1", "2") for x in expected)]
    assert f"{tmp_path / 'rows.jsonl'}: 2 rows read, 0 skipped\n" in out
    for split in ("train", "val"):
        assert f"{folder / f'{task}_{split}.jsonl'}: 1 rows written\n" in out
    template = (
        r"chats are written as 'System: ...\nUser: ...\nAssistant: ...\nUser: ...\nAssistant:'"
    )
    assert (f"{template}\n" in out) == ("written as" in out) == ("User" in expected[0])


@pytest.mark.parametrize("end", ["", " ", "\n"])
@pytest.mark.parametrize("beginning", ["", " ", "\n"])
def test_an_answer_gets_a_leading_space_where_neither_side_has_white_space(end, beginning):
    first, second = f"{beginning}b ", "x y"
    space = " " * (not end)
    expected = (f"a{end}", (space if not beginning else "") + first, space + second)
    assert make_row(f"a{end}", first, second) == expected


def test_a_chat_is_written_out_with_its_roles_up_to_the_last_reply(tmp_path):
    contents = " Hi\n", "Hello", "1 + 1?\nThink.", "\n2 "
    messages = [{"role": "system", "content": "Be kind."}, *chat(*contents)]
    others = [{"from": "system", "value": "Be kind."}, *sharegpt(*contents)]
    prompt = "System: Be kind.\nUser: Hi\nAssistant: Hello\nUser: 1 + 1?\nThink.\nAssistant:"
    for chats in (messages, others):
        flags = *CHATS, "--overwrite"
        assert converted(tmp_path, [{"m": chats}], *flags) == [(prompt, "\n2 ")]


DIFFER = "chats differ before the last reply"


@pytest.mark.parametrize(
    "flags, row, reason",
    [
        (SFT, {"q": "", "a": ""}, "empty prompt"),
        (PROMPTS, {"q": " \n"}, "empty prompt"),
        (SFT, {"q": "b", "a": " "}, "empty answer"),
        (PREF, {"q": "b", "good": "c", "bad": "\n"}, "empty answer"),
        (PREF, {"q": "b", "good": "c", "bad": " c\n"}, "equal answers"),
        (CHATS, {"m": []}, "no reply at the end"),
        (CHATS, {"m": chat("b", "c", "d")}, "no reply at the end"),
        (CHATS, {"m": chat(" ", "c")}, "empty prompt"),
        (CHATS, {"m": chat("b", "")}, "empty answer"),
        (CHATS, {"m": "Human: b"}, r"no '\n\nAssistant:' in a transcript"),
        (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b")}, "no reply at the end"),
        (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("e", "d")}, DIFFER),
        (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b", "c", "d", "e")}, DIFFER),
        (CHAT_PAIRS, {"good": talk("b", "c"), "bad": talk("e", "d")}, DIFFER),
        (CHAT_PAIRS, {"good": talk("b", "c"), "bad": talk("b", "c", "d", "e")}, DIFFER),
        (CHAT_PAIRS, {"good": talk("b", "c"), "bad": talk("b", " ")}, "empty answer"),
        (CHAT_PAIRS, {"good": chat("b", "c"), "bad": chat("b", "c")}, "equal answers"),
    ],
)
def test_a_row_that_teaches_nothing_is_skipped_and_counted_by_reason(tmp_path, flags, row, reason):
    sound = {"q": "x", "a": "y", "good": "y", "bad": "z"}
    if flags not in (SFT, PREF, PROMPTS):
        sound = {"m": chat("x", "y"), "good": talk("x", "y"), "bad": talk("x", "z")}
    status, out, err = convert(tmp_path, [row, sound, row, sound], *flags, "--val", 0)
    assert (status, err) == (0, "")
    assert f"rows.jsonl: 4 rows read, 3 skipped; {reason}: 2; duplicate: 1" in out
    status, out, err = convert(tmp_path, [row, row], *flags)
    assert (status, out) == (2, "")
    assert err.endswith(f"rows.jsonl: no row to write (2 rows read, 2 skipped; {reason}: 2)\n")


def test_rows_keep_their_order_and_the_same_prompt_with_another_answer_is_no_duplicate(tmp_path):
    rows = [("b", "c"), ("b", "d"), ("b", " c"), ("e", "c"), ("b", "c"), *zip("zyxwvu", "gghhii")]
    expected = [(q, f" {a.strip()}") for q, a in dict.fromkeys(rows) if a != " c"]
    assert converted(tmp_path, [{"q": q, "a": a} for q, a in rows], *SFT) == expected


def test_keys_that_are_not_used_are_named(tmp_path):
    rows = [{"q": "b", "a": "c", "label": False}, {"q": "d", "a": "e", "input": "f", "label": True}]
    _, out, _ = convert(tmp_path, rows, *SFT)
    assert "rows.jsonl: 2 rows read, 0 skipped; keys not used: 'input', 'label'\n" in out


# What is held out


@pytest.mark.parametrize("seed", range(20))
def test_the_prompts_of_the_smallest_hashes_are_held_out_in_any_order(seed):
    rng = random.Random(seed)
    prompts = [f"{rng.random()}\ud83d" for _ in range(rng.choice([2, 5, 500]))]
    for share in (1e-9, rng.random(), 1 - 1e-9):
        places = {x: zlib.crc32(x.encode(errors="replace")) / 2**32 for x in prompts}
        val = {x for x in prompts if places[x] < share}
        val = val or {min(prompts, key=places.get)}
        val = val - {max(prompts, key=places.get)} if len(val) == len(prompts) else val
        rng.shuffle(prompts)
        assert held_out(prompts * 2, share) == val
    assert held_out(prompts, 0) == set() and held_out(prompts, 1) == set(prompts)
    assert held_out(prompts[:1], 0.5) == held_out([], 0.5) == set()


@pytest.mark.parametrize("task", KEYS)
@pytest.mark.parametrize("n", [2, 1000])
def test_scripts_and_converter_hold_out_the_same_prompts_whatever_the_kind_of_file(
    tmp_path, task, n
):
    """One rule: no prompt that one stage is validated on is in the training data of another."""
    rows = [{"q": f"q{i % n}", "a": f"{i}", "good": f"{i}", "bad": "z"} for i in range(2 * n)]
    flags = {"sft": SFT, "pref": PREF, "prompts": PROMPTS}[task]
    convert(tmp_path, rows, *flags)
    whole = tmp_path / "whole"
    write_rows(whole, task, rows_of(tmp_path / "out", task), share=0)
    assert [path.name for path in whole.iterdir()] == [f"{task}_train.jsonl"]
    for split in ("train", "val"):
        assert sorted(read_rows(whole, task, split)) == sorted(
            read_rows(tmp_path / "out", task, split)
        )
    val = {prompt for prompt, *_ in read_rows(whole, task, "val")}
    expected = {row["q"] for row in rows if zlib.crc32(row["q"].encode()) < 0.05 * 2**32}
    assert val == held_out({row["q"] for row in rows}) and (n == 2 or val == expected)
    assert not val & {prompt for prompt, *_ in read_rows(whole, task, "train")}


def test_a_share_of_0_writes_the_train_file_alone_and_1_the_val_file_from_any_folder(tmp_path):
    """The two published files of transcripts, as data/README.md has it."""
    published = [{"good": talk(f"{i}", "c"), "bad": talk(f"{i}", "d")} for i in range(9)]
    for share, rows in enumerate((published[:4], published[4:])):
        (tmp_path / "rows").write_bytes(gzip.compress(json.dumps(rows).encode()))
        flags = ["rows", *CHAT_PAIRS, "--out", "new/folder", "--val", str(share)]
        done = subprocess.run([sys.executable, ROOT / "data" / "convert.py", *flags], cwd=tmp_path)
        assert (
            done.returncode == 0 and len(list((tmp_path / "new" / "folder").iterdir())) == 1 + share
        )
    for split, numbers in (("train", "0123"), ("val", "45678")):
        rows = read_rows(tmp_path / "new" / "folder", "pref", split)
        assert [prompt[9] for prompt, *_ in rows] == list(numbers)


# Files


def test_other_files_stay_and_one_of_the_same_name_is_replaced_on_request_alone(tmp_path):
    rows = [{"q": f"q{i}", "a": "x", "good": "y", "bad": "z"} for i in range(20)]
    convert(tmp_path, rows, *PREF)
    pref = rows_of(tmp_path / "out", "pref")
    for answer, flags in (("x", []), ("new", ["--overwrite"])):
        convert(tmp_path, [{**row, "a": answer} for row in rows], *SFT, *flags)
        sft = rows_of(tmp_path / "out", "sft")
        assert sorted(sft) == sorted((row["q"], f" {answer}") for row in rows)
    assert rows_of(tmp_path / "out", "pref") == pref
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(before) == 4
    keys = ["--prompt", "prompt", "--completion", "completion"]
    for share in ("0", "1", "0.05"):  # one of the files, the other, and both
        for path in (tmp_path / "out" / f"sft_{split}.jsonl" for split in ("train", "val")):
            flags = ["--out", path.parent, *keys, "--val", share]
            status, _, err = run("data/convert.py", path, *flags)
            assert status == 2 and err.count("\n") == 1 and "would replace itself" in err
            status, _, _ = run("data/convert.py", path, *flags, "--overwrite")
            assert status == 2
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "sft_train.jsonl").unlink()
    assert convert(tmp_path, rows, *SFT)[0] == 2  # because of one of the two, neither is written
    assert not (tmp_path / "out" / "sft_train.jsonl").exists()
    assert convert(tmp_path, rows, *SFT, "--val", 0)[0] == 0


def test_a_file_is_written_whole_or_not_at_all_by_one_process_alone(tmp_path, monkeypatch):
    convert(tmp_path, [{"q": "old"}, {"q": "older"}], *PROMPTS)
    before, names = rows_of(tmp_path / "out", "prompts"), set()

    def fail(beside, path):
        names.add(beside)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "replace", fail)
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        new = [{"q": "new"}, {"q": "newer"}]
        status, _, err = convert(tmp_path, new, *PROMPTS, "--overwrite")
        assert status == 2 and err.count("\n") == 1 and "No space left" in err
    assert rows_of(tmp_path / "out", "prompts") == before and len(names) == 2
    assert len(list((tmp_path / "out").iterdir())) == 2


# What is refused

GOOD = b'{"q": "a", "a": "b"}'


BAD_MESSAGE = (
    ", line 1: a message should be an object with the strings 'role', 'content' or 'from', "
    "'value', found "
)


def message(x):
    return json.dumps({"m": [chat("b")[0], x]}).encode()


@pytest.mark.parametrize(
    "kind, content, flags, says",
    [
        ("jsonl", b"\n \n", SFT, ": no row to write (0 rows read, 0 skipped); it should hold JSON"),
        ("jsonl", GOOD + b'\n{"q": "a",', SFT, ", line 2: cannot be read ("),
        ("jsonl", GOOD + b"\n\n" + b'{"a":' * 100_000, SFT, ", line 3: cannot be read ("),
        ("jsonl", b'{"a": "b", "qu": 1}', SFT, ", line 1: no key 'q'; found 'a', 'qu'\n"),
        ("jsonl", b"{}", SFT, ", line 1: no key 'q'; found no key at all\n"),
        ("jsonl", b'{"q": 7}', SFT, ", line 1: the value of 'q' should be a string, found 7\n"),
        (
            "jsonl",
            b'\n{"q": "", "a": null}',
            SFT,
            ", line 2: the value of 'a' should be a string, ",
        ),
        ("jsonl", GOOD + b'\n{"q": "\xff"}', SFT, ", line 2: not UTF-8 ("),
        ("jsonl", "\ufeffé\né".encode()[:-1], SFT, ", line 2: not UTF-8 ("),
        ("json", b"[" + GOOD + b",\n{", SFT, ": cannot be read ("),
        ("json", b"[" * 100_000, SFT, ": cannot be read ("),
        ("json", b"[" + GOOD + b",\n\n7]", SFT, ", row 2: found int; it should hold JSON lines"),
        ("csv", b"q,a\n", SFT, ": no row to write ("),
        ("csv", b"q;a\n1;2", SFT, ", row 2: no key 'q'; found 'q;a'\n"),
        ("csv", b"q,a\n1,2\n\nwell, yes,2", SFT, ", row 4: cannot be read (3 values for 2 names; "),
        ("csv", b'q,a\n1,"2\n3"\n1', SFT, ", row 3: cannot be read (1 values for 2 names; "),
        ("csv", b'q,a\n1,"2\n3,4\n', SFT, ", row 2: cannot be read ("),
        ("csv", b'q,a\n1,2\n"3"x,4\n', SFT, ", row 3: cannot be read ("),
        ("gz", gzip.compress(GOOD * 99, mtime=0)[:-9], SFT, ": cannot be read ("),
        ("gz", gzip.compress(GOOD * 99, mtime=0)[:10] + b"\xff" * 30, SFT, ": cannot be read ("),
        ("gz", gzip.compress(GOOD, mtime=0) + b"more", SFT, ": cannot be read ("),
        ("jsonl", message("c"), CHATS, BAD_MESSAGE + '"c"\n'),
        ("jsonl", message({"role": "user"}), CHATS, BAD_MESSAGE + '{"role": "user"}\n'),
        ("jsonl", message({"role": 1, "content": "c"}), CHATS, BAD_MESSAGE + '{"role": 1, '),
        ("jsonl", message({"x": "y" * 99}), CHATS, BAD_MESSAGE + '{"x": "' + "y" * 73 + "\n"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_no_row_ends_the_run_with_one_line(tmp_path, kind, content, flags, says):
    status, out, err = convert(tmp_path, content, *flags, name=f"r.{kind}")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"convert.py: {tmp_path / 'r'}.{kind}{says}")
    assert not (tmp_path / "out").exists()


def test_a_value_of_another_kind_is_refused_with_a_hint(tmp_path):
    wanted = "'bad' should be a list of messages or a transcript, found null\n"
    assert wanted in convert(tmp_path, [{"good": [], "bad": None}], *CHAT_PAIRS)[2]
    wanted = 'found ["' + "x" * 38 + "; leave --prompt out if it is a chat\n"
    assert wanted in convert(tmp_path, [{"q": ["x" * 99]}], *PROMPTS)[2]
    for content, name, wanted in (
        (b"q,a\n1,2\n", "r.txt", ".csv.gz"),
        (b"\xff", "r", "as UTF-8\n"),
    ):
        assert wanted in convert(tmp_path, content, *SFT, name=name)[2]


@pytest.mark.parametrize(
    "flags, says",
    [
        ((), "give --prompt, or --prompt --completion, or --prompt --chosen --rejected, or --mess"),
        (("--completion", "a"), "--messages, or --chosen --rejected, and a --val between 0 and 1"),
        ((*SFT, "--messages", "m"), "give --prompt"),
        ((*SFT, "--val", "-0.1"), "between 0 and 1"),
        ((*SFT, "--val", "1.1"), "between 0 and 1"),
        ((*SFT, "--val", "nan"), "between 0 and 1"),
        (("--prom", "q"), "--prom"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_in_one_line(tmp_path, flags, says):
    status, out, err = convert(tmp_path, [{"q": "a", "a": "b"}], *flags)
    assert (status, out) == (2, "") and err.startswith("convert.py: ") and err.count("\n") == 1
    assert says in err and "-h explains" in err and not (tmp_path / "out").exists()


def test_a_missing_file_or_folder_and_a_file_in_the_way_are_named_in_one_line(tmp_path):
    (tmp_path / "file").write_bytes(GOOD)
    for file, out, says in (
        ("none", "out", f"{tmp_path / 'none'}: cannot be read (No such file"),
        (".", "out", f"{tmp_path}: cannot be read (Is a directory)"),
        ("file", "file", str(tmp_path / "file")),
    ):
        status, _, err = run("data/convert.py", tmp_path / file, "--out", tmp_path / out, *SFT)
        assert status == 2 and err.count("\n") == 1 and says in err
    for args, says in ((["x"], "--out"), (["--out", "x"], "FILE")):
        status, _, err = run("data/convert.py", *args, *SFT)
        assert status == 2 and err.count("\n") == 1 and says in err


def test_help_names_every_flag():
    status, out, _ = run("data/convert.py", "-h")
    assert status == 0 and "where a row has its rejected" in out and "(default: 0.05)" in out


# Film reviews


@pytest.mark.parametrize("seed", range(20))
def test_snippets_become_demonstrations_prompts_and_pairs_with_the_longest_common_opening(seed):
    rng = random.Random(seed)

    def snippets():
        return [" ".join(rng.choices("ab", k=rng.randint(1, 12))) for _ in range(40)]

    good, bad = snippets(), snippets()
    rows = make_rows("\n \n".join(good) + "\n", "\n".join(bad))
    long = [text for text in good + bad if len(text.split()) >= 8]
    assert [prompt + answer for prompt, answer in rows["sft"]] == long
    assert all(len(prompt.split()) == 4 for prompt, _ in rows["sft"])
    assert rows["prompts"] == list(dict.fromkeys((prompt,) for prompt, _ in rows["sft"]))
    for side, texts in ((1, good), (2, bad)):  # every snippet serves once
        used = [row[0] + row[side] for row in rows["pref"]]
        assert all(row[side].split() for row in rows["pref"])
        for text in used:
            assert used.count(text) <= texts.count(text)
    openings = [len(row[0].split()) for row in rows["pref"]]
    assert openings == sorted(openings, reverse=True) and max(openings) == 4


def test_snippets_nearest_in_length_are_paired_and_what_is_left_waits_for_a_shorter_opening():
    good = ["a b c d 1 1 1 1", "a b c d 1", "a b c d 1 1", "a b x 1", "e f", "z z"]
    bad = ["a b c d 2 2 2", "a b c d 2", "a b y 2 2", "e f", "e g 2"]
    assert make_rows("\n".join(good), "\n".join(bad))["pref"] == [
        ("a b c d", " 1", " 2"),
        ("a b c d", " 1 1", " 2 2 2"),
        ("a b", " x 1", " y 2 2"),
        ("e", " f", " f"),
    ]


def test_the_command_writes_six_files_holds_out_what_the_converter_would_and_takes_latin_1(
    tmp_path,
):
    lines = [
        f"{a} {b} café {c} for each and every one" for a in "abcde" for b in "fghij" for c in "kl"
    ]
    (tmp_path / "pos").write_bytes("\n".join(lines).encode("latin-1"))
    (tmp_path / "neg").write_text("\n".join(lines).replace("every", "no"), encoding="utf-8")
    command = [sys.executable, str(ROOT / "data" / "rt_polarity.py"), "pos", "neg", "--out", "out"]
    for flags, status in (([], 0), ([], 2), (["--overwrite"], 0)):
        done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status and done.stderr.count("\n") == (status == 2)
    for task, n in (("sft", 100), ("pref", 50), ("prompts", 50)):
        rows, val = (
            rows_of(tmp_path / "out", task, splits) for splits in (("train", "val"), ["val"])
        )
        assert len(rows) == n and "café" in rows[0][0]
        assert {row[0] for row in val} == held_out(row[0] for row in rows)
    status, out, err = run("data/rt_polarity.py", tmp_path / "none", tmp_path / "neg")
    assert (status, out) == (2, "") and err.count("\n") == 1 and str(tmp_path / "none") in err
    assert "(default: data/rt)" in run("data/rt_polarity.py", "-h")[1]
