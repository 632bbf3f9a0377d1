"""Every training run behind the figures of README.md and RESULTS.md, on the default task.

    python -m bench.results               ten seeds, ablations and other settings (about three hours)
    python -m bench.results neighbours    PPO beside variations/ and TRL
    python -m bench.results seeds         or only one part of the first: seeds or settings

Runs what is missing in out/results, measures it, and writes bench/results.json, the pictures and
the tables. If interrupted, it goes on where it stopped; to begin anew, remove that folder. Each run
is a process with one thread; --workers says how many at a time. --summary measures what is there.

Every run starts from the SFT and reward models of its seed and is measured by the same ruler. In
"neighbours" each algorithm, PPO too, first gets the same small search on the first seed, at a
quarter of the length: three learning rates times two values of its main flag. The setting with the
largest score - beta KL in the last quarter of the log is kept.
"""

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

import minippo
import train_ppo
from bench import parser, pictures
from bench.tables import ROOT, keep, load, mean_and_error
from data.zoo import judge
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.errors import run_script
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
SHORT = "--steps 100 --no_report"

# name: flags. Each runs for 100 iterations, the default too, so that all have the same budget.
HACKED = "a quarter of the pairs, beta = 0"
ABLATIONS = {
    "default": "",
    "no clipping": "--clip_eps inf --value_clip inf",
    "one step per batch": "--minibatches 1",
    "no value function": "--lam 1 --vf_coef 0",
    "lam = 0": "--lam 0",
    "lam = 0.95": "--lam 0.95",
    "no advantage whitening": "--no_whiten",
    "KL in the loss": "--kl_coef 0 --kl_loss_coef 0.2",
    "beta = 0": "--kl_coef 0",
    "beta = 0.03": "--kl_coef 0.03",
    "beta = 0.3": "--kl_coef 0.3",
    "adaptive KL, target 3": "--kl_target 3 --kl_horizon 5000",
    "separate critic": "--separate_critic",
    "scores not normalised": "",
    "a quarter of the pairs": "",
    HACKED: "--kl_coef 0",
}
# Settings that other texts and programs have.
QUESTIONS = {
    "default": "",
    "clip at 0.1": "--clip_eps 0.1",
    "clip at 0.3": "--clip_eps 0.3",
    "four passes": "--epochs 4",
    "four passes, no clipping": "--epochs 4 --clip_eps inf --value_clip inf",
    "four passes, lower lr": "--epochs 4 --lr 0.0002",
    "four passes, lower lr, no clipping": "--epochs 4 --lr 0.0002 --clip_eps inf --value_clip inf",
    "gamma = 0.95": "--gamma 0.95",
    "value loss x 5": "--vf_coef 0.5",
    "value loss x 10": "--vf_coef 1",
    "entropy bonus 0.01": "--entropy_coef 0.01",
    "entropy bonus 0.1": "--entropy_coef 0.1",
    "KL in the loss too": "--kl_loss_coef 0.05",
    "reference moves, every iteration": "--ref_update_every 1",
    "reference moves, every 50": "--ref_update_every 50",
    "length penalty": "--length_penalty 0.05",
}

# What is run, the flag that is searched besides the learning rate, and its two values. Where the KL
# is not in the reward, the same beta is another price: see variations/dpo.py and grpo.py.
TRL = "-m torch.distributed.run --standalone --nproc_per_node 2 -m variations.outgrow --k 8"
ALGORITHMS = {
    "PPO": ("train_ppo.py", "minibatches 4 8"),
    "PPO, separate critic": ("train_ppo.py --separate_critic", "minibatches 4 8"),
    "PPO, KL penalty": ("-m variations.ppo_penalty", "target 0.003 0.03"),
    "PPO, one action": ("-m variations.sequence_ppo", "clip_eps 0.2 1"),
    "PPO, ratio of GSPO": ("-m variations.sequence_ppo --mean", "clip_eps 0.01 0.2"),
    "REINFORCE, total return": ("-m variations.reinforce --credit total", "minibatches 4 8"),
    "REINFORCE, reward-to-go": ("-m variations.reinforce", "minibatches 4 8"),
    "REINFORCE, less the value": ("-m variations.reinforce --baseline", "minibatches 4 8"),
    "RLOO": ("-m variations.rloo", "k 4 8"),
    "GRPO": ("-m variations.grpo --k 8", "kl_coef 0.1 0.3"),
    "Dr. GRPO": ("-m variations.grpo --no_std --no_length --k 8", "kl_coef 0.1 0.3"),
    "PPO of TRL": ("-m bench.trl_ppo", "minibatches 4 8"),
    "GRPO of TRL": (TRL, "kl_coef 0.1 0.3"),
    "best of n, imitated": ("-m variations.best_of_n", "n 4 8"),
    "DPO": ("-m variations.dpo", "kl_coef 0.1 0.3"),
    "IPO": ("-m variations.dpo --ipo", "kl_coef 0.1 0.3"),
}
STEPS, RATES = 200, (4e-4, 8e-4, 1.6e-3)
LOW_RATES = 1.2e-4, 4e-4, 1.2e-3  # for DPO and IPO, whose pairs never change


