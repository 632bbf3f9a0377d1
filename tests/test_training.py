"""The specification of plumbing/training.py and plumbing/settings.py. Run: python -m pytest tests/test_training.py"""

import inspect
import itertools
import math
from dataclasses import fields

import pytest
import torch

import minippo
import sample
import train_ppo
import train_sft
from minippo import GPTConfig, PPOConfig, generate
from plumbing import fast, settings
from plumbing.settings import LIMITS, RunConfig, explanations
from plumbing.training import FitConfig, adamw, add_critic, batches, full_batches, join, pair_scores, rollout_in_pieces, set_lr
from tiny import assert_equal, noise, tiny_gpt, tiny_reward_model

# Batches


@pytest.mark.parametrize("rows, batch_size", [(1, 64), (5, 64), (64, 64), (65, 64), (130, 4)])
def test_every_row_comes_once_per_pass_also_when_there_are_fewer_than_a_batch(rows, batch_size):
    count = math.ceil(rows / batch_size)
    stream = batches(rows, batch_size, seed=3)
    passes = [list(itertools.islice(stream, count)) for _ in range(3)]
    for one in passes:
        assert sorted(itertools.chain.from_iterable(one)) == list(range(rows))
        assert all(0 < len(numbers) <= batch_size for numbers in one)
    assert list(itertools.islice(batches(rows, batch_size, seed=3), 3 * count)) == sum(passes, [])
    if rows >= 5:
        assert passes[0] != passes[1] and list(itertools.islice(batches(rows, batch_size, seed=4), count)) != passes[0]


@pytest.mark.parametrize("rows, batch_size", [(1, 4), (5, 3), (6, 3), (3, 10)])
def test_full_batches_are_full_and_see_every_row_once_before_any_comes_again(rows, batch_size):
    got = list(itertools.islice(full_batches(rows, batch_size, seed=3), 3 * rows))
    assert all(len(batch) == batch_size for batch in got)
    stream = sum(got, [])
    for i in range(0, len(stream) - rows + 1, rows):
        assert sorted(stream[i : i + rows]) == list(range(rows))
    assert got == list(itertools.islice(full_batches(rows, batch_size, seed=3), 3 * rows))


def test_each_pair_gets_the_scores_of_its_own_two_answers():
    model = tiny_reward_model()
    rows = [tuple(torch.randint(11, (int(n),)).tolist() for n in torch.randint(1, 5, (3,))) for _ in range(20)]
    chosen, rejected = pair_scores(model, rows, "cpu")
    for i, (prompt, *answers) in enumerate(rows):
        for score, answer in zip((chosen[i], rejected[i]), answers, strict=True):
            assert_equal(score, model(torch.tensor([prompt + answer]), torch.tensor([len(prompt + answer)]))[0], 1e-10)


def test_joined_batches_have_the_rows_of_the_parts_padded_on_the_right():
    one = {"tokens": torch.tensor([[1, 2]]), "mask": torch.tensor([[True]]), "scores": torch.tensor([0.5])}
    two = {"tokens": torch.tensor([[3, 4, 5], [6, 7, 8]]), "mask": torch.tensor([[True, True], [False, True]])}
    whole = join([one, two | {"scores": torch.tensor([1.5, 2.5])}])
    assert whole["tokens"].tolist() == [[1, 2, 0], [3, 4, 5], [6, 7, 8]] and whole["scores"].tolist() == [0.5, 1.5, 2.5]
    assert whole["mask"].tolist() == [[True, False], [True, True], [False, True]] and whole["mask"].dtype == torch.bool


