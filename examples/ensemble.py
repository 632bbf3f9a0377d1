"""Three reward models instead of one, against reward hacking: the lowest of their scores.

    for i in 1 2 3; do
        python train_rm.py --models out --out out/ensemble/$i --seed $i --resume || break
    done
    python train_ppo.py --models out --out out/minimum --reward examples.ensemble:minimum

PPO finds answers that a reward model scores too high. Models with different seeds err in different
places, so the lowest score is high only where all agree (Coste et al., arXiv:2310.02743). All start
from one SFT model and may share its errors (Eisenstein et al., arXiv:2312.09244).
"""

import functools

import torch

from data.files import UserError
from minippo import row_lengths
from plumbing.models import fingerprint, load_checkpoint


def minimum(tokens, mask, config):
    """B rows -> (B,), the lowest score of each. The models' scores have been normalised."""
    models = members(config.models, tokens.device)
    return torch.stack([model(tokens, row_lengths(mask)) for model in models]).amin(0)


minimum.reads_tokens = True  # not texts: see text_reward()


@functools.cache
@torch.random.fork_rng(devices=[])  # so that a resumed run draws the same random numbers
def members(folder, device):
    """The reward models of folder/ensemble; UserError if there are none, or of another SFT
    model."""
    paths = sorted(folder.glob("ensemble/*/rm.pt"))
    members = [load_checkpoint(path, ["rm"], device) for path in paths]
    if {metadata["sft"] for *_, metadata in members} != {fingerprint(folder / "sft.pt")}:
        raise UserError(f"{folder}/ensemble/*/rm.pt: should be made from {folder}/sft.pt")
    print(f"{len(members)} reward models: {folder}/ensemble/*/rm.pt")
    return [model for model, *_ in members]
