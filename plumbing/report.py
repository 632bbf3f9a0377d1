"""Does PPO do what it should? A check before it trains, and the report at its end.

The report measures a finished policy. For a fixed reference, reward and beta, the best policy is
known: pi*(y | x) ~ ref(y | x) exp(r(x, y) / beta) (Korbak et al., arXiv:2205.11275). So samples of
the reference alone tell how well that policy does, and how well any policy could do. All is
measured on validation prompts, with fresh samples; errors treat these prompts as a random sample of
all.
"""

import json
import math

import torch

from data.files import UserError, printable, write_file
from data.rows import load_rows
from data.truth import entropies, judge_of, margins
from minippo import draw, evaluate_actions, gather_logprobs, generate, kl_per_response, rollout
from minippo import row_lengths
from plumbing.models import load_checkpoint, load_sft, nll
from plumbing.page import strict
from plumbing.text import encode_rows, in_parts, pad, read_prompts, texts_of

PROMPTS, REFERENCE, SAMPLES = 128, 192, 16  # responses of the reference, of a policy, to a prompt
BEST_OF = 4, 16, 64
COLUMNS = "judge", "score", "kl", "eos_rate", "response_length", "distinct"


@torch.no_grad()
def check_start(policy, ref, score, prompts, config):
    """Before the first update: do sampling and scoring agree? Do the settings suit the scores?

    pi / old must be 1 at every token, and the KL 0, unless --policy was given; else UserError. In
    bfloat16 single tokens are off by its rounding, so there the mean is judged.
    """
    B, k, minibatches = config.batch_size, config.k, config.minibatches
    if B % k or B < minibatches:
        raise UserError(
            f"--batch_size {B}: should be a multiple of --k {k}, >= --minibatches {minibatches}"
        )
    context, longest = policy.config.context, config.max_new_tokens
    if short := sum(len(prompt) + longest > context for prompt in prompts):
        room = f"leave less than {longest} tokens of the context of {context} for a response"
        print(f"warning: {short:,} of {len(prompts):,} prompts {room} (--max_new_tokens)")
    columns = []  # log-probabilities by which generate() draws, column by column, of its rows

    def recorded_draw(logits):
        token = draw(logits)
        columns.append(gather_logprobs(logits, token))
        return token

    prompts = prompts[: config.micro_batch or config.batch_size]
    temperature = config.temperature
    tokens, mask, logprobs, _ = generate(policy, prompts, longest, temperature, recorded_draw)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, temperature)
    drawn, lengths = torch.zeros_like(logprobs), row_lengths(mask)
    for t, column in enumerate(columns, tokens.shape[1] - 1 - len(columns)):
        drawn[lengths > t + 1, t] = column
    ratios, half = ((logprobs - drawn).exp() - 1).abs()[mask], policy.config.bfloat16
    off = (ratios.mean() if half else ratios.max()).item()
    nats = (logprobs - ref_logprobs).abs()[mask].max().item()
    tolerance, when = 0.05 if half else 1e-3, "before the first update"
    if not off <= tolerance:
        raise UserError(f"{when} a ratio is {off:.4f} off 1: sampling and scoring disagree")
    if not config.policy and not nats <= tolerance:
        raise UserError(f"{when} a token is {nats:.4f} nats away from the reference, not 0")
    kl = "" if config.policy else " and the KL to the reference is 0"
    print(f"checked: {when} the ratio is 1{kl}")
    scores = score(tokens, mask).double()
    spread, mean = scores.std(correction=0).item(), scores.mean().item()
    if spread > 0 and not 0.2 < spread < 5:
        factor = f"divide the reward by {float(f'{spread:.1g}'):g}"
        print(
            f"warning: the first scores have a standard deviation of {spread:.2g}, not 1: {factor}"
        )
    if abs(mean) > 1e4 * spread > 0:
        print(f"warning: the mean of the first scores is {mean:.3g}: subtract it from the reward")


# The report


