"""Stage 2, the reward model: from pairs of answers it learns which one people prefer.

    python train_rm.py                     after train_sft.py, on the same data
    python train_rm.py --data FOLDER       on pref_train.jsonl and pref_val.jsonl of your own

The files hold rows {"prompt": ..., "chosen": ..., "rejected": ...}. The model starts from the SFT
model, with a score head in place of the vocabulary head, and minimises the Bradley-Terry loss. Then
its scores are shifted and scaled to mean 0 and standard deviation 1 on the SFT model's own answers.
Writes out/rm.pt.
"""

import math

import torch

from minippo import PPOConfig, RewardModel, frozen_copy, gradient_step, reward_model_loss
from minippo import row_lengths
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.fast import generate
from plumbing.settings import RunConfig, prepare, read_flags, run_script
from plumbing.text import pieces, read_ids
from plumbing.training import FitConfig, Progress, adamw, batches, pair_scores, set_lr

ANSWERS = 2048  # so many answers of the SFT model set the scale of the scores


def main():
    run, config = read_flags(__doc__, RunConfig(), FitConfig(epochs=2))
    prepare(run)
    model, tokenizer, rows, val_rows, answers, sft_facts = load(run)
    steps = config.epochs * math.ceil(len(rows) / config.batch_size)
    optimizer = adamw(model, config.lr, config.weight_decay)
    parts = {"model": model, "optimizer": optimizer}
    progress = Progress("rm", run, (config, model.config), steps, {"sft": sft_facts}, **parts)
    for step, numbers in progress.remaining(batches(len(rows), config.batch_size, run.seed)):
        lr = set_lr(optimizer, config.lr, step, steps, config.warmup)
        batch = [rows[i] for i in numbers]
        optimizer.zero_grad()
        metrics = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0, "lr": lr}
        for piece in pieces(batch, config.micro_batch):  # all of the batch, unless memory is short
            chosen, rejected = pair_scores(model, piece, run.device)
            loss, stats = reward_model_loss(chosen, rejected)
            share = len(piece) / len(batch)  # means over pieces, so weighted, add up to the batch's
            (share * loss).backward()
            for name, x in {"loss": loss.item(), **stats}.items():
                metrics[name] += share * x
        metrics["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        if progress.due(config.evals):
            facts = validate(model, val_rows, run.device)
            if progress.is_best(facts):
                scorer = normalised(model, answers)
                save_checkpoint(run.out / "rm.pt", "rm", scorer, tokenizer, **facts)
            metrics |= facts
        tokens = sum(2 * len(prompt) + len(c) + len(r) for prompt, c, r in batch)
        progress.end_step(tokens, ["loss", "accuracy", "val_loss", "val_accuracy"], **metrics)
    best = progress.values["best"]
    accuracy = f"{100 * best['val_accuracy']:.1f} % ± {100 * best['val_accuracy_se']:.1f}"
    print(f"saved {run.out / 'rm.pt'}: it gets {accuracy} of the validation pairs right")


def load(run):
    """-> model, tokenizer, rows for training and for validation, (prompt, chosen, rejected) as ids;
    the SFT model's own answers, as in answers_of(); and the figures that were saved with it."""
    sft, tokenizer, sft_facts = load_checkpoint(run.out / "sft.pt", ["sft"], run.device)
    rows, val_rows, prompts = (
        read_ids(run.data, task, split, tokenizer, sft.config.context)
        for task, split in (("pref", "train"), ("pref", "val"), ("prompts", "train"))
    )
    answers = answers_of(sft, [prompt for (prompt,) in prompts])
    print(f"training a reward model on {run.device}: {len(rows):,} pairs")
    model = RewardModel(sft).to(run.device).train()
    return model, tokenizer, rows, val_rows, answers, sft_facts


@torch.no_grad()
def validate(model, rows, device):
    """Mean loss and accuracy over the rows, and the standard error of the latter."""
    model.eval()
    scores = [torch.stack(pair_scores(model, piece, device)) for piece in pieces(rows, 64)]
    model.train()
    loss, stats = reward_model_loss(*torch.cat(scores, 1))
    error = (stats["accuracy"] * (1 - stats["accuracy"]) / len(rows)) ** 0.5
    return {"val_loss": loss.item(), "val_accuracy": stats["accuracy"], "val_accuracy_se": error}


def answers_of(sft, prompts):
    """The SFT model's own answers, to prompts spread over all: a list of (tokens, lengths)."""
    stride, answers = max(1, len(prompts) // ANSWERS), []
    for i in range(0, ANSWERS, 256):
        rows = [prompts[j * stride % len(prompts)] for j in range(i, i + 256)]
        tokens, mask, *_ = generate(sft, rows, PPOConfig.max_new_tokens)
        answers.append((tokens, row_lengths(mask)))
    return answers


@torch.no_grad()
def normalised(model, answers):
    """A copy of the reward model; on the answers its scores have mean 0, standard deviation 1."""
    copy = frozen_copy(model)
    scores = torch.cat([copy(tokens, lengths) for tokens, lengths in answers])
    copy.mean.copy_(scores.mean())
    copy.std.copy_(scores.std().clamp(min=1e-6))
    return copy


if __name__ == "__main__":
    run_script(main)
