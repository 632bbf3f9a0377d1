"""What bench/ runs, counts and writes. Run: python -m pytest tests/test_bench.py"""

import re
import shutil
import subprocess
import time
from dataclasses import asdict
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from bench import accident, pictures, results, speed, tables, trl_ppo
from cli import ROOT, run, same_weights, write_data, write_models, write_rows
from data import zoo
from data.files import UserError, read_log, write_jsonl
from data.rows import load_rows
from minippo import PPOConfig, generate
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.flags import RunConfig
from plumbing.packing import PackedTrunk
from plumbing.rows import read_prompts
from plumbing.tokenizer import texts_of
from plumbing.training import FitConfig
from tiny import f64, stir, tiny_gpt, weights
from train_ppo import StageConfig

ROWS = {"PPO": {"flags": "", "judge": [2.345, 0.0125], "tokens": 3, "made": "a"}}
ROWS |= {"RLOO": {"flags": "--k 8", "judge": [1.0, None], "tokens": 12.25, "made": "a"}}
TABLE = """|  | flags | judge | tokens |
| --- | ---: | ---: | ---: |
| PPO |  | 2.35±0.01 | 3 |
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


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_code_that_is_not_committed_is_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # of a hook that runs the tests
        monkeypatch.delenv(name, raising=False)

    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path)

    for folder in ("tests", "bench", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "x.py").write_text("1")
    git("init", "-q"), git("add", "."), git("commit", "-qm", "x")
    for folder, mark in (("tests", False), ("bench", False), (".", True)):
        (tmp_path / folder / "x.py").write_text("2")
        assert ("+," in tables.made()) == mark


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
    assert {*re.findall(r"\d[\d.]*", name)} <= {*job.commands[0]}
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
    names = "judge score optimality kl distinct response_length length_correlation".split()
    names += ["above_entropy", "below_ceiling"]
    for i, part in enumerate(("sft", "rm", "ppo", "ppo_seen", "ppo_unseen")):
        report[part] = dict.fromkeys([f"{name}_se" for name in names], 0.25)
        report[part] |= {name: x + i + j for j, name in enumerate(names)}
    report["best_of_n"] = {"4": report["rm"]}
    kl = 5 + ("--kl_coef" in job.commands[0])
    answers = [
        {"text": f" {seed}{i}{' so' * 99}", "score": i, "judge": 0, "kl": kl} for i in (3, 1, 4, 2)
    ]
    report["samples"] = [{"prompt": "Who?", "ppo": answer} for answer in answers] * few
    log = [{"score": -i, "kl": i + x} for i in range(30)]
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
    lab, jumps = results.Lab(seeds=2), results.jumps
    monkeypatch.setattr(results, "jumps", max)
    steps = int(lab.few_pairs(3).commands[0][-5])
    assert 0 <= zoo.ROWS["pref_train"] / 4 - steps * FitConfig.batch_size < FitConfig.batch_size
    assert len(results.seeds(results.Lab())["seeds"]) == 10
    found = results.seeds(lab) | results.settings(lab) | results.neighbours(lab)
    systems, rows, four = found["systems"], found["settings"], found["settings"]["four passes"]
    assert systems["SFT model"]["judge"] == [8, 8]
    assert systems["**PPO**"]["judge"] == [10, 8] and systems["best of 4"]["KL"] == [12, 8]
    assert systems["PPO, on unseen prompts"]["KL"] == [15, 8]
    assert systems["the optimum at beta = 0.1"]["KL"] == [1.5, 0.5]
    pairs = [[x, 0.25] for x in (23, 25, 18, 21, 21, 22)]
    assert [*found["seeds"]["1"].values()][:8] == [*pairs, 7, 45]
    assert four["flags"] == "--epochs 4" and four["less the default's"] == [1.5, 0.5]
    assert four["optimality"][0] == 13.5 and four["tokens"][0] == 16.5
    assert rows["default"]["less the default's"] is rows[results.HACKED]["less the default's"]
    worst = {"score": 4, "judge": 0, "KL": 6, "made": tables.made()}  # of each seed
    assert found["hacked"] == {f"Who? **{i}4{' so' * 28} …**": worst for i in (0, 1)}
    assert found["neighbours"]["DPO"]["seconds to a judge of 2.5"] == [50.5, 0.5]
    assert found["paths"]["default"]["kl"] == [12.5, 22.5, 32.5]
    log = [{"judge": 0.0, "seconds": 1.0}] * 10 + [{"judge": 25.0, "seconds": 2.0}]
    assert results.seconds_to(2.5, log) == 2.0 and results.seconds_to(2.6, log) is None
    assert jumps([9.0] + [1.0] * 100 + [1.9, 2.1, 1.0, 2.1]) == 2
    assert tables.mean_and_error([2.0]) == [2.0, None]
    pytest.importorskip("matplotlib")
    draw = pictures.draw
    monkeypatch.setattr(results.pictures, "draw", lambda found: draw(found, tmp_path))
    lab.keep(found)
    path = {"seconds": [*range(20)], "judge": [*range(20)]}
    pretrained = {"pretrained_speed_paths": dict.fromkeys(pictures.LABELS, path)}
    draw(pretrained, tmp_path)
    assert len([ElementTree.parse(path) for path in tmp_path.glob("*.svg")]) == 4
    path, limits = found["paths"]["default"], found["limits"]
    points = [[x["KL"][0], x["judge"][0]] for x in limits.values()]  # best of 4, then over beta
    judged = [list(x) for x in zip(path["kl"], path["judge"])]
    axes = pictures.draw_frontier(found).axes[1], pictures.draw_hacking(found).axes[0]
    drawn = {x.get_label(): x.get_xydata().tolist() for axis in axes for x in axis.lines}
    assert drawn["best of 4, 16, 64"] == points[:1]
    assert drawn["the best policy, over beta"] == points[1:]
    assert drawn["PPO, beta = 0.1"] == drawn["judge, beta = 0.1"] == judged
    assert pictures.draw_pretrained(pretrained).axes[0].lines[0].get_ydata()[5] == 3
    rows = {"neighbours": {"PPO": {"KL": [2, 0.5], "score": [1, 0], "judge": [3, 0.25]}}}
    bars = pictures.draw_neighbours(rows | {"limits_of_neighbours": {}}).axes[1].containers[0][2]
    ends = [x.get_segments()[0].tolist() for x in bars]
    assert ends == [[[1.5, 3], [2.5, 3]], [[2, 2.75], [2, 3.25]]]


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


def test_no_stage_of_a_pretrained_run_sees_what_the_judge_learns_from(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from bench import pretrained

    for split, n in (("train", 12), ("val", 2)):
        pairs = [(f"{split} {i}", f" good {i}", f" bad {i}") for i in range(n)]
        write_rows(tmp_path / "data", **{f"pref_{split}": pairs})
        write_rows(tmp_path / "data", **{f"prompts_{split}": [x[:1] for x in pairs]})
        write_rows(tmp_path / "data", **{f"sft_{split}": [x[:2] for x in pairs]})
    seen = {}
    for name in ("naive_bayes", "first_stages", "keep"):
        monkeypatch.setattr(pretrained, name, lambda *x, name=name: seen.update({name: x}) or bool)
    for name in ("load_model", "AutoTokenizer", "register_optimizer_step_post_hook", "row_of"):
        monkeypatch.setattr(pretrained, name, lambda *_: {})
    pretrained.AutoTokenizer.from_pretrained = lambda _: None
    for name in ("classifier_score", "Policy", "normalised"):
        monkeypatch.setattr(pretrained.hf, name, lambda *_: None)
    monkeypatch.setattr(pretrained, "OUT", tmp_path / "out")
    monkeypatch.setattr(pretrained, "train", lambda *x: seen.update(train=x) or x[-1].note("after"))
    monkeypatch.setattr("sys.argv", ["", "stages", str(tmp_path / "data")])
    pretrained.main()
    (judged,), (_, sft, pairs) = seen["naive_bayes"], seen["first_stages"]
    every = load_rows(tmp_path / "data" / "pref_train.jsonl", "pref")
    assert judged == every[::3] and len(sft) == len(pairs) == 8
    assert not {*judged} & {*pairs} and not {x[:2] for x in judged} & {*sft}
    assert seen["train"][2:4] == ([f"train {i}" for i in range(12)], ["val 0", "val 1"])


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


def test_what_is_measured_is_of_these_models_and_prompts(tmp_path, monkeypatch):
    data, seen = write_data(tmp_path / "data"), []
    policy, tokenizer, _ = load_checkpoint(write_models(tmp_path) / "sft.pt", ["sft"])
    facts = {"sft": load_checkpoint(tmp_path / "rm.pt", ["rm"])[2]["sft"]}
    save_checkpoint(tmp_path / "ppo.pt", "ppo", stir(policy), tokenizer, **facts)
    train, prompts = (read_prompts(data, x, tokenizer, 48) for x in ("train", "val"))
    for module in (results, accident):
        monkeypatch.setattr(module, "DATA", data)
    monkeypatch.setattr(results, "best_policies", lambda reference: reference)
    monkeypatch.setattr(results, "Ruler", lambda *x: SimpleNamespace(reference=x[1]))
    torch.manual_seed(3)
    shuffled = [prompts[i] for i in torch.randperm(len(prompts))]
    assert results.optima(tmp_path, 3) == shuffled  # as in the report of this seed
    monkeypatch.setattr(accident, "distances", lambda *x: seen.extend(x) or {})
    report = {"ppo": {"optimality": 0.5}}
    job = SimpleNamespace(out=tmp_path, log=lambda: [{"kl": 0.0}], report=lambda: report)
    assert accident.figures_of(job, tmp_path) == {"jumps": 0, "optimality": 0.5}
    for model, name in zip(seen, ("ppo", "sft")):
        exact = load_checkpoint(tmp_path / f"{name}.pt", [name])[0]
        assert torch.equal(weights(model), weights(exact))
    assert seen[3] == train
    row = results.over_seeds([{"low": 1, "high": 2}], accident.FIGURES)
    assert (
        row["KL on answers of low scores, nats per token"][0] == 1 and row["of high scores"][0] == 2
    )
    words = accident.CURES["all three, as by default"].split()
    defaults = asdict(PPOConfig()) | asdict(StageConfig())
    assert {x[2:]: float(y) for x, y in zip(words[::2], words[1::2])}.items() <= defaults.items()


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
    made, workload = [], speed.Workload
    monkeypatch.setattr(workload, "iteration", lambda _: [1, 2, 3])
    monkeypatch.setattr(speed, "Workload", lambda *x: made.append(workload(*x)) or made[-1])
    monkeypatch.setattr(speed, "in_turn", lambda *x: [[1 + (f.__self__ is made[1]) for f in x]])
    names = "sampling, s", "scoring, s", "update, s"
    found = speed.measure("small")
    assert [found.pop(name) for name in names] == [1, 2, 3] and {*found.values()} == {2}
    assert [isinstance(x.policy.trunk, PackedTrunk) for x in made] == [True, False]
    status, _, error = run("bench/speed.py", "--workload", "large")
    assert status == 2 and "--workload large: should be one of default, small, medium" in error


def test_trl_and_transformers_are_timed_beside_ours(monkeypatch):
    pytest.importorskip("trl")
    work, calls = speed.Workload((300, 32, 1, 2, 8, 4, 9, 5)), []
    work.iteration = lambda: [1e6]

    def in_turn(*functions):
        for function in functions:
            calls.append("begins"), function()
        return [[3, 1]]

    monkeypatch.setattr(speed, "in_turn", in_turn)
    monkeypatch.setattr(speed, "generate", lambda *_: calls.append("ours"))
    sampling, iteration = speed.beside_others(work).values()
    assert calls == ["begins", "begins", "ours"] and sampling == 3 and 0 < iteration < 1


def test_ppo_of_trl_gets_our_settings_and_writes_a_model_and_a_log(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    write_data(tmp_path / "data")
    write_models(tmp_path)
    out = tmp_path / "trl"
    flags = "--steps 2 --batch_size 8 --max_new_tokens 8 --lr 0.01 --warmup 0 --no_report".split()
    flags += ["--models", tmp_path, "--data", tmp_path / "data", "--out", out, "--device", "cpu"]
    judged, states, clock = [], [], time.perf_counter

    def watched_generate(policy, *given):
        judged.append(weights(policy.trunk)), states.append(torch.get_rng_state())
        return generate(policy, *given)

    def watched_texts_of(*given):
        assert torch.equal(torch.get_rng_state(), states[-1])  # TRL draws what it would have drawn
        return texts_of(*given)

    monkeypatch.setattr("minippo.generate", watched_generate)
    monkeypatch.setattr("plumbing.tokenizer.texts_of", watched_texts_of)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1e6 * len(judged))
    status, _, error = run("bench/trl_ppo.py", *flags)
    assert status == 0, error
    assert torch.equal(judged[-1], weights(load_checkpoint(out / "ppo.pt", ["ppo"])[0].trunk))
    first, second = read_log(out / "ppo.jsonl")
    assert second["seconds"] < 1e6
    assert [first["step"], second["step"]] == [1, 2] and -3 <= first["judge"] <= 3
    assert abs(first["kl"]) < 1e-5 < second["kl"]
    assert not same_weights(out / "ppo.pt", tmp_path / "sft.pt")
    config = PPOConfig(9, 0.8, kl_coef=0.2, gamma=0.9, lam=0.7, epochs=2, minibatches=4)
    config.clip_eps, config.value_clip, config.vf_coef = 0.3, 0.4, 0.6
    config.max_grad_norm, config.missing_eos_penalty = 0.7, 0.5
    stage = StageConfig(steps=7, batch_size=32, lr=0.03, warmup=3, adam_eps=0.02)
    run_config = RunConfig(out=out, device="cpu", seed=6)
    trainer, _ = trl_ppo.make_trainer(run_config, config, stage, [[1], [2]])
    head = trainer.reward_model.score
    assert head.cap == load_checkpoint(tmp_path / "rm.pt", ["rm"])[0].cap
    assert trl_ppo.Capped(torch.nn.Identity(), 1.0)(f64([2.0, 0.0])).tolist() == [1, 0]
    names = """response_length temperature kl_coef gamma lam num_ppo_epochs num_mini_batches cliprange
        cliprange_value vf_coef total_episodes learning_rate warmup_steps adam_epsilon
        adam_beta2 max_grad_norm missing_eos_penalty seed per_device_train_batch_size"""
    values = [9, 0.8, 0.2, 0.9, 0.7, 2, 4, 0.3, 0.4, 0.6, 7 * 32, 0.03, 3, 0.02, 0.99]
    values += [0.7, 0.5, 6, 32]
    assert [getattr(trainer.args, name) for name in names.split()] == values
