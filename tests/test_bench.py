"""What bench/ computes from runs, and what it writes. Run: python -m pytest tests/test_bench.py"""

import json
import math

import pytest

from bench import pictures, real, results, speed, tables
from cli import run
from plumbing.errors import UserError

TINY = dict(zip(speed.SHAPE, (11, 9, 1, 2, 8))) | {"batch": 4, "prompt": (2, 4), "new": 2}


def test_the_error_of_a_mean_is_the_deviation_over_n_less_1_by_the_root_of_n():
    assert tables.mean_and_error([1.0, 2.0, 6.0]) == [3.0, pytest.approx(math.sqrt(7 / 3))]
    assert tables.mean_and_error([2.0]) == [2.0, None]


def test_runs_are_compared_seed_by_seed_where_they_start_from_the_same_models(monkeypatch):
    known = {"default": [0.1, 0.5], "a": [0.2, 0.7], "a quarter": [0.0, 0.0], "stopped": [1.0, 1.0]}

    class Run:
        def __init__(self, name, share):
            self.name, self.share = name, share

        def status(self):
            return None if self.name == "stopped" else 0

    jobs = {name: [Run(name, x) for x in shares] for name, shares in known.items()}
    monkeypatch.setattr(results, "measured", lambda job, *_: {"optimality": job.share})
    rows = results.rows_of(jobs, dict.fromkeys(known, ""), "default")
    assert list(rows) == ["default", "a", "a quarter"]
    assert rows["a"]["optimality"] == [pytest.approx(0.45), pytest.approx(0.25)]
    assert rows["a"]["gain"] == [pytest.approx(0.15), pytest.approx(0.05)]
    assert "gain" not in rows["default"] and "gain" not in rows["a quarter"]


def test_a_table_replaces_what_is_between_its_markers_and_nothing_else():
    text = "a\n<!-- b -->\nold\n<!-- /b -->\nc\n<!-- bb -->\nd\n<!-- /bb -->\n"
    new = tables.splice(text, "b", "| x |")
    assert new == text.replace("old", "| x |")
    assert tables.splice(new, "b", "| x |") == new and tables.splice(text, "e", "x") == text


def test_results_json_keeps_a_line_for_each_run_with_five_digits(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    monkeypatch.setattr(tables, "PATH", path)
    monkeypatch.setattr(tables, "write_tables", lambda: None)
    path.write_text("{}")
    tables.keep({"a": {"x": {"y": [1 / 3, None]}, 1: 123456}, "b": [{"z": "ä"}]})
    tables.keep({"b": [{"z": 2.0}, 7]})
    lines = path.read_text().splitlines()
    assert lines[2:4] == ['"x": {"y": [0.33333, null]},', '"1": 123456']
    assert json.loads(path.read_text())["b"] == [{"z": 2.0}, 7] and len(lines) == 10


def test_the_file_itself_is_written_so():
    text = (tables.ROOT / "bench" / "results.json").read_text(encoding="utf-8")
    assert tables.dumps(json.loads(text)) == text


def test_a_last_digit_of_5_is_rounded_up():
    assert tables.cell([0.00575, 0.245]) == "0.01 ± 0.25" and tables.cell(0.00575, 4) == "0.0058"
    assert tables.cell(None) == "" and tables.cell([1.0, None]) == "1.00"


def test_a_jump_is_a_kl_more_than_1_above_the_median_of_the_hundred_before():
    assert results.jumps([9.0] + [1.0] * 100 + [1.9, 2.1, 1.0, 2.1]) == 2


def test_the_table_of_seeds_shows_what_the_report_and_the_log_of_each_say(tmp_path):
    report = {"sft": {"above_entropy": 0.02, "above_entropy_se": 0.001, "samples": 4}}
    report |= {"rm": {"below_ceiling": 0.007, "below_ceiling_se": 0.002}}
    for part, x in (("sft", 1.0), ("ppo", 2.0), ("ppo_seen", 3.0), ("ppo_unseen", 4.0)):
        names = ("judge", "score", "kl", "optimality")
        figures = {name: x + i / 10 for i, name in enumerate(names)}
        report[part] = report.get(part, {}) | figures | {f"{name}_se": 0.5 for name in names}
    report["suspects"] = {"count": 7, "responses": 2048, "examples": []}
    (tmp_path / "report.json").write_text(json.dumps(report))
    lines = (json.dumps({"kl": x}) + "\n" for x in [1.0] * 100 + [3.0])
    (tmp_path / "ppo.jsonl").write_text("".join(lines))
    found = results.read_report(tmp_path)
    assert found["suspects"] == 7 and "samples" not in found["sft"]
    best = {"4": {"judge": [1, 0], "score": [2, 0], "kl": 0.64}}
    optimum = {"0.1": {"judge": [3, 0], "score": [4, 0], "kl": [5, 0]}}
    made = tables.tables({"reports": {"3": found}, "best_of_n": best, "optimum": optimum})
    assert made["seeds"].splitlines()[-1] == (
        "| 3 | 0.0200 ± 0.0010 | 0.0070 ± 0.0020 | 2.00 ± 0.50 | 2.20 ± 0.50 | 3.300 ± 0.500 | "
        "4.300 ± 0.500 | 7 | 1 |"
    )
    rows = made["systems"].splitlines()[2:]
    assert rows[0] == "| SFT model | 1.00 | 1.10 | 0 |  |" and rows[-1].endswith(
        "| 5.00 ± 0.00 | 1 |"
    )
    assert rows[2] == "| **PPO** | 2.00 | 2.10 | 2.20 | 2.300 |"


def finish(job, scores, status=0):
    """As if a job had run."""
    job.out.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"score": x, "kl": 1.0}) + "\n" for x in scores)
    (job.out / "ppo.jsonl").write_text("".join(rows))
    job.path_of_status().write_text(str(status))


