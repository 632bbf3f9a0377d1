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

from minippo import evaluate_actions, generate, load_jsonl
from plumbing import encode_rows, printable
from train_rm import score_pairs
from train_sft import completion_nats

PROMPTS = 1024  # validation prompts used at most
FEW, MANY = 128, 192  # for best of n and the optimum: so many of the prompts, so many responses of the SFT model to each
CHUNK = 512  # responses sampled at a time, unless --rollout_batch says otherwise


def optimal_objective(scores, kl_coef):
    """The largest E[r] - beta KL that any policy reaches: scores (P, M) of M reference samples per prompt -> (P,).

    J*(x) = beta log E_ref[exp(r / beta)], with the mean over the samples for E. That is too low rather than too high (rare
    answers of a high score are missing), so what is measured against it, optimality, is a little too high.
    """
    return kl_coef * (torch.logsumexp(scores / kl_coef, 1) - math.log(scores.shape[1]))


def best_of_n(scores, values, n):
    """The expected value of the sample with the best score among n: scores, values (P, M) -> (P,).

    Exact over all subsets of n out of the M samples: the one ranked k-th from below is the best of C(k-1, n-1) of
    the C(M, n) subsets. The policy "best of n" has a KL to the reference of at most log n - (n - 1) / n.
    """
    M = scores.shape[1]
    weights = scores.new_tensor([math.comb(k - 1, n - 1) / math.comb(M, n) for k in range(1, M + 1)])
    return (values.gather(1, scores.argsort(dim=1, stable=True)) * weights).sum(1)


def respond(policy, ref, score, prompts, n, tokenizer, ppo, judge=None):
    """n responses to each of P prompts -> dict of tensors (P, n), "judge" among them if there is one; and the texts."""
    rows = [prompt for prompt in prompts for _ in range(n)]
    parts, texts, size, settings = [], [], ppo.rollout_batch or CHUNK, (ppo.max_new_tokens, ppo.temperature)
    for start in range(0, len(rows), size):
        tokens, mask, logprobs, _ = generate(policy, rows[start : start + size], *settings, cuda_graph=ppo.cuda_graph)
        kl = torch.zeros(len(tokens), device=tokens.device)
        if policy is not ref:
            with torch.no_grad():
                kl = (logprobs - evaluate_actions(ref, tokens, mask, ppo.temperature, with_entropy=False)[0]).sum(1)
        parts.append(torch.stack([*score(tokens, mask), kl, mask.sum(1)]).float().cpu())
        texts += [tokenizer.decode(ids[response].tolist()) for ids, response in zip(tokens[:, 1:], mask)]
    measured = dict(zip(("score", "ended", "kl", "length"), torch.cat(parts, 1).view(4, len(prompts), n)))
    if judge:
        grades = [judge(tokenizer.decode(row), text) for row, text in zip(rows, texts)]
        measured["judge"] = torch.tensor(grades).view(len(prompts), n)
    return measured, texts


def estimate(name, x):
    """x (P,) or (P, n), independent over prompts -> {name: mean, name_se: standard error}."""
    x = x.double().view(len(x), -1).mean(1)
    error = (x.std() / math.sqrt(len(x))).item() if len(x) > 1 else None
    return {name: x.mean().item(), f"{name}_se": error}


def means(measured):
    """The estimates of all figures, under the names that they have in the report."""
    called = {"ended": "eos_rate", "length": "response_length"}
    out = {}
    for name, x in measured.items():
        out |= estimate(called.get(name, name), x)
    return out


def optimality(J, J_sft, J_best):
    """(J(PPO) - J(SFT)) / (J* - J(SFT)) from (P,) each, a ratio of means, with its standard error by the delta method."""
    gained, possible = (J - J_sft).double(), (J_best - J_sft).double()
    ratio = gained.mean() / possible.mean()
    error = (gained - ratio * possible).std() / math.sqrt(len(gained)) / possible.mean()
    return {"optimality": ratio.item(), "optimality_se": error.item() if len(gained) > 1 else None}


@torch.no_grad()
def above_entropy(sft, tokenizer, run, crowd):
    """How much worse than the truth itself the SFT model does on the validation rows, row by row, so that luck cancels out."""
    rows = load_jsonl(run.data / "sft_val.jsonl", ("prompt", "completion"))
    encoded = encode_rows(rows, tokenizer, sft.config.context)
    if len(encoded) < len(rows) or any(completion[-1] != tokenizer.eot for _, completion in encoded):
        return {}  # some rows did not fit into the context: nothing to compare
    nats = completion_nats(sft, encoded, run.device)[0].cpu().double()
    excess = nats - nats.new_tensor([-math.log(crowd(prompt)[completion]) for prompt, completion in rows])
    return estimate("above_entropy", excess * len(rows) / sum(len(completion) for _, completion in encoded))


@torch.no_grad()
def below_ceiling(reward_model, tokenizer, run, judge):
    """How many more of the validation pairs the judge himself gets right, pair by pair."""
    pairs = load_jsonl(run.data / "pref_val.jsonl", ("prompt", "chosen", "rejected"))
    encoded = encode_rows(pairs, tokenizer, reward_model.config.context)
    if len(encoded) < len(pairs):
        return {}
    chosen, rejected = score_pairs(reward_model, encoded, run.device)
    gaps = torch.tensor([judge(prompt, chosen) - judge(prompt, rejected) for prompt, chosen, rejected in pairs])
    hits = [(x > 0).double() + 0.5 * (x == 0).double() for x in (gaps, (chosen - rejected).cpu())]
    return estimate("below_ceiling", hits[0] - hits[1])


