"""From a data folder to batches of token ids: JSON lines, rows of ids, padding."""

import gzip
import json
import math
import time
import zlib
from pathlib import Path

import torch

from data.convert import KEYS, held_out
from minippo import response_mask
from plumbing.errors import UserError


def load_jsonl(path, keys):
    """A JSON-lines file, gzipped or not -> a tuple of strings per row, in the order of `keys`.

    Other keys are ignored. Blank lines, CRLF line ends and a byte-order mark are fine. Anything else
    that is not a row raises UserError with the file, the line, the key and what was found.
    """
    wanted = f"it should hold one JSON object a line with {', '.join(keys)}"
    try:
        data = Path(path).read_bytes()
        lines = (gzip.decompress(data) if str(path).endswith(".gz") else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); {wanted}")
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig").strip()
            if text:
                rows.append(strings(json.loads(text), keys, where, wanted))
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 ({error.reason} at byte {error.start})"
            raise UserError(f"{where}: {fault}; save the file as UTF-8")
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            array = not rows and text[0] == "["
            hint = "a JSON array; data/convert.py makes JSON lines of it"
            raise UserError(f"{where}: {hint if array else f'not JSON ({error})'}; {wanted}")
    if not rows:
        raise UserError(f"{path}: no rows; {wanted}")
    return rows


def strings(row, keys, where, wanted):
    """The values of the keys, as a tuple; UserError unless all of them are strings."""
    if not isinstance(row, dict):
        hint = "; data/convert.py makes such a file from a JSON array" * isinstance(row, list)
        raise UserError(f"{where}: found {type(row).__name__}; {wanted}{hint}")
    chat = "; data/convert.py writes chats and transcripts out as prompt and reply"
    for key in keys:
        if key not in row:
            hint = chat * ("messages" in row or row.keys() >= {"chosen", "rejected"})
            found = ", ".join(map(repr, row)) or "no key at all"
            raise UserError(f"{where}: no key {key!r}; found {found}{hint}")
        if not isinstance(row[key], str):
            found = json.dumps(row[key])[:40] + chat * isinstance(row[key], list)
            raise UserError(f"{where}: the value of {key!r} should be a string, found {found}")
    return tuple(row[key] for key in keys)


def read_rows(data, task, split):
    """The rows of a data folder for "sft", "pref" or "prompts", and "train" or "val", as tuples of
    strings; says what it read.

    What a folder lacks comes from what it has: without a val file, some prompts of the train file
    are held out (data/convert.py says which); without sft files the chosen responses serve, without
    prompts files the prompts of the pairs.
    """
    if data.is_file():
        raise UserError(f"--data {data}: should be a folder; data/convert.py makes one from a file")

    def find(name):
        paths = (data / f"{name}.jsonl", data / f"{name}.jsonl.gz")
        return next((path for path in paths if path.exists()), None)

    train, val = find(f"{task}_train"), find(f"{task}_val")
    others = {"sft": ["pref"], "prompts": ["pref", "sft"], "pref": []}[task]
    other = next((name for name in others if find(f"{name}_train")), None)
    if not train and not (split == "val" and val) and other:
        rows = [row[: len(KEYS[task])] for row in read_rows(data, other, split)]
        served = "chosen responses" if task == "sft" else f"prompts of {other}_train.jsonl"
        print(f"no {task}_train.jsonl: {served} serve instead")
        return rows if task == "sft" else list(dict.fromkeys(rows))
    path = val if split == "val" and val else train or data / f"{task}_train.jsonl"
    rows, note = load_jsonl(path, KEYS[task]), ""
    if not val:
        aside = held_out(row[0] for row in rows)
        rows = [row for row in rows if (row[0] in aside) == (split == "val")]
        note = f" for {split}; there is no {task}_val.jsonl, so one prompt in twenty is held out"
        if not rows:
            raise UserError(f"{path}: too few prompts to hold any out; write a {task}_val.jsonl")
    print(f"read {path}: {len(rows):,} rows{note}")
    return rows


def encode_rows(rows, tokenizer, context):
    """Rows of a prompt and completions -> the same as lists of ids; says what was skipped or cut,
    and which context would suit them.

    Prompt and completions are encoded apart, so that no token crosses the border; a completion gets
    its end token. A prompt that leaves no room in the context skips the row; a completion that does
    not fit is cut (and has no end), and a pair whose answers are then the same is skipped.
    """
    encoded, lengths, full, cut, equal, uneven = [], [], 0, 0, 0, 0
    for prompt, *completions in rows:
        prompt = tokenizer.encode(prompt)
        whole = [tokenizer.encode(completion) + [tokenizer.eos] for completion in completions]
        lengths.append(len(prompt) + max(map(len, whole), default=1))
        if not 0 < len(prompt) < context:
            full += 1
            continue
        completions = [ids[: context - len(prompt)] for ids in whole]
        if len(completions) == 2 and completions[0] == completions[1]:
            equal += 1
            continue
        ends = [len(ids) == len(kept) for ids, kept in zip(whole, completions)]
        cut, uneven = cut + (not all(ends)), uneven + (any(ends) and not all(ends))
        encoded.append((prompt, *completions))
    room = f"context of {context} tokens"
    notes = {
        f"skipped: the prompt is empty or leaves no room in the {room}": full,
        "skipped: the two answers are the same, or the same up to the end of the context": equal,
        f"cut at the end of the {room}": cut,
        "of these pairs keep the end of one answer alone, which tells the two apart": uneven,
    }
    for note, count in notes.items():
        if count:
            print(f"    {count:,} {note}")
    if (suits := length_of_most(lengths)) > context:
        suited = f"a context of {suits} tokens (train_sft.py --context, or another --init)"
        print(f"warning: 95 % of these rows would fit whole into {suited}")
    if not encoded:
        why = "no two answers differ within" if equal else "no prompt leaves room in"
        raise UserError(f"{why} the {room}; shorten the rows, or train with a larger --context")
    return encoded


def length_of_most(lengths):
    """The shortest that at least 95 % do not exceed."""
    return sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1]


def read_ids(data, task, split, tokenizer, context):
    """read_rows(), as lists of ids (see encode_rows)."""
    return encode_rows(read_rows(data, task, split), tokenizer, context)


def read_prompts(data, split, tokenizer, context):
    """The prompts of a data folder: lists of ids."""
    return [ids for (ids,) in read_ids(data, "prompts", split, tokenizer, context)]


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
    """Rows (tuples of lists of ids) -> how many tokens they have."""
    return sum(len(ids) for row in rows for ids in row)


def order_by_length(rows, size):
    """Rows (tuples of lists of ids) -> their numbers in parts of `size`, those of similar length
    together."""
    order = sorted(range(len(rows)), key=lambda i: sum(map(len, rows[i])))
    return [order[i : i + size] for i in range(0, len(order), size)]


def by_length(rows, size):
    """The same with the rows themselves."""
    return [[rows[i] for i in part] for part in order_by_length(rows, size)]


def progress(what, rows, size):
    """Yield the rows in parts of `size`. Every few seconds say how many are done, so that nobody
    waits in silence."""
    start = shown = time.perf_counter()
    for i in range(0, len(rows), size):
        yield rows[i : i + size]
        now, done = time.perf_counter(), min(i + size, len(rows))
        if now - shown > 4:
            left = (now - start) / done * (len(rows) - done)
            print(f"    {done:,} of {len(rows):,} {what}, {left:.0f} s left", flush=True)
            shown = now
