"""Every training run behind the tables of RESULTS.md, on the default task.

    python -m bench.results seeds         the default, all three stages, on ten seeds
    python -m bench.results settings      PPO with other settings, on three
    python -m bench.results neighbours    PPO beside variations/ and TRL, on three

Runs what is missing in out/results, measures it, and writes bench/results.json, the tables and the
pictures. A run is a process of the real script with one thread; then train_ppo.py measures its
policy, at the settings of the default, whatever it was trained with. If interrupted, the same
command goes on. All runs must be of one commit and machine; to begin anew, remove that folder.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

import torch

from bench import pictures
from bench.tables import ROOT, keep, made, mean_and_error, tables
from data.files import UserError, read_log, write_file
from data.zoo import write_data
from minippo import PPOConfig
from plumbing.errors import run_script
from plumbing.flags import RunConfig, prepare, read_flags
from plumbing.models import load_models
from plumbing.packing import packed
from plumbing.page import rounded
from plumbing.report import BEST_OF, PROMPTS, Ruler, optimal_objective
from plumbing.rows import read_prompts
from variations import copy_files

DATA, RUNS = ROOT / "data" / "zoo", ROOT / "out" / "results"
MODELS = RUNS / "models"
FEW_PAIRS, HACKED = "a quarter of the pairs", "a quarter of the pairs, beta = 0"
SETTINGS = {  # name: flags
    "default": "",
    "four passes": "--epochs 4",
    "four passes, narrower clip": "--epochs 4 --clip_eps 0.1",
    "four passes, wider clip": "--epochs 4 --clip_eps 0.3",
    "four passes, no clipping": "--epochs 4 --clip_eps inf --value_clip inf",
    "value loss weighs 0.5": "--vf_coef 0.5",
    "value loss weighs 1": "--vf_coef 1",
    "lam = 0.9": "--lam 0.9",
    "lam = 0": "--lam 0",
    "gamma = 0.95": "--gamma 0.95",
    "the response is one action": "--algorithm gspo --no_mean",
    "entropy bonus 0.03": "--entropy_coef 0.03",
    "length penalty 0.05": "--length_penalty 0.05",
    "KL in the loss": "--kl_coef 0 --kl_loss_coef 0.2",
    "beta = 0.03": "--kl_coef 0.03",
    "beta = 0.3": "--kl_coef 0.3",
    "beta = 0": "--kl_coef 0",
    "beta adapts": "--kl_horizon 10000",
    "reference moves, every 50 iterations": "--ref_update_every 50",
    "reference moves, every iteration": "--ref_update_every 1",
    FEW_PAIRS: "",
    HACKED: "--kl_coef 0",
}
NEIGHBOURS = {  # with what a search on seed 0 found, over learning rates, betas, a flag of each
    "PPO": "train_ppo.py",
    "PPO, separate critic": "train_ppo.py --separate_critic --lr 4e-4 --minibatches 8",
    "PPO, KL penalty": "train_ppo.py --algorithm ppo_penalty --lr 4e-4",
    "PPO, ratio of GSPO": "train_ppo.py --algorithm gspo --lr 1.6e-3 --clip_eps 0.01",
    "REINFORCE, reward-to-go": "train_ppo.py --algorithm reinforce --lr 4e-4",
    "REINFORCE, less the value": "train_ppo.py --algorithm reinforce --baseline",
    "RLOO": "train_ppo.py --algorithm rloo --k 8",
    "GRPO": "train_ppo.py --algorithm grpo --k 8 --lr 4e-4",
    "Dr. GRPO": "train_ppo.py --algorithm grpo --no_std --no_length --k 8 --lr 4e-4 --kl_coef 0.05",
    "PPO of TRL": "-m bench.trl_ppo",
    "GRPO of TRL": "-m variations.outgrow --k 8",
    "best of n, imitated": "train_ppo.py --algorithm best_of_n --k 4",
    "DPO": "-m variations.dpo --lr 4e-4 --kl_coef 0.5",
    "IPO": "-m variations.dpo --ipo --lr 4e-4 --kl_coef 0.06",
}
GOAL = 2.5  # of the judge: how long does it take?
BETAS = (0.03, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0)  # of the best policies
LETTERS = 90  # of a hacked answer
WINDOW = 10  # iterations that a point of a path, and the judge's mean, is over
FIGURES = {  # title of a column: name in a report
    "judge": "judge",
    "score": "score",
    "optimality": "optimality",
    "KL": "kl",
    "different answers": "distinct",
    "tokens": "response_length",
    "correlation with score": "length_correlation",
}


@dataclass
class Job:
    """Processes, one after the other, and the folder that they write into."""

    out: Path
    commands: list  # of words for Python

    def made(self):
        """Of which commit and machine it is; None if it is not finished."""
        path = self.out / "made.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        return known.get("made") if known.get("commands") == self.commands else None

    def run(self, source):
        if self.made():
            return
        self.out.mkdir(parents=True, exist_ok=True)
        for number, words in enumerate(self.commands):
            print(" ".join(["python", *words]), flush=True)
            with open(self.out / f"log{number}.txt", "a") as log:
                process = {"stdout": log, "stderr": log, "cwd": ROOT}
                process["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
                if subprocess.call([sys.executable, "-u", *words], **process):
                    return
        text = json.dumps({"made": source, "commands": self.commands})
        write_file(self.out / "made.json", text)

    def report(self):
        return json.loads((self.out / "measured" / "report.json").read_text())

    def log(self):
        return read_log(self.out / "ppo.jsonl")


def job(out, seed, *commands):
    same = ["--data", DATA, "--seed", seed]
    return Job(out, [[str(word) for word in (*words, *same)] for words in commands])


@dataclass
class Lab:
    """What is run, and where it is kept."""

    workers: int = 2  # processes at a time [1, inf]
    seeds: int = 0  # that many, from 0 on; 0: as many as stand above [0, inf]

    def models(self, seed):
        out = MODELS / str(seed)
        flags = ["--out", out, "--resume"]
        return job(out, seed, ["train_sft.py", *flags], ["train_rm.py", *flags])

    def few_pairs(self, seed):
        """The reward model has seen a quarter of the pairs, once."""
        out = MODELS / f"{seed} of few pairs"
        copy_files(MODELS / str(seed), "sft.pt", out)
        return job(out, seed, ["train_rm.py", "--out", out, "--resume", "--steps", 312])

    def policy(self, name, seed, words):
        """Train a policy; then measure it, by an iteration with a learning rate of 0, which ends
        with the report."""
        out = RUNS / re.sub(r"[^\w.]+", "_", name) / str(seed)
        models = MODELS / (f"{seed} of few pairs" if FEW_PAIRS in name else str(seed))
        go_on = "--overwrite" if "TRL" in name else "--resume"  # TRL begins anew
        train = [*words.split(), "--models", models, "--out", out, "--no_report", go_on]
        train += ["--sft", models / "sft.pt", "--demonstrations", DATA] if "ptx" in words else []
        measure = ["train_ppo.py", "--models", models, "--out", out / "measured", "--overwrite"]
        measure += ["--policy", out / "ppo.pt", "--lr", 0, "--steps", 1]
        return job(out, seed, train, measure)

    def run(self, jobs):
        """Those that are missing, `workers` at a time."""
        source = made()
        for x in jobs:
            if x.made() not in (None, source):
                hint = f"here it would be of {source}; remove {RUNS} to begin anew"
                raise UserError(f"{x.out}: is of {x.made()}; {hint}")
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(lambda x: x.run(source), jobs))
        if missing := [str(x.out) for x in jobs if not x.made()]:
            raise UserError(f"not finished, the logs there say why: {', '.join(missing)}")

    def train(self, words, count):
        """{name: words of a script with its flags} -> {name: the finished job of each seed}."""
        seeds = range(self.seeds or count)
        if not DATA.exists():
            write_data(DATA)
        self.run([self.models(seed) for seed in seeds])
        if FEW_PAIRS in words:
            self.run([self.few_pairs(seed) for seed in seeds])
        jobs = {name: [self.policy(name, seed, x) for seed in seeds] for name, x in words.items()}
        self.run(sum(jobs.values(), []))
        return jobs

    def keep(self, sections):
        found = rounded(sections)
        print(*tables(found).values(), sep="\n\n")
        pictures.draw(keep(found))


# --------------------------------------------------------------------------------------------------
# What is measured


@torch.no_grad()
def optima(folder, seed):
    """Score, judge and KL of the best policy at each beta, pi* ~ ref exp(score / beta), from the
    ruler's answers of the SFT model."""
    models = load_models(folder, "cpu")
    packed(models.networks())
    prompts = read_prompts(DATA, "val", models.tokenizer, models.ref.config.context)
    torch.manual_seed(seed)
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
    return best_policies(Ruler(models, prompts, DATA, PPOConfig()).reference)


