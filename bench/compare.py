"""Trains with other settings and algorithms on the same models, and prints a table of RESULTS.md.

    python -m bench.seeds 1 2 3       first: it makes the models, in out/seeds
    python -m bench.compare 1 2 3

All policies are trained for 200 iterations, and compared at the beta of PPO, 0.1. An interrupted
command goes on where it was stopped: remove out/compare when the code has changed.
"""

import json
import sys
from pathlib import Path

from bench.seeds import python, table

COMMANDS = {  # the flags of RLOO and GRPO were found on seed 0
    "PPO": "train_ppo.py",
    "lam = 0.95": "train_ppo.py --lam 0.95",
    "lam = 0": "train_ppo.py --lam 0",
    "no value function": "train_ppo.py --vf_coef 0",
    "RLOO": "-m variations.rloo --group_size 8",
    "GRPO": "-m variations.grpo --group_size 8 --lr 4e-4",
}


def train_and_evaluate(words, seed):
    """-> what evaluate.py found of the policy."""
    out = Path("out/compare", "".join(words), seed)
    if not (out / "report.json").exists():
        flags = "--steps", "200", "--seed", seed, "--models", f"out/seeds/{seed}"
        python(*words, *flags, "--out", str(out), "--resume")
        python("evaluate.py", str(out), "--kl_coef", "0.1")
    return json.loads((out / "report.json").read_text())["policy"]


def main(*seeds):
    rows = {}
    for name, command in COMMANDS.items():
        rows[name] = [train_and_evaluate(command.split(), seed) for seed in seeds]
    print(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
