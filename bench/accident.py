"""The accident that RESULTS.md tells of, made to happen more often, and what helps.

    python -m bench.accident      half an hour with two cores; flags as of bench.results

In some runs the KL of a response jumps by tens of nats. PPO runs on three seeds with settings
under which it does so often, then with those of the default that help, and with a little of the SFT
loss. At the end: how far is the policy from the reference, on answers that the reference wrote? On
the tenth with the lowest scores, which PPO soon hardly ever writes, and on that with the highest.
"""

import torch

from bench.results import DATA, MODELS, RUNS, Lab, jumps, over_seeds
from minippo import PPOConfig, generate
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, prepare, read_flags
from plumbing.models import load_models
from plumbing.rows import read_prompts

RISKY = "--lr 6e-4 --vf_coef 0.5 --head_lr_factor 1 --adam_eps 1e-8"
CURES = {
    "nothing": "",
    "the value loss weighs less": "--vf_coef 0.1",
    "the value head learns faster": "--head_lr_factor 30",
    "Adam's epsilon is larger": "--adam_eps 1e-4",
    "all three, as by default": "--vf_coef 0.1 --head_lr_factor 30 --adam_eps 1e-4",
    "a little SFT loss": "--algorithm ppo_ptx --ptx_coef 0.02",
}


@torch.no_grad()
def distance(policy, ref, tokens, mask):
    """KL(policy || ref) of the next token, exact over the vocabulary, in nats: the mean over the
    actions of these rows."""
    p, q = (m.lm_head(m.hidden(tokens[:, :-1], mask)[0]).log_softmax(-1) for m in (policy, ref))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@torch.no_grad()
def distances(policy, ref, score, prompts):
    """On the tenth of the reference's answers with the lowest scores, and with the highest."""
    tokens, mask, *_ = generate(ref, prompts, PPOConfig.max_new_tokens)
    order, tenth = score(tokens, mask).argsort(), len(tokens) // 10
    ends = {"low": order[:tenth], "high": order[-tenth:]}
    return {kind: distance(policy, ref, tokens[rows], mask[rows]) for kind, rows in ends.items()}


FIGURES = {
    "jumps of the KL": "jumps",
    "KL on answers of low scores, nats per token": "low",
    "of high scores": "high",
    "optimality": "optimality",
}


def figures_of(job, folder):
    models, policy = load_models(folder, "cpu"), load_checkpoint(job.out / "ppo.pt", ["ppo"])[0]
    prompts = read_prompts(DATA, "train", models.tokenizer, policy.config.context)
    torch.manual_seed(0)
    found = distances(policy, models.ref, models.score, prompts)
    kl = [row["kl"] for row in job.log()]
    return found | {"jumps": jumps(kl), "optimality": job.report()["ppo"]["optimality"]}


def main():
    (lab,), rows = read_flags(__doc__, Lab()), {}
    prepare(RunConfig(device="cpu", out=RUNS))
    words = {f"accident, {name}": f"train_ppo.py {RISKY} {x}" for name, x in CURES.items()}
    for runs, (name, flags) in zip(lab.train(words, 3).values(), CURES.items()):
        figures = [figures_of(x, MODELS / str(seed)) for seed, x in enumerate(runs)]
        rows[name] = {"flags": flags, **over_seeds(figures, FIGURES), "made": runs[0].made()}
    lab.keep({"accident": rows})


if __name__ == "__main__":
    run_script(main)
