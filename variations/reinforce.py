"""REINFORCE: log pi of each token times its return. PPO without the clip and without lambda.

With the reward r_t of a token (section 5 of minippo.py) and the value V_t of the state before it

    grad J = E[ sum_t grad log pi_t * A_t ]
        --total       A_t = r_1 + ... + r_T          Williams (1992), Machine Learning 8
        (default)     A_t = r_t + ... + r_T          no token changes the rewards before it
        --baseline    A_t = r_t + ... + r_T - V_t    Sutton et al. (2000), "Policy gradient methods"

On average each is the gradient of J; they differ in variance. Advantages are not whitened: the mean
of the batch would be one more baseline. After the first minibatch, the ratio corrects for the steps
before, and no clip limits it.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import train_ppo
from minippo import kl_adjusted_rewards, policy_loss, value_loss
from plumbing.settings import run_script
from train_ppo import train


@dataclass
class Config(train_ppo.Config):
    out: Path = Path("out/reinforce")  # folder for checkpoints and logs
    total: bool = False  # each token is credited with all rewards, earlier ones too
    baseline: bool = False  # subtract the value of the state, and train the values
    gamma: ClassVar[float] = 1.0  # these five are no flags here
    lam: ClassVar[float] = 1.0
    whiten: ClassVar[bool] = False
    clip_eps: ClassVar[float] = math.inf
    value_clip: ClassVar[float] = math.inf


def compute_advantages(batch, config):
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    rewards = kl_adjusted_rewards(
        batch["scores"], old_logprobs, batch["ref_logprobs"], mask, config.kl_coef
    )
    returns = rewards.flip(1).cumsum(1).flip(1) * mask  # at t: r_t + ... + r_T
    advantages = returns
    if config.total:
        advantages = rewards.sum(1, keepdim=True) * mask
    if config.baseline:
        advantages = advantages - batch["old_values"]
    return {"rewards": rewards, "returns": returns, "advantages": advantages}


def loss(logprobs, values, batch, config):
    losses, stats = policy_loss(
        logprobs, batch["old_logprobs"], batch["advantages"], config.clip_eps
    )
    if config.baseline:
        errors, value_stats = value_loss(
            values, batch["old_values"], batch["returns"], config.value_clip
        )
        return losses + config.vf_coef * errors, stats | value_stats
    return losses, stats


if __name__ == "__main__":
    run_script(lambda config: train(config, compute_advantages, loss), Config, __doc__)
