"""Imitate the best of n: sample n responses to each prompt, train on the best one, and repeat.

    python -m variations.best_of_n --n 4    after train_sft.py and train_rm.py

This is RAFT (Dong et al., arXiv:2304.06767), or expert iteration (Anthony et al., arXiv:1705.08439)
with n samples as the expert. For each prompt

    best = the response of n with the largest score - beta * KL
    loss = - mean of log pi over the tokens of the best          the loss of SFT, on one in n

There is no value function, no advantage, no ratio. The best of n has a distribution of its own,
p_n(y): the probability that y is among the n and none of the others is better. The expected step
goes towards p_n: it is minus the gradient of KL(p_n || pi), where p_n counts as fixed, although it
was made from pi (tests/test_variations.py, to 1e-9). The step depends on which response is best,
and not on by how much. The other n - 1 responses only take part in this comparison.
"""

from dataclasses import dataclass, replace

import torch

import train_ppo
from minippo import describe, evaluate_actions, kl_per_response, masked_mean, merge, ppo_update
from plumbing.settings import run_script
from variations import CRITIC, EXTRAS, groups


@dataclass
class BestConfig:
    n: int = 4  # responses to each prompt, of which batch_size / n are drawn


def best_rows(rewards, n):
    """(B,), the n responses to a prompt in a row -> (B / n,), the number of the best of each n."""
    return rewards.view(-1, n).argmax(1) + torch.arange(0, len(rewards), n, device=rewards.device)


def imitation_loss(policy, batch, config):
    mask, how = batch["mask"], (config.temperature, False)
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask, *how)
    loss = -masked_mean(logprobs, mask)
    return loss, {"loss": loss.item(), "tokens": int(mask.sum()), "ratio_max": 1.0}  # no old policy


def best_of_n_iteration(
    policy, ref, score, prompts, optimizer, config, kl_coef, rollout, micro_batch, own
):
    batch = rollout(policy, ref, score, groups(prompts, own.n), config)
    kl, _ = kl_per_response(batch["logprobs"], batch["ref_logprobs"], batch["mask"])
    rewards = batch["scores"] - kl_coef * kl  # (B,)
    batch["returns"] = rewards[:, None] * batch["mask"]  # only for the log
    best = best_rows(rewards, own.n)
    chosen = {name: x[best] for name, x in batch.items()}
    config = replace(config, minibatches=min(config.minibatches, len(best)))
    passes = ppo_update(policy, optimizer, chosen, config, micro_batch, imitation_loss)
    return batch, {**describe(batch, kl_coef), **merge(passes), "passes": passes}


if __name__ == "__main__":
    flags = {"own": [BestConfig()], "without": ("clip_eps", *CRITIC, *EXTRAS)}
    run_script(lambda: train_ppo.main(best_of_n_iteration, "best_of_n", __doc__, **flags))
