"""Every figure, table and picture of README.md and RESULTS.md, from training runs over several seeds.

    python -m bench.results            runs whatever is missing, one process each, then writes bench/results.json, the pictures
                                       beside it, and the tables of both texts; if interrupted, it goes on where it stopped
    python -m bench.results --summary  only the latter, from the runs that are there
    python -m bench.results --texts    only the tables of both texts, from bench/results.json

The runs are kept in out/results. The default is trained on five seeds at full length; each ablation on three, for 100 iterations.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import minippo
from minippo import PPOConfig, row_lengths
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.report import best_of_n, optimal_objective, optimum, respond
from plumbing.settings import RunConfig, prepare, run_script
from plumbing.text import load_jsonl, texts_of

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "out" / "results"
SEEDS, FEW_SEEDS = 5, 3
PROMPTS, REFERENCE, SAMPLES = 128, 192, 16  # prompts; responses of the SFT model, and of a policy, to each
BETAS = (0.03, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0)

# name: flags. Each runs for 100 iterations, the default among them, so that all have the same budget.
ABLATIONS = {
    "default": "",
    "no clipping": "--clip_eps inf --value_clip inf",
    "one step per batch": "--minibatches 1",
    "no value function": "--lam 1 --vf_coef 0",
    "lam = 0": "--lam 0",
    "lam = 0.95": "--lam 0.95",
    "no advantage whitening": "",
    "KL in the loss": "--kl_coef 0 --kl_loss_coef 0.2",
    "beta = 0": "--kl_coef 0",
    "beta = 0.03": "--kl_coef 0.03",
    "beta = 0.3": "--kl_coef 0.3",
    "adaptive KL, target 3": "--kl_target 3 --kl_horizon 5000",
    "separate critic": "--separate_critic",
    "scores not normalised": "",
    "a quarter of the pairs": "",
    "a quarter of the pairs, beta = 0": "--kl_coef 0",
}
# Settings that other texts and programs have, as many iterations.
QUESTIONS = {
    "clip at 0.1": "--clip_eps 0.1",
    "clip at 0.3": "--clip_eps 0.3",
    "four passes": "--epochs 4",
    "four passes, no clipping": "--epochs 4 --clip_eps inf --value_clip inf",
    "four passes, lower lr": f"--epochs 4 --lr {PPOConfig.lr / 4:g}",
    "four passes, lower lr, no clipping": f"--epochs 4 --lr {PPOConfig.lr / 4:g} --clip_eps inf --value_clip inf",
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
TEXTS = ("README.md", "RESULTS.md")
FILES = {
    "minippo.py": "the algorithm, to be read",
    "train_sft.py": "stage 1: imitate demonstrations",
    "train_rm.py": "stage 2: learn which answers are preferred",
    "train_ppo.py": "stage 3: raise the score, stay close",
    "sample.py": "talk to a trained model",
    "variations/": "PPO's neighbours, each a small change of it",
    "plumbing/": "flags, tokenizer, data folders, checkpoints, resuming, the report, the Hugging Face bridge",
    "data/": "the default data and its judge; converters",
    "tests/": "the specification, the proof, the known bugs",
    "bench/": "whatever makes a number or a picture of README.md and RESULTS.md",
}
HACKED = "a quarter of the pairs, beta = 0"
NO_PENALTY, OTHER_DATA = RUNS / "no_penalty", RUNS / "other_data"  # one run each, seed 0, at full length


def command(script, *flags):
    """Run a script in a process of its own, its output in log.txt of its --out folder."""
    out = Path(flags[flags.index("--out") + 1])
    out.mkdir(parents=True, exist_ok=True)
    print(" ".join(["python", script, *flags]), flush=True)
    with open(out / "log.txt", "a") as log:
        name = [script] if script.endswith(".py") else ["-m", script]
        subprocess.run([sys.executable, "-u", *name, *flags], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)


def folder(name, seed):
    return RUNS / name.replace(" ", "_").replace(",", "").replace("=", "") / str(seed)


def models_of(name, seed):
    """The folder with the SFT and the reward model that a setting starts from."""
    return folder("few pairs" if "quarter" in name else "raw" if "not normalised" in name else "models", seed)


def make_models(seed, ablations):
    """SFT and reward model of a seed; the same with a quarter of the pairs; the same with scores that are not normalised."""
    out, few, raw = (folder(name, seed) for name in ("models", "few pairs", "raw"))
    for kind in ("sft", "rm"):
        if not (out / f"{kind}.done").exists():
            command(f"train_{kind}.py", "--out", str(out), "--seed", str(seed))
            (out / f"{kind}.done").touch()
    if seed >= FEW_SEEDS or not ablations:
        return
    if not (raw / "rm.pt").exists():
        model, tokenizer, facts = load_checkpoint(out / "rm.pt", ("rm",))
        model.mean.zero_(), model.std.fill_(1.0)
        raw.mkdir(parents=True, exist_ok=True)
        os.link(out / "sft.pt", raw / "sft.pt")
        save_checkpoint(raw / "rm.pt", "rm", model, tokenizer, **facts)
    if not (few / "rm.done").exists():
        data = few / "data"
        data.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "data" / "zoo").iterdir():
            lines = path.read_bytes().splitlines(True)
            (data / path.name).write_bytes(b"".join(lines[: len(lines) // 4] if path.stem == "pref_train" else lines))
        (few / "sft.pt").unlink(missing_ok=True)
        os.link(out / "sft.pt", few / "sft.pt")
        command("train_rm.py", "--out", str(few), "--seed", str(seed), "--data", str(data))
        (few / "rm.done").touch()


def recorded_ppo(name, seed, flags):
    """train_ppo.py in this process, with the judge looking on: out/judge.json gets his mean score of each batch of responses."""
    import train_ppo
    from data.zoo import judge

    models, out = models_of(name, seed), folder(name, seed)
    tokenizer = load_checkpoint(models / "sft.pt", ("sft",))[1]
    grades = []

    def iterate_and_judge(*args, **kwargs):
        batch, metrics = minippo.ppo_iteration(*args, **kwargs)
        prompts, responses = texts_of(tokenizer, batch["tokens"], batch["mask"])
        grades.append(sum(map(judge, prompts, responses)) / len(prompts))
        (out / "judge.json").write_text(json.dumps(grades))
        return batch, metrics

    if name == "no advantage whitening":
        minippo.whiten = lambda x, mask: torch.where(mask, x, 0.0)
    sys.argv = ["train_ppo.py", "--models", str(models), "--out", str(out), "--seed", str(seed), *flags]
    run_script(lambda: train_ppo.main(iterate_and_judge))


def missing():
    """Everything still to be run, as (name, seed, flags); the default at full length comes first."""
    runs = [("full", seed, []) for seed in range(SEEDS)]
    for seed in range(FEW_SEEDS):
        settings = {**ABLATIONS, **QUESTIONS}.items()
        runs += [(name, seed, ["--steps", "100", "--no_report", *flags.split()]) for name, flags in settings]
    return [(name, seed, flags) for name, seed, flags in runs if not (folder(name, seed) / "ppo.done").exists()]


def run_all(ablations):
    for name, seed, flags in missing():
        if name != "full" and not ablations:
            continue
        make_models(seed, ablations)
        command("bench.results", "--record", name, "--seed", str(seed), "--out", str(folder(name, seed)), *flags)
        (folder(name, seed) / "ppo.done").touch()
    if not (NO_PENALTY / "report.json").exists():
        command("train_ppo.py", "--kl_coef", "0", "--models", str(folder("models", 0)), "--out", str(NO_PENALTY))
    if not (OTHER_DATA / "report.json").exists():
        data = OTHER_DATA / "zoo7"
        command("data/zoo.py", "--seed", "7", "--out", str(data))
        for kind in ("sft", "rm", "ppo"):
            command(f"train_{kind}.py", "--data", str(data), "--out", str(OTHER_DATA))


# ----------------------------------------------------------------------------------------------------------------------
# From runs to figures


def mean_and_error(numbers):
    """Over seeds: mean and standard error of the mean, or None for the latter where there is one seed."""
    x = torch.tensor(numbers, dtype=torch.float64)
    return {"mean": x.mean().item(), "se": (x.std() / math.sqrt(len(x))).item() if len(x) > 1 else None, "seeds": len(x)}


def over_seeds(rows):
    """A list of dicts of numbers -> {name: mean_and_error}."""
    return {name: mean_and_error([row[name] for row in rows]) for name in rows[0]}


class Yardstick:
    """Prompts of the validation file, the SFT model's answers to them, and what follows from those: for one setting and seed."""

    def __init__(self, name, seed):
        from data.zoo import judge

        models = models_of(name, seed)
        self.sft, self.tokenizer, _ = load_checkpoint(models / "sft.pt", ("sft",))
        self.reward_model, _, _ = load_checkpoint(models / "rm.pt", ("rm",))
        self.config, self.judge = PPOConfig(), judge
        torch.manual_seed(seed)
        prompts = [self.tokenizer.encode(row[0]) for row in load_jsonl(ROOT / "data" / "zoo" / "prompts_val.jsonl", ["prompt"])]
        self.prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
        self.reference, _ = self.respond(self.sft, REFERENCE)

    def respond(self, policy, n):
        def score(tokens, mask):
            return self.reward_model(tokens, row_lengths(mask))

        return respond(policy, self.sft, score, self.prompts, n, self.tokenizer, self.config, judge=self.judge)

    def measure(self, policy, beta=0.1):
        """What a policy reaches: score, judge, KL, and J = score - beta KL as a share of the way from SFT to the optimum."""
        x, texts = self.respond(policy, SAMPLES)
        J, J_sft = (x["score"] - beta * x["kl"]).mean().item(), self.reference["score"].mean().item()
        J_best = optimal_objective(self.reference["score"], beta).mean().item()
        row = {name: x[name].mean().item() for name in ("judge", "score", "kl", "ended", "length")}
        return row | {"optimality": (J - J_sft) / (J_best - J_sft)}, x, texts

    def best_of(self, n):
        row = {name: best_of_n(self.reference["score"], self.reference[name], n).mean().item() for name in ("score", "judge")}
        return row | {"kl": math.log(n) - (n - 1) / n}


