"""Talk to a trained model.

    python sample.py out/ppo.pt "What does a bee eat?" ["Another prompt" ...]
    python sample.py out/ppo.pt "What does a bee eat?" --trace

Without a prompt, each line of the standard input is one; with --whole, all of it is one. In place
of out/ppo.pt, the folder of a GPT-2 in the Hugging Face format will do. --trace shows the numbers
of each token, as PPO would compute them; the header of minippo.py explains them. (Whitened is over
one response. There is no ratio: it exists in updates alone.) Then, for each token, the three
likeliest others with their probabilities.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import minippo
from plumbing import fast
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import UserError, printable, run_script
from plumbing.hf import read_gpt2
from plumbing.settings import read_flags
from plumbing.token_table import TraceConfig, load_traced, print_others, print_table, trace_of


@dataclass
class SampleConfig:
    n: int = 1  # responses to each prompt [1, inf]
    temperature: float = 1.0  # divides the logits; below 1 keeps to likelier words [0.01, inf]
    top_k: int = 0  # choose among so many likeliest tokens; 0: all; 1: the likeliest [0, inf]
    max_new_tokens: int = 64  # longest response, in tokens [1, inf]
    seed: int = 0  # seed of the samples [0, 2147483648]
    whole: bool = False  # the standard input is one prompt, line breaks included (but the last)


def draw_top_k(logits, top_k):
    """A token from the top_k likeliest of each row: (B, V) -> (B,). PPO samples from all."""
    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
    return minippo.draw(logits.masked_fill(logits < kth, -torch.inf))


def load_policy(path):
    if (checkpoint := Path(path) / "ppo.pt").exists():
        raise UserError(f"{path}: the folder of a run; give its {checkpoint}")
    return read_gpt2(path) if Path(path).is_dir() else load_checkpoint(path, ("ppo", "sft"))


def read_prompts(texts, whole):
    """The prompts of the command line; without one, those of the standard input."""
    if texts:
        return texts
    lines = (line.rstrip("\r\n") for line in sys.stdin or ())  # None: closed
    return ["\n".join(lines)] if whole else lines


def main():
    flags = SampleConfig(), TraceConfig()
    config, tracing, (path, *texts) = read_flags(__doc__, *flags, positional="CHECKPOINT PROMPT")
    models = load_traced(path, tracing) if tracing.trace else None
    policy, tokenizer = (models.policy, models.tokenizer) if models else load_policy(path)[:2]
    policy.eval()
    torch.manual_seed(config.seed)
    fast.install()
    draw = functools.partial(draw_top_k, top_k=config.top_k) if config.top_k else None
    status = 0
    for text in read_prompts(texts, config.whole):
        prompt, longest = tokenizer.encode(text), policy.config.context - 1
        if not 0 < len(prompt) <= longest:
            count = f"has {len(prompt)} tokens, not 1 to {longest}"
            print(f"sample.py: the prompt {text[:40]!r} {count}", file=sys.stderr)
            status = 2  # at the end, after the other prompts
            continue
        prompts = [prompt] * config.n
        sampled = fast.generate(policy, prompts, config.max_new_tokens, config.temperature, draw)
        tokens, mask, _, _ = sampled
        if models:
            trace = trace_of(sampled, models, config.temperature, tracing.kl_coef)
        print(printable(text))
        for row, (ids, response) in enumerate(zip(tokens[:, 1:], mask)):
            print(" ", printable(tokenizer.decode(ids[response].tolist()).strip()), flush=True)
            if models:
                print_table(trace, row, tokenizer, tracing.kl_coef)
                print_others(trace, row, models, config.temperature)
    sys.exit(status)


if __name__ == "__main__":
    run_script(main)
