"""What bench/ computes from runs, and what it writes. Run: python -m pytest tests/test_bench.py"""

import dataclasses
import json
import math
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_ppo
from bench import accident, gpu, memory, pictures, real, results, speed, tables, trl_ppo
from cli import PPO, run, same_weights, write_data, write_models
from minippo import PPOConfig
from plumbing import hf
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.errors import UserError
from plumbing.settings import RunConfig
from tiny import marks, tiny_gpt, weights

TINY = dict(zip(speed.SHAPE, (11, 9, 1, 2, 8))) | {"batch": 4, "prompt": (2, 4), "new": 2}


def test_the_error_of_a_mean_is_the_deviation_over_n_less_1_by_the_root_of_n():
    assert tables.mean_and_error([1.0, 2.0, 6.0]) == [3.0, pytest.approx(math.sqrt(7 / 3))]
    assert tables.mean_and_error([2.0]) == [2.0, None]


def test_runs_are_compared_seed_by_seed_where_they_start_from_the_same_models(monkeypatch):
    known = {"default": [0.1, 0.5, 0.9], "a": [0.2, 0.7], "a quarter": [0.0]}
    known |= {"stopped": [1.0], "failed": [1.0]}

    class Run:
        def __init__(self, name, share):
            self.name, self.share = name, share

        def status(self):
            return {"stopped": None, "failed": 2}.get(self.name, 0)

    def measured(job, models, seed):
        assert models == results.models_of(job.name, seed) and known[job.name][seed] == job.share
        return {"optimality": job.share}

    jobs = {name: [Run(name, x) for x in shares] for name, shares in known.items()}
    monkeypatch.setattr(results, "measured", measured)
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


def finish(job, optimality, status=0):
    """As if a job had run and been measured."""
    job.out.mkdir(parents=True, exist_ok=True)
    job.path_of_status().write_text(str(status))
    if not status:
        (job.out / "measured.json").write_text(json.dumps({"optimality": optimality}))


def begins_with_models_of(job, seed):
    """-> {flag: its value}"""
    given = dict(zip(job.words, job.words[1:]))
    assert given["--models"] == results.folder("models", seed) and given["--seed"] == seed
    return given


def test_the_search_keeps_what_is_best_and_has_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RUNS", tmp_path)
    jobs = results.searches("RLOO")
    assert len(jobs) == len({job.out for job in jobs.values()}) == 6
    for i, job in enumerate(jobs.values()):
        finish(job, i / 10, status=2 if i == 5 else 0)
    best = results.best(jobs)
    assert best == list(jobs)[4] == "--lr 0.0016 --k 4 --kl_coef 0.1"
    # The best one is tried with the other prices of the KL; where one beats it, that is kept.
    others = results.other_betas("RLOO")
    assert list(others) == [
        f"--lr 0.0016 --k 4 --kl_coef {x}" for x in ("0.03", "0.06", "0.2", "0.4")
    ]
    for i, job in enumerate(others.values()):
        finish(job, 0.5 - i / 10)
    monkeypatch.setattr(results, "names_of_neighbours", lambda: ["RLOO"])
    (found,) = results.neighbour_jobs().values()
    assert found[0].out == others["--lr 0.0016 --k 4 --kl_coef 0.03"].out
    assert [job.out.name for job in found] == ["0", "1", "2"]
    flags = "--lr 0.0016 --k 4 --kl_coef 0.03"
    assert begins_with_models_of(found[1], 1)["--steps"] == results.STEPS
    assert found[1].words[-6:] == flags.split() and found[1].words[:2] == ["-m", "variations.rloo"]
    monkeypatch.setattr(results, "PACED", ["RLOO"])
    (paced,) = results.paced_jobs().values()
    assert "--steps" not in begins_with_models_of(paced[2], 2)
    assert paced[2].words[:4] == ["-m", "bench.results", "paced", "variations.rloo"]
    assert paced[2].words[-6:] == best.split() and paced[2].out == results.folder("paced/RLOO", 2)
    path = results.over_beta("RLOO")
    assert list(path) == [0.03, 0.06, 0.1, 0.2, 0.4]
    assert path[0.1] == {"optimality": 0.4}
    assert not results.other_betas("PPO, KL penalty")


