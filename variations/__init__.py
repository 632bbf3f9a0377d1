"""Algorithms related to PPO.

An algorithm is two functions. compute_advantages(batch, config): what does each token deserve?
loss(logprobs, values, batch, config): the loss of each token. A file holds its Config, each of the
functions that differs from PPO's, and a last line that trains with them in the loop of
train_ppo.py. (dpo.py, which learns from pairs, has a loop of its own.) To run one:

    python -m variations.rloo --group_size 8     writes to out/rloo; -h lists the flags
    python evaluate.py out/rloo --kl_coef 0.1    all compared at the same beta, that of PPO

The *expected step* of a loss is the mean step over all responses that could be sampled, if the loss
is summed over tokens. For REINFORCE and RLOO it is the gradient of J: tests/test_variations.py
checks it, to 1e-9.
"""

from dataclasses import dataclass
from typing import ClassVar

import train_ppo
from minippo import policy_loss


@dataclass
class NoValuesConfig(train_ppo.Config):
    """For algorithms without a value function."""

    gamma: ClassVar[float] = 1.0  # a ClassVar is no flag
    lam: ClassVar[float] = 1.0
    whiten: ClassVar[bool] = False
    vf_coef: ClassVar[float] = 0.0
    value_clip: ClassVar[float] = 0.0
    value_lr: ClassVar[float] = 0.0


def loss(logprobs, values, batch, config):
    """PPO's, without the loss of the value function."""
    return policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], config.clip_eps)


@dataclass
class GroupConfig(NoValuesConfig):
    """For algorithms that compare the responses to a prompt with each other."""

    group_size: int = 4  # responses to each prompt

    def __post_init__(self):
        super().__post_init__()
        self.at_least(2, "group_size")
