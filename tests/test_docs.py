"""What the texts say: commands that exist, links that lead somewhere, recipes that work."""

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from bench import fill, run
from data.rows import read_rows
from plumbing.settings import read_flags

ROOT = Path(__file__).parents[1]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
TEXTS |= {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")}
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("variations/*.py"), *ROOT.glob("examples/*.py")]
DOCSTRINGS = "\n".join(path.read_text(encoding="utf-8").split('"""')[1] for path in SOURCES)


def commands():
    """(module, flags) of each line of a text that runs one of the programs."""
    text = "\n".join(TEXTS.values()) + DOCSTRINGS
    pattern = r"(?m)python (?:-m )?((?:examples|variations)\.\w+|train_\w+\.py|evaluate\.py)(.*)"
    for program, rest in re.findall(pattern, text):
        yield program.removesuffix(".py"), re.findall(r"--(\w+)", rest)


def test_every_command_of_the_texts_has_these_flags():
    found = list(commands())
    assert len(found) > 20
    for module, flags in found:
        if module == "examples.with_transformers":  # tested where transformers is installed
            continue
        config = importlib.import_module(module).Config
        names = {field.name for field in fields(config)}
        names |= {f"no_{name}" for name in names}
        assert set(flags) <= names, module


def test_links_lead_to_files():
    for name, text in TEXTS.items():
        folder = ROOT if (ROOT / name).exists() else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / link).exists(), f"{name}: {link}"


def test_the_tests_that_the_exercises_name_exist():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py"))
    for name in set(re.findall(r"`(test_\w+)`", TEXTS["EXERCISES.md"])):
        assert f"def {name}(" in tests, name


def test_the_manuals_recipes_write_rows_that_the_scripts_read(tmp_path, monkeypatch):
    (recipe,) = re.findall(r"```python\n(.*?)```", TEXTS["manual.md"], flags=re.S)
    monkeypatch.chdir(tmp_path)
    Path("reviews.csv").write_text('question,good,bad\nWhy?,"Well, so.",No.\nHow?,Like this.,Eh.\n')
    turns = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Good day!")]
    messages = [{"role": role, "content": content} for role, content in turns]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    talk = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Help\n\nAssistant:"
    pair = {"chosen": talk + " Sure.", "rejected": talk + " Never."}
    Path("hh.jsonl").write_text(json.dumps(pair) + "\n")
    exec(recipe, {})
    pairs = read_rows(Path(), "pref", "train") + read_rows(Path(), "pref", "val")
    assert {"prompt": talk, "chosen": " Sure.", "rejected": " Never."} in pairs
    assert {"prompt": "Why?\n", "chosen": "Well, so.", "rejected": "No."} in pairs
    row = json.loads(Path("sft_train.jsonl").read_text())
    assert row["prompt"] == "system: Be kind.\nuser: Hello\nassistant:"
    assert row["completion"] == " Good day!"


@pytest.mark.parametrize(
    "name, prompts, completions, scores",
    [
        ("examples.sums", ["2 + 3 =", "36 + 31 ="], [" 5", " 66"], [1.0, 0.0]),
        ("examples.sums", ["2 + 3 ="], ["5"], [0.0]),
    ],
)
def test_the_sums_are_scored_by_arithmetic(name, prompts, completions, scores):
    score = importlib.import_module(name).score
    assert score(prompts=prompts, completions=completions, completion_ids=[]) == scores


def test_a_table_of_results_has_means_and_standard_errors():
    rows = {
        "SFT": {"0": {"judge": -0.4}},
        "PPO": {"0": {"judge": 2.8, "kl": 2.0}, "1": {"judge": 3.0, "kl": 2.5}},
    }
    assert fill.table(rows).splitlines() == [
        "| | judge | kl |",
        "| --- | ---: | ---: |",
        "| SFT | -0.400 |  |",
        "| PPO | 2.900 ± 0.100 | 2.250 ± 0.250 |",
    ]


def test_the_rows_of_the_bench_are_commands_with_flags_that_exist():
    for rows in run.TABLES.values():
        for command in rows.values():
            module = command[1] if command[0] == "-m" else command[0].removesuffix(".py")
            config_class = importlib.import_module(module).Config
            first = 2 if command[0] == "-m" else 1
            read_flags(config_class, "", command[first:])


def test_a_report_becomes_rows_with_what_the_run_began_as():
    report = {"sft": {"judge": 0}, "policy": {"judge": 2}, "unseen": {"judge": 1}}
    report["best_of_n"] = {n: {"judge": int(n)} for n in ("4", "16", "64")}
    rows = fill.rows_of("seeds", {"PPO": {"0": report}})
    found = {label: row["0"]["judge"] for label, row in rows.items()}
    names = ["SFT", "PPO", "best of 4", "best of 16", "best of 64", "PPO, unseen prompts"]
    assert found == dict(zip(names, [0, 2, 4, 16, 64, 1]))
