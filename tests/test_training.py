"""The specification of plumbing/training.py, and of plumbing/settings.py where it decides how a run
computes. Run: python -m pytest tests/test_training.py"""

import inspect
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

import minippo
from minippo import GPTConfig, PPOConfig, evaluate_actions, frozen_copy, generate, ppo_loss
from plumbing import fast, settings
from plumbing.errors import UserError
from plumbing.settings import RunConfig, explanations
from plumbing.training import (
    FitConfig,
    adamw,
    add_critic,
    batch_of,
    first_model,
    join_batches,
    loss_in_pieces,
    rollout_in_pieces,
    set_lr,
    split_batch,
    spread_over,
    warn_of_long_answers,
)
from tiny import (
    EOS,
    assert_equal,
    gradients,
    noise,
    random_batch,
    stir,
    tiny_gpt,
    tiny_reward_model,
    weights,
)
from train_rm import pair_scores


def test_a_run_is_as_long_as_its_epochs_say_or_else_its_steps():
    assert FitConfig(epochs=3, batch_size=10).steps(21) == 7  # 63 rows
    assert FitConfig(max_steps=70).steps(21) == 70
    assert FitConfig() == FitConfig(0, 1300, 64, 0, 1e-3, 20, 0.0, 1.0)


def test_the_first_model_has_the_vocabulary_of_its_rows(monkeypatch, capsys):
    shape = GPTConfig(1024, 16, 1, 2, 8, dropout=0.1)
    model, tokenizer = first_model([("ab ab", " ab ab")] * 3, shape, "")
    assert tokenizer.encode("ab ab") == [256, 257]
    assert model.config == replace(shape, vocab_size=259) and tokenizer.vocab_size == 259
    assert "vocabulary of 259 tokens" in capsys.readouterr().out
    hf = SimpleNamespace(read_gpt2=lambda source, dropout: (source, dropout))
    monkeypatch.setitem(sys.modules, "plumbing.hf", hf)
    assert first_model([], shape, "gpt2") == ("gpt2", 0.1)


@pytest.mark.parametrize("long, says", [(0, None), (1, None), (2, 60)])
def test_completions_longer_than_ppo_writes_are_warned_of(capsys, long, says):
    tokenizer = SimpleNamespace(encode=list)  # a letter is a token
    rows = [("a" * 99, "b" * 47)] * (20 - long) + [("a", "b" * 59)] * long  # and the end token
    warn_of_long_answers(rows, tokenizer)
    said = capsys.readouterr().out
    assert ("warning" in said) == bool(says) == (f"--max_new_tokens {says} " in said)


def test_a_separate_critic_starts_with_the_scores_of_the_reward_model():
    policy, scorer = tiny_gpt(), frozen_copy(tiny_reward_model())
    scorer.mean.fill_(0.7), scorer.std.fill_(1.9)
    tokens, before = torch.randint(EOS + 1, (3, 6)), weights(scorer)
    logits = policy(tokens)[0]
    add_critic(policy, scorer)
    assert_equal(policy(tokens)[0], logits)
    for length in range(1, 7):
        scores = scorer(tokens, torch.full((3,), length))
        assert_equal(policy(tokens)[1][:, length - 1], scores)
    assert policy.config.separate_critic and all(p.requires_grad for p in policy.parameters())
    critic = stir(policy).critic
    assert torch.equal(weights(scorer), before)
    add_critic(policy, None)  # of an earlier round: it goes on
    assert policy.critic is critic
    with pytest.raises(UserError, match="starts from the reward model, and with --reward"):
        add_critic(tiny_gpt(), None)


# Batches


@pytest.mark.parametrize("count, batch_size", [(1, 4), (5, 3), (6, 3), (3, 10), (20, 7)])
def test_batches_are_full_and_every_row_comes_once_in_a_pass(count, batch_size):
    rows = [f"row {i}" for i in range(count)]
    got = [batch_of(rows, step, batch_size, seed=3) for step in range(3 * count)]
    assert all(len(batch) == batch_size for batch in got)
    stream = sum(got, [])
    passes = [stream[i : i + count] for i in range(0, len(stream), count)]
    assert all(sorted(one) == sorted(rows) for one in passes)
    if count == 20:
        assert len(set(map(tuple, passes))) == len(passes)
        assert passes[0] != batch_of(rows, 0, 20, seed=4)
    assert got[2] == batch_of(rows, 2, batch_size, seed=3)  # a step knows its batch


