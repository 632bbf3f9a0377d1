"""The report that train_ppo.py ends with: SFT model, best of n, and PPO, measured against each other and the best possible.

Everything is measured on the validation prompts, with fresh samples. Each figure stands beside its standard error, which
treats the prompts as a random sample of all prompts.

For a fixed reference, reward and beta, the best policy is known: pi*(y | x) ~ ref(y | x) exp(r(x, y) / beta). So samples of the
reference alone tell how well it does, and how well PPO could do. (Derived in Korbak et al., arXiv:2205.11275.)
"""

import json
import math
import time
from pathlib import Path

import torch

from minippo import evaluate_actions, score_responses
from plumbing.fast import generate
from plumbing.settings import UserError
from plumbing.text import each, encode_rows, load_jsonl, pad_completions, printable, waiting
from plumbing.training import pair_scores

PROMPTS = 1024, 128  # validation prompts used at most, with a judge and without; --report_prompts says otherwise
SHARE, MANY = 8, 192  # for best of n and the optimum: one in so many of these, so many responses of the SFT model to each
SHARES = 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0  # the betas of the optima, over the standard deviation of the scores
CHUNK = 512  # responses sampled at a time, unless --rollout_batch says otherwise


def optimal_objective(scores, kl_coef):
    """The largest E[r] - beta KL that any policy reaches: scores (P, M) of M reference samples per prompt -> (P,).

    J*(x) = beta log E_ref[exp(r / beta)], with the mean over the samples for E. That is too low rather than too high (rare
    answers of a high score are missing), so what is measured against it, optimality, is a little too high.
    """
    return kl_coef * (torch.logsumexp(scores / kl_coef, 1) - math.log(scores.shape[1]))


def optimum(measured, beta, weights=None):
    """How well the best policy at this beta does: the reference, each of its answers weighted by exp(score / beta).

    measured: "score", and "judge" where there is one, of the reference's samples, (P, M) each; weights of the prompts (P,).
    -> {name: mean}, and its KL, which M samples show up to log M. So at a small beta the true optimum is further away and higher.
    """
    shares = (measured["score"] / beta).softmax(1)  # (P, M), of the probability
    found = {name: (shares * measured[name]).sum(1) for name in ("score", "judge") if name in measured}
    found["kl"] = (shares * (shares * shares.shape[1]).clamp(min=1e-30).log()).sum(1)
    return {name: estimate(name, x, weights)[name] for name, x in found.items()}


def optima(measured, beta, weights=None):
    """The optimum at this beta, unless it is 0, and at others around the spread of the scores, from the smallest on."""
    spread = measured["score"].std(correction=0).item()
    betas = {beta, *(share * spread for share in SHARES)} - {0.0}
    return [{"beta": x, **optimum(measured, x, weights)} for x in sorted(betas)]


def best_of_n(scores, values, n):
    """The expected value of the sample with the best score among n: scores, values (P, M) -> (P,).

    Exact over all subsets of n out of the M samples: the one ranked k-th from below is the best of C(k-1, n-1) of
    the C(M, n) subsets. The policy "best of n" has a KL to the reference of at most log n - (n - 1) / n.
    """
    M = scores.shape[1]
    weights = scores.new_tensor([math.comb(k - 1, n - 1) / math.comb(M, n) for k in range(1, M + 1)])
    return (values.gather(1, scores.argsort(dim=1, stable=True)) * weights).sum(1)


def respond(policy, ref, score, prompts, n, tokenizer, config, size=0, judge=None):
    """n responses to each of P prompts -> dict of tensors (P, n), "judge" among them if there is one; and the texts.

    score(tokens, mask) -> (B,), config: as in minippo.rollout; size: how many responses are sampled at a time.
    """
    rows = [prompt for prompt in prompts for _ in range(n)]
    parts, texts = [], []
    for part in waiting("responses for the report", rows, size or CHUNK):
        tokens, mask, logprobs, _ = generate(policy, part, config.max_new_tokens, config.temperature)
        kl = torch.zeros(len(tokens), device=tokens.device)
        if policy is not ref:
            with torch.no_grad():
                kl = (logprobs - evaluate_actions(ref, tokens, mask, config.temperature, with_entropy=False)[0]).sum(1)
        scores, ended = score_responses(score, tokens, mask, config, tokenizer.eos)
        parts.append(torch.stack([scores, ended, kl, mask.sum(1)]).float().cpu())
        texts += [tokenizer.decode(ids[response].tolist()) for ids, response in zip(tokens[:, 1:], mask)]
    measured = dict(zip(("score", "ended", "kl", "length"), torch.cat(parts, 1).view(4, len(prompts), n)))
    if judge:
        answers = each("responses graded", list(zip(rows, texts)))
        grades = [judge(tokenizer.decode(row), text) for row, text in answers]
        measured["judge"] = torch.tensor(grades).view(len(prompts), n)
    return measured, texts