def test_the_ruler_is_score_less_beta_kl_from_the_sft_model_to_the_best_policy(monkeypatch):
    stick = object.__new__(results.Yardstick)
    S, G = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    stick.reference = {"score": S, "judge": G}
    best = 0.1 * ((S / 0.1).logsumexp(1) - math.log(8))
    found = stick.figures({"score": S + 1, "kl": torch.full_like(S, 2), "judge": G})
    assert found["optimality"] == pytest.approx(0.8 / (best - S.mean(1)).mean().item())
    means = [G.mean().item(), S.mean().item() + 1, 2]
    assert [found[name] for name in ("judge", "score", "kl")] == pytest.approx(means)
    best = {"score": S.amax(1).mean(), "judge": G[range(5), S.argmax(1)].mean()}
    assert stick.best_of(8) == pytest.approx({name: x.item() for name, x in best.items()})
    stick.questions = ["a", "b"]
    stick.models = SimpleNamespace(tokenizer=SimpleNamespace(encode=str), reference=0, score=0)
    monkeypatch.setattr(results, "respond", lambda *_: ({}, ["a", "a", "b", "c"]))
    monkeypatch.setattr(results, "judge", lambda question, text: float(question == text))
    assert stick.ask("policy", 2)[0]["judge"].tolist() == [[1, 1], [1, 0]]


def test_the_ruler_asks_the_sft_model_many_times_and_draws_with_the_seed(
    small_run, tmp_path, monkeypatch
):
    asked = []

    def respond(policy, ref, score, prompts, n, *rest):
        asked.append((policy is ref, len(prompts), n, torch.initial_seed()))
        return {}, ["a"] * len(prompts) * n

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "judge", lambda question, text: 1.0)
    monkeypatch.setattr(results, "respond", respond)
    write_data(tmp_path / "data" / "zoo")
    results.Yardstick(tmp_path, 7)
    assert asked == [(True, 10, 192, 7)]  # all of the prompts: there are fewer than 128


def test_the_limits_of_any_policy_are_means_over_seeds():
    class Stick:
        def __init__(self, score):
            self.reference = {"score": torch.tensor([[0.0, score]])}
            self.best_of = lambda n: {"score": n * score}

    found = results.limits_of([Stick(1.0), Stick(2.0)])
    assert found["best_of_n"][4]["score"] == [6.0, 2.0]
    assert found["best_of_n"][4]["kl"] == pytest.approx(math.log(4) - 3 / 4)
    assert found["optimum"].keys() == {*results.BETAS}
    best = [s / (1 + math.exp(-s)) for s in (1.0, 2.0)]  # at beta = 1, of two samples
    assert found["optimum"][1.0]["score"] == pytest.approx([sum(best) / 2, (best[1] - best[0]) / 2])


def test_a_goal_is_reached_on_the_line_between_two_policies_that_were_kept():
    curve = [[10.0, 0.5], [20.0, 0.9], [30.0, 0.8]]
    assert results.seconds_to(0.25, curve) == 5 and results.seconds_to(0.6, curve) == 12.5
    assert results.seconds_to(0.9, curve) == 20 and results.seconds_to(0.95, curve) is None