def log_of(name, seed):
    """The metrics of each iteration, with the judge's mean score where he looked on."""
    log = [json.loads(line) for line in (folder(name, seed) / "ppo.jsonl").read_text().splitlines()]
    grades = folder(name, seed) / "judge.json"
    for row, grade in zip(log, json.loads(grades.read_text()) if grades.exists() else []):
        row["judge"] = grade
    return log


def path_of(name, window=10):
    """How score, judge and KL move during training: means over the seeds and over every ten iterations."""
    logs = [log_of(name, seed) for seed in range(FEW_SEEDS) if (folder(name, seed) / "ppo.done").exists()]
    rows = [[row for log in logs for row in log[i : i + window]] for i in range(0, len(logs[0]) if logs else 0, window)]
    return [{key: sum(row[key] for row in part) / len(part) for key in ("score", "judge", "kl")} for part in rows]


def summarise():
    """All runs that are there -> the dict of bench/results.json."""
    seeds = [seed for seed in range(SEEDS) if (folder("full", seed) / "ppo.done").exists()]
    reports = [json.loads((folder("full", seed) / "report.json").read_text()) for seed in seeds]
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}"
    out, logs = {"machine": machine, "seeds": seeds, "reports": reports}, [log_of("full", seed) for seed in seeds]
    out["no_penalty"], out["other_data"] = (json.loads((x / "report.json").read_text()) for x in (NO_PENALTY, OTHER_DATA))
    for name in ("score", "judge", "kl", "entropy", "explained_variance"):
        curve = [mean_and_error([log[i][name] for log in logs]) for i in range(0, len(logs[0]), 3)]
        out.setdefault("curves", {})[name] = curve
    other = [json.loads(line) for line in (OTHER_DATA / "ppo.jsonl").read_text().splitlines()]
    out["jumps"] = [jumps([row["kl"] for row in log]) for log in [*logs, other]]
    sticks = {}

    def stick(name, seed):
        key = models_of(name, seed)
        if key not in sticks:
            sticks[key] = Yardstick(name, seed)
        return sticks[key]

    out["best_of_n"] = {n: over_seeds([stick("full", seed).best_of(n) for seed in seeds]) for n in (4, 16, 64)}
    out["optimum"] = {beta: over_seeds([optimum(stick("full", seed).reference, beta) for seed in seeds]) for beta in BETAS}
    for key, settings in (("ablations", ABLATIONS), ("questions", {"default": "", **QUESTIONS})):
        if all((folder(name, seed) / "ppo.done").exists() for name in settings for seed in range(FEW_SEEDS)):
            out[key] = summarise_settings(stick, settings)
    if "ablations" in out:
        policy, _, _ = load_checkpoint(folder(HACKED, 0) / "ppo.pt", ("ppo",))
        out["hacked"] = worst_of(*stick(HACKED, 0).measure(policy)[1:], stick(HACKED, 0))
        out["paths"] = {name: path_of(name) for name in ("beta = 0.03", "default", "beta = 0.3", HACKED)}
    return out


