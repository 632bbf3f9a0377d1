"""REINFORCE with reward-to-go: log pi of each token times the rewards from this token on.

With the reward r_t of a token (section 5 of minippo.py)

    grad J = E[ sum_t grad log pi_t * (r_t + ... + r_T) ]

(Williams, 1992, Machine Learning 8, has all rewards in the place of these: the earlier ones, which
the token cannot change, only add noise.) Returns are not whitened: the mean of the batch would be a
baseline. After the first minibatch, the ratio corrects for the steps before, and no clip limits it.

With the values as a baseline (Sutton et al., 2000, "Policy gradient methods") this is PPO without
its clips: `python train_ppo.py --no-whiten --clip_eps inf --value_clip inf`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from minippo import kl_adjusted_rewards
from plumbing.settings import run_script
from train_ppo import train
from variations import NoValuesConfig, loss


@dataclass
class Config(NoValuesConfig):
    out: Path = Path("out/reinforce")  # folder for checkpoints and logs
    clip_eps: ClassVar[float] = math.inf  # no clip


def compute_advantages(batch, config):
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    rewards = kl_adjusted_rewards(
        batch["scores"], old_logprobs, batch["ref_logprobs"], mask, config.kl_coef
    )
    returns = rewards.flip(1).cumsum(1).flip(1)  # at t: r_t + ... + r_T
    return {"advantages": returns * mask}


if __name__ == "__main__":
    run_script(lambda config: train(config, compute_advantages, loss), Config, __doc__)
