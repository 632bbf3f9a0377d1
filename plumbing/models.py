"""The models that stage 3 needs. Scores come from a reward model, or from any function of prompts and
responses. Both end as score(tokens, mask) -> (B,)."""

import copy
import dataclasses
import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import minippo
from data.files import UserError
from minippo import GPT, RewardModel, frozen_copy, row_lengths
from plumbing.checkpoints import fingerprint, load_checkpoint
from plumbing.tokenizer import Tokenizer, texts_of

LARGEST_SCORE = 1e6  # with far larger ones the loss is no number


@dataclass
class Models:
    policy: GPT  # to be trained: the SFT model, unless another is given
    ref: GPT  # frozen: the SFT model
    reward_model: RewardModel | None  # frozen; None where a function takes its place
    score: Callable  # (tokens, mask) -> (B,)
    tokenizer: Tokenizer
    facts: dict  # figures of the models: {"sft": ..., "rm": ...}
    made_from: dict  # {file: its fingerprint}

    def networks(self):
        return torch.nn.ModuleList(filter(None, (self.policy, self.ref, self.reward_model)))


def load_models(folder, device, policy="", reward="", separate_critic=False):
    """sft.pt of a folder and its rm.pt, or instead of the latter the function that `reward` names.

    policy: a checkpoint to train instead of sft.pt, from which it must have been made.
    separate_critic: the policy gets a value network of its own.
    """
    folder = Path(folder)
    if not (folder / "sft.pt").exists():
        hint = "train_sft.py makes it; --models names the folder if it is another one"
        raise UserError(f"{folder}/sft.pt: not found; {hint}")
    sft, tokenizer, sft_facts = load_checkpoint(folder / "sft.pt", ["sft"], device)
    root = fingerprint(sft)
    facts, made_from = {"sft": sft_facts, "rm": {}}, {"sft.pt": root}

    def load_descendant(name, path, kinds):
        model, _, model_facts = load_checkpoint(path, kinds, device)
        made_from[name] = fingerprint(model)
        if root not in (model_facts.get("sft"), made_from[name]):
            raise UserError(f"{path}: was not made from {folder}/sft.pt; make it again")
        return model, model_facts

    reward_model, ref = None, frozen_copy(sft)
    policy = load_descendant("--policy", policy, ["ppo", "sft"])[0] if policy else sft
    if reward:
        function, made_from["the code of --reward"] = load_function(reward)
        score = text_reward(function, tokenizer, root)
    else:
        reward_model, facts["rm"] = load_descendant("rm.pt", folder / "rm.pt", ["rm"])
        reward_model = frozen_copy(reward_model)

        def score(tokens, mask):
            return reward_model(tokens, row_lengths(mask))

    if separate_critic:
        add_critic(policy, reward_model)
    return Models(policy, ref, reward_model, score, tokenizer, facts, made_from)


def add_critic(policy, reward_model):
    """Give the policy, in place, a value network of its own, which starts as the reward model (as
    in InstructGPT)."""
    if policy.critic is not None:  # of an earlier round: it goes on
        return
    if reward_model is None:
        missing = "with --reward there is none"
        raise UserError(f"--separate_critic starts from the reward model, and {missing}")
    policy.config = dataclasses.replace(policy.config, separate_critic=True)
    policy.critic = copy.deepcopy(reward_model.trunk).requires_grad_(True)
    head, std = reward_model.score_head, reward_model.std
    with torch.no_grad():  # value = normalised score = (head(hidden) - mean) / std
        policy.value_head.weight.copy_(head.weight / std)
        policy.value_head.bias.copy_((head.bias - reward_model.mean) / std)


def load_function(name):
    """ "module:function" -> the function, and a fingerprint of its file. The current folder is where
    the module is looked for last."""
    module, _, function = name.partition(":")
    sys.path.append("")
    try:
        module = importlib.import_module(module)
        source = Path(module.__file__).read_bytes()
        return getattr(module, function), hashlib.sha256(source).hexdigest()[:16]
    except Exception as error:  # the module is the user's: it may raise anything
        wanted = "should be module:function, for instance my:score for score() in my.py"
        raise UserError(f"--reward {name}: {type(error).__name__}: {error}; {wanted}")


def text_reward(function, tokenizer, sft):
    """A function of lists of prompts and responses, (texts, texts) -> numbers, as score(tokens, mask)
    -> (B,). One with the attribute `reads_tokens` is given tokens, mask, and the SFT model's
    fingerprint."""
    if getattr(function, "reads_tokens", False):
        return lambda tokens, mask: function(tokens, mask, sft)

    def score(tokens, mask):
        prompts, responses = texts_of(tokenizer, tokens, mask)
        found = function(prompts, responses)
        try:
            scores = [float(x) for x in found]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            scores = []
        texts = zip(scores, prompts, responses)
        bad = [f"{x} for {(p + r)[:80]!r}" for x, p, r in texts if not abs(x) <= LARGEST_SCORE]
        if bad or len(scores) != len(prompts):
            wanted = f"{len(prompts)} numbers, none beyond {LARGEST_SCORE:,.0f}"
            wrong = bad[0] if bad else repr(found)[:80]
            raise UserError(f"--reward: should return a list of {wanted}, not {wrong}")
        return torch.tensor(scores, device=tokens.device)

    return score


@dataclass
class Algorithm:
    """PPO, or what a file of variations/ puts in its place."""

    Settings: type = minippo.PPOConfig  # PPO's settings, and perhaps others; each is a flag
    compute_advantages: Callable = minippo.compute_advantages  # (batch, config)
    loss: Callable = minippo.ppo_loss  # (policy, batch, config)
    UNREAD: tuple = ()  # PPO's flags that have no effect


def load_algorithm(name):
    """ "ppo", or the name of a file in variations/ that has one of the two functions, or both."""
    if name == "ppo":
        return Algorithm()
    try:
        module = importlib.import_module(f"variations.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"variations.{name}":
            raise
        module = None
    own = {x.name: getattr(module, x.name) for x in fields(Algorithm) if hasattr(module, x.name)}
    if not {"compute_advantages", "loss"} & own.keys() or hasattr(module, "main"):
        wanted = "should be ppo, or a file of variations/ with compute_advantages() or loss()"
        raise UserError(f"--algorithm {name}: {wanted}")
    return Algorithm(**own)
