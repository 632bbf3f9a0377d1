"""Text to token ids and back.

Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2) learns a vocabulary
from the data at hand: start from the 256 single bytes; again and again make the most frequent pair
of neighbours one new token.
"""

from collections import Counter, defaultdict

import regex  # comes with tiktoken
import tiktoken

# How GPT-2 cuts text into words before any merging; no token ever spans two of these.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def join_pairs(parts, new):
    """Join each pair of neighbours that spells `new`, from left to right: [a, b, c], ab -> [ab, c]."""
    joined = []
    for part in parts:
        if joined and joined[-1] + part == new:
            joined[-1] = new
        else:
            joined.append(part)
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
        """The text of one token. Bytes that are no text by themselves become \\xe2."""
        return "<eos>" if i == self.eos else self.tokens[i].decode(errors="backslashreplace")

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn a vocabulary of at most `vocab_size` ids, fewer when the texts have no pair left
        that occurs twice."""
        words = Counter(word for text in texts for word in regex.findall(WORDS, text))
        parts = {word: [bytes([b]) for b in word.encode(errors="replace")] for word in words}
        pairs = Counter()  # bytes of two neighbours joined: how often
        where = defaultdict(set)  # and in which words

        def count(word, sign):
            for a, b in zip(parts[word], parts[word][1:]):
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
                parts[word] = join_pairs(parts[word], new)
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
