"""GRPO, group relative policy optimisation: (score - mean of the group) / its standard deviation.

    python -m variations.grpo --k 8                    after train_sft.py and train_rm.py
    python -m variations.grpo --no_std --no_length     nearly "Dr. GRPO" (arXiv:2503.20783)

For the k responses to a prompt (DeepSeekMath, arXiv:2402.03300, section 4.1.2 and eq. 3 and 4)

    A_i = (score_i - mean) / std        of the k scores; std with 1 / (k - 1), as in TRL
    L = mean over i of the mean over the tokens of response i of
        min(ratio A_i, clipped ratio A_i) - beta (q - 1 - log q),       q = ref / pi of the token

What each part does to the expected step (at ratio 1; tests/test_variations.py, to 1e-9):

mean    includes response i: so only (k - 1) / k of the gradient of E[score].
std     no longer that gradient: prompts whose scores hardly differ count as much as others. With
        k = 2, A is 0.71 or -0.71 (with 1 / k in std: 1 or -1), however far apart the scores are,
        and the step is the gradient of P(win) - P(lose) against another sample, times that number.
        Beta is not divided by std.
tokens  count less in long responses. --no_length: all alike (Dr. GRPO divides by a constant).
k3      q - 1 - log q as a loss has the gradient of KL(ref || pi); PPO's J has KL(pi || ref).
"""

import sys
from dataclasses import dataclass
from functools import partial

import train_ppo
from minippo import evaluate_actions, masked_mean, policy_loss
from plumbing.errors import run_script
from variations import GROUPS, TERMS, refuse_flags, take_flags


def group_advantages(scores, k, no_std=False):
    """(B,), the k responses to a prompt in a row -> (B,)."""
    scores = scores.view(-1, k)
    advantages = scores - scores.mean(1, keepdim=True)
    std = 1.0 if no_std else scores.std(1, keepdim=True).clamp(min=1e-4)
    return (advantages / std).flatten()


def grpo_advantages(batch, config, kl_coef, k, no_std=False):
    advantages = group_advantages(batch["scores"], k, no_std)[:, None] * batch["mask"]  # (B, T-1)
    return {"advantages": advantages, "whitened": advantages}


def grpo_loss(policy, batch, config, no_length=False):
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    logprobs, _, _ = evaluate_actions(
        policy, batch["tokens"], mask, config.temperature, with_entropy=False
    )
    # With these weights the mean over all tokens is the mean over responses of their means.
    lengths = mask.sum(1, keepdim=True).to(logprobs)
    weights = mask * (1.0 if no_length else lengths.mean() / lengths)  # (B, T-1)
    advantages = weights * batch["whitened"]
    loss, stats = policy_loss(logprobs, old_logprobs, advantages, mask, config.clip_eps)
    log_q = (batch["ref_logprobs"] - logprobs) * mask
    loss = loss + config.kl_coef * masked_mean(weights * (log_q.exp() - 1 - log_q), mask)
    count = int(mask.sum()) if no_length else len(mask)  # a mean over tokens, or over responses
    return loss, {"loss": loss.item(), "count": count, **stats}


@dataclass
class GRPOConfig:
    k: int = 4  # responses to each prompt, of which batch_size / k are drawn [2, inf]
    no_std: bool = False  # do not divide by the standard deviation of the group
    no_length: bool = False  # all tokens count the same, those of long responses too


UNREAD = (*GROUPS, *TERMS, "kl_target", "kl_horizon")


def main():
    flags = take_flags(__doc__, GRPOConfig())
    refuse_flags(*UNREAD)
    sys.argv += ["--group_size", str(flags.k)]
    advantages = partial(grpo_advantages, k=flags.k, no_std=flags.no_std)
    train_ppo.main(advantages, partial(grpo_loss, no_length=flags.no_length), "GRPO")


if __name__ == "__main__":
    run_script(main)
