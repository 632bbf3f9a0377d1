"""DPO, direct preference optimisation: from the pairs to the policy, without a reward model.

    python -m variations.dpo           after train_sft.py, on pref_train.jsonl
    python -m variations.dpo --ipo     with the loss of IPO

Writes out/dpo/ppo.pt, for sample.py, and for `evaluate.py out/dpo --kl_coef 0.1` (with rm.pt).

The policy with the largest J for a reward r is proportional to ref * exp(r / beta). Solved for r:

    r(x, y) = beta * log(pi(y | x) / ref(y | x)) + something that depends only on x

The Bradley-Terry loss (section 4 of minippo.py) needs only differences of r between answers to the
same x. So put this r into it, and train pi on the pairs. The loss of a pair is

    h   = log(pi / ref) of the chosen answer - log(pi / ref) of the rejected one
    DPO = -log sigmoid(beta * h)          Rafailov et al., arXiv:2305.18290, eq. 7
    IPO = (h - 1 / (2 beta))^2            Azar et al., arXiv:2310.12036, eq. 17: h has a target

Scores of a reward model have standard deviation 1, but r does not: the same --kl_coef is not the
same penalty as in PPO.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from minippo import evaluate_actions, frozen_copy, gradient_step, pad_completions
from minippo import reward_model_loss, set_lr
from plumbing.batches import batch_of, similar_chunks
from plumbing.files import Record
from plumbing.models import load_sft
from plumbing.settings import RunConfig, run_script
from plumbing.text import read_ids


@dataclass
class Config(RunConfig):
    out: Path = Path("out/dpo")  # folder for checkpoints and logs
    models: str = ""  # folder of sft.pt; if empty, --out or the folder above it
    steps: int = 1800  # gradient steps
    batch_size: int = 32  # pairs per step
    micro_batch: int = 32  # pairs in memory at once
    lr: float = 4e-4  # peak of the learning rate, which then falls linearly to 0
    warmup: int = 20  # steps in which it climbs to its peak; at most a tenth of all
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    kl_coef: float = 0.5  # beta
    ipo: bool = False  # the loss of IPO instead; try --kl_coef 0.06

    def __post_init__(self):
        self.at_least(1, "steps", "batch_size", "micro_batch")
        if not self.kl_coef > 0:
            raise ValueError(f"kl_coef ({self.kl_coef}): should be above 0")


def dpo_loss(policy, ref, pairs, config, device):
    """(prompt, chosen, rejected) as ids -> the mean loss of the pairs, stats."""
    rows = []
    for prompt, *answers in pairs:
        rows += [(prompt, answer) for answer in answers]
    tokens, mask = pad_completions(rows, device)  # (2B, T), (2B, T-1)
    logprobs, _ = evaluate_actions(policy, tokens, mask)
    with torch.no_grad():
        ref_logprobs, _ = evaluate_actions(ref, tokens, mask)
    log_ratios = (logprobs - ref_logprobs).sum(1).view(-1, 2)  # (B, 2): log(pi / ref)
    chosen, rejected = log_ratios.unbind(1)
    loss, stats = reward_model_loss(config.kl_coef * chosen, config.kl_coef * rejected)
    if config.ipo:
        loss = ((chosen - rejected - 1 / (2 * config.kl_coef)) ** 2).mean()
    return loss, stats | {"loss": loss.item()}


def train(config):
    device = config.prepare("ppo")  # sets the seed
    policy, tokenizer = load_sft(config, device)
    ref = frozen_copy(policy)
    pairs = read_ids(config.data, "pref", "train", tokenizer, policy.config.context)
    groups = [{"params": policy.parameters(), "peak": config.lr}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    record = Record(config, "ppo", config.steps, policy, optimizer, ["sft"], pairs=len(pairs))
    first = record.begin(config.resume)

    for step in range(first, config.steps):
        set_lr(optimizer, step, config.steps, config.warmup)
        batch = batch_of(pairs, step, config.batch_size, config.seed)
        stats = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0}
        optimizer.zero_grad()
        for piece in similar_chunks(batch, config.micro_batch):
            loss, piece_stats = dpo_loss(policy, ref, piece, config, device)
            share = len(piece) / len(batch)
            (share * loss).backward()
            for name, mean in piece_stats.items():
                stats[name] += share * mean
        stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        record.log(step + 1, stats, show=["loss", "accuracy", "margin"])
        record.save_if_due(step + 1)

    record.save_model(policy, tokenizer)


if __name__ == "__main__":
    run_script(train, Config, __doc__)
