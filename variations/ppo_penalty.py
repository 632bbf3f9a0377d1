"""PPO with a penalty on the KL to the old policy instead of the clip.

Both keep the policy near the one that sampled the batch (not near the reference, as beta does).
Schulman et al., arXiv:1707.06347, section 4, eq. 8:

    J = E[ratio * A] - c * E[KL(old || pi)]

The paper also adapts c to a target for the KL; here c is fixed. The KL is estimated by k3 (the
statistic approx_kl). Advantages are whitened, so c weighs nats per token against advantages of
size 1.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import train_ppo
from minippo import ppo_loss
from plumbing.settings import run_script
from train_ppo import train


@dataclass
class Config(train_ppo.Config):
    out: Path = Path("out/ppo_penalty")  # folder for checkpoints and logs
    clip_eps: float = math.inf  # no clip
    penalty: float = 1.0  # c, the penalty per nat of KL per token to the old policy


def loss(logprobs, values, batch, config):
    losses, stats = ppo_loss(logprobs, values, batch, config)
    return losses + config.penalty * stats["approx_kl"], stats


if __name__ == "__main__":
    run_script(lambda config: train(config, loss=loss), Config, __doc__)
