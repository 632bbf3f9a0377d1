"""The runs of the three scripts, of variations/ and of TRL behind the tables of RESULTS.md.

    python -m bench.results seeds         the default, all three stages, on ten seeds
    python -m bench.results settings      PPO with other settings, on three
    python -m bench.results passes        PPO with several passes over a batch, on three
    python -m bench.results equals        settings of PPO that make little difference, on three
    python -m bench.results neighbours    PPO beside variations/ and TRL (trl==1.12.0), on three
    python -m bench.results sums          PPO, RLOO and GRPO on examples/sums.py, on three

Runs what is missing in out/results, or of another commit or machine, and writes the tables. A run
is a process of the real script with one thread; then train_ppo.py measures its policy, at the
settings of its task, whatever it was trained with. If interrupted, the same command goes on.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import torch

from bench.tables import ROOT, mean_and_error, provenance, store
from data.files import UserError, read_log, write_file, write_jsonl
from data.zoo import write_data
from examples.sums import make_rows
from minippo import PPOConfig
from plumbing.models import load_models
from plumbing.report import PROMPTS, Evaluator, optimal_objective
from plumbing.settings import read_flags, script
from plumbing.text import read_prompts

RUNS, ZOO = ROOT / "out" / "results", ROOT / "data" / "zoo"
REWARD = "--reward examples.sums:score"
STAGES = {  # what makes the models that a policy starts from
    "zoo": ["train_sft.py", "train_rm.py"],
    "few pairs": ["train_sft.py", "train_rm.py --steps 312"],  # a quarter of them, once
    "sums": ["train_sft.py --vocab_size 270 --steps 1500 --lr 1e-3"],
}
MEASURE = dict.fromkeys(STAGES, "train_ppo.py --lr 0 --steps 1")  # it ends with the report
MEASURE["sums"] += f" {REWARD} --missing_eos_penalty 0"  # so the score is the share of right sums
HACKED = "a quarter of the pairs, beta = 0"
TABLES = {  # name of a row: how its policy is trained, by train_ppo.py if no script is named
    "seeds": {"default": ""},
    "settings": {
        "default": "",
        "lam = 0": "--lam 0",
        "gamma = 0.95": "--gamma 0.95",
        "length penalty 0.05": "--length_penalty 0.05",
        "KL in the loss, 0.2": "--kl_coef 0 --kl_loss_coef 0.2",
        "beta = 0.03": "--kl_coef 0.03",
        "beta = 0.3": "--kl_coef 0.3",
        "beta = 0": "--kl_coef 0",
        "reference moves, every 50 iterations": "--ref_update_every 50",
        "a quarter of the pairs": "",
        HACKED: "--kl_coef 0",
    },
    "passes": {
        "default": "",
        "four passes": "--epochs 4",
        "four passes, half the rate": "--epochs 4 --lr 4e-4",
        "four passes, a quarter of the rate": "--epochs 4 --lr 2e-4",
        "four passes of one step": "--epochs 4 --minibatches 1",
        "four passes, no value clip": "--epochs 4 --value_clip inf",
        "four passes, no clipping": "--epochs 4 --clip_eps inf --value_clip inf",
        "lam = 0.95": "--lam 0.95",
    },
    "equals": {
        "default": "",
        "no value function": "--vf_coef 0",
        "an entropy bonus, 0.03": "--entropy_coef 0.03",
        "Adam's epsilon 1e-8": "--adam_eps 1e-8",
    },
    "neighbours": {  # with what a search on seed 0 found
        "PPO": "train_ppo.py",
        "PPO, separate critic": "train_ppo.py --separate_critic --lr 4e-4 --minibatches 8",
        "PPO, KL penalty": "-m variations.ppo_penalty --lr 4e-4",
        "REINFORCE, reward-to-go": "-m variations.reinforce --lr 4e-4",
        "REINFORCE, value baseline": "-m variations.reinforce --baseline",
        "RLOO": "-m variations.rloo --k 8",
        "GRPO": "-m variations.grpo --k 8 --lr 4e-4",
        "Dr. GRPO": "-m variations.grpo --no_std --no_length --k 8 --lr 4e-4 --kl_coef 0.05",
        "PPO of TRL": "-m bench.trl_ppo",
        "DPO": "-m variations.dpo --lr 4e-4 --kl_coef 0.5",
        "IPO": "-m variations.dpo --ipo --lr 4e-4 --kl_coef 0.06",
    },
    "sums": {"PPO": "train_ppo.py", "RLOO": "-m variations.rloo", "GRPO": "-m variations.grpo"},
}
ADDED_FLAGS = dict.fromkeys(("passes", "equals", "neighbours"), "--steps 200") | {"sums": REWARD}
PATHS = "beta = 0.03", "default", "beta = 0.3", HACKED  # for the pictures
WINDOWS = *range(0, 100, 10), *range(100, 451, 50)  # of iterations; most happens in the first
BETAS = 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0  # of the best policies
COLUMNS = "judge", "score", "optimality", "kl", "distinct"
FEW = "judge", "optimality", "kl"
OF_A_SEED = "policy judge", "policy kl", "seen optimality", "unseen optimality"

# The runner: a job is a folder and the words of its processes


def models_folder(task, seed):
    return RUNS / task / "models" / str(seed)


def job(task, out, seed, *lines):
    data = RUNS / "sums" / "data" if task == "sums" else ZOO
    same = "--data", data, "--seed", seed, "--device", "cpu", "--overwrite"
    return out, [[*map(str, (*words, *same))] for words in lines]


def models_job(task, seed):
    out = models_folder(task, seed)
    return job(task, out, seed, *([*line.split(), "--out", out] for line in STAGES[task]))


def policy_job(task, seed, line):
    """Train a policy; then measure it, by an iteration with a learning rate of 0."""
    out = RUNS / task / re.sub(r"[^\w.]+", "_", line.strip()) / str(seed)
    models = "--models", models_folder(task, seed)
    train = *line.split(), *models, "--out", out, "--no_report"
    measure = *MEASURE[task].split(), *models, "--out", out / "measured"
    return job(task, out, seed, train, (*measure, "--policy", out / "ppo.pt"))


def run(out, commands, source):
    """Do a job, unless it has ended well before, of this commit and machine."""
    path, ended = out / "made.json", json.dumps({"made": source, "commands": commands})
    if path.exists() and path.read_text() == ended:
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "log.txt", "w") as log:
        process = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT}
        process["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
        for words in commands:
            print(" ".join(["python", *words]), flush=True)
            if subprocess.call([sys.executable, *words], **process):
                raise UserError(f"{log.name} says what went wrong")
    write_file(path, ended)


def train(table, source):
    """-> {name of a row: the folder of each seed}."""
    seeds, rows = range(10 if table == "seeds" else 3), {}
    for name, line in TABLES[table].items():
        task = "sums" if table == "sums" else "few pairs" if "pairs" in name else "zoo"
        script = "" if line.startswith(("-m", "train")) else "train_ppo.py"
        rows[name] = task, f"{script} {line} {ADDED_FLAGS.get(table, '')}"
    tasks = sorted({task for task, _ in rows.values()})
    if "sums" in tasks:
        for name, lines in make_rows(0).items():
            write_jsonl(RUNS / "sums" / "data" / f"{name}.jsonl", lines)
    elif not ZOO.exists():
        write_data(ZOO)
    models = [models_job(task, seed) for task in tasks for seed in seeds]
    jobs = {name: [policy_job(task, x, line) for x in seeds] for name, (task, line) in rows.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for wave in (models, sum(jobs.values(), [])):
            list(pool.map(lambda job: run(*job, source), wave))
    return {name: [out for out, _ in row] for name, row in jobs.items()}


# What is measured


def report(out):
    return json.loads((out / "measured" / "report.json").read_text())


def log(out):
    return read_log(out / "ppo.jsonl")


@torch.no_grad()
def optima(seed):
    """The best policy at each beta, pi* ~ ref exp(score / beta), on the report's prompts."""
    more = {"policy": "", "reward": "", "device": "cpu", "data": ZOO}
    config = SimpleNamespace(**vars(PPOConfig()), **more, models=models_folder("zoo", seed))
    _, ref, score, tokenizer = load_models(config)
    prompts, rows = read_prompts(ZOO, "val", tokenizer, ref.config.context), {}
    torch.manual_seed(seed)
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
    reference = Evaluator(ref, score, tokenizer, prompts, config).reference
    scores = reference["score"]
    for beta in BETAS:
        weights = torch.softmax(scores / beta, 1)
        row = {x: (weights * reference[x]).sum(1).mean().item() for x in ("judge", "score")}
        best = optimal_objective(scores, beta).mean().item()
        rows[str(beta)] = row | {"kl": (row["score"] - best) / beta}
    return rows


