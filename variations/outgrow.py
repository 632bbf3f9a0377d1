"""Outgrown: the same models and prompts under TRL's GRPO trainer, in several processes.

    torchrun --nproc_per_node 2 -m variations.outgrow    after pip install trl==1.12.0

One process for each GPU; on several machines (--nnodes of torchrun) all must see --out. What TRL
makes of sft.pt and rm.pt becomes ppo.pt. Flags, prompts and report are those of variations.grpo.
"""

from importlib.util import find_spec

from minippo import PPOConfig
from plumbing.checkpoints import save_checkpoint
from plumbing.errors import UserError, run_script
from plumbing.hf import export, read_gpt2, read_scorer
from plumbing.models import load_models
from plumbing.report import make_report, print_report
from plumbing.rows import read_prompts
from plumbing.settings import RunConfig, prepare, read_flags
from train_ppo import StageConfig
from variations import refuse_flags, take_flags
from variations.grpo import UNREAD, GRPOConfig

# What TRL does not read, or reads by another name
NOT_IN_TRL = """ref_update_every policy reference reward length_penalty dtype micro_batch
    grad_checkpoint resume save_every tensorboard""".split()


def train_grpo(run, config, stage, flags, prompts, tokenizer, processes):
    import trl
    from datasets import Dataset

    scorer = read_scorer(run.out / "rm", run.device)
    M, B = config.minibatches, stage.batch_size
    steps = M * config.epochs  # gradient steps in an iteration
    if B % flags.k or B % (M * processes):
        multiple = f"should be a multiple of {flags.k} and of {M * processes}"
        raise UserError(f"--batch_size {B}: {multiple}")

    def score(prompts, completions, completion_ids, **_):
        scored = zip(scorer(prompts, completions), completion_ids)
        return [x - config.missing_eos_penalty * (y[-1] != tokenizer.eos) for x, y in scored]

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
        adam_beta2=0.95,
        adam_epsilon=stage.adam_eps,
        num_generations=flags.k,
        temperature=config.temperature,
        max_completion_length=config.max_new_tokens,
        beta=config.kl_coef,
        epsilon=config.clip_eps,
        scale_rewards="none" if flags.no_std else "group",
        loss_type="dapo" if flags.no_length else "grpo",
        use_bias_correction_kl=False,
    )
    rows = Dataset.from_dict({"prompt": [tokenizer.decode(prompt) for prompt in prompts]})
    trainer = trl.GRPOTrainer(str(run.out / "sft"), score, arguments, rows)
    trainer.train()
    trainer.save_model(run.out / "policy")
    trainer.save_state()  # the log, trainer_state.json


def main(train=train_grpo, name="TRL's GRPO"):
    if not find_spec("trl"):
        raise UserError("the package trl is missing; pip install trl==1.12.0")
    from accelerate import PartialState  # comes with it

    flags = take_flags(__doc__, GRPOConfig())
    refuse_flags(*UNREAD, *NOT_IN_TRL)
    defaults = RunConfig(out="out/outgrow"), PPOConfig(), StageConfig(models="out")
    run, config, stage = read_flags(__doc__, *defaults)
    processes = PartialState(cpu=run.device == "cpu")
    run.device = str(processes.device)  # each process has a GPU of its own
    models = load_models(stage.models, run.device)
    context = models.policy.config.context
    prompts = read_prompts(run.data, "train", models.tokenizer, context)
    if processes.is_main_process:
        prepare(run)
        if (run.out / "ppo.pt").exists() and not run.overwrite:
            raise UserError(f"{run.out}/ppo.pt: is there; give another --out, or --overwrite")
        for kind in ("sft", "rm"):
            export(f"{stage.models}/{kind}.pt", run.out / kind, run.overwrite)
    processes.wait_for_everyone()
    train(run, config, stage, flags, prompts, models.tokenizer, processes.num_processes)
    if processes.is_main_process:
        models.policy = read_gpt2(run.out / "policy")[0].to(run.device).eval()
        save_checkpoint(run.out / "ppo.pt", "ppo", models.policy, models.tokenizer)
        if not stage.no_report:
            val_prompts = read_prompts(run.data, "val", models.tokenizer, context)
            report = make_report(models, prompts, val_prompts, run, config, stage, name)
            print_report(report)


if __name__ == "__main__":
    run_script(main)
