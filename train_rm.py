"""Stage 2, after train_sft.py: the reward model learns which of two answers people prefer.

It reads pref_train.jsonl and pref_val.jsonl, rows {"prompt": ..., "chosen": ..., "rejected": ...}.
The loss is -log sigmoid(score of the chosen answer - score of the rejected one). Writes out/rm.pt.
"""

import math
from dataclasses import dataclass

import torch

from minippo import RewardModel, generate, gradient_step, pad, reward_model_loss, row_lengths
from minippo import set_lr
from plumbing.batches import chunks, similar_batches, similar_chunks, take
from plumbing.files import Record
from plumbing.models import load_sft
from plumbing.settings import RunConfig, run_script
from plumbing.text import read_ids, read_prompts


@dataclass
class Config(RunConfig):
    models: str = ""  # folder of sft.pt; if empty, --out or the folder above it
    steps: int = 1950  # gradient steps; fewer if `epochs` allows fewer
    epochs: int = 2  # passes over the pairs, at most
    batch_size: int = 64  # pairs per step
    micro_batch: int = 16  # pairs in memory at once
    lr: float = 1e-3  # peak of the learning rate, which then falls linearly to 0
    warmup: int = 20  # steps in which it climbs to its peak; at most a tenth of all
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    answers: int = 2048  # of the SFT model, sampled to set the scale of the scores
    sample_batch: int = 256  # answers sampled at once, if memory is short
    max_new_tokens: int = 48  # longest of these answers, in tokens; as in train_ppo.py
    temperature: float = 1.0  # at which they are sampled; as in train_ppo.py

    def __post_init__(self):
        self.at_least(1, "steps", "epochs", "batch_size", "micro_batch", "sample_batch")
        self.at_least(1, "max_new_tokens")
        self.at_least(2, "answers")
        self.at_least(1e-3, "temperature")


def scores_of(model, pairs, device):
    """(prompt, chosen, rejected) as ids -> scores of chosen and rejected answers, (B, 2)."""
    rows = [prompt + answer for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
    return model(*pad(rows, device)).view(-1, 2)  # of tokens (2B, T) and lengths (2B,)


@torch.no_grad()
def validation(model, pairs, config, device):
    scores = [scores_of(model, rows, device) for rows in similar_chunks(pairs, config.micro_batch)]
    _, stats = reward_model_loss(*torch.cat(scores).unbind(1))
    return {f"val_{name}": mean for name, mean in stats.items()}


@torch.no_grad()
def set_score_scale(reward_model, sft, prompts, config):
    """Scores of the SFT model's own answers get mean 0, standard deviation 1 and a cap, which one
    in a hundred of them exceeds."""
    prompts = sorted(take(prompts, config.answers), key=len)
    scores = []
    for piece in chunks(prompts, config.sample_batch):
        tokens, mask = generate(sft, piece, config.max_new_tokens, config.temperature)
        scores.append(reward_model(tokens, row_lengths(mask)))
    scores = torch.cat(scores)
    reward_model.mean.copy_(scores.mean())
    reward_model.std.copy_(scores.std().clamp(min=1e-6))
    reward_model.cap.copy_((scores.quantile(0.99) - scores.mean()) / reward_model.std)


def train(config):
    device = config.prepare("rm")  # sets the seed
    sft, tokenizer = load_sft(config, device)
    pairs = read_ids(config.data, "pref", "train", tokenizer, sft.config.context)
    val_pairs = read_ids(config.data, "pref", "val", tokenizer, sft.config.context)
    prompts = read_prompts(config.data, "train", tokenizer, sft.config.context)
    steps = min(config.steps, math.ceil(config.epochs * len(pairs) / config.batch_size))
    batches = similar_batches(pairs, steps, config.batch_size, config.seed)
    model = RewardModel(sft).to(device)
    groups = [{"params": model.parameters(), "peak": config.lr}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    record = Record(config, "rm", steps, model, optimizer, ["sft"], pairs=len(pairs))
    first = record.begin(config.resume)

    for step in range(first, steps):
        set_lr(optimizer, step, steps, config.warmup)
        batch = batches[step]
        scores = []
        optimizer.zero_grad()
        for piece in chunks(batch, config.micro_batch):
            piece_scores = scores_of(model, piece, device)
            loss, _ = reward_model_loss(*piece_scores.unbind(1))
            (loss * len(piece) / len(batch)).backward()
            scores.append(piece_scores.detach())
        _, stats = reward_model_loss(*torch.cat(scores).unbind(1))  # of the whole batch
        stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        if (step + 1) % max(1, steps // 10) == 0:
            stats |= validation(model, val_pairs[:1000], config, device)
        record.log(step + 1, stats, show=["loss", "accuracy", "val_loss", "val_accuracy"])
        record.save_if_due(step + 1)

    stats = validation(model, val_pairs, config, device)
    torch.manual_seed(config.seed)
    set_score_scale(model, sft, prompts, config)
    record.save_model(model, tokenizer, **stats)
    print(f"{100 * stats['val_accuracy']:.1f}% of {len(val_pairs):,} validation pairs right")


if __name__ == "__main__":
    run_script(train, Config, __doc__)
