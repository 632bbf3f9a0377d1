"""PPO with a penalty on the KL to the old policy instead of the clip.

    python -m variations.ppo_penalty    after train_sft.py and train_rm.py

Both keep the policy near its old self, which has sampled the batch. (Not near the reference: beta
does that.) This is the other form of Schulman et al., arXiv:1707.06347, section 4, eq. 8. After
each update, d is the KL from the old policy to the new, and the coefficient c is adapted:

    J = E[ratio * A] - c * E[KL(old || pi)]         d < target / 1.5: c = max(c / 2, 0.01)
                                                    d > target * 1.5: c = min(c * 2, 100)

The bounds are ours: Adam's steps are about as long whatever c is, so without them c can run away.
The KL is estimated by k3 with q = pi / old. The mean of k3 is the KL, and the mean of its gradient
is that of the KL: E_old[grad q] = grad sum_a pi(a) = 0. The optimizer keeps c, for --resume.
"""

from dataclasses import dataclass
from functools import partial

import torch

import train_ppo
from minippo import evaluate_actions, gae, kl_adjusted_rewards, masked_mean, merge, policy_loss
from minippo import value_loss, whiten
from plumbing.settings import run_script
from variations import EXTRAS, update


@dataclass
class PenaltyConfig:
    penalty: float = 1.0  # c in the first iteration
    target: float = 0.01  # KL from the old policy to the new, nats per token, that c steers to


def penalty_loss(policy, batch, config, penalty):
    mask, old, returns = batch["mask"], batch["logprobs"], batch["returns"]
    logprobs, values, _ = evaluate_actions(policy, batch["tokens"], mask, config.temperature, False)
    loss, stats = policy_loss(logprobs, old, batch["advantages"], mask, float("inf"))
    kl = masked_mean((logprobs - old).exp() - 1 - (logprobs - old), mask)
    values_loss, more = value_loss(values, batch["values"], returns, mask, config.value_clip)
    loss = loss + penalty * kl + config.vf_coef * values_loss
    return loss, {"loss": loss.item(), "tokens": int(mask.sum()), **stats, **more}


def adapt(penalty, kl, target):
    factor = 0.5 if kl < target / 1.5 else 2.0 if kl > target * 1.5 else 1.0
    return min(max(factor * penalty, 0.01), 100.0)


def penalty_iteration(
    policy, ref, score, prompts, optimizer, config, kl_coef, rollout, micro_batch, own
):
    batch, group = rollout(policy, ref, score, prompts, config), optimizer.param_groups[0]
    old, mask, c = batch["logprobs"], batch["mask"], group.setdefault("penalty", own.penalty)
    rewards = kl_adjusted_rewards(batch["scores"], old, batch["ref_logprobs"], mask, kl_coef)
    advantages, returns = gae(rewards, batch["values"], mask, config.gamma, config.lam)
    batch |= {"rewards": rewards, "advantages": whiten(advantages, mask), "returns": returns}
    loss_of = partial(penalty_loss, penalty=c)
    batch, stats = update(policy, optimizer, batch, config, kl_coef, micro_batch, loss_of)
    rows = torch.arange(len(mask), device=mask.device).split(micro_batch or len(mask))
    with torch.no_grad():  # once more, after the last step
        after = [loss_of(policy, {k: x[i] for k, x in batch.items()}, config)[1] for i in rows]
    d = merge(after)["approx_kl"]
    group["penalty"] = adapt(c, d, own.target)
    return batch, stats | {"penalty": c, "old_kl": d}


if __name__ == "__main__":
    flags = {"own": [PenaltyConfig()], "without": ("clip_eps", *EXTRAS)}
    run_script(lambda: train_ppo.main(penalty_iteration, "ppo_penalty", __doc__, **flags))