def over_seeds(rows, columns=COLUMNS):
    """The figures of each seed -> {column: [mean, error]}."""
    return {x: mean_and_error([row[x] for row in rows]) for x in columns if x in rows[0]}


def rows_of(table, folders, columns=FEW):
    """The last figure is a difference of optimality, on the same seed and models."""
    rows, first_name = {}, next(iter(folders))
    first = [report(out)["policy"] for out in folders[first_name]]
    for name, outs in folders.items():
        figures = [report(out)["policy"] for out in outs]
        flags = {"flags": TABLES[table][name]} if table == "neighbours" else {}
        rows[name] = flags | over_seeds(figures, columns)
        if name != first_name and "pairs" not in name:
            gain = [x["optimality"] - y["optimality"] for x, y in zip(figures, first)]
            rows[name]["minus the first row"] = mean_and_error(gain)
    return rows


def row_of_seed(out):
    measured, row = report(out), {}
    for part, name in map(str.split, OF_A_SEED):
        row[f"{part} {name}"] = [measured[part].get(name), measured[part].get(f"{name}_se")]
    kl = [line["kl"] for line in log(out)]
    return row | {"suspects": measured["suspects"]["count"], "jumps": jumps(kl)}


def jumps(kl):
    """How many of the KLs, one per iteration, exceed the median of the hundred before by 1 nat."""
    medians = (statistics.median(kl[i - 100 : i]) for i in range(100, len(kl)))
    return sum(x > 1 + median for x, median in zip(kl[100:], medians))