def test_the_seeds_have_models_and_a_run_of_their_own_and_a_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RUNS", tmp_path)
    monkeypatch.setattr(results, "run", lambda jobs, workers: started.extend(jobs))
    monkeypatch.setattr(results, "yardstick", lambda *given: given)
    monkeypatch.setattr(results, "limits_of", lambda sticks: {"sticks": sticks})
    monkeypatch.setattr(results, "read_report", lambda out: out.name)
    row = dict.fromkeys(pictures.CURVES, 0.0)
    monkeypatch.setattr(
        results, "judged_log", lambda out: [row | {"kl": i + int(out.name)} for i in range(450)]
    )
    started = []
    found = results.seeds(2)
    scripts = ["train_sft.py"] * 10 + ["train_rm.py"] * 10 + ["-m"] * 10
    assert [job.words[0] for job in started] == scripts
    assert [job.out for job in started[:20]] == [
        results.folder("models", i % 10) for i in range(20)
    ]
    assert [begins_with_models_of(job, i)["-m"] for i, job in enumerate(started[20:])] == [
        "bench.results"
    ] * 10
    assert all(job.words[-1] == i % 10 for i, job in enumerate(started[:20]))
    assert found["sticks"] == [(results.folder("models", i), i) for i in range(10)]
    assert found["reports"] == {i: str(i) for i in range(10)}
    assert [mean for mean, _ in found["curves"]["kl"]] == [4.5 + i for i in range(0, 450, 6)]
    assert found["curves"]["kl"][0][1] == pytest.approx(math.sqrt(55 / 6))


def test_the_judge_looks_on_and_the_run_is_that_of_the_script(small_run, tmp_path, monkeypatch):
    lines = (tmp_path / "data" / "prompts_train.jsonl").read_text().splitlines()
    prompts = {json.loads(line)["prompt"] for line in lines}
    monkeypatch.setattr(results, "judge", lambda prompt, response: 2.0 * (prompt in prompts))
    results.judged_ppo(small_run)
    assert json.loads((tmp_path / "judge.json").read_text()) == [2.0] * 3
    log, weights_of = results.read_lines(tmp_path / "ppo.jsonl"), tmp_path / "judged.pt"
    shutil.copy(tmp_path / "ppo.pt", weights_of)
    assert [row["judge"] for row in results.judged_log(tmp_path)] == [2.0] * 3
    assert run("train_ppo.py", *small_run)[0] == 0 and len(log) == 3
    assert same_weights(weights_of, tmp_path / "ppo.pt")


def test_a_run_that_has_not_finished_is_said(tmp_path):
    (tmp_path / "stops.py").write_text("raise SystemExit(1)")
    (tmp_path / "fails.py").write_text("raise SystemExit(2)")
    results.run([results.Job(tmp_path / "a", [tmp_path / "fails.py"])], 2)
    with pytest.raises(SystemExit, match=r"not finished, log.txt says why: \S+/b; call again"):
        results.run([results.Job(tmp_path / "b", [tmp_path / "stops.py"])], 2)


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """-> flags of train_ppo.py for small models; what bench/ patches is restored."""
    write_data(tmp_path / "data")
    write_models(tmp_path)
    for module, name in ((train_ppo, "ppo_iteration"), (trl_ppo, "after_iteration"), (sys, "argv")):
        monkeypatch.setattr(module, name, getattr(module, name))
    folders = [f"--data {tmp_path / 'data'} --models {tmp_path} --out {tmp_path}"]
    return " ".join([*folders, "--seed 0", *map(str, PPO), "--overwrite --no_report"]).split()


def test_settings_name_the_models_that_they_start_from_and_the_default_is_a_full_run():
    jobs = results.settings_jobs()
    assert [job.out for job in jobs["default"]] == [results.folder("full", i) for i in range(5)]
    assert "--no_report" not in jobs["default"][0].words and list(jobs) == [*results.SETTINGS]
    assert {name: 5 if name in results.FIVE_SEEDS else 3 for name in jobs} == {
        name: len(runs) for name, runs in jobs.items()
    }
    for name, kind in (
        ("lam = 0", "models"),
        ("scores without a cap", "no cap"),
        (results.HACKED, "few pairs"),
    ):
        job, models = jobs[name][1], results.folder(kind, 1)
        assert job.out == results.folder(name, 1)
        given = dict(zip(job.words, job.words[1:]))
        assert given["--models"] == models and given["--seed"] == 1 and "--no_report" in job.words
        assert " ".join(map(str, job.words)).endswith(results.SETTINGS[name])


