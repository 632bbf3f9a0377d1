"""How far a run has come: its log, the state from which --resume goes on, and how long a run of
stages 1 and 2 lasts."""

import contextlib
import dataclasses
import json
import math
import signal
import sys
import time
import zlib

import torch

from plumbing.checkpoints import read_contents, write_contents
from plumbing.errors import UserError
from plumbing.files import read_log, write_file

# Settings that --resume may change: they alter nothing but rounding and random draws.
FREE_SETTINGS = ("models", "no_report", "report_prompts", "micro_batch", "rollout_batch")
SAVE_SECONDS = 30  # between two saves of the state, if it is saved quickly
SHOW_SECONDS = 4  # between two lines on the screen


def settings_of(run, *configs, data, **more):
    """What must be the same when a run goes on -> {name: value}; of the data, several lists, a
    fingerprint."""
    settings = {"seed": run.seed, "dtype": run.dtype, "data": fingerprint(*data), **more}
    for config in configs:
        if dataclasses.is_dataclass(config):
            settings |= dataclasses.asdict(config)
        else:  # a function; if it is a functools.partial, with settings
            settings |= getattr(config, "keywords", {})
    return {name: value for name, value in settings.items() if name not in FREE_SETTINGS}


def fingerprint(*data):
    """A number that changes with the data, which comes in several lists."""
    number = 0
    for rows in data:
        number = zlib.crc32(b"%d rows" % len(rows), number)
        for row in rows:
            number = zlib.crc32(repr(row).encode(errors="replace"), number)
    return number