def path_of(outs):
    """Means over the seeds and over the iterations of each window."""
    logs, path = [log(out) for out in outs], {"kl": [], "score": [], "judge": []}
    for start, end in pairwise(WINDOWS):
        for name, means in path.items():
            values = [line[name] for lines in logs for line in lines[start:end]]
            means.append(statistics.fmean(values))
    return path


# {name of a row: the folder of each seed} -> sections of results.json, where it is not rows_of()


def seeds(folders):
    outs = folders["default"]
    reports, best = [report(out) for out in outs], [optima(seed) for seed in range(len(outs))]
    best = {beta: over_seeds([row[beta] for row in best]) for beta in best[0]}
    systems = {f"best of {n}": [x["best_of_n"][n] for x in reports] for n in ("4", "16", "64")}
    for name, part in {"SFT": "sft", "PPO": "policy", "PPO, unseen prompts": "unseen"}.items():
        systems[name] = [x[part] for x in reports]
    systems = {name: over_seeds(figures) for name, figures in systems.items()}
    systems["the optimum at beta = 0.1"] = best.pop("0.1") | {"optimality": 1}
    rows = {str(seed): row_of_seed(out) for seed, out in enumerate(outs)}
    return {"systems": systems, "seeds": rows, "optima": best}


def settings(folders):
    return {
        "settings": rows_of("settings", folders, COLUMNS),
        "paths": {x.replace("default", "beta = 0.1"): path_of(folders[x]) for x in PATHS},
    }


def sums(folders):
    """The score is the share of right sums, among those not trained on."""
    rows = {"SFT": over_seeds([report(out)["sft"] for out in folders["PPO"]])}
    for name, outs in folders.items():
        rows[name] = over_seeds([report(out)["policy"] for out in outs])
    return {"sums": rows}


@script
def main():
    _, names = read_flags(__doc__, run=False, positional="TABLE")
    for name in {*names} - {*TABLES}:
        raise UserError(f"{name}: should be among {', '.join(TABLES)}")
    source, summaries = provenance(), {"seeds": seeds, "settings": settings, "sums": sums}
    for name in names:
        folders = train(name, source)
        measured = summaries[name](folders) if name in summaries else {name: rows_of(name, folders)}
        store(measured, source)


if __name__ == "__main__":
    main()
