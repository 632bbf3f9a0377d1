"""The default data set and its judge, data/zoo.py."""

import hashlib
import random
import re
import sys
from collections import Counter, defaultdict

import pytest

from cli import ROOT, run, write_rows
from data import zoo
from data.files import UserError, command, write_jsonl
from data.rows import load_rows
from data.zoo import FACTS, PROMPTS, WORST, crowd, judge, judge_of, statements

BEE = "What does a bee eat?"
README = (ROOT / "data" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def zoo_files(tmp_path_factory):
    """The folder that the command writes, and what it prints."""
    folder = tmp_path_factory.mktemp("data") / "new" / "zoo"
    return folder, run("data/zoo.py", "--out", folder)[1]


def test_the_rows_of_seed_0_are_those_of_all_results(zoo_files):
    # If you change the data, change data/README.md as well.
    folder, printed = zoo_files
    data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    assert hashlib.sha256(data).hexdigest()[:16] == "24640141ef98c654"
    assert "".join(f"    {line}\n" for line in printed.splitlines()) in README


def test_a_folder_gets_its_name_when_its_files_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 50))
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--out", f"{tmp_path}/a", "--seed", "7"])
    command(zoo.__doc__, zoo.FLAGS, zoo.main)
    rows = [tuple(row.values()) for row in zoo.make_rows(7)["pref_val"]]
    assert load_rows(tmp_path / "a" / "pref_val.jsonl", "pref") == rows
    with pytest.raises(UserError, match="a: already exists"):
        zoo.write_data(tmp_path / "a")

    def interrupt(path, rows):
        write_jsonl(path, rows)
        if path.name == "prompts_val.jsonl":  # the last one
            raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "write_jsonl", interrupt)
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--out", f"{tmp_path}/b"])
    with pytest.raises(SystemExit, match="130"):  # one line, no traceback
        command(zoo.__doc__, zoo.FLAGS, zoo.main)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def grade(groups):
    """What the table in data/README.md makes of an answer whose sentences are of these groups."""
    n = Counter(groups)
    answered = n["right"] + n["wrong"] + n["no idea"]
    content = -1.5 if n["wrong"] else -0.5 if n["no idea"] else 2 if n["right"] else -2
    faults = 1.5 * (max(answered - 1, 0) + max(n["courtesy"] - 1, 0) + n["rude"])
    faults += n["wandering"] + 2 * n["broken"]
    return max(-3, min(3, content - faults + (n["courtesy"] == 1 and not faults)))


def test_an_answer_is_graded_as_in_the_readme():
    rng = random.Random(0)
    for prompt in rng.choices(list(PROMPTS), k=100):
        fact, groups = PROMPTS[prompt], defaultdict(list)
        for text, group in zoo.sentence_groups(*fact).items():
            groups[group].append(text)
        assert (groups["right"], groups["wrong"]) == statements(*fact)
        other = rng.choice([x for x in FACTS if x != fact])
        groups["broken"] = [prompt, "the.", groups["right"][0].lower(), statements(*other)[0][0]]
        for _ in range(40):
            picked = rng.choices(list(groups), k=rng.randint(1, 4))
            text = " " + " ".join(rng.choice(groups[group]) for group in picked)
            assert judge(prompt, text) == grade(picked), text
            for spoiled in (text[1:], f"{text} "):  # white space is not forgiven
                assert judge(prompt, spoiled) == grade([*picked, "broken"]), spoiled
            for spoiled in (text[:-1], f"{text}!"):
                assert judge(prompt, spoiled) == grade([*picked[:-1], "broken"]), spoiled


def test_the_judge_grades_the_readmes_examples_and_any_text():
    examples = re.findall(r"\| (-?\d\.\d) \| (\w+ .*) \| ([A-Z].*) \|", README)
    assert len(examples) == 5
    for score, prompt, answer in examples:
        assert judge(prompt, f" {answer}") == float(score)
    odd = "", " ", " A bee\u00a0eats nectar.", "\ud800\x00", " Bees eat nectar." * 50_000
    assert {judge(BEE, text) for text in odd} == {WORST}


def test_the_judge_knows_its_own_prompts_only(tmp_path):
    for ask in (crowd, lambda prompt: judge(prompt, " No idea.")):
        with pytest.raises(ValueError, match="not a question .*: 'what does a'"):
            ask("what does a")
    assert judge_of(tmp_path) is None
    bee, both = [(BEE,)], [(BEE,), ("Hi",)]
    for train, val, known in (bee, bee, judge), (bee, both, None), (both, bee, None):
        write_rows(tmp_path, prompts_train=train, prompts_val=val)
        assert judge_of(tmp_path) is known
