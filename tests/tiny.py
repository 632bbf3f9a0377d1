"""Tensors written as literals, and models and batches small enough to look at."""

import math

import torch

from minippo import GPT, GPTConfig
from plumbing.batches import pad_completions

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
    """A rollout of responses of 1 to 6 tokens: random numbers, and `outside` the mask this one."""
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
