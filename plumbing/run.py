"""A training run: the optimizer, the batches, the steps across interruptions, log and screen, and
the best weights."""

import hashlib
import json
import math
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from data.files import UserError, read_log, write_jsonl
from data.zoo import judge_of
from minippo import frozen_copy, mean_stats
from plumbing.models import model_fingerprints, read_contents, save_checkpoint, write_contents
from plumbing.page import json_safe, traced, watch, write_page
from plumbing.text import by_length, chunks, spread_over

# Settings that --resume may change: where things are (their contents are compared), what is written
# besides, and what alters only rounding and random draws.
MAY_CHANGE = "data out models policy device resume overwrite tensorboard no_report micro_batch"
SAVE_SECONDS, SHOW_SECONDS = 30, 4  # between two saves; between two lines on the screen
VALIDATIONS, VALIDATION_ROWS = 10, 1000  # validations per run; rows per validation


def limited_steps(config, rows):
    """-> config.steps, or fewer if config.epochs passes over so many rows take fewer."""
    steps = math.ceil(config.epochs * rows / config.batch_size)
    if steps < config.steps:
        print(f"{steps:,} steps, not {config.steps:,}: --epochs {config.epochs} of {rows:,} rows")
    return min(steps, config.steps)


def adam(model, config):
    """Adam, and the schedule of its learning rates. A value head on the policy's trunk, which has
    far to go, learns 30 times as fast as the rest."""
    head, rest = [], []
    for name, parameter in model.named_parameters():
        on_trunk = name.startswith("value_head") and model.value_trunk is None
        (head if on_trunk else rest).append(parameter)
    groups = [{"params": rest}, {"params": head, "lr": 30 * config.lr}]
    eps = getattr(config, "adam_eps", 1e-8)
    if not eps > 0:  # a gradient of 0 would become 0 / 0
        raise UserError(f"--adam_eps {eps}: should be above 0")
    optimizer = torch.optim.Adam(groups, config.lr, betas=(0.9, 0.99), eps=eps, fused=True)
    warmup = min(config.warmup, config.steps // 10)

    def share(step):  # of the peak
        return min((step + 1) / (warmup + 1), (config.steps - step) / (config.steps - warmup))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


class Run:
    """The steps of a run, one after the other, even if it is interrupted. kind: "sft", "rm" or
    "ppo". data: nested lists. ref: the reference of PPO, saved too if it moves. validation: rows,
    loss_of(rows) -> loss, stats, and count(rows), how many these are means over. Ten times in a run
    the stats are computed on some of the rows, and the weights of the lowest loss are kept."""

    def __init__(
        self, kind, config, model, tokenizer, optimizer, schedule, data, ref=None, validation=None
    ):
        self.kind, self.config, self.model, self.tokenizer = kind, config, model, tokenizer
        self.optimizer, self.ref, self.models_before = optimizer, ref, None
        self.validation = validation
        self.stateful = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if getattr(config, "ref_update_every", 0):
            self.stateful["ref"] = ref
        self.judge = judge_of(config.data) if kind == "ppo" else None
        digest = hashlib.sha256(repr((data, tokenizer.tokens)).encode()).hexdigest()[:16]
        self.fingerprints = {"data": digest, **model_fingerprints(config)}
        self.settings = {x: y for x, y in vars(config).items() if x not in MAY_CHANGE.split()}
        self.settings |= self.fingerprints
        self.state_path, self.log_path, self.path, self.best_path = (
            config.out / f"{kind}{end}" for end in ("_state.pt", ".jsonl", ".pt", "_best.pt")
        )
        self.step, self.seconds, self.done, self.best_loss = 0, 0.0, False, math.inf
        self.log = self.board = None
        if Path(getattr(config, "policy", "")).resolve() == self.path.resolve():
            raise UserError(f"--policy {config.policy}: would be replaced; choose another --out")
        if config.resume and self.state_path.exists():
            self.load()
        elif self.state_path.exists() and not config.overwrite:
            hint = "--resume continues it, --overwrite starts over"
            raise UserError(f"{self.state_path}: a run already exists; {hint}")
        elif self.path.exists() and not config.overwrite:
            raise UserError(f"{self.path}: a model already exists; --overwrite makes it again")
        elif config.resume:
            print(f"--resume: {self.state_path} is not there, so this run starts at the beginning")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a package that not everybody has

            self.board = SummaryWriter(config.out / "tensorboard", purge_step=self.step + 1)

    # Saving, and going on

    SAVED = "settings", "step", "seconds", "done", "best_loss"

    def save(self):
        start = time.perf_counter()
        contents = {name: part.state_dict() for name, part in self.stateful.items()}
        contents |= {name: getattr(self, name) for name in self.SAVED}
        contents |= {"kind": "state", "kl_coef": getattr(self.config, "kl_coef", None)}
        contents["random"] = torch.get_rng_state()
        if self.config.device.startswith("cuda"):
            contents["cuda"] = torch.cuda.get_rng_state(self.config.device)
        write_contents(self.state_path, contents)
        self.saved = time.perf_counter()
        self.saving = self.saved - start

    def load(self):
        again = "--overwrite starts over"
        contents = read_contents(self.state_path, ["state"], again)
        old = contents["settings"]
        for name in {**old, **self.settings}:  # flags first, then what they lead to
            if old.get(name) != self.settings.get(name):
                was = f"other {name}" if name in self.fingerprints else f"{name} = {old.get(name)}"
                raise UserError(f"{self.state_path} was saved with {was}; use the same ({again})")
        for name, part in self.stateful.items():
            part.load_state_dict(contents[name])
        for name in self.SAVED:
            setattr(self, name, contents[name])
        self.config.kl_coef = contents["kl_coef"]  # of PPO, which may have adapted it
        torch.set_rng_state(contents["random"])
        if self.config.device.startswith("cuda") and "cuda" in contents:
            torch.cuda.set_rng_state(contents["cuda"], self.config.device)
        config = self.config
        reported = self.kind != "ppo" or config.no_report or (config.out / "report.json").exists()
        if self.done and reported and self.path.exists():
            print(f"{self.path} is finished; --overwrite makes it again")
            sys.exit()

    def steps(self):
        """Yield the steps that are left. After Ctrl-C or SIGTERM the loop ends its step, saves and
        stops."""
        self.model.train(self.validation is not None)  # PPO samples and updates in eval mode
        self.began = time.perf_counter() - self.seconds
        self.shown = self.saved = -math.inf  # the first step is shown and saved
        self.saving = 0.0
        self.interrupted, self.warned = False, set()
        handlers = {x: signal.signal(x, self.interrupt) for x in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.step < self.config.steps:
                self.lr = self.optimizer.param_groups[0]["lr"]
                if self.ref and traced(self.step + 1, self.config.steps):
                    self.models_before = [frozen_copy(x) for x in (self.model, self.ref)]
                yield self.step
                self.models_before = None
                if self.interrupted:
                    self.save()
                    raise KeyboardInterrupt(f"stopped; step {self.step} is saved, --resume goes on")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def interrupt(self, number, frame):
        self.interrupted = True
        print("stopping after this step", flush=True)

    def batch(self, rows, size):
        """Rows for this step: in each pass every row comes once, in random order, and a batch may
        go on from one pass into the next."""
        epoch, start = divmod(self.step * size, len(rows))
        order = np.empty(0, int)
        while len(order) < start + size:
            rng = np.random.default_rng([self.config.seed, epoch])
            order = np.append(order, rng.permutation(len(rows)))
            epoch += 1
        return [rows[i] for i in order[start : start + size]]

    # The end of a step, and of the run

    def end_step(self, stats, rollout=None):
        """Watch, log and show what has happened, and save the state now and then. rollout: of PPO,
        as it was before the update."""
        self.step += 1
        if self.validation:
            show, more = ["loss", "accuracy", "val_loss", "val_accuracy"], self.validate_if_due()
        else:
            show = ["score", "judge", "kl", "entropy", "eos_rate"]
            more = watch(self, stats, rollout)
        stats, now, last = stats | more, time.perf_counter(), self.step == self.config.steps
        self.seconds = now - self.began
        line = {"step": self.step, **stats, "lr": self.lr, "seconds": round(self.seconds, 2)}
        self.write_log(json_safe(line))
        if last or now - self.saved > max(SAVE_SECONDS, 20 * self.saving):
            self.save()
            if self.kind == "ppo":
                write_page(self)
        if last or now - self.shown > SHOW_SECONDS or "val_loss" in stats:
            self.shown = now
            numbers = "  ".join(f"{name} {stats[name]:.3g}" for name in show if name in stats)
            left = clock(self.seconds / self.step * (self.config.steps - self.step))
            step = "iteration" if self.kind == "ppo" else "step"
            place = f"{step} {self.step:>4}/{self.config.steps}"
            print(f"{place}  {numbers}  {clock(self.seconds)}, {left} left", flush=True)

    def write_log(self, line):
        """Log this step. Lines after the last save are dropped: those steps are repeated."""
        if self.log is None:  # from here on the files of an earlier run are overwritten
            lines = [x for x in read_log(self.log_path) if x["step"] < self.step]
            write_jsonl(self.log_path, lines)
            self.log = open(self.log_path, "a", buffering=1)  # lines are written at once
            if self.step == 1:  # they must not be mistaken for this run's
                self.state_path.unlink(missing_ok=True)
                if self.kind == "ppo":
                    (self.config.out / "report.json").unlink(missing_ok=True)
        self.log.write(json.dumps(line) + "\n")
        for name, x in line.items() if self.board else ():
            if isinstance(x, int | float):
                self.board.add_scalar(f"{self.kind}/{name}", x, line["step"])

    @torch.no_grad()
    def validate(self, most=math.inf):
        """The stats on at most so many validation rows, short and long ones."""
        rows, loss_of, count = self.validation
        rows = spread_over(by_length(rows), most)
        self.model.eval()
        parts = chunks(rows, self.config.micro_batch)
        stats = mean_stats([(count(x) / count(rows), loss_of(x)[1]) for x in parts])
        self.model.train()
        return {f"val_{name}": x for name, x in stats.items()}

    def validate_if_due(self):
        """The metrics of a validation, if it is time for one. The best weights so far are kept."""
        step, count = self.step, self.config.steps
        if step * VALIDATIONS // count == (step - 1) * VALIDATIONS // count:
            return {}
        metrics = self.validate(VALIDATION_ROWS)
        if metrics["val_loss"] <= self.best_loss:
            self.best_loss = metrics["val_loss"]
            save_checkpoint(self.best_path, self.kind, self.model, self.tokenizer)
        return metrics

    def load_best(self):
        """The best weights into the model -> its metrics on all validation rows."""
        best = read_contents(self.best_path, [self.kind], "--overwrite starts over")
        self.model.load_state_dict(best["model"])
        metrics = self.validate()
        self.model.eval()
        return metrics

    def finish(self, **metadata):
        """Write the model. From now on --resume has nothing to train."""
        if self.step == 0:  # trained by other code: log and traces can only be of an earlier run
            self.log_path.unlink(missing_ok=True)
            (self.config.out / "ppo_traces.jsonl").unlink(missing_ok=True)
        if "sft.pt" in self.fingerprints:
            metadata["sft"] = self.fingerprints["sft.pt"]
        save_checkpoint(self.path, self.kind, self.model, self.tokenizer, **metadata)
        self.done = True
        self.save()
        self.best_path.unlink(missing_ok=True)
        print(f"saved {self.path}")


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
