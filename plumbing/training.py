"""What the three training loops share: optimizer, learning rate, batches, and work in pieces."""

import copy
import dataclasses
import functools
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import minippo
from minippo import GPT, evaluate_actions
from plumbing import fast
from plumbing.errors import UserError
from plumbing.rows import by_length, length_of_most, pad_completions
from plumbing.tokenizer import Tokenizer


@dataclass
class FitConfig:
    epochs: int = 0  # passes over the rows; 0: until validation stops falling [0, inf]
    max_steps: int = 1300  # steps at most, when --epochs does not say how many [1, inf]
    batch_size: int = 64  # rows per step [1, inf]
    micro_batch: int = 0  # rows in memory at once in a step; 0: all of them [0, inf]
    lr: float = 1e-3  # peak learning rate of AdamW; it falls linearly to 0 [0, inf]
    warmup: int = 20  # steps in which the learning rate climbs to its peak [0, inf]
    weight_decay: float = 0.0  # AdamW's decay of the weights; norms and biases have none [0, inf]
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this norm [1e-6, inf]

    def steps(self, rows):
        """How many steps there are at most."""
        return math.ceil(self.epochs * rows / self.batch_size) or self.max_steps


def first_model(rows, shape, init):
    """A GPT with random weights and a vocabulary learned from the rows; with `init`, a GPT-2
    -> model, tokenizer."""
    if init:
        from plumbing.hf import read_gpt2

        print(f"reading the weights and the vocabulary of {init}", flush=True)
        return read_gpt2(init, shape.dropout)
    start = time.perf_counter()
    tokenizer = Tokenizer.train((text for row in rows for text in row), shape.vocab_size)
    seconds = time.perf_counter() - start
    print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens in {seconds:.1f} s")
    return GPT(dataclasses.replace(shape, vocab_size=tokenizer.vocab_size)), tokenizer


def warn_of_long_answers(texts, tokenizer):
    """Say if PPO, by default, writes no responses as long as those of (prompt, completion)."""
    texts = spread_over(texts, 1000)
    suits = length_of_most([len(tokenizer.encode(completion)) + 1 for _, completion in texts])
    most = minippo.PPOConfig.max_new_tokens
    if suits > most:
        hint = f"train_rm.py and train_ppo.py --max_new_tokens {suits} would hold 95 %"
        print(f"warning: more than 5 % of the completions exceed {most} tokens; {hint}")


def add_critic(policy, reward_model):
    """Give the policy, in place, a value network of its own, which starts as the reward model (as
    in InstructGPT)."""
    if policy.critic is not None:  # of an earlier round: it goes on
        return
    if reward_model is None:
        missing = "with --reward there is none"
        raise UserError(f"--separate_critic starts from the reward model, and {missing}")
    policy.config = dataclasses.replace(policy.config, separate_critic=True)
    policy.critic = copy.deepcopy(reward_model.trunk).requires_grad_(True)
    head, std = reward_model.score_head, reward_model.std
    with torch.no_grad():  # value = normalised score = (head(hidden) - mean) / std
        policy.value_head.weight.copy_(head.weight / std)
        policy.value_head.bias.copy_((head.bias - reward_model.mean) / std)


# Batches


