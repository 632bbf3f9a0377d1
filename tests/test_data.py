"""The default data set, its judge, and what is known of its truth: data/zoo.py, data/truth.py."""

import hashlib
import json
import math
import random
import re
import sys
from collections import Counter

import pytest

from cli import ROOT, run, write_rows
from data import truth, zoo
from data.files import UserError
from data.zoo import BEST, FACTS, PROMPTS, WORST, crowd, judge, questions, statements

BEE = "What does a bee eat?"
README = (ROOT / "data" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name of the file: bytes} that the command writes, and what it prints."""
    folder = tmp_path_factory.mktemp("data") / "new" / "zoo"
    status, out, err = run("data/zoo.py", "--out", folder)
    assert (status, err) == (0, "") and list(folder.parent.iterdir()) == [folder]
    return {path.stem: path.read_bytes() for path in folder.iterdir()}, out


@pytest.fixture(scope="module")
def rows(made):
    """{name of the file: tuples}"""
    lines = {name: data.decode().split("\n")[:-1] for name, data in made[0].items()}
    return {name: [tuple(json.loads(x).values()) for x in lines[name]] for name in lines}


# The files


def test_the_rows_of_seed_0_are_those_of_all_results(made):
    # On every machine, with any hash seed. If you change the data, change data/README.md as well.
    data, printed = made
    digest = hashlib.sha256(b"".join(data[name] for name in sorted(data))).hexdigest()
    assert digest == "24640141ef98c6546d43cef74c7794823875e4ba84f4bcba32777f38d1682589"
    assert "".join(f"    {line}\n" for line in printed.splitlines()) in README


def test_a_new_folder_gets_its_name_when_all_files_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 50))
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--out", f"{tmp_path}/a", "--seed", "7"])
    zoo.main()
    lines = (tmp_path / "a" / "pref_val.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == zoo.make_rows(7)["pref_val"]

    def interrupt(path, rows):
        written.append(path.name)
        if len(written) == 6:
            raise KeyboardInterrupt
        path.parent.mkdir(exist_ok=True)
        path.write_text("")

    with pytest.raises(UserError, match="a: is there already; choose another --out"):
        zoo.write_data(tmp_path / "a")
    written = []
    monkeypatch.setattr(zoo, "write_jsonl", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zoo.write_data(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# The crowd


@pytest.mark.parametrize("share", [0.04, 0.15])
def test_a_distribution_sums_to_one_and_every_completion_begins_with_one_space(share):
    for fact in FACTS[::3]:
        first, *others = [crowd(prompt, share) for prompt in questions(*fact)]
        assert min(first.values()) > 0 and math.isclose(math.fsum(first.values()), 1)
        assert all(re.fullmatch(r"( \S+)*", x) for x in first)
        for other in others:  # the phrasing changes three echoes and no probability
            assert len(other.items() - first.items()) == 3
            assert sorted(other.values()) == sorted(first.values())


# The judge


def grade(groups):
    """What the table in data/README.md makes of an answer whose sentences are of these groups."""
    n = Counter(groups)
    answered = n["right"] + n["wrong"] + n["no idea"]
    content = -1.5 if n["wrong"] else -0.5 if n["no idea"] else 2 if n["right"] else -2
    faults = 1.5 * (max(answered - 1, 0) + max(n["courtesy"] - 1, 0) + n["rude"])
    faults += n["wandering"] + 2 * n["broken"]
    return max(-3, min(3, content - faults + (n["courtesy"] == 1 and not faults)))


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_is_graded_as_the_table_in_the_readme_says(seed):
    rng = random.Random(seed)
    for prompt in rng.choices(list(PROMPTS), k=20):
        fact, groups = PROMPTS[prompt], {}
        for text, group in zoo.known_sentences(*fact).items():
            groups.setdefault(group, []).append(text)
        assert (groups["right"], groups["wrong"]) == statements(*fact)
        other = rng.choice([x for x in FACTS if x != fact])
        groups["broken"] = [prompt, "the.", groups["right"][0].lower(), statements(*other)[0][0]]
        for _ in range(40):
            picked = rng.choices(list(groups), k=rng.choice([1, 1, 2, 2, 3, 4]))
            text = " ".join(rng.choice(groups[group]) for group in picked)
            assert judge(prompt, f" {text}") == grade(picked), text
            for spoiled in (text, f" {text} "):  # white space is not forgiven
                assert judge(prompt, spoiled) == grade([*picked, "broken"]), spoiled
            for spoiled in (text[:-1], text + "!"):
                assert judge(prompt, f" {spoiled}") == grade([*picked[:-1], "broken"]), spoiled


def test_the_judge_grades_the_examples_of_the_readme_and_takes_any_text():
    examples = re.findall(r"\| (-?\d\.\d) \| (\w+ .*) \| ([A-Z].*) \|", README)
    assert len(examples) == 5
    for score, prompt, answer in examples:
        assert judge(prompt, f" {answer}") == float(score)
    odd = [
        "A bee eats nectar.Enjoy your visit!",
        "A bee eats nect\u0430r.",
        "A bee\u00a0eats nectar.",
    ]
    for text in (*odd, "", "\U0001f41d\ud800\x00", "a" * 10**6, " A bee eats nectar." * 50_000):
        assert judge(BEE, f" {text}") == WORST
    assert judge(BEE, "") == WORST


# The truth


def test_the_limits_of_the_readme_are_what_crowd_and_judge_reach(rows):
    dists = [(prompt, crowd(prompt)) for prompt in list(PROMPTS)[::5]]  # the other phrasings' too
    entropy = -sum(p * math.log(p) for _, dist in dists for p in dist.values()) / 100
    graded = [(judge(prompt, text), p / 100) for prompt, dist in dists for text, p in dist.items()]
    gaps = truth.margins(rows["pref_val"])
    right = sum(gap > 0 for gap in gaps) / 8000
    loss = sum(math.log1p(math.exp(-gap)) for gap in gaps) / 8000
    says = [f"{entropy:.3f} nats", f"{100 * right:.1f} %", f"a loss of {loss:.3f}"]
    says += [f"get {sum(score * p for score, p in graded):.2f} on average"]
    says += [f"{100 * sum(p for score, p in graded if score == BEST):.1f} % of them get 3"]
    assert all(text in " ".join(README.split()) for text in says), says
    # What is drawn has this entropy: the demonstrations come from no other distribution.
    surprise = truth.entropies(rows["sft_val"])
    error = math.sqrt(sum((x - entropy) ** 2 for x in surprise)) / 4000
    assert abs(sum(surprise) / 4000 - entropy) < 3 * error < 0.1
    assert surprise[:9] == [-math.log(crowd(x)[y]) for x, y in rows["sft_val"][:9]]


def test_nothing_is_known_of_other_rows(tmp_path):
    assert truth.margins([(BEE, " No idea.", " Bees eat nectar.")]) == [-2.5]
    assert truth.margins([("Hi", "a", "b")]) is None
    assert truth.entropies([("Hi", " No idea.")]) is truth.entropies([(BEE, " Hi")]) is None
    for ask in (crowd, lambda prompt: judge(prompt, " No idea.")):
        with pytest.raises(ValueError, match="not a question of this data set: 'what does a'"):
            ask("what does a")
    assert truth.judge_of(tmp_path) is None
    for prompts, known in (([(BEE,)], judge), ([(BEE,), ("Hi",)], None)):
        write_rows(tmp_path, prompts_train=[(BEE,)], prompts_val=prompts)
        assert truth.judge_of(tmp_path) is known
        write_rows(tmp_path, prompts_train=prompts, prompts_val=[(BEE,)])
        assert truth.judge_of(tmp_path) is known
