"""How far a run has come: its length and learning rate, its log, its best model, and the state from which --resume goes on."""

import dataclasses
import json
import math
import signal
import sys
import time
import zlib

import torch

from plumbing.board import Board
from plumbing.checkpoints import read_file, write_file
from plumbing.settings import AT_ERROR, UserError
from plumbing.text import waiting

# Settings that --resume may change: the gradients stay the same. (In pieces of another size, samples are drawn in another order.)
FREE = ("models", "no_report", "report_prompts", "micro_batch", "rollout_batch")
FIRST_CHECK, MORE = 50, 1.5  # the validation loss is looked at after so many steps, then after 1.5 times as many, and so on
AT_LEAST, GAIN = 200, 0.002  # steps before a run may stop by itself; a smaller gain (as a share of the loss) is none
MUCH = 0.15  # a gain in the second half of the steps that makes one expect more of a third
SECONDS = 30  # between two saves of the state, if it is saved quickly


def fingerprint(*data):
    """A number that changes with the data, which comes in several lists."""
    number = 0
    for rows in data:
        number = zlib.crc32(b"%d rows" % len(rows), number)
        for piece in waiting("rows compared with those of an interrupted run", rows, 10_000):
            number = zlib.crc32(repr(piece).encode(errors="replace"), number)
    return number


