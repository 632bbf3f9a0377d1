"""Every training run behind the figures of README.md and RESULTS.md, on the default task.

    python -m bench.results seeds         ten seeds, all three stages
    python -m bench.results settings      PPO with other settings
    python -m bench.results neighbours    PPO beside variations/ and TRL
    python -m bench.results quality       how long it takes to a given optimality

Runs what is missing in out/results, measures it, and writes bench/results.json, the pictures and
the tables; each part takes some hours. If interrupted, it goes on where it stopped; to begin anew,
remove that folder. Each run is a process with one thread; --workers says how many at a time.
--summary measures what is there.

Every run starts from the SFT and reward models of its seed and is measured by the same ruler. In
"neighbours" each algorithm, PPO too, first gets the same search on the first seed, at the full
length of the table: learning rates times the values of its own flag, then other prices of the KL.
The setting with the highest optimality is kept.
"""

import functools
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

import minippo
import train_ppo
from bench import parser, pictures, trl_ppo
from bench.tables import ROOT, keep, load, mean_and_error
from data.zoo import judge
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.errors import run_script
from plumbing.hf import copy_trunk
from plumbing.models import load_models
from plumbing.report import best_of_n, best_of_n_kl, optimal_objective, optimum, respond
from plumbing.rows import load_jsonl
from plumbing.settings import RunConfig, prepare
from plumbing.tokenizer import texts_of

RUNS = ROOT / "out" / "results"
SEEDS, FEW_SEEDS = range(10), range(3)
BETA = minippo.PPOConfig.kl_coef
BETAS = (0.03, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0)  # of the best policies
PROMPTS, REFERENCE, SAMPLES = 128, 192, 16  # REFERENCE answers of the SFT model to each prompt

# name: flags. The default is among the ten seeds.
HACKED = "a quarter of the pairs, beta = 0"
SETTINGS = {
    "default": "",
    "learning rate halved": "--lr 4e-4",
    "learning rate doubled": "--lr 1.6e-3",
    "batches of 256, half as many": "--batch_size 256 --steps 225",
    "no clipping": "--clip_eps inf --value_clip inf",
    "four passes": "--epochs 4",
    "four passes, no clipping": "--epochs 4 --clip_eps inf --value_clip inf",
    "no advantage whitening": "--no_whiten",
    "no value function": "--vf_coef 0",
    "lam = 0.95": "--lam 0.95",
    "lam = 0": "--lam 0",
    "gamma = 0.95": "--gamma 0.95",
    "entropy bonus 0.01": "--entropy_coef 0.01",
    "KL in the loss": "--kl_coef 0 --kl_loss_coef 0.2",
    "beta = 0.03": "--kl_coef 0.03",
    "beta = 0.3": "--kl_coef 0.3",
    "beta = 0": "--kl_coef 0",
    "reference moves, every iteration": "--ref_update_every 1",
    "scores without a cap": "",
    "a quarter of the pairs": "",
    HACKED: "--kl_coef 0",
}
FIVE_SEEDS = "default", "four passes", "entropy bonus 0.01"  # the others have three


@dataclass
class Algorithm:
    """What is run; the flag that is searched besides the learning rate, with its values; and the
    prices of the KL, of which the first is that of the search. Where the KL is not in the reward,
    the same beta is another price: see variations/dpo.py and grpo.py."""

    words: str
    flag: str = ""
    betas: tuple = (BETA,)
    rates: tuple = (4e-4, 8e-4, 1.6e-3)


