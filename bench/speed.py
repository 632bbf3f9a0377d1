"""How many times as long does TRL take for an iteration of PPO, in one run, in float32?

    python -m bench.speed    after pip install trl==1.12.0 and make run; some minutes

Ours is timed in turn with theirs. The factors go into bench/results.json.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import minippo
from bench.tables import ROOT, provenance, store
from bench.trl_ppo import make_trainer
from minippo import GPT, GPTConfig, PPOConfig, RewardModel
from plumbing.hf import export
from plumbing.models import load_checkpoint, save_checkpoint
from plumbing.run import adam
from plumbing.settings import read_flags, script
from plumbing.text import Tokenizer, read_prompts

# Vocabulary, context, layers, heads, channels; responses, longest prompt, new tokens
SIZES = {
    "default": None,  # what is in out/
    "small": (1024, 128, 4, 4, 128, 64, 24, 48),
    "medium": (4096, 256, 6, 6, 384, 32, 48, 64),
}


def workload(size):
    """-> policy, reward model, tokenizer, prompts, settings."""
    torch.manual_seed(0)
    if size is None:
        policy, tokenizer, _ = load_checkpoint(ROOT / "out" / "sft.pt", ["sft"])
        reward_model, _, _ = load_checkpoint(ROOT / "out" / "rm.pt", ["rm"])
        data, context = ROOT / "data" / "zoo", policy.config.context
        prompts = read_prompts(data, "train", tokenizer, context)[:128]
        return policy, reward_model, tokenizer, prompts, PPOConfig()
    *shape, count, longest, new = size
    policy = GPT(GPTConfig(*shape)).eval()
    eos = policy.config.eos
    with torch.no_grad():  # the end token has a logit of -100: no response ends early
        policy.trunk.norm.weight[0], policy.trunk.norm.bias[0] = 0, 1
        policy.lm_head.weight[eos, 0] = -100
    letters = [bytes([b]) for b in range(256)]
    tokens = [*letters, *(a + b for a in letters for b in letters)]
    tokenizer = Tokenizer(tokens[:eos])
    lengths = torch.randint(longest // 3, longest + 1, (count,)).tolist()
    prompts = [torch.randint(eos, (n,)).tolist() for n in lengths]
    config = PPOConfig(max_new_tokens=new, epochs=4, minibatches=4)
    return policy, RewardModel(policy), tokenizer, prompts, config


def ratio(size):
    """How many times as long theirs takes: a median of five, after one that does not count."""
    policy, reward_model, tokenizer, prompts, config = workload(size)
    run = SimpleNamespace(**vars(config), steps=6, batch_size=len(prompts), lr=1e-6, warmup=0)
    run.adam_eps, run.device, run.seed = 1e-8, "cpu", 0
    (optimizer, _), ref, times = adam(policy, run), minippo.frozen_copy(policy), []

    def score(tokens, mask):
        return reward_model(tokens, minippo.row_lengths(mask))

    @torch.enable_grad()  # TRL calls it under no_grad()
    def iteration():  # in each of theirs
        times.append(time.perf_counter())
        batch = minippo.rollout(policy, ref, score, prompts, config)
        batch |= minippo.compute_advantages(batch, config)
        minippo.ppo_update(policy, optimizer, batch, config)
        times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        run.out = Path(folder)
        for kind, model in (("sft", policy), ("rm", reward_model)):
            save_checkpoint(run.out / f"{kind}.pt", kind, model, tokenizer)
            export(run.out / f"{kind}.pt", run.out / kind)
        make_trainer(run, prompts, iteration)[0].train()
    seconds = [b - a for a, b in itertools.pairwise(times)]  # begins with ours
    return statistics.median(a / b for a, b in zip(seconds[1::2], seconds[2::2]))


@script
def main():
    read_flags(__doc__, run=False)
    factors = {name: ratio(size) for name, size in SIZES.items()}
    store({"speed": {"TRL, times as long": factors}}, provenance())


if __name__ == "__main__":
    main()
