"""bench/results.json, and the tables of README.md and RESULTS.md that are written from it.

    python -m bench.tables

results.json is {section: {name: figures}} or {section: [figures]}, one line for each of the
figures, which have five digits. [mean, standard error] is a figure too; the error is null where
there is one seed. A table stands between <!-- name --> and <!-- /name -->.
"""

import json
import math
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATH = ROOT / "bench" / "results.json"
TEXTS = ("README.md", "RESULTS.md")


def mean_and_error(numbers):
    """Over seeds: the mean and its standard error, or None for the latter where there is one
    seed."""
    n = len(numbers)
    error = statistics.stdev(numbers) / math.sqrt(n) if n > 1 else None
    return [statistics.fmean(numbers), error]


def rounded(x, digits=5):
    if isinstance(x, dict):
        return {str(name): rounded(part, digits) for name, part in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(part, digits) for part in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def dumps(results):
    """The text of results.json: what is two levels down stands on one line."""

    def one_line(x):
        return json.dumps(x, ensure_ascii=False)

    def lines(section):
        if isinstance(section, list):
            return "[\n" + ",\n".join(map(one_line, section)) + "\n]"
        rows = (f"{one_line(name)}: {one_line(x)}" for name, x in section.items())
        return "{\n" + ",\n".join(rows) + "\n}"

    sections = (f"{one_line(name)}: {lines(x)}" for name, x in rounded(results).items())
    return "{\n" + ",\n".join(sections) + "\n}\n"


def load():
    return json.loads(PATH.read_text(encoding="utf-8"))


def keep(sections):
    """Put these sections into results.json, beside the others, and their figures into the
    tables."""
    PATH.write_text(dumps(load() | sections), encoding="utf-8")
    write_tables()


def write_tables():
    made = tables(load())
    for name in TEXTS:
        document = (ROOT / name).read_text(encoding="utf-8")
        for marker, text in made.items():
            document = splice(document, marker, text)
        (ROOT / name).write_text(document, encoding="utf-8")


def splice(document, name, text):
    """The document with this text between the markers of that name, if it has them."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in document:
        return document
    before, rest = document.split(begin)
    return before + begin + text + "\n" + end + rest.split(end, 1)[1]


def cell(x, digits=2):
    """A number, or [mean, error], or None."""
    if x is None:
        return ""
    numbers = x if isinstance(x, list) else [x]
    # A last digit of 5 is rounded up, whatever binary makes of it.
    return " ± ".join(f"{n * (1 + 1e-9):.{digits}f}" for n in numbers if n is not None)


def table(head, rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(figures, **digits):
    return [cell(figures.get(name), n) for name, n in digits.items()]


def tables(results):
    """results.json -> {name of a marker: text of the table}, of the sections that are there."""
    makers = {
        "reports": tables_of_seeds,
        "settings": table_of_settings,
        "hacked": table_of_hacked,
        "cured": table_of_cured,
        "neighbours": table_of_neighbours,
        "quality": table_of_quality,
        "ladder": table_of_ladder,
        "judged": tables_of_real,
        "speed": tables_of_speed,
        "beside_nanogpt": table_of_nanogpt,
        "memory": tables_of_memory,
        "accidents": tables_of_accident,
    }
    out = {}
    for section, make in makers.items():
        if section in results:
            out |= make(results)
    return out


def pair(report, part, name):
    """[mean, error over prompts] of a report."""
    return [report[part][name], report[part][f"{name}_se"]]


def tables_of_seeds(results):
    """What the runs at full length have reported."""
    reports = results["reports"]

    def mean(part, name):
        return mean_and_error([report[part][name] for report in reports.values()])

    def figures(part, *names):
        return {name: mean(part, name) for name in names}

    digits = {"judge": 2, "score": 2, "kl": 2, "optimality": 3}
    systems = {"SFT model": figures("sft", "judge", "score") | {"kl": None}}
    systems |= {f"best of {n}": x for n, x in results["best_of_n"].items()}
    for part, label in (
        ("ppo", "**PPO**"),
        ("ppo_seen", "PPO, on prompts that it was trained on"),
        ("ppo_unseen", "PPO, on unseen prompts"),
    ):
        systems[label] = figures(part, *digits)
    systems["the optimum at beta = 0.1"] = results["optimum"]["0.1"]
    rows = [[label, *cells(x, **digits)] for label, x in systems.items()]
    rows[0][3], rows[-1][4] = "0", "1"
    out = {"systems": table(["", "judge", "score", "KL", "optimality"], rows)}

    columns = (
        ("SFT above the entropy, nats/token", "sft", "above_entropy", 4),
        ("RM below its ceiling", "rm", "below_ceiling", 4),
        ("judge", "ppo", "judge", 2),
        ("KL", "ppo", "kl", 2),
        ("optimality on seen prompts", "ppo_seen", "optimality", 3),
        ("on unseen prompts", "ppo_unseen", "optimality", 3),
    )
    rows = []
    for seed, x in reports.items():
        row = [cell(pair(x, part, name), n) for _, part, name, n in columns]
        rows.append([seed, *row, str(x["suspects"]), str(x["jumps"])])
    head = [name for name, *_ in columns]
    out["seeds"] = table(["seed", *head, "suspicious answers", "jumps of the KL"], rows)
    return out


def code(flags):
    return f"`{flags}`" if flags else ""


def table_of_settings(results):
    columns = {"optimality": 3, "gain": 3, "judge": 2, "kl": 2}
    rows = results["settings"].items()
    rows = [[name, code(x["flags"]), *cells(x, **columns)] for name, x in rows]
    head = ["setting", "flags", "optimality", "less the default's", "judge", "KL"]
    return {"settings": table(head, rows)}


def table_of_hacked(results):
    rows = []
    for x in results["hacked"]:
        said = f"{x['prompt']} **{x['response'].strip()}**"
        rows.append([said, *cells(x, score=2, judge=2, kl=2)])
    return {"hacked": table(["prompt and response", "score", "judge", "kl"], rows)}


def table_of_cured(results):
    """PPO on the models of seeds that it hacked."""
    seeds = {}
    for x in results["cured"].values():
        seeds |= dict.fromkeys(x)
    rows = []
    for name, x in results["cured"].items():
        figures = [[*cells(x[seed], judge=2, kl=2), str(x[seed]["suspects"])] for seed in seeds]
        rows.append([name, *sum(figures, [])])
    head = [f"{column}, seed {seed}" for seed in seeds for column in ("judge", "KL", "suspicious")]
    return {"cured": table(["", *head], rows)}


def table_of_neighbours(results):
    columns = {"optimality": 3, "gain": 3, "judge": 2, "kl": 2}
    rows = [[name, *cells(x, **columns)] for name, x in results["neighbours"].items()]
    head = ["", "optimality", "less PPO's", "judge", "KL"]
    return {"neighbours": table(head, rows)}


def table_of_quality(results):
    goals = [name for name in next(iter(results["quality"].values())) if name != "curve"]
    rows = [
        [name, *(cell(x[goal], 0) or "never" for goal in goals)]
        for name, x in results["quality"].items()
    ]
    head = ["seconds to an optimality of", *goals]
    return {"quality": table(head, rows)}


def table_of_ladder(results):
    rungs = results["ladder"]
    first = rungs["total return"]["variance"]
    rows = [
        [rung, cell(x["variance"], 1), cell(x["variance"] / first, 3)] for rung, x in rungs.items()
    ]
    head = ["grad log pi times the", "variance", "share of the first"]
    return {"ladder": table(head, rows)}


def tables_of_real(results):
    """What bench.real has measured on film reviews."""
    rows, out = [], {}
    for x in results["reviews"]:
        texts = [f"{x['prompt']} **{x[kind].strip()}**" for kind in ("sft", "ppo")]
        rows.append([*texts, *cells(x, score=2, kl=2)])
    out["reviews"] = table(["SFT model", "PPO", "score", "KL"], rows)
    rows = []
    for name, x in results["judged"].items():
        share = cell([100 * figure for figure in x["judge"]], 1)
        rows.append([name, share, cell(x["score"]), "0" if x["kl"] == [0, 0] else cell(x["kl"])])
    out["judged"] = table(["", "favourable, %", "score", "KL"], rows)
    names, shares, _, kls = zip(*rows)
    out["favourable"] = table(["", *names], [["favourable, %", *shares], ["KL", *kls]])
    return out


def tables_of_speed(results):
    ratios = ("update", "iteration")
    phases = ("rollout", "scoring", "update")
    rows = []
    for name, x in results["speed"].items():
        seconds = [cell(x["seconds"][phase]) for phase in phases]
        rows.append([name, *seconds, *(cell(x["ratios"][name], 1) for name in ratios)])
    head = ["workload", *(f"{phase}, s" for phase in phases), *ratios]
    return {"speed": table(head, rows)}


def table_of_nanogpt(results):
    rows = [
        [name, cell(1000 * x["seconds"][-1], 0), *map(cell, x["ratios"])]
        for name, x in results["beside_nanogpt"].items()
    ]
    head = ["workload", "minippo, ms", "times nanoGPT", "times nanoGPT with GPT-2's GELU"]
    return {"nanogpt": table(head, rows)}


def tables_of_memory(results):
    columns = ("four_models", "total", "total_checkpointed")
    rows = []
    for name, x in results["memory"].items():
        size = f"{x['parameters'] / 1e6:,.0f} M"
        rows.append([name, size, *(cell(x[column] / 1e9, 1) for column in columns)])
    head = ["", "parameters", "the models", "in all"]
    out = {"memory": table([*head, "in all, `--grad_checkpoint`"], rows)}
    rows = []
    for name, stages in results["memory_measured"].items():
        gigabytes = [[x / 1e9 for x in stage] for stage in stages.values()]
        rows.append([name, *(f"{peak:.1f} ({said:.1f})" for peak, said in gigabytes)])
    head = ["in memory at once", "SFT", "reward model", "PPO"]
    return out | {"memory_measured": table(head, rows)}


def tables_of_accident(results):
    rows = [[name, *cells(x, rise=2, spread=2)] for name, x in results["accidents"].items()]
    head = ["changed in the iteration", "rise, nats per token", "spread over orders of the batch"]
    out = {"accidents": table(head, rows)}
    rows = [
        [name, code(x["flags"]), *cells(x, astray=1, low=2, high=2)]
        for name, x in results["cures"].items()
    ]
    head = ["changed in the run", "", "iterations with a response astray", "low scores"]
    return out | {"cures": table([*head, "high scores"], rows)}


if __name__ == "__main__":
    write_tables()