def jumps(kl, window=100):
    """How many of these KLs, one per iteration, are more than 1 nat above the median of the hundred before; the first have none."""
    return sum(kl[i] > 1 + statistics.median(kl[i - window : i]) for i in range(window, len(kl)))


def differences(rows, first):
    """The optimality of these runs less that of the `first` ones, seed by seed: known better than either mean."""
    return mean_and_error([row["optimality"] - other["optimality"] for row, other in zip(rows, first, strict=True)])


def summarise_settings(stick, settings):
    """{setting: flags}, the default among them, all of which have been run -> {setting: its figures}."""
    out = {}
    runs = {name: [load_checkpoint(folder(name, seed) / "ppo.pt", ("ppo",))[0] for seed in range(FEW_SEEDS)] for name in settings}
    rows = {name: [stick(name, i).measure(policy)[0] for i, policy in enumerate(policies)] for name, policies in runs.items()}
    for name, flags in settings.items():
        out[name] = {"flags": flags, **over_seeds(rows[name])}
        if models_of(name, 0) == models_of("default", 0) and name != "default":
            out[name]["gain"] = differences(rows[name], rows["default"])
    return out


def worst_of(x, texts, stick):
    """Three responses that the reward model likes and the judge does not, to different prompts."""
    order = (x["score"] - x["judge"]).amax(1).argsort(descending=True)[:3].tolist()
    best = (x["score"] - x["judge"]).argmax(1)
    return [{"prompt": stick.tokenizer.decode(stick.prompts[i]), "response": texts[i * SAMPLES + best[i]],
             **{name: x[name][i, best[i]].item() for name in ("score", "judge", "kl")}} for i in order]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# From figures to tables and pictures


