"""Your own rows as a data folder. FILE holds JSON lines, a JSON array of objects or, if its name
ends in .csv, CSV with a header line.

    python -m data.convert FILE --out FOLDER and one of

    --prompt question --completion answer             demonstrations: sft files
    --prompt question --chosen good --rejected bad    pairs: pref files
    --prompt question                                 prompts files
    --messages messages                               chats: sft files
    --chosen good --rejected bad                      pairs of chats: pref files

A flag names a key of the objects, or a column. --prompt instruction,input puts two together, one
below the other. --where label keeps the rows in which label is true.

A chat is a list of messages {"role": ..., "content": ...} or {"from": ..., "value": ...}, where
human and gpt mean user and assistant. The last one, by the assistant, is the answer, and those
before are the prompt, "User: ...\\nAssistant:". Or it is a transcript, one string "\\n\\nHuman: ...
\\n\\nAssistant: ...": the prompt ends with the last "\\n\\nAssistant:". An answer gets a leading
space where neither the prompt ends nor the answer begins with white space.

A row is skipped and counted if the prompt or an answer is empty, the answers are equal, a chat
cannot be cut like that, or the same row came before. Any other fault ends the run before anything
is written. A share of the prompts, chosen by a hash, is held out with all their rows.
"""

import argparse
import csv
import io
import json
from collections import Counter
from pathlib import Path

from data.files import UserError, parse_lines, read_text
from data.rows import KEYS, SHARE, write_rows

FLAGS = ("prompt", "completion", "chosen", "rejected", "messages")
USES = [*KEYS.values(), ("messages",), ("chosen", "rejected")]
SHAREGPT = {"human": "user", "gpt": "assistant"}
TURN = "\n\nAssistant:"
# Without these keys of well-known formats a row means something else.
TELLING = {"input": "add it to --prompt, as in instruction,input", "label": "add --where label"}


class Skip(Exception):
    """Why a row is left out."""


def read_objects(path):
    """-> {place in the file: object}."""
    text, is_table = read_text(path), path.suffix.lower() == ".csv"
    if not is_table and not text.lstrip().startswith("["):
        return {f"{path}, line {n}": row for n, row in parse_lines(path, text).items()}
    try:
        found = read_table(text) if is_table else json.loads(text)
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error})")
    return {f"{path}, row {n}": row for n, row in enumerate(found, 1)}


def read_table(text):
    """CSV -> dicts."""
    names, *rows = filter(None, csv.reader(io.StringIO(text), strict=True))
    if len(set(names)) < len(names):
        raise ValueError(f"a column name comes twice in {', '.join(names)}")
    for n, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ValueError(f"row {n} has {len(row)} values for {len(names)} columns")
    return [dict(zip(names, row)) for row in rows]


def value_of(where, row, keys):
    """The value of a key, or of several, as text or as a list of (role, text)."""
    texts = []
    for key in keys.split(","):
        if not isinstance(row, dict) or key not in row:
            raise UserError(f"{where}: no {key!r} in {json.dumps(row)[:60]}")
        if isinstance(row[key], list) and keys == key:
            return [message(where, x) for x in row[key]]
        if row[key] is not None and not isinstance(row[key], str):
            found = json.dumps(row[key])[:40]
            raise UserError(f"{where}: {key!r} should be text or a list of messages, found {found}")
        texts.append(row[key])
    return "\n".join(filter(None, texts))


def message(where, x):
    """{"role": "user", "content": "Hi"} or {"from": "human", "value": "Hi"} -> ("user", "Hi")"""
    for names in (("role", "content"), ("from", "value")):
        role, content = (isinstance(x, dict) and x.get(name) for name in names)
        if isinstance(role, str) and isinstance(content, str):
            return SHAREGPT.get(role, role), content
    raise UserError(f"{where}: found {json.dumps(x)[:60]}, no message with role and content")


def render(chat):
    """[("user", "Hi")] -> "User: Hi\\nAssistant:"; text stays as it is."""
    if isinstance(chat, str):
        return chat
    turns = "".join(f"{role.capitalize()}: {text.strip()}\n" for role, text in chat)
    return turns and turns + "Assistant:"


