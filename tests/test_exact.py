"""Proof without sampling: of few tokens all responses can be listed, so the objective J is a short
sum with an exact gradient. And numbers of TRL."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from minippo import PPOConfig, compute_advantages, gae, ppo_loss
from minippo import ppo_update
from tiny import Task, assert_equal, f64, gradient, marks, nan, weights

CASES = [(1, 0.1, 2, 1), (1, 0, 3, 1.6), (0, 0.3, 2, 1), (1, 2, 1, 0.7)]


@pytest.mark.parametrize("scores, beta, horizon, temperature", CASES)
def test_the_expected_step_climbs_score_minus_beta_kl(scores, beta, horizon, temperature):
    task = Task(4, horizon, scores, kl_coef=beta, temperature=temperature)
    exact = gradient(task.objective(), task.policy)
    batch = task.record()
    batch["advantages"] *= task.chances()  # so the loss is the expected one
    policy = copy.deepcopy(task.policy)
    ppo_update(policy, torch.optim.SGD(policy.parameters(), 1.0), batch, task.config)
    step = weights(policy) - weights(task.policy)
    assert_equal(step * task.mask.sum(), exact, 1e-9)  # the loss is a mean over tokens, J a sum
    assert batch["old_values"][task.mask].std() > 0.1  # a baseline that is not constant cancels


def perfect_values(task):
    """V(s) = E[return | s]: (B, T-1). Where the response begins belongs to the state."""
    tokens, returns, chances = task.tokens, task.record()["returns"], task.chances()[:, 0]
    values = torch.zeros_like(returns)
    begin = task.mask.int().argmax(1)
    for b, t in task.mask.nonzero().tolist():
        same = (tokens[:, : t + 1] == tokens[b, : t + 1]).all(1) & (begin == begin[b])
        values[b, t] = chances[same] @ returns[same, t] / chances[same].sum()
    return values


def test_returns_values_and_lambda_lower_the_variance_alone():
    # From change to change in section 5. (The first need not help every time.)
    torch.manual_seed(1)
    task = Task(kl_coef=0.5)
    batch = task.record()
    multipliers = [batch["rewards"].sum(1, keepdim=True), batch["returns"]]  # of grad log pi
    batch["old_values"] = perfect_values(task)
    for lam in (1.0, 0.95, 0.5, 0.0):
        config = replace(task.config, lam=lam)
        multipliers.append(compute_advantages(batch, config)["advantages"])
    exact = gradient(task.objective(), task.policy)
    logprobs, _ = task.evaluate(task.policy)
    p = task.chances().view(3, -1, 1)
    variances = []
    for A in multipliers:
        # The gradients of single responses, then E g and E|g - E g|^2 of each prompt
        g = torch.stack([gradient(x, task.policy) for x in (A * logprobs).sum(1)])
        g = g.unflatten(0, (3, -1))
        mean = (p * g).sum(1, keepdim=True)
        variances.append((p * (g - mean) ** 2).sum().item())
        assert_equal(mean.sum(0)[0], exact, 1e-9)
    for before, after in itertools.pairwise(variances):
        assert after < 0.99 * before


def test_rewards_advantages_and_losses_are_those_of_trl():
    # PPOTrainer.train of trl 1.12.0 with kl_coef 0.5, gamma 0.9, lam 0.8 and both clips 0.2. The
    # response stands after three prompts, and nothing outside the mask matters.
    mask = marks("xxxx..", ".xxxx.", "..xxxx")
    config = PPOConfig(kl_coef=0.5, gamma=0.9, lam=0.8, clip_eps=0.2, value_clip=0.2, vf_coef=0.1)

    def rows(*numbers):
        return torch.full(mask.shape, nan).double().masked_scatter(mask, f64(numbers * 3))

    batch = {"scores": f64([1.0] * 3), "mask": mask, "old_values": rows(0.5, 0.1, -0.3, 0.2)}
    batch["old_logprobs"] = rows(-1.0, -0.5, -2.0, -0.1)
    batch["ref_logprobs"] = rows(-1.3, -0.4, -1.5, -0.3)
    expected = {
        "rewards": rows(-0.15, 0.05, 0.25, 0.9),
        "returns": rows(0.3493056, 0.66848, 0.934, 0.9),
        "advantages": rows(-1.29505713, -0.03413039, 1.13272421, 0.19646331),
    }
    numbers = compute_advantages(batch, config)
    numbers["advantages"] *= 0.75**0.5  # trl divides by the deviation of a sample
    for name, x in expected.items():
        assert_equal(numbers[name][mask], x[mask], 2e-5)
        assert not numbers[name][~mask].any()
    _, returns = gae(expected["rewards"], batch["old_values"], mask, 0.9, 0.8)
    assert_equal(returns, numbers["returns"])
    logprobs = rows(-0.6, -0.4, -2.5, -0.4).requires_grad_()
    values = rows(0.9, 0.0, -0.2, -0.4)
    losses, _ = ppo_loss(logprobs, values, batch | expected, config)
    assert_equal(losses.detach()[mask].mean(), f64(0.28428564 + 0.1 * 0.46576073), 1e-8)
