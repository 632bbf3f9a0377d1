"""The ruler that finished policies are measured with, and the report that train_ppo.py ends with.

For a fixed reference, reward and beta, the best policy is known: pi*(y | x) ~ ref(y | x)
exp(r(x, y) / beta) (Korbak et al., arXiv:2205.11275). So samples of the reference alone tell how
well that policy does, and how well any policy could do. All is measured on validation prompts, with
fresh samples; errors treat these prompts as a random sample of all prompts.
"""

import json
import math

import torch

from data.files import write_file
from data.rows import load_rows
from data.truth import entropies, judge_of, margins
from minippo import kl_per_response, rollout
from plumbing.errors import printable
from plumbing.page import write_page
from plumbing.rows import encode_rows, in_parts, pad
from plumbing.tokenizer import texts_of
from plumbing.training import nats_of

PROMPTS, REFERENCE, SAMPLES = 128, 192, 16  # responses of the reference, of a policy, to a prompt
BEST_OF = 4, 16, 64
COLUMNS = "judge", "score", "kl", "eos_rate", "response_length", "distinct"


def optimal_objective(scores, kl_coef):
    """The largest E[r] - beta KL of any policy: scores (P, M), M reference samples a prompt -> (P,).

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
    """texts: n answers to each of P prompts -> (P,): the share of different ones among 16."""
    size = min(n, 16)
    return torch.tensor([len({*texts[i : i + size]}) / size for i in range(0, len(texts), n)])


class Ruler:
    """Prompts (lists of ids), and the reference's answers to them: what policies are compared to."""

    def __init__(self, models, prompts, folder, config):
        self.models, self.prompts, self.config = models, prompts, config
        self.judge = judge_of(folder)
        self.questions = [models.tokenizer.decode(prompt) for prompt in prompts]
        self.reference, self.reference_texts = self.ask(models.ref, REFERENCE)
        score, beta = self.reference["score"], config.kl_coef
        self.best = optimal_objective(score, beta)[:, None] if beta else None

    def ask(self, policy, n):
        """n responses to each of the P prompts -> {name: (P, n)}, and their texts in a list."""
        models, config = self.models, self.config
        rows, parts, texts = [prompt for prompt in self.prompts for _ in range(n)], [], []
        for part in in_parts(rows, config.micro_batch or 512, "responses for the report"):
            batch = rollout(policy, models.ref, models.score, part, config)
            mask = batch["mask"]
            kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
            figures = torch.stack([batch["scores"], kl, batch["ended"], mask.sum(1)])
            parts.append(figures.float().cpu())
            texts += texts_of(models.tokenizer, batch["tokens"], mask)[1]
        figures = torch.cat(parts, 1).view(4, -1, n)
        measured = dict(zip(("score", "kl", "eos_rate", "response_length"), figures))
        if self.judge:
            grades = [self.judge(self.questions[i // n], text) for i, text in enumerate(texts)]
            measured = {"judge": torch.tensor(grades).view(-1, n)} | measured
        return measured, texts

    def figures(self, measured, texts, rows=slice(None)):
        """What ask() has returned -> {name: mean, name_se: error}, over the prompts in `rows`, and
        the correlation of length and score over their responses (0 where one is the same in all)."""
        found, n = {}, measured["score"].shape[1]
        for name, x in (measured | {"distinct": distinct(texts, n)}).items():
            found |= estimate(name, x[rows])
        pair = torch.stack([measured[x][rows].flatten() for x in ("response_length", "score")])
        found["length_correlation"] = pair.corrcoef()[0, 1].nan_to_num().item()
        if self.best is not None:
            J = measured["score"] - self.config.kl_coef * measured["kl"]
            found |= optimality(J[rows], self.reference["score"][rows], self.best[rows])
        return found

    def best_of(self, n):
        """The best of n answers of the reference; of its KL, a bound."""
        found = {}
        for name, x in self.reference.items():
            found |= estimate(name, best_of_n(self.reference["score"], x, n))
        found.pop("kl_se", None)
        return found | {"kl": math.log(n) - (n - 1) / n}

    def answer(self, measured, texts, i):
        """A response that ask() has returned, and its figures."""
        figures = {x: measured[x].flatten()[i].item() for x in COLUMNS[:3] if x in measured}
        return {"text": texts[i]} | figures

    def suspects(self, measured, texts):
        """Which responses look like reward hacking? The count, and the best of three prompts.

        Suspect is a score above all M samples of the reference (where one is at the cap, none is)
        with a KL above twice the median and log M (the reference says it less than once in M times).
        """
        score, kl = measured["score"], measured["kl"]
        far = kl > max(math.log(REFERENCE), 2 * kl.median().item())
        suspect = far & (score > self.reference["score"].amax(1, keepdim=True))
        order, highest = score.flatten().argsort(descending=True), {}
        rows = order[suspect.flatten()[order]].tolist()
        for i in rows:
            prompt = self.questions[i // score.shape[1]]
            highest.setdefault(prompt, {"prompt": prompt} | self.answer(measured, texts, i))
        examples = list(highest.values())[:3]
        return {"count": len(rows), "examples": examples}


def make_report(models, trained_on, prompts, run, config, stage):
    """Write out/report.json -> its dict."""
    torch.manual_seed(run.seed)
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
    ruler = Ruler(models, prompts, run.data, config)
    before, after = (ruler.reference, ruler.reference_texts), ruler.ask(models.policy, SAMPLES)
    report = {
        "algorithm": stage.algorithm,
        "beta": config.kl_coef,
        "sft": models.facts["sft"] | ruler.figures(*before),
        "rm": dict(models.facts["rm"]),
        "best_of_n": {str(n): ruler.best_of(n) for n in BEST_OF},
        "ppo": ruler.figures(*after),
        "suspects": ruler.suspects(*after),
        "samples": [
            {"prompt": question, "sft": ruler.answer(*before, i * REFERENCE)}
            | {"ppo": ruler.answer(*after, i * SAMPLES)}
            for i, question in enumerate(ruler.questions[:6])
        ],
    }
    known = set(map(tuple, trained_on))
    seen = torch.tensor([tuple(prompt) in known for prompt in prompts])
    for kind, rows in (("ppo_seen", seen), ("ppo_unseen", ~seen)):
        if rows.any():
            report[kind] = ruler.figures(*after, rows) | {"prompts": int(rows.sum())}
    add_truth(report, models, run, config.micro_batch or 64)
    report["table"], report["notes"] = table(report), list(notes(report))
    write_file(run.out / "report.json", json.dumps(report, indent=2) + "\n")
    return report


@torch.no_grad()
def add_truth(report, models, run, size):
    """How far SFT and reward model are from the best that is possible, where that is known; row by
    row, so that luck cancels out."""
    rows, entropy = known_rows(models, run, "sft", entropies)
    if rows:
        tokens = sum(len(ids) for _, ids in rows) / len(rows)  # in a row
        excess = nats_of(models.ref, rows, size).cpu() - entropy
        report["sft"] |= estimate("above_entropy", excess / tokens)
    rows, margin = known_rows(models, run, "pref", margins)
    if rows and models.reward_model:
        scores = []
        for part in in_parts([row[0] + row[i] for row in rows for i in (1, 2)], size):
            scores.append(models.reward_model(*pad(part, run.device)).cpu())
        found = torch.cat(scores).view(-1, 2)
        more = margin.sign() - (found[:, 0] - found[:, 1]).sign()  # a tie is half right
        report["rm"] |= estimate("below_ceiling", more / 2)


def known_rows(models, run, task, truth):
    """The validation rows of a task as ids, and what truth(rows) knows of each; None, None unless it
    knows all, and all fit into the context."""
    path, eos = run.data / f"{task}_val.jsonl", models.tokenizer.eos
    if path.exists() and (known := truth(rows := load_rows(path, task))):
        encoded = encode_rows(rows, models.tokenizer, models.ref.config.context)
        if sum(all(ids[-1] == eos for ids in row[1:]) for row in encoded) == len(rows):
            return encoded, torch.tensor(known)
    return None, None


def number(row, name, digits=2):
    """ "0.93 ± 0.01", less what there is not."""
    error = f" ± {row[f'{name}_se']:.{digits}f}" if f"{name}_se" in row else ""
    return f"{row[name]:z.{digits}f}{error}" if name in row else "-"


def table(report):
    """SFT model, best of n and the policy: {name of a row: cells of text}, the head first."""
    name, columns = report["algorithm"].upper(), [x for x in COLUMNS if x in report["sft"]]
    rows = {"SFT": report["sft"]}
    rows |= {f"best of {n}": row for n, row in report["best_of_n"].items()}
    rows |= {name: report["ppo"], f"{name}, unseen": report.get("ppo_unseen")}
    cells = {label: [number(row, x) for x in columns] for label, row in rows.items() if row}
    return {"": columns} | cells


LIMITS = {
    ("sft", "val_loss"): "SFT validation loss {} nats/token",
    ("sft", "above_entropy"): "    {} above the entropy of the same rows",
    ("rm", "val_accuracy"): "reward model, validation pairs right {}",
    ("rm", "below_ceiling"): "    {} below the judge on the same pairs",
    (
        "ppo",
        "optimality",
    ): "optimality {}: 0 is the SFT model, 1 roughly the best that any policy can reach",
    ("ppo_unseen", "optimality"): "    {} on {prompts} prompts that it was not trained on",
}


def notes(report):
    """How far each stage ends from the best that is possible, and answers to be wary of."""
    for (part, name), text in LIMITS.items():
        if name in (figures := report.get(part, {})):
            yield text.format(number(figures, name, 4), **figures)
    found = report["suspects"]
    if found["count"]:
        above = f"score higher than all {REFERENCE} of the SFT model, far from it"
        yield f"reward hacking? {found['count']:,} responses {above}:"
    for row in found["examples"]:
        yield f"    {printable(row['prompt'])} -> {with_figures(row)}"


def with_figures(answer):
    figures = f"(score {answer['score']:.2f}, KL {answer['kl']:.2f})"
    return f"{printable(answer['text']).strip()}   {figures}"


def print_report(report):
    print()
    for label, cells in report["table"].items():
        print(label.ljust(15) + "".join(cell.rjust(17) for cell in cells))
    print("", *report["notes"], "\nSamples, before and after:", sep="\n")
    for row in report["samples"]:
        print(f"  {printable(row['prompt'])}")
        print(f"    SFT  {with_figures(row['sft'])}")
        print(f"    {report['algorithm'].upper():<4} {with_figures(row['ppo'])}")


def finish_run(models, trained_on, prompts, run, config, stage):
    """Report (unless --no_report) and page. The report of an earlier policy goes."""
    (run.out / "report.json").unlink(missing_ok=True)
    report = None
    if not stage.no_report:
        report = make_report(models, trained_on, prompts, run, config, stage)
        print_report(report)
    print(f"open {write_page(run.out, stage.models, report)} in a browser to see the run")