def cell(x, digits=2):
    if x is None:
        return ""
    return f"{x['mean']:.{digits}f}" + (f" ± {x['se']:.{digits}f}" if x["se"] is not None else "")


def table(head, rows):
    lines = [f"| {' | '.join(head)} |", f"| --- | {' | '.join(['---:'] * (len(head) - 1))} |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def tables(results):
    """results.json -> {name of a marker in README.md: text of the table}."""
    reports = results["reports"]

    def ppo(part, name):
        return mean_and_error([report[part][name] for report in reports])

    rows = [["SFT model", cell(ppo("sft", "judge")), cell(ppo("sft", "score")), "0", ""]]
    for n, x in results["best_of_n"].items():
        rows += [[f"best of {n}", cell(x["judge"]), cell(x["score"]), f"{x['kl']['mean']:.2f}", ""]]
    optimality = ppo("ppo", "optimality")
    rows += [["**PPO**", *(cell(ppo("ppo", name)) for name in ("judge", "score", "kl")), cell(optimality, 3)]]
    for part, prompts in (("ppo_seen", "450 prompts that it was trained on"), ("ppo_unseen", "50 unseen prompts")):
        figures = [cell(ppo(part, name)) for name in ("judge", "score", "kl")]
        rows += [[f"PPO, on the {prompts}", *figures, cell(ppo(part, "optimality"), 3)]]
    best = results["optimum"]["0.1"]
    rows += [["the optimum at beta = 0.1", *(cell(best[name]) for name in ("judge", "score", "kl")), "1"]]
    out = {"systems": table(["", "judge", "score", "KL", "optimality"], rows)}

    labels = [str(report["seed"]) for report in reports] + ["0, other data"]
    reports, jumps = [*reports, results["other_data"]], map(str, results["jumps"])
    share = [(r["ppo"]["judge"] - r["sft"]["judge"]) / (r["best_judge"] - r["sft"]["judge"]) for r in reports]
    rows = [
        [label, f"{r['sft']['above_entropy']:.4f} ± {r['sft']['above_entropy_se']:.4f}",
         f"{r['rm']['below_ceiling']:.4f} ± {r['rm']['below_ceiling_se']:.4f}", f"{part:.2f}",
         *(f"{r['ppo'][name]:.{digits}f} ± {r['ppo'][name + '_se']:.{digits}f}"
           for name, digits in (("win_rate_vs_sft", 3), ("kl", 2), ("eos_rate", 4), ("optimality", 3))),
         *(f"{r[kind]['optimality']:.3f} ± {r[kind]['optimality_se']:.3f}" for kind in ("ppo_seen", "ppo_unseen")), jumped]
        for label, r, part, jumped in zip(labels, reports, share, jumps)
    ]  # fmt: skip
    head = ["seed", "SFT above the entropy, nats/token", "RM below its ceiling", "judge, share of the way to 3", "wins against SFT",
            "KL", "end-of-text", "optimality", "on seen prompts", "on unseen prompts", "jumps of the KL"]  # fmt: skip
    out["seeds"] = table(head, rows)
    more = (gap_table, passes_table, accident_tables, ablation_tables, real_tables, speed_tables, memory_tables, neighbour_tables,
            screens)  # fmt: skip
    return out | {name: text for make in more for name, text in make(results).items()}


def screens(results):
    """What README.md shows of what the programs print, and its table of files."""
    printed = results["make_run"]
    start = next(i for i, line in enumerate(printed) if line.split()[:2] == ["judge", "score"])
    stop = next(i for i, line in enumerate(printed) if line.startswith("PPO, unseen"))
    limits = next(i for i, line in enumerate(printed) if line.startswith("optimality"))
    systems = [line for line in printed[start : stop + 1] if not line.startswith(("best of 4 ", "best of 64"))]
    report = [*systems, *printed[limits : limits + 2]]
    example = results["example"]
    shown = [line for line in example if not line.startswith("iteration") or int(line.split()[1]) in (1, 100)]

    def block(lines):
        return "\n".join(f"    {line}".rstrip() for line in lines)

    rows = []
    for name, text in FILES.items():
        paths = sorted((ROOT / name).rglob("*.py")) if name.endswith("/") else [ROOT / name]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        rows += [[f"[`{name}`]({name})", f"{lines:,}", text]]
    head = ["", "lines", "what it is"]
    files = table(head, rows).replace("| --- | ---: | ---: |", "| --- | ---: | --- |")
    return {"run": block(report), "example": block(shown), "files": files}


def ablation_tables(results):
    """The same of the runs with other settings: ablations, no penalty, few pairs."""
    reports, out = results["reports"], {}
    names = ("judge", "score", "kl", "eos_rate", "response_length")
    systems = {"SFT model": reports[0]["sft"], "PPO, beta = 0.1": reports[0]["ppo"], "PPO, beta = 0": results["no_penalty"]["ppo"]}
    rows = [[label, *(f"{x[name]:.2f} ± {x[name + '_se']:.2f}" for name in names)] for label, x in systems.items()]
    out["no_penalty"] = table(["", "judge", "score", "KL", "end-of-text", "length"], rows)
    for key in ("ablations", "questions"):
        rows, names = [], {"optimality": "optimality", "gain": "less the default's", "judge": "judge", "score": "score", "kl": "KL"}
        if not any("gain" in x for x in results.get(key, {}).values()):  # runs that were measured before there was this column
            del names["gain"]
        for name, x in results.get(key, {}).items():
            figures = (cell(x.get(figure), 3 if figure == "gain" else 2) for figure in names)
            rows += [[name, f"`{x['flags']}`" if x["flags"] else "", *figures]]
        out[key] = table(["setting", "flags", *names.values()], rows)
    names, rows = ("score", "judge", "kl"), []
    for x in results["hacked"]:
        rows += [[f"{x['prompt']} **{x['response'].strip()}**", *(f"{x[key]:.2f}" for key in names)]]
    out["hacked"] = table(["prompt and response", *names], rows)
    return out


def judged_tables(systems):
    """The film reviews, by a classifier that no training has seen: for RESULTS.md, and with fewer figures for README.md."""
    rows = []
    for name, x in systems.items():
        (share, error), (score, score_se), (kl, kl_se) = x["judge"], x["score"], x["kl"]
        kl = "0" if name == "SFT model" else f"{kl:.2f}" + (f" ± {kl_se:.2f}" if kl_se else "")
        rows += [[name, f"{100 * share:.1f} ± {100 * error:.1f}", f"{score:.2f} ± {score_se:.2f}", kl]]
    names, shares, _, kls = zip(*rows)
    wide = table(["", *names], [["favourable, %", *shares], ["KL", *kls]])
    return {"judged": table(["", "favourable, %", "score", "KL"], rows), "favourable": wide}


def real_tables(results):
    """What bench.real has measured."""
    out = {}
    names, rows = {"reviews": "film reviews", "dialogues": "dialogues"}, []
    for name, x in results["real"].items():
        sft, rm, ppo = (x["report"][part] for part in ("sft", "rm", "ppo"))
        figures = [(100 * rm["val_accuracy"], 100 * rm["val_accuracy_se"], 1)]
        parts = ((sft, "score"), (ppo, "score"), (ppo, "kl"), (ppo, "eos_rate"))
        figures += [(part[key], part[f"{key}_se"], 2) for part, key in parts]
        cells = [f"{mean:.{digits}f} ± {error:.{digits}f}" for mean, error, digits in figures]
        rows += [[names[name], *cells, f"{sum(x['seconds'].values()) / 60:.1f}"]]
    head = ["data", "validation pairs right, %", "score, SFT", "score, PPO", "KL", "end-of-text", "minutes"]
    out["real"] = table(head, rows)
    rows = []
    for x in results["real"]["reviews"]["report"]["samples"]:
        rows += [[f"{x['prompt']} **{x[kind].strip()}**" for kind in ("sft", "ppo")] + [f"{x[key]:.2f}" for key in ("score", "kl")]]
    out["reviews"] = table(["SFT model", "PPO", "score", "KL"], rows)
    if "judged" in results["real"]["reviews"]:
        out |= judged_tables(results["real"]["reviews"]["judged"]["systems"])
    return out


def speed_tables(results):
    """What bench.speed has measured."""
    out, rows = {}, []
    for name in ("small", "medium", "default"):
        if name in results["speed"]:
            x = results["speed"][name]
            ratios = [x["ratios"][key] for key in ("update", "iteration", "update, at peak", "iteration, at peak")]
            seconds = [x["seconds"][phase] for phase in ("rollout", "scoring", "update")]
            rows += [[name, *(f"{x:.2f}" for x in seconds), *(f"{x:.1f}" for x in ratios)]]
    head = ["workload", "rollout, s", "scoring, s", "update, s", "update", "iteration", "update, at peak", "iteration, at peak"]
    out["speed"] = table(head, rows)
    rows = [[name, *(f"{1000 * s:.0f}" for s in x["seconds"]), *(f"{ratio:.2f}" for ratio in x["ratios"])]
            for name, x in results.get("beside_nanogpt", {}).items()]  # fmt: skip
    head = ["workload", "nanoGPT, ms", "with GPT-2's GELU, ms", "minippo, ms", "times nanoGPT", "times that with GPT-2's GELU"]
    out["nanogpt"] = table(head, rows)
    rows = []
    for what, (first, *_, last) in results["speed"]["growth"].items():
        rows += [[what, f"{first['value']} to {last['value']}", f"{last['times_operations']:.1f}", f"{last['times_seconds']:.1f}"]]
    out["growth"] = table(["doubled three times", "from and to", "times the operations", "times the seconds"], rows)
    return out


def memory_tables(results):
    """What bench.memory has computed and measured."""
    out = {}
    columns = ("parameters", "four_models", "activations", "logits", "total", "total_checkpointed")
    rows = [[x["model"], f"{x['parameters'] / 1e6:,.0f} M", *(f"{x[name] / 1e9:.1f}" for name in columns[1:])]
            for x in results["memory"]["rows"]]  # fmt: skip
    head = ["", "parameters", "the models", "activations", "logits", "in all", "in all, `--grad_checkpoint`"]
    out["memory"] = table(head, rows)
    cases = {"short": "4 rows of 64 + 64 tokens", "long": "1 row of 884 + 16 tokens"}
    rows = [[said, *(f"{x['peak'] / 1e9:.1f} ({x['predicted'] / 1e9:.1f})" for x in results["memory"][f"measured_{name}"].values())]
            for name, said in cases.items()]  # fmt: skip
    out["memory_measured"] = table(["in memory at once", "SFT", "reward model", "PPO"], rows)
    return out


def passes_table(results):
    """What bench.drawings has read in the log of a run of several passes: medians, and the quartiles in brackets."""
    metrics, rows = {"clip_frac": 3, "approx_kl": 4, "ratio_max": 2}, []
    for i in range(len(results["passes"]["clip_frac"])):
        cells = [[f"{x:.{digits}f}" for x in results["passes"][name][i]] for name, digits in metrics.items()]
        rows += [[str(i + 1), *(f"{middle} ({low} to {high})" for low, middle, high in cells)]]
    return {"passes": table(["pass", "clip fraction", "approx_kl, nats per token", "ratio_max"], rows)}


def gap_table(results):
    """What is missing to the optimum, and how much of it the worst tenth of the prompts holds."""
    rows = []
    for part, label in (("ppo_seen", "seen"), ("ppo_unseen", "unseen")):
        parts = [report[part] for report in results["reports"]]
        gap, worst = mean_and_error([1 - x["optimality"] for x in parts]), mean_and_error([x["worst_tenth"] for x in parts])
        rows += [[label, cell(gap, 3), cell(worst)]]
    return {"gap": table(["prompts", "missing to an optimality of 1", "share of it in the worst tenth"], rows)}


def accident_tables(results):
    """What bench.accident has measured."""
    accident, out = results["accident"], {}
    rows = [[str(i), *(f"{accident['rows'][i - 1][name]:.2f}" for name in ("low", "high", "kl")),
             f"{accident['rows'][i - 1]['longest']:.0f}"] for i in range(10, len(accident["rows"]) + 1, 10)]  # fmt: skip
    head = ["iteration", "low scores, nats per token", "high scores, nats per token", "kl of its batch", "its largest KL"]
    out["accident"] = table(head, rows)
    names = list(accident["again"][0]["after"])
    rows = [[str(x["iteration"]), *(f"{n:.2f}" for n in (x["before"], *x["after"].values()))] for x in accident["again"]]
    out["again"] = table(["iteration", "before it", "after it", *(f"without {name}" for name in names[1:])], rows)
    rows = [[name, " ".join(f"`--{flag} {value:g}`" for flag, value in x["flags"].items()), str(x["astray"]), f"{x['low']:.2f}"]
            for name, x in accident["cures"].items()]  # fmt: skip
    out["cures"] = table(["changed", "", "iterations with a response astray", "low scores, nats per token, at the end"], rows)
    return out


def neighbour_tables(results):
    """What bench.ladder has computed and bench.neighbours measured, if they have."""
    from bench import ladder, neighbours  # which import this file

    return {
        name: text for key, module in (("ladder", ladder), ("neighbours", neighbours)) if key in results
        for name, text in module.tables(results).items()
    }  # fmt: skip


def splice(document, name, text):
    """Put the text between the markers <!-- name --> and <!-- /name --> of a document, if it has them."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in document:
        return document
    before, rest = document.split(begin)
    return before + begin + text + "\n" + end + rest.split(end, 1)[1]


BLUE, ORANGE, PURPLE, GREY = "#3b82f6", "#f97316", "#a855f7", "#8b949e"  # each legible on white and on black


def figure(columns, width, height):
    """Axes without a background."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    clear = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "svg.hashsalt": "minippo"}
    pyplot.rcParams.update(grey | clear | {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def save(drawing, name):
    drawing.savefig(ROOT / "bench" / f"{name}.svg", metadata={"Date": None})


def draw(results):
    drawing, axes = figure(len(results["curves"]), 15, 2.8)
    for axis, (name, points) in zip(axes, results["curves"].items()):
        middle = torch.tensor([point["mean"] for point in points])
        spread = torch.tensor([(point["se"] or 0.0) * math.sqrt(point["seeds"]) for point in points])  # the standard deviation
        steps, colour = range(1, 3 * len(points), 3), ORANGE if name == "judge" else BLUE
        axis.plot(steps, middle, color=colour)
        axis.fill_between(steps, middle - spread, middle + spread, color=colour, alpha=0.25, linewidth=0)
        axis.set(title=name.replace("_", " "), xlabel="iteration")
    save(drawing, "curves")

    def line(axis, points, name, **style):
        return axis.plot([point["kl"] for point in points], [point[name] for point in points], **style)[0]

    def means(points):
        return [{key: x["mean"] for key, x in point.items()} for point in points.values()]

    drawing, axes = figure(2, 10, 4)
    for axis, name in zip(axes, ("score", "judge")):
        line(axis, means(results["optimum"]), name, color=GREY, label="the best policy, over beta")
        line(axis, means(results["best_of_n"]), name, color=PURPLE, marker="o", linestyle=":", label="best of 4, 16, 64")
        for path, colour in (("beta = 0.3", "#22c55e"), ("default", BLUE), ("beta = 0.03", ORANGE)):
            label = f"PPO, {'beta = 0.1' if path == 'default' else path}"
            line(axis, results["paths"][path], name, color=colour, marker=".", linewidth=1, label=label)
        axis.set(xlabel="KL to the reference, nats per response", title=name)
    axes[0].legend(loc="lower right")
    save(drawing, "frontier")

    drawing, axis = figure(1, 6, 3.6)
    for name, colour in (("score", BLUE), ("judge", ORANGE)):
        line(axis, results["paths"]["default"], name, color=colour, label=f"{name}, beta = 0.1")
        line(axis, results["paths"][HACKED], name, color=colour, linestyle="--", label=f"{name}, beta = 0 and few pairs")
    axis.set(xlabel="KL to the reference, nats per response", xscale="symlog")
    axis.legend(fontsize=8)
    save(drawing, "hacking")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--summary", action="store_true", help="train nothing")
    parser.add_argument("--texts", action="store_true", help="measure nothing")
    parser.add_argument("--no_ablations", action="store_true", help="only the seeds; the ablations stay as they are")
    parser.add_argument("--record", metavar="SETTING", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.record:
        return recorded_ppo(args.record, args.seed, flags)
    path = ROOT / "bench" / "results.json"
    if args.texts:
        return write_texts(json.loads(path.read_text()))
    prepare(RunConfig(device="cpu"))
    if not args.summary:
        run_all(not args.no_ablations)
    results = json.loads(path.read_text()) | summarise()  # what has not been run again, here or by other programs, stays
    log = ROOT / "out" / "run.log"  # what `make run` printed, for the README: make run | tee out/run.log
    results["make_run"] = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    results["example"] = subprocess.check_output([sys.executable, "minippo.py"], cwd=ROOT, encoding="utf-8").splitlines()
    path.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(path.read_text())  # as the test of the README reads it
    draw(results)
    write_texts(results)


def write_texts(results):
    for name in TEXTS:
        document = (ROOT / name).read_text(encoding="utf-8")
        for marker, lines in tables(results).items():
            document = splice(document, marker, lines)
        (ROOT / name).write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
