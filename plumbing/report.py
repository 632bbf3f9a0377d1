"""The report that train_ppo.py ends with: the SFT model, best of n, and the trained policy, measured
against each other and the best possible.

Everything is measured on the validation prompts, with fresh samples. Each figure stands beside its
standard error, which treats the prompts as a random sample of all prompts.

For a fixed reference, reward and beta, the best policy is known: pi*(y | x) ~ ref(y | x)
exp(r(x, y) / beta). So samples of the reference alone tell how well that policy does, and how well
any policy could do. (Derived in Korbak et al., arXiv:2205.11275.)
"""

import json
import math
import time
from pathlib import Path

import torch

from data.convert import KEYS
from minippo import evaluate_actions, score_responses
from plumbing.errors import UserError, printable
from plumbing.fast import generate
from plumbing.files import read_log, write_file
from plumbing.rows import (
    encode_rows,
    load_jsonl,
    order_by_length,
    pad,
    pad_completions,
    progress,
)
from plumbing.tokenizer import texts_of
from plumbing.training import spread_over, validate, reward_model_warnings

PROMPTS = 1024, 128  # validation prompts at most, with a judge and without; or --report_prompts
# For best of n and the optimum: an eighth of these numbers of prompts, many SFT responses to each
OPTIMUM_SHARE, OPTIMUM_SAMPLES = 8, 192
# The betas of the optima, over the standard deviation of the scores
RELATIVE_BETAS = 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0


def optimal_objective(scores, kl_coef):
    """The largest E[r] - beta KL of any policy: scores (P, M), M reference samples a prompt -> (P,).

    J*(x) = beta log E_ref[exp(r / beta)], with the mean over the samples for E. That is too low
    rather than too high (rare answers of a high score are missing), so what is measured against it,
    optimality, is a little too high.
    """
    scores = scores.double()  # at a large beta the two logarithms hardly differ
    return kl_coef * (torch.logsumexp(scores / kl_coef, 1) - math.log(scores.shape[1]))


def optimum(measured, beta, weights=None):
    """The best policy at this beta: the reference, each answer weighted by exp(score / beta).

    measured: "score", and "judge" where there is one, of the reference's samples, (P, M) each;
    weights of the prompts (P,). -> {name: mean}, and its KL, which M samples show up to log M. So
    at a small beta the true optimum is further away and higher.
    """
    shares = (measured["score"] / beta).softmax(1)  # (P, M), of the probability
    names = [name for name in ("score", "judge") if name in measured]
    found = {name: (shares * measured[name]).sum(1) for name in names}
    found["kl"] = (shares * (shares * shares.shape[1]).clamp(min=1e-30).log()).sum(1)
    return {name: estimate(name, x, weights)[name] for name, x in found.items()}


def optima(measured, beta, weights=None):
    """The optimum at this beta, unless it is 0, and at others around the spread of the scores."""
    spread = measured["score"].std(correction=0).item()
    betas = {beta, *(share * spread for share in RELATIVE_BETAS)} - {0.0}
    return [{"beta": x, **optimum(measured, x, weights)} for x in sorted(betas)]


def best_of_n(scores, values, n):
    """The expected value of the sample with the best score among n: scores, values (P, M) -> (P,).

    Exact over all subsets of n out of the M samples: the one ranked k-th from below is the best of
    C(k-1, n-1) of the C(M, n) subsets.
    """
    M = scores.shape[1]
    ranks = range(1, M + 1)
    weights = scores.new_tensor([math.comb(k - 1, n - 1) / math.comb(M, n) for k in ranks])
    return (values.gather(1, scores.argsort(dim=1, stable=True)) * weights).sum(1)


def best_of_n_kl(n):
    """What the KL of the policy "best of n" to the reference is at most, in nats."""
    return math.log(n) - (n - 1) / n


