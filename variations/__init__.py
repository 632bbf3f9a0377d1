"""Algorithms related to PPO.

An algorithm is two functions. compute_advantages(batch, config): what does each token deserve?
loss(policy, batch, config): a mean over the tokens of the batch. A file holds its settings, each
of the two functions that differs from PPO's, and a last line that trains with them in the loop of
train_ppo.py. (dpo.py, which learns from pairs, has its own loop.) To run one:

    python -m variations.rloo --k 8     writes to out/rloo; -h lists the flags

The *expected step* of a loss: sum the loss over the tokens instead of averaging, take a step of
plain gradient descent, and average the step over all responses that could have been sampled. For
REINFORCE and RLOO it is the gradient of J: tests/test_variations.py checks it, to 1e-9.
"""

from dataclasses import dataclass

from minippo import PolicyGradientConfig


@dataclass
class GroupConfig(PolicyGradientConfig):
    """For algorithms that compare the responses to a prompt with each other."""

    k: int = 4  # responses to each prompt

    def __post_init__(self):
        super().__post_init__()
        if self.k < 2:
            raise ValueError(f"k ({self.k}): should be at least 2, to compare responses")
