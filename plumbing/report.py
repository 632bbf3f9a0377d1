"""Does PPO do what it should? A check before it trains, and the report at its end.

The report measures a finished policy. For a fixed reference, reward and beta, the best policy is
known: pi*(y | x) ~ ref(y | x) exp(r(x, y) / beta) (Korbak et al., arXiv:2205.11275). So samples of
the reference are enough to tell how well any policy could do. Everything is measured on validation
prompts, with fresh samples; standard errors treat these prompts as a random sample.
"""

import copy
import json
import math

import torch

from data.files import UserError, printable, write_file
from data.zoo import judge_of
from minippo import draw, evaluate_actions, gather_logprobs, generate, kl_per_response, rollout
from minippo import row_lengths
from plumbing.models import load_sft
from plumbing.page import json_safe, write_page
from plumbing.text import read_prompts, texts_of

PROMPTS, REFERENCE_SAMPLES, POLICY_SAMPLES = 128, 192, 16  # samples to each of the prompts
BEST_OF = 4, 16, 64
COLUMNS = "judge", "score", "kl", "eos_rate", "response_length", "distinct"


@torch.no_grad()
def check_start(policy, ref, score, prompts, config):
    """Before the first update: do sampling and update agree? Do the settings suit the scores?

    pi / old must be 1 at every token; the KL 0, too, unless --policy was given; else UserError. In
    bfloat16 rounding moves single tokens, so the mean is checked instead.
    """
    if config.kl_target and not config.kl_coef:
        raise UserError("--kl_target multiplies --kl_coef, which is 0: give a --kl_coef above 0")
    B, k, minibatches = config.batch_size, config.k, config.minibatches
    if B % k or B < minibatches:
        wanted = f"a multiple of --k {k} and at least --minibatches {minibatches}"
        raise UserError(f"--batch_size {B}: should be {wanted}")
    columns = []  # log-probabilities by which generate() draws, column by column, of its rows

    def recorded_draw(logits):
        token = draw(logits)
        columns.append(gather_logprobs(logits, token))
        return token

    prompts = prompts[: min(B, 16 * config.micro_batch or B)]
    temperature = config.temperature
    tokens, mask, logprobs, _ = generate(
        policy, prompts, config.max_new_tokens, temperature, recorded_draw
    )
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, temperature)
    drawn, lengths = torch.zeros_like(logprobs), row_lengths(mask)
    for t, column in enumerate(columns, tokens.shape[1] - 1 - len(columns)):
        drawn[lengths > t + 1, t] = column
    ratios = ((logprobs - drawn).exp() - 1).abs()[mask]
    off, limit = (ratios.mean(), 0.05) if policy.config.bfloat16 else (ratios.max(), 1e-3)
    nats = (logprobs - ref_logprobs).abs()[mask].max()
    when = "before the first update"
    if not off <= limit:
        raise UserError(f"{when} a ratio is {off:.4f} off 1: sampling and update disagree")
    if not config.policy and not nats <= 1e-3:
        raise UserError(f"{when} a token is {nats:.4f} nats away from the reference, not 0")
    kl = "" if config.policy else " and the KL to the reference is 0"
    print(f"checked: {when} the ratio is 1{kl}")
    spread = score(tokens, mask).double().std(correction=0).item()
    if spread > 0 and not 0.2 < spread < 5:
        print(f"warning: the standard deviation of the first scores is {spread:.2g}: divide by it")


# The report. There are P prompts, and figures of each


def optimal_objective(scores, kl_coef):
    """The largest E[r] - beta KL of any policy: scores (P, M) of M reference samples -> (P,).

    J*(x) = beta log E_ref[exp(r / beta)], with the mean over the samples for E. Rare
    high-scoring answers are missing, so optimality, which is measured against it, is a little too
    high.
    """
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
    """x (P,) -> {name: mean, name_se: its standard error}; of a single prompt no error."""
    error = {f"{name}_se": (x.std() / len(x) ** 0.5).item()} if len(x) > 1 else {}
    return {name: x.mean().item()} | error


def optimality(J, J_sft, J_best):
    """(J(policy) - J(SFT)) / (J* - J(SFT)) from (P,) each: a ratio of means, with its standard
    error by the delta method; nothing if no policy can gain."""
    gained, possible = J - J_sft, J_best - J_sft
    if possible.mean() < 1e-6:  # the score does not differ between answers
        return {}
    ratio = gained.mean() / possible.mean()
    return estimate("optimality", ratio + (gained - ratio * possible) / possible.mean())


def distinct(texts, n):
    """texts: n answers to each of P prompts -> (P,): share of different ones, among the first 16."""
    size = min(n, 16)
    return torch.tensor([len({*texts[i : i + size]}) / size for i in range(0, len(texts), n)])


