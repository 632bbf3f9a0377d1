"""Rows of one's own: data/convert.py and data/rt_polarity.py."""

import json

import pytest

from cli import run, shell
from data.rows import held_out, load_rows
from data.rt_polarity import make_rows

SFT, PREF = "--prompt q --completion a", "--prompt q --chosen a --rejected b"
PROMPTS, CHAT, PAIR = "--prompt q", "--messages m", "--chosen a --rejected b"


def convert(folder, text, flags):
    """-> status, stdout, stderr of the command for a file of this text, or of these objects."""
    if not isinstance(text, str):
        text = "".join(json.dumps(row) + "\n" for row in text)
    path = folder / ("x.CSV" if "q,a" in text[:4] else "x.tsv" if "q\ta" in text[:4] else "x")
    path.write_bytes(text.encode())
    return run("data/convert.py", path, "--out", folder / "out", *flags.split())


def rows_of(folder, *names):
    return [row for x in names for row in load_rows(folder / f"{x}.jsonl", x.split("_")[0])]


def chat(*texts):
    roles = ["user", "assistant"] * 2
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]


def talk(*texts):
    return "".join(f"\n\n{who}: {x}" for who, x in zip(["Human", "Assistant"] * 2, texts))


LINES = '\ufeff{"x": 1, "a": "2", "q": "é"}\r\n\n \t\n{"q": "\\ud83d", "a": "\u2028c"}'
TABLE = '\ufeffq,a,x\r\n"é, ""1""\n2",3,\r\n\r\n"4\n",\u20285,6'
ALPACA = [{"q": "1", "input": "", "a": "2"}, {"q": "3", "input": "4", "a": "5"}]
SYSTEM = [{"role": "system", "content": " Be kind.\n"}]
LONG = "System: Be kind.\nUser: 1\nAssistant: 2\nUser: 3\nAssistant:"
CHATS, HH = {"a": chat("1", "2"), "b": chat("1", "3")}, {"a": talk("1", "2"), "b": talk("1", "3")}
TRL = {"q": chat("1"), "a": chat("", "2")[1:], "b": chat("", "3")[1:]}
ULTRAFEEDBACK = {"q": "1\n", "a": chat("1", "2"), "b": "\n3"}
Q = "User: 1\nAssistant:"
BAD_PAIRS = [dict(zip("qab", texts)) for texts in (" 12", "1\n2", ("1", "2", " 2\n"))]
WHOLE = [
    {"q": "1", "a": chat("1", "2", "3", "4"), "b": "5"},
    {"q": chat("1", "2"), "a": "2", "b": "3"},
    {"q": talk("1", "2"), "a": "2", "b": "3"},
]
BAD_CHATS = [{"m": x} for x in ([], chat("1", "2", "3"), "Human: 1", talk("1", "2", "3"))]
DEEP = '{"q": "1", "a": ' + "[" * 99_999
STEER = [{"q": "1", "a": "2", "k\x1b": 1}, {"q": "\x1b", "\ud83d": 7}]


