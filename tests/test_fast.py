"""The specification of plumbing/fast.py: less work, the same numbers. Run: python -m pytest tests/test_fast.py"""

import random

import pytest
import torch

import minippo
from minippo import GPT, GPTConfig, Trunk, evaluate_actions, response_mask
from plumbing import fast
from plumbing.fast import Packing
from plumbing.text import pad
from plumbing.training import add_critic
from tiny import EOS, assert_equal, biased, inf, noise, stir, tiny_gpt, tiny_reward_model


def all_read(tokens, lengths):
    return torch.arange(tokens.shape[1]) < lengths[:, None]


def test_what_rows_have_in_common_is_computed_once_and_padding_never():
    tokens, lengths = pad([[7, 8, 9], [7, 8, 5, 9], [7, 8], [3, 8, 5, 9], [7]])
    packing = Packing(tokens, all_read(tokens, lengths))
    # 3 8 5 9, then 7 and 8, which four and three rows share, then 5 9 and 9.
    assert sorted(zip(packing.columns.tolist(), packing.ids.tolist(), strict=True)) == [
        (0, 3), (0, 7), (1, 8), (1, 8), (2, 5), (2, 5), (2, 9), (3, 9), (3, 9),
    ]  # fmt: skip


def test_rows_in_any_order_share_what_they_have_in_common():
    tokens, lengths = pad([[1, 2, 3], [4, 4], [1, 2, 5], [4, 4, 4], [1, 2, 3]])
    assert len(Packing(tokens, all_read(tokens, lengths)).ids) == 4 + 3


def random_tree(seed):
    """Rows that grow from each other's beginnings, in random order, some of them twice; and junk in the padding."""
    draw, rows = random.Random(seed), [[]]
    for _ in range(draw.randint(2, 14)):
        stem = draw.choice(rows)
        rows.append(stem[: draw.randint(0, len(stem))] + [draw.randrange(3) for _ in range(draw.randint(0, 4))])
    rows = [row for row in rows if row] or [[0]]
    rows += draw.choices(rows, k=3)
    draw.shuffle(rows)
    tokens, lengths = pad(rows)
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    return rows, torch.where(padding, torch.randint(3, tokens.shape), tokens), lengths


@pytest.mark.parametrize("seed", range(40))
def test_every_different_beginning_is_computed_once_and_laid_out_wherever_it_stands(seed):
    rows, tokens, lengths = random_tree(seed)
    packing = Packing(tokens, all_read(tokens, lengths))
    beginnings = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert len(packing.ids) == len(beginnings)
    # Give each computed token a number of its own, lay these out, and see that two places have the same if and only if they have
    # read the same.
    numbers = packing.unpack(torch.arange(len(beginnings))[:, None].double())[..., 0]
    at = {}
    for b, row in enumerate(rows):
        for t in range(len(row)):
            number = int(numbers[b, t])
            assert at.setdefault(tuple(row[: t + 1]), number) == number
            assert (packing.ids[number], packing.columns[number]) == (row[t], t)
    assert len(set(at.values())) == len(beginnings)
    # And back: each is picked where it really stands, not in the padding.
    grid = torch.full(tokens.shape, float("nan"), dtype=torch.float64)
    for b, row in enumerate(rows):
        grid[b, : len(row)] = numbers[b, : len(row)]
    assert_equal(packing.pack(grid[..., None])[:, 0], torch.arange(len(beginnings)).double())


@pytest.mark.parametrize("shared, whole", [(1, True), (2, False), (4, False)])
def test_where_less_than_a_tenth_would_be_saved_the_tokens_stay_where_they_are(shared, whole):
    tokens = torch.arange(20).view(2, 10)
    tokens[1, :shared] = tokens[0, :shared]
    packing = Packing(tokens, torch.ones(2, 10, dtype=torch.bool))
    assert len(packing.ids) == (20 if whole else 20 - shared)
    if whole:
        assert_equal(packing.ids, tokens.flatten())
        assert packing.columns.tolist() == [*range(10), *range(10)]
        grid = noise(2, 10, 3)
        assert_equal(packing.pack(grid), grid.flatten(0, 1), 0)
        assert_equal(packing.unpack(packing.pack(grid)), grid, 0)


