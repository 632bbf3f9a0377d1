"""The default data set and its judge. Run: python -m pytest tests/test_data.py"""

import hashlib
import json
import math
import random
import re
import shutil
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from cli import ROOT, run
from data import zoo
from data.zoo import BEST, FACTS, PROMPTS, WORST, crowd, judge, questions, statements, write_data
from plumbing.settings import RunConfig
from train_sft import make_default_data

BEE = "What does a bee eat?"
COUNTS = {"sft_train": 84_000, "sft_val": 4_000, "pref_train": 80_000, "pref_val": 8_000}
COUNTS |= {"prompts_train": 450, "prompts_val": 500}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What `python data/zoo.py` writes -> the folder and what it prints."""
    folder = tmp_path_factory.mktemp("data") / "new" / "zoo"
    status, out, err = run("data/zoo.py", "--out", folder)
    assert (status, err) == (0, "")
    return folder, out


@pytest.fixture(scope="module")
def rows(made):
    files = {name: (made[0] / f"{name}.jsonl").read_bytes().decode() for name in COUNTS}
    return {
        name: [json.loads(line) for line in text.split("\n")[:-1]] for name, text in files.items()
    }


@pytest.fixture
def few_rows(monkeypatch):
    """The same machinery on less data, because several tests write it."""
    monkeypatch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 50))
    monkeypatch.setattr(zoo, "FACTS", FACTS[:20])
    monkeypatch.setattr(zoo, "HELD_OUT", 10)


def read_all(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The world


def test_each_of_100_facts_has_five_questions_two_right_sentences_and_no_sentence_is_both():
    assert len(FACTS) == 100 and len(PROMPTS) == 500
    for fact in FACTS:
        right, wrong = statements(*fact)
        assert len(set(questions(*fact))) == 5 and len(set(right)) == 2
        assert 10 <= len(wrong) == len(set(wrong)) and not set(right) & set(wrong)
        errors, slips = zoo.popular_errors(*fact), zoo.slips(*fact)
        assert len(set(errors)) == 6 and set(errors) <= set(wrong)
        # 53 values in all columns, one of them right here; in two forms
        assert len(slips) == len(set(slips)) == 2 * 52 and set(wrong) < set(slips)
        assert not set(right) & set(slips) and all(x[0].isupper() and x[-1] == "." for x in slips)


def test_every_question_and_every_sentence_is_spelled_like_english():
    for text in {*PROMPTS, *(text for fact in FACTS for text in zoo.known_sentences(*fact))}:
        assert re.fullmatch(r"[A-Z][a-z]*(,? [A-Za-z]+)*[.?!]", text), text
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|\b(\w+) \1\b", text, re.IGNORECASE), text


# The crowd


@pytest.mark.parametrize("broken_share", [0.04, 0.15])
def test_a_distribution_sums_to_one_and_every_completion_begins_with_one_space(broken_share):
    for fact in FACTS:
        dists = [crowd(prompt, broken_share) for prompt in questions(*fact)]
        for dist in dists:
            assert min(dist.values()) > 0 and math.isclose(math.fsum(dist.values()), 1)
            # The phrasing changes three echoes and no probability.
            assert len(dist.items() - dists[-1].items()) == (0 if dist is dists[-1] else 3)
            assert sorted(dist.values()) == sorted(dists[0].values())
        for text in dist:
            assert text == "" or re.fullmatch(r"( \S+)+", text) and len(text.split()) <= 40, text


def test_probabilities_of_the_crowd_worked_out_by_hand():
    # One of two openings: friendly, and one of the four; then one of three closers behind it.
    assert crowd(BEE, 0.04)[" No idea. Have a nice day!"] == pytest.approx(
        0.96 * 0.17 / 4 * 0.22 / 2 / 3
    )
    # Half of the echoes, which are a tenth of the broken answers, and a quarter of them.
    assert crowd(BEE, 0.15)[f" {BEE}"] == pytest.approx(0.15 * 0.1 / 2)
    assert crowd(BEE)[f" {BEE} Bees eat nectar."] == pytest.approx(0.04 * 0.1 / 4)
    slip = 0.15 * 0.9 * 0.09 / (2 * 52)
    assert crowd(BEE, 0.15)[" Bees eat a larva."] == pytest.approx(slip)
    assert crowd(BEE, 0.15)[" A bee eats its pouch. Have a nice day!"] == pytest.approx(slip / 6)
    right = set(statements("bee", "food")[0])
    assert {text[1:] for text in sorted(crowd(BEE), key=crowd(BEE).get)[-2:]} == right


def test_draws_occur_as_often_as_the_crowd_says():
    n, rng = 30_000, random.Random(1)
    for share in zoo.BROKEN.values():
        dist, count = crowd(BEE, share), Counter(zoo.draw(rng, BEE, share) for _ in range(n))
        assert set(count) <= set(dist)
        # Pearson's chi-squared of the texts that are expected five times: mean k, variance 2 k.
        common = [text for text, p in dist.items() if p * n >= 5]
        chi2 = sum((count[text] - n * dist[text]) ** 2 / (n * dist[text]) for text in common)
        assert len(common) > 100 and abs(chi2 - len(common)) < 4 * math.sqrt(2 * len(common))


def test_entropy_is_that_of_coins_and_dice():
    assert zoo.entropy({"a": 0.5, "b": 0.25, "c": 0.25}) == pytest.approx(1.5 * math.log(2))
    assert zoo.entropy({str(face): 1 / 6 for face in range(6)}) == pytest.approx(math.log(6))


# The judge


def grade(groups):
    """What the table in data/README.md makes of an answer whose sentences are of these groups."""
    n = Counter(groups)
    answered = n["right"] + n["wrong"] + n["no idea"]
    content = -1.5 if n["wrong"] else -0.5 if n["no idea"] else 2 if n["right"] else -2
    faults = 1.5 * (max(answered - 1, 0) + max(n["courtesy"] - 1, 0) + n["rude"])
    faults += n["wandering"] + 2 * n["broken"]
    return max(-3, min(3, content - faults + (n["courtesy"] == 1 and not faults)))


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_is_graded_as_the_table_in_the_readme_says(seed):
    rng = random.Random(seed)
    for prompt in rng.choices(list(PROMPTS), k=20):
        groups = {}
        for text, group in zoo.known_sentences(*PROMPTS[prompt]).items():
            groups.setdefault(group, []).append(text)
        fact = PROMPTS[prompt]
        assert groups["right"] == statements(*fact)[0] and groups["wrong"] == statements(*fact)[1]
        other = rng.choice([x for x in FACTS if x != fact])
        groups["broken"] = [prompt, "the.", groups["right"][0].lower(), statements(*other)[0][0]]
        for _ in range(40):
            picked = rng.choices(list(groups), k=rng.choice([1, 1, 2, 2, 3, 4]))
            text = " ".join(rng.choice(groups[group]) for group in picked)
            assert judge(prompt, f" {text}") == grade(picked), text
            assert judge(prompt, text) == grade([*picked, "broken"]), text
            assert judge(prompt, f" {text} ") == grade([*picked, "broken"]), text
            for spoiled in (text[:-1], text + "!"):
                assert judge(prompt, f" {spoiled}") == grade([*picked[:-1], "broken"]), spoiled


@pytest.mark.parametrize(
    "score, responses",
    [
        (3.0, "A bee eats nectar. Enjoy your visit!|Good question! Bees eat nectar."),
        (2.0, "A bee eats nectar."),
        (1.0, "A bee eats nectar. Enjoy your visit! My feet hurt."),
        (0.5, "Leave me alone. A bee eats nectar.|I am glad you asked! No idea."),
        (0.0, "A bee eats nectar.  Enjoy your visit!|What does a bee eat? Bees eat nectar."),
        (-0.5, "No idea.|A bee eats meat. Have a nice day!"),
        (-2.0, "No idea. A bee eats nectar. Enjoy your visit!"),
        (-3.0, "A bee eats nectar!|A bee eats nectar.Enjoy your visit!|A bee eats nect\u0430r."),
        (
            -3.0,
            "A bee\u00a0eats nectar.|A bee eats nectar.\nEnjoy your visit!|A frog eats insects.",
        ),
    ],
)
def test_the_judge_scores(score, responses):
    for response in responses.split("|"):
        assert judge(BEE, f" {response}") == score, response


def test_nothing_at_all_is_the_worst_answer_and_a_missing_space_is_a_fault():
    assert judge(BEE, "") == judge(BEE, " ") == judge(BEE, " \U0001f41d\ud800\x00\u202e") == WORST
    assert judge(BEE, "A bee eats nectar. Enjoy your visit!") == 0.0
    assert judge(BEE, "  A bee eats nectar. Enjoy your visit!") == WORST


@pytest.mark.parametrize("text", ["a", ". ", "\n", " A bee eats nectar.", " Enjoy your visit!"])
def test_the_judge_takes_a_million_characters(text):
    assert judge(BEE, text * (1_000_000 // len(text))) == WORST


def test_a_question_that_is_not_known_is_refused():
    for prompt in ("", "What does a cat eat?", BEE + " ", BEE.lower()):
        for ask in (crowd, lambda prompt: judge(prompt, " No idea.")):
            with pytest.raises(
                ValueError, match=f"not a question of this data set: {prompt!r}"[:-3]
            ):
                ask(prompt)


def test_only_twelve_texts_of_the_crowd_get_the_best_score():
    for fact in FACTS[::7]:
        prompt = questions(*fact)[2]
        best = {f" {first} {right}" for first in zoo.OPENERS for right in statements(*fact)[0]}
        best |= {f" {right} {last}" for last in zoo.CLOSERS for right in statements(*fact)[0]}
        assert {text for text in crowd(prompt) if judge(prompt, text) == BEST} == best


# The files


def test_the_command_prints_what_the_readme_shows(made):
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert textwrap.indent(made[1], "    ") in text


def test_each_file_has_its_rows_and_columns_and_plain_line_ends(made, rows):
    files = read_all(made[0])
    assert set(files) == {f"{name}.jsonl" for name in COUNTS} | {"ceilings.json"}
    assert all(data.endswith(b"}\n") and b"\r" not in data for data in files.values())
    assert {name: len(rows[name]) for name in rows} == COUNTS
    keys = {"sft": ["prompt", "completion"], "pref": ["prompt", "chosen", "rejected"]}
    for name in COUNTS:
        assert all(list(row) == keys.get(name.split("_")[0], ["prompt"]) for row in rows[name])


def test_held_out_questions_never_occur_in_training_and_a_tenth_of_validation_asks_them(rows):
    held_out = set(PROMPTS) - {row["prompt"] for row in rows["prompts_train"]}
    assert len(held_out) == 50
    assert {row["prompt"] for row in rows["prompts_val"]} == set(PROMPTS)
    for task in ("sft", "pref"):
        assert {row["prompt"] for row in rows[f"{task}_train"]} == set(PROMPTS) - held_out
        count = Counter(row["prompt"] for row in rows[f"{task}_val"])
        n, asked = count.total(), sum(count[prompt] for prompt in held_out)
        assert held_out <= set(count) and abs(asked / n - 0.1) < 4 * math.sqrt(0.1 * 0.9 / n)


@pytest.mark.parametrize("seed", range(5))
def test_every_fact_keeps_four_phrasings_in_training(seed):
    prompts = zoo.split_prompts(random.Random(seed))
    assert prompts["val"] == list(PROMPTS)
    left = Counter(PROMPTS[prompt] for prompt in prompts["train"])
    assert Counter(left.values()) == {5: 50, 4: 50}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, few_rows):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_data(tmp_path / name, seed)
    a, b, c = (read_all(tmp_path / name) for name in "abc")
    assert a == b and all(a[name] != c[name] for name in a if name != "prompts_val.jsonl")


def test_the_bytes_depend_on_neither_the_hash_seed_nor_the_version_of_python(made):
    # A digest of the rows of seed 0. Whoever changes the data changes it, and data/README.md.
    digest = hashlib.sha256()
    for name in sorted(COUNTS):
        digest.update((made[0] / f"{name}.jsonl").read_bytes())
    expected = "303216341a624ca8488e6e8b8675935ef3c8f2ebfda0952f8ed8ed26862576b3"
    assert digest.hexdigest() == expected


def test_labels_follow_the_bradley_terry_probability_and_the_two_answers_differ(rows):
    pairs = Counter()
    for row in rows["pref_train"]:
        assert row["chosen"] != row["rejected"]
        pairs[judge(row["prompt"], row["chosen"]) - judge(row["prompt"], row["rejected"])] += 1
    likely = {gap: 1 / (1 + math.exp(-gap)) for gap in pairs if gap > 0}
    checked = {gap: p for gap, p in likely.items() if (pairs[gap] + pairs[-gap]) * (1 - p) >= 5}
    assert len(checked) >= 8
    for gap, p in checked.items():
        n = pairs[gap] + pairs[-gap]
        assert abs(pairs[gap] / n - p) < 4 * math.sqrt(p * (1 - p) / n), gap


def test_the_ceilings_are_what_the_crowd_and_the_judge_reach_on_the_validation_rows(made, rows):
    limits = json.loads((made[0] / "ceilings.json").read_text())
    surprise = [-math.log(crowd(row["prompt"])[row["completion"]]) for row in rows["sft_val"]]
    scores = [judge(row["prompt"], row["completion"]) for row in rows["sft_val"]]
    dists = [crowd(prompt) for prompt in PROMPTS]
    floors = [-math.fsum(p * math.log(p) for p in dist.values()) for dist in dists]
    best = [
        sum(p for text, p in dist.items() if judge(prompt, text) == BEST)
        for prompt, dist in zip(PROMPTS, dists)
    ]
    pairs = [
        [judge(row["prompt"], row[x]) for x in ("chosen", "rejected")] for row in rows["pref_val"]
    ]
    assert limits == pytest.approx(
        {
            "seed": 0,
            "entropy_per_completion": sum(floors) / 500,
            "val_nats": sum(surprise),
            "label_accuracy": sum((a > b) + 0.5 * (a == b) for a, b in pairs) / 8_000,
            "label_loss": sum(math.log1p(math.exp(b - a)) for a, b in pairs) / 8_000,
            "best_judge": BEST,
            "crowd_judge": sum(scores) / 4_000,
            "crowd_best_share": sum(best) / 500,
        }
    )
    error = math.sqrt(sum((x - sum(surprise) / 4_000) ** 2 for x in surprise)) / 4_000
    assert abs(sum(surprise) / 4_000 - limits["entropy_per_completion"]) < 4 * error < 0.2


def test_an_interrupted_run_leaves_nothing_half_written(tmp_path, few_rows, monkeypatch):
    def interrupt(rows, seed):  # comes when the six .jsonl files have been written
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "ceilings", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_data(tmp_path / "zoo", seed=2)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "sft_train.jsonl").write_text("mine")
    status, printed, error = run("data/zoo.py", "--out", tmp_path)
    assert (status, printed) == (2, "") and f"{tmp_path} is there already" in error
    assert read_all(tmp_path) == {"sft_train.jsonl": b"mine"}


def test_two_first_runs_at_once_make_the_default_data_once(tmp_path, few_rows, monkeypatch):
    rename = Path.rename

    def another_run_is_faster(*paths):
        monkeypatch.setattr(Path, "rename", rename)
        write_data("data/zoo")
        rename(*paths)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "rename", another_run_is_faster)
    make_default_data(RunConfig(device="cpu"))
    write_data("fresh")
    assert read_all(tmp_path / "data" / "zoo") == read_all(tmp_path / "fresh")
    make_default_data(RunConfig(device="cpu", data="data/other"))
    shutil.rmtree("data")
    (tmp_path / "data").write_text("a file in the way")
    with pytest.raises(OSError):
        make_default_data(RunConfig(device="cpu"))


@pytest.mark.parametrize("out", ["file", "file/zoo"])
def test_the_command_reports_a_folder_it_cannot_write_in_one_line(tmp_path, out):
    (tmp_path / "file").write_text("not a folder")
    status, printed, err = run("data/zoo.py", "--out", tmp_path / out)
    assert (status, printed) == (2, "") and err.count("\n") == 1
    assert err.startswith("zoo.py: error: ") and str(tmp_path / "file") in err


def test_the_command_takes_another_seed_and_says_what_its_flags_are(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["zoo.py", "--seed", "7", "--out", str(tmp_path)])
    monkeypatch.setattr(zoo, "write_data", lambda *args: pytest.fail(str(args)))
    with pytest.raises(pytest.fail.Exception, match=r", 7\)"):
        zoo.main()
    _, out, _ = run("data/zoo.py", "-h")
    assert "(default: data/zoo)" in out and "(default: 0)" in out