def best_policies(reference):
    found, score = {}, reference["score"].double()
    for beta in BETAS:
        weights = torch.softmax(score / beta, 1)
        row = {x: (weights * reference[x]).sum(1).mean().item() for x in ("score", "judge")}
        best = optimal_objective(score, beta).mean().item()
        found[str(beta)] = row | {"kl": (row["score"] - best) / beta}
    return found


def over_seeds(rows, titles=FIGURES):
    """Dicts of numbers, one for each seed -> {title: [mean, error]}, as far as they are there."""
    known = {title: name for title, name in titles.items() if name in rows[0]}
    return {title: mean_and_error([row[name] for row in rows]) for title, name in known.items()}


def limits(jobs):
    """Best of n, and the best policy at each beta."""
    found, rows = {}, []
    for n in map(str, BEST_OF):
        found[f"best of {n}"] = over_seeds([x.report()["best_of_n"][n] for x in jobs])
    for seed in range(len(jobs)):
        path = MODELS / str(seed) / "optima.json"
        if not path.exists():
            write_file(path, json.dumps(optima(path.parent, seed)))
        rows.append(json.loads(path.read_text()))
    return found | {beta: over_seeds([row[beta] for row in rows]) for beta in rows[0]}


def rows_of(jobs, flags, less, first):
    """{name: the job of each seed} -> {name: figures}; `less` is the optimality less that of the
    one named `first`, seed by seed, where both have the same models."""
    rows, base = {}, [x.report()["ppo"]["optimality"] for x in jobs[first]]
    for name, runs in jobs.items():
        known = [x.report()["ppo"] for x in runs]
        gain = mean_and_error([x["optimality"] - y for x, y in zip(known, base)])
        rows[name] = {"flags": flags[name], **over_seeds(known), "made": runs[0].made()}
        rows[name][less] = None if name == first or FEW_PAIRS in name else gain
    return rows