def cut(chat):
    """A transcript or a list of messages -> prompt and reply."""
    if isinstance(chat, str):
        beginning, turn, reply = chat.rpartition(TURN)
        if not turn:
            raise Skip(f"no {TURN!r} in a transcript")
        return beginning + turn, reply.rstrip()
    role, reply = chat[-1] if chat else ("nobody", "")
    if role != "assistant":
        raise Skip(f"the last message is by {role}, not by assistant")
    return render(chat[:-1]), reply


def make_row(values, has_prompt):
    """The values of a row -> prompt and answers."""
    if has_prompt:
        prompt, *answers = values
        prompt = render(prompt)
        if any(TURN in x if isinstance(x, str) else len(x) > 2 for x in answers):
            raise Skip("an answer is a whole chat: leave out --prompt")
        answers = [x if isinstance(x, str) else cut(x)[1] for x in answers]
    else:
        prompts, answers = zip(*map(cut, values))
        prompt = prompts[0]
        if len(set(prompts)) > 1:
            raise Skip("the chats differ before the last reply")
    stripped = [answer.strip() for answer in answers]
    if not prompt.strip() or not all(stripped):
        raise Skip("empty prompt or answer")
    if len(set(stripped)) < len(stripped):
        raise Skip("equal answers")
    joined = prompt[-1].isspace()
    return prompt, *(x if joined or x[0].isspace() else " " + x for x in answers)


def convert(path, keys, where_key="", ignored=()):
    """keys: {flag: key}. -> rows; prints what is skipped, and what is not used."""
    rows, skipped, unused = {}, Counter(), set()
    used = {key for value in keys.values() for key in value.split(",")} | {where_key, *ignored}
    for where, row in read_objects(path).items():
        values = [value_of(where, row, key) for key in keys.values()]
        unused |= {key for key in row.keys() - used if row[key] not in ("", None)}
        try:
            if where_key and where_key not in row:
                raise UserError(f"{where}: no {where_key!r} in {json.dumps(row)[:60]}")
            if where_key and str(row[where_key]).lower() not in ("true", "1", "1.0"):
                raise Skip(f"{where_key} is not true")
            made = make_row(values, "prompt" in keys)
            if made in rows:
                raise Skip("duplicate")
            rows[made] = None
        except Skip as reason:
            skipped[str(reason)] += 1
    for key in sorted(unused & TELLING.keys()):
        hint = f"{TELLING[key]}, or leave it out with --ignore {key}"
        raise UserError(f"{path}: without {key!r} a row may mean something else; {hint}")
    notes = [f"{reason}: {n:,}" for reason, n in skipped.items()]
    notes += [f"not used: {', '.join(sorted(unused))}"] * bool(unused)
    print(f"{path}: {len(rows):,} rows kept, {skipped.total():,} skipped", *notes, sep="; ")
    if not rows:
        raise UserError(f"{path}: no row is left to write")
    return list(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", metavar="KEY", help=f"where a row has its {flag}")
    parser.add_argument("--where", metavar="KEY", default="", help="keep rows where it is true")
    parser.add_argument("--ignore", metavar="KEY", action="append", default=[], help="not needed")
    text = "share of the prompts to hold out; 0: the train file alone, 1: the val file alone"
    parser.add_argument("--val", type=float, default=SHARE, help=f"{text} (default: {SHARE})")
    parser.add_argument("--overwrite", action="store_true", help="replace files in FOLDER")
    args = parser.parse_args()
    keys = {flag: getattr(args, flag) for flag in FLAGS if getattr(args, flag) is not None}
    try:
        if tuple(keys) not in USES or not 0 <= args.val <= 1:
            raise UserError("-h shows which flags go together; --val is between 0 and 1")
        rows = convert(args.file, keys, args.where, args.ignore)
        task = {len(columns): name for name, columns in KEYS.items()}[len(rows[0])]
        write_rows(args.out, task, rows, args.overwrite, args.val)
    except (UserError, OSError) as error:
        parser.exit(2, f"convert.py: {error}\n")


if __name__ == "__main__":
    main()
