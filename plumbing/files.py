"""Files that are written whole or not at all, and logs that can be read while they grow."""

import json
import os
from pathlib import Path

from plumbing.errors import UserError


def write_file(path, contents):
    """Write beside the file, then rename: the path always holds the old version or the new, whole.

    contents: text, bytes, or, to have it in memory once, a function that writes to the open file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a name of this process alone
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
        beside.unlink(missing_ok=True)
        failed = f"cannot be written ({reason(error)})"
        raise UserError(f"{path}: {failed}; what was there before is still there")


def reason(error):
    """What went wrong, in a few words. torch.save hides the system's error behind its own."""
    while error.__context__ and not isinstance(error, OSError):
        error = error.__context__
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


def read_log(path):
    """The rows of a JSON-lines log, as dicts; none if there is no file.

    A line without a JSON object that has a step is left out: the last one may be half written.
    """
    lines = Path(path).read_bytes().splitlines() if Path(path).exists() else []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) in (int, float):  # not True, which isinstance() takes for an int
            rows.append(row)
    return rows
