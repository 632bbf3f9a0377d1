"""Outgrown: the same models and prompts under TRL's GRPO trainer, in several processes.

    torchrun --nproc_per_node 2 -m variations.outgrow    after pip install trl==1.12.0

One process for each GPU; on several machines (--nnodes of torchrun) all must see --out. What TRL
makes of sft.pt and rm.pt becomes ppo.pt. Flags, prompts and report are those of variations.grpo.
"""

from importlib.util import find_spec

import train_ppo
from minippo import PPOConfig
from plumbing.hf import export, read_gpt2, read_scorer
from plumbing.settings import RunConfig, UserError, prepare, read_flags, run_script
from variations import HERE_ALONE
from variations.grpo import GRPOConfig


def train_grpo(run, config, stage, own, prompts, tokenizer, processes):
    import trl
    from datasets import Dataset

    scorer, M, B = read_scorer(run.out / "rm"), config.minibatches, config.batch_size
    each = M * config.epochs  # gradient steps in an iteration
    if B % own.k or B % (M * processes):
        raise UserError(f"--batch_size {B}: should be a multiple of {own.k} and of {M * processes}")

    def score(prompts, completions, completion_ids, **_):
        scored = zip(scorer(prompts, completions), completion_ids)
        return [x - config.missing_eos_penalty * (y[-1] != tokenizer.eos) for x, y in scored]

    arguments = trl.GRPOConfig(
        per_device_train_batch_size=B // M // processes, steps_per_generation=M,
        num_iterations=config.epochs, max_steps=config.steps * each, learning_rate=config.lr,
        warmup_steps=config.warmup * each, max_grad_norm=config.max_grad_norm, adam_beta2=0.95,
        num_generations=own.k, beta=config.kl_coef, epsilon=config.clip_eps, seed=run.seed,
        scale_rewards="none" if own.no_std else "group", use_bias_correction_kl=False,
        loss_type="dapo" if own.no_length else "grpo", disable_dropout=True, bf16=False,
        temperature=config.temperature, max_completion_length=config.max_new_tokens,
        gradient_checkpointing=False, use_cpu=run.device == "cpu", output_dir=str(run.out),
        save_strategy="no", logging_steps=each, adam_epsilon=stage.adam_eps,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [tokenizer.decode(prompt) for prompt in prompts]})
    trainer = trl.GRPOTrainer(str(run.out / "sft"), score, arguments, rows)
    trainer.train()
    trainer.save_model(run.out / "policy")
    trainer.save_state()  # the log, trainer_state.json


def main(train=train_grpo):
    if not find_spec("trl"):
        raise UserError("the package trl is missing; pip install trl==1.12.0")
    from accelerate import PartialState  # comes with it
    defaults = RunConfig(out="out/outgrow"), PPOConfig(), train_ppo.StageConfig(models="out")
    run, config, stage, own = read_flags(__doc__, *defaults, GRPOConfig(), without=HERE_ALONE)
    models, prompts, val_prompts, _ = train_ppo.load(run, config, stage)
    processes = PartialState(cpu=run.device == "cpu")
    if processes.is_main_process:
        prepare(run)
        for kind in ("sft", "rm"):
            export(f"{stage.models}/{kind}.pt", run.out / kind)
    processes.wait_for_everyone()
    train(run, config, stage, own, prompts, models.tokenizer, processes.num_processes)
    if processes.is_main_process:
        models.policy = read_gpt2(run.out / "policy")[0].to(run.device).eval()
        train_ppo.finish(models, val_prompts, prompts, run, config, stage)


if __name__ == "__main__":
    run_script(main)
