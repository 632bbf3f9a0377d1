"""TRL's PPO trainer, from the same models, on the same prompts, as a row of the table of
neighbours.

    python -m bench.trl_ppo --models out    after pip install trl==1.12.0 and the first two scripts

TRL calls it experimental. It has a value network apart, which starts from the reward model, as with
train_ppo.py's --separate_critic. The flags are those of variations/outgrow.py, in one process.
"""

import time

import torch
from torch import nn

from data.files import write_jsonl
from data.truth import judge_of
from minippo import generate
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import run_script
from plumbing.hf import copy_trunk
from plumbing.rows import batch_of
from plumbing.tokenizer import texts_of
from variations import outgrow


class Capped(nn.Module):
    """The head of a reward model; its scores end at the cap, as those of minippo.RewardModel."""

    def __init__(self, head, cap):
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, hidden):
        return self.head(hidden).clamp(max=self.cap)


def make_trainer(run, config, stage, prompts):
    """PPO as TRL does it, of the models that plumbing.hf has exported to run.out -> trainer,
    policy."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM as Model
    from transformers import AutoModelForSequenceClassification as Scorer
    from transformers import AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    same = ("max_grad_norm", "gamma", "lam", "kl_coef", "vf_coef", "temperature")
    arguments = PPOConfig(
        **{name: getattr(config, name) for name in (*same, "missing_eos_penalty")},
        **dict.fromkeys(("bf16", "gradient_checkpointing"), False),
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=stage.batch_size,
        local_rollout_forward_batch_size=stage.batch_size,
        num_mini_batches=config.minibatches,
        num_ppo_epochs=config.epochs,
        total_episodes=stage.steps * stage.batch_size,
        learning_rate=stage.lr,
        warmup_steps=stage.warmup,
        adam_beta2=0.99,
        adam_epsilon=stage.adam_eps,
        cliprange=config.clip_eps,
        cliprange_value=config.value_clip,
        response_length=config.max_new_tokens,
        stop_token="eos",
        num_sample_generations=0,
        logging_steps=1,
        seed=run.seed,
        use_cpu=run.device == "cpu",
        output_dir=str(run.out),
    )
    padder = AutoTokenizer.from_pretrained(run.out / "rm", padding_side="left")
    policy, ref = (Model.from_pretrained(run.out / "sft") for _ in range(2))
    reward_model, critic = (Scorer.from_pretrained(run.out / "rm") for _ in range(2))
    reward_model.score = Capped(reward_model.score, reward_model.config.score_cap)
    rows = Dataset.from_dict({"input_ids": prompts})
    models = policy, ref, reward_model, rows, critic
    return PPOTrainer(arguments, padder, *models, eval_dataset=rows), policy


def train(run, config, stage, prompts, tokenizer, score):
    """Train, and log the score, the KL, the seconds, and what the judge says after each iteration
    of as many new responses; for these the clock stands still."""
    from transformers import AutoTokenizer, TrainerCallback

    trainer, policy = make_trainer(run, config, stage, prompts)
    ours, judge, rows = (
        load_checkpoint(f"{stage.models}/sft.pt", ["sft"])[0],
        judge_of(run.data),
        [],
    )

    class AfterIteration(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.seconds, self.start = 0.0, time.perf_counter()

        def on_step_end(self, arguments, state, *_, **__):
            self.seconds += time.perf_counter() - self.start
            copy_trunk(policy.transformer, ours.trunk)
            random_state = torch.get_rng_state()
            asked = batch_of(prompts, len(rows), stage.batch_size, run.seed)
            tokens, mask, *_ = generate(ours, asked, config.max_new_tokens, config.temperature)
            torch.set_rng_state(random_state)
            grades = list(map(judge, *texts_of(tokenizer, tokens, mask)))
            row = {"step": state.global_step, "judge": sum(grades) / len(grades)}
            row |= {x: state.log_history[-1][f"objective/{x}"] for x in ("scores", "kl")}
            rows.append(row | {"score": row.pop("scores"), "seconds": self.seconds})
            self.start = time.perf_counter()

    trainer.add_callback(AfterIteration())
    trainer.train()
    trainer.save_model(run.out / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run.out / "sft")  # without the token for padding
    tokenizer.save_pretrained(run.out / "policy")
    write_jsonl(run.out / "ppo.jsonl", rows)


def main():
    outgrow.main(train, "ppo_of_trl")


if __name__ == "__main__":
    run_script(main)