IN_REWARD, IN_LOSS = (0.1, 0.03, 0.06, 0.2, 0.4), (0.3, 0.05, 0.1, 0.2, 0.5)
LOW_RATES = 2e-4, 4e-4, 8e-4  # where the KL is in the loss, high ones fail
OF_PAIRS, FROM_PAIRS = (0.3, 0.1, 0.2, 0.5, 1), (1.2e-4, 4e-4, 1.2e-3)  # for DPO and IPO
ALGORITHMS = {
    "PPO": Algorithm("train_ppo.py", "minibatches 4 8", IN_REWARD),
    "PPO, separate critic": Algorithm("train_ppo.py --separate_critic", "minibatches 4 8"),
    "PPO, KL penalty": Algorithm("-m variations.ppo_penalty", "target 0.003 0.03"),
    "PPO, ratio of GSPO": Algorithm("-m variations.sequence_ppo --mean", "clip_eps 0.01 0.2"),
    "REINFORCE, reward-to-go": Algorithm("-m variations.reinforce"),
    "REINFORCE, less the value": Algorithm("-m variations.reinforce --baseline"),
    "RLOO": Algorithm("-m variations.rloo", "k 4 8", IN_REWARD),
    "GRPO": Algorithm("-m variations.grpo --k 8", "", IN_LOSS, LOW_RATES),
    "Dr. GRPO": Algorithm("-m variations.grpo --no_std --no_length --k 8", "", IN_LOSS, LOW_RATES),
    "PPO of TRL": Algorithm("-m bench.trl_ppo"),
    "GRPO of TRL": Algorithm("-m variations.outgrow --k 8", "", IN_LOSS, LOW_RATES),
    "best of n, imitated": Algorithm("-m variations.best_of_n", "n 4 8"),
    "DPO": Algorithm("-m variations.dpo", "", OF_PAIRS, FROM_PAIRS),
    "IPO": Algorithm("-m variations.dpo --ipo", "", IN_REWARD, FROM_PAIRS),
}
STEPS = 200

# Until which optimality? Policies are kept every PACE iterations, at full length.
PACED = ("PPO", "PPO, separate critic", "RLOO", "PPO of TRL")
PACE, GOALS = 25, (0.9, 0.95)


# --------------------------------------------------------------------------------------------------
# What is run


