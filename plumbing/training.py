"""What the training loops share: optimizer, learning rate, pieces of a batch, and, for stages 1 and
2, validation and the best weights."""

import dataclasses
import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import minippo
from data.files import UserError
from minippo import GPT, GPTConfig, evaluate_actions
from plumbing.checkpoints import load_weights, save_checkpoint
from plumbing.rows import count_tokens, in_parts, pad_completions, spread_over
from plumbing.tokenizer import Tokenizer

VALIDATIONS, VALIDATED = 10, 1000  # so often in a run, on so many rows


@dataclass
class FitConfig:
    steps: int = 1300  # steps at most [1, inf]
    epochs: int = 12  # passes over the rows at most [1, inf]
    batch_size: int = 64  # rows per step [1, inf]
    micro_batch: int = 0  # rows in memory at once in a step; 0: all of them [0, inf]
    lr: float = 1e-3  # peak learning rate of AdamW; it falls linearly to 0 [0, inf]
    warmup: int = 20  # steps in which the learning rate climbs to its peak [0, inf]
    weight_decay: float = 0.0  # AdamW's decay of the weights; norms and biases have none [0, inf]
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this norm [1e-6, inf]

    def for_rows(self, count):
        """The same, with the number of steps that there will be."""
        steps = min(self.steps, math.ceil(self.epochs * count / self.batch_size))
        return dataclasses.replace(self, steps=steps)


def first_model(rows, shape, init):
    """A GPT with random weights and a vocabulary learned from the rows; with `init`, a GPT-2
    -> model, tokenizer."""
    if init:
        from plumbing.hf import read_gpt2

        if shape != GPTConfig(dropout=shape.dropout):
            raise UserError("--init brings its own size and vocabulary: leave out flags for them")
        print(f"reading the weights and the vocabulary of {init}", flush=True)
        return read_gpt2(init, shape.dropout)
    start = time.perf_counter()
    tokenizer = Tokenizer.train((text for row in rows for text in row), shape.vocab_size)
    seconds = time.perf_counter() - start
    print(f"learned a vocabulary of {tokenizer.vocab_size:,} tokens in {seconds:.1f} s")
    return GPT(dataclasses.replace(shape, vocab_size=tokenizer.vocab_size)), tokenizer


def warn_of_long_answers(rows):
    """Say if PPO, by default, writes no responses as long as those of (prompt, completion)."""
    lengths = sorted(len(completion) for _, completion in rows)
    suits, most = lengths[math.ceil(0.95 * len(rows)) - 1], minippo.PPOConfig.max_new_tokens
    if suits > most:
        hint = f"train_rm.py and train_ppo.py --max_new_tokens {suits} would hold 95 %"
        print(f"warning: more than 5 % of the completions exceed {most} tokens; {hint}")


# Optimizer and learning rate


def adamw(model, lr, weight_decay=0.0, head_lr_factor=1.0, eps=1e-8):
    """AdamW; norms and biases do not decay. Each group of parameters knows its `peak`, its highest
    learning rate: that of a value head on the policy's trunk is head_lr_factor times lr."""
    shared_trunk = getattr(model, "critic", None) is None
    groups = {}
    for name, parameter in model.named_parameters():
        head = name.startswith("value_head") and shared_trunk
        decay = weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((head_lr_factor * lr if head else lr, decay), []).append(parameter)
    groups = [
        {"params": parameters, "peak": peak, "weight_decay": decay}
        for (peak, decay), parameters in groups.items()
    ]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.99), eps=eps, fused=True)


def set_lr(optimizer, step, config):
    """Every learning rate in step 0, 1, 2, ..., a share of its peak: a linear climb in config.warmup
    steps, then a straight fall to 0 at config.steps. -> that of the first group"""
    climb = (step + 1) / (config.warmup + 1)
    fall = (config.steps - step) / max(1, config.steps - config.warmup)
    for group in optimizer.param_groups:
        group["lr"] = min(climb, fall) * group["peak"]
    return optimizer.param_groups[0]["lr"]


