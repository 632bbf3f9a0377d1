"""Your own rows as a data folder. FILE holds JSON lines, a JSON array of objects or, if its name
ends in .csv, CSV; gzipped or not.

    python data/convert.py FILE --out FOLDER and one of

    --prompt question --completion answer             demonstrations: sft files
    --prompt question --chosen good --rejected bad    pairs: pref files
    --prompt question                                 prompts files
    --messages messages                               chats: sft files
    --chosen good --rejected bad                      pairs of chats: pref files

Each flag names a key of the objects, or a column in the header line of the CSV. Files that are in
FOLDER stay as they are, unless --overwrite.

A chat is a list of messages {"role": ..., "content": ...} or, as in ShareGPT, {"from": ...,
"value": ...}, where human and gpt mean user and assistant. The last one, by the assistant, is the
answer, and those before are the prompt, written out like "User: ...\\nAssistant:". Or it is a
transcript, one string "\\n\\nHuman: ...\\n\\nAssistant: ...": the prompt ends with the last
"\\n\\nAssistant:", and the answer is what follows, without white space at the end. The two chats of
a pair differ in the answer only. An answer gets a leading space where neither the prompt ends nor
the answer begins with white space.

Rows are skipped and counted when the prompt or an answer is empty, the answers are equal, a chat
cannot be cut like that, or the same row came before. A share of the prompts, chosen by a hash, is
held out with all their rows. Any other fault ends the run.
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

KEYS = {
    "prompts": ("prompt",),
    "sft": ("prompt", "completion"),
    "pref": ("prompt", "chosen", "rejected"),
}
CHATS = [("messages",), ("chosen", "rejected")]
FLAGS = ("prompt", "completion", "chosen", "rejected", "messages")
WANTED = (
    "it should hold JSON lines, a JSON array of objects, or, if its name ends in .csv or .csv.gz, "
    "CSV with a header line"
)
SHAREGPT = {"human": "user", "gpt": "assistant"}
TURN = "\n\nAssistant:"
SHARE = 0.05  # of the prompts are held out


def held_out(prompts, share=SHARE):
    """-> the set of those to validate on. It goes by a hash: the same in every file, in any order.

    Where 0 < share < 1, one prompt at least is held out and one at least is not, if there are two.
    """
    places = sorted((zlib.crc32(x.encode(errors="replace")) / 2**32, x) for x in set(prompts))
    n = sum(place < share for place, _ in places)
    if 0 < share < 1:
        n = min(max(n, 1), len(places) - 1)
    return {prompt for _, prompt in places[:n]}


def write_rows(folder, task, rows, share=SHARE, overwrite=False):
    """Write the train and the val file of "sft", "pref" or "prompts", and say how many rows.

    FileExistsError if one is there, unless overwrite. Beside the file first and then renamed, so
    that what stands there is whole.
    """
    val, parts = held_out((row[0] for row in rows), share), {}
    for row in rows:
        split = "val" if row[0] in val else "train"
        parts.setdefault(folder / f"{task}_{split}.jsonl", []).append(row)
    for path in parts:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path}: is there already; choose another --out, or --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    for path, part in sorted(parts.items()):
        objects = (dict(zip(KEYS[task], row)) for row in part)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in objects)
        beside = path.with_suffix(f".{os.getpid()}.tmp")  # a name of this process alone
        try:
            # Half a surrogate pair is written as the escape that JSON has for it.
            beside.write_bytes(lines.encode(errors="backslashreplace"))
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        print(f"{path}: {len(part):,} rows written")


def read_csv(text):
    """Yields {name: value}, and () for the header and for blank rows: rows count as in a table."""
    csv.field_size_limit(2**31 - 1)
    names = ()
    for values in csv.reader(io.StringIO(text, newline=""), strict=True):
        if names and len(values) not in (0, len(names)):
            found = f"{len(values)} values for {len(names)} names"
            raise ValueError(f"{found}; a value with a comma needs quotes")
        yield dict(zip(names, values)) or ()
        names = names or values


def read_rows(path):
    """Yields (where, row); `where` is the file and the line or row, for error messages."""
    where = path
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        text = data.decode("utf-8-sig")
        if str(path).lower().removesuffix(".gz").endswith(".csv"):
            unit, rows = "row", read_csv(text)
        elif text.lstrip().startswith("["):
            unit, rows = "row", json.loads(text)
        else:
            unit = "line"
            rows = (json.loads(line) if line.strip() else () for line in text.split("\n"))
        where = f"{path}, {unit} 1"
        for number, row in enumerate(rows, 2):
            if row != ():
                yield where, row
            where = f"{path}, {unit} {number}"
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        fault = f"not UTF-8 ({error.reason}); save the file as UTF-8"
        raise ValueError(f"{path}, line {line}: {fault}")
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{where}: cannot be read ({reason}); {WANTED}")


def pick_values(where, row, keys, chats):
    """The values of the keys: strings or, if they are chats, perhaps lists of messages."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {type(row).__name__}; {WANTED}")
    values = []
    for key in keys:
        if key not in row:
            found = ", ".join(map(repr, row)) or "no key at all"
            raise ValueError(f"{where}: no key {key!r}; found {found}")
        value = row[key]
        if chats and isinstance(value, list):
            value = [read_message(where, message) for message in value]
        elif not isinstance(value, str):
            wanted = "list of messages or a transcript" if chats else "string"
            hint = "; leave --prompt out if it is a chat" * isinstance(value, list)
            found = f"{json.dumps(value)[:40]}{hint}"
            raise ValueError(f"{where}: the value of {key!r} should be a {wanted}, found {found}")
        values.append(value)
    return values