def random_state():
    """The states of PyTorch's generators, on which everything random in a training loop depends."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_random_state(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1 : 1 + torch.cuda.device_count()])  # saved, perhaps, where there were more


def step_of(line):
    """The step that a line of a log is about; infinity if it is not whole."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """The steps of a run, one after the other, also across interruptions.

    configs: the settings that must be the same when it goes on. steps: how many, at most. warmup: how many until the learning
    rate is at its peak; from there it falls in a straight line to 0. automatic: as soon as the validation loss stops falling, the
    learning rate falls to 0 quickly, and the run ends. data: what it is trained on, which must be the same too. made_from: the
    figures that came with the checkpoints that the run starts from, {"sft": ..., "rm": ...}, by which they are known again.
    algorithm: the name of what train_ppo.py runs in place of PPO. parts: whatever has a state_dict() (model, optimizer). `values`
    holds the numbers that must survive an interruption.
    """

    def __init__(self, kind, run, configs, steps, warmup=0, automatic=False, data=(), made_from=None, algorithm="", **parts):
        self.kind, self.state_path, self.log_path = kind, run.out / f"{kind}_state.pt", run.out / f"{kind}.jsonl"
        self.run, self.parts, self.warmup, self.automatic = run, parts, warmup, automatic
        self.best = run.out / f"{kind}_best.pt"  # the best model so far; finished, it becomes {kind}.pt
        self.made_from = made_from or {}
        self.values = {"step": 0, "steps": steps, "seconds": 0.0, "checks": {}, "fall": [warmup, 1.0]}
        self.settings = {"rows": fingerprint(*data), "seed": run.seed, "dtype": run.dtype, "steps": steps, "algorithm": algorithm}
        for config in configs:
            self.settings |= {name: x for name, x in dataclasses.asdict(config).items() if name not in FREE}
        run.out.mkdir(parents=True, exist_ok=True)
        for forgotten in run.out.glob(".*.tmp"):  # half a file of a run that was killed
            forgotten.unlink()
        if run.resume and not self.state_path.exists():
            print(f"--resume: {self.state_path} is not there, so this run starts at the beginning")
        elif run.resume:
            self.load()
        else:
            self.check_that_nothing_is_lost()
        self.log, self.board, self.asked, self.random, self.changed, self.on_disk = None, None, [], random_state(), False, self.step
        if "optimizer" in parts:
            parts["optimizer"].register_step_post_hook(self.note_change)
        if self.step < self.steps:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.ask)
            AT_ERROR.append(self.rescue)
        self.began = time.perf_counter() - self.values["seconds"]
        self.shown, self.saved, self.saving = self.began, time.perf_counter(), 0.0

    @property
    def step(self):
        """How many steps are done."""
        return self.values["step"]

    @property
    def steps(self):
        """How many there will be."""
        return self.values["steps"]

    def check_that_nothing_is_lost(self):
        """UserError if the state of an unfinished run is there, and nobody said that it may be overwritten."""
        try:
            was = read_file(self.state_path, ("state",))["values"]
            unfinished = not was.get("done")
        except (UserError, KeyError):  # there is none, or none that could be used
            unfinished = False
        if unfinished and not self.run.overwrite:
            where = f"{self.state_path}: a run was interrupted at step {was['step']} of {was['steps']}"
            raise UserError(f"{where}; --resume goes on with it, --overwrite begins again")

    def open_log(self):
        """From here on the files of an earlier run are overwritten. One line a step; those after the last save are made again."""
        lines = self.log_path.read_text().splitlines(True) if self.on_disk and self.log_path.exists() else []
        lines = [line for line in lines if step_of(line) <= self.on_disk]
        if len(lines) < self.on_disk:
            print(f"{self.log_path} holds {len(lines)} of {self.on_disk} steps")
        self.log_path.write_text("".join(lines))
        self.log = open(self.log_path, "a")
        if self.run.tensorboard:
            self.board = Board(self.run.out / "tensorboard" / self.kind, lines)
        if not self.on_disk:
            self.state_path.unlink(missing_ok=True)  # it must not be mistaken for this run's

    def load(self):
        state = read_file(self.state_path, ("state",), mmap=False)  # what an optimizer loads it keeps: no mapping of the file
        was = state.get("settings", {})
        if any(name not in was for name in self.settings):
            raise UserError(f"{self.state_path} was saved by another version; --overwrite begins again")
        if was["rows"] != self.settings["rows"]:
            raise UserError(f"{self.state_path}: data or vocabulary have changed since it was saved; --overwrite begins again")
        differ = [f"{name} = {was[name]}" for name, value in self.settings.items() if was[name] != value]
        if differ:
            raise UserError(f"{self.state_path} was saved with {', '.join(differ)}; repeat that, or --overwrite it")
        for name, facts in self.made_from.items():
            if state.get("made_from", {}).get(name) != facts:
                raise UserError(f"{name}.pt has been made again since {self.state_path} was saved; --overwrite begins again")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            set_random_state(state["random"])
            self.values = state["values"]
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.state_path}: damaged, or another version's ({type(error).__name__}); --overwrite begins again")
        model = self.run.out / f"{self.kind}.pt"
        if self.values.get("done") and self.kind != "ppo":  # train_ppo.py goes on to its report
            if not model.exists():
                raise UserError(f"{model} is gone; --overwrite makes it again")
            print(f"{model} is finished; --overwrite makes it again")
            sys.exit()

    def remaining(self, batches):
        """Yield the batches of the steps that are still to be made."""
        for step, batch in enumerate(batches):
            if step >= self.steps:
                return
            if step >= self.step:
                self.random, self.changed = random_state(), False
                yield batch

    def note_change(self, *_):
        """Called after each step of the optimizer."""
        self.changed = True

    def rate(self, step=None):
        """The share of the peak learning rate: a linear climb, then a straight line from [step, share] down to 0."""
        step, (start, share) = self.step if step is None else step, self.values["fall"]
        climb = (step + 1) / (self.warmup + 1)
        return min(climb, share * (self.steps - step) / max(1, self.steps - start))

    def ask(self, number, frame):
        """At the first Ctrl-C or SIGTERM the loop ends its step and saves; a second one kills."""
        self.asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    def due(self):
        """Is the validation loss to be looked at in this step? In the last one it is."""
        step = self.step + 1
        return step == self.steps or any(step == round(FIRST_CHECK * MORE**k) for k in range(40))

    def is_best(self, facts):
        """Is facts["val_loss"] the lowest so far? If the loss no longer falls, and nobody has fixed the length of the run, the
        learning rate begins to. FloatingPointError if the loss is no number."""
        loss, step, checks = facts["val_loss"], self.step + 1, self.values["checks"]
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {step}: the validation loss is {loss}")
        best = min((x for number, x in checks.items() if number < step), default=math.inf)
        checks[step] = loss
        if self.automatic and "stopped" not in self.values and AT_LEAST <= step < self.steps and loss > (1 - GAIN) * best:
            end = min(self.steps, step + step // 3)
            self.values |= {"fall": [step, self.rate(step)], "steps": end, "stopped": step}
            print(f"step {step}: the validation loss no longer falls; the learning rate does, to 0 at step {end}")
        return loss <= best

    def load_best(self, model):
        """The model in training becomes the best one, in eval mode: no second one is in memory, and its gradients no longer are."""
        model.zero_grad()  # first: what it frees is enough for what is read
        model.load_state_dict(read_file(self.best, [self.kind], mmap=False)["model"])
        model.eval()

    def ending(self):
        """Why there were so many steps, in a sentence; a warning if more would have helped."""
        if not self.automatic:
            return f"all {self.steps:,} steps of --epochs are done"
        if "stopped" in self.values:
            return f"the validation loss stopped falling at step {self.values['stopped']:,}"
        half = [x for step, x in sorted(self.values["checks"].items()) if step <= self.steps / 2][-1:]
        if not half or min(self.values["checks"].values()) < (1 - MUCH) * half[0]:
            return f"warning: the validation loss was still falling when --max_steps {self.steps} ended the training"
        return f"all {self.steps:,} steps of --max_steps are done"

    def end_step(self, tokens, show, /, **metrics):
        """Log the metrics of a step, print those named in `show` every few seconds; save now and then, or when asked."""
        if self.log is None:
            self.open_log()
        seconds = time.perf_counter() - self.began
        speed = tokens / (seconds - self.values["seconds"])
        step = self.values["step"] = self.values["step"] + 1
        self.values["seconds"], self.random, self.changed = seconds, random_state(), False
        record = {"step": step, **metrics, "tokens_per_second": round(speed), "seconds": round(seconds, 2)}
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()
        if self.board:
            self.board.add(record)
        if time.perf_counter() - self.shown > 4 or "val_loss" in metrics or step == self.steps:
            self.shown = time.perf_counter()
            numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in show if name in metrics)
            times = f"{clock(seconds)}, {clock(seconds / step * (self.steps - step))} left"
            print(f"step {step:>4}/{self.steps}  {numbers}  {speed:,.0f} tokens/s  {times}", flush=True)
        long_ago = time.perf_counter() - self.saved > max(SECONDS, 20 * self.saving)
        if self.asked or long_ago or step % self.run.save_every == 0 or step == self.steps:
            self.save()
        if self.asked:
            raise KeyboardInterrupt(f"step {step} is saved, --resume goes on from there")
        if step == self.steps:
            AT_ERROR.clear()
            signal.signal(signal.SIGINT, self.stop)  # from here on, Ctrl-C has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop(self, number, frame):
        raise KeyboardInterrupt(f"step {self.step} is saved, --resume goes on from there")

    def done(self):
        """The model of this run is in its file: a new run may begin without a word, and --resume has nothing to train."""
        self.values["done"] = True
        self.save()

    def save(self):
        start = time.perf_counter()
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state = {"kind": "state", "settings": self.settings, "made_from": self.made_from, "values": self.values}
        write_file(self.state_path, state | {"random": self.random} | parts)
        self.saved, self.on_disk = time.perf_counter(), self.step
        self.saving = self.saved - start

    def rescue(self, error):
        """Save the steps before the one that has failed, unless it has changed the weights already -> a sentence."""
        if self.step > self.on_disk and not self.changed:
            try:
                self.save()
            except UserError:
                pass
        again = "" if isinstance(error, FloatingPointError) else ", --resume goes on from there"  # that would fail again
        return f"step {self.on_disk} is saved{again}" if self.on_disk else ""
