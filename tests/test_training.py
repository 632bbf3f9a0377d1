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
import train_rm
import train_sft
from minippo import GPTConfig, PPOConfig, generate
from plumbing import fast, settings
from plumbing.settings import LIMITS, RunConfig, explanations
from plumbing.training import (
    FitConfig, adamw, add_critic, batches, first_model, full_batches, join, length, pair_scores, rollout_in_pieces, set_lr, some,
)  # fmt: skip
from tiny import assert_equal, noise, tiny_gpt, tiny_reward_model
from variations import best_of_n, dpo, ensemble, grpo, iterate, ppo_penalty, reinforce, rloo, sequence_ppo

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


def test_what_training_will_compare_with_can_be_computed_again(monkeypatch):
    policy, config = tiny_gpt(), PPOConfig(temperature=0.7)
    rounded = []

    def coarse(*args):
        tokens, mask, logprobs, values = generate(*args)
        rounded.append((logprobs, values))
        return tokens, mask, logprobs + 0.01 * mask, values + 0.01 * mask

    monkeypatch.setattr(fast, "generate", coarse)
    for again, off in ((False, 0.01), (True, 0.0)):
        batch = rollout_in_pieces(0, again)(policy, tiny_gpt(), lambda tokens, mask: mask.sum(1).double(), [[1], [2, 3]], config)
        for name, exact in zip(("logprobs", "values"), rounded[-1], strict=True):
            assert_equal(batch[name], exact + off * batch["mask"], 1e-9)
            assert not batch[name].requires_grad


# Optimizer and learning rate


def test_the_optimizer_holds_every_parameter_once_and_a_separate_critic_apart():
    policy = tiny_gpt()
    add_critic(policy, tiny_reward_model())
    groups = adamw(policy, 0.1, critic_lr=0.02).param_groups
    names = {id(p): name for name, p in policy.named_parameters()}
    actor, critic = ({names[id(p)] for g in groups if g["network"] == name for p in g["params"]} for name in ("policy", "critic"))
    assert critic == {name for name in names.values() if name.startswith(("critic.", "value_head."))}
    assert actor == set(names.values()) - critic and sum(len(group["params"]) for group in groups) == len(names)
    assert groups[0]["network"] == "policy"  # the one whose gradient norm and learning rate are reported
    assert {(g["network"], g["peak"], g["lr"]) for g in groups} == {("policy", 0.1, 0.1), ("critic", 0.02, 0.1)}
    assert {g["peak"] for g in adamw(policy, 0.1).param_groups} == {0.1}  # a critic of no learning rate of its own has the policy's
    assert all(g["betas"] == (0.9, 0.95) and g["fused"] for g in groups)


def test_the_value_head_on_the_policys_trunk_has_a_learning_rate_of_its_own_but_no_norm():
    policy = tiny_gpt()
    groups = adamw(policy, 0.1, head_lr=30.0, eps=1e-4).param_groups
    names = {id(p): name for name, p in policy.named_parameters()}
    peaks = {names[id(p)]: (g["network"], g["peak"], g["eps"]) for g in groups for p in g["params"]}
    assert sum(len(group["params"]) for group in groups) == len(names) == len(peaks)
    for name, (network, peak, eps) in peaks.items():
        assert network == "policy" and eps == 1e-4
        assert peak == pytest.approx(3.0 if name.startswith("value_head") else 0.1)
    assert all(g["eps"] == 1e-8 and g["peak"] == 0.1 for g in adamw(policy, 0.1).param_groups)
    add_critic(policy, tiny_reward_model())
    assert {g["peak"] for g in adamw(policy, 0.1, critic_lr=0.2, head_lr=30.0).param_groups} == {0.1, 0.2}
    reward_model = tiny_reward_model()
    assert sum(len(g["params"]) for g in adamw(reward_model, 0.1).param_groups) == len(list(reward_model.parameters()))


