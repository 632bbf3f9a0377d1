"""RLOO, REINFORCE leave-one-out: several responses to a prompt are each other's baseline.

PPO asks a value function how much reward to expect. RLOO samples --k responses to the same prompt
instead, and compares each with the mean of the others:

    A_i = R_i - 1 / (k - 1) * sum over j != i of R_j        R_i = score_i - beta * KL_i

(Ahmadian et al., arXiv:2402.14740; Kool et al., 2019, "Buy 4 REINFORCE samples, get a baseline for
free!") This baseline does not depend on response i, so at ratio 1 the expected step (see
variations/__init__.py) is the gradient of J. All tokens of a response have the same advantage: the
earlier KL rewards are not dropped, which adds noise. There is no value loss, no lam and no
whitening. The paper leaves the clip out. Here it stays: with --epochs above 1 it matters.
"""

from dataclasses import dataclass

from minippo import evaluate_actions, kl_per_response, policy_loss
from train_ppo import train
from variations import GroupConfig


@dataclass
class Settings(GroupConfig):
    clip_eps: float = 0.2  # no gain from a ratio further from 1 than this; inf: no clip


def compute_advantages(batch, config):
    k, mask = config.k, batch["mask"]
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
    # The k responses to a prompt are neighbours: (B,) -> (B / k, k)
    R = (batch["scores"] - config.kl_coef * kl).view(-1, k)
    others = (R.sum(1, keepdim=True) - R) / (k - 1)
    return {"advantages": (R - others).view(-1, 1) * mask}  # (B, T-1)


def loss(policy, batch, config):
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    loss, stats = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, config.clip_eps)
    return loss, {"loss": loss.item(), **stats}


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/rloo")
