"""PPO's neighbours. Each file first shows, by itself, the function that differs, and says why and
where it comes from.

Another `credit` (what does each token deserve?), another `loss_of`, or both; all else is
train_ppo.py:

reinforce      every token's log pi times what came of it: no clip, no lambda
rloo           several responses to a prompt are each other's baseline
grpo           the same with mean and standard deviation, and the KL in the loss
sequence_ppo   the whole response is one action
ppo_penalty    a penalty on the KL to the old policy instead of the clip
best_of_n      imitate the best of n responses, again and again: another algorithm, same loop

With a loop of its own:

dpo            straight from the pairs: no reward model, no sampling

Around the algorithm:

ensemble       three reward models instead of one
iterate        the judge labels what PPO writes, and the reward model learns from that too
outgrow        the same models under TRL, in several processes

Each writes to out/NAME, where ppo.pt is the policy that it has trained.

Where a file speaks of its *expected step*, it means, on average over what is sampled, one plain
gradient step (no Adam, no value loss) on the loss summed, not averaged, over the tokens.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from plumbing.errors import UserError
from plumbing.settings import read_flags

ROOT = Path(__file__).parents[1]
# Flags of train_ppo.py that algorithms without a value function do not read
CRITIC = ("gamma", "lam", "vf_coef", "value_clip", "separate_critic", "critic_lr", "head_lr")
TERMS = ("entropy_coef", "kl_loss_coef")  # terms of minippo.ppo_loss that other losses do not have


def take_flags(doc, settings, unread=()):
    """The flags of a variation, taken out of the command line: train_ppo.py reads the others.
    unread: flags of train_ppo.py that would have no effect here, and so are refused."""
    for word in sys.argv[1:]:
        if word.startswith("--") and word[2:].partition("=")[0] in unread:
            raise UserError(f"{word} has no effect on this algorithm; leave it out")
    (settings,) = read_flags(doc, settings, partly=True)
    return settings


def run_python(*words):
    """Python with these words, for instance a script and its flags, in a process of its own."""
    status = subprocess.run([sys.executable, *map(str, words)]).returncode
    if status:
        raise UserError(f"{words[0]} ended with status {status}; it says why above")


def copy_files(folder, files, out):
    """Those that match: for instance sft.pt, which train_rm.py wants in its --out folder."""
    found = list(Path(folder).glob(files))
    if not found:
        raise UserError(f"{folder}/{files}: not found; train_sft.py makes it")
    out.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copy(path, out)
