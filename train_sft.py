"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, which is made first if it is not there yet
    python train_sft.py --data FOLDER      on sft_train.jsonl and sft_val.jsonl of your own: {"prompt", "completion"}

It minimises the cross-entropy of the completion's tokens, end-of-text included, given the prompt. Writes out/sft.pt.
"""

import dataclasses
import json
import math
import time
from collections import Counter
from dataclasses import dataclass

import torch

from minippo import GPT, GPTConfig, Tokenizer, UserError, by_length, evaluate_actions, optimizer_step, option
from minippo import response_mask, save_checkpoint
from plumbing import Progress, RunConfig, adamw, batches, encode_rows, prepare, read_flags, read_rows, run_script, set_lr


@dataclass
class FitConfig:
    epochs: int = option(1, "passes over the training rows", 1)
    batch_size: int = option(64, "rows per step", 1)
    micro_batch: int = option(0, "rows in memory at once in a step; 0: all of them", 0)
    lr: float = option(1e-3, "peak learning rate of AdamW; it falls linearly to 0", 0)
    warmup: int = option(20, "steps in which the learning rate climbs to its peak", 0)
    weight_decay: float = option(0.0, "AdamW's decay of the weights", 0)
    max_grad_norm: float = option(1.0, "longer gradients are scaled down to this norm", 0)
    evals: int = option(2, "validations during the run; the best checkpoint is kept", 1)


@dataclass
class InitConfig:
    init: str = option("", "gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder: its weights, vocabulary and size; use a small --lr")


def fit(kind, run, config, model, rows, loss_of, weight_of, validate, save, made_from=None):
    """Supervised training, here and in train_rm.py: the weights with the lowest validation loss are saved.

    rows: how many training rows there are; loss_of(row numbers) -> mean loss, number of tokens, stats; weight_of(row
    numbers): how many things that is a mean over; validate() -> facts, "val_loss" among them; save(facts); made_from: as in
    Progress. Returns the facts of the saved weights.
    """
    steps = config.epochs * math.ceil(rows / config.batch_size)
    optimizer = adamw(model, config.lr, config.weight_decay)
    progress = Progress(kind, run, (config, model.config), steps, made_from, model=model, optimizer=optimizer)
    best = progress.values.setdefault("best", {"val_loss": math.inf})
    for step, numbers in zip(range(steps), batches(rows, config.batch_size, run.seed)):
        if step < progress.values["step"]:
            continue  # done before the interruption
        lr = set_lr(optimizer, config.lr, step, steps, config.warmup)
        size = config.micro_batch or len(numbers)
        optimizer.zero_grad()
        tokens, stats = 0, Counter()
        for piece in (numbers[i : i + size] for i in range(0, len(numbers), size)):
            loss, tokens_of_piece, stats_of_piece = loss_of(piece)
            share = weight_of(piece) / weight_of(numbers)  # means over the pieces, so weighted, add up to that over the batch
            (share * loss).backward()
            tokens += tokens_of_piece
            stats.update({name: share * x for name, x in {"loss": loss.item(), **stats_of_piece}.items()})
        norm = optimizer_step(stats["loss"], model, optimizer, config.max_grad_norm, step + 1)
        stats = {**stats, "lr": lr, "grad_norm": norm}
        if (step + 1) % math.ceil(steps / config.evals) == 0 or step + 1 == steps:
            model.eval()  # while saving too: train_rm.py measures the scores that it normalises by
            with torch.no_grad():
                facts = validate()
                if not math.isfinite(facts["val_loss"]):
                    raise UserError(f"step {step + 1}: the validation loss is {facts['val_loss']}; try a smaller --lr")
                if facts["val_loss"] <= best["val_loss"]:
                    best.update(facts)
                    save(facts)
            model.train()
            stats.update(facts)
        progress.end_step(tokens, ["loss", "accuracy", "val_loss", "val_accuracy"], **stats)
    return best


def completion_nats(model, rows, device):
    """Rows of (prompt, completion) as ids -> -log probability of each completion, in nats, and its tokens: (B,) each."""

    def measure(numbers, tokens, lengths):
        prompt_lengths = lengths.new_tensor([len(rows[i][0]) for i in numbers])
        mask = response_mask(prompt_lengths, lengths, tokens.shape[1])
        logprobs, _, _ = evaluate_actions(model, tokens, mask, with_entropy=False)
        return torch.stack([-logprobs.sum(1), mask.sum(1)], 1)

    return by_length(measure, [prompt + completion for prompt, completion in rows], 64, device).unbind(1)


def main():
    run, gpt, config, start_from = read_flags(__doc__, RunConfig(), GPTConfig(), FitConfig(lr=3e-3), InitConfig())
    prepare(run)
    if run.data == RunConfig().data and not run.data.exists():
        from data.zoo import write_data

        print(f"{run.data} is not there yet: making the default data")
        write_data(run.data, seed=0)

    rows, start = read_rows(run.data, "sft", "train"), time.perf_counter()
    if start_from.init:
        from hf import read_gpt2

        model, tokenizer = read_gpt2(start_from.init)
    else:
        tokenizer = Tokenizer.train((text for row in rows for text in row), gpt.vocab_size)
        print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens in {time.perf_counter() - start:.1f} s")
        model = GPT(dataclasses.replace(gpt, vocab_size=tokenizer.vocab_size))
    model = model.to(run.device).train()
    train = encode_rows(rows, tokenizer, model.config.context)
    val = encode_rows(read_rows(run.data, "sft", "val"), tokenizer, model.config.context)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"training a GPT of {parameters / 1e6:.2f} M parameters on {run.device}: {config.epochs} x {len(train):,} rows")

    def loss_of(numbers):
        nats, counts = completion_nats(model, [train[i] for i in numbers], run.device)
        return nats.sum() / counts.sum(), sum(len(p) + len(c) for p, c in (train[i] for i in numbers)), {}

    def weight_of(numbers):
        return sum(len(completion) for _, completion in (train[i] for i in numbers))

    def validate():
        nats, counts = completion_nats(model, val, run.device)
        loss = nats.sum() / counts.sum()
        error = (nats - loss * counts).std() * len(nats) ** 0.5 / counts.sum()  # of a ratio of two sums over rows
        return {"val_loss": loss.item(), "val_loss_se": error.nan_to_num().item(), "val_tokens": int(counts.sum())}

    def save(facts):
        save_checkpoint(run.out / "sft.pt", "sft", model, tokenizer, **facts)

    best = fit("sft", run, config, model, len(train), loss_of, weight_of, validate, save)
    print(f"saved {run.out / 'sft.pt'}: validation loss {best['val_loss']:.4f} ± {best['val_loss_se']:.4f} nats/token")
    if (run.data / "ceilings.json").exists():
        floor = json.loads((run.data / "ceilings.json").read_text())["val_nats"] / best["val_tokens"]
        print(f"the entropy of the same completions under the distribution that they were drawn from is {floor:.4f}")


if __name__ == "__main__":
    run_script(main)
