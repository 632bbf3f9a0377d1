"""Tensors written as literals, and models and batches small enough to look at."""

import itertools
import math

import torch

from minippo import GPT, GPTConfig, PPOConfig, compute_advantages, evaluate_actions, frozen_copy
from minippo import pad_completions

inf = math.inf
nan = math.nan
EOS = 10  # of the tiny models: ids 0 .. 9 are ordinary tokens


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def marks(*rows):
    """marks(".xx") -> [[False, True, True]]"""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def noise(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def assert_equal(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)


# Models


def stir(model, size=0.3):
    """Move every weight off its initial value: none is 0 or 1, or the same as another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return model


def tiny_gpt(vocab_size=EOS + 1, context=16, layers=2, **options):
    config = GPTConfig(vocab_size, context, layers, heads=2, channels=8, **options)
    return stir(GPT(config).double().eval())


def biased(policy, bias):
    """Raise logits of a policy: {id: by how much}."""
    offsets = f64([bias.get(i, 0.0) for i in range(policy.config.vocab_size)])
    policy.lm_head.register_forward_hook(lambda head, hidden, logits: logits + offsets)
    return policy


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def gradient(number, model):
    """Of a scalar with respect to weights(model)."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(number, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


# Batches


def random_batch(seed, outside=0.0):
    """A rollout of responses of 1 to 6 tokens: random numbers; `outside` fills the rest."""
    torch.manual_seed(seed)
    rows = []
    for n in torch.randperm(6).tolist():
        prompt = torch.randint(EOS, (1 + n % 4,)).tolist()
        rows.append((prompt, torch.randint(EOS, (1 + n,)).tolist()))
    tokens, mask = pad_completions(rows)

    def numbers(mean, std):
        return torch.where(mask, mean + std * noise(*mask.shape), outside)

    return {
        "tokens": tokens,
        "mask": mask,
        "scores": noise(6),
        "old_logprobs": numbers(-2.4, 0.4),  # near tiny_gpt()'s: some ratios are clipped
        "old_values": numbers(0.0, 1.0),
        "ref_logprobs": numbers(-2.4, 0.4),
    }


PROMPTS = [[0], [1, 0, 1], [0, 1]]  # of different lengths


def all_responses(vocab_size, horizon):
    """All that may be sampled: up to the end token (the last id) or cut off at the horizon."""
    rows = [[]]
    for _ in range(horizon):
        ended = [row for row in rows if vocab_size - 1 in row]
        going_on = [row for row in rows if vocab_size - 1 not in row]
        rows = ended + [[*row, token] for row in going_on for token in range(vocab_size)]
    return rows


class Task:
    """Random policy, reference and scores; every response to every prompt as one batch."""

    def __init__(self, vocab_size=3, horizon=3, scores=1.0, **settings):
        self.config = PPOConfig(
            whiten=False, minibatches=1, max_grad_norm=inf, vf_coef=0, **settings
        )
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
