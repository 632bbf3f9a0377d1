"""minippo.py with its numbers beside it: what each line computes, while it runs.

    python -m plumbing.reading                  writes out/minippo.html, a page for the browser

Masks, rewards, advantages and losses are computed for the example of the file's header; networks,
sampling and loop for two responses of a tiny GPT. What each line changes is recorded in the first
call of a function (sys.settrace). So after an edit of the file, the page shows the edit.
"""

import ast
import html
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import torch

import minippo
from data.files import write_file
from plumbing.errors import run_script
from plumbing.flags import read_flags

SMALL, TURNS, LONGEST = 24, 8, 48  # numbers of a tensor, turns of a loop, letters: what is shown


def run_header():
    """The functions of sections 2, 4 and 5, on the response of the header."""

    def row(*numbers):  # less the prompt's first token, and a pad
        return torch.tensor([[0.0, *numbers, 0.0]])

    logprobs, ref_logprobs = row(-0.5, -1.2, -0.1), row(-1.0, -1.0, -0.3)
    values, scores, config = row(0.8, 1.0, 1.2), torch.tensor([1.4]), minippo.PPOConfig()
    mask = logprobs != 0
    rewards = minippo.kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1)
    advantages, returns = minippo.gae(rewards, values, mask, config.gamma, config.lam)
    credit = minippo.whiten(advantages, mask)
    minippo.kl_per_response(logprobs, ref_logprobs, mask)
    minippo.policy_loss(row(-0.25, -1.1, -0.4), logprobs, credit, mask, config.clip_eps)
    minippo.value_loss(values + 0.25 * mask, values, returns, mask, config.value_clip)
    minippo.reward_model_loss(scores, torch.tensor([0.2]))


def run_tiny():
    """Networks, sampling and the loop: two prompts of letters. The weights have moved a little;
    else nothing would differ from the reference, and all values would be 0."""
    torch.manual_seed(21)  # one of the two responses ends by itself
    policy = minippo.GPT(minippo.GPTConfig(27, context=16, layers=2, channels=32)).eval()
    ref, reward_model = minippo.frozen_copy(policy), minippo.RewardModel(policy)
    for weights in policy.parameters():
        weights.data += 0.02 * torch.randn_like(weights)
    tokens, mask = torch.tensor([[1, 15, 2, 26]]), torch.tensor([[False, True, True]])
    minippo.evaluate_actions(policy, tokens, mask, 0.9, with_entropy=True)

    def score(tokens, mask):
        return reward_model(tokens, minippo.row_lengths(mask))

    config = minippo.PPOConfig(max_new_tokens=6, minibatches=1)
    batch = minippo.rollout(policy, ref, score, [[1], [4, 5]], config)
    batch |= minippo.compute_advantages(batch, config)
    minippo.ppo_update(policy, torch.optim.Adam(policy.parameters(), 3e-3), batch, config)
    minippo.batch_metrics(batch, config)
    policy(batch["tokens"])
    minippo.table(minippo.trace(batch, 0, str))


def statements(source):
    """{line: the first line of the statement that it belongs to}; of a loop or an if, its head."""
    first = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            end = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            start = min(x.lineno for x in (node, *getattr(node, "decorator_list", [])))
            first |= dict.fromkeys(range(start, max(end, node.lineno) + 1), node.lineno)
    return first


def record(source):
    """{line: [{name: text}, one for each time that it ran]}: what the functions of minippo.py set in
    their first call."""
    notes, seen, first = defaultdict(list), set(), statements(source)

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
            now = {name: (x, show(x)) for name, x in frame.f_locals.items() if name != "_"}
            new = {}
            for name, (x, text) in now.items():
                old, old_text = before.get(name, (None, ""))
                if text and (x is not old or text != old_text):  # set, or changed in place
                    new[name] = text
            if event == "return" and show(value):
                new["->"] = show(value)
            notes[line].append(new)
            before, line = now, first[frame.f_lineno]
            return on_line

        return on_line

    sys.settrace(on_call)
    try:
        run_header()
        run_tiny()
    finally:
        sys.settrace(None)
    return notes


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
    if isinstance(x, (int, str)):
        return str(x) if len(str(x)) <= LONGEST else str(x)[:LONGEST] + "…"
    if isinstance(x, dict):
        return ", ".join(f"{k} {show(v)}" if isinstance(v, float) else str(k) for k, v in x.items())
    if isinstance(x, (list, tuple)) and len(x) <= TURNS:
        return "; ".join(filter(None, map(show, x)))
    return ""


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
:root { color-scheme: light dark; --dim: light-dark(#57606a, #8b96a3);
  --number: light-dark(#0a5c8f, #7cc0f5); --stripe: light-dark(#f3f6f9, #1b2129); }
body { margin: 0; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
p { margin: 0; padding: 8px 12px; background: var(--stripe); font-family: system-ui, sans-serif; }
.line { display: grid; grid-template-columns: 3.5em minmax(0, 100ch) minmax(0, 1fr); gap: 0 12px; }
.line:has(.n) { background: var(--stripe); }
.line > * { white-space: pre-wrap; overflow-wrap: anywhere; }
i, .c { color: var(--dim); } i { text-align: right; font-style: normal; }
.n { color: var(--number); }
@media (max-width: 1100px) { .line { grid-template-columns: 2.5em minmax(0, 1fr); }
  .n { grid-column: 2; margin-left: 4ch; } body { font-size: 11px; } }
</style>
<p>minippo.py, and beside each line what it computes, for the response of the header or two of a tiny
GPT. x and . are a mask, / stands between the rows of a tensor, | between the turns of a loop, ;
between the items of a list. (3, 27) is a shape, -&gt; what a function returns.</p>
LINES
</html>
"""


def commented(source):
    """{line: the column at which its comment begins}; docstrings are comments."""
    start = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            rest = range(token.start[0] + 1, token.end[0] + 1)
            start |= {token.start[0]: token.start[1]} | dict.fromkeys(rest, 0)
    return start


def page(source, notes):
    """The HTML page: a row for each line, its number, its code, its numbers."""
    comments, rows = commented(source), []
    for i, line in enumerate(source.splitlines(), 1):
        cut = comments.get(i, len(line))
        code, comment = html.escape(line[:cut]), html.escape(line[cut:])
        row = f'<i>{i}</i><span>{code}<span class="c">{comment}</span></span>'
        if found := beside(notes.get(i, [])):
            text = "\n".join(f"<b>{name}</b> {html.escape(x)}" for name, x in found)
            row += f'<span class="n">{text}</span>'
        rows.append(f'<div class="line">{row}</div>')
    return PAGE.replace("LINES", "\n".join(rows))


def main():
    read_flags(__doc__)
    source = Path(minippo.__file__).read_text(encoding="utf-8")
    write_file("out/minippo.html", page(source, record(source)))
    print("open out/minippo.html in a browser: minippo.py with its numbers beside it")


if __name__ == "__main__":
    run_script(main)
