"""PPO's neighbours: the first seven files replace one function of PPO, the other three what is
around it. Each says what differs, why, and where it comes from.

reinforce      every token's log pi times what came of it: no clip, no lambda
rloo           several responses to a prompt are each other's baseline
grpo           the same with mean and standard deviation, and the KL in the loss
sequence_ppo   the whole response is one action
ppo_penalty    a penalty on the KL to the old policy instead of the clip
best_of_n      imitate the best of n responses, again and again
dpo            straight from the pairs: no reward model, no sampling
ensemble       three reward models instead of one
iterate        the judge labels what PPO writes, and the reward model learns from that too
outgrow        the same models under TRL, in several processes

The first seven give train_ppo.main() another `iterate`. It is called as minippo.ppo_iteration is,
and then with its own flags (`own`, dataclasses) and with the rows of the files named in `also`;
`without` names the flags of PPO that it does not read. Data, log, --resume and report are those of
train_ppo.py. All is written to out/NAME, where ppo.pt and "PPO" in the report mean the variation.

Where a file speaks of its *expected step*, it means, on average over what is sampled, one plain
gradient step (no Adam, no value loss) on the loss summed, not averaged, over the tokens.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from minippo import describe, merge, ppo_loss, ppo_update
from plumbing.settings import UserError

ROOT = Path(__file__).parents[1]
# Flags that some variations do not read, for `without`
CRITIC = ("gamma", "lam", "vf_coef", "value_clip", "separate_critic", "critic_lr", "head_lr")
EXTRAS = ("entropy_coef", "kl_loss_coef")  # terms of minippo.ppo_loss that other losses do not have
HERE_ALONE = (
    *CRITIC, *EXTRAS, "kl_target", "kl_horizon", "ref_update_every", "policy", "reference",
    "reward", "length_penalty", "dtype", "micro_batch", "grad_checkpoint", "resume", "overwrite",
    "save_every", "tensorboard",
)  # fmt: skip


def update(policy, optimizer, batch, config, kl_coef, micro_batch, loss_of=ppo_loss):
    """How minippo.ppo_iteration ends -> the batch, and what to watch."""
    passes = ppo_update(policy, optimizer, batch, config, micro_batch, loss_of)
    return batch, {**describe(batch, kl_coef), **merge(passes), "passes": passes}


def groups(prompts, k):
    """B prompts (lists of ids) -> the first B / k of them, each k times in a row."""
    if len(prompts) % k:
        raise UserError(f"--batch_size {len(prompts)}: should be a multiple of {k}, the group size")
    return [prompt for prompt in prompts[: len(prompts) // k] for _ in range(k)]


def run_script_apart(*words):
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
