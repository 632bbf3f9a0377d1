"""The specification of minippo.py, in its order.

What holds for every batch is said of random batches (tiny.random_batch), what can be computed by
hand of literal ones. All numbers are float64; `nan` stands for what must not matter."""

import copy
import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import minippo
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, batch_metrics, center_values
from minippo import compute_advantages, draw, evaluate_actions, explained_variance, frozen_copy
from minippo import gae, gather_logprobs, generate, gradient_step, kl_adjusted_rewards
from minippo import kl_per_response, masked_mean, policy_loss, ppo_loss, ppo_update, response_mask
from minippo import reward_model_loss, rollout, row_lengths, score_responses, table, trace
from minippo import value_loss, whiten
from tiny import EOS, assert_equal, biased, f64, gradient, inf, marks, nan, noise
from tiny import padded_otherwise, random_batch, stir, tiny_gpt, tiny_reward_model, weights

SOURCE = Path(minippo.__file__).read_text(encoding="utf-8")
for_random_batches = pytest.mark.parametrize("seed", range(20))


# The tables in its texts


def row(name):
    """The numbers of the response in the row of this name of a table in minippo.py."""
    line = rf"(?m)^[# ]+(?:The response of the header: +)?{re.escape(name)}  +(?:\. +)?(.*)"
    cells = re.search(line, SOURCE)[1].split()
    return [float(x) for x in cells[:3]]


def drawn_batch():
    """The response of the drawing as a rollout."""
    names = {"old_logprobs": "log pi", "ref_logprobs": "log ref", "old_values": "value"}
    batch = {key: f64([[0, *row(name), 0]]) for key, name in names.items()}
    return batch | {"tokens": torch.arange(6)[None], "mask": marks(".xxx."), "scores": f64([1.40])}


def shown(x):
    """The numbers of the response (1, T-1), as the tables show them."""
    return [round(v, 2) for v in x.detach()[0, 1:4].tolist()]


def test_the_numbers_in_the_drawing_are_what_the_functions_give():
    batch = drawn_batch()
    x = compute_advantages(batch, PPOConfig(whiten=False))
    computed = {"KL": batch["old_logprobs"] - batch["ref_logprobs"], "reward": x["rewards"]}
    computed |= {"advantage": x["advantages"], "return": x["returns"]}
    computed["whitened"] = compute_advantages(batch, PPOConfig())["advantages"]
    for name, lam in (("lam 1", 1.0), ("lam 0.9", 0.9), ("lam 0", 0.0), ("delta", 0.0)):
        config = PPOConfig(lam=lam, whiten=False)
        computed[name] = compute_advantages(batch, config)["advantages"]
    for name, numbers in computed.items():
        assert row(name) == shown(numbers), name


