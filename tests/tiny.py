"""Tensors written as literals, and models and batches small enough to look at."""

import itertools
import math
import random

import torch
import torch.nn.functional as F

from minippo import GPT, GPTConfig, RewardModel, Trunk, response_mask, row_lengths
from plumbing.text import pad

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


# Models


def stir(model, size=0.3):
    """Move every weight off its initial value: none is 0 or 1, or the same as another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return model


def tiny_gpt(vocab_size=EOS + 1, context=16, layers=2, critic=False, **more):
    policy = GPT(GPTConfig(vocab_size, context, layers, heads=2, channels=8, **more))
    policy.value_trunk = Trunk(policy.config) if critic else None
    return stir(policy.double().eval())


def tiny_reward_model(**more):
    config = GPTConfig(EOS + 1, 16, 2, heads=2, channels=8, **more)
    return stir(RewardModel(GPT(config)).double().eval())


def biased(policy, bias):
    """Raise logits of a policy: {id: by how much}."""
    offsets = f64([bias.get(i, 0.0) for i in range(policy.config.vocab_size)])
    policy.lm_head.register_forward_hook(lambda head, hidden, logits: logits + offsets)
    return policy


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def gradient(x, model):
    """Of x with respect to weights(model); 0 for those that x does not need."""
    more = {"retain_graph": True, "materialize_grads": True}
    return torch.cat([g.flatten() for g in torch.autograd.grad(x, [*model.parameters()], **more)])


# Batches


def all_responses(vocab_size, horizon):
    """All that may be sampled: up to the end token, the last id, or cut off at the horizon."""
    eos = vocab_size - 1
    for length in range(horizon):
        for words in itertools.product(range(eos), repeat=length):
            yield [*words, eos]
    yield from map(list, itertools.product(range(eos), repeat=horizon))


def random_batch(seed):
    """A rollout with random numbers, 0 outside the mask: 2 to 6 rows for tiny_gpt(), no two
    responses of one length; the last column or two are padding in all rows, or none is."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    B = rng.randint(2, 6)
    rows, prompt_lengths = [], []
    for length in rng.sample(range(1, 7), B):
        prompt = [rng.randrange(EOS) for _ in range(rng.randint(1, 4))]
        last = EOS if rng.random() < 0.6 else rng.randrange(EOS)
        rows.append([*prompt, *(rng.randrange(EOS) for _ in range(length - 1)), last])
        prompt_lengths.append(len(prompt))
    tokens, lengths = pad(rows)
    tokens = F.pad(tokens, (0, rng.randint(0, 2)))
    mask = response_mask(torch.tensor(prompt_lengths), lengths, tokens.shape[1])

    def numbers(mean, spread):
        x = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        return torch.where(mask, mean + spread * x, 0.0)

    return {
        "tokens": tokens,
        "mask": mask,
        "scores": torch.randn(B, generator=generator, dtype=torch.float64),
        "ended": torch.tensor([row[-1] == EOS for row in rows]),
        "old_logprobs": numbers(-2.4, 0.4),  # about those of tiny_gpt(): some ratios are clipped
        "old_values": numbers(0.0, 1.0),
        "ref_logprobs": numbers(-2.4, 0.4),
    }


def padded_otherwise(batch, columns, token, number):
    """The same rows with so many more columns, `token` in all padding, and `number` wherever a
    number means nothing."""
    mask = batch["mask"]
    padding = torch.arange(batch["tokens"].shape[1]) >= row_lengths(mask)[:, None]
    other = dict(batch)
    for name, x in batch.items():
        if name == "tokens":
            other[name] = F.pad(torch.where(padding, token, x), (0, columns), value=token)
        elif name == "mask":
            other[name] = F.pad(mask, (0, columns))
        elif x.dim() == 2:
            other[name] = F.pad(torch.where(mask, x, number), (0, columns), value=number)
    return other