def adapt_kl_coef(kl_coef, kl, stage):
    """Raise beta when the KL (nats per response) is above its target, else lower it, by about a
    fifth at most in stage.kl_horizon responses."""
    error = min(max(kl / stage.kl_target - 1, -0.2), 0.2)  # Ziegler et al., section 2.2
    return kl_coef * (1 + error * min(1, stage.batch_size / stage.kl_horizon))


# Pieces, where memory is short


def backward(loss_function, model, rows, micro_batch, terms):
    """The gradient of the mean loss of the rows, at most `micro_batch` of them (0: all) in memory at
    once -> stats. terms(rows): how many terms the mean over these rows has."""
    whole = {}
    for piece in in_parts(rows, micro_batch or len(rows)):
        share = terms(piece) / terms(rows)
        loss, stats = loss_function(model, piece)
        (share * loss).backward()
        whole = {name: whole.get(name, 0.0) + share * x for name, x in stats.items()}
    return whole


def rollout_in_pieces(policy, ref, score, prompts, config):
    """minippo.rollout, with at most config.micro_batch responses (0: all) in memory at once."""
    pieces = in_parts(prompts, config.micro_batch or len(prompts))
    return join_batches([minippo.rollout(policy, ref, score, p, config) for p in pieces])


def join_batches(batches):
    """Dicts of tensors (B,) or (B, T) -> one such dict with all the rows; the narrower ones are
    padded on the right."""

    def join(tensors):
        width = max(x.shape[-1] for x in tensors)
        padded = [F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in tensors]
        return torch.cat(padded)

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}


# Validation, and the best weights


@torch.no_grad()
def nats_of(model, rows, size):
    """(prompt, completion) as ids -> -log pi of each whole completion: (rows,). size: rows in memory
    at once."""
    nats = []
    for part in in_parts(rows, size):
        tokens, mask = pad_completions(part, model.lm_head.weight.device)
        nats.append(-evaluate_actions(model, tokens, mask)[0].sum(1))
    return torch.cat(nats)


class Fit:
    """What a step of stages 1 and 2 ends with: validation ten times in a run, the best weights so
    far in a file, the log, the state.

    validate(model, rows, size) -> figures, "val_loss" among them; size: rows in memory at once.
    """

    def __init__(self, state, model, tokenizer, validate, val_rows, micro_batch):
        self.state, self.model, self.tokenizer = state, model, tokenizer
        self.validate, self.val_rows, self.size = validate, val_rows, micro_batch or 64
        self.best = state.run.out / f"{state.kind}_best.pt"

    def end_step(self, stats, batch):
        step, count = self.state.step + 1, self.state.count
        if step * VALIDATIONS // count > (step - 1) * VALIDATIONS // count:
            some = spread_over(self.val_rows, VALIDATED)
            stats |= self.validate(self.model, some, self.size)
            if not math.isfinite(stats["val_loss"]):
                raise FloatingPointError(f"step {step}: the validation loss is {stats['val_loss']}")
            if stats["val_loss"] <= self.state.values.get("best", math.inf):
                self.state.values |= {"best": stats["val_loss"], "best_step": step}
                save_checkpoint(self.best, self.state.kind, self.model, self.tokenizer)
        show = ["loss", "accuracy", "val_loss", "val_accuracy"]
        self.state.end_step(stats, count_tokens(batch), show)

    def load_best(self):
        """The best weights into the model -> its figures on all validation rows."""
        best, count = self.state.values["best_step"], self.state.count
        print(f"the validation loss was lowest at step {best:,} of {count:,}: saved is that")
        load_weights(self.best, self.state.kind, self.model)
        return self.validate(self.model, self.val_rows, self.size)

    def finish(self):
        self.state.finish()
        self.best.unlink()
