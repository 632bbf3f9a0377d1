"""PPO with one action: the response as a whole has one advantage and one ratio.

    python -m variations.sequence_ppo                            after train_sft.py, train_rm.py
    python -m variations.sequence_ppo --mean --clip_eps 0.01     with the ratio of GSPO

Many texts describe PPO for language models like this: the prompt x is the only state, and the whole
response y is the only action. So a response has one reward, one value and one ratio:

    A = score - beta * KL - V(x),        ratio = pi(y | x) / old(y | x)

At ratio 1, without whitening, the expected step is the gradient of J (test: 1e-9). What is lost:
all tokens have the same advantage, and V has read the prompt alone. The ratio is the product of the
ratios of all tokens, so it leaves the clip range sooner, and then no token has a gradient. --mean
takes the geometric mean instead: this product to the power of 1 / length (GSPO, Zheng et al.,
arXiv:2507.18071, who clip it at 1 - 3e-4 and 1 + 4e-4). It divides the gradient by the length too.
"""

from dataclasses import dataclass
from functools import partial

import torch

import train_ppo
from minippo import evaluate_actions, kl_per_response, policy_loss, value_loss, whiten
from plumbing.errors import run_script
from variations import TERMS, take_flags


def at_first_token(x, mask):
    """(B, T-1) -> (B, 1): the number at the first token of each response."""
    return x.gather(1, mask.int().argmax(1, keepdim=True))


def every_row(x):
    """A mask over (B, 1) that leaves nothing out."""
    return torch.ones_like(x, dtype=torch.bool)


def sequence_credit(batch, config, kl_coef):
    mask, values = batch["mask"], at_first_token(batch["old_values"], batch["mask"])  # (B, 1)
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
    returns = (batch["scores"] - kl_coef * kl)[:, None]  # (B, 1)
    advantages = returns - values
    whitened = whiten(advantages, every_row(advantages)) if config.whiten else advantages
    credits = {"advantages": advantages, "whitened": whitened, "returns": returns}
    return {name: x * mask for name, x in credits.items()}  # (B, T-1), the same at every token


def sequence_loss(policy, batch, config, mean=False):
    mask = batch["mask"]
    logprobs, values, _ = evaluate_actions(
        policy, batch["tokens"], mask, config.temperature, with_entropy=False
    )
    log_ratio = torch.where(mask, logprobs - batch["old_logprobs"], 0.0).sum(1, keepdim=True)
    log_ratio = log_ratio / mask.sum(1, keepdim=True) if mean else log_ratio  # (B, 1)
    names = "whitened", "old_values", "returns"
    advantages, old_values, returns = (at_first_token(batch[name], mask) for name in names)
    values, one = at_first_token(values, mask), every_row(log_ratio)
    loss, stats = policy_loss(log_ratio, 0 * log_ratio, advantages, one, config.clip_eps)
    value_term, value_stats = value_loss(values, old_values, returns, one, config.value_clip)
    loss = loss + config.vf_coef * value_term
    return loss, {"loss": loss.item(), "count": len(mask), **stats, **value_stats}


@dataclass
class SequenceConfig:
    mean: bool = False  # the geometric mean of the ratios of the tokens, not their product


def main():
    flags = take_flags(__doc__, SequenceConfig(), unread=("gamma", "lam", *TERMS))
    train_ppo.main(sequence_credit, partial(sequence_loss, mean=flags.mean), "sequence PPO")


if __name__ == "__main__":
    run_script(main)