def optimal_objective(scores, kl_coef):
    """The largest E[r] - beta KL of any policy: scores (P, M), M reference samples a prompt ->
    (P,).

    J*(x) = beta log E_ref[exp(r / beta)], with the mean over the samples for E. Rare answers of a
    high score are missing, so optimality, which is measured against it, is a little too high.
    """
    scores = scores.double()  # at a large beta the two logarithms hardly differ
    return kl_coef * (torch.logsumexp(scores / kl_coef, 1) - math.log(scores.shape[1]))


def best_of_n(scores, values, n):
    """The expected value of the sample with the best score among n: scores, values (P, M) -> (P,).

    Exact over all subsets of n out of the M samples: the one ranked k-th from below is the best of
    C(k-1, n-1) of the C(M, n) subsets.
    """
    M = scores.shape[1]
    ranks = range(1, M + 1)
    weights = scores.new_tensor([math.comb(k - 1, n - 1) / math.comb(M, n) for k in ranks])
    return (values.gather(1, scores.argsort(dim=1, stable=True)) * weights).sum(1)


def estimate(name, x):
    """x (P,) or (P, n), independent over prompts -> {name: mean, name_se: its standard error}; of
    a single prompt no error."""
    x = x.double().view(len(x), -1).mean(1)
    error = {f"{name}_se": (x.std() / len(x) ** 0.5).item()} if len(x) > 1 else {}
    return {name: x.mean().item()} | error


def optimality(J, J_sft, J_best):
    """(J(policy) - J(SFT)) / (J* - J(SFT)) from (P,) or (P, n) each: a ratio of means, with its
    standard error by the delta method; nothing if no policy can gain."""
    J, J_sft, J_best = (x.double().view(len(x), -1).mean(1) for x in (J, J_sft, J_best))
    gained, possible = J - J_sft, J_best - J_sft
    if possible.mean() < 1e-6:  # the score does not differ between answers
        return {}
    ratio = gained.mean() / possible.mean()
    return estimate("optimality", ratio + (gained - ratio * possible) / possible.mean())


def distinct(texts, n):
    """texts: n answers to each of P prompts -> (P,): the share of different ones among the first 16."""
    size = min(n, 16)
    return torch.tensor([len({*texts[i : i + size]}) / size for i in range(0, len(texts), n)])


