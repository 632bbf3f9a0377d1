"""REINFORCE: log pi of each token times its return. PPO without the clip and without lambda.

    python -m variations.reinforce                   after train_sft.py and train_rm.py
    python -m variations.reinforce --credit total    a token answers for the whole response
    python -m variations.reinforce --baseline        less the value of the state, as in PPO

With the reward r_t of a token (section 5 of minippo.py) and the value V(s_t) of the state before it

    grad J = E[ sum_t grad log pi(a_t | s_t) A_t ]
        --credit total    A_t = r_1 + ... + r_T      Williams (1992), "episodic REINFORCE"
        --credit to_go    A_t = r_t + ... + r_T      no token changes the rewards before it
        --baseline        A_t = the same - V(s_t)    Sutton et al. (2000), "Policy gradient methods"

(Williams: Machine Learning 8, pages 229 to 256, section 5. His baseline is one for all tokens.) On
average each is the gradient of J, whatever the values are (tests/test_variations.py, to 1e-9). They
differ in variance: bench/ladder.py computes it. Advantages are not whitened, because the mean of
the batch would be one more baseline.

This is so while the policy is the one that sampled, in the first of the --minibatches. In the
others the ratio corrects for the steps before, and no clip limits it.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

import train_ppo
from minippo import gae, kl_adjusted_rewards, ppo_loss
from plumbing.errors import UserError, run_script
from variations import CRITIC, refuse_flags, take_flags


def reinforce_advantages(batch, config, kl_coef, credit="to_go", baseline=False):
    old_logprobs, ref_logprobs, mask = batch["old_logprobs"], batch["ref_logprobs"], batch["mask"]
    rewards = kl_adjusted_rewards(batch["scores"], old_logprobs, ref_logprobs, mask, kl_coef)
    values = batch["old_values"] * baseline  # (B, T-1)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)  # lam = 1: the return less the value
    if credit == "total":  # the rewards before the token too
        advantages = torch.where(mask, rewards.sum(1, keepdim=True) - values, 0.0)
    found = {"rewards": rewards, "advantages": advantages, "returns": returns}
    return found | {"whitened": advantages}


def reinforce_loss(policy, batch, config, baseline=False):
    no_clip = replace(config, clip_eps=math.inf, vf_coef=config.vf_coef * baseline)
    return ppo_loss(policy, batch, no_clip)


@dataclass
class ReinforceConfig:
    credit: str = "to_go"  # the rewards a token answers for: total (all) or to_go (from it on)
    baseline: bool = False  # subtract the value of the state, and train the values

    def __post_init__(self):
        if self.credit not in ("total", "to_go"):
            raise UserError(f"--credit {self.credit}: should be total or to_go")


def main():
    flags = take_flags(__doc__, ReinforceConfig())
    baseline = flags.baseline
    refuse_flags("gamma", "lam", "clip_eps", "no_whiten", *(() if baseline else CRITIC))
    advantages = partial(reinforce_advantages, credit=flags.credit, baseline=baseline)
    train_ppo.main(advantages, partial(reinforce_loss, baseline=baseline), "REINFORCE")


if __name__ == "__main__":
    run_script(main)
