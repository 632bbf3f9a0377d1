"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on your own prompts_train.jsonl, rows {"prompt": ...}
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model:
                                           score(prompts, completions, **columns) -> numbers

Writes out/ppo.pt at the end; then `python evaluate.py out` measures it. Every half minute (large
models: more rarely) out/ppo_state.pt is written: policy, optimizer, iteration, random numbers. A
kill loses what came after. --resume continues from there. It refuses to if something has changed: a
setting (other than data, models, policy, out, device, micro_batch, sample_batch), sft.pt, rm.pt or
the number of prompts. A second round, with a new optimizer: --policy out/ppo.pt --out out/2.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from data.zoo import judge_of
from minippo import PPOConfig, batch_metrics, center_values, compute_advantages
from minippo import frozen_copy, ppo_loss, ppo_update, set_lr
from plumbing import watch
from plumbing.batches import prompt_batch, rollout_in_pieces
from plumbing.files import Record
from plumbing.models import load_from_same_sft, load_score, load_sft
from plumbing.settings import RunConfig, run_script
from plumbing.text import read_prompts


@dataclass
class Config(PPOConfig, RunConfig):
    models: str = ""  # folder of sft.pt and rm.pt; if empty, --out or the folder above it
    policy: str = ""  # for a second round: start from this checkpoint; sft.pt stays the reference
    reward: str = ""  # module:function that scores responses instead of rm.pt; see docs/manual.md
    steps: int = 450  # iterations: each samples a batch and trains on it
    batch_size: int = 128  # responses per iteration
    group_size: int = 1  # responses to each prompt
    sample_batch: int = 512  # responses sampled at once, if memory is short
    lr: float = 8e-4  # peak of the learning rate, which then falls linearly to 0
    value_lr: float = 2.4e-2  # the same for the value head, which has further to go
    warmup: int = 5  # iterations in which the rates climb to their peaks; at most a tenth of all

    def __post_init__(self):
        self.at_least(1, "steps", "batch_size", "group_size", "sample_batch", "max_new_tokens")
        self.at_least(1, "epochs", "minibatches")
        self.at_least(0, "micro_batch")
        self.at_least(1e-3, "temperature")
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size ({self.batch_size}) should be a multiple of group_size")
        if self.policy and Path(self.policy).resolve() == (self.out / "ppo.pt").resolve():
            raise ValueError("policy: a second round needs another --out")
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError("gamma and lam should be from 0 to 1")


def train(config, compute_advantages=compute_advantages, loss=ppo_loss):
    """PPO. The files of variations/ pass functions of their own."""
    device = config.prepare("ppo")  # refuses to replace a run unasked; sets the seed
    policy, tokenizer = load_sft(config, device)
    ref = frozen_copy(policy)
    if config.policy:  # must stem from the same SFT model
        policy = load_from_same_sft(config.policy, ["ppo", "sft"], config, device)
    score = load_score(config, tokenizer, device)
    prompts = read_prompts(config.data, "train", tokenizer, policy.config.context)
    judge = judge_of(config.data)  # None for other data than the default; nothing trains on it

    groups = [
        {"params": policy.trunk.parameters(), "peak": config.lr},  # lm_head shares its weights
        {"params": policy.value_head.parameters(), "peak": config.value_lr},
    ]
    # Adam's usual 0.999 averages over a thousand steps: too slow for a short run.
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    models = ["sft"] if config.reward else ["sft", "rm"]
    record = Record(config, "ppo", config.steps, policy, optimizer, models, prompts=len(prompts))
    first_prompts = prompt_batch(prompts, 0, config)
    # The ratio must be 1 and, unless --policy is given, the KL 0; else the run ends here.
    watch.check_start(policy, ref, score, first_prompts[: config.sample_batch], config)
    first = record.begin(config.resume)  # with --overwrite, the old run is replaced only now
    if first == 0:
        center_values(policy, rollout_in_pieces(policy, ref, score, first_prompts, config))

    for step in range(first, config.steps):
        set_lr(optimizer, step, config.steps, config.warmup)
        batch_prompts = prompt_batch(prompts, step, config)  # group_size copies of each
        # Phases 1 and 2
        batch = rollout_in_pieces(policy, ref, score, batch_prompts, config)
        batch |= compute_advantages(batch, config)  # phase 3
        stats = batch_metrics(batch, config)
        stats |= watch.metrics(batch, batch_prompts, judge, tokenizer)
        stats |= ppo_update(policy, optimizer, batch, config, loss)  # phase 4
        watch.show(step + 1, batch, stats, batch_prompts, tokenizer)
        record.log(step + 1, stats, show=["score", "judge", "kl", "entropy", "eos_rate"])
        record.save_if_due(step + 1)

    record.save_model(policy, tokenizer)


if __name__ == "__main__":
    run_script(train, Config, __doc__)