class Evaluator:
    """Prompts (lists of ids), and the reference's answers to them: what policies are compared
    to."""

    def __init__(self, ref, score, tokenizer, prompts, config):
        self.ref, self.score, self.tokenizer = ref, score, tokenizer
        self.prompts, self.config, self.judge = prompts, config, judge_of(config.data)
        self.questions = [tokenizer.decode(prompt) for prompt in prompts]
        self.reference, self.reference_texts = self.sample(ref, REFERENCE)
        scores, beta = self.reference["score"], config.kl_coef
        self.best = optimal_objective(scores, beta)[:, None] if beta else None

    def sample(self, policy, n):
        """n responses to each of the P prompts -> {name: (P, n)}, and their texts in a list."""
        rows, parts, texts = [prompt for prompt in self.prompts for _ in range(n)], [], []
        print(f"    {len(rows):,} responses for the report", flush=True)
        for part in in_parts(rows, self.config.micro_batch or 512):
            batch = rollout(policy, self.ref, self.score, part, self.config)
            mask = batch["mask"]
            kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
            figures = torch.stack([batch["scores"], kl, batch["ended"], mask.sum(1)])
            parts.append(figures.float().cpu())
            texts += texts_of(self.tokenizer, batch["tokens"], mask)[1]
        figures = torch.cat(parts, 1).view(4, -1, n)
        measured = dict(zip(("score", "kl", "eos_rate", "response_length"), figures))
        if self.judge:
            grades = [self.judge(self.questions[i // n], text) for i, text in enumerate(texts)]
            measured = {"judge": torch.tensor(grades).view(-1, n)} | measured
        return measured, texts

    def figures(self, measured, texts, rows=slice(None)):
        """What sample() has returned -> {name: mean, name_se: error}, over the prompts in
        `rows`."""
        figures, n = {}, measured["score"].shape[1]
        for name, x in (measured | {"distinct": distinct(texts, n)}).items():
            figures |= estimate(name, x[rows])
        if self.best is not None:
            J = measured["score"] - self.config.kl_coef * measured["kl"]
            figures |= optimality(J[rows], self.reference["score"][rows], self.best[rows])
        return figures

    def best_of(self, n):
        """The best of n answers of the reference; its KL is an upper bound."""
        figures = {}
        for name, x in self.reference.items():
            figures |= estimate(name, best_of_n(self.reference["score"], x, n))
        figures.pop("kl_se", None)
        return figures | {"kl": math.log(n) - (n - 1) / n}

    def answer(self, measured, texts, i):
        """A response that sample() has returned, and its figures."""
        figures = {x: measured[x].flatten()[i].item() for x in COLUMNS[:3] if x in measured}
        return {"text": texts[i]} | figures

    def suspects(self, measured, texts):
        """Which responses look like reward hacking? The count, and the best of three prompts.

        A response is suspicious if its score is above all M of the reference (none is if one of
        these is at the cap) and its KL above log M (the reference says it less than once in M
        times) and twice the median.
        """
        score, kl = measured["score"], measured["kl"]
        far = kl > max(math.log(REFERENCE), 2 * kl.median().item())
        suspect = far & (score > self.reference["score"].amax(1, keepdim=True))
        order, highest = score.flatten().argsort(descending=True), {}
        rows = order[suspect.flatten()[order]].tolist()
        for i in rows:
            prompt = self.questions[i // score.shape[1]]
            highest.setdefault(prompt, {"prompt": prompt} | self.answer(measured, texts, i))
        return {"count": len(rows), "examples": list(highest.values())[:3]}


def report(run, score, trained_on):
    """Measure the policy of a finished run on validation prompts: out/report.json and the screen
    (unless --no_report), then the page. trained_on: prompts as ids."""
    config, path, figures = run.config, run.config.out / "report.json", None
    path.unlink(missing_ok=True)  # of an earlier policy
    if not config.no_report:
        torch.manual_seed(config.seed)
        prompts = read_prompts(config.data, "val", run.tokenizer, run.model.config.context)
        figures = make_report(run, score, trained_on, prompts)
        write_file(path, json.dumps(strict(figures), indent=2) + "\n")
        print_report(figures)
    print(f"open {run.write_page(figures)} in a browser to see the run")


def make_report(run, score, trained_on, prompts):
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
    evaluator = Evaluator(load_sft(run.config)[0], score, run.tokenizer, prompts, run.config)
    before, after = (
        (evaluator.reference, evaluator.reference_texts),
        evaluator.sample(run.model, SAMPLES),
    )
    sft, rm = stages_before(evaluator)
    report = {
        "beta": run.config.kl_coef,
        "sft": sft | evaluator.figures(*before),
        "rm": rm,
        "best_of_n": {str(n): evaluator.best_of(n) for n in BEST_OF},
        "policy": evaluator.figures(*after),
        "suspects": evaluator.suspects(*after),
        "samples": [
            {"prompt": question, "sft": evaluator.answer(*before, i * REFERENCE)}
            | {"policy": evaluator.answer(*after, i * SAMPLES)}
            for i, question in enumerate(evaluator.questions[:6])
        ],
    }
    seen = set(map(tuple, trained_on))
    seen = torch.tensor([tuple(prompt) in seen for prompt in prompts])
    if seen.any() and not seen.all():
        for kind, rows in (("seen", seen), ("unseen", ~seen)):
            report[kind] = evaluator.figures(*after, rows) | {"prompts": int(rows.sum())}
    report["table"], report["notes"] = table(report), list(notes(report))
    return report


@torch.no_grad()
def stages_before(evaluator):
    """Figures of the SFT model and the reward model (if one gave the scores): those of their files,
    and, where the truth is known, how far they are from the best that is possible: row by row, so
    that luck cancels out."""
    config, size = evaluator.config, evaluator.config.micro_batch or 64
    _, _, sft = load_checkpoint(config.models / "sft.pt", ["sft"])
    rows, entropy = known_rows(evaluator, "sft", entropies)
    if rows:
        tokens = sum(len(ids) for _, ids in rows) / len(rows)  # in a row
        excess = nll(evaluator.ref, rows, size).cpu() - entropy
        sft |= estimate("above_entropy", excess / tokens)
    if config.reward:
        return sft, {}
    model, _, rm = load_checkpoint(config.models / "rm.pt", ["rm"], config.device)
    rows, margin = known_rows(evaluator, "pref", margins)
    if rows:
        scores = []
        for part in in_parts([row[0] + row[i] for row in rows for i in (1, 2)], size):
            scores.append(model(*pad(part, config.device)).cpu())
        scores = torch.cat(scores).view(-1, 2)
        more = margin.sign() - (scores[:, 0] - scores[:, 1]).sign()  # a tie is half right
        rm |= estimate("below_ceiling", more / 2)
    return sft, rm


def known_rows(evaluator, task, truth):
    """The validation rows of a task as ids, and what truth(rows) says of each; None, None unless it
    knows all, and all fit into the context."""
    path, eos = evaluator.config.data / f"{task}_val.jsonl", evaluator.tokenizer.eos
    if path.exists() and (numbers := truth(rows := load_rows(path, task))):
        encoded = encode_rows(rows, evaluator.tokenizer, evaluator.ref.config.context)
        if sum(all(ids[-1] == eos for ids in row[1:]) for row in encoded) == len(rows):
            return encoded, torch.tensor(numbers)
    return None, None


def number(row, name, digits=2):
    """ "0.93 ± 0.01", or "0.93", or "-", as available."""
    error = f" ± {row[f'{name}_se']:.{digits}f}" if f"{name}_se" in row else ""
    return f"{row[name]:z.{digits}f}{error}" if name in row else "-"


def table(report):
    """SFT model, best of n and the policy: {name of a row: cells of text}, the head first."""
    columns = [name for name in COLUMNS if name in report["sft"]]
    rows = {"SFT": report["sft"]}
    rows |= {f"best of {n}": row for n, row in report["best_of_n"].items()}
    rows |= {"policy": report["policy"], "policy, unseen": report.get("unseen")}
    cells = {label: [number(row, x) for x in columns] for label, row in rows.items() if row}
    return {"": columns} | cells


LIMITS = [
    ("sft", "val_loss", "SFT validation loss {} nats/token"),
    ("sft", "above_entropy", "    {} above the entropy of the same rows"),
    ("rm", "val_accuracy", "reward model, validation pairs right {}"),
    ("rm", "below_ceiling", "    {} below the judge on the same pairs"),
    ("policy", "optimality", "optimality {}: 0 is the SFT model, 1 about the best possible policy"),
    ("unseen", "optimality", "    {} on {prompts} prompts that it was not trained on"),
]


def notes(report):
    """How far each stage ends from the best that is possible, and answers to be wary of."""
    for part, name, text in LIMITS:
        if name in (figures := report.get(part, {})):
            yield text.format(number(figures, name, 4), **figures)
    suspects = report["suspects"]
    if suspects["count"]:
        above = f"score above all {REFERENCE} of the SFT model, at a high KL"
        yield f"reward hacking? {suspects['count']:,} responses {above}:"
    for row in suspects["examples"]:
        prompt, text = (printable(row[x][:400]).strip() for x in ("prompt", "text"))
        yield f"    {prompt} -> {text}   (score {row['score']:.2f}, KL {row['kl']:.2f})"


def print_report(report):
    print()
    for label, cells in report["table"].items():
        print(label.ljust(15) + "".join(cell.rjust(17) for cell in cells))
    print("", *report["notes"], sep="\n")
