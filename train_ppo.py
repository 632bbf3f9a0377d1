"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on your own prompts_train.jsonl, rows {"prompt": ...}
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model:
                                           score(prompts, completions, **columns) -> numbers

Writes out/ppo.pt at the end; then `python evaluate.py out` measures it. Every half minute the state
of the run is saved: networks, optimizer, iteration, beta, random numbers. So a kill costs half a
minute at most. --resume continues from there, unless a setting (other than a path or a limit of
memory), the number of prompts, sft.pt or rm.pt is another.
"""

from dataclasses import dataclass, replace

import torch

from data.zoo import judge_of
from minippo import PPOConfig, batch_metrics, center_values, compute_advantages, explained_variance
from minippo import frozen_copy, ppo_loss, ppo_update, rollout_in_pieces, set_lr
from plumbing.files import Record
from plumbing.models import load_descendant, load_score, load_sft, save_checkpoint
from plumbing.settings import RunConfig, run_script
from plumbing.text import prompt_batch, read_prompts
from plumbing.watch import check_start, watch


@dataclass
class Config(PPOConfig, RunConfig):
    models: str = ""  # folder of sft.pt and rm.pt; if empty, --out or the folder above it
    policy: str = ""  # for a second round: start from this checkpoint; sft.pt stays the reference
    reward: str = ""  # module:function that scores responses instead of rm.pt; see docs/manual.md
    steps: int = 450  # iterations: each samples a batch and trains on it
    batch_size: int = 128  # responses per iteration
    group_size: int = 1  # responses to each prompt
    lr: float = 8e-4  # peak of the learning rate, which then falls linearly to 0
    value_lr: float = 2.4e-2  # the same for the value head, which has further to go
    warmup: int = 5  # iterations in which the rates climb to their peaks; at most a tenth of all

    def __post_init__(self):
        super().__post_init__()
        self.at_least_1("steps", "batch_size", "group_size")
        if self.batch_size % self.group_size or self.batch_size < self.minibatches:
            wanted = f"a multiple of group_size {self.group_size}, and at least {self.minibatches}"
            raise ValueError(f"batch_size ({self.batch_size}): should be {wanted} (minibatches)")


def train(
    config, compute_advantages=compute_advantages, loss=ppo_loss, add_critic=None, next_kl_coef=None
):
    """PPO. Files of variations/ pass functions of their own."""
    device = config.prepare("ppo")  # refuses to replace a run unasked; sets the seed
    policy, tokenizer, sft_fingerprint = load_sft(config, device)
    ref = frozen_copy(policy)
    if config.policy:  # must stem from the same SFT model
        policy = load_descendant(config.policy, ["ppo", "sft"], sft_fingerprint, device)
    actor_critic = add_critic(policy, config) if add_critic else policy  # a GPT is both
    score, score_name = load_score(config, sft_fingerprint, tokenizer, device)
    context = policy.config.context
    prompts = read_prompts(config.data, "train", tokenizer, context, config.max_new_tokens)
    judge = judge_of(config.data)  # None for other data than the default; nothing trains on it

    names = dict(actor_critic.named_parameters())
    value_head = [names[name] for name in names if name.startswith("value_head")]
    others = [names[name] for name in names if not name.startswith("value_head")]
    groups = [
        {"params": others, "peak": config.lr},
        {"params": value_head, "peak": config.value_lr},
    ]
    # With 0.99, Adam forgets a gradient after some hundred steps: runs are short.
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    parts = {"policy": actor_critic, "optimizer": optimizer}
    facts = {"prompts": len(prompts), "sft": sft_fingerprint, "score": score_name}
    record = Record(
        config, "ppo", config.steps, parts, **facts
    )  # log and state; restores the parts
    kl_coef = record.numbers.get("kl_coef", config.kl_coef)
    if record.step == 0:
        batch_prompts = prompt_batch(prompts, 0, config)
        check_start(actor_critic, ref, score, batch_prompts, config)  # ratio 1, KL 0
        batch = rollout_in_pieces(actor_critic, ref, score, batch_prompts, config)
        center_values(actor_critic, batch)

    for step in range(record.step, config.steps):
        set_lr(optimizer, step, config.steps, config.warmup)
        now = replace(config, kl_coef=kl_coef)
        batch_prompts = prompt_batch(prompts, step, config)  # group_size copies of each
        batch = rollout_in_pieces(actor_critic, ref, score, batch_prompts, now)  # phases 1 and 2
        stats = batch_metrics(batch, now)
        batch |= compute_advantages(batch, now)  # phase 3
        if "returns" in batch:
            values, returns = batch["old_values"], batch["returns"]
            stats["explained_variance"] = explained_variance(values, returns, batch["mask"])
        stats |= ppo_update(actor_critic, optimizer, batch, now, loss)  # phase 4
        stats["lr"] = optimizer.param_groups[0]["lr"]
        if next_kl_coef:  # variations/adaptive_kl.py; PPO's beta stays as it is
            kl_coef = next_kl_coef(kl_coef, stats["kl"], config)

        stats |= watch(step + 1, stats, batch, batch_prompts, tokenizer, judge)  # warns, grades
        tokens = batch["mask"].sum().item()
        record.log(step + 1, stats, tokens, ["score", "judge", "kl", "entropy", "eos_rate"])
        record.save_if_due(step + 1, kl_coef=kl_coef)

    settings = record.settings | {"data": str(config.data)}
    save_checkpoint(config.out / "ppo.pt", "ppo", policy, tokenizer, settings=settings, **facts)


if __name__ == "__main__":
    run_script(train, Config, __doc__)
