"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, which is made first if it is not there yet
    python train_sft.py --data FOLDER      on sft_train.jsonl and sft_val.jsonl of your own: {"prompt", "completion"}

It minimises the cross-entropy of the completion's tokens, end-of-text included, given the prompt. Writes out/sft.pt.
"""

import dataclasses
import json
import time

import torch

from minippo import GPT, FitConfig, GPTConfig, RunConfig, Tokenizer
from minippo import evaluate_actions, fit, load_jsonl, load_rows, pad_by_length
from minippo import read_flags, response_mask, run_script, save_checkpoint


def completion_nats(model, rows, device):
    """Rows of (prompt, completion) as ids -> -log probability of each completion, in nats, and its tokens: (B,) each."""
    nats, counts = [], []
    for numbers, tokens, lengths in pad_by_length([prompt + completion for prompt, completion in rows], 32, device):
        prompt_lengths = lengths.new_tensor([len(rows[i][0]) for i in numbers])
        mask = response_mask(prompt_lengths, lengths, tokens.shape[1])
        logprobs, _, _ = evaluate_actions(model, tokens, mask)
        nats.append(-logprobs.sum(1))
        counts.append(mask.sum(1))
    return torch.cat(nats), torch.cat(counts)


def main():
    run, gpt, config = read_flags(__doc__, RunConfig(), GPTConfig(), FitConfig(epochs=1, lr=3e-3))
    torch.manual_seed(run.seed)
    if run.data == RunConfig().data and not run.data.exists():
        from data.zoo import write_data

        print(f"{run.data} is not there yet: making the default data")
        write_data(run.data, seed=0)

    start, keys = time.perf_counter(), ("prompt", "completion")
    texts = (text for row in load_jsonl(run.data / "sft_train.jsonl", keys) for text in row)
    tokenizer = Tokenizer.train(texts, gpt.vocab_size)
    print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens in {time.perf_counter() - start:.1f} s")
    train = load_rows(run.data / "sft_train.jsonl", keys, tokenizer, gpt.context)
    val = load_rows(run.data / "sft_val.jsonl", keys, tokenizer, gpt.context)

    model = GPT(dataclasses.replace(gpt, vocab_size=tokenizer.vocab_size)).to(run.device).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"training a GPT of {parameters / 1e6:.2f} M parameters on {run.device}: {config.epochs} x {len(train):,} rows")

    def loss_of(numbers):
        nats, counts = completion_nats(model, [train[i] for i in numbers], run.device)
        return nats.sum() / counts.sum(), sum(len(p) + len(c) for p, c in (train[i] for i in numbers)), {}

    def validate():
        nats, counts = completion_nats(model, val, run.device)
        loss = nats.sum() / counts.sum()
        error = (nats - loss * counts).std() * len(nats) ** 0.5 / counts.sum()  # of a ratio of two sums over rows
        return {"val_loss": loss.item(), "val_loss_se": error.item(), "val_tokens": int(counts.sum())}

    def save(facts):
        save_checkpoint(run.out / "sft.pt", "sft", model, tokenizer, **facts)

    best = fit("sft", run, config, model, len(train), loss_of, validate, save)
    print(f"saved {run.out / 'sft.pt'}: validation loss {best['val_loss']:.4f} ± {best['val_loss_se']:.4f} nats/token")
    if (run.data / "ceilings.json").exists():
        floor = json.loads((run.data / "ceilings.json").read_text())["val_nats"] / best["val_tokens"]
        print(f"the entropy of this data, below which no model can get, is {floor:.4f}")


if __name__ == "__main__":
    run_script(main)