def test_nothing_is_computed_behind_the_last_token_that_is_read():
    tokens = torch.tensor([[1, 2, 3, 4], [1, 5, 6, 7], [8, 9, 9, 9]])
    read = torch.tensor([[False, True, False, False], [False, True, True, False], [False] * 4])
    packing = Packing(tokens, read)
    assert sorted(packing.ids.tolist()) == [1, 2, 5, 6]
    assert packing.ids[packing.wanted].tolist() == [2, 5, 6] and packing.columns[packing.wanted].tolist() == [1, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_the_hidden_states_that_are_read_are_those_of_the_plain_network(seed):
    trunk, (_, tokens, lengths) = tiny_gpt().trunk, random_tree(seed)
    read = (torch.rand(tokens.shape) < 0.4) & all_read(tokens, lengths)
    read[0, 0] = True
    plain, packed = both_ways(lambda: trunk(tokens, read))
    assert_equal(packed[read], plain[read], 1e-11)
    assert not packed[~read].any()
    whole, packed = both_ways(lambda: trunk(tokens))  # by default everything is read
    assert_equal(packed, whole, 1e-11)


def test_the_last_mlp_computes_only_what_is_read():
    policy, rows = tiny_gpt(), []
    policy.trunk.blocks[-1].mlp.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    fast.install()
    tokens, mask = torch.randint(EOS + 1, (2, 7)), torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]]).bool()
    evaluate_actions(policy, tokens, mask)
    assert rows == [5]


def with_critic():
    policy = tiny_gpt()
    add_critic(policy, tiny_reward_model())
    return policy


def both_ways(function):
    """What a function gives with the plain networks and with the fast ones."""
    fast.uninstall()
    plain = function()
    fast.install()
    return plain, function()


@pytest.mark.parametrize("make", [tiny_gpt, with_critic])
@pytest.mark.parametrize("seed", range(3))
def test_packing_changes_no_number_and_no_gradient(make, seed):
    model, (_, tokens, lengths) = make(), random_tree(seed)
    mask = response_mask(torch.ones_like(lengths), lengths.clamp(min=2), tokens.shape[1])
    weights = noise(3, *mask.shape)

    def compute():
        model.zero_grad()
        outputs = torch.stack(evaluate_actions(model, tokens, mask))
        (outputs * weights).sum().backward()
        return outputs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    (outputs, gradient), (fast_outputs, fast_gradient) = both_ways(compute)
    assert_equal(outputs, fast_outputs, 1e-11)
    assert_equal(gradient, fast_gradient, 1e-9)
    assert gradient.norm() > 1


def test_a_packed_reward_model_gives_the_same_scores_and_gradients():
    model, (_, tokens, lengths) = tiny_reward_model(), random_tree(5)

    def compute():
        model.zero_grad()
        scores = model(tokens, lengths)
        (scores**2).sum().backward()
        return scores.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    (scores, gradient), (fast_scores, fast_gradient) = both_ways(compute)
    assert_equal(scores, fast_scores, 1e-11)
    assert_equal(gradient, fast_gradient, 1e-9)


def test_dropout_drops_in_training_only():
    fast.install()
    model, tokens = stir(GPT(GPTConfig(11, 16, 2, heads=2, channels=8, dropout=0.5))), torch.tensor([[1, 2, 3], [1, 2, 4]])
    still = model.eval()(tokens)[0]
    assert_equal(model(tokens)[0], still)
    first, second = model.train()(tokens)[0], model(tokens)[0]
    assert (first - still).abs().min() > 1e-6 and (first - second).abs().min() > 1e-6


def test_installed_and_uninstalled():
    model, seen = tiny_gpt(), []
    model.trunk.blocks[0].norm1.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    both_ways(lambda: model(torch.tensor([[1, 2, 3], [1, 2, 4]])))
    assert seen == [(2, 3, 8), (4, 8)]  # six tokens of which two are the same beginning
    fast.uninstall()
    assert Trunk.forward is fast.PLAIN


# Sampling with a cache


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("bias", [-inf, 0.0, 2.0], ids=["never ends", "ends sometimes", "ends early"])
@pytest.mark.parametrize("make", [tiny_gpt, with_critic])
def test_decoding_with_a_cache_gives_the_logprobs_that_scoring_the_whole_rows_gives(make, temperature, max_new_tokens, bias):
    policy = biased(make(), {EOS: bias})
    tokens, mask, logprobs, values = fast.generate(policy, PROMPTS, max_new_tokens, temperature)
    with torch.no_grad():
        scored, expected, _ = evaluate_actions(policy, tokens, mask, temperature)
    assert_equal(logprobs, scored, 1e-10)
    assert_equal(values, expected, 1e-10)
    assert not logprobs[~mask].any() and not values[~mask].any()


