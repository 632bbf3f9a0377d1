"""Proof without sampling: of few tokens all responses can be listed, so the objective J is a short
sum with an exact gradient. And numbers of TRL."""

import copy
import inspect
import itertools
import re
from dataclasses import replace

import pytest
import torch

import minippo
from minippo import PPOConfig, compute_advantages, evaluate_actions, frozen_copy, gae
from minippo import kl_adjusted_rewards, policy_loss, ppo_loss, ppo_update, value_loss, whiten
from plumbing.batches import pad_completions
from tiny import all_responses, assert_equal, f64, gradient, inf, marks, noise, tiny_gpt, weights

PROMPTS = [[0], [1, 0, 1], [0, 1]]  # of different lengths
CASES = [(1.0, 0.1, 2, 1.0), (1.0, 0.0, 3, 1.6), (0.0, 0.3, 2, 1.0), (1.0, 2.0, 1, 0.7)]


class Task:
    """Random policy, reference and scores; every response to every prompt as one batch."""

    def __init__(self, vocab_size=3, horizon=3, scores=1.0, **settings):
        neutral = {"whiten": False, "minibatches": 1, "max_grad_norm": inf, "vf_coef": 0.0}
        self.config = PPOConfig(value_clip=inf, **neutral | settings)
        self.policy = tiny_gpt(vocab_size)
        self.ref = frozen_copy(tiny_gpt(vocab_size))
        rows = itertools.product(PROMPTS, all_responses(vocab_size, horizon))
        self.tokens, self.mask = pad_completions(list(rows))
        self.scores = scores * noise(len(self.tokens))

    def evaluate(self, model):
        return evaluate_actions(model, self.tokens, self.mask, self.config.temperature)

    def chances(self):
        """The probability of each row, given its prompt: (B, 1)."""
        return self.evaluate(self.policy)[0].detach().sum(1, keepdim=True).exp()

    def record(self):
        """The batch as ppo_update gets it."""
        old_logprobs, old_values = self.evaluate(self.policy)
        batch = {"tokens": self.tokens, "mask": self.mask, "scores": self.scores}
        batch |= {"old_logprobs": old_logprobs.detach(), "old_values": old_values.detach()}
        batch["ref_logprobs"] = self.evaluate(self.ref)[0]
        return batch | compute_advantages(batch, self.config)

    def objective(self):
        """J, summed over the prompts: sum of p(y) (score(y) - beta log p(y) / q(y))."""
        log_p = self.evaluate(self.policy)[0].sum(1)
        assert_equal(log_p.exp().sum(), f64(3.0))  # none is missing
        kl = log_p - self.evaluate(self.ref)[0].sum(1)
        return (log_p.exp() * (self.scores - self.config.kl_coef * kl)).sum()

    def in_states_visited(self, x):
        """E of the sum over a response."""
        return (self.chances() * x)[self.mask].sum()

    def step(self, batch):
        """How a plain step of ppo_update moves the weights, if the loss is the expected one. Times
        the number of tokens: the loss is a mean over them, J a sum."""

        def expected_loss(logprobs, values, batch, config):
            losses, stats = ppo_loss(logprobs, values, batch, config)
            return losses * batch["chances"], stats

        policy = copy.deepcopy(self.policy)
        optimizer = torch.optim.SGD(policy.parameters(), 1.0)
        batch = batch | {"chances": self.chances()}
        ppo_update(policy, optimizer, batch, self.config, expected_loss)
        return (weights(policy) - weights(self.policy)) * self.mask.sum()


@pytest.mark.parametrize("scores, beta, horizon, temperature", CASES)
def test_the_expected_step_climbs_score_minus_beta_kl(scores, beta, horizon, temperature):
    task = Task(4, horizon, scores, kl_coef=beta, temperature=temperature)
    exact = gradient(task.objective(), task.policy)
    batch = task.record()
    assert_equal(task.step(batch), exact, 1e-9)
    assert batch["old_values"][task.mask].std() > 0.1  # a baseline that is not constant cancels


def test_the_lines_of_reinforce_climb_the_expected_score():
    task = Task(kl_coef=0.0)
    (lines,) = re.findall(
        r"REINFORCE \(Williams.*\n#\n((?:#     .*\n){4})", inspect.getsource(minippo)
    )
    names = vars(minippo) | {"policy": task.policy, "prompts": [], "max_new_tokens": 3}
    names["generate"] = lambda *_: (task.tokens, task.mask)
    names["score"] = lambda *_: task.scores * task.chances()[:, 0] * len(task.scores)
    exec(lines.replace("#     ", ""), names)
    step = gradient(-names["loss"], task.policy)
    assert_equal(step, gradient(task.objective(), task.policy), 1e-9)


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


def test_values_learn_the_expected_returns():
    task = Task(temperature=0.7, vf_coef=0.3)
    batch = task.record()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    errors = (task.evaluate(task.policy)[1] - perfect_values(task)) ** 2 / 2
    exact = gradient(task.in_states_visited(errors), task.policy)
    assert_equal(task.step(batch), -0.3 * exact, 1e-9)


def test_rewards_advantages_and_losses_are_those_of_trl():
    # PPOTrainer.train of trl 1.12.0 with kl_coef 0.5, gamma 0.9, lam 0.8 and both clips 0.2
    mask = marks("xxxx")
    old_logprobs = f64([[-1.0, -0.5, -2.0, -0.1]])
    ref_logprobs = f64([[-1.3, -0.4, -1.5, -0.3]])
    old_values = f64([[0.5, 0.1, -0.3, 0.2]])
    rewards = kl_adjusted_rewards(f64([1.0]), old_logprobs, ref_logprobs, mask, 0.5)
    assert_equal(rewards, f64([[-0.15, 0.05, 0.25, 0.9]]))
    advantages, returns = gae(rewards, old_values, mask, 0.9, 0.8)
    assert_equal(returns, f64([[0.3493056, 0.66848, 0.934, 0.9]]))
    whitened = f64([[-1.29505713, -0.03413039, 1.13272421, 0.19646331]])
    assert_equal(whiten(advantages, mask) * 0.75**0.5, whitened, 2e-5)  # sample deviation
    losses, _ = policy_loss(f64([[-0.6, -0.4, -2.5, -0.4]]), old_logprobs, whitened, 0.2)
    value_losses, _ = value_loss(f64([[0.9, 0.0, -0.2, -0.4]]), old_values, returns, 0.2)
    assert_equal(losses.mean(), f64(0.28428564), 1e-8)
    assert_equal(value_losses.mean(), f64(0.46576073), 1e-8)
