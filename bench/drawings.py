"""Three drawings of RESULTS.md: the clipped objective, the loop, and what several passes over a batch do.

    python -m bench.drawings                        draws all three; what was measured comes from bench/results.json
    python -m bench.drawings --passes out/epochs4   first reads the log of a run: train_ppo.py --epochs 4 --steps 60 --no_report

Plain SVG, each with the colours of a light and of a dark page. The curves of the first are computed by minippo.policy_loss.
"""

import argparse
import json
import math
import statistics
from html import escape
from pathlib import Path

import torch

from minippo import PPOConfig, policy_loss
from plumbing.settings import UserError, run_script

ROOT = Path(__file__).parents[1]
# Blue and orange differ for every kind of colour vision; what they say is also said in words.
LIGHT = {"page": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "rule": "#c8d1da", "tint": "#f1f5f9", "blue": "#0860c4",
         "orange": "#b04a00"}  # fmt: skip
DARK = {"page": "#0d1117", "ink": "#e6edf3", "soft": "#a0a9b4", "rule": "#3d444d", "tint": "#182029", "blue": "#6cb2ff",
        "orange": "#f59a4c"}  # fmt: skip
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, 'Liberation Sans', sans-serif"
SIZES = {"head": 19, "text": 17, "note": 16}  # of text, in units of a drawing; each is 760 wide
WIDTH = 760


def style():
    """The rules of all classes: a text has a size and a colour, a shape has strokes and fills."""
    rules = [f"text {{ font-family: {FONT}; }}", ".head { font-weight: 600; }"]
    rules += [f".{name} {{ font-size: {size}px; }}" for name, size in SIZES.items()]

    def colours(palette):
        fills = [f".{name} {{ fill: {colour}; }}" for name, colour in palette.items()]
        return fills + [f".{name}-line {{ stroke: {colour}; fill: none; }}" for name, colour in palette.items()]

    return "\n".join([*rules, *colours(LIGHT), "@media (prefers-color-scheme: dark) {", *colours(DARK), "}"])


class Drawing:
    """Shapes in the order in which they are drawn. Coordinates grow to the right and down."""

    def __init__(self, height, title, description):
        self.height, self.title, self.description, self.shapes = height, title, description, []
        self.add("rect", "page", x=0, y=0, width=WIDTH, height=height, rx=8)

    def add(self, shape, kind, inner="", **attributes):
        values = "".join(f' {name.replace("_", "-")}="{escape(number(x))}"' for name, x in attributes.items())
        self.shapes.append(f'<{shape} class="{kind}"{values}' + (f">{inner}</{shape}>" if inner else "/>"))

    def text(self, x, y, words, kind="text ink", anchor="middle", **more):
        self.add("text", kind, escape(words), x=x, y=y, text_anchor=anchor, **more)

    def line(self, points, kind, width=2, **more):
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.add("polyline", kind, points=path, stroke_width=width, stroke_linejoin="round", **more)

    def arrow(self, points, colour, width=2, size=6, **more):
        """A line along the points, with a head at the last; the last piece is horizontal or vertical."""
        (a, b), (x, y) = points[-2:]
        dx, dy = ((x > a) - (x < a)) * size, ((y > b) - (y < b)) * size
        self.line([*points[:-1], (x - dx, y - dy)], f"{colour}-line", width, **more)
        head = [(x, y), (x - 2 * dx + dy, y - 2 * dy + dx), (x - 2 * dx - dy, y - 2 * dy - dx)]
        self.add("polygon", colour, points=" ".join(f"{number(x)},{number(y)}" for x, y in head))

    def box(self, x, y, width, height, kind, **more):
        self.add("rect", kind, x=x, y=y, width=width, height=height, rx=8, stroke_width=2, **more)

    def write(self, path):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">'
        said = [f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.description)}</desc>", f"<style>\n{style()}\n</style>"]
        path.write_text("\n".join([head, *said, *self.shapes, "</svg>"]) + "\n", encoding="utf-8")


def number(x):
    """Coordinates to a hundredth; words as they are."""
    return f"{x:.2f}".rstrip("0").rstrip(".") if isinstance(x, float) else str(x)


# ----------------------------------------------------------------------------------------------------------------------
# The clipped objective