def row_of_seed(x):
    report, kl = x.report(), [line["kl"] for line in x.log()]

    def pair(part, figure):
        return [report[part][figure], report[part][f"{figure}_se"]]

    return {
        "SFT above the entropy, nats/token": pair("sft", "above_entropy"),
        "RM below its ceiling": pair("rm", "below_ceiling"),
        "judge": pair("ppo", "judge"),
        "KL": pair("ppo", "kl"),
        "optimality on seen prompts": pair("ppo_seen", "optimality"),
        "on unseen prompts": pair("ppo_unseen", "optimality"),
        "suspicious answers": report["suspects"]["count"],
        "jumps of the KL": jumps(kl),
        "made": x.made(),
    }


def jumps(kl, window=100):
    """How many of the KLs, one per iteration, are more than 1 nat above the median of the hundred
    before; the first hundred have none."""
    before = (statistics.median(kl[i - window : i]) for i in range(window, len(kl)))
    return sum(x > 1 + middle for x, middle in zip(kl[window:], before))


def path_of(jobs, names):
    """How figures move: {name: means over the seeds and over every ten iterations}."""
    logs = [x.log() for x in jobs]
    begins = range(0, len(logs[0]), WINDOW)
    parts = [[row for log in logs for row in log[i : i + WINDOW]] for i in begins]
    found = {x: [statistics.fmean(row[x] for row in part) for part in parts] for x in names}
    return rounded(found, 4)


