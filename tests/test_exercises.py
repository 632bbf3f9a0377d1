"""tests/EXERCISES.md"""

import re
from pathlib import Path

import torch

import minippo
from minippo import GPT, GPTConfig, RewardModel

TESTS = Path(__file__).parent
TEXT = (TESTS / "EXERCISES.md").read_text(encoding="utf-8")
REPAIRS = {
    "temperature=0.7": "temperature=1.0",
    "everywhere)": "row_lengths(mask))",
    "torch.where(mask, scores[:, None] - beta * kl, 0.0)": "kl_adjusted_rewards("
    "scores, old_logprobs, ref_logprobs, mask, beta)",
    "(advantages - advantages.mean()) / advantages.std()": "whiten(advantages, mask)",
    "(logprobs - ref_logprobs).exp()": "(logprobs - old_logprobs).exp()",
    "torch.max": "torch.min",
}


def test_the_tests_that_it_names_are_there():
    source = "".join(path.read_text(encoding="utf-8") for path in TESTS.glob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", TEXT)
    assert names and all(f"def {name}(" in source for name in names)


def test_repaired_the_loop_runs_and_its_ratio_starts_at_1():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for fault, repair in REPAIRS.items():
        assert code.count(fault) == 1
        code = code.replace(fault, repair)
    sft_model = GPT(GPTConfig(27, context=60, layers=1, channels=16, heads=2))
    names = vars(minippo) | {"config": sft_model.config, "sft_model": sft_model, "ratios": []}
    names |= {"reward_model": RewardModel(sft_model), "batches": [[[1], [2, 3]]], "beta": 0.1}
    setup, loop = code.split("for prompts in", 1)
    exec(setup, names)
    names["optimizer"] = torch.optim.AdamW(names["policy"].parameters(), 1e-3)
    exec("for prompts in" + loop + "        ratios.append(ratio[mask].detach())", names)
    first, *others = names["ratios"]
    torch.testing.assert_close(first, torch.ones_like(first))
    assert len(others) == 3
    assert all(not torch.equal(a, b) for a, b in zip(names["ratios"], others))
