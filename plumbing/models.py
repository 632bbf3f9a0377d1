"""Models in files, the models that a stage starts from, and rewards that are functions of texts."""

import copy
import hashlib
import importlib
import sys
from dataclasses import asdict, fields
from pathlib import Path

import torch

from data.files import UserError, write_file
from minippo import GPT, GPTConfig, RewardModel, Trunk, frozen_copy, generate, row_lengths
from plumbing.text import Tokenizer, chunks, spread_over, texts_of

ANSWERS = 2048  # of the SFT model, that set the scale of the scores
LARGEST_SCORE = 1e6  # with far larger ones the loss is NaN


def write_contents(path, contents):
    """torch.save, whole or not at all."""
    write_file(path, lambda file: torch.save(contents, file))


def read_contents(path, kinds, hint):
    """Read what write_contents wrote, onto the CPU. UserError if it is damaged, or its "kind" is
    not one of `kinds`. No code in the file is run."""
    if not Path(path).is_file():
        raise UserError(f"{path}: not found; {hint}")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        kind = contents["kind"]
    except Exception as error:  # torch.load raises many kinds of error at a damaged file
        raise UserError(f"{path}: damaged, or not a checkpoint ({type(error).__name__}); {hint}")
    if kind not in kinds:
        raise UserError(f"{path}: holds {kind!r}, not {' or '.join(map(repr, kinds))}")
    return contents


def save_checkpoint(path, kind, model, tokenizer, **metadata):
    """All that a model needs, in one file. kind: "sft" or "ppo" (a GPT), "rm" (a RewardModel).
    metadata: numbers of its validation, and "sft", the fingerprint of the SFT model behind it."""
    vocabulary = [token.decode("latin-1") for token in tokenizer.tokens]
    contents = {"kind": kind, "config": asdict(model.config), "vocabulary": vocabulary}
    write_contents(path, contents | {"model": model.state_dict(), "metadata": metadata})


def load_checkpoint(path, kinds, device="cpu"):
    """A checkpoint of one of `kinds` -> model in eval mode, tokenizer, metadata saved with it."""
    stage = Path(path).stem if Path(path).stem in kinds else kinds[0]
    contents = read_contents(path, kinds, f"train_{stage}.py makes it")
    try:
        model = GPT(GPTConfig(**contents["config"]))
        if contents["kind"] == "rm":
            model = RewardModel(model)
        if "value_trunk.norm.bias" in contents["model"]:
            model.value_trunk = Trunk(model.config)
        model.load_state_dict(contents["model"])
        tokenizer = Tokenizer([token.encode("latin-1") for token in contents["vocabulary"]])
        metadata = contents["metadata"]
    except Exception as error:  # the file may hold anything
        kind = type(error).__name__
        raise UserError(f"{path}: damaged, or made by another version ({kind}); make it again")
    return model.to(device).eval(), tokenizer, metadata


