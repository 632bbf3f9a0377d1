"""What bench/ starts, and the tables that come of it. Run: python -m pytest tests/test_bench.py"""

import pytest
import torch

from bench import critic, results, tables
from cli import PPO, run, write_data, write_models
from minippo import turns_score
from plumbing.models import load_checkpoint, save_checkpoint

MODULES = "critic", "pictures", "pretrained", "results", "speed", "tables", "trl_ppo"


@pytest.mark.parametrize("name", results.TABLES)
def test_every_command_line_of_a_table_is_one_that_its_script_takes(name, tmp_path, monkeypatch):
    for folder in ("RUNS", "ZOO"):
        monkeypatch.setattr(results, folder, tmp_path / folder)
    commands = set()
    for task, line in results.TABLES[name].values():
        for _, words in (results.models_job(task, 3), results.policy_job(task, 3, line)):
            commands |= {*map(tuple, words)}
    for words in commands:
        script, *flags = words[words[0] == "-m" :]
        script = script if script.endswith(".py") else script.replace(".", "/") + ".py"
        status, _, error = run(script, *flags)
        missing = "sft_train.jsonl" if script == "train_sft.py" else "sft.pt"
        assert status == 2 and f"{missing}: not found" in error, error


@pytest.mark.parametrize("name", MODULES)
def test_each_module_explains_itself(name):
    if name == "pretrained":
        pytest.importorskip("transformers")
    status, printed, error = run(f"bench/{name}.py", "-h")
    assert (status, error) == (0, "") and f"python -m bench.{name}" in printed


def test_a_run_is_made_once_and_becomes_tables(tmp_path, monkeypatch):
    models = tmp_path / "zoo" / "models" / "0"
    monkeypatch.setattr(results, "RUNS", tmp_path)
    monkeypatch.setattr(results, "ZOO", write_data(models / "data"))
    monkeypatch.setitem(results.STAGES, "zoo", [])
    monkeypatch.setitem(results.MEASURE, "zoo", f"{results.MEASURE['zoo']} --max_new_tokens 8")
    write_models(models)
    rows = {"default": ("zoo", " ".join(["train_ppo.py", *PPO]))}
    folders = results.train(rows, 1, "a")
    (out,) = folders["default"]
    assert [line["step"] for line in results.log(out)] == [1, 2, 3]
    before = (out / "ppo.pt").stat().st_mtime_ns
    assert results.train(rows, 1, "a") == folders
    assert (out / "ppo.pt").stat().st_mtime_ns == before

    sections, measured = results.seeds(folders), results.report(out)
    policy, row = measured["policy"], sections["seeds"]["0"]
    assert row["policy judge"] == [policy["judge"], policy["judge_se"]]
    assert sections["systems"]["PPO"]["kl"] == [policy["kl"], None]
    # The higher beta, the nearer is the best policy to the SFT model.
    for name in ("score", "kl"):
        best = [row[name][0] for row in sections["optima"].values()]
        assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(0, abs=0.05)
    (row,) = results.rows_of(folders, {"default": "--lam 0"}).values()
    assert row["flags"] == "--lam 0" and row["distinct"] == [policy["distinct"], None]
    assert len(results.path_of([out, out])["judge"]) == 1
    prompts = [sample["prompt"] for sample in measured["samples"]]
    assert results.worst_sample(out)[0].partition(" **")[0] in prompts
    assert tables.table(sections["systems"]).count("\n") == 1 + 3 + 3 + 1


def test_a_run_of_another_commit_or_of_other_commands_is_made_again(tmp_path):
    def commands(x):
        return [["-c", f"open(r'{tmp_path}/made.txt', 'a').write('{x}')"]]

    for x, source in ("p", "a"), ("p", "a"), ("q", "a"), ("q", "b"), ("q", "b"):
        assert results.run(tmp_path, commands(x), source)
    assert (tmp_path / "made.txt").read_text() == "pqq"
    assert not results.run(tmp_path, [["-c", "1 / 0"]], "b")
    assert not results.run(tmp_path, [["-c", "1 / 0"]], "b")


def test_the_speed_beside_trl_is_a_factor():
    pytest.importorskip("trl")
    from bench import speed

    assert 0.1 < speed.ratio((300, 32, 1, 2, 16, 8, 6, 4)) < 100


def test_a_jump_is_a_kl_above_the_median_of_the_hundred_before():
    assert results.jumps([9.0] + [1.0] * 100 + [1.9, 2.1, 1.0, 2.1]) == 2
    assert results.jumps([1.0, 3.0] * 50 + [3.1]) == 1


def test_the_policy_that_was_trained_is_measured():
    out, (_, measure) = results.policy_job("zoo", 3, "train_ppo.py --lam 0")
    assert measure[measure.index("--policy") + 1] == f"{out}/ppo.pt"


