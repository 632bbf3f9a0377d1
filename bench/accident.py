"""Why does the KL jump? The accident that RESULTS.md tells of, made to happen.

    python -m bench.accident --models out/results/models/4 --seed 4     some minutes

PPO runs with the settings under which the accident happened (FLAGS). The policy is compared with
the reference on answers that the reference wrote: the tenth with the lowest scores, which PPO soon
hardly ever writes, and the tenth with the highest. The same is done with settings that may help.
Writes bench/results.json.
"""

import sys

import torch

import minippo
import train_ppo
from bench import parser
from bench.tables import ROOT, keep
from plumbing.errors import run_script
from plumbing.fast import generate

FLAGS = {"vf_coef": 0.5, "lr": 6e-4, "steps": 400, "head_lr": 1, "adam_eps": 1e-8}
STOP = 100  # iterations
ASTRAY = 50  # nats of KL
CURES = {
    "nothing": {},
    "the value loss counts less": {"vf_coef": 0.1},
    "the value head learns faster": {"head_lr": 30},
    "Adam's epsilon": {"adam_eps": 1e-4},
    "the last two": {"head_lr": 30, "adam_eps": 1e-4},
}


class Stopped(Exception):
    pass


class Watch:
    """In place of ppo_iteration: the same, and after each iteration the distance between policy and
    reference on both kinds of answers."""

    def __init__(self):
        self.rows, self.probes = [], None

    def __call__(self, policy, ref, score, prompts, optimizer, config, *rest, **more):
        if self.probes is None:
            state = torch.get_rng_state()
            tokens, mask, *_ = generate(ref, prompts * 8, config.max_new_tokens)
            torch.set_rng_state(state)
            order, tenth = score(tokens, mask).argsort(), len(tokens) // 10
            ends = {"low": order[:tenth], "high": order[-tenth:]}
            self.probes = {kind: (tokens[rows], mask[rows]) for kind, rows in ends.items()}
        models = policy, ref, score
        batch, metrics = minippo.ppo_iteration(*models, prompts, optimizer, config, *rest, **more)
        kl = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
        row = {"kl": metrics["kl"], "longest": kl.max().item()}
        self.rows += [row | {kind: distance(policy, ref, *x) for kind, x in self.probes.items()}]
        if len(self.rows) == STOP:
            raise Stopped
        return batch, metrics


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
            rows = {i: watch.rows[i - 1] for i in range(10, STOP + 1, 10)}
    keep({"accident": rows, "cures": cures})


if __name__ == "__main__":
    run_script(main)
