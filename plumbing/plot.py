"""The curves of one or several runs as a picture, at any time, also while they train. Needs the package matplotlib.

    python -m plumbing.plot out                             writes out/curves.svg
    python -m plumbing.plot out out/other --to both.png     two runs in one picture

Each folder is the --out of a run. Of sft.jsonl, rm.jsonl and ppo.jsonl those are drawn that are there. A run is cut into at most a
hundred parts of equal length: the line goes through their means, the band from the smallest to the largest value in each.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from plumbing.settings import UserError, read_flags, run_script

# What is drawn of each stage: the name in the log, and the unit of its axis.
STAGES = {
    "sft": {"loss": "nats per token", "grad_norm": "norm", "lr": "learning rate", "tokens_per_second": "tokens per second"},
    "rm": {"loss": "nats per pair", "accuracy": "share of pairs", "margin": "chosen less rejected score", "grad_norm": "norm"},
    "ppo": {
        "score": "score", "kl": "nats per response", "entropy": "nats per token", "response_length": "tokens",
        "eos_rate": "share of responses", "explained_variance": "share of variance", "approx_kl": "nats per token",
        "clip_frac": "share of tokens",
    },
}  # fmt: skip
TITLES = {"sft": "SFT", "rm": "reward model", "ppo": "PPO"}
FALLING = ("loss", "grad_norm")  # where they begin high, their axes are logarithmic, or nothing else would be seen
PARTS, COLUMNS = 100, 4
# Okabe and Ito's colours, which differ for every kind of colour vision; the yellow is left out.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
STYLES = ("-", "--", ":", "-.")  # of the first seven folders, of the next seven, ...
NOTE = f"lines: means over parts of a run, at most {PARTS}; bands: smallest to largest; dots: validation"


@dataclass
class PlotConfig:
    to: str = ""  # picture to write, .svg or .png; curves.svg in the first folder unless it is given


def read_log(path):
    """The rows of a log, as dicts. A line that is not whole, as the last one may be while the run goes on, is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def read_runs(folders):
    """-> {stage: {folder: rows}}, without what is not there. UserError if a folder has no log, or if no step is logged yet."""
    runs = {}
    for folder in folders:
        paths = {stage: Path(folder) / f"{stage}.jsonl" for stage in STAGES}
        if not any(path.is_file() for path in paths.values()):
            raise UserError(f"{folder}: no sft.jsonl, rm.jsonl or ppo.jsonl there; give the --out folder of a run")
        for stage, path in paths.items():
            rows = read_log(path) if path.is_file() else []
            if rows:
                runs.setdefault(stage, {})[folder] = rows
    if not runs:
        raise UserError(f"{', '.join(folders)}: no step is logged yet")
    return {stage: runs[stage] for stage in STAGES if stage in runs}


def series(rows, name):
    """The steps at which a metric was logged, and its values; what is no finite number is left out."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]
    return [step for step, _ in points], [x for _, x in points]


def parts(steps, values, most=PARTS):
    """At most `most` parts of the points, of equal length to one point -> middle step, mean, smallest and largest of each."""
    cuts = [len(steps) * i // min(most, len(steps)) for i in range(min(most, len(steps)) + 1)]
    pieces = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
    middle = [(steps[piece][0] + steps[piece][-1]) / 2 for piece in pieces]
    means = [math.fsum(values[piece]) / len(values[piece]) for piece in pieces]
    return middle, means, [min(values[piece]) for piece in pieces], [max(values[piece]) for piece in pieces]


def draw(runs):
    """What read_runs() gives -> a matplotlib Figure: rows for each stage, a panel for each metric, a colour for each folder."""
    folders = list(dict.fromkeys(folder for logs in runs.values() for folder in logs))
    looks = {folder: {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i // len(COLOURS) % len(STYLES)]}
             for i, folder in enumerate(folders)}  # fmt: skip
    heights = {stage: math.ceil(len(STAGES[stage]) / COLUMNS) for stage in runs}
    matplotlib = need_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(16, 3 * sum(heights.values()) + 1), layout="constrained")
    grid, top = figure.add_gridspec(sum(heights.values()), COLUMNS), 0
    for stage, logs in runs.items():
        for i, (name, unit) in enumerate(STAGES[stage].items()):
            axis = figure.add_subplot(grid[top + i // COLUMNS, i % COLUMNS])
            axis.set(title=f"{TITLES[stage]}: {name}", ylabel=unit, xlabel="iteration" if stage == "ppo" else "step")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.3)
            for folder, rows in logs.items():
                curve(axis, rows, name, looks[folder])
            low, high = axis.dataLim.intervaly
            if name in FALLING and 0 < 4 * low < high:
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        top += heights[stage]
    lines = [matplotlib.lines.Line2D([], [], **look) for look in looks.values()]
    legend = figure.legend(lines, ["" for _ in folders], loc="outside upper left", ncols=4, frameon=False)
    for text, folder in zip(legend.get_texts(), folders):
        text.set(text=folder, parse_math=False)  # as it is, also with a dollar in it or an underscore in front
    figure.supxlabel(NOTE, fontsize="medium")
    return figure


def curve(axis, rows, name, look):
    """One metric of one run: line, band, and the validation as dots."""
    steps, values = series(rows, name)
    if steps:
        middle, means, low, high = parts(steps, values)
        axis.plot(middle, means, **look)
        axis.fill_between(middle, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axis.plot(*series(rows, f"val_{name}"), "o", color=look["color"], markersize=5)


def need_matplotlib():
    try:
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.ticker
    except ImportError:
        raise UserError("the package matplotlib is missing; pip install matplotlib")
    return matplotlib


def main():
    config, folders = read_flags(__doc__, PlotConfig(), positional="FOLDER")
    path = Path(config.to or Path(folders[0]) / "curves.svg")
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"--to {path}: should end in .svg or .png")
    matplotlib = need_matplotlib()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text: small, and it can be searched
        draw(read_runs(folders)).savefig(path, dpi=100)
    print(f"wrote {path}")


if __name__ == "__main__":
    run_script(main)
