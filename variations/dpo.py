"""DPO, direct preference optimisation, another algorithm than PPO: from the pairs to the policy,
with no reward model between.

    python -m variations.dpo           after train_sft.py and train_rm.py, on pref_train.jsonl
    python -m variations.dpo --ipo     with the loss of IPO

The policy with the largest J for a reward r is proportional to ref * exp(r / beta). Solved for r:

    r(x, y) = beta * log(pi(y | x) / ref(y | x)) + something that depends on x alone

The Bradley-Terry loss (section 4 of minippo.py) needs only differences of r between answers to the
same x. So put this r into it, and train pi on the pairs (chosen, rejected). The loss of a pair is

    h   = log(pi / ref) of the chosen answer - log(pi / ref) of the rejected one
    DPO = -log sigmoid(beta * h)          Rafailov et al., arXiv:2305.18290, eq. 7
    IPO = (h - 1 / (2 beta))^2            Azar et al., arXiv:2310.12036, eq. 17: h has a target

Scores are divided by their standard deviation, r is not; so the same --kl_coef is another price.
The loss needs neither rm.pt nor samples. Both are only for the log and the report.
"""

from dataclasses import dataclass
from functools import partial

import torch

from minippo import PPOConfig, average, batch_metrics, evaluate_actions, ppo_update
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import UserError, run_script
from plumbing.models import load_models
from plumbing.page import write_page
from plumbing.report import make_report, print_report
from plumbing.rows import pad_completions, read_ids, read_prompts
from plumbing.settings import RunConfig, prepare, read_flags
from plumbing.state import State, settings_of
from plumbing.training import adamw, batch_of, loss_in_pieces, rollout_in_pieces, set_lr
from plumbing.watch import Watch, check_settings, warn_about
from train_ppo import StageConfig
from variations import CRITIC, TERMS, refuse_flags, take_flags


def dpo_loss(chosen, rejected, beta, ipo=False):
    """log(pi / ref) of the chosen and of the rejected answers, (B,) each -> mean over pairs, stats."""
    h = chosen - rejected
    losses = (h - 1 / (2 * beta)) ** 2 if ipo else -torch.nn.functional.logsigmoid(beta * h)
    loss, accuracy = losses.mean(), (h > 0).float().mean()
    return loss, {"loss": loss.item(), "accuracy": accuracy.item(), "margin": h.mean().item()}


def pair_loss(policy, batch, config, ref, ipo=False):
    """The loss of B pairs: tokens (B, 2, T), mask (B, 2, T-1)."""
    tokens, mask = batch["tokens"].flatten(0, 1), batch["mask"].flatten(0, 1)  # (2B, T), (2B, T-1)
    logprobs, _, _ = evaluate_actions(policy, tokens, mask, config.temperature, False)
    with torch.no_grad():
        ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, config.temperature, False)
    chosen, rejected = (logprobs - ref_logprobs).sum(1).view(-1, 2).unbind(1)  # (B,) each
    loss, stats = dpo_loss(chosen, rejected, config.kl_coef, ipo)
    return loss, stats | {"count": len(chosen)}


@dataclass
class DPOConfig:
    ipo: bool = False  # the loss of IPO instead
    samples: int = 32  # responses per iteration, for the log [1, inf]


def main():
    flags = take_flags(__doc__, DPOConfig())
    refuse_flags("clip_eps", "no_whiten", "group_size", *CRITIC, *TERMS)
    refuse_flags("kl_target", "kl_horizon", "ref_update_every")
    defaults = RunConfig(out="out/dpo"), PPOConfig(), StageConfig(models="out")
    run, config, stage = read_flags(__doc__, *defaults)
    check_settings(config, stage)
    if not config.kl_coef:
        raise UserError("--kl_coef 0: DPO would learn nothing; give a larger one")
    prepare(run)
    models = load_models(stage.models, run.device, stage.reward, stage.policy, stage.reference)
    policy, ref, tokenizer = models.policy.eval(), models.reference, models.tokenizer
    context = policy.config.context
    pairs = read_ids(run.data, "pref", "train", tokenizer, context)
    prompts = read_prompts(run.data, "train", tokenizer, context)
    val_prompts = read_prompts(run.data, "val", tokenizer, context)
    optimizer = adamw(policy, stage.lr, eps=stage.adam_eps)

    data = pairs, prompts, tokenizer.tokens
    settings = settings_of(run, config, stage, flags, algorithm="DPO", data=data)
    state = State("ppo", run, settings, models.facts, policy=policy, optimizer=optimizer)
    warn_about(prompts, models, config)
    watch = Watch(state, models, ref, config, stage)
    rollout = rollout_in_pieces(stage.rollout_batch)
    loss_of = loss_in_pieces(partial(pair_loss, ref=ref, ipo=flags.ipo), stage.micro_batch)
    for step in state.steps_left(stage):
        climb = (step + 1) / (stage.warmup + 1)
        fall = (stage.steps - step) / max(1, stage.steps - stage.warmup)
        lr = set_lr(optimizer, min(climb, fall))
        some_prompts = batch_of(prompts, step, flags.samples, run.seed)
        samples = rollout(policy, ref, models.score, some_prompts, config)
        some_pairs = batch_of(pairs, step, stage.batch_size, run.seed)
        answers = [(prompt, answer) for prompt, *pair in some_pairs for answer in pair]
        tokens, mask = (x.unflatten(0, (-1, 2)) for x in pad_completions(answers, run.device))
        passes = ppo_update(policy, optimizer, {"tokens": tokens, "mask": mask}, config, loss_of)
        metrics = batch_metrics(samples, config.kl_coef) | average(passes)
        watch.end_step(samples, metrics | {"passes": passes, "lr": lr}, config.kl_coef)

    save_checkpoint(run.out / "ppo.pt", "ppo", policy, tokenizer)
    state.finish()
    print(f"saved {run.out / 'ppo.pt'}{'' if stage.no_report else '; now the report'}")
    if not stage.no_report:
        seen = [prompt for prompt, *_ in pairs]
        print_report(make_report(models, seen, val_prompts, run, config, stage, "DPO"))
    print(f"open {write_page(run.out, stage.models)} in a browser to see the run")


if __name__ == "__main__":
    run_script(main)
