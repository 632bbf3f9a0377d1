"""Talk to a trained model.

    python sample.py out/ppo.pt "What does a bee eat?" ["Another prompt" ...]
    python sample.py out/ppo.pt "What does a bee eat?" --trace

Without a prompt, each line of the standard input is one. In place of out/ppo.pt, the folder of a
GPT-2 in the Hugging Face format will do. --trace shows the numbers of each token, as PPO would
compute them; the header of minippo.py explains them. (Credit is whitened over one response.)
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from data.files import UserError
from minippo import PPOConfig, compute_advantages, generate, rollout, table, trace
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import printable, run_script
from plumbing.flags import read_flags
from plumbing.hf import read_gpt2
from plumbing.models import load_models


@dataclass
class SampleConfig:
    n: int = 1  # responses to each prompt [1, inf]
    temperature: float = 1.0  # divides the logits; below 1 keeps to likelier words [0.01, inf]
    max_new_tokens: int = 64  # longest response, in tokens [1, inf]
    seed: int = 0  # seed of the samples [0, 2147483648]
    trace: bool = False  # show the numbers of each token; needs sft.pt, and rm.pt or --reward
    kl_coef: float = PPOConfig.kl_coef  # beta in these numbers [0, 1e6]
    models: str = ""  # folder of sft.pt and rm.pt for --trace; that of the checkpoint if not given
    reward: str = ""  # module:function that scores instead of rm.pt, as in train_ppo.py


def load_policy(path):
    if (checkpoint := Path(path) / "ppo.pt").exists():
        raise UserError(f"{path}: the folder of a run; give its {checkpoint}")
    return read_gpt2(path) if Path(path).is_dir() else load_checkpoint(path, ("ppo", "sft"))[:2]


def print_trace(sampled, models, config):
    """The numbers of a response that generate() has returned, as an iteration of PPO has them."""
    settings = PPOConfig(temperature=config.temperature, kl_coef=config.kl_coef)
    batch = rollout(models.policy, models.ref, models.score, [], settings, lambda *_: sampled)
    batch |= compute_advantages(batch, settings)

    def spell(i):  # for a column of 10: a leading space as a dot, cut to fit
        text = printable(re.sub("^ ", "·", models.tokenizer.spell(i))).replace("\n", r"\n")
        return text if len(text) < 10 else text[:8] + "…"

    columns, score = trace(batch, 0, spell), batch["scores"][0]
    print(f"    score {score:.2f}  KL {sum(columns['KL']):.2f}  beta {config.kl_coef:g}")
    print(*("    " + line for line in table(columns)), sep="\n")


def main():
    config, (path, *texts) = read_flags(__doc__, SampleConfig(), positional="CHECKPOINT PROMPT")
    models, status = None, 0
    if config.trace:
        folder = config.models or Path(path).parent
        models = load_models(folder, "cpu", policy=path, reward=config.reward)
    policy, tokenizer = (models.policy, models.tokenizer) if models else load_policy(path)
    policy.eval()
    torch.manual_seed(config.seed)
    for text in texts or (line.rstrip("\r\n") for line in sys.stdin or ()):  # None: closed
        prompt, longest = tokenizer.encode(text), policy.config.context - 1
        if not 0 < len(prompt) <= longest:
            count = f"has {len(prompt)} tokens, not 1 to {longest}"
            print(f"sample.py: the prompt {text[:40]!r} {count}", file=sys.stderr)
            status = 2  # at the end, after the other prompts
            continue
        print(printable(text))
        for _ in range(config.n):
            sampled = generate(policy, [prompt], config.max_new_tokens, config.temperature)
            ids = sampled[0][0, 1:][sampled[1][0]].tolist()
            print(" ", printable(tokenizer.decode(ids).strip()), flush=True)
            if models:
                print_trace(sampled, models, config)
    sys.exit(status)


if __name__ == "__main__":
    run_script(main)
