"""The bench on film reviews: what is held out, and how a classifier that nobody trained against judges.

Run: python -m pytest tests/test_real.py
"""

import json
import math

import pytest
import torch

from bench import real, results
from plumbing.checkpoints import save_checkpoint
from test_variations import small_models


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    """Reviews 0 to 59, each in a pair, and in SFT, cut elsewhere; 60 to 69 in SFT alone."""
    (tmp_path / "data").mkdir()
    pairs = [{"prompt": f"film {i}", "chosen": f" is a good one {i}", "rejected": f" is a bad one {i}"} for i in range(60)]
    sft = [{"prompt": f"film {i} is a", "completion": f" {kind} one {i}"} for i in range(70) for kind in ("good", "bad")]
    prompts = [{"prompt": f"film {i} is a"} for i in range(70)]
    for task, rows in (("pref", pairs), ("sft", sft), ("prompts", prompts)):
        write(tmp_path / "data" / f"{task}_train.jsonl", rows)
        write(tmp_path / "data" / f"{task}_val.jsonl", [{"prompt": "x", "chosen": " good", "rejected": " bad", "completion": " y"}])
    return tmp_path / "data"


def test_a_third_of_the_pairs_is_nowhere_in_the_training_data(folder, tmp_path):
    good, bad = real.hold_out(folder, tmp_path / "out" / "data")
    kept = {path.stem: real.rows_of(path) for path in (tmp_path / "out" / "data").glob("*.jsonl")}
    numbers = {text.split()[1] for text in good}
    assert 12 <= len(good) == len(bad) <= 28 and numbers == {text.split()[1] for text in bad}
    assert all(" good " in text for text in good) and all(" bad " in text for text in bad)
    assert [row["prompt"].split()[1] for row in kept["pref_train"]] == [str(i) for i in range(60) if str(i) not in numbers]
    assert {row["prompt"].split()[1] for row in kept["sft_train"]} == {str(i) for i in range(70)} - numbers
    assert len(kept["sft_train"]) == 2 * (70 - len(good))
    assert [row["prompt"].split()[1] for row in kept["prompts_train"]] == [str(i) for i in range(70) if str(i) not in numbers]
    for task in ("pref", "sft", "prompts"):
        assert kept[f"{task}_val"] == real.rows_of(folder / f"{task}_val.jsonl")
    assert real.hold_out(folder, tmp_path / "again") == (good, bad)


def test_naive_bayes_counts_the_texts_that_hold_a_word():
    log_odds = real.naive_bayes(["fine fine film", "fine plot"], ["dull film"])
    # 4 words; favourable: fine 2, film 1, plot 1; unfavourable: dull 1, film 1
    fine, film, dull, new = (math.log(a * (2 + 4) / (b * (4 + 4))) for a, b in ((3, 1), (2, 2), (1, 2), (1, 1)))
    assert log_odds("fine") == pytest.approx(fine) and log_odds("a dull film") == pytest.approx(new + dull + film)
    assert log_odds("film film film") == pytest.approx(film) and log_odds("") == 0


def test_the_classifier_judges_what_each_model_goes_on_with(tmp_path, monkeypatch):
    sft, scorer, tokenizer = small_models(tmp_path)
    save_checkpoint(tmp_path / "ppo.pt", "ppo", sft, tokenizer)
    monkeypatch.setattr(real, "ANSWERS", 8)
    seen = []

    def log_odds(text):
        seen.append(text)
        return len(text) - 32.0

    out = real.judged(tmp_path, {"PPO": tmp_path / "ppo.pt"}, ["What does", "Do bees"] * 10, log_odds)
    assert list(out) == ["SFT model", "best of 8", "PPO"] and len(seen) == 2 * 20 * 8
    share = sum(len(text) > 32 for text in seen[:160]) / 160
    assert 0.1 < share < 0.9 and out["SFT model"]["judge"][0] == pytest.approx(share)
    assert not any(text.startswith(("What does", "Do bees")) for text in seen)
    assert out["best of 8"]["score"][0] > out["SFT model"]["score"][0] + 3 * out["SFT model"]["score"][1]
    assert out["best of 8"]["kl"] == [pytest.approx(math.log(8) - 7 / 8), None] and out["SFT model"]["kl"][0] == 0
    assert out["PPO"]["kl"][0] == pytest.approx(0, abs=1e-4) and out["PPO"]["judge"][1] > 0


def test_the_best_answer_is_that_of_the_largest_score(tmp_path, monkeypatch):
    """The models are only loaded here; the figures of two openings with two answers each are given."""
    small_models(tmp_path)
    x = {"judge": torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "score": torch.tensor([[1.0, 2.0], [5.0, 3.0]]), "kl": torch.zeros(2, 2)}
    monkeypatch.setattr(real, "respond", lambda *_: (x, []))
    out = real.judged(tmp_path, {}, ["a", "b"], len)
    assert (out["SFT model"]["judge"][0], out["best of 16"]["judge"][0], out["best of 16"]["score"][0]) == (0.5, 1.0, 3.5)


def test_the_neighbours_start_from_the_same_models_on_the_same_data(folder, tmp_path, monkeypatch):
    calls, given = [], []
    monkeypatch.setattr(real, "run", lambda *words: calls.append(words))
    monkeypatch.setattr(real, "judged", lambda *words: given.append(words) or {"PPO": 1})
    out = real.compare(folder, tmp_path, ["good film"] * 3, ["bad film"] * 3)
    for words, name in zip(calls, ("RLOO", "DPO"), strict=True):
        assert words[:2] == ("-m", f"variations.{name.lower()}") and words[-1] == "--no_report"
        places = dict(zip(words, words[1:]))
        assert (places["--data"], places["--models"], places["--out"]) == (folder, tmp_path, tmp_path / name)
    ((models, policies, openings, log_odds),) = given
    assert (models, openings) == (tmp_path, ["x"]) and log_odds("good") > 0 > log_odds("bad")
    assert policies == {"PPO": tmp_path / "ppo.pt"} | {name: tmp_path / name / "ppo.pt" for name in ("RLOO", "DPO")}
    assert out == {"classifier": {"reviews": 6, "right": [1.0, 0.0]}, "openings": 1, "systems": {"PPO": 1}}
    (folder / "pref_val.jsonl").write_text(json.dumps({"prompt": "", "chosen": "bad", "rejected": "bad"}) + "\n")
    out = real.compare(folder, tmp_path, ["good film"] * 3, ["bad film"] * 3)
    assert out["classifier"]["right"] == [0.5, pytest.approx(math.sqrt(0.25 / 2))]


def test_the_table_of_the_reviews():
    x = json.loads((results.ROOT / "bench" / "results.json").read_text())
    x["real"]["reviews"]["judged"] = {"systems": {
        "SFT model": {"judge": [0.444, 0.01], "score": [-0.1, 0.02], "kl": [0.0, 0.0]},
        "best of 16": {"judge": [0.7, 0.02], "score": [1.0, 0.03], "kl": [1.84, None]},
    }}  # fmt: skip
    lines = results.tables(x)["judged"].splitlines()
    assert lines[2] == "| SFT model | 44.4 ± 1.0 | -0.10 ± 0.02 | 0 |"
    assert lines[3] == "| best of 16 | 70.0 ± 2.0 | 1.00 ± 0.03 | 1.84 |"
    lines = results.tables(x)["favourable"].splitlines()
    assert lines[0] == "|  | SFT model | best of 16 |" and lines[3] == "| KL | 0 | 1.84 |"
    assert lines[2] == "| favourable, % | 44.4 ± 1.0 | 70.0 ± 2.0 |"