def test_the_numbers_of_the_gradient_step_are_what_the_loss_gives():
    batch, now = drawn_batch(), f64([[0, *row("log pi now"), 0]]).requires_grad_()
    old, A = batch["old_logprobs"], compute_advantages(batch, PPOConfig())["advantages"]
    ratio = (now - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    policy_loss(now, old, A, batch["mask"], 0.2)[0].backward()
    computed = {"ratio": ratio, "A": A, "clipped": clipped, "gradient": -3 * now.grad}
    computed |= {"ratio * A": ratio * A, "clipped * A": clipped * A}
    for name, numbers in computed.items():
        assert row(name) == shown(numbers), name


# 1. The networks


def test_the_defaults_are_those_that_were_measured():
    assert str(GPTConfig()) == (
        "GPTConfig(vocab_size=1024, context=128, layers=4, heads=4, channels=96, bfloat16=False)"
    )
    assert str(PPOConfig()) == (
        "PPOConfig(max_new_tokens=48, temperature=1.0, length_penalty=0.0, missing_eos_penalty=1.0, "
        "kl_coef=0.1, k=1, epochs=1, minibatches=4, micro_batch=0, max_grad_norm=1.0, gamma=1.0, "
        "lam=1.0, whiten=True, clip_eps=0.2, value_clip=0.2, vf_coef=0.1, entropy_coef=0.0, "
        "kl_loss_coef=0.0)"
    )


def test_the_end_token_is_the_last_of_the_vocabulary_and_heads_share_the_channels():
    assert GPTConfig(vocab_size=300).eos == 299 and replace(GPTConfig(300), vocab_size=7).eos == 6
    with pytest.raises(ValueError, match="multiple"):
        GPTConfig(channels=10, heads=3)
    for wrong in ({"temperature": 0}, {"gamma": 1.1}, {"lam": 2}, {"lam": nan}):
        with pytest.raises(ValueError, match=f"{[*wrong][0]} .*: should be"):
            PPOConfig(**wrong)


def by_formula(policy, tokens):
    """A row (T,) -> logits (T, V), values (T,), by the formulas of GPT-2."""

    def norm(x, layer):
        return F.layer_norm(x, (8,)) * layer.weight + layer.bias

    def linear(x, layer):
        return x @ layer.weight.T + layer.bias

    def run(trunk):
        x = trunk.token_embedding.weight[tokens] + trunk.position_embedding.weight[: len(tokens)]
        future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        for block in trunk.blocks:
            qkv = linear(norm(x, block.norm1), block.attention.qkv)  # (T, 3 x 8)
            heads = []
            for i in (0, 4):  # two heads of four channels
                q, k, v = (qkv[:, 8 * part + i :][:, :4] for part in range(3))
                heads.append((q @ k.T / 2).masked_fill(future, -inf).softmax(-1) @ v)
            x = x + linear(torch.cat(heads, -1), block.attention.out)
            y = linear(norm(x, block.norm2), block.mlp[0])
            y = 0.5 * y * (1 + ((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3)).tanh())
            x = x + linear(y, block.mlp[2])
        return norm(x, trunk.norm)

    hidden, critic = run(policy.trunk), policy.value_trunk or policy.trunk
    values = linear(run(critic), policy.value_head).squeeze(-1)
    return hidden @ policy.trunk.token_embedding.weight.T, values


@pytest.mark.parametrize("critic", [False, True])
def test_the_network_is_a_gpt_2_with_a_value_head(critic):
    policy = tiny_gpt(layers=3, critic=critic)
    tokens = torch.randint(EOS + 1, (3, 7))
    logits, values = policy(tokens)
    for i in range(3):
        expected = by_formula(policy, tokens[i])
        assert_equal(logits[i], expected[0])
        assert_equal(values[i], expected[1])


def test_weights_start_at_gpt_2s_spread_smaller_where_branches_add_up_and_values_at_0():
    policy = GPT(GPTConfig(400, 64, layers=8, heads=4, channels=192))
    for name, parameter in policy.trunk.named_parameters():
        if parameter.dim() == 2:
            adds_up = name.endswith(("out.weight", "mlp.2.weight"))
            std = 0.02 * 2 / (4 if adds_up else 1)  # sqrt(768 / 192) and sqrt(2 x 8)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
        else:
            assert (parameter == ("norm" in name and name.endswith("weight"))).all(), name
    assert not policy.value_head.weight.any() and not policy.value_head.bias.any()
    heads = [
        RewardModel(GPT(GPTConfig(3, 8, 1, heads=1, channels=3))).score_head for _ in range(100)
    ]
    assert torch.cat([head.weight for head in heads]).std().item() == pytest.approx(0.5, rel=0.08)
    assert not heads[0].bias.any()


def test_a_score_is_read_at_the_last_token_then_scaled_and_cut_off_at_the_cap():
    model, tokens, lengths = tiny_reward_model(), torch.randint(EOS, (4, 4)), torch.arange(1, 5)
    last = [model.trunk(tokens[[i], : i + 1])[0, -1] for i in range(4)]  # each row alone
    raw = model.score_head(torch.stack(last)).squeeze(1).detach()
    assert_equal(model(tokens, lengths), raw)
    model.mean.fill_(0.25), model.std.fill_(2.0)
    scaled = (raw - 0.25) / 2
    model.cap.copy_(scaled.sort().values[1:3].mean())
    scores = model(tokens, lengths)
    assert_equal(scores, scaled.clamp(max=model.cap))
    grad = gradient(scores[scaled > model.cap].sum(), model)
    assert not grad.any()  # nothing is gained above the cap


# 2. Log-probabilities and masks


def test_the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token():
    # A prompt of one token and no padding; a response of one token; none at all.
    prompt_lengths, lengths = torch.tensor([1, 2, 3]), torch.tensor([6, 3, 3])
    mask = marks("xxxxx", ".x...", ".....")
    assert_equal(response_mask(prompt_lengths, lengths, 6), mask)


def test_a_row_is_as_long_as_its_last_action_says_and_has_one():
    assert row_lengths(marks("..xx.", "x....", "....x", "xxxxx")).tolist() == [5, 2, 6, 6]
    with pytest.raises(ValueError, match="a response is empty"):
        row_lengths(marks("..xx", "...."))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gathered_logprobs_are_the_log_softmax_at_the_targets_and_never_in_16_bits(dtype):
    logits, targets = (8 * noise(5, 10, 9)).to(dtype), torch.randint(9, (5, 10))
    for options in ({}, {"temperature": 0.7}):
        log_p = (logits.double() / options.get("temperature", 1)).log_softmax(-1)
        logprobs = gather_logprobs(logits, targets, **options)
        assert logprobs.dtype == (dtype if dtype == torch.float64 else torch.float32)
        expected = log_p.gather(-1, targets[..., None]).squeeze(-1)
        assert_equal(logprobs.double(), expected, 1e-5)


def test_bfloat16_is_inside_the_blocks_alone_and_the_same_in_sampling_and_scoring():
    full, seen = tiny_gpt().float(), []
    half = GPT(replace(full.config, bfloat16=True)).eval()
    half.load_state_dict(full.state_dict())

    def watched_draw(logits):
        seen.append(logits)
        return draw(logits)

    tokens, mask, logprobs, _ = generate(half, [[1, 2]], 9, draw=watched_draw)
    sampled = gather_logprobs(torch.cat(seen), tokens[0, 2:])
    assert (sampled - logprobs[mask]).abs().mean() < 0.03
    a, b = full.hidden(tokens)[0], half.hidden(tokens)[0]
    assert 1e-4 < (a - b).abs().max() < 0.3
    assert {x.dtype for x in (b, logprobs, *half.parameters())} == {torch.float32}
    cache = [[] for _ in half.trunk.blocks]
    half.trunk(tokens, cache)
    assert {x.dtype for block in cache for x in block} == {torch.bfloat16}
    assert evaluate_actions(half.to(torch.bfloat16), tokens, mask)[0].dtype == torch.float32


@pytest.mark.parametrize(
    "function, count, more",
    [  # what takes `count` tensors (B, T-1), a mask, and so much more
        (masked_mean, 1, ()),
        (whiten, 1, ()),
        (kl_per_response, 2, ()),
        (explained_variance, 2, ()),
        (gae, 2, (1.0, 1.0)),
        (policy_loss, 3, (0.2,)),
        (value_loss, 3, (0.2,)),
        (partial(kl_adjusted_rewards, f64([1, 2])), 2, (0.1,)),
        (partial(evaluate_actions, tiny_gpt(), torch.ones(2, 4).long()), 0, ()),
    ],
)
def test_a_mask_that_is_not_boolean_and_shapes_that_do_not_fit_are_refused(function, count, more):
    mask, tensors = marks(".xx", "x.."), [noise(2, 3) for _ in range(count)]
    function(*tensors, mask, *more)
    for wrong in (mask.long(), mask[:1], mask[:, :1], mask[0]):
        with pytest.raises(ValueError, match="wanted a boolean mask and equal shapes, got torch."):
            function(*tensors, wrong, *more)
    for i, shape in itertools.product(range(count), [(2, 1), (1, 3), (3,), (2, 4)]):
        with pytest.raises(ValueError, match=r"bool and \[\(2, 3\), .*\]"):
            function(*tensors[:i], noise(*shape), *tensors[i + 1 :], mask, *more)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3,), (1,)], ids=str)
