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
from dataclasses import dataclass, replace

import torch

from minippo import PPOConfig, gae, kl_adjusted_rewards, ppo_loss

UNREAD = ("gamma", "lam", "clip_eps", "whiten")


@dataclass
class Settings(PPOConfig):
    clip_eps: float = math.inf  # no clip [0, inf]
    total: bool = False  # a token answers for all rewards of the response, not from itself on
    baseline: bool = False  # subtract the value of the state, and train the values


def compute_advantages(batch, config):
    old_logprobs, ref_logprobs, mask = batch["old_logprobs"], batch["ref_logprobs"], batch["mask"]
    rewards = kl_adjusted_rewards(batch["scores"], old_logprobs, ref_logprobs, mask, config.kl_coef)
    values = batch["old_values"] * config.baseline  # (B, T-1)
    credit, returns = gae(rewards, values, mask, 1.0, 1.0)  # lam = 1: the return less the value
    if config.total:  # the rewards before the token too
        credit = torch.where(mask, rewards.sum(1, keepdim=True) - values, 0.0)
    return {"rewards": rewards, "returns": returns, "credit": credit}


def loss(policy, batch, config):
    return ppo_loss(policy, batch, replace(config, vf_coef=config.vf_coef * config.baseline))
