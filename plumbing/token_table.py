"""What sample.py --trace shows: the numbers of each token, as an iteration of PPO would compute them,
and what else could have been said.

Settings that are no flag of sample.py are the defaults of train_ppo.py.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from minippo import (
    PPOConfig,
    at_least_float32,
    compute_advantages,
    kl_per_response,
    rollout,
    trace,
    whiten,
)
from plumbing.errors import UserError, printable
from plumbing.models import load_models


@dataclass
class TraceConfig:
    trace: bool = False  # show the numbers of each token; needs sft.pt, and rm.pt or --reward
    kl_coef: float = PPOConfig.kl_coef  # beta in these numbers [0, 1e6]
    models: str = ""  # folder of sft.pt and rm.pt; that of the checkpoint unless it is given
    reward: str = ""  # module:function that scores instead of rm.pt, as in train_ppo.py

    def __post_init__(self):
        unread = (self.kl_coef, self.models, self.reward) != (PPOConfig.kl_coef, "", "")
        if unread and not self.trace:
            raise UserError("--kl_coef, --models and --reward have no effect without --trace")


def load_traced(path, config):
    """The policy in a checkpoint, with what its tokens are measured by -> Models."""
    if Path(path).is_dir():
        raise UserError(f"--trace {path}: a folder; give the ppo.pt or sft.pt of a run")
    return load_models(config.models or Path(path).parent, "cpu", config.reward, policy=path)


@torch.no_grad()
def trace_of(sampled, models, temperature, kl_coef):
    """What generate() has returned -> a batch with the numbers of phases 2 and 3.

    Advantages are whitened over one response each: no response changes the numbers of another.
    """
    config = PPOConfig(temperature=temperature, kl_coef=kl_coef)
    batch = rollout(models.policy, models.reference, models.score, [], config, lambda *_: sampled)
    batch |= compute_advantages(batch, config, kl_coef)
    rows = zip(batch["advantages"].split(1), batch["mask"].split(1))
    return batch | {"whitened": torch.cat([whiten(*row) for row in rows])}


def print_table(batch, row, tokenizer, kl_coef):
    """Score, KL (in nats) and beta of a response; then a line for each token."""
    kl, _ = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], batch["mask"])
    score, kl = (round(x[row].item(), 2) + 0.0 for x in (batch["scores"], kl))  # no "-0.00"
    cut = f" (it was cut off, which costs {PPOConfig.missing_eos_penalty:g})"
    print(
        f"    score {score:.2f}{'' if batch['ended'][row] else cut}  KL {kl:.2f}  beta {kl_coef:g}"
    )
    for line in trace(batch, row, lambda token: column_text(tokenizer.spell(token))):
        print("    " + line)


@torch.no_grad()
def others(model, tokens, mask, temperature, count=3):
    """The likeliest tokens other than those that were chosen, and their probabilities: tokens (T,),
    mask (T-1,) with N actions -> (N, count) each."""
    hidden, _ = model.hidden(tokens[None, :-1])
    logits = at_least_float32(model.lm_head(hidden[mask[None]]))  # (N, V)
    shares = (logits / temperature).softmax(-1)
    shares.scatter_(1, tokens[1:][mask][:, None], -1.0)  # below all that were not chosen
    found = shares.topk(count)
    return found.indices, found.values


def print_others(batch, row, models, temperature):
    """A line for each token of a response: the three likeliest other tokens at this place, each with
    its probability, under the policy and under the reference."""
    tokens, mask = batch["tokens"][row], batch["mask"][row]
    spell = models.tokenizer.spell
    columns = []
    for model in (models.policy, models.reference):
        found = zip(*(x.tolist() for x in others(model, tokens, mask, temperature)))
        columns.append(
            ["  ".join(f"{column_text(spell(i))} {p:.2f}" for i, p in zip(*x)) for x in found]
        )
    print(f"    {'action':>10}  {'likeliest others, policy':40}  likeliest others, reference")
    for token, *cells in zip(tokens[1:][mask].tolist(), *columns):
        print(f"    {column_text(spell(token)):>10}  {cells[0]:40}  {cells[1]}")


def column_text(text):
    """A token for a column of 10: its leading space as a dot, cut to fit."""
    text = printable("·" + text[1:] if text[:1] == " " else text).replace("\n", r"\n")
    return text if len(text) < 10 else text[:8] + "…"
