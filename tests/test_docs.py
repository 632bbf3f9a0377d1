"""What the texts say: commands that exist, links that lead somewhere, recipes that work."""

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path

from bench import compare, seeds
from data.rows import read_jsonl
from plumbing.files import write_text
from plumbing.settings import read_flags
from tiny_run import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md")]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("variations/*.py"), *ROOT.glob("examples/*.py")]


def test_every_command_of_the_texts_has_these_flags():
    docstrings = [path.read_text(encoding="utf-8").split('"""')[1] for path in SOURCES]
    text = "\n".join([*TEXTS.values(), *docstrings])
    pattern = r"(?m)python (?:-m )?((?:examples|variations)\.\w+|train_\w+\.py|evaluate\.py)(.*)"
    commands = re.findall(pattern, text)
    assert len(commands) > 20
    for program, rest in commands:
        if program != "examples.with_transformers":  # tested where transformers is installed
            module = importlib.import_module(program.removesuffix(".py"))
            names = {field.name for field in fields(module.Config)}
            assert set(re.findall(r"--(?:no-)?(\w+)", rest)) <= names, program


def test_links_lead_to_files_and_headings():
    for path, text in TEXTS.items():
        for link, heading in re.findall(r"\]\(([^)#:]+)#?([\w-]*)\)", text):
            target = path.parent / link
            assert target.exists(), f"{path}: {link}"
            if heading:
                titles = re.findall(r"(?m)^##* (.*)", target.read_text(encoding="utf-8"))
                assert heading in [x.lower().replace(" ", "-") for x in titles], heading


def test_the_manuals_recipes_write_rows(tmp_path, monkeypatch):
    [recipe] = re.findall(r"```python\n(.*?)```", TEXTS[ROOT / "docs/manual.md"], flags=re.S)
    monkeypatch.chdir(tmp_path)
    Path("reviews.csv").write_text('question,good,bad\nWhy?,"Well, so.",No.\n')
    turns = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Good day!")]
    messages = [{"role": role, "content": content} for role, content in turns]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    talk = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Help\n\nAssistant:"
    pair = {"chosen": talk + " Sure.", "rejected": talk + " Never."}
    Path("hh.jsonl").write_text(json.dumps(pair) + "\n")
    exec(recipe, {})
    chat = {"prompt": "system: Be kind.\nuser: Hello\nassistant:", "completion": " Good day!"}
    assert read_jsonl("chats/sft_train.jsonl") == [chat]
    pairs = read_jsonl("hh/pref_train.jsonl") + read_jsonl("reviews/pref_train.jsonl")
    assert len(pairs) == 2
    assert {"prompt": "Why?\n", "chosen": "Well, so.", "rejected": "No."} in pairs
    assert {"prompt": talk, "chosen": " Sure.", "rejected": " Never."} in pairs


TABLE = """\
| | judge | kl |
| --- | ---: | ---: |
| SFT | -0.400 ± 0.000 |  |
| best of 4 | 4.000 ± 0.000 |  |
| PPO | 2.900 ± 0.100 | 2.000 |
| PPO, unseen prompts | 2.000 ± 0.000 |  |"""


def test_a_table_of_results_has_means_and_standard_errors():
    rows = {}
    for policy in {"judge": 2.8, "kl": 2}, {"judge": 3.0}:
        report = {"sft": {"judge": -0.4}, "best_of_n": {"4": {"judge": 4}}}
        report |= {"policy": policy, "unseen": {"judge": 2}}
        for name, numbers in seeds.rows_of(report).items():
            rows.setdefault(name, []).append(numbers)
    assert seeds.table(rows) == TABLE


def test_all_policies_are_compared_at_one_beta(tmp_path, monkeypatch):
    def python(*words):
        commands.append(words)
        if "evaluate.py" in words:
            write_text(Path(words[1], "report.json"), '{"policy": {"kl": 2}}')

    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "python", python)
    for _ in range(2):  # the second time, all is there
        assert compare.train_and_evaluate("GRPO", "7") == {"kl": 2}
    training, evaluation = commands
    flags = " ".join(training)
    assert "--kl_coef 0.2 --seed 7 --models out/seeds/7 --out out/compare/GRPO/7" in flags
    assert evaluation == ("evaluate.py", "out/compare/GRPO/7", "--kl_coef", "0.1")


def test_every_command_of_the_tables_has_these_flags():
    for command in compare.COMMANDS.values():
        program, *flags = command.removeprefix("-m ").split()
        module = importlib.import_module(program.removesuffix(".py"))
        read_flags(module.Config, "", flags)