@pytest.mark.parametrize(
    "flags, text, expected",
    [
        (SFT, LINES, [("é", " 2"), ("\ud83d", "\u2028c")]),
        (SFT, '\n [{"q": "1", "a": "2"},\n{"q": "3", "a": " 4"}]', [("1", " 2"), ("3", " 4")]),
        (SFT, TABLE, [('é, "1"\n2', " 3"), ("4\n", "\u20285")]),
        (PROMPTS, [{"q": "1"}, {"q": chat("1")}], [("1",), (Q,)]),
        (SFT, "q\ta\n1,2\t3", [("1,2", " 3")]),
        (SFT, f"q,a\n1,{'2' * 200_000}", [("1", " " + "2" * 200_000)]),
        (PROMPTS, [{"q": talk("1", "")[:-1]}], [(talk("1", "")[:-1],)]),
        (SFT, ALPACA[:1], [("1", " 2")]),
        (CHAT, [{"m": SYSTEM + chat(" 1", "2", "3\n", "\n4 ")}], [(LONG, "\n4 ")]),
        (CHAT, [{"m": talk("1", "2", "3", "4 \n")}], [(talk("1", "2", "3", "")[:-1], " 4")]),
        (PAIR, [CHATS, HH], [(Q, " 2", " 3"), (talk("1", "")[:-1], " 2", " 3")]),
        (PREF, [TRL, ULTRAFEEDBACK], [(Q, " 2", " 3"), ("1\n", "2", "\n3")]),
        (SFT, [{"q": "1", "a": "2"}, {"q": None, "a": "2"}], [("1", " 2")]),
        (SFT, [{"q": "1", "a": x} for x in "23"], [("1", " 2"), ("1", " 3")]),
        (CHAT, [{"m": talk("1", "")[:-1] + "\n2 "}], [(talk("1", "")[:-1], "\n2")]),
        (PREF, [{"q": "1", "a": SYSTEM + chat("1", "2"), "b": "3"}], "1 a whole chat stands where"),
        # Rows that teach nothing are skipped; without any other, that is a fault.
        (
            PREF,
            WHOLE,
            "3 a whole chat stands where a prompt or an answer should: leave out --prompt",
        ),
        (PREF, BAD_PAIRS, "2 empty prompt or answer: line 1, ...\n    1 equal answers: line 3"),
        (CHAT, BAD_CHATS[:2], "2 the last message is not by the assistant: line 1, ..."),
        (CHAT, BAD_CHATS[2:], "2 a transcript does not end with a turn of the assistant: line 1"),
        (PAIR, [{"a": talk("1", "2"), "b": talk("3", "4")}], "chats differ before the last reply"),
        # Any other fault
        (SFT, '{"q": "1", "a": "2"}\n{"q"', "x, line 2: not JSON ("),
        (SFT, DEEP, "x, line 1: not JSON ("),
        (SFT, "[" + DEEP, "x: cannot be read ("),
        (SFT, "q,a\n", "no row is left to write"),
        (SFT, STEER, 'x, line 2: no \'a\' in {"q": "\\u001b"'),
        (SFT, '\n{"q": "1"}', 'x, line 2: no \'a\' in {"q": "1"}'),
        (SFT, "7", "x, line 1: no 'q' in 7"),
        (PROMPTS, '[{"q": "1"},\n{"q": 7}]', "x, row 2: 'q' should be text or"),
        (PROMPTS, '[{"q": "1"}', "x: cannot be read ("),
        (CHAT, [{"m": ["hi"]}], 'x, line 1: "hi" is no message'),
        (CHAT, [{"m": [{"role": "user"}]}], '{"role": "user"} is no message with role and content'),
        (
            SFT,
            "q,a,q\n1,2,3",
            "x.CSV: cannot be read (the first line should name the columns, each once)",
        ),
        (SFT, "q,a\n1,2\n\n3,4,5", "row 2 has 3 values for 2 columns"),
        (SFT, 'q,a\n1,"2\n', "cannot be read (unexpected end of data)"),
        (
            SFT,
            ALPACA,
            "'input' may change what a row means; put it into the prompt first, and write a file",
        ),
        (SFT, [{"q": "1", "a": "b", "label": True}], "keep the good rows, and write a file"),
        (SFT + " --messages m", "{}", "-h shows which flags go together"),
        *((f"{PROMPTS} --val {x}", "{}", "--val is between 0 and 1") for x in (-0.1, 1.1, "nan")),
    ],
)
def test_rows_of_all_shapes_are_converted_or_nothing_is_written(tmp_path, flags, text, expected):
    status, out, err = convert(tmp_path, text, f"--val 0 {flags}")
    if isinstance(expected, str):
        assert status == 2 and err.startswith("convert.py: ") and err.count("\n") == 1
        assert expected in out + err and not (tmp_path / "out").exists()
    else:
        assert (status, err) == (0, "")
        (path,) = (tmp_path / "out").iterdir()
        assert rows_of(tmp_path / "out", path.stem) == expected


