"""The three scripts on data that was not made for them, with the settings that the README names.

    python -m bench.real reviews FOLDER      the folder that data/rt_polarity.py writes
    python -m bench.real dialogues FOLDER    the folder that data/convert.py writes

Prints what the scripts print, and writes the report and the seconds into bench/results.json, without samples of the dialogues: much
of that text is upsetting.

On the reviews PPO is checked by somebody else than its own reward model. A fixed third of the pairs, with whatever else holds their
text, is held out of all training. A naive Bayes classifier, which counts words, learns from them what a favourable review is, and
judges what each model writes after openings that it has not seen. RLOO and DPO start from the same models as PPO.
"""

import argparse
import json
import math
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import torch

from bench.results import write_texts
from minippo import PPOConfig, row_lengths
from plumbing.checkpoints import load_checkpoint
from plumbing.report import means, respond
from plumbing.settings import RunConfig, prepare

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "reviews": {
        "train_sft.py": "--vocab_size 4096 --context 96 --layers 2 --channels 128 --dropout 0.2 --epochs 12 --lr 2e-3",
        "train_rm.py": "--epochs 2 --weight_decay 1",
        "train_ppo.py": "--kl_coef 0.25 --steps 300",
    },
    "dialogues": {
        "train_sft.py": "--vocab_size 4096 --context 384 --layers 2 --channels 128 --dropout 0.1 --epochs 6 --lr 2e-3",
        "train_rm.py": "--epochs 2 --weight_decay 1 --lr 3e-4",
        "train_ppo.py": "--kl_coef 0.2 --steps 60 --batch_size 64 --max_new_tokens 32",
    },
}
NEIGHBOURS = {
    "RLOO": "variations.rloo --kl_coef 0.25 --steps 300",
    "DPO": "variations.dpo --kl_coef 0.3 --lr 1e-4 --steps 100",  # later it knows all pairs by heart
}
ANSWERS = 16  # to each opening


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def hold_out(folder, out):
    """Copy a data folder of reviews, less a fixed third of the training pairs and the same text elsewhere.
    -> the favourable and the unfavourable texts of that third."""
    out.mkdir(parents=True, exist_ok=True)
    rows = {path.stem: rows_of(path) for path in folder.glob("*.jsonl")}
    held = [row for row in rows["pref_train"] if zlib.crc32((row["prompt"] + row["chosen"]).encode()) % 3 == 0]
    good, bad = ([row["prompt"] + row[side] for row in held] for side in ("chosen", "rejected"))
    texts = {*good, *bad}
    rows["pref_train"] = [row for row in rows["pref_train"] if row not in held]
    rows["sft_train"] = [row for row in rows["sft_train"] if row["prompt"] + row["completion"] not in texts]
    known = {row["prompt"] for row in rows["sft_train"]}
    rows["prompts_train"] = [row for row in rows["prompts_train"] if row["prompt"] in known]
    for name, kept in rows.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return good, bad


def naive_bayes(good, bad):
    """Texts of two kinds -> a function of a text: the log of the odds that it is good, if its words were independent."""
    good, bad = (Counter(word for text in texts for word in set(text.split())) for texts in (good, bad))
    words = len(good | bad)  # one more of each, so that no count is 0
    good_total, bad_total = good.total() + words, bad.total() + words

    def log_odds(text):
        odds = ((good[word] + 1) / good_total * bad_total / (bad[word] + 1) for word in set(text.split()))
        return sum(map(math.log, odds))

    return log_odds


def judged(models, policies, prompts, log_odds):
    """The folder of sft.pt and rm.pt, {name: ppo.pt}, openings as text -> {name: share of favourable continuations, score, KL}."""
    sft, tokenizer, _ = load_checkpoint(models / "sft.pt", ["sft"])
    reward_model, _, _ = load_checkpoint(models / "rm.pt", ["rm"])
    prompts, out = [tokenizer.encode(prompt) for prompt in prompts], {}

    def sample(policy):
        def score(tokens, mask):
            return reward_model(tokens, row_lengths(mask))

        how = tokenizer, PPOConfig(), 0, lambda _, text: float(log_odds(text) > 0)
        return respond(policy, sft, score, prompts, ANSWERS, *how)[0]

    torch.manual_seed(0)
    measured = {"SFT model": sample(sft)}
    best = measured["SFT model"]["score"].argmax(1, keepdim=True)
    measured[f"best of {ANSWERS}"] = {name: x.gather(1, best) for name, x in measured["SFT model"].items()}
    for name, path in policies.items():
        measured[name] = sample(load_checkpoint(path, ["ppo"])[0])
    for name, x in measured.items():
        row = means(x)
        out[name] = {key: [row[key], row[f"{key}_se"]] for key in ("judge", "score", "kl")}
    out[f"best of {ANSWERS}"]["kl"] = [math.log(ANSWERS) - (ANSWERS - 1) / ANSWERS, None]  # a bound
    return out


def compare(data, out, good, bad):
    """The neighbours of PPO, trained and judged beside it."""
    policies = {"PPO": out / "ppo.pt"}
    for name, words in NEIGHBOURS.items():
        policies[name] = out / name / "ppo.pt"
        run("-m", *words.split(), "--data", data, "--models", out, "--out", out / name, "--no_report")
    log_odds = naive_bayes(good, bad)
    labelled = [(row["prompt"] + row[side], side) for row in rows_of(data / "pref_val.jsonl") for side in ("chosen", "rejected")]
    right = sum((log_odds(text) > 0) == (side == "chosen") for text, side in labelled) / len(labelled)
    openings = [row["prompt"] for row in rows_of(data / "prompts_val.jsonl")]
    classifier = {"reviews": len(good) + len(bad), "right": [right, math.sqrt(right * (1 - right) / len(labelled))]}
    return {"classifier": classifier, "openings": len(openings), "systems": judged(out, policies, openings, log_odds)}


def run(*words):
    """Python with these words -> seconds."""
    start = time.perf_counter()
    if subprocess.run([sys.executable, *map(str, words)], cwd=ROOT).returncode:
        sys.exit(f"{words[0] if words[0] != '-m' else words[1]} failed")
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SETTINGS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    out, data, seconds, more = ROOT / "out" / args.name, args.folder.resolve(), {}, {}
    prepare(RunConfig(device="cpu", out=out / "judged"))  # not out, where the scripts will be at work
    if args.name == "reviews":
        data = out / "data"
        texts = hold_out(args.folder, data)
    for script, flags in SETTINGS[args.name].items():
        seconds[script] = run(script, "--data", data, "--out", out, *flags.split())
    if args.name == "reviews":
        more["judged"] = compare(data, out, *texts)
    report = json.loads((out / "report.json").read_text())
    if args.name == "dialogues":
        del report["samples"]
    print("seconds:", {script: round(s) for script, s in seconds.items()}, "sum", round(sum(seconds.values())))
    path = ROOT / "bench" / "results.json"
    results = json.loads(path.read_text())
    results.setdefault("real", {})[args.name] = {"report": report, "seconds": seconds, **more}
    path.write_text(json.dumps(results, indent=1) + "\n")
    write_texts(results)


if __name__ == "__main__":
    main()
