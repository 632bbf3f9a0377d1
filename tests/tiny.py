"""What several test files need: tensors written as literals, and models small enough to look at."""

import math

import torch

from minippo import GPT, GPTConfig, RewardModel

inf, nan = math.inf, math.nan
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


def stir(model, size=0.3):
    """Move every weight off its initial value, so that no part of the model is zero, one, or the same as another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return model


def tiny_gpt(vocab_size=EOS + 1, context=16, layers=2, **more):
    return stir(GPT(GPTConfig(vocab_size, context, layers, heads=2, channels=8, **more)).double().eval())


def tiny_reward_model(**more):
    return stir(RewardModel(GPTConfig(EOS + 1, 16, 2, heads=2, channels=8, **more)).double().eval())


def biased(policy, bias):
    """A policy whose logit of each token is raised: {id: by how much}."""
    head = torch.nn.Linear(policy.config.channels, policy.config.vocab_size).to(policy.lm_head.weight)
    head.weight.data.copy_(policy.lm_head.weight)
    head.bias.data.copy_(f64([bias.get(i, 0.0) for i in range(policy.config.vocab_size)]))
    policy.lm_head = head
    return policy


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])
