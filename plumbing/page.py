"""out/report.html: a run of PPO to look at. One page, which any browser opens from disk; it asks the network for nothing.

    python -m plumbing.page out                    write it, as train_ppo.py does, from the files that are there
    python -m plumbing.page out --models FOLDER    the logs of stages 1 and 2 are in another folder

Of the files out/ppo.jsonl alone must be there. report.json gives the result, ppo_traces.jsonl the responses token by token, and
sft.jsonl and rm.jsonl the curves of stages 1 and 2. The page is plumbing/page.html with the data in it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from plumbing.report import number, systems
from plumbing.errors import UserError, run_script
from plumbing.settings import read_flags
from plumbing.traces import finite, spaced

POINTS = 400  # of a curve; where a log has more lines, a point is the mean of several
PATH = 40  # points of the way that score and KL have taken
BUDGET = 500_000  # bytes of the page for the responses shown token by token
LONGEST = 300, 1500  # characters of a prompt, and of a response before and after, that are shown
CURVES = {
    "sft": ("loss", "val_loss"),
    "rm": ("loss", "val_loss", "accuracy", "val_accuracy"),
    "ppo": ("score", "rlhf_reward", "kl", "paid", "entropy", "explained_variance", "response_length", "eos_rate", "value_loss",
            "policy_loss"),
}  # fmt: skip
NUMBERS = (
    "log_pi",
    "log_old",
    "log_ref",
    "kl",
    "reward",
    "value",
    "return",
    "advantage",
    "whitened",
    "ratio",
)
FACTS = {  # figures of the report and their digits
    "ppo": {"optimality": 3, "win_rate_vs_sft": 3}, "ppo_unseen": {"optimality": 3}, "sft": {"val_loss": 4, "above_entropy": 4},
    "rm": {"val_accuracy": 4, "below_ceiling": 4},
}  # fmt: skip


@dataclass
class PageConfig:
    models: str = (
        ""  # folder of sft.jsonl and rm.jsonl; the same as that of ppo.jsonl unless it is given
    )


def write_page(out, models=""):
    """Write out/report.html from the files in the folder `out`, those of stages 1 and 2 in `models` -> its path."""
    data = gather(Path(out), Path(models or out))
    before, after = Path(__file__).with_suffix(".html").read_text(encoding="utf-8").split("@data@")
    # In JSON a "<" can only be part of a string. Written so, no text can end the script that holds it.
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    path = Path(out) / "report.html"
    path.write_text(before + text + after, encoding="utf-8")
    return path


def gather(out, models):
    """-> all that the page shows, as a dict."""
    ppo, traces = read_lines(out / "ppo.jsonl"), read_lines(out / "ppo_traces.jsonl")
    if not ppo:
        raise UserError(
            f"{out / 'ppo.jsonl'}: not there, or empty; train_ppo.py --out {out} writes it"
        )
    settings = part_of(out / "ppo_traces.jsonl", lambda: traces[-1]["settings"]) if traces else {}
    sft, rm = (
        read_lines(models / "sft.jsonl"),
        [] if settings.get("reward") else read_lines(models / "rm.jsonl"),
    )
    report = read_report(out / "report.json", ppo)
    data = {
        "settings": settings,
        "steps": ppo[-1]["step"],
        "beta": settings.get("kl_coef", ppo[0].get("kl_coef")),
    }
    data["curves"] = {
        "sft": curves(sft, "sft"),
        "rm": curves(rm, "rm"),
        "ppo": curves(ppo, "ppo"),
        "judge": curve(traces, "judge"),
    }
    data["clip"] = part_of(out / "ppo.jsonl", lambda: clip_curves(ppo))
    data["every"] = {"sft": every(sft), "rm": every(rm), "ppo": every(ppo)}
    data["path"] = (
        [] if settings.get("ref_update_every") else path_of(ppo)
    )  # there, the KL is not to the SFT model
    data["judged"] = judged(ppo, traces) if data["path"] else []
    data["traces"] = part_of(out / "ppo_traces.jsonl", lambda: within_budget(traces))
    data["result"] = part_of(out / "report.json", lambda: result(report)) if report else None
    return data


def part_of(path, make):
    """make(); UserError if the file lacks what it should hold."""
    try:
        return make()
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise UserError(
            f"{path}: damaged, or another version's ({type(error).__name__}: {error}); {remedy(path)}"
        )


def remedy(path):
    if path.name == "ppo.jsonl":
        return "train_ppo.py --overwrite makes it again"
    return f"delete it, and `python -m plumbing.page {path.parent}` makes the page without it"


def read_lines(path):
    """A log, a dict a line; [] if it is not there. UserError for a line that is none, but for a last one that is being written."""
    lines = path.read_bytes().splitlines(True) if path.exists() else []
    rows = []
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not is_number(row["step"]):
                raise TypeError
            rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            if place < len(lines) or line.endswith(b"\n"):
                what = "is no JSON object with a step; delete this line" + ", or the file" * (
                    path.name != "ppo.jsonl"
                )
                raise UserError(
                    f"{path}, line {place}: {what}, and `python -m plumbing.page` makes the page without it"
                )
    return rows


def read_report(path, ppo):
    """report.json; None if it is not there, or if it is about an earlier run than the log."""
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is no JSON; {remedy(path)}")
    seconds = part_of(path, lambda: report["seconds"].get("ppo"))
    return report if seconds == ppo[-1].get("seconds") else None


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def short(x):
    """Five digits are more than a screen shows."""
    return float(f"{x:.5g}") if is_number(x) else None


# Curves


def every(rows):
    """How many lines of a log become one point."""
    return max(1, math.ceil(len(rows) / POINTS))


def curve(rows, name):
    """-> {"x": steps, "y": values}, thinned out; without the lines that do not have it as a number."""
    rows = [row for row in rows if is_number(row.get(name))]
    parts = [rows[i : i + every(rows)] for i in range(0, len(rows), every(rows))]
    return {
        "x": [round(mean(part, "step"), 1) for part in parts],
        "y": [short(mean(part, name)) for part in parts],
    }


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


def curves(rows, stage):
    """{name: curve} of what the log of a stage holds."""
    rows = [row | {"paid": row["kl_coef"] * row["kl"]} if is_number(row.get("kl_coef")) and is_number(row.get("kl")) else row
            for row in rows]  # fmt: skip
    found = {name: curve(rows, name) for name in CURVES[stage]}
    return {name: x for name, x in found.items() if x["x"]}


def clip_curves(rows):
    """The clip fraction of each pass over the batch, or of some where there are many -> [{"pass": 1, "x": ..., "y": ...}, ...]."""
    split = [[row["step"], *row.get("passes", [row])] for row in rows]
    found = []
    for i in spaced(max(len(parts) for parts in split) - 1, 6):
        one = [parts[i] | {"step": step} for step, *parts in split if i < len(parts)]
        found.append({"pass": i + 1, **curve(one, "clip_frac")})
    return [x for x in found if x["x"]]


def path_of(rows):
    """How score and KL have moved together, in at most PATH means -> [{"kl": ..., "score": ...}, ...]."""
    rows = [row for row in rows if is_number(row.get("kl")) and is_number(row.get("score"))]
    size = max(1, math.ceil(len(rows) / PATH))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{name: short(mean(part, name)) for name in ("kl", "score")} for part in parts]


def judged(rows, traces):
    """The same of the judge's grade, in the iterations that are recorded -> [{"kl": ..., "judge": ...}, ...]."""
    kl = {row["step"]: row.get("kl") for row in rows}
    return [{"kl": short(kl[row["step"]]), "judge": short(row["judge"])}
            for row in traces if is_number(row.get("judge")) and is_number(kl.get(row["step"]))]  # fmt: skip


