"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, which is made first if missing
    python train_sft.py --data FOLDER      on your own sft_train.jsonl and sft_val.jsonl

The files hold rows {"prompt": ..., "completion": ...}. The loss is the cross-entropy of the
completion, its end token included, given the prompt. Writes out/sft.pt.
"""

import math
from dataclasses import dataclass

import torch

from data.rows import read_rows
from data.zoo import ensure_data
from minippo import GPT, GPTConfig, evaluate_actions, gradient_step, pad_completions, set_lr
from plumbing.batches import batch_of, similar_chunks
from plumbing.files import Record
from plumbing.gpt2 import read_gpt2
from plumbing.settings import RunConfig, run_script
from plumbing.text import Tokenizer, encode_rows


@dataclass
class Config(GPTConfig, RunConfig):
    init: str = ""  # gpt2, gpt2-medium, -large, -xl or a folder: with its size and vocabulary
    vocab_size: int = 1024  # tokens in the vocabulary, at most: on the default data 790
    steps: int = 1300  # gradient steps; fewer if `epochs` allows fewer
    epochs: int = 12  # passes over the rows, at most
    batch_size: int = 64  # rows per step
    micro_batch: int = 16  # rows in memory at once
    lr: float = 3e-3  # peak of the learning rate, which then falls linearly to 0
    warmup: int = 20  # steps in which it climbs to its peak; at most a tenth of all
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    def __post_init__(self):
        self.at_least(1, "steps", "epochs", "batch_size", "micro_batch", "layers", "heads")
        self.at_least(257, "vocab_size")  # single bytes and the end token
        if self.channels % self.heads:
            raise ValueError(f"channels ({self.channels}) should be a multiple of heads")


def new_model(config, rows):
    """-> a GPT with random weights and a vocabulary learned from the rows; or GPT-2."""
    if config.init:
        return read_gpt2(config.init, config.bfloat16)
    texts = [row[name] for row in rows for name in ("prompt", "completion")]
    tokenizer = Tokenizer.train(texts, config.vocab_size)
    size = config.layers, config.heads, config.channels, config.bfloat16
    return GPT(GPTConfig(tokenizer.vocab_size, config.context, *size)), tokenizer


@torch.no_grad()
def validation_loss(model, rows, config, device):
    """The mean of -log pi over the tokens of the completions."""
    total = 0.0
    count = 0
    for piece in similar_chunks(rows, config.micro_batch):
        tokens, mask = pad_completions(piece, device)
        logprobs, _ = evaluate_actions(model, tokens, mask)
        total -= logprobs.sum().item()
        count += mask.sum().item()
    return total / count


def train(config):
    device = config.prepare("sft")  # sets the seed
    ensure_data(config.data)
    texts = read_rows(config.data, "sft", "train")
    val_texts = read_rows(config.data, "sft", "val")
    model, tokenizer = new_model(config, texts)
    model.to(device)
    context = model.config.context
    rows = encode_rows(texts, ["completion"], tokenizer, context)  # (prompt, completion) as ids
    val_rows = encode_rows(val_texts, ["completion"], tokenizer, context)
    steps = min(config.steps, math.ceil(config.epochs * len(rows) / config.batch_size))

    groups = [{"params": model.parameters(), "peak": config.lr}]
    # Adam's usual 0.999 averages over a thousand steps: too slow for a short run.
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    inputs = {"rows": len(rows), "vocabulary": tokenizer.fingerprint()}
    record = Record(config, "sft", steps, model, optimizer, **inputs)
    first = record.begin(config.resume)

    for step in range(first, steps):
        set_lr(optimizer, step, steps, config.warmup)
        batch = batch_of(rows, step, config.batch_size, config.seed)
        N = sum(len(completion) for _, completion in batch)  # tokens
        loss = 0.0
        optimizer.zero_grad()
        for piece in similar_chunks(batch, config.micro_batch):
            tokens, mask = pad_completions(piece, device)
            logprobs, _ = evaluate_actions(model, tokens, mask)
            piece_loss = -logprobs.sum() / N
            piece_loss.backward()
            loss += piece_loss.item()
        stats = {"loss": loss, "grad_norm": gradient_step(optimizer, config.max_grad_norm)}
        if (step + 1) % max(1, steps // 10) == 0:
            stats["val_loss"] = validation_loss(model, val_rows[:1000], config, device)
        record.log(step + 1, stats, show=["loss", "val_loss"])
        record.save_if_due(step + 1)

    loss = validation_loss(model, val_rows, config, device)
    record.save_model(model, tokenizer, val_loss=loss)
    print(f"validation loss {loss:.4f} nats per token")


if __name__ == "__main__":
    run_script(train, Config, __doc__)
