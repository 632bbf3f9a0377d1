"""The pictures of RESULTS.md, from bench/results.json.

    python -m bench.pictures    after pip install matplotlib

bench/tokens.png is a photograph of out/report.html, at iteration 20 of a run.
"""

import io
import re
import statistics

from bench.tables import ROOT, load
from data.files import write_file

BLUE, ORANGE, PURPLE, GREY = "#3b82f6", "#f97316", "#a855f7", "#8b949e"  # on white and on black
GREEN = "#22c55e"
PATHS = ("beta = 0.03", "default", "beta = 0.3", "a quarter of the pairs, beta = 0")
KL = "KL to the reference, nats per response"
MARKERS = "osD^v<>pPX*hd8"
LABELS = {"speed, seed 0": "minippo", "speed, seed 0, LoRA": "minippo, LoRA"}
LABELS["speed, seed 0, TRL"] = "TRL"
KINDS = {"TRL": GREY, "PPO": BLUE, "RE": PURPLE, "RLOO": PURPLE, "GRPO": PURPLE}


def figure(columns, width, height):
    """Axes without a background."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    style = dict.fromkeys(inks, GREY) | dict.fromkeys(papers, "none")
    style |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    style |= {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}  # text stays text
    pyplot.rcParams.update(style | {"svg.hashsalt": "minippo"})
    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def save(drawing, path):
    """As SVG, with coordinates to a hundredth of a point."""
    svg = io.StringIO()
    drawing.savefig(svg, format="svg", metadata={"Date": None})
    text = re.sub(r"-?\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", svg.getvalue())
    write_file(path, text)


def plot_limits(axis, limits, name, **style):
    """Best of n, and the best policy over beta."""
    kinds = {True: [], False: []}
    for label, x in limits.items():
        kinds["best" in label].append((x["KL"][0], x[name][0]))
    axis.plot(*zip(*kinds[False]), color=GREY, label="the best policy, over beta", **style)
    axis.plot(*zip(*kinds[True]), "o:", color=PURPLE, label="best of 4, 16, 64", **style)


def draw_frontier(results):
    drawing, axes = figure(2, 10, 4)
    for axis, name in zip(axes, ("score", "judge")):
        plot_limits(axis, results["limits"], name)
        for setting, colour in zip(PATHS, (ORANGE, BLUE, GREEN)):
            path, label = results["paths"][setting], setting.replace("default", "beta = 0.1")
            style = {"color": colour, "linewidth": 1, "label": f"PPO, {label}"}
            axis.plot(path["kl"], path[name], ".-", **style)
        axis.set(xlabel=KL, title=name)
    axes[0].legend(loc="lower right")
    return drawing


def draw_hacking(results):
    drawing, axis = figure(1, 6, 3.6)
    for name, colour in (("score", BLUE), ("judge", ORANGE)):
        for setting, line in (("default", "-"), (PATHS[-1], "--")):
            path, label = results["paths"][setting], setting.replace("default", "beta = 0.1")
            axis.plot(path["kl"], path[name], line, color=colour, label=f"{name}, {label}")
    axis.set(xlabel=KL, xscale="symlog")
    axis.legend(fontsize=8)
    return drawing


def draw_neighbours(results):
    drawing, axes = figure(2, 12, 4.5)
    for axis, key in zip(axes, ("score", "judge")):
        plot_limits(axis, results["limits_of_neighbours"], key, linewidth=1, markersize=3)
        for (name, row), marker in zip(results["neighbours"].items(), MARKERS):
            colour = next((x for part, x in KINDS.items() if part in name), ORANGE)
            x, y = row["KL"], row[key]
            axis.errorbar(x[0], y[0], y[1], x[1], fmt=marker, color=colour, label=name)
        axis.set(xlabel=KL, title=key)
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return drawing


def draw_pretrained(results):
    drawing, axis = figure(1, 6, 3.6)
    for (name, path), colour in zip(
        results["pretrained_speed_paths"].items(), (BLUE, PURPLE, GREY)
    ):
        means = [statistics.fmean(path["judge"][max(0, i - 4) : i + 1]) for i in range(20)]
        axis.plot(path["seconds"], means, color=colour, label=LABELS[name])
    axis.set(xlabel="seconds since the first batch", ylabel="favourable, last five batches")
    axis.legend()
    return drawing


PICTURES = {  # name: the sections that it shows
    "frontier": (draw_frontier, "limits", "paths"),
    "hacking": (draw_hacking, "paths"),
    "neighbours": (draw_neighbours, "neighbours", "limits_of_neighbours"),
    "pretrained": (draw_pretrained, "pretrained_speed_paths"),
}


def draw(results, folder=ROOT / "bench"):
    """All pictures whose figures are there."""
    for name, (draw_it, *sections) in PICTURES.items():
        if results.keys() >= {*sections}:
            save(draw_it(results), folder / f"{name}.svg")


if __name__ == "__main__":
    draw(load())
