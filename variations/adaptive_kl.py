"""PPO with an adaptive beta, which holds the KL near a target.

After each iteration (Ziegler et al., arXiv:1909.08593, section 2.2)

    error = KL / target - 1, limited to -0.2 ... 0.2
    beta  = beta * (1 + 0.1 * error)

So beta changes by at most 2% per iteration: by a factor of 10 in 115 iterations.
"""

from dataclasses import dataclass
from pathlib import Path

import train_ppo
from plumbing.settings import run_script
from train_ppo import train


@dataclass
class Config(train_ppo.Config):
    out: Path = Path("out/adaptive_kl")  # folder for checkpoints and logs
    kl_coef: float = 0.1  # beta at the beginning; above 0
    kl_target: float = 3.0  # nats per response

    def __post_init__(self):
        super().__post_init__()
        if not (self.kl_coef > 0 and self.kl_target > 0):
            numbers = f"kl_coef ({self.kl_coef}) and kl_target ({self.kl_target})"
            raise ValueError(f"{numbers}: should be above 0")


def next_kl_coef(kl_coef, kl, config):
    error = min(max(kl / config.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + 0.1 * error)


if __name__ == "__main__":
    run_script(lambda config: train(config, next_kl_coef=next_kl_coef), Config, __doc__)
