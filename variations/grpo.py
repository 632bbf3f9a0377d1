"""GRPO, group relative policy optimisation: (score - mean of the group) / its standard deviation.

For the --k responses to a prompt (DeepSeekMath, arXiv:2402.03300, section 4.1.2 and eq. 3 and 4)

    A_i  = (score_i - mean of the k scores) / their standard deviation     the same at every token
    loss = mean over responses of the mean over tokens of
        -min(ratio A_i, clipped ratio A_i) + beta k3,    k3 = exp(-d) - 1 + d, d = log pi - log ref

What each part does to the expected step at ratio 1:

mean    includes response i: so only (k - 1) / k of the gradient of E[score].
std     prompts whose scores hardly differ count as much as others. With k = 2, A is 0.71 or -0.71,
        and the step is 0.71 times the gradient of P(win) - P(lose) against another sample.
tokens  count less in long responses.
k3      as a loss has the gradient of KL(ref || pi); PPO's J has KL(pi || ref).

With --no_std --no_length it is nearly Dr. GRPO (arXiv:2503.20783, which divides by a constant).
"""

from dataclasses import dataclass

from minippo import bounded_exp, evaluate_actions, masked_mean, policy_loss
from train_ppo import train
from variations import GroupConfig


@dataclass
class Settings(GroupConfig):
    clip_eps: float = 0.2  # no gain from a ratio further from 1 than this; inf: no clip
    std: bool = True  # divide by the standard deviation of the group
    length: bool = True  # tokens of long responses count less


def compute_advantages(batch, config):
    mask, scores = batch["mask"], batch["scores"].view(-1, config.k)  # (B / k, k)
    advantages = scores - scores.mean(1, keepdim=True)
    if config.std:
        advantages = advantages / (scores.std(1, keepdim=True) + 1e-4)  # equal scores: 0
    # With these weights the mean over all tokens of the batch is the mean over responses of their
    # means. (In a minibatch it is nearly so.)
    lengths = mask.sum(1, keepdim=True).to(scores)  # (B, 1)
    weights = mask * (lengths.mean() / lengths if config.length else 1.0)  # (B, T-1)
    return {"weights": weights, "advantages": weights * advantages.view(-1, 1)}


def loss(policy, batch, config):
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    loss, stats = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, config.clip_eps)
    d = logprobs - batch["ref_logprobs"]
    k3 = masked_mean(batch["weights"] * (bounded_exp(-d) - 1 + d), mask)
    loss = loss + config.kl_coef * k3
    return loss, {"loss": loss.item(), **stats}


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/grpo")
