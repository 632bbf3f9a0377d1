"""What the three training loops share: batches, optimizer, learning rate, memory, the log, stopping and going on."""

import copy
import dataclasses
import itertools
import json
import math
import signal
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import minippo
from plumbing import fast
from plumbing.checkpoints import read_file, write_file
from plumbing.settings import UserError
from plumbing.text import pad


@dataclass
class FitConfig:
    epochs: int = 1  # passes over the training rows
    batch_size: int = 64  # rows per step
    micro_batch: int = 0  # rows in memory at once in a step; 0: all of them
    lr: float = 1e-3  # peak learning rate of AdamW; it falls linearly to 0
    warmup: int = 20  # steps in which the learning rate climbs to its peak
    weight_decay: float = 0.0  # AdamW's decay of the weights
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this norm
    evals: int = 2  # validations during the run; the best checkpoint is kept


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


def adamw(model, lr, weight_decay=0.0):
    """AdamW; a separate critic, with the value head that reads it, is a network of its own (see minippo.gradient_step)."""
    critic = [*model.critic.parameters(), *model.value_head.parameters()] if getattr(model, "critic", None) else []
    policy = [p for p in model.parameters() if not any(p is other for other in critic)]
    groups = [{"params": part, "network": name} for name, part in (("policy", policy), ("critic", critic)) if part]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)


def set_lr(optimizer, lr, step, steps, warmup):
    """Linear warm-up to lr, then a straight line down to 0 after the last step; returns what it set."""
    now = lr * min((step + 1) / (warmup + 1), (steps - step) / max(1, steps - warmup))
    for group in optimizer.param_groups:
        group["lr"] = now
    return now


def rollout_in_pieces(size):
    """minippo.rollout, sampling fast, and no more than `size` responses at once; 0: all of them."""

    def rollout(policy, ref, score, prompts, config):
        parts = [prompts[i : i + (size or len(prompts))] for i in range(0, len(prompts), size or len(prompts))]
        return join([minippo.rollout(policy, ref, score, part, config, fast.generate) for part in parts])

    return rollout


def join(batches):
    """Dicts of tensors (B,) or (B, T) -> one such dict with all the rows; the narrower ones are padded on the right."""

    def join_one(parts):
        width = max(x.shape[-1] for x in parts)
        return torch.cat([F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in parts])

    return {name: join_one([batch[name] for batch in batches]) for name in batches[0]}


def add_critic(policy, reward_model):
    """Give the policy, in place, a value network of its own, which starts as the reward model (as in InstructGPT)."""
    if reward_model is None:
        raise UserError("--separate_critic starts from the reward model, and with --reward there is none")
    policy.config = dataclasses.replace(policy.config, separate_critic=True)
    policy.critic = copy.deepcopy(reward_model.trunk).requires_grad_(True)
    head, std = reward_model.score_head, reward_model.std
    with torch.no_grad():  # value = normalised score = (head(hidden) - mean) / std
        policy.value_head.weight.copy_(head.weight / std)
        policy.value_head.bias.copy_((head.bias - reward_model.mean) / std)


