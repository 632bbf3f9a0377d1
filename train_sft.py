"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, made first if it is not there yet
    python train_sft.py --data FOLDER      on sft_train.jsonl and sft_val.jsonl of your own

The files hold rows {"prompt": ..., "completion": ...}. The loss is the cross-entropy of the
completion, its end token included, given the prompt. Writes out/sft.pt.
"""

from dataclasses import dataclass

import torch

from data.rows import read_rows
from data.zoo import write_data
from minippo import GPTConfig, evaluate_actions, gradient_step, masked_mean
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, prepare, read_flags
from plumbing.packing import packed
from plumbing.rows import batch_of, encode_rows, pad_completions, read_ids
from plumbing.state import State
from plumbing.training import (
    Fit,
    FitConfig,
    adamw,
    backward,
    first_model,
    nats_of,
    set_lr,
    warn_of_long_answers,
)
from plumbing.watch import doubts_about


@dataclass
class InitConfig:
    init: str = ""  # gpt2, gpt2-medium, -large, -xl or a folder: its weights, vocabulary and size


def sft_loss(model, rows):
    """(prompt, completion) as ids -> the mean of -log pi over the completions' tokens, stats."""
    tokens, mask = pad_completions(rows, model.lm_head.weight.device)
    logprobs, _, _ = evaluate_actions(model, tokens, mask)
    loss = -masked_mean(logprobs, mask)
    return loss, {"loss": loss.item()}


def completion_tokens(rows):
    return sum(len(completion) for _, completion in rows)


def main():
    run, shape, config, start = read_flags(
        __doc__,
        RunConfig(),
        GPTConfig(),
        FitConfig(lr=3e-3),
        InitConfig(),
        without=("separate_critic",),
    )
    prepare(run)
    if run.data == RunConfig().data and not run.data.exists():
        print(f"{run.data} is not there yet: making the default data")
        write_data(run.data)

    # Data, model, optimizer. for_rows(): --steps, or --epochs if that is sooner
    texts = read_rows(run.data, "sft", "train")
    model, tokenizer = first_model(texts, shape, start.init)
    model = packed(model.to(run.device), run.dtype, run.grad_checkpoint).train()
    rows = encode_rows(texts, tokenizer, model.config.context)
    val_rows = read_ids(run.data, "sft", "val", tokenizer, model.config.context)
    warn_of_long_answers(rows)
    optimizer = adamw(model, config.lr, config.weight_decay)
    config = config.for_rows(len(rows))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"training a GPT of {size:.2f} M parameters on {run.device}: {len(rows):,} rows")

    # State: the log, and how far the run has come. Fit: validation, and the best weights
    parts, data = {"model": model, "optimizer": optimizer}, (rows, val_rows, tokenizer.tokens)
    state = State("sft", run, parts, data, config, model.config)
    fit = Fit(state, model, tokenizer, validate, val_rows, config.micro_batch)

    # The loop
    for step in state.steps(config.steps):
        lr = set_lr(optimizer, step, config)
        batch = batch_of(rows, step, config.batch_size, run.seed)
        optimizer.zero_grad()
        # The gradient of sft_loss, in pieces of --micro_batch rows, each weighed by its tokens
        stats = backward(sft_loss, model, batch, config.micro_batch, completion_tokens)
        grad_norm = gradient_step(optimizer, config.max_grad_norm)
        fit.end_step(stats | {"grad_norm": grad_norm, "lr": lr}, batch)

    # The best weights, measured on all validation rows and saved
    figures = fit.load_best()
    save_checkpoint(run.out / "sft.pt", "sft", model, tokenizer, **figures)
    fit.finish()
    print(f"saved {run.out / 'sft.pt'}: validation loss {figures['val_loss']:.4f} nats/token")
    for doubt in doubts_about(figures, choices=tokenizer.vocab_size):
        print(doubt)


@torch.no_grad()
def validate(model, rows, size):
    """The loss, a mean over all tokens of the completions."""
    nats = nats_of(model.eval(), rows, size)  # (rows,)
    model.train()
    return {"val_loss": nats.sum().item() / completion_tokens(rows)}


if __name__ == "__main__":
    run_script(main)