@pytest.mark.parametrize("context", [9, 16, 64])
@pytest.mark.parametrize("max_new_tokens", [1, 5, 30])
@pytest.mark.parametrize("bias", [-inf, 0.0, 2.0], ids=["never ends", "ends sometimes", "ends early"])
@pytest.mark.parametrize("make", [tiny_gpt, with_critic])
def test_both_samplers_write_the_same_when_chance_does(make, context, max_new_tokens, bias):
    policy = biased(make() if context == 16 else tiny_gpt(context=context), {EOS: bias})

    def likeliest(logits):  # up to a shift that depends on nothing but the logits, so that rows differ
        return (logits * 1e3).sin().argmax(-1)

    plain = minippo.generate(policy, PROMPTS, max_new_tokens, 0.8, likeliest)
    cached = fast.generate(policy, PROMPTS, max_new_tokens, 0.8, likeliest)
    assert len(set(plain[1].sum(1).tolist())) > 1 or max_new_tokens == 1 or bias != 0
    for a, b in zip(plain, cached, strict=True):
        assert_equal(a.double() if a.is_floating_point() else a, b.double() if b.is_floating_point() else b, 1e-9)


def test_each_new_token_is_one_row_of_work_and_rows_that_ended_are_dropped():
    policy, seen = biased(tiny_gpt(context=64), {EOS: 1.0}), []
    policy.trunk.blocks[0].mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:-1].numel()))
    fast.generate(policy, PROMPTS, 40)
    assert seen[0] == 1 + 4 + 2 + 3 + 5 + 1  # the different beginnings of the prompts; then at most one token per row
    assert max(seen[1:]) == 48 and seen[1:] == sorted(seen[1:], reverse=True) and seen[-1] < 24


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_an_empty_prompt_and_one_that_fills_the_context_are_refused(prompts):
    with pytest.raises(ValueError, match="15"):
        fast.generate(tiny_gpt(), prompts, 5)


def test_every_response_is_sampled_as_often_as_the_plain_sampler_does():
    policy, n, counts = stir(GPT(GPTConfig(3, 8, layers=1, heads=1, channels=8)).double().eval(), 0.15), 3000, []
    for generate in (minippo.generate, fast.generate):
        tokens, mask, *_ = generate(policy, [[0, 1], [1]] * n, 3)
        seen = {}
        for i, (row, inside) in enumerate(zip(tokens[:, 1:], mask, strict=True)):
            key = (i % 2, *row[inside].tolist())
            seen[key] = seen.get(key, 0) + 1
        counts.append(seen)
    keys = [key for key in counts[0] if counts[0][key] + counts[1].get(key, 0) > 10]
    chi2 = sum((counts[0][key] - counts[1].get(key, 0)) ** 2 / (counts[0][key] + counts[1].get(key, 0)) for key in keys)
    assert 20 < len(keys) <= 30 and chi2 < 70  # 30 degrees of freedom: 70 is passed once in 20,000 times


# Memory and types


def test_recomputing_activations_changes_no_gradient_and_computes_each_block_twice():
    policy, tokens, calls = tiny_gpt(), torch.randint(11, (3, 7)), []
    policy.trunk.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for flag in (False, True):
        fast.install(recompute=flag)
        policy.zero_grad()
        calls.clear()
        logits, values = policy(tokens)
        (logits.square().mean() + values.square().mean()).backward()
        assert len(calls) == 1 + flag
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert_equal(*gradients)
    calls.clear()
    fast.generate(policy, [[1, 2]], 3)  # without gradients nothing is computed again
    assert len(calls) <= 3


def test_bfloat16_is_for_the_products_in_the_blocks_alone():
    policy, seen = minippo.frozen_copy(tiny_gpt().float()), {}

    def watch(name):
        return lambda module, inputs, output: seen.update({name: output.dtype})

    block, norm = policy.trunk.blocks[0], policy.trunk.norm
    for name, module in {"qkv": block.attention.qkv, "mlp": block.mlp[2], "norm": norm, "head": policy.lm_head}.items():
        module.register_forward_hook(watch(name))
    tokens = torch.randint(11, (3, 7))
    exact = policy(tokens)[0]
    assert set(seen.values()) == {torch.float32}
    fast.install(dtype=torch.bfloat16)
    expected = {"qkv": torch.bfloat16, "mlp": torch.bfloat16, "norm": torch.float32, "head": torch.float32}
    near = policy(tokens)[0]
    assert seen == expected and 1e-6 < (near - exact).abs().max() < 0.3
    seen.clear()
    fast.generate(policy, [[1, 2]], 3)
    assert seen == expected


def test_in_bfloat16_each_weight_is_cast_once_for_all_tokens_of_a_response():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            cast = func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and (kwargs or {}).get("dtype") == torch.bfloat16
            self.count += cast and any(args[0].data_ptr() == p.data_ptr() for p in policy.parameters())
            return func(*args, **kwargs or {})

    policy = GPT(GPTConfig(300, 64, 2, heads=2, channels=16)).eval()
    fast.install(torch.bfloat16)
    with Casts() as casts:
        tokens, *_ = fast.generate(policy, [[1, 2]] * 4, 20)
    assert tokens.shape[1] > 12 and casts.count == 2 * 4  # two layers of four matrices
