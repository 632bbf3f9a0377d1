"""PPO with one action: the whole response has one advantage and one ratio.

    python -m variations.sequence_ppo                            after train_sft.py, train_rm.py
    python -m variations.sequence_ppo --mean --clip_eps 0.01     with the ratio of GSPO

Many texts describe PPO for language models like this: the prompt x is the only state, and the whole
response y is the only action. So there are one reward, one value and one ratio per response:

    A = score - beta * KL - V(x),        ratio = pi(y | x) / old(y | x)

At ratio 1, without whitening, the expected step is the gradient of J (test: 1e-9). What is lost?
All tokens have the same advantage, and V has read the prompt alone. The ratio is the product of the
ratios of all tokens. So it leaves the clip range sooner, and then no token has a gradient. --mean
takes the geometric mean instead: this product to the power of 1 / length (GSPO, Zheng et al.,
arXiv:2507.18071, who clip it at 1 - 3e-4 and 1 + 4e-4). So the gradient is divided by the length.
"""

from dataclasses import dataclass
from functools import partial

import train_ppo
from minippo import evaluate_actions, kl_per_response, policy_loss, value_loss, whiten
from plumbing.errors import run_script
from variations import TERMS, refuse_flags, take_flags


def at_first_token(x, mask):
    """(B, T-1) -> (B, 1): the number at the first token of each response."""
    return x.gather(1, mask.int().argmax(1, keepdim=True))


def sequence_advantages(batch, config, kl_coef):
    mask = batch["mask"]
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
    returns = (batch["scores"] - kl_coef * kl)[:, None]  # (B, 1)
    values = at_first_token(batch["old_values"], mask)
    advantages = returns - values
    whitened = whiten(advantages, mask.any(1, keepdim=True)) if config.whiten else advantages
    result = {"old_values": values, "returns": returns}
    result |= {"advantages": advantages, "whitened": whitened}
    return {name: x * mask for name, x in result.items()}  # (B, T-1): the same at all tokens


def sequence_loss(policy, batch, config, mean=False):
    mask = batch["mask"]
    logprobs, values, _ = evaluate_actions(
        policy, batch["tokens"], mask, config.temperature, with_entropy=False
    )
    log_ratio = ((logprobs - batch["old_logprobs"]) * mask).sum(1, keepdim=True)  # (B, 1)
    log_ratio = log_ratio / mask.sum(1, keepdim=True) if mean else log_ratio
    names = "whitened", "old_values", "returns"
    advantages, old_values, returns = (at_first_token(batch[name], mask) for name in names)
    values, one = at_first_token(values, mask), mask.any(1, keepdim=True)  # one action a row
    loss, stats = policy_loss(log_ratio, 0 * log_ratio, advantages, one, config.clip_eps)
    value_term, value_stats = value_loss(values, old_values, returns, one, config.value_clip)
    loss = loss + config.vf_coef * value_term
    return loss, {"loss": loss.item(), "count": len(mask), **stats, **value_stats}


@dataclass
class SequenceConfig:
    mean: bool = False  # the geometric mean of the ratios of the tokens, not their product


def main():
    flags = take_flags(__doc__, SequenceConfig())
    refuse_flags("gamma", "lam", *TERMS)
    train_ppo.main(sequence_advantages, partial(sequence_loss, mean=flags.mean), "sequence PPO")


if __name__ == "__main__":
    run_script(main)