def make_report(policy, sft, reward_model, score, prompts, tokenizer, run, ppo, facts):
    """-> the dict of out/report.json. facts: {"sft": ..., "rm": ...}, the validation figures that came with the models."""
    start, ceilings, judge = time.perf_counter(), {}, None
    if (run.data / "ceilings.json").exists():  # the default data knows the truth; other data has no judge and no ceilings
        from data.zoo import crowd, judge

        ceilings = json.loads((run.data / "ceilings.json").read_text())
    torch.manual_seed(run.seed)
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
    few, beta = prompts[:FEW], ppo.kl_coef
    settings = (tokenizer, ppo, judge)
    before, before_texts = respond(sft, sft, score, prompts, 4, *settings)
    many, _ = respond(sft, sft, score, few, MANY, *settings)
    after, after_texts = respond(policy, sft, score, prompts, 4, *settings)
    again, _ = respond(policy, sft, score, few, 16, *settings)

    report = {"sft": facts["sft"] | means(before), "rm": facts.get("rm", {}), "ppo": means(after), "best_of_n": {}}
    if beta > 0:  # at beta = 0 nothing but the reward model's reach limits the optimum
        J_sft, J_ppo = many["score"].mean(1), (again["score"] - beta * again["kl"]).mean(1)
        report["ppo"] |= optimality(J_ppo, J_sft, optimal_objective(many["score"], beta))
    for n in (4, 16, 64):
        best = {name: best_of_n(many["score"], many[name], n) for name in ("judge", "score") if name in many}
        report["best_of_n"][str(n)] = means(best) | {"kl": math.log(n) - (n - 1) / n}
    if judge:
        wins = (after["judge"] > before["judge"]).float() + 0.5 * (after["judge"] == before["judge"]).float()
        report["ppo"] |= estimate("win_rate_vs_sft", wins)
        report["sft"]["entropy_floor"] = ceilings["val_nats"] / facts["sft"]["val_tokens"]
        report["best_judge"] = ceilings["best_judge"]
        report["sft"] |= above_entropy(sft, tokenizer, run, crowd)
        if reward_model:
            report["rm"] |= {"label_ceiling": ceilings["label_accuracy"], "label_loss_floor": ceilings["label_loss"]}
            report["rm"] |= below_ceiling(reward_model, tokenizer, run, judge)
    report |= {"beta": beta, "seed": run.seed, "samples": []}
    for i in range(min(6, len(prompts))):
        sample = {"prompt": tokenizer.decode(prompts[i]), "sft": before_texts[4 * i], "ppo": after_texts[4 * i]}
        report["samples"].append(sample | {"score": after["score"][i, 0].item(), "kl": after["kl"][i, 0].item()})
    models = Path(ppo.models or run.out)
    logs = {"sft": models / "sft.jsonl", "rm": models / "rm.jsonl", "ppo": run.out / "ppo.jsonl"}
    report["seconds"] = {name: last_seconds(path) for name, path in logs.items() if path.exists()}
    report["seconds"]["report"] = round(time.perf_counter() - start, 2)
    return report


def last_seconds(path):
    lines = path.read_text().splitlines()
    return json.loads(lines[-1])["seconds"] if lines else 0.0


def print_report(report):
    sft, rm, ppo = report["sft"], report["rm"], report["ppo"]

    def cell(row, name, digits=2):
        if name not in row:
            return f"{'-':>14}"
        error = f" ±{row[name + '_se']:.{digits}f}" if row.get(name + "_se") is not None else ""
        return f"{row[name]:.{digits}f}{error}".rjust(14)

    def with_error(row, name, digits=4):
        error = f" ± {row[name + '_se']:.{digits}f}" if row[name + "_se"] is not None else ""
        return f"{row[name]:.{digits}f}{error}"

    names = ["judge"] * ("judge" in sft) + ["score", "kl", "eos_rate", "response_length"]
    print("\n" + " " * 16 + "".join(name.rjust(14 if name != "response_length" else 17) for name in names))
    rows = {"SFT": sft, **{f"best of {n}": row for n, row in report["best_of_n"].items()}, "PPO": ppo}
    for name, row in rows.items():
        print(f"{name:<16}" + "".join(cell(row, name, 3 if name == "eos_rate" else 2) for name in names))
    if "judge" in sft:
        print(f"{'best possible':<16}{report['best_judge']:>9.2f}")
    print(f"\nSFT validation loss {with_error(sft, 'val_loss')} nats/token")
    if "above_entropy" in sft:
        print(f"    {with_error(sft, 'above_entropy')} above the entropy of the same rows, {sft['entropy_floor']:.4f}")
    if rm:
        print(f"reward model, validation pairs right {with_error(rm, 'val_accuracy')}")
    if "below_ceiling" in rm:
        print(f"    {with_error(rm, 'below_ceiling')} below the judge itself on the same pairs, {rm['label_ceiling']:.4f}")
    if "win_rate_vs_sft" in ppo:
        print(f"PPO wins against SFT {with_error(ppo, 'win_rate_vs_sft', 3)} (by the judge, ties half)")
    if "optimality" in ppo:
        print(f"optimality {with_error(ppo, 'optimality', 3)}: how much of the way PPO has come from SFT")
        print(f"to the largest score - {report['beta']:g} KL that any policy can have")
    print("\nSamples, before and after:")
    for sample in report["samples"]:
        print(f"  {printable(sample['prompt'])}\n    SFT {printable(sample['sft'])}")
        print(f"    PPO {printable(sample['ppo'])}   (score {sample['score']:.2f}, KL {sample['kl']:.2f})")
    print("seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in report["seconds"].items()))
