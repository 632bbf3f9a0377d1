"""Text as token ids, and back: the tokenizer, rows as ids, batches.

Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2) learns a
vocabulary from the data at hand: it starts from the 256 single bytes, and repeatedly merges the
most frequent pair of neighbours into one new token.
"""

import functools
import math
import zlib
from collections import Counter, defaultdict

import numpy as np
import regex
import tiktoken
import torch

from data.rows import UserError, read_rows

# How GPT-2 cuts text into words before any merging; no token spans two of these. (999: tiktoken
# fails at a million spaces.)
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s{1,999}(?!\S)|\s{1,999}"
LONGEST_WORD = 64  # characters; longer words teach nothing, and take long


class Tokenizer:
    """Text to token ids and back. `tokens` holds the bytes of each token in the order of the ids.

    One more id follows, `eos`: end-of-text, which ends every response. `encode` never produces it,
    whatever the text says, so that nothing a user types can end a document.
    """

    def __init__(self, tokens):
        self.tokens = tokens
        self.eos = len(tokens)
        self.vocab_size = len(tokens) + 1
        ranks = {token: rank for rank, token in enumerate(tokens)}
        end = {"<|endoftext|>": self.eos}
        self.bpe = tiktoken.Encoding(
            "minippo", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=end
        )

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i != self.eos])

    def spell(self, i):
        """The text of one token. Bytes that are not text become escapes like \\xe2."""
        return "<eos>" if i == self.eos else self.tokens[i].decode(errors="backslashreplace")

    def fingerprint(self):
        """A number that other vocabularies do not have."""
        return zlib.crc32(b"\n".join(self.tokens))

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn a vocabulary of at most `vocab_size` ids, fewer when no pair is left that occurs
        twice."""
        words = Counter(word for text in texts for word in regex.findall(WORDS, text))
        words = {word: n for word, n in words.items() if len(word) <= LONGEST_WORD}
        pieces = {word: [bytes([b]) for b in word.encode(errors="replace")] for word in words}
        pairs = Counter()  # two neighbours as joined bytes: how often
        where = defaultdict(set)  # and in which words

        def count(word, sign):
            for a, b in zip(pieces[word], pieces[word][1:]):
                pairs[a + b] += sign * words[word]
                where[a + b].add(word)

        for word in words:
            count(word, +1)
        tokens = [bytes([b]) for b in range(256)]
        while len(tokens) < vocab_size - 1:
            # The second entry makes ties the same on every machine.
            new = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
            if pairs[new] < 2:  # no pair at all counts 0
                break
            tokens.append(new)
            for word in where.pop(new):  # only these words change
                count(word, -1)
                pieces[word] = join_pairs(pieces[word], new)
                count(word, +1)
            del pairs[new]
        return cls(tokens)


def join_pairs(pieces, new):
    """Join each pair of neighbours that spells `new`, from the left: a b c, ab -> ab c."""
    joined = []
    for piece in pieces:
        if joined and joined[-1] + piece == new:
            joined[-1] = new
        else:
            joined.append(piece)
    return joined


def responses_of(tokens, mask):
    """Rows (B, T) and their masks (B, T-1) -> the ids of each response."""
    pairs = zip(tokens[:, 1:].tolist(), mask.tolist())
    return [[i for i, inside in zip(row, marks) if inside] for row, marks in pairs]


class Prompt(list):
    """The ids of a prompt. row: the user's row, a dict, for rewards that read more than text."""

    row = None


def encode_rows(rows, names, tokenizer, context):
    """Rows of text, dicts -> (prompt, answer, ...) as ids, with names for the answers; says what is
    skipped or cut.

    Prompt and answers are encoded apart, so that no token crosses the boundary. An answer gets its
    end token. One that does not fit is cut, and has no end.
    """
    encoded = []
    places = defaultdict(list)  # what was done: to which rows
    limit = f"context of {context} tokens (--context of SFT)"
    for number, row in enumerate(rows, 1):
        prompt = Prompt(tokenizer.encode(row["prompt"]))
        prompt.row = row
        whole = [tokenizer.encode(row[name]) + [tokenizer.eos] for name in names]
        answers = [ids[: context - len(prompt)] for ids in whole]
        if not prompt:
            places["skipped: the prompt is empty"].append(number)
        elif len(prompt) >= context:
            places[f"skipped: the prompt leaves no room in the {limit}"].append(number)
        elif len(answers) == 2 and answers[0] == answers[1]:
            places[f"skipped: the two answers do not differ in the {limit}"].append(number)
        else:
            if answers != whole:
                places[f"cut at the end of the {limit}"].append(number)
            encoded.append((prompt, *answers))
    notes = [f"{len(x):,} {note}; the first is row {x[0]:,}" for note, x in places.items()]
    if not encoded:
        raise UserError(f"no row is left: {'; '.join(notes)}")
    for note in notes:
        print(f"    {note}")
    return encoded


def read_ids(folder, task, split, tokenizer, context):
    """The rows of a data folder (data/rows.py) as ids."""
    names = {"sft": ["completion"], "pref": ["chosen", "rejected"], "prompts": []}[task]
    return encode_rows(read_rows(folder, task, split), names, tokenizer, context)


def read_prompts(folder, split, tokenizer, context, max_new_tokens):
    """The prompts of a data folder as ids; says how many leave less room than max_new_tokens."""
    prompts = [prompt for (prompt,) in read_ids(folder, "prompts", split, tokenizer, context)]
    tight = sum(len(prompt) + max_new_tokens > context for prompt in prompts)
    if tight:
        print(f"    {tight:,} prompts leave less room than {max_new_tokens} tokens (--context)")
    return prompts


# Batches


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


def by_length(rows):
    """(prompt, answer, ...) as ids, the short ones first: neighbours need little padding."""
    return sorted(rows, key=lambda row: len(row[0]) + max(len(answer) for answer in row[1:]))


def similar_batches(rows, steps, size, seed):
    """A batch for each step, of rows of similar length, so that little is padding. It is cut out of
    50 * size random rows. In each pass every row comes once."""
    windows = chunks(batch_of(rows, 0, len(rows), seed), 50 * size)
    batches = [batch for window in windows for batch in chunks(by_length(window), size)]
    return [batch_of(batches, step, 1, seed)[0] for step in range(steps)]


def chunks(rows, size):
    """The rows, `size` at a time."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def spread_over(rows, n):
    """At most n of the rows, spread over all."""
    return rows[:: max(1, math.ceil(len(rows) / n))]


def pad(sequences, device="cpu"):
    """B lists of ids -> tokens (B, T), rows padded on the right, and lengths (B,)."""
    lengths = [len(ids) for ids in sequences]
    tokens = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in sequences])
    return tokens.to(device), torch.tensor(lengths, device=device)


def pad_completions(rows, device="cpu"):
    """(prompt, completion) as ids -> tokens (B, T), and mask (B, T-1): true at t where token t + 1
    is part of the completion."""
    tokens, lengths = pad([prompt + completion for prompt, completion in rows], device)
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rows], device=device)
    action = torch.arange(1, tokens.shape[1], device=device)
    mask = (action >= prompt_lengths[:, None]) & (action < lengths[:, None])
    return tokens, mask


def padded_pieces(rows, size, device):
    """(prompt, completion) as ids -> tokens and mask of `size` rows at a time, as many as fit into
    memory, of similar length."""
    for piece in chunks(by_length(rows), size):
        yield pad_completions(piece, device)
