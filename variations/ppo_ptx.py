"""PPO-ptx: a little of the SFT loss in every gradient step, the third term of InstructGPT.

PPO sees only what it samples, so what the policy would say elsewhere may change at no cost. PPO-ptx
adds c * E[log pi] to the objective, a mean over the tokens of texts that are known to be good. In
InstructGPT (arXiv:2203.02155, eq. 2) they come from the pretraining data. Here they are
demonstrations of stage 1: one for each response, as one more row of the batch. As PPO's advantages
are whitened, c is not on the scale of the scores. (In the log, explained_variance counts these rows
too, as predicted.)
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import minippo
import train_ppo
from minippo import ppo_loss
from plumbing.batches import join_batches, pad_completions
from plumbing.models import load_sft
from plumbing.settings import run_script
from plumbing.text import read_ids
from train_ppo import train


@dataclass
class Config(train_ppo.Config):
    out: Path = Path("out/ppo_ptx")  # folder for checkpoints and logs
    ptx_coef: float = 0.02  # c, the weight of the SFT loss


def compute_advantages(batch, config, demonstrations):
    """PPO's phase 3, then the demonstrations as B more rows: (2B, ...) each."""
    batch = batch | minippo.compute_advantages(batch, config)
    B = len(batch["tokens"])
    rows = [demonstrations[i] for i in torch.randint(len(demonstrations), (B,)).tolist()]
    tokens, mask = pad_completions(rows, batch["tokens"].device)
    # What is recorded of responses means nothing for demonstrations: zeros.
    sft_batch = {}
    for name, numbers in batch.items():
        sft_batch[name] = numbers.new_zeros(mask.shape if numbers.dim() == 2 else B)
    sft_batch |= {"tokens": tokens, "mask": mask}
    # A gradient step averages over all tokens. With these weights that is about the mean over the
    # tokens of responses, plus c times the mean over the tokens of demonstrations.
    share = batch["mask"].sum() / (batch["mask"].sum() + mask.sum())
    zeros = torch.zeros(B, 1, device=tokens.device)
    batch |= {"weight": zeros + 1 / share, "ptx_weight": zeros}
    sft_batch |= {"weight": zeros, "ptx_weight": zeros + config.ptx_coef / (1 - share)}
    return join_batches([batch, sft_batch])


def loss(logprobs, values, batch, config):
    losses, stats = ppo_loss(logprobs, values, batch, config)
    weight = batch["weight"]
    ratio = torch.where(weight > 0, stats["ratio"], 1.0)
    stats = {name: weight * numbers for name, numbers in stats.items()} | {"ratio": ratio}
    return weight * losses - batch["ptx_weight"] * logprobs, stats


def main(config):
    sft, tokenizer, _ = load_sft(config, "cpu")
    demonstrations = read_ids(config.data, "sft", "train", tokenizer, sft.config.context)
    train(config, partial(compute_advantages, demonstrations=demonstrations), loss)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