def read_message(where, message):
    """{"role": "user", "content": "Hi"} or {"from": "human", "value": "Hi"} -> ("user", "Hi")"""
    for names in (("role", "content"), ("from", "value")):
        role, content = (isinstance(message, dict) and message.get(name) for name in names)
        if isinstance(role, str) and isinstance(content, str):
            return SHAREGPT.get(role, role), content
    wanted = "a message should be an object with the strings 'role', 'content' or 'from', 'value'"
    raise ValueError(f"{where}: {wanted}, found {json.dumps(message)[:80]}")


def render_chat(messages):
    """[("user", "Hi")] -> "User: Hi\\nAssistant:"; "" if nothing is said."""
    lines = [f"{role.capitalize()}: {content.strip()}\n" for role, content in messages]
    return "".join(lines) + "Assistant:" if any(text.strip() for _, text in messages) else ""


def cut_chat(chat):
    """A transcript or a list of messages -> prompt and reply; ValueError where there is none."""
    if isinstance(chat, str):
        beginning, turn, reply = chat.rpartition(TURN)
        if not turn:
            raise ValueError(f"no {TURN!r} in a transcript")
        return beginning + turn, reply.rstrip()
    if not chat or chat[-1][0] != "assistant":
        raise ValueError("no reply at the end")
    return render_chat(chat[:-1]), chat[-1][1]


def make_row(prompt, *answers):
    """-> the row to write; ValueError if it teaches nothing."""
    stripped = [answer.strip() for answer in answers]
    if not prompt.strip():
        raise ValueError("empty prompt")
    if not all(stripped):
        raise ValueError("empty answer")
    if len(set(stripped)) < len(answers):
        raise ValueError("equal answers")
    joined = prompt[-1].isspace()
    return prompt, *[text if joined or text[0].isspace() else " " + text for text in answers]


def make_rows(table, chats):
    """The values of all rows -> the rows to write, and {reason: how many were skipped}."""
    rows, skipped = {}, Counter()
    for values in table:
        try:
            if chats:
                prompts, replies = zip(*map(cut_chat, values))
                if len(set(prompts)) > 1:
                    raise ValueError("chats differ before the last reply")
                values = prompts[0], *replies
            row = make_row(*values)
            if row in rows:
                raise ValueError("duplicate")
            rows[row] = True
        except ValueError as reason:
            skipped[str(reason)] += 1
    return list(rows), skipped


def convert(file, out, share, keys, overwrite):
    """Reads, skips, splits, writes and says how many. keys: {flag: key} of the flags given."""
    uses = [*KEYS.values(), *CHATS]
    if tuple(keys) not in uses or not 0 <= share <= 1:
        flags = ", or ".join(" ".join(f"--{flag}" for flag in use) for use in uses)
        raise ValueError(f"give {flags}, and a --val between 0 and 1 (-h explains the flags)")
    chats, table, unread = tuple(keys) in CHATS, [], set()
    for where, row in read_rows(file):
        table.append(pick_values(where, row, keys.values(), chats))
        unread |= row.keys() - keys.values()
    rows, skipped = make_rows(table, chats)
    counts = f"{len(table):,} rows read, {skipped.total():,} skipped"
    counts += "".join(f"; {reason}: {n:,}" for reason, n in skipped.items())
    counts += f"; keys not used: {', '.join(map(repr, sorted(unread)))}" * bool(unread)
    if not rows:
        raise ValueError(f"{file}: no row to write ({counts})" + f"; {WANTED}" * (not table))
    print(f"{file}: {counts}")
    if any(isinstance(value, list) for values in table for value in values):
        turns = [(role, "...") for role in ("system", "user", "assistant", "user")]
        print("chats are written as", ascii(render_chat(turns)))
    task = list(KEYS)[len(rows[0]) - 1]
    if Path(file).resolve() in [out.resolve() / f"{task}_{x}.jsonl" for x in ("train", "val")]:
        raise ValueError(f"{file}: would replace itself; choose another --out")
    write_rows(out, task, rows, share, overwrite)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = lambda text: parser.exit(2, f"convert.py: {text} (-h explains the flags)\n")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="folder to write into"
    )
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", metavar="KEY", help=f"where a row has its {flag}")
    text = "share of the prompts to hold out (default: %(default)s); 0 writes the train file alone"
    parser.add_argument("--val", type=float, default=SHARE, help=f"{text}, and 1 the val file")
    text = "replace files that are in FOLDER"
    parser.add_argument("--overwrite", action="store_true", help=text)
    args = parser.parse_args()
    keys = {flag: key for flag in FLAGS if (key := getattr(args, flag)) is not None}
    try:
        convert(args.file, args.out, args.val, keys, args.overwrite)
    except (OSError, ValueError) as error:
        parser.exit(2, f"convert.py: {error}\n")


if __name__ == "__main__":
    main()
