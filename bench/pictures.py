"""The pictures of RESULTS.md, from bench/results.json.

    python -m bench.pictures    after pip install matplotlib

bench/tokens.png is a photograph of out/report.html, at iteration 10 of a run.
"""

import io
import re

from bench.tables import ROOT, load
from data.files import write_file
from plumbing.settings import read_flags, script

# On white and on black
BLUE, ORANGE, PURPLE, GREEN, GREY = "#3b82f6", "#f97316", "#a855f7", "#22c55e", "#8b949e"
KL = "KL to the reference, nats per response"


def axes(columns, width, height):
    """-> figure, axes, without a background."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inks = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    style = dict.fromkeys(inks, GREY) | {"savefig.transparent": True, "legend.frameon": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "minippo"}
    style |= {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}  # text stays text
    pyplot.rcParams.update(style)
    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def frontier(results):
    """Best of n, the best policy over beta, and the ways of PPO."""
    figure, both = axes(2, 10, 4)
    systems = results["systems"]
    optima = [systems["the optimum at beta = 0.1"], *results["optima"].values()]
    optima.sort(key=lambda row: row["kl"])
    best = [systems[f"best of {n}"] for n in (4, 16, 64)]
    for axis, name in zip(both, ("score", "judge")):
        for rows, line, colour, label in (
            (optima, "-", GREY, "the best policy, over beta"),
            (best, "o:", PURPLE, "best of 4, 16, 64"),
        ):
            points = [(row["kl"][0], row[name][0]) for row in rows]
            axis.plot(*zip(*points), line, color=colour, label=label)
        for beta, colour in (("0.03", ORANGE), ("0.1", BLUE), ("0.3", GREEN)):
            path, label = results["paths"][f"beta = {beta}"], f"PPO, beta = {beta}"
            axis.plot(path["kl"], path[name], color=colour, linewidth=1, label=label)
        axis.set(xlabel=KL, title=name)
    both[0].legend(loc="lower right")
    return figure


def hacking(results):
    figure, axis = axes(1, 6, 3.6)
    for name, colour in (("score", BLUE), ("judge", ORANGE)):
        for setting, line in (("beta = 0.1", "-"), ("a quarter of the pairs, beta = 0", "--")):
            path = results["paths"][setting]
            axis.plot(path["kl"], path[name], line, color=colour, label=f"{name}, {setting}")
    axis.set(xlabel=KL, xscale="symlog")
    axis.legend(fontsize=8)
    return figure


@script
def main():
    read_flags(__doc__, run=False)
    for draw in (frontier, hacking):
        svg = io.StringIO()
        draw(load()).savefig(svg, format="svg", metadata={"Date": None})
        text = re.sub(r"-?\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", svg.getvalue())
        write_file(ROOT / "bench" / f"{draw.__name__}.svg", text)


if __name__ == "__main__":
    main()
