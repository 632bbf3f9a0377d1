"""Your own rows as a data folder. FILE holds JSON lines, a JSON array of objects, or a table with a
header line, if its name ends in .csv or .tsv.

    python -m data.convert FILE --out FOLDER and one of

    --prompt question --completion answer             demonstrations: sft files
    --prompt question --chosen good --rejected bad    pairs: pref files
    --prompt question                                 prompts files
    --messages messages                               chats: sft files
    --chosen good --rejected bad                      pairs of chats: pref files

A flag names a key of the objects, or a column. "input" and "label" may change what a row means, so
a file in which they are not empty is refused.

A chat is a list of messages {"role": ..., "content": ...}. The last one, by the assistant, is the
answer, and those before are the prompt, "User: ...\\nAssistant:". Or it is a transcript, one string
"\\n\\nHuman: ...\\n\\nAssistant: ...": the prompt ends with the last "\\n\\nAssistant:". An answer
gets a leading space where neither the prompt ends nor the answer begins with white space.

A row is skipped and counted if the prompt or an answer is empty, the answers are equal, a chat
cannot be cut like that, or the same row came before. Any other fault ends the run before anything
is written. A share of the prompts, chosen by a hash, is held out with all their rows.
"""

import argparse
import csv
import io
import json
from pathlib import Path

from data.files import UserError, parse_lines, printable, read_text
from data.rows import KEYS, SHARE, TELLING, write_rows

FLAGS = ("prompt", "completion", "chosen", "rejected", "messages")
USES = [*KEYS.values(), ("messages",), ("chosen", "rejected")]
TURN = "\n\nAssistant:"
csv.field_size_limit(2**31 - 1)


class Skip(Exception):
    """Why a row is left out."""


def shown(x):
    """The beginning of any value, on one line."""
    return printable(json.dumps(x)[:60], keep="")


def read_objects(path):
    """-> {place in the file: object}."""
    text, suffix = read_text(path), path.suffix.lower()
    if suffix not in (".csv", ".tsv") and not text.lstrip().startswith("["):
        return {f"line {n}": row for n, row in parse_lines(path, text).items()}
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else read_table(text, suffix)
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error})")
    return {f"row {n}": row for n, row in enumerate(rows, 1)}


def read_table(text, suffix):
    """CSV or TSV -> dicts."""
    delimiter = "\t" if suffix == ".tsv" else ","
    lines = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    names, *rows = [*filter(None, lines)] or [[]]
    if len(set(names)) < max(1, len(names)):
        raise ValueError("the first line should name the columns, each once")
    for n, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ValueError(f"row {n} has {len(row)} values for {len(names)} columns")
    return [dict(zip(names, row)) for row in rows]


def value_of(where, row, key):
    """The value of a key, as text or as a list of (role, text)."""
    if not isinstance(row, dict) or key not in row:
        raise UserError(f"{where}: no {key!r} in {shown(row)}")
    if isinstance(row[key], list):
        return [message(where, x) for x in row[key]]
    if row[key] is not None and not isinstance(row[key], str):
        raise UserError(f"{where}: {key!r} should be text or messages, not {shown(row[key])}")
    return row[key] or ""


def message(where, x):
    """{"role": "user", "content": "Hi"} -> ("user", "Hi")"""
    role, text = (isinstance(x, dict) and x.get(name) for name in ("role", "content"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise UserError(f"{where}: {shown(x)} is no message with role and content")
    return role, text


def prompt_of(chat):
    """[("user", "Hi")] -> "User: Hi\\nAssistant:"; text stays as it is."""
    if isinstance(chat, str):
        return chat
    turns = "".join(f"{role.capitalize()}: {text.strip()}\n" for role, text in chat)
    return turns and turns + "Assistant:"


def cut(chat):
    """A transcript or a list of messages -> prompt and reply."""
    if isinstance(chat, str):
        beginning, turn, reply = chat.rpartition(TURN)
        if not turn or "\n\nHuman:" in reply:
            raise Skip("a transcript does not end with a turn of the assistant")
        return beginning + turn, reply.rstrip()
    if not chat or chat[-1][0] != "assistant":
        raise Skip("the last message is not by the assistant")
    return prompt_of(chat[:-1]), chat[-1][1]


def is_whole(prompt):
    """Does a prompt have an answer already?"""
    if isinstance(prompt, str):
        return bool(prompt.partition(TURN)[1] and prompt.rpartition(TURN)[2].strip())
    return bool(prompt) and prompt[-1][0] == "assistant"


def make_row(values, has_prompt):
    """The values of a row -> prompt and answers."""
    if has_prompt:
        prompt, *answers = values
        if is_whole(prompt) or any(
            TURN in x if isinstance(x, str) else len(x) > 2 for x in answers
        ):
            raise Skip("a whole chat stands where a prompt or an answer should: leave out --prompt")
        prompt, answers = (
            prompt_of(prompt),
            [x if isinstance(x, str) else cut(x)[1] for x in answers],
        )
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


def convert(path, keys):
    """keys: {flag: key}. -> rows; prints what is skipped, and what is not used."""
    rows, skipped, unused = {}, {}, set()
    for place, row in read_objects(path).items():
        values = [value_of(f"{path}, {place}", row, key) for key in keys.values()]
        unused |= {x for x in row.keys() - {*keys.values()} if row[x] not in ("", None)}
        try:
            new = make_row(values, "prompt" in keys)
            if new in rows:
                raise Skip("duplicate")
            rows[new] = None
        except Skip as reason:
            skipped.setdefault(str(reason), []).append(place)
    for key in sorted(unused & TELLING.keys()):
        hint = f"{TELLING[key]}, and write a file without {key!r}"
        raise UserError(f"{path}: {key!r} may change what a row means; {hint}")
    print(f"{path}: {len(rows):,} rows kept, {sum(map(len, skipped.values())):,} skipped")
    for reason, places in skipped.items():
        print(f"    {len(places):,} {printable(reason, keep='')}: {places[0]}, ...")
    if unused:
        print(f"    not used: {printable(', '.join(sorted(unused)), keep='')}")
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
    text = "share of the prompts to hold out; 0: the train file alone, 1: the val file alone"
    parser.add_argument("--val", type=float, default=SHARE, help=f"{text} (default: {SHARE})")
    parser.add_argument("--overwrite", action="store_true", help="replace files in FOLDER")
    args = parser.parse_args()
    keys = {flag: getattr(args, flag) for flag in FLAGS if getattr(args, flag) is not None}
    try:
        if tuple(keys) not in USES or not 0 <= args.val <= 1:
            raise UserError("-h shows which flags go together; --val is between 0 and 1")
        rows = convert(args.file, keys)
        task = {len(columns): name for name, columns in KEYS.items()}[len(rows[0])]
        write_rows(args.out, task, rows, args.overwrite, args.val)
    except (UserError, OSError) as error:
        parser.exit(2, f"convert.py: {printable(str(error), keep='')}\n")


if __name__ == "__main__":
    main()
