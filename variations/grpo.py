"""GRPO, group relative policy optimisation: (score - mean of the group) / its standard deviation.

    python -m variations.grpo --k 8                    after train_sft.py and train_rm.py
    python -m variations.grpo --no_std --no_length     nearly "Dr. GRPO" (arXiv:2503.20783)

For the k responses to a prompt (DeepSeekMath, arXiv:2402.03300, section 4.1.2 and eq. 3 and 4)

    A_i = (score_i - mean) / std
    L = mean over i of the mean over the tokens of response i of
        min(ratio A_i, clipped ratio A_i) - beta (q - 1 - log q),       q = ref / pi of the token

What each part does to the expected step (at ratio 1; tests/test_variations.py, to 1e-9):

mean    of all k, response i among them: the step is (k - 1) / k of the gradient of E[score].
std     no longer the gradient of E[score]: prompts whose scores hardly differ count as much as
        others. With k = 2, A is 1 or -1, however far apart the scores are, and the step is the
        gradient of P(win) - P(lose) against another sample. Beta is not divided by std.
tokens  count less in long responses. --no_length: all alike (Dr. GRPO divides by a constant).
k3      q - 1 - log q as a loss has the gradient of KL(ref || pi); PPO's J has KL(pi || ref).
"""

from dataclasses import dataclass
from functools import partial

import train_ppo
from minippo import evaluate_actions, masked_mean, policy_loss
from plumbing.settings import run_script
from variations import CRITIC, EXTRAS, groups, update


@dataclass
class GRPOConfig:
    k: int = 4  # responses to each prompt, of which batch_size / k are drawn
    no_std: bool = False  # do not divide by the standard deviation of the group
    no_length: bool = False  # all tokens count the same, those of long responses too


def group_advantages(scores, k, no_std=False):
    """(B,), the k responses to a prompt in a row -> (B,)."""
    scores = scores.view(-1, k)
    advantages = scores - scores.mean(1, keepdim=True)
    std = 1.0 if no_std else scores.std(1, correction=0, keepdim=True).clamp(min=1e-4)
    return (advantages / std).flatten()


def grpo_loss(policy, batch, config, beta):
    mask, weights, how = batch["mask"], batch["weights"], (config.temperature, False)
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask, *how)
    old = batch["logprobs"], weights * batch["advantages"]
    loss, stats = policy_loss(logprobs, *old, mask, config.clip_eps)
    log_q = (batch["ref_logprobs"] - logprobs) * mask
    loss = loss + beta * masked_mean(weights * (log_q.exp() - 1 - log_q), mask)
    return loss, {"loss": loss.item(), "tokens": int(mask.sum()), **stats}


def grpo_iteration(
    policy, ref, score, prompts, optimizer, config, kl_coef, rollout, micro_batch, own
):
    batch = rollout(policy, ref, score, groups(prompts, own.k), config)
    mask, lengths = batch["mask"], batch["mask"].sum(1, keepdim=True).to(batch["scores"])
    shares = 1.0 if own.no_length else lengths.mean() / lengths  # (B, 1), around 1
    batch["advantages"] = group_advantages(batch["scores"], own.k, own.no_std)[:, None] * mask
    batch |= {"weights": shares * mask, "returns": batch["scores"][:, None] * mask}
    loss_of = partial(grpo_loss, beta=kl_coef)
    return update(policy, optimizer, batch, config, kl_coef, micro_batch, loss_of)


if __name__ == "__main__":
    flags = {"own": [GRPOConfig()], "without": CRITIC + EXTRAS}
    run_script(lambda: train_ppo.main(grpo_iteration, "grpo", __doc__, **flags))
