"""Models in files, and rewards that are functions of texts."""

import importlib
import sys

import torch

from data.rows import UserError
from minippo import GPT, GPTConfig, RewardModel, row_lengths
from plumbing.files import find_model, file_hash, read_torch
from plumbing.text import Tokenizer, responses_of


def load_checkpoint(path, kinds, device="cpu"):
    """A checkpoint of one of `kinds` -> model in eval mode, tokenizer, metadata."""
    contents = read_torch(path, f"train_{kinds[0]}.py makes it")
    if contents["kind"] not in kinds:
        raise UserError(f"{path}: holds {contents['kind']!r}, not {' or '.join(kinds)}")
    try:
        model = GPT(GPTConfig(**contents["config"]))
        if contents["kind"] == "rm":
            model = RewardModel(model)
        model.load_state_dict(contents["model"])
        tokenizer = Tokenizer([token.encode("latin-1") for token in contents["vocabulary"]])
        metadata = contents["metadata"]
    except Exception as error:  # the file may hold anything
        name = type(error).__name__
        raise UserError(f"{path}: damaged, or of another version ({name}); train it again")
    return model.to(device).eval(), tokenizer, metadata


def load_sft(config, device):
    """-> the SFT model, tokenizer."""
    path = find_model(config, "sft")
    model, tokenizer, _ = load_checkpoint(path, ["sft"], device)
    print(f"read {path}")
    return model, tokenizer


def load_from_same_sft(path, kinds, config, device):
    """A model that was trained from the SFT model of this run, or is it; else UserError."""
    model, _, metadata = load_checkpoint(path, kinds, device)
    sft = file_hash(find_model(config, "sft"))
    if sft not in (metadata.get("settings", {}).get("sft"), file_hash(path)):
        raise UserError(f"{path}: was trained from another sft.pt; train it again")
    print(f"read {path}")
    return model


def load_score(config, tokenizer, device):
    """-> score(prompts, tokens, mask) -> (B,): the frozen reward model or, with --reward, a function
    of texts."""
    if config.reward:
        return text_score(load_function(config.reward), tokenizer)
    reward_model = load_from_same_sft(find_model(config, "rm"), ["rm"], config, device)
    reward_model.requires_grad_(False)

    def score(prompts, tokens, mask):
        return reward_model(tokens, row_lengths(mask))

    return score


def load_function(name):
    """ "module:function" -> the function."""
    module, _, function = name.partition(":")
    sys.path.append("")  # the current folder, last
    try:
        attribute = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module is the user's: it may raise anything
        hint = "give module:function, for instance my:score for score() in my.py"
        raise UserError(f"{name}: {type(error).__name__}: {error}; {hint}")
    if not callable(attribute):
        raise UserError(f"{name}: not a function")
    return attribute


def text_score(function, tokenizer):
    """A reward with TRL's signature -> score(prompts, tokens, mask) -> (B,).

    The function gets prompts and completions (lists of texts), completion_ids, and the other keys
    of the user's rows as lists by name. It returns a number for each completion.
    """

    def score(prompts, tokens, mask):
        names = dict.fromkeys(name for prompt in prompts for name in prompt.row)
        columns = {name: [prompt.row.get(name) for prompt in prompts] for name in names}
        columns["prompts"] = columns.pop("prompt")
        columns["completion_ids"] = responses_of(tokens, mask)
        columns["completions"] = [tokenizer.decode(ids) for ids in columns["completion_ids"]]
        with torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):  # it may seed torch
            numbers = function(**columns)
        wanted = f"--reward: wanted a finite number for each of {len(prompts)} completions"
        try:
            scores = torch.as_tensor(numbers, dtype=torch.float32, device=tokens.device).detach()
        except (TypeError, ValueError, RuntimeError):  # not numbers
            raise UserError(f"{wanted}, not {numbers!r:.200}")
        if scores.shape != (len(prompts),) or not scores.isfinite().all():
            raise UserError(f"{wanted}, not {numbers!r:.200}")
        return scores

    return score
