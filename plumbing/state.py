"""How far a run has come: its log, and the state from which --resume goes on."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time

import torch

from data.files import UserError, read_log, write_file
from plumbing.checkpoints import read_contents, write_contents

# Settings that --resume may change: they alter nothing but rounding and random draws.
FREE_SETTINGS = ("data", "out", "device", "resume", "overwrite", "tensorboard", "grad_checkpoint")
FREE_SETTINGS += ("models", "no_report", "micro_batch")
SAVE_SECONDS = 30  # between two saves of the state, if it is saved quickly
SHOW_SECONDS = 4  # between two lines on the screen
SIGNALS = [getattr(signal, x) for x in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, x)]


def random_state():
    """The states of PyTorch's generators, on which everything random in a loop depends."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_random_state(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():  # the state may come from a machine with more GPUs
        torch.cuda.set_rng_state_all(states[1 : 1 + torch.cuda.device_count()])


class State:
    """The steps of a run, one after the other, also across interruptions.

    parts: {name: model, optimizer, ...}, whatever has a state_dict(). `values` holds numbers that
    must survive an interruption. When the run goes on, the data, lists in any depth, must be the
    same, and the settings: dataclasses, and {file: its fingerprint}.
    """

    def __init__(self, kind, run, parts, data, *settings):
        self.kind, self.run, self.parts = kind, run, parts
        digest = hashlib.sha256(repr(data).encode(errors="replace")).hexdigest()
        self.settings = {"data": digest[:16]}
        for part in (run, *settings):
            values = part if isinstance(part, dict) else dataclasses.asdict(part)
            self.settings |= {name: x for name, x in values.items() if name not in FREE_SETTINGS}
        self.contents = {"data"}.union(*(x for x in settings if isinstance(x, dict)))
        self.path, self.log_path = run.out / f"{kind}_state.pt", run.out / f"{kind}.jsonl"
        self.model_path = run.out / f"{kind}.pt"
        if run.tensorboard:
            summary_writer()  # if it is missing, say so before anything is overwritten
        self.step, self.seconds, self.done, self.values = 0, 0.0, False, {}
        for half_written in run.out.glob(f".{kind}[._]*.tmp"):  # by a run that was killed
            half_written.unlink()
        if run.resume and self.path.exists():
            self.load()
        elif self.path.exists() and not run.overwrite:
            hint = "--resume goes on with it, --overwrite begins again"
            raise UserError(f"{self.path}: a run is there; {hint}")
        elif self.model_path.exists() and not run.overwrite:
            raise UserError(f"{self.model_path}: a model is there; --overwrite makes it again")
        elif run.resume:
            print(f"--resume: {self.path} is not there, so this run starts at the beginning")
        self.log = self.board = None
        self.interrupted = False

    def load(self):
        contents = read_contents(self.path, ["state"], mmap=False)  # the optimizer keeps it
        old, again = contents.get("settings", {}), "--overwrite begins again"
        names = sorted(self.settings.keys() | old.keys())
        differ = [name for name in names if old.get(name) != self.settings.get(name)]
        if differ:
            other = self.contents  # of these only fingerprints are known
            saved = [f"other {x}" if x in other else f"{x} = {old.get(x)}" for x in differ]
            saved = ", ".join(saved)
            raise UserError(f"{self.path} was saved with {saved}; repeat that, or {again}")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(contents[name])
            set_random_state(contents["random"])
            names = ("step", "seconds", "done", "values")
            self.step, self.seconds, self.done, self.values = (contents[name] for name in names)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.path}: damaged ({type(error).__name__}); {again}")
        if self.done:
            if not self.model_path.exists():
                raise UserError(f"{self.model_path} is gone; --overwrite makes it again")
            print(f"{self.model_path} is finished; --overwrite makes it again")
            sys.exit()

    def save(self):
        start = time.perf_counter()
        contents = {name: part.state_dict() for name, part in self.parts.items()}
        names = ("settings", "step", "seconds", "done", "values")
        contents |= {name: getattr(self, name) for name in names}
        write_contents(self.path, contents | {"kind": "state", "random": random_state()})
        self.saved = time.perf_counter()
        self.saving = self.saved - start

    def steps(self, count):
        """Yield the steps of 0 .. count - 1 that are still to be made."""
        self.count = count
        self.began = time.perf_counter() - self.seconds
        self.shown, self.saved, self.saving = self.began, -math.inf, 0.0  # the first step is saved
        heard = [x for x in SIGNALS if signal.getsignal(x) != signal.SIG_IGN]  # nohup ignores one
        handlers = {number: signal.signal(number, self.interrupt) for number in heard}
        try:
            while self.step < count:
                yield self.step
                if self.interrupted:
                    self.save()
                    saved = f"step {self.step} is saved"
                    raise KeyboardInterrupt(f"{saved}, --resume goes on from there")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def interrupt(self, number, frame):
        """At the first Ctrl-C or SIGTERM the loop ends its step and saves; a second one within that
        step kills, and --resume goes on from the last save."""
        self.interrupted = True
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            print("stopping after this step; once more ends the run at once", flush=True)
        sys.stdout = open(os.devnull, "w")  # Ctrl-C may have ended who reads it, as in `| tee log`

    def end_step(self, metrics, tokens, show):
        """Log the metrics of a step, and print those named in `show` every few seconds; save the
        state now and then, and at the end."""
        if self.log is None:
            self.open_log()
        seconds = time.perf_counter() - self.began
        speed = tokens / (seconds - self.seconds)
        self.step, self.seconds = self.step + 1, seconds
        record = {"step": self.step, **metrics, "tokens_per_second": round(speed)}
        record["seconds"] = round(seconds, 2)
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()
        self.to_board(record)
        now, last = time.perf_counter(), self.step == self.count
        if last or now - self.saved > max(SAVE_SECONDS, 20 * self.saving):
            self.save()
        if now - self.shown > SHOW_SECONDS or "val_loss" in metrics or last:
            self.shown = now
            numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in show if name in metrics)
            left = clock(seconds / self.step * (self.count - self.step))
            times = f"{speed:,.0f} tokens/s  {clock(seconds)}, {left} left"
            print(f"step {self.step:>4}/{self.count}  {numbers}  {times}", flush=True)

    def open_log(self):
        """From here on the files of an earlier run are overwritten. One line a step; the lines of
        steps after the last save go, because these steps are made a second time."""
        rows = [row for row in read_log(self.log_path) if row["step"] <= self.step]
        write_file(self.log_path, "".join(json.dumps(row) + "\n" for row in rows))
        self.log = open(self.log_path, "a")
        if not self.step:
            self.path.unlink(missing_ok=True)  # it must not be mistaken for this run's
        if self.run.tensorboard:
            folder = self.run.out / "tensorboard" / self.kind
            self.board = summary_writer()(folder, purge_step=0)  # it forgets what was there
            for row in rows:
                self.to_board(row)

    def to_board(self, record):
        """The numbers of a line of the log for TensorBoard, at its step and time."""
        if self.board:
            at = time.time() - self.seconds + record["seconds"]
            for name, x in record.items():
                if name != "step" and isinstance(x, int | float):
                    self.board.add_scalar(name, x, record["step"], at)
            self.board.flush()

    def finish(self):
        """The model of this run is in its file: a new run may begin, and --resume has nothing to
        train."""
        self.done = True
        self.save()


def summary_writer():
    """The class that writes for TensorBoard, which comes with PyTorch."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        fault = f"--tensorboard needs a package that is missing ({error})"
        raise UserError(f"{fault}; pip install tensorboard")
    return SummaryWriter


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
