"""What the three training loops share: batches, optimizer, learning rate, sampling in pieces."""

import copy
import dataclasses
import itertools
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import minippo
from minippo import GPT
from plumbing import fast
from plumbing.settings import UserError
from plumbing.text import Tokenizer, each, pad


@dataclass
class FitConfig:
    epochs: int = 0  # passes over the training rows; 0: as many as lower the validation loss, within --max_steps
    max_steps: int = 1300  # steps at most, when --epochs does not say how many
    batch_size: int = 64  # rows per step
    micro_batch: int = 0  # rows in memory at once in a step; 0: all of them
    lr: float = 1e-3  # peak learning rate of AdamW; it falls linearly to 0
    warmup: int = 20  # steps in which the learning rate climbs to its peak
    weight_decay: float = 0.0  # AdamW's decay of the weights; norms and biases have none
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this norm


def first_model(rows, shape, init):
    """A GPT with random weights and a vocabulary learned from the rows; with `init`, a GPT-2 -> model, tokenizer."""
    if init:
        from plumbing.hf import read_gpt2

        print(f"reading the weights and the vocabulary of {init}", flush=True)
        return read_gpt2(init, shape.dropout)
    start = time.perf_counter()
    texts = (text for row in each("rows cut into words", rows) for text in row)
    tokenizer = Tokenizer.train(texts, shape.vocab_size)
    seconds = time.perf_counter() - start
    print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens in {seconds:.1f} s")
    return GPT(dataclasses.replace(shape, vocab_size=tokenizer.vocab_size)), tokenizer


def some(rows, n=1000):
    """At most n of the validation rows, spread over all: enough to see whether the loss still falls."""
    return rows[:: max(1, math.ceil(len(rows) / n))]


def batches(rows, batch_size, seed):
    """Yield lists of row numbers for ever: in each pass over the data every row once, in random order."""
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(rows)
        for batch in np.array_split(order, math.ceil(rows / batch_size)):  # sizes differ by one at most
            yield batch.tolist()


def full_batches(rows, batch_size, seed):
    """The same in lists of exactly `batch_size` numbers, which may go on from one pass into the next."""
    stream = itertools.chain.from_iterable(batches(rows, rows, seed))
    while True:
        yield list(itertools.islice(stream, batch_size))


def pair_scores(model, rows, device):
    """Rows of (prompt, chosen, rejected) as ids -> scores (B,) of the chosen and (B,) of the rejected answers."""
    tokens, lengths = pad([prompt + answer for prompt, *answers in rows for answer in answers], device)
    return model(tokens, lengths).view(-1, 2).unbind(1)


def length(config, rows):
    """-> what Progress wants to know: the steps of a run, its warm-up, and whether it may end before."""
    steps = config.epochs * math.ceil(rows / config.batch_size)
    return steps or config.max_steps, config.warmup, not steps


def adamw(model, lr, weight_decay=0.0, critic_lr=0.0, head_lr=1.0, eps=1e-8):
    """AdamW; norms and biases do not decay. Three parts can have learning rates of their own, of which `peak` is the highest:

    A separate critic, with the value head that reads it, is a network of its own, also in its gradient norm (see
    minippo.gradient_step). critic_lr 0: lr. A value head that reads the policy's trunk has head_lr times lr.
    """
    apart = bool(getattr(model, "critic", None))
    head = [*model.value_head.parameters()] if hasattr(model, "value_head") else []
    critic = [*model.critic.parameters(), *head] if apart else []
    policy = [p for p in model.parameters() if not any(p is other for other in [*critic, *head])]
    others = [("critic", critic, critic_lr or lr)] if apart else [("policy", head, head_lr * lr)]
    groups = [
        {"params": part, "network": network, "peak": peak, "weight_decay": decay}
        for network, params, peak in [("policy", policy, lr), *others]
        for part, decay in (([p for p in params if p.dim() > 1], weight_decay), ([p for p in params if p.dim() < 2], 0.0))
        if part
    ]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), eps=eps, fused=True)


def set_lr(optimizer, share):
    """Every learning rate to this share of its peak; returns the policy's."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
    return optimizer.param_groups[0]["lr"]


def rollout_in_pieces(size, again=False):
    """minippo.rollout, sampling fast, and no more than `size` responses at once; 0: all of them.

    again: compute log-probabilities and values again, as training will. In bfloat16 those of sampling differ by its rounding.
    """

    def rollout(policy, ref, score, prompts, config):
        parts = [prompts[i : i + (size or len(prompts))] for i in range(0, len(prompts), size or len(prompts))]
        batches = [minippo.rollout(policy, ref, score, part, config, fast.generate) for part in parts]
        for batch in batches if again else ():
            how = batch["mask"], config.temperature, False
            with torch.no_grad():
                batch["logprobs"], batch["values"], _ = minippo.evaluate_actions(policy, batch["tokens"], *how)
        return join(batches)

    return rollout


def join(batches):
    """Dicts of tensors (B,) or (B, T) -> one such dict with all the rows; the narrower ones are padded on the right."""

    def join_one(parts):
        width = max(x.shape[-1] for x in parts)
        return torch.cat([F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in parts])

    return {name: join_one([batch[name] for batch in batches]) for name in batches[0]}


def add_critic(policy, reward_model):
    """Give the policy, in place, a value network of its own, which starts as the reward model (as in InstructGPT)."""
    if policy.critic is not None:  # of an earlier round: it goes on
        return
    if reward_model is None:
        raise UserError("--separate_critic starts from the reward model, and with --reward there is none")
    policy.config = dataclasses.replace(policy.config, separate_critic=True)
    policy.critic = copy.deepcopy(reward_model.trunk).requires_grad_(True)
    head, std = reward_model.score_head, reward_model.std
    with torch.no_grad():  # value = normalised score = (head(hidden) - mean) / std
        policy.value_head.weight.copy_(head.weight / std)
        policy.value_head.bias.copy_((head.bias - reward_model.mean) / std)
