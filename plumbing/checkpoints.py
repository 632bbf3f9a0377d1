"""Models in files: written whole or not at all, and read without running any code that they hold."""

import dataclasses
import os
from pathlib import Path

import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing.settings import UserError
from plumbing.text import Tokenizer


def write_file(path, contents):
    """torch.save beside the file and rename: whatever happens, the path holds an old or a new version, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a name of this process alone
    try:
        with open(beside, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({reason(error)}); what was there before is still there")


def reason(error):
    """What went wrong, in a few words. torch.save hides the system's error behind one of its own, with a long text."""
    while error.__context__ and not isinstance(error, OSError):
        error = error.__context__
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def read_file(path, kinds, mmap=True):
    """What write_file wrote, as a dict on the CPU; UserError unless it is whole and its "kind" is one of `kinds`. mmap: it stays on
    the disk until it is copied into a model."""
    hint = "leave --resume out" if kinds[0] == "state" else f"train_{kinds[0]}.py makes it"
    if not Path(path).is_file():
        raise UserError(f"{path}: not found; {hint}")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)  # a pickle that would run code is refused
        kind = contents["kind"]
    except Exception as error:  # torch.load raises many kinds of error at a damaged file
        raise UserError(f"{path}: damaged, or no checkpoint ({type(error).__name__}); {hint}")
    if kind not in kinds:
        raise UserError(f"{path}: holds {kind!r}, not {' or '.join(kinds)!r}; {hint}")
    return contents


def save_checkpoint(path, kind, model, tokenizer, **facts):
    """Everything needed to use the model, in one file. kind: "sft" or "ppo" (a GPT), or "rm" (a RewardModel)."""
    vocabulary = [token.decode("latin-1") for token in tokenizer.tokens]
    config = dataclasses.asdict(model.config)
    write_file(Path(path), {"kind": kind, "config": config, "vocabulary": vocabulary, "model": model.state_dict(), "facts": facts})


def load_checkpoint(path, kinds, device="cpu"):
    """A checkpoint of one of `kinds` -> model in eval mode, tokenizer, and the dict of facts saved with it."""
    contents = read_file(path, kinds)
    try:
        model = (RewardModel if contents["kind"] == "rm" else GPT)(GPTConfig(**contents["config"]))
        model.load_state_dict(contents["model"])
        tokenizer = Tokenizer([token.encode("latin-1") for token in contents["vocabulary"]])
        return model.to(device).eval(), tokenizer, contents["facts"]
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: damaged, or made by another version ({type(error).__name__}); make it again")
