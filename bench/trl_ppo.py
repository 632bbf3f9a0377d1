"""TRL's PPO trainer, from the same models, on the same prompts, as a row of the table of
neighbours.

    python -m bench.trl_ppo --models out    after pip install trl==1.12.0 and the first two scripts

TRL calls it experimental. It has a value network apart, which starts from the reward model, as with
train_ppo.py's --separate_critic. The flags are those of variations/outgrow.py, in one process.
"""

import json

from torch import nn

from plumbing.errors import run_script
from variations import outgrow


def after_iteration(policy):
    """bench.results puts a function here that keeps the policy."""


class Capped(nn.Module):
    """The head of a reward model; its scores end at the cap, as those of minippo.RewardModel."""

    def __init__(self, head, cap):
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, hidden):
        return self.head(hidden).clamp(max=self.cap)


def train(run, config, stage, flags, prompts, tokenizer, processes):
    """PPO as TRL does it; flags and processes are for TRL's GRPO."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    arguments = PPOConfig(
        per_device_train_batch_size=stage.batch_size,
        num_mini_batches=config.minibatches,
        num_ppo_epochs=config.epochs,
        total_episodes=stage.steps * stage.batch_size,
        learning_rate=stage.lr,
        warmup_steps=stage.warmup,
        max_grad_norm=config.max_grad_norm,
        adam_beta2=0.95,
        adam_epsilon=stage.adam_eps,
        seed=run.seed,
        gamma=config.gamma,
        lam=config.lam,
        kl_coef=config.kl_coef,
        cliprange=config.clip_eps,
        cliprange_value=config.value_clip,
        vf_coef=config.vf_coef,
        temperature=config.temperature,
        response_length=config.max_new_tokens,
        stop_token="eos",
        missing_eos_penalty=config.missing_eos_penalty,
        local_rollout_forward_batch_size=stage.batch_size,
        num_sample_generations=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=run.device == "cpu",
        output_dir=str(run.out),
    )
    padder = AutoTokenizer.from_pretrained(run.out / "rm", padding_side="left")
    policy, ref = (AutoModelForCausalLM.from_pretrained(run.out / "sft") for _ in range(2))
    reward_model, critic = (
        AutoModelForSequenceClassification.from_pretrained(run.out / "rm") for _ in range(2)
    )
    reward_model.score = Capped(reward_model.score, reward_model.config.score_cap)
    rows = Dataset.from_dict({"input_ids": prompts})
    models = policy, ref, reward_model, rows, critic
    trainer = PPOTrainer(arguments, padder, *models, eval_dataset=rows)

    class AfterIteration(TrainerCallback):
        def on_step_end(self, *_, **__):
            after_iteration(policy)

    trainer.add_callback(AfterIteration())
    trainer.train()
    trainer.save_model(run.out / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run.out / "sft")  # without the token for padding
    tokenizer.save_pretrained(run.out / "policy")
    with open(run.out / "ppo.jsonl", "w") as file:
        for row in trainer.state.log_history:
            numbers = {
                "score": row["objective/scores"],
                "kl": row["objective/kl"],
                "seconds": row["episode"] / row["eps"],
            }
            print(json.dumps(numbers), file=file)


def main():
    outgrow.main(train, "TRL's PPO")


if __name__ == "__main__":
    run_script(main)
