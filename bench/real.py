"""The three scripts on data that was not made for them, with the settings that the README names.

    python -m bench.real reviews FOLDER      the folder that data/rt_polarity.py writes
    python -m bench.real dialogues FOLDER    the folder that data/hh_rlhf.py writes

Prints what the scripts print, and writes the report and the seconds into bench/results.json, without samples of the dialogues: much
of that text is upsetting.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SETTINGS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    out, seconds = ROOT / "out" / args.name, {}
    for script, flags in SETTINGS[args.name].items():
        command = [script, "--data", str(args.folder), "--out", str(out), *flags.split()]
        start = time.perf_counter()
        if subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
            sys.exit(f"{script} failed")
        seconds[script] = time.perf_counter() - start
    report = json.loads((out / "report.json").read_text())
    if args.name == "dialogues":
        del report["samples"]
    print("seconds:", {script: round(s) for script, s in seconds.items()}, "sum", round(sum(seconds.values())))
    path = ROOT / "bench" / "results.json"
    results = json.loads(path.read_text())
    results.setdefault("real", {})[args.name] = {"report": report, "seconds": seconds}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