# The result


def result(report):
    """What the page shows of report.json."""
    names, rows = systems(report)
    facts = {
        f"{part} {name}": number(report[part], name, digits)
        for part, names_of in FACTS.items() for name, digits in names_of.items() if name in report.get(part, {})
    }  # fmt: skip
    limits = [
        report["sft"].get("entropy_floor"),
        report["rm"].get("label_loss_floor"),
        report["rm"].get("label_ceiling"),
    ]
    points = {name: means(report[name]) for name in ("sft", "ppo")}
    best = [{"n": int(n), **means(row)} for n, row in report["best_of_n"].items()]
    texts = [
        {"prompt": ending(x["prompt"]), "sft": beginning(x["sft"]), "ppo": beginning(x["ppo"])}
        for x in report["samples"]
    ]
    return {
        "beta": report["beta"], "columns": names, "rows": [[name, *cells] for name, cells in rows.items()], "facts": facts,
        "limits": dict(zip(("sft loss", "rm loss", "rm accuracy"), limits)), "points": points, "best_of_n": best,
        "optimum": [{"beta": short(x["beta"]), **means(x)} for x in report.get("optimum", [])],
        "unseen": report.get("ppo_unseen", {}).get("prompts"), "seconds": report["seconds"],
        "samples": [sample | cut for sample, cut in zip(report["samples"], texts)],
    }  # fmt: skip


