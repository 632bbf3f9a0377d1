"""The bench that compares PPO with its neighbours: what it runs, what it keeps, what it writes.

Run: python -m pytest tests/test_neighbours.py
"""

import json

import pytest

from bench import ladder, neighbours, results
from bench.neighbours import ALGORITHMS, BETA, PPO, Bench, Job
from cli import run

CODE = """
import os, sys
with open(f"{sys.argv[sys.argv.index('--out') + 1]}/runs", "a") as file:
    file.write(os.environ["OMP_NUM_THREADS"] + os.environ["MORE"])
print("said")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Everything is written below tmp_path."""
    monkeypatch.setattr(results, "RUNS", tmp_path)
    monkeypatch.setattr(neighbours, "RUNS", tmp_path)
    return tmp_path


def finish(job, rows=(), status=0):
    """As if a job had run: its log, of dicts, and its status."""
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / "ppo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.out / "status").write_text(str(status))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_six_settings_of_each_are_tried_three_learning_rates_and_two_values_of_its_knob(name):
    x = ALGORITHMS[name]
    tried = [flags.split() for flags in x.settings()]
    assert {tuple(flags[::2]) for flags in tried} == {("--lr", f"--{x.knob}")} and len({tuple(flags) for flags in tried}) == 6
    rates, values = {float(flags[1]) for flags in tried}, {float(flags[3]) for flags in tried}
    assert rates == {float(f"{rate * PPO.lr:g}") for rate in x.rates} and values == {float(f"{value:g}") for value in x.values}


@pytest.mark.parametrize("name", [name for name, x in ALGORITHMS.items() if "TRL" not in name])
def test_every_setting_is_one_that_the_program_takes(name, tmp_path):
    """Flags are read before the models are, and these are missing."""
    x = ALGORITHMS[name]
    words = x.words.split()
    script = words[0] if words[0] != "-m" else words[1].replace(".", "/") + ".py"
    more = words[1 if words[0] != "-m" else 2 :]
    for flags in x.settings():
        status, _, error = run(script, *more, *flags.split(), "--models", tmp_path, "--out", tmp_path / "out", "--device", "cpu")
        assert status == 2 and "sft.pt: not found" in error, error


def test_a_search_is_on_the_first_seed_at_a_quarter_of_the_length_and_a_full_run_on_each_with_the_best_setting(home):
    bench = Bench(40, 3)
    searches = bench.searches("RLOO")
    assert list(searches) == ALGORITHMS["RLOO"].settings() and len({job.out for job in searches.values()}) == 6
    for flags, job in searches.items():
        words = list(map(str, job.words))
        models = str(home / "models" / "0")
        expected = ["-m", "variations.rloo", "--models", models, "--seed", "0", "--steps", "10", "--no_report", "--resume"]
        assert words == [*expected, *flags.split()]
    assert bench.best("RLOO") is None
    for i, job in enumerate(searches.values()):
        finish(job, [{"score": 5.0, "kl": 0.0}] * 6 + [{"score": i % 5, "kl": 1.0 / BETA if i == 4 else 0.0}] * 2)
    best = list(searches)[3]  # the fourth has the largest score, once its KL is paid
    assert bench.best("RLOO") == best
    jobs = bench.full("RLOO")
    assert [job.words[3] for job in jobs] == [results.folder("models", seed) for seed in range(3)]
    for seed, job in enumerate(jobs):
        words = list(map(str, job.words))
        given = dict(zip(words, words[1:]))
        assert (given["--steps"], given["--seed"]) == ("40", str(seed)) and words[-4:] == best.split()
    assert len({job.out for job in jobs} | {job.out for job in searches.values()}) == 9
    assert Bench(80, 3).full is not None and not {job.out for job in Bench(80, 3).searches("RLOO").values()} & {
        job.out for job in searches.values()}  # runs of another length are other runs  # fmt: skip


def test_a_setting_that_fails_is_out_and_the_search_goes_on(home):
    bench = Bench(40, 1)
    for i, job in enumerate(bench.searches("PPO").values()):
        finish(job, [{"score": float(i), "kl": 0.0}] * 4, status=2 if i == 5 else 0)
    assert bench.best("PPO") == ALGORITHMS["PPO"].settings()[4]
    summary = bench.searches("PPO")
    assert [job.objective() for job in summary.values()] == [0, 1, 2, 3, 4, None]


def test_the_objective_is_score_minus_beta_kl_over_the_last_quarter_of_the_log(tmp_path):
    job = Job([], tmp_path)
    finish(job, [{"score": 100.0, "kl": 0.0}] * 6 + [{"score": 2.0, "kl": 3.0}, {"score": 4.0, "kl": 5.0}])
    assert job.objective() == pytest.approx(3.0 - BETA * 4.0)


def test_the_log_of_trl_gives_the_kl_of_whole_responses(tmp_path):
    rows = [{"reward": float(i), "kl": 0.5, "completions/mean_length": 4.0, "step": i} for i in range(1, 5)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*rows, {"train_runtime": 20.0}]}))
    log = Job([], tmp_path).log()
    assert log == [{"score": float(i), "kl": 2.0, "seconds": 5.0 * i} for i in range(1, 5)]


