"""Tensors written as literals, and models and batches small enough to look at."""

import itertools
import math
import random

import torch
import torch.nn.functional as F

from minippo import GPT, GPTConfig, RewardModel, row_lengths
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


def tiny_reward_model():
    return stir(RewardModel(tiny_gpt()).double().eval())


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


def all_responses(vocab_size, horizon):
    """All that may be sampled: up to the end token (the last id) or cut off at the horizon."""
    eos = vocab_size - 1
    for length in range(horizon):
        for words in itertools.product(range(eos), repeat=length):
            yield [*words, eos]
    for words in itertools.product(range(eos), repeat=horizon):
        yield list(words)


def random_batch(seed):
    """A rollout with random numbers, 0 outside the mask: 2 to 6 rows for tiny_gpt(), no two
    responses of one length. The last columns may be padding in all rows."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    B = rng.randint(2, 6)
    rows = []
    for length in rng.sample(range(1, 7), B):
        prompt = rng.choices(range(EOS), k=rng.randint(1, 4))
        response = rng.choices(range(EOS), k=length)
        if rng.random() < 0.6:
            response[-1] = EOS
        rows.append((prompt, response))
    tokens, mask = pad_completions(rows)
    columns = rng.randint(0, 2)
    tokens = F.pad(tokens, (0, columns))
    mask = F.pad(mask, (0, columns))

    def numbers(mean, std):
        x = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        return torch.where(mask, mean + std * x, 0.0)

    return {
        "tokens": tokens,
        "mask": mask,
        "scores": torch.randn(B, generator=generator, dtype=torch.float64),
        "ended": torch.tensor([response[-1] == EOS for _, response in rows]),
        "old_logprobs": numbers(-2.4, 0.4),  # near tiny_gpt()'s: some ratios are clipped
        "old_values": numbers(0.0, 1.0),
        "ref_logprobs": numbers(-2.4, 0.4),
    }


def padded_otherwise(batch, columns, token, number):
    """The same rows with more columns, `token` in all padding, `number` outside the mask."""
    mask = batch["mask"]
    padding = torch.arange(batch["tokens"].shape[1]) >= row_lengths(mask)[:, None]
    other = dict(batch)
    other["tokens"] = F.pad(batch["tokens"].masked_fill(padding, token), (0, columns), value=token)
    other["mask"] = F.pad(mask, (0, columns))
    for name, x in batch.items():
        if x.shape == mask.shape and x.is_floating_point():
            other[name] = F.pad(x.masked_fill(~mask, number), (0, columns), value=number)
    return other