def test_weights_decay_and_norms_and_biases_do_not():
    policy = tiny_gpt()
    names = {id(p): name for name, p in policy.named_parameters()}
    groups = adamw(policy, 0.1, weight_decay=0.3).param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert decay.keys() == set(names.values())
    for name, share in decay.items():
        assert share == (0.0 if name.endswith("bias") or "norm" in name else 0.3)


def test_every_group_gets_its_share_of_its_own_peak():
    policy = tiny_gpt()
    add_critic(policy, tiny_reward_model())
    optimizer = adamw(policy, 1.0, critic_lr=0.2)
    assert set_lr(optimizer, 0.5) == 0.5
    assert {(group["network"], group["lr"]) for group in optimizer.param_groups} == {("policy", 0.5), ("critic", 0.1)}


def test_a_run_is_as_long_as_its_epochs_or_as_its_validation_loss_wants_it():
    assert length(FitConfig(epochs=3, batch_size=10, warmup=4), 21) == (9, 4, False)
    assert length(FitConfig(max_steps=70, warmup=4), 21) == (70, 4, True)


def test_the_first_model_has_the_vocabulary_of_its_rows(capsys):
    torch.manual_seed(1)
    model, tokenizer = first_model([("ab ab", " ab ab")] * 3, GPTConfig(1024, 16, 1, 2, 8, dropout=0.1), "")
    assert tokenizer.encode("ab ab") == [256, 257] and model.config.vocab_size == tokenizer.vocab_size == 259
    assert (model.config.context, model.config.layers, model.config.dropout) == (16, 1, 0.1)
    assert "vocabulary of 259 tokens" in capsys.readouterr().out


def test_a_first_model_that_is_a_gpt2_has_the_dropout_that_was_asked_for(monkeypatch):
    monkeypatch.setattr("plumbing.hf.read_gpt2", lambda source, dropout: (source, dropout))
    assert first_model([], GPTConfig(dropout=0.3), "gpt2") == ("gpt2", 0.3)


@pytest.mark.parametrize("count, n, rest", [
    (10, 10, [*range(10)]), (10, 5, [0, 2, 4, 6, 8]), (11, 5, [0, 3, 6, 9]), (3, 5, [0, 1, 2]),
])  # fmt: skip
def test_some_rows_are_spread_over_all(count, n, rest):
    assert some(list(range(count)), n) == rest


# Flags


VARIATIONS = (reinforce.ReinforceConfig, rloo.RLOOConfig, grpo.GRPOConfig, sequence_ppo.SequenceConfig, ppo_penalty.PenaltyConfig,
              best_of_n.BestConfig, dpo.DPOConfig, ensemble.EnsembleConfig, iterate.IterateConfig)  # fmt: skip
CLASSES = (RunConfig, GPTConfig, PPOConfig, FitConfig, train_sft.InitConfig, train_rm.AnswerConfig, train_ppo.StageConfig,
           sample.SampleConfig, *VARIATIONS)  # fmt: skip


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


@pytest.fixture
def locks():
    """Folders that a test has locked are free after it."""
    yield
    while settings.LOCKS:
        settings.LOCKS.pop().close()


@pytest.mark.parametrize("flags, how", [
    ({}, {"dtype": None, "recompute": False}),
    ({"dtype": "bfloat16"}, {"dtype": torch.bfloat16, "recompute": False}),
    ({"grad_checkpoint": True}, {"dtype": None, "recompute": True}),
], ids=str)  # fmt: skip
def test_the_scripts_compute_fast_and_as_the_flags_say(tmp_path, locks, flags, how):
    settings.prepare(RunConfig(device="cpu", out=tmp_path, **flags))
    assert minippo.Trunk.forward is not fast.PLAIN and how == fast.HOW


def test_the_seed_decides_all_random_numbers(tmp_path, locks):
    draws = []
    for seed in (7, 7, 8):
        settings.prepare(RunConfig(device="cpu", out=tmp_path / str(len(draws)), seed=seed))
        draws.append(noise(3).tolist())
    assert draws[0] == draws[1] != draws[2]
