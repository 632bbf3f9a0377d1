"""DPO, direct preference optimisation: from the pairs to the policy, with no reward model between.

    python -m variations.dpo           after train_sft.py and train_rm.py, on pref_train.jsonl
    python -m variations.dpo --ipo     with the loss of IPO

The policy with the largest J for a reward r is proportional to ref * exp(r / beta). Solved for r:

    r(x, y) = beta * log(pi(y | x) / ref(y | x)) + something that depends on x alone

The Bradley-Terry loss (section 4 of minippo.py) needs only differences of r between answers to the
same x. So put this r into it, and train pi on the pairs (chosen, rejected). The loss of a pair is

    h   = log(pi / ref) of the chosen answer - log(pi / ref) of the rejected one
    DPO = -log sigmoid(beta * h)          Rafailov et al., arXiv:2305.18290, eq. 7
    IPO = (h - 1 / (2 beta))^2            Azar et al., arXiv:2310.12036, eq. 17: h has a target

Scores have standard deviation 1, r has not; so the same --kl_coef is another price. Samples and
rm.pt are only for the log and the report.
"""

import math
from dataclasses import dataclass

import torch

from minippo import PPOConfig, batch_metrics, evaluate_actions, gradient_step
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, prepare, read_flags
from plumbing.models import load_models
from plumbing.packing import packed
from plumbing.report import finish_run
from plumbing.rows import batch_of, in_parts, pad_completions, read_ids, read_prompts
from plumbing.state import State
from plumbing.training import adamw, backward, rollout_in_pieces, set_lr
from plumbing.watch import Watch
from train_ppo import StageConfig
from variations import NO_CRITIC

UNREAD = (*NO_CRITIC, "clip_eps", "epochs", "algorithm", "kl_target", "kl_horizon")
UNREAD += ("ref_update_every",)


@dataclass
class Settings(PPOConfig):
    clip_eps: float = math.inf  # no clip [0, inf]
    kl_coef: float = 0.1  # beta [1e-6, 1e6]
    ipo: bool = False  # the loss of IPO instead
    samples: int = 32  # responses per iteration, for the log [1, inf]


def dpo_loss(chosen, rejected, beta, ipo=False):
    """log(pi / ref) of chosen and rejected answers, (B,) each -> mean over the pairs, stats."""
    h = chosen - rejected
    losses = (h - 1 / (2 * beta)) ** 2 if ipo else -torch.nn.functional.logsigmoid(beta * h)
    loss, accuracy = losses.mean(), (h > 0).float().mean()
    return loss, {"loss": loss.item(), "accuracy": accuracy.item(), "margin": h.mean().item()}


def log_ratios(policy, ref, pairs, temperature):
    """(prompt, chosen, rejected) as ids -> what dpo_loss needs."""
    rows = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    tokens, mask = pad_completions(rows, policy.lm_head.weight.device)  # (2B, T), (2B, T-1)
    a, b = (evaluate_actions(x, tokens, mask, temperature)[0] for x in (policy, ref))
    return (a - b).sum(1).view(-1, 2).unbind(1)


def main():
    defaults = RunConfig(out="out/dpo"), Settings(), StageConfig()
    run, config, stage = read_flags(__doc__, *defaults, without=UNREAD)
    stage.algorithm, stage.models = "ipo" if config.ipo else "dpo", stage.models or run.out.parent
    prepare(run)
    models = load_models(stage.models, run.device, stage.policy, stage.reward)
    packed(models.networks(), run.dtype, run.grad_checkpoint)
    policy, ref, tokenizer = models.policy, models.ref, models.tokenizer
    pairs = read_ids(run.data, "pref", "train", tokenizer, ref.config.context)
    val_prompts = read_prompts(run.data, "val", tokenizer, ref.config.context)
    optimizer = adamw(policy, stage.lr, eps=stage.adam_eps)
    parts, data = {"policy": policy, "optimizer": optimizer}, (pairs, tokenizer.tokens)
    state = State("ppo", run, parts, data, config, stage, models.made_from)
    watch = Watch(state, models, config, stage)

    def loss(policy, pairs):
        ratios = log_ratios(policy, ref, pairs, config.temperature)
        return dpo_loss(*ratios, config.kl_coef, config.ipo)

    for step in state.steps(stage.steps):
        lr, parts = set_lr(optimizer, step, stage), []
        some = batch_of(pairs, step, stage.batch_size, run.seed)
        asked = [prompt for prompt, *_ in some[: config.samples]]
        batch = rollout_in_pieces(policy, ref, models.score, asked, config)
        for minibatch in in_parts(some, -(-len(some) // config.minibatches)):
            optimizer.zero_grad()
            parts.append(backward(loss, policy, minibatch, config.micro_batch, len))
            parts[-1]["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        stats = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        watch.end_step(batch, stats | batch_metrics(batch, config) | {"lr": lr})

    save_checkpoint(run.out / "ppo.pt", "ppo", policy, tokenizer, sft=models.made_from["sft.pt"])
    finish_run(models, [prompt for prompt, *_ in pairs], val_prompts, run, config, stage)


if __name__ == "__main__":
    run_script(main)
