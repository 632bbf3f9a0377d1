"""Trains and evaluates the rows of a table of RESULTS.md, and keeps the numbers in results.jsonl.

    python -m bench.run seeds 0 1 2        all three stages for each seed
    python -m bench.run settings 0 1 2     PPO with other settings, from these models
    python -m bench.fill                   then: the tables of RESULTS.md

An interrupted command goes on where it was stopped. Set OMP_NUM_THREADS=1 and run two commands side
by side, in two checkouts, to use two cores.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from data.rows import UserError
from plumbing.settings import run_script

RESULTS = Path(__file__).with_name("results.jsonl")
OUT = Path("out/bench")
COLUMNS = "judge", "score", "optimality", "kl", "distinct"
PPO = ["train_ppo.py"]
# Of each table: {row: command of stage 3}
TABLES = {
    "seeds": {"PPO": PPO},
    "settings": {
        "default": PPO,
        "lam = 0": [*PPO, "--lam", "0"],
        "lam = 0.95": [*PPO, "--lam", "0.95"],
        "gamma = 0.95": [*PPO, "--gamma", "0.95"],
        "beta = 0": [*PPO, "--kl_coef", "0"],
        "beta = 0.03": [*PPO, "--kl_coef", "0.03"],
        "beta = 0.3": [*PPO, "--kl_coef", "0.3"],
        "no value function": [*PPO, "--vf_coef", "0"],
        "four passes": [*PPO, "--epochs", "4"],
        "four passes, half the rate": [*PPO, "--epochs", "4", "--lr", "4e-4"],
        "four passes, no clip": [*PPO, "--epochs", "4", "--clip_eps", "inf", "--value_clip", "inf"],
    },
    "algorithms": {
        "PPO": PPO,
        "separate critic": ["-m", "variations.separate_critic", "--minibatches", "8"],
        "KL penalty to the old policy": ["-m", "variations.ppo_penalty", "--lr", "4e-4"],
        "REINFORCE": ["-m", "variations.reinforce", "--lr", "4e-4"],
        "REINFORCE, baseline": ["-m", "variations.reinforce", "--baseline"],
        "RLOO": ["-m", "variations.rloo", "--group_size", "8"],
        "GRPO": ["-m", "variations.grpo", "--group_size", "8", "--lr", "4e-4"],
        "DPO": ["-m", "variations.dpo"],
        "IPO": ["-m", "variations.dpo", "--ipo", "--kl_coef", "0.06"],
    },
    "sums": {
        "PPO": [*PPO, "--reward", "examples.sums:score"],
        "RLOO": ["-m", "variations.rloo", "--group_size", "8", "--reward", "examples.sums:score"],
        "GRPO": ["-m", "variations.grpo", "--group_size", "8", "--reward", "examples.sums:score"],
    },
}


def python(*words):
    subprocess.run([sys.executable, *map(str, words)], check=True)


def commit():
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def rows_of(table, label, report):
    """{name of the row: what evaluate.py found}"""
    rows = {}
    if table in ("seeds", "sums"):
        rows["SFT"] = report["sft"]
    if table == "seeds":
        for n in ("4", "16", "64"):
            rows[f"best of {n}"] = report["best_of_n"][n]
    rows[label] = report["policy"]
    if table == "seeds":
        rows[f"{label}, unseen prompts"] = report["unseen"]
    return rows


def read_results():
    """A dict for each row of a table and each seed."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def train_earlier_stages(table, seed):
    """-> the folder of the models that stage 3 starts from, and that of its data."""
    common = ["--seed", seed, "--resume"]
    if table == "sums":
        data, models = Path("data/sums"), OUT / f"sums{seed}"
        if not data.exists():
            python("-m", "examples.sums")
        shape = ["--vocab_size", 270, "--steps", 1500, "--lr", "1e-3"]
        python("train_sft.py", *common, "--data", data, "--out", models, *shape)
        return data, models
    data, models = Path("data/zoo"), OUT / f"seed{seed}"
    for script in ("train_sft.py", "train_rm.py"):
        python(script, *common, "--out", models)
    return data, models


@dataclass
class Config:
    words: list = field(default_factory=list)  # a table and its seeds


def main(config):
    name, *seeds = config.words or [""]
    if name not in TABLES or not all(seed.isdecimal() for seed in seeds):
        raise UserError(f"give one of {', '.join(TABLES)}, and seeds")
    for seed in map(int, seeds):
        data, models = train_earlier_stages(name, seed)
        for label, command in TABLES[name].items():
            here = {"table": name, "row": label, "seed": seed}
            if any(here.items() <= result.items() for result in read_results()):
                continue  # measured before
            out = models / name / label.replace(" ", "_")
            places = ["--data", data, "--models", models, "--out", out]
            python(*command, *places, "--seed", seed, "--resume")
            python("evaluate.py", out, "--kl_coef", 0.1)  # one beta in all rows
            report = json.loads((out / "report.json").read_text())
            for row, summary in rows_of(name, label, report).items():
                if any({**here, "row": row}.items() <= x.items() for x in read_results()):
                    continue  # SFT, which all rows begin as
                numbers = {x: round(summary[x], 4) for x in COLUMNS if x in summary}
                result = {**here, "row": row, "commit": commit(), **numbers}
                with open(RESULTS, "a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