def estimate(name, x, weights=None):
    """x (P,) or (P, n), independent over prompts, weights (P,) -> {name: mean, name_se: standard error}."""
    x = x.double().view(len(x), -1).mean(1)
    weights = torch.ones_like(x) if weights is None else weights
    weights = weights / weights.sum()
    mean = (weights * x).sum()
    error = (weights * (x - mean)).norm() * math.sqrt(len(x) / (len(x) - 1)) if len(x) > 1 else None
    return {name: mean.item(), f"{name}_se": None if error is None else error.item()}


def means(measured, weights=None):
    """The estimates of all figures, under the names that they have in the report."""
    called = {"ended": "eos_rate", "length": "response_length"}
    out = {}
    for name, x in measured.items():
        out |= estimate(called.get(name, name), x, weights)
    return out


def optimality(J, J_sft, J_best, weights=None):
    """(J(PPO) - J(SFT)) / (J* - J(SFT)) from (P,) or (P, n) each, a ratio of means, with its standard error by the delta method."""
    J, J_sft, J_best = (x.double().view(len(x), -1).mean(1) for x in (J, J_sft, J_best))
    gained, possible = J - J_sft, J_best - J_sft
    whole, most = (estimate("x", x, weights)["x"] for x in (gained, possible))
    error = estimate("x", gained - whole / most * possible, weights)["x_se"]
    return {"optimality": whole / most, "optimality_se": None if error is None else error / most}


def worst_tenth(J, J_best, rows):
    """The share of what is missing, J_best - J, that the tenth of the prompts holds where most is missing: (P, n), (P, 1), (P,).

    The tenth is chosen by half of the samples and measured by the others, and the other way round: otherwise luck would choose.
    """
    halves = [(J_best - half)[rows].mean(1) for half in (J[:, ::2], J[:, 1::2])]
    tenth = math.ceil(len(halves[0]) / 10)
    held = sum(b[a.topk(tenth).indices].sum() for a, b in (halves, halves[::-1]))
    return {"worst_tenth": (held / sum(half.sum() for half in halves)).item()}


def wins(ours, theirs):
    """1 where ours is better, 0 where it is worse, a half where they are equal."""
    return (ours > theirs).float() + 0.5 * (ours == theirs).float()


def unseen(prompts, seen):
    """For each prompt (ids): is it none of those, tuples of ids, that PPO was trained on?"""
    return [tuple(prompt) not in seen for prompt in prompts]


def spread_out(prompts, seen, n):
    """At most n of the prompts, and their weights: up to half of them such as PPO has not trained on, since these may be rare.

    Weighted, they stand for all of the prompts: each of the two kinds weighs as much as it has prompts.
    """
    kinds = [[p for p, new in zip(prompts, unseen(prompts, seen)) if new == kind] for kind in (True, False)]
    first = kinds[0][: max(n // 2, n - len(kinds[1]))]
    chosen = [first, kinds[1][: n - len(first)]]
    weights = [len(kind) / len(part) for kind, part in zip(kinds, chosen) for _ in part]
    return chosen[0] + chosen[1], torch.tensor(weights, dtype=torch.float64)


@torch.no_grad()
def above_entropy(sft, tokenizer, run, crowd):
    """How much worse than the truth itself the SFT model does on the validation rows, row by row, so that luck cancels out."""
    rows = load_jsonl(run.data / "sft_val.jsonl", ("prompt", "completion"))
    encoded = encode_rows(rows, tokenizer, sft.config.context)
    if len(encoded) < len(rows) or any(completion[-1] != tokenizer.eos for _, completion in encoded):
        return {}  # some rows did not fit into the context: nothing to compare
    truth = [-math.log(crowd(prompt)[completion]) for prompt, completion in rows]
    order = sorted(range(len(rows)), key=lambda i: sum(map(len, encoded[i])))  # pieces of similar length
    excess = []
    for numbers in waiting("demonstrations compared with their entropy", torch.tensor(order), 64):
        tokens, mask = pad_completions([encoded[i] for i in numbers], run.device)
        logprobs, _, _ = evaluate_actions(sft, tokens, mask, with_entropy=False)
        excess.append(-logprobs.sum(1).cpu().double() - torch.tensor([truth[i] for i in numbers]))
    return estimate("above_entropy", torch.cat(excess) * len(rows) / sum(len(completion) for _, completion in encoded))


@torch.no_grad()
def below_ceiling(reward_model, tokenizer, run, judge):
    """How many more of the validation pairs the judge himself gets right, pair by pair."""
    pairs = load_jsonl(run.data / "pref_val.jsonl", ("prompt", "chosen", "rejected"))
    encoded = encode_rows(pairs, tokenizer, reward_model.config.context)
    if len(encoded) < len(pairs):
        return {}
    truth = [judge(prompt, chosen) - judge(prompt, rejected) for prompt, chosen, rejected in pairs]
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, encoded[i])))
    differences = []
    for numbers in waiting("pairs compared with the judge", torch.tensor(order), 64):
        chosen, rejected = pair_scores(reward_model, [encoded[i] for i in numbers], run.device)
        gaps = torch.tensor([truth[i] for i in numbers])
        hits = [(x > 0).double() + 0.5 * (x == 0).double() for x in (gaps, (chosen - rejected).cpu())]
        differences.append(hits[0] - hits[1])
    return estimate("below_ceiling", torch.cat(differences))


