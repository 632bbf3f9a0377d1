"""What bench/ starts, and the figures that come of it."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench import critic, results, tables
from cli import PPO, run, write_models
from data.files import UserError, write_file, write_jsonl
from minippo import turns_score
from plumbing.models import load_checkpoint, save_checkpoint
from plumbing.report import REFERENCE, Evaluator


@pytest.mark.parametrize("name", results.TABLES)
def test_every_command_line_of_a_table_is_one_that_its_script_takes(name, tmp_path, monkeypatch):
    data, jobs, folders = set(), {}, {}
    for x, stub in {
        "RUNS": tmp_path,
        "ZOO": tmp_path / "zoo",
        "write_data": data.add,
        "write_jsonl": lambda path, _: data.add(path.parent),
        "run": lambda out, commands, _: jobs.setdefault(out, commands),
        name: lambda x: x,
        "keep": lambda x, _: folders.update(x),
    }.items():
        monkeypatch.setattr(results, x, stub)
    monkeypatch.setattr(sys, "argv", ["results.py", name])
    results.main()
    assert next(iter(jobs)).parent.name == "models"  # these come first
    assert data == {tmp_path / ("sums/data" if name == "sums" else "zoo")}
    for row, (_, out, *others) in folders.items():
        assert len(others) == (8 if name == "seeds" else 1)
        assert (results.TABLES[name][row][0] == "few pairs") == ("pairs" in row)
        assert jobs[out][1][jobs[out][1].index("--policy") + 1] == f"{out}/ppo.pt"
    for words in {tuple(words) for out in jobs if out.name == "1" for words in jobs[out]}:
        assert words[words.index("--seed") + 1] == "1"
        script, *flags = words[words[0] == "-m" :]
        script = script if script.endswith(".py") else script.replace(".", "/") + ".py"
        status, _, error = run(script, *flags)
        missing = "sft_train.jsonl" if script == "train_sft.py" else "sft.pt"
        assert status == 2 and f"{missing}: not found" in error, error
        assert ("/sums/" in error) == (name == "sums")


@pytest.mark.parametrize("name", ["pictures", "pretrained", "speed", "tables"])
def test_each_module_explains_itself(name):
    if name == "pretrained":
        pytest.importorskip("transformers")
    status, printed, error = run(f"bench/{name}.py", "-h")
    assert (status, error) == (0, "") and f"python -m bench.{name}" in printed


def test_the_optimum_is_the_reference_times_the_exponential_of_the_score(tmp_path, monkeypatch):
    kept, models = [], tmp_path / "zoo" / "models" / "2"
    monkeypatch.setattr(results, "RUNS", tmp_path)
    monkeypatch.setattr(results, "ZOO", models / "data")
    monkeypatch.setattr(results, "Evaluator", lambda *x: kept.append(Evaluator(*x)) or kept[0])
    write_models(models)
    best, reference = results.optima(2), kept[0].reference
    for beta, row in best.items():
        weights = (reference["score"].double() / float(beta)).exp()
        weights /= weights.sum(1, keepdim=True)
        by_hand = {x: (weights * reference[x]).sum(1).mean().item() for x in ("judge", "score")}
        by_hand["kl"] = (weights * (weights * REFERENCE).log()).sum(1).mean().item()
        assert row == pytest.approx(by_hand)


def test_a_run_of_another_commit_or_of_other_commands_is_made_again(tmp_path):
    def commands(x):
        return [["-c", f"open(r'{tmp_path}/made.txt', 'a').write('{x}')"]]

    for x, source in ("p", "a"), ("p", "a"), ("q", "a"), ("q", "b"), ("q", "b"):
        results.run(tmp_path / "new", commands(x), source)
    assert (tmp_path / "made.txt").read_text() == "pqq"
    for _ in range(2):
        with pytest.raises(UserError, match="log.txt says what went wrong"):
            results.run(tmp_path, [["-c", "1 / 0"]], "b")


def test_the_time_beside_trl_is_a_factor():
    pytest.importorskip("trl")
    from bench import speed

    assert 1 < speed.ratio((300, 32, 1, 2, 16, 8, 6, 4)) < 1000


def test_figures_by_hand(tmp_path, monkeypatch):
    """All figures in a folder are one number, plus 0 to 7 for the part of its report."""
    parts = "sft", "rm", "policy", "seen", "unseen", "4", "16", "64"

    def figures(x):
        return dict.fromkeys(results.COLUMNS, x)

    def folder(x):
        rows = {part: figures(x + i) for i, part in enumerate(parts)}
        rows["unseen"]["optimality_se"] = 0.5
        a, b = (
            {"text": "word " * 99, "score": s, "judge": j, "kl": 4} for s, j in ((2, 3), (1, -3))
        )
        samples = [{"prompt": "a", "policy": a}, {"prompt": "b", "policy": b}]
        report = {**rows, "best_of_n": rows, "suspects": {"count": 9}, "samples": samples}
        log = [{"kl": x + i, "score": 2 * i, "judge": -i} for i in range(110)]
        write_file(tmp_path / f"{x}" / "measured" / "report.json", json.dumps(report))
        write_jsonl(tmp_path / f"{x}" / "ppo.jsonl", log)
        return tmp_path / f"{x}"

    monkeypatch.setattr(results, "optima", lambda x: {"0.1": {"kl": x}, "0.2": {}})
    assert [tables.mean_and_error(x) for x in ([1, 3], [5])] == [[2, 1], [5, None]]
    # A jump is a KL above the median of the hundred before.
    assert results.jumps([9.0] + [1.0] * 100 + [1.9, 2.1, 1.0, 2.1]) == 2
    assert results.jumps([1.0, 3.0] * 50 + [3.1]) == 1

    found = results.seeds({"default": [folder(0), folder(2)]})
    names = "best of 4", "best of 16", "best of 64", "SFT", "PPO", "PPO, unseen prompts"
    systems = {name: figures([x, 1]) for name, x in zip(names, (6, 7, 8, 1, 3, 5))}
    systems["the optimum at beta = 0.1"] = {"kl": [0.5, 0.5], "optimality": 1}
    assert found["systems"] == systems and found["optima"] == {"0.2": {}}
    row = [[None, None], [None, None], [4, None], [4, None], [5, None], [6, 0.5], 9, 10]
    assert [*found["seeds"]["1"].values()] == row

    numbers = enumerate(results.SETTINGS)
    found = results.settings({x: [folder(i), folder(i + 2)] for i, x in numbers})
    for i, (name, row) in enumerate(found["settings"].items()):
        gain = {"minus the first row": [i, 0]} if i and "pairs" not in name else {}
        assert row == {"flags": results.SETTINGS[name], **figures([i + 3, 1]), **gain}
    assert found["paths"].keys() == tables.load()["paths"].keys()
    path = found["paths"]["beta = 0.1"]
    assert [path[x][:2] for x in path] == [[5.5, 15.5], [9, 29], [-4.5, -14.5]]
    assert found["hacked"] == {f"b **{'word ' * 9}…**": {"score": 1, "judge": -3, "kl": 4}}
    found = results.sums({"PPO": [folder(0), folder(2)]})["sums"]
    assert found == {"SFT": figures([1, 1]), "PPO": figures([3, 1])}


def test_the_pictures_show_what_is_stored():
    pytest.importorskip("matplotlib")
    from bench import pictures

    stored = tables.load()

    def shows(line, setting, name):
        path = stored["paths"][setting]
        return line.get_xydata().tolist() == [*map(list, zip(path["kl"], path[name]))]

    for axis, name in zip(pictures.frontier(stored).axes, ("score", "judge")):
        optima, best, *paths = axis.lines
        assert list(x := optima.get_xdata()) == sorted(x) and len(x) == len(stored["optima"]) + 1
        rows = [stored["systems"][f"best of {n}"] for n in (4, 16, 64)]
        assert best.get_xydata().tolist() == [[row["kl"][0], row[name][0]] for row in rows]
        assert all(shows(line, line.get_label().removeprefix("PPO, "), name) for line in paths)
    for line in pictures.hacking(stored).axes[0].lines:
        name, setting = line.get_label().split(", ", 1)
        assert shows(line, setting, name)
    for line in pictures.pretrained(stored).axes[0].lines:
        path = stored["pretrained_paths"][f"speed, {line.get_label()}"]
        assert list(line.get_xdata()) == path["seconds"]
        means = path["judge"][0], sum(path["judge"][:2]) / 2, sum(path["judge"][-5:]) / 5
        assert [line.get_ydata()[i] for i in (0, 1, -1)] == pytest.approx(means)


def test_the_tables_hold_what_is_stored():
    stored, text = tables.load(), tables.TEXT.read_text(encoding="utf-8")
    made = " ".join(row["tables"] for row in stored["made"].values()).split()
    assert sorted(made) == sorted(stored.keys() - {"made"})
    assert tables.fill(text, stored) == text
    assert tables.dumps(stored) == tables.PATH.read_text(encoding="utf-8")
    cells = {"": None, "3": 3, "0.123": 0.1234, "2.87±0.03": [2.874, 0.0321], "1.5": [1.5, None]}
    cells |= {"217±90": [217.1, 90.4], "`--k 8`": "--k 8", "0": [0.0, 0.0]}
    assert [tables.cell(x) for x in cells.values()] == [*cells]


def test_a_table_that_is_made_again_moves_to_its_new_commit(tmp_path, monkeypatch):
    for name in ("PATH", "TEXT"):
        monkeypatch.setattr(tables, name, tmp_path / name)
    x, y = {"r": {"c": 1}}, {"r": {"c": 1.23456, "d": [2.0, 0.5]}, "s": {"e": ""}}
    tables.PATH.write_text(json.dumps({"made": {"old": {"tables": "x y"}}, "x": x, "y": x}))
    text = "a\n<!-- x -->\n{}<!-- /x -->\n<!-- y -->\n{}<!-- /y -->\nb"
    tables.TEXT.write_text(text.format("old\n" * 2, ""))
    tables.keep({"y": y, "z": {}}, "new")
    y["r"]["c"], made = 1.235, {"old": {"tables": "x"}, "new": {"tables": "y z"}}
    assert tables.load() == {"made": made, "x": x, "y": y, "z": {}}
    tables_of = (
        "|  | c |\n| --- | ---: |\n| r | 1 |\n",
        "|  | c | d | e |\n| --- | ---: | ---: | ---: |\n| r | 1.24 | 2.0±0.5 |  |\n| s |  |  |  |\n",
    )
    assert tables.TEXT.read_text() == text.format(*tables_of)


def test_the_experiment_with_the_critic_is_the_loop_of_minippo(monkeypatch):
    monkeypatch.setattr(critic, "ITERATIONS", 40)
    assert critic.objective(({"kl_coef": 1e3}, 64, 0)) < 0 < 1 < critic.objective(({}, 64, 0))
    assert critic.objective(({}, 4, 0)) != critic.objective(({}, 4, 1))
    tokens = torch.tensor([[0, 1, 4, 8, 26]])  # a b e i <eos>
    assert turns_score(tokens, torch.tensor([[True] * 4])).item() == 0.5 + 0.5 - 0.5 + 0.5
    # Its table has the mean over the seeds for each row and each batch size.
    monkeypatch.setattr(critic, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(critic, "objective", lambda job: sum(job[1:]) + len(job[0]))
    monkeypatch.setattr(critic, "keep", lambda sections, _: rows.update(sections["critic"]))
    monkeypatch.setattr(sys, "argv", ["critic.py"])
    rows = {}
    critic.main()
    assert rows["values"]["batches of 8"] == tables.mean_and_error(range(8, 18))
    assert rows["no values"]["batches of 64"] == tables.mean_and_error(range(65, 75))


def test_trls_ppo_has_our_settings_and_cap_and_its_policy_is_saved(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from trl.experimental import ppo

    model, tokenizer, figures = load_checkpoint(write_models(tmp_path) / "rm.pt", ["rm"])
    model.cap.fill_(0.25)
    save_checkpoint(tmp_path / "rm.pt", "rm", model, tokenizer, **figures)
    trainers, trainer = [], ppo.PPOTrainer
    monkeypatch.setattr(ppo, "PPOTrainer", lambda *x, **y: trainers.append(x) or trainer(*x, **y))
    flags = ["--models", tmp_path, "--data", tmp_path / "data", "--out", tmp_path / "out", *PPO]
    flags += "--gamma .9 --lam .8 --kl_coef .3 --vf_coef .2 --clip_eps .4 --value_clip .7".split()
    flags += "--epochs 3 --lr 1e-3 --adam_eps 1e-6 --temperature .9 --missing_eos_penalty 2".split()
    assert run("bench/trl_ppo.py", *flags, "--max_grad_norm", 5, "--no_report")[0] == 0
    arguments, _, _, _, scorer, *_ = trainers[0]
    names = "gamma lam kl_coef vf_coef cliprange cliprange_value num_ppo_epochs learning_rate "
    names += "adam_epsilon temperature missing_eos_penalty max_grad_norm num_mini_batches "
    names += "total_episodes response_length warmup_steps per_device_train_batch_size"
    values = [getattr(arguments, name) for name in names.split()]
    assert values == [0.9, 0.8, 0.3, 0.2, 0.4, 0.7, 3, 1e-3, 1e-6, 0.9, 2, 5, 2, 24, 8, 1, 8]
    assert scorer.score(99 * torch.randn(99, 16)).max() == 0.25
    start, end = (torch.load(tmp_path / x)["model"] for x in ("sft.pt", "out/ppo.pt"))
    assert not torch.equal(start["trunk.norm.bias"], end["trunk.norm.bias"])
