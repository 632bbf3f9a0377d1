"""The default data and their judge: data/zoo.py."""

import hashlib
from pathlib import Path

import pytest

from data import zoo
from data.rows import UserError, write_jsonl

BEE = "What does a bee eat?"
GRADES = {
    " Bees eat nectar. Have a nice day!": 3.0,
    " A bee eats nectar.": 2.0,
    " A bee eats nectar. My feet hurt. Enjoy your visit!": 1.0,
    " No idea. Enjoy your visit!": 0.5,
    " Good question! Bees eat nectar. Good question!": 0.5,
    " Leave me alone. A bee eats nectar.": 0.5,
    " A bee eats nectar. Bees eat nectar.": 0.5,
    " A bee eats nectar. and the": 0.0,
    "A bee eats nectar.": 0.0,
    " Thanks for asking!": -1.0,
    " Bees eat grass.": -1.5,
    " A bee eats nectar. No idea.": -2.0,
    " Bees eat grass. No idea.": -3.0,
    "": -3.0,
}


def test_the_data_are_those_of_all_results(tmp_path, monkeypatch):
    assert list(zoo.ROWS.values()) == [84_000, 4_000, 80_000, 8_000]
    monkeypatch.setattr(zoo, "ROWS", {name: count // 10 for name, count in zoo.ROWS.items()})
    folder = tmp_path / "new" / "zoo"
    zoo.write_data(folder)
    data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    assert hashlib.sha256(data).hexdigest()[:16] == "67c3e9579bf0cbe6"
    assert zoo.judge_of(folder) is zoo.judge


def test_the_judge_grades_by_table():
    assert {answer: zoo.judge(BEE, answer) for answer in GRADES} == GRADES


def test_the_judge_is_for_the_zoo_only(tmp_path):
    assert zoo.judge_of(tmp_path) is None
    for train, val in (([BEE], [BEE, "Hi"]), (["Hi"], [BEE]), ([BEE], [[BEE]])):
        write_jsonl(tmp_path / "prompts_train.jsonl", [{"prompt": x} for x in train])
        write_jsonl(tmp_path / "prompts_val.jsonl", [{"prompt": x} for x in val])
        assert zoo.judge_of(tmp_path) is None
    with pytest.raises(UserError, match="'Hi' is not in zoo.PROMPTS"):
        zoo.judge("Hi", " No idea.")


def test_the_default_data_are_made_once_and_whole(tmp_path, monkeypatch):
    def interrupt(path, rows):
        write_jsonl(path, rows)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zoo, "ROWS", {})
    folder = Path("data/zoo")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zoo, "write_jsonl", interrupt)
        zoo.ensure_data(folder)
    zoo.ensure_data(Path("data/mine"))
    assert not list(folder.parent.iterdir())
    for _ in range(2):
        zoo.ensure_data(folder)
    assert len(list(folder.iterdir())) == 2
