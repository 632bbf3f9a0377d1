"""Proof without sampling: every response is listed, so that expectations are sums.

With three or four tokens and responses of at most three, J = E[score] - beta KL is a short sum, and
autograd gives its gradient. Phases 3 and 4 of minippo.py must give the same in expectation."""

import copy
import inspect
import itertools
import re

import pytest
import torch

import minippo
from minippo import PPOConfig, compute_advantages, evaluate_actions, frozen_copy, ppo_loss
from minippo import ppo_update
from plumbing.text import pad_completions
from tiny import all_responses, assert_equal, f64, gradient, inf, noise
from tiny import tiny_gpt, weights

PROMPTS = [[0], [1, 0, 1], [0, 1]]  # of different lengths, in one batch


class Task:
    """Policy and reference with random weights, every response to every prompt as one batch, and
    random scores."""

    def __init__(self, vocab_size=3, horizon=3, temperature=1.0, kl_coef=0.1):
        self.temperature, self.kl_coef = temperature, kl_coef
        self.policy, self.ref = tiny_gpt(vocab_size), frozen_copy(tiny_gpt(vocab_size))
        responses = list(all_responses(vocab_size, horizon))
        self.rows = [(prompt, response) for prompt in PROMPTS for response in responses]
        self.tokens, self.mask = pad_completions(self.rows)
        self.scores = noise(len(self.rows))

    def evaluate(self, model):
        return evaluate_actions(model, self.tokens, self.mask, self.temperature)

    def chances(self):
        """The probability of each row of the batch, given its prompt: (B, 1)."""
        return self.evaluate(self.policy)[0].detach().sum(1, keepdim=True).exp()

    def record(self, lam=1.0, old_values=None):
        """The batch as ppo_update gets it, but not whitened."""
        with torch.no_grad():
            old_logprobs, values, _ = self.evaluate(self.policy)
            ref_logprobs, _, _ = self.evaluate(self.ref)
        batch = {"tokens": self.tokens, "mask": self.mask, "scores": self.scores}
        batch |= {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        batch["old_values"] = values if old_values is None else old_values
        config = PPOConfig(kl_coef=self.kl_coef, lam=lam, whiten=False)
        return batch | compute_advantages(batch, config)

    def objective(self):
        """J, summed over the prompts: sum of p(y) (score(y) - beta log p(y) / ref(y))."""
        logprobs, ref_logprobs = (self.evaluate(x)[0].sum(1) for x in (self.policy, self.ref))
        assert_equal(logprobs.exp().sum(), f64(float(len(PROMPTS))))  # no response is missing
        return (logprobs.exp() * (self.scores - self.kl_coef * (logprobs - ref_logprobs))).sum()

    def step(self, batch, **changes):
        """How ppo_update moves the weights in a plain step of size 1: E over responses of the step
        x their tokens, because the loss is a mean over tokens, the objective a sum."""
        neutral = {"minibatches": 1, "max_grad_norm": inf, "vf_coef": 0.0}
        config = PPOConfig(temperature=self.temperature, **neutral | changes)

        def expected_loss(policy, batch, config):
            rows = [{name: x[[i]] for name, x in batch.items()} for i in range(len(self.rows))]
            return sum(row["weight"] * ppo_loss(policy, row, config)[0] for row in rows), {}

        batch = batch | {"weight": (self.chances() * self.mask).sum(1)}
        policy = copy.deepcopy(self.policy)
        optimizer = torch.optim.SGD(policy.parameters(), 1.0)
        ppo_update(policy, optimizer, batch, config, expected_loss)
        return weights(policy) - weights(self.policy)

    def in_states_visited(self, x):
        """E of the sum over the states of a response: (B, T-1) -> scalar. Which states are visited
        counts as given."""
        return torch.where(self.mask, self.chances() * x, 0.0).sum()


CASES = [
    {},
    {"vocab_size": 4, "horizon": 2, "temperature": 1.6},
    {"temperature": 0.7, "kl_coef": 2.0},
    {"kl_coef": 0.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_expected_step_climbs_score_minus_beta_kl(case):
    task = Task(**case)
    batch, exact = task.record(), gradient(task.objective(), task.policy)
    assert batch["old_values"][task.mask].std() > 0.1  # a baseline that is not constant cancels
    assert_equal(task.step(batch), exact, 1e-9)
    assert exact.norm() > 1e-3


def test_the_lines_of_reinforce_climb_the_expected_score():
    task, source = Task(kl_coef=0.0), inspect.getsource(minippo)
    (lines,) = re.findall(r"REINFORCE \(.*\n#\n((?:#     .*\n){3})", source)
    weighted = task.scores * task.chances()[:, 0] * len(task.scores)
    names = vars(minippo) | {"policy": task.policy, "prompts": [], "max_new_tokens": 3}
    names["generate"] = lambda *_: (task.tokens, task.mask, None, None)
    exec(lines.replace("#     ", ""), names | {"score": lambda *_: weighted}, made := {})
    step = gradient(-made["loss"], task.policy)
    assert_equal(step, gradient(task.objective(), task.policy), 1e-9)


def perfect_values(task):
    """V(s) = E[return | s], the mean return of all rows that pass through the state: (B, T-1).
    Where the response begins belongs to the state: so much may still be written."""
    tokens, returns, chances = task.tokens, task.record()["returns"], task.chances()[:, 0]
    values, begin = torch.zeros_like(returns), task.mask.int().argmax(1)
    for b, t in task.mask.nonzero().tolist():
        same = (tokens[:, : t + 1] == tokens[b, : t + 1]).all(1) & (begin == begin[b])
        values[b, t] = (chances[same] @ returns[same, t]) / chances[same].sum()
    return values


def test_returns_values_and_lambda_lower_the_variance_alone():
    # Section 5 of minippo.py: what multiplies grad log pi of each token, from rung to rung.
    # (The first usually does, not by a law: the rewards before a token may cancel something.)
    torch.manual_seed(1)
    task = Task(kl_coef=0.5)
    values, exact = perfect_values(task), gradient(task.objective(), task.policy)
    plain, *others = (task.record(lam, values) for lam in (1.0, 0.95, 0.5, 0.0))
    total = torch.where(task.mask, plain["rewards"].sum(1, keepdim=True), 0.0)
    rungs = [total, plain["returns"], plain["advantages"], *(x["advantages"] for x in others)]
    variances, logprobs = [], task.evaluate(task.policy)[0]
    for A in rungs:  # the gradients of single responses, then E g and E|g - E g|^2 of each prompt
        rows = [gradient(x, task.policy) for x in (A * logprobs).sum(1).tensor_split(len(A))]
        g, p = (x.view(len(PROMPTS), -1, x.shape[1]) for x in (torch.stack(rows), task.chances()))
        mean = (p * g).sum(1, keepdim=True)
        variances.append((p * (g - mean) ** 2).sum().item())
        assert_equal(mean.sum(0)[0], exact, 1e-9)
    for before, after in itertools.pairwise(variances):
        assert after < 0.99 * before


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_further_term_is_what_its_name_says(temperature):
    task = Task(kl_coef=0.0, temperature=temperature)
    (logits, values), (ref_logits, _) = (x(task.tokens[:, :-1]) for x in (task.policy, task.ref))
    policy, ref = ((x / temperature).log_softmax(-1) for x in (logits, ref_logits))
    terms = {
        "kl_loss_coef": (policy.exp() * (policy - ref)).sum(-1),
        "entropy_coef": (policy.exp() * policy).sum(-1),  # minus the entropy
        "vf_coef": 0.5 * (values - perfect_values(task)) ** 2,  # as towards the sampled returns
    }
    batch = task.record()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    for name, term in terms.items():
        exact = gradient(task.in_states_visited(term), task.policy)
        assert_equal(task.step(batch, value_clip=inf, **{name: 0.3}), -0.3 * exact, 1e-9)
        assert exact.norm() > 1e-2


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_the_kl_in_the_reward_counts_for_earlier_tokens_too(horizon):
    task = Task(horizon=horizon, kl_coef=0.3)
    task.scores = torch.zeros_like(task.scores)
    batch = task.record()
    in_reward = task.step(batch)
    assert_equal(in_reward, gradient(task.objective(), task.policy), 1e-9)  # of the whole KL
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    in_loss = task.step(batch, kl_loss_coef=0.3)  # a token is not blamed for later ones
    assert ((in_loss - in_reward).norm() < 1e-9) == (horizon == 1)
