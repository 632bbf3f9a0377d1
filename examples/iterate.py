"""Iterated RLHF: a judge labels what PPO writes, the reward model learns from it, PPO runs again.

    python train_ppo.py --models out --out out/1             a first round
    python -m examples.iterate --models out --out out/1      new pairs, into out/1/data
    python train_rm.py --data out/1/data --out out/1         from the old pairs and the new
    python train_ppo.py --models out/1 --out out/2           the second round, and so on:
    python -m examples.iterate --models out/1 --data out/1/data --out out/2

A reward model is reliable only near its pairs, and PPO moves away from them. So new pairs
are labelled, each with an answer of ppo.pt and one of sft.pt (Christiano et al., arXiv:1706.03741,
section 2.2; Bai et al., arXiv:2204.05862, section 4.5).
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from data.files import UserError, write_file, write_jsonl
from data.rows import KEYS, load_rows
from minippo import generate
from plumbing.models import load_descendant, load_function, load_sft, read_contents
from plumbing.settings import device_of, read_flags, script
from plumbing.text import chunks, read_prompts, texts_of


@dataclass
class IterateConfig:
    data: Path = Path("data/zoo")  # folder of the pairs so far and the prompts
    models: Path = Path("out")  # folder of sft.pt
    out: Path = Path("out/1")  # folder of ppo.pt; gets sft.pt and data/
    label: str = "data.zoo:label"  # module:function, (rng, prompt, answer, answer) -> row of a pair
    pairs: int = 8000  # new pairs, less those of two equal answers
    device: str = "auto"  # auto, cpu or cuda
    seed: int = 0  # of prompts, answers and labels


@script
def main():
    config = read_flags(__doc__, IterateConfig, run=False)
    data, out = config.data, config.out
    if (out / "data").exists():
        raise UserError(f"{out}/data: already exists; remove it to make it again")
    config.device = device_of(config)
    ref, tokenizer = load_sft(config)
    policy = load_descendant(config, out / "ppo.pt", ["ppo"])
    state = read_contents(out / "ppo_state.pt", ["state"], "train_ppo.py makes it")
    longest, temperature = (state["settings"][x] for x in ("max_new_tokens", "temperature"))
    rng, label = random.Random(config.seed), load_function(config.label)
    torch.manual_seed(config.seed)
    prompts = read_prompts(data, "train", tokenizer, policy.config.context)
    prompts = rng.choices(prompts, k=config.pairs)
    pairs = [dict(zip(KEYS["pref"], row)) for row in load_rows(data / "pref_train.jsonl", "pref")]
    for part in chunks(prompts, 256):
        sampled = [generate(model, part, longest, temperature)[:2] for model in (policy, ref)]
        (texts, ours), (_, others) = (texts_of(tokenizer, *rows) for rows in sampled)
        for prompt, a, b in zip(texts, ours, others):
            if a != b:
                pairs.append(label(rng, prompt, a, b))
    for path in data.glob("pr*_*.jsonl"):
        write_file(out / "data" / path.name, path.read_bytes())
    write_jsonl(out / "data/pref_train.jsonl", pairs)
    write_file(out / "sft.pt", (config.models / "sft.pt").read_bytes())  # for the next round
    print(f"{out}/data: {len(pairs):,} pairs")


if __name__ == "__main__":
    main()
