"""PPO's neighbours.

An algorithm is two functions. compute_advantages(batch, config): what does each token deserve?
loss(policy, batch, config): a mean over the tokens of the batch. A file has those that differ from
PPO's, `Settings` with flags of its own, and `UNREAD`, PPO's flags that have no effect. All else is
train_ppo.py, which runs it: python train_ppo.py --algorithm rloo --k 4. It writes to out/rloo.
Files with a main() are scripts, and with_transformers.py is to be copied beside minippo.py.

The *expected step* of a loss is one plain gradient step on it as a sum, not a mean, averaged over
all responses that could have been sampled: tests/test_variations.py computes it, to 1e-9.
"""

from dataclasses import dataclass
from pathlib import Path

from data.files import write_file
from minippo import PPOConfig, kl_per_response

# PPO's flags that have no effect where responses to a prompt are compared with each other
NO_CRITIC = ("gamma", "lam", "vf_coef", "value_clip", "separate_critic")
NO_CRITIC += ("head_lr_factor", "whiten", "entropy_coef", "kl_loss_coef")


@dataclass
class GroupConfig(PPOConfig):
    k: int = 4  # responses to each prompt, of which batch_size / k are drawn [2, inf]


def response_rewards(batch, config):
    """R = score - beta * KL of each response: (B,)."""
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    return batch["scores"] - config.kl_coef * kl


def copy_files(folder, pattern, out):
    """Copy the files that match: for instance sft.pt, which train_rm.py wants in its --out."""
    for path in Path(folder).glob(pattern):
        write_file(out / path.name, path.read_bytes())
