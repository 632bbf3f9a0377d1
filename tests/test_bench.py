"""What bench/ starts, and the figures that come of it."""

import json
import sys
from itertools import accumulate, cycle, product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from bench import critic, results, tables
from cli import PPO, run, write_models
from data.files import UserError, write_jsonl
from minippo import turns_score
from plumbing.report import REFERENCE_SAMPLES, Evaluator
from plumbing.text import read_prompts


SHORT = "passes", "equals", "neighbours"


@pytest.mark.parametrize("name", results.TABLES)
def test_every_command_line_of_a_table_parses(name, tmp_path, monkeypatch):
    data, jobs, folders = set(), {}, {}
    for x, stub in {
        "RUNS": tmp_path,
        "ZOO": tmp_path / "zoo",
        "write_data": data.add,
        "write_jsonl": lambda path, _: data.add(path.parent),
        "run": lambda out, commands, _: jobs.setdefault(out, commands),
        **dict.fromkeys(("seeds", "settings", "sums"), lambda x: {name: x}),
        "store": lambda x, _: folders.update(x),
        "rows_of": lambda _, x: x,
    }.items():
        monkeypatch.setattr(results, x, stub)
    monkeypatch.setattr(sys, "argv", ["results.py", name])
    results.main()
    assert next(iter(jobs)).parent.name == "models"  # these come first
    assert data == {tmp_path / ("sums/data" if name == "sums" else "zoo")}
    for row, (_, out, *others) in folders[name].items():
        assert len(others) == (8 if name == "seeds" else 1)
        assert ("few pairs" in str(out)) == ("pairs" in row)
        assert ("--steps 200 " in " ".join(jobs[out][0])) == (name in SHORT)
        assert f"--policy {out}/ppo.pt" in " ".join(jobs[out][1])
    for words in {tuple(words) for out in jobs if out.name == "1" for words in jobs[out]}:
        assert "--seed 1 --device cpu " in " ".join(words)
        script, *flags = words[words[0] == "-m" :]
        status, _, error = run(script.removesuffix(".py").replace(".", "/") + ".py", *flags)
        missing = "sft_train.jsonl" if script == "train_sft.py" else "sft.pt"
        assert status == 2 and f"{missing}: not found" in error, error
        assert ("/sums/" in error) == (name == "sums")


def test_the_best_policy_is_reference_times_exp_of_score(made, monkeypatch):
    kept = []
    monkeypatch.setattr(results, "models_folder", lambda *x: {("zoo", 2): made}[x])
    monkeypatch.setattr(results, "ZOO", made / "data")
    monkeypatch.setattr(results, "Evaluator", lambda *x: kept.append(Evaluator(*x)) or kept[0])
    best, reference = results.optima(2), kept[0].reference
    prompts = read_prompts(made / "data", "val", kept[0].tokenizer, 48)
    torch.manual_seed(2)  # as in the report of this seed
    assert kept[0].prompts == [prompts[i] for i in torch.randperm(len(prompts))]
    for beta, row in best.items():
        weights = (reference["score"].double() / float(beta)).exp()
        weights /= weights.sum(1, keepdim=True)
        by_hand = {x: (weights * reference[x]).sum(1).mean().item() for x in ("judge", "score")}
        by_hand["kl"] = (weights * (weights * REFERENCE_SAMPLES).log()).sum(1).mean().item()
        assert row == pytest.approx(by_hand)


def test_a_run_of_other_code_or_commands_is_made_again(tmp_path):
    made = tmp_path / "made.txt"
    for x, source in ("p", "a"), ("p", "a"), ("q", "a"), ("q", "b"), ("q", "b"):
        words = ["-c", f"open(r'{made}', 'a').write('{x}')"]
        results.run(tmp_path / "new", [words], source)
    assert made.read_text() == "pqq"
    for _ in range(2):
        with pytest.raises(UserError, match="log.txt says what went wrong"):
            results.run(tmp_path, [["-c", "1 / 0"]], "b")


def test_the_time_beside_trl_is_a_factor(monkeypatch):
    pytest.importorskip("trl")
    from bench import speed

    times = accumulate(cycle([1.0, 3.0]))  # an iteration of ours takes 3 seconds, theirs 1
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert speed.ratio((300, 32, 1, 2, 16, 8, 6, 4)) == pytest.approx(1 / 3)


