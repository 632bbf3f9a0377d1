"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, made first if it is not there yet
    python train_sft.py --data FOLDER      on sft_train.jsonl and sft_val.jsonl of your own

The files hold rows {"prompt": ..., "completion": ...}. The loss is the cross-entropy of the
completion, its end-of-text token included, given the prompt. Writes out/sft.pt.
"""

import json
from dataclasses import dataclass

import torch

from minippo import GPTConfig, evaluate_actions, gradient_step
from plumbing.checkpoints import save_checkpoint
from plumbing.progress import Progress
from plumbing.settings import RunConfig, prepare, read_flags, run_script
from plumbing.text import each, encode_rows, pad_completions, pieces, read_ids, read_rows
from plumbing.training import FitConfig, adamw, batches, first_model, length, set_lr, some


@dataclass
class InitConfig:
    init: str = ""  # gpt2, gpt2-medium, -large, -xl or a folder: its weights, vocabulary and size


def main():
    defaults = RunConfig(), GPTConfig(), FitConfig(lr=3e-3), InitConfig()
    run, shape, config, start = read_flags(__doc__, *defaults, without=["separate_critic"])
    prepare(run)
    model, tokenizer, rows, val_rows = load(run, shape, start.init)
    optimizer = adamw(model, config.lr, config.weight_decay)
    progress = Progress(
        "sft", run, (config, model.config), *length(config, len(rows)),
        data=(rows, val_rows, tokenizer.tokens), model=model, optimizer=optimizer,
    )  # fmt: skip
    for numbers in progress.remaining(batches(len(rows), config.batch_size, run.seed)):
        batch = [rows[i] for i in numbers]
        count = sum(len(completion) for _, completion in batch)
        metrics = {"loss": 0.0, "lr": set_lr(optimizer, progress.rate())}
        optimizer.zero_grad()
        for piece in pieces(batch, config.micro_batch):  # all of the batch, unless memory is short
            tokens, mask = pad_completions(piece, run.device)
            logprobs, _, _ = evaluate_actions(model, tokens, mask, with_entropy=False)
            loss = -logprobs.sum() / count  # a mean over the tokens of the whole batch
            loss.backward()
            metrics["loss"] += loss.item()
        metrics["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        if progress.due():
            metrics |= validate(model, some(val_rows), run.device, config.micro_batch)
            if progress.is_best(metrics):
                save_checkpoint(progress.best, "sft", model, tokenizer)
        progress.end_step(sum(len(p) + len(c) for p, c in batch), ["loss", "val_loss"], **metrics)
    finish(run, progress, model, tokenizer, val_rows, config)


def load(run, shape, init):
    """-> model, tokenizer, rows for training and for validation: (prompt, completion) as ids."""
    if run.data == RunConfig().data and not run.data.exists():
        from data.zoo import write_data

        print(f"{run.data} is not there yet: making the default data")
        write_data(run.data, seed=0, each=each)
    rows = read_rows(run.data, "sft", "train")
    model, tokenizer = first_model(rows, shape, init)
    rows = encode_rows(rows, tokenizer, model.config.context)
    val_rows = read_ids(run.data, "sft", "val", tokenizer, model.config.context)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    print(f"training a GPT of {size} on {run.device}: {len(rows):,} rows")
    return model.to(run.device).train(), tokenizer, rows, val_rows


@torch.no_grad()
def validate(model, rows, device, size):
    """The mean loss over all tokens of the rows, `size` at once, and its standard error."""
    model.eval()
    nats, counts = [], []
    for piece in each("pieces of the validation rows", pieces(rows, size or 64), 1):
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


def finish(run, progress, model, tokenizer, val_rows, config):
    """The best model of the run becomes sft.pt, with its loss on all validation rows."""
    progress.load_best(model)
    facts = validate(model, val_rows, run.device, config.micro_batch)
    save_checkpoint(run.out / "sft.pt", "sft", model, tokenizer, **facts)
    progress.done()
    progress.best.unlink()
    print(progress.ending())
    loss = f"{facts['val_loss']:.4f} ± {facts['val_loss_se']:.4f} nats/token"
    print(f"saved {run.out / 'sft.pt'}: validation loss {loss}")
    if (run.data / "ceilings.json").exists():
        nats = json.loads((run.data / "ceilings.json").read_text())["val_nats"]
        print("the entropy of the same completions, in the distribution that they were drawn from,")
        print(f"is {nats / facts['val_tokens']:.4f}: on average no model can do better")


if __name__ == "__main__":
    run_script(main)
