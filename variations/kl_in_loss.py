"""The KL in the loss instead of the reward, and the entropy bonus, which is the same formula.

A penalty on KL(pi || ref) can be a term of the loss: at each state that was visited, c * KL of the
next token. k2 = d^2 / 2, d = log pi - log ref of the sampled token, has its gradient on average:

    E[grad k2] = E[d * grad log pi] = grad KL(pi || ref)

An *entropy bonus*, H = E[-log pi], rewards varied choices. The entropy of V equally likely tokens
is log V, so KL(pi || uniform) = log V - H: a bonus on H is a penalty on the KL to the uniform
distribution. Its k2 is (log pi + log V)^2 / 2.

In the reward, a token also pays for the KL of the states that it leads to (section 5.7 of
minippo.py). And as advantages are whitened, a coefficient in the loss is not the same price per nat
as --kl_coef.
"""

from dataclasses import dataclass
from pathlib import Path

import train_ppo
from minippo import ppo_loss
from plumbing.settings import run_script
from train_ppo import train


@dataclass
class Config(train_ppo.Config):
    out: Path = Path("out/kl_in_loss")  # folder for checkpoints and logs
    kl_coef: float = 0.0  # the penalty in the reward
    kl_loss_coef: float = 0.2  # weight of the KL to the reference, in the loss
    entropy_coef: float = 0.0  # weight of the entropy bonus, in the loss


def k2(log_ratio):
    """An estimate of the KL whose mean gradient is that of the KL."""
    return 0.5 * log_ratio**2


def loss(logprobs, values, batch, config):
    losses, stats = ppo_loss(logprobs, values, batch, config)
    to_ref = k2(logprobs - batch["ref_logprobs"])
    # log V is left out: a constant times grad log pi is 0 on average, and here it would add noise.
    to_uniform = k2(logprobs)
    return losses + config.kl_loss_coef * to_ref + config.entropy_coef * to_uniform, stats


if __name__ == "__main__":
    run_script(lambda config: train(config, loss=loss), Config, __doc__)
