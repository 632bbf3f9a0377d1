"""Rows of one's own: data/convert.py and data/rt_polarity.py."""

import json

import pytest

from cli import run
from data.rows import load_rows
from data.rt_polarity import make_rows

SFT, PREF = "--prompt q --completion a", "--prompt q --chosen a --rejected b"
PROMPTS, CHAT, PAIR = "--prompt q", "--messages m", "--chosen a --rejected b"


def convert(folder, text, flags):
    """-> status, stdout, stderr; text: the file, or its objects."""
    text = text if isinstance(text, str) else json.dumps(text)
    path = folder / ("x.CSV" if "q,a" in text[:4] else "x")
    path.write_bytes(text.encode())
    return run("data/convert.py", path, "--out", folder / "out", *flags.split())


def rows_of(folder, *names):
    return [row for x in names for row in load_rows(folder / f"{x}.jsonl", x.split("_")[0])]


def rows(keys, *values):
    """rows("qa", "12", "34") -> [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]"""
    return [dict(zip(keys, x)) for x in values]


def chat(*texts):
    return rows(["role", "content"], *zip(["user", "assistant"] * 2, texts))


def talk(*texts):
    return "".join(f"\n\n{who}: {x}" for who, x in zip(["Human", "Assistant"] * 2, texts))


LINES = '{"x": 1, "a": "2", "q": "é"}\r\n\n \t\n{"q": "\\ud83d", "a": "\u2028c"}'
TABLE = '\ufeffq,a,x\r\n"é, ""1""\n2",3,\r\n\r\n"4\n",\u20285,6'
ARRAY = '\n [{"q": "1", "input": "", "a": "2"},\n{"q": "1", "a": " 4"}]'
STEER = [{"q": "1", "a": "2", "k\x1b": 1}, {"q": "\x1b", "\ud83d": 7}]
SYSTEM = [{"role": "system", "content": " Be kind.\n"}]
LONG = "System: Be kind.\nUser: 1\nAssistant: 2\nUser: 3\nAssistant:"
USER, HUMAN = "User: 1\nAssistant:", "\n\nHuman: 1\n\nAssistant:"
CHATS, HH = ({"a": f("1", "2"), "b": f("1", "3")} for f in (chat, talk))
CONTINUED = {"q": chat("1"), "a": chat("1", "2")[1:], "b": chat("1", "3")[1:]}
EMPTY = rows("qab", "\n23", "1 2", ("1", "2", " 2\n"))
NO_CHATS = rows("m", [[]], [chat("", "2")[1:]], [chat("1", "2", "3")], [""], [talk("1", "2", "3")])
NO_MESSAGES = rows("m", *([[x]] for x in (1, {"role": ""}, {"role": 1, "content": ""})))


@pytest.mark.parametrize(
    "flags, text, expected",
    [
        (SFT, LINES, [("é", " 2"), ("\ud83d", "\u2028c")]),
        (SFT, ARRAY, [("1", " 2"), ("1", " 4")]),
        (SFT, TABLE, [('é, "1"\n2', " 3"), ("4\n", "\u20285")]),
        (SFT, f"q,a\n1,{'2' * 200_000}", [("1", " " + "2" * 200_000)]),
        (PREF, rows("qab", ("1\n", "2", "\n3"), ("1", None, "3")), [("1\n", "2", "\n3")]),
        (PROMPTS, rows("q", "1", [HUMAN]), [("1",), (HUMAN,)]),
        (CHAT, rows("m", [SYSTEM + chat(" 1", "2", "3\n", "\n4 ")]), [(LONG, "\n4 ")]),
        (CHAT, rows("m", [talk("0", "1") + HUMAN + "2 \n"]), [(talk("0", "1") + HUMAN, " 2")]),
        (PAIR, [CHATS, HH], [(USER, " 2", " 3"), (HUMAN, " 2", " 3")]),
        (PREF, [CONTINUED], [(USER, " 2", " 3")]),
        (PROMPTS, [CONTINUED], [(USER,)]),
        # Rows that teach nothing are skipped; without any other, that is a fault.
        (PREF, EMPTY, "0 rows kept, 3 skipped\n    2 empty prompt or answer\n    1 equal"),
        (CHAT, NO_CHATS, "3 a chat does not end with an answer\n    2 a transcript"),
        (CHAT, NO_MESSAGES, "3 a message is no object"),
        (PAIR, [HH | {"b": talk("2", "3")}], "1 the chats differ"),
        (PREF, [CONTINUED | {"b": CHATS["b"]}], "1 the chats differ"),
        (PREF, [CONTINUED | {"q": "1"}], "1 text beside a list of messages"),
        # Any other fault
        (SFT, STEER, 'x, row 2: no \'a\' in {"q": "\\u001b"'),
        (SFT, "7", "x, line 1: no 'q' in 7"),
        (PAIR, '[{"a": "", "b": 7}]', "'b' is 7 and should be text or a list"),
        (SFT, "[" * 99_999, "x: cannot be read ("),
        (SFT, "q,a\n1,2\n\n3,4,5", "x.CSV: cannot be read (row 2 has more or fewer"),
        (SFT, "q,a\n1", "(row 1 has more or fewer"),
        (SFT, 'q,a\n1,"2\n', "cannot be read (unexpected end"),
        (SFT, [*STEER[:1], {"q": "1", "a": "2", "input": "3"}], "'input' may change"),
        (SFT, [{"q": "1", "a": "2", "label": False}], "'label' may change"),
        (SFT + " --messages m", "{}", "do not go together"),
    ],
)
def test_rows_are_converted_or_nothing_is_written(tmp_path, flags, text, expected):
    status, out, err = convert(tmp_path, text, flags)
    if isinstance(expected, str):
        assert status == 2 and err.startswith("convert.py: ") and err.count("\n") == 1
        assert expected in out + err and not (tmp_path / "out").exists()
    else:
        assert (status, err) == (0, "")
        (path,) = (tmp_path / "out").iterdir()
        assert rows_of(tmp_path / "out", path.stem) == expected