def fingerprint(path):
    """A short hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def model_fingerprints(config):
    """The models that a stage starts from -> {file: its fingerprint}."""
    paths = {}
    if hasattr(config, "models"):
        paths["sft.pt"] = config.models / "sft.pt"
    if getattr(config, "reward", None) == "":
        paths["rm.pt"] = config.models / "rm.pt"
    if getattr(config, "policy", ""):
        paths["--policy"] = config.policy
    return {name: fingerprint(path) for name, path in paths.items()}


def new_model(config, rows):
    """A GPT with random weights and a vocabulary learned from rows of texts; with config.init, a
    GPT-2 -> model, tokenizer."""
    shape = GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)})
    if not config.init:
        tokenizer = Tokenizer.train((text for row in rows for text in row), shape.vocab_size)
        print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens")
        shape.vocab_size = tokenizer.vocab_size
        return GPT(shape).to(config.device), tokenizer
    from plumbing.hf import read_gpt2

    if shape != GPTConfig(bfloat16=shape.bfloat16):
        raise UserError("--init brings its own size and vocabulary: leave out flags for them")
    print(f"reading the weights and the vocabulary of {config.init}", flush=True)
    model, tokenizer = read_gpt2(config.init)
    model.config.bfloat16 = shape.bfloat16
    return model.to(config.device), tokenizer


def load_sft(config):
    """The SFT model of --models -> model, tokenizer."""
    return load_checkpoint(config.models / "sft.pt", ["sft"], config.device)[:2]


def load_models(config):
    """For stage 3 -> policy (the SFT model, or --policy), ref (the SFT model, frozen),
    score(tokens, mask) -> (B,) (the frozen reward model, or --reward), tokenizer. UserError if they
    do not stem from one SFT model."""
    sft, tokenizer = load_sft(config)
    policy = load_descendant(config, config.policy, ["ppo", "sft"]) if config.policy else sft
    ref, reward_model = frozen_copy(sft), None
    if config.reward:
        score = text_reward(load_function(config.reward), tokenizer, config)
    else:
        reward_model = frozen_copy(load_descendant(config, config.models / "rm.pt", ["rm"]))

        def score(tokens, mask):
            return reward_model(tokens, row_lengths(mask))

    if getattr(config, "separate_critic", False):
        add_critic(policy, reward_model)
    return policy, ref, score, tokenizer


def load_descendant(config, path, kinds):
    """A model that was made from the SFT model of --models, or is that one."""
    model, _, metadata = load_checkpoint(path, kinds, config.device)
    if fingerprint(config.models / "sft.pt") not in (metadata.get("sft"), fingerprint(path)):
        raise UserError(f"{path}: was not made from {config.models}/sft.pt; make it again")
    return model


def add_critic(policy, reward_model):
    """Give the policy, in place, its own value network, which starts as the reward model (as in
    InstructGPT)."""
    if policy.value_trunk is not None:  # from an earlier round
        return
    if reward_model is None:
        raise UserError("--separate_critic starts from the reward model: leave out --reward")
    policy.value_trunk = copy.deepcopy(reward_model.trunk).requires_grad_(True)
    head, std = reward_model.score_head, reward_model.std
    with torch.no_grad():  # value = normalised score = (head(hidden) - mean) / std
        policy.value_head.weight.copy_(head.weight / std)
        policy.value_head.bias.copy_((head.bias - reward_model.mean) / std)


def load_function(name):
    """ "module:function" -> the function."""
    module, _, function = name.partition(":")
    sys.path.append("")  # the current folder, last
    try:
        attribute = getattr(importlib.import_module(module), function)
        if not callable(attribute):
            raise TypeError("not a function")
        return attribute
    except Exception as error:  # the module is the user's: it may raise anything
        kind, hint = type(error).__name__, "for instance my:score for score() in my.py"
        raise UserError(f"{name}: {kind}: {error}; should be module:function, {hint}")


def text_reward(function, tokenizer, config):
    """Turn a function of texts, (prompts, responses) -> numbers, into score(tokens, mask) -> (B,).
    A function with the attribute `reads_tokens` gets tokens, mask and the settings instead."""
    if getattr(function, "reads_tokens", False):
        return lambda tokens, mask: function(tokens, mask, config)

    def score(tokens, mask):
        prompts, responses = texts_of(tokenizer, tokens, mask)
        returned = function(prompts, responses)
        try:
            scores = [float(x) for x in returned]
        except (TypeError, ValueError, OverflowError):
            scores = []
        limits = f"{len(prompts)} numbers, none beyond {LARGEST_SCORE:,.0f}"
        wanted = f"--reward: should return a list of {limits}, not"
        if len(scores) != len(prompts):
            raise UserError(f"{wanted} {repr(returned)[:80]}")
        for x, prompt, response in zip(scores, prompts, responses):
            if not abs(x) <= LARGEST_SCORE:
                raise UserError(f"{wanted} {x} for {(prompt + response)[:80]!r}")
        return torch.tensor(scores, device=tokens.device)

    return score


@torch.no_grad()
def set_score_scale(reward_model, sft, prompts, config):
    """Shift and scale the scores, so that the SFT model's own answers have mean 0 and standard
    deviation 1; and cap them at what one in a hundred of these exceeds."""
    print(f"    {ANSWERS:,} answers of the SFT model, for the scale of the scores", flush=True)
    prompts, scores = spread_over(prompts, ANSWERS), []
    prompts = [prompts[i % len(prompts)] for i in range(ANSWERS)]
    for part in chunks(prompts, 16 * config.micro_batch):  # without gradients, more fit
        tokens, mask, _, _ = generate(sft, part, config.max_new_tokens)
        scores.append(reward_model(tokens, row_lengths(mask)))
    scores = torch.cat(scores)
    reward_model.mean.copy_(scores.mean())
    reward_model.std.copy_(scores.std().clamp(min=1e-6))
    reward_model.cap.copy_((scores.quantile(0.99) - scores.mean()) / reward_model.std)