def test_the_search_keeps_what_is_best_in_the_last_quarter_and_has_not_failed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "RUNS", tmp_path)
    jobs = results.searches("PPO")
    assert len(jobs) == len({job.out for job in jobs.values()}) == 6
    for i, job in enumerate(jobs.values()):
        finish(job, [9.0 - i] * 6 + [float(i)] * 2, status=2 if i == 5 else 0)
    assert results.best("PPO") == list(jobs)[4]
    assert jobs[results.best("PPO")].objective() == pytest.approx(4.0 - results.BETA)


@pytest.mark.parametrize("code, status", [(0, 0), (2, 2), (1, None), (130, None)])
def test_a_run_that_was_stopped_is_run_again_and_one_that_has_ended_is_not(tmp_path, code, status):
    script = tmp_path / "script.py"
    script.write_text(f"open(__file__ + '.runs', 'a').write('x'); raise SystemExit({code})")
    job = results.Job(tmp_path / "out", [script])
    for _ in range(2):
        job.run()
        assert job.status() == status
    assert len((tmp_path / "script.py.runs").read_text()) == (1 if status is not None else 2)


FLAGS = {f"train_ppo.py {flags}" for flags in (results.ABLATIONS | results.QUESTIONS).values()}
FLAGS |= {
    f"{words} {next(iter(results.searches(name)))}"
    for name, (words, _) in results.ALGORITHMS.items()
    if "TRL" not in name
}


@pytest.mark.parametrize("words", sorted(FLAGS))
def test_every_setting_is_one_that_the_program_takes(words, tmp_path):
    script, *flags = words.replace("-m variations.", "variations/").split()
    script += "" if script.endswith(".py") else ".py"
    status, _, error = run(script, *flags, "--models", tmp_path, "--out", tmp_path / "out")
    assert status == 2 and "sft.pt: not found" in error, error


def test_an_iteration_is_timed_and_its_products_are_counted(monkeypatch):
    monkeypatch.setitem(speed.SIZES, "small", TINY)
    monkeypatch.setattr(speed, "large_rate", lambda: 1e9)
    x = speed.measure("small")
    assert min(x["seconds"].values()) > 0 and len(x["seconds"]) == len(x["ratios"]) == 4
    assert x["ratios"]["update"] > 1 and x["ratios"]["iteration"] > 1


def test_a_third_of_the_reviews_is_nowhere_in_the_training_data(tmp_path):
    pairs = [{"prompt": f"film {i}", "chosen": " good", "rejected": " bad"} for i in range(60)]
    texts = [
        {"prompt": f"film {i}", "completion": f" {x}"} for i in range(70) for x in ("good", "bad")
    ]
    rows = {"pref_train": pairs, "sft_train": texts, "prompts_train": texts[::2]}
    for name, part in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    good, bad = real.hold_out(tmp_path, tmp_path / "out")
    numbers = {text.split()[1] for text in good}
    assert 12 <= len(good) <= 28 and numbers == {text.split()[1] for text in bad}
    for name, part in rows.items():
        kept = real.rows_of(tmp_path / "out" / f"{name}.jsonl")
        assert kept == [row for row in part if row["prompt"].split()[1] not in numbers]


def test_naive_bayes_counts_the_texts_that_hold_a_word():
    log_odds = real.naive_bayes(["fine fine film", "fine plot"], ["dull film"])
    # of 4 words, each counted once more: fine 3 to 1 of 8 to 6
    assert log_odds("fine") == log_odds("fine fine") == pytest.approx(math.log(3 / 8 * 6))
    assert log_odds("dull") < 0 == log_odds("")


def test_the_pictures_are_drawn_from_results_json(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    (tmp_path / "bench" / "curves.svg").write_text("old")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot be written"):
        patch.setattr("os.fsync", lambda _: (tmp_path / "full" / "disk").touch())
        pictures.draw(tables.load())
    assert (tmp_path / "bench" / "curves.svg").read_text() == "old"
    pictures.draw(tables.load())
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "bench").iterdir()}
    assert len(drawn) == 4 and max(drawn.values()) < 60_000