def test_scores_that_are_not_one_number_a_row_are_refused(shape):
    with pytest.raises(ValueError, match="equal shapes"):
        kl_adjusted_rewards(noise(*shape), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.1)
    with pytest.raises(ValueError, match="differ"):
        reward_model_loss(noise(2), noise(*shape))


@for_random_batches
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}], ids=str)
def test_index_t_is_the_choice_of_token_t_plus_1_in_the_state_of_having_read_tokens_0_to_t(
    seed, options
):
    policy, batch = tiny_gpt(critic=seed % 2 > 0), random_batch(seed)
    tokens, mask = batch["tokens"], batch["mask"]
    logits, values = policy(tokens)
    log_p = (logits / options.get("temperature", 1))[:, :-1].log_softmax(-1)
    logprobs, entropy = log_p.gather(-1, tokens[:, 1:, None]), -(log_p.exp() * log_p).sum(-1)
    numbers = evaluate_actions(policy, tokens, mask, with_entropy=True, **options)
    for x, expected in zip(numbers, (logprobs.squeeze(-1), values[:, :-1], entropy), strict=True):
        assert_equal(x, torch.where(mask, expected, 0.0))
    without = evaluate_actions(policy, tokens, mask, **options)
    assert torch.equal(without[0], numbers[0]) and torch.equal(without[1], numbers[1])
    assert not without[2].any()


def test_a_token_without_a_chance_adds_nothing_to_the_entropy():
    policy = biased(tiny_gpt(), {3: -inf, 5: -inf})
    tokens, mask = torch.randint(3, (2, 5)), marks("xxxx", "xxxx")
    _, _, entropy = evaluate_actions(policy, tokens, mask, with_entropy=True)
    p = policy(tokens)[0][:, :-1].softmax(-1).clamp(min=1e-300)
    assert_equal(entropy, -(p * p.log()).sum(-1))
    grad = gradient(entropy.sum(), policy)
    assert grad.isfinite().all() and grad.norm() > 0.1


def numbers_of_rows(policy, batch):
    """All that is computed about each row: {name: (B,) or (B, T-1)}"""
    tokens, mask, scores = batch["tokens"], batch["mask"], batch["scores"]
    x = compute_advantages(batch, PPOConfig(gamma=0.9, lam=0.8, whiten=False))
    x["k1"], x["k3"] = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
    x["scores"], x["ended"] = score_responses(lambda *_: scores, tokens, mask, PPOConfig(), EOS)
    numbers = evaluate_actions(policy, tokens, mask, with_entropy=True)
    return x | dict(zip(("logprobs", "values", "entropy"), numbers))


