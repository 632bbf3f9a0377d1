"""The specification of variations/: the expected step, and the loss of each token."""

import itertools

import pytest
import torch

from minippo import PPOConfig, compute_advantages, evaluate_actions, pad_completions
from minippo import policy_loss, ppo_loss
from tiny import EOS, Task, assert_equal, gradient, inf, random_batch, tiny_gpt
from variations import dpo, grpo, kl_in_loss, ppo_penalty, reinforce, rloo


def evaluated(batch):
    """-> logprobs and values of a policy, always the same."""
    torch.manual_seed(0)
    return evaluate_actions(tiny_gpt(), batch["tokens"], batch["mask"])


UNBIASED = [(reinforce, {}), (rloo, {"group_size": 3})]


@pytest.mark.parametrize("module, settings", UNBIASED)
def test_the_expected_step_is_the_gradient_of_j(module, settings):
    task = Task(3, 2, temperature=0.7, kl_coef=0.3)
    config = module.Config(kl_coef=0.3, batch_size=6, **settings)
    n = config.group_size
    rows = []  # all groups of n responses to one prompt, side by side
    for responses in torch.arange(len(task.tokens)).view(3, -1).tolist():
        for group in itertools.product(responses, repeat=n):
            rows += group
    batch = {name: numbers[rows] for name, numbers in task.record().items()}
    batch |= module.compute_advantages(batch, config)
    logprobs, values = task.evaluate(task.policy)
    losses, _ = module.loss(logprobs[rows], values[rows], batch, config)
    chances = task.chances()[rows].view(-1, n).prod(1)  # of the groups
    expected = chances @ (losses * batch["mask"]).sum(1).view(-1, n).mean(1)
    assert_equal(gradient(expected, task.policy), -gradient(task.objective(), task.policy), 1e-9)


def test_kl_in_the_loss_and_the_entropy_bonus_have_their_exact_gradients():
    task = Task(kl_coef=0.0, temperature=0.7)
    states = task.tokens[:, :-1]
    everywhere = torch.ones_like(states).bool()

    def log_pi(model):
        """Of all tokens: (B, T-1, V)."""
        logits, _ = model(states, everywhere)
        return (logits / 0.7).log_softmax(-1).view(*states.shape, -1)

    policy = log_pi(task.policy)
    kl = (policy.exp() * (policy - log_pi(task.ref))).sum(-1)
    entropy = -(policy.exp() * policy).sum(-1)
    exact = gradient(task.in_states_visited(0.3 * kl - 0.2 * entropy), task.policy)
    config = kl_in_loss.Config(kl_loss_coef=0.3, entropy_coef=0.2, vf_coef=0.0, clip_eps=inf)
    batch = task.record()
    batch["advantages"] *= 0
    losses, _ = kl_in_loss.loss(*task.evaluate(task.policy), batch, config)
    assert_equal(gradient(task.in_states_visited(losses), task.policy), exact, 1e-9)


GROUPS = {"group_size": 3, "batch_size": 6, "kl_coef": 0.3, "clip_eps": 0.15}


@pytest.mark.parametrize("std, length", [(True, False), (False, True)])
def test_grpo_averages_over_responses_and_compares_within_a_group(std, length):
    config = grpo.Config(**GROUPS, std=std, length=length)
    batch = random_batch(5)  # six responses, of one to six tokens
    mask = batch["mask"]
    scores = batch["scores"] = batch["scores"].float()
    scores[:3] = 999_999.9  # equal scores have no advantage, however large
    A = scores - scores[3:].mean()
    A[:3] = 0
    if std:
        A /= scores[3:].std() + 1e-4
    batch |= grpo.compute_advantages(batch, config)
    assert not batch["advantages"][:3].any()
    logprobs, values = evaluated(batch)
    losses, _ = grpo.loss(logprobs, values, batch, config)
    exact, _ = policy_loss(logprobs, batch["old_logprobs"], A[:, None].expand(mask.shape), 0.15)
    d = logprobs - batch["ref_logprobs"]
    exact = exact + 0.3 * ((-d).exp() - 1 + d)
    responses = torch.stack([row[inside].mean() for row, inside in zip(exact, mask)])
    assert_equal(losses[mask].mean(), responses.mean() if length else exact[mask].mean(), 1e-6)


def test_rloo_compares_with_the_mean_of_the_others():
    batch = random_batch(5)
    R = batch["scores"] - 0.3 * (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
    R = R.view(2, 3)
    others = (R.roll(1, 1) + R.roll(2, 1)) / 2
    config = rloo.Config(**GROUPS)
    batch |= rloo.compute_advantages(batch, config)
    assert_equal(batch["advantages"], (R - others).view(6, 1) * batch["mask"])
    logprobs, values = evaluated(batch)
    exact = policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], 0.15)
    assert_equal(rloo.loss(logprobs, values, batch, config), exact)
    for size in (1, 3):  # 128 responses
        with pytest.raises(ValueError):
            rloo.Config(group_size=size)


def test_reinforce_is_ppo_without_whitening_clips_and_values():
    config = reinforce.Config(kl_coef=0.3)
    ppo = PPOConfig(kl_coef=0.3, vf_coef=0, whiten=False, clip_eps=inf)
    batch = random_batch(3)
    batch["old_values"] *= 0
    exact = batch | compute_advantages(batch, ppo)
    batch |= reinforce.compute_advantages(batch, config)
    assert_equal(batch["advantages"], exact["advantages"])
    numbers = evaluated(batch)
    assert_equal(reinforce.loss(*numbers, batch, config)[0], ppo_loss(*numbers, exact, ppo)[0])


def test_the_penalty_is_on_the_kl_to_the_old_policy():
    batch = random_batch(4)
    batch |= compute_advantages(batch, PPOConfig())
    logprobs, values = evaluated(batch)
    losses, _ = ppo_penalty.loss(logprobs, values, batch, ppo_penalty.Config(penalty=1.7))
    plain, _ = ppo_loss(logprobs, values, batch, PPOConfig(clip_eps=inf))
    log_ratio = logprobs - batch["old_logprobs"]
    assert_equal(losses, plain + 1.7 * (log_ratio.exp() - 1 - log_ratio))


def test_dpo_is_the_loss_of_its_paper():
    policy, ref = tiny_gpt(), tiny_gpt()
    pairs = [([1, 2], [3, EOS], [4, 5, EOS]), ([6], [7, 8, 9, EOS], [1, EOS])]

    def log_ratio(prompt, answer):
        tokens, mask = pad_completions([(prompt, answer)])
        ours, theirs = (evaluate_actions(x, tokens, mask)[0].sum() for x in (policy, ref))
        return ours - theirs

    h = torch.stack([log_ratio(x, chosen) - log_ratio(x, other) for x, chosen, other in pairs])
    for ipo, losses in ((False, -(0.4 * h).sigmoid().log()), (True, (h - 1.25) ** 2)):
        config = dpo.Config(kl_coef=0.4, ipo=ipo)
        loss, stats = dpo.dpo_loss(policy, ref, pairs, config, "cpu")
        assert_equal(loss, losses.mean())
        assert stats["loss"] == loss.item()
