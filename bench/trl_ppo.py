"""TRL's PPO trainer, which TRL calls experimental, from the same models, on the same prompts.

    python -m bench.trl_ppo --models out    after pip install trl==1.12.0 and the first two scripts

Its value network starts from the reward model, as with train_ppo.py's --separate_critic. Of the
flags, which are those of PPO, those that TRL does not have are not read.
"""

import math

from minippo import PPOConfig
from plumbing.hf import copy_trunk, export
from plumbing.models import load_checkpoint, load_models
from plumbing.report import report
from plumbing.run import Run, adam
from plumbing.settings import read_flags, script
from plumbing.text import read_prompts
from train_ppo import TrainConfig


def make_trainer(config, prompts, sampled=lambda: None, cap=math.inf):
    """PPO as TRL does it, of the models that plumbing.hf has exported to config.out -> trainer,
    policy. sampled() is called in each iteration, between sampling and scoring. cap: of the
    scores."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM as Model
    from transformers import AutoModelForSequenceClassification as Scorer
    from transformers import AutoTokenizer
    from trl.experimental import ppo

    names = "max_grad_norm gamma lam kl_coef vf_coef temperature missing_eos_penalty seed"
    arguments = ppo.PPOConfig(
        **{name: getattr(config, name) for name in names.split()},
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=config.batch_size,
        local_rollout_forward_batch_size=config.batch_size,
        num_mini_batches=config.minibatches,
        num_ppo_epochs=config.epochs,
        total_episodes=config.steps * config.batch_size,
        learning_rate=config.lr,
        warmup_steps=config.warmup,
        adam_beta2=0.99,
        adam_epsilon=config.adam_eps,
        cliprange=config.clip_eps,
        cliprange_value=config.value_clip,
        response_length=config.max_new_tokens,
        stop_token="eos",
        num_sample_generations=0,
        use_cpu=config.device == "cpu",
        output_dir=str(config.out),
    )
    tokenizer = AutoTokenizer.from_pretrained(config.out / "rm", padding_side="left")
    policy, ref = (Model.from_pretrained(config.out / "sft") for _ in range(2))
    reward_model, critic = (Scorer.from_pretrained(config.out / "rm") for _ in range(2))
    reward_model.score.register_forward_hook(lambda _, inputs, scores: scores.clamp(max=cap))
    reward_model.base_model.register_forward_pre_hook(lambda *_: sampled())
    rows = Dataset.from_dict({"input_ids": prompts})
    models = policy, ref, reward_model, rows, critic
    return ppo.PPOTrainer(arguments, tokenizer, *models, eval_dataset=rows), policy


@script
def main():
    config = read_flags(__doc__, PPOConfig, TrainConfig, out="out/trl_ppo")
    policy, _, score, tokenizer = load_models(config)
    prompts = read_prompts(config.data, "train", tokenizer, policy.config.context)
    run = Run("ppo", config, policy, tokenizer, *adam(policy, config), data=prompts)
    for kind in ("sft", "rm"):
        export(f"{config.models}/{kind}.pt", config.out / kind)
    cap = load_checkpoint(config.models / "rm.pt", ["rm"])[0].cap.item()  # export() loses it
    trainer, theirs = make_trainer(config, prompts, cap=cap)
    trainer.train()
    copy_trunk(theirs.transformer, policy.trunk)
    run.finish()
    report(run, score, prompts)


if __name__ == "__main__":
    main()