# --------------------------------------------------------------------------------------------------
# What is run


@dataclass
class Job:
    """A process that trains something, and the folder that it writes into."""

    out: Path
    words: list  # for Python
    policy: str = "ppo.pt"  # in that folder
    env: dict = field(default_factory=dict)

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
        env = os.environ | {"OMP_NUM_THREADS": "1"} | self.env
        with open(self.out / "log.txt", "a") as log:
            command = [sys.executable, "-u", *words]
            code = subprocess.call(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        if code in (0, 2):  # not when it was stopped
            self.path_of_status().write_text(str(code))

    def log(self):
        """score, KL and seconds of each iteration."""
        if (self.out / "trainer_state.json").exists():  # of TRL, which logs the KL per token
            rows = json.loads((self.out / "trainer_state.json").read_text())["log_history"]
            seconds, rows = rows[-1]["train_runtime"], [row for row in rows if "reward" in row]
            return [
                {
                    "score": row["reward"],
                    "kl": row["kl"] * row["completions/mean_length"],
                    "seconds": seconds * (i + 1) / len(rows),
                }
                for i, row in enumerate(rows)
            ]
        return read_lines(self.out / "ppo.jsonl")

    def objective(self):
        """score - beta KL in the last quarter of the log; None where the run has failed."""
        if self.status():
            return None
        rows = self.log()
        rows = rows[-max(1, len(rows) // 4) :]
        return statistics.fmean(row["score"] - BETA * row["kl"] for row in rows)

    def seconds(self):
        """Of training; in the rounds of variations/iterate.py, of PPO and of the reward models."""
        logs = [*self.out.glob("*/ppo.jsonl"), *self.out.glob("*/rm.jsonl")]
        return sum(read_lines(path)[-1]["seconds"] for path in logs) or self.log()[-1]["seconds"]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(jobs, workers):
    """Those that are missing, `workers` at a time; those of several processes alone."""
    apart = [job for job in jobs if "variations.outgrow" in job.words]
    for job in apart:
        job.run()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(Job.run, [job for job in jobs if job not in apart]))
    if missing := [str(job.out) for job in jobs if job.status() is None]:
        sys.exit(f"not finished, log.txt says why: {', '.join(missing)}; call again to go on")


def folder(name, seed):
    return RUNS / "".join(c if c.isalnum() or c in "/." else "_" for c in name.lower()) / str(seed)


def models_of(name, seed):
    """The folder with the SFT and the reward model that a setting starts from."""
    kind = "few pairs" if "quarter" in name else "raw" if "not normalised" in name else "models"
    return folder(kind, seed)


def make_models(seeds, workers):
    for kind in ("sft", "rm"):
        words = [f"train_{kind}.py", "--resume", "--seed"]
        run([Job(folder("models", seed), [*words, seed]) for seed in seeds], workers)


def make_other_models(seeds, workers):
    """Reward models with scores that are not normalised, and of a quarter of the pairs."""
    jobs = []
    for seed in seeds:
        models, raw, few = (folder(kind, seed) for kind in ("models", "raw", "few pairs"))
        data = few / "data"
        data.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "data" / "zoo").iterdir():
            lines = path.read_bytes().splitlines(True)
            share = 4 if path.stem == "pref_train" else 1
            (data / path.name).write_bytes(b"".join(lines[: len(lines) // share]))
        for out in (raw, few):
            out.mkdir(parents=True, exist_ok=True)
            (out / "sft.pt").unlink(missing_ok=True)
            os.link(models / "sft.pt", out / "sft.pt")
        model, tokenizer, facts = load_checkpoint(models / "rm.pt", ["rm"])
        model.cap.mul_(model.std).add_(model.mean)
        model.mean.zero_(), model.std.fill_(1.0)
        save_checkpoint(raw / "rm.pt", "rm", model, tokenizer, **facts)
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


def settings_jobs(settings):
    return {
        name: [judged_job(name, seed, f"{SHORT} {flags}") for seed in FEW_SEEDS]
        for name, flags in settings.items()
    }


def searches(name):
    """{flags: job} for the six settings, on the first seed, at a quarter of the length."""
    flag, *values = ALGORITHMS[name][1].split()
    jobs = {}
    for lr, value in itertools.product(LOW_RATES if name in ("DPO", "IPO") else RATES, values):
        flags = f"--lr {lr:g} --{flag} {value}"
        jobs[flags] = neighbour_job(name, f"search/{name} {flags}", 0, STEPS // 4, flags)
    return jobs


def neighbour_job(name, out, seed, steps, flags):
    words = ALGORITHMS[name][0].split()
    models = ["--models", folder("models", seed), "--seed", seed]
    go_on = "--overwrite" if "TRL" in name else "--resume"  # TRL begins anew
    length = ["--steps", steps, "--no_report", go_on]
    return Job(folder(f"neighbours/{out}", seed), [*words, *models, *length, *flags.split()])


def best(name):
    """The flags that did best in the search; None if all of them failed."""
    found = {flags: job.objective() for flags, job in searches(name).items()}
    found = {flags: x for flags, x in found.items() if x is not None}
    return max(found, key=found.get, default=None)


def neighbour_jobs():
    """{name: the job of each seed, with the best setting}, once all searches are done."""
    names = [name for name in ALGORITHMS if "TRL" not in name or find_spec("trl")]
    return {
        name: [neighbour_job(name, name, seed, STEPS, flags) for seed in FEW_SEEDS]
        for name in names
        if (flags := best(name))
    }


def hacking_jobs():
    """{name: jobs} at beta = 0, on the first seed, after the ensemble of reward models."""
    home, seed, rounds = folder("neighbours/against hacking", 0), 0, 3
    models = ["--models", folder("models", seed)]
    flags = ["--seed", seed, "--kl_coef", 0, "--no_report", "--resume", "--steps", STEPS]
    rewards = {
        "one reward model": [],
        "mean of three": ["--reward", "variations.ensemble:mean"],
        "lowest of three": ["--reward", "variations.ensemble:minimum"],
    }
    jobs = {
        name: Job(
            home / name,
            ["train_ppo.py", *models, *flags, *reward],
            env={"ENSEMBLE": str(home / "ensemble")},
        )
        for name, reward in rewards.items()
    }
    ppo = f"--kl_coef 0 --steps {STEPS // rounds} --no_report"
    words = ["-m", "variations.iterate", "--rounds", rounds, "--ppo", ppo, *models, "--seed", seed]
    jobs["three rounds"] = Job(home / "rounds", words, f"{rounds}/ppo.pt")
    return Job(home / "ensemble", ["-m", "variations.ensemble", *models]), jobs


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
        policy, _, _ = load_checkpoint(job.out / job.policy, ["ppo"])
        path.write_text(json.dumps(stick.figures(stick.ask(policy, SAMPLES)[0])))
    return json.loads(path.read_text()) | {"seconds": job.seconds()}


def over_seeds(rows):
    """Dicts of numbers, one for each seed -> {name: [mean, error]}."""
    return {name: mean_and_error([row[name] for row in rows]) for name in rows[0]}


def differences(rows, first):
    """The optimality of these runs less that of the `first`, seed by seed: known better than
    either."""
    pairs = zip(rows, first, strict=True)
    return mean_and_error([row["optimality"] - other["optimality"] for row, other in pairs])


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
    sticks = [yardstick(folder("models", seed), seed) for seed in SEEDS]
    best = {n: over_seeds([stick.best_of(n) for stick in sticks]) for n in (4, 16, 64)}
    return {
        "reports": {seed: read_report(job.out) for seed, job in zip(SEEDS, jobs)},
        "curves": curves,
        "best_of_n": {n: x | {"kl": best_of_n_kl(n)} for n, x in best.items()},
        "optimum": {
            beta: over_seeds([optimum(stick.reference, beta) for stick in sticks]) for beta in BETAS
        },
    }


def settings(workers):
    jobs = settings_jobs(ABLATIONS | QUESTIONS)
    if workers:
        make_models(FEW_SEEDS, workers)
        make_other_models(FEW_SEEDS, workers)
        run([job for runs in jobs.values() for job in runs], workers)
    out = {
        "ablations": rows_of({name: jobs[name] for name in ABLATIONS}, ABLATIONS, "default"),
        "questions": rows_of({name: jobs[name] for name in QUESTIONS}, QUESTIONS, "default"),
    }
    stick = yardstick(models_of(HACKED, 0), 0)
    policy, _, _ = load_checkpoint(folder(HACKED, 0) / "ppo.pt", ["ppo"])
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
    names = [name for name in ALGORITHMS if "TRL" not in name or find_spec("trl")]
    ensemble, hacking = hacking_jobs()
    if workers:
        make_models(FEW_SEEDS, workers)
        run([job for name in names for job in searches(name).values()], workers)
        run([job for runs in neighbour_jobs().values() for job in runs], workers)
        run([ensemble], workers)
        run(list(hacking.values()), workers)
    flags = {name: best(name) for name in names}
    rows = {name: measured(job, folder("models", 0), 0) for name, job in hacking.items()}
    return {
        "neighbours": rows_of(neighbour_jobs(), flags, "PPO"),
        "search": {
            name: {flags: job.objective() for flags, job in searches(name).items()}
            for name in names
        },
        "hacking": [{"name": name, "beta": 0, **row} for name, row in rows.items()],
    }


def main():
    if sys.argv[1:2] == ["judged"]:
        return judged_ppo(sys.argv[2:])
    parts = {"seeds": seeds, "settings": settings, "neighbours": neighbours}
    flags = parser(__doc__)
    flags.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    flags.add_argument("--workers", type=int, default=2, help="processes at a time")
    flags.add_argument("--summary", action="store_true", help="train nothing")
    args = flags.parse_args()
    if unknown := set(args.parts) - set(parts):
        flags.error(f"no part is called {', '.join(unknown)}")
    prepare(RunConfig(device="cpu", out=RUNS))
    for name in args.parts or ["seeds", "settings"]:
        keep(parts[name](0 if args.summary else args.workers))
    pictures.draw(load())


if __name__ == "__main__":
    run_script(main)
