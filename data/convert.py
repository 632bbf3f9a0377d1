"""Your own rows as a data folder. FILE holds JSON lines, a JSON array of objects or, if its name is *.csv, CSV; gzipped or not.

    python data/convert.py FILE --out FOLDER --prompt question --completion answer             demonstrations: sft files
    python data/convert.py FILE --out FOLDER --prompt question --chosen good --rejected bad    pairs: pref files
    python data/convert.py FILE --out FOLDER --prompt question                                 prompts files
    python data/convert.py FILE --out FOLDER --messages messages                               chats: sft files
    python data/convert.py FILE --out FOLDER --chosen good --rejected bad                      pairs of chats: pref files

Each flag names a key of the objects, or a column in the header line of the CSV. Other files in FOLDER stay as they are.

An answer gets a leading space where neither the prompt ends nor the answer begins with white space. A chat is a list of messages
{"role": ..., "content": ...}. The last one, by the assistant, is the answer. Those before are the prompt, written out like
"User: ...\\nAssistant:". The two chats of a pair differ in the last message only.

Rows are skipped and counted when the prompt or an answer is empty, the answers are equal, a chat cannot be cut like that, or the
same row came before. A share of the prompts, chosen by a hash, is held out with all their rows. Any other fault ends the run.
"""

import argparse
import csv
import gzip
import io
import json
import os
import zlib
from collections import Counter
from pathlib import Path

FLAGS = ("prompt", "completion", "chosen", "rejected", "messages")
USES = [("prompt",), ("prompt", "completion"), ("prompt", "chosen", "rejected"), ("messages",), ("chosen", "rejected")]
WANTED = "it should hold JSON lines, a JSON array of objects, or, if its name ends in .csv or .csv.gz, CSV with a header line"


def csv_rows(text):
    """Yields {name: value}, and () for the header and for blank rows, so that rows count as in a spreadsheet."""
    csv.field_size_limit(2**31 - 1)
    names = ()
    for values in csv.reader(io.StringIO(text, newline=""), strict=True):
        if names and len(values) not in (0, len(names)):
            raise ValueError(f"{len(values)} values for {len(names)} names; a value with a comma needs quotes")
        yield dict(zip(names, values)) or ()
        names = names or values


def read_rows(path):
    """Yields (where, row); `where` is the file and the line or row, for error messages."""
    where = path
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig")
        if str(path).lower().removesuffix(".gz").endswith(".csv"):
            unit, rows = "row", csv_rows(text)
        elif text.lstrip().startswith("["):
            unit, rows = "row", json.loads(text)
        else:
            unit, rows = "line", (json.loads(line) if line.strip() else () for line in text.split("\n"))
        where = f"{path}, {unit} 1"
        for number, row in enumerate(rows, 2):
            if row != ():
                yield where, row
            where = f"{path}, {unit} {number}"
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8")
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, csv.Error) as error:
        raise ValueError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error}); {WANTED}")


def columns(where, row, keys, chats):
    """The values of the keys: strings, or chats as [(role, content), ...]."""
    kind, wanted, hint = str, "string", "; leave --prompt out if it is a chat"
    if chats:
        kind, wanted, hint = list, "list of messages", "; data/hh_rlhf.py cuts transcripts"
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {type(row).__name__}; {WANTED}")
    for key in keys:
        if key not in row:
            raise ValueError(f"{where}: no key {key!r}; found {', '.join(map(repr, row)) or 'no key at all'}")
        if not isinstance(row[key], kind):
            hint *= isinstance(row[key], str | list)
            raise ValueError(f"{where}: the value of {key!r} should be a {wanted}, found {json.dumps(row[key])[:40]}{hint}")
    return [[spoken(where, message) for message in row[key]] if chats else row[key] for key in keys]


def spoken(where, message):
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        wanted = "a message should be an object with the strings 'role' and 'content'"
        raise ValueError(f"{where}: {wanted}, found {json.dumps(message)[:80]}")
    return message["role"], message["content"]


def written(chat):
    """[("user", "Hi")] -> "User: Hi\\nAssistant:"; "" if nothing is said."""
    lines = [f"{role.capitalize()}: {content.strip()}\n" for role, content in chat]
    return "".join(lines) + "Assistant:" if any(content.strip() for _, content in chat) else ""


