"""PPO-ptx: a little of the SFT loss in every gradient step, the third term of InstructGPT.

PPO sees only what it samples, so what the policy would say elsewhere may change at no cost. PPO-ptx
adds c * E[log pi(x)] to the objective J, a mean over the tokens of text x that is known to be good.
In InstructGPT (arXiv:2203.02155, eq. 2), x comes from the pretraining data, so that other abilities
are not lost. Here x is a demonstration of stage 1: a gradient step draws one per response.
(--resume does not notice other demonstrations.)
"""

import functools
from dataclasses import dataclass

import torch

import train_ppo
from minippo import compute_advantages, ppo_loss
from plumbing.models import load_checkpoint
from plumbing.text import read_ids
from train_ppo import train
from train_sft import sft_loss


@dataclass
class Settings(train_ppo.Settings):
    ptx_coef: float = 0.02  # c, the weight of the SFT loss


def loss(policy, batch, config):
    loss, stats = ppo_loss(policy, batch, config)
    rows = read_demonstrations(config.models, config.data)
    drawn = torch.randint(len(rows), (len(batch["tokens"]),)).tolist()
    sft_term, _ = sft_loss(policy, [rows[i] for i in drawn])
    loss = loss + config.ptx_coef * sft_term
    return loss, stats | {"loss": loss.item(), "sft_loss": sft_term.item()}


@functools.cache
@torch.random.fork_rng(devices=[])  # so that a resumed run draws the same random numbers
def read_demonstrations(models, folder):
    """-> (prompt, completion) as ids"""
    model, tokenizer, _ = load_checkpoint(models / "sft.pt", ["sft"])
    return read_ids(folder, "sft", "train", tokenizer, model.config.context)


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/ppo_ptx")
