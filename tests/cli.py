"""Running the scripts, as a user does: in a process of their own, or in this one, which saves importing torch each time."""

import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def command(script, *args):
    return [sys.executable, script, *map(str, args)]


def shell(script, *args):
    return subprocess.run(command(script, *args), cwd=ROOT, env=ONE_THREAD, capture_output=True, encoding="utf-8", timeout=120)


def run(script, *args, stdin=""):
    """The same in this process -> exit status, stdout, stderr. Whatever else it raises, a user would see as a traceback."""
    out, err, status = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [script, *map(str, args)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        patch.chdir(ROOT)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return status, out.buffer.getvalue().decode(), err.getvalue()


def metrics(path):
    """The lines of a log, without what the clock says."""
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    return [{name: x for name, x in row.items() if name not in ("tokens_per_second", "seconds")} for row in rows]


def same_weights(a, b):
    a, b = (torch.load(path, weights_only=True)["model"] for path in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
