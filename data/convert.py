"""Your own rows as a data folder. FILE holds JSON lines, a JSON array of objects, or, if its name
ends in .csv, a table with a header line.

    python -m data.convert FILE --out FOLDER and one of

    --prompt question --completion answer             demonstrations: an sft file
    --prompt question --chosen good --rejected bad    pairs: a pref file
    --prompt question                                 a prompts file
    --messages messages                               chats: an sft file
    --chosen good --rejected bad                      pairs of chats: a pref file

A flag names a key of the objects, or a column. "input" and "label" may change what a row means, so
a file in which they are not empty is refused.

A chat is a list of messages {"role": ..., "content": ...}. The last one, by the assistant, is the
answer, and those before are the prompt, "User: ...\\nAssistant:". If a prompt is such a list, so are
its answers. Or a chat is a transcript, one string "\\n\\nHuman: ...\\n\\nAssistant: ...": the prompt
ends with the last "\\n\\nAssistant:". An answer gets a leading space where neither the prompt ends
nor the answer begins with white space.

Rows from which nothing can be learned are skipped and counted. Any other fault ends the run before
anything is written.
"""

import csv
import io
import json
from collections import Counter
from pathlib import Path

from data.files import UserError, command, parse_lines, printable, read_text
from data.rows import KEYS, write_rows

ROW_KEYS = ("prompt", "completion", "chosen", "rejected", "messages")
USES = [*KEYS.values(), ("messages",), ("chosen", "rejected")]
NO_ANSWER = [{"role": "assistant", "content": ""}]


class Skip(Exception):
    """Why a row is left out."""


def read_objects(path):
    """-> {place in the file: object}."""
    text, is_table = read_text(path), path.suffix.lower() == ".csv"
    if not is_table and not text.lstrip().startswith("["):
        return {f"line {n}": row for n, row in parse_lines(path, text).items()}
    try:
        rows = read_table(text) if is_table else json.loads(text)
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error})")
    return {f"row {n}": row for n, row in enumerate(rows, 1)}


def read_table(text):
    """CSV -> dicts."""
    csv.field_size_limit(2**31 - 1)  # 131,072 characters are not enough
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    for n, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"row {n} has more or fewer values than there are columns")
    return rows


def value_of(where, row, key):
    """The value of a key; null stands for empty text."""
    if not isinstance(row, dict) or key not in row:
        raise UserError(f"{where}: no {key!r} in {json.dumps(row)[:60]}")
    value = "" if row[key] is None else row[key]
    if not isinstance(value, (str, list)):
        wanted = "should be text or a list of messages"
        raise UserError(f"{where}: {key!r} is {json.dumps(value)[:60]} and {wanted}")
    return value


def is_message(x):
    return isinstance(x, dict) and all(isinstance(x.get(y), str) for y in ("role", "content"))


def cut(chat):
    """A transcript or a list of messages -> prompt and answer."""
    if isinstance(chat, str):
        beginning, turn, answer = chat.rpartition("\n\nAssistant:")
        if not turn or "\n\nHuman:" in answer:
            raise Skip("a transcript does not end with a turn of the assistant")
        return beginning + turn, answer.rstrip()
    if not all(map(is_message, chat)):
        raise Skip("a message is no object with role and content")
    if len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise Skip("a chat does not end with an answer")
    turns = [f"{x['role'].capitalize()}: {x['content'].strip()}\n" for x in chat[:-1]]
    return "".join(turns) + "Assistant:", chat[-1]["content"]


def make_row(values, has_prompt):
    """The values of a row -> prompt and answers."""
    if len(set(map(type, values))) > 1:
        raise Skip("text beside a list of messages")
    if has_prompt and isinstance(values[0], str):
        prompt, *answers = values
    else:
        if has_prompt:  # messages, which each answer continues
            values = [values[0] + answer for answer in (NO_ANSWER, *values[1:])]
        prompts, answers = zip(*map(cut, values))
        prompt, answers = prompts[0], answers[has_prompt:]
        if len(set(prompts)) > 1:
            raise Skip("the chats differ before the answer")
    stripped = [answer.strip() for answer in answers]
    if not prompt.strip() or not all(stripped):
        raise Skip("empty prompt or answer")
    if len(set(stripped)) < len(stripped):
        raise Skip("equal answers")
    joined = prompt[-1].isspace()
    return prompt, *(x if joined or x[0].isspace() else " " + x for x in answers)


def convert(path, keys):
    """keys: {flag: key}. -> rows; prints what is skipped, and what is not used."""
    rows, skipped, unused = {}, Counter(), set()
    for place, row in read_objects(path).items():
        values = [value_of(f"{path}, {place}", row, key) for key in keys.values()]
        unused |= {x for x in row.keys() - {*keys.values()} if row[x] not in ("", None)}
        try:
            new = make_row(values, "prompt" in keys)
            if new in rows:
                raise Skip("duplicate")
            rows[new] = None
        except Skip as reason:
            skipped[str(reason)] += 1
    for key in ("input", "label"):
        if key in unused:
            hint = "put it into the prompt, or keep the good rows, and write a file without it"
            raise UserError(f"{path}: {key!r} may change what a row means; {hint}")
    print(f"{path}: {len(rows):,} rows kept, {sum(skipped.values()):,} skipped")
    for reason, n in skipped.items():
        print(f"    {n:,} {reason}")
    if unused:
        print(f"    not used: {printable(', '.join(sorted(unused)), keep='')}")
    if not rows:
        raise UserError(f"{path}: no row is left to write")
    return list(rows)


SPLIT = "the file to write (train); without a val file, one prompt in twenty is held out"
FLAGS = {
    "file": {"metavar": "FILE", "type": Path},
    "--out": {"metavar": "FOLDER", "type": Path, "required": True},
    **{f"--{key}": {"metavar": "KEY", "help": f"where a row has its {key}"} for key in ROW_KEYS},
    "--split": {"choices": ["train", "val"], "default": "train", "help": SPLIT},
    "--overwrite": {"action": "store_true", "help": "replace the file, if it exists"},
}


def main(args):
    keys = {key: getattr(args, key) for key in ROW_KEYS if getattr(args, key) is not None}
    if tuple(keys) not in USES:
        raise UserError("these flags do not go together: -h shows which do")
    rows = convert(args.file, keys)
    task = {len(columns): name for name, columns in KEYS.items()}[len(rows[0])]
    write_rows(args.out, task, args.split, rows, args.overwrite)


if __name__ == "__main__":
    command(__doc__, FLAGS, main)
