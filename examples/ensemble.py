"""Three reward models instead of one, against reward hacking: their mean, or the lowest score.

    for i in 1 2 3; do
        mkdir -p out/ensemble/$i && cp out/sft.pt out/ensemble/$i
        python train_rm.py --out out/ensemble/$i --seed $i --resume || break
    done
    python train_ppo.py --models out --out out/minimum --reward variations.ensemble:minimum

PPO finds answers that a reward model scores too high. Models of other seeds err in other places
(Coste et al., arXiv:2310.02743). Only the score differs:

    variations.ensemble:mean       1/m * sum of r_i(x, y)    an error of one counts 1/m
    variations.ensemble:minimum    min of r_i(x, y)          high only where all agree

All start from one SFT model and may share its errors (Eisenstein et al., arXiv:2312.09244). If
their folder is not out/ensemble, the environment variable ENSEMBLE names it.
"""

import functools
import os
from pathlib import Path

import torch

from data.files import UserError
from minippo import row_lengths
from plumbing.checkpoints import load_checkpoint


def mean(tokens, mask, sft):
    return scores(tokens, mask, sft).mean(0)


def minimum(tokens, mask, sft):
    return scores(tokens, mask, sft).amin(0)


mean.reads_tokens = minimum.reads_tokens = True  # not texts: see plumbing/models.py


def scores(tokens, mask, sft):
    """m reward models, B rows -> (m, B), each normalised by its train_rm.py."""
    models = members(os.environ.get("ENSEMBLE", "out/ensemble"), tokens.device, sft)
    return torch.stack([model(tokens, row_lengths(mask)) for model in models])


@functools.cache
@torch.random.fork_rng()  # a run that goes on must draw what it would have drawn
def members(folder, device, sft):
    found = [load_checkpoint(x, ["rm"], device) for x in sorted(Path(folder).glob("*/rm.pt"))]
    if {facts["sft"] for *_, facts in found} != {sft}:
        raise UserError(f"{folder}/*/rm.pt: should be reward models made from this run's sft.pt")
    return [model for model, *_ in found]
