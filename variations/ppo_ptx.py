"""PPO-ptx: a little of the SFT loss in every gradient step, the third term of InstructGPT.

PPO sees only what it samples. What the policy would say elsewhere may change, and no response pays
for it. To the objective J this adds c * E[log pi(x)], a mean over the tokens of text x that is
known to be good. In InstructGPT (arXiv:2203.02155, eq. 2) x comes from the pretraining, so that
other abilities are not lost. Here it is answers from stage 1: a gradient step draws as many as it
has responses. RESULTS.md measures what this does ("An accident worth knowing").
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from data.files import UserError
from minippo import PPOConfig, ppo_loss
from plumbing.checkpoints import load_checkpoint
from plumbing.rows import read_ids
from train_sft import sft_loss


@dataclass
class Settings(PPOConfig):
    ptx_coef: float = 0.02  # c, the weight of the SFT loss [0, inf]
    demonstrations: str = ""  # folder of sft_train.jsonl, as in --data
    sft: str = ""  # the sft.pt of --models, for its vocabulary and context


def loss(policy, batch, config):
    loss, stats = ppo_loss(policy, batch, config)
    rows = read_demonstrations(config.sft, config.demonstrations)
    drawn = torch.randint(len(rows), (len(batch["tokens"]),)).tolist()
    sft_term, _ = sft_loss(policy, [rows[i] for i in drawn])
    loss = loss + config.ptx_coef * sft_term
    return loss, stats | {"loss": loss.item(), "sft_loss": sft_term.item()}


@functools.cache
@torch.random.fork_rng()  # a run that goes on must draw what it would have drawn
def read_demonstrations(sft, folder):
    """-> (prompt, completion) as ids"""
    if not (sft and folder):
        raise UserError("--algorithm ppo_ptx needs --sft out/sft.pt --demonstrations data/zoo")
    model, tokenizer, _ = load_checkpoint(sft, ["sft"])
    return read_ids(Path(folder), "sft", "train", tokenizer, model.config.context)