def alone(x, i, length):
    """Row i of all tensors, without its padding."""
    ends = {"tokens": length}
    return {k: y[[i], : ends.get(k, length - 1)] if y.dim() == 2 else y[[i]] for k, y in x.items()}


@for_random_batches
def test_padding_and_neighbours_change_no_number_of_a_row(seed):
    policy, batch = tiny_gpt(), random_batch(seed)
    x = numbers_of_rows(policy, batch)
    for columns, token, number in ((0, 7, nan), (3, EOS, inf)):
        padded = padded_otherwise(batch, columns, token, number)
        wider = {k: F.pad(y, (0, columns)) if y.dim() == 2 else y for k, y in x.items()}
        assert_equal(numbers_of_rows(policy, padded), wider)
    for i, length in enumerate(row_lengths(batch["mask"]).tolist()):
        assert_equal(numbers_of_rows(policy, alone(batch, i, length)), alone(x, i, length))


# 3. Sampling


def test_a_token_is_drawn_if_a_random_number_falls_into_its_piece_of_the_interval(monkeypatch):
    logits = f64([0.0, 0.3, 0.0, 0.2, 0.5, 0.0]).log() + 7
    drawn = {0.0: 1, 0.299: 1, 0.301: 3, 0.499: 3, 0.501: 4, 1 - 2**-53: 4}

    def rand(*shape, dtype, device):
        return f64([*drawn]).to(dtype).view(shape)

    monkeypatch.setattr(torch, "rand", rand)
    assert draw(logits.expand(6, 6)).tolist() == [*drawn.values()]
    # In float32 these probabilities add up to less than 1.
    assert draw(torch.zeros(6, 41))[-1] == 40
    for bad in (nan, inf):
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            draw(f64([[0.0, 1.0], [bad, 1.0]]))


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 4


def settled(logits):
    """Tokens that follow from the logits, in place of random ones: (B, V) -> (B,)."""
    u = logits[:, :1] * 100 % 1
    return (logits.softmax(-1).cumsum(-1) < u).sum(-1)


def plain_generate(policy, prompt, max_new_tokens, temperature):
    """One row by itself, read again for each token -> the row; log pi and value of each token."""
    row, numbers = [*prompt], []
    while len(row) < min(16, len(prompt) + max_new_tokens) and row[-1] != EOS:
        logits, values = policy(torch.tensor([row]))
        logits = logits[:, -1] / temperature
        row.append(settled(logits).item())
        numbers.append((logits.log_softmax(-1)[0, row[-1]].item(), values[0, -1].item()))
    return row, numbers


@pytest.mark.parametrize("prompts", [PROMPTS, [[2, 3]], [[1, 2], [3, 4]], [[1] * 15, [2]]], ids=len)
@pytest.mark.parametrize(
    "max_new_tokens, options",
    [(6, {}), (1, {"temperature": 1.3}), (10**12, {"temperature": 0.7})],  # more than fits
)
@pytest.mark.parametrize("bias", [-inf, 1.0, 50.0])  # the end token: never, at any time, at once
def test_sampling_is_a_plain_loop_that_reads_whole_rows(prompts, max_new_tokens, options, bias):
    policy = biased(tiny_gpt(critic=bias == 1), {EOS: bias})
    tokens, mask, *numbers = generate(policy, prompts, max_new_tokens, draw=settled, **options)
    assert not any(x.requires_grad for x in numbers)
    temperature, longest = options.get("temperature", 1.0), 0
    for i, prompt in enumerate(prompts):
        row, expected = plain_generate(policy, prompt, max_new_tokens, temperature)
        assert tokens[i].tolist() == row + [0] * (tokens.shape[1] - len(row))
        assert mask[i].nonzero().flatten().tolist() == [*range(len(prompt) - 1, len(row) - 1)]
        assert_equal(torch.stack([x[i, mask[i]] for x in numbers], 1), f64(expected), 1e-9)
        longest = max(longest, len(row))
    assert tokens.shape[1] == longest


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_an_empty_prompt_and_one_that_fills_the_context_are_refused(prompts):
    with pytest.raises(ValueError, match="1 to 15 tokens"):
        generate(tiny_gpt(), prompts, 5)


# 4. The reward model's loss


def test_the_loss_is_minus_the_log_probability_of_the_choices_under_bradley_terry():
    chosen, rejected = f64([2.0, 0.5, 1.0]).requires_grad_(), f64([1.0, 2.5, 1.0]).requires_grad_()
    loss, stats = reward_model_loss(chosen, rejected)
    chances = [1 / (1 + math.exp(-margin)) for margin in (1.0, -2.0, 0.0)]
    assert loss.item() == pytest.approx(-sum(map(math.log, chances)) / 3)
    assert stats == pytest.approx({"accuracy": (1 + 0 + 0.5) / 3, "margin": -1 / 3})  # a tie: half
    loss.backward()
    assert_equal(chosen.grad, (f64(chances) - 1) / 3)
    assert_equal(rejected.grad, (1 - f64(chances)) / 3)
    wrong, _ = reward_model_loss(f64([-5000.0]), f64([5000.0]))
    assert wrong.item() == pytest.approx(10_000)  # finite, however wrong


