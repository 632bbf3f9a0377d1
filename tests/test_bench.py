"""What bench/ runs, counts and writes. Run: python -m pytest tests/test_bench.py"""

import re
from xml.etree import ElementTree

import pytest
import torch

from bench import accident, pictures, results, speed, tables, trl_ppo
from cli import ROOT, metrics, run, same_weights, write_data, write_models
from data.files import UserError, write_jsonl
from minippo import PPOConfig, generate
from plumbing.flags import RunConfig
from tiny import tiny_gpt
from train_ppo import StageConfig

ROWS = {"PPO": {"flags": "", "judge": [2.345, 0.0125], "tokens": 3, "made": "a"}}
ROWS |= {"RLOO": {"flags": "--k 8", "judge": [1.0, None], "tokens": 12.25, "made": "a"}}
TABLE = """|  | flags | judge | tokens |
| --- | ---: | ---: | ---: |
| PPO |  | 2.35 ± 0.01 | 3 |
| RLOO | `--k 8` | 1.00 | 12.3 |"""


def test_results_are_kept_with_their_tables_unless_rows_are_of_several_commits(
    tmp_path, monkeypatch
):
    path, text = tmp_path / "results.json", "a\n<!-- neighbours -->\n%s\n<!-- /neighbours -->\nb\n"
    commit = r"\w{7,}\+?" if (ROOT / ".git").exists() else ""
    assert re.fullmatch(rf"{commit}, .+, \d+ cores", tables.made())
    monkeypatch.setattr(tables, "PATH", path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for name in tables.TEXTS:
        (tmp_path / name).write_text(text % "old")
    path.write_text('{"paths": {"x": [0.5]}}')
    with pytest.raises(UserError, match=r"several commits or machines \(a; b\)"):
        tables.keep({"neighbours": ROWS | {"DPO": {"made": "b"}}})
    assert tables.load() == {"paths": {"x": [0.5]}}
    kept = tables.keep({"neighbours": ROWS, "limits": {"kl": [1 / 3, 123456.7]}})
    assert kept == tables.load() and kept["limits"] == {"kl": [0.33333, 123460.0]}
    assert path.read_text().splitlines()[1:4] == ['"paths": {', '"x": [0.5]', "},"]
    assert (tmp_path / "RESULTS.md").read_text() == text % TABLE
    assert tables.tables(kept)["made"].endswith("| neighbours | a |")


def test_a_job_is_done_when_its_last_process_has_ended_well_and_each_has_one_thread(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['OMP_NUM_THREADS']); exit(int(os.sys.argv[1]))")
    for codes, logs in (("02", ["11", "11"]), ("20", ["11"]), ("00", ["1", "1"])):
        job = results.Job(tmp_path / codes, [[str(script), code] for code in codes])
        job.run("now"), job.run("later")
        assert job.made() == ("now" if codes == "00" else None)
        found = [path.read_text().replace("\n", "") for path in sorted(job.out.glob("log*"))]
        assert found == logs
    with pytest.raises(UserError, match="00: is of now; here it would be of"):
        results.Lab().run([job])
    with pytest.raises(UserError, match="not finished.*00$"):
        results.Lab().run([results.Job(job.out, [[str(script), "1"]])])


EVERY = {name: f"train_ppo.py {x}" for name, x in results.SETTINGS.items()} | results.NEIGHBOURS
EVERY |= {name: f"train_ppo.py {accident.RISKY} {x}" for name, x in accident.CURES.items()}


@pytest.mark.parametrize("name", EVERY)
def test_every_setting_is_one_that_the_scripts_take(name, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "MODELS", tmp_path)
    monkeypatch.setattr(results, "RUNS", tmp_path / "runs")
    job = results.Lab().policy(name, 3, EVERY[name])
    train, measure = map(" ".join, job.commands)
    for words in job.commands["TRL" in name :]:
        script, *flags = words[words[0] == "-m" :]
        script = script if script.endswith(".py") else script.replace(".", "/") + ".py"
        status, _, error = run(script, *flags)
        few = " of few pairs" * ("a quarter" in name)
        assert status == 2 and f"{tmp_path}/3{few}/sft.pt: not found" in error
    same = f"--data {results.DATA} --seed 3"
    assert train.endswith(same) and "--no_report" in train
    assert measure.endswith(f"--policy {job.out}/ppo.pt --lr 0 --steps 1 {same}")


def finish(job, source):
    """As if the processes of a job had run; its figures tell the seed and one setting."""
    seed, few = int(job.commands[0][-1]), "few" in str(job.commands)
    x = 16.0 * seed + ("four_passes" in str(job.out)) * (1 + seed)
    report = {"suspects": {"count": 7}}
    names = (*results.FIGURES.values(), "above_entropy", "below_ceiling")
    for i, part in enumerate(("sft", "rm", "ppo", "ppo_seen", "ppo_unseen")):
        report[part] = dict.fromkeys([f"{name}_se" for name in names], 0.25)
        report[part] |= {name: x + i + j for j, name in enumerate(names)}
    report["best_of_n"] = {"4": report["rm"]}
    report["samples"] = [{"prompt": "Who?", "ppo": report["ppo"] | {"text": " I. "}}] * few
    log = [dict.fromkeys(("score", "kl"), i + x) for i in range(30)]
    log = [row | {"judge": i / 8, "seconds": 2.0 * i + seed} for i, row in enumerate(log)]
    optima = {str(b): {"score": 1.0, "judge": 2.0, "kl": seed + (b == 0.1)} for b in results.BETAS}
    files = {"measured/report.json": [report], "ppo.jsonl": log, "optima.json": [optima]}
    files["made.json"] = [{"made": source, "commands": job.commands}]
    for name, rows in files.items():
        write_jsonl(job.out / name, rows)


def test_runs_become_tables_and_pictures(tmp_path, monkeypatch):
    folders = {"RUNS": tmp_path, "MODELS": tmp_path / "models", "DATA": tmp_path}
    for name, x in (folders | {"BEST_OF": (4,), "keep": lambda found: found}).items():
        monkeypatch.setattr(results, name, x)
    monkeypatch.setattr(results, "copy_files", lambda *_: None)
    monkeypatch.setattr(results.Job, "run", finish)
    lab = results.Lab(seeds=2)
    found = results.seeds(lab) | results.settings(lab) | results.neighbours(lab)
    systems, rows, four = found["systems"], found["settings"], found["settings"]["four passes"]
    assert systems["**PPO**"]["judge"] == [10, 8] and systems["best of 4"]["KL"] == [12, 8]
    assert systems["PPO, on unseen prompts"]["KL"] == [15, 8]
    assert systems["the optimum at beta = 0.1"]["KL"] == [1.5, 0.5]
    pairs = [[x, 0.25] for x in (23, 25, 18, 21, 21, 22)]
    assert [*found["seeds"]["1"].values()][:8] == [*pairs, 7, 0]
    assert four["flags"] == "--epochs 4" and four["less the default's"] == [1.5, 0.5]
    assert four["optimality"][0] == 13.5 and four["tokens"][0] == 16.5
    assert rows["default"]["less the default's"] is rows[results.HACKED]["less the default's"]
    assert found["hacked"]["Who? **I.**"]["KL"] == 5
    assert found["neighbours"]["DPO"]["seconds to a judge of 2.5"] == [50.5, 0.5]
    assert found["paths"]["default"]["kl"] == [12.5, 22.5, 32.5]
    log = [{"judge": 0.0, "seconds": 1.0}] * 10 + [{"judge": 25.0, "seconds": 2.0}]
    assert results.seconds_to(2.5, log) == 2.0 and results.seconds_to(2.6, log) is None
    assert results.jumps([9.0] + [1.0] * 100 + [1.9, 2.1, 1.0, 2.1]) == 2
    assert tables.mean_and_error([2.0]) == [2.0, None]
    pytest.importorskip("matplotlib")
    draw = pictures.draw
    monkeypatch.setattr(results.pictures, "draw", lambda found: draw(found, tmp_path))
    lab.keep(found)
    paths = {name: {"seconds": [*range(20)], "judge": [0.5] * 20} for name in pictures.LABELS}
    draw({"pretrained_speed_paths": paths}, tmp_path)
    assert len([ElementTree.parse(path) for path in tmp_path.glob("*.svg")]) == 4


def test_a_pretrained_run_becomes_a_row(monkeypatch):
    pytest.importorskip("transformers")
    from bench import pretrained

    pairs = [("the film", "is good", "is bad"), ("a good", "plot with more words", "mess")]
    judge = pretrained.naive_bayes(pairs)
    assert judge("good plot") and not judge("bad film") and not judge("mess")
    assert not judge("film")  # as often in good reviews, which have more words in all
    monkeypatch.setattr(pretrained, "sentiments", lambda texts: [len(x) for x in texts])
    clock = iter([0, 1, 2, 4, 5, 8, 10, 11, 14, 19, 20, 30, 60])
    monkeypatch.setattr(pretrained.time, "perf_counter", lambda: next(clock))
    record = pretrained.Record(judge)
    record.note("before", ["good", "bad", "bad"], score=0.25)
    for what in "sample score update update sample score update update sample score".split():
        record.note(what)
    record.note("after", ["good", "good plot"], score=1.5)
    names = "an iteration, s", "until it is sampled", "until it is scored", "update"
    assert record.phases(2) == dict(zip(names, (11, 2, 1, 8)))
    row = pretrained.row_of(record, [{"kl": x} for x in (9, 1, 2, 3, 4, 5)])
    assert row["favourable before"] == pytest.approx(1 / 3) and row["favourable after"] == 1
    assert (row["lexicon before"], row["lexicon after"]) == (pytest.approx(10 / 3), 6.5)
    assert (row["score before"], row["score after"], row["KL"]) == (0.25, 1.5, 3)
    assert (row["different of 128 after"], row["minutes"]) == (2, 1)
    assert row["of these PPO"] == pytest.approx(59 / 60)
    record.lines = [{"what": "sample", "seconds": x, "judge": x / 8} for x in (2.0, 5.0)]
    assert record.path() == {"seconds": [0.0, 3.0], "judge": [0.25, 0.625]}
    rows = {"old": {"made": "a"}, "new": {"made": "b"}}
    known = {"pretrained": rows, "pretrained_speed": rows}
    known["pretrained_speed_paths"] = {"old": "x", "new": "y"}
    found = pretrained.beside(known, "row", {"made": "b"}, {})
    assert found == {"pretrained": {"new": {"made": "b"}, "row": {"made": "b"}}}
    found = pretrained.beside(known, "row", {"made": "b"}, {"seconds": []})
    assert found["pretrained_speed_paths"] == {"new": "y", "row": {"seconds": []}}
    assert [*found["pretrained_speed"]] == ["new", "row"]
    found = pretrained.beside({}, "row", {"made": "b"}, {"seconds": []})
    assert found["pretrained_speed"] == {"row": {"made": "b"}}


def test_the_best_policy_is_the_reference_times_exp_of_the_score_over_beta():
    score, judge = torch.randn(2, 3, 5).double()
    p = (score / 0.3).softmax(1)
    exact = {"score": p * score, "judge": p * judge, "kl": p * (5 * p).log()}
    exact = {name: x.sum(1).mean().item() for name, x in exact.items()}
    found = results.best_policies({"score": score, "judge": judge})
    assert found["0.3"] == pytest.approx(exact)


def test_the_distance_is_the_kl_on_the_worst_and_the_best_answers_of_the_reference():
    policy, ref, prompts = tiny_gpt(5), tiny_gpt(5), [[1, 2], [3]] * 10
    torch.manual_seed(0)
    found = accident.distances(policy, ref, lambda tokens, _: tokens.double().var(1), prompts)
    torch.manual_seed(0)
    tokens, mask, *_ = generate(ref, prompts, 48)
    order = tokens.double().var(1).argsort()
    for kind, rows in (("low", order[:2]), ("high", order[-2:])):
        p, q = (m(tokens[rows, :-1])[0][mask[rows]].log_softmax(-1) for m in (policy, ref))
        assert found[kind] == pytest.approx((p.exp() * (p - q)).sum(1).mean().item())


def test_steps_are_timed_in_turn_on_responses_of_full_length(monkeypatch):
    monkeypatch.setitem(speed.SIZES, "small", (300, 32, 1, 2, 8, 4, 9, 5))
    monkeypatch.setattr(speed, "beside_others", lambda work: {})
    found = speed.measure("small")
    assert min(found.values()) > 0 and len(found) == 6
    work = speed.Workload(speed.SIZES["small"])
    _, mask, *_ = generate(work.policy, work.prompts, work.config.max_new_tokens)
    assert len(work.iteration()) == 3 and mask.sum() == 20
    calls = []
    rows = speed.in_turn(lambda: calls.append("a"), lambda: calls.append("b"), rounds=2)
    assert len(rows) == 2 and "".join(calls) == "ababab"
    assert speed.ratio([[2, 1], [6, 2], [9, 9]]) == 2
    status, _, error = run("bench/speed.py", "--workload", "large")
    assert status == 2 and "--workload large: should be one of default, small, medium" in error


def test_ppo_of_trl_gets_our_settings_and_writes_a_model_and_a_log(tmp_path):
    pytest.importorskip("trl")
    write_data(tmp_path / "data")
    write_models(tmp_path)
    out, flags = (
        tmp_path / "trl",
        "--steps 2 --batch_size 8 --max_new_tokens 8 --lr 0.01 --warmup 0",
    )
    folders = ["--models", tmp_path, "--data", tmp_path / "data", "--out", out, "--no_report"]
    status, _, error = run("bench/trl_ppo.py", *folders, *flags.split(), "--device", "cpu")
    assert status == 0, error
    first, second = metrics(out / "ppo.jsonl")
    assert [first["step"], second["step"]] == [1, 2] and -3 <= first["judge"] <= 3
    assert abs(first["kl"]) < 1e-5 < second["kl"]
    assert not same_weights(out / "ppo.pt", tmp_path / "sft.pt")
    config = PPOConfig(9, 0.8, kl_coef=0.2, gamma=0.9, lam=0.7, epochs=2, minibatches=4)
    config.clip_eps, config.value_clip, config.vf_coef = 0.3, 0.4, 0.6
    stage = StageConfig(steps=7, batch_size=32, lr=0.03, warmup=3, adam_eps=0.02)
    made = trl_ppo.make_trainer(RunConfig(out=out, device="cpu"), config, stage, [[1], [2]])[0].args
    names = """response_length temperature kl_coef gamma lam num_ppo_epochs num_mini_batches cliprange
        cliprange_value vf_coef total_episodes learning_rate warmup_steps adam_epsilon
        adam_beta2"""
    values = [9, 0.8, 0.2, 0.9, 0.7, 2, 4, 0.3, 0.4, 0.6, 7 * 32, 0.03, 3, 0.02, 0.99]
    assert [getattr(made, name) for name in names.split()] == values