def test_figures_of_tables_by_hand(monkeypatch):
    assert tables.mean_and_error([1.0, 3.0]) == [2.0, 1.0]
    monkeypatch.setattr(results, "report", lambda x: {"policy": {"optimality": x}})
    rows = results.rows_of({"a": [0.5, 0.75], "b": [0.25, 0.5]}, {"a": "", "b": "--k 4"})
    assert rows["b"]["less the first row's"] == [-0.25, 0.0] and len(rows["a"]) == 2
    lines = [{"kl": i, "score": i, "judge": i, "seconds": i} for i in range(20)]
    monkeypatch.setattr(results, "log", lambda _: lines)
    assert results.path_of(["a"])["kl"] == [4.5, 14.5]
    samples = [
        {"prompt": x, "policy": {"text": "", "score": s, "judge": j, "kl": 1}}
        for x, s, j in (("a", 2, 3), ("b", 1, -3))
    ]
    parts = {x: {"kl": i} for i, x in enumerate(("sft", "rm", "policy", "seen", "unseen"))}
    parts |= {"best_of_n": dict.fromkeys(("4", "16", "64"), {"kl": 0})}
    parts |= {"suspects": {"count": 0}, "samples": samples}
    monkeypatch.setattr(results, "report", lambda _: parts)
    monkeypatch.setattr(results, "optima", lambda _: {"0.1": {"kl": 0}})
    assert results.worst_sample("")[0].startswith("b ")
    assert results.seeds({"default": ["x"]})["systems"]["PPO, unseen prompts"]["kl"] == [4, None]
    assert results.sums({"PPO": ["x"]})["sums"]["PPO"]["seconds"] == [19, None]


def test_the_pictures_show_what_is_stored():
    pytest.importorskip("matplotlib")
    from bench import pictures

    for axis in pictures.frontier(tables.load()).axes:
        assert list(x := axis.lines[0].get_xdata()) == sorted(x)
    for line in pictures.hacking(tables.load()).axes[0].lines:
        name, setting = line.get_label().split(", ", 1)
        assert list(line.get_ydata()) == tables.load()["paths"][setting][name]


def test_the_tables_hold_what_is_stored():
    stored = tables.load()
    printed = tables.tables(stored)
    made = " ".join(row["tables"] for row in stored["made"].values()).split()
    assert sorted(made) == sorted(stored.keys() - {"made"})
    for name, lines in printed.items():
        assert lines.count("\n") == 1 + len(stored[name])
    mean, error = stored["systems"]["PPO"]["judge"]
    assert f"| {mean:.3f}±{error:.3f} |" in printed["systems"]
    text = "a\n<!-- seeds -->\n%s\n<!-- /seeds -->\nb"
    assert tables.fill(text % "old", printed) == text % printed["seeds"]
    text = tables.TEXT.read_text(encoding="utf-8")
    assert tables.fill(text, printed) == text
    assert tables.dumps(stored) == tables.PATH.read_text(encoding="utf-8")
    cells = {"": None, "3": 3, "0.123": 0.1234, "2.87±0.03": [2.874, 0.0321], "1.5": [1.5, None]}
    cells |= {"217±90": [217.1, 90.4], "`--k 8`": "--k 8", "0": [0.0, 0.0]}
    assert [tables.cell(x) for x in cells.values()] == [*cells]


def test_a_table_that_is_made_again_moves_to_its_new_commit(tmp_path, monkeypatch):
    for name in ("PATH", "TEXT"):
        path = getattr(tables, name)
        monkeypatch.setattr(tables, name, tmp_path / path.name)
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    before, made = tables.load(), {"a": {"x": {"c": 1}}, "speed": {"y": {"c": 2}}}
    tables.keep(made, "new")
    after = tables.load()
    assert after == before | made | {"made": after["made"]}
    assert after["made"]["new"] == {"tables": "speed a"}
    assert [row for row in after["made"].values() if "speed" in row["tables"]] == [
        after["made"]["new"]
    ]


def test_the_experiment_with_the_critic_is_the_loop_of_minippo(monkeypatch):
    monkeypatch.setattr(critic, "ITERATIONS", 60)
    assert critic.objective(({"kl_coef": 1e3}, 64, 0)) < 0 < 1 < critic.objective(({}, 64, 0))
    tokens = torch.tensor([[0, 1, 4, 8, 26]])  # a b e i <eos>
    assert turns_score(tokens, torch.tensor([[True] * 4])).item() == 0.5 + 0.5 - 0.5 + 0.5


def test_trls_ppo_has_our_settings_and_cap_and_its_policy_is_saved(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from trl.experimental import ppo

    write_data(tmp_path / "data")
    model, tokenizer, figures = load_checkpoint(write_models(tmp_path) / "rm.pt", ["rm"])
    model.cap.fill_(0.25)
    save_checkpoint(tmp_path / "rm.pt", "rm", model, tokenizer, **figures)
    trainers, trainer = [], ppo.PPOTrainer
    monkeypatch.setattr(ppo, "PPOTrainer", lambda *x, **y: trainers.append(x) or trainer(*x, **y))
    flags = ["--models", tmp_path, "--data", tmp_path / "data", "--out", tmp_path / "out", *PPO]
    flags += ["--no_report", "--value_clip", 0.7]
    assert run("bench/trl_ppo.py", *flags)[0] == 0
    arguments, _, _, _, scorer, *_ = trainers[0]
    assert (arguments.cliprange, arguments.cliprange_value) == (0.2, 0.7)
    assert scorer.score(99 * torch.randn(99, 16)).max() == 0.25
    start, end = (torch.load(tmp_path / x)["model"] for x in ("sft.pt", "out/ppo.pt"))
    assert not torch.equal(start["trunk.norm.bias"], end["trunk.norm.bias"])
