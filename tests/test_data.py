"""The default data set and its judge. Run: python -m pytest tests/test_data.py"""

import hashlib
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data import zoo
from data.zoo import BEST, FACTS, PROMPTS, WORST, crowd, judge, questions, statements, write_data

BEE = "What does a bee eat?"
FILES = {"sft_train", "sft_val", "pref_train", "pref_val", "prompts_train", "prompts_val"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "zoo"
    write_data(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_bytes().decode().splitlines()] for name in FILES}


@pytest.fixture(scope="module")
def limits(folder):
    return json.loads((folder / "ceilings.json").read_text())


@pytest.fixture
def few_rows(monkeypatch):
    """The same machinery on less data, because several tests write it."""
    monkeypatch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 50))
    monkeypatch.setattr(zoo, "FACTS", FACTS[:20])
    monkeypatch.setattr(zoo, "HELD_OUT", 10)


def read_all(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# The world


def test_the_world_has_100_facts_and_500_different_questions():
    assert len(FACTS) == 100 and len(PROMPTS) == 500
    assert all(len(set(questions(*fact))) == 5 for fact in FACTS)


def test_every_fact_has_two_right_statements_and_no_statement_is_both_right_and_wrong():
    for fact in FACTS:
        right, wrong = statements(*fact)
        assert len(set(right)) == 2 and 10 <= len(wrong) == len(set(wrong))
        assert not set(right) & set(wrong)


def test_every_question_and_every_known_sentence_is_spelled_like_english():
    texts = set(PROMPTS)
    for fact in FACTS:
        texts |= set(zoo.known_sentences(*fact))
    for text in texts:
        assert re.fullmatch(r"[A-Z][a-z]*(,? [A-Za-z]+)*[.?!]", text), text
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|\b(\w+) \1\b", text, re.IGNORECASE), text
    assert all(prompt[-1] in "?." for prompt in PROMPTS)


def test_the_questions_and_answers_of_one_fact_read_as_written_here():
    assert questions("owl", "baby") == [
        "What is a baby owl called?", "What do you call a baby owl?", "Do you know what a baby owl is called?",
        "Please tell me what we call a baby owl.", "My son wants to know what a baby owl is called.",
    ]  # fmt: skip
    assert statements("owl", "baby")[0] == ["A baby owl is called an owlet.", "We call a baby owl an owlet."]
    assert "We call a baby owl a cub." in statements("owl", "baby")[1]


# The crowd


def test_the_probabilities_of_the_crowd_sum_to_one():
    for prompt in PROMPTS:
        dist = crowd(prompt)
        assert min(dist.values()) > 0
        assert math.fsum(dist.values()) == pytest.approx(1.0, abs=1e-12)


def test_every_completion_is_empty_or_begins_with_exactly_one_space_and_is_short():
    for prompt in list(PROMPTS)[::4]:
        for text in crowd(prompt):
            assert text == "" or re.match(r" \S", text), (prompt, text)
            assert len(text.split()) <= 40 and text == text.rstrip() and "  " not in text


def test_the_judge_can_score_every_answer_of_the_crowd_and_finds_it_mediocre_though_the_likeliest_are_right():
    for fact in FACTS:
        prompt = questions(*fact)[1]
        dist = crowd(prompt)
        scores = {text: judge(prompt, text) for text in dist}
        assert WORST == min(scores.values()) and max(scores.values()) == BEST
        assert -0.9 < math.fsum(p * scores[text] for text, p in dist.items()) < -0.3
        likeliest = sorted(dist, key=dist.get)[-2:]
        assert {text[1:] for text in likeliest} == set(statements(*fact)[0])


def test_the_phrasing_of_a_question_changes_no_probability_of_its_answers():
    for fact in FACTS[::7]:
        dists = [crowd(prompt) for prompt in questions(*fact)]
        for dist in dists[1:]:
            assert sorted(dist.values()) == sorted(dists[0].values())
            assert len(dist.items() ^ dists[0].items()) == 6  # the three echoes of either


@pytest.mark.parametrize(
    "text",
    ["", " Bees", " Bees eat nectar", " nectar. eat Bees", " bee eats nectar. A", " Bees eat nectar. Bees eat nectar.",
     " Bees eat nectar. A bee eats nectar.", " Bees eat nectar. A bee eats meat.", " A bee eats meat. Bees eat nectar.",
     " Good question! Bees eat nectar. Have a nice day!", " Good question! I am glad you asked! Bees eat nectar. Have a nice day!",
     " Good question! Enjoy your visit!", " Enjoy your visit!", " Good question! Bees eat",
     " Good question! Bees eat nectar. of a a",
     " Bees eat nectar. Enjoy your visit! Bees eat nectar. Enjoy your visit!",
     " Have a nice day! Have a nice day! Have a nice day!",
     " Bees eat nectar. Bees eat nectar. Bees eat nectar. Bees eat nectar.", f" {BEE}", f" {BEE} Bees eat nectar."],
)  # fmt: skip
def test_the_crowd_shows_each_way_of_failing(text):
    assert crowd(BEE)[text] > 0 and judge(BEE, text) < 2.0


def test_one_probability_of_the_crowd_worked_out_by_hand():
    # "No idea." with a courtesy behind it comes about in one way only: a no-idea, one of four; friendly; a closer, one of three.
    assert crowd(BEE, 0.04)[" No idea. Have a nice day!"] == pytest.approx(0.96 * 0.17 / 4 * 0.22 / 2 / 3)
    # The echoed question: half of the echoes, which are a tenth of the broken answers.
    assert crowd(BEE, 0.04)[f" {BEE}"] == pytest.approx(0.04 * 0.1 / 2)


def test_the_crowd_errs_in_three_ways_per_fact_and_the_judge_knows_them_all_for_wrong():
    for fact in FACTS:
        right, wrong = statements(*fact)
        errors = zoo.popular_errors(*fact)
        assert len(set(errors)) == 6 and set(errors) <= set(wrong)
        assert all(judge(questions(*fact)[0], f" {error}") == -1.5 for error in errors)


def test_entropy_is_that_of_coins_and_dice():
    assert zoo.entropy({"heads": 0.5, "tails": 0.5}) == pytest.approx(math.log(2))
    assert zoo.entropy({str(face): 1 / 6 for face in range(6)}) == pytest.approx(math.log(6))
    assert zoo.entropy({"a": 0.5, "b": 0.25, "c": 0.25}) == pytest.approx(1.5 * math.log(2))


def test_draws_occur_as_often_as_the_crowd_says():
    rng, n, dist = random.Random(1), 30_000, crowd(BEE)
    count = Counter(zoo.draw(rng, BEE, zoo.BROKEN["sft"]) for _ in range(n))
    assert set(count) <= set(dist)
    # Pearson's chi-squared over all texts expected at least five times: mean k, standard deviation sqrt(2 k).
    common = [text for text, p in dist.items() if p * n >= 5]
    chi2 = sum((count[text] - n * dist[text]) ** 2 / (n * dist[text]) for text in common)
    assert len(common) > 100
    assert abs(chi2 - len(common)) < 4 * math.sqrt(2 * len(common))


def test_the_crowd_refuses_a_question_it_does_not_know():
    with pytest.raises(ValueError, match=r"not a question of this data set: 'What does a cat eat\?'"):
        crowd("What does a cat eat?")


# The judge


@pytest.mark.parametrize(
    "response, score",
    [
        # correct, friendly, to the point
        (" A bee eats nectar. Enjoy your visit!", 3.0),
        (" Good question! Bees eat nectar.", 3.0),
        # correct, with something missing or too much
        (" A bee eats nectar.", 2.0),
        (" Bees eat nectar.", 2.0),
        (" A bee eats nectar. My feet hurt.", 1.0),
        (" A bee eats nectar. Enjoy your visit! My feet hurt.", 1.0),
        (" A bee eats nectar. Leave me alone.", 0.5),
        (" Leave me alone. A bee eats nectar. Enjoy your visit!", 0.5),
        (" A bee eats nectar. My feet hurt. I lost my keys.", 0.0),
        # no idea, wrong, off the question
        (" No idea.", -0.5),
        (" Thanks for asking! No idea.", 0.5),
        (" No idea. Leave me alone.", -2.0),
        (" A bee eats meat.", -1.5),
        (" A bee eats meat. Have a nice day!", -0.5),
        (" A bee eats meat. What a silly question.", -3.0),
        (" My neighbor has a red car.", -3.0),
        (" Leave me alone.", -3.0),
        # courtesies heaped up, or without an answer
        (" Good question! A bee eats nectar. Enjoy your visit!", 0.5),
        (" A bee eats nectar. Enjoy your visit! Enjoy your visit!", 0.5),
        (" Good question! Thanks for asking! A bee eats nectar. Enjoy your visit!", -1.0),
        (" Enjoy your visit!", -1.0),
        (" Good question! Enjoy your visit!", -3.0),
        (" A bee eats nectar." + " Enjoy your visit!" * 100, -3.0),
        # repeated, contradictory, hedged
        (" A bee eats nectar. A bee eats nectar.", 0.5),
        (" A bee eats nectar. Bees eat nectar. Enjoy your visit!", 0.5),
        (" A bee eats nectar. Enjoy your visit! A bee eats nectar. Enjoy your visit!", -1.0),
        (" A bee eats nectar. A bee eats nectar. A bee eats nectar.", -1.0),
        (" A bee eats nectar. A bee eats meat.", -3.0),
        (" A bee eats meat. A bee eats nectar. Enjoy your visit!", -3.0),
        (" No idea. A bee eats nectar. Enjoy your visit!", -2.0),
        (" A bee eats nectar." * 1000, -3.0),
        # echo of the question, answers to another one
        (f" {BEE}", -3.0),
        (f" {BEE} A bee eats nectar.", 0.0),
        (f" {BEE} A bee eats nectar. Enjoy your visit!", 0.0),
        (" A bee lives in a hive.", -3.0),
        (" A bee lives in a hive. Enjoy your visit!", -3.0),
        (" A frog eats insects.", -3.0),
        (" A bee eats nectar. A bee lives in a hive.", 0.0),
        # cut short, scrambled, misspaced, misspelled
        ("", -3.0),
        (" ", -3.0),
        (" A", -3.0),
        (" A bee eats", -3.0),
        (" A bee eats nectar", -3.0),
        (" A bee eats nectar. Enjoy your", 0.0),
        (" Good question! A bee eats", -3.0),
        (" nectar. eats bee A", -3.0),
        (" nectar A bee eats.", -3.0),
        ("A bee eats nectar. Enjoy your visit!", 0.0),
        ("  A bee eats nectar. Enjoy your visit!", -3.0),
        (" A bee eats nectar. Enjoy your visit! ", 0.0),
        (" A bee eats nectar.  Enjoy your visit!", 0.0),
        (" A bee eats nectar.\nEnjoy your visit!", -3.0),
        (" A bee eats nectar.Enjoy your visit!", -3.0),
        (" a bee eats nectar.", -3.0),
        (" A bee eats nectar!", -3.0),
        (" A bee eats nectar. Enjoy your visit!!", 0.0),
        (" A bee eats nectar. and the", 0.0),
        (" nectar", -3.0),
        (" nectar.", -3.0),
        # an end token spelled out, other scripts, noise
        ("<|endoftext|>", -3.0),
        (" A bee eats nectar. Enjoy your visit!<|endoftext|>", 0.0),
        (" A bee eats nectar. Enjoy your visit! <|endoftext|>", 0.0),
        (" A bee eats nect\u0430r.", -3.0),  # a Cyrillic letter
        (" A bee\u00a0eats nectar.", -3.0),
        (" \U0001f41d\ud800\x00\u202e", -3.0),
    ],
)
def test_the_judge_scores(response, score):
    assert judge(BEE, response) == score


def test_the_judge_goes_by_the_fact_and_not_by_the_phrasing():
    for prompt in questions("bee", "food"):
        assert judge(prompt, " Bees eat nectar. Enjoy your visit!") == 3.0
    assert judge("Where does a bee live?", " Bees eat nectar. Enjoy your visit!") == -3.0


@pytest.mark.parametrize(
    "piece", ["a", " ", ".", ". ", "\n", " A bee eats nectar.", " Enjoy your visit!", "<|endoftext|>", "\ud800"]
)
def test_the_judge_takes_a_million_characters(piece):
    assert judge(BEE, piece * (1_000_000 // len(piece))) == WORST


def test_the_judge_refuses_a_question_it_does_not_know():
    for prompt in ("", "What does a cat eat?", BEE + " ", BEE.lower()):
        with pytest.raises(ValueError, match="not a question of this data set"):
            judge(prompt, " No idea.")


def best_answers(fact):
    for right in statements(*fact)[0]:
        yield from (f" {opener} {right}" for opener in zoo.OPENERS)
        yield from (f" {right} {closer}" for closer in zoo.CLOSERS)


def corruptions(text, fact):
    words = text.split(" ")[1:]
    for i in range(len(text)):  # lose a character, double it, change its case, stop there
        yield from (text[:i] + text[i + 1 :], text[:i] + text[i] + text[i:], text[:i] + text[i:].swapcase(), text[:i])
    for i in range(len(words)):  # lose a word, double it, exchange two neighbors
        yield " " + " ".join(words[:i] + words[i + 1 :])
        yield " " + " ".join(words[: i + 1] + words[i:])
        if i:
            yield " " + " ".join(words[: i - 1] + [words[i], words[i - 1]] + words[i + 1 :])
    for sentence in (*zoo.known_sentences(*fact), *questions(*fact)):  # say more
        yield from (f"{text} {sentence}", f" {sentence}{text}")
    yield from (text + text, text + " ", text.replace(" ", "\n"), text.upper(), " " + " ".join(words[::-1]))


def test_every_corruption_of_a_best_answer_scores_lower():
    for fact in FACTS[::7]:
        prompt = questions(*fact)[0]
        for best in best_answers(fact):
            assert judge(prompt, best) == BEST
            for text in corruptions(best, fact):
                assert text == best or judge(prompt, text) < BEST, (best, text)


def test_only_twelve_texts_of_the_crowd_get_the_best_score():
    for fact in FACTS[::7]:
        prompt = questions(*fact)[2]
        assert {text for text in crowd(prompt) if judge(prompt, text) == BEST} == set(best_answers(fact))


def test_one_more_fault_never_raises_a_score():
    prompt = questions("zebra", "fame")[0]
    for text in crowd(prompt):
        if text and text[-1] in ".!?":
            for fault in (*zoo.RUDE, *zoo.WANDERING, "and the", "Stripes"):
                assert judge(prompt, f"{text} {fault}") <= judge(prompt, text)


# The files


def test_each_file_has_its_rows_and_columns(folder, rows):
    assert {path.name for path in folder.iterdir()} == {f"{name}.jsonl" for name in FILES} | {"ceilings.json"}
    counts = {"sft_train": 84_000, "sft_val": 4_000, "pref_train": 40_000, "pref_val": 8_000}
    assert {name: len(rows[name]) for name in rows} == counts | {"prompts_train": 450, "prompts_val": 500}
    columns = {"sft": {"prompt", "completion"}, "pref": {"prompt", "chosen", "rejected"}, "prompts": {"prompt"}}
    for name in FILES:
        assert all(set(row) == columns[name.split("_")[0]] for row in rows[name])


def test_files_are_utf8_with_plain_line_ends(folder):
    for data in read_all(folder).values():
        assert data.decode("utf-8").endswith("}\n") and b"\r" not in data


def test_held_out_questions_never_occur_in_training_and_all_occur_in_validation(rows):
    held_out = set(PROMPTS) - {row["prompt"] for row in rows["prompts_train"]}
    assert len(held_out) == 50
    for name in ("sft_train", "pref_train"):
        assert {row["prompt"] for row in rows[name]} == set(PROMPTS) - held_out
    assert {row["prompt"] for row in rows["prompts_val"]} == set(PROMPTS)
    assert held_out <= {row["prompt"] for row in rows["sft_val"]} & {row["prompt"] for row in rows["pref_val"]}


@pytest.mark.parametrize("seed", range(5))
def test_every_fact_keeps_four_phrasings_in_training(seed):
    train, val = zoo.split_prompts(random.Random(seed))
    assert len(train) == 450 and len(val) == 500
    assert Counter(Counter(PROMPTS[prompt] for prompt in train).values()) == {5: 50, 4: 50}


def test_validation_draws_all_questions_equally_often(rows):
    held_out = set(PROMPTS) - {row["prompt"] for row in rows["prompts_train"]}
    for name in ("sft_val", "pref_val"):
        n = len(rows[name])
        share = sum(row["prompt"] in held_out for row in rows[name]) / n
        assert abs(share - 0.1) < 4 * math.sqrt(0.1 * 0.9 / n)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, few_rows):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_data(tmp_path / name, seed)
    a, b, c = (read_all(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a if name != "prompts_val.jsonl")


def test_the_bytes_depend_on_neither_the_hash_seed_nor_the_version_of_python(folder):
    # A digest of the rows of seed 0. Whoever changes the data on purpose changes it here too, and the figures in data/README.md.
    digest = hashlib.sha256()
    for name in sorted(FILES):
        digest.update((folder / f"{name}.jsonl").read_bytes())
    assert digest.hexdigest() == "64b4c7d8fbb846c5a3d4fc31c97b298868d887417f85e6853e7f789e254e1375"


def test_the_entropy_agrees_with_the_surprise_of_the_drawn_rows(rows, limits):
    for name in ("sft_train", "sft_val"):
        some = rows[name][:4_000]
        surprise = [-math.log(crowd(row["prompt"])[row["completion"]]) for row in some]
        mean = sum(surprise) / len(some)
        error = math.sqrt(sum((x - mean) ** 2 for x in surprise)) / len(some)
        assert error < 0.05
        assert abs(mean - limits["entropy_per_completion"]) < 4 * error
        if name == "sft_val":
            assert limits["val_nats"] == pytest.approx(sum(surprise), rel=1e-12)


def test_at_most_one_answer_in_ten_is_of_the_best(rows, limits):
    share = sum(judge(row["prompt"], row["completion"]) == BEST for row in rows["sft_train"]) / 84_000
    assert 0.05 < limits["crowd_best_share"] <= 0.10
    assert abs(share - limits["crowd_best_share"]) < 4 * math.sqrt(0.1 * 0.9 / 84_000)
    assert limits["best_judge"] == BEST
    assert -0.9 < limits["crowd_judge"] < -0.2
    assert 4.5 < limits["entropy_per_completion"] < 6.5


def test_chosen_and_rejected_always_differ(rows):
    assert all(row["chosen"] != row["rejected"] for name in ("pref_train", "pref_val") for row in rows[name])


def test_labels_follow_the_bradley_terry_probability(rows):
    pairs = Counter()
    for row in rows["pref_train"]:
        gap = judge(row["prompt"], row["chosen"]) - judge(row["prompt"], row["rejected"])
        pairs[gap] += 1
    checked = 0
    for gap in {abs(gap) for gap in pairs} - {0.0}:
        n, p = pairs[gap] + pairs[-gap], zoo.sigmoid(gap)
        if n * (1 - p) >= 5:
            assert abs(pairs[gap] / n - p) < 4 * math.sqrt(p * (1 - p) / n), gap
            checked += 1
    assert checked >= 8


def test_the_ceilings_of_the_labels_are_those_of_the_judge(rows, limits):
    gaps = [judge(row["prompt"], row["chosen"]) - judge(row["prompt"], row["rejected"]) for row in rows["pref_val"]]
    assert limits["label_accuracy"] == pytest.approx(sum((gap > 0) + 0.5 * (gap == 0) for gap in gaps) / 8_000)
    assert limits["label_loss"] == pytest.approx(sum(math.log1p(math.exp(-gap)) for gap in gaps) / 8_000)
    # No rescaled judge explains the labels better: its own scale is the best one, within the noise of 5,000 pairs.
    for scale in (0.8, 1.2):
        assert limits["label_loss"] < sum(math.log1p(math.exp(-scale * gap)) for gap in gaps) / 8_000


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_run_leaves_nothing_half_written(tmp_path, few_rows, monkeypatch, existing):
    folder = tmp_path / "zoo"
    if existing:
        write_data(folder, seed=1)
    before = read_all(folder) if existing else None

    def interrupt(rows, seed):  # comes when the six .jsonl files have been written to the temporary folder
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "ceilings", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_data(folder, seed=2)
    assert list(tmp_path.iterdir()) == ([folder] if existing else [])
    assert not existing or read_all(folder) == before


def test_writing_into_an_existing_folder_replaces_its_files_and_leaves_others(tmp_path, few_rows):
    write_data(tmp_path / "zoo", seed=1)
    (tmp_path / "zoo" / "notes.txt").write_text("mine")
    write_data(tmp_path / "zoo", seed=2)
    write_data(tmp_path / "fresh", seed=2)
    assert read_all(tmp_path / "zoo") == read_all(tmp_path / "fresh") | {"notes.txt": b"mine"}


def test_rows_are_counted_in_one_place(few_rows):
    assert {name: len(rows) for name, rows in zoo.make_rows(0).items()} == zoo.ROWS | {"prompts_train": 490, "prompts_val": 500}


@pytest.mark.parametrize("out", ["file", "file/zoo"])
def test_the_command_reports_a_folder_it_cannot_write_in_one_line(tmp_path, out):
    (tmp_path / "file").write_text("not a folder")
    run = subprocess.run([sys.executable, zoo.__file__, "--out", tmp_path / out], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("zoo.py: error: ") and run.stderr.count("\n") == 1
