"""When one machine is too small: the same models, prompts and scores under TRL's GRPO trainer, in
several processes.

    torchrun --nproc_per_node 2 -m examples.outgrow    after pip install trl==1.12.0

One process for each GPU; on several machines (--nnodes of torchrun) all must see --out. The report
is that of variations/grpo.py; -h shows those of its flags that TRL has too.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from data.files import UserError
from minippo import score_responses
from plumbing.hf import export, read_gpt2
from plumbing.models import load_models
from plumbing.report import report
from plumbing.run import Run, adamw
from plumbing.settings import read_flags, script
from plumbing.text import pad_completions, read_prompts


@dataclass
class Settings:
    steps: int = 450  # iterations
    batch_size: int = 128  # responses per iteration
    k: int = 4  # responses to each prompt
    minibatches: int = 4  # gradient steps per pass
    epochs: int = 1  # passes over each batch of responses
    lr: float = 8e-4  # peak learning rate of AdamW; it falls linearly to 0
    warmup: int = 5  # iterations in which the learning rate climbs to its peak
    adam_eps: float = 1e-4  # Adam's epsilon
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    max_new_tokens: int = 48  # longest response, in tokens
    temperature: float = 1.0  # divides the logits, in sampling and in every log pi
    length_penalty: float = 0.0  # subtracted from the score for each token of a response
    missing_eos_penalty: float = 1.0  # subtracted if a response was cut off
    kl_coef: float = 0.1  # beta, the penalty per nat of KL to the reference
    clip_eps: float = 0.2  # no gain from a ratio further from 1 than this
    std: bool = True  # divide by the standard deviation of the group
    length: bool = True  # tokens of long responses count less
    models: str = ""  # folder of sft.pt and rm.pt; if empty, --out, or the folder above
    no_report: bool = False  # end without measuring the result on the validation prompts


def train_grpo(config, prompts, tokenizer, score):
    import trl
    from accelerate import PartialState
    from datasets import Dataset

    M, B, processes = config.minibatches, config.batch_size, PartialState().num_processes
    if B % config.k or B % (M * processes):
        raise UserError(f"--batch_size {B}: no multiple of {config.k} and {M * processes}")

    def reward(prompts, completion_ids, **_):
        rows = [(tokenizer.encode(x), ids) for x, ids in zip(prompts, completion_ids)]
        tokens, mask = pad_completions(rows, config.device)
        return score_responses(score, tokens, mask, config, tokenizer.eos)[0].tolist()

    steps = M * config.epochs  # gradient steps in an iteration
    arguments = trl.GRPOConfig(
        output_dir=str(config.out),
        seed=config.seed,
        use_cpu=config.device == "cpu",
        bf16=False,
        disable_dropout=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=steps,
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
        max_completion_length=config.max_new_tokens,
        beta=config.kl_coef,
        epsilon=config.clip_eps,
        scale_rewards="group" if config.std else "none",
        loss_type="grpo" if config.length else "dapo",
        use_bias_correction_kl=False,
    )
    rows = Dataset.from_dict({"prompt": [tokenizer.decode(prompt) for prompt in prompts]})
    trainer = trl.GRPOTrainer(str(config.out / "sft"), reward, arguments, rows)
    trainer.train()
    trainer.save_model(config.out / "policy")
    trainer.save_state()  # the log, trainer_state.json


@script
def main():
    config = read_flags(__doc__, Settings, out="out/outgrow")
    if not find_spec("trl"):
        raise UserError("the package trl is missing; pip install trl==1.12.0")
    from accelerate import PartialState  # comes with it

    process = PartialState(cpu=config.device == "cpu")
    config.device = str(process.device)  # each process has a GPU of its own
    config.policy, config.reward, config.micro_batch = "", "", 0  # TRL has no such settings
    policy, _, score, tokenizer = load_models(config)
    prompts = read_prompts(config.data, "train", tokenizer, policy.config.context)
    if process.is_main_process:
        run = Run("ppo", config, policy, tokenizer, *adamw(policy, config), data=prompts)
        export(config.models / "sft.pt", config.out / "sft", config.overwrite)
    process.wait_for_everyone()
    train_grpo(config, prompts, tokenizer, score)
    if process.is_main_process:
        policy.load_state_dict(read_gpt2(config.out / "policy")[0].state_dict())
        run.finish()
        report(run, score, prompts)


if __name__ == "__main__":
    main()
