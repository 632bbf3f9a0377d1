"""The pictures of README.md and RESULTS.md that show measurements, from bench/results.json.

python -m bench.pictures    after pip install matplotlib
"""

import io
import re

from bench.tables import ROOT, load
from plumbing.files import write_file

BLUE, ORANGE, PURPLE, GREY = "#3b82f6", "#f97316", "#a855f7", "#8b949e"  # on white and on black
GREEN = "#22c55e"
CURVES = ("score", "judge", "kl", "entropy", "explained_variance")
KL = "KL to the reference, nats per response"
FAR, MARKERS = -0.3, "osD^v<>pPX*hd8H.12"  # what is worse than FAR stands at the edge


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


def save(drawing, name):
    """As SVG, with coordinates to a hundredth of a point."""
    svg = io.StringIO()
    drawing.savefig(svg, format="svg", metadata={"Date": None})
    text = re.sub(r"-?\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", svg.getvalue())
    write_file(ROOT / "bench" / f"{name}.svg", text)


def draw_curves(results):
    drawing, axes = figure(len(CURVES), 15, 2.8)
    for axis, name in zip(axes, CURVES):
        steps = range(1, 6 * len(results["curves"][name]), 6)
        mean, spread = zip(*results["curves"][name])
        low, high = ([m + sign * s for m, s in zip(mean, spread)] for sign in (-1, 1))
        colour = ORANGE if name == "judge" else BLUE
        axis.plot(steps, mean, color=colour)
        axis.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
        axis.set(title=name.replace("_", " "), xlabel="iteration")
    save(drawing, "curves")


def plot_limits(axis, results, name, **style):
    """The best policy over beta, and best of n."""
    points = results["optimum"].values()
    x, y = ([point[key][0] for point in points] for key in ("kl", name))
    axis.plot(x, y, color=GREY, label="the best policy, over beta", **style)
    points = results["best_of_n"].values()
    x, y = [point["kl"] for point in points], [point[name][0] for point in points]
    axis.plot(x, y, "o:", color=PURPLE, label="best of 4, 16, 64", **style)


def draw_frontier(results):
    drawing, axes = figure(2, 10, 4)
    paths = {"beta = 0.3": GREEN, "default": BLUE, "beta = 0.03": ORANGE}
    for axis, name in zip(axes, ("score", "judge")):
        plot_limits(axis, results, name)
        for setting, colour in paths.items():
            path, label = results["paths"][setting], setting.replace("default", "beta = 0.1")
            style = {"color": colour, "linewidth": 1, "label": f"PPO, {label}"}
            axis.plot(path["kl"], path[name], ".-", **style)
        axis.set(xlabel=KL, title=name)
    axes[0].legend(loc="lower right")
    save(drawing, "frontier")


def draw_hacking(results):
    drawing, axis = figure(1, 6, 3.6)
    paths = {
        "default": ("-", "beta = 0.1"),
        "a quarter of the pairs, beta = 0": ("--", "beta = 0 and few pairs"),
    }
    for name, colour in (("score", BLUE), ("judge", ORANGE)):
        for setting, (line, label) in paths.items():
            path = results["paths"][setting]
            axis.plot(path["kl"], path[name], line, color=colour, label=f"{name}, {label}")
    axis.set(xlabel=KL, xscale="symlog")
    axis.legend(fontsize=8)
    save(drawing, "hacking")


def draw_neighbours(results, widest=6.5):
    """The widest KL that is drawn, in nats."""
    drawing, (*axes, forest) = figure(3, 15, 5)
    rows = results["neighbours"]
    kinds = {"TRL": GREY, "RE": PURPLE, "RL": PURPLE, "GRPO": PURPLE, "best": ORANGE}
    kinds |= {"DPO": ORANGE, "IPO": ORANGE}
    styles = {}
    for name, marker in zip(rows, MARKERS):
        colour = next((kinds[part] for part in kinds if part in name), BLUE)
        styles[name] = {"marker": marker, "color": colour, "markersize": 5, "linewidth": 0.8}
    for axis, key in zip(axes, ("score", "judge")):
        plot_limits(axis, results["limits"], key, linewidth=1, markersize=3)
        for name, path in results["over_beta"].items():
            x, y = ([point[kind] for point in path.values()] for kind in ("kl", key))
            axis.plot(x, y, **styles[name])
        axis.set(xlabel=KL, title=f"{key}, seed 0", xlim=(0, widest))
    for place, (name, row) in enumerate(rows.items()):
        gain, error = row.get("gain", [0.0, 0.0])  # PPO has none
        style = styles[name] if gain > FAR else styles[name] | {"marker": "<"}
        forest.errorbar(max(gain, FAR), place, xerr=error if gain > FAR else None, **style)
    forest.axvline(0, color=GREY, linewidth=0.5)
    edges = FAR - 0.02, 0.05
    forest.set(title="optimality, less PPO's", xlim=edges, yticks=range(len(rows)))
    forest.set_yticklabels(list(rows), fontsize=8)
    forest.yaxis.tick_right()
    forest.invert_yaxis()
    save(drawing, "neighbours")


def draw_quality(results):
    drawing, axis = figure(1, 6, 3.6)
    for (name, x), colour in zip(results["quality"].items(), (BLUE, GREEN, PURPLE, GREY)):
        axis.plot(*zip([0, 0], *x["curve"]), ".-", color=colour, label=name)
    axis.set(xlabel="seconds of training, one thread", title="optimality", ylim=(0.7, 1))
    axis.legend(loc="lower right")
    save(drawing, "quality")


def draw(results):
    draw_curves(results)
    draw_frontier(results)
    draw_hacking(results)
    draw_neighbours(results)
    draw_quality(results)


if __name__ == "__main__":
    draw(load())
