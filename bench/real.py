"""The three scripts on film reviews, which were not made for them.

    python -m bench.real FOLDER      a folder of data that data/README.md says how to make

Writes the report and the seconds into bench/results.json.

PPO is checked by something else than its reward model. A fixed third of the pairs, with whatever
else holds their text, is held out of all training. A naive Bayes classifier, which counts words,
learns from them what a favourable review is, and judges what each model writes after openings that
it has not seen. RLOO and DPO start from the same models as PPO.
"""

import json
import math
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import torch

from bench import parser
from bench.tables import ROOT, keep
from minippo import PPOConfig
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import run_script
from plumbing.models import load_models
from plumbing.report import best_of_n_kl, means, respond
from plumbing.settings import RunConfig, prepare

SHAPE = "--vocab_size 4096 --context 96 --layers 2 --channels 128"
SETTINGS = {
    "train_sft.py": f"{SHAPE} --dropout 0.2 --epochs 12 --lr 2e-3",
    "train_rm.py": "--epochs 2 --weight_decay 1",
    "train_ppo.py": "--kl_coef 0.25 --steps 300",
}
NEIGHBOURS = {
    "RLOO": "variations.rloo --kl_coef 0.25 --steps 300",
    # With more steps it knows all pairs by heart.
    "DPO": "variations.dpo --kl_coef 0.3 --lr 1e-4 --steps 100",
}
ANSWERS = 16  # to each opening


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def hold_out(folder, out):
    """Copy a data folder of reviews, less a fixed third of the training pairs and the same text
    elsewhere -> the favourable and the unfavourable texts of that third."""
    out.mkdir(parents=True, exist_ok=True)
    rows = {path.stem: rows_of(path) for path in folder.glob("*.jsonl")}

    def held(row):
        return zlib.crc32((row["prompt"] + row["chosen"]).encode()) % 3 == 0

    third = [row for row in rows["pref_train"] if held(row)]
    good, bad = ([row["prompt"] + row[side] for row in third] for side in ("chosen", "rejected"))
    texts = {*good, *bad}
    rows["pref_train"] = [row for row in rows["pref_train"] if not held(row)]
    rows["sft_train"] = [x for x in rows["sft_train"] if x["prompt"] + x["completion"] not in texts]
    openings = {row["prompt"] for row in rows["sft_train"]}
    rows["prompts_train"] = [row for row in rows["prompts_train"] if row["prompt"] in openings]
    for name, kept in rows.items():
        lines = (json.dumps(row) + "\n" for row in kept)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return good, bad


def naive_bayes(good, bad):
    """Texts of two kinds -> a function of a text: the log of the odds that it is good, if its words
    were independent."""
    kinds = (good, bad)
    good, bad = (Counter(word for text in texts for word in set(text.split())) for texts in kinds)
    words = len(good | bad)  # one more of each, so that no count is 0
    good_total, bad_total = good.total() + words, bad.total() + words

    def log_odds(text):
        ratios = ((good[word] + 1) / (bad[word] + 1) for word in set(text.split()))
        return sum(math.log(ratio * bad_total / good_total) for ratio in ratios)

    return log_odds


def judged(models, policies, prompts, log_odds):
    """The folder of sft.pt and rm.pt, {name: ppo.pt}, openings as text -> {name: share of
    favourable continuations, score, KL}."""
    loaded = load_models(models, "cpu")
    sft, tokenizer = loaded.reference, loaded.tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in prompts]

    def sample(policy):
        asked = prompts, ANSWERS, tokenizer, PPOConfig()
        figures, texts = respond(policy, sft, loaded.score, *asked)
        favourable = torch.tensor([float(log_odds(text) > 0) for text in texts])
        return figures | {"judge": favourable.view(-1, ANSWERS)}

    torch.manual_seed(0)
    known = {"SFT model": sample(sft)}
    best = known["SFT model"]["score"].argmax(1, keepdim=True)
    name = f"best of {ANSWERS}"
    known[name] = {key: x.gather(1, best) for key, x in known["SFT model"].items()}
    known |= {name: sample(load_checkpoint(path, ["ppo"])[0]) for name, path in policies.items()}
    rows = {name: means(x) for name, x in known.items()}
    out = {
        name: {key: [row[key], row[f"{key}_se"]] for key in ("judge", "score", "kl")}
        for name, row in rows.items()
    }
    out[name]["kl"] = [best_of_n_kl(ANSWERS), None]  # a bound
    return out


def compare(data, out, good, bad):
    """The neighbours of PPO, trained and judged beside it."""
    policies = {"PPO": out / "ppo.pt"}
    for name, words in NEIGHBOURS.items():
        policies[name] = out / name / "ppo.pt"
        folders = ["--data", data, "--models", out, "--out", out / name]
        run("-m", *words.split(), *folders, "--no_report")
    log_odds = naive_bayes(good, bad)
    pairs = rows_of(data / "pref_val.jsonl")
    right = [
        (log_odds(row["prompt"] + row[side]) > 0) == (side == "chosen")
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    openings = [row["prompt"] for row in rows_of(data / "prompts_val.jsonl")]
    classifier = {"reviews": len(good) + len(bad), "right": sum(right), "of": len(right)}
    return {"classifier": classifier, "judged": judged(out, policies, openings, log_odds)}


def run(*words):
    """Train anew, python with these words -> seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *map(str, words), "--overwrite"], cwd=ROOT, check=True)
    return time.perf_counter() - start


def main():
    flags = parser(__doc__)
    flags.add_argument("folder", type=Path)
    args = flags.parse_args()
    out, seconds = ROOT / "out" / "reviews", 0.0
    data = out / "data"
    prepare(RunConfig(device="cpu", out=out / "judged"))  # not out, which the scripts lock
    texts = hold_out(args.folder, data)
    for script, flags in SETTINGS.items():
        seconds += run(script, "--data", data, "--out", out, *flags.split())
    report = json.loads((out / "report.json").read_text())
    names = ("prompt", "sft", "ppo", "score", "kl")
    samples = [{name: x[name] for name in names} for x in report["samples"][:1]]
    print(f"pairs right: {100 * report['rm']['val_accuracy']:.1f} %; seconds: {seconds:.0f}")
    keep({"reviews": samples} | compare(data, out, *texts))


if __name__ == "__main__":
    run_script(main)
