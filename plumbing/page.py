"""out/report.html: the result, responses before and after, PPO token by token, the curves."""

from html import escape
from string import Template

from plumbing.files import write_text
from plumbing.settings import printable

PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>minippo: a run</title>
<style>
:root { color-scheme: light dark; }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif; }
p { max-width: 48rem; }
h2 { margin-top: 2.5rem; }
pre, .wide { overflow-x: auto; }
pre, table, figure { font-size: .85rem; }
td, th { padding: .1rem .6rem; white-space: pre; text-align: right; }
:is(td, th):is(:first-child, :last-child) { text-align: left; }
summary { margin: .5rem 0; overflow-wrap: anywhere; }
figure { display: inline-block; width: 20rem; max-width: 100%; margin: 0 1.5rem 1.5rem 0; }
svg { width: 100%; height: 9rem; border: solid grey; border-width: 1px 0; }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
</style>
<h1>What this run did</h1>
<h2>The result</h2>
<pre>$text</pre>
<p>Means over validation prompts, ± standard errors. <em>Best of n</em>: of n responses of the SFT
model, the one with the highest score. <em>Unseen</em>: prompts that PPO was not trained on.
The <em>judge</em>, if there is one, knows the truth, and takes no part in the training.</p>
<h2>Before and after PPO: the first responses sampled, not chosen</h2>
$samples
<h2>Token by token</h2>
<p>A single response cannot show which of its tokens earned the score. Over many responses, good
choices stand out from bad ones. This is one iteration of PPO, whatever the algorithm of the run,
made after it with a new optimizer, at the learning rate of the first iteration. The columns are
those in the header of minippo.py. A blue token has a whitened advantage above 0, and is pushed up;
an orange one is pushed down. The last three columns come after the update: log pi, the ratio, and the
likeliest tokens in this place with their probabilities in %, before → after. (All places share the
weights, so other tokens move them too.)</p>
$iterations
<h2>The curves</h2>
$charts
</html>
""")
COLUMNS = {  # of the table of a response
    "old_logprobs": "log pi",
    "ref_logprobs": "log ref",
    "d": "d",
    "rewards": "reward",
    "old_values": "value",
    "returns": "return",
    "advantages": "whitened",
    "logprobs": "new log pi",
    "ratio": "ratio",
}
BLUE = "#3b8fd9"  # colour-blind eyes tell these two apart
ORANGE = "#de7a21"
CHARTS = [  # title, log, names of its numbers
    ("Score, in each iteration", "ppo", ["score", "objective", "judge"]),
    ("KL to the reference, nats per response", "ppo", ["kl"]),
    ("Entropy, nats per token", "ppo", ["entropy"]),
    ("Share of the returns' variance that values explain", "ppo", ["explained_variance"]),
    ("SFT: validation loss, nats per token", "sft", ["val_loss"]),
    ("Reward model: validation pairs right", "rm", ["val_accuracy"]),
]


def sample_html(before, after):
    """The first response of the SFT model and of the policy to a prompt."""
    lines = [f"<p><b>{escape(printable(before['prompt']))}</b>"]
    for label, response in (("before", before), ("after", after)):
        text = escape(printable(response["text"]))
        lines.append(f"<br>{label}: {text} (score {response['score']:.2f})")
    return "\n".join(lines)


def response_html(response):
    """A row for each token of a response."""
    header = "".join(
        f"<th>{title}</th>" for title in ("token", *COLUMNS.values(), "likeliest tokens")
    )
    rows = [f"<tr>{header}</tr>"]
    for i, token in enumerate(response["tokens"]):
        advantage = response["advantages"][i]
        colour = BLUE if advantage > 0 else ORANGE
        strength = min(99, round(25 * abs(advantage)))  # in %
        style = f"background: color-mix(in srgb, {colour} {strength}%, Canvas)"
        cells = [f'<td style="{style}">{escape(token)}</td>']
        cells += [f"<td>{response[name][i]:z.2f}</td>" for name in COLUMNS]
        shares = [f"{text} {100 * a:.0f} → {100 * b:.0f}" for text, a, b in response["rivals"][i]]
        cells.append(f"<td>{escape(',  '.join(shares))}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    text = printable(response["prompt"] + "".join(response["tokens"]))
    summary = f"<summary>{escape(text)} (score {response['score']:.2f})</summary>"
    table = f'<div class="wide"><table>{"".join(rows)}</table></div>'
    return f"<details open>{summary}{table}</details>"


def chart_html(title, curves):
    """curves: {name: [(step, number), ...]} -> a line for each."""
    steps, numbers = zip(*[point for curve in curves.values() for point in curve])
    low, high = min(numbers), max(numbers)
    names = []
    lines = []
    for (name, curve), colour in zip(curves.items(), (BLUE, ORANGE, "grey")):
        names.append(f'<span style="color: {colour}">{name}</span> {curve[-1][1]:.3g}')
        places = []
        for step, number in curve:
            x = 100 * (step - min(steps)) / max(1, max(steps) - min(steps))
            y = 100 * (high - number) / ((high - low) or 1)
            places.append(f"{x:.2f},{y:.2f}")
        lines.append(f'<polyline stroke="{colour}" points="{" ".join(places)}"/>')
    svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(lines)}</svg>'
    text = f"<b>{title}</b><br>{', '.join(names)}<br>{high:.3g}{svg}{low:.3g}"
    return f"<figure>{text}, steps {min(steps)} to {max(steps)}</figure>"


def charts_html(logs):
    charts = []
    for title, stage, names in CHARTS:
        curves = {}
        for name in names:
            curve = [(line["step"], line[name]) for line in logs.get(stage, []) if name in line]
            if curve:
                curves[name] = curve
        if curves:
            charts.append(chart_html(title, curves))
    return "\n".join(charts)


def write_page(path, text, samples, iterations, logs):
    """samples: (before, after), responses each. iterations: {where it starts: responses of
    report.one_iteration}. logs: {name of a stage: the lines of its log}."""
    tables = []
    for start, responses in iterations.items():
        tables.append(f"<h3>It starts from {start}</h3>")
        tables += map(response_html, responses)
    page = PAGE.substitute(
        text=escape(text),
        samples="\n".join(sample_html(*pair) for pair in samples),
        iterations="\n".join(tables),
        charts=charts_html(logs),
    )
    write_text(path, page)
    print(f"open {path} in a browser")
