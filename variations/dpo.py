"""DPO, direct preference optimisation, another algorithm than PPO: from the pairs to the policy,
with no reward model between.

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
is not: the same --kl_coef is another price. rm.pt only measures: the log,
for which --watch responses are sampled in each iteration, and the report.
"""

from dataclasses import dataclass
from functools import partial

import torch

from minippo import PPOConfig, describe, evaluate_actions, ppo_update
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import UserError, run_script
from plumbing.models import load_models
from plumbing.page import write_page
from plumbing.report import make_report, print_report
from plumbing.rows import pad_completions, read_ids, read_prompts
from plumbing.settings import RunConfig, prepare, read_flags
from plumbing.state import State, fingerprint, settings_of
from plumbing.training import adamw, batch_of, loss_in_pieces, rollout_in_pieces, set_lr
from plumbing.watch import Watch
from train_ppo import StageConfig
from variations import CRITIC, TERMS, take_flags


def dpo_loss(policy, batch, config, ref, beta, ipo=False):
    """tokens (B, 2, T), mask (B, 2, T-1): the chosen and the rejected answer. A mean over pairs."""
    tokens, mask = batch["tokens"].flatten(0, 1), batch["mask"].flatten(0, 1)  # (2B, T), (2B, T-1)
    logprobs, _, _ = evaluate_actions(policy, tokens, mask, config.temperature, with_entropy=False)
    with torch.no_grad():
        ref_logprobs, _, _ = evaluate_actions(
            ref, tokens, mask, config.temperature, with_entropy=False
        )
    chosen, rejected = (logprobs - ref_logprobs).sum(1).view(-1, 2).unbind(1)  # (B,) each
    h = chosen - rejected
    losses = (h - 1 / (2 * beta)) ** 2 if ipo else -torch.nn.functional.logsigmoid(beta * h)
    loss, accuracy = losses.mean(), (h > 0).float().mean()
    stats = {"loss": loss.item(), "count": len(h), "margin": h.mean().item()}
    return loss, stats | {"accuracy": accuracy.item()}


@dataclass
class DPOConfig:
    ipo: bool = False  # the loss of IPO instead
    watch: int = 32  # responses sampled in an iteration, to see how it goes [1, inf]


UNREAD = (*CRITIC, *TERMS, "clip_eps", "whiten", "kl_target", "kl_horizon", "ref_update_every")


def main():
    flags = take_flags(__doc__, DPOConfig(), (*UNREAD, "group_size"))
    defaults = RunConfig(out="out/dpo"), PPOConfig(), StageConfig(models="out")
    run, config, stage = read_flags(__doc__, *defaults)
    if not config.kl_coef:
        raise UserError("--kl_coef 0: at this price DPO learns nothing; give a larger one")
    prepare(run)
    models = load_models(stage.models, run.device, stage.reward, stage.policy, stage.reference)
    policy, ref, tokenizer = models.policy.eval(), models.reference, models.tokenizer
    context = policy.config.context
    pairs = read_ids(run.data, "pref", "train", tokenizer, context)
    prompts = read_prompts(run.data, "train", tokenizer, context)
    val_prompts = read_prompts(run.data, "val", tokenizer, context)
    optimizer = adamw(policy, stage.lr, eps=stage.adam_eps)

    data = fingerprint(pairs, prompts, tokenizer.tokens)
    settings = settings_of(run, config, stage, flags, algorithm="DPO", data=data)
    state = State("ppo", run, settings, models.facts, policy=policy, optimizer=optimizer)
    watch = Watch(state, models, ref, config, stage)
    rollout = rollout_in_pieces(stage.rollout_batch)
    loss_of = partial(dpo_loss, ref=ref, beta=config.kl_coef, ipo=flags.ipo)
    loss_of = loss_in_pieces(loss_of, stage.micro_batch)
    for step in state.steps_left(stage):
        climb = (step + 1) / (stage.warmup + 1)
        fall = (stage.steps - step) / max(1, stage.steps - stage.warmup)
        lr = set_lr(optimizer, min(climb, fall))
        answers = [
            (prompt, answer)
            for prompt, *pair in batch_of(pairs, step, stage.batch_size, run.seed)
            for answer in pair
        ]
        tokens, mask = pad_completions(answers, run.device)
        batch = {"tokens": tokens.unflatten(0, (-1, 2)), "mask": mask.unflatten(0, (-1, 2))}
        passes = ppo_update(policy, optimizer, batch, config, loss_of)
        watched = batch_of(prompts, step, flags.watch, run.seed)
        batch = rollout(policy, ref, models.score, watched, config)
        metrics = describe(batch, config.kl_coef) | passes[-1] | {"passes": passes, "lr": lr}
        watch.end_step(batch, metrics, config.kl_coef)

    save_checkpoint(run.out / "ppo.pt", "ppo", policy, tokenizer)
    state.finish()
    if not stage.no_report:
        print_report(make_report(models, prompts, val_prompts, run, config, stage, "DPO"))
    print(f"open {write_page(run.out, stage.models)} in a browser to see the run")


if __name__ == "__main__":
    run_script(main)
