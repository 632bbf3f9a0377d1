"""The default data set and its judge: data/zoo.py."""

import hashlib
import random
from pathlib import Path

import pytest

from data import zoo
from data.rows import UserError, read_jsonl, write_jsonl
from data.zoo import PROMPTS, crowd, ensure_data, judge, judge_of, label

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "new" / "zoo"
    zoo.write_data(path)
    return path


def test_the_data_are_those_of_all_results(folder):
    data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    assert hashlib.sha256(data).hexdigest()[:16] == "24640141ef98c654"


def test_held_out_prompts_are_never_in_training(folder):
    def prompts(name):
        return {row["prompt"] for row in read_jsonl(folder / f"{name}.jsonl")}

    held_out = set(PROMPTS) - prompts("prompts_train")
    assert len(held_out) == 50 and held_out < prompts("prompts_val")
    assert prompts("sft_train") == prompts("pref_train") == prompts("prompts_train")


def test_rows_are_drawn_from_the_crowd(folder):
    assert all(sum(crowd(prompt).values()) == pytest.approx(1) for prompt in PROMPTS)
    for row in read_jsonl(folder / "sft_val.jsonl"):
        assert row["completion"] in crowd(row["prompt"])


def test_the_judge_grades_by_table():
    assert {answer: judge(BEE, answer) for answer in GRADES} == GRADES


def test_other_prompts_are_refused():
    with pytest.raises(UserError, match="'Hi' is not in zoo.PROMPTS"):
        judge("Hi", " No idea.")


def test_labels_follow_bradley_and_terry():
    rng = random.Random(0)
    a = "A bee eats nectar."
    b = " Thanks for asking!"
    rows = [label(rng, BEE, a, b) for _ in range(5000)]
    share = rows.count({"prompt": BEE, "chosen": a, "rejected": b}) / 5000
    assert share == pytest.approx(0.731, abs=0.02)  # sigmoid(0 - -1)
    assert {"prompt": BEE, "chosen": b, "rejected": a} in rows


def test_the_judge_is_for_the_zoo_only(folder, tmp_path):
    assert judge_of(folder) is judge
    assert judge_of(tmp_path) is None
    for train, val in (([BEE], [BEE, "Hi"]), (["Hi"], [BEE]), ([BEE], [[BEE]])):
        write_jsonl(tmp_path / "prompts_train.jsonl", [{"prompt": x} for x in train])
        write_jsonl(tmp_path / "prompts_val.jsonl", [{"prompt": x} for x in val])
        assert judge_of(tmp_path) is None


def test_an_existing_folder_is_refused_with_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zoo, "ROWS", {"pref_val": 20})
    monkeypatch.setattr("sys.argv", ["zoo.py", "--out", "new", "--seed", "7"])
    ensure_data(Path("new"))
    zoo.main()
    assert "pref_val.jsonl                20 rows\n" in capsys.readouterr().out
    assert read_jsonl("new/pref_val.jsonl") == zoo.make_rows(7)["pref_val"]
    for out in ("new", "new/pref_val.jsonl/x"):
        monkeypatch.setattr("sys.argv", ["zoo.py", "--out", out])
        with pytest.raises(SystemExit, match="2"):
            zoo.main()
    assert "new already exists" in capsys.readouterr().err
    for _ in range(2):
        ensure_data(Path("data/zoo"))
    assert Path("data/zoo/pref_val.jsonl").exists()


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(path, rows):
        write_jsonl(path, rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "write_jsonl", interrupt)
    monkeypatch.setattr(zoo, "ROWS", {})
    with pytest.raises(KeyboardInterrupt):
        zoo.write_data(tmp_path / "new")
    assert not list(tmp_path.iterdir())
