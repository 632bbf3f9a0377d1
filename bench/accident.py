"""Why does the KL jump? The accident that RESULTS.md tells of, made to happen, and replayed.

    python -m bench.accident      after python -m bench.results seeds; an hour on two cores

PPO runs on five seeds with the settings under which the accident happens (FLAGS), and with settings
that may help. The policy is compared with the reference on answers that the reference wrote: the
tenth with the lowest scores, which PPO soon hardly ever writes, and the tenth with the highest. The
iteration in which the distance on the first kind rises most is replayed, from the weights, Adam's
averages, the learning rate and the random numbers of that iteration, and then with a part of it
changed. Writes bench/results.json.
"""

import copy
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

import minippo
import train_ppo
from bench import parser
from bench.results import Job, folder, run
from bench.tables import keep, mean_and_error
from plumbing.errors import run_script
from plumbing.fast import generate
from variations import ppo_ptx

FLAGS = "--vf_coef 0.5 --lr 6e-4 --steps 400 --head_lr 1 --adam_eps 1e-8"
SEEDS, STOP = range(5), 200  # iterations
ASTRAY = 50  # nats of KL
CURES = {
    "nothing": "",
    "all three, as by default": "--vf_coef 0.1 --head_lr 30 --adam_eps 1e-4",
    "a little SFT loss": "--ptx_coef 0.02",
}
ORDERS = 16  # other permutations of the batch, in a replay


class Stopped(Exception):
    pass


class Watch:
    """In place of ppo_iteration: the same, and after each iteration the distance between policy and
    reference on both kinds of answers; what is needed to replay the worst iteration is kept."""

    def __init__(self):
        self.rows, self.probes, self.worst = [], None, None

    def __call__(
        self, policy, ref, score, prompts, optimizer, config, kl_coef, rollout, advantages, loss_of
    ):
        if self.probes is None:
            self.probes = probes_of(ref, score, prompts, config)
        before = {}

        def note_and_compute_advantages(batch, config, kl_coef):
            out = advantages(batch, config, kl_coef)
            before.update(batch=batch | out, state=state_of(policy, optimizer))
            return out

        models, functions = (policy, ref, score), (rollout, note_and_compute_advantages, loss_of)
        batch, metrics = minippo.ppo_iteration(
            *models, prompts, optimizer, config, kl_coef, *functions
        )
        kl = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
        row = {"kl": metrics["kl"], "longest": kl.max().item()}
        row |= {kind: distance(policy, ref, *x) for kind, x in self.probes.items()}
        row["rise"] = row["low"] - (self.rows[-1]["low"] if self.rows else 0.0)
        self.rows.append(row)
        if row["rise"] == max(x["rise"] for x in self.rows):
            after = copy.deepcopy(policy.state_dict())
            self.worst = before | {"iteration": len(self.rows), "after": after}
        if len(self.rows) == STOP:
            raise Stopped(policy, ref, optimizer, config, loss_of)
        return batch, metrics


def probes_of(ref, score, prompts, config):
    """{"low", "high"}: tokens and mask of the tenth of the reference's answers with such scores."""
    state = torch.get_rng_state()
    tokens, mask, *_ = generate(ref, prompts * 8, config.max_new_tokens)
    torch.set_rng_state(state)
    order, tenth = score(tokens, mask).argsort(), len(tokens) // 10
    ends = {"low": order[:tenth], "high": order[-tenth:]}
    return {kind: (tokens[rows], mask[rows]) for kind, rows in ends.items()}


@torch.no_grad()
def distance(policy, ref, tokens, mask):
    """KL(policy || ref) of the next token, exact over the vocabulary, in nats: the mean over the
    actions of these rows."""
    p, q = (m.lm_head(m.hidden(tokens[:, :-1])[0][mask]).log_softmax(-1) for m in (policy, ref))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def state_of(policy, optimizer):
    """Weights, Adam's averages and learning rates, random numbers."""
    weights = copy.deepcopy((policy.state_dict(), optimizer.state_dict()))
    return *weights, torch.get_rng_state()


def nothing(config, batch, optimizer):
    pass


def drop_value_loss(config, batch, optimizer):
    config.vf_coef = 0.0


def drop_policy_loss(config, batch, optimizer):
    batch["whitened"].zero_()


def drop_both(*parts):
    drop_value_loss(*parts), drop_policy_loss(*parts)


def empty_averages(config, batch, optimizer):
    for averages in optimizer.state.values():
        averages["exp_avg"].zero_()


