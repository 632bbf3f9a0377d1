"""The models that stage 3 needs. Scores come from a reward model, or from any function of prompts and
responses. Both end as score(tokens, mask) -> (B,)."""

import dataclasses
import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from minippo import GPT, RewardModel, frozen_copy, row_lengths
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import UserError
from plumbing.training import add_critic
from plumbing.tokenizer import Tokenizer, texts_of

LARGEST = 1e6  # score; with far larger ones the loss is no number


@dataclass
class Models:
    policy: GPT  # to be trained: the SFT model, unless another is given
    reference: GPT  # frozen: the SFT model, unless another is given
    reward_model: RewardModel | None  # frozen; None where a function takes its place
    score: Callable  # (tokens, mask) -> (B,)
    tokenizer: Tokenizer
    facts: dict  # the figures that the models are known by: {"sft": ..., "rm": ...}


def load_models(folder, device, reward="", policy="", reference="", separate_critic=False):
    """sft.pt of a folder and its rm.pt, or instead of the latter the function that `reward` names.

    policy, reference: checkpoints that take the place of sft.pt as what is trained, and as what it
    is compared with. separate_critic: the policy gets a value network of its own.
    """
    if not (Path(folder) / "sft.pt").exists():
        hint = "train_sft.py makes it; --models names the folder if it is another one"
        raise UserError(f"{folder}/sft.pt: not found; {hint}")
    sft, tokenizer, sft_facts = load_checkpoint(Path(folder) / "sft.pt", ["sft"], device)

    def load_relative(path):
        model, relative_tokenizer, _ = load_checkpoint(path, ["ppo", "sft"], device)
        config = dataclasses.replace(model.config, separate_critic=False)
        if relative_tokenizer.tokens != tokenizer.tokens or config != sft.config:
            raise UserError(f"{path}: was not made from {folder}/sft.pt")
        return model

    reward_model, facts = None, {"sft": sft_facts}
    if reference:  # it is read again when a run goes on: it must be the same
        other = load_relative(reference)
        facts["reference"] = sum(x.double().norm().item() for x in other.parameters())
    reference = frozen_copy(other if reference else sft)
    policy = load_relative(policy) if policy else sft
    if reward:
        score = text_reward(load_function(reward), tokenizer)
    else:
        reward_model, rm_tokenizer, facts["rm"] = load_checkpoint(
            Path(folder) / "rm.pt", ["rm"], device
        )
        same = rm_tokenizer.tokens == tokenizer.tokens and reward_model.config == sft.config
        # The figures of the SFT model that it was made from; older files do not hold them.
        if not same or facts["rm"].pop("sft", sft_facts) != sft_facts:
            stale = "rm.pt was not made from sft.pt; run train_rm.py again after train_sft.py"
            raise UserError(f"{folder}: {stale}")
        reward_model = frozen_copy(reward_model)

        def score(tokens, mask):
            return reward_model(tokens, row_lengths(mask))

    if separate_critic:
        add_critic(policy, reward_model)
    return Models(policy, reference, reward_model, score, tokenizer, facts)


def load_function(name):
    """ "module:function" -> the function; the current folder is where the module is looked for last."""
    module, _, function = name.partition(":")
    sys.path.append("")
    try:
        found = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError(f"{function} is no function")
        return found
    except (
        Exception
    ) as error:  # the module is the user's: it may raise anything when it is imported
        wanted = "should be module:function, for instance my:score for score() in my.py"
        raise UserError(f"--reward {name}: {type(error).__name__}: {error}; {wanted}")


def text_reward(function, tokenizer):
    """A function of lists of prompts and responses, (texts, texts) -> numbers, as score(tokens, mask) -> (B,)."""

    def score(tokens, mask):
        texts = texts_of(tokenizer, tokens, mask)
        try:
            scores = function(*texts)
        except Exception as error:  # it is the user's code: it may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"--reward: {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
            ) from error
        wanted = f"{len(tokens)} responses should get a list of {len(tokens)} numbers"
        wanted = f"--reward: {wanted} from {-LARGEST:,.0f} to {LARGEST:,.0f}"
        try:
            if isinstance(scores, dict | set | str):  # keys or letters are no scores
                raise TypeError
            numbers = torch.tensor([float(x) for x in scores], device=tokens.device)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # no list, or not of numbers
            raise UserError(f"{wanted}, got {getattr(scores, 'shape', repr(scores)[:80])}")
        if len(numbers) != len(tokens):
            raise UserError(f"{wanted}, got {len(numbers)}")
        wrong = ~(numbers.abs() <= LARGEST)  # NaN too
        if wrong.any():
            bad = int(wrong.nonzero()[0])
            raise UserError(
                f"{wanted}, got {numbers[bad].item()} for {(texts[0][bad] + texts[1][bad])[:80]!r}"
            )
        return numbers

    return score
