"""Imitate the best of n, another algorithm than PPO: sample n responses to each prompt, train on
the best one, and repeat.

    python -m variations.best_of_n --n 4    after train_sft.py and train_rm.py

This is RAFT (Dong et al., arXiv:2304.06767), or expert iteration (Anthony et al., arXiv:1705.08439)
with n samples as the expert. There is no value function, no advantage, no ratio. For each prompt

    best = the response of n with the largest score - beta * KL
    loss = - mean of log pi over the tokens of the best          the loss of SFT, on one in n

The best of n has a distribution of its own, p_n(y): the probability that y is among the n and none
is better. The expected step is minus the gradient of KL(p_n || pi), with p_n as fixed, although it
was made from pi (tests/test_variations.py, to 1e-9). So it matters which response is best, and not
by how much.
"""

import sys
from dataclasses import dataclass
from functools import partial

import torch

import train_ppo
from minippo import evaluate_actions, kl_per_response
from plumbing.errors import run_script
from variations import GROUPS, TERMS, refuse_flags, take_flags


def best_rows(rewards, n):
    """(B,), the n responses to a prompt in a row -> (B,): true for the best of each n."""
    best = rewards.view(-1, n).argmax(1, keepdim=True)  # (B / n, 1)
    return (torch.arange(n, device=rewards.device) == best).flatten()


def best_of_n_advantages(batch, config, kl_coef, n):
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    return {"chosen": best_rows(batch["scores"] - kl_coef * kl, n)}


def imitation_loss(policy, batch, config):
    mask, chosen = batch["mask"], batch["chosen"][:, None]  # (B, T-1), (B, 1)
    logprobs, _, _ = evaluate_actions(
        policy, batch["tokens"], mask, config.temperature, with_entropy=False
    )
    count = int((mask & chosen).sum())  # 0 if a piece of a minibatch holds none of the best
    loss = -(logprobs * chosen).sum() / max(1, count)
    return loss, {"loss": loss.item(), "count": count}


@dataclass
class BestConfig:
    n: int = 4  # responses to each prompt, of which batch_size / n are drawn [1, inf]


def main():
    flags = take_flags(__doc__, BestConfig())
    refuse_flags("clip_eps", *GROUPS, *TERMS)
    sys.argv += ["--group_size", str(flags.n)]
    train_ppo.main(partial(best_of_n_advantages, n=flags.n), imitation_loss, "best of n")


if __name__ == "__main__":
    run_script(main)
