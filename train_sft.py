"""Stage 1, supervised fine-tuning: a GPT learns to imitate demonstrations.

    python train_sft.py                    on the default data, which is made first if missing
    python train_sft.py --data FOLDER      on your own sft_train.jsonl and sft_val.jsonl

The files hold rows {"prompt": ..., "completion": ...}. The loss is the cross-entropy of the
completion, its end token included, given the prompt. Writes out/sft.pt.
"""

from dataclasses import dataclass

from data.rows import read_rows
from data.zoo import ensure_data
from minippo import GPTConfig, accumulate_gradient, evaluate_actions, gradient_step, masked_mean
from plumbing.models import new_model
from plumbing.run import Run, adam, limited_steps
from plumbing.settings import read_flags, script
from plumbing.text import by_length, count_tokens, encode_rows, pad_completions


@dataclass
class TrainConfig(GPTConfig):  # GPTConfig, in minippo.py: the size of the model
    steps: int = 1300  # gradient steps; fewer if the next setting allows fewer
    epochs: int = 12  # limits the steps to this many passes over the rows
    batch_size: int = 64  # rows per step
    micro_batch: int = 16  # rows in memory at once
    lr: float = 3e-3  # peak learning rate of Adam; falls linearly to 0
    warmup: int = 20  # steps in which the rate climbs to its peak; at most a tenth of all
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    init: str = ""  # start from gpt2, gpt2-medium, -large, -xl or a folder with such a model


def sft_loss(model, rows):
    """(prompt, completion) as ids -> the mean of -log pi over the completions' tokens, stats."""
    tokens, mask = pad_completions(rows, model.lm_head.weight.device)
    logprobs, _, _ = evaluate_actions(model, tokens, mask)
    loss = -masked_mean(logprobs, mask)
    return loss, {"loss": loss.item()}


@script  # a user's mistake ends it with one line, not a traceback
def train():
    config = read_flags(__doc__, TrainConfig)  # and --data, --out, --device, --seed, ...
    ensure_data(config.data)  # makes the default data, data/zoo, if it is missing
    texts = read_rows(config.data, "sft", "train")
    model, tokenizer = new_model(config, texts)  # learns a vocabulary from the texts
    rows = encode_rows(texts, tokenizer, model.config.context)  # ids, with end tokens
    val_rows = encode_rows(read_rows(config.data, "sft", "val"), tokenizer, model.config.context)
    config.steps = limited_steps(config, len(rows))  # at most config.epochs passes over the rows
    optimizer, schedule = adam(model, config)

    def loss_of(rows):
        return sft_loss(model, rows)

    # Run draws batches, validates, logs and saves. Of data it keeps a hash, for --resume
    data, validation = (rows, val_rows), (val_rows, loss_of, count_tokens)
    run = Run("sft", config, model, tokenizer, optimizer, schedule, data, validation=validation)
    for _ in run.steps():
        batch = by_length(run.batch(rows, config.batch_size))  # micro-batches need little padding
        optimizer.zero_grad()
        stats = accumulate_gradient(loss_of, batch, config.micro_batch, count_tokens)
        stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        schedule.step()
        run.end_step(stats)  # validates now and then, and keeps the best weights

    metrics = run.load_best()  # the weights with the lowest val_loss; metrics on all val_rows
    run.finish(**metrics)
    print(f"validation loss {metrics['val_loss']:.4f} nats/token")


if __name__ == "__main__":
    train()
