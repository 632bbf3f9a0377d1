"""Talk to a trained model.

    python sample.py out/ppo.pt "What does a bee eat?" ["Another prompt" ...]

Without a prompt, one is read from each line of the standard input.
"""

import sys
from dataclasses import dataclass

import torch

from minippo import UserError, generate, load_checkpoint, option
from plumbing import printable, read_flags, run_script


@dataclass
class SampleConfig:
    n: int = option(1, "responses to each prompt", 1)
    temperature: float = option(1.0, "divides the logits; below 1 keeps to the likelier words", 0.01)
    top_k: int = option(0, "choose among this many likeliest tokens only; 0: among all; 1: always the likeliest", 0)
    max_new_tokens: int = option(64, "longest response, in tokens", 1)
    seed: int = option(0, "seed of the samples", 0, 2**31)


def main():
    config, (path, *texts) = read_flags(__doc__, SampleConfig(), positional="CHECKPOINT PROMPT")
    policy, tokenizer, _ = load_checkpoint(path, ("ppo", "sft"))
    torch.manual_seed(config.seed)
    for text in texts or filter(None, (line.rstrip("\r\n") for line in sys.stdin)):
        prompt = tokenizer.encode(text)
        if not 0 < len(prompt) < policy.config.context:
            raise UserError(f"the prompt {text[:40]!r} has {len(prompt)} tokens, should have 1 to {policy.config.context - 1}")
        tokens, mask, *_ = generate(policy, [prompt] * config.n, config.max_new_tokens, config.temperature, config.top_k)
        print(printable(text))
        for ids, response in zip(tokens[:, 1:], mask):
            print(" ", printable(tokenizer.decode(ids[response].tolist()).strip()), flush=True)


if __name__ == "__main__":
    run_script(main)
