"""The rows of a data folder: JSON lines with TRL's column names.

    sft_train.jsonl, sft_val.jsonl            prompt, completion
    pref_train.jsonl, pref_val.jsonl          prompt, chosen, rejected
    prompts_train.jsonl, prompts_val.jsonl    prompt

Without a val file, some prompts of the train file are held out. Without sft files the chosen
answers serve, without prompts files the prompts of the pairs or of the demonstrations.
"""

import hashlib
import json

from data.files import UserError, parse_lines, read_text, write_jsonl

KEYS = {
    "sft": ("prompt", "completion"),
    "pref": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}
SUBSTITUTES = {"sft": ["pref"], "pref": [], "prompts": ["pref", "sft"]}
HELD_OUT = 0.05  # share of the prompts


def held_out(prompts):
    """-> the set of those to validate on. A hash decides, so they are the same in every file, in
    any order. Of two prompts or more, at least one is held out and at least one is not."""

    def place(prompt):  # from 0 to 1
        digest = hashlib.sha256(prompt.encode(errors="replace")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    places = sorted((place(x), x) for x in set(prompts))
    n = max(1, sum(at < HELD_OUT for at, _ in places))
    return {prompt for _, prompt in places[: min(n, len(places) - 1)]}


def load_rows(path, task):
    """A file of "sft", "pref" or "prompts" -> a tuple of strings per row. Other keys are ignored.
    UserError names a line in which a key is missing or not a string, or "label" is false."""
    keys, rows = KEYS[task], []
    wanted = f"expected one JSON object per line with {', '.join(keys)} as strings"
    for number, row in parse_lines(path, read_text(path)).items():
        where = f"{path}, line {number}"
        for key in keys:
            value = row.get(key) if isinstance(row, dict) else None
            if not isinstance(value, str):
                hint = "python -m data.convert makes such files"
                raise UserError(f"{where}: {key!r} is {json.dumps(value)[:40]}; {wanted}; {hint}")
        if row.get("label") in (False, 0):
            raise UserError(f'{where}: "label" is false: leave out bad examples, or the key')
        rows.append(tuple(row[key] for key in keys))
    if not rows:
        raise UserError(f"{path}: no rows; {wanted}")
    return rows


def read_rows(folder, task, split):
    """The rows of a data folder for "sft", "pref" or "prompts", and "train" or "val", as tuples of
    strings; says what it read."""
    train, val = (folder / f"{task}_{part}.jsonl" for part in ("train", "val"))
    path = val if split == "val" and val.exists() else train
    if not path.exists():
        return substitute(folder, task, split, train)
    rows, note = load_rows(path, task), ""
    if not val.exists():
        aside = held_out(row[0] for row in rows)
        rows = [row for row in rows if (row[0] in aside) == (split == "val")]
        note = f" for {split}; there is no {val.name}, so one prompt in twenty is held out"
        if not rows:
            raise UserError(f"{path}: too few prompts to hold any out; write a {val.name}")
    print(f"read {path}: {len(rows):,} rows{note}")
    return rows


def substitute(folder, task, split, missing):
    """The rows for a task that the folder has no files of."""
    for other in SUBSTITUTES[task]:
        if (folder / f"{other}_train.jsonl").exists():
            print(f"no {missing.name}: {other}_train.jsonl serves instead")
            rows = [row[: len(KEYS[task])] for row in read_rows(folder, other, split)]
            return list(dict.fromkeys(rows)) if task == "prompts" else rows
    hint = "--data names the folder; docs/using.md says what is in it"
    raise UserError(f"{missing}: not found; {hint}")


def write_rows(folder, task, split, rows, overwrite):
    """Write rows (tuples of strings) into a file of a data folder, and say how many. UserError if
    the file exists, unless overwrite."""
    path = folder / f"{task}_{split}.jsonl"
    if path.exists() and not overwrite:
        raise UserError(f"{path}: already exists; choose another --out, or --overwrite")
    write_jsonl(path, [dict(zip(KEYS[task], row)) for row in rows])
    print(f"{path}: {len(rows):,} rows written")
