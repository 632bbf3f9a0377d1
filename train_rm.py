"""Stage 2, the reward model: from pairs of answers it learns which one people prefer.

    python train_rm.py                     after train_sft.py, on the same data
    python train_rm.py --data FOLDER       on pref_train.jsonl and pref_val.jsonl: {"prompt", "chosen", "rejected"}

It starts from the SFT model with a score head in place of the vocabulary, and minimises the Bradley-Terry loss. Its
scores are then shifted and scaled to mean 0 and standard deviation 1 on the SFT model's own answers. Writes out/rm.pt.
"""

import torch

from minippo import PPOConfig, RewardModel, by_length, generate, last_action, load_checkpoint, reward_model_loss
from minippo import save_checkpoint
from plumbing import RunConfig, encode_rows, prepare, read_flags, read_rows, run_script
from train_sft import FitConfig, fit


def score_pairs(model, rows, device):
    """Rows of (prompt, chosen, rejected) as ids -> raw scores (B,) of the chosen and (B,) of the rejected."""
    sequences = [prompt + answer for prompt, *answers in rows for answer in answers]
    scores = by_length(lambda _, tokens, lengths: model.raw_scores(tokens, lengths), sequences, 64, device, together=2)
    return scores.view(-1, 2).unbind(1)


def main():
    run, config = read_flags(__doc__, RunConfig(), FitConfig(epochs=2))
    prepare(run)
    sft, tokenizer, sft_facts = load_checkpoint(run.out / "sft.pt", ["sft"], run.device)
    train = encode_rows(read_rows(run.data, "pref", "train"), tokenizer, sft.config.context)
    val = encode_rows(read_rows(run.data, "pref", "val"), tokenizer, sft.config.context)
    prompts = encode_rows(read_rows(run.data, "prompts", "train"), tokenizer, sft.config.context)

    # The SFT model's answers set the scale of the scores.
    answers, stride = [], max(1, len(prompts) // 2048)
    for i in range(0, 2048, 256):
        rows = [prompts[j * stride % len(prompts)][0] for j in range(i, i + 256)]
        tokens, mask, *_ = generate(sft, rows, PPOConfig.max_new_tokens)
        answers.append((tokens, last_action(mask) + 2))

    model = RewardModel(sft).to(run.device).train()
    print(f"training a reward model on {run.device}: {config.epochs} x {len(train):,} pairs")

    def loss_of(numbers):
        chosen, rejected = score_pairs(model, [train[i] for i in numbers], run.device)
        loss, stats = reward_model_loss(chosen, rejected)
        return loss, sum(2 * len(p) + len(c) + len(r) for p, c, r in (train[i] for i in numbers)), stats

    def validate():
        chosen, rejected = score_pairs(model, val, run.device)
        loss, stats = reward_model_loss(chosen, rejected)
        error = (stats["accuracy"] * (1 - stats["accuracy"]) / len(val)) ** 0.5
        return {"val_loss": loss.item(), "val_accuracy": stats["accuracy"], "val_accuracy_se": error}

    def save(facts):
        raw = torch.cat([model.raw_scores(tokens, ends) for tokens, ends in answers])
        model.mean.copy_(raw.mean())
        model.std.copy_(raw.std().clamp(min=1e-6))
        save_checkpoint(run.out / "rm.pt", "rm", model, tokenizer, **facts)

    best = fit("rm", run, config, model, len(train), loss_of, len, validate, save, {"sft": sft_facts})
    accuracy, error = 100 * best["val_accuracy"], 100 * best["val_accuracy_se"]
    print(f"saved {run.out / 'rm.pt'}: it gets {accuracy:.1f} % ± {error:.1f} of the validation pairs right")


if __name__ == "__main__":
    run_script(main)
