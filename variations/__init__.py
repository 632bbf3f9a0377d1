"""PPO's neighbours. Each file shows first the function that differs from PPO, then how to run it.

Another `compute_advantages` (what does each token deserve?), another `loss_of`, or both. All else is
train_ppo.py, with its flags:

reinforce      log pi of each token times its return: no clip, no lambda
rloo           several responses to a prompt are each other's baseline
grpo           the same with mean and standard deviation, and the KL in the loss
sequence_ppo   the whole response is one action
ppo_penalty    a penalty on the KL to the old policy instead of the clip
ppo_ptx        a little of the SFT loss in every gradient step
best_of_n      imitate the best of n responses: another algorithm in the same loop

With a loop of its own:

dpo            straight from the pairs: no reward model, no advantages

Around the algorithm:

ensemble       three reward models instead of one
iterate        the judge labels what PPO writes, and the reward model learns from that too
outgrow        the same models under TRL, in several processes

Each writes to out/NAME; the trained policy is ppo.pt there.

To take away:

with_transformers   PPO on a GPT-2 of transformers, in one file to copy beside minippo.py

These files speak of the *expected step*: one plain gradient step (no Adam, no value loss) on the
loss as a sum, not a mean, averaged over all responses that could have been sampled.
"""

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

from plumbing.errors import UserError
from plumbing.settings import read_flags

ROOT = Path(__file__).parents[1]
# Flags of train_ppo.py that have no effect
CRITIC = ("gamma", "lam", "vf_coef", "value_clip", "separate_critic", "critic_lr", "head_lr")
GROUPS = (*CRITIC, "no_whiten", "group_size")  # where k responses to a prompt replace the critic
TERMS = ("entropy_coef", "kl_loss_coef")  # where the loss is not built on minippo.ppo_loss


def take_flags(doc, settings):
    """A variation's flags, taken out of the command line; train_ppo.py reads the others."""
    (settings,) = read_flags(doc, settings, partly=True)
    return settings


def refuse_flags(*names):
    """UserError if one of these flags of train_ppo.py is given: it would have no effect."""
    for word in sys.argv[1:]:
        if word.startswith("--") and word[2:].partition("=")[0] in names:
            raise UserError(f"{word} has no effect on this algorithm; leave it out")


def run_python(*words):
    """python script flags ..., in a process of its own."""
    status = subprocess.run([sys.executable, *map(str, words)]).returncode
    if status:
        raise UserError(f"{words[0]} ended with status {status}; it says why above")


def copy_files(folder, pattern, out):
    """Copy the files that match: for instance sft.pt, which train_rm.py wants in its --out."""
    found = list(Path(folder).glob(pattern))
    if not found:
        raise UserError(f"{folder}/{pattern}: not found; train_sft.py or data/convert.py makes it")
    out.mkdir(parents=True, exist_ok=True)
    for path in found:
        copy = out / path.name
        if copy.exists() and not filecmp.cmp(path, copy, shallow=False):
            raise UserError(f"{copy}: {path} has been made again since; remove {out}")
        shutil.copy(path, copy)
