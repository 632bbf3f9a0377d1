"""Three reward models instead of one, against reward hacking: the lowest of their scores.

    for i in 1 2 3; do
        python train_rm.py --models out --out out/ensemble/$i --seed $i --resume || break
    done
    python train_ppo.py --models out --out out/minimum --reward examples.ensemble:minimum

PPO finds answers that a reward model scores too high. Models with different seeds err in different
places, so the lowest score is high only where all agree (Coste et al., arXiv:2310.02743). All start
from one SFT model and may share its errors (Eisenstein et al., arXiv:2312.09244). The models are
read from out/ensemble; the environment variable ENSEMBLE names another folder.
"""

import functools
import os
from pathlib import Path

import torch

from data.rows import UserError
from plumbing.batches import pad
from plumbing.models import load_checkpoint
from plumbing.settings import find_device


@functools.cache
def load_members(folder):
    """-> the reward models, which all have one tokenizer, and this tokenizer."""
    paths = sorted(Path(folder).glob("*/rm.pt"))
    if not paths:
        raise UserError(f"{folder}: no */rm.pt in it; train_rm.py makes them")
    loaded = [load_checkpoint(path, ["rm"], find_device("auto")) for path in paths]
    if len({metadata["sft"] for _, _, metadata in loaded}) > 1:
        raise UserError(f"{folder}: the reward models come from different SFT models")
    print(f"{len(paths)} reward models in {folder}")
    return [model for model, _, _ in loaded], loaded[0][1]


@torch.no_grad()
def minimum(prompts, completions, completion_ids, **columns):
    """-> the lowest score of each response. The models' scores have been normalised."""
    models, tokenizer = load_members(os.environ.get("ENSEMBLE", "out/ensemble"))
    if [tokenizer.decode(ids) for ids in completion_ids] != completions:
        raise UserError("the reward models have another vocabulary than the policy")
    rows = [tokenizer.encode(prompt) + ids for prompt, ids in zip(prompts, completion_ids)]
    tokens, lengths = pad(rows, models[0].mean.device)
    return torch.stack([model(tokens, lengths) for model in models]).amin(0)
