"""Trains and evaluates the rows of a table of RESULTS.md, and keeps the reports in results.json.

    python -m bench.run seeds --seeds 0 1 2        all three stages for each seed
    python -m bench.run settings --seeds 0 1 2     PPO with other settings, from these models
    python -m bench.fill                           then: the tables of RESULTS.md

An interrupted command goes on where it was stopped. Set OMP_NUM_THREADS=1 and run two commands side
by side, in two checkouts, to use two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")
OUT = Path("out/bench")
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    for seed in options.seeds:
        data, models = train_earlier_stages(options.table, seed)
        for row, command in TABLES[options.table].items():
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            if str(seed) in results.get(options.table, {}).get(row, {}):
                continue  # measured before
            out = models / options.table / row.replace(" ", "_")
            places = ["--data", data, "--models", models, "--out", out]
            python(*command, *places, "--seed", seed, "--resume")
            python("evaluate.py", out, "--models", models, "--kl_coef", 0.1)
            report = json.loads((out / "report.json").read_text())
            kept = {name: report.get(name) for name in ("sft", "policy", "unseen", "best_of_n")}
            kept["commit"] = commit()
            results.setdefault(options.table, {}).setdefault(row, {})[str(seed)] = kept
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
