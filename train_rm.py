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

from minippo import PPOConfig, RewardModel, generate, gradient_step, reward_model_loss, row_lengths
from plumbing.checkpoints import fingerprint, load_checkpoint, save_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, prepare, read_flags
from plumbing.packing import packed
from plumbing.rows import batch_of, in_parts, pad, read_ids, read_prompts, spread_over
from plumbing.state import State
from plumbing.training import Fit, FitConfig, adamw, backward, set_lr
from plumbing.watch import doubts_about


@dataclass
class AnswerConfig:
    answers: int = 2048  # answers of the SFT model that set scale and cap of the scores [2, inf]
    cap_quantile: float = 0.99  # the cap: no score exceeds this quantile of theirs [0.5, 1]
    max_new_tokens: int = PPOConfig.max_new_tokens  # longest of these answers, in tokens [1, inf]


def pair_scores(model, pairs):
    """(prompt, chosen, rejected) as ids -> scores (B,) of the chosen and the rejected answers."""
    rows = [prompt + answer for prompt, *answers in pairs for answer in answers]
    tokens, lengths = pad(rows, model.mean.device)  # (2B, T), (2B,)
    return model(tokens, lengths).view(-1, 2).unbind(1)


def rm_loss(model, pairs):
    """(prompt, chosen, rejected) as ids -> the Bradley-Terry loss, a mean over the pairs, stats."""
    loss, stats = reward_model_loss(*pair_scores(model, pairs))
    return loss, {"loss": loss.item(), **stats}


def main():
    run, config, answers = read_flags(
        __doc__, RunConfig(), FitConfig(steps=1950, epochs=2), AnswerConfig()
    )
    prepare(run)

    # Data, models, optimizer. for_rows(): --steps, or --epochs if that is sooner
    sft, tokenizer, _ = load_checkpoint(run.out / "sft.pt", ["sft"], run.device)
    pairs = read_ids(run.data, "pref", "train", tokenizer, sft.config.context)
    val_pairs = read_ids(run.data, "pref", "val", tokenizer, sft.config.context)
    prompts = read_prompts(run.data, "train", tokenizer, sft.config.context)
    model = packed(RewardModel(sft).to(run.device), run.dtype, run.grad_checkpoint).train()
    optimizer = adamw(model, config.lr, config.weight_decay)
    config = config.for_rows(len(pairs))
    print(f"training a reward model on {run.device}: {len(pairs):,} pairs")

    # State: the log, and how far the run has come. Fit: validation, and the best weights
    parts, made_from = {"model": model, "optimizer": optimizer}, {"sft.pt": fingerprint(sft)}
    data = pairs, val_pairs, prompts, tokenizer.tokens
    state = State("rm", run, parts, data, config, answers, model.config, made_from)
    fit = Fit(state, model, tokenizer, validate, val_pairs, config.micro_batch)

    # The loop
    for step in state.steps(config.steps):
        lr = set_lr(optimizer, step, config)
        batch = batch_of(pairs, step, config.batch_size, run.seed)
        optimizer.zero_grad()
        stats = backward(rm_loss, model, batch, config.micro_batch, len)
        grad_norm = gradient_step(optimizer, config.max_grad_norm)
        fit.end_step(stats | {"grad_norm": grad_norm, "lr": lr}, batch)

    # The best weights, measured on all validation pairs; the scale and the cap of the scores
    figures = fit.load_best()
    normalise(model, sft, prompts, answers, config.micro_batch)
    figures |= {"max_new_tokens": answers.max_new_tokens, "sft": made_from["sft.pt"]}
    save_checkpoint(run.out / "rm.pt", "rm", model, tokenizer, **figures)
    fit.finish()
    right, error = 100 * figures["val_accuracy"], 100 * figures["val_accuracy_se"]
    print(f"saved {run.out / 'rm.pt'}: {right:.1f} % ± {error:.1f} of the validation pairs right")
    for doubt in doubts_about(figures):
        print(doubt)


@torch.no_grad()
def validate(model, pairs, size):
    """Mean loss and accuracy over the pairs, and the standard error of the latter."""
    model.eval()
    scores = [torch.stack(pair_scores(model, part)) for part in in_parts(pairs, size)]
    model.train()
    loss, stats = reward_model_loss(*torch.cat(scores, 1))
    accuracy, n = stats["accuracy"], len(pairs)
    error = (accuracy * (1 - accuracy) / n) ** 0.5
    figures = {"val_loss": loss.item(), "val_accuracy": accuracy, "val_accuracy_se": error}
    return figures | {"val_pairs": n}


@torch.no_grad()
def normalise(model, sft, prompts, answers, micro_batch):
    """Shift and scale the scores, so that those of the SFT model's own answers, to prompts spread
    over the list, have mean 0 and standard deviation 1; and cap them."""
    prompts, scores = spread_over(prompts, answers.answers), []
    questions = [prompts[i % len(prompts)] for i in range(answers.answers)]
    for part in in_parts(questions, micro_batch or 256, "answers of the SFT model"):
        tokens, mask, _, _ = generate(sft, part, answers.max_new_tokens)
        scores.append(model.eval()(tokens, row_lengths(mask)))
    scores = torch.cat(scores)
    model.mean.copy_(scores.mean())
    model.std.copy_(scores.std().clamp(min=1e-6))
    model.cap.copy_((scores.quantile(answers.cap_quantile) - model.mean) / model.std)


if __name__ == "__main__":
    run_script(main)