@dataclass
class Job:
    """A process that trains something, and the folder that it writes into."""

    out: Path
    words: list  # for Python

    def status(self):
        """0: done, 2: it failed (the learning rate was too large, say), None: not finished."""
        path = self.path_of_status()
        return int(path.read_text()) if path.exists() else None

    def path_of_status(self):
        script = next(word for word in self.words if word != "-m")
        return self.out / f"{Path(script).stem}.status"

    def run(self):
        if self.status() is not None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        words = [*map(str, self.words), "--out", str(self.out)]
        print(" ".join(["python", *words]), flush=True)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(self.out / "log.txt", "a") as log:
            command = [sys.executable, "-u", *words]
            code = subprocess.call(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        if code in (0, 2):  # not when it was stopped
            self.path_of_status().write_text(str(code))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(jobs, workers):
    """Those that are missing, `workers` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(Job.run, jobs))
    if missing := [str(job.out) for job in jobs if job.status() is None]:
        sys.exit(f"not finished, log.txt says why: {', '.join(missing)}; call again to go on")


def folder(name, seed):
    return RUNS / "".join(c if c.isalnum() or c in "/." else "_" for c in name.lower()) / str(seed)


def models_of(name, seed):
    """The folder with the SFT and the reward model that a setting starts from."""
    parts = {"quarter": "few pairs", "without a cap": "no cap"}
    kind = next((kind for part, kind in parts.items() if part in name), "models")
    return folder(kind, seed)


def make_models(seeds, workers):
    for kind in ("sft", "rm"):
        words = [f"train_{kind}.py", "--resume", "--seed"]
        run([Job(folder("models", seed), [*words, seed]) for seed in seeds], workers)


def make_other_models(seeds, workers):
    """Reward models of a quarter of the pairs, and without a cap."""
    jobs = []
    for seed in seeds:
        models, few, no_cap = (folder(kind, seed) for kind in ("models", "few pairs", "no cap"))
        data = few / "data"
        data.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "data" / "zoo").iterdir():
            lines = path.read_bytes().splitlines(True)
            share = 4 if path.stem == "pref_train" else 1
            (data / path.name).write_bytes(b"".join(lines[: len(lines) // share]))
        for out in (few, no_cap):
            out.mkdir(parents=True, exist_ok=True)
            shutil.copy(models / "sft.pt", out)
        model, tokenizer, facts = load_checkpoint(models / "rm.pt", ["rm"])
        model.cap.fill_(math.inf)
        save_checkpoint(no_cap / "rm.pt", "rm", model, tokenizer, **facts)
        jobs += [Job(few, ["train_rm.py", "--resume", "--seed", seed, "--data", data])]
    run(jobs, workers)


def judged_job(name, seed, flags=""):
    """train_ppo.py, with the judge looking on."""
    words = ["-m", "bench.results", "judged", "--overwrite", "--models", models_of(name, seed)]
    return Job(folder(name, seed), [*words, "--seed", seed, *flags.split()])


def judged_ppo(flags):
    """train_ppo.py in this process; judge.json gets the judge's mean score of each batch."""
    sys.argv = ["train_ppo.py", *flags]
    out, models = (Path(flags[flags.index(flag) + 1]) for flag in ("--out", "--models"))
    tokenizer, grades = load_checkpoint(models / "sft.pt", ["sft"])[1], []

    def compute_advantages(batch, config, kl_coef):
        prompts, responses = texts_of(tokenizer, batch["tokens"], batch["mask"])
        grades.append(statistics.fmean(map(judge, prompts, responses)))
        (out / "judge.json").write_text(json.dumps(grades))
        return minippo.compute_advantages(batch, config, kl_coef)

    train_ppo.main(compute_advantages)


def settings_jobs():
    """{name: the job of each seed}."""
    jobs = {}
    for name, flags in SETTINGS.items():
        place, flags = ("full", "") if name == "default" else (name, f"--no_report {flags}")
        seeds = range(5) if name in FIVE_SEEDS else FEW_SEEDS
        jobs[name] = [judged_job(place, seed, flags) for seed in seeds]
    return jobs


def searches(name):
    """{flags: job} on the first seed: learning rates times values of the flag."""
    x = ALGORITHMS[name]
    flag, *values = x.flag.split() or [""]
    betas = f" --kl_coef {x.betas[0]:g}" if len(x.betas) > 1 else ""
    settings = itertools.product(x.rates, values or [""])
    words = [f"--lr {lr:g}{f' --{flag} {v}' if v else ''}{betas}" for lr, v in settings]
    return {flags: neighbour_job(name, 0, flags) for flags in words}


def other_betas(name):
    """{flags: job} on the first seed: the best of searches() with the other prices of the KL."""
    first, *others = ALGORITHMS[name].betas
    found = best(searches(name)) if others else None
    if not found:
        return {}
    flags = {beta: found.replace(f"--kl_coef {first:g}", f"--kl_coef {beta:g}") for beta in others}
    return {x: neighbour_job(name, 0, x) for x in flags.values()}


def tried(name):
    return searches(name) | other_betas(name)


def neighbour_job(name, seed, flags):
    words = ALGORITHMS[name].words.split()
    models = ["--models", folder("models", seed), "--seed", seed]
    go_on = "--overwrite" if "TRL" in name else "--resume"  # TRL begins anew
    length = ["--steps", STEPS, "--no_report", go_on]
    out = folder(f"neighbours/{name}/{flags}", seed)
    return Job(out, [*words, *models, *length, *flags.split()])


def optimality(job):
    """On the first seed; None where the run has failed."""
    return None if job.status() else measured(job, folder("models", 0), 0)["optimality"]


def best(jobs):
    """The flags that did best; None if all of them failed."""
    found = {flags: optimality(job) for flags, job in jobs.items()}
    found = {flags: x for flags, x in found.items() if x is not None}
    return max(found, key=found.get, default=None)


def names_of_neighbours():
    return [name for name in ALGORITHMS if "TRL" not in name or find_spec("trl")]


def neighbour_jobs():
    """{name: the job of each seed, with the best setting}, once all searches are done."""
    return {
        name: [neighbour_job(name, seed, flags) for seed in FEW_SEEDS]
        for name in names_of_neighbours()
        if (flags := best(tried(name)))
    }


def paced_jobs():
    """{name: the job of each seed}: the settings found by the search, at full length."""
    jobs = {}
    for name in PACED:
        words = [word for word in ALGORITHMS[name].words.split() if word != "-m"]
        # The KL's price is that of the optimality.
        flags = best(searches(name)).split()
        jobs[name] = [
            Job(
                folder(f"paced/{name}", seed),
                ["-m", "bench.results", "paced", *words, "--models", folder("models", seed)]
                + ["--seed", seed, "--no_report", "--overwrite", *flags],
            )
            for seed in FEW_SEEDS
        ]
    return jobs


def paced(words):
    """A script with its flags, in this process; its policy is kept every PACE iterations."""
    module, sys.argv = words[0], words
    out, models = (Path(words[words.index(flag) + 1]) for flag in ("--out", "--models"))
    sft, tokenizer, _ = load_checkpoint(models / "sft.pt", ["sft"])
    steps = itertools.count(1)

    def keep_policy(policy):
        if (step := next(steps)) % PACE == 0:
            if not isinstance(policy, minippo.GPT):  # of TRL
                copy_trunk(policy.transformer, sft.trunk)
                policy = sft
            (out / "policies").mkdir(exist_ok=True)
            save_checkpoint(out / "policies" / f"{step}.pt", "ppo", policy, tokenizer)

    def iteration(policy, *rest):
        found = minippo.ppo_iteration(policy, *rest)
        keep_policy(policy)
        return found

    train_ppo.ppo_iteration, trl_ppo.after_iteration = iteration, keep_policy
    import_module(module.removesuffix(".py")).main()


# --------------------------------------------------------------------------------------------------
# What is measured


class Yardstick:
    """Prompts of the validation file, and the SFT model's answers to them."""

    def __init__(self, folder, seed):
        self.models = load_models(folder, "cpu")
        torch.manual_seed(seed)
        rows = load_jsonl(ROOT / "data" / "zoo" / "prompts_val.jsonl", ["prompt"])
        self.questions = [rows[i][0] for i in torch.randperm(len(rows))[:PROMPTS]]
        self.reference, _ = self.ask(self.models.reference, REFERENCE)

    def ask(self, policy, n):
        """n responses to each question -> {name: (PROMPTS, n)}, texts."""
        x = self.models
        prompts, settings = map(x.tokenizer.encode, self.questions), minippo.PPOConfig()
        asked = [*prompts], n, x.tokenizer, settings
        figures, texts = respond(policy, x.reference, x.score, *asked)
        grades = [judge(self.questions[i // n], text) for i, text in enumerate(texts)]
        return figures | {"judge": torch.tensor(grades).view(-1, n)}, texts

    def figures(self, x):
        """score, judge and KL of responses, and J = score - beta KL as a share of the way from the
        SFT model to the optimum."""
        sft = self.reference["score"]
        J, J_sft = (x["score"] - BETA * x["kl"]).mean(), sft.mean()
        share = (J - J_sft) / (optimal_objective(sft, BETA).mean() - J_sft)
        means = {name: x[name].mean().item() for name in ("judge", "score", "kl")}
        return {"optimality": share.item()} | means

    def best_of(self, n):
        x = {
            name: best_of_n(self.reference["score"], self.reference[name], n)
            for name in ("score", "judge")
        }
        return {name: values.mean().item() for name, values in x.items()}


@functools.cache
def yardstick(models, seed):
    return Yardstick(models, seed)


def measured(job, models, seed):
    """The figures of a job that is done; they are kept beside its model."""
    path = job.out / "measured.json"
    if not path.exists():
        stick = yardstick(models, seed)
        policy, _, _ = load_checkpoint(job.out / "ppo.pt", ["ppo"])
        path.write_text(json.dumps(stick.figures(stick.ask(policy, SAMPLES)[0])))
    return json.loads(path.read_text())


def over_seeds(rows):
    """Dicts of numbers, one for each seed -> {name: [mean, error]}."""
    return {name: mean_and_error([row[name] for row in rows]) for name in rows[0]}


def differences(rows, first):
    """The optimality of these runs less that of the `first`, seed by seed, on the seeds that both
    have: known better than either."""
    return mean_and_error([a["optimality"] - b["optimality"] for a, b in zip(rows, first)])


def rows_of(jobs, flags, first):
    """{name: the job of each seed}, {name: flags} -> {name: figures}, of those that are done;
    "gain" is the optimality less that of the one named `first`, where both have the same models."""
    out, known = {}, {}
    for name, runs in jobs.items():
        if any(job.status() != 0 for job in runs):
            continue
        known[name] = [measured(job, models_of(name, i), i) for i, job in enumerate(runs)]
        out[name] = {"flags": flags[name], **over_seeds(known[name])}
        if name != first and first in known and models_of(name, 0) == models_of(first, 0):
            out[name]["gain"] = differences(known[name], known[first])
    return out


FIGURES = ("judge score kl eos_rate optimality above_entropy below_ceiling val_accuracy").split()


def figures_of(report):
    """What the tables show of a report.json."""

    def part(x):
        return {name: x[name] for name in x if name.removesuffix("_se") in FIGURES}

    parts = ("sft", "rm", "ppo", "ppo_seen", "ppo_unseen")
    return {name: part(report[name]) for name in parts if name in report}


def read_report(out):
    """A report.json, and the jumps in the log beside it."""
    report = json.loads((out / "report.json").read_text())
    kl = [row["kl"] for row in read_lines(out / "ppo.jsonl")]
    return figures_of(report) | {"suspects": report["suspects"]["count"], "jumps": jumps(kl)}


def jumps(kl, window=100):
    """How many of the KLs, one per iteration, are more than 1 nat above the median of the hundred
    before; the first hundred have none."""
    before = (statistics.median(kl[i - window : i]) for i in range(window, len(kl)))
    return sum(x > 1 + middle for x, middle in zip(kl[window:], before))


def judged_log(out):
    grades = json.loads((out / "judge.json").read_text())
    return [
        row | {"judge": x} for row, x in zip(read_lines(out / "ppo.jsonl"), grades, strict=True)
    ]


# --------------------------------------------------------------------------------------------------
# The three parts: each runs what is missing, unless there are no workers, and returns its sections


def seeds(workers):
    jobs = [judged_job("full", seed) for seed in SEEDS]
    if workers:
        make_models(SEEDS, workers)
        run(jobs, workers)
    logs = [judged_log(job.out)[::6] for job in jobs]
    curves = {}
    for name in pictures.CURVES:
        points = [[row[name] for row in rows] for rows in zip(*logs)]
        curves[name] = [[statistics.fmean(x), statistics.stdev(x)] for x in points]
    limits = limits_of([yardstick(folder("models", seed), seed) for seed in SEEDS])
    return {
        "reports": {seed: read_report(job.out) for seed, job in zip(SEEDS, jobs)},
        "curves": curves,
        **limits,
    }


def limits_of(sticks):
    """The best policy at each beta, and best of n."""
    best = {n: over_seeds([stick.best_of(n) for stick in sticks]) for n in (4, 16, 64)}
    return {
        "best_of_n": {n: x | {"kl": best_of_n_kl(n)} for n, x in best.items()},
        "optimum": {
            beta: over_seeds([optimum(stick.reference, beta) for stick in sticks]) for beta in BETAS
        },
    }


def settings(workers):
    jobs = settings_jobs()
    if workers:
        make_models(range(5), workers)
        make_other_models(FEW_SEEDS, workers)
        run([job for runs in jobs.values() for job in runs], workers)
    out = {"settings": rows_of(jobs, SETTINGS, "default")}
    stick = yardstick(models_of(HACKED, 0), 0)
    policy, _, _ = load_checkpoint(jobs[HACKED][0].out / "ppo.pt", ["ppo"])
    out["hacked"] = most_hacked(*stick.ask(policy, SAMPLES), stick)
    paths = {name: path_of(jobs[name]) for name in ("beta = 0.03", "default", "beta = 0.3", HACKED)}
    return out | {"paths": paths}


def path_of(jobs, window=10):
    """How score, judge and KL move: means over the seeds and over every ten iterations."""
    logs = [judged_log(job.out) for job in jobs]
    parts = [
        [row for log in logs for row in log[i : i + window]] for i in range(0, len(logs[0]), window)
    ]
    return {
        name: [statistics.fmean(row[name] for row in part) for part in parts]
        for name in ("kl", "score", "judge")
    }


def most_hacked(x, texts, stick):
    """Three responses that the reward model likes and the judge does not, to different prompts."""
    gap, best = (x["score"] - x["judge"]).max(1)
    rows = []
    for i in gap.argsort(descending=True)[:3].tolist():
        words = {"prompt": stick.questions[i]}
        words["response"] = texts[i * SAMPLES + best[i]]
        rows.append(words | {name: x[name][i, best[i]].item() for name in ("score", "judge", "kl")})
    return rows


def neighbours(workers):
    names = names_of_neighbours()
    if workers:
        make_models(FEW_SEEDS, workers)
        for jobs_of in (searches, other_betas):
            run([job for name in names for job in jobs_of(name).values()], workers)
        run([job for runs in neighbour_jobs().values() for job in runs], workers)
    flags = {name: best(tried(name)) for name in names}
    return {
        "neighbours": rows_of(neighbour_jobs(), flags, "PPO"),
        "over_beta": {name: over_beta(name) for name in names},
        "limits": limits_of([yardstick(folder("models", 0), 0)]),
        "search": {
            name: {flags: optimality(job) for flags, job in tried(name).items()} for name in names
        },
    }


def over_beta(name):
    """{beta: figures on the first seed}, with the setting that the search found at the first
    beta."""
    found = best(searches(name))
    jobs = {found: searches(name)[found]} | other_betas(name)
    path = {
        float(flags.partition("--kl_coef ")[2] or BETA): measured(job, folder("models", 0), 0)
        for flags, job in jobs.items()
        if job.status() == 0
    }
    return dict(sorted(path.items()))


def quality(workers):
    jobs = paced_jobs()
    if workers:
        run([job for runs in jobs.values() for job in runs], workers)
    out = {}
    for name, runs in jobs.items():
        curves = [curve_of(job, folder("models", i), i) for i, job in enumerate(runs)]
        curve = [[statistics.fmean(x) for x in zip(*points)] for points in zip(*curves)]
        out[name] = {"curve": curve}
        for goal in GOALS:
            seconds = [seconds_to(goal, curve) for curve in curves]
            out[name][str(goal)] = None if None in seconds else mean_and_error(seconds)
    return {"quality": out}


def curve_of(job, models, seed):
    """[[seconds of training, optimality], ...] of the policies that were kept."""
    path = job.out / "curve.json"
    if not path.exists():
        seconds = [row["seconds"] for row in read_lines(job.out / "ppo.jsonl")]
        curve, stick = [], yardstick(models, seed)
        for step in range(PACE, len(seconds) + 1, PACE):
            policy, _, _ = load_checkpoint(job.out / "policies" / f"{step}.pt", ["ppo"])
            figures = stick.figures(stick.ask(policy, SAMPLES)[0])
            curve.append([seconds[step - 1], figures["optimality"]])
        path.write_text(json.dumps(curve))
    return json.loads(path.read_text())


def seconds_to(goal, curve):
    """When a straight line between two points first reaches the goal; None if it never does."""
    for (start, low), (end, high) in zip([[0.0, 0.0], *curve], curve):
        if high >= goal:
            return start + (end - start) * (goal - low) / (high - low)


def main():
    if sys.argv[1:2] == ["judged"]:
        return judged_ppo(sys.argv[2:])
    if sys.argv[1:2] == ["paced"]:
        return paced(sys.argv[2:])
    parts = {
        "seeds": seeds,
        "settings": settings,
        "neighbours": neighbours,
        "quality": quality,
    }
    flags = parser(__doc__)
    flags.add_argument("parts", nargs="+", metavar="part", help=", ".join(parts))
    flags.add_argument("--workers", type=int, default=2, help="processes at a time")
    flags.add_argument("--summary", action="store_true", help="train nothing")
    args = flags.parse_args()
    if unknown := set(args.parts) - set(parts):
        flags.error(f"no part is called {', '.join(unknown)}")
    prepare(RunConfig(device="cpu", out=RUNS))
    for name in args.parts:
        keep(parts[name](0 if args.summary else args.workers))
    pictures.draw(load())


if __name__ == "__main__":
    run_script(main)
