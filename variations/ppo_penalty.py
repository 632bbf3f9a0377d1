"""PPO with a penalty on the KL to the old policy instead of the clip.

    python -m variations.ppo_penalty    after train_sft.py and train_rm.py

Both keep the policy near its old self, which has sampled the batch. (Not near the reference: beta
does that.) This is the other form of Schulman et al., arXiv:1707.06347, section 4, eq. 8. After
each update, d is the KL from the old policy to the new, and the coefficient c is adapted:

    J = E[ratio * A] - c * E[KL(old || pi)]         d < target / 1.5: c = max(c / 2, 0.01)
                                                    d > target * 1.5: c = min(c * 2, 100)

The bounds are ours: Adam's steps are about as long whatever c is, so without them c can run away.
The KL is estimated by k3 with q = pi / old. The mean of k3 is the KL, and the mean of its gradient
is that of the KL: E_old[grad q] = grad sum_a pi(a) = 0. Here d is measured on the last minibatch of
the update, before its own step.
"""

import math
from dataclasses import dataclass

import train_ppo
from minippo import credit, evaluate_actions, masked_mean, policy_loss, value_loss
from plumbing.errors import run_script
from variations import TERMS, take_flags


@dataclass
class PenaltyLoss:
    """The loss of an update, and a memory: c, and d as it was last measured."""

    penalty: float = 1.0  # c in the first iteration [0, inf]
    target: float = 0.01  # KL from the old policy to the new, nats per token, to steer to [0, inf]

    def __post_init__(self):
        self.c, self.d = self.penalty, None

    def __call__(self, policy, batch, config):
        mask, old_logprobs = batch["mask"], batch["old_logprobs"]
        logprobs, values, _ = evaluate_actions(
            policy, batch["tokens"], mask, config.temperature, with_entropy=False
        )
        loss, stats = policy_loss(logprobs, old_logprobs, batch["whitened"], mask, math.inf)
        log_ratio = logprobs - old_logprobs
        kl = masked_mean(log_ratio.exp() - 1 - log_ratio, mask)
        value_term, value_stats = value_loss(
            values, batch["old_values"], batch["returns"], mask, config.value_clip
        )
        loss = loss + self.c * kl + config.vf_coef * value_term
        self.d = kl.item()
        stats |= {"loss": loss.item(), "count": int(mask.sum()), "penalty": self.c}
        return loss, stats | value_stats

    def adapt_and_credit(self, batch, config, kl_coef):
        """PPO's credit; before it, c follows from the update that has just ended."""
        if self.d is not None:
            self.c = adapt_penalty(self.c, self.d, self.target)
        return credit(batch, config, kl_coef)

    def state_dict(self):
        return {"c": self.c, "d": self.d}

    def load_state_dict(self, state):
        self.c, self.d = state["c"], state["d"]


def adapt_penalty(c, d, target):
    factor = 0.5 if d < target / 1.5 else 2.0 if d > target * 1.5 else 1.0
    return min(max(factor * c, 0.01), 100.0)


def main():
    loss = take_flags(__doc__, PenaltyLoss(), unread=("clip_eps", *TERMS))
    train_ppo.main(loss.adapt_and_credit, loss, "PPO penalty")


if __name__ == "__main__":
    run_script(main)