def test_a_run_that_cannot_go_on_is_not_told_to(home):
    for name in ALGORITHMS:
        first, *_ = Bench(40, 1).searches(name).values()
        assert ("--resume" in first.words) == ("TRL" not in name), name


@pytest.mark.parametrize("trl", [None, object()])
def test_the_rows_of_trl_are_there_where_trl_is(monkeypatch, trl):
    monkeypatch.setattr(neighbours, "find_spec", lambda name: trl)
    assert [name for name in Bench(40, 1).names if "TRL" in name] == (["PPO of TRL", "GRPO of TRL"] if trl else [])
    assert len(Bench(40, 1).names) == len(ALGORITHMS) - 2 * (trl is None)


@pytest.mark.parametrize("code, status", [(0, 0), (2, 2), (1, None), (130, None)])
def test_a_job_that_was_stopped_runs_again_and_one_that_has_ended_does_not(tmp_path, code, status):
    job = Job(["-c", CODE, code], tmp_path / "job", env={"MORE": "x"})
    for _ in range(2):
        job.run()
        assert job.status() == status
    assert (tmp_path / "job" / "runs").read_text() == "1x" * (1 if status is not None else 2)
    assert "said" in (tmp_path / "job" / "log.txt").read_text()


def test_against_hacking_all_run_at_the_default_beta_and_at_0_and_ensembles_find_their_reward_models(home):
    bench = Bench(30, 2)
    jobs = bench.hacking()
    assert list(jobs) == [(name, beta) for beta in (0.0, BETA) for name in (*neighbours.SCORERS, "three rounds")]
    homes = [job.out for job in bench.ensembles()]
    for (name, beta), seeds in jobs.items():
        for seed, job in enumerate(seeds):
            words = list(map(str, job.words))
            given = dict(zip(words, words[1:]))
            assert given["--models"] == str(home / "models" / str(seed)) and given["--seed"] == str(seed)
            if name == "three rounds":
                assert given["--ppo"] == f"--kl_coef {beta:g} --steps 10 --no_report" and job.policy == "3/ppo.pt"
                assert given["--rounds"] == "3"
            else:
                assert given.get("--reward", "") == neighbours.SCORERS[name] and given["--kl_coef"] == f"{beta:g}"
                assert job.env == {"ENSEMBLE": str(homes[seed])} and given["--steps"] == "30"
    assert len({job.out for seeds in jobs.values() for job in seeds}) == 16
    assert [list(map(str, job.words)) for job in bench.ensembles()] == [
        ["-m", "variations.ensemble", "--models", str(home / "models" / str(seed))] for seed in range(2)]  # fmt: skip


def test_everything_is_run_in_order_once_and_what_is_there_is_skipped(home, monkeypatch):
    ran, bench = [], Bench(8, 2)
    bench.names = ["PPO", "DPO", "GRPO of TRL"]

    def run(job):
        if job.status() is None:
            ran.append(job)
            finish(job, [{"score": float(len(ran)), "kl": 0.0, "seconds": 1.0}])

    monkeypatch.setattr(Job, "run", run)
    monkeypatch.setattr(results, "make_models", lambda seed, ablations: ran.append(seed))
    neighbours.run_all(bench, 1)
    assert ran[:2] == [0, 1]
    jobs = ran[2:]
    assert len(jobs) == 3 * 6 + 3 * 2 + 2 + 2 * 4 * 2
    first = [any("outgrow" in str(word) for word in job.words) for job in jobs]
    assert first[:6] == [True] * 6 and not any(first[6:18]) and first[18:20] == [True] * 2 and not any(first[20:])
    assert "variations.ensemble" in jobs[24].words and "variations.ensemble" in jobs[25].words
    neighbours.run_all(bench, 1)
    assert ran[2 + len(jobs) :] == [0, 1]  # the models look after themselves


def test_a_run_that_was_stopped_ends_the_bench(home, monkeypatch):
    bench = Bench(8, 1)
    bench.names = ["PPO"]
    monkeypatch.setattr(Job, "run", lambda job: None)
    monkeypatch.setattr(results, "make_models", lambda seed, ablations: None)
    with pytest.raises(SystemExit, match="not finished.*call again"):
        neighbours.run_all(bench, 2)


class Stick:
    """In place of bench.results.Yardstick: measures by the number that a policy is."""

    made = []

    def __init__(self, name, seed):
        assert name == "full"
        self.made.append(seed)

    def measure(self, policy, beta):
        assert beta == BETA
        return {name: policy * scale for name, scale in (("optimality", 0.1), ("judge", 1.0), ("score", 2.0), ("kl", 3.0))}, {}, []


