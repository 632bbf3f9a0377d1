"""Iterated RLHF: the judge labels what PPO writes, the reward model learns from it, PPO runs again.

    python -m variations.iterate                        after train_sft.py and train_rm.py
    python -m variations.iterate --ppo "--kl_coef 0"    where nothing but the labels holds PPO back

A reward model is right near the text of its pairs, and PPO moves away from that text. So the judge,
which labelled the default data, labels new pairs (Christiano et al., arXiv:1706.03741, section 2.2;
Bai et al., arXiv:2204.05862, section 4.5). A round has a folder: in out/iterate/2, ppo.pt is
trained on the scores of out/iterate/1/rm.pt. data/ holds all pairs so far and new ones, an answer
of ppo.pt and one of sft.pt: P(a is chosen) = sigmoid(judge(a) - judge(b)). rm.pt learns from data/.
"""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from data.zoo import PROMPTS, label
from minippo import PPOConfig
from plumbing import fast
from plumbing.checkpoints import load_checkpoint, read_contents
from plumbing.errors import UserError, run_script
from plumbing.report import respond
from plumbing.rows import load_jsonl
from plumbing.settings import RunConfig, read_flags
from variations import ROOT, copy_files, run_python


@dataclass
class IterateConfig:
    data: str = RunConfig.data  # folder of the default data
    models: str = "out"  # folder of sft.pt and of the first rm.pt
    out: str = "out/iterate"  # folder for the rounds; where they were interrupted, they go on
    rounds: int = 3  # times that PPO runs, each but the first with a new reward model [1, inf]
    pairs: int = 8000  # new pairs in a round, less those of two equal answers [1, inf]
    seed: int = 0  # seed of everything random [0, 2147483648]
    ppo: str = ""  # more flags for train_ppo.py, in quotes; a single word as --ppo=--no_report


def main():
    (config,) = read_flags(__doc__, IterateConfig())
    fast.install()
    models, data = config.models, Path(config.data)
    prompts = [prompt for (prompt,) in load_jsonl(data / "prompts_train.jsonl", ["prompt"])]
    for prompt in prompts:
        if prompt not in PROMPTS:
            raise UserError(
                f"--data {data}: the judge, which labels, does not know {prompt[:40]!r}"
            )
    for number in range(1, config.rounds + 1):
        out = Path(config.out) / str(number)
        flags = "--out", out, "--seed", config.seed, "--resume", "--data"
        ppo_flags = *flags, config.data, "--models", models, *config.ppo.split()
        run_python(ROOT / "train_ppo.py", *ppo_flags)
        if number < config.rounds:
            copy_files(config.models, "sft.pt", out)
            if not (out / "data").exists():
                half_written = out / "half_written"
                shutil.rmtree(half_written, ignore_errors=True)  # of a run that was stopped
                copy_files(data, "pr*.jsonl", half_written)  # pairs and prompts
                rows = map(json.dumps, new_pairs(out, prompts, config.pairs, config.seed + number))
                with open(half_written / "pref_train.jsonl", "a") as file:
                    print("", *rows, sep="\n", file=file)  # "": the last line may have no end
                half_written.rename(out / "data")
            models, data = out, out / "data"
            longest = "--max_new_tokens", settings_of_ppo(out)["max_new_tokens"]
            run_python(ROOT / "train_rm.py", *flags, data, *longest)


def new_pairs(out, prompts, count, seed):
    """-> rows like those of pref_train.jsonl: what ppo.pt and sft.pt answer, where they differ."""
    rng, answers = random.Random(seed), []
    asked = rng.choices(prompts, k=count)
    settings = settings_of_ppo(out)
    config = PPOConfig(settings["max_new_tokens"], settings["temperature"])
    torch.manual_seed(seed)
    for kind in ("ppo", "sft"):
        model, tokenizer, _ = load_checkpoint(out / f"{kind}.pt", [kind], RunConfig().device)
        ids = [tokenizer.encode(prompt) for prompt in asked]
        _, texts = respond(model, model, no_score, ids, 1, tokenizer, config)
        answers.append(texts)
    return [label(rng, prompt, a, b) for prompt, a, b in zip(asked, *answers) if a != b]


def settings_of_ppo(out):
    return read_contents(out / "ppo_state.pt", ["state"])["settings"]


def no_score(tokens, mask):
    return torch.zeros(len(tokens), device=tokens.device)


if __name__ == "__main__":
    run_script(main)
