"""Which rows come together in a batch, and rollouts of many prompts."""

import functools
from itertools import groupby

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from minippo import rollout


@functools.lru_cache(maxsize=2)
def random_order(count, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def batch_of(rows, step, size, seed):
    """The rows of a step, by seed and step alone. In each pass every row comes once, in random
    order; a batch may go on from one pass into the next."""
    places = range(step * size, (step + 1) * size)
    epochs_and_places = [divmod(place, len(rows)) for place in places]
    return [rows[random_order(len(rows), seed, epoch)[i]] for epoch, i in epochs_and_places]


def prompt_batch(prompts, step, config):
    """The prompts of an iteration, group_size copies of each side by side; short ones first, as
    prompts of similar length are sampled together."""
    batch = batch_of(prompts, step, config.batch_size // config.group_size, config.seed)
    return [prompt for prompt in sorted(batch, key=len) for _ in range(config.group_size)]


def chunks(rows, size):
    """The rows, `size` at a time."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def similar_chunks(rows, size):
    """(prompt, answer, ...) as ids, `size` rows of similar length at a time: little padding."""
    by_length = sorted(rows, key=lambda row: len(row[0]) + max(len(ids) for ids in row[1:]))
    return chunks(by_length, size)


def similar_batches(rows, steps, size, seed):
    """A batch of rows of similar length for each step: cut out of 50 * size random rows. In each
    pass every row comes once."""
    windows = chunks(batch_of(rows, 0, len(rows), seed), 50 * size)
    batches = [batch for window in windows for batch in similar_chunks(window, size)]
    return [batch_of(batches, step, 1, seed)[0] for step in range(steps)]


def take(rows, n):
    """n of the rows, spread over all; if there are fewer, they are repeated."""
    if n < len(rows):
        return [rows[i * len(rows) // n] for i in range(n)]
    return [rows[i % len(rows)] for i in range(n)]


def join_batches(batches):
    """Batches, dicts of tensors with a row each -> one batch, padded on the right."""
    joined = {}
    for name in batches[0]:
        rows = [row for batch in batches for row in batch[name]]
        is_scalar = rows[0].dim() == 0
        joined[name] = torch.stack(rows) if is_scalar else pad_sequence(rows, batch_first=True)
    return joined


def rollout_in_pieces(policy, ref, score, prompts, config):
    """minippo.rollout for many prompts, the short ones first: at most config.sample_batch are
    sampled at once, and only those of similar length, as longer prompts are read token by token."""

    def piece_of(i):
        return i // config.sample_batch, len(prompts[i]) // config.max_new_tokens

    pieces = []
    for _, indices in groupby(range(len(prompts)), piece_of):
        piece = [prompts[i] for i in indices]
        pieces.append(rollout(policy, ref, score, piece, config))
    return join_batches(pieces)
