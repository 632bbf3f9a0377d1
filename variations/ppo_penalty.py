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

from minippo import PolicyGradientConfig, bounded_exp, compute_advantages, evaluate_actions
from minippo import masked_mean, policy_loss, value_loss
from train_ppo import train


@dataclass
class Settings(PolicyGradientConfig):
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # GAE's lambda: 0 trusts the value function, 1 the sampled return
    whiten: bool = True  # advantages with mean 0 and standard deviation 1
    value_clip: float = 0.2  # no gain from a value further from its old one; inf: no clip
    vf_coef: float = 0.1  # weight of the value loss
    penalty: float = 1.0  # c, the penalty per nat of KL per token to the old policy
    separate_critic: bool = False  # a value network of its own, started from the reward model


def loss(policy, batch, config):
    mask, old_logprobs, old_values = batch["mask"], batch["old_logprobs"], batch["old_values"]
    logprobs, values, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    loss, stats = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, math.inf)
    log_ratio = logprobs - old_logprobs
    kl = masked_mean(bounded_exp(log_ratio) - 1 - log_ratio, mask)
    errors, value_stats = value_loss(values, old_values, batch["returns"], mask, config.value_clip)
    loss = loss + config.penalty * kl + config.vf_coef * errors
    return loss, {"loss": loss.item(), **stats, **value_stats}


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/ppo_penalty")
