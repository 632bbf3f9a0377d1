"""What README.md and RESULTS.md say can be typed, and was measured.

Run: python -m pytest tests/test_readme.py
"""

import re

import pytest
import torch
import torch.nn.functional as F

from bench.memory import needed
from bench.tables import ROOT, TEXTS, load, splice, tables
from cli import run
from minippo import GPT, GPTConfig, evaluate_actions
from plumbing import fast

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