def random_state():
    """The states of PyTorch's generators, on which everything random in a loop depends."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_random_state(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():  # the state may come from a machine with more GPUs
        torch.cuda.set_rng_state_all(states[1 : 1 + torch.cuda.device_count()])


class Schedule:
    """How many steps stages 1 and 2 take, and the share of the peak learning rate in each: a linear
    climb, then a straight fall to 0.

    automatic: validation says when to end. Once every row has been seen, and in two validations in
    a row the loss no longer falls, the learning rate falls to 0 in a third as many steps as there
    have been. One such validation may be noise. Before every row has been seen, none is known by
    heart: a loss that does not fall yet may do so later.
    """

    FIRST_CHECK, GROWTH = 50, 1.5  # validation after 50 steps, then after 1.5 times as many, ...
    LEAST_GAIN = 0.002  # share of the loss; a smaller gain is none
    RISE, SHORTEST = 0.1, 200  # such a rise ends a run at once; before step 200, nothing else does
    STILL_FALLING = 0.15  # a gain in the second half of the steps that promises more

    def __init__(self, steps, warmup, automatic, one_pass=math.inf):
        """one_pass: steps that see every row once. Few rows are soon known by heart: the first
        validation comes within a quarter of a pass."""
        self.steps, self.warmup, self.automatic = steps, warmup, automatic
        self.first_check = max(1, int(min(self.FIRST_CHECK, one_pass / 4)))
        self.one_pass = one_pass
        self.fall = warmup, 1.0  # step at which the fall begins, and the share from which it falls
        self.checks, self.stopped = {}, None  # {steps done: validation loss}; where the fall began

    def state_dict(self):
        names = ("steps", "fall", "checks", "stopped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, values):
        most = self.steps  # --resume may lower --max_steps
        for name, value in values.items():
            setattr(self, name, value)
        self.steps = min(self.steps, most)

    def share(self, step):
        """The share of the peak learning rate in step 0, 1, 2, ..."""
        start, share = self.fall
        climb = (step + 1) / (self.warmup + 1)
        return min(climb, share * (self.steps - step) / max(1, self.steps - start))

    def check_due(self, step):
        """Is the validation loss to be computed after this step? After the last one it is."""
        checks = {round(self.first_check * self.GROWTH**k) for k in range(40)}
        return step + 1 == self.steps or step + 1 in checks

    def is_best(self, step, loss):
        """Is this validation loss the lowest so far? FloatingPointError if it is no number."""
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {step + 1}: the validation loss is {loss}")
        done, losses = step + 1, [math.inf, math.inf, *self.checks.values(), loss]
        self.checks[done] = loss
        ripe = self.automatic and self.stopped is None and self.one_pass <= done < self.steps
        rises = loss > (1 + self.RISE) * min(losses)
        stalls = min(losses[-2:]) > (1 - self.LEAST_GAIN) * min(losses[:-2])
        if ripe and (rises or stalls and done >= self.SHORTEST):
            self.fall, self.stopped = (done, self.share(done)), done
            self.steps = min(self.steps, done + done // 3)
            falls = f"the learning rate does, to 0 at step {self.steps}"
            print(f"step {done}: the validation loss no longer falls; {falls}")
        return loss == min(losses)

    def ending(self):
        """Why there were so many steps, a warning if more would have helped, and what is saved."""
        best = min(sorted(self.checks, reverse=True), key=self.checks.get)
        half = max((done for done in self.checks if done <= self.steps / 2), default=best)
        gained = self.checks[best] < (1 - self.STILL_FALLING) * self.checks[half]
        last = best == max(self.checks) > half
        flag = "max_steps" if self.automatic else "epochs"
        why = f"all {self.steps:,} steps of --{flag} are done"
        if self.stopped:
            why = f"the validation loss no longer fell at step {self.stopped:,}"
        elif self.automatic and gained and last:
            falling = "warning: the validation loss was still falling when"
            why = f"{falling} --max_steps {self.steps} ended the training"
        return f"{why}; saved is that of step {best:,}, with the lowest loss"


class State:
    """The steps of a run, one after the other, also across interruptions.

    settings: what must be the same when the run goes on. made_from: the figures that came with the
    checkpoints that it starts from, {"sft": ..., "rm": ...}. parts: model, optimizer and whatever
    else may have a state_dict().
    `values` holds other numbers that must survive an interruption.
    """

    def __init__(self, kind, run, settings, made_from=None, **parts):
        self.kind, self.run, self.settings = kind, run, settings
        self.parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        self.path, self.log_path = run.out / f"{kind}_state.pt", run.out / f"{kind}.jsonl"
        self.model_path = run.out / f"{kind}.pt"
        self.made_from = made_from or {}
        if run.tensorboard:
            summary_writer()  # if it is missing, say so before anything is overwritten
        self.step, self.seconds, self.done, self.values = 0, 0.0, False, {}
        for half_written in run.out.glob(f".{kind}[._]*.tmp"):  # by a run that was killed
            half_written.unlink()
        if run.resume and self.path.exists():
            self.load()
        elif not run.overwrite:
            self.check_that_nothing_is_lost()
        self.log = self.board = None
        self.interrupted = False

    def check_that_nothing_is_lost(self):
        """UserError if a run, finished or not, or its model is there."""
        if self.path.exists():
            hint = "--resume goes on with it, --overwrite begins again"
            raise UserError(f"{self.path}: a run is there; {hint}")
        if self.model_path.exists():
            raise UserError(f"{self.model_path}: a model is there; --overwrite makes it again")
        if self.run.resume:
            print(f"--resume: {self.path} is not there, so this run starts at the beginning")

    def load(self):
        contents = read_contents(self.path, ("state",), mmap=False)  # the optimizer keeps it
        old, again = contents.get("settings", {}), "--overwrite begins again"
        if not self.settings.keys() <= old.keys():
            raise UserError(f"{self.path} was saved by another version or algorithm; {again}")
        if old["data"] != self.settings["data"]:
            change = "data or vocabulary have changed since it was saved"
            raise UserError(f"{self.path}: {change}; {again}")
        done = contents.get("step", 0)
        for name, least in (("steps", done), ("max_steps", done + 1)):  # it may end earlier
            if self.settings.get(name, math.inf) >= old.get(name, 0):
                continue
            if self.settings[name] < least:
                over = f"step {done} is done; --{name} {least} or more, or {again}"
                raise UserError(f"{self.path}: {over}")
            old[name] = self.settings[name]
        differ = [f"{name} = {old[name]}" for name, x in self.settings.items() if old[name] != x]
        if differ:
            saved = f"{self.path} was saved with {', '.join(differ)}"
            raise UserError(f"{saved}; repeat that, or --overwrite it")
        for name, facts in self.made_from.items():
            if contents.get("made_from", {}).get(name) != facts:
                which = "the file of --reference" if name == "reference" else f"{name}.pt"
                change = f"{which} has been made again since {self.path} was saved"
                raise UserError(f"{change}; {again}")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(contents[name])
            set_random_state(contents["random"])
            names = ("step", "seconds", "done", "values")
            self.step, self.seconds, self.done, self.values = (contents[name] for name in names)
        except (KeyError, ValueError, RuntimeError) as error:
            damage = f"damaged, or another version's ({type(error).__name__})"
            raise UserError(f"{self.path}: {damage}; {again}")
        if self.done and self.kind != "ppo":  # train_ppo.py goes on to its report
            if not self.model_path.exists():
                raise UserError(f"{self.model_path} is gone; --overwrite makes it again")
            print(f"{self.model_path} is finished; --overwrite makes it again")
            sys.exit()

    def save(self):
        start = time.perf_counter()
        contents = {name: part.state_dict() for name, part in self.parts.items()}
        names = ("settings", "made_from", "step", "seconds", "done", "values")
        contents |= {name: getattr(self, name) for name in names}
        write_contents(self.path, contents | {"kind": "state", "random": random_state()})
        self.saved = time.perf_counter()
        self.saving = self.saved - start

    def steps_left(self, schedule):
        """Yield the steps, counted from 0, that are still to be made. schedule: has `steps`."""
        self.schedule = schedule
        self.began = time.perf_counter() - self.seconds
        self.shown, self.saved, self.saving = self.began, -math.inf, 0.0  # the first step is saved
        handlers = {s: signal.signal(s, self.interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.step < schedule.steps:
                yield self.step
            if self.interrupted:  # after the last step was saved
                raise KeyboardInterrupt(f"step {self.step} is saved, --resume goes on from there")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def interrupt(self, number, frame):
        """At the first Ctrl-C or SIGTERM the loop ends its step and saves; a second one within that
        step kills, and --resume goes on from the last save."""
        self.interrupted = True
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # in a pipe, Ctrl-C has ended its reader too
            print("stopping after this step; once more ends the run at once", flush=True)

    def end_step(self, metrics, tokens, show):
        """Log the metrics of a step, and print those named in `show` every few seconds; save the
        state now and then, or when the run is to stop."""
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
        now, last = time.perf_counter(), self.step == self.schedule.steps
        long_ago = now - self.saved > max(SAVE_SECONDS, 20 * self.saving)
        if self.interrupted or long_ago or last or self.step % self.run.save_every == 0:
            self.save()
        if now - self.shown > SHOW_SECONDS or "val_loss" in metrics or last:
            self.shown = now
            self.print_line(metrics, show, speed)
        if self.interrupted:
            saved = f"step {self.step} is saved"
            raise KeyboardInterrupt(f"{saved}, --resume goes on from there")

    def print_line(self, metrics, show, speed):
        steps, each = self.schedule.steps, self.seconds / self.step
        numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in show if name in metrics)
        times = f"{clock(self.seconds)}, {clock(each * (steps - self.step))} left"
        line = f"step {self.step:>4}/{steps}  {numbers}  {speed:,.0f} tokens/s  {times}"
        print(line, flush=True)

    def open_log(self):
        """From here on the files of an earlier run are overwritten. One line a step; the lines of
        steps after the last save go, because these steps are made a second time."""
        rows = [row for row in read_log(self.log_path) if row["step"] <= self.step]
        if len(rows) < self.step:
            print(f"{self.log_path} holds {len(rows)} of {self.step} steps; the curves have a gap")
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
