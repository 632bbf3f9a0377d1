"""out/report.html: a run to look at, also while it goes on. One page, which any browser opens from
disk; it asks the network for nothing. It is plumbing/page.html with the data in it."""

import json
import math
from pathlib import Path

from data.files import read_log, write_file

POINTS = 300  # of a curve at most; where a log has more lines, a point is the mean of several


def write_page(out, models="", report=None):
    """Write out/report.html from the logs and the traces in the folder `out`, the logs of stages 1
    and 2 in `models`, and the report, if there is one -> its path."""
    out, models = Path(out), Path(models or out)
    logs = {"sft": models / "sft.jsonl", "rm": models / "rm.jsonl", "ppo": out / "ppo.jsonl"}
    traces = read_log(out / "ppo_traces.jsonl")
    data = {
        "steps": len(read_log(logs["ppo"])),
        "settings": traces[-1]["settings"] if traces else {},
        "traces": traces,
        "report": report,
        "curves": {name: curves(read_log(path)) for name, path in logs.items()},
    }
    before, after = Path(__file__).with_suffix(".html").read_text(encoding="utf-8").split("@data@")
    # In JSON a "<" can only be part of a string. Written so, no text ends the script that holds it.
    text = json.dumps(rounded(data), separators=(",", ":")).replace("<", "\\u003c")
    write_file(out / "report.html", before + text + after)
    return out / "report.html"


def rounded(x, digits=5):
    """The same lists and dicts for JSON: with fewer digits, and None for infinity and NaN."""
    if isinstance(x, dict):
        return {str(name): rounded(value, digits) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value, digits) for value in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x


def curves(rows):
    """Lines of a log -> {name: {"x": steps, "y": values}}, thinned out, less what is not finite."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        points = [(x["step"], x[name]) for x in rows if math.isfinite(x.get(name, math.nan))]
        size = max(1, math.ceil(len(points) / POINTS))  # points that become one
        parts = [points[i : i + size] for i in range(0, len(points), size)]
        means = [[sum(x) / len(part) for x in zip(*part)] for part in parts]
        if means:
            found[name] = {"x": [x for x, _ in means], "y": [y for _, y in means]}
    return found