def random_state():
    """The states of PyTorch's generators, on which everything random in a training loop depends."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_random_state(states):
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


FREE = ("models", "no_report", "micro_batch", "rollout_batch")  # settings that --resume may change


class Progress:
    """How far a training run has come: its log, its clock, and the state from which --resume goes on.

    configs: the settings that must be the same when it goes on. made_from: the figures that came with the checkpoints that the run
    starts from, {"sft": ..., "rm": ...}, by which they are known again. parts: whatever has a state_dict() (model, optimizer).
    `values` holds the numbers that must survive an interruption.
    """

    def __init__(self, kind, run, configs, steps, made_from=None, **parts):
        self.state_path, log_path = run.out / f"{kind}_state.pt", run.out / f"{kind}.jsonl"
        self.run, self.steps, self.parts, self.values = run, steps, parts, {"step": 0, "seconds": 0.0}
        self.made_from = made_from or {}
        self.settings = {"data": str(run.data), "seed": run.seed, "dtype": run.dtype, "steps": steps}
        for config in configs:
            self.settings |= {name: x for name, x in dataclasses.asdict(config).items() if name not in FREE}
        if run.resume and not self.state_path.exists():
            print(f"--resume: {self.state_path} is not there, so this run starts at the beginning")
        elif run.resume:
            self.load()
        else:
            self.state_path.unlink(missing_ok=True)  # of an earlier run: a later --resume must not mistake it for this one's
        run.out.mkdir(parents=True, exist_ok=True)
        logged = log_path.read_text().splitlines(True) if self.values["step"] else []
        log_path.write_text("".join(logged[: self.values["step"]]))  # one line a step; those after the last save are made again
        self.log, self.asked = open(log_path, "a"), []
        if self.values["step"] < steps:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.ask)
        self.began = self.shown = time.perf_counter() - self.values["seconds"]

    def load(self):
        state = read_file(self.state_path, ("state",))
        was = state.get("settings", {})
        differ = [f"{name} = {was.get(name)}" for name, value in self.settings.items() if was.get(name) != value]
        if differ:
            raise UserError(f"{self.state_path} was saved with {', '.join(differ)}; repeat that, or leave --resume out")
        for name, facts in self.made_from.items():
            if state.get("made_from", {}).get(name) != facts:
                raise UserError(f"{name}.pt has been made again since {self.state_path} was saved; leave --resume out")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        set_random_state(state["random"])
        self.values = state["values"]

    def remaining(self, batches):
        """Yield the steps that are still to be made, 0 for the first of the run, each with its batch."""
        return itertools.islice(enumerate(batches), self.values["step"], self.steps)

    def ask(self, number, frame):
        """At the first Ctrl-C or SIGTERM the loop ends its step and saves; a second one kills."""
        self.asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    def due(self, times):
        """Is the step in work one of those, so many in the run and spread evenly, at which something is done? The last one is."""
        step = self.values["step"] + 1
        return step % math.ceil(self.steps / times) == 0 or step == self.steps

    def is_best(self, facts):
        """Is facts["val_loss"] the lowest so far? Then these facts are remembered. UserError if it is no number."""
        loss, best = facts["val_loss"], self.values.get("best", {"val_loss": math.inf})
        if not math.isfinite(loss):
            raise UserError(f"step {self.values['step'] + 1}: the validation loss is {loss}; try a smaller --lr")
        if loss <= best["val_loss"]:
            self.values["best"] = facts
        return loss <= best["val_loss"]

    def end_step(self, tokens, show, /, **metrics):
        """Log the metrics of a step, print those named in `show` every few seconds; save now and then, or when asked."""
        seconds = time.perf_counter() - self.began
        speed = tokens / (seconds - self.values["seconds"])
        step = self.values["step"] = self.values["step"] + 1
        self.values["seconds"] = seconds
        record = {"step": step, **metrics, "tokens_per_second": round(speed), "seconds": round(seconds, 2)}
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()
        if time.perf_counter() - self.shown > 4 or step == self.steps:
            self.shown = time.perf_counter()
            numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in show if name in metrics)
            times = f"{clock(seconds)}, {clock(seconds / step * (self.steps - step))} left"
            print(f"step {step:>4}/{self.steps}  {numbers}  {speed:,.0f} tokens/s  {times}", flush=True)
        if self.asked or step % self.run.save_every == 0 or step == self.steps:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            state = {"kind": "state", "settings": self.settings, "made_from": self.made_from, "values": self.values}
            write_file(self.state_path, state | {"random": random_state()} | parts)
        if self.asked:
            raise KeyboardInterrupt(f"step {step} is saved, --resume goes on from there")
        if step == self.steps:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, Ctrl-C has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
