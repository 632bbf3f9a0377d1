"""REINFORCE: log pi of each token times its return. PPO without the clip and without lambda.

With the reward r_t of a token (section 5 of minippo.py) and the value V(s_t) of the state before it

    grad J = E[ sum_t grad log pi(a_t | s_t) A_t ]
        --total       A_t = r_1 + ... + r_T      Williams (1992), Machine Learning 8, section 5
        (default)     A_t = r_t + ... + r_T      no token changes the rewards before it
        --baseline    A_t = the same - V(s_t)    Sutton et al. (2000), "Policy gradient methods"

On average each is the gradient of J, whatever the values are. They differ in variance. Advantages
are not whitened: the mean of the batch would be one more baseline. After the first of the
--minibatches, the ratio corrects for the steps before, and no clip limits it.
"""

import math
from dataclasses import dataclass

from minippo import PolicyGradientConfig, evaluate_actions, kl_adjusted_rewards, policy_loss
from minippo import value_loss
from train_ppo import train


@dataclass
class Settings(PolicyGradientConfig):
    total: bool = False  # each token is credited with all rewards, earlier ones too
    baseline: bool = False  # subtract the value of the state, and train the values
    vf_coef: float = 0.1  # weight of the value loss, with --baseline


def compute_advantages(batch, config):
    old_logprobs, ref_logprobs, mask = batch["old_logprobs"], batch["ref_logprobs"], batch["mask"]
    rewards = kl_adjusted_rewards(batch["scores"], old_logprobs, ref_logprobs, mask, config.kl_coef)
    returns = rewards.flip(1).cumsum(1).flip(1) * mask  # at t: r_t + ... + r_T
    earned = rewards.sum(1, keepdim=True) if config.total else returns
    advantages = earned - config.baseline * batch["old_values"]  # (B, T-1)
    return {"rewards": rewards, "returns": returns, "advantages": advantages * mask}


def loss(policy, batch, config):
    mask, old_logprobs, old_values = batch["mask"], batch["old_logprobs"], batch["old_values"]
    logprobs, values, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    loss, stats = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, math.inf)
    errors, value_stats = value_loss(values, old_values, batch["returns"], mask, math.inf)
    loss = loss + config.baseline * config.vf_coef * errors
    return loss, {"loss": loss.item(), **stats, **value_stats}


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/reinforce")
