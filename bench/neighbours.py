"""PPO and its neighbours (variations/) on the default task, by the same ruler: optimality, judge, score, KL, seconds.

    python -m bench.neighbours --workers 2    runs whatever is missing, then writes bench/results.json, the picture and the tables;
                                              if interrupted, it goes on where it stopped
    python -m bench.neighbours --summary      only the latter, from the runs that are there

Every algorithm starts from the SFT and reward models of bench.results, three seeds of them, and samples as many responses as PPO
does by default (DPO and IPO, which sample nothing, see as many pairs). Before that each gets the same small search, PPO too: three
learning rates times two values of its own main knob, on the first seed, at a quarter of the length. It keeps the setting with the
largest score - beta KL in the last quarter of the log. All runs are in out/results/neighbours, one process with one thread each;
those of TRL, which are two processes each, come one at a time. To begin anew, remove that folder.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench import results as shared
from bench.results import BLUE, FEW_SEEDS, GREY, ORANGE, PURPLE, ROOT, RUNS, cell, over_seeds
from minippo import PPOConfig
from plumbing.checkpoints import load_checkpoint
from plumbing.settings import RunConfig, prepare

PPO, BETA = PPOConfig(), PPOConfig.kl_coef
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2 -m variations.outgrow"


@dataclass
class Algorithm:
    """What is run, and what is tried for it."""

    words: str  # for Python: a script, or -m and a module; and flags
    knob: str  # the flag that is searched besides the learning rate
    values: tuple  # two of them
    colour: str = BLUE  # in the picture
    rates: tuple = (0.5, 1.0, 2.0)  # times the default learning rate

    def settings(self):
        """The six that are tried, as flags."""
        return [f"--lr {rate * PPO.lr:g} --{self.knob} {value:g}" for rate, value in itertools.product(self.rates, self.values)]


SPLITS = (PPO.minibatches, 2 * PPO.minibatches)
GROUPS = (4, 8)
BETAS = (BETA, 3 * BETA)  # where the KL is not in the reward, the same beta is another price: see variations/dpo.py and grpo.py
LOW = (0.15, 0.5, 1.5)  # DPO's learning rates, lower because the pairs never change
ALGORITHMS = {
    "PPO": Algorithm("train_ppo.py", "minibatches", SPLITS),
    "PPO, separate critic": Algorithm("train_ppo.py --separate_critic", "minibatches", SPLITS),
    "PPO, KL penalty": Algorithm("-m variations.ppo_penalty", "target", (0.003, 0.03)),
    "PPO, one action": Algorithm("-m variations.sequence_ppo", "clip_eps", (PPO.clip_eps, 5 * PPO.clip_eps)),
    "PPO, ratio of GSPO": Algorithm("-m variations.sequence_ppo --mean", "clip_eps", (PPO.clip_eps / 20, PPO.clip_eps)),
    "REINFORCE, total return": Algorithm("-m variations.reinforce --credit total", "minibatches", SPLITS, PURPLE),
    "REINFORCE, reward-to-go": Algorithm("-m variations.reinforce", "minibatches", SPLITS, PURPLE),
    "REINFORCE, less the value": Algorithm("-m variations.reinforce --baseline", "minibatches", SPLITS, PURPLE),
    "RLOO": Algorithm("-m variations.rloo", "k", GROUPS, PURPLE),
    "GRPO": Algorithm("-m variations.grpo --k 8", "kl_coef", BETAS, PURPLE),
    "Dr. GRPO": Algorithm("-m variations.grpo --no_std --no_length --k 8", "kl_coef", BETAS, PURPLE),
    "PPO of TRL": Algorithm("-m bench.trl_ppo", "minibatches", SPLITS, GREY),
    "GRPO of TRL": Algorithm(f"{TORCHRUN} --k 8", "kl_coef", BETAS, GREY),
    "best of n, imitated": Algorithm("-m variations.best_of_n", "n", GROUPS, ORANGE),
    "DPO": Algorithm("-m variations.dpo", "kl_coef", BETAS, ORANGE, LOW),
    "IPO": Algorithm("-m variations.dpo --ipo", "kl_coef", BETAS, ORANGE, LOW),
}
# Against reward hacking, with the default settings, at the default beta and at 0.
SCORERS = {"one reward model": "", "mean of three": "variations.ensemble:mean", "lowest of three": "variations.ensemble:minimum"}
NATS, FAR = 6.5, -0.3  # in the picture: no KL beyond the first; what is worse than the second stands at the edge
ROUNDS = 3  # of variations/iterate.py, each with a third of the steps


@dataclass
class Job:
    """A process that trains something, and the folder that it writes into."""

    words: list
    out: Path
    policy: str = "ppo.pt"  # in that folder
    env: dict = field(default_factory=dict)

    def status(self):
        """0: done, 2: it failed (the learning rate was too large, say), None: still to be run, or to be gone on with."""
        path = self.out / "status"
        return int(path.read_text()) if path.exists() else None

    def run(self):
        if self.status() is not None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        words = [*map(str, self.words), "--out", str(self.out)]
        print(" ".join(["python", *words]), flush=True)
        with open(self.out / "log.txt", "a") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1"} | self.env
            done = subprocess.run([sys.executable, "-u", *words], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode in (0, 2):  # not when it was stopped
            (self.out / "status").write_text(str(done.returncode))

    def log(self):
        """score, KL and seconds of each iteration."""
        if (self.out / "trainer_state.json").exists():  # of TRL, which logs the KL per token
            state = json.loads((self.out / "trainer_state.json").read_text())["log_history"]
            rows = [row for row in state if "reward" in row]
            seconds = [row["train_runtime"] * (i + 1) / len(rows) for row in state[-1:] for i in range(len(rows))]
            kls = [row["kl"] * row["completions/mean_length"] for row in rows]
            return [{"score": row["reward"], "kl": kl, "seconds": s} for row, kl, s in zip(rows, kls, seconds)]
        paths = sorted(self.out.glob("*/ppo.jsonl")) or [self.out / "ppo.jsonl"]
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def objective(self):
        """score - beta KL, at the default beta, in the last quarter of the log; None where the run has failed."""
        if self.status():
            return None
        rows = self.log()
        rows = rows[-max(1, len(rows) // 4) :]
        return sum(row["score"] - BETA * row["kl"] for row in rows) / len(rows)


def slug(name):
    return "".join(c if c.isalnum() else "_" for c in name.lower())


class Bench:
    """All jobs, for runs of so many steps on so many seeds."""

    def __init__(self, steps, seeds):
        self.steps, self.seeds, self.home = steps, range(seeds), RUNS / "neighbours" / str(steps)
        self.names = [name for name, x in ALGORITHMS.items() if "TRL" not in name or find_spec("trl")]

    def job(self, words, seed, out, steps, *flags, **more):
        go_on = [] if "outgrow" in words or "trl_ppo" in words else ["--resume"]  # TRL begins anew
        same = ["--models", shared.folder("models", seed), "--seed", seed, "--steps", steps, "--no_report", *go_on]
        return Job([*words.split(), *same, *flags], out, **more)

    def searches(self, name):
        """{flags: job} for the six settings, on the first seed, at a quarter of the length."""
        x, out = ALGORITHMS[name], self.home / "search" / slug(name)
        short = max(1, self.steps // 4)
        return {flags: self.job(x.words, 0, out / slug(flags), short, *flags.split()) for flags in x.settings()}

    def best(self, name):
        """The flags of the setting that did best in the search; None while that is not finished."""
        tried = self.searches(name)
        if any(job.status() is None for job in tried.values()):
            return None
        found = {flags: job.objective() for flags, job in tried.items() if job.objective() is not None}
        return max(found, key=found.get, default=None)

    def full(self, name):
        """The job of each seed, with the best setting."""
        flags, words = self.best(name), ALGORITHMS[name].words
        return [self.job(words, seed, self.home / slug(name) / str(seed), self.steps, *flags.split()) for seed in self.seeds]

    def hacking(self):
        """{(name, beta): the job of each seed}, after the reward models of ensembles()."""
        jobs = {}
        for beta in (0.0, BETA):
            for name, reward in SCORERS.items():
                flags = ["--kl_coef", f"{beta:g}", *(["--reward", reward] if reward else [])]
                out, models = self.home / slug(f"{name} {beta:g}"), self.home / "ensemble"
                jobs[name, beta] = [self.job("train_ppo.py", seed, out / str(seed), self.steps, *flags,
                                             env={"ENSEMBLE": str(models / str(seed))}) for seed in self.seeds]  # fmt: skip
            out, third = self.home / slug(f"iterate {beta:g}"), max(1, self.steps // ROUNDS)
            ppo = f"--kl_coef {beta:g} --steps {third} --no_report"
            words = "-m", "variations.iterate", "--rounds", ROUNDS, "--ppo", ppo
            jobs["three rounds", beta] = [
                Job([*words, "--models", shared.folder("models", seed), "--seed", seed], out / str(seed), f"{ROUNDS}/ppo.pt")
                for seed in self.seeds
            ]
        return jobs

    def ensembles(self):
        words = "-m", "variations.ensemble", "--models"
        return [Job([*words, shared.folder("models", seed)], self.home / "ensemble" / str(seed)) for seed in self.seeds]


def run_all(bench, workers):
    for seed in bench.seeds:
        shared.make_models(seed, ablations=False)

    def run(jobs):
        """TRL's alone, since each is two processes; then the others, `workers` at a time."""
        for job in jobs:
            if "variations.outgrow" in job.words:
                job.run()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(Job.run, [job for job in jobs if "variations.outgrow" not in job.words]))
        missing = [str(job.out) for job in jobs if job.status() is None]
        if missing:
            sys.exit(f"not finished, log.txt says why: {', '.join(missing)}; call again to go on")

    run([job for name in bench.names for job in bench.searches(name).values()])
    run([job for name in bench.names if bench.best(name) for job in bench.full(name)])
    run(bench.ensembles())
    run([job for jobs in bench.hacking().values() for job in jobs])


