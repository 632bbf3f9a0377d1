"""When one machine is too small: the same models, prompts and scores under TRL's GRPO trainer, in
several processes.

    torchrun --nproc_per_node 2 -m examples.outgrow    after pip install trl==1.12.0

One process for each GPU; on several machines (--nnodes of torchrun) all must see --out. The flags
and the report are those of variations/grpo.py, without --policy, --micro_batch, --resume,
--kl_target, --ref_update_every and --tensorboard.
"""

from data.files import UserError
from minippo import score_responses
from plumbing.hf import copy_trunk, export
from plumbing.models import load_models
from plumbing.report import report
from plumbing.run import Run, adam
from plumbing.settings import read_flags, script
from plumbing.text import pad_completions, read_prompts
from train_ppo import TrainConfig
from variations import grpo


@script
def main():
    config = read_flags(__doc__, grpo.Settings, TrainConfig, out="out/outgrow")
    import trl
    from accelerate import PartialState
    from datasets import Dataset

    process = PartialState(cpu=config.device == "cpu")
    config.device = str(process.device)  # each process has its own GPU
    B, M, processes = config.batch_size, config.minibatches, process.num_processes
    wrong = "policy", "micro_batch", "resume", "kl_target", "ref_update_every", "tensorboard"
    if any(getattr(config, name) for name in wrong):
        raise UserError(f"{', '.join(wrong)} do not work here: leave them out")
    if B % config.k or B % (M * processes):
        hint = f"--k {config.k} and of --minibatches x processes, {M * processes}"
        raise UserError(f"--batch_size {B}: should be a multiple of {hint}")
    policy, _, score, tokenizer = load_models(config)
    prompts = read_prompts(config.data, "train", tokenizer, policy.config.context)
    if process.is_main_process:
        run = Run("ppo", config, policy, tokenizer, *adam(policy, config), data=prompts)
        export(config.models / "sft.pt", config.out / "sft")
    process.wait_for_everyone()

    def reward(prompts, completion_ids, **_):
        rows = [(tokenizer.encode(x), ids) for x, ids in zip(prompts, completion_ids)]
        tokens, mask = pad_completions(rows, config.device)
        return score_responses(score, tokens, mask, config, tokenizer.eos)[0].tolist()

    steps = M * config.epochs  # gradient steps in an iteration
    room = policy.config.context - max(map(len, prompts))  # TRL does not see to it
    arguments = trl.GRPOConfig(
        output_dir=str(config.out),
        seed=config.seed,
        use_cpu=process.device.type == "cpu",
        bf16=False,
        save_strategy="no",
        per_device_train_batch_size=B // M // processes,
        steps_per_generation=M,
        num_iterations=config.epochs,
        max_steps=config.steps * steps,
        learning_rate=config.lr,
        warmup_steps=config.warmup * steps,
        max_grad_norm=config.max_grad_norm,
        adam_beta2=0.99,
        adam_epsilon=config.adam_eps,
        num_generations=config.k,
        temperature=config.temperature,
        max_completion_length=min(config.max_new_tokens, room),
        beta=config.kl_coef,
        epsilon=config.clip_eps,
        scale_rewards="group" if config.std else "none",
        loss_type="grpo" if config.length else "dapo",
        use_bias_correction_kl=False,
    )
    rows = Dataset.from_dict({"prompt": [tokenizer.decode(prompt) for prompt in prompts]})
    trainer = trl.GRPOTrainer(str(config.out / "sft"), reward, arguments, rows)
    trainer.train()
    if process.is_main_process:
        copy_trunk(trainer.model.transformer, policy.trunk)
        run.finish()
        report(run, score, prompts)
    process.destroy_process_group()


if __name__ == "__main__":
    main()
