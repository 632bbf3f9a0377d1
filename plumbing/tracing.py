"""What sample.py --trace shows: the numbers of each token of a response, as one iteration of PPO would compute them.

Settings that are no flag of sample.py are the defaults of train_ppo.py. "log old" and the ratio are not among the columns: they
differ from log pi and from 1 during an update alone, and nothing is trained here.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from minippo import PPOConfig, gae, kl_adjusted_rewards, kl_per_response, rollout, trace, whiten
from plumbing.rewards import load_models
from plumbing.settings import UserError
from plumbing.text import printable

WIDTH = 10  # of a column of minippo.trace


@dataclass
class TraceConfig:
    trace: bool = False  # show the numbers of each token; needs sft.pt, the reference, and rm.pt beside the checkpoint
    kl_coef: float = PPOConfig.kl_coef  # beta in these numbers
    models: str = (
        ""  # folder of sft.pt and rm.pt for --trace; that of the checkpoint unless it is given
    )
    reward: str = ""  # module:function that scores for --trace instead of rm.pt, as in train_ppo.py

    def __post_init__(self):
        for name in ("kl_coef", "models", "reward"):
            if getattr(self, name) != getattr(TraceConfig, name) and not self.trace:
                raise UserError(f"--{name} has no effect without --trace")


def load_traced(path, config):
    """The policy in a checkpoint, with what its tokens are measured by -> Models."""
    if Path(path).is_dir():
        raise UserError(
            f"--trace {path}: a folder; give the ppo.pt or sft.pt of a run (a GPT-2 has no reward model and no values)"
        )
    folder = Path(config.models or Path(path).parent)
    for name in ["sft.pt"] if config.reward else ["sft.pt", "rm.pt"]:
        if Path(path).exists() and not (folder / name).exists():
            hint = "--models FOLDER says where it is" + ", --reward what scores in its place" * (
                name == "rm.pt"
            )
            raise UserError(f"--trace needs {folder / name}, which is not there; {hint}")
    return load_models(folder, "cpu", config.reward, policy=path)


@torch.no_grad()
def trace_of(sampled, models, temperature, kl_coef):
    """What generate() has returned -> that batch with the numbers of phases 2 and 3 of minippo.ppo_iteration.

    Advantages are whitened over one response each, not over the batch: no other response changes the numbers of a response.
    """
    config = PPOConfig(temperature=temperature, kl_coef=kl_coef)
    batch = rollout(models.policy, models.reference, models.score, None, config, lambda *_: sampled)
    logprobs, ref_logprobs, mask = batch["logprobs"], batch["ref_logprobs"], batch["mask"]
    rewards = kl_adjusted_rewards(batch["scores"], logprobs, ref_logprobs, mask, kl_coef)
    advantages, returns = gae(rewards, batch["values"], mask, config.gamma, config.lam)
    whitened = torch.cat([whiten(*row) for row in zip(advantages.split(1), mask.split(1))])
    return batch | {"rewards": rewards, "advantages": whitened, "returns": returns}


def print_trace(batch, row, tokenizer, kl_coef):
    """Score, KL (in nats) and beta of a response; then minippo.trace, a table whose columns the header of minippo.py explains."""
    kl, _ = kl_per_response(batch["logprobs"], batch["ref_logprobs"], batch["mask"])
    score, kl = (plain(f"{x[row]:.2f}").strip() for x in (batch["scores"], kl))
    cut = (
        ""
        if batch["ended"][row]
        else f" (it was cut off, which costs {PPOConfig.missing_eos_penalty:g})"
    )
    print(f"    score {score}{cut}  KL {kl}  beta {kl_coef:g}")
    with contextlib.redirect_stdout(io.StringIO()) as table:
        trace(batch, row, lambda token: spelled(token, tokenizer))
    for line in table.getvalue().splitlines():
        print("    " + line[:WIDTH] + plain(line[WIDTH:]))


def plain(numbers):
    """What rounds to 0 gets no sign."""
    return re.sub(r"-0\.00\b", " 0.00", numbers)


def spelled(token, tokenizer):
    """A token in a column: a leading space as a dot, bytes that are no character as their numbers, cut to fit."""
    if token == tokenizer.eos:
        return "<eos>"
    text = tokenizer.tokens[token].decode(errors="backslashreplace")
    text = re.sub(r"^ ", "·", printable(text).replace("\n", r"\n"))
    return text if len(text) < WIDTH else text[: WIDTH - 2] + "…"
