"""Stage 2, the reward model: it learns from pairs which answer people prefer.

    python train_rm.py                     after train_sft.py, on the same data
    python train_rm.py --data FOLDER       on pref_train.jsonl and pref_val.jsonl of your own

The files hold rows {"prompt": ..., "chosen": ..., "rejected": ...}. The model starts from the SFT
model, with a score head in place of the vocabulary head, and minimises the Bradley-Terry loss. Then
its scores are shifted and scaled to mean 0 and standard deviation 1 on the SFT model's own answers,
and capped where one in a hundred of these is higher. Writes out/rm.pt.
"""

from dataclasses import dataclass

import torch

from minippo import PPOConfig, RewardModel, gradient_step, reward_model_loss, row_lengths
from plumbing.checkpoints import load_checkpoint, load_weights, save_checkpoint
from plumbing.errors import run_script
from plumbing.fast import generate
from plumbing.rows import by_length, count_tokens, pad, progress, read_ids, read_prompts
from plumbing.settings import RunConfig, prepare, read_flags
from plumbing.state import Schedule, State, settings_of
from plumbing.training import (
    FitConfig,
    adamw,
    batch_of,
    loss_in_pieces,
    reward_model_warnings,
    set_lr,
    spread_over,
)


@dataclass
class AnswerConfig:
    answers: int = 2048  # answers of the SFT model that set scale and cap of the scores [2, inf]
    cap_quantile: float = 0.99  # scores above this quantile of theirs are cut off [0.5, 1]
    max_new_tokens: int = PPOConfig.max_new_tokens  # longest of these answers, in tokens [1, inf]


def pair_scores(model, pairs, device):
    """(prompt, chosen, rejected) as ids -> scores (B,) of the chosen and the rejected answers."""
    rows = [prompt + answer for prompt, *answers in pairs for answer in answers]
    tokens, lengths = pad(rows, device)  # (2B, T), (2B,)
    return model(tokens, lengths).view(-1, 2).unbind(1)


def rm_loss(model, pairs, device):
    """(prompt, chosen, rejected) as ids -> the Bradley-Terry loss, a mean over the pairs, stats."""
    loss, stats = reward_model_loss(*pair_scores(model, pairs, device))
    return loss, {"loss": loss.item(), "count": len(pairs), **stats}


def main():
    run, config, answer = read_flags(
        __doc__, RunConfig(), FitConfig(max_steps=1950), AnswerConfig()
    )
    prepare(run)

    # Data, models, optimizer, and how the learning rate climbs and falls
    sft, tokenizer, sft_facts = load_checkpoint(run.out / "sft.pt", ["sft"], run.device)
    pairs = read_ids(run.data, "pref", "train", tokenizer, sft.config.context)
    val_pairs = read_ids(run.data, "pref", "val", tokenizer, sft.config.context)
    prompts = read_prompts(run.data, "train", tokenizer, sft.config.context)
    model = RewardModel(sft).to(run.device).train()
    optimizer = adamw(model, config.lr, config.weight_decay)
    one_pass = len(pairs) / config.batch_size
    schedule = Schedule(
        config.steps(len(pairs)), config.warmup, automatic=not config.epochs, one_pass=one_pass
    )
    print(f"training a reward model on {run.device}: {len(pairs):,} pairs")

    # What a run that was stopped needs to go on
    data = pairs, val_pairs, tokenizer.tokens
    settings = settings_of(run, config, model.config, data=data)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state = State("rm", run, settings, made_from={"sft": sft_facts}, **parts)
    loss_of = loss_in_pieces(rm_loss, config.micro_batch)
    best = run.out / "rm_best.pt"

    # The loop
    for step in state.steps_left(schedule):
        lr = set_lr(optimizer, schedule.share(step))
        batch = batch_of(pairs, step, config.batch_size, run.seed)
        optimizer.zero_grad()
        loss, metrics = loss_of(model, batch, run.device)
        loss.backward()
        grad_norm = gradient_step(optimizer, config.max_grad_norm)
        metrics |= {"grad_norm": grad_norm, "lr": lr}
        if schedule.check_due(step):
            metrics |= validate(model, spread_over(val_pairs, 1000), run.device, config.micro_batch)
            if schedule.is_best(step, metrics["val_loss"]):
                save_checkpoint(best, "rm", model, tokenizer)
        show = ["loss", "accuracy", "val_loss", "val_accuracy"]
        state.end_step(metrics, count_tokens(batch), show)

    # The best weights, measured on all validation pairs; the scale and the cap of the scores
    load_weights(best, "rm", model)
    facts = validate(model, val_pairs, run.device, config.micro_batch)
    normalise(model.eval(), sft, prompts, answer, config.micro_batch)
    facts |= {"max_new_tokens": answer.max_new_tokens, "sft": sft_facts}
    save_checkpoint(run.out / "rm.pt", "rm", model, tokenizer, **facts)
    state.finish()
    best.unlink()
    print(schedule.ending())
    accuracy, error = facts["val_accuracy"], facts["val_accuracy_se"]
    error = "" if error is None else f" ± {100 * error:.1f}"
    right = f"{100 * accuracy:.1f} %{error} of the validation pairs right"
    print(f"saved {run.out / 'rm.pt'}: it gets {right}", *reward_model_warnings(facts), sep="\n")


@torch.no_grad()
def validate(model, pairs, device, micro_batch):
    """Mean loss and accuracy over the pairs, and the standard error of the latter."""
    model.eval()
    parts = by_length(pairs, micro_batch or 64)
    scores = [torch.stack(pair_scores(model, part, device)) for part in parts]
    model.train()
    loss, stats = reward_model_loss(*torch.cat(scores, 1))
    accuracy, n = stats["accuracy"], len(pairs)
    error = (accuracy * (1 - accuracy) / n) ** 0.5 if n > 1 else None
    facts = {"val_loss": loss.item(), "val_accuracy": accuracy, "val_accuracy_se": error}
    return facts | {"val_pairs": n}


@torch.no_grad()
def normalise(model, sft, prompts, answer, micro_batch):
    """Shift and scale the scores, so that those of the SFT model's own answers, to prompts spread
    over the list, have mean 0 and standard deviation 1; and cap them."""
    prompts, scores = spread_over(prompts, answer.answers), []
    questions = [prompts[i % len(prompts)] for i in range(answer.answers)]
    for part in progress("answers of the SFT model", questions, (4 * micro_batch) or 256):
        tokens, mask, *_ = generate(sft, part, answer.max_new_tokens)
        scores.append(model(tokens, row_lengths(mask)))
    scores = torch.cat(scores)
    model.mean.copy_(scores.mean())
    model.std.copy_(scores.std().clamp(min=1e-6))
    model.cap.copy_((scores.quantile(answer.cap_quantile) - model.mean) / model.std)


if __name__ == "__main__":
    run_script(main)