@pytest.mark.parametrize("count, n, places", [(10, 10, 1), (10, 5, 2), (11, 5, 3), (3, 5, 1)])
def test_rows_are_spread_over_all(count, n, places):
    assert spread_over(list(range(count)), n) == list(range(0, count, places))


def test_a_pair_gets_the_scores_of_its_two_answers():
    model = tiny_reward_model()
    lengths = torch.randint(1, 5, (20, 3)).tolist()
    rows = [tuple(torch.randint(11, (n,)).tolist() for n in row) for row in lengths]
    for scores, place in zip(pair_scores(model, rows, "cpu"), (1, 2), strict=True):
        for score, row in zip(scores, rows, strict=True):
            ids = row[0] + row[place]
            assert_equal(score, model(torch.tensor([ids]), torch.tensor([len(ids)]))[0])


# Optimizer and learning rate


def groups_of(model, *arguments, **more):
    """{name of a parameter: its group}"""
    optimizer = adamw(model, *arguments, **more)
    names = {id(p): name for name, p in model.named_parameters()}
    found = [(names[id(p)], group) for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(names) == len(dict(found))  # every parameter once
    return optimizer, dict(found)


@pytest.mark.parametrize("separate_critic", [False, True])
@pytest.mark.parametrize("critic_lr", [0.0, 0.02])
def test_value_head_and_critic_have_learning_rates_of_their_own(separate_critic, critic_lr):
    policy = tiny_gpt(separate_critic=separate_critic)
    optimizer, groups = groups_of(policy, 0.1, 0.3, critic_lr, 30.0, 1e-4)
    assert set_lr(optimizer, 0.5) == pytest.approx(0.05)
    for name, group in groups.items():
        peak = 0.1
        if separate_critic and name.startswith(("critic", "value_head")):
            peak = critic_lr or 0.1
        elif name.startswith("value_head"):
            peak = 3.0
        assert (group["peak"], group["lr"]) == pytest.approx((peak, 0.5 * peak))
        assert group["weight_decay"] == (0.0 if "norm" in name or name.endswith("bias") else 0.3)
        assert group["eps"] == 1e-4 and group["betas"] == (0.9, 0.95) and group["fused"]


def test_the_defaults_of_the_optimizer_are_one_learning_rate_and_no_decay():
    for model in (tiny_gpt(separate_critic=True), tiny_gpt(), tiny_reward_model()):
        _, groups = groups_of(model, 0.1)
        found = {(g["peak"], g["lr"], g["weight_decay"], g["eps"]) for g in groups.values()}
        assert found == {(0.1, 0.1, 0.0, 1e-8)}


# Pieces


def loss_of_responses(policy, batch, config):
    """A loss that is a mean over responses, not over tokens."""
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], batch["mask"])
    per_row = logprobs.sum(1) * batch["scores"]
    stats = {"ratio_max": per_row.max().item(), "least": per_row.mean().item() ** 2}
    return per_row.mean(), {"loss": per_row.mean().item(), "count": len(per_row), **stats}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loss_of", [ppo_loss, loss_of_responses])
def test_the_loss_its_gradient_and_its_stats_are_the_same_in_pieces(seed, loss_of):
    config = PPOConfig(entropy_coef=0.1, kl_loss_coef=0.3, vf_coef=0.5)
    policy, batch = tiny_gpt(), random_batch(seed)
    batch |= minippo.compute_advantages(batch, config, 0.1)
    rows, seen = [], []

    def watched(policy, piece, config):
        rows.append(len(piece["scores"]))
        return loss_of(policy, piece, config)

    for size in (0, 1, 2, 4, 100):
        policy.zero_grad()
        loss, stats = loss_in_pieces(watched, size)(policy, batch, config)
        loss.backward()
        assert sum(rows) == len(batch["scores"]) and max(rows) <= (size or 100)
        rows.clear()
        stats.pop("least", None)  # a square: no mean over rows
        seen.append((loss.item(), gradients(policy).clone(), stats))
    for loss, gradient, stats in seen[1:]:
        assert loss == pytest.approx(seen[0][0])
        assert_equal(gradient, seen[0][1], 1e-10)
        assert stats == pytest.approx(seen[0][2])
    assert loss_in_pieces(ppo_loss, 0) is ppo_loss