def objective(ratio, advantage, clip_eps):
    """What PPO maximises for one token, and its slope: the gradient with respect to the ratio, by autograd."""
    ratio = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    loss, _ = policy_loss(ratio.log(), old, torch.full_like(old, advantage), mask, clip_eps)
    (-loss).backward()
    return -loss.item(), ratio.grad.item()


def said_of(ratio, slope):
    """One of the six cases in words."""
    if slope == 0:
        return "risen enough" if ratio > 1 else "fallen enough"
    if (ratio - 1) * slope < 0:
        return "comes back"
    return "rises" if slope > 0 else "falls"


LOW, HIGH = 0.4, 1.6  # the ratios that are drawn
PANEL, TOP, BOTTOM = 312, 72, 262  # width and edges of a panel


def draw_clip(clip_eps=PPOConfig.clip_eps):
    about = "PPO's objective for one token over the ratio pi / old, for a positive and for a negative advantage A."
    drawing = Drawing(420, "The clipped objective of PPO", about)
    for left, advantage, words in ((56, 1.0, "better"), (430, -1.0, "worse")):
        drawing.text(left + PANEL / 2, 32, f"A {'>' if advantage > 0 else '<'} 0: {words} than expected", "head ink")
        drawing.text(left, 60, f"objective, A = {minus(advantage)}", "note soft", "start")
        clip_panel(drawing, left, advantage, clip_eps)
    said = {"blue": (56, "has a gradient"), "orange": (236, "flat: has none"), "soft": (430, "ratio × A, not clipped")}
    for colour, (x, words) in said.items():
        how = {"width": 2, "stroke_dasharray": "5 5"} if colour == "soft" else {"width": 4}
        drawing.line([(x, 396), (x + 28, 396)], f"{colour}-line", **how)
        drawing.text(x + 38, 401, words, "note ink", "start")
    return drawing


def clip_panel(drawing, left, advantage, clip_eps):
    """One sign of the advantage: axes, the two lines, and the three cases with what happens to the ratio there."""
    unit = PANEL / (HIGH - LOW)

    def place(ratio, y):
        return left + (ratio - LOW) * unit, (TOP + BOTTOM) / 2 - (y - advantage) * 150

    ends = [LOW, 1 - clip_eps, 1 + clip_eps, HIGH]
    drawing.add("rect", "tint", x=place(ends[1], 0)[0], y=TOP, width=2 * clip_eps * unit, height=BOTTOM - TOP)
    drawing.text(place(1, 0)[0], BOTTOM - 10, "clip range", "note soft")
    drawing.line([(left, TOP), (left, BOTTOM), (left + PANEL, BOTTOM)], "rule-line", 1.5)
    for tick in (ends[1], 1.0, ends[2]):
        drawing.text(place(tick, 0)[0], BOTTOM + 20, f"{tick:g}", "note soft")
        drawing.text(left - 8, place(0, tick * advantage)[1] + 5, minus(tick * advantage), "note soft", "end")
    drawing.text(left + PANEL / 2, BOTTOM + 44, "ratio = pi / old", "note soft")
    drawing.line([place(x, x * advantage) for x in (LOW, HIGH)], "soft-line", stroke_dasharray="5 5", data_curve="unclipped")
    for a, b in zip(ends, ends[1:]):
        ratios = torch.linspace(a, b, 9, dtype=torch.float64).tolist()
        (value, slope), ratio = objective(ratios[4], advantage, clip_eps), ratios[4]
        colour, (x, y) = "blue" if slope else "orange", place(ratio, value)
        drawing.line([place(r, objective(r, advantage, clip_eps)[0]) for r in ratios], f"{colour}-line", 4, data_curve="objective")
        if slope:  # uphill
            drawing.arrow([(x, y + 14), (x + 40 * (1 if slope > 0 else -1), y + 14)], "ink", data_case=f"{advantage:g} {ratio:g}")
        drawing.add("circle", colour, cx=x, cy=y, r=6.0)
        drawing.text(x, BOTTOM + 76, f"slope {minus(slope)}", f"text {colour}")
        drawing.text(x, BOTTOM + 99, said_of(ratio, slope), "note ink")


