"""The specification of variations/: the expected step, the loss of each token, programs."""

import dataclasses
import importlib
import itertools
import runpy

import pytest
import torch

import minippo
from minippo import compute_advantages, evaluate_actions, policy_loss, ppo_loss
from plumbing.files import read_log
from plumbing.models import load_checkpoint
from plumbing.batches import pad_completions
from test_exact import Task
from tiny import EOS, assert_equal, gradient, inf, random_batch, tiny_gpt
from tiny_run import write_models
from variations import adaptive_kl, dpo, grpo, kl_in_loss, ppo_penalty, ppo_ptx, reinforce, rloo
from variations import separate_critic


def evaluated(batch, seed=0):
    """A batch with phase 3 done elsewhere -> logprobs and values of a policy, (B, T-1)."""
    return evaluate_actions(tiny_gpt(), batch["tokens"], batch["mask"])


UNBIASED = [
    (reinforce, {}),
    (reinforce, {"total": True}),
    (reinforce, {"baseline": True, "vf_coef": 0.0}),
    (rloo, {"group_size": 2, "batch_size": 4}),
]


@pytest.mark.parametrize("module, settings", UNBIASED)
def test_the_expected_step_is_the_gradient_of_j(module, settings):
    task = Task(3, 2, temperature=0.7, kl_coef=0.3)
    config = module.Config(kl_coef=0.3, temperature=0.7, **settings)
    record, p = task.record(), task.chances()[:, 0]
    logprobs, values = task.evaluate(task.policy)
    total = 0.0
    for rows in torch.arange(len(p)).view(3, -1).tolist():  # the responses to a prompt
        for group in itertools.product(rows, repeat=config.group_size):
            group = list(group)
            batch = {name: numbers[group] for name, numbers in record.items()}
            batch |= module.compute_advantages(batch, config)
            losses, _ = module.loss(logprobs[group], values[group], batch, config)
            total += p[group].prod() * losses[batch["mask"]].sum() / config.group_size
    assert_equal(gradient(total, task.policy), -gradient(task.objective(), task.policy), 1e-9)


