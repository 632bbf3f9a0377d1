"""What one sees of PPO while it trains: warnings, responses, and out/report.html, a page that any
browser opens from disk. It is plumbing/page.html with the data in it."""

import json
import math
from collections import defaultdict
from pathlib import Path

import torch

from data.files import printable, read_log, write_file, write_jsonl
from minippo import at_least_float32, evaluate_actions, kl_per_response, trace
from plumbing.text import chunks, texts_of

POINTS = 300  # of a curve at most; where a log has more lines, a point is the mean of several
RESPONSES = 6  # traced in an iteration
LIKELY = 3  # next tokens shown in a state


@torch.no_grad()
def likely_tokens(models, tokens, mask, temperature, spell):
    """In the state of each action of a row, tokens (T,) and mask (T-1,): the likeliest next tokens
    by the first of the models, which sampled the row, and the action -> a list of [text, its
    probability by each model] for each action."""
    hidden = [model.hidden(tokens[None, :-1])[0][0, mask] for model in models]  # (N, C) each
    logits = [at_least_float32(x.lm_head(h)) / temperature for x, h in zip(models, hidden)]
    chances = torch.stack(logits, -1).softmax(1).cpu()  # (N, V, models)
    likely = chances[:, :, 0].topk(LIKELY).indices.tolist()
    actions = tokens[1:][mask].tolist()
    return [
        [[spell(i), *p[i].tolist()] for i in dict.fromkeys([*ids, action])]
        for ids, action, p in zip(likely, actions, chances)
    ]


@torch.no_grad()
def trace_responses(batch, models, tokenizer, temperature):
    """Some responses of a batch, from the lowest score to the highest, token by token. models: the
    policy before the update, the reference at that time, the policy after the update."""
    order = batch["scores"].argsort(stable=True)
    rows = order[torch.linspace(0, len(order) - 1, min(RESPONSES, len(order))).long()]
    batch = {name: x[rows] for name, x in batch.items()}
    tokens, mask = batch["tokens"], batch["mask"]
    batch["logprobs"], _, _ = evaluate_actions(models[-1], tokens, mask, temperature)
    prompts, _ = texts_of(tokenizer, tokens, mask)
    return [
        {
            "prompt": prompt,
            "score": batch["scores"][i].item(),
            "columns": trace(batch, i, tokenizer.spell),
            "likely": likely_tokens(models, tokens[i], mask[i], temperature, tokenizer.spell),
        }
        for i, prompt in enumerate(prompts)
    ]


def warnings_of(stats, kl):
    """What is wrong with an iteration -> {kind: sentence}. kl: of each response."""
    mean, error = kl.mean().item(), kl.std(correction=0).item() / math.sqrt(len(kl))
    wrong = {}
    if len(kl) < 16:  # too few for a reliable mean
        return wrong
    if mean < -4 * error - 1e-4:
        wrong["sign"] = f"KL {mean:.3f} ± {error:.3f} is below 0: sampling and update disagree"
    if mean > 100 or stats["entropy"] < 0.02:
        figures = f"KL {mean:.0f}, entropy {stats['entropy']:.3f} nats per token"
        wrong["collapse"] = f"{figures}: the policy may have collapsed (a smaller --lr?)"
    if not stats["eos_rate"]:
        wrong["end"] = "no response has ended by itself (a larger --max_new_tokens?)"
    return wrong


def traced(step, steps):
    """Are some responses of this iteration traced? 1, 2, 5, 10, 20, 50, ... and the last."""
    return str(step).rstrip("0") in ("1", "2", "5") or step == steps


def watch(run, stats, batch):
    """Look at an iteration of PPO: warn, show a response, trace some -> the judge's grade, if the
    prompts are those of the default data."""
    step, config = run.step, run.config
    texts = texts_of(run.tokenizer, batch["tokens"], batch["mask"])
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    for kind, text in warnings_of(stats, kl).items():
        if kind not in run.warned:
            run.warned.add(kind)
            print(f"warning: iteration {step}: {text}")
    if step % 40 == 1:
        text = printable((texts[0][0] + texts[1][0])[:400])
        print(f"    {text!r}  score {batch['scores'][0]:.2f}  KL {kl[0]:.2f}")
    if traced(step, config.steps):
        path = config.out / "ppo_traces.jsonl"
        lines = [line for line in read_log(path) if line["step"] < step]
        models = *run.models_before, run.model
        responses = trace_responses(batch, models, run.tokenizer, config.temperature)
        lines.append(json_safe({"step": step, "responses": responses}))
        write_jsonl(path, lines)
    return {"judge": sum(map(run.judge, *texts)) / len(kl)} if run.judge else {}


def write_page(run, report=None):
    """Write out/report.html from logs, traces and the report, if there is one -> its path."""
    out, models = run.config.out, run.config.models
    folders = {"sft": models, "rm": models, "ppo": out}
    logs = {name: read_log(folder / f"{name}.jsonl") for name, folder in folders.items()}
    data = {
        "steps": len(logs["ppo"]),
        "settings": run.settings,
        "traces": read_log(out / "ppo_traces.jsonl"),
        "report": report,
        "curves": {name: curves(rows) for name, rows in logs.items()},
    }
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    # In JSON a "<" can only be part of a string. Escaped like this, no text can end the <script>
    # that holds it.
    text = json.dumps(json_safe(data, 5)).replace("<", "\\u003c")
    write_file(out / "report.html", page.replace("@data@", text))
    return out / "report.html"


def json_safe(x, digits=17):
    """The same lists and dicts for JSON, which has no infinity and no NaN: None stands for them."""
    if isinstance(x, dict):
        return {name: json_safe(value, digits) for name, value in x.items()}
    if isinstance(x, list):
        return [json_safe(value, digits) for value in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x


def curves(rows):
    """Lines of a log -> {name: [[step, value], ...]}, thinned out, less what is not finite."""
    points = defaultdict(list)
    for row in rows:
        for name, x in row.items():
            if x is not None:
                points[name].append([row["step"], x])
    for name, curve in points.items():
        size = math.ceil(len(curve) / POINTS)  # points that become one
        pieces = chunks(curve, size)
        points[name] = [[sum(x) / len(piece) for x in zip(*piece)] for piece in pieces]
    return points
