"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, made first if it is not there yet
    python train_sft.py --data FOLDER      on sft_train.jsonl and sft_val.jsonl of your own

The files hold rows {"prompt": ..., "completion": ...}. The loss is the cross-entropy of the
completion, its end-of-text token included, given the prompt. Writes out/sft.pt.
"""

import dataclasses
import json
import math
import time
from dataclasses import dataclass

import torch

from minippo import GPT, GPTConfig, evaluate_actions, gradient_step
from plumbing.checkpoints import save_checkpoint
from plumbing.settings import RunConfig, prepare, read_flags, run_script
from plumbing.text import Tokenizer, encode_rows, pad_completions, pieces, read_ids, read_rows
from plumbing.training import FitConfig, Progress, adamw, batches, set_lr


@dataclass
class InitConfig:
    init: str = ""  # gpt2, gpt2-medium, -large, -xl or a folder: its weights, vocabulary and size


def main():
    defaults = RunConfig(), GPTConfig(), FitConfig(lr=3e-3), InitConfig()
    run, shape, config, start = read_flags(__doc__, *defaults, without=["separate_critic"])
    prepare(run)
    model, tokenizer, rows, val_rows = load(run, shape, start.init)
    steps = config.epochs * math.ceil(len(rows) / config.batch_size)
    optimizer = adamw(model, config.lr, config.weight_decay)
    progress = Progress("sft", run, (config, model.config), steps, model=model, optimizer=optimizer)
    for step, numbers in progress.remaining(batches(len(rows), config.batch_size, run.seed)):
        lr = set_lr(optimizer, config.lr, step, steps, config.warmup)
        batch = [rows[i] for i in numbers]
        count = sum(len(completion) for _, completion in batch)
        optimizer.zero_grad()
        metrics = {"loss": 0.0, "lr": lr}
        for piece in pieces(batch, config.micro_batch):  # all of the batch, unless memory is short
            tokens, mask = pad_completions(piece, run.device)
            logprobs, _, _ = evaluate_actions(model, tokens, mask, with_entropy=False)
            loss = -logprobs.sum() / count  # a mean over the tokens of the whole batch
            loss.backward()
            metrics["loss"] += loss.item()
        metrics["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        if progress.due(config.evals):
            facts = validate(model, val_rows, run.device)
            if progress.is_best(facts):
                save_checkpoint(run.out / "sft.pt", "sft", model, tokenizer, **facts)
            metrics |= facts
        progress.end_step(sum(len(p) + len(c) for p, c in batch), ["loss", "val_loss"], **metrics)
    say(progress.values["best"], run)


def load(run, shape, init):
    """-> model, tokenizer, rows for training and for validation: (prompt, completion) as ids."""
    if run.data == RunConfig().data and not run.data.exists():
        from data.zoo import write_data

        print(f"{run.data} is not there yet: making the default data")
        write_data(run.data, seed=0)
    rows = read_rows(run.data, "sft", "train")
    model, tokenizer = first_model(rows, shape, init)
    rows = encode_rows(rows, tokenizer, model.config.context)
    val_rows = read_ids(run.data, "sft", "val", tokenizer, model.config.context)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    print(f"training a GPT of {size} on {run.device}: {len(rows):,} rows")
    return model.to(run.device).train(), tokenizer, rows, val_rows


def first_model(rows, shape, init):
    """A GPT with random weights and a vocabulary learned from the rows; with `init`, a GPT-2."""
    if init:
        from plumbing.hf import read_gpt2

        return read_gpt2(init)
    start = time.perf_counter()
    tokenizer = Tokenizer.train((text for row in rows for text in row), shape.vocab_size)
    seconds = time.perf_counter() - start
    print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens in {seconds:.1f} s")
    return GPT(dataclasses.replace(shape, vocab_size=tokenizer.vocab_size)), tokenizer


@torch.no_grad()
def validate(model, rows, device):
    """The mean loss over all tokens of the rows, and its standard error."""
    model.eval()
    nats, counts = [], []
    for piece in pieces(rows, 64):
        tokens, mask = pad_completions(piece, device)
        logprobs, _, _ = evaluate_actions(model, tokens, mask, with_entropy=False)
        nats.append(-logprobs.sum(1))
        counts.append(mask.sum(1))
    model.train()
    nats, counts = torch.cat(nats), torch.cat(counts)
    loss = nats.sum() / counts.sum()
    spread = (nats - loss * counts).std(correction=min(1, len(nats) - 1))  # 0 for a single row
    error = spread * len(nats) ** 0.5 / counts.sum()  # the loss is a ratio of two sums over rows
    return {"val_loss": loss.item(), "val_loss_se": error.item(), "val_tokens": int(counts.sum())}


def say(facts, run):
    loss = f"{facts['val_loss']:.4f} ± {facts['val_loss_se']:.4f} nats/token"
    print(f"saved {run.out / 'sft.pt'}: validation loss {loss}")
    if (run.data / "ceilings.json").exists():
        nats = json.loads((run.data / "ceilings.json").read_text())["val_nats"]
        print("the entropy of the same completions, in the distribution that they were drawn from,")
        print(f"is {nats / facts['val_tokens']:.4f}: on average no model can do better")


if __name__ == "__main__":
    run_script(main)
