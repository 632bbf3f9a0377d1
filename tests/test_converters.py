"""The specification of the converters in data/. Run: python -m pytest tests/test_converters.py"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data import hh_rlhf, rt_polarity
from plumbing.text import KEYS, load_jsonl

ROOT = Path(hh_rlhf.__file__).parents[1]
TALK = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: What is 1 + 1?\n\nAssistant:"


def convert(script, *args):
    return subprocess.run([sys.executable, f"data/{script}", *map(str, args)], cwd=ROOT, capture_output=True, encoding="utf-8")


def test_the_prompt_is_all_up_to_the_last_reply_and_the_replies_are_what_follows():
    assert hh_rlhf.pair(TALK + " 2", TALK + " 3 \n") == (TALK, " 2", " 3")


@pytest.mark.parametrize("chosen, rejected, reason", [
    (TALK + " 2", TALK.replace("Hi", "Ho") + " 3", "differ"), (TALK + " 2", TALK + " 3\n\nHuman: No\n\nAssistant: 2", "differ"),
    (TALK, TALK + " 3", "empty"), (TALK + " 2", TALK + " \n", "empty"), ("2", "3", "differ"), (TALK + " 2", "", "differ"),
])  # fmt: skip
def test_a_pair_that_cannot_be_cut_is_left_out_for_a_reason(chosen, rejected, reason):
    with pytest.raises(ValueError, match=reason):
        hh_rlhf.pair(chosen, rejected)


def test_published_dialogues_become_a_data_folder_and_what_is_left_out_is_counted(tmp_path):
    rows = [(TALK + " 2", TALK + " 3"), (TALK, TALK + " 3"), (TALK + " 2", TALK.replace("Hi", "Ho") + " 3")]
    lines = "".join(json.dumps({"chosen": a, "rejected": b}) + "\n" for a, b in rows)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    done = convert("hh_rlhf.py", tmp_path / "train.jsonl.gz", "--out", tmp_path / "out")
    assert done.returncode == 0 and "1 rows" in done.stdout and done.stdout.count("': 1") == 2
    assert load_jsonl(tmp_path / "out" / "pref_train.jsonl", KEYS["pref"]) == [(TALK, " 2", " 3")]


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"{}"), gzip.compress(b"[1]"), gzip.compress(b"{")])
def test_a_file_that_is_no_such_thing_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "train.jsonl.gz").write_bytes(content)
    done = convert("hh_rlhf.py", tmp_path / "train.jsonl.gz", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "train.jsonl.gz" in done.stderr


GOOD = ["the film is a warm and funny thing", "the film is a joy to watch again and again", "a b c d e f g h", "short one"]
BAD = ["the film is a long and dull affair indeed", "the film was made by nobody for nobody at all", "a b x d e f g h"]


def test_snippets_become_demonstrations_prompts_and_pairs_with_a_common_opening():
    rows = rt_polarity.make("\n".join(GOOD), "\n".join(BAD))
    sft = rows["sft_train"] + rows["sft_val"]
    assert sorted(row["prompt"] + row["completion"] for row in sft) == sorted(GOOD[:3] + BAD)
    assert all(len(row["prompt"].split()) == 4 for row in sft)
    prompts = {row["prompt"] for row in rows["prompts_train"] + rows["prompts_val"]}
    assert prompts == {row["prompt"] for row in sft}
    pairs = rows["pref_train"] + rows["pref_val"]
    assert len(pairs) == 3
    for row in pairs:
        assert row["prompt"] + row["chosen"] in GOOD and row["prompt"] + row["rejected"] in BAD
    assert {"prompt": "the film is a", "chosen": " warm and funny thing", "rejected": " long and dull affair indeed"} in pairs
    assert {"prompt": "a b", "chosen": " c d e f g h", "rejected": " x d e f g h"} in pairs


def test_no_opening_is_in_train_and_val():
    lines = [f"{a} {b} is so good that one forgets" for a in "abcdefgh" for b in "ijklmnopqrstuvwxyz"]
    rows = rt_polarity.make("\n".join(lines), "\n".join(line.replace("good", "bad") for line in lines))
    for task in ("sft", "prompts"):
        train, val = ({row["prompt"] for row in rows[f"{task}_{split}"]} for split in ("train", "val"))
        assert val and not train & val


def test_the_command_writes_six_files_and_takes_latin_1(tmp_path):
    (tmp_path / "pos").write_bytes("\n".join(GOOD + ["a café of wonders for each and every one"]).encode("latin-1"))
    (tmp_path / "neg").write_text("\n".join(BAD))
    done = convert("rt_polarity.py", tmp_path / "pos", tmp_path / "neg", "--out", tmp_path / "out")
    assert done.returncode == 0 and len(list((tmp_path / "out").iterdir())) == 6
    assert any("café" in path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir())
    done = convert("rt_polarity.py", tmp_path / "none", tmp_path / "neg", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "none" in done.stderr