def raise_epsilon(config, batch, optimizer):
    for group in optimizer.param_groups:
        group["eps"] = 1e-4


CHANGES = {  # of one iteration
    "another order of the batch": nothing,
    "no value loss": drop_value_loss,
    "no policy loss": drop_policy_loss,
    "neither: Adam's averages alone": drop_both,
    "Adam's average of the gradients emptied": empty_averages,
    "Adam's epsilon 1e-4": raise_epsilon,
}


def replay(worst, policy, ref, optimizer, config, loss_of, probe, change=nothing, order=None):
    """The worst iteration again, with something changed -> the rise of the distance. With another
    order of the batch, if `order` is a seed."""
    weights, averages, random_numbers = worst["state"]
    policy.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(averages))
    batch, config = copy.deepcopy(worst["batch"]), replace(config)
    before = distance(policy, ref, *probe)
    torch.set_rng_state(random_numbers)
    if order is not None:
        torch.manual_seed(order)
    change(config, batch, optimizer)
    minippo.ppo_update(policy, optimizer, batch, config, loss_of)
    return distance(policy, ref, *probe) - before


def one(flags):
    """A run of train_ppo.py or variations/ppo_ptx.py -> accident.json in its --out."""
    sys.argv = ["train_ppo.py", *flags, "--no_report", "--overwrite"]
    watch = train_ppo.ppo_iteration = Watch()
    try:
        (ppo_ptx if "--ptx_coef" in flags else train_ppo).main()
    except Stopped as stopped:
        worst, probe = watch.worst, watch.probes["low"]
        found = {
            "iteration": worst["iteration"],
            "rise": watch.rows[worst["iteration"] - 1]["rise"],
        }
        found["replayed"] = replay(worst, *stopped.args, probe)
        weights = stopped.args[0].state_dict()
        found["same_bits"] = all(x.equal(weights[name]) for name, x in worst["after"].items())
        if "--ptx_coef" not in flags:
            found["changes"] = {
                name: [
                    replay(worst, *stopped.args, probe, change, order) for order in range(ORDERS)
                ]
                for name, change in CHANGES.items()
            }
    out = Path(flags[flags.index("--out") + 1])
    (out / "accident.json").write_text(json.dumps({"rows": watch.rows, "worst": found}))


def main():
    if sys.argv[1:2] == ["one"]:
        return one(sys.argv[2:])
    flags = parser(__doc__)
    flags.add_argument("--workers", type=int, default=2, help="processes at a time")
    args = flags.parse_args()
    jobs = {name: [job_of(name, seed) for seed in SEEDS] for name in CURES}
    run([job for runs in jobs.values() for job in runs], args.workers)
    known = {
        name: [json.loads((job.out / "accident.json").read_text()) for job in runs]
        for name, runs in jobs.items()
    }
    keep({"accidents": accidents(known["nothing"]), "cures": cures(known)})


def accidents(runs):
    """accident.json of each seed -> {what was changed: figures of the rise}. "rise" is a mean over
    the accidents, "spread" its standard deviation over orders of the batch, where that varies."""
    worst = [run["worst"] for run in runs]
    if not all(x["same_bits"] for x in worst):
        raise ArithmeticError("a replay without a change did not end where its run did")
    rows = {"nothing": {"rise": mean_and_error([x["rise"] for x in worst])}}
    for name in CHANGES:
        orders = [x["changes"][name] for x in worst]
        rises = mean_and_error([statistics.fmean(rises) for rises in orders])
        spread = statistics.fmean(map(statistics.stdev, orders))
        rows[name] = {"rise": rises, "spread": spread}
    return rows


def cures(known):
    """{setting: accident.json of each seed} -> {setting: figures}."""
    rows = {}
    for name, runs in known.items():
        astray = [sum(row["longest"] > ASTRAY for row in run["rows"]) for run in runs]
        ends = {kind: [run["rows"][-1][kind] for run in runs] for kind in ("low", "high")}
        rows[name] = {"flags": CURES[name], "astray": mean_and_error(astray)}
        rows[name] |= {kind: mean_and_error(x) for kind, x in ends.items()}
    return rows


def job_of(name, seed):
    words = ["-m", "bench.accident", "one", "--models", folder("models", seed), "--seed", seed]
    words += [*FLAGS.split(), *CURES[name].split()]  # of two that are alike, the last counts
    return Job(folder(f"accident/{name}", seed), words)


if __name__ == "__main__":
    run_script(main)