# 5. PPO: the KL and the rewards


def test_both_kl_estimates_are_right_on_average_and_k3_is_never_negative():
    # Policy and reference; each response of two tokens once, weighted by its probability.
    p, q = f64([0.5, 0.3, 0.15, 0.05]), f64([0.1, 0.2, 0.3, 0.4])
    rows = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    logprobs, ref_logprobs = (F.pad(x.log()[rows], (1, 1), value=nan) for x in (p, q))
    k1, k3 = kl_per_response(logprobs, ref_logprobs, marks(*[".xx."] * 16))
    kl, chances = 2 * (p * (p / q).log()).sum(), p[rows].prod(1)
    assert_equal((chances * k1).sum(), kl)
    assert_equal((chances * k3).sum(), kl)
    assert (k3 >= 0).all() and k1.min() < 0


@for_random_batches
def test_a_token_pays_for_its_part_of_the_kl_and_the_last_one_gets_the_score(seed):
    batch = random_batch(seed)
    rewards = compute_advantages(batch, PPOConfig(kl_coef=0.3))["rewards"]
    expected = 0.3 * (batch["ref_logprobs"] - batch["old_logprobs"])
    for b, inside in enumerate(batch["mask"]):
        expected[b, inside.nonzero().max()] += batch["scores"][b]
    assert_equal(rewards, expected)


# 5. PPO: advantages


@for_random_batches
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.9, 1.0), (0.5, 0.0), (0.0, 0.5)])
def test_advantages_are_sums_of_deltas_and_returns_are_advantages_plus_values(seed, gamma, lam):
    batch, before, config = random_batch(seed), random_batch(seed), PPOConfig(gamma=gamma, lam=lam)
    mask, values = batch["mask"], batch["old_values"]
    white, x = (compute_advantages(batch, replace(config, whiten=on)) for on in (True, False))
    rewards, returns, advantages = x.values()
    for b in range(len(mask)):
        t = mask[b].nonzero().flatten()
        r, V = rewards[b, t], torch.cat([values[b, t], f64([0.0])])  # 0 after the last action
        delta = (r + gamma * V[1:] - V[:-1]).tolist()
        A = [sum((gamma * lam) ** n * d for n, d in enumerate(delta[i:])) for i in range(len(t))]
        assert_equal(advantages[b, t], f64(A))
        assert_equal(returns[b, t], f64(A) + values[b, t])
    assert not advantages[~mask].any() and not returns[~mask].any()
    assert_equal(white, x | {"advantages": whiten(advantages, mask)})
    outside = torch.where(mask, rewards, nan), torch.where(mask, values, inf)
    assert_equal(gae(*outside, mask, gamma, lam), (advantages, returns))
    assert_equal(batch, before)  # nothing is overwritten


def test_whitening_sees_the_mask_only_and_knows_no_scale():
    white = whiten(f64([[1, 3, nan, 100], [inf, 5, 7, 9]]), marks("xx..", ".xxx"))
    assert_equal(white, (f64([[1, 3, 5, 5], [5, 5, 7, 9]]) - 5) / 8**0.5)
    x, mask = noise(3, 5), torch.rand(3, 5) < 0.8
    for scale in (1e-9, 10, 1e9):
        assert_equal(whiten(scale * x, mask), whiten(x, mask), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1000.3, -1e6 / 3, 1e-6 / 3, 0.1])
def test_equal_values_are_whitened_to_0(value, dtype):
    x = torch.full((7, 43), value, dtype=dtype)
    x[0, 0] *= 1 + torch.finfo(dtype).eps  # rounding
    assert not whiten(x, torch.rand(7, 43) < 0.9).any()


# 5. PPO: losses


def test_a_token_has_a_gradient_unless_it_has_moved_far_enough():
    ratio = f64([1e-3, 0.79, 0.81, 1.0, 1.19, 1.21, 50.0]).repeat(2)
    A = f64(7 * [2.0] + 7 * [-1.0])
    old = F.pad(noise(1, 14), (1, 1), value=nan)
    logprobs = (old + F.pad(ratio.log(), (1, 1))).requires_grad_()
    advantages, mask = F.pad(A[None], (1, 1), value=inf), F.pad(A[None] != 0, (1, 1))
    loss, stats = policy_loss(logprobs, old, advantages, mask, 0.2)
    loss.backward()
    # What should rise is pulled back up from below the range, what should fall down from above it
    far_enough = torch.where(A > 0, ratio > 1.2, ratio < 0.8)
    counted = torch.where(A > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
    gradient = torch.where(far_enough, 0, ratio * A)  # grad (ratio A) = ratio A grad log pi
    assert_equal(loss, -(counted * A).mean())
    assert_equal(logprobs.grad, -F.pad(gradient[None], (1, 1)) / 14)
    expected = {"policy_loss": loss.item(), "approx_kl": (ratio - 1 - ratio.log()).mean().item()}
    assert stats == pytest.approx(expected | {"clip_frac": 8 / 14, "ratio_max": 50.0})


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_that_overflows_has_a_finite_loss_and_no_gradient_behind_the_clip(advantage):
    logprobs, mask = torch.tensor([[100.0, 0.1, -100.0]]).requires_grad_(), marks("xxx")
    loss, stats = policy_loss(logprobs, torch.zeros(1, 3), torch.full((1, 3), advantage), mask, 0.2)
    loss.backward()
    assert all(map(math.isfinite, stats.values())) and logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 0] == 0 if advantage >= 0 else loss > 1e6
    assert (logprobs.grad[0, 1] != 0) == (advantage != 0)
    assert all(x.isfinite().all() for x in kl_per_response(logprobs, torch.zeros(1, 3), mask))


