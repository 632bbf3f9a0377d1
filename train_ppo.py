"""Stage 3, PPO: the policy learns to write what scores highly, and stays close to the SFT model.

    python train_ppo.py                    after train_sft.py and train_rm.py, on the same data
    python train_ppo.py --data FOLDER      on your own prompts_train.jsonl and prompts_val.jsonl
    python train_ppo.py --reward my:score  with a function in my.py instead of the reward model

The rows are {"prompt": ...}. Writes out/ppo.pt and out/report.html, a page to open in a browser.
"""

from dataclasses import dataclass

from minippo import PPOConfig, batch_metrics, center_values, compute_advantages, ppo_loss
from minippo import ppo_update, rollout
from plumbing.models import load_models
from plumbing.report import check_start, report
from plumbing.run import Run, adam
from plumbing.settings import read_flags, script
from plumbing.text import read_prompts


@dataclass
class TrainConfig:  # read by the loop below, whatever the algorithm
    steps: int = 450  # iterations: a new batch, then epochs x minibatches gradient steps
    batch_size: int = 128  # responses per iteration
    lr: float = 8e-4  # peak learning rate, falling to 0; for a value head on the trunk, times 30
    warmup: int = 5  # iterations in which the rate climbs to its peak; at most a tenth of all
    adam_eps: float = 1e-4  # Adam's epsilon; weights with tiny, noisy gradients move less
    models: str = ""  # folder of sft.pt and rm.pt; if empty, --out or else the folder above it
    policy: str = ""  # checkpoint to start from instead of sft.pt, which remains the reference
    reward: str = ""  # module:function to score responses instead of rm.pt; see docs/using.md
    no_report: bool = False  # end without measuring the result on the validation prompts
    kl_target: float = 0.0  # adapt beta to hold the KL at this many nats; 0: beta is fixed
    ref_update_every: int = 0  # copy the policy into ref every so many iterations; 0: never


@dataclass
class Settings(PPOConfig):  # PPO's; each file of variations/ brings its own
    separate_critic: bool = False  # a separate value network, started from the reward model


@script
def train(
    settings=Settings, compute_advantages=compute_advantages, loss=ppo_loss, doc=__doc__, out="out"
):
    """variations/ pass their own settings, compute_advantages (-> a dict) and loss."""
    config = read_flags(doc, settings, TrainConfig, out=out)  # and --data, --out, --seed, ...
    policy, ref, score, tokenizer = load_models(config)  # score(tokens, mask) -> (B,)
    prompts = read_prompts(config.data, "train", tokenizer, policy.config.context)
    optimizer, schedule = adam(policy, config)
    run = Run("ppo", config, policy, tokenizer, optimizer, schedule, data=prompts, ref=ref)
    if run.step == 0:  # not resumed
        check_start(policy, ref, score, prompts, config)  # stops if sampling and update disagree
        center_values(policy, rollout(policy, ref, score, prompts[: config.batch_size], config))

    for step in run.steps():
        batch_prompts = run.batch(prompts, config.batch_size // config.k)
        batch_prompts = [x for x in batch_prompts for _ in range(config.k)]  # k responses to each
        batch = rollout(policy, ref, score, batch_prompts, config)  # phases 1 and 2
        batch |= compute_advantages(batch, config)  # phase 3
        stats = ppo_update(policy, optimizer, batch, config, loss)  # phase 4
        stats |= batch_metrics(batch, config)
        schedule.step()
        adapt_kl_coef(config, stats["kl"])  # changes config.kl_coef, with --kl_target
        if config.ref_update_every and (step + 1) % config.ref_update_every == 0:
            ref.load_state_dict(policy.state_dict(), strict=False)  # ref has no separate critic
        run.end_step(stats, batch)  # grades by the judge, logs, saves

    run.finish()
    report(run, score, trained_on=prompts)  # on the validation prompts, unless --no_report


def adapt_kl_coef(config, kl):
    """Beta follows the KL slowly (Ziegler et al., arXiv:1909.08593)."""
    if config.kl_target:
        error = min(max(kl / config.kl_target - 1, -0.2), 0.2)
        config.kl_coef *= 1 + error * config.batch_size / 10_000


if __name__ == "__main__":
    train()
