"""README.md and RESULTS.md say what was measured. Run: python -m pytest tests/test_readme.py"""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import memory, real
from bench.memory import needed
from bench.results import TEXTS, splice, tables
from data.zoo import BEST, WORST, judge
from minippo import (
    GPT, GPTConfig, PPOConfig, evaluate_actions, gae, kl_adjusted_rewards, kl_per_response, ppo_update, response_mask, whiten,
)  # fmt: skip
from plumbing import fast

ROOT = Path(__file__).parents[1]
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in TEXTS}
RESULTS = json.loads((ROOT / "bench" / "results.json").read_text())


MARKERS = {
    "README.md": ["favourable", "run", "example", "files"],
    "RESULTS.md": ["systems", "seeds", "gap", "passes", "accident", "again", "cures", "ablations", "no_penalty", "hacked",
                   "real", "reviews", "judged", "memory", "memory_measured", "speed", "growth", "nanogpt", "ladder", "neighbours",
                   "ensembles", "questions"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_table_is_the_one_that_the_results_give(name):
    assert sorted(re.findall(r"<!-- (\w+) -->", TEXT[name])) == sorted(MARKERS[name] + ["snippet"] * (name == "README.md"))
    made = tables(RESULTS)
    for marker in MARKERS[name]:
        assert splice(TEXT[name], marker, made[marker]) == TEXT[name], marker


def test_the_front_door_is_short():
    assert len(TEXT["README.md"].splitlines()) <= 230


def test_the_three_graded_answers_get_these_grades():
    rows = re.findall(r"^\| (-?[\d.]+) \| (.+) \|$", TEXT["README.md"], re.M)
    assert len(rows) == 3
    for grade, answer in rows:
        assert judge("What does a bee eat?", f" {answer}") == float(grade)
    assert (WORST, BEST) == (-3, 3) and "grades from -3 to 3" in TEXT["README.md"]


def test_the_settings_shown_for_other_data_are_those_that_were_measured():
    for name, folder in (("reviews", "data/rt"), ("dialogues", "data/hh")):
        for script, flags in real.SETTINGS[name].items():
            assert f"    python {script} --data {folder} --out out/{name} {flags}\n" in TEXT["RESULTS.md"]


@pytest.mark.parametrize("rows, prompt, new", [(4, 64, 64), (1, 90, 30)])
def test_a_gradient_step_keeps_what_the_formula_of_the_memory_table_says(rows, prompt, new):
    layers, channels = 3, 128
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


@pytest.mark.parametrize("name, rows, prompt, new", [("short", memory.ROWS, memory.PROMPT, memory.NEW), ("long", 1, 884, 16)])
def test_the_memory_that_was_measured_is_what_the_formula_says_within_a_fifth(name, rows, prompt, new):
    layers, _, channels = memory.SHAPES["GPT-2"]
    for stage, measured in RESULTS["memory"][f"measured_{name}"].items():
        predicted = RESULTS["memory"]["base"] + sum(needed(layers, channels, rows, prompt, new, stage).values())
        assert abs(measured["peak"] / predicted - 1) < 0.2, stage


def prose(text):
    """A text without what is printed, computed or typed: tables, code, addresses."""
    for pattern in (r"<!-- (\w+) -->.*?<!-- /\1 -->", r"^    .*$", r"`[^`]*`", r"\]\([^)]*\)", r"arXiv:[\d.]+", r"^\|.*\|$"):
        text = re.sub(pattern, "", text, flags=re.S | re.M if "<" in pattern else re.M)
    return text


@pytest.mark.parametrize("name", TEXTS)
def test_no_measured_number_stands_in_the_prose_where_nothing_would_update_it(name):
    assert re.findall(r"(?<!Python )-?\b\d+\.\d{2,}", prose(TEXT[name])) == []


def test_the_grades_named_in_the_readme_are_those_of_the_five_seeds():
    sft, ppo = (sum(report[part]["judge"] for report in RESULTS["reports"]) / len(RESULTS["reports"]) for part in ("sft", "ppo"))
    text = " ".join(TEXT["README.md"].split())
    assert f"The SFT model gets {sft:.1f} from him on average, like the crowd; after PPO it is about {ppo:.1f}." in text


def test_what_is_said_of_the_classifier_and_of_the_neighbours_is_what_was_measured():
    x, text = RESULTS["real"]["reviews"]["judged"], " ".join(TEXT["RESULTS.md"].split())
    right, error = x["classifier"]["right"]
    others = round(right * (1 - right) / error**2)
    said = f"It has learned from {x['classifier']['reviews']:,} reviews, and is right about {100 * right:.0f} % of {others} others."
    assert said in text
    x = RESULTS["neighbours"]
    assert f"{x['responses']:,} responses, {x['steps']} iterations of {x['responses'] // x['steps']}" in text


def test_the_pictures_and_the_files_are_there():
    for text in TEXT.values():
        for path in re.findall(r"\]\(([\w./]+)\)", text):
            assert (ROOT / path).exists(), path


def test_the_snippet_works_around_a_gpt2_of_transformers():
    transformers = pytest.importorskip("transformers")
    code = TEXT["README.md"].split("<!-- snippet -->\n```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=39, eos_token_id=39)).train()
    names = {"torch": torch, "response_mask": response_mask, "gpt2": gpt2}
    exec(code, names)
    policy, prompts = names["policy"], [[1, 2, 3], [4], [5, 6], [7] * 6] * 30
    assert not gpt2.training
    with torch.no_grad():
        tokens, mask = names["sample"](gpt2, prompts, 39, max_new_tokens=8)
        logprobs, values, _ = evaluate_actions(policy, tokens, mask)
        direct = gpt2(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    for row, inside, prompt in zip(tokens.tolist(), mask.tolist(), prompts, strict=True):
        response = [token for token, is_response in zip(row[1:], inside, strict=True) if is_response]
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
    batch = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "ref_logprobs": logprobs, "values": values}
    batch |= {"advantages": whiten(advantages, mask), "returns": returns}
    optimizer = torch.optim.SGD(policy.parameters(), 0.01)
    (stats,) = ppo_update(policy, optimizer, batch, PPOConfig(batch_size=120, minibatches=1, vf_coef=0.0))
    assert abs(stats["ratio_max"] - 1) < 1e-4
    after = evaluate_actions(policy, tokens, mask)[0].detach()
    assert ((after - logprobs) * batch["advantages"]).sum() > 0
