"""GRPO, group relative policy optimisation: (score - mean of the group) / its standard deviation.

For the responses i of a group, which answer the same prompt (DeepSeekMath, arXiv:2402.03300,
section 4.1)

    A_i  = (score_i - mean of the scores of the group) / their standard deviation
    loss = mean over responses of the mean over tokens of
        -min(ratio A_i, clipped ratio A_i) + beta k3,    k3 = exp(-d) - 1 + d, d = log pi - log ref

What each part does to the expected step at ratio 1:

mean    includes response i itself: with n responses, (n - 1) / n of the gradient is left.
std     prompts whose scores hardly differ count as much as others.
tokens  count less in long responses.
k3      as a loss has the gradient of KL(ref || pi); PPO's J has KL(pi || ref).

Beta is a penalty in the loss, beside advantages of a fixed size: --kl_coef is not the same penalty
per nat as in PPO. With --no-std --no-length this is nearly Dr. GRPO (arXiv:2503.20783, which
divides by a constant).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from minippo import k3, policy_loss
from plumbing.settings import run_script
from train_ppo import train
from variations import GroupConfig


@dataclass
class Config(GroupConfig):
    out: Path = Path("out/grpo")  # folder for checkpoints and logs
    std: bool = True  # divide by the standard deviation of the group
    length: bool = True  # every response counts the same, so tokens of long ones count less


def compute_advantages(batch, config):
    mask = batch["mask"]
    # In float64: the mean of equal scores near 1e6 would differ from them by a rounding error.
    scores = batch["scores"].double().view(-1, config.group_size)  # (groups, group_size)
    advantages = scores - scores.mean(1, keepdim=True)
    if config.std:
        advantages = advantages / (scores.std(1, keepdim=True) + 1e-4)  # equal scores: 0
    advantages = advantages.view(-1, 1).to(batch["old_logprobs"])
    weights = torch.ones_like(advantages)
    if config.length:
        # ppo_update averages over tokens. With these weights: about the mean over responses.
        lengths = mask.sum(1, keepdim=True).to(advantages)  # (B, 1)
        weights = lengths.mean() / lengths
    return {"advantages": advantages * mask, "weights": weights * mask}  # (B, T-1)


def loss(logprobs, values, batch, config):
    losses, stats = policy_loss(
        logprobs, batch["old_logprobs"], batch["advantages"], config.clip_eps
    )
    kl = k3(logprobs - batch["ref_logprobs"])
    return batch["weights"] * (losses + config.kl_coef * kl), stats


if __name__ == "__main__":
    run_script(lambda config: train(config, compute_advantages, loss), Config, __doc__)
