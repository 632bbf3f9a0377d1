"""PPO with a separate critic: a value network that shares no weight with the policy.

In InstructGPT (arXiv:2203.02155, appendix C.4) the critic starts as the reward model: its first
value in a state is the score of the text so far. It costs a second network, and the value loss no
longer moves the policy's trunk. What is saved is the policy alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn as nn

import train_ppo
from plumbing.models import load_checkpoint, models_folder
from plumbing.settings import run_script
from train_ppo import train


@dataclass
class Config(train_ppo.Config):
    out: Path = Path("out/separate_critic")  # folder for checkpoints and logs
    lr: float = 4e-4  # peak of the learning rate of both networks, which then falls linearly to 0
    value_lr: float = 4e-4  # the same for the head of the critic
    reward: ClassVar[str] = ""  # the critic starts from rm.pt, so this is no flag here


class ActorCritic(nn.Module):
    """The policy and its critic; called as a GPT is."""

    def __init__(self, policy, value_trunk, value_head):
        super().__init__()
        self.config = policy.config
        self.trunk = policy.trunk
        self.lm_head = policy.lm_head
        self.value_trunk = value_trunk
        self.value_head = value_head

    def forward(self, tokens, mask):
        """As GPT.forward."""
        logits = self.lm_head(self.trunk(tokens)[mask])
        values = self.value_head(self.value_trunk(tokens)[mask]).squeeze(-1)
        return logits, values


@torch.no_grad()
def add_critic(policy, config):
    device = policy.lm_head.weight.device
    reward_model, _, _ = load_checkpoint(models_folder(config) / "rm.pt", ["rm"], device)
    value_head = reward_model.score_head
    # value = normalised score = (score_head(hidden) - mean) / std
    value_head.weight /= reward_model.std
    value_head.bias -= reward_model.mean
    value_head.bias /= reward_model.std
    return ActorCritic(policy, reward_model.trunk, value_head)


if __name__ == "__main__":
    run_script(lambda config: train(config, add_critic=add_critic), Config, __doc__)