@pytest.mark.parametrize("size, sizes", [(0, [5]), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_a_rollout_in_pieces_is_that_of_the_whole_batch(monkeypatch, size, sizes):
    policy, ref, seen = tiny_gpt(), tiny_gpt(), []
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8], [9]]
    tokens, mask, *more = generate(policy, prompts, 6)
    sampled = {tuple(prompt): [x[i : i + 1] for x in (tokens, mask, *more)] for i, prompt in enumerate(prompts)}

    def replay(policy, rows, *settings):
        seen.append(len(rows))
        tokens, *more = (torch.cat(x) for x in zip(*(sampled[tuple(row)] for row in rows), strict=True))
        columns = int(minippo.row_lengths(more[0]).max())  # as many as these rows need
        return tokens[:, :columns], *(x[:, : columns - 1] for x in more)

    def score(tokens, mask):
        return -mask.sum(1).double()

    monkeypatch.setattr(fast, "generate", replay)
    whole = minippo.rollout(policy, ref, score, prompts, PPOConfig(), replay)
    seen.clear()
    pieces = rollout_in_pieces(size)(policy, ref, score, prompts, PPOConfig())
    assert seen == sizes and list(pieces) == list(whole)
    for name, x in whole.items():
        assert_equal(pieces[name], x)


# Optimizer and learning rate


def test_the_optimizer_holds_every_parameter_once_and_a_separate_critic_apart():
    policy = tiny_gpt()
    (group,) = adamw(policy, 0.1, weight_decay=0.3).param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in policy.parameters()} and group["weight_decay"] == 0.3
    add_critic(policy, tiny_reward_model())
    groups = adamw(policy, 0.1).param_groups
    names = {id(p): name for name, p in policy.named_parameters()}
    actor, critic = ({names[id(p)] for p in group["params"]} for group in groups)
    assert critic == {name for name in names.values() if name.startswith(("critic.", "value_head."))}
    assert actor == set(names.values()) - critic and sum(len(group["params"]) for group in groups) == len(names)


def test_the_learning_rate_climbs_in_the_warm_up_and_falls_to_0_after_the_last_step():
    optimizer = adamw(tiny_gpt(), 0.0)
    rates = [set_lr(optimizer, 0.6, step, steps=12, warmup=2) for step in range(12)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[2:] == pytest.approx([0.6 * (12 - step) / 10 for step in range(2, 12)])
    assert optimizer.param_groups[0]["lr"] == rates[-1] == pytest.approx(0.06)  # one step further it would be 0
    assert set_lr(optimizer, 0.6, 0, steps=1, warmup=20) == pytest.approx(0.6 / 21)  # a run shorter than its warm-up
    assert set_lr(optimizer, 0.5, 0, steps=4, warmup=0) == 0.5


def test_every_group_gets_the_learning_rate():
    policy = tiny_gpt()
    add_critic(policy, tiny_reward_model())
    optimizer = adamw(policy, 1.0)
    set_lr(optimizer, 0.5, 0, 4, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


# Flags


CLASSES = (RunConfig, GPTConfig, PPOConfig, FitConfig, train_sft.InitConfig, train_ppo.StageConfig, sample.SampleConfig)


@pytest.mark.parametrize("owner", CLASSES)
def test_every_setting_is_explained_behind_it_and_every_number_has_limits_that_its_default_keeps(owner):
    texts = explanations(owner)
    assert texts.keys() == {field.name for field in fields(owner)}
    for field in fields(owner):
        if field.type in (int, float):
            low, high = (*LIMITS[field.name], math.inf)[:2]
            assert low <= field.default <= high
    # The explanation is the comment on the same line, all of it.
    for name, text in texts.items():
        assert any(line.strip().startswith(f"{name}:") and line.endswith(f"  # {text}")
                   for line in inspect.getsource(owner).splitlines())  # fmt: skip


# How the networks are computed


@pytest.mark.parametrize("flags, how", [
    ({}, {"dtype": None, "recompute": False}),
    ({"dtype": "bfloat16"}, {"dtype": torch.bfloat16, "recompute": False}),
    ({"grad_checkpoint": True}, {"dtype": None, "recompute": True}),
], ids=str)  # fmt: skip
def test_the_scripts_compute_fast_and_as_the_flags_say(flags, how):
    settings.prepare(RunConfig(device="cpu", **flags))
    assert minippo.Trunk.forward is not fast.PLAIN and how == fast.HOW


def test_the_seed_decides_all_random_numbers():
    draws = []
    for seed in (7, 7, 8):
        settings.prepare(RunConfig(device="cpu", seed=seed))
        draws.append(noise(3).tolist())
    assert draws[0] == draws[1] != draws[2]
