"""When does a value function pay? The task of `python minippo.py` with up to 32 sampled letters.

    python -m bench.critic      ten seeds, batches of 4 to 64 responses, a quarter of an hour

A figure is score - beta * KL of 1,024 new responses after 200 iterations. The table goes into
RESULTS.md.
"""

from concurrent.futures import ProcessPoolExecutor
from itertools import product

import torch

from bench.tables import mean_and_error, provenance, store
from minippo import GPT, LETTERS, GPTConfig, PPOConfig, batch_metrics, center_values
from minippo import compute_advantages, frozen_copy, ppo_update, rollout, turns_score
from plumbing.settings import read_flags, script

SEEDS, BATCHES, ITERATIONS, LR = range(10), (4, 8, 16, 64), 200, 3e-3
ROWS = {
    "values": {},
    "values, lam = 0.95": {"lam": 0.95},
    "no values": {"vf_coef": 0.0},  # they stay at the mean score
}


def objective(job):
    """(settings, batch size, seed) -> score - beta * KL at the end."""
    settings, size, seed = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = PPOConfig(max_new_tokens=32, **settings)
    policy = GPT(GPTConfig(len(LETTERS), context=40, layers=2, channels=32)).eval()
    ref, optimizer = frozen_copy(policy), torch.optim.Adam(policy.parameters(), LR)
    prompts = [[letter] for letter in range(26)]
    center_values(policy, rollout(policy, ref, turns_score, prompts, config))
    for step in range(ITERATIONS):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / ITERATIONS)
        batch = rollout(policy, ref, turns_score, torch.randint(26, (size, 1)).tolist(), config)
        batch |= compute_advantages(batch, config)
        ppo_update(policy, optimizer, batch, config)
    batch = rollout(policy, ref, turns_score, torch.randint(26, (1024, 1)).tolist(), config)
    return batch_metrics(batch, config)["rlhf_reward"]


@script
def main():
    read_flags(__doc__, run=False)
    rows = {name: {} for name in ROWS}
    with ProcessPoolExecutor() as pool:
        for name, size in product(ROWS, BATCHES):
            numbers = pool.map(objective, [(ROWS[name], size, seed) for seed in SEEDS])
            rows[name][f"batches of {size}"] = mean_and_error([*numbers])
    store({"critic": rows}, provenance())


if __name__ == "__main__":
    main()
