"""The whole response is one action, with one advantage and one ratio: GSPO.

Many texts describe PPO for language models like this: the prompt x is the only state, and the whole
response y is the only action. So there are one reward, one value and one ratio per response:

    A = score - beta * KL - V(x),        ratio = pi(y | x) / old(y | x)        --no_mean

At ratio 1, without whitening, the expected step is the gradient of J. What is lost? All tokens have
the same advantage, and V has read the prompt alone. The ratio is the product of those of all its
tokens. So it soon leaves the clip range, and then, if it has moved as A wants, no token has a
gradient. GSPO (Zheng et al., arXiv:2507.18071) takes the geometric mean instead, this product to
the power of 1 / length, and clips it at 1 - 3e-4 and 1 + 4e-4. So the gradient is divided by the
length. Its advantages are those of GRPO. Here they are A, and the clip is PPO's: give a small
--clip_eps.
"""

from dataclasses import dataclass

from minippo import PolicyGradientConfig, evaluate_actions, masked_mean, policy_loss, whiten
from train_ppo import train
from variations import response_rewards


@dataclass
class Settings(PolicyGradientConfig):
    whiten: bool = True  # advantages with mean 0 and standard deviation 1
    clip_eps: float = 0.2  # no gain from a ratio further from 1 than this; inf: no clip
    vf_coef: float = 0.1  # weight of the value loss
    separate_critic: bool = False  # a value network of its own, started from the reward model
    mean: bool = True  # the ratio is the geometric mean of those of the tokens, not their product


def compute_advantages(batch, config):
    mask = batch["mask"]
    first = mask & (mask.cumsum(1) == 1)  # the first token of each response
    values = (batch["old_values"] * first).sum(1, keepdim=True)  # V(x), (B, 1)
    returns = response_rewards(batch, config)[:, None]  # (B, 1)
    advantages = returns - values
    if config.whiten:
        advantages = whiten(advantages, mask.any(1, keepdim=True))
    # With these weights a mean over all tokens is a mean over responses.
    lengths = mask.sum(1, keepdim=True).to(values)
    weights = mask * lengths.mean() / lengths
    same = {"old_values": values * mask, "returns": returns * mask}  # at all tokens
    return same | {"first": first * lengths.mean(), "advantages": advantages * weights}


def loss(policy, batch, config):
    mask = batch["mask"]
    logprobs, values, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature)
    log_ratio = ((logprobs - batch["old_logprobs"]) * mask).sum(1, keepdim=True)  # (B, 1)
    log_ratio = mask * (log_ratio / mask.sum(1, keepdim=True) if config.mean else log_ratio)
    loss, stats = policy_loss(log_ratio, 0 * log_ratio, batch["advantages"], mask, config.clip_eps)
    value_term = 0.5 * masked_mean(batch["first"] * (values - batch["returns"]) ** 2, mask)
    loss = loss + config.vf_coef * value_term
    return loss, {"loss": loss.item(), **stats, "value_loss": value_term.item()}


if __name__ == "__main__":
    train(Settings, compute_advantages, loss, __doc__, out="out/gspo")