class Evaluator:
    """Prompts (lists of ids), and the reference's answers to them, which policies have to beat."""

    def __init__(self, ref, score, tokenizer, prompts, config):
        self.ref, self.score, self.tokenizer = ref, score, tokenizer
        self.prompts, self.config, self.judge = prompts, copy.copy(config), judge_of(config.data)
        self.config.micro_batch = 16 * config.micro_batch or 512  # without gradients, more fit
        self.questions = [tokenizer.decode(prompt) for prompt in prompts]
        self.reference, self.reference_texts = self.sample(ref, REFERENCE_SAMPLES)

    def sample(self, policy, n):
        """n responses to each prompt -> {name: (P, n) in float64}, and their texts in a list."""
        rows = [prompt for prompt in self.prompts for _ in range(n)]
        print(f"    {len(rows):,} responses for the report", flush=True)
        batch = rollout(policy, self.ref, self.score, rows, self.config)
        mask = batch["mask"]
        kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
        measured = {"score": batch["scores"], "kl": kl, "eos_rate": batch["ended"]}
        measured["response_length"] = mask.sum(1)
        _, texts = texts_of(self.tokenizer, batch["tokens"], mask)
        if self.judge:
            grades = [self.judge(self.questions[i // n], text) for i, text in enumerate(texts)]
            measured["judge"] = torch.tensor(grades)
        return {name: x.cpu().double().view(-1, n) for name, x in measured.items()}, texts

    def figures(self, measured, texts, rows=slice(None)):
        """What sample() has returned -> {name: mean, name_se: error} over some prompts."""
        figures, means = {}, {name: x.mean(1) for name, x in measured.items()}
        means["distinct"] = distinct(texts, measured["score"].shape[1])
        for name, x in means.items():
            figures |= estimate(name, x[rows])
        if beta := self.config.kl_coef:
            J, reference = means["score"] - beta * means["kl"], self.reference["score"][rows]
            figures |= optimality(J[rows], reference.mean(1), optimal_objective(reference, beta))
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
        names = [x for x in ("judge", "score", "kl") if x in measured]
        figures = {x: measured[x].flatten()[i].item() for x in names}
        return {"text": texts[i]} | figures

    def suspects(self, measured, texts):
        """Which responses look like reward hacking? The count, and the best of three prompts.

        A response is suspicious if its score is above all M of the reference (so never if one of
        these is at the cap), and its KL is above both log M (the reference says it less than once
        in M times) and twice the median.
        """
        score, kl = measured["score"], measured["kl"]
        far = kl > max(math.log(REFERENCE_SAMPLES), 2 * kl.median().item())
        suspect = (far & (score > self.reference["score"].amax(1, keepdim=True))).flatten()
        rows = [i for i in score.flatten().argsort(descending=True).tolist() if suspect[i]]
        highest = {}
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
        figures = json_safe(make_report(run, score, trained_on, prompts))
        print()
        for label, cells in figures["table"].items():
            print(label.ljust(15) + "".join(cell.rjust(17) for cell in cells))
        print("", *figures["notes"], sep="\n")
    print(f"open {write_page(run, figures)} in a browser to see the run")
    if figures:  # last: with this file, the run has ended
        write_file(path, json.dumps(figures, indent=2) + "\n")


def make_report(run, score, trained_on, prompts):
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
    evaluator = Evaluator(load_sft(run.config)[0], score, run.tokenizer, prompts, run.config)
    before = evaluator.reference, evaluator.reference_texts
    after = evaluator.sample(run.model, POLICY_SAMPLES)
    report = {
        "sft": evaluator.figures(*before),
        "best_of_n": {str(n): evaluator.best_of(n) for n in BEST_OF},
        "policy": evaluator.figures(*after),
        "suspects": evaluator.suspects(*after),
        "samples": [
            {"prompt": question, "sft": evaluator.answer(*before, i * REFERENCE_SAMPLES)}
            | {"policy": evaluator.answer(*after, i * POLICY_SAMPLES)}
            for i, question in enumerate(evaluator.questions[:6])
        ],
    }
    seen = torch.tensor([prompt in trained_on for prompt in prompts])
    if seen.any() and not seen.all():
        for kind, rows in (("seen", seen), ("unseen", ~seen)):
            report[kind] = evaluator.figures(*after, rows)
    return report | {"table": table(report), "notes": list(notes(report))}


def cell(row, name, digits=2):
    """ "0.93 ± 0.01", or "0.93", or "-", as available."""
    error = f" ± {row[f'{name}_se']:.{digits}f}" if f"{name}_se" in row else ""
    return f"{row[name]:z.{digits}f}{error}" if name in row else "-"


def table(report):
    """SFT model, best of n and the policy: {name of a row: cells of text}, the head first."""
    columns = [name for name in COLUMNS if name in report["sft"]]
    rows = {"SFT": report["sft"]}
    rows |= {f"best of {n}": row for n, row in report["best_of_n"].items()}
    rows |= {"policy": report["policy"], "policy, unseen": report.get("unseen")}
    cells = {label: [cell(row, x) for x in columns] for label, row in rows.items() if row}
    return {"": columns} | cells


def notes(report):
    """How near the best possible policy is, and answers to be wary of."""
    scale = "0 is the SFT model, 1 about the best possible policy"
    if "optimality" in report["policy"]:
        yield f"optimality {cell(report['policy'], 'optimality', 4)}: {scale}"
    if "optimality" in report.get("unseen", {}):
        yield f"    {cell(report['unseen'], 'optimality', 4)} on prompts that it was not trained on"
    suspects = report["suspects"]
    if suspects["count"]:
        above = f"score above all {REFERENCE_SAMPLES} of the SFT model, at a high KL"
        yield f"reward hacking? {suspects['count']:,} responses {above}:"
    for row in suspects["examples"]:
        prompt, text = (printable(row[x][:400]).strip() for x in ("prompt", "text"))
        yield f"    {prompt} -> {text}   (score {row['score']:.2f}, KL {row['kl']:.2f})"
