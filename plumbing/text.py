"""Text as token ids, and back: the tokenizer, and rows as ids.

Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2) learns a
vocabulary from the data at hand: it starts from the 256 single bytes, and repeatedly merges the
most frequent pair of neighbours into one new token.
"""

import zlib
from collections import Counter, defaultdict

import regex
import tiktoken

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
        """A number that other vocabularies hardly share."""
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
    """Rows of text, dicts -> (prompt, answer, ...) as ids; names: those of the answers.

    Prompt and answers are encoded apart, so that no token crosses the boundary. An answer gets its
    end token. One that does not fit into the context is cut, and has no end. Rows that teach
    nothing are skipped.
    """
    encoded = []
    skipped = 0
    cut = 0
    for row in rows:
        prompt = Prompt(tokenizer.encode(row["prompt"]))
        prompt.row = row
        answers = [tokenizer.encode(row[name]) + [tokenizer.eos] for name in names]
        fitting = [ids[: context - len(prompt)] for ids in answers]
        is_tie = len(fitting) == 2 and fitting[0] == fitting[1]
        if not 0 < len(prompt) < context or is_tie:
            skipped += 1
        else:
            encoded.append((prompt, *fitting))
            cut += fitting != answers
    if skipped:
        print(f"    rows skipped (no prompt, no room, or two equal answers): {skipped:,}")
    if cut:
        print(f"    rows cut at {context} tokens (--context of train_sft.py): {cut:,}")
    if not encoded:
        raise UserError("no row is left to train on")
    return encoded


def read_ids(folder, task, split, tokenizer, context):
    """The rows of a data folder (data/rows.py) as ids."""
    names = {"sft": ["completion"], "pref": ["chosen", "rejected"], "prompts": []}[task]
    return encode_rows(read_rows(folder, task, split), names, tokenizer, context)


def read_prompts(folder, split, tokenizer, context):
    """The prompts of a data folder as ids."""
    return [prompt for (prompt,) in read_ids(folder, "prompts", split, tokenizer, context)]