def cut(chats):
    """One chat, or two that begin alike -> prompt and replies as text; else ValueError."""
    if any(not chat or chat[-1][0] != "assistant" for chat in chats):
        raise ValueError("no reply at the end")
    if any(chat[:-1] != chats[0][:-1] for chat in chats):
        raise ValueError("chats differ before the last message")
    return written(chats[0][:-1]), *[chat[-1][1] for chat in chats]


def finished(prompt, *answers):
    """-> the row to write; ValueError if it teaches nothing."""
    said = [answer.strip() for answer in answers]
    if not prompt.strip() or not all(said):
        raise ValueError("empty answer" if prompt.strip() else "empty prompt")
    if len(set(said)) < len(said):
        raise ValueError("equal answers")
    return prompt, *[answer if prompt[-1].isspace() or answer[0].isspace() else " " + answer for answer in answers]


def usable(table, chats):
    """Rows from columns() -> those to write, and {reason: how many were skipped}."""
    rows, skipped = {}, Counter()
    for values in table:
        try:
            row = finished(*(cut(values) if chats else values))
            if row in rows:
                raise ValueError("duplicate")
            rows[row] = True
        except ValueError as reason:
            skipped[str(reason)] += 1
    return list(rows), skipped


def split(rows, share):
    """-> {"train": rows, "val": rows}. Where 0 < share < 1, both get a prompt if there are two."""
    place = {row[0]: zlib.crc32(row[0].encode(errors="replace")) / 2**32 for row in rows}
    order = sorted(place, key=lambda prompt: (place[prompt], prompt))
    n = sum(place[prompt] < share for prompt in order)
    val = set(order[: min(max(n, 1), len(order) - 1) if 0 < share < 1 else n])
    return {name: [row for row in rows if (row[0] in val) == (name == "val")] for name in ("train", "val")}


def write(path, rows):
    """Beside the file first and then renamed, so that what stands there is whole."""
    keys = USES[len(rows[0]) - 1]
    lines = "".join(json.dumps(dict(zip(keys, row)), ensure_ascii=False) + "\n" for row in rows)
    beside = path.with_suffix(".tmp")
    beside.write_bytes(lines.encode(errors="backslashreplace"))  # half a surrogate pair: as the escape that JSON has for it
    os.replace(beside, path)


def convert(file, out, share, keys):
    """Reads, skips, splits, writes and says how many. keys: {flag: key} of the flags given."""
    if tuple(keys) not in USES or not 0 <= share <= 1:
        uses = ", or ".join(" ".join(f"--{flag}" for flag in use) for use in USES)
        raise ValueError(f"give {uses}, and a --val between 0 and 1 (-h explains the flags)")
    chats = "prompt" not in keys
    table = [columns(where, row, keys.values(), chats) for where, row in read_rows(file)]
    rows, skipped = usable(table, chats)
    counts = f"{len(table):,} rows read, {skipped.total():,} skipped" + "".join(f"; {why}: {n:,}" for why, n in skipped.items())
    if not rows:
        raise ValueError(f"{file}: no row to write ({counts})" + f"; {WANTED}" * (not table))
    print(f"{file}: {counts}")
    if chats:
        print("chats are written as", ascii(written([(role, "...") for role in ("system", "user", "assistant", "user")])))
    out.mkdir(parents=True, exist_ok=True)
    for name, part in split(rows, share).items():
        path = out / f"{('prompts', 'sft', 'pref')[len(rows[0]) - 1]}_{name}.jsonl"
        if part:
            write(path, part)
            print(f"{path}: {len(part):,} rows written")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"convert.py: {message} (-h explains the flags)\n")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="folder to write into")
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", metavar="KEY", help=f"where a row has its {flag}")
    text = "share of the prompts to hold out (default: %(default)s); 0 writes the train file alone, and 1 the val file"
    parser.add_argument("--val", type=float, default=0.05, help=text)
    args = parser.parse_args()
    try:
        convert(args.file, args.out, args.val, {flag: key for flag in FLAGS if (key := getattr(args, flag)) is not None})
    except (OSError, ValueError) as error:
        parser.exit(2, f"convert.py: {error}\n")


if __name__ == "__main__":
    main()