def seconds_to(goal, log):
    """When the judge's mean over the last ten iterations first reached the goal, in seconds of
    training; None if it never did."""
    for i in range(WINDOW, len(log) + 1):
        if statistics.fmean(row["judge"] for row in log[i - WINDOW : i]) >= goal:
            return log[i - 1]["seconds"]


# --------------------------------------------------------------------------------------------------
# The parts: each runs what is missing and returns its sections of results.json


def seeds(lab):
    jobs = lab.train({"default": "train_ppo.py"}, 10)["default"]
    known, reports = limits(jobs), [x.report() for x in jobs]
    systems = {"SFT model": over_seeds([x["sft"] for x in reports])}
    systems |= {name: x for name, x in known.items() if "best" in name}
    systems["**PPO**"] = over_seeds([x["ppo"] for x in reports])
    systems["PPO, on unseen prompts"] = over_seeds([x["ppo_unseen"] for x in reports])
    systems["the optimum at beta = 0.1"] = known["0.1"] | {"optimality": 1}
    return {
        "systems": {name: x | {"made": jobs[0].made()} for name, x in systems.items()},
        "seeds": {str(seed): row_of_seed(x) for seed, x in enumerate(jobs)},
        "limits": known,
    }


def settings(lab):
    jobs = lab.train({name: f"train_ppo.py {flags}" for name, flags in SETTINGS.items()}, 3)
    hacked = {}
    for job in jobs[HACKED]:
        samples = job.report()["samples"]
        worst = min(samples, key=lambda x: x["ppo"]["judge"] - x["ppo"]["score"])
        x = worst["ppo"]
        said = f"{worst['prompt']} **{shorten(x['text'], LETTERS, placeholder=' …')}**"
        hacked[said] = {"score": x["score"], "judge": x["judge"], "KL": x["kl"]}
        hacked[said]["made"] = job.made()
    return {
        "settings": rows_of(jobs, SETTINGS, "less the default's", "default"),
        "hacked": hacked,
        "paths": {name: path_of(jobs[name], ("kl", "score", "judge")) for name in pictures.PATHS},
    }


def neighbours(lab):
    names = [name for name in NEIGHBOURS if "TRL" not in name or find_spec("trl")]
    jobs = lab.train({f"beside, {x}": f"{NEIGHBOURS[x]} --steps 200" for x in names}, 3)
    jobs = {name: jobs[f"beside, {name}"] for name in names}
    flags = {name: words.removeprefix("train_ppo.py") for name, words in NEIGHBOURS.items()}
    rows = rows_of(jobs, flags, "less PPO's", "PPO")
    for name, runs in jobs.items():
        seconds = [seconds_to(GOAL, x.log()) for x in runs]
        mean = None if None in seconds else mean_and_error(seconds)
        rows[name][f"seconds to a judge of {GOAL}"] = mean
    return {"neighbours": rows, "limits_of_neighbours": limits(jobs["PPO"])}


def main():
    parts = {"seeds": seeds, "settings": settings, "neighbours": neighbours}
    lab, names = read_flags(__doc__, Lab(), positional="TABLE")
    if unknown := set(names) - set(parts):
        raise UserError(f"{', '.join(unknown)}: should be among {', '.join(parts)}")
    prepare(RunConfig(device="cpu", out=RUNS))
    for name in names:
        lab.keep(parts[name](lab))


if __name__ == "__main__":
    run_script(main)
