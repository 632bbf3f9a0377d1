"""RLOO, REINFORCE leave-one-out: several responses to a prompt are each other's baseline.

    python -m variations.rloo --k 4    after train_sft.py and train_rm.py

PPO asks a value function how much reward is to be expected. RLOO samples k responses to the same
prompt instead, and compares each with the mean of the others:

    A_i = R_i - 1 / (k - 1) * sum over j != i of R_j        R_i = score_i - beta * KL_i

(Ahmadian et al., arXiv:2402.14740; Kool et al., 2019, "Buy 4 REINFORCE samples, get a baseline for
free!") The others know nothing of response i, so the expected step is the gradient of J
(tests/test_variations.py, to 1e-9). All tokens of a response have the same advantage, which is not
whitened: which of them deserve it shows only on average over many responses. The paper leaves the
clip out, because it hardly acts in its two steps per batch. Here it stays, for PPO's four.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial

import train_ppo
from minippo import kl_per_response, ppo_loss
from plumbing.errors import run_script
from variations import GROUPS, refuse_flags, take_flags


def leave_one_out(rewards, k):
    """(B,), the k responses to a prompt in a row -> each less the mean of the k - 1 others."""
    rewards = rewards.view(-1, k)
    others = (rewards.sum(1, keepdim=True) - rewards) / (k - 1)
    return (rewards - others).flatten()


def rloo_advantages(batch, config, kl_coef, k):
    mask = batch["mask"]
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
    rewards = batch["scores"] - kl_coef * kl  # (B,)
    advantages = leave_one_out(rewards, k)[:, None] * mask  # (B, T-1)
    returns = rewards[:, None] * mask
    # "whitened" is what the policy loss reads. Returns are for the log: no values learn from them.
    return {"advantages": advantages, "whitened": advantages, "returns": returns}


def rloo_loss(policy, batch, config):
    return ppo_loss(policy, batch, replace(config, vf_coef=0.0))  # no value function


@dataclass
class RLOOConfig:
    k: int = 4  # responses to each prompt, of which batch_size / k are drawn [2, inf]


def main():
    flags = take_flags(__doc__, RLOOConfig())  # train_ppo.py reads the others
    refuse_flags(*GROUPS)  # they would have no effect
    sys.argv += ["--group_size", str(flags.k)]
    train_ppo.main(partial(rloo_advantages, k=flags.k), rloo_loss, "RLOO")


if __name__ == "__main__":
    run_script(main)
