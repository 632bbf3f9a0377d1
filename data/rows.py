"""The rows of a data folder: JSON lines with TRL's column names.

Without a val file, one prompt in twenty is held out. Without sft files, the chosen answers are
used. Without prompts files, those of the pairs or demonstrations are used, each once.
"""

import json
from hashlib import sha256
from pathlib import Path

COLUMNS = {
    "sft": ["prompt", "completion"],
    "pref": ["prompt", "chosen", "rejected"],
    "prompts": ["prompt"],
}
HINT = "write one JSON object on each line in UTF-8; docs/manual.md shows how to convert chats"


class UserError(ValueError):
    """A mistake in what the user gave. Scripts print it in one line."""


def parse(line, columns):
    row = json.loads(line.decode("utf-8-sig"))
    if not isinstance(row, dict):
        raise ValueError("not an object")
    for column in columns:
        if not isinstance(row.get(column), str):
            raise ValueError(f"{column!r} is missing, or no string")
    if "completion" in columns and row.get("label") in (False, 0):
        raise ValueError('"label" is false: leave the row out')
    return row


def read_jsonl(path, columns=()):
    """-> the rows. These columns must be strings."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}")
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            if line.strip():
                rows.append(parse(line, columns))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; {HINT}")
    return rows


def write_jsonl(path, rows):
    """Lone surrogates, which UTF-8 cannot hold, become escapes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(text.encode(errors="backslashreplace"))


def held_out(prompts):
    """-> the prompts to validate on, chosen by hash, never all."""
    places = sorted((sha256(x.encode(errors="replace")).hexdigest(), x) for x in set(prompts))
    count = sum(int(place, 16) < 16**64 / 20 for place, _ in places)
    return {x for _, x in places[:-1][: max(1, count)]}


def read_rows(folder, task, split):
    """-> the rows of a task for "train" or "val"."""
    sources = ["pref"] if task == "pref" else [task, "pref", "sft"]
    source = next((x for x in sources if any(folder.glob(f"{x}_*.jsonl"))), task)
    val = folder / f"{source}_val.jsonl"
    path = val if split == "val" and val.exists() else folder / f"{source}_train.jsonl"
    rows = read_jsonl(path, COLUMNS[source])
    if not val.exists():
        print(f"no {val.name}: one prompt in twenty is held out")
        aside = held_out(row["prompt"] for row in rows)
        rows = [row for row in rows if (row["prompt"] in aside) == (split == "val")]
    if not rows:
        raise UserError(f"{path}: too few prompts for {split}; add some")
    print(f"read {path}: {len(rows):,} rows")
    if source == task:
        return rows
    print(f"no {task} files: {source} files are used")
    if task == "sft":
        return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    return list({row["prompt"]: row for row in rows}.values())