def test_figures_by_hand(tmp_path, monkeypatch):
    """All figures in a folder are one number, plus 0 to 7 for the part of its report."""
    parts = "sft", "rm", "policy", "seen", "unseen", "4", "16", "64"

    def figures(x):
        return dict.fromkeys(results.COLUMNS, x)

    def folder(x):
        rows = {part: figures(x + i) for i, part in enumerate(parts)}
        rows["unseen"]["optimality_se"] = 0.5
        report = {**rows, "best_of_n": rows, "suspects": {"count": 9}}
        log = [{"kl": x + i, "score": 2 * i, "judge": -i} for i in range(450)]
        write_jsonl(tmp_path / f"{x}/measured/report.json", [report])
        write_jsonl(tmp_path / f"{x}/ppo.jsonl", log)
        return tmp_path / f"{x}"

    assert [tables.mean_and_error(x) for x in ([1, 3], [5])] == [[2, 1], [5, None]]
    assert results.jumps([1.0] * 60 + [9.0] * 40 + [1.9, 2.1, 1.0, 2.1, 1.0]) == 2

    monkeypatch.setattr(results, "optima", lambda x: {"0.1": {"kl": x}, "0.2": {}})
    found = results.seeds({"default": [folder(0), folder(2)]})
    names = "SFT", "PPO", "PPO, unseen prompts", "best of 4", "best of 16", "best of 64"
    systems = {name: figures([x, 1]) for name, x in zip(names, (1, 3, 5, 6, 7, 8))}
    systems["the optimum at beta = 0.1"] = {"kl": [0.5, 0.5], "optimality": 1}
    assert found["systems"] == systems and found["optima"] == {"0.2": {}}
    row = [[4, None], [4, None], [5, None], [6, 0.5], 9, 350]
    assert [*found["seeds"]["1"].values()] == row

    runs = {x: [folder(i), folder(i + 2)] for i, x in enumerate(results.TABLES["settings"])}
    found = results.settings(runs)
    for i, (name, row) in enumerate(found["settings"].items()):
        gain = {"minus the first row": [i, 0]} if i and "pairs" not in name else {}
        assert row == figures([i + 3, 1]) | gain
    assert found["paths"].keys() == tables.load()["paths"].keys()
    path = found["paths"]["beta = 0.1"]
    ends = [(path[x][0], path[x][9], path[x][-1]) for x in path]
    assert ends == [(5.5, 95.5, 425.5), (9, 189, 849), (-4.5, -94.5, -424.5)]
    found = results.sums({"PPO": [folder(0), folder(2)]})["sums"]
    assert found == {"SFT": figures([1, 1]), "PPO": figures([3, 1])}


def test_the_pictures_show_what_is_stored():
    pytest.importorskip("matplotlib")
    from bench import pictures

    stored = tables.load()

    def lines(axis):
        return {line.get_label(): line.get_xydata().T.tolist() for line in axis.lines}

    def path(setting, name):
        return [stored["paths"][setting][x] for x in ("kl", name)]

    for axis, name in zip(pictures.frontier(stored).axes, ("score", "judge")):
        shown = lines(axis)
        (optima, _), best = shown.pop("the best policy, over beta"), shown.pop("best of 4, 16, 64")
        rows = [stored["systems"][f"best of {n}"] for n in (4, 16, 64)]
        assert best == [[row[x][0] for row in rows] for x in ("kl", name)]
        betas = "beta = 0.03", "beta = 0.1", "beta = 0.3"
        assert shown == {f"PPO, {x}": path(x, name) for x in betas}
        assert optima == sorted(optima)
        assert {"0.1", *stored["optima"]} == {*map(str, results.BETAS)}
    shown = lines(pictures.hacking(stored).axes[0])
    for name, setting in product(("score", "judge"), ("beta = 0.1", results.HACKED)):
        assert shown[f"{name}, {setting}"] == path(setting, name)


def test_the_tables_hold_what_is_stored():
    stored, text = tables.load(), tables.TEXT.read_text(encoding="utf-8")
    assert stored["made"].keys() == stored.keys() - {"made"}
    assert tables.fill(text, stored) == text
    assert tables.dumps(stored) == tables.PATH.read_text(encoding="utf-8")
    cells = {
        "": None,
        "1234": 1234,
        "0.123": 0.1234,
        "2.87±0.03": [2.874, 0.0321],
        "1.5": [1.5, None],
    }
    cells |= {"217±90": [217.1, 90.4], "`--k 8`": "--k 8", "0": [0.0, 0.0]}
    assert [tables.cell(x) for x in cells.values()] == [*cells]


