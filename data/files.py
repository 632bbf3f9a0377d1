"""Files that are written whole or not at all, JSON lines, and the programs of this folder."""

import argparse
import json
import os
import sys
from pathlib import Path


class UserError(ValueError):
    """Something the user can put right. Scripts print it on one line and exit with status 2."""


def printable(text, keep="\n"):
    """The text with its control characters spelled out, so no model can control the terminal."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def write_file(path, contents):
    """Write beside the file, then rename: the path always holds the old version or the new, whole.

    contents: text, bytes, or, to have it in memory once, a function that writes to the open file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "wb") as file:
            if callable(contents):
                contents(file)
            else:
                file.write(contents.encode() if isinstance(contents, str) else contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        failed = f"cannot be written ({reason(error)})"
        raise UserError(f"{path}: {failed}; any old file is intact")
    finally:
        beside.unlink(missing_ok=True)


def reason(error):
    """What went wrong, in a few words. torch.save hides the system's error behind its own."""
    while error.__context__ and not isinstance(error, OSError):
        error = error.__context__
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


def read_text(path):
    """The text of a UTF-8 file, with or without a byte-order mark; UserError names the line."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8")


def parse_lines(path, text):
    """JSON lines -> {number of the line: object}, without blank lines; UserError names the line."""
    rows = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows[number] = json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = "one object a line; python -m data.convert reads other files"
            raise UserError(f"{path}, line {number}: not JSON ({error}); {hint}")
    return rows


def read_log(path):
    """The lines of a log as a list of dicts; none if there is no file. The last line may be half
    written, because the run is at work or was killed: then it is left out."""
    text = read_text(path) if Path(path).exists() else ""
    return list(parse_lines(path, text.rpartition("\n")[0]).values())


def write_jsonl(path, rows):
    """rows: dicts. Half a surrogate pair, which UTF-8 cannot hold, becomes the escape of JSON."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_file(path, lines.encode(errors="backslashreplace"))


def command(doc, flags, main):
    """main(arguments) as a program. flags: {name: how argparse.add_argument() takes it}."""
    name, form = Path(sys.argv[0]).name, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=doc, formatter_class=form)
    for flag, options in flags.items():
        parser.add_argument(flag, **options)
    try:
        main(parser.parse_args())
    except KeyboardInterrupt:
        parser.exit(130, f"{name}: stopped\n")
    except (UserError, OSError) as error:
        parser.exit(2, f"{name}: {printable(str(error), keep='')}\n")
