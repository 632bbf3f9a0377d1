"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on prompts_train.jsonl and prompts_val.jsonl of your own
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model

The files hold rows {"prompt": ...}. Writes out/ppo.pt, out/report.json and out/report.html, a page
for the browser, which is there from the first minute on.
"""

import math
from dataclasses import dataclass

from minippo import (
    PPOConfig,
    adapt_kl_coef,
    compute_advantages,
    frozen_copy,
    ppo_iteration,
    ppo_loss,
)
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import run_script
from plumbing.models import load_models
from plumbing.page import write_page
from plumbing.report import make_report, print_report
from plumbing.rows import read_prompts
from plumbing.settings import RunConfig, prepare, read_flags
from plumbing.state import State, settings_of
from plumbing.training import (
    adamw,
    batch_of,
    loss_in_pieces,
    rollout_in_pieces,
    set_lr,
)
from plumbing.watch import Watch, check_settings, check_start, warn_about


@dataclass
class StageConfig:
    steps: int = 450  # iterations [1, inf]
    batch_size: int = 128  # responses per iteration [1, inf]
    group_size: int = 1  # responses to each prompt, so batch_size / group_size prompts [1, inf]
    lr: float = 8e-4  # peak learning rate of AdamW; it falls linearly to 0 [0, inf]
    warmup: int = 5  # iterations in which the learning rate climbs to its peak [0, inf]
    head_lr: float = 30.0  # multiple of --lr for the value head, which begins at 0 [0, inf]
    adam_eps: float = 1e-4  # Adam's epsilon: weights whose gradient is mere noise move less [0, 1]
    kl_target: float = 6.0  # KL in nats that an adaptive beta steers to [1e-6, inf]
    kl_horizon: float = math.inf  # responses in which beta may change by 20 %; inf: never [1, inf]
    ref_update_every: int = 0  # iterations after which the policy replaces ref; 0: never [0, inf]
    separate_critic: bool = False  # a value network of its own, started from the reward model
    critic_lr: float = 0.0  # peak learning rate of the separate critic; 0: --lr [0, inf]
    models: str = ""  # folder of sft.pt and rm.pt; the same as --out unless it is given
    policy: str = ""  # checkpoint to start from, out/ppo.pt for a second round; sft.pt otherwise
    reference: str = ""  # checkpoint that the KL is measured against; sft.pt unless it is given
    reward: str = ""  # module:function, (prompts, responses) -> scores, instead of the reward model
    rollout_batch: int = 0  # responses sampled and scored at once; 0: all of them [0, inf]
    micro_batch: int = 0  # responses in memory at once in a gradient step; 0: all [0, inf]
    no_report: bool = False  # end without measuring the result on the validation prompts
    report_prompts: int = 0  # prompts in the report; 0: 1024 if there is a judge, or 128 [0, inf]


def main(compute_advantages=compute_advantages, loss_of=ppo_loss, name="PPO"):
    """PPO; with another compute_advantages or loss_of, one of its neighbours in variations/."""
    folder = "out" if name == "PPO" else f"out/{name.lower().replace(' ', '_')}"
    defaults = StageConfig() if name == "PPO" else StageConfig(models="out")
    run, config, stage = read_flags(__doc__, RunConfig(out=folder), PPOConfig(), defaults)
    check_settings(config, stage)
    prepare(run)

    # Models, prompts, optimizer. score(tokens, mask) asks the reward model, or --reward.
    models = load_models(
        stage.models or run.out,
        run.device,
        stage.reward,
        stage.policy,
        stage.reference,
        stage.separate_critic,
    )
    policy, ref, score = models.policy, models.reference, models.score
    policy.eval()  # no dropout, ever: with it, the ratio would not start at 1
    if stage.ref_update_every:
        ref = frozen_copy(ref)  # models.reference stays what the report compares with
    prompts = read_prompts(run.data, "train", models.tokenizer, policy.config.context)
    val_prompts = read_prompts(run.data, "val", models.tokenizer, policy.config.context)
    print(f"training on {run.device}: {len(prompts):,} prompts")
    warn_about(prompts, models, config)
    optimizer = adamw(
        policy, stage.lr, critic_lr=stage.critic_lr, head_lr=stage.head_lr, eps=stage.adam_eps
    )

    # What a run that was stopped needs to go on
    data = prompts, models.tokenizer.tokens
    settings = settings_of(
        run, config, stage, compute_advantages, loss_of, algorithm=name, data=data
    )
    parts = {"policy": policy, "optimizer": optimizer, "loss_of": loss_of}
    parts["ref"] = ref if stage.ref_update_every else None  # else it is read from its file
    state = State("ppo", run, settings, made_from=models.facts, **parts)
    kl_coef = state.values.get("kl_coef", config.kl_coef)
    if state.step == 0:
        check_start(policy, ref, score, prompts, config, stage, run.dtype)
    # In bfloat16, sampling rounds differently: then log pi is computed again, as in the update.
    rollout = rollout_in_pieces(stage.rollout_batch, recompute_logprobs=run.dtype != "float32")
    # With --micro_batch, the loss calls backward() on each piece and frees it.
    functions = rollout, compute_advantages, loss_in_pieces(loss_of, stage.micro_batch)
    watch = Watch(state, models, ref, config, stage)

    # The loop
    for step in state.steps_left(stage):
        climb = (step + 1) / (stage.warmup + 1)
        fall = (stage.steps - step) / max(1, stage.steps - stage.warmup)
        lr = set_lr(optimizer, min(climb, fall))
        step_prompts = batch_of(prompts, step, stage.batch_size // stage.group_size, run.seed)
        step_prompts = [prompt for prompt in step_prompts for _ in range(stage.group_size)]
        batch, metrics = ppo_iteration(
            policy, ref, score, step_prompts, optimizer, config, kl_coef, *functions
        )
        kl_coef = adapt_kl_coef(
            kl_coef, metrics["kl"], stage.kl_target, stage.batch_size, stage.kl_horizon
        )
        if stage.ref_update_every and (step + 1) % stage.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)  # less a separate critic
        watch.end_step(batch, metrics | {"lr": lr}, kl_coef)

    save_checkpoint(run.out / "ppo.pt", "ppo", policy, models.tokenizer)
    state.finish()
    print(f"saved {run.out / 'ppo.pt'}{'' if stage.no_report else '; now the report'}")
    if not stage.no_report:
        print_report(make_report(models, prompts, val_prompts, run, config, stage, name))
    print(f"open {write_page(run.out, stage.models)} in a browser to see the run")


if __name__ == "__main__":
    run_script(main)
