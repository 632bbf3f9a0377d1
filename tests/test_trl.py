"""The losses beside TRL's, on the same numbers (needs trl).

TRL computes them in the middle of PPOTrainer.train(), so the tests run those lines of its source."""

import inspect
import os
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minippo import gae, kl_adjusted_rewards, policy_loss, response_mask, value_loss, whiten
from tiny import assert_equal, noise

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.ppo import ppo_trainer

ARGUMENTS = {"kl_estimator": "k1", "kl_coef": 0.3, "gamma": 0.9, "lam": 0.8, "vf_coef": 0.1}
ARGUMENTS |= {"cliprange": 0.2, "cliprange_value": 0.3, "whiten_rewards": False}
B, T = 7, 6


def lines_of_trl(first, last, **names):
    """Run TRL's lines from the one that begins with `first` to the one before `last`."""
    source = inspect.getsource(ppo_trainer.PPOTrainer.train)
    start = source.rindex("\n", 0, source.index(first))
    code = textwrap.dedent(source[start : source.rindex("\n", 0, source.index(last, start))])
    names = {**vars(ppo_trainer), "args": SimpleNamespace(**ARGUMENTS), **names}
    exec(code, names)
    return SimpleNamespace(**names)


@pytest.fixture
def batch():
    """later: the mask of TRL's values, one action longer in a row that ended before the limit."""
    lengths, one = torch.tensor([6, 1, 3, 5, 6, 4, 2]), torch.ones(B)
    mask, later = (response_mask(one, 1 + (lengths + i).clamp(max=T), 1 + T) for i in (0, 1))
    x = {name: noise(B, T) for name in ("logprobs", "ref_logprobs", "values")}
    return SimpleNamespace(lengths=lengths, mask=mask, later=later, scores=noise(B), **x)


def test_rewards_and_advantages_are_trls_but_for_its_later_score(batch):
    x, mask, later = batch, batch.mask, batch.later
    theirs = lines_of_trl(
        "response_idxs = torch.arange",
        "# Do multiple epochs",
        responses=mask,
        sequence_lengths=x.lengths - 1,
        **vars(batch),
    )
    assert torch.equal(~theirs.padding_mask, mask) and torch.equal(~theirs.padding_mask_p1, later)
    ref_logprobs = torch.where(mask, x.ref_logprobs, x.logprobs)  # no KL in the later action
    rewards = kl_adjusted_rewards(x.scores, x.logprobs, ref_logprobs, later, 0.3)
    advantages, returns = gae(rewards, x.values, later, 0.9, 0.8)
    assert_equal(rewards, theirs.rewards)
    assert_equal(returns, theirs.returns * later)
    # Theirs divides by the sample deviation, and adds 1e-8 to its square.
    whitened, N = whiten(torch.where(mask, advantages, 0.0), mask), mask.sum()
    assert_equal(theirs.advantages, whitened * ((N - 1) / N).sqrt(), 1e-7)


def test_losses_and_gradients_are_trls_on_its_masks(batch):
    x, mask, later = batch, batch.mask, batch.later
    logprobs = (x.logprobs + 0.3 * noise(B, T)).requires_grad_()
    values = (x.values + 0.4 * noise(B, T)).requires_grad_()
    advantages, returns = noise(B, T), noise(B, T)
    theirs = lines_of_trl(
        "new_logprobs = torch.masked_fill(",
        "accelerator.backward(loss)",
        new_logprobs=logprobs,
        vpred_temp=F.pad(values, (0, 1))[..., None],
        context_length=1,
        micro_batch_inds=slice(None),
        padding_mask=~mask,
        padding_mask_p1=~later,
        mb_logprobs=torch.where(mask, x.logprobs, ppo_trainer.INVALID_LOGPROB),
        mb_values=torch.where(later, x.values, 0.0),
        mb_advantage=advantages,
        mb_return=returns,
    )
    loss, _ = policy_loss(logprobs, x.logprobs, advantages, mask, 0.2)
    value_term, _ = value_loss(values, x.values, returns, later, 0.3)
    assert_equal(loss, theirs.pg_loss)
    assert_equal(value_term, theirs.vf_loss)
    totals = loss + 0.1 * value_term, theirs.loss
    for ours, trls in zip(*(torch.autograd.grad(total, (logprobs, values)) for total in totals)):
        assert_equal(ours, trls)
