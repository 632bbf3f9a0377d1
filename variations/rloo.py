"""RLOO, REINFORCE leave-one-out: several responses to a prompt are each other's baseline.

PPO asks a value function how much reward to expect. RLOO samples n = --group_size responses to the
same prompt instead, and compares each with the mean of the others:

    A_i = R_i - 1 / (n - 1) * sum over j != i of R_j        R_i = score_i - beta * KL_i

(Ahmadian et al., arXiv:2402.14740; Kool et al., 2019, "Buy 4 REINFORCE samples, get a baseline for
free!") This baseline does not depend on response i, so at ratio 1 the expected step is the gradient
of J. All tokens of a response have the same advantage: the earlier KL rewards are not dropped,
which adds noise. The paper has no clip. Here it stays: with --epochs above 1 it matters.
"""

from dataclasses import dataclass
from pathlib import Path

from minippo import kl_per_response
from plumbing.settings import run_script
from train_ppo import train
from variations import GroupConfig, loss


@dataclass
class Config(GroupConfig):
    out: Path = Path("out/rloo")  # folder for checkpoints and logs


def compute_advantages(batch, config):
    n = config.group_size
    kl = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    # The responses to a prompt are neighbours: (B,) -> (B / n, n)
    R = (batch["scores"] - config.kl_coef * kl).view(-1, n)
    others = (R.sum(1, keepdim=True) - R) / (n - 1)
    return {"advantages": (R - others).view(-1, 1) * batch["mask"]}  # (B, T-1)


if __name__ == "__main__":
    run_script(lambda config: train(config, compute_advantages, loss), Config, __doc__)