@functools.lru_cache(maxsize=2)
def shuffled(rows, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(rows)


def batch_of(rows, step, batch_size, seed):
    """The batch of step 0, 1, 2, ...: in each pass over the rows every row comes once, in random
    order; a batch may go on from one pass into the next."""
    count = len(rows)
    places = range(step * batch_size, (step + 1) * batch_size)
    return [rows[shuffled(count, seed, place // count)[place % count]] for place in places]


def spread_over(rows, n):
    """At most n of the rows, spread over all."""
    return rows[:: max(1, math.ceil(len(rows) / n))]


def reward_model_warnings(facts):
    """What its validation says against a reward model, in sentences."""
    accuracy, pairs = facts.get("val_accuracy", 1.0), facts.get("val_pairs", math.inf)
    if facts.get("val_loss", 0.0) >= math.log(2):
        yield "warning: at no step was the reward model better than guessing (loss 0.693)"
    if accuracy <= 0.5 + 1 / math.sqrt(pairs):  # by chance a half is right, ± 0.5 / sqrt(pairs)
        right = f"{100 * accuracy:.1f} % of {pairs:,} validation pairs right"
        yield f"warning: {right} is not clearly better than chance; the reward may be noise"


@torch.no_grad()
def validate(model, rows, device, micro_batch):
    """The loss of SFT, a mean over all tokens of the completions, and its standard error."""
    model.eval()
    nats, counts = [], []
    for part in by_length(rows, micro_batch or 64):
        tokens, mask = pad_completions(part, device)
        logprobs, _, _ = evaluate_actions(model, tokens, mask, with_entropy=False)
        nats.append(-logprobs.sum(1))
        counts.append(mask.sum(1))
    model.train()
    nats, counts = torch.cat(nats), torch.cat(counts)
    loss = nats.sum() / counts.sum()
    error = None
    if len(nats) > 1:  # the loss is a ratio of two sums over rows
        error = ((nats - loss * counts).std() * len(nats) ** 0.5 / counts.sum()).item()
    return {"val_loss": loss.item(), "val_loss_se": error, "val_tokens": int(counts.sum())}


# Optimizer and learning rate


def adamw(model, lr, weight_decay=0.0, critic_lr=0.0, head_lr=1.0, eps=1e-8):
    """AdamW; norms and biases do not decay. Each group of parameters knows its `peak`, its highest
    learning rate: that of a value head on the policy's trunk is head_lr times lr; that of a
    separate critic, with the head that reads it, critic_lr (0: lr)."""
    critic = bool(getattr(model, "critic", None))
    groups = {}
    for name, parameter in model.named_parameters():
        peak, part = lr, name.split(".")[0]
        if part == "critic" or (part == "value_head" and critic):
            peak = critic_lr or lr
        elif part == "value_head":
            peak = head_lr * lr
        decay = weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((part, peak, decay), []).append(parameter)
    groups = [
        {"params": parameters, "peak": peak, "weight_decay": decay}
        for (_, peak, decay), parameters in groups.items()
    ]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), eps=eps, fused=True)


def set_lr(optimizer, share):
    """Every learning rate to this share of its peak -> that of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    return optimizer.param_groups[0]["lr"]


# Pieces, where memory is short


def split_batch(batch, size):
    """A list of rows, or a dict of tensors with B rows each -> such batches of at most `size`."""
    if isinstance(batch, dict):
        parts = [x.split(size) for x in batch.values()]
        return [dict(zip(batch, piece)) for piece in zip(*parts)]
    return [batch[i : i + size] for i in range(0, len(batch), size)]


def loss_in_pieces(loss_of, size):
    """The same loss with no more than `size` rows in memory at once; 0: all.

    loss_of(model, batch, ...) -> a mean over stats["count"] things, stats. So the mean over the
    whole batch is that of its pieces, weighted by their counts. Each piece goes backward at once,
    which frees its memory; the backward() of the caller finds nothing left to do.
    """
    if not size:
        return loss_of

    def in_pieces(model, batch, *more):
        stats = []
        for piece in split_batch(batch, size):
            loss, piece_stats = loss_of(model, piece, *more)
            (loss * piece_stats["count"]).backward()
            stats.append(piece_stats)
        count = max(1, sum(s["count"] for s in stats))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        whole = {name: sum(s[name] * s["count"] for s in stats) / count for name in stats[0]}
        whole |= {name: max(s[name] for s in stats) for name in whole if name == "ratio_max"}
        whole["count"] = count
        return torch.tensor(whole["loss"], requires_grad=True), whole

    return in_pieces


def rollout_in_pieces(size, recompute_logprobs=False, generate=None):
    """minippo.rollout, sampling fast, and no more than `size` responses at once; 0: all of them.

    recompute_logprobs: compute log-probabilities and values once more, as training will. In bfloat16
    those of sampling differ by its rounding.
    """

    def rollout(policy, ref, score, prompts, config):
        pieces = split_batch(prompts, size or len(prompts))
        sample = generate or fast.generate
        batches = [minippo.rollout(policy, ref, score, p, config, sample) for p in pieces]
        for batch in batches if recompute_logprobs else ():
            with torch.no_grad():
                batch["old_logprobs"], batch["old_values"], _ = minippo.evaluate_actions(
                    policy, batch["tokens"], batch["mask"], config.temperature, with_entropy=False
                )
        return join_batches(batches)

    return rollout


def join_batches(batches):
    """Dicts of tensors (B,) or (B, T) -> one such dict with all the rows; the narrower ones are
    padded on the right."""

    def join(tensors):
        width = max(x.shape[-1] for x in tensors)
        return torch.cat(
            [F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in tensors]
        )

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}