def make_report(policy, sft, models, prompts, trained_on, run, config, stage):
    """-> the dict of out/report.json, which is written. models: as loaded; prompts, and trained_on, those that PPO has seen:
    lists of ids; the rest: the settings of train_ppo.py."""
    start, tokenizer, beta, seen = time.perf_counter(), models.tokenizer, config.kl_coef, set(map(tuple, trained_on))
    crowd, judge, ceilings = truth_about(run.data)
    torch.manual_seed(run.seed)
    most = stage.report_prompts or PROMPTS[judge is None]
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:most]]
    few, weights = spread_out(prompts, seen, max(1, most // SHARE))

    def ask(model, prompts, n):
        return respond(model, sft, models.score, prompts, n, tokenizer, config, stage.rollout_batch, judge)

    before, before_texts = ask(sft, prompts, 4)
    many, _ = ask(sft, few, MANY)
    after, after_texts = ask(policy, prompts, 4)
    again, _ = ask(policy, few, 16)
    report = {"beta": beta, "seed": run.seed, "rm": models.facts.get("rm", {}), "best_of_n": {},
              "sft": models.facts["sft"] | means(before), "ppo": means(after)}  # fmt: skip
    J = again["score"] - beta * again["kl"], many["score"], optimal_objective(many["score"], beta or 1.0)[:, None]
    if beta:  # at beta = 0 nothing but the reward model's reach limits the optimum
        report["ppo"] |= optimality(*J, weights)
    new, few_new = torch.tensor(unseen(prompts, seen)), torch.tensor(unseen(few, seen))
    for kind, rows, few_rows in (("ppo_seen", ~new, ~few_new), ("ppo_unseen", new, few_new)):
        if 1 < int(new.sum()) < len(new) - 1:  # else there is but one kind
            report[kind] = {"prompts": int(rows.sum())} | means({name: x[rows] for name, x in after.items()})
            report[kind] |= optimality(*(x[few_rows] for x in J)) | worst_tenth(J[0], J[2], few_rows) if beta else {}
    for n in (4, 16, 64):
        best = {name: best_of_n(many["score"], many[name], n) for name in ("judge", "score") if name in many}
        report["best_of_n"][str(n)] = means(best, weights) | {"kl": math.log(n) - (n - 1) / n}
    report["optimum"] = optima(many, beta, weights)
    if judge:
        add_truth(report, before, after, sft, models, run, crowd, judge, ceilings)
    texts = zip(map(tokenizer.decode, prompts[:6]), before_texts[::4], after_texts[::4])
    report["samples"] = [sample(*three, before, after, i) for i, three in enumerate(texts)]
    seconds = {"report": round(time.perf_counter() - start, 2)}
    report["seconds"] = seconds_of_stages(Path(stage.models or run.out), run.out) | seconds
    (run.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def sample(prompt, sft, ppo, before, after, i):
    """Prompt i and the first response of each to it; "score", "judge", "kl" are PPO's, "sft_score", "sft_judge" the SFT model's."""
    figures = {name: after[name][i, 0].item() for name in ("score", "judge", "kl") if name in after}
    figures |= {f"sft_{name}": before[name][i, 0].item() for name in ("score", "judge") if name in before}
    return {"prompt": prompt, "sft": sft, "ppo": ppo, **figures}


def truth_about(data):
    """-> crowd, judge and ceilings of the default data; for any other folder None, None and {}."""
    if not (data / "ceilings.json").exists():
        return None, None, {}
    from data.zoo import crowd, judge

    try:
        return crowd, judge, json.loads((data / "ceilings.json").read_text())
    except ValueError:
        raise UserError(f"{data / 'ceilings.json'}: is no JSON; delete it, or make the data again with data/zoo.py")


def add_truth(report, before, after, sft, models, run, crowd, judge, ceilings):
    """Add what only the default data can tell: who wins in the eyes of the judge, and how far stages 1 and 2 are from the best."""
    report["ppo"] |= estimate("win_rate_vs_sft", wins(after["judge"], before["judge"]))
    report["best_judge"] = ceilings["best_judge"]
    report["sft"]["entropy_floor"] = ceilings["val_nats"] / report["sft"]["val_tokens"]
    report["sft"] |= above_entropy(sft, models.tokenizer, run, crowd)
    if models.reward_model:
        report["rm"] |= {"label_ceiling": ceilings["label_accuracy"], "label_loss_floor": ceilings["label_loss"]}
        report["rm"] |= below_ceiling(models.reward_model, models.tokenizer, run, judge)


def seconds_of_stages(models, out):
    """What the last lines of the logs say: stages 1 and 2 in one folder, stage 3 in the other or the same. 0: nothing."""
    logs = {"sft": models / "sft.jsonl", "rm": models / "rm.jsonl", "ppo": out / "ppo.jsonl"}
    return {name: last_seconds(path) for name, path in logs.items() if path.exists()}


def last_seconds(path):
    try:
        return float(json.loads(path.read_bytes().splitlines()[-1])["seconds"])
    except (ValueError, KeyError, TypeError, IndexError):  # empty, or damaged: that does not matter here
        return 0.0


def number(row, name, digits):
    """"0.93 ± 0.01", or without the error where there is none."""
    error = f" ± {row[name + '_se']:.{digits}f}" if row.get(name + "_se") is not None else ""
    return f"{row[name]:.{digits}f}{error}"


def print_report(report):
    print_systems(report)
    print_limits(report)
    print("\nSamples, before and after:")
    for sample in report["samples"]:
        print(f"  {printable(sample['prompt'])}\n    SFT {printable(sample['sft'])}")
        print(f"    PPO {printable(sample['ppo'])}   (score {sample['score']:.2f}, KL {sample['kl']:.2f})")
    print("seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in report["seconds"].items()))


def systems(report):
    """SFT model, best of n and PPO -> the names of the columns, and {name of a system: its cells}, as text."""
    names = ["judge"] * ("judge" in report["sft"]) + ["score", "kl", "eos_rate", "response_length"]
    rows = {"SFT": report["sft"], **{f"best of {n}": row for n, row in report["best_of_n"].items()}, "PPO": report["ppo"]}
    if "ppo_unseen" in report:
        rows["PPO, unseen"] = report["ppo_unseen"]
    cells = {
        label: [number(row, name, 3 if name == "eos_rate" else 2) if name in row else "-" for name in names]
        for label, row in rows.items()
    }
    return names, cells | ({"best possible": [f"{report['best_judge']:.2f}"]} if "best_judge" in report else {})


def print_systems(report):
    """The same, a line each."""
    names, rows = systems(report)
    print("\n" + " " * 13 + "".join(name.rjust(17) for name in names))
    for label, cells in rows.items():
        print(f"{label:<13}" + "".join(cell.rjust(17) for cell in cells))


def print_limits(report):
    """How far each stage ends from the best that is possible."""
    sft, rm, ppo = report["sft"], report["rm"], report["ppo"]
    print(f"\nSFT validation loss {number(sft, 'val_loss', 4)} nats/token")
    if "above_entropy" in sft:
        print(f"    {number(sft, 'above_entropy', 4)} above the entropy of the same rows, {sft['entropy_floor']:.4f}")
    if rm:
        print(f"reward model, validation pairs right {number(rm, 'val_accuracy', 4)}")
    if "below_ceiling" in rm:
        print(f"    {number(rm, 'below_ceiling', 4)} below the judge itself on the same pairs, {rm['label_ceiling']:.4f}")
    if "win_rate_vs_sft" in ppo:
        print(f"PPO wins against SFT {number(ppo, 'win_rate_vs_sft', 3)} (by the judge, ties half)")
    if "optimality" in ppo:
        print(f"optimality {number(ppo, 'optimality', 3)}: how much of the way PPO has come from SFT")
        print(f"    to the largest score - {report['beta']:g} KL that any policy can have")
    if "ppo_unseen" in report:
        seen, unseen = report["ppo_seen"], report["ppo_unseen"]
        print(f"    {unseen['prompts']} of the prompts are unseen: PPO was not trained on them", end="")
        if "optimality" in unseen:
            print(f"; optimality there {number(unseen, 'optimality', 3)},")
            print(f"    {number(seen, 'optimality', 3)} on those that it was trained on. The tenth of the prompts with the largest")
            print(f"    gap to the best holds {unseen['worst_tenth']:.0%} and {seen['worst_tenth']:.0%} of all gaps", end="")
        print()
