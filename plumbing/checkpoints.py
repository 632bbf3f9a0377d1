"""Models in files, read without running any code that the files hold."""

import dataclasses
from pathlib import Path

import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing import files
from plumbing.settings import UserError
from plumbing.text import Tokenizer


def write_file(path, contents):
    """torch.save, whole or not at all."""
    files.write_file(path, lambda file: torch.save(contents, file))


def read_file(path, kinds, mmap=True):
    """What write_file wrote, as a dict on the CPU; UserError unless whole and of one of `kinds`.

    mmap: the weights stay on the disk until they are copied into a model.
    """
    hint = "leave --resume out" if kinds[0] == "state" else f"train_{kinds[0]}.py makes it"
    if not Path(path).is_file():
        raise UserError(f"{path}: not found; {hint}")
    try:  # weights_only: a pickle that would run code is refused
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        kind = contents["kind"]
    except Exception as error:  # torch.load raises many kinds of error at a damaged file
        raise UserError(f"{path}: damaged, or no checkpoint ({type(error).__name__}); {hint}")
    if kind not in kinds:
        raise UserError(f"{path}: holds {kind!r}, not {' or '.join(kinds)!r}; {hint}")
    return contents


def save_checkpoint(path, kind, model, tokenizer, **facts):
    """All that a model needs, in one file. kind: "sft" or "ppo" (a GPT), "rm" (a RewardModel)."""
    vocabulary = [token.decode("latin-1") for token in tokenizer.tokens]
    contents = {"kind": kind, "config": dataclasses.asdict(model.config), "vocabulary": vocabulary}
    write_file(path, contents | {"model": model.state_dict(), "facts": facts})


def load_checkpoint(path, kinds, device="cpu"):
    """A checkpoint of one of `kinds` -> model in eval mode, tokenizer, facts saved with it."""
    contents = read_file(path, kinds)
    try:
        model = (RewardModel if contents["kind"] == "rm" else GPT)(GPTConfig(**contents["config"]))
        model.load_state_dict(contents["model"])
        tokenizer = Tokenizer([token.encode("latin-1") for token in contents["vocabulary"]])
        return model.to(device).eval(), tokenizer, contents["facts"]
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        found = f"damaged, or made by another version ({type(error).__name__})"
        raise UserError(f"{path}: {found}; make it again")