def test_the_other_reward_models_have_no_cap_or_a_quarter_of_the_pairs(
    small_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(results, "run", lambda jobs, workers: started.extend(jobs))
    write_data(tmp_path / "data" / "zoo")
    base, started = results.folder("models", 3), []
    base.mkdir(parents=True)
    shutil.copy(tmp_path / "sft.pt", base)
    model, tokenizer, facts = load_checkpoint(tmp_path / "rm.pt", ["rm"])
    tokens, lengths = torch.randint(tokenizer.vocab_size, (20, 9)), torch.full((20,), 9)
    uncapped = model(tokens, lengths)
    model.cap.copy_(uncapped.median())
    save_checkpoint(base / "rm.pt", "rm", model, tokenizer, **facts)
    results.make_other_models([3], 1)
    no_cap = load_checkpoint(results.folder("no cap", 3) / "rm.pt", ["rm"])[0]
    assert 5 < (model(tokens, lengths) < uncapped).sum() < 15
    assert no_cap(tokens, lengths).equal(uncapped)
    few = results.folder("few pairs", 3)
    assert [job.out for job in started] == [few] and (few / "sft.pt").exists()
    lines = {path.stem: len(path.read_text().splitlines()) for path in (few / "data").iterdir()}
    assert lines["pref_train"] == 5 and lines["pref_val"] == 10 and lines["sft_train"] == 20


def test_the_time_to_a_goal_is_a_mean_over_seeds_unless_one_never_reaches_it(monkeypatch):
    curves = [[[10.0, 0.9], [20.0, 0.96]], [[12.0, 0.9], [24.0, 0.94]]]
    monkeypatch.setattr(results, "paced_jobs", lambda: {"PPO": [0, 1]})
    monkeypatch.setattr(results, "curve_of", lambda job, models, seed: curves[seed])
    found = results.quality(0)["quality"]["PPO"]
    assert found == {"curve": [[11, 0.9], [22, pytest.approx(0.95)]], "0.9": [11, 1], "0.95": None}
    made = tables.tables({"quality": {"PPO": found}})["quality"]
    assert made.splitlines()[-1] == "| PPO | 11 ± 1 | never |"


def test_policies_are_kept_on_the_way_and_measured_with_the_seconds(
    small_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "PACE", 2)
    results.paced(["variations.rloo", *small_run, "--steps", "4", "--k", "4"])
    assert {path.name for path in (tmp_path / "policies").iterdir()} == {"2.pt", "4.pt"}
    assert same_weights(tmp_path / "policies" / "4.pt", tmp_path / "ppo.pt")
    assert not same_weights(tmp_path / "policies" / "2.pt", tmp_path / "ppo.pt")

    class Stick:
        def ask(self, policy, n):
            return [weights(policy).sum().item()]

        def figures(self, found):
            return {"optimality": found}

    monkeypatch.setattr(results, "yardstick", lambda models, seed: Stick())
    curve = results.curve_of(results.Job(tmp_path, []), tmp_path / "models", 0)
    seconds = [row["seconds"] for row in results.read_lines(tmp_path / "ppo.jsonl")]
    last = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])[0]
    assert [x for x, _ in curve] == [seconds[1], seconds[3]]
    assert curve[1][1] == weights(last).sum().item() != curve[0][1]


