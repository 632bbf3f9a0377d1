"""Outgrown: the same models, prompts and scores under TRL's GRPO trainer, in several processes.

    torchrun --nproc_per_node 2 -m variations.outgrow    after pip install trl==1.12.0

One process for each GPU; on several machines (--nnodes of torchrun) all must see --out. The
report is that of --algorithm grpo; -h shows those of its flags that TRL has too.
"""

from importlib.util import find_spec

from data.files import UserError
from minippo import score_responses
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, read_flags
from plumbing.hf import export, read_gpt2
from plumbing.models import load_models
from plumbing.report import finish_run
from plumbing.rows import pad_completions, read_prompts
from train_ppo import StageConfig
from variations.grpo import UNREAD, Settings

# What TRL does not read, or reads by another name
NOT_IN_TRL = """algorithm ref_update_every kl_target kl_horizon policy reward dtype
    micro_batch grad_checkpoint resume tensorboard""".split()


def train_grpo(run, config, stage, prompts, tokenizer, score):
    import trl
    from accelerate import PartialState
    from datasets import Dataset

    M, B, processes = config.minibatches, stage.batch_size, PartialState().num_processes
    if B % config.k or B % (M * processes):
        raise UserError(f"--batch_size {B}: no multiple of {config.k} and {M * processes}")

    def reward(prompts, completion_ids, **_):
        rows = [(tokenizer.encode(x), ids) for x, ids in zip(prompts, completion_ids)]
        tokens, mask = pad_completions(rows, run.device)
        return score_responses(score, tokens, mask, config, tokenizer.eos)[0].tolist()

    steps = M * config.epochs  # gradient steps in an iteration
    arguments = trl.GRPOConfig(
        output_dir=str(run.out),
        seed=run.seed,
        use_cpu=run.device == "cpu",
        bf16=False,
        disable_dropout=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=steps,
        per_device_train_batch_size=B // M // processes,
        steps_per_generation=M,
        num_iterations=config.epochs,
        max_steps=stage.steps * steps,
        learning_rate=stage.lr,
        warmup_steps=stage.warmup * steps,
        max_grad_norm=config.max_grad_norm,
        adam_beta2=0.99,
        adam_epsilon=stage.adam_eps,
        num_generations=config.k,
        temperature=config.temperature,
        max_completion_length=config.max_new_tokens,
        beta=config.kl_coef,
        epsilon=config.clip_eps,
        scale_rewards="group" if config.std else "none",
        loss_type="grpo" if config.length else "dapo",
        use_bias_correction_kl=False,
    )
    rows = Dataset.from_dict({"prompt": [tokenizer.decode(prompt) for prompt in prompts]})
    trainer = trl.GRPOTrainer(str(run.out / "sft"), reward, arguments, rows)
    trainer.train()
    trainer.save_model(run.out / "policy")
    trainer.save_state()  # the log, trainer_state.json


def main(train=train_grpo, name="grpo_of_trl"):
    defaults = RunConfig(out="out/outgrow"), Settings(), StageConfig()
    run, config, stage = read_flags(__doc__, *defaults, without=(*UNREAD, *NOT_IN_TRL))
    if not find_spec("trl"):
        raise UserError("the package trl is missing; pip install trl==1.12.0")
    from accelerate import PartialState  # comes with it

    stage.algorithm, stage.models = name, stage.models or run.out.parent
    process = PartialState(cpu=run.device == "cpu")
    run.device = str(process.device)  # each process has a GPU of its own
    models = load_models(stage.models, run.device)
    tokenizer, context = models.tokenizer, models.policy.config.context
    prompts = read_prompts(run.data, "train", tokenizer, context)
    if process.is_main_process:
        for kind in ("sft", "rm"):
            export(f"{stage.models}/{kind}.pt", run.out / kind, run.overwrite)
    process.wait_for_everyone()
    train(run, config, stage, prompts, tokenizer, models.score)
    if process.is_main_process:
        models.policy = read_gpt2(run.out / "policy")[0].to(run.device).eval()
        sft = models.made_from["sft.pt"]
        save_checkpoint(run.out / "ppo.pt", "ppo", models.policy, tokenizer, sft=sft)
        val_prompts = read_prompts(run.data, "val", tokenizer, context)
        finish_run(models, prompts, val_prompts, run, config, stage)


if __name__ == "__main__":
    run_script(main)