@pytest.mark.parametrize("name", ["kl_loss_coef", "entropy_coef"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_in_the_loss_and_the_entropy_bonus_have_their_exact_gradients(name, temperature):
    task = Task(kl_coef=0.0, temperature=temperature)
    everywhere = torch.ones_like(task.tokens[:, :-1]).bool()
    policy, ref = (
        (model(task.tokens[:, :-1], everywhere)[0] / temperature)
        .log_softmax(-1)
        .view(*everywhere.shape, -1)
        for model in (task.policy, task.ref)
    )
    kl = (policy.exp() * (policy - ref)).sum(-1)
    minus_entropy = (policy.exp() * policy).sum(-1)
    term = task.in_states_visited(kl if name == "kl_loss_coef" else minus_entropy)
    off = {"kl_loss_coef": 0.0, "entropy_coef": 0.0, "vf_coef": 0.0, "clip_eps": inf}
    config = kl_in_loss.Config(**off | {name: 0.3})
    batch = task.record()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    logprobs, values = task.evaluate(task.policy)
    losses, _ = kl_in_loss.loss(logprobs, values, batch, config)
    step = gradient(task.in_states_visited(losses), task.policy)
    assert_equal(step, 0.3 * gradient(term, task.policy), 1e-9)
    assert step.norm() > 1e-2


def grpo_batch():
    """Two prompts with three responses each, of one to six tokens."""
    batch = random_batch(5)
    assert len(batch["mask"]) == 6
    return batch


@pytest.mark.parametrize("std, length", [(True, True), (False, False), (True, False)])
def test_grpo_averages_over_responses_and_compares_within_a_group(std, length):
    config = grpo.Config(
        group_size=3, batch_size=6, kl_coef=0.3, clip_eps=0.15, std=std, length=length
    )
    batch = grpo_batch()
    batch["scores"][:3] = 999_999.9  # equal scores have no advantage, however large
    mask, scores = batch["mask"], batch["scores"]
    batch |= grpo.compute_advantages(batch, config)
    logprobs, values = evaluated(batch)
    losses, _ = grpo.loss(logprobs, values, batch, config)
    ratio = (logprobs - batch["old_logprobs"]).exp()
    q = (batch["ref_logprobs"] - logprobs).exp()
    means = []
    for i in range(6):
        group = scores[:3] if i < 3 else scores[3:]
        A = torch.zeros((), dtype=torch.float64)
        if i >= 3:
            A = (scores[i] - group.mean()) / (group.std() + 1e-4 if std else 1)
        terms = -torch.min(ratio[i] * A, ratio[i].clamp(0.85, 1.15) * A)
        terms = (terms + 0.3 * (q[i] - 1 - q[i].log()))[mask[i]]
        means.append(terms.mean() if length else terms.sum() * 6 / mask.sum())
    assert_equal(losses[mask].mean(), torch.stack(means).mean(), 1e-6)
    assert not batch["advantages"][:3].any()


def test_rloo_compares_with_the_mean_of_the_others():
    config = rloo.Config(group_size=3, batch_size=6, kl_coef=0.3, clip_eps=0.15)
    batch = grpo_batch()
    advantages = rloo.compute_advantages(batch, config)["advantages"]
    kl = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1)
    R = batch["scores"] - 0.3 * kl
    assert_equal(advantages[4, batch["mask"][4]][0], R[4] - (R[3] + R[5]) / 2)
    assert not advantages[~batch["mask"]].any()
    batch["advantages"] = advantages
    logprobs, values = evaluated(batch)
    exact, _ = policy_loss(logprobs, batch["old_logprobs"], advantages, 0.15)
    assert_equal(rloo.loss(logprobs, values, batch, config)[0], exact)


def test_reinforce_trains_values_towards_returns_with_a_baseline():
    config = reinforce.Config(baseline=True, vf_coef=0.5)
    batch = random_batch(3)
    batch |= reinforce.compute_advantages(batch, config)
    logprobs, values = evaluated(batch)
    losses, stats = reinforce.loss(logprobs, values, batch, config)
    ratio = (logprobs - batch["old_logprobs"]).exp()
    exact = -ratio * batch["advantages"] + 0.25 * (values - batch["returns"]) ** 2
    assert_equal(losses, exact)
    assert "value_loss" in stats


def ppo_batch():
    batch = random_batch(4)
    return batch | compute_advantages(batch, minippo.PPOConfig())


def test_the_penalty_is_on_the_kl_to_the_old_policy():
    config = ppo_penalty.Config(penalty=1.7)
    batch = ppo_batch()
    logprobs, values = evaluated(batch)
    losses, _ = ppo_penalty.loss(logprobs, values, batch, config)
    plain, _ = ppo_loss(logprobs, values, batch, dataclasses.replace(config, clip_eps=inf))
    q = (logprobs - batch["old_logprobs"]).exp()
    assert_equal(losses, plain + 1.7 * (q - 1 - q.log()))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_ptx_adds_the_mean_loss_of_as_many_demonstrations(minibatches, monkeypatch):
    config = ppo_ptx.Config(ptx_coef=0.7, batch_size=6)
    rows = [([1, 2], [3, EOS]), ([4], [5, 6, 7, 8, EOS])]
    batch = grpo_batch()
    ready = batch | compute_advantages(batch, config)
    torch.manual_seed(7)
    longer = ppo_ptx.compute_advantages(batch, config, rows)
    torch.manual_seed(7)
    demonstrations = [rows[i] for i in torch.randint(2, (6,)).tolist()]
    policy = tiny_gpt()
    logprobs, values = evaluate_actions(policy, longer["tokens"], longer["mask"])
    losses, stats = ppo_ptx.loss(logprobs, values, longer, config)
    numbers = evaluate_actions(policy, ready["tokens"], ready["mask"])
    plain, plain_stats = ppo_loss(*numbers, ready, config)
    tokens, mask = pad_completions(demonstrations)
    sft_loss = -evaluate_actions(policy, tokens, mask)[0][mask].mean()
    exact = plain[ready["mask"]].mean() + 0.7 * sft_loss
    assert_equal(losses[longer["mask"]].mean(), exact, 1e-6)
    for name in ("policy_loss", "value_loss", "approx_kl", "clip_frac"):
        mean = stats[name][longer["mask"]].double().mean()
        assert_equal(mean, plain_stats[name][ready["mask"]].double().mean(), 1e-6)
    assert stats["ratio"][longer["mask"]].max() == max(1, plain_stats["ratio"][ready["mask"]].max())


@pytest.mark.parametrize("ipo", [False, True])
def test_dpo_is_the_loss_of_its_paper(ipo):
    config = dpo.Config(kl_coef=0.4, ipo=ipo)
    policy, ref = tiny_gpt(), tiny_gpt()
    pairs = [([1, 2], [3, EOS], [4, 5, EOS]), ([6], [7, 8, 9, EOS], [1, EOS])]
    loss, stats = dpo.dpo_loss(policy, ref, pairs, config, "cpu")
    losses = []
    for prompt, *answers in pairs:
        log_ratios = []
        for answer in answers:
            tokens, mask = pad_completions([(prompt, answer)])
            ours, theirs = (evaluate_actions(x, tokens, mask)[0].sum() for x in (policy, ref))
            log_ratios.append(ours - theirs)
        h = log_ratios[0] - log_ratios[1]
        losses.append((h - 1.25) ** 2 if ipo else -(0.4 * h).sigmoid().log())
    assert_equal(loss, torch.stack(losses).mean())
    assert stats["loss"] == loss.item()


def test_beta_follows_the_kl_and_can_hold_it_at_the_target():
    config = adaptive_kl.Config(kl_coef=0.1, kl_target=2.0)
    assert adaptive_kl.next_kl_coef(0.1, 2.2, config) == pytest.approx(0.1 * 1.01)
    assert adaptive_kl.next_kl_coef(0.1, 9.0, config) == pytest.approx(0.1 * 1.02)
    assert adaptive_kl.next_kl_coef(0.1, 0.0, config) == pytest.approx(0.1 * 0.98)
    kl_coef = 0.001
    for _ in range(450):  # a policy whose KL is 0.2 / beta
        kl_coef = adaptive_kl.next_kl_coef(kl_coef, 0.2 / kl_coef, config)
    assert 0.2 / kl_coef == pytest.approx(2.0, rel=0.02)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("run"))