def test_an_update_in_pieces_ends_at_the_same_weights():
    ends, config = [], PPOConfig(epochs=2, minibatches=2, entropy_coef=0.1)
    for size in (0, 1, 2):
        torch.manual_seed(0)
        policy, batch = tiny_gpt(), random_batch(5)
        batch |= minippo.compute_advantages(batch, config, 0.1)
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        passes = minippo.ppo_update(
            policy, optimizer, batch, config, loss_in_pieces(ppo_loss, size)
        )
        ends.append((weights(policy), passes))
    for end, passes in ends[1:]:
        assert_equal(end, ends[0][0], 1e-9)
        assert all(a == pytest.approx(b) for a, b in zip(passes, ends[0][1], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_split_and_joined_without_loss(seed):
    batch, other = random_batch(seed), random_batch(seed + 20)
    for size, x in ((2, batch), (4, batch), (100, batch)):
        pieces = split_batch(x, size)
        assert all(len(piece["scores"]) <= size for piece in pieces)
        assert all(len(piece["scores"]) == size for piece in pieces[:-1])
        assert all(torch.equal(y, x[name]) for name, y in join_batches(pieces).items())
    joined, rows = join_batches([batch, other]), len(batch["scores"])
    assert joined.keys() == batch.keys()
    for name, x in joined.items():
        for part, source in ((x[:rows], batch[name]), (x[rows:], other[name])):
            width = source.shape[-1]
            assert part.dtype == source.dtype and torch.equal(part[..., :width], source)
            assert x.dim() == 1 or not part[:, width:].any()  # padded on the right
    assert split_batch([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("size, sizes", [(0, [5]), (2, [2, 2, 1]), (9, [5])])
@pytest.mark.parametrize("recompute_logprobs", [False, True])
def test_a_rollout_in_pieces_is_one_rollout(monkeypatch, size, sizes, recompute_logprobs):
    policy, ref, seen = tiny_gpt(), tiny_gpt(), []
    prompts, config = [[1, 2, 3], [4], [5, 6], [7, 8], [9]], PPOConfig(6, temperature=0.7)

    def coarse(policy, prompts, *settings):
        """A sampler without chance, whose numbers are a little off, as those of bfloat16."""
        seen.append(len(prompts))
        draw = {"draw": lambda logits: (logits * 1e3).sin().argmax(-1)}
        tokens, mask, logprobs, values = generate(policy, prompts, *settings, **draw)
        return tokens, mask, logprobs + 0.01 * mask, values + 0.01 * mask

    def score(tokens, mask):
        return -mask.sum(1).double()

    monkeypatch.setattr(fast, "generate", coarse)
    whole = minippo.rollout(policy, ref, score, prompts, config, coarse)
    seen.clear()
    options = {"recompute_logprobs": True} if recompute_logprobs else {}
    batch = rollout_in_pieces(size, **options)(policy, ref, score, prompts, config)
    assert seen == sizes and batch.keys() == whole.keys()
    for name, x in whole.items():
        off = 0.01 * (recompute_logprobs and name in ("old_logprobs", "old_values"))
        assert_equal(batch[name], x - off * whole["mask"] if off else x)
        assert not batch[name].requires_grad


# How a run computes


def test_every_setting_is_explained_and_its_default_is_in_its_range():
    for owner in (RunConfig, GPTConfig, PPOConfig, FitConfig):
        source, texts = inspect.getsource(owner).splitlines(), explanations(owner)
        assert texts.keys() == {field.name for field in fields(owner)}
        for field in fields(owner):
            text, low, high = texts[field.name]
            assert field.type not in (int, float) or low <= field.default <= high
            assert any(line.endswith(f"  # {text}") for line in source)


@pytest.fixture
def locks():
    """Folders that a test has locked are free after it."""
    yield
    while settings.LOCKS:
        settings.LOCKS.pop().close()


def test_the_seed_and_the_flags_decide_how_a_run_computes(tmp_path, locks):
    draws = []
    torch.set_float32_matmul_precision("medium")  # whatever was set before, float32 is float32
    for seed, flags in ((7, {}), (7, {"dtype": "bfloat16"}), (8, {"grad_checkpoint": True})):
        settings.prepare(RunConfig(device="cpu", out=tmp_path, seed=seed, **flags))
        dtype = torch.bfloat16 if "dtype" in flags else None
        expected = {"dtype": dtype, "recompute": "grad_checkpoint" in flags, "installed": True}
        assert fast.OPTIONS == expected
        draws.append(noise(3).tolist())
        assert torch.get_float32_matmul_precision() == "highest"
    assert draws[0] == draws[1] != draws[2] and not torch.backends.cuda.cudnn_sdp_enabled()
    run = RunConfig(device="cpu", out=tmp_path, dtype="bfloat16")
    run.device = "cuda"
    settings.prepare(run)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
