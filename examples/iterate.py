"""Iterated RLHF: a judge labels what PPO writes, the reward model learns from it, PPO runs again.

    python train_ppo.py --models out --out out/1             a first round
    python -m variations.iterate --models out --out out/1    new pairs, into out/1/data
    python train_rm.py --data out/1/data --out out/1         from the old pairs and the new
    python train_ppo.py --models out/1 --out out/2           the second round, and so on:
    python -m variations.iterate --models out/1 --data out/1/data --out out/2

A reward model is right near the text of its pairs, and PPO moves away from that text. So new pairs
are labelled, an answer of ppo.pt and one of sft.pt (Christiano et al., arXiv:1706.03741, section
2.2; Bai et al., arXiv:2204.05862, section 4.5).
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from data.files import UserError, write_jsonl
from data.rows import KEYS, load_rows, read_rows
from minippo import generate
from plumbing.checkpoints import read_contents
from plumbing.errors import run_script
from plumbing.flags import RunConfig, read_flags
from plumbing.models import load_function, load_models
from plumbing.rows import in_parts
from plumbing.tokenizer import texts_of
from variations import copy_files


@dataclass
class IterateConfig:
    data: str = RunConfig.data  # folder of the pairs so far and the prompts
    models: str = "out"  # folder of sft.pt, and of the rm.pt that gave the scores
    out: str = "out/1"  # folder of ppo.pt; gets sft.pt and data/
    device: str = RunConfig.device  # auto, cpu or cuda
    label: str = "data.zoo:label"  # module:function, (rng, prompt, answer, answer) -> row of a pair
    pairs: int = 8000  # new pairs, less those of two equal answers [1, inf]
    seed: int = 0  # of prompts, answers and labels [0, 2147483648]


def main():
    (config,) = read_flags(__doc__, IterateConfig())
    data, out, device = Path(config.data), Path(config.out), RunConfig(device=config.device).device
    (label, _), rng, answers = load_function(config.label), random.Random(config.seed), []
    models = load_models(config.models, device, policy=out / "ppo.pt")
    settings = read_contents(out / "ppo_state.pt", ["state"])["settings"]
    encode, context = models.tokenizer.encode, models.ref.config.context
    prompts = [prompt for (prompt,) in read_rows(data, "prompts", "train")]
    prompts = [prompt for prompt in prompts if 0 < len(encode(prompt)) < context]
    asked = rng.choices(prompts, k=config.pairs)
    torch.manual_seed(config.seed)
    for model in (models.policy, models.ref):
        texts = []
        for part in in_parts(list(map(encode, asked)), 256, "answers"):
            sampled = generate(model, part, settings["max_new_tokens"], settings["temperature"])
            texts += texts_of(models.tokenizer, *sampled[:2])[1]
        answers.append(texts)
    pairs = [dict(zip(KEYS["pref"], row)) for row in load_rows(data / "pref_train.jsonl", "pref")]
    for prompt, a, b in zip(asked, *answers):
        if a != b:
            row = label(rng, prompt, a, b)
            if not isinstance(row, dict) or any(type(row.get(x)) is not str for x in KEYS["pref"]):
                wanted = f"a dict of texts, {', '.join(KEYS['pref'])}"
                raise UserError(f"--label: should return {wanted}, not {repr(row)[:80]}")
            pairs.append(row)
    copy_files(config.models, "sft.pt", out)  # train_rm.py wants it there
    copy_files(data, "pr*_*.jsonl", out / "data")
    write_jsonl(out / "data/pref_train.jsonl", pairs)
    print(f"{out}/data: {len(pairs):,} pairs")


if __name__ == "__main__":
    run_script(main)
