"""RAFT, imitate the best of k: sample k responses to each prompt, train on the best one, and
repeat.

RAFT (Dong et al., arXiv:2304.06767) is expert iteration (Anthony et al., arXiv:1705.08439) with k
samples as the expert. For each prompt

    best = the response of k with the largest score - beta * KL
    loss = - mean of log pi over the tokens of the best          the loss of SFT, on one in k

The best of k has its own distribution, p_k. The expected step is minus the gradient of
KL(p_k || pi), with p_k held fixed although it depends on pi. So it matters which response is best,
but not by how much.
"""

import torch

from minippo import evaluate_actions, masked_mean
from train_ppo import train
from variations import GroupConfig, response_rewards


def compute_advantages(batch, config):
    mask, rewards = batch["mask"], response_rewards(batch, config).view(-1, config.k)  # (B / k, k)
    best = torch.zeros_like(mask[:, 0]).view(-1, config.k)
    best.scatter_(1, rewards.argmax(1, keepdim=True), True)
    chosen = best.view(-1, 1) & mask  # (B, T-1)
    # Divided by their share, so that the mean over all tokens of the batch is the mean over the
    # chosen ones. (In a minibatch it is nearly so.)
    return {"advantages": chosen * (mask.sum() / chosen.sum())}


def loss(policy, batch, config):
    mask = batch["mask"]
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    loss = -masked_mean(batch["advantages"] * logprobs, mask)
    return loss, {"loss": loss.item()}


if __name__ == "__main__":
    train(GroupConfig, compute_advantages, loss, __doc__, out="out/raft")