@pytest.fixture
def measured(home, monkeypatch):
    """A bench in which PPO and the first three of the runs against hacking are done: 1, 2 and 3 stand for their policies."""
    bench = Bench(8, 3)
    bench.names = ["PPO", "RLOO"]
    Stick.made.clear()
    monkeypatch.setattr(results, "Yardstick", Stick)
    monkeypatch.setattr(neighbours, "load_checkpoint", lambda path, kinds: (float(path.read_text()), None, None))
    for i, job in enumerate(bench.searches("PPO").values()):
        finish(job, [{"score": float(i), "kl": 0.0}])
    for seed, job in enumerate(bench.full("PPO")):
        finish(job, [{"seconds": 5.0}, {"seconds": 10.0 * (seed + 1)}])
        (job.out / "ppo.pt").write_text(str(seed + 1.0))
    job = bench.hacking()["three rounds", 0.0][0]
    finish(job)
    for number, seconds in ((1, 3.0), (2, 4.0), (3, 5.0)):
        (job.out / str(number)).mkdir()
        (job.out / str(number) / "ppo.jsonl").write_text(json.dumps({"seconds": seconds}) + "\n")
        (job.out / str(number) / "rm.jsonl").write_text(json.dumps({"seconds": 100.0}) + "\n")
    (job.out / "3" / "ppo.pt").write_text("7.0")
    return bench


def test_the_figures_are_means_over_the_seeds_with_their_standard_errors_and_are_measured_once(measured):
    summary = neighbours.summarise(measured)
    row = summary["rows"]["PPO"]
    assert row["judge"] == {"mean": 2.0, "se": pytest.approx(1 / 3**0.5), "seeds": 3} and row["kl"]["mean"] == 6.0
    assert row["seconds"]["mean"] == 20.0 and row["optimality"]["mean"] == pytest.approx(0.2)
    assert row["flags"] == ALGORITHMS["PPO"].settings()[5] and list(summary["rows"]) == ["PPO"]
    assert [x["objective"] for x in summary["search"]["PPO"]] == [0, 1, 2, 3, 4, 5] and summary["search"]["RLOO"] == []
    assert [x["flags"] for x in summary["search"]["PPO"]] == ALGORITHMS["PPO"].settings()
    assert row["gain"]["mean"] == 0 and row["gain"]["se"] == 0
    (rounds,) = summary["hacking"]
    assert (rounds["name"], rounds["beta"], rounds["judge"]["mean"], rounds["seconds"]["mean"]) == ("three rounds", 0.0, 7.0, 312.0)
    assert (summary["steps"], summary["responses"]) == (8, 8 * PPO.batch_size) and sorted(Stick.made) == [0, 1, 2]
    assert neighbours.summarise(measured) == summary and len(Stick.made) == 3
    for i, job in enumerate(measured.searches("RLOO").values()):
        finish(job, [{"score": float(i), "kl": 0.0}])
    for seed, job in enumerate(measured.full("RLOO")):
        finish(job, [{"seconds": 5.0}])
        (job.out / "ppo.pt").write_text(str([4.0, 5.0, 9.0][seed]))
    gain = neighbours.summarise(measured)["rows"]["RLOO"]["gain"]  # 0.1 x (3, 3, 6), seed by seed
    assert gain["mean"] == pytest.approx(0.4) and gain["se"] == pytest.approx(0.1)


def test_the_tables_and_the_picture(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    x = json.loads((results.ROOT / "bench" / "results.json").read_text()) | {"neighbours": neighbours.summarise(measured)}
    made = results.tables(x)
    flags = ALGORITHMS["PPO"].settings()[5]
    figures = "0.200 ± 0.058 |  | 2.00 ± 0.58 | 4.00 ± 1.15 | 6.00 ± 1.73 | 20 ± 6"
    assert made["neighbours"].splitlines()[2] == f"| PPO | `{flags}` | {figures} |"
    assert made["ensembles"].splitlines()[2] == "| three rounds | 0 | 7.00 | 14.00 | 21.00 |"
    drawn = []
    monkeypatch.setattr(results, "save", lambda drawing, name: drawn.append((drawing, name)))
    neighbours.draw(x)
    ((drawing, name),) = drawn
    assert name == "neighbours" and [axis.get_title() for axis in drawing.axes] == ["score", "judge", "optimality, less PPO's"]
    assert [label.get_text() for label in drawing.axes[2].get_yticklabels()] == ["PPO"] and len(drawing.axes[0].containers) == 1
    x["neighbours"]["rows"]["PPO"]["kl"]["mean"] = 14.0
    neighbours.draw(x)
    assert not drawn[-1][0].axes[0].containers and len(drawn[-1][0].axes[2].containers) == 1
    x["neighbours"]["rows"]["RLOO"] = x["neighbours"]["rows"]["PPO"] | {"gain": {"mean": -0.25, "se": 0.5, "seeds": 3}}
    assert " | 0.200 ± 0.058 | -0.250 ± 0.500 | 2.00 " in neighbours.tables(x)["neighbours"].splitlines()[3]


def test_the_ladder_has_a_table_of_four_rows():
    rungs = {name: {"variance": 8.0 / 2**i, "bias": 1e-15} for i, name in enumerate("abcd")}
    rungs = dict(zip(("total return", "b", "c", "d"), rungs.values()))
    lines = ladder.tables({"ladder": rungs})["ladder"].splitlines()
    assert len(lines) == 6 and lines[3] == "| b | 4.0 | 0.500 | 1e-15 |"
