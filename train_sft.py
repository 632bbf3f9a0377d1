"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, made first if it is not there yet
    python train_sft.py --data FOLDER      on sft_train.jsonl and sft_val.jsonl of your own

The files hold rows {"prompt": ..., "completion": ...}. The loss is the cross-entropy of the
completion, its end token included, given the prompt. Writes out/sft.pt.
"""

from dataclasses import dataclass

from minippo import GPTConfig, evaluate_actions, gradient_step, masked_mean
from plumbing.checkpoints import load_weights, save_checkpoint
from plumbing.errors import run_script
from plumbing.rows import count_tokens, encode_rows, pad_completions, read_ids, read_rows
from plumbing.settings import RunConfig, prepare, read_flags
from plumbing.state import Schedule, State, settings_of
from plumbing.training import (
    FitConfig,
    adamw,
    batch_of,
    first_model,
    loss_in_pieces,
    set_lr,
    spread_over,
    validate,
    warn_of_long_answers,
)


@dataclass
class InitConfig:
    init: str = ""  # gpt2, gpt2-medium, -large, -xl or a folder: its weights, vocabulary and size


def sft_loss(model, rows, device):
    """(prompt, completion) as ids -> the mean of -log pi over the completions' tokens, stats."""
    tokens, mask = pad_completions(rows, device)
    logprobs, _, _ = evaluate_actions(model, tokens, mask, with_entropy=False)
    loss = -masked_mean(logprobs, mask)
    return loss, {"loss": loss.item(), "count": int(mask.sum())}


def main():
    defaults = RunConfig(), GPTConfig(), FitConfig(lr=3e-3), InitConfig()
    run, shape, config, start = read_flags(__doc__, *defaults, without=["separate_critic"])
    prepare(run)
    make_default_data(run)

    # Data, model, optimizer, and how the learning rate climbs and falls
    texts = read_rows(run.data, "sft", "train")
    model, tokenizer = first_model(texts, shape, start.init)
    model = model.to(run.device).train()
    rows = encode_rows(texts, tokenizer, model.config.context)
    warn_of_long_answers(texts, tokenizer)
    val_rows = read_ids(run.data, "sft", "val", tokenizer, model.config.context)
    optimizer = adamw(model, config.lr, config.weight_decay)
    one_pass = len(rows) / config.batch_size
    schedule = Schedule(
        config.steps(len(rows)), config.warmup, automatic=not config.epochs, one_pass=one_pass
    )
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"training a GPT of {size:.2f} M parameters on {run.device}: {len(rows):,} rows")

    # What a run that was stopped needs to go on: the same settings and data, and where it was
    data = rows, val_rows, tokenizer.tokens
    settings = settings_of(run, config, model.config, data=data)
    state = State("sft", run, settings, model=model, optimizer=optimizer, schedule=schedule)
    # With --micro_batch, loss_of() calls backward() on each piece and frees it. What it returns
    # then is a leaf, and the backward() below reaches no weight.
    loss_of = loss_in_pieces(sft_loss, config.micro_batch)
    best = run.out / "sft_best.pt"

    # The loop
    for step in state.steps_left(schedule):
        lr = set_lr(optimizer, schedule.share(step))
        batch = batch_of(rows, step, config.batch_size, run.seed)
        optimizer.zero_grad()
        loss, metrics = loss_of(model, batch, run.device)
        loss.backward()
        grad_norm = gradient_step(optimizer, config.max_grad_norm)
        metrics |= {"grad_norm": grad_norm, "lr": lr}
        if schedule.check_due(step):
            metrics |= validate(model, spread_over(val_rows, 1000), run.device, config.micro_batch)
            if schedule.is_best(step, metrics["val_loss"]):
                save_checkpoint(best, "sft", model, tokenizer)
        state.end_step(metrics, count_tokens(batch), show=["loss", "val_loss"])

    # The best weights, measured on all validation rows and saved
    load_weights(best, "sft", model)
    facts = validate(model, val_rows, run.device, config.micro_batch)
    save_checkpoint(run.out / "sft.pt", "sft", model, tokenizer, **facts)
    state.finish()
    best.unlink()
    print(schedule.ending())
    error = "" if facts["val_loss_se"] is None else f" ± {facts['val_loss_se']:.4f}"
    print(f"saved {run.out / 'sft.pt'}: validation loss {facts['val_loss']:.4f}{error} nats/token")


def make_default_data(run):
    if run.data == RunConfig().data and not run.data.exists():
        from data.zoo import write_data

        print(f"{run.data} is not there yet: making the default data")
        try:
            write_data(run.data, seed=0)
        except OSError:
            if not run.data.exists():  # if it does, another run has made it meanwhile
                raise


if __name__ == "__main__":
    run_script(main)
