"""out/report.html: a run to look at, also while it goes on. One page, which any browser opens from
disk; it asks the network for nothing.

    python -m plumbing.page out                  write it anew from the files that are there
    python -m plumbing.page out --models FOLDER  the logs of stages 1 and 2 are in another folder

Only ppo.jsonl must be there. report.json gives the result, ppo_traces.jsonl the settings and the
responses token by token. The page is plumbing/page.html with the data in it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import UserError, run_script
from plumbing.files import read_log, write_file
from plumbing.recorder import rounded
from plumbing.settings import read_flags

POINTS = 400  # of a curve at most; where a log has more lines, a point is the mean of several
PATH = 40  # points of score against KL
DIGITS = 5  # of each number
# What report.json must have
REPORT = "beta", "seconds", "sft", "ppo", "rm", "best_of_n", "samples"


@dataclass
class PageConfig:
    models: str = ""  # folder of sft.jsonl and rm.jsonl; that of ppo.jsonl unless it is given


def write_page(out, models=""):
    """Write out/report.html from the files in the folder `out`, those of stages 1 and 2 in `models`
    -> its path."""
    out = Path(out)
    data = rounded(gather(out, Path(models or out)), DIGITS)
    before, after = Path(__file__).with_suffix(".html").read_text(encoding="utf-8").split("@data@")
    # In JSON a "<" can only be part of a string. Written so, no text ends the script that holds it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    write_file(out / "report.html", before + text + after)
    return out / "report.html"


def gather(out, models):
    """-> all that the page shows, as a dict."""
    ppo = read_log(out / "ppo.jsonl")
    if not ppo:
        missing = f"{out / 'ppo.jsonl'}: not there, or nothing is logged yet"
        raise UserError(f"{missing}; train_ppo.py --out {out} writes it")
    settings, traces = part(out / "ppo_traces.jsonl", read_traces) or ({}, [])
    report = part(out / "report.json", read_report)
    if report and report["seconds"].get("ppo") != ppo[-1].get("seconds"):
        report = None  # of an earlier run, or of a shorter one
    if report and settings:
        settings = settings | {"steps": ppo[-1]["step"]}  # --resume may have ended it early
    logs = {"sft": read_log(models / "sft.jsonl"), "rm": read_log(models / "rm.jsonl"), "ppo": ppo}
    if settings.get("reward"):  # a function takes the place of the reward model
        logs["rm"] = []
    scored = [row for row in ppo if is_number(row.get("kl")) and is_number(row.get("score"))]
    return {
        "settings": settings,
        "traces": [line for line in traces if line["sampled"]],
        "report": report,
        "steps": ppo[-1]["step"],
        "curves": {stage: curves(rows) for stage, rows in logs.items()},
        "judge": curve(traces, "judge"),
        "path": {name: curve(scored, name, PATH)["y"] for name in ("kl", "score")},
    }


def part(path, read):
    """What `read` makes of a file; None if it is not there, or, with a line that says so, if it does
    not hold what it should."""
    try:
        return read(path) if path.exists() else None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:100]
        print(f"{path}: damaged, or another version's ({reason}); the page does without it")
        return None


def read_traces(path):
    """-> the settings, and the lines."""
    lines = read_log(path)
    for line in lines:
        for response in (*line["tracked"], *line["sampled"]):
            response["prompt"], response["tokens"], response["advantage"]  # KeyError: this is none
    return dict(lines[-1]["settings"]), lines


def read_report(path):
    report = json.loads(path.read_bytes())
    for row in (report["sft"], report["ppo"], *report["best_of_n"].values(), *report["samples"]):
        float(row["score"])
    return {name: report[name] for name in REPORT} | {
        "seconds": dict(report["seconds"]),
        "unseen": report.get("ppo_unseen"),
        "best_judge": report.get("best_judge"),
        "optimum": report.get("optimum", []),
        "notes": report.get("notes", []),
    }


def is_number(x):
    return type(x) in (int, float) and math.isfinite(x)


def curve(rows, name, points=POINTS):
    """-> {"x": steps, "y": values}, of the lines that have it as a number, thinned out."""
    rows = [row for row in rows if is_number(row.get(name))]
    size = max(1, math.ceil(len(rows) / points))  # lines that become one point
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    return {
        axis: [sum(row[key] for row in chunk) / len(chunk) for chunk in chunks]
        for axis, key in (("x", "step"), ("y", name))
    }


def curves(rows):
    """{name: curve} of all numbers in a log; the clip fraction of each pass is called "pass 1" ..."""
    rows = [
        row | {f"pass {i}": x.get("clip_frac") for i, x in enumerate(row.get("passes", []), 1)}
        for row in rows
    ]
    names = dict.fromkeys(name for row in rows for name, x in row.items() if is_number(x))
    return {name: curve(rows, name) for name in names}


def main():
    config, folders = read_flags(__doc__, PageConfig(), positional="FOLDER")
    if len(folders) > 1:
        raise UserError(f"one folder is wanted, not {len(folders)}")
    print(f"wrote {write_page(folders[0], config.models)}")


if __name__ == "__main__":
    run_script(main)
