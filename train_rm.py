"""Stage 2: the reward model learns which of two answers people prefer.

    python train_rm.py                     after train_sft.py, on the same data
    python train_rm.py --data FOLDER       on your own pref_train.jsonl and pref_val.jsonl

The files hold rows {"prompt": ..., "chosen": ..., "rejected": ...}. The loss is -log sigmoid(score
of the chosen answer - score of the rejected one). Writes out/rm.pt, after setting the scale of the
scores: on answers of the SFT model they have mean 0 and standard deviation 1.
"""

from dataclasses import dataclass

from minippo import RewardModel, accumulate_gradient, gradient_step, reward_model_loss
from plumbing.models import load_sft, set_score_scale
from plumbing.run import Run, adam, limited_steps
from plumbing.settings import read_flags, script
from plumbing.text import pad, read_ids, read_prompts, similar_batches


@dataclass
class TrainConfig:
    steps: int = 1950  # gradient steps; fewer if the next setting allows fewer
    epochs: int = 2  # limits the steps to this many passes over the pairs
    batch_size: int = 64  # pairs per step
    micro_batch: int = 16  # pairs in memory at once
    lr: float = 1e-3  # peak learning rate of Adam; falls linearly to 0
    warmup: int = 20  # steps in which the rate climbs to its peak; at most a tenth of all
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    max_new_tokens: int = 48  # longest answer sampled to set the scale of the scores; as in PPO
    models: str = ""  # folder of sft.pt; if empty, --out or the folder above it


def pair_scores(model, pairs):
    """(prompt, chosen, rejected) as ids -> scores (B,) of the chosen and the rejected answers."""
    rows = [x + y for x, chosen, rejected in pairs for y in (chosen, rejected)]
    tokens, lengths = pad(rows, model.score_head.weight.device)  # (2B, T), (2B,)
    scores = model(tokens, lengths).view(-1, 2)  # (2B,) -> (B, 2)
    return scores[:, 0], scores[:, 1]


@script
def train():
    config = read_flags(__doc__, TrainConfig)  # and --data, --out, --device, --seed, ...
    sft, tokenizer = load_sft(config)
    pairs = read_ids(config.data, "pref", "train", tokenizer, sft.config.context)
    val_pairs = read_ids(config.data, "pref", "val", tokenizer, sft.config.context)
    prompts = read_prompts(config.data, "train", tokenizer, sft.config.context)  # for the scale
    model = RewardModel(sft).to(config.device)
    config.steps = limited_steps(config, len(pairs))  # at most config.epochs passes over the pairs
    batches = similar_batches(pairs, config.batch_size, config.seed)  # of similar length
    optimizer, schedule = adam(model, config)

    def loss_of(pairs):
        return reward_model_loss(*pair_scores(model, pairs))

    data, validation = (pairs, val_pairs, prompts), (val_pairs, loss_of, len)
    run = Run("rm", config, model, tokenizer, optimizer, schedule, data, validation=validation)
    for _ in run.steps():
        batch = run.batch(batches, 1)[0]
        optimizer.zero_grad()
        stats = accumulate_gradient(loss_of, batch, config.micro_batch, len)
        stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
        schedule.step()
        run.end_step(stats)  # validates now and then, and keeps the best weights

    metrics = run.load_best()  # the weights with the lowest val_loss; metrics on all val_pairs
    set_score_scale(model, sft, prompts, config)  # sets mean, std and cap by scores of SFT answers
    run.finish(**metrics)
    accuracy = metrics["val_accuracy"]
    standard_error = (accuracy * (1 - accuracy) / len(val_pairs)) ** 0.5
    print(f"{100 * accuracy:.1f} % ± {100 * standard_error:.1f} of the validation pairs right")


if __name__ == "__main__":
    train()
