"""Three reward models instead of one, against reward hacking: their mean, or the lowest score.

    python -m variations.ensemble                              trains them in out/ensemble/1, 2, 3
    python train_ppo.py --models out --out out/minimum --reward variations.ensemble:minimum

Reward hacking: PPO finds answers that a reward model scores too high. Models of other seeds err in
other places (Coste et al., arXiv:2310.02743). Only the score differs from PPO:

    variations.ensemble:mean       1/m * sum of r_i(x, y)    an error of one counts 1/m
    variations.ensemble:minimum    min of r_i(x, y)          high only where all agree

All start from one SFT model and may share its errors (Eisenstein et al., arXiv:2312.09244). The
environment variable ENSEMBLE names their folder, if it is another than out/ensemble.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from plumbing.checkpoints import load_checkpoint
from plumbing.errors import UserError, run_script
from plumbing.rows import pad
from plumbing.settings import RunConfig, read_flags
from variations import ROOT, copy_files, run_python


def mean(prompts, responses):
    return scores(prompts, responses).mean(0).tolist()


def minimum(prompts, responses):
    return scores(prompts, responses).amin(0).tolist()


@torch.no_grad()
def scores(prompts, responses):
    """m reward models, B prompts and responses -> (m, B), each normalised by its train_rm.py."""
    models, tokenizers, _ = zip(*members(os.environ.get("ENSEMBLE", "out/ensemble")))
    encode, eos, context = tokenizers[0].encode, tokenizers[0].eos, models[0].config.context
    rows = [[*encode(x), *encode(y), eos][:context] for x, y in zip(prompts, responses)]
    rows = pad(rows, models[0].mean.device)
    return torch.stack([model(*rows) for model in models])


@functools.cache
def members(folder):
    if not (found := sorted(Path(folder).glob("*/rm.pt"))):
        raise UserError(f"{folder}/*/rm.pt: not found; python -m variations.ensemble makes them")
    return [load_checkpoint(path, ["rm"], RunConfig().device) for path in found]


@dataclass
class EnsembleConfig:
    data: str = RunConfig.data  # folder with the pairs
    models: str = "out"  # folder of sft.pt
    out: str = "out/ensemble"  # folder for 1/rm.pt and so on; those that are there stay
    members: int = 3  # reward models; their seeds are 1, 2, ... [1, inf]


def main():
    (config,) = read_flags(__doc__, EnsembleConfig())
    for seed in range(1, config.members + 1):
        out = Path(config.out) / str(seed)
        copy_files(config.models, "sft.pt", out)
        flags = "--data", config.data, "--out", out, "--seed", seed, "--resume"
        if not (out / "rm.pt").exists():
            run_python(ROOT / "train_rm.py", *flags)


if __name__ == "__main__":
    run_script(main)
