"""PPO with a penalty on the KL to the old policy instead of the clip.

    python -m variations.ppo_penalty    after train_sft.py and train_rm.py

Both keep the policy near its old self, which sampled the batch. (Not near the reference: beta does
that.) This is the other form of Schulman et al., arXiv:1707.06347, section 4, eq. 8. Before each
update but the first, the coefficient c follows d, the KL from old to pi in the update before:

    J = E[ratio * A] - c * E[KL(old || pi)]         d < target / 1.5: c = max(c / 2, 0.01)
                                                    d > target * 1.5: c = min(c * 2, 100)

The bounds are ours: Adam's steps are about as long whatever c is, so c could run away. The KL is
estimated by k3 with q = pi / old. On average k3 is the KL, and its gradient that of the KL, because
E_old[grad q] = grad sum_a pi(a) = 0. d is measured on the last minibatch, before the step on it.
"""

import math
from dataclasses import dataclass

import train_ppo
from minippo import compute_advantages, evaluate_actions, masked_mean, policy_loss, value_loss
from plumbing.errors import run_script
from variations import TERMS, refuse_flags, take_flags


@dataclass
class PenaltyLoss:
    """The loss, and a memory: c, and of the last minibatch the sum of k3 and how many tokens."""

    penalty: float = 1.0  # c in the first iteration [0, inf]
    target: float = 0.01  # KL from the old policy to the new, nats per token, to steer to [0, inf]

    def __post_init__(self):
        self.c, self.kl_sum, self.tokens = self.penalty, 0.0, 0

    def __call__(self, policy, batch, config):
        mask, old_logprobs = batch["mask"], batch["old_logprobs"]
        logprobs, values, _ = evaluate_actions(
            policy, batch["tokens"], mask, config.temperature, with_entropy=False
        )
        loss, stats = policy_loss(logprobs, old_logprobs, batch["whitened"], mask, math.inf)
        log_ratio, count = logprobs - old_logprobs, int(mask.sum())
        kl = masked_mean(log_ratio.exp() - 1 - log_ratio, mask)
        value_term, value_stats = value_loss(
            values, batch["old_values"], batch["returns"], mask, config.value_clip
        )
        loss = loss + self.c * kl + config.vf_coef * value_term
        if policy.lm_head.weight.grad is None:  # a minibatch begins (--micro_batch: in pieces)
            self.kl_sum, self.tokens = 0.0, 0
        self.kl_sum, self.tokens = self.kl_sum + count * kl.item(), self.tokens + count
        stats |= {"loss": loss.item(), "count": count, "penalty": self.c}
        return loss, stats | value_stats

    def adapt_and_compute_advantages(self, batch, config, kl_coef):
        """PPO's advantages; before that, c follows from the update before."""
        if self.tokens:
            self.c = adapt_penalty(self.c, self.kl_sum / self.tokens, self.target)
        return compute_advantages(batch, config, kl_coef)

    def state_dict(self):
        return {name: getattr(self, name) for name in ("c", "kl_sum", "tokens")}

    def load_state_dict(self, state):
        self.c, self.kl_sum, self.tokens = state["c"], state["kl_sum"], state["tokens"]


def adapt_penalty(c, d, target):
    factor = 0.5 if d < target / 1.5 else 2.0 if d > target * 1.5 else 1.0
    return min(max(factor * c, 0.01), 100.0)


def main():
    loss = take_flags(__doc__, PenaltyLoss())
    refuse_flags("clip_eps", *TERMS)
    train_ppo.main(loss.adapt_and_compute_advantages, loss, "PPO penalty")


if __name__ == "__main__":
    run_script(main)
