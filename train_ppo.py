"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on prompts_train.jsonl and prompts_val.jsonl of your own
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model
    python train_ppo.py --algorithm rloo   another algorithm: a file of variations/

The files hold rows {"prompt": ...}. Writes out/ppo.pt, out/report.json and out/report.html, a page
for the browser.
"""

import math
from dataclasses import dataclass

from minippo import batch_metrics, frozen_copy, ppo_update
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, peek, prepare, read_flags
from plumbing.models import load_algorithm, load_models
from plumbing.packing import packed
from plumbing.report import finish_run
from plumbing.rows import batch_of, read_prompts
from plumbing.state import State
from plumbing.training import adamw, adapt_kl_coef, rollout_in_pieces, set_lr
from plumbing.watch import Watch, check_settings, check_start


@dataclass
class StageConfig:
    algorithm: str = "ppo"  # ppo, or a file of variations/: reinforce, rloo, grpo, ...
    steps: int = 450  # iterations [1, inf]
    batch_size: int = 128  # responses per iteration [1, inf]
    lr: float = 8e-4  # peak learning rate of AdamW; it falls linearly to 0 [0, inf]
    warmup: int = 5  # iterations in which the learning rate climbs to its peak [0, inf]
    head_lr_factor: float = 30.0  # times --lr for the value head, which has far to go [0, inf]
    adam_eps: float = 1e-4  # Adam's epsilon; weights of tiny, noisy gradients move less [1e-12, 1]
    kl_target: float = 3.0  # KL in nats that an adaptive beta steers to [1e-6, inf]
    kl_horizon: float = math.inf  # responses in which beta changes by 20 % at most; inf: 0 [1, inf]
    ref_update_every: int = 0  # iterations after which the policy replaces ref; 0: never [0, inf]
    separate_critic: bool = False  # a value network of its own, started from the reward model
    models: str = ""  # folder of sft.pt, rm.pt; if empty, --out, or its parent if not ppo
    policy: str = ""  # checkpoint to start from, out/ppo.pt for a second round; sft.pt otherwise
    reward: str = ""  # module:function, (prompts, responses) -> scores, instead of the reward model
    no_report: bool = False  # end without measuring the result on the validation prompts


def main():
    # By default: PPOConfig, compute_advantages and ppo_loss of minippo.py
    algorithm = load_algorithm(name := peek("algorithm", "ppo"))
    out = "out" if name == "ppo" else f"out/{name}"
    defaults = RunConfig(out=out), algorithm.Settings(), StageConfig()
    run, config, stage = read_flags(__doc__, *defaults, without=algorithm.UNREAD)
    check_settings(config, stage)
    prepare(run)

    # Models, prompts, optimizer. score(tokens, mask) asks the reward model, or --reward.
    folder = stage.models = stage.models or (run.out if name == "ppo" else run.out.parent)
    models = load_models(folder, run.device, stage.policy, stage.reward, stage.separate_critic)
    packed(models.networks(), run.dtype, run.grad_checkpoint)  # in place
    policy, ref, score = models.policy.eval(), models.ref, models.score
    if stage.ref_update_every:  # the report needs the SFT model too
        ref = frozen_copy(ref)
    prompts = read_prompts(run.data, "train", models.tokenizer, policy.config.context)
    val_prompts = read_prompts(run.data, "val", models.tokenizer, policy.config.context)
    optimizer = adamw(policy, stage.lr, head_lr_factor=stage.head_lr_factor, eps=stage.adam_eps)
    print(f"training on {run.device}: {len(prompts):,} prompts")

    # State: the log, and how far the run has come. Watch: warnings, and what the page shows
    parts, data = {"policy": policy, "optimizer": optimizer}, (prompts, models.tokenizer.tokens)
    parts |= {"ref": ref} if stage.ref_update_every else {}  # else it is read from its file
    state = State("ppo", run, parts, data, config, stage, models.made_from)
    watch = Watch(state, models, config, stage)
    if state.step == 0:
        check_start(policy, ref, score, prompts, config, stage, run.dtype)

    # The loop
    k = getattr(config, "k", 1)  # responses to each prompt; PPO needs one
    for step in state.steps(stage.steps):
        lr = set_lr(optimizer, step, stage)
        asked = batch_of(prompts, step, stage.batch_size // k, run.seed)
        asked = [prompt for prompt in asked for _ in range(k)]
        batch = rollout_in_pieces(policy, ref, score, asked, config)  # phases 1 and 2: rollout()
        batch |= algorithm.compute_advantages(batch, config)  # phase 3
        stats = ppo_update(policy, optimizer, batch, config, algorithm.loss)  # phase 4
        stats |= batch_metrics(batch, config) | {"lr": lr}
        config.kl_coef = adapt_kl_coef(config.kl_coef, stats["kl"], stage)  # stays, by default
        if stage.ref_update_every and (step + 1) % stage.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)  # it has no separate critic
        watch.end_step(batch, stats)

    sft = models.made_from["sft.pt"]
    save_checkpoint(run.out / "ppo.pt", "ppo", policy, models.tokenizer, sft=sft)
    print(f"saved {run.out / 'ppo.pt'}")
    finish_run(models, prompts, val_prompts, run, config, stage)


if __name__ == "__main__":
    run_script(main)
