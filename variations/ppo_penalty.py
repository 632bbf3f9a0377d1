"""PPO with a penalty on the KL to the old policy instead of the clip.

Both keep the policy near the one that sampled the batch (not near the reference, as beta does).
Schulman et al., arXiv:1707.06347, section 4, eq. 8:

    J = E[ratio * A] - c * E[KL(old || pi)]

The paper also adapts c to a target for the KL; here c is fixed. The KL is estimated by k3 with q =
pi / old. On average k3 is the KL, and its gradient that of the KL, because E_old[grad q] = grad
sum_a pi(a) = 0.
"""

import math
from dataclasses import dataclass

from minippo import PPOConfig, evaluate_actions, masked_mean, policy_loss, value_loss

UNREAD = ("clip_eps", "entropy_coef", "kl_loss_coef")


@dataclass
class Settings(PPOConfig):
    clip_eps: float = math.inf  # no clip [0, inf]
    penalty: float = 1.0  # c, the price of a nat of KL per token to the old policy [0, inf]


def loss(policy, batch, config):
    mask, old_logprobs, old_values = batch["mask"], batch["old_logprobs"], batch["old_values"]
    logprobs, values, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    loss, stats = policy_loss(logprobs, old_logprobs, batch["credit"], mask, config.clip_eps)
    log_ratio = logprobs - old_logprobs
    kl = masked_mean(log_ratio.exp() - 1 - log_ratio, mask)
    errors, value_stats = value_loss(values, old_values, batch["returns"], mask, config.value_clip)
    loss = loss + config.penalty * kl + config.vf_coef * errors
    return loss, {"loss": loss.item(), **stats, **value_stats}
