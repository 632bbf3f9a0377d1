"""From JSON lines to token ids and back: tokenizer, data folders, rows, batches of rows."""

import gzip
import json
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import regex  # comes with tiktoken
import tiktoken
import torch

from data.convert import held_out
from minippo import response_mask
from plumbing.settings import UserError

# Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2) learns a vocabulary from the data at hand:
# start from the 256 single bytes; again and again make the most frequent pair of neighbours one new token.

# How GPT-2 cuts text into words before any merging; no token ever spans two of these pieces.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def merge(parts, new):
    """Join each pair of neighbours that spells `new`, from left to right: merge([a, b, c], ab) -> [ab, c]."""
    merged = []
    for part in parts:
        if merged and merged[-1] + part == new:
            merged[-1] = new
        else:
            merged.append(part)
    return merged


class Tokenizer:
    """Text to token ids and back. `tokens` holds the bytes of each token in the order of the ids.

    One more id follows, `eos`: end-of-text, which ends every response. It is special: `encode` never produces it,
    whatever the text says, so that nothing a user types can end a document.
    """

    def __init__(self, tokens):
        self.tokens, self.eos, self.vocab_size = tokens, len(tokens), len(tokens) + 1
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self.bpe = tiktoken.Encoding("minippo", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.eos})

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i != self.eos])

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn a vocabulary of at most `vocab_size` ids, fewer when the texts have no pair left that occurs twice."""
        words = Counter(piece for text in texts for piece in regex.findall(SPLIT, text))
        parts = {word: [bytes([b]) for b in word.encode(errors="replace")] for word in words}
        pairs, where = Counter(), defaultdict(set)  # bytes of two neighbours joined: how often, and in which words

        def count(word, sign):
            for a, b in zip(parts[word], parts[word][1:]):
                pairs[a + b] += sign * words[word]
                where[a + b].add(word)

        for word in each("different words counted", list(words)):
            count(word, +1)
        tokens = [bytes([b]) for b in range(256)]
        for _ in each("tokens of the vocabulary learned", range(256, vocab_size - 1), 1):
            # The second entry makes ties the same on every machine.
            new = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
            if pairs[new] < 2:  # no pair at all counts 0
                break
            tokens.append(new)
            for word in where.pop(new):  # only the words that hold the pair change: this makes training take seconds
                count(word, -1)
                parts[word] = merge(parts[word], new)
                count(word, +1)
            del pairs[new]
        return cls(tokens)


def load_jsonl(path, keys):
    """Read a JSON-lines file, gzipped or not; a tuple of strings per row, in the order of `keys`. Other keys are ignored.

    Blank lines, CRLF line ends and a byte-order mark are fine. Anything else that is not a row raises UserError with
    the file, the line, the key and what was found.
    """
    wanted = f"it should hold one JSON object a line with {', '.join(keys)}"
    try:
        data = Path(path).read_bytes()
        lines = (gzip.decompress(data) if str(path).endswith(".gz") else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {wanted}")
    rows = []
    for number, line in enumerate(each(f"lines of {path} read", lines), 1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig").strip()
            row = json.loads(text) if text else None
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            array = not rows and text[0] == "["
            found = "a JSON array; data/convert.py makes JSON lines of it" if array else f"not JSON ({error})"
            raise UserError(f"{where}: {found}; {wanted}")
        if text:
            rows.append(strings(row, keys, where, wanted))
    if not rows:
        raise UserError(f"{path}: no rows; {wanted}")
    return rows


def strings(row, keys, where, wanted):
    """The values of the keys, as a tuple; UserError unless the row is an object and all of them are strings."""
    if not isinstance(row, dict):
        hint = "; data/convert.py makes such a file from a JSON array" * isinstance(row, list)
        raise UserError(f"{where}: found {type(row).__name__}; {wanted}{hint}")
    chat = "; data/convert.py writes the messages of a chat out as one text"
    for key in keys:
        if key not in row:
            hint = "; data/convert.py cuts whole transcripts into prompt and replies" * (row.keys() >= {"chosen", "rejected"})
            hint = hint or chat * ("messages" in row)
            found = ", ".join(map(repr, row)) or "no key at all"
            raise UserError(f"{where}: no key {key!r}; found {found}{hint}")
        if not isinstance(row[key], str):
            found = json.dumps(row[key])[:40] + chat * isinstance(row[key], list)
            raise UserError(f"{where}: the value of {key!r} should be a string, found {found}")
    return tuple(row[key] for key in keys)


KEYS = {"sft": ("prompt", "completion"), "pref": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}


def read_rows(data, task, split):
    """The rows of a data folder for "sft", "pref" or "prompts", and "train" or "val", as tuples of strings; says what it read.

    What a folder lacks comes from what it has: without a val file, the train rows of one prompt in twenty, chosen by a
    hash, are held out; without sft files the chosen responses serve, without prompts files the prompts of the pairs.
    """

    if data.is_file():
        raise UserError(f"--data {data}: should be a folder; data/convert.py makes one from a file")

    def find(name):
        return next((path for path in (data / f"{name}.jsonl", data / f"{name}.jsonl.gz") if path.exists()), None)

    if not find(f"{task}_{split}") and not find(f"{task}_train") and find("pref_train"):
        rows = [pair[: len(KEYS[task])] for pair in read_rows(data, "pref", split)]  # (prompt, chosen) or (prompt,)
        print(f"no {task}_train.jsonl: {'chosen responses' if task == 'sft' else 'prompts of the pairs'} serve instead")
        return rows if task == "sft" else list(dict.fromkeys(rows))
    path, note = find(f"{task}_{split}"), ""
    if path and (split == "val" or find(f"{task}_val")):
        rows = load_jsonl(path, KEYS[task])
    else:
        path = find(f"{task}_train") or data / f"{task}_train.jsonl"
        rows = load_jsonl(path, KEYS[task])
        val = held_out(row[0] for row in rows)
        rows = [row for row in rows if (row[0] in val) == (split == "val")]
        note = f" for {split}; there is no {task}_val.jsonl, so one prompt in twenty is held out"
        if not rows:
            raise UserError(f"{path}: too few prompts to hold any out; write a {task}_val.jsonl")
    print(f"read {path}: {len(rows):,} rows{note}")
    return rows


def encode_rows(rows, tokenizer, context):
    """Rows of a prompt and completions -> the same as lists of ids; says how many were skipped or cut.

    Prompt and completions are encoded apart, so that no token crosses the border; a completion gets its end token. A
    prompt that leaves no room in the context skips the row; a completion that does not fit is cut (and has no end), and
    a pair whose answers are then the same is skipped.
    """
    encoded, full, cut, equal, uneven = [], 0, 0, 0, 0
    for prompt, *completions in each("rows encoded", rows):
        prompt = tokenizer.encode(prompt)
        if not 0 < len(prompt) < context:
            full += 1
            continue
        whole = [tokenizer.encode(completion) + [tokenizer.eos] for completion in completions]
        completions = [ids[: context - len(prompt)] for ids in whole]
        if len(completions) == 2 and completions[0] == completions[1]:
            equal += 1
            continue
        ends = [ids == ids_cut for ids, ids_cut in zip(whole, completions)]
        cut, uneven = cut + (not all(ends)), uneven + (any(ends) and not all(ends))
        encoded.append((prompt, *completions))
    if full:
        print(f"    {full:,} skipped: the prompt is empty or leaves no room in the context of {context} tokens")
    if equal:
        print(f"    {equal:,} skipped: the two answers are the same, or the same up to the end of the context")
    if cut:
        print(f"    {cut:,} cut at the end of the context of {context} tokens")
    if uneven:
        print(f"    {uneven:,} of these pairs keep the end of one answer alone, which tells the two apart")
    if not encoded:
        why = "no two answers differ within" if equal else "no prompt leaves room in"
        raise UserError(f"{why} the context of {context} tokens; shorten the rows, or train with a larger --context")
    return encoded


def read_ids(data, task, split, tokenizer, context):
    """read_rows(), as lists of ids (see encode_rows)."""
    return encode_rows(read_rows(data, task, split), tokenizer, context)


def printable(text):
    """The text with its control characters spelled out: what a model writes must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def texts_of(tokenizer, tokens, mask):
    """Rows (B, T) and their masks (B, T-1) -> their prompts and their responses as text."""
    begins = mask.int().argmax(1) + 1
    prompts = [tokenizer.decode(row[:begin].tolist()) for row, begin in zip(tokens, begins)]
    return prompts, [tokenizer.decode(row[1:][inside].tolist()) for row, inside in zip(tokens, mask)]