def test_only_what_is_computed_now_has_a_gradient():
    x = f64([[0.1, -0.2]]).requires_grad_()
    recorded, mask = 2 * x, marks("xx")  # carelessly, with its gradient
    policy_loss(x, recorded, recorded, mask, inf)[0].backward()
    assert_equal(x.grad, -(-x.detach()).exp() * recorded.detach() / 2)  # grad ratio = ratio
    x.grad = None
    value_loss(x, recorded, 3 * x, mask, inf)[0].backward()
    assert_equal(x.grad, (x - 3 * x).detach() / 2)


@pytest.mark.parametrize(
    "value, old, target, loss, gradient",
    [
        (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9),  # inside the range: plain
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved to 2, counted as 1.2: far enough towards 3
        (0.0, 1.0, -3.0, 0.5 * 3.8**2, 0.0),  # the same, downwards: counted as 0.8
        (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0),  # moved away from the target: full gradient back
        (2.0, 1.0, 1.0, 0.5 * 1.0**2, 1.0),  # moved past the target: full gradient back
    ],
)
def test_the_value_loss_clips_around_the_old_value(value, old, target, loss, gradient):
    values = f64([[value]]).requires_grad_()
    result, stats = value_loss(values, f64([[old]]), f64([[target]]), marks("x"), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss) == stats["value_loss"]
    assert stats["value_clip_frac"] == (gradient == 0)
    assert values.grad.item() == pytest.approx(gradient)


# 6. The loop


def test_the_reward_model_and_the_reference_start_as_copies_and_the_latter_stays():
    policy = tiny_gpt().train()
    model, frozen, before = RewardModel(policy).double(), frozen_copy(policy), weights(policy)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(module.training for module in frozen.modules())
    assert all(p.requires_grad for p in policy.parameters()) and policy.training
    stir(policy)
    assert_equal(weights(frozen), before)
    assert_equal(weights(model.trunk), weights(frozen.trunk))


def test_penalties_are_taken_off_for_each_token_and_for_a_response_that_was_cut_off():
    # An end token in the prompt, as in the last row, or in the padding ends no response.
    tokens = [[1, 2, 3, EOS, 0], [1, 2, 3, 4, 5], [1, EOS, 0, 0, 0], [EOS, 1, 2, EOS, EOS]]
    tokens, mask = torch.tensor(tokens), marks(".xx.", ".xxx", "x...", ".x..")
    raw = f64([1.0, 2.0, 3.0, 4.0]).requires_grad_()

    def score(*args):
        assert args == (tokens, mask)
        return raw

    config = PPOConfig(length_penalty=0.25, missing_eos_penalty=0.5)
    scores, ended = score_responses(score, tokens, mask, config, EOS)
    assert ended.tolist() == [True, False, True, False] and not scores.requires_grad
    assert_equal(scores, f64([1 - 0.5, 2 - 0.75 - 0.5, 3 - 0.25, 4 - 0.25 - 0.5]))


@pytest.mark.parametrize("size", [0, 1, 5, 23])
def test_a_rollout_holds_what_policy_reference_and_score_say_at_once_or_in_pieces(size):
    policy, ref, model = tiny_gpt(), tiny_gpt(), tiny_reward_model()
    prompts, pieces = [*PROMPTS[6:], [1] * 12], []
    config = PPOConfig(max_new_tokens=5, temperature=0.7, missing_eos_penalty=0.5, micro_batch=size)

    def kept_generate(*args):
        assert args == (policy, prompts[len(pieces) * size :][: size or 19], 5, 0.7)
        pieces.append(generate(*args))
        return pieces[-1]

    def score(tokens, mask):
        return model(tokens, row_lengths(mask))

    batch = rollout(policy, ref, score, prompts, config, kept_generate)
    assert not any(x.requires_grad for x in batch.values())
    tokens, mask = batch["tokens"], batch["mask"]
    expected = {}
    for name, parts in zip(("tokens", "mask", "old_logprobs", "old_values"), zip(*pieces)):
        width = max(x.shape[1] for x in parts)
        expected[name] = torch.cat([F.pad(x, (0, width - x.shape[1])) for x in parts])
    expected["ref_logprobs"] = evaluate_actions(ref, tokens, mask, 0.7)[0].detach()
    expected["scores"], ended = score_responses(score, tokens, mask, config, EOS)
    assert_equal(batch, expected | {"ended": ended})
    assert 0 < ended.sum() < len(ended) == 19