def means(row):
    return {name: short(row[name]) for name in ("kl", "score", "judge") if name in row}


def beginning(text):
    return text if len(text) <= LONGEST[1] else text[: LONGEST[1]] + "…"


def ending(text):
    return text if len(text) <= LONGEST[0] else "…" + text[-LONGEST[0] :]


# Responses, token by token


def within_budget(traces):
    """The lines of ppo_traces.jsonl as the page needs them; with fewer responses, and with less of each, where they are long."""
    for responses, tokens in (
        (6, 10**6),
        (4, 10**6),
        (3, 10**6),
        (2, 10**6),
        (1, 10**6),
        (1, 400),
        (1, 100),
    ):
        kinds = [line[kind] for line in traces for kind in ("tracked", "sampled")]
        count = sum(
            min(len(kind[i]["tokens"]), tokens)
            for kind in kinds
            for i in spaced(len(kind), responses)
        )
        if 60 * count > BUDGET and tokens > 100:  # a token takes more than that: no need to try
            continue
        lines = [line_shown(line, responses, tokens) for line in traces]
        if len(json.dumps(finite(lines))) <= BUDGET:
            break
    return lines


def line_shown(line, responses, tokens):
    shown = {
        "step": line["step"],
        **{name: short(line[name]) for name in ("kl_coef", "mean", "std")},
    }
    for kind in ("tracked", "sampled"):
        shown[kind] = [
            response_shown(line[kind][i], tokens) for i in spaced(len(line[kind]), responses)
        ]
    return shown


def response_shown(row, most):
    """A response less what the page does not show. If it has more than `most` tokens, only the first and the last of them stay:
    "gap" says after how many tokens how many are left out."""
    count, sums = len(row["tokens"]), {name: row[name] for name in ("log_old", "kl")}
    head = most // 2 if count > most else count
    keep = [*range(head), *range(max(head, count - most + head), count)]
    shown = {
        "prompt": ending(row["prompt"]),
        "ended": row["ended"],
        "count": count,
        "gap": [head, count - len(keep)],
    }
    shown |= {name: short(row[name]) for name in ("score", "judge") if name in row}
    shown |= {f"total_{name}": None if None in x else short(sum(x)) for name, x in sums.items()}
    shown |= {name: [short(row[name][i]) for i in keep] for name in NUMBERS}
    return shown | {name: [row[name][i] for i in keep] for name in ("tokens", "clip")}


def main():
    config, folders = read_flags(__doc__, PageConfig(), positional="FOLDER")
    if len(folders) > 1:
        raise UserError(f"one folder is wanted, not {len(folders)} (-h explains the flags)")
    print(f"wrote {write_page(folders[0], config.models)}")


if __name__ == "__main__":
    run_script(main)