# ----------------------------------------------------------------------------------------------------------------------
# From runs to figures, tables and a picture


def measured(jobs, sticks):
    """A row of figures for each job that is done; what has been measured once is kept beside the model."""
    rows = []
    for seed, job in enumerate(jobs):
        path = job.out / "measured.json"
        if job.status() != 0:
            continue
        if not path.exists():
            if seed not in sticks:
                sticks[seed] = shared.Yardstick("full", seed)
            policy, _, _ = load_checkpoint(job.out / job.policy, ("ppo",))
            path.write_text(json.dumps(sticks[seed].measure(policy, BETA)[0]))
        rows.append(json.loads(path.read_text()) | {"seconds": seconds_of(job)})
    return rows


def seconds_of(job):
    """Of training: in the rounds of variations/iterate.py, of PPO and of the reward models."""
    logs = [*job.out.glob("*/ppo.jsonl"), *job.out.glob("*/rm.jsonl")]
    if logs:
        return sum(json.loads(path.read_text().splitlines()[-1])["seconds"] for path in logs)
    return job.log()[-1]["seconds"]


def summarise(bench):
    """-> what stands under "neighbours" in bench/results.json."""
    out, sticks = {"steps": bench.steps, "responses": bench.steps * PPO.batch_size, "rows": {}, "search": {}, "hacking": []}, {}
    first = None
    for name in bench.names:
        tried = bench.searches(name)
        done = {flags: job for flags, job in tried.items() if job.status() is not None}
        out["search"][name] = [{"flags": flags, "objective": job.objective()} for flags, job in done.items()]
        if bench.best(name) and (rows := measured(bench.full(name), sticks)):
            out["rows"][name] = {"flags": bench.best(name), **over_seeds(rows)}
            first = first or rows  # PPO's
            if len(rows) == len(first):
                out["rows"][name]["gain"] = shared.differences(rows, first)
    for (name, beta), jobs in bench.hacking().items():
        if rows := measured(jobs, sticks):
            out["hacking"].append({"name": name, "beta": beta, **over_seeds(rows)})
    return out


