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
from minippo import (
    GPT,
    GPTConfig,
    PPOConfig,
    evaluate_actions,
    gae,
    kl_adjusted_rewards,
    kl_per_response,
    ppo_update,
    response_mask,
    whiten,
)
from plumbing import fast

TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in TEXTS}
COMMAND = r"python (?:-m )?([\w./]*\w)((?: +[^\s`#]+)*)"


def test_each_table_is_the_one_that_the_results_give():
    made = tables(load())
    found = {name: re.findall(r"<!-- (\w+) -->", text) for name, text in TEXT.items()}
    assert {*sum(found.values(), [])} == {*made, "snippet"}
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


def test_the_snippet_works_around_a_gpt2_of_transformers():
    transformers = pytest.importorskip("transformers")
    code = TEXT["README.md"].split("<!-- snippet -->\n```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, bos_token_id=39, eos_token_id=39)
    ).train()
    names = {"torch": torch, "response_mask": response_mask, "gpt2": gpt2}
    exec(code, names)
    policy, prompts = names["policy"], [[1, 2, 3], [4], [5, 6], [7] * 6] * 30
    assert not gpt2.training
    with torch.no_grad():
        tokens, mask = names["sample"](gpt2, prompts, 39, max_new_tokens=8)
        logprobs, values, _ = evaluate_actions(policy, tokens, mask)
        direct = (
            gpt2(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        )
    for row, inside, prompt in zip(tokens.tolist(), mask.tolist(), prompts, strict=True):
        response = [
            token for token, is_response in zip(row[1:], inside, strict=True) if is_response
        ]
        assert row[: len(prompt)] == prompt and inside[len(prompt) - 1] and 39 not in response[:-1]
        assert len(response) == 8 or response[-1] == 39
    torch.testing.assert_close(logprobs[mask], direct[mask])
    # The samples are those of the full distribution: k1 and k3 against any other model agree on average.
    other = torch.log_softmax(torch.randn(40), -1)[tokens[:, 1:]]
    k1, k3 = kl_per_response(logprobs, other, mask)
    assert abs(k1.mean() - k3.mean()) < 5 * (k1 - k3).std() / len(k1) ** 0.5
    assert len(set(tokens[:, 1:][mask].tolist())) == 40  # nothing is cut off
    # And an update of minippo trains it.
    rewards = kl_adjusted_rewards(-mask.sum(1).float(), logprobs, logprobs, mask, 0.1)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    batch = {"tokens": tokens, "mask": mask, "old_logprobs": logprobs, "ref_logprobs": logprobs}
    batch |= {"old_values": values, "whitened": whiten(advantages, mask), "returns": returns}
    optimizer = torch.optim.SGD(policy.parameters(), 0.01)
    (stats,) = ppo_update(policy, optimizer, batch, PPOConfig(minibatches=1, vf_coef=0.0))
    assert abs(stats["ratio_max"] - 1) < 1e-4
    after = evaluate_actions(policy, tokens, mask)[0].detach()
    assert ((after - logprobs) * batch["whitened"]).sum() > 0
