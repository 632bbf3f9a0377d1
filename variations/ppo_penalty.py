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

import train_ppo
from minippo import bounded_exp, compute_advantages, evaluate_actions, masked_mean, ppo_loss
from train_ppo import train


@dataclass
class Settings(train_ppo.Settings):
    clip_eps: float = math.inf  # no clip
    penalty: float = 1.0  # c, the penalty per nat of KL per token to the old policy


def loss(policy, batch, config):
    loss, stats = ppo_loss(policy, batch, config)
    mask = batch["mask"]
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    log_q = logprobs - batch["old_logprobs"]
    kl = masked_mean(bounded_exp(log_q) - 1 - log_q, mask)
    loss = loss + config.penalty * kl
    return loss, stats | {"loss": loss.item()}


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/ppo_penalty")