def test_a_separate_critic_starts_as_the_reward_model(out):
    config = separate_critic.Config(models=str(out))
    policy, _, _ = load_checkpoint(out / "sft.pt", ["sft"])
    reward_model, _, _ = load_checkpoint(out / "rm.pt", ["rm"])
    reward_model.cap.fill_(inf)
    actor_critic = separate_critic.add_critic(policy, config)
    tokens = torch.randint(300, (2, 9))
    last = torch.zeros_like(tokens).bool()
    last[:, -1] = True
    logits, values = actor_critic(tokens, last)
    assert_equal(logits, policy(tokens, last)[0])
    assert_equal(values, reward_model(tokens, torch.tensor([9, 9])), 1e-4)
    shared = {id(p) for p in policy.parameters()} & {
        id(p) for p in actor_critic.value_trunk.parameters()
    }
    assert not shared


NAMES = ["adaptive_kl", "dpo", "grpo", "kl_in_loss", "ppo_penalty", "ppo_ptx", "reinforce", "rloo"]
NAMES += ["separate_critic"]


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_and_saves_a_policy(out, tmp_path, monkeypatch, name):
    module = importlib.import_module(f"variations.{name}")
    assert str(module.Config().out) == f"out/{name}"
    options = {"max_new_tokens": 16} if name != "dpo" else {}
    config = module.Config(
        data=out.parent / "data", models=str(out), out=tmp_path, steps=3, batch_size=16, **options
    )
    monkeypatch.setattr("plumbing.settings.read_flags", lambda *_: config)
    runpy.run_path(module.__file__, run_name="__main__")
    rows = read_log(tmp_path / "ppo.jsonl")
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    trained, _, metadata = load_checkpoint(tmp_path / "ppo.pt", ["ppo"])
    before, _, _ = load_checkpoint(out / "sft.pt", ["sft"])
    moved = (trained.trunk.norm.weight - before.trunk.norm.weight).abs().max()
    assert 0 < moved < 0.1
    if name == "adaptive_kl":
        assert rows[1]["kl_coef"] != rows[0]["kl_coef"] == 0.1


def test_settings_that_an_algorithm_does_not_read_are_no_flags():
    names = {field.name for field in dataclasses.fields(rloo.Config)}
    assert "group_size" in names and not names & {"lam", "gamma", "vf_coef", "value_lr", "whiten"}
    for bad in ({"group_size": 1}, {"group_size": 5, "batch_size": 12}):
        with pytest.raises(ValueError, match="group_size"):
            rloo.Config(**bad)
