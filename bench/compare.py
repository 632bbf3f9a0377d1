"""Trains with other settings and algorithms on the same models, and prints a table of RESULTS.md.

    python -m bench.seeds 1 2 3       first: it makes the models, in out/seeds
    python -m bench.compare 1 2 3

All policies are compared at the beta of PPO, 0.1. An interrupted command goes on where it was
stopped: remove out/compare when the code has changed.
"""

import json
import sys
from pathlib import Path

from bench.seeds import python, table

COMMANDS = {
    "PPO": "train_ppo.py --steps 200",
    "beta = 0": "train_ppo.py --steps 200 --kl_coef 0",
    "beta = 0.03": "train_ppo.py --steps 200 --kl_coef 0.03",
    "beta = 0.3": "train_ppo.py --steps 200 --kl_coef 0.3",
    "gamma = 0.95": "train_ppo.py --steps 200 --gamma 0.95",
    "lam = 0.95": "train_ppo.py --steps 200 --lam 0.95",
    "lam = 0": "train_ppo.py --steps 200 --lam 0",
    "no value function": "train_ppo.py --steps 200 --vf_coef 0",
    "four passes, no value clip": "train_ppo.py --steps 200 --epochs 4 --value_clip inf",
    "four passes, no clip": "train_ppo.py --steps 200 --epochs 4 --value_clip inf --clip_eps inf",
    # The flags of these were found on seed 0.
    "RLOO": "-m variations.rloo --steps 200 --group_size 8",
    "GRPO": "-m variations.grpo --steps 200 --group_size 8 --lr 4e-4 --kl_coef 0.2",
}


def train_and_evaluate(name, seed):
    """-> what evaluate.py found of the policy."""
    out = Path("out/compare", name, seed)
    if not (out / "report.json").exists():
        flags = "--seed", seed, "--models", f"out/seeds/{seed}", "--out", str(out), "--resume"
        python(*COMMANDS[name].split(), *flags)
        python("evaluate.py", str(out), "--kl_coef", "0.1")
    return json.loads((out / "report.json").read_text())["policy"]


def main(*seeds):
    rows = {}
    for name in COMMANDS:
        rows[name] = [train_and_evaluate(name, seed) for seed in seeds]
    print(table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
