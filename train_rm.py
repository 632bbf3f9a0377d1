"""Stage 2, the reward model: from pairs of answers it learns which one people prefer.

    python train_rm.py                     after train_sft.py, on the same data
    python train_rm.py --data FOLDER       on pref_train.jsonl and pref_val.jsonl of your own

The files hold rows {"prompt": ..., "chosen": ..., "rejected": ...}. The model starts from the SFT
model, with a score head in place of the vocabulary head, and minimises the Bradley-Terry loss. Then
its scores are shifted and scaled to mean 0 and standard deviation 1 on the SFT model's own answers.
Writes out/rm.pt.
"""

from dataclasses import dataclass

import torch

from minippo import PPOConfig, RewardModel, gradient_step, reward_model_loss, row_lengths
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.fast import generate
from plumbing.progress import Progress
from plumbing.settings import RunConfig, prepare, read_flags, run_script
from plumbing.text import each, pieces, read_ids, waiting
from plumbing.training import FitConfig, adamw, batches, length, pair_scores, set_lr, some


@dataclass
class AnswerConfig:
    answers: int = 2048  # answers of the SFT model that set the scale of the scores
    max_new_tokens: int = PPOConfig.max_new_tokens  # longest of the answers that set the scale


def main():
    run, config, answer = read_flags(__doc__, RunConfig(), FitConfig(), AnswerConfig())
    prepare(run)
    sft, model, tokenizer, rows, val_rows, prompts, sft_facts = load(run)
    optimizer = adamw(model, config.lr, config.weight_decay)
    progress = Progress(
        "rm", run, (config, model.config), *length(config, len(rows)),
        data=(rows, val_rows, tokenizer.tokens), made_from={"sft": sft_facts},
        model=model, optimizer=optimizer,
    )  # fmt: skip
    for numbers in progress.remaining(batches(len(rows), config.batch_size, run.seed)):
        batch = [rows[i] for i in numbers]
        lr = set_lr(optimizer, progress.rate())
        metrics = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0, "lr": lr}
        optimizer.zero_grad()
        for piece in pieces(batch, config.micro_batch):  # all of the batch, unless memory is short
            chosen, rejected = pair_scores(model, piece, run.device)
            loss, stats = reward_model_loss(chosen, rejected)
            share = len(piece) / len(batch)  # means over pieces, so weighted, add up to the batch's
            (share * loss).backward()
            for name, x in {"loss": loss.item(), **stats}.items():
                metrics[name] += share * x
        metrics["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        if progress.due():
            metrics |= validate(model, some(val_rows), run.device, config.micro_batch)
            if progress.is_best(metrics):
                save_checkpoint(progress.best, "rm", model, tokenizer)
        tokens = sum(2 * len(prompt) + len(c) + len(r) for prompt, c, r in batch)
        progress.end_step(tokens, ["loss", "accuracy", "val_loss", "val_accuracy"], **metrics)
    finish(run, progress, model, tokenizer, sft, prompts, val_rows, config, answer)


def load(run):
    """-> SFT model, reward model, tokenizer; rows for training and for validation, (prompt, chosen,
    rejected) as ids; prompts; and the figures that were saved with the SFT model."""
    sft, tokenizer, sft_facts = load_checkpoint(run.out / "sft.pt", ["sft"], run.device)
    rows, val_rows, prompts = (
        read_ids(run.data, task, split, tokenizer, sft.config.context)
        for task, split in (("pref", "train"), ("pref", "val"), ("prompts", "train"))
    )
    print(f"training a reward model on {run.device}: {len(rows):,} pairs")
    model = RewardModel(sft).to(run.device).train()
    return sft, model, tokenizer, rows, val_rows, [ids for (ids,) in prompts], sft_facts


@torch.no_grad()
def validate(model, rows, device, size):
    """Mean loss and accuracy over the rows, and the standard error of the latter."""
    model.eval()
    parts = each("pieces of the validation pairs", pieces(rows, size or 64), 1)
    scores = [torch.stack(pair_scores(model, part, device)) for part in parts]
    model.train()
    loss, stats = reward_model_loss(*torch.cat(scores, 1))
    error = (stats["accuracy"] * (1 - stats["accuracy"]) / len(rows)) ** 0.5
    return {"val_loss": loss.item(), "val_accuracy": stats["accuracy"], "val_accuracy_se": error}


def finish(run, progress, model, tokenizer, sft, prompts, val_rows, config, answer):
    """The best model of the run becomes rm.pt, with its accuracy on all validation rows."""
    progress.load_best(model)
    facts = validate(model, val_rows, run.device, config.micro_batch)
    normalise(model.eval(), sft, prompts, answer, config.micro_batch)
    facts["max_new_tokens"] = answer.max_new_tokens
    save_checkpoint(run.out / "rm.pt", "rm", model, tokenizer, **facts)
    progress.done()
    progress.best.unlink()
    print(progress.ending())
    accuracy, error = facts["val_accuracy"], facts["val_accuracy_se"]
    right = f"{100 * accuracy:.1f} % ± {100 * error:.1f} of the validation pairs right"
    print(f"saved {run.out / 'rm.pt'}: it gets {right}")
    if accuracy < 0.5 + 2 * error:
        print("warning: that is no better than chance. PPO with this reward model follows noise")


@torch.no_grad()
def normalise(model, sft, prompts, answer, size):
    """Shift and scale the scores, so that those of the SFT model's own answers, to prompts spread
    over all, have mean 0 and standard deviation 1."""
    stride = max(1, len(prompts) // answer.answers)
    rows, scores = [prompts[i * stride % len(prompts)] for i in range(answer.answers)], []
    for part in waiting("answers of the SFT model", rows, 4 * size or 256):  # no gradient: 4 x
        tokens, mask, *_ = generate(sft, part, answer.max_new_tokens)
        scores.append(model(tokens, row_lengths(mask)))
    scores = torch.cat(scores)
    model.mean.copy_(scores.mean())
    model.std.copy_(scores.std().clamp(min=1e-6))


if __name__ == "__main__":
    run_script(main)
