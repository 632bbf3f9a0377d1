"""Talk to a trained model.

    python sample.py out/ppo.pt "What does a bee eat?" ["Another prompt" ...]

Without a prompt, each line of standard input is a prompt.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minippo import generate
from plumbing.models import load_checkpoint
from plumbing.settings import printable, run_script
from plumbing.text import responses_of


@dataclass
class Config:
    checkpoint: Path  # such as out/ppo.pt
    prompts: list = field(default_factory=list)  # if there is none, the lines of standard input
    n: int = 1  # responses to each prompt
    temperature: float = 1.0  # divides the logits; below 1 keeps to likelier words
    max_new_tokens: int = 64  # longest response, in tokens
    seed: int = 0  # seed of the samples

    def __post_init__(self):
        if not (self.temperature > 0 and self.n > 0 and self.max_new_tokens > 0):
            raise ValueError("n, temperature and max_new_tokens should be above 0")


def main(config):
    policy, tokenizer, _ = load_checkpoint(config.checkpoint, ["ppo", "sft"])
    torch.manual_seed(config.seed)
    longest = policy.config.context - 1
    if not config.prompts:
        sys.stdin.reconfigure(errors="replace")  # what is not text
    for text in config.prompts or (line.rstrip("\r\n") for line in sys.stdin):
        prompt = tokenizer.encode(text)
        print(printable(text))
        if not 0 < len(prompt) <= longest:
            print(f"  (no answer: a prompt has 1 to {longest} tokens, not {len(prompt)})")
            continue
        copies = [prompt] * config.n
        tokens, mask = generate(policy, copies, config.max_new_tokens, config.temperature)
        for ids in responses_of(tokens, mask):
            print(" ", printable(tokenizer.decode(ids).strip()), flush=True)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
