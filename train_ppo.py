"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on prompts_train.jsonl and prompts_val.jsonl of your own
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model

The files hold rows {"prompt": ...}. Writes out/ppo.pt and out/report.json.
"""

import math
from dataclasses import dataclass

import torch

from minippo import PPOConfig, adapt_kl_coef, evaluate_actions, frozen_copy, kl_per_response
from minippo import ppo_iteration
from plumbing.checkpoints import save_checkpoint
from plumbing.report import make_report, print_report
from plumbing.rewards import load_models
from plumbing.settings import RunConfig, UserError, prepare, read_flags, run_script
from plumbing.text import read_ids, texts_of
from plumbing.training import Progress, adamw, add_critic, full_batches, rollout_in_pieces, set_lr


@dataclass
class StageConfig:
    separate_critic: bool = False  # a value network of its own, started from the reward model
    models: str = ""  # folder of sft.pt and rm.pt; the same as --out unless it is given
    reward: str = ""  # module:function, (prompts, responses) -> floats, instead of the reward model
    rollout_batch: int = 0  # responses sampled and scored at once; 0: all of them
    micro_batch: int = 0  # responses in memory at once in a gradient step; 0: all of its minibatch
    no_report: bool = False  # end without measuring the result on the validation prompts


def main():
    run, config, stage = read_flags(__doc__, RunConfig(), PPOConfig(), StageConfig())
    prepare(run)
    models, prompts, val_prompts = load(run, stage)
    policy, ref = models.policy, frozen_copy(models.policy)
    sft = frozen_copy(ref) if config.ref_update_every else ref  # what the report compares with
    if stage.separate_critic:
        add_critic(policy, models.reward_model)
    policy.eval()  # no dropout, ever: it would make the policy differ from itself
    optimizer = adamw(policy, config.lr)
    parts = {"policy": policy, "ref": ref, "optimizer": optimizer}
    progress = Progress("ppo", run, (config, stage), config.steps, models.facts, **parts)
    kl_coef = progress.values.setdefault("kl_coef", config.kl_coef)
    rollout = rollout_in_pieces(stage.rollout_batch)
    batches = full_batches(len(prompts), config.batch_size, run.seed)
    for step, numbers in progress.remaining(batches):
        lr = set_lr(optimizer, config.lr, step, config.steps, config.warmup)
        rows = [prompts[i] for i in numbers]
        if step == 0:
            check_start(policy, rollout(policy, ref, models.score, rows, config), config, run.dtype)
        batch, metrics = ppo_iteration(
            policy, ref, models.score, rows, optimizer, config, kl_coef, rollout, stage.micro_batch
        )
        if config.epochs == 1:
            del metrics["passes"]  # of a single pass they are the same numbers again
        look(batch, models.tokenizer, show=step % 40 == 0)
        kl_coef = progress.values["kl_coef"] = adapt_kl_coef(
            kl_coef, metrics["kl"], config.kl_target, config.batch_size, config.kl_horizon
        )
        if config.ref_update_every and (step + 1) % config.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)  # less a separate critic
        tokens = sum(map(len, rows)) + int(batch["mask"].sum())
        progress.end_step(tokens, ["score", "kl", "entropy", "eos_rate"], **metrics, lr=lr)
    save_checkpoint(run.out / "ppo.pt", "ppo", policy, models.tokenizer)
    print(f"saved {run.out / 'ppo.pt'}{'' if stage.no_report else '; now the report'}")
    if not stage.no_report:
        report = make_report(policy, sft, models, val_prompts, prompts, run, config, stage)
        print_report(report)


def load(run, stage):
    """-> the models that stages 1 and 2 have made, and the prompts for training and the report."""
    models = load_models(stage.models or run.out, run.device, stage.reward)
    context = models.policy.config.context
    prompts, val_prompts = (
        [ids for (ids,) in read_ids(run.data, "prompts", split, models.tokenizer, context)]
        for split in ("train", "val")
    )
    print(f"PPO on {run.device}: {len(prompts):,} prompts")
    return models, prompts, val_prompts


@torch.no_grad()
def check_start(policy, batch, config, dtype):
    """Nothing has been trained yet, so pi / old must be 1 and the KL 0, at every token. If they are
    not, sampling and scoring disagree (padding? dropout? temperature?): training makes no sense."""
    logprobs, _, _ = evaluate_actions(
        policy, batch["tokens"], batch["mask"], config.temperature, with_entropy=False
    )
    off = ((logprobs - batch["logprobs"]).exp() - 1).abs().max().item()
    kl = (batch["logprobs"] - batch["ref_logprobs"]).abs().max().item()
    tolerance, when = 1e-3 if dtype == "float32" else 0.2, "before the first update"
    if not off <= tolerance:
        raise UserError(f"{when} a ratio is {off:.4f} off 1: sampling and scoring disagree")
    if not kl <= tolerance:
        raise UserError(f"{when} a token is {kl:.4f} nats away from the reference, not 0")
    print("checked: before the first update the ratio is 1 and the KL to the reference is 0")


def look(batch, tokenizer, show):
    """Warn if the KL is below 0, which a true KL cannot be; show two responses if asked to."""
    kl, _ = kl_per_response(batch["logprobs"], batch["ref_logprobs"], batch["mask"])
    mean, error = kl.mean().item(), kl.std(correction=0).item() / math.sqrt(len(kl))
    if len(kl) >= 16 and mean < -4 * error - 1e-4:  # the error of a few is not to be relied on
        print(f"warning: KL {mean:.3f} ± {error:.3f} is below 0: sampling and scoring disagree")
    if show:
        two = [0, len(kl) // 2]
        for i, *texts in zip(two, *texts_of(tokenizer, batch["tokens"][two], batch["mask"][two])):
            score = batch["scores"][i]
            print(f"    {''.join(texts)!r}  score {score:.2f}  KL {kl[i]:.2f}")


if __name__ == "__main__":
    run_script(main)