def minus(x):
    """A number with a minus sign as long as a plus."""
    return f"{x:g}".replace("-", "−")


# ----------------------------------------------------------------------------------------------------------------------
# The loop


LEFT, RIGHT = 104, 688  # edges of what is as wide as the loop
COLUMNS, CELL = (104, 248, 392), 132  # left edges of what stands side by side, and its width
VALUES = 536, 140  # the same of the value head
PHASES = ((106, "sample"), (270, "score"), (428, "reward"), (564, "update"))  # where each phase has its number


def draw_loop():
    about = "The policy samples responses. Reward model, reference and value head say what they think of them. From that come "
    about += "rewards and advantages. The update changes the policy and its value head."
    drawing = Drawing(624, "One iteration of PPO and its four networks", about)
    for i, (y, word) in enumerate(PHASES, 1):
        drawing.add("circle", "rule-line", cx=50, cy=y - 12, r=17, stroke_width=2)
        drawing.text(50, y - 6, str(i))
        drawing.text(50, y + 24, word, "note soft")
    networks(drawing)
    flows(drawing)
    return drawing


def networks(drawing):
    """The boxes: with a solid frame what is trained, with a dashed one what is frozen, without one what is computed."""
    middle, heads = (LEFT + RIGHT) / 2, COLUMNS[2] + CELL - LEFT - 12
    drawing.box(LEFT, 52, RIGHT - LEFT, 108, "page blue-line")
    drawing.text(LEFT + 16, 80, "Policy", "head blue", "start")
    drawing.text(RIGHT - 16, 80, "starts as the SFT model; trained", "note soft", "end")
    for x, width, head, words in ((LEFT + 12, heads, "vocabulary head", "which token comes next?"),
                                  (*VALUES, "value head", "reward to come?")):  # fmt: skip
        drawing.box(x, 94, width, 54, "tint")
        drawing.text(x + width / 2, 117, head)
        drawing.text(x + width / 2, 138, words, "note soft")
    for x, head, words in ((COLUMNS[0], "Reward model", "learned; frozen"), (COLUMNS[1], "Reference", "SFT; frozen")):
        drawing.box(x, 240, CELL, 60, "page soft-line", stroke_dasharray="6 5")
        drawing.text(x + CELL / 2, 265, head)
        drawing.text(x + CELL / 2, 287, words, "note soft")
    drawing.box(LEFT, 390, RIGHT - LEFT, 76, "tint")
    drawing.text(middle, 420, "rewards: −β (log pi − log ref), and at the end the score")
    drawing.text(middle, 448, "advantages: how much more than the values foresaw?")
    drawing.box(LEFT, 526, RIGHT - LEFT, 76, "tint")
    drawing.text(middle, 556, "clipped loss of the policy, loss of the values")
    drawing.text(middle, 584, "some gradient steps; then the next prompts", "note soft")


def flows(drawing):
    """The arrows, each with the name of what flows."""
    first, second, third = (x + CELL / 2 for x in COLUMNS)
    for x, ends, words in (
        (second, (14, 52), "prompts"), (first, (160, 240), "responses"), (second, (160, 240), "responses"),
        (third, (160, 390), "log pi"), (VALUES[0] + VALUES[1] / 2, (160, 390), "values"),
        (first, (300, 390), "score"), (second, (300, 390), "log ref"),
        (first, (466, 526), "old log pi, old values"), (third, (466, 526), "advantages, returns"),
    ):  # fmt: skip
        drawing.arrow([(x, ends[0]), (x, ends[1])], "ink")
        drawing.text(x + 12, sum(ends) / 2 + 2, words, "note ink", "start")
    drawing.arrow([(RIGHT, 564), (RIGHT + 36, 564), (RIGHT + 36, 106), (RIGHT, 106)], "blue", 3)
    drawing.text(0, 0, "gradient", "text blue", transform=f"translate({RIGHT + 57} 335) rotate(-90)")


# ----------------------------------------------------------------------------------------------------------------------
# Several passes over a batch

METRICS = {"clip_frac": ("clip fraction", "share of tokens"), "approx_kl": ("approx_kl", "nats per token"),
           "ratio_max": ("ratio_max", "pi / old")}  # fmt: skip


