"""Files that are written whole or not at all; the log and the state of a run."""

import hashlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch

from data.rows import UserError
from plumbing.settings import NOT_COMPARED

SAVE_SECONDS = 30  # between two saved states
SHOW_SECONDS = 4  # between two lines on the screen


def write_file(path, write):
    """write(file) writes beside the path; then the file is renamed. So the path always holds the
    old version or the new one, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise UserError(f"{path}: cannot be written ({str(error)[:120]}); an old file is intact")
    finally:
        beside.unlink(missing_ok=True)


def write_text(path, text):
    write_file(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_torch(path, contents):
    write_file(path, lambda file: torch.save(contents, file))


def read_torch(path, hint):
    """What write_torch wrote, on the CPU; no code in the file is run. UserError if it is missing or
    damaged."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; {hint}")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        contents["kind"]  # every file of ours has one
    except Exception as error:  # torch.load raises many kinds
        name = type(error).__name__
        raise UserError(f"{path}: damaged, or not a file of minippo ({name}); {hint}")
    return contents


def file_hash(path):
    """A short hash of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def find_model(config, name):
    """The path of a model of an earlier stage, sft or rm: in the folder --models; without it in
    --out or, if it is not there, in the folder above. UserError if its training has not ended."""
    folders = [Path(config.models)] if config.models else [config.out, config.out.parent]
    for folder in folders:
        path = folder / f"{name}.pt"
        if path.exists():
            return path
        if (folder / f"{name}_state.pt").exists():
            raise UserError(f"{folder}: train_{name}.py has not ended; --resume continues it")
    return folders[0] / f"{name}.pt"


def read_log(path):
    """The lines of a log as dicts, up to the first damaged one: a killed run leaves such an end."""
    lines = []
    try:
        for line in Path(path).read_bytes().split(b"\n"):
            lines.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return lines


class Record:
    """What a run writes: its log, its state and, at the end, its model, out/STAGE.jsonl,
    out/STAGE_state.pt and out/STAGE.pt.

    models: names of those that it starts from. inputs: numbers that other data would change, such
    as that of the rows. --resume compares both, and the settings.
    """

    def __init__(self, config, stage, steps, model, optimizer, models=(), **inputs):
        self.state_path = config.out / f"{stage}_state.pt"
        self.log_path = config.out / f"{stage}.jsonl"
        self.model_path = config.out / f"{stage}.pt"
        self.settings = {**config.settings(), **inputs}
        for name in models:
            self.settings[name] = file_hash(find_model(config, name))
        self.device = next(model.parameters()).device
        self.parts = {"model": model, "optimizer": optimizer}
        self.steps = steps

    def begin(self, resume):
        """-> the first step. With resume, model and optimizer get their saved state; UserError if
        the settings were others."""
        if self.steps < self.settings["steps"]:
            print(f"{self.steps:,} steps: --epochs allows no more on these data")
        self.first = self.load() if resume else 0
        self.save(self.first)  # now an earlier run is overwritten
        if self.first == 0:
            self.model_path.unlink(missing_ok=True)
        lines = [line for line in read_log(self.log_path) if line["step"] <= self.first]
        write_text(self.log_path, "".join(json.dumps(line) + "\n" for line in lines))
        self.log_file = open(self.log_path, "a", buffering=1, encoding="utf-8")  # line by line
        self.start = time.monotonic()
        self.next_show = 0.0
        return self.first

    def load(self):
        if not self.state_path.exists():
            if self.model_path.exists():
                missing = f"there is no {self.state_path.name} to continue from"
                raise UserError(f"{self.model_path}: {missing}; --overwrite replaces it")
            print(f"--resume: there is no {self.state_path}, so the run starts at the beginning")
            return 0
        contents = read_torch(self.state_path, "--overwrite starts again")
        old = contents["settings"]
        for name in self.settings | old:  # another algorithm has other names
            setting = self.settings.get(name)
            if name not in NOT_COMPARED and old.get(name) != setting:
                was = f"{name} = {old.get(name)}, not {setting}"
                raise UserError(f"{self.state_path}: saved with {was}; --overwrite starts again")
        for name, part in self.parts.items():
            part.load_state_dict(contents[name])
        torch.set_rng_state(contents["random"])
        if self.device.type == "cuda" and "random_cuda" in contents:
            torch.cuda.set_rng_state(contents["random_cuda"], self.device)
        print(f"continuing after step {contents['step']} of {self.steps}")
        return contents["step"]

    def save(self, step):
        """`step` steps are done."""
        start = time.monotonic()
        contents = {name: part.state_dict() for name, part in self.parts.items()}
        contents |= {"kind": "state", "step": step, "settings": self.settings}
        contents["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            contents["random_cuda"] = torch.cuda.get_rng_state(self.device)
        write_torch(self.state_path, contents)
        end = time.monotonic()
        self.next_save = end + max(SAVE_SECONDS, 20 * (end - start))  # large models: rarely

    def save_if_due(self, step):
        """Every half minute, and at the end."""
        if step == self.steps or time.monotonic() > self.next_save:
            self.save(step)

    def log(self, step, stats, show):
        """show: names of the numbers that the screen shows."""
        time_now = time.monotonic()
        seconds = time_now - self.start
        line = {"step": step, **stats, "seconds": round(seconds, 2)}  # since it began or resumed
        line["lr"] = self.parts["optimizer"].param_groups[0]["lr"]
        self.log_file.write(json.dumps(line) + "\n")
        if time_now > self.next_show or step == self.steps or "val_loss" in stats:
            self.next_show = time_now + SHOW_SECONDS
            numbers = "  ".join(f"{name} {stats[name]:.3g}" for name in show if name in stats)
            left = int(seconds / (step - self.first) * (self.steps - step))
            clock = f"{left // 60}:{left % 60:02d}"
            print(f"{step:>5}/{self.steps}  {numbers}  {clock} left", flush=True)

    def save_model(self, model, tokenizer, **metadata):
        """All that a model needs, in one file. A finished run keeps its file."""
        if self.model_path.exists():
            print(f"{self.model_path} was there already")
            return
        contents = {"kind": self.model_path.stem, "config": asdict(model.config)}
        contents["vocabulary"] = [token.decode("latin-1") for token in tokenizer.tokens]
        contents["model"] = model.state_dict()
        contents["metadata"] = metadata | {"settings": self.settings}
        write_torch(self.model_path, contents)
        print(f"saved {self.model_path}")