def respond(policy, ref, score, prompts, n, tokenizer, config, size=512):
    """n responses to each of P prompts -> dict of tensors (P, n), and the texts, a list of P * n.

    score(tokens, mask) -> (B,), config: as in minippo.rollout; size: responses sampled at a time.
    """
    rows = [prompt for prompt in prompts for _ in range(n)]
    parts, texts = [], []
    for part in progress("responses for the report", rows, size):
        sampled = generate(policy, part, config.max_new_tokens, config.temperature)
        tokens, mask, logprobs, _ = sampled
        kl = torch.zeros(len(tokens), device=tokens.device)
        if policy is not ref:
            with torch.no_grad():
                ref_logprobs, _, _ = evaluate_actions(
                    ref, tokens, mask, config.temperature, with_entropy=False
                )
            kl = (logprobs - ref_logprobs).sum(1)
        scores, ended = score_responses(score, tokens, mask, config, tokenizer.eos)
        parts.append(torch.stack([scores, ended, kl, mask.sum(1)]).float().cpu())
        texts += texts_of(tokenizer, tokens.cpu(), mask.cpu())[1]
    figures = torch.cat(parts, 1).view(4, len(prompts), n)
    measured = dict(zip(("score", "ended", "kl", "length"), figures))
    penalty = config.missing_eos_penalty * (1 - measured["ended"])
    measured["penalty"] = penalty + config.length_penalty * measured["length"]
    measured["empty"] = torch.tensor([not x.strip() for x in texts]).view(len(prompts), n)
    return measured, texts


def estimate(name, x, weights=None):
    """x (P,) or (P, n), independent over prompts, weights (P,) -> {name: mean, name_se: error}."""
    x = x.double().view(len(x), -1).mean(1)
    weights = torch.ones_like(x) if weights is None else weights
    weights = weights / weights.sum()
    mean, error = (weights * x).sum(), None
    if len(x) > 1:
        error = (weights * (x - mean)).norm().item() * math.sqrt(len(x) / (len(x) - 1))
    return {name: mean.item(), f"{name}_se": error}


def means(measured, weights=None):
    """The estimates of all figures, under the names that they have in the report."""
    names = {"ended": "eos_rate", "length": "response_length"}
    estimates = {}
    for name, x in measured.items():
        estimates |= estimate(names.get(name, name), x, weights)
    return estimates


def optimality(J, J_sft, J_best, weights=None):
    """(J(policy) - J(SFT)) / (J* - J(SFT)) from (P,) or (P, n) each: a ratio of means, with its
    standard error by the delta method."""
    J, J_sft, J_best = (x.double().view(len(x), -1).mean(1) for x in (J, J_sft, J_best))
    gained, possible = J - J_sft, J_best - J_sft
    mean_gained, mean_possible = (estimate("x", x, weights)["x"] for x in (gained, possible))
    if mean_possible < 1e-6:  # no policy can gain: the score does not differ between answers
        return {}
    ratio = mean_gained / mean_possible
    error = estimate("x", gained - ratio * possible, weights)["x_se"]
    error = None if error is None else error / mean_possible
    return {"optimality": ratio, "optimality_se": error}


def wins(ours, theirs):
    """1 where ours is better, 0 where it is worse, a half where they are equal."""
    return (ours > theirs).float() + 0.5 * (ours == theirs).float()


