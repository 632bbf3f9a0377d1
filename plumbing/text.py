"""Text as token ids, and back: the tokenizer, the rows of a data folder as ids, padding.

Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2) learns a
vocabulary from the data at hand: it starts from the 256 single bytes and repeatedly merges the most
frequent pair of neighbours into one new token.
"""

import math
from collections import Counter, defaultdict

import numpy as np
import regex  # comes with tiktoken
import tiktoken
import torch

from data.files import UserError
from data.rows import read_rows
from minippo import response_mask

# How GPT-2 cuts text into words before any merging; no token spans two of these. (999: tiktoken
# fails at a million spaces.)
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s{1,999}(?!\S)|\s{1,999}"
LONGEST_WORD = 64  # characters


def join_pairs(pieces, new):
    """Join each pair of neighbours that spells `new`, from the left: a b c, ab -> ab c."""
    joined = []
    for piece in pieces:
        if joined and joined[-1] + piece == new:
            joined[-1] = new
        else:
            joined.append(piece)
    return joined


class Tokenizer:
    """Text to token ids and back. `tokens` holds the bytes of each token in the order of the ids.

    One more id follows, `eos`: end-of-text, which ends every response. It is special: `encode`
    never produces it, whatever the text says, so that nothing a user types can end a document.
    """

    def __init__(self, tokens):
        self.tokens, self.eos, self.vocab_size = tokens, len(tokens), len(tokens) + 1
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

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn a vocabulary of at most `vocab_size` ids, fewer when the texts have no pair left
        that occurs twice. Words longer than LONGEST_WORD are left out."""
        words = Counter(word for text in texts for word in regex.findall(WORDS, text))
        words = {word: n for word, n in words.items() if len(word) <= LONGEST_WORD}
        pieces = {word: [bytes([b]) for b in word.encode(errors="replace")] for word in words}
        pairs = Counter()  # bytes of two neighbours joined: how often
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
            for word in where.pop(new):  # only these words change: this takes seconds
                count(word, -1)
                pieces[word] = join_pairs(pieces[word], new)
                count(word, +1)
            del pairs[new]
        return cls(tokens)


def texts_of(tokenizer, tokens, mask):
    """Rows (B, T) and their masks (B, T-1) -> their prompts and their responses as text."""
    tokens, mask = tokens.cpu(), mask.cpu()  # at once: each row by itself would wait for the GPU
    begins = mask.int().argmax(1) + 1
    prompts = [tokenizer.decode(row[:begin].tolist()) for row, begin in zip(tokens, begins)]
    responses = [tokenizer.decode(row[1:][inside].tolist()) for row, inside in zip(tokens, mask)]
    return prompts, responses


# Rows of text as rows of ids


def encode_rows(rows, tokenizer, context):
    """Rows of a prompt and completions -> the same as lists of ids; says what was skipped or cut.

    Prompt and completions are encoded apart, so that no token crosses the boundary; a completion
    gets its end token. A completion that does not fit is cut, and has no end.
    """
    encoded, notes, limit = [], Counter(), f"context of {context} tokens (--context of SFT)"
    for texts in rows:
        prompt, *completions = map(tokenizer.encode, texts)
        whole = [ids + [tokenizer.eos] for ids in completions]
        kept = [ids[: context - len(prompt)] for ids in whole]
        if not prompt:
            notes["skipped: the prompt is empty"] += 1
        elif len(prompt) >= context:
            notes[f"skipped: the prompt leaves no room in the {limit}"] += 1
        elif len(kept) == 2 and kept[0] == kept[1]:
            notes[f"skipped: the two answers do not differ in the {limit}"] += 1
        else:
            if kept != whole:
                notes[f"cut at the end of the {limit}"] += 1
            encoded.append((prompt, *kept))
    lines = [f"{count:,} {note}" for note, count in notes.items()]
    if not encoded:
        raise UserError(f"no row is left: {'; '.join(lines)}")
    for line in lines:
        print(f"    {line}")
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


def count_tokens(rows):
    """Rows of (prompt, completion) as ids -> how many tokens the completions have."""
    return sum(len(completion) for _, completion in rows)


def by_length(rows):
    """Rows of a prompt and completions as ids, the short ones first: neighbours need little
    padding."""
    return sorted(rows, key=lambda row: len(row[0]) + max(map(len, row[1:])))


def similar_batches(rows, size, seed):
    """The rows in batches of `size`, each of similar length, so that little is padding. A batch is
    cut out of 50 * size random rows."""
    shuffled = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    parts = chunks(shuffled, 50 * size)
    return [batch for part in parts for batch in chunks(by_length(part), size)]


def spread_over(rows, n):
    """At most n of the rows, spread over all."""
    return rows[:: max(1, math.ceil(len(rows) / n))]


def chunks(rows, size):
    """The rows, `size` at a time."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]
