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
from plumbing.settings import run_script
from variations import EXTRAS, update


@dataclass
class SequenceConfig:
    mean: bool = False  # the geometric mean of the ratios of the tokens, not their product


def first(x, mask):
    """(B, T-1) -> (B, 1): the number at the first token of each response."""
    return x.gather(1, mask.int().argmax(1, keepdim=True))


def sequence_loss(policy, batch, config, mean=False):
    mask, tokens = batch["mask"], int(batch["mask"].sum())
    logprobs, values, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature, False)
    log_ratio = torch.where(mask, logprobs - batch["logprobs"], 0.0).sum(1, keepdim=True)  # (B, 1)
    log_ratio = log_ratio / mask.sum(1, keepdim=True) if mean else log_ratio
    recorded = batch["advantages"], batch["values"], batch["returns"]
    values, advantages, old_values, returns = (first(x, mask) for x in (values, *recorded))
    one = torch.ones_like(values, dtype=torch.bool)
    loss, stats = policy_loss(log_ratio, 0 * log_ratio, advantages, one, config.clip_eps)
    values_loss, more = value_loss(values, old_values, returns, one, config.value_clip)
    loss = loss + config.vf_coef * values_loss
    stats |= {"loss": loss.item(), "tokens": tokens, **more}
    return loss * len(mask) / tokens, stats  # ppo_update multiplies by the tokens


def sequence_iteration(
    policy, ref, score, prompts, optimizer, config, kl_coef, rollout, micro_batch, own
):
    batch = rollout(policy, ref, score, prompts, config)
    mask, values = batch["mask"], first(batch["values"], batch["mask"])
    kl, _ = kl_per_response(batch["logprobs"], batch["ref_logprobs"], mask)
    returns = (batch["scores"] - kl_coef * kl)[:, None]  # (B, 1)
    advantages = whiten(returns - values, torch.ones_like(values, dtype=torch.bool))
    advantages *= mask.sum() / len(mask) if own.mean else 1.0  # update() divides by the length too
    batch |= {"advantages": advantages * mask, "values": values * mask, "returns": returns * mask}
    loss_of = partial(sequence_loss, mean=own.mean)
    return update(policy, optimizer, batch, config, kl_coef, micro_batch, loss_of)


if __name__ == "__main__":
    flags = {"own": [SequenceConfig()], "without": ("gamma", "lam", *EXTRAS)}
    run_script(lambda: train_ppo.main(sequence_iteration, "sequence_ppo", __doc__, **flags))