@for_random_batches
def test_centred_values_are_shifted_so_that_their_mean_is_the_mean_score(seed):
    policy, batch = tiny_gpt(critic=seed % 2 > 0), random_batch(seed)
    tokens, mask = batch["tokens"], batch["mask"]
    before = batch["old_values"] = evaluate_actions(policy, tokens, mask)[1].detach()
    center_values(policy, batch)
    shift = batch["scores"].mean() - before[mask].mean()
    values = evaluate_actions(policy, tokens, mask)[1]
    assert_equal(values, torch.where(mask, before + shift, 0.0))


ALL_TERMS = PPOConfig(
    temperature=0.7,
    lam=0.9,
    clip_eps=0.15,
    value_clip=0.4,
    vf_coef=0.5,
    entropy_coef=0.1,
    kl_loss_coef=0.3,
)


def ready_batch(seed):
    """A random batch with phase 3 done."""
    batch = random_batch(seed)
    return batch | compute_advantages(batch, ALL_TERMS)


@for_random_batches
def test_the_loss_of_ppo_is_the_sum_of_its_weighted_terms(seed):
    policy, batch = tiny_gpt(), ready_batch(seed)
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    loss, stats = ppo_loss(policy, batch, ALL_TERMS)
    logprobs, values, entropy = evaluate_actions(policy, batch["tokens"], mask, 0.7, True)
    first, stats_of_policy = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, 0.15)
    second, stats_of_values = value_loss(values, batch["old_values"], batch["returns"], mask, 0.4)
    k2 = 0.5 * ((logprobs - batch["ref_logprobs"])[mask] ** 2).mean()
    assert_equal(loss, first + 0.5 * second + 0.3 * k2 - 0.1 * entropy[mask].mean())
    assert stats == pytest.approx({"loss": loss.item()} | stats_of_policy | stats_of_values)


def plain_update(policy, batch, config):
    """ppo_update with plain gradient descent, each step in one piece."""
    optimizer, steps = torch.optim.SGD(policy.parameters(), 0.1), []
    for _ in range(config.epochs):
        for rows in torch.randperm(len(batch["mask"])).tensor_split(config.minibatches):
            loss, stats = ppo_loss(policy, {name: x[rows] for name, x in batch.items()}, config)
            policy.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
            steps.append(stats | {"grad_norm": norm.item()})
    means = {name: sum(stats[name] for stats in steps) / len(steps) for name in steps[0]}
    return means | {"ratio_max": max(stats["ratio_max"] for stats in steps)}


@for_random_batches
@pytest.mark.parametrize(
    "epochs, minibatches, micro_batch", [(1, 1, 0), (3, 2, 0), (2, 2, 1), (2, 1, 2)]
)
def test_an_update_is_a_plain_loop_and_pieces_of_a_step_add_up(
    seed, epochs, minibatches, micro_batch
):
    steps = {"epochs": epochs, "minibatches": minibatches, "micro_batch": micro_batch}
    policy, batch, config = tiny_gpt(), ready_batch(seed), replace(ALL_TERMS, **steps)
    twin, sizes = copy.deepcopy(policy), []
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)

    def loss(model, rows, config):
        sizes.append(len(rows["scores"]))
        return ppo_loss(model, rows, config)

    torch.manual_seed(seed)
    expected = plain_update(twin, batch, config)
    torch.manual_seed(seed)
    stats = ppo_update(policy, optimizer, batch, config, loss)
    assert_equal(weights(policy), weights(twin))
    assert stats == pytest.approx(expected)
    assert max(sizes) <= (micro_batch or 6)
    with pytest.raises(ValueError, match=f"7 minibatches of only {len(batch['mask'])} responses"):
        ppo_update(policy, optimizer, batch, replace(config, minibatches=7))


@pytest.mark.parametrize("max_grad_norm, scale", [(1.0, 0.2), (inf, 1.0), (10.0, 1.0)])
def test_one_norm_is_taken_over_all_parameters_and_scaled_down_to_max_grad_norm(
    max_grad_norm, scale
):
    x, y = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    x.grad, y.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer = torch.optim.SGD([{"params": [x]}, {"params": [y], "lr": 10.0}], 1.0)
    assert gradient_step(optimizer, max_grad_norm) == 5.0  # the norm before
    assert (x.item(), y.item()) == pytest.approx((-3 * scale, -40 * scale))


@pytest.mark.parametrize("value", [inf, nan])
def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_touched(value):
    x = torch.nn.Parameter(torch.zeros(2))
    x.grad = torch.tensor([1.0, value])
    with pytest.raises(FloatingPointError, match="norm of the gradient is"):
        gradient_step(torch.optim.SGD([x], 1.0), 1.0)
    assert not x.any()


