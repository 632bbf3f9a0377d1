"""Talk to a trained model.

    python sample.py out/ppo.pt "What does a bee eat?" ["Another prompt" ...]
    python sample.py out/ppo.pt "What does a bee eat?" --trace

Without a prompt, each line of the standard input is one; with --whole, all of it is one. In place
of out/ppo.pt, the folder of a GPT-2 in the Hugging Face format will do. --trace shows the numbers
of each token, as PPO would compute them; the header of minippo.py explains them. (Whitened is over
one response. There is no ratio: it exists in updates alone.)
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import minippo
from plumbing.checkpoints import load_checkpoint
from plumbing.fast import generate
from plumbing.hf import read_gpt2
from plumbing.settings import UserError, read_flags, run_script
from plumbing.text import printable
from plumbing.tracing import TraceConfig, load_traced, print_trace, trace_of


@dataclass
class SampleConfig:
    n: int = 1  # responses to each prompt
    temperature: float = 1.0  # divides the logits; below 1 keeps to the likelier words
    top_k: int = 0  # choose among so many likeliest tokens; 0: among all; 1: always the likeliest
    max_new_tokens: int = 64  # longest response, in tokens
    seed: int = 0  # seed of the samples
    whole: bool = False  # the standard input is one prompt, line breaks included (but the last)


def draw_top_k(logits, top_k):
    """A token from the top_k likeliest of each row: (B, V) -> (B,). PPO itself samples from all."""
    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
    return minippo.draw(logits.masked_fill(logits < kth, -torch.inf))


def main():
    flags = SampleConfig(), TraceConfig()
    config, tracing, (path, *texts) = read_flags(__doc__, *flags, positional="CHECKPOINT PROMPT")
    read = read_gpt2 if Path(path).is_dir() else lambda path: load_checkpoint(path, ("ppo", "sft"))
    models = load_traced(path, tracing) if tracing.trace else None
    policy, tokenizer, *_ = (models.policy, models.tokenizer) if models else read(path)
    torch.manual_seed(config.seed)
    draw = functools.partial(draw_top_k, top_k=config.top_k) if config.top_k else minippo.draw
    lines = (line.rstrip("\r\n") for line in sys.stdin or ())  # None: closed
    for text in texts or filter(None, ["\n".join(lines)] if config.whole else lines):
        prompt, most = tokenizer.encode(text), policy.config.context - 1
        if not 0 < len(prompt) <= most:
            raise UserError(f"the prompt {text[:40]!r} has {len(prompt)} tokens, not 1 to {most}")
        rows, settings = [prompt] * config.n, (config.max_new_tokens, config.temperature, draw)
        sampled = tokens, mask, *_ = generate(policy, rows, *settings)
        trace = trace_of(sampled, models, config.temperature, tracing.kl_coef) if models else None
        print(printable(text))
        for row, (ids, response) in enumerate(zip(tokens[:, 1:], mask)):
            print(" ", printable(tokenizer.decode(ids[response].tolist()).strip()), flush=True)
            if models:
                print_trace(trace, row, tokenizer, tracing.kl_coef)


if __name__ == "__main__":
    run_script(main)
