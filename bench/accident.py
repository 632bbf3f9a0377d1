"""Why does the KL jump? The accident that RESULTS.md tells of, made to happen and taken apart.

    python -m bench.accident --models out/results/models/4 --seed 4     some minutes

PPO runs with the settings under which the accident happened (FLAGS). The policy is compared with
the reference on answers that the reference wrote: the tenth with the lowest scores, which PPO soon
hardly ever writes, and the tenth with the highest. Then the updates of the iterations that did most
harm are made again, each time without a part: whose gradient was it? Writes bench/results.json.
"""

import copy
import sys
from dataclasses import replace

import torch

import minippo
import train_ppo
from bench import parser
from bench.tables import ROOT, keep
from plumbing.errors import run_script
from plumbing.fast import generate

FLAGS = {"vf_coef": 0.5, "lr": 6e-4, "steps": 400, "head_lr": 1, "adam_eps": 1e-8}
STOP, WORST = 100, 3  # iterations; how many of them are made again
ASTRAY = 50  # nats of KL
CURES = {
    "nothing": {},
    "the value loss counts less": {"vf_coef": 0.1},
    "the value head learns faster": {"head_lr": 30},
    "Adam's epsilon": {"adam_eps": 1e-4},
    "the last two": {"head_lr": 30, "adam_eps": 1e-4},
}
PARTS = (
    "after it",
    "without the value loss",
    "without the policy loss",
    "without the response with the largest KL",
    "without what came before, in Adam's averages",
)


class Stopped(Exception):
    pass


class Watch:
    """In place of ppo_iteration: the same, and after each iteration the distance between policy and
    reference on both kinds of answers, and what is needed to make its update again."""

    def __init__(self):
        self.rows, self.before, self.probes = [], [], None

    def __call__(self, policy, ref, score, prompts, optimizer, config, *rest, **more):
        if self.probes is None:
            state = torch.get_rng_state()
            tokens, mask, *_ = generate(ref, prompts * 8, config.max_new_tokens)
            torch.set_rng_state(state)
            order, tenth = score(tokens, mask).argsort(), len(tokens) // 10
            ends = {"low": order[:tenth], "high": order[-tenth:]}
            self.probes = {kind: (tokens[rows], mask[rows]) for kind, rows in ends.items()}
        before = copy.deepcopy([policy.state_dict(), optimizer.state_dict()])
        models = policy, ref, score
        batch, metrics = minippo.ppo_iteration(*models, prompts, optimizer, config, *rest, **more)
        kl = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
        row = {"kl": metrics["kl"], "longest": kl.max().item()}
        self.rows += [row | {kind: distance(policy, ref, *x) for kind, x in self.probes.items()}]
        self.before += [(*before, batch, kl.argmax().item())]
        self.models = policy, ref, optimizer, config
        if len(self.rows) == STOP:
            raise Stopped
        return batch, metrics

    def update_once_more(self, i, part):
        """The update of iteration i, without a part of it -> the distance on the low answers."""
        policy, ref, optimizer, config = self.models
        weights, averages, batch, astray = self.before[i]
        policy.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(averages))  # and its learning rates
        if part == "without the value loss":
            config = replace(config, vf_coef=0.0)
        elif part == "without the policy loss":
            batch = batch | {"whitened": torch.zeros_like(batch["whitened"])}
        elif part == "without the response with the largest KL":
            batch = {name: torch.cat([x[:astray], x[astray + 1 :]]) for name, x in batch.items()}
        elif part == "without what came before, in Adam's averages":
            optimizer.state.clear()
        torch.manual_seed(0)
        minippo.ppo_update(policy, optimizer, batch, config)
        return distance(policy, ref, *self.probes["low"])


@torch.no_grad()
def distance(policy, ref, tokens, mask):
    """KL(policy || ref) of the next token, exact over the vocabulary, in nats: the mean over the
    actions of these rows."""
    p, q = (m.lm_head(m.hidden(tokens[:, :-1])[0][mask]).log_softmax(-1) for m in (policy, ref))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def watched(models, seed, changes):
    """-> the Watch of a run of STOP iterations."""
    watch = train_ppo.ppo_iteration = Watch()
    out = ROOT / "out" / "accident" / ("_".join(changes) or "unchanged")
    sys.argv = ["train_ppo.py", "--models", models, "--out", str(out), "--seed", str(seed)]
    for name, value in {**FLAGS, **changes}.items():
        sys.argv += [f"--{name}", str(value)]
    sys.argv += ["--overwrite"]
    try:
        train_ppo.main()
    except Stopped:
        return watch


def main():
    flags = parser(__doc__)
    flags.add_argument("--models", required=True, metavar="FOLDER")
    flags.add_argument("--seed", type=int, default=4)
    args = flags.parse_args()
    cures = {}
    for name, changes in CURES.items():
        watch = watched(args.models, args.seed, changes)
        astray = sum(row["longest"] > ASTRAY for row in watch.rows)
        cures[name] = {"flags": changes, "astray": astray, "low": watch.rows[-1]["low"]}
        if not changes:
            first = watch
    low = [row["low"] for row in first.rows]
    worst = sorted(range(1, STOP), key=lambda i: low[i - 1] - low[i])[:WORST]
    again = {
        i + 1: {"before it": low[i - 1]} | {part: first.update_once_more(i, part) for part in PARTS}
        for i in worst
    }
    rows = {i: first.rows[i - 1] for i in range(10, STOP + 1, 10)}
    keep({"accident": rows, "again": again, "cures": cures})


if __name__ == "__main__":
    run_script(main)
