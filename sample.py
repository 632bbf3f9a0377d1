"""Talk to a trained model.

    python sample.py out/ppo.pt "What does a bee eat?" ["Another prompt" ...]
    python sample.py out/ppo.pt "What does a bee eat?" --trace

Without a prompt, each line of standard input is a prompt. --trace shows the numbers of each token
that do not depend on settings of PPO; the header of minippo.py explains them.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from data.files import UserError, printable
from minippo import evaluate_actions, generate, table, trace
from plumbing.models import load_checkpoint, load_models
from plumbing.page import likely_tokens
from plumbing.settings import models_folder, read_flags, script


@dataclass
class SampleConfig:
    n: int = 1  # responses to each prompt
    temperature: float = 1.0  # divides the logits; below 1 keeps to likelier words
    max_new_tokens: int = 64  # longest response, in tokens
    seed: int = 0  # seed of the samples
    trace: bool = False  # show the numbers of each token; needs sft.pt, and rm.pt or --reward
    models: str = ""  # folder of sft.pt and rm.pt for --trace; if empty, the checkpoint's or above
    reward: str = ""  # module:function that scores instead of rm.pt, as in train_ppo.py

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature ({self.temperature}): should be above 0")


@torch.no_grad()
def print_trace(sampled, policy, ref, score, tokenizer, temperature):
    """The numbers of a response that generate() has returned."""
    tokens, mask, logprobs, values = sampled
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, temperature)
    batch = {"tokens": tokens, "mask": mask, "old_logprobs": logprobs, "old_values": values}

    def spell(i):  # for a column of 10
        return printable(tokenizer.spell(i), keep="")[:9]

    columns = trace(batch | {"ref_logprobs": ref_logprobs}, 0, spell)
    print(f"    score {score(tokens, mask)[0]:.2f}  KL {sum(columns['KL']):.2f}")
    print(*("    " + line for line in table(columns)), sep="\n")
    print("\n    the likeliest tokens, and the sampled one: probability under ref -> under policy")
    likely = likely_tokens((policy, ref), tokens[0], mask[0], temperature, spell)
    for action, rows in zip(columns["action"], likely):
        cells = (f"{text:>11} {in_ref:.2f} -> {here:.2f}" for text, here, in_ref in rows)
        print(f"    {action:>10} ", *cells)


@script
def main():
    config, (path, *texts) = read_flags(
        __doc__, SampleConfig, run=False, positional="CHECKPOINT PROMPT"
    )
    if Path(path).is_dir():
        raise UserError(f"{path}: a folder; give a file in it, such as ppo.pt")
    if config.trace:
        config.models = models_folder(config, Path(path).parent)
        config.policy, config.device = path, "cpu"
        policy, ref, score, tokenizer = load_models(config)
    else:
        policy, tokenizer, _ = load_checkpoint(path, ["ppo", "sft"])
    torch.manual_seed(config.seed)
    status, longest = 0, policy.config.context - 1
    for text in texts or (line.rstrip("\r\n") for line in sys.stdin):
        prompt = tokenizer.encode(text)
        if not 0 < len(prompt) <= longest:
            wrong = f"it has {len(prompt)} tokens, not 1 to {longest}"
            print(f"sample.py: the prompt {text[:40]!r}: {wrong}", file=sys.stderr)
            status = 2  # at the end, after the other prompts
            continue
        print(printable(text[:400]))
        for _ in range(config.n):
            sampled = generate(policy, [prompt], config.max_new_tokens, config.temperature)
            tokens, mask, _, _ = sampled
            response = tokenizer.decode(tokens[0, 1:][mask[0]].tolist())
            print(" ", printable(response.strip()), flush=True)
            if config.trace:
                print_trace(sampled, policy, ref, score, tokenizer, config.temperature)
    sys.exit(status)


if __name__ == "__main__":
    main()