def test_a_file_is_replaced_on_request_alone_and_no_old_one_stays_beside_new_rows(tmp_path):
    rows, out = [{"q": f"{i}", "a": "x"} for i in range(99)], tmp_path / "out"
    more = {"q": "1", "a": " x", "c": 0, "b": [], "empty": "", "none": None}
    said = convert(tmp_path, [*rows, more, more], SFT + " --val 0.2")[1]
    assert "99 rows kept, 2 skipped\n    2 duplicate: line 100, ...\n    not used: b, c\n" in said
    assert said.endswith("sft_val.jsonl: 14 rows written\n")
    assert {q for q, _ in rows_of(out, "sft_val")} == held_out([row["q"] for row in rows], 0.2)
    for flags, says in (
        ("", "sft_train.jsonl: is there already; choose another --out, or --overwrite"),
        ("--val 1", "sft_val.jsonl: is there already; choose"),
        ("--overwrite", ""),
    ):
        before = rows_of(out, "sft_train", "sft_val")
        status, _, err = convert(tmp_path, rows[::-1], f"{SFT} {flags}")
        assert status == (2 if says else 0) and says in err
        assert (rows_of(out, "sft_train", "sft_val") == before) == bool(says)
    # Of the same questions in other files the same are held out, one in twenty.
    convert(tmp_path, rows, PROMPTS)
    aside = held_out(row["q"] for row in rows)
    assert {q for q, *_ in rows_of(out, "sft_val", "prompts_val")} == aside
    (out / "prompts_val.jsonl").unlink()  # from another file of the publisher
    status, said, _ = convert(tmp_path, [*rows, {"q": "new"}], PROMPTS + " --val 1")
    assert rows_of(out, "prompts_val") == [*((row["q"],) for row in rows), ("new",)]
    both = 99 - len(aside)
    assert status == 0 and f"warning: {both} of these prompts are in {out}/prompts_train" in said


def test_a_command_names_the_file_that_it_cannot_read_or_write(tmp_path):
    for module, default in (("convert", 0.05), ("rt_polarity", "data/rt"), ("zoo", "data/zoo")):
        said = shell("-m", f"data.{module}", "-h").stdout
        assert f"default: {default}" in said and f"\n    python -m data.{module} " in said
    no, x = tmp_path / "no", tmp_path / "x"
    x.write_text('{"q": "a"}')
    for script, *files in ["convert", no], ["convert", x], ["rt_polarity", no, x], ["zoo"]:
        flags = ["--prompt", "q"] * (script == "convert")
        status, _, err = run(f"data/{script}.py", *files, *flags, "--out", x / "out" / "zoo")
        assert status == 2 and err.count("\n") == 1 and str([*files, x][0]) in err


def test_reviews_nearest_in_length_are_paired_and_others_wait_for_a_shorter_opening(tmp_path):
    good = "é b c d 1 1 1 1\né b c d 3\né b x 1\n\ne f\nz w 1 1\nz w 3\n"
    bad = "é b c d 2 2 2\né b c d 4\né b c d 5 5 5 5\né b y 2 2\ne f\nz w 2"
    rows, o = make_rows(good, bad), "é b c d"
    assert rows["pref"][:2] == [(o, " 3", " 4"), (o, " 1 1 1 1", " 2 2 2")]
    assert rows["pref"][2:4] == [("é b", " x 1", " y 2 2"), ("z w", " 3", " 2")]
    assert rows["pref"][4:] == [("e", " f", " f")] and rows["prompts"] == [(o,)]
    assert rows["sft"] == [(o, " 1 1 1 1"), (o, " 5 5 5 5")]
    (tmp_path / "pos").write_text(good, encoding="latin-1")
    (tmp_path / "neg").write_text(bad, encoding="utf-8")
    flags = [tmp_path / "pos", tmp_path / "neg", "--out", tmp_path / "out"]
    for more, status in (([], 0), ([], 2), (["--overwrite"], 0)):
        got = run("data/rt_polarity.py", *flags, *more)
        assert got[0] == status and ("is there already" in got[2]) == (status == 2)
    found = rows_of(tmp_path / "out", "pref_train", "pref_val", "sft_train", "prompts_train")
    assert sorted(found) == sorted(sum(rows.values(), []))