def tables(results):
    """results.json -> {name of a marker in RESULTS.md: text of the table}."""
    x, digits = results["neighbours"], {"optimality": 3, "judge": 2, "score": 2, "kl": 2, "seconds": 0}
    rows = [[name, f"`{row['flags']}`", *(cell(row[key], n) for key, n in digits.items())] for name, row in x["rows"].items()]
    for row, (name, figures) in zip(rows, x["rows"].items()):
        row.insert(3, "" if name == "PPO" else cell(figures.get("gain"), 3))
    out = {"neighbours": shared.table(["", "setting found", "optimality", "less PPO's", "judge", "score", "KL", "seconds"], rows)}
    rows = [[row["name"], f"{row['beta']:g}", *(cell(row[key]) for key in ("judge", "score", "kl"))] for row in x["hacking"]]
    return out | {"ensembles": shared.table(["PPO with", "beta", "judge", "score by the first reward model", "KL"], rows)}


def draw(results):
    drawing, (*axes, forest) = shared.figure(3, 15, 5)
    rows, markers = results["neighbours"]["rows"], "osD^v<>pPX*hd8H.12"
    for axis, key in zip(axes, ("score", "judge")):
        for line, style in (("optimum", {"color": GREY}), ("best_of_n", {"color": PURPLE, "marker": "o", "linestyle": ":"})):
            points = results[line].values()
            axis.plot([p["kl"]["mean"] for p in points], [p[key]["mean"] for p in points], linewidth=1, markersize=3, **style)
        for (name, row), marker in zip(rows.items(), markers):
            style = {"fmt": marker, "color": ALGORITHMS[name].colour, "markersize": 5, "linewidth": 0.8}
            if row["kl"]["mean"] < NATS:
                axis.errorbar(row["kl"]["mean"], row[key]["mean"], row[key]["se"], row["kl"]["se"], **style)
        axis.set(xlabel="KL to the reference, nats per response", title=key, xlim=(0, NATS))
    for place, ((name, row), marker) in enumerate(zip(rows.items(), markers)):
        inside, gain = row["gain"]["mean"] > FAR, row["gain"]
        style = {"fmt": marker if inside else "<", "color": ALGORITHMS[name].colour, "markersize": 5, "linewidth": 0.8}
        forest.errorbar(max(gain["mean"], FAR), place, xerr=gain["se"] if inside else None, **style)
    forest.axvline(0, color=GREY, linewidth=0.5)
    forest.set(title="optimality, less PPO's", xlim=(FAR - 0.02, 0.05), yticks=range(len(rows)))
    forest.set_yticklabels(list(rows), fontsize=8)
    forest.yaxis.tick_right()
    forest.invert_yaxis()
    shared.save(drawing, "neighbours")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--steps", type=int, default=PPO.steps, help="iterations of a run; fewer for trying this out")
    parser.add_argument("--seeds", type=int, default=FEW_SEEDS, help="how many")
    parser.add_argument("--summary", action="store_true", help="train nothing")
    args = parser.parse_args()
    bench, path = Bench(args.steps, args.seeds), ROOT / "bench" / "results.json"
    prepare(RunConfig(device="cpu", out=RUNS / "neighbours"))
    if not args.summary:
        run_all(bench, args.workers)
    results = json.loads(path.read_text()) | {"neighbours": summarise(bench)}
    path.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(path.read_text())
    draw(results)
    shared.write_texts(results)


if __name__ == "__main__":
    main()
