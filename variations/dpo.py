"""DPO, direct preference optimisation: from the pairs to the policy, with no reward model between.

    python -m variations.dpo           after train_sft.py and train_rm.py, on pref_train.jsonl
    python -m variations.dpo --ipo     with the loss of IPO

The policy with the largest J for a reward r is proportional to ref * exp(r / beta). Solved for r:

    r(x, y) = beta * log(pi(y | x) / ref(y | x)) + something that depends on x alone

The Bradley-Terry loss (section 4 of minippo.py) needs only differences of r between answers to the
same x. So put this r into it, and train pi itself on the pairs (chosen, rejected):

    h   = log(pi / ref) of the chosen answer - log(pi / ref) of the rejected one
    DPO = -log sigmoid(beta * h)          Rafailov et al., arXiv:2305.18290, eq. 7
    IPO = (h - 1 / (2 beta))^2            Azar et al., arXiv:2310.12036, eq. 17: h has a target

pi learns from the pairs, not from samples. Scores are divided by their standard deviation, this r
is not: the same --kl_coef is another price. rm.pt only measures, for log (--watch) and report.
"""

from dataclasses import dataclass
from functools import partial

import torch

import train_ppo
from minippo import describe, evaluate_actions, merge, ppo_update
from plumbing.settings import UserError, run_script
from plumbing.text import pad_completions
from variations import CRITIC, EXTRAS


@dataclass
class DPOConfig:
    ipo: bool = False  # the loss of IPO instead
    watch: int = 32  # responses sampled in an iteration, to see how it goes


def dpo_loss(policy, batch, config, ref, beta, ipo=False, length=1.0):
    """tokens (B, 2, T), mask (B, 2, T-1): the chosen and the rejected answer."""
    rows = batch["tokens"].flatten(0, 1), batch["mask"].flatten(0, 1), config.temperature, False
    with torch.no_grad():
        ref_logprobs = evaluate_actions(ref, *rows)[0]
    chosen, rejected = (evaluate_actions(policy, *rows)[0] - ref_logprobs).sum(1).view(-1, 2).T
    h = chosen - rejected
    losses = (h - 1 / (2 * beta)) ** 2 if ipo else -torch.nn.functional.logsigmoid(beta * h)  # (B,)
    stats = {"loss": losses.mean().item(), "margin": h.mean().item(), "ratio_max": 1.0}  # no old pi
    stats |= {"accuracy": (h > 0).float().mean().item(), "tokens": int(batch["mask"].sum())}
    return length * losses.sum() / stats["tokens"], stats  # ppo_update multiplies by the tokens


def dpo_iteration(
    policy, ref, score, prompts, optimizer, config, kl_coef, rollout, micro_batch, own, rows
):
    if not kl_coef:
        raise UserError("--kl_coef 0: at this price DPO learns nothing; give a larger one")
    seen = rollout(policy, ref, score, prompts[: own.watch], config)
    seen["returns"] = seen["scores"][:, None] * seen["mask"]  # only for the log
    some = [rows[i] for i in torch.randint(len(rows), (config.batch_size,)).tolist()]
    answers = [(prompt, answer) for prompt, *two in some for answer in two]
    tokens, mask = pad_completions(answers, seen["tokens"].device)
    batch = {"tokens": tokens.unflatten(0, (-1, 2)), "mask": mask.unflatten(0, (-1, 2))}
    loss_of = partial(dpo_loss, ref=ref, beta=kl_coef, ipo=own.ipo, length=mask.sum() / len(some))
    passes = ppo_update(policy, optimizer, batch, config, micro_batch, loss_of)
    return seen, {**describe(seen, kl_coef), **merge(passes), "passes": passes}


if __name__ == "__main__":
    out = {"own": [DPOConfig()], "without": ("clip_eps", *CRITIC, *EXTRAS), "also": ["pref"]}
    run_script(lambda: train_ppo.main(dpo_iteration, "dpo", __doc__, **out))
