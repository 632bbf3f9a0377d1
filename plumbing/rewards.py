"""Where scores come from: a reward model, or any function of prompts and responses. Both end as score(tokens, mask) -> (B,)."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from minippo import GPT, RewardModel, frozen_copy, row_lengths
from plumbing.checkpoints import load_checkpoint
from plumbing.settings import UserError
from plumbing.text import Tokenizer, texts_of


@dataclass
class Models:
    policy: GPT  # the SFT model, to be trained
    reward_model: RewardModel | None  # frozen; None where a function takes its place
    score: Callable  # (tokens, mask) -> (B,)
    tokenizer: Tokenizer
    facts: dict  # the figures that were saved with the models: {"sft": ..., "rm": ...}


def load_models(folder, device, reward=""):
    """sft.pt of a folder and its rm.pt, or instead of the latter the function that `reward` names -> Models."""
    policy, tokenizer, sft_facts = load_checkpoint(Path(folder) / "sft.pt", ["sft"], device)
    if reward:
        return Models(policy, None, text_reward(load_function(reward), tokenizer), tokenizer, {"sft": sft_facts})
    reward_model, rm_tokenizer, rm_facts = load_checkpoint(Path(folder) / "rm.pt", ["rm"], device)
    if rm_tokenizer.tokens != tokenizer.tokens or reward_model.config != policy.config:
        raise UserError(f"{folder}: rm.pt was not made from sft.pt; run train_rm.py again after train_sft.py")
    reward_model = frozen_copy(reward_model)

    def score(tokens, mask):
        return reward_model(tokens, row_lengths(mask))

    return Models(policy, reward_model, score, tokenizer, {"sft": sft_facts, "rm": rm_facts})


def load_function(name):
    """"module:function" -> the function; the module is looked for in the current folder too."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"{function} is no function")
        return found
    except (ImportError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"--reward {name}: {error}; should be module:function, for instance my:score for score() in my.py")


def text_reward(function, tokenizer):
    """A function of lists of prompts and responses, (texts, texts) -> numbers, as score(tokens, mask) -> (B,)."""

    def score(tokens, mask):
        scores = function(*texts_of(tokenizer, tokens, mask))
        try:
            scores = torch.tensor([float(x) for x in scores], device=tokens.device)
        except (TypeError, ValueError, RuntimeError):  # no list, or a list of something else
            scores = torch.tensor([])
        if len(scores) != len(tokens) or not scores.isfinite().all():
            wanted = f"{len(tokens)} responses should get {len(tokens)} finite numbers"
            raise UserError(f"--reward: {wanted}, got {scores.tolist()}"[:200])
        return scores

    return score
