"""What README.md and RESULTS.md say can be typed, and was measured.

Run: python -m pytest tests/test_readme.py
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import minippo
from bench import ladder
from bench.memory import SHAPES, computed, needed
from bench.tables import ROOT, TEXTS, load, splice, tables
from cli import run
from minippo import (
    GPT,
    GPTConfig,
    RewardModel,
    evaluate_actions,
    frozen_copy,
    gae,
    generate,
)
from plumbing import fast
from train_ppo import StageConfig

TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in TEXTS}
COMMAND = r"python (?:-m )?([\w./]*\w)((?: +[^\s`#]+)*)"


def test_each_table_is_the_one_that_the_results_give():
    made = tables(load())
    found = {name: re.findall(r"<!-- (\w+) -->", text) for name, text in TEXT.items()}
    assert {*sum(found.values(), [])} == {*made}
    for text in TEXT.values():
        for marker in made:
            assert splice(text, marker, made[marker]) == text, marker


def commands():
    """{script: the flags that the texts give it}"""
    found = {}
    for script, flags in re.findall(COMMAND, "\n".join(TEXT.values())):
        if script.endswith(".py") or script.split(".")[0] in ("bench", "variations", "plumbing"):
            path = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
            found.setdefault(path, set()).update(re.findall(r"--\w+", flags))
    return found


@pytest.mark.parametrize("script, flags", commands().items())
def test_every_command_is_there_and_knows_its_flags(script, flags):
    assert (ROOT / script).exists()
    if flags:
        status, printed, error = run(script, "-h")
        assert status == 0, error
        assert flags <= {*re.findall(r"--\w+", printed)}


def test_the_pictures_and_the_files_are_there():
    for text in TEXT.values():
        for path in re.findall(r"\]\(([\w./]+)\)", text):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("rows, prompt, new", [(4, 64, 64), (1, 90, 30)])
def test_a_gradient_step_keeps_what_the_formula_of_the_memory_table_says(rows, prompt, new):
    layers, channels = 6, 128
    policy = GPT(GPTConfig(257, 128, layers, heads=2, channels=channels)).eval()
    weights, kept = {p.data_ptr() for p in policy.parameters()}, {}

    def keep(x):
        if x.data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.randint(256, (rows, prompt + new))
    mask = torch.arange(prompt + new - 1).expand(rows, -1) >= prompt - 1
    if rows == 1:  # with padding, since a row that fills the grid is not packed, and keeps less
        tokens, mask = F.pad(tokens, (0, 20)), F.pad(mask, (0, 20))
    fast.install()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs, values, _ = evaluate_actions(policy, tokens, mask, with_entropy=False)
    expected = needed(layers, channels, rows, prompt, new)["activations"]
    logits = 4 * rows * new * 257
    assert sum(kept.values()) - logits == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_memory_is_what_the_formula_gives(name):
    layers, heads, channels = SHAPES[name]
    known, row = load()["memory"][name], computed(0, layers, channels)
    base = known["total"] - row["total"]  # of an empty process
    assert 1e8 < base < 5e8
    for figure, x in row.items():
        x += base if "total" in figure else 0
        assert known[figure] == pytest.approx(x, rel=1e-4), figure
    with torch.device("meta"):
        model = GPT(GPTConfig(50257, 1024, layers, heads, channels))
    assert row["parameters"] == sum(x.numel() for x in model.parameters())
    assert row["four_models"] == 24 * row["parameters"]


def test_the_ladder_of_variance_is_the_one_of_the_table():
    rungs = ladder.ladder(*ladder.task(vocab_size=4, horizon=4, seed=0), kl_coef=0.5)
    assert rungs.keys() == load()["ladder"].keys()
    for name, rung in load()["ladder"].items():
        assert rungs[name]["variance"] == pytest.approx(rung["variance"], rel=1e-4)
        assert rungs[name]["bias"] < 1e-9


EXERCISES = (ROOT / "tests" / "EXERCISES.md").read_text(encoding="utf-8")


def test_the_expressions_of_the_exercises_choose_tests_of_the_function():
    source = (ROOT / "tests" / "test_minippo.py").read_text(encoding="utf-8")
    tests = re.findall(r"(?m)^def (test_\w+)\((?:.|\n)*?(?=^def |\Z)", source)
    bodies = dict(re.findall(r"(?m)^def (test_\w+)(\((?:.|\n)*?)(?=^@|^def |\Z)", source))
    rows = re.findall(r"(?m)^\| `(\w+)` \| `(.+)` \|$", EXERCISES)
    assert len(rows) == 13
    for function, expression in rows:
        chosen = [[name for name in tests if part in name] for part in expression.split(" or ")]
        assert all(chosen) and any(function in bodies[x] for x in sum(chosen, [])), function


def test_the_tests_and_the_bugs_that_the_texts_name_are_there():
    files = ("test_minippo.py", "test_exact.py", "mutants/catalogue.py")
    source = "".join((ROOT / "tests" / name).read_text(encoding="utf-8") for name in files)
    names = re.findall(r"`(test_\w+)`", EXERCISES)
    assert len(names) == 15 and all(f"def {name}(" in source for name in names)
    bugs = re.findall(r'the bug ("[^"]+")', EXERCISES)
    assert len(bugs) == 3 and all(f"{bug},\n" in source for bug in bugs)


def test_the_loop_with_faults_runs():
    (code,) = re.findall(r"```python\n(.*?)```", EXERCISES, re.DOTALL)
    torch.manual_seed(0)
    config = GPTConfig(27, context=60, layers=1, channels=16, heads=2)
    sft_model = GPT(config)
    names = {"config": config, "sft_model": sft_model, "reward_model": RewardModel(sft_model)}
    names |= {"batches": [[[1], [2, 3]]], "beta": 0.1, "torch": torch, "GPT": GPT}
    setup, loop = code.split("for prompts in", 1)
    names |= {f.__name__: f for f in (frozen_copy, generate, evaluate_actions, gae)}
    exec(setup, names)
    names["optimizer"] = torch.optim.AdamW(names["policy"].parameters(), 1e-3)
    exec("for prompts in" + loop, names)
    assert torch.isfinite(names["policy_term"]) and names["ratio"].shape == names["mask"].shape


def test_uv_installs_what_the_project_installs():
    text = (ROOT / "minippo.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?m)^# /// script\n((?:# .*\n)*?)# ///$", text)
    needed = re.findall(r'"([\w.=>]+)"', block.split("dependencies")[1])
    assert len(needed) == 2 and {*needed} <= {*(ROOT / "requirements.txt").read_text().split()}
    assert 'requires-python = ">=3.10"' in block


def test_the_defaults_are_those_of_the_runs_that_the_texts_report():
    stage = StageConfig()
    sampled = f"{stage.steps * stage.batch_size:,} in train_ppo.py"
    assert sampled == "57,600 in train_ppo.py" and sampled in Path(minippo.__file__).read_text()
    said = " ".join(run("train_rm.py", "-h")[1].split())
    assert "--max_steps int" in said and all(x in said for x in ("(1950)", "(0.99)", "(2048)"))
    assert "(0.003)" in " ".join(run("train_sft.py", "-h")[1].split())
    assert stage == StageConfig(
        450, 128, 1, lr=8e-4, warmup=5, head_lr=30.0, adam_eps=1e-4, kl_target=6.0
    )