def summary(folder):
    """The log of a run of several epochs -> for each metric and pass the quartiles over the middle half of its iterations, in which
    the learning rate neither climbs nor is small. UserError if the log is not of such a run."""
    path = Path(folder) / "ppo.jsonl"
    if not path.exists():
        raise UserError(f"{path}: not found; train_ppo.py --epochs 4 --steps 60 --no_report --out {folder} makes it")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if len(rows) < 8 or "passes" not in rows[0]:
        raise UserError(f"{path}: a run of at least 8 iterations with --epochs 2 or more is needed")
    first, last = len(rows) // 4 + 1, len(rows) - len(rows) // 4
    middle = [row["passes"] for row in rows[first - 1 : last]]
    out = {"steps": len(rows), "first": first, "last": last}
    return out | {name: [statistics.quantiles([passes[i][name] for passes in middle], n=4, method="inclusive")
                         for i in range(len(middle[0]))] for name in METRICS}  # fmt: skip


def ticks(top):
    """0 and up to four more round numbers at equal distances, the last at or just above `top`."""
    top = top or 1.0
    power = 10.0 ** math.floor(math.log10(top))
    steps = [power * step for step in (0.2, 0.25, 0.5, 1, 2, 2.5, 5) if power * step * 4 >= top]
    step = min(steps, key=lambda step: math.ceil(top / step) * step)
    return [i * step for i in range(math.ceil(top / step) + 1)]


def draw_passes(measured):
    """measured: as summary() gives it."""
    passes = len(measured["clip_frac"])
    about = f"Clip fraction, approximate KL and largest ratio in each of {passes} passes over a batch."
    drawing = Drawing(366, "What several passes over a batch do", about)
    for left, (name, (head, unit)) in zip((64, 308, 552), METRICS.items()):
        drawing.text(left, 32, head, "head ink", "start")
        drawing.text(left, 55, unit, "note soft", "start")
        passes_panel(drawing, left, name, measured[name])
    which = f"iterations {measured['first']} to {measured['last']} of {measured['steps']}"
    drawing.text(64, 328, f"Line: median of the {which}. Band: their middle half.", "note soft", "start")
    drawing.text(64, 350, "Pass 1 is all that the default setting makes.", "note soft", "start")
    return drawing


def passes_panel(drawing, left, name, quartiles, width=184, top=74, bottom=254):
    """One metric over the passes: the median as a line, the quartiles as a band."""
    start = 1.0 if name == "ratio_max" else 0.0  # what it is before the first step
    marks = [start + tick for tick in ticks(max(high for _, _, high in quartiles) - start)]

    def place(i, x):
        across, up = i / (len(quartiles) - 1), (x - start) / (marks[-1] - start)
        return left + 14 + across * (width - 28), bottom - up * (bottom - top)

    for tick in marks:
        y = place(0, tick)[1]
        drawing.line([(left, y), (left + width, y)], "rule-line", 1)
        drawing.text(left - 8, y + 5, f"{tick:g}", "note soft", "end")
    low, middle, high = ([place(i, q[k]) for i, q in enumerate(quartiles)] for k in range(3))
    band = " ".join(f"{number(x)},{number(y)}" for x, y in low + high[::-1])
    drawing.add("polygon", "blue", points=band, fill_opacity=0.2, data_band=name)
    drawing.line(middle, "blue-line", 3, data_curve=name)
    for i, (x, y) in enumerate(middle):
        drawing.add("circle", "blue", cx=x, cy=y, r=5)
        drawing.text(x, bottom + 22, str(i + 1), "note soft")
    drawing.text(left + width / 2, bottom + 45, "pass over the batch", "note soft")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", metavar="FOLDER", help="the --out folder of a run with --epochs 4")
    folder, path = parser.parse_args().passes, ROOT / "bench" / "results.json"
    results = json.loads(path.read_text())
    if folder:
        results["passes"] = summary(folder)
        path.write_text(json.dumps(results, indent=1) + "\n")
    for name, drawing in drawings(results).items():
        drawing.write(ROOT / "bench" / f"{name}.svg")


def drawings(results):
    return {"clip": draw_clip(), "loop": draw_loop(), "passes": draw_passes(results["passes"])}


if __name__ == "__main__":
    run_script(main)
