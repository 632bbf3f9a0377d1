"""How good is the policy of a run? Writes out/report.json and the page out/report.html.

    python evaluate.py out            or out/rloo, also while the run is still going on

It samples M responses to each of P validation prompts. Those of the reference tell how well any
policy could do: the best is pi*(y | x) ~ ref(y | x) exp(score / beta) (arXiv:2205.11275).
"""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

import train_ppo
from data.rows import UserError
from minippo import frozen_copy
from plumbing.batches import take
from plumbing.files import find_model, file_hash, read_log, read_torch, write_text
from plumbing.models import load_score, load_sft
from plumbing.page import write_page
from plumbing.report import distinct, numbers_of, one_iteration, report_text, sample
from plumbing.settings import find_device, run_script
from plumbing.text import read_prompts


@dataclass
class Config:
    folder: Path  # of the run, such as out
    data: str = ""  # data folder, if not the run's
    models: str = ""  # folder of sft.pt and rm.pt, if not the run's
    kl_coef: float = 0.0  # beta of J, if not the run's; where that is another penalty, give 0.1
    device: str = "auto"  # auto, cpu, cuda or cuda:1
    seed: int = 0  # of the samples
    prompts: int = 128  # validation prompts
    reference_samples: int = 192  # responses of the SFT model to each
    policy_samples: int = 16  # responses of the policy to each
    sample_batch: int = 0  # responses sampled at once; 0: as in the run

    def __post_init__(self):
        if min(self.prompts, self.reference_samples, self.policy_samples) < 1:
            raise ValueError("prompts and samples should be at least 1")


def optimal_objective(scores, kl_coef):
    """The largest E[score] - beta KL of any policy, beta log E_ref[exp(score / beta)], from scores
    of the reference: (P, M) -> (P,). Slightly too low: rare answers with high scores are missing.
    """
    return kl_coef * (torch.logsumexp(scores / kl_coef, 1) - math.log(scores.shape[1]))


def best_of_n(scores, numbers, n):
    """The expected number of the response with the best score among n: (P, M) each -> (P,). Exact:
    the one ranked k-th from below is the best of C(k-1, n-1) of all C(M, n) subsets."""
    M = scores.shape[1]
    shares = [math.comb(k - 1, n - 1) / math.comb(M, n) for k in range(1, M + 1)]
    ranked = numbers.gather(1, scores.argsort(dim=1, stable=True))
    return (ranked * scores.new_tensor(shares)).sum(1)


def estimate(columns):
    """{name: (P,)} -> means and standard errors."""
    estimates = {}
    for name, numbers in columns.items():
        estimates[name] = numbers.mean().item()
        if len(numbers) > 1:
            estimates[f"{name}_se"] = (numbers.std() / len(numbers) ** 0.5).item()
    return estimates


def optimality(J, J_sft, J_best):
    """(J(policy) - J(SFT)) / (J* - J(SFT)) from (P,) each: a ratio of means, with its standard
    error by the delta method. {} if the reference is the best policy already."""
    gain = J - J_sft
    possible = J_best - J_sft
    if possible.mean() < 1e-6:
        return {}
    ratio = gain.mean() / possible.mean()
    return estimate({"optimality": ratio + (gain - ratio * possible) / possible.mean()})


def summarize(groups, reference_scores, kl_coef):
    numbers = numbers_of(groups)
    columns = {name: numbers[name].mean(1) for name in numbers} | {"distinct": distinct(groups)}
    summary = estimate(columns)
    if kl_coef:
        J = columns["score"] - kl_coef * columns["kl"]
        best = optimal_objective(reference_scores, kl_coef)
        summary |= optimality(J, reference_scores.mean(1), best)
    return summary


def summarize_best(reference, n):
    """The best of n. Its KL is an upper bound."""
    numbers = numbers_of(reference)
    columns = {name: best_of_n(numbers["score"], numbers[name], n) for name in numbers}
    del columns["kl"]
    return estimate(columns) | {"kl": math.log(n) - (n - 1) / n}


def furthest(groups):
    """The three responses with the highest KL, of different prompts: reward hacking, if there is
    any, is found there."""
    responses = sorted((row for group in groups for row in group), key=lambda row: row["kl"])
    of_prompt = {row["prompt"]: row for row in responses}  # the last one counts
    return sorted(of_prompt.values(), key=lambda row: -row["kl"])[:3]


def read_run(out, config):
    """The folder of a run -> the settings of its PPO, what its models and reward were, and the
    weights of its policy."""
    in_progress = not (out / "ppo.pt").exists()
    contents = read_torch(out / ("ppo_state.pt" if in_progress else "ppo.pt"), "run train_ppo.py")
    settings = contents["settings"] if in_progress else contents["metadata"]["settings"]
    names = [field.name for field in fields(train_ppo.Config) if field.name in settings]
    ppo = train_ppo.Config(out=out, **{name: settings[name] for name in names})
    ppo = replace(
        ppo,
        data=Path(config.data or ppo.data),
        models=config.models or ppo.models,
        kl_coef=config.kl_coef or ppo.kl_coef,
        sample_batch=config.sample_batch or ppo.sample_batch,
    )
    return ppo, settings, contents["model"]


def main(config):
    out = config.folder
    device = find_device(config.device)
    ppo, settings, weights = read_run(out, config)
    sft, tokenizer = load_sft(ppo, device)
    score = load_score(ppo, tokenizer, device)
    for name in {"sft", "rm"} & settings.keys():  # with --reward there is no rm, nor with DPO
        if settings[name] != file_hash(find_model(ppo, name)):
            raise UserError(f"{find_model(ppo, name)}: not that of this run; give --models")
    policy = frozen_copy(sft)
    policy.load_state_dict(weights)

    training_prompts = read_prompts(ppo.data, "train", tokenizer, sft.config.context)
    prompts = read_prompts(ppo.data, "val", tokenizer, sft.config.context)
    torch.manual_seed(config.seed)
    prompts = [prompts[i] for i in torch.randperm(len(prompts))[: config.prompts]]
    prompts.sort(key=len)  # for speed
    roles = {"ref": sft, "score": score, "tokenizer": tokenizer, "config": ppo}
    reference = sample(sft, config.reference_samples, prompts, **roles)
    groups = sample(policy, config.policy_samples, prompts, **roles)
    unseen = [i for i, prompt in enumerate(prompts) if prompt not in training_prompts]
    scores = numbers_of(reference)["score"]
    sizes = [n for n in (4, 16, 64) if n <= config.reference_samples]
    report = {
        "sft": summarize(reference, scores, ppo.kl_coef),
        "best_of_n": {n: summarize_best(reference, n) for n in sizes},
        "policy": summarize(groups, scores, ppo.kl_coef),
        "unseen": {},
        "furthest": furthest(groups),
    }
    if unseen:
        report["unseen"] = summarize([groups[i] for i in unseen], scores[unseen], ppo.kl_coef)
    write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    text = report_text(report)
    print(text)

    iterations = {
        "the SFT model": one_iteration(sft, training_prompts, **roles),
        "the policy": one_iteration(policy, training_prompts, **roles),
    }
    samples = [(before[0], after[0]) for before, after in zip(reference, groups)]
    names = ["sft"] if ppo.reward else ["sft", "rm"]
    logs = {name: read_log(find_model(ppo, name).with_suffix(".jsonl")) for name in names}
    logs["ppo"] = read_log(out / "ppo.jsonl")
    write_page(out / "report.html", text, take(samples, min(6, len(samples))), iterations, logs)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