def test_explained_variance_is_1_for_perfect_values_and_0_for_constant_ones():
    returns, mask = f64([[nan, 1, 2], [3, 4, inf]]), marks(".xx", "xx.")
    for values, expected in ((returns, 1), (torch.full_like(returns, 7.0), 0), (-returns, -3)):
        assert explained_variance(values, returns, mask) == pytest.approx(expected, abs=1e-6)
    assert math.isfinite(explained_variance(returns, returns, marks(".x.", "...")))  # one token


@for_random_batches
def test_what_is_watched_is_what_the_names_say(seed):
    batch = random_batch(seed)
    assert "explained_variance" not in batch_metrics(batch, PPOConfig())
    batch |= compute_advantages(batch, PPOConfig())
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    log_ratio = torch.where(mask, old_logprobs - batch["ref_logprobs"], 0.0).sum(1)
    _, k3 = kl_per_response(old_logprobs, batch["ref_logprobs"], mask)
    padded = padded_otherwise(batch, 2, EOS, nan)
    assert batch_metrics(padded, PPOConfig(kl_coef=0.25)) == pytest.approx({
        "score": scores.mean().item(),
        "kl": log_ratio.mean().item(),
        "kl_k3": k3.mean().item(),
        "kl_coef": 0.25,
        "rlhf_reward": (scores - 0.25 * log_ratio).mean().item(),
        "entropy": -old_logprobs.sum().item() / mask.sum().item(),
        "response_length": mask.sum().item() / len(mask),
        "eos_rate": batch["ended"].sum().item() / len(mask),
        "explained_variance": explained_variance(batch["old_values"], batch["returns"], mask),
    })  # fmt: skip


# The parts together, and the example


def test_a_trace_is_the_table_of_the_drawing_turned_round():
    batch = drawn_batch()
    batch |= compute_advantages(batch, PPOConfig())
    batch = {name: torch.cat([torch.zeros_like(x), x]) for name, x in batch.items()}
    spell = "Bees eat sweet nectar <eos> pad".split().__getitem__
    titles = "log pi", "log ref", "KL", "reward", "value", "return", "advantage"
    expected = {"action": ["sweet", "nectar", "<eos>"]} | {title: row(title) for title in titles}
    expected["advantage"] = row("whitened")
    assert table(trace(batch, 1, spell)) == table(expected)
    del batch["rewards"]
    batch["logprobs"] = f64([5 * [0], [9, -0.25, -1.1, -0.4, 9]])
    columns = trace(batch, 1, str)
    assert "reward" not in columns and columns["log pi now"] == [-0.25, -1.1, -0.4]
    lines = ["    action         x", "     sweet      0.00", "    nectar      1.20"]
    assert table({"action": ["sweet", "nectar"], "x": [-1e-9, 1.2]}) == lines  # no -0.00


def test_the_example_learns_what_its_score_function_likes_where_there_is_nothing_but_torch():
    code = "import runpy, sys; sys.modules.update(numpy=None, tiktoken=None); "
    code += f"runpy.run_path({minippo.__file__!r}, run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", code]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = subprocess.check_output(command, env=one_thread, encoding="utf-8").splitlines()
    lines = [re.match(r"iteration +(\d+)  score +(\S+)  kl +(\S+)", x) for x in printed[:6]]
    assert [int(x[1]) for x in lines] == [1, 21, 41, 61, 81, 100]
    scores, kl = ([float(x[i]) for x in lines] for i in (2, 3))
    assert -3 < scores[0] < -1.5 and min(scores[2:]) > 3 and 3.5 < scores[-1] <= 4  # eight turns
    assert abs(kl[0]) < 0.3 and 8 < min(kl[2:]) <= max(kl) < 13  # at beta = 0: 19 to 20
    words, (title, *actions) = printed[5].split()[-4:], [line.split()[0] for line in printed[6:]]
    turns = [(a in "aeiou") != (b in "aeiou") for w in words for a, b in itertools.pairwise(w)]
    assert sum(turns) > 0.8 * len(turns) and all(x.isalpha() and len(x) <= 9 for x in words)
    assert title == "action" and actions == [*words[0][1:], "<eos>"]  # without the prompt


def test_the_example_begins_with_the_same_weights_and_lowers_the_learning_rate(monkeypatch):
    batch, starts, rates = random_batch(0), [], []

    def update(policy, optimizer, *_):
        starts.append(weights(policy))
        rates.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(minippo, "rollout", lambda *_: {**batch})
    monkeypatch.setattr(minippo, "ppo_update", update)
    minippo.main(), torch.manual_seed(1), minippo.main()
    assert torch.equal(starts[0], starts[100]) and len(rates) == 200
    assert starts[0][-1] != 0  # the bias of the values: they are centred
    assert rates[:100] == pytest.approx([3e-3 * (1 - i / 100) for i in range(100)])
