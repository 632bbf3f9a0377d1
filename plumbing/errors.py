"""How a script ends when something is wrong that the user can put right."""

import re
import sys
from pathlib import Path

from data.files import UserError


def printable(text, keep="\n"):
    """The text with its control characters spelled out: no model may steer the terminal."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def run_script(main):
    """Call main(). What a user can put right ends in one line and status 2, Ctrl-C in one line and
    status 130."""
    for stream in filter(None, (sys.stdin, sys.stdout)):  # None: closed
        stream.reconfigure(errors="replace")  # what cannot be shown or read becomes a question mark
    try:
        return main()
    except KeyboardInterrupt as stop:
        status, message = 130, f"stopped; {str(stop) or 'files written before are whole'}"
    except Exception as error:
        status, message = 2, explain(error)
        if not message:  # a mistake of ours: its traceback is wanted
            raise
    message = printable(message, keep="")  # it may quote a file
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


def explain(error):
    """One line for the user; nothing for an error that the user cannot put right."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FloatingPointError):
        return f"{text}; begin again with --overwrite and a smaller --lr"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", text):
        return f"not enough memory ({text[:100]}); --micro_batch 1 needs less, also with --resume"
    return ""
