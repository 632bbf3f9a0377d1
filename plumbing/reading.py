"""minippo.py with its numbers beside it: what each line computes, while it runs.

    python -m plumbing.reading                  writes out/minippo.html, a page for the browser

Masks, rewards, advantages and losses are computed for the example of the file's header; networks,
sampling and loop for two responses of a tiny GPT, which has taken one step. The names that a line
sets are recorded while the functions run (sys.settrace), in the first call of each. So after an
edit of the file, the page shows the edit.
"""

import ast
import html
import io
import re
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

import minippo
from plumbing.errors import run_script
from plumbing.files import write_file
from plumbing.settings import read_flags

SMALL, TURNS, LONGEST = 24, 8, 48  # numbers of a tensor, turns of a loop, letters: what is shown
SEED = 8  # of the two responses


@dataclass
class ReadingConfig:
    out: str = "out"  # folder for minippo.html


def header_rows(text):
    """The table of the header -> {row: its cells}, the first of each name."""
    rows = {}
    for line in text.splitlines():
        if found := re.match(r"    (\S+(?: \S+)*)  +((?:\S+ +){4}\S+)", line):
            rows.setdefault(found[1], found[2].split())
    return rows


def run_header():
    """The functions of sections 2, 4 and 5, on the response of the header."""
    rows = header_rows(minippo.__doc__)

    def row(name):
        return torch.tensor([[0.0 if x == "." else float(x) for x in rows[name][:5]]])

    score, kl_coef = map(
        float, re.search(r"score of (\S+) and beta (\S+):", minippo.__doc__).groups()
    )
    mask = minippo.response_mask(torch.tensor([2]), torch.tensor([5]), 6)
    batch = {"tokens": torch.arange(6)[None], "mask": mask, "scores": torch.tensor([score])}
    batch |= {"old_logprobs": row("log pi"), "ref_logprobs": row("log ref")}
    batch["old_values"], config = row("value"), minippo.PPOConfig()
    old = batch["old_logprobs"], batch["ref_logprobs"], mask
    batch["rewards"] = minippo.kl_adjusted_rewards(batch["scores"], *old, kl_coef)
    old = batch["rewards"], batch["old_values"], mask
    advantages, batch["returns"] = minippo.gae(*old, config.gamma, config.lam)
    batch["whitened"] = minippo.whiten(advantages, mask)
    minippo.kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
    logprobs, values = row("log pi now"), batch["old_values"] + 0.25 * mask
    old = batch["old_logprobs"], batch["whitened"], mask
    minippo.policy_loss(logprobs.requires_grad_(), *old, config.clip_eps)
    old = batch["old_values"], batch["returns"], mask
    minippo.value_loss(values.requires_grad_(), *old, config.value_clip)
    minippo.masked_mean(batch["rewards"], mask)
    minippo.reward_model_loss(torch.tensor([score]), torch.tensor([0.2]))
    minippo.adapt_kl_coef(kl_coef, 0.5, 6.0, 128, 5000)


class TinyGPT:
    """PPO with two prompts, a letter each. Before the first step nothing differs from the reference
    and all values are 0: so an iteration with all letters comes before the one looked at."""

    def __init__(self):
        torch.manual_seed(0)
        self.policy = minippo.GPT(minippo.GPTConfig(27, context=16, layers=2, channels=32)).eval()
        self.ref = minippo.frozen_copy(self.policy)
        self.reward_model = minippo.RewardModel(self.policy)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), 3e-3)

    def score(self, tokens, mask):
        return self.reward_model(tokens, minippo.row_lengths(mask))

    def iterate(self, prompts):
        config = minippo.PPOConfig(max_new_tokens=6, minibatches=1)
        settings = prompts, self.optimizer, config, config.kl_coef
        batch, _ = minippo.ppo_iteration(self.policy, self.ref, self.score, *settings)
        return batch

    def look(self):
        tokens = torch.tensor([[1, 15, 2, 26]])  # with entropy, which the loop does without
        mask = minippo.response_mask(torch.tensor([2]), torch.tensor([4]), 4)
        minippo.evaluate_actions(self.policy, tokens, mask, temperature=0.9)
        torch.manual_seed(SEED)  # so that one of the two responses ends by itself
        batch = self.iterate([[1], [4]])
        self.policy(batch["tokens"])
        minippo.trace(batch, 0, str)


def statements(source):
    """{line: the first line of the statement that it belongs to}; of a loop or an if, its head."""
    first = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            end = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            start = min(x.lineno for x in (node, *getattr(node, "decorator_list", [])))
            first |= dict.fromkeys(range(start, max(end, node.lineno) + 1), node.lineno)
    return first


def names_set(source):
    """{line of a statement: the names that it sets, as a whole or in part}"""
    names = defaultdict(set)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            for part in ast.walk(node):
                if isinstance(getattr(part, "ctx", None), ast.Store):
                    part = part.value if isinstance(part, ast.Subscript) else part
                    names[node.lineno].add(getattr(part, "id", ""))
    return names


def record(run, source, notes, seen, example):
    """Call run() and add to notes, {line: [{name: text}, one for each time that it ran]}, what the
    functions of minippo.py set in their first call. example: what they compute, beside each `def`."""
    first, sets = statements(source), names_set(source)

    def on_call(frame, event, _):
        code = frame.f_code
        if code.co_filename != minippo.__file__ or code in seen or code.co_name[0] == "<":
            return None
        seen.add(code)
        before, line = {}, first[code.co_firstlineno]

        def on_line(frame, event, value):
            nonlocal before, line
            if first[frame.f_lineno] == line and event != "return":
                return on_line  # another line of the same statement
            now = {name: (x, show(x)) for name, x in frame.f_locals.items()}
            new = {
                name: text
                for name, (x, text) in now.items()
                if text
                and name != "_"
                and (name in sets[line] or changed(before.get(name), x, text))
            }
            if not before:
                new = {"example:": example} | new
            if event == "return" and value is not None and show(value):
                new["->"] = show(value)
            notes[line].append(new)
            before, line = now, first[frame.f_lineno]
            return on_line

        return on_line

    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(None)


