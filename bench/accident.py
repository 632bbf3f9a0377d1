"""Why does the KL jump? The accident that RESULTS.md tells of, made to happen and taken apart.

    python -m bench.accident --models out/results/models/4 --seed 4      some minutes; writes bench/results.json

PPO runs with the settings under which the accident happened (FLAGS). The policy is compared with the reference on answers that the
reference wrote: the tenth with the lowest scores, which PPO soon hardly ever writes, and the tenth with the highest. Then the
updates of the iterations that did most harm are made again, each time without a part: whose gradient was it?
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import torch

import minippo
import train_ppo
from minippo import ppo_update
from plumbing.fast import generate
from plumbing.settings import run_script

ROOT = Path(__file__).parents[1]
FLAGS = {"vf_coef": 0.5, "lr": 6e-4, "steps": 400, "head_lr": 1, "adam_eps": 1e-8}
STOP, WORST = 100, 3  # iterations; how many of them are made again
CURES = {  # what is changed: the flags
    "nothing": {}, "the value loss counts less": {"vf_coef": 0.1}, "the value head learns faster": {"head_lr": 30},
    "Adam's epsilon": {"adam_eps": 1e-4}, "the last two": {"head_lr": 30, "adam_eps": 1e-4},
}  # fmt: skip


class Stopped(Exception):
    pass


class Watch:
    """In place of ppo_iteration: the same, and after each iteration the distance between policy and reference on both kinds of
    answers, and what is needed to make its update again."""

    def __init__(self):
        self.rows, self.before, self.probes = [], [], None

    def __call__(self, policy, ref, score, prompts, optimizer, config, *rest):
        if self.probes is None:
            self.probes = {"low": None, "high": None}
            state = torch.get_rng_state()
            tokens, mask, *_ = generate(ref, prompts * 8, config.max_new_tokens)
            order = score(tokens, mask).argsort()
            torch.set_rng_state(state)
            tenth = len(order) // 10
            self.probes = {kind: (tokens[i], mask[i]) for kind, i in (("low", order[:tenth]), ("high", order[-tenth:]))}
        before = copy.deepcopy([policy.state_dict(), optimizer.state_dict()])
        batch, metrics = minippo.ppo_iteration(policy, ref, score, prompts, optimizer, config, *rest)
        kl = minippo.kl_per_response(batch["logprobs"], batch["ref_logprobs"], batch["mask"])[0]
        far = {kind: distance(policy, ref, *x) for kind, x in self.probes.items()}
        self.rows += [{"kl": metrics["kl"], "value_loss": metrics["value_loss"], "longest": kl.max().item(), **far}]
        self.before += [(*before, {name: x.clone() for name, x in batch.items()}, kl.argmax().item())]
        self.last = policy, ref, optimizer, config
        if len(self.rows) == STOP:
            raise Stopped
        return batch, metrics

    def again(self, i, without=""):
        """The update of iteration i again, without a part of it -> the distance on the answers with low scores."""
        policy, ref, optimizer, config = self.last
        weights, moments, batch, astray = self.before[i]
        policy.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(moments))
        lr = config.lr * (1 - i / config.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if without == "what came before, in Adam's averages":
            optimizer.state.clear()
        if without == "the response with the largest KL":
            batch = {name: torch.cat([x[:astray], x[astray + 1 :]]) for name, x in batch.items()}
        if without == "the policy loss":
            batch = batch | {"advantages": torch.zeros_like(batch["advantages"])}
        changes = {"vf_coef": 0.0} if without == "the value loss" else {}
        torch.manual_seed(0)
        ppo_update(policy, optimizer, batch, type(config)(**vars(config) | changes))
        return distance(policy, ref, *self.probes["low"])


PARTS = ("", "the value loss", "the policy loss", "the response with the largest KL", "what came before, in Adam's averages")


@torch.no_grad()
def distance(policy, ref, tokens, mask):
    """KL(policy || ref) of the next token, exact over the vocabulary, on the mean over the actions of these rows, in nats."""
    logs = [model.lm_head(model.hidden(tokens[:, :-1], mask)[0][mask]).log_softmax(-1) for model in (policy, ref)]
    return (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()


def watched(models, seed, changes):
    """-> the Watch of a run of STOP iterations."""
    watch = train_ppo.ppo_iteration = Watch()
    out = ROOT / "out" / "accident" / ("_".join(changes) or "unchanged")
    sys.argv = ["train_ppo.py", "--models", models, "--out", str(out), "--seed", str(seed), "--overwrite"]
    sys.argv += [word for name, value in {**FLAGS, **changes}.items() for word in (f"--{name}", str(value))]
    try:
        train_ppo.main()
    except Stopped:
        return watch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=4)
    args = parser.parse_args()
    watch = watched(args.models, args.seed, {})
    out = {"flags": FLAGS, "seed": args.seed, "rows": watch.rows, "again": []}
    low = [row["low"] for row in watch.rows]
    for i in sorted(range(1, STOP), key=lambda i: low[i] - low[i - 1])[-WORST:][::-1]:
        out["again"] += [{"iteration": i + 1, "before": low[i - 1], "after": {part: watch.again(i, part) for part in PARTS}}]
        print(json.dumps(out["again"][-1]))
    out["cures"] = {}
    for name, changes in CURES.items():
        rows = watched(args.models, args.seed, changes).rows if changes else watch.rows
        out["cures"][name] = jumps(rows) | {"flags": changes}
    print(json.dumps(out["cures"], indent=1))
    path = ROOT / "bench" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"accident": out}, indent=1) + "\n")


def jumps(rows):
    """How often a response went astray (see plumbing/watch.py), and how far the policy is at the end."""
    return {"astray": sum(row["longest"] > 50 for row in rows), "low": rows[-1]["low"], "high": rows[-1]["high"]}


if __name__ == "__main__":
    run_script(main)