def test_the_paths_are_means_over_seeds_and_the_hacked_responses_those_with_the_widest_gap(
    tmp_path,
):
    jobs = [results.Job(tmp_path / name, []) for name in "ab"]
    for job, first in zip(jobs, (0, 10)):
        job.out.mkdir()
        rows = [{"kl": first + i, "score": i} for i in range(4)]
        (job.out / "ppo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (job.out / "judge.json").write_text("[1, 3, 5, 7]")
    path = results.path_of(jobs, window=2)
    assert path == {"kl": [5.5, 7.5], "score": [0.5, 2.5], "judge": [2, 6]}
    score, judge = torch.zeros(4, results.SAMPLES), torch.zeros(4, results.SAMPLES)
    score[1, 3], judge[2, 5], score[3, 0], score[0, 1], judge[0, 1] = 2, -3, 1, 9, 8.5
    found = {"score": score, "judge": judge, "kl": score + 1}
    texts = [f"{i} {j}" for i in range(4) for j in range(results.SAMPLES)]
    rows = results.most_hacked(found, texts, SimpleNamespace(questions="abcd"))
    assert [list(row.values()) for row in rows] == [
        ["c", "2 5", 0, -3, 1],
        ["b", "1 3", 2, 0, 3],
        ["d", "3 0", 1, 0, 2],
    ]


def test_the_worst_iteration_is_replayed_to_the_last_bit_and_then_with_changes(
    small_run, tmp_path, monkeypatch
):
    monkeypatch.setattr(accident, "STOP", 3)
    monkeypatch.setattr(accident, "ORDERS", 3)
    flags = small_run + "--steps 30 --warmup 9 --minibatches 4 --lr 0.01 --adam_eps 1e-8".split()
    accident.one(flags)
    found = json.loads((tmp_path / "accident.json").read_text())
    rows, worst = found["rows"], found["worst"]
    assert len(rows) == 3 and all(row["low"] > 0 and row["high"] > 0 for row in rows)
    assert all(row["longest"] > row["kl"] for row in rows)
    rises = [b["low"] - a["low"] for a, b in zip([{"low": 0.0}, *rows], rows)]
    assert worst["rise"] == max(rises) == rises[worst["iteration"] - 1] == worst["replayed"]
    assert worst["same_bits"]
    assert list(worst["changes"]) == list(accident.CHANGES)
    for name, x in worst["changes"].items():
        assert (len(set(x)) == 1) == name.startswith("neither"), name  # no batch, so no order
    first = [x[0] for x in worst["changes"].values()]
    assert len(set(first)) == len(first) and worst["rise"] not in first


def test_the_distance_is_the_kl_of_the_next_token_on_the_answers_of_either_kind(monkeypatch):
    policy, ref = tiny_gpt(5), tiny_gpt(5)
    tokens, mask = torch.randint(5, (30, 7)), marks(*[".xxx..", "..xxxx", "xx...."] * 10)
    p, q = (model(tokens[:, :-1])[0][mask].log_softmax(-1) for model in (policy, ref))
    exact = F.kl_div(q, p, log_target=True, reduction="batchmean").item()
    assert accident.distance(policy, ref, tokens, mask) == pytest.approx(exact)
    monkeypatch.setattr(accident, "generate", lambda *_: (tokens, mask, None, None))
    scores = torch.randperm(30)
    probes = accident.probes_of(ref, lambda *_: scores, [], PPOConfig())
    for kind, found in (("low", range(3)), ("high", range(27, 30))):
        rows = [scores.tolist().index(i) for i in found]
        assert probes[kind][0].equal(tokens[rows]) and probes[kind][1].equal(mask[rows])


def test_an_accident_is_summed_up_over_seeds_and_orders(monkeypatch):
    monkeypatch.setattr(accident, "CHANGES", {"a": None})
    runs = [
        {"worst": {"same_bits": True, "rise": rise, "changes": {"a": x}}}
        for rise, x in ((0.5, [0.1, 0.3]), (0.7, [0.5, 0.7]))
    ]
    rows = accident.accidents(runs)
    assert rows["nothing"]["rise"] == [pytest.approx(0.6), pytest.approx(0.1)]
    assert rows["a"]["rise"] == [pytest.approx(0.4), pytest.approx(0.2)]
    assert rows["a"]["spread"] == pytest.approx(math.sqrt(0.02))
    runs[1]["worst"]["same_bits"] = False
    with pytest.raises(ArithmeticError):
        accident.accidents(runs)
    rows = [{"longest": x, "low": x, "high": 1.0} for x in (51.0, 50.0, 3.0)]
    given = begins_with_models_of(accident.job_of("all three, as by default", 1), 1)
    assert (given["--adam_eps"], given["--head_lr"], given["--steps"]) == ("1e-4", "30", "400")
    found = accident.cures({"nothing": [{"rows": rows}, {"rows": rows[1:]}]})
    assert found["nothing"]["astray"] == [0.5, 0.5] and found["nothing"]["low"] == [3.0, 0.0]


@pytest.mark.parametrize("code, status", [(0, 0), (2, 2), (1, None), (130, None)])
def test_a_run_that_was_stopped_is_run_again_and_one_that_has_ended_is_not(
    tmp_path, monkeypatch, code, status
):
    script = tmp_path / "script.py"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script.write_text(
        "import os; open(__file__ + '.runs', 'a').write(os.environ['OMP_NUM_THREADS'])\n"
        f"raise SystemExit({code})"
    )
    job = results.Job(tmp_path / "out", [script])
    for _ in range(2):
        job.run()
        assert job.status() == status
    assert (tmp_path / "script.py.runs").read_text() == ("1" if status is not None else "11")


FLAGS = {f"train_ppo.py {flags}" for flags in results.SETTINGS.values()}
FLAGS |= {f"train_ppo.py {flags}" for flags in accident.CURES.values() if "ptx" not in flags}
FLAGS |= {
    f"{x.words} {next(iter(results.searches(name)))}"
    for name, x in results.ALGORITHMS.items()
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
    x = speed.measure("small")
    assert min(x["seconds"].values()) > 0 and len(x["seconds"]) == len(x["ratios"]) == 4
    assert x["ratios"]["update"] > 1 and x["ratios"]["iteration"] > 1
    work = speed.Workload(TINY)
    generate = speed.generate
    monkeypatch.setattr(speed, "generate", lambda *x: time.sleep(0.5) or generate(*x))
    times = work.iteration()
    assert list(times) == ["rollout", "scoring", "update"] and times["rollout"] > 0.5
    assert max(times["scoring"], times["update"]) < 0.5
    assert speed.operations([(3, 2, 4, 5, 6)]) == 2 * 3 * 2 * 4 * 5 * 6
    shapes = {(inner, columns) for *_, inner, columns in work.products()["rollout"]}
    T = (sum(map(len, work.prompts)) + 4 * 2 - 4) // 4  # tokens read in a row
    assert shapes == {(8, 24), (8, 8), (8, 32), (32, 8), (4, T), (T, 4), (8, 11)}
    counts = {phase: speed.operations(x) for phase, x in work.products().items()}
    passes = 3 * work.config.epochs  # forward, and a gradient for either factor
    assert counts["update"] == pytest.approx(passes * counts["rollout"], rel=0.05)
    assert counts["rollout"] < counts["scoring"] < 2 * counts["rollout"]


def test_the_step_of_nanogpt_is_timed_beside_ours(tmp_path):
    (tmp_path / "model.py").write_text(
        "import time, types, torch\n"
        "GPTConfig = lambda *x, **y: None\n"
        "class GPT(torch.nn.Linear):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(1, 1)\n"
        "        self.gelu = torch.nn.GELU()\n"
        "    def forward(self, x, y):\n"
        "        time.sleep(0.6 if self.gelu.approximate == 'tanh' else 0.2)\n"
        "        return None, super().forward(torch.ones(1)).sum()\n"
    )
    found = speed.beside_nanogpt(tmp_path, TINY, rounds=1)
    exact, tanh, ours = found["seconds"]
    assert tanh > 0.6 > exact > 0.2 > ours and found["ratios"] == [ours / exact, ours / tanh]


def test_what_is_tried_without_a_gpu_is_not_kept(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(tables, "keep", lambda _: pytest.fail("kept"))
    status, printed, error = run("bench/gpu.py", "--try")
    assert (status, error) == (0, "") and "CPU: " in printed and "256 prompts, " in printed
    monkeypatch.setattr(gpu, "seconds_of", lambda function, repeats: 2.0)
    assert gpu.matrix_rate("cpu", 8) == 8**3


def test_ppo_of_trl_gets_the_options_that_mean_what_ours_do(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    made, log = [], [{"objective/scores": 1.0, "objective/kl": 2.0, "episode": 64, "eps": 8.0}]

    class Trainer:
        state = SimpleNamespace(log_history=log)

        def __init__(self, *arguments, eval_dataset):
            made[:] = arguments

        def __getattr__(self, name):
            return lambda *_: None

    monkeypatch.setattr("trl.experimental.ppo.PPOTrainer", Trainer)
    write_data(tmp_path / "data")
    write_models(tmp_path)
    model, tokenizer, facts = load_checkpoint(tmp_path / "rm.pt", ["rm"])
    model.cap.fill_(1.5)
    save_checkpoint(tmp_path / "rm.pt", "rm", model, tokenizer, **facts)
    for kind in ("sft", "rm"):
        hf.export(tmp_path / f"{kind}.pt", tmp_path / kind)
    config = PPOConfig(9, 0.8, missing_eos_penalty=0.5, kl_coef=0.2, gamma=0.9, lam=0.7, epochs=2)
    config = dataclasses.replace(
        config, minibatches=4, max_grad_norm=0.65, clip_eps=0.3, value_clip=0.4, vf_coef=0.6
    )
    stage = train_ppo.StageConfig(steps=7, batch_size=32, lr=0.03, warmup=3, adam_eps=0.02)
    settings = RunConfig(out=tmp_path, device="cpu", seed=6)
    trl_ppo.train(settings, config, stage, None, [[1], [2]], tokenizer, 1)
    expected = {
        **{"per_device_train_batch_size": 32, "num_mini_batches": 4, "num_ppo_epochs": 2},
        **{"total_episodes": 7 * 32, "learning_rate": 0.03, "warmup_steps": 3, "seed": 6},
        **{"max_grad_norm": 0.65, "adam_beta2": 0.95, "adam_epsilon": 0.02},
        **{"gamma": 0.9, "lam": 0.7, "kl_coef": 0.2, "missing_eos_penalty": 0.5},
        **{"cliprange": 0.3, "cliprange_value": 0.4, "vf_coef": 0.6, "temperature": 0.8},
        **{"response_length": 9, "local_rollout_forward_batch_size": 32},
        **{"whiten_rewards": False, "bf16": False, "gradient_checkpointing": False},
    }
    assert {name: getattr(made[0], name) for name in expected} == expected
    assert made[0].stop_token_id in (None, tokenizer.eos) and made[1].padding_side == "left"
    made[4].score.head = torch.nn.Identity()
    assert made[4].score(torch.tensor([0.5, 2.5])).tolist() == [0.5, 1.5]
    (row,) = results.read_lines(tmp_path / "ppo.jsonl")
    assert row == {"score": 1.0, "kl": 2.0, "seconds": 8.0}


def test_the_memory_of_stage_2_is_of_pairs_and_two_models():
    needs = {
        stage: memory.needed(2, 8, rows=3, prompt=5, new=7, stage=stage)
        for stage in ("sft", "rm", "ppo")
    }
    size = 4 * memory.parameters(2, 8)
    models = [
        [x[name] for name in ("reference", "reward model", "SFT model")] for x in needs.values()
    ]
    assert models == [[0, 0, 0], [0, 0, size], [size, size, 0]]
    tokens = {"sft": 3 * 12, "rm": 3 * 5 + 6 * 7, "ppo": 3 * 12}
    assert {stage: x["activations"] for stage, x in needs.items()} == {
        stage: 2 * 4 * n * 17 * 8 for stage, n in tokens.items()
    }
    assert needs["rm"]["logits"] == 0 < needs["sft"]["logits"] == needs["ppo"]["logits"]
    tied = 4 * memory.VOCABULARY * 8
    assert [x["tied embedding"] for x in needs.values()] == [3 * tied, tied, 3 * tied]


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


def test_each_model_is_judged_by_the_classifier_on_openings_of_the_validation_file(
    tmp_path, monkeypatch
):
    write_data(tmp_path / "data")
    write_models(tmp_path)
    model, tokenizer, _ = load_checkpoint(tmp_path / "sft.pt", ["sft"])
    save_checkpoint(tmp_path / "ppo.pt", "ppo", model, tokenizer)
    monkeypatch.setattr(real, "ANSWERS", 4)
    ran, judged, seen = [], real.judged, {}
    monkeypatch.setattr(real, "run", lambda *words: ran.append(words))
    monkeypatch.setattr(real, "judged", lambda *given: seen.update(zip("mpol", given)))
    pairs = real.rows_of(tmp_path / "data" / "pref_val.jsonl")
    texts = [[row["prompt"] + row[side] for row in pairs] for side in ("chosen", "rejected")]
    found = real.compare(tmp_path / "data", tmp_path, texts[0], texts[1][:9])["classifier"]
    assert found["reviews"] == 19 and found["of"] == 20
    log_odds = real.naive_bayes(texts[0], texts[1][:9])
    signs = [sum(log_odds(text) > 0 for text in part) for part in texts]
    assert found["right"] == signs[0] + 10 - signs[1] > 12
    trained = {name: tmp_path / name / "ppo.pt" for name in real.NEIGHBOURS}
    assert seen["p"] == {"PPO": tmp_path / "ppo.pt"} | trained
    for name, words in zip(real.NEIGHBOURS, ran):
        given = dict(zip(words, words[1:]))
        assert (given["--models"], given["--out"]) == (tmp_path, tmp_path / name)
        assert given["--data"] == tmp_path / "data"
    assert [words[1] for words in ran] == ["variations.rloo", "variations.dpo"]
    rows = real.rows_of(tmp_path / "data" / "prompts_val.jsonl")
    assert seen["o"] == [row["prompt"] for row in rows] and seen["m"] == tmp_path
    policies = {"PPO": tmp_path / "ppo.pt"}
    found = judged(tmp_path, policies, seen["o"], lambda text: 1.0)
    assert found["PPO"]["judge"] == [1, 0] and found["best of 4"]["kl"][1] is None
    assert found["best of 4"]["score"][0] > found["SFT model"]["score"][0] + 0.1
    assert judged(tmp_path, policies, seen["o"], lambda text: 0.0)["PPO"]["judge"] == [0, 0]


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
    assert len(drawn) == 5 and max(drawn.values()) < 60_000
    shown, known = {}, tables.load()
    monkeypatch.setattr(pictures, "save", lambda drawing, name: shown.update({name: drawing.axes}))
    pictures.draw(known)
    lines = {name: [axis.lines for axis in axes] for name, axes in shown.items()}
    paths, best = known["paths"], known["optimum"].values()
    kls, judged = zip(*((x["kl"], x["judge"]) for x in known["over_beta"]["PPO"].values()))
    for line, x, y in (
        (lines["frontier"][1][0], [x["kl"][0] for x in best], [x["judge"][0] for x in best]),
        (lines["frontier"][1][2], paths["beta = 0.3"]["kl"], paths["beta = 0.3"]["judge"]),
        (lines["hacking"][0][2], paths["default"]["kl"], paths["default"]["judge"]),
        (lines["neighbours"][1][2], kls, judged),
        (lines["quality"][0][1], *zip([0, 0], *known["quality"]["PPO, separate critic"]["curve"])),
        (lines["curves"][0][0], range(1, 451, 6), [mean for mean, _ in known["curves"]["score"]]),
    ):
        assert [*line.get_xdata()] == [*x] and [*line.get_ydata()] == [*y]
    gains = [max(x.get("gain", [0])[0], pictures.FAR) for x in known["neighbours"].values()]
    forest = shown["neighbours"][2]
    assert [line.get_xdata()[0] for line in forest.lines[: len(gains)]] == gains
    (band,) = shown["curves"][0].collections
    mean, spread = known["curves"]["score"][-1]
    heights = {round(y, 9) for x, y in band.get_paths()[0].vertices if x == 445}
    assert heights == {round(mean - spread, 9), round(mean + spread, 9)}