def test_a_table_made_again_has_its_commit(tmp_path, monkeypatch):
    for name in ("PATH", "TEXT"):
        monkeypatch.setattr(tables, name, tmp_path / name)
    x, made = {"r": {"c": 1}}, dict.fromkeys("xyz", "old")
    tables.PATH.write_text(json.dumps({"made": made, "x": x, "y": x, "z": x}))
    tables.TEXT.write_text("a\n<!-- y -->\nb\n<!-- /y -->")
    tables.store({"y": {"r": {"c": 1.23456}}, "z": {}}, "new")
    made = {"x": "old", "y": "new", "z": "new"}
    assert tables.load() == {"made": made, "x": x, "y": {"r": {"c": 1.235}}, "z": {}}
    table = "|  | c |\n| --- | ---: |\n| r | 1.24 |\n"
    assert tables.TEXT.read_text() == f"a\n<!-- y -->\n{table}<!-- /y -->"


def test_a_change_of_the_code_marks_its_commit(monkeypatch):
    says = [SimpleNamespace(stdout=x) for x in ("abc\n", "", "abc\n", " M minippo.py\n")]
    monkeypatch.setattr(tables.subprocess, "run", Mock(side_effect=says))
    assert [tables.provenance().split(", ")[0] for _ in range(2)] == ["abc", "abc+"]


def test_the_critic_experiment_learns(monkeypatch):
    monkeypatch.setattr(critic, "ITERATIONS", 1)
    start, other = critic.objective(({}, 64, 0)), critic.objective(({}, 64, 1))
    monkeypatch.setattr(critic, "ITERATIONS", 12)
    assert critic.objective(({}, 64, 0)) > max(start, other) + 1 and start != other
    assert critic.objective(({"kl_coef": 1e3}, 64, 0)) < -100
    tokens = torch.tensor([[0, 1, 4, 8, 26]])  # a b e i <eos>
    assert turns_score(tokens, torch.ones(1, 4) > 0) == 0.5 + 0.5 - 0.5 + 0.5


def test_the_judge_counts_words_and_scores_are_cut_then_normalised(monkeypatch):
    pytest.importorskip("transformers")
    from bench import pretrained

    good = pretrained.naive_bayes([("a", " fine film", " dull film"), ("b", " fine", " dull dull")])
    assert [*map(good, ("fine", "dull", "fine film x", "dull film x"))] == [True, False] * 2
    x = torch.arange(256.0).roll(9)
    monkeypatch.setattr(pretrained, "answers", lambda *_: [(x[:99], None), (x[99:], None)])
    score = pretrained.normalised(lambda tokens, _: tokens, None, ["a"])
    scores = torch.tensor([x.mean(), x.mean() - x.std(), x.quantile(0.99), 999.0])
    assert score(scores, None)[:2].tolist() == pytest.approx([0, -1], abs=1e-5)
    assert score(scores, None)[2] == score(scores, None)[3] < 2


def test_trls_ppo_has_our_settings_and_saves_its_policy(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from trl.experimental import ppo

    contents = torch.load(write_models(tmp_path) / "rm.pt")
    contents["model"]["cap"].fill_(0.25)
    torch.save(contents, tmp_path / "rm.pt")
    trainer = Mock(wraps=ppo.PPOTrainer)
    monkeypatch.setattr(ppo, "PPOTrainer", trainer)
    ours = "--gamma .9 --lam .8 --kl_coef .3 --vf_coef .2 --clip_eps .4 --value_clip .7 --epochs 3 "
    ours += "--lr 1e-3 --adam_eps 1e-6 --temperature .9 --missing_eos_penalty 2 --max_grad_norm 5"
    theirs = "gamma lam kl_coef vf_coef cliprange cliprange_value num_ppo_epochs learning_rate "
    theirs += "adam_epsilon temperature missing_eos_penalty max_grad_norm num_mini_batches "
    theirs += "response_length warmup_steps per_device_train_batch_size total_episodes"
    folders = "--models", tmp_path, "--data", tmp_path / "data", "--out", tmp_path / "out"
    assert run("bench/trl_ppo.py", *folders, *PPO, *ours.split(), "--no_report")[0] == 0
    arguments, _, _, _, scorer, *_ = trainer.call_args.args
    values = [*map(float, ours.split()[1::2]), 2, 8, 1, 8, 3 * 8]
    assert [getattr(arguments, x) for x in theirs.split()] == values
    assert scorer.score(99 * torch.randn(99, 16)).max() == 0.25
    start, end = (torch.load(tmp_path / x)["model"] for x in ("sft.pt", "out/ppo.pt"))
    assert not torch.equal(start["trunk.norm.bias"], end["trunk.norm.bias"])
