"""Iterated RLHF: a judge labels what PPO writes, the reward model learns from it, PPO runs again.

    python train_ppo.py --models out --out out/1             a first round
    python -m examples.iterate --models out --out out/1      new pairs, into out/1/data
    python train_rm.py --data out/1/data --out out/1         from the old pairs and the new
    python train_ppo.py --models out/1 --out out/2           the second round, and so on:
    python -m examples.iterate --models out/1 --data out/1/data --out out/2

A reward model is reliable only near its pairs, and PPO moves away from them. So new pairs are
labelled, each with an answer of ppo.pt and one of sft.pt (Christiano et al., arXiv:1706.03741,
section 2.2; Bai et al., arXiv:2204.05862, section 4.5). Answers that were cut off are left out, as
a row of pairs cannot say that its answer has no end.
"""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from data.rows import UserError, read_jsonl, write_jsonl
from minippo import generate
from plumbing.batches import chunks
from plumbing.models import load_checkpoint, load_descendant, load_function, load_sft
from plumbing.settings import find_device, run_script
from plumbing.text import read_prompts, responses_of


@dataclass
class Config:
    data: Path = Path("data/zoo")  # folder of the pairs so far and the prompts
    models: str = "out"  # folder of sft.pt
    out: Path = Path("out/1")  # folder of ppo.pt; gets sft.pt and data/
    label: str = "data.zoo:label"  # module:function, (rng, prompt, answer, answer) -> row of a pair
    pairs: int = 8000  # new pairs, less those of two equal answers
    device: str = "auto"  # auto, cpu, cuda or cuda:1
    seed: int = 0  # of prompts, answers and labels


def main(config):
    new_data = config.out / "data"
    if Path(config.models).resolve() == config.out.resolve():
        raise UserError(f"{config.out}: holds the models that the round began with; choose another")
    if new_data.exists():
        raise UserError(f"{new_data}: exists already; remove it to make it again")
    device = find_device(config.device)
    sft, tokenizer, sft_fingerprint = load_sft(config, device)
    path = config.out / "ppo.pt"
    policy = load_descendant(path, ["ppo"], sft_fingerprint, device)
    settings = load_checkpoint(path, ["ppo"])[2]["settings"]
    longest = settings.get("max_new_tokens", 48)  # DPO has none
    temperature = settings.get("temperature", 1.0)
    prompts = read_prompts(config.data, "train", tokenizer, sft.config.context, longest)
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    label = load_function(config.label)

    def answers(model, prompts):
        tokens, mask = generate(model, prompts, longest, temperature)
        return responses_of(tokens, mask)

    pairs = read_jsonl(config.data / "pref_train.jsonl")
    chosen = sorted(rng.choices(prompts, k=config.pairs), key=len)
    for piece in chunks(chosen, 256):
        for prompt, a, b in zip(piece, answers(policy, piece), answers(sft, piece)):
            if a != b and a[-1] == b[-1] == tokenizer.eos:
                texts = tokenizer.decode(a), tokenizer.decode(b)
                pairs.append(label(rng, prompt.row["prompt"], *texts))

    write_jsonl(new_data / "pref_train.jsonl", pairs)
    for file in ("pref_val", "prompts_train", "prompts_val"):
        source = config.data / f"{file}.jsonl"
        if source.exists():
            shutil.copy(source, new_data)
    shutil.copy(Path(config.models) / "sft.pt", config.out)  # for the next round
    print(f"{new_data}: {len(pairs):,} pairs")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
