"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on prompts_train.jsonl and prompts_val.jsonl of your own
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model

The files hold rows {"prompt": ...}. Writes out/ppo.pt, out/report.json and out/report.html, a page
for the browser.
"""

from dataclasses import dataclass

from minippo import PPOConfig, adapt_kl_coef, frozen_copy, ppo_iteration, row_lengths
from plumbing.checkpoints import save_checkpoint
from plumbing.page import write_page
from plumbing.progress import Progress
from plumbing.report import make_report, print_report
from plumbing.rewards import load_models
from plumbing.settings import RunConfig, prepare, read_flags, run_script
from plumbing.text import read_ids
from plumbing.traces import Traces
from plumbing.training import adamw, add_critic, full_batches, rollout_in_pieces, set_lr
from plumbing.watch import check_start, look, warn_of


@dataclass
class StageConfig:
    separate_critic: bool = False  # a value network of its own, started from the reward model
    critic_lr: float = 0.0  # peak learning rate of the separate critic; 0: --lr
    head_lr: float = 30.0  # that of the value head, in multiples of --lr: it has to begin at zero
    adam_eps: float = 1e-4  # Adam's epsilon: what moves weights whose gradients are mere noise less
    models: str = ""  # folder of sft.pt and rm.pt; the same as --out unless it is given
    policy: str = ""  # checkpoint to start from, out/ppo.pt for a second round; sft.pt otherwise
    reference: str = ""  # checkpoint that the KL is measured against; sft.pt unless it is given
    reward: str = ""  # module:function, (prompts, responses) -> floats, instead of the reward model
    rollout_batch: int = 0  # responses sampled and scored at once; 0: all of them
    micro_batch: int = 0  # responses in memory at once in a gradient step; 0: all of its minibatch
    no_report: bool = False  # end without measuring the result on the validation prompts
    report_prompts: int = 0  # validation prompts in the report; 0: 1024 if there is a judge, or 128


def main(iterate=ppo_iteration, name="", doc=__doc__, own=(), without=(), also=()):
    """PPO, or what a file of variations/ puts in its place; variations/__init__.py says how."""
    defaults = RunConfig(out=f"out/{name}"), PPOConfig(), StageConfig(models="out" if name else "")
    run, config, stage, *more = read_flags(doc, *defaults, *own, without=without)
    prepare(run)
    models, prompts, val_prompts, rows = load(run, config, stage, also)
    policy, sft = models.policy, models.reference
    ref = frozen_copy(sft) if config.ref_update_every else sft  # sft: what the report compares with
    policy.eval()  # no dropout, ever: it would make the policy differ from itself
    optimizer = adamw(policy, config.lr, 0.0, stage.critic_lr, stage.head_lr, stage.adam_eps)
    progress = Progress(
        "ppo", run, (config, stage, *more), config.steps, config.warmup, algorithm=name,
        data=(prompts, models.tokenizer.tokens, *rows), made_from=models.facts,
        policy=policy, ref=ref, optimizer=optimizer,
    )  # fmt: skip
    kl_coef = progress.values.setdefault("kl_coef", config.kl_coef)
    traces = Traces(progress, models.tokenizer, stage.rollout_batch)  # what report.html shows
    rollout = traces.around(rollout_in_pieces(stage.rollout_batch, run.dtype != "float32"))
    for numbers in progress.remaining(full_batches(len(prompts), config.batch_size, run.seed)):
        step, asked = progress.step, [prompts[i] for i in numbers]
        lr = set_lr(optimizer, progress.rate())
        if step == 0:
            check_start(policy, ref, models.score, asked, config, stage, run.dtype)
        batch, metrics = iterate(
            policy, ref, models.score, asked, optimizer, config, kl_coef, rollout,
            stage.micro_batch, *more, *rows,
        )  # fmt: skip
        traces.record(policy, batch, metrics, config)
        if config.epochs == 1:
            del metrics["passes"]  # of a single pass they are the same numbers again
        look(batch, models.tokenizer, show=step % 40 == 0)
        kl_coef = progress.values["kl_coef"] = adapt_kl_coef(
            kl_coef, metrics["kl"], config.kl_target, config.batch_size, config.kl_horizon
        )
        if config.ref_update_every and (step + 1) % config.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)  # less a separate critic
        tokens = int(row_lengths(batch["mask"]).sum())
        progress.end_step(tokens, ["score", "kl", "entropy", "eos_rate"], **metrics, lr=lr)
    finish(models, val_prompts, prompts, run, config, stage, progress)


def load(run, config, stage, also=()):
    """-> the models that stages 1 and 2 have made, the prompts for training and for the report, and
    the training rows of the files named in `also`, all as ids."""
    models = load_models(
        stage.models or run.out, run.device, stage.reward, stage.policy, stage.reference
    )
    if stage.separate_critic:
        add_critic(models.policy, models.reward_model)
    context = models.policy.config.context
    prompts, val_prompts = (
        [ids for (ids,) in read_ids(run.data, "prompts", split, models.tokenizer, context)]
        for split in ("train", "val")
    )
    rows = [read_ids(run.data, task, "train", models.tokenizer, context) for task in also]
    print(f"training on {run.device}: {len(prompts):,} prompts")
    warn_of(prompts, models, config)
    return models, prompts, val_prompts, rows


def finish(models, val_prompts, prompts, run, config, stage, progress=None):
    """The policy is saved and measured; out/report.html shows how it came about."""
    policy, sft = models.policy, models.reference
    save_checkpoint(run.out / "ppo.pt", "ppo", policy, models.tokenizer)
    if progress:
        progress.done()
    print(f"saved {run.out / 'ppo.pt'}{'' if stage.no_report else '; now the report'}")
    if not stage.no_report:
        print_report(make_report(policy, sft, models, val_prompts, prompts, run, config, stage))
    if progress:  # without, there is no log
        print(f"open {write_page(run.out, stage.models)} in a browser to see the run")


if __name__ == "__main__":
    run_script(main)