def changed(before, x, text):
    """Is this another thing than before, or the same one, changed in place?"""
    return before is None or before[0] is not x or before[1] != text


def show(x):
    """A value as text; "" for what has no numbers, as networks and settings."""
    if isinstance(x, torch.Tensor):
        if x.numel() > SMALL:
            return f"{tuple(x.shape)}"
        if x.dim() > 1:
            return " / ".join(map(show, x))
        values = x.reshape(-1).tolist()
        return " ".join(".x"[v] if x.dtype == torch.bool else show(v) for v in values)
    if isinstance(x, float):
        return f"{x:.0e}" if 0 < abs(x) < 0.005 else f"{x + 0.0:.2f}"  # 0.0: no "-0.00"
    if isinstance(x, (bool, int, str)):
        return str(x) if len(str(x)) <= LONGEST else str(x)[:LONGEST] + "…"
    if isinstance(x, dict):
        return ", ".join(
            f"{name} {show(v)}" if is_number(v) else str(name) for name, v in x.items()
        )
    if isinstance(x, (list, tuple)) and len(x) <= TURNS:
        return "; ".join(filter(None, map(show, x)))
    return ""


def is_number(x):
    return isinstance(x, (int, float))


def beside(turns):
    """What a line has set, turn by turn: [{name: text}, ...] -> [(name, texts joined)]; - where it
    has changed nothing."""
    turns = turns[: len(turns) - (len(turns) > 1 and not turns[-1])]  # the one that ends a loop
    names = dict.fromkeys(name for turn in turns for name in turn)
    columns = {name: [turn.get(name, "-") for turn in turns] for name in names}
    more = ["…"] * (len(turns) > TURNS)
    return [(name, " | ".join([*x[:TURNS], *more])) for name, x in columns.items()]


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>minippo.py</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --text: light-dark(#1f2328, #d7dde4);
  --back: light-dark(#fff, #14181d); --dim: light-dark(#57606a, #8b96a3);
  --number: light-dark(#0a5c8f, #7cc0f5); --stripe: light-dark(#f3f6f9, #1b2129); }
body { margin: 0; background: var(--back); color: var(--text);
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
header { position: sticky; top: 0; padding: 8px 12px; background: var(--stripe);
  font-family: system-ui, sans-serif; }
label { margin-right: 16px; white-space: nowrap; }
.line { display: grid; grid-template-columns: 3.5em minmax(0, 100ch) minmax(0, 1fr); gap: 0 12px; }
.line:has(.n) { background: var(--stripe); }
.line > * { white-space: pre-wrap; overflow-wrap: anywhere; }
.i, .c { color: var(--dim); } .i { text-align: right; user-select: none; }
.n { color: var(--number); } .n b { color: var(--text); font-weight: 600; }
body:has(#comments:not(:checked)) .c, body:has(#numbers:not(:checked)) .n { display: none; }
@media (max-width: 1100px) { header { position: static; } main { overflow-x: auto; }
  .line { grid-template-columns: 2.5em 100ch; gap: 0 8px; } body { font-size: 11px; }
  .n { grid-column: 2; margin-left: 4ch; padding-left: 1ch; border-left: 2px solid; } }
</style>
<header>minippo.py, and beside each line what it computes. x and . are a mask, / stands between the
rows of a tensor, | between the turns of a loop, ; between the items of a list. (3, 27) is a shape,
-&gt; what a function returns.<br>
<label><input type="checkbox" id="comments" checked> comments</label>
<label><input type="checkbox" id="numbers" checked> numbers</label></header>
<main>
LINES
</main></html>
"""


def commented(source):
    """{line: the column at which its comment begins}; docstrings are comments."""
    start = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", 0), str):
            start |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            start[line] = column if token.line[:column].strip() else 0
    return start


def page(source, notes):
    """The HTML page: a row for each line, its number, its code, its numbers."""
    comments, rows = commented(source), []
    for i, line in enumerate(source.splitlines(), 1):
        cut = comments.get(i, len(line))
        code = html.escape(line[:cut])
        if cut < len(line):
            code += f'<span class="c">{html.escape(line[cut:])}</span>'
        found = beside(notes.get(i, []))
        text = "\n".join(f"<b>{name}</b> {html.escape(x)}" for name, x in found)
        numbers = f'<span class="n">{text}</span>' if text else ""
        kind = "line c" if comments.get(i) == 0 else "line"
        rows.append(
            f'<div class="{kind}"><span class="i">{i}</span><span>{code}</span>{numbers}</div>'
        )
    return PAGE.replace("LINES", "\n".join(rows))


def all_notes(source):
    notes, seen, models = defaultdict(list), set(), []
    record(run_header, source, notes, seen, "the header")
    record(lambda: models.append(TinyGPT()), source, notes, seen, "a tiny GPT")
    models[0].iterate([[i] for i in range(26)])
    record(models[0].look, source, notes, seen, "a tiny GPT")
    return notes


def main():
    (config,) = read_flags(__doc__, ReadingConfig())
    source = Path(minippo.__file__).read_text(encoding="utf-8")
    notes = all_notes(source)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "minippo.html", page(source, notes))
    print(f"open {out / 'minippo.html'} in a browser: minippo.py with its numbers beside it")


if __name__ == "__main__":
    run_script(main)
