"""Models in files, read without running any code that the files hold."""

import dataclasses
import hashlib
from pathlib import Path

import torch

from data.files import UserError, write_file
from minippo import GPT, GPTConfig, RewardModel
from plumbing.tokenizer import Tokenizer


def write_contents(path, contents):
    """torch.save, whole or not at all."""
    write_file(path, lambda file: torch.save(contents, file))


def read_contents(path, kinds, mmap=True):
    """What write_contents wrote, as a dict on the CPU; UserError unless it is whole, and one of `kinds`.

    mmap: the weights stay on the disk until they are copied into a model.
    """
    hint = f"train_{kinds[0]}.py makes it" if kinds[0] != "state" else "--overwrite begins again"
    if not Path(path).is_file():
        raise UserError(f"{path}: not found; {hint}")
    try:  # weights_only: a pickle that would run code is refused
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        kind = contents["kind"]
    except Exception as error:  # torch.load raises many kinds of error at a damaged file
        raise UserError(f"{path}: damaged, or no checkpoint ({type(error).__name__}); {hint}")
    if kind not in kinds:
        raise UserError(f"{path}: holds {kind!r}, not {' or '.join(map(repr, kinds))}; {hint}")
    return contents


def save_checkpoint(path, kind, model, tokenizer, **facts):
    """All that a model needs, in one file. kind: "sft" or "ppo" (a GPT), "rm" (a RewardModel).
    facts: figures, and "sft", the fingerprint of the SFT model that it was made from."""
    vocabulary = [token.decode("latin-1") for token in tokenizer.tokens]
    contents = {"kind": kind, "config": dataclasses.asdict(model.config), "vocabulary": vocabulary}
    write_contents(path, contents | {"model": model.state_dict(), "facts": facts})


def load_checkpoint(path, kinds, device="cpu"):
    """A checkpoint of one of `kinds` -> model in eval mode, tokenizer, facts saved with it."""
    contents = read_contents(path, kinds)
    try:
        model = (RewardModel if contents["kind"] == "rm" else GPT)(GPTConfig(**contents["config"]))
        model.load_state_dict(contents["model"])
        tokenizer = Tokenizer([token.encode("latin-1") for token in contents["vocabulary"]])
        return model.to(device).eval(), tokenizer, contents["facts"]
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        found = f"damaged, or made by another version ({type(error).__name__})"
        raise UserError(f"{path}: {found}; make it again")


def load_weights(path, kind, model):
    """The weights of a checkpoint into a model in training, which goes into eval mode. No second
    model is in memory, and its gradients no longer are."""
    model.zero_grad()  # first: what it frees is enough for what is read
    model.load_state_dict(read_contents(path, [kind], mmap=False)["model"])
    model.eval()


def fingerprint(model):
    """A few letters that change with the weights, and with nothing else."""
    digest = hashlib.sha256()
    for x in model.state_dict().values():
        digest.update(x.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