def pad(sequences, device="cpu"):
    """B lists of ids -> tokens (B, T), every row from column 0 and padded on the right, and lengths (B,)."""
    lengths = [len(ids) for ids in sequences]
    tokens = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in sequences])
    return tokens.to(device), torch.tensor(lengths, device=device)


def pad_completions(rows, device="cpu"):
    """Rows of (prompt, completion) as ids -> tokens (B, T), and the mask of the completions, (B, T-1)."""
    tokens, lengths = pad([prompt + completion for prompt, completion in rows], device)
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rows], device=device)
    return tokens, response_mask(prompt_lengths, lengths, tokens.shape[1])


def pieces(rows, size):
    """Rows (tuples of lists of ids) in pieces of at most `size`, or in one if that is 0; rows of similar length together."""
    rows = sorted(rows, key=lambda row: sum(map(len, row)))
    return [rows[i : i + (size or len(rows))] for i in range(0, len(rows), size or len(rows))]


def waiting(what, rows, size):
    """Yield the rows in pieces of `size`. Every few seconds say how many are done, so that nobody waits in silence."""
    start = shown = time.perf_counter()
    for i in range(0, len(rows), size):
        yield rows[i : i + size]
        now, done = time.perf_counter(), min(i + size, len(rows))
        if now - shown > 4:
            print(f"    {done:,} of {len(rows):,} {what}, {(now - start) / done * (len(rows) - done):.0f} s left", flush=True)
            shown = now


def each(what, rows, size=1000):
    """The same row by row; after `size` rows it looks at the clock."""
    for piece in waiting(what, rows, size):
        yield from piece