def test_a_file_is_replaced_on_request(tmp_path):
    more = {"q": "2", "a": " x", "c": 0, "b\x1b": [], "empty": "", "none": None}
    text = [{"q": "1", "a": "x"}, more, more, {**more, "c": None}]
    for split, flags in ("train", SFT), ("val", SFT + " --split val"):
        printed = convert(tmp_path, text, flags)[1]
        assert "2 rows kept, 2 skipped\n    2 duplicate\n    not used: b\\x1b, c\n" in printed
        assert printed.endswith(f"sft_{split}.jsonl: 2 rows written\n")
        status, _, err = convert(tmp_path, text[1:], flags)
        assert status == 2 and f"sft_{split}.jsonl: already exists" in err
        assert rows_of(tmp_path / "out", f"sft_{split}") == [("1", " x"), ("2", " x")]
        assert convert(tmp_path, text[1:], f"{flags} --overwrite")[0] == 0
        assert rows_of(tmp_path / "out", f"sft_{split}") == [("2", " x")]


def test_a_command_names_the_file_it_cannot_read_or_write(tmp_path):
    no, x = tmp_path / "no", tmp_path / "x"
    x.write_text('{"q": "a"}')
    for script, *files in ["convert", no], ["convert", x], ["rt_polarity", no, x], ["zoo"]:
        flags = ["--prompt", "q"] * (script == "convert")
        status, _, err = run(f"data/{script}.py", *files, *flags, "--out", x / "out" / "zoo")
        assert status == 2 and err.count("\n") == 1 and str([*files, x][0]) in err
        assert f"\n    python -m data.{script} " in run(f"data/{script}.py", "-h")[1]


def test_reviews_are_paired_by_length_longest_opening_first(tmp_path):
    good = "é b c d 1 1 1 1\né b c d 3\né b x 1\n\ne f g\nz w 1 1\nz w 3\n"
    bad = "é b c d 2 2 2\né b c d 4\né b c d 5 5 5 5\né b y 2 2\ne f\nz w 2"
    rows, o = make_rows(good, bad), "é b c d"
    assert rows["pref"] == [
        (o, " 3", " 4"),
        (o, " 1 1 1 1", " 2 2 2"),
        ("é b", " x 1", " y 2 2"),
        ("z w", " 3", " 2"),
        ("e", " f g", " f"),
    ]
    assert rows["sft"] == [(o, " 1 1 1 1"), (o, " 5 5 5 5")] and rows["prompts"] == [(o,)]
    (tmp_path / "pos").write_text(good, encoding="latin-1")
    (tmp_path / "neg").write_text(bad, encoding="utf-8")
    files = [tmp_path / "pos", tmp_path / "neg", "--out", tmp_path / "out"]
    for flags, status in ([], 0), ([], 2), (["--overwrite"], 0):
        assert run("data/rt_polarity.py", *files, *flags)[0] == status
    for task in rows:
        assert rows_of(tmp_path / "out", f"{task}_train") == rows[task]