def suspects(measured, texts, prompts, reference_scores):
    """Which responses look like reward hacking? The count, and the highest score among those to
    each of three prompts.

    measured, texts: of n responses to each of P prompts; prompts: their texts; reference_scores
    (P, M): of samples of the reference. A good answer is one that the reference gives too, if
    rarely. So an answer is suspect if its score is above all M, and its KL above log M (the
    reference gives it less than once in M times) and above twice the median. Where one of the M is
    at the cap of the reward model, none is above it.
    """
    score, kl = measured["score"], measured["kl"]
    n, M = score.shape[1], reference_scores.shape[1]
    above = score > reference_scores.max(1, keepdim=True).values
    far = kl > max(math.log(M), 2 * kl.median().item())
    rows = (above & far).flatten().nonzero().flatten().tolist()
    score, kl, highest = score.flatten().tolist(), kl.flatten().tolist(), {}
    for i in sorted(rows, key=lambda i: -score[i]):
        row = {"prompt": prompts[i // n], "response": texts[i], "score": score[i], "kl": kl[i]}
        highest.setdefault(row["prompt"], row)
    found = {"count": len(rows), "responses": len(score), "reference_samples": M}
    return found | {"examples": list(highest.values())[:3]}


def distinct(texts, n, shown=16):
    """texts: n answers to each of P prompts -> (P,): the share of different ones among `shown`."""
    parts = [texts[i : i + n][:shown] for i in range(0, len(texts), n)]
    return torch.tensor([len(set(part)) / len(part) for part in parts])


def unseen(prompts, seen):
    """For each prompt (ids): is it none of those, tuples of ids, that the policy was trained on?"""
    return [tuple(prompt) not in seen for prompt in prompts]


def spread_out(prompts, seen, n):
    """At most n of the prompts, and their weights: up to half of them such as the policy was not
    trained on, since these may be rare.

    Weighted, they stand for all of the prompts: each of the two kinds weighs as much as it has
    prompts.
    """
    new = unseen(prompts, seen)
    kinds = [[p for p, is_new in zip(prompts, new) if is_new == kind] for kind in (True, False)]
    first = kinds[0][: max(n // 2, n - len(kinds[1]))]
    chosen = [first, kinds[1][: n - len(first)]]
    weights = [len(kind) / len(part) for kind, part in zip(kinds, chosen) for _ in part]
    return chosen[0] + chosen[1], torch.tensor(weights, dtype=torch.float64)


def imitation(models, run, size):
    """How well the policy still imitates: the loss of stage 1, on at most 1,000 validation rows, if
    there are any. size: of them in memory at once; 0: 64."""
    try:
        rows = load_jsonl(run.data / "sft_val.jsonl", KEYS["sft"])
    except UserError:  # the file is missing or damaged, and PPO has not needed it
        return {}
    rows = encode_rows(spread_over(rows, 1000), models.tokenizer, models.policy.config.context)
    figures = validate(models.policy, rows, run.device, size) if rows else {}
    models.policy.eval()
    return figures


@torch.no_grad()
def above_entropy(sft, tokenizer, run, crowd):
    """How much worse than the truth the SFT model does on the validation rows, row by row, so that
    luck cancels out."""
    rows = load_jsonl(run.data / "sft_val.jsonl", ("prompt", "completion"))
    encoded = encode_rows(rows, tokenizer, sft.config.context)
    if len(encoded) < len(rows) or any(ids[-1] != tokenizer.eos for _, ids in encoded):
        return {}  # some rows did not fit into the context: nothing to compare
    truth = [-math.log(crowd(prompt)[completion]) for prompt, completion in rows]
    excess = []
    for part in order_by_length(encoded, 64):
        tokens, mask = pad_completions([encoded[i] for i in part], run.device)
        logprobs, _, _ = evaluate_actions(sft, tokens, mask, with_entropy=False)
        nats = torch.tensor([truth[i] for i in part])
        excess.append(-logprobs.sum(1).cpu().double() - nats)
    count = sum(len(ids) for _, ids in encoded)
    above = estimate("above_entropy", torch.cat(excess) * len(rows) / count)
    return above | {"entropy_floor": sum(truth) / count}


@torch.no_grad()
def below_ceiling(reward_model, tokenizer, run, judge):
    """How many more of the validation pairs the judge gets right, pair by pair; what share it gets
    right, and its loss: the best that can be expected."""
    pairs = load_jsonl(run.data / "pref_val.jsonl", ("prompt", "chosen", "rejected"))
    encoded = encode_rows(pairs, tokenizer, reward_model.config.context)
    if len(encoded) < len(pairs):
        return {}
    truth = [judge(prompt, a) - judge(prompt, b) for prompt, a, b in pairs]
    truth, right = torch.tensor(truth), []
    for part in order_by_length(encoded, 64):
        rows = [encoded[i] for i in part]
        chosen, rejected = (
            reward_model(*pad([row[0] + row[answer] for row in rows], run.device))
            for answer in (1, 2)
        )
        right.append(wins(truth[part], torch.tensor(0)) - wins(chosen, rejected).cpu())
    best = {"label_ceiling": wins(truth, torch.tensor(0)).mean().item()}
    best["label_loss_floor"] = torch.nn.functional.softplus(-truth).mean().item()
    return estimate("below_ceiling", torch.cat(right)) | best


def make_report(models, trained_on, prompts, run, config, stage, name="PPO"):
    """-> the dict of out/report.json, which is written. models.policy: as trained; trained_on: the
    prompts that it has seen, lists of ids, as `prompts`; name: of the algorithm."""
    start, beta, sft = time.perf_counter(), config.kl_coef, models.reference
    crowd, judge, ceilings = truth_about(run.data)
    seen, size = set(map(tuple, trained_on)), stage.rollout_batch or stage.batch_size
    torch.manual_seed(run.seed)
    count = stage.report_prompts or PROMPTS[judge is None]
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:count]]
    few, weights = spread_out(prompts, seen, max(2, count // OPTIMUM_SHARE))  # one of each kind

    def ask(model, prompts, n):
        measured, texts = respond(
            model, sft, models.score, prompts, n, models.tokenizer, config, size
        )
        if judge:
            asked = [models.tokenizer.decode(prompt) for prompt in prompts for _ in range(n)]
            grades = torch.tensor([judge(*pair) for pair in zip(asked, texts)])
            measured["judge"] = grades.view(len(prompts), n)
        return measured, texts

    before, before_texts = ask(sft, prompts, 4)
    sft_samples, sft_texts = ask(sft, few, OPTIMUM_SAMPLES)
    after, after_texts = ask(models.policy, prompts, 4)
    samples, texts = ask(models.policy, few, 16)
    questions = [models.tokenizer.decode(prompt) for prompt in few]
    report = {
        "algorithm": name,
        "reference": "reference" if stage.reference else "SFT",
        "prompts": len(prompts),
        "prompts_of_best_of_n": len(few),
        "beta": beta,
        "seed": run.seed,
        "rm": models.facts.get("rm", {}),
        "sft": models.facts["sft"] | means(before),
        "ppo": means(after),
        "best_of_n": {},
        "suspects": suspects(samples, texts, questions, sft_samples["score"]),
    }
    # At beta = 0 nothing but the reach of the reward model limits the optimum.
    best = optimal_objective(sft_samples["score"], beta or 1.0)[:, None]
    J = samples["score"] - beta * samples["kl"], sft_samples["score"], best
    if beta:
        report["ppo"] |= optimality(*J, weights)
    new, few_new = torch.tensor(unseen(prompts, seen)), torch.tensor(unseen(few, seen))
    kinds = (("ppo_seen", ~new, ~few_new), ("ppo_unseen", new, few_new))
    for kind, rows, few_rows in kinds if 1 < int(new.sum()) < len(new) - 1 else ():
        report[kind] = {"prompts": int(rows.sum())}
        report[kind] |= means({name: x[rows] for name, x in after.items()})
        if "optimality" in report["ppo"]:
            report[kind] |= optimality(*(x[few_rows] for x in J))
    for n in (4, 16, 64):
        names = [name for name in ("judge", "score") if name in sft_samples]
        figures = {x: best_of_n(sft_samples["score"], sft_samples[x], n) for x in names}
        report["best_of_n"][str(n)] = means(figures, weights) | {"kl": best_of_n_kl(n)}
    for kind, x in (("sft", sft_texts), ("ppo", texts)):
        report[kind] |= estimate("distinct", distinct(x, len(x) // len(few)), weights)
    report["ppo"] |= imitation(models, run, stage.rollout_batch)
    report["optimum"] = optima(sft_samples, beta, weights)
    report["notes"] = list(notes(report))
    if judge:
        add_truth(report, before, after, models, run, crowd, judge, ceilings)
    texts = zip(map(models.tokenizer.decode, prompts[:6]), before_texts[::4], after_texts[::4])
    report["samples"] = [sample(*three, before, after, i) for i, three in enumerate(texts)]
    report["seconds"] = seconds_of_stages(Path(stage.models or run.out), run.out)
    if stage.reward:  # an rm.jsonl that is there is of another run
        report["seconds"].pop("rm", None)
    report["seconds"]["report"] = round(time.perf_counter() - start, 2)
    write_file(run.out / "report.json", json.dumps(report, indent=2) + "\n")
    return report


def sample(prompt, sft, ppo, before, after, i):
    """Prompt i and the first response of each to it; "score", "judge", "kl" are the policy's,
    "sft_score", "sft_judge" the SFT model's."""
    names = ("score", "judge", "kl")
    figures = {name: after[name][i, 0].item() for name in names if name in after}
    figures |= {f"sft_{x}": before[x][i, 0].item() for x in names[:2] if x in before}
    return {"prompt": prompt, "sft": sft, "ppo": ppo, **figures}


def truth_about(data):
    """-> crowd, judge and ceilings if all validation rows are the zoo's; else None, None, {}."""
    path = data / "ceilings.json"
    if not path.exists():
        return None, None, {}
    from data.zoo import PROMPTS, crowd, judge

    try:
        ceilings = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path}: is no JSON; delete it, or make the data again with data/zoo.py")
    try:
        rows = {task: load_jsonl(data / f"{task}_val.jsonl", keys) for task, keys in KEYS.items()}
        known = all(row[0] in PROMPTS for task in rows for row in rows[task])
    except UserError:  # a file is missing
        known = False
    if known and all(text in crowd(prompt) for prompt, text in rows["sft"]):
        return crowd, judge, ceilings
    return None, None, {}


def add_truth(report, before, after, models, run, crowd, judge, ceilings):
    """Add what only the default data can tell: who wins in the eyes of the judge, and how far
    stages 1 and 2 are from the best."""
    report["ppo"] |= estimate("win_rate_vs_sft", wins(after["judge"], before["judge"]))
    report["best_judge"] = ceilings["best_judge"]
    if report["reference"] == "SFT":
        report["sft"] |= above_entropy(models.reference, models.tokenizer, run, crowd)
    if models.reward_model:
        report["rm"] |= below_ceiling(models.reward_model, models.tokenizer, run, judge)


def seconds_of_stages(models, out):
    """The seconds in the last lines of the logs: stages 1 and 2 in one folder, stage 3 in the
    other or the same."""
    logs = {"sft": models / "sft.jsonl", "rm": models / "rm.jsonl", "ppo": out / "ppo.jsonl"}
    rows = {name: read_log(path) for name, path in logs.items()}
    return {name: found[-1].get("seconds", 0.0) for name, found in rows.items() if found}


def number(row, name, digits):
    """ "0.93 ± 0.01", or without the error where there is none."""
    error = row.get(f"{name}_se")
    return f"{row[name]:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def systems(report):
    """SFT model, best of n and the policy -> the names of the columns, and {name of a system: its
    cells}, as text."""
    names = ["judge"] * ("judge" in report["sft"])
    names += ["score", "kl", "eos_rate", "response_length"]
    algorithm = report.get("algorithm", "PPO")
    rows = {report.get("reference", "SFT"): report["sft"]}
    rows |= {f"best of {n}": row for n, row in report["best_of_n"].items()}
    rows[algorithm] = report["ppo"]
    if "ppo_unseen" in report:
        rows[f"{algorithm}, unseen"] = report["ppo_unseen"]
    digits = {"eos_rate": 3}
    cells = {
        label: [number(row, x, digits.get(x, 2)) if x in row else "-" for x in names]
        for label, row in rows.items()
    }
    if "best_judge" in report:
        cells["best possible"] = [f"{report['best_judge']:.2f}"]
    return names, cells


def notes(report):
    """What the figures do not say by themselves, in sentences."""
    sft, ppo, ref = report["sft"], report["ppo"], report["reference"]
    yield from reward_model_warnings(report["rm"])
    yield from hacking(report.get("suspects"), ref)
    few, prompts = report["prompts_of_best_of_n"], report["prompts"]
    yield f"best of n and optimality are measured on {few:,} of the {prompts:,} prompts"
    gain, saved = ppo["score"] - sft["score"], sft["penalty"] - ppo["penalty"]
    if abs(saved) >= 0.005:
        grown = f"the penalty for cut-off or long answers, now {ppo['penalty']:.2f}"
        yield f"of the change of {gain:+.2f} in score, {saved:+.2f} comes from {grown}"
    if sft["empty"] or ppo["empty"]:
        yield f"empty answers: {sft['empty']:.1%} of {ref}, {ppo['empty']:.1%} of {report['algorithm']}"
    if ppo.get("optimality", 0.0) > 1.1:
        yield f"optimality above 1: the samples of {ref} hold too few of the best answers to know it"
    if report["beta"] and "optimality" not in ppo:
        yield f"there is no optimality: all answers of {ref} to a prompt have the same score"


def hacking(found, ref):
    """What makes responses suspect, and the examples, in sentences."""
    if not found or not found["count"]:
        return
    count = f"{found['count']:,} of {found['responses']:,} responses"
    above = f"a higher score than all {found['reference_samples']} of {ref} to the same prompt"
    yield f"reward hacking? {count} have {above}, at more than twice the usual KL; read them:"
    for row in found["examples"]:
        figures = f"(score {row['score']:.2f}, KL {row['kl']:.2f})"
        yield f"    {printable(row['prompt'])} ->{printable(row['response'])}   {figures}"


def print_report(report):
    algorithm, ref = report.get("algorithm", "PPO"), report.get("reference", "SFT")
    names, rows = systems(report)
    width = max(13, *(len(label) + 1 for label in rows))
    print("\n" + " " * width + "".join(name.rjust(17) for name in names))
    for label, cells in rows.items():
        print(label.ljust(width) + "".join(cell.rjust(17) for cell in cells))
    if report.get("notes"):
        print("", *report["notes"], sep="\n")
    print_limits(report, algorithm, ref)
    print("\nSamples, before and after:")
    width = max(len(ref), len(algorithm))
    for row in report["samples"]:
        print(f"  {printable(row['prompt'])}\n    {ref:<{width}} {printable(row['sft'])}")
        figures = f"(score {row['score']:.2f}, KL {row['kl']:.2f})"
        print(f"    {algorithm:<{width}} {printable(row['ppo'])}   {figures}")
    seconds = [f"{name} {seconds:.0f}" for name, seconds in report["seconds"].items()]
    print("seconds: " + ", ".join(seconds))


def print_limits(report, algorithm, ref):
    """How far each stage ends from the best that is possible."""
    sft, rm, ppo = report["sft"], report["rm"], report["ppo"]
    print(f"\nSFT validation loss {number(sft, 'val_loss', 4)} nats/token")
    if "above_entropy" in sft:
        floor = f"the entropy of the same rows, {sft['entropy_floor']:.4f}"
        print(f"    {number(sft, 'above_entropy', 4)} above {floor}")
    if "val_loss" in ppo:
        aim = "it imitates less, bad demonstrations included"
        print(f"    after {algorithm} {number(ppo, 'val_loss', 4)}: {aim}")
    if rm:
        print(f"reward model, validation pairs right {number(rm, 'val_accuracy', 4)}")
    if "below_ceiling" in rm:
        ceiling = f"the judge on the same pairs, {rm['label_ceiling']:.4f}"
        print(f"    {number(rm, 'below_ceiling', 4)} below {ceiling}")
    shares = f"{ref} {number(sft, 'distinct', 2)}, {algorithm} {number(ppo, 'distinct', 2)}"
    print(f"share of different answers among 16 to one prompt: {shares}")
    if "win_rate_vs_sft" in ppo:
        rate = number(ppo, "win_rate_vs_sft", 3)
        print(f"{algorithm} wins against {ref} {rate} (by the judge, ties half)")
    if "optimality" in ppo:
        share = f"how much of the way {algorithm} has come from {ref}"
        print(f"optimality {number(ppo, 'optimality', 3)}: {share}")
        print(f"    to the largest score - {report['beta']:g} KL that any policy can have")
    if "ppo_unseen" in report:
        seen, new = report["ppo_seen"], report["ppo_unseen"]
        print(f"    {new['prompts']} of the prompts are unseen: it was not trained on them")
        if "optimality" in new and "optimality" in seen:
            print(f"    optimality there {number(new, 'optimality', 3)},", end=" ")
            print(f"{number(seen, 'optimality', 3)} on those that it was trained on")
