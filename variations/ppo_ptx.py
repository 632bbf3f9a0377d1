"""PPO-ptx: a little of the SFT loss in every gradient step, the third term of InstructGPT.

    python -m variations.ppo_ptx --ptx_coef 0.02    after train_sft.py and train_rm.py

PPO sees only what it samples. What the policy would say elsewhere may change, and no response pays
for it. To the objective J this adds c * E[log pi(x)], where x is text that is known to be good. In
InstructGPT (arXiv:2203.02155, eq. 2) x comes from the pretraining, so that other abilities are not
lost. Here x is an answer from the demonstrations of stage 1. A gradient step draws as many of them
as it has responses, and log pi is a mean over their tokens. RESULTS.md measures what this does ("An
accident worth knowing").
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import train_ppo
from minippo import compute_advantages, ppo_loss
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import run_script
from plumbing.rows import read_ids
from plumbing.settings import RunConfig
from train_sft import sft_loss
from variations import take_flags


def ptx_loss(policy, batch, config, ptx_coef, models, demonstrations):
    """PPO's loss, and c times that of demonstrations; models, demonstrations: their folders."""
    loss, stats = ppo_loss(policy, batch, config)
    rows = read_demonstrations(models, demonstrations)
    drawn = torch.randint(len(rows), (len(batch["tokens"]),)).tolist()
    sft_term, _ = sft_loss(policy, [rows[i] for i in drawn], batch["tokens"].device)
    loss = loss + ptx_coef * sft_term
    return loss, stats | {"loss": loss.item(), "sft_loss": sft_term.item()}


@functools.cache
def read_demonstrations(models, data):
    """The folder of sft.pt, and that of the demonstrations -> (prompt, completion) as ids."""
    model, tokenizer, _ = load_checkpoint(Path(models) / "sft.pt", ["sft"])
    return read_ids(Path(data), "sft", "train", tokenizer, model.config.context)


@dataclass
class PtxConfig:
    ptx_coef: float = 0.02  # c, the weight of the SFT loss [0, inf]
    data: str = RunConfig.data  # folder with demonstrations and prompts
    models: str = "out"  # folder of sft.pt and rm.pt


def main():
    flags = take_flags(__doc__, PtxConfig())
    sys.argv += ["--data", flags.data, "--models", flags.models]
    folders = {"models": flags.models, "demonstrations": flags.data}
    loss_of = functools.partial(ptx_loss, ptx_coef=flags.ptx_coef, **folders)
    train_ppo.main(compute_advantages, loss_of, "PPO ptx")


if __name__ == "__main__":
    run_script(main)
