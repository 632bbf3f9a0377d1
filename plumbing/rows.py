"""Rows of text as rows of token ids: encoding, padding, batches."""

import functools
import math
import time

import numpy as np
import torch

from data.files import UserError
from data.rows import read_rows
from minippo import response_mask


def encode_rows(rows, tokenizer, context):
    """Rows of a prompt and completions -> the same as lists of ids; says what was skipped or cut.

    Prompt and completions are encoded apart, so that no token crosses the border; a completion gets
    its end token. A prompt that leaves no room in the context skips the row; a completion that does
    not fit is cut (and has no end), and a pair whose answers are then the same is skipped.
    """
    encoded, longest, full, cut, equal = [], 0, 0, 0, 0
    for prompt, *completions in rows:
        prompt = tokenizer.encode(prompt)
        whole = [tokenizer.encode(completion) + [tokenizer.eos] for completion in completions]
        longest = max(longest, len(prompt) + max(map(len, whole), default=1))
        if not 0 < len(prompt) < context:
            full += 1
            continue
        kept = [ids[: context - len(prompt)] for ids in whole]
        if len(kept) == 2 and kept[0] == kept[1]:
            equal += 1
            continue
        cut += kept != whole
        encoded.append((prompt, *kept))
    notes = {
        "skipped: the prompt is empty or leaves no room in the context": full,
        "skipped: the two answers are the same": equal,
        "cut at the end of the context": cut,
    }
    for note, count in notes.items():
        if count:
            print(f"    {count:,} {note}")
    if longest > context:
        print(
            f"    the longest has {longest} tokens, the context {context} (train_sft.py --context)"
        )
    if not encoded:
        raise UserError(f"no row fits into a context of {context} tokens; train with a larger one")
    return encoded


def read_ids(folder, task, split, tokenizer, context):
    """The rows of a data folder (data/rows.py) as lists of ids."""
    return encode_rows(read_rows(folder, task, split), tokenizer, context)


def read_prompts(folder, split, tokenizer, context):
    """The prompts of a data folder: lists of ids."""
    return [ids for (ids,) in read_ids(folder, "prompts", split, tokenizer, context)]


def pad(sequences, device="cpu"):
    """B lists of ids -> tokens (B, T), rows padded on the right, and lengths (B,)."""
    lengths = [len(ids) for ids in sequences]
    tokens = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in sequences])
    return tokens.to(device), torch.tensor(lengths, device=device)


def pad_completions(rows, device="cpu"):
    """Rows of (prompt, completion) as ids -> tokens (B, T), and the completions' mask, (B, T-1)."""
    tokens, lengths = pad([prompt + completion for prompt, completion in rows], device)
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rows], device=device)
    return tokens, response_mask(prompt_lengths, lengths, tokens.shape[1])


@functools.lru_cache(maxsize=2)
def shuffled(count, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def batch_of(rows, step, batch_size, seed):
    """The batch of step 0, 1, 2, ...: in each pass over the rows every row comes once, in random
    order; a batch may go on from one pass into the next."""
    count = len(rows)
    places = range(step * batch_size, (step + 1) * batch_size)
    return [rows[shuffled(count, seed, place // count)[place % count]] for place in places]


def spread_over(rows, n):
    """At most n of the rows, spread over all."""
    return rows[:: max(1, math.ceil(len(rows) / n))]


def count_tokens(rows):
    """Rows (tuples of lists of ids) -> how many tokens they have."""
    return sum(len(ids) for row in rows for ids in row)


def in_parts(rows, size, what=""):
    """Yield the rows in parts of `size`. Where `what` names them, say every few seconds how many
    are done, so that nobody waits in silence."""
    start = shown = time.perf_counter()
    for i in range(0, len(rows), size):
        yield rows[i : i + size]
        now, done = time.perf_counter(), min(i + size, len(rows))
        if what and now - shown > 4:
            left = (now - start) / done * (len(rows) - done)
            print(f"    {done:,} of {len(rows):,} {what}, {left:.0f} s left", flush=True)
            shown = now
