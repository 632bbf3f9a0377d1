"""The specification of minippo.py, in its order.

What holds for every batch is said of random batches (tiny.random_batch), what can be computed by
hand of literal ones. Numbers are float64, except where rounding is tested; `nan` stands for what
must not matter."""

import copy
import inspect
import itertools
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import minippo
from cli import shell
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, batch_metrics, center_values
from minippo import compute_advantages, draw, evaluate_actions, explained_variance, frozen_copy
from minippo import gae, gather_logprobs, generate, gradient_step, kl_adjusted_rewards
from minippo import kl_per_response, masked_mean, policy_loss, ppo_loss, ppo_update, response_mask
from minippo import reward_model_loss, rollout, row_lengths, score_responses, table, trace
from minippo import value_loss, whiten
from tiny import EOS, assert_equal, biased, f64, gradient, inf, marks, nan, noise
from tiny import padded_otherwise, random_batch, stir, tiny_gpt, tiny_reward_model, weights

SOURCE = inspect.getsource(minippo)
for_random_batches = pytest.mark.parametrize("seed", range(20))


# The tables in its texts


def row(name):
    """The numbers of the response in the row of this name of a table in minippo.py."""
    line = rf"(?m)^[# ]+(?:The response of the header: +)?{re.escape(name)}  +(?:\. +)?(.*)"
    return [float(x) for x in re.search(line, SOURCE)[1].split()[:3]]


def drawn_batch():
    """The response of the drawing as a rollout."""
    names = {"old_logprobs": "log pi", "ref_logprobs": "log ref", "old_values": "value"}
    batch = {key: f64([[0, *row(name), 0]]) for key, name in names.items()}
    return batch | {"tokens": torch.arange(6)[None], "mask": marks(".xxx."), "scores": f64([1.40])}


def test_the_tables_show_what_the_functions_give():
    batch, now = drawn_batch(), f64([[0, *row("log pi now"), 0]]).requires_grad_()
    old, x = batch["old_logprobs"], compute_advantages(batch, PPOConfig(whiten=False))
    A = compute_advantages(batch, PPOConfig())["advantages"]
    loss, _ = policy_loss(now, old, A, batch["mask"], 0.2)
    loss.backward()
    assert f" / 3 = {loss:.2f}. " in SOURCE
    ratio = (now - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    computed = {"KL": old - batch["ref_logprobs"], "reward": x["rewards"], "whitened": A, "A": A}
    computed |= {"advantage": x["advantages"], "return": x["returns"], "gradient": -3 * now.grad}
    computed |= {"ratio": ratio, "clipped": clipped}
    computed |= {"ratio * A": ratio * A, "clipped * A": clipped * A}
    for name, lam in (("lam 1", 1.0), ("lam 0.9", 0.9), ("lam 0", 0.0), ("delta", 0.0)):
        config = PPOConfig(lam=lam, whiten=False)
        computed[name] = compute_advantages(batch, config)["advantages"]
    for name, numbers in computed.items():
        assert row(name) == [round(v, 2) for v in numbers[0, 1:4].tolist()], name


# 1. The networks


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        GPTConfig(channels=10, heads=3)
    for name, bad in (("temperature", (0, -1)), ("gamma", (-0.1, 1.1)), ("lam", (-0.1, 2, nan))):
        for value in bad:
            with pytest.raises(ValueError, match=f"{name} .*: should be"):
                PPOConfig(**{name: value})


def by_formula(policy, tokens):
    """tokens (B, 7) -> logits (B, 7, V), values (B, 7), by the formulas of GPT-2."""

    def norm(x, layer):
        return F.layer_norm(x, (8,)) * layer.weight + layer.bias

    def linear(x, layer):
        return x @ layer.weight.T + layer.bias

    def run(trunk):
        x = trunk.token_embedding.weight[tokens] + trunk.position_embedding.weight[:7]
        future = torch.ones(7, 7).triu(1).bool()
        for block in trunk.blocks:
            qkv = linear(norm(x, block.norm1), block.attention.qkv)  # (B, 7, 3 x 8)
            heads = []
            for i in (0, 4):  # two heads of four channels
                q, k, v = (qkv[..., 8 * part + i :][..., :4] for part in range(3))
                heads.append((q @ k.mT / 2).masked_fill(future, -inf).softmax(-1) @ v)
            x = x + linear(torch.cat(heads, -1), block.attention.out)
            y = linear(norm(x, block.norm2), block.mlp[0])
            x = x + linear(F.gelu(y, approximate="tanh"), block.mlp[2])
        return norm(x, trunk.norm)

    values = linear(run(policy.value_trunk or policy.trunk), policy.value_head).squeeze(-1)
    return run(policy.trunk) @ policy.trunk.token_embedding.weight.T, values


@pytest.mark.parametrize("critic", [False, True])
def test_the_network_is_a_gpt_2_with_a_value_head(critic):
    policy, tokens = tiny_gpt(layers=3, critic=critic), torch.randint(EOS + 1, (3, 7))
    assert policy.config.eos == EOS
    assert_equal(policy(tokens), by_formula(policy, tokens))


def test_weights_start_at_gpt_2s_spread_and_values_at_0():
    policy = GPT(GPTConfig(400, 64, layers=8, heads=4, channels=192))
    for name, parameter in policy.trunk.named_parameters():
        if parameter.dim() == 2:
            adds_up = name.endswith(("out.weight", "mlp.2.weight"))
            std = 0.02 * 2 / (4 if adds_up else 1)  # sqrt(768 / 192) and sqrt(2 x 8)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
        else:
            assert (parameter == ("norm" in name and name.endswith("weight"))).all(), name
    assert not any(x.any() for x in policy.value_head.parameters())
    gpt = GPT(GPTConfig(3, 8, 1, heads=1, channels=3))
    heads = [RewardModel(gpt).score_head for _ in range(100)]
    assert torch.cat([head.weight for head in heads]).std().item() == pytest.approx(0.5, rel=0.08)
    assert not heads[0].bias.any()


def test_a_score_is_read_at_the_last_token():
    model, tokens, lengths = tiny_reward_model(), torch.randint(EOS, (4, 4)), torch.arange(1, 5)
    last = [model.trunk(tokens[[i], : i + 1])[0, -1] for i in range(4)]  # each row alone
    raw = model.score_head(torch.stack(last)).squeeze(1).detach()
    assert_equal(model(tokens, lengths), raw)
    model.mean.fill_(0.25), model.std.fill_(2.0)
    scaled = (raw - 0.25) / 2
    model.cap.copy_(scaled.sort().values[1:3].mean())
    scores = model(tokens, lengths)
    assert_equal(scores, scaled.clamp(max=model.cap))
    assert not gradient(scores[scaled > model.cap].sum(), model).any()  # no gain above the cap


# 2. Log-probabilities and masks


def test_the_mask_marks_the_actions_of_the_response():
    # A prompt of one token and no padding; a response of one token; none at all.
    mask = response_mask(torch.tensor([1, 2, 3]), torch.tensor([6, 3, 3]), 6)
    assert_equal(mask, marks("xxxxx", ".x...", "....."))


def test_a_row_is_as_long_as_its_last_action_says():
    assert row_lengths(marks("..xx.", "x....", "....x", "xxxxx")).tolist() == [5, 2, 6, 6]
    with pytest.raises(ValueError, match="empty"):
        row_lengths(marks("..xx", "...."))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_logprobs_are_those_of_the_targets_never_in_16_bits(dtype):
    logits, targets = (8 * noise(5, 10, 9)).to(dtype), torch.randint(9, (5, 10))
    for temperature, options in ((1.0, {}), (0.7, {"temperature": 0.7})):
        log_p = (logits.double() / temperature).log_softmax(-1)
        logprobs = gather_logprobs(logits, targets, **options)
        assert logprobs.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert_equal(logprobs.double(), log_p.gather(-1, targets[..., None])[..., 0], 1e-5)


def test_bfloat16_is_inside_the_blocks_alone():
    full = tiny_gpt().float()
    half = GPT(replace(full.config, bfloat16=True)).eval()
    half.load_state_dict(full.state_dict())
    tokens, mask, logprobs, _ = generate(half, [[1, 2]], 9)
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
def test_a_mask_or_shape_that_does_not_fit_is_refused(function, count, more):
    mask, tensors = marks(".xx", "x.."), [noise(2, 3) for _ in range(count)]
    function(*tensors, mask, *more)
    for wrong in (mask.long(), mask[:1], mask[:, :1], mask[0]):
        with pytest.raises(ValueError, match="boolean mask"):
            function(*tensors, wrong, *more)
    for i, shape in itertools.product(range(count), [(2, 1), (1, 3), (3,), (2, 4)]):
        with pytest.raises(ValueError, match=r"bool and \[\(2, 3\), "):
            function(*tensors[:i], noise(*shape), *tensors[i + 1 :], mask, *more)


def test_scores_that_are_not_one_number_a_row_are_refused():
    for shape in ((2, 1), (1, 2), (3,), (1,)):
        with pytest.raises(ValueError, match="equal shapes"):
            kl_adjusted_rewards(noise(*shape), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.1)
        with pytest.raises(ValueError, match="differ"):
            reward_model_loss(noise(2), noise(*shape))


@for_random_batches
def test_index_t_is_the_choice_of_token_t_plus_1(seed):
    policy, batch = tiny_gpt(critic=seed % 2 > 0), random_batch(seed)
    options = {"temperature": 0.7} if seed % 3 else {}
    tokens, mask = batch["tokens"], batch["mask"]
    logits, values = policy(tokens)  # the states of having read tokens 0 .. t
    log_p = (logits / options.get("temperature", 1))[:, :-1].log_softmax(-1)
    logprobs, entropy = log_p.gather(-1, tokens[:, 1:, None]), -(log_p.exp() * log_p).sum(-1)
    expected = [logprobs.squeeze(-1), values[:, :-1], entropy]
    expected = [torch.where(mask, x, 0.0) for x in expected]
    assert_equal(evaluate_actions(policy, tokens, mask, with_entropy=True, **options), expected)
    expected[2] = torch.zeros_like(entropy)
    assert_equal(evaluate_actions(policy, tokens, mask, **options), expected)


@for_random_batches
def test_padding_changes_no_number_of_a_row(seed):
    policy, batch = tiny_gpt(), random_batch(seed)

    def numbers(batch):
        tokens, mask = batch["tokens"], batch["mask"]
        x = compute_advantages(batch, PPOConfig(gamma=0.9, lam=0.8))
        kl = kl_per_response(batch["old_logprobs"], batch["ref_logprobs"], mask)
        scores = score_responses(lambda *_: batch["scores"], tokens, mask, PPOConfig(), EOS)
        return [*x.values(), *kl, *scores, *evaluate_actions(policy, tokens, mask, 1.0, True)]

    for columns, token, number in ((0, 7, nan), (3, EOS, inf)):
        padded = padded_otherwise(batch, columns, token, number)
        wider = [F.pad(x, (0, columns)) if x.dim() == 2 else x for x in numbers(batch)]
        assert_equal(numbers(padded), wider)


# 3. Sampling


def test_a_token_is_drawn_if_a_number_falls_into_its_piece(monkeypatch):
    logits = f64([0.0, 0.3, 0.0, 0.2, 0.5, 0.0]).log() + 7
    drawn = {0.0: 1, 0.299: 1, 0.301: 3, 0.499: 3, 0.501: 4, 1 - 2**-53: 4}
    numbers = f64([*drawn])
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: numbers.to(dtype).view(shape))
    assert draw(logits.expand(6, 6)).tolist() == [*drawn.values()]
    # In float32 the second probability would be lost in the sum.
    assert draw(torch.tensor([[0.0, -20.0]]).expand(6, 2))[-1] == 1
    for bad in (nan, inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            draw(f64([[0.0, 1.0], [bad, 1.0]]))


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 4


def settled(logits):
    """Tokens that follow from the logits, in place of random ones: (B, V) -> (B,)."""
    u = logits[:, :1] * 100 % 1
    return (logits.softmax(-1).cumsum(-1) < u).sum(-1)


def plain_generate(policy, prompt, max_new_tokens, temperature=1.0):
    """One row by itself, read again for each token -> the row; log pi and value of each token."""
    row, numbers = [*prompt], []
    while len(row) < min(16, len(prompt) + max_new_tokens) and row[-1] != EOS:
        logits, values = policy(torch.tensor([row]))
        logits = logits[:, -1] / temperature
        row.append(settled(logits).item())
        numbers.append((logits.log_softmax(-1)[0, row[-1]].item(), values[0, -1].item()))
    return row, numbers


@pytest.mark.parametrize("prompts", [PROMPTS, [[2, 3]], [[1, 2], [3, 4]], [[1] * 15, [2]]], ids=len)
@pytest.mark.parametrize("limits", [(6,), (1, 1.3), (10**12, 0.7)], ids=str)  # and temperature
@pytest.mark.parametrize("bias", [-inf, 1.0, 50.0])  # the end token: never, at any time, at once
def test_sampling_is_a_plain_loop_that_reads_whole_rows(prompts, limits, bias):
    policy = biased(tiny_gpt(critic=bias == 1), {EOS: bias})
    tokens, mask, *numbers = generate(policy, prompts, *limits, draw=settled)
    assert not any(x.requires_grad for x in numbers)
    for i, prompt in enumerate(prompts):
        row, expected = plain_generate(policy, prompt, *limits)
        assert tokens[i].tolist() == row + [0] * (tokens.shape[1] - len(row))
        assert mask[i].nonzero().flatten().tolist() == [*range(len(prompt) - 1, len(row) - 1)]
        assert_equal(torch.stack([x[i, mask[i]] for x in numbers], 1), f64(expected), 1e-9)
    assert row_lengths(mask).max() == tokens.shape[1]


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_prompts_too_short_or_too_long_are_refused(prompts):
    with pytest.raises(ValueError, match="1 to 15 tokens"):
        generate(tiny_gpt(), prompts, 5)


# 4. The reward model's loss


def test_the_reward_models_loss_is_bradley_and_terrys():
    chosen, rejected = f64([2.0, 0.5, 1.0]).requires_grad_(), f64([1.0, 2.5, 1.0]).requires_grad_()
    loss, stats = reward_model_loss(chosen, rejected)
    chances = f64([1 / (1 + math.exp(-margin)) for margin in (1.0, -2.0, 0.0)])
    assert_equal(loss, -chances.log().mean())
    accuracy = (1 + 0 + 0.5) / 3  # a tie is half right
    assert stats == pytest.approx({"loss": loss.item(), "accuracy": accuracy, "margin": -1 / 3})
    loss.backward()
    assert_equal(chosen.grad, (chances - 1) / 3)
    assert_equal(rejected.grad, (1 - chances) / 3)
    wrong, _ = reward_model_loss(f64([-5000.0]), f64([5000.0]))
    assert wrong.item() == pytest.approx(10_000)  # finite, however wrong


# 5. PPO: the rewards and the advantages


@for_random_batches
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.9, 1.0), (0.5, 0.0), (0.0, 0.5)])
def test_rewards_returns_and_advantages_are_these_sums(seed, gamma, lam):
    batch, config = random_batch(seed), PPOConfig(kl_coef=0.3, gamma=gamma, lam=lam)
    mask, values = batch["mask"], batch["old_values"]
    rewards = 0.3 * (batch["ref_logprobs"] - batch["old_logprobs"])
    rewards[range(len(mask)), row_lengths(mask) - 2] += batch["scores"]
    delta = (rewards + gamma * F.pad(values, (0, 1))[:, 1:] - values).T  # 0 after the last action
    A = [sum((gamma * lam) ** n * d for n, d in enumerate(delta[t:])) for t in range(len(delta))]
    A = torch.where(mask, torch.stack(A, 1), 0.0)
    expected = {"rewards": rewards, "returns": A + values, "advantages": A}
    assert_equal(compute_advantages(batch, replace(config, whiten=False)), expected)
    expected["advantages"] = whiten(A, mask)
    assert_equal(compute_advantages(batch, config), expected)
    outside = torch.where(mask, rewards, nan), torch.where(mask, values, inf)
    assert_equal(gae(*outside, mask, gamma, lam), (A, A + values))
    assert_equal(batch, random_batch(seed))  # nothing is overwritten


def test_whitening_sees_the_mask_only_and_no_scale():
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


def test_a_ratio_that_overflows_has_a_finite_loss():
    logprobs = torch.tensor([[100.0, 0.1, -100.0]] * 3).requires_grad_()
    old, mask = torch.zeros(3, 3), torch.ones(3, 3).bool()
    advantages = torch.tensor([0.0, 1.0, -1.0])[:, None].expand(3, 3)
    loss, stats = policy_loss(logprobs, old, advantages, mask, 0.2)
    loss.backward()
    assert all(map(math.isfinite, stats.values())) and logprobs.grad.isfinite().all()
    assert loss > 1e6  # that of the last row
    assert all(x.isfinite().all() for x in kl_per_response(logprobs, old, mask))


def test_only_what_is_computed_now_has_a_gradient():
    x = f64([[0.1, -0.2]]).requires_grad_()
    recorded, mask = 2 * x, marks("xx")  # carelessly, with its gradient
    policy_loss(x, recorded, recorded, mask, inf)[0].backward()
    assert_equal(x.grad, -(-x.detach()).exp() * recorded.detach() / 2)  # grad ratio = ratio
    x.grad = None
    value_loss(x, recorded, 3 * x, mask, inf)[0].backward()
    assert_equal(x.grad, (x - 3 * x).detach() / 2)


# 6. The loop


def test_reward_model_and_reference_start_as_copies():
    policy = tiny_gpt().train()
    model, frozen, before = RewardModel(policy).double(), frozen_copy(policy), weights(policy)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(module.training for module in frozen.modules())
    assert all(p.requires_grad for p in policy.parameters()) and policy.training
    stir(policy)
    assert_equal(weights(frozen), before)
    assert_equal(weights(model.trunk), weights(frozen.trunk))


def test_penalties_are_for_each_token_and_for_no_end():
    # An end token in the prompt, as in the last row, or in the padding ends no response.
    tokens = [[1, 2, 3, EOS, 0], [1, 2, 3, 4, 5], [1, EOS, 0, 0, 0], [EOS, 1, 2, EOS, EOS]]
    tokens, mask = torch.tensor(tokens), marks(".xx.", ".xxx", "x...", ".x..")
    raw = f64([1.0, 2.0, 3.0, 4.0]).requires_grad_()
    config = PPOConfig(length_penalty=0.25, missing_eos_penalty=0.5)
    scores, ended = score_responses(lambda *_: raw, tokens, mask, config, EOS)
    assert ended.tolist() == [True, False, True, False] and not scores.requires_grad
    assert_equal(scores, f64([1 - 0.5, 2 - 0.75 - 0.5, 3 - 0.25, 4 - 0.25 - 0.5]))


@pytest.mark.parametrize("size", [0, 1, 5, 23])
def test_a_rollout_is_the_same_at_once_or_in_pieces(size):
    policy, ref, model = tiny_gpt(), tiny_gpt(), tiny_reward_model()
    prompts, sizes = [*PROMPTS[6:], [1] * 12], []
    config = PPOConfig(max_new_tokens=5, temperature=0.7, missing_eos_penalty=0.5, micro_batch=size)

    def sample(policy, prompts, *limits):
        sizes.append(len(prompts))
        return generate(policy, prompts, *limits, draw=settled)

    def score(tokens, mask):
        return model(tokens, row_lengths(mask))

    batch = rollout(policy, ref, score, prompts, config, sample)
    assert not any(x.requires_grad for x in batch.values())
    assert max(sizes) == min(size or 19, 19)
    names = "tokens", "mask", "old_logprobs", "old_values"
    expected = dict(zip(names, generate(policy, prompts, 5, 0.7, settled)))
    tokens, mask = batch["tokens"], batch["mask"]
    expected["ref_logprobs"] = evaluate_actions(ref, tokens, mask, 0.7)[0].detach()
    expected["scores"], ended = score_responses(score, tokens, mask, config, EOS)
    assert_equal(batch, expected | {"ended": ended})
    assert 0 < ended.sum() < 19


@for_random_batches
def test_centred_values_have_the_mean_of_the_scores(seed):
    policy, batch = tiny_gpt(), random_batch(seed)
    tokens, mask = batch["tokens"], batch["mask"]
    before = batch["old_values"] = evaluate_actions(policy, tokens, mask)[1].detach()
    center_values(policy, batch)
    shift = batch["scores"].mean() - before[mask].mean()
    assert_equal(evaluate_actions(policy, tokens, mask)[1][mask], before[mask] + shift)


ALL_TERMS = PPOConfig(
    temperature=0.7, clip_eps=0.15, value_clip=0.4, vf_coef=0.5, entropy_coef=0.1, kl_loss_coef=0.3
)


def ready_batch(seed):
    """A random batch with phase 3 done."""
    batch = random_batch(seed)
    return batch | compute_advantages(batch, ALL_TERMS)


@for_random_batches
def test_the_loss_of_ppo_is_the_sum_of_its_terms(seed):
    policy, batch = tiny_gpt(), ready_batch(seed)
    mask = batch["mask"]
    numbers = evaluate_actions(policy, batch["tokens"], mask, 0.7, True)
    logprobs, values, entropy = (x[mask] for x in numbers)
    names = "old_logprobs", "ref_logprobs", "advantages", "old_values", "returns"
    old, ref, A, old_values, returns = (batch[name][mask] for name in names)
    ratio, moved = (logprobs - old).exp(), values - old_values
    # There is no gradient above the range for what should rise, below it for what should fall.
    counted = torch.where(A > 0, ratio.clamp(max=1.15), ratio.clamp(min=0.85))
    error = (values - returns) ** 2 / 2
    clipped_error = (old_values + moved.clamp(-0.4, 0.4) - returns) ** 2 / 2
    expected = {
        "policy_loss": -(counted * A).mean(),
        "approx_kl": (ratio - 1 - ratio.log()).mean(),
        "clip_frac": ((ratio < 0.85) | (ratio > 1.15)).double().mean(),
        "ratio_max": ratio.max(),
        "value_loss": torch.max(error, clipped_error).mean(),
    }
    k2 = ((logprobs - ref) ** 2 / 2).mean()
    total = expected["policy_loss"] + 0.5 * expected["value_loss"] + 0.3 * k2 - 0.1 * entropy.mean()
    loss, stats = ppo_loss(policy, padded_otherwise(batch, 2, EOS, nan), ALL_TERMS)
    assert_equal(gradient(loss, policy), gradient(total, policy))
    expected = {name: x.item() for name, x in (expected | {"loss": total}).items()}
    assert stats == pytest.approx(expected)


@for_random_batches
@pytest.mark.parametrize("epochs, minibatches, size", [(1, 1, 0), (3, 2, 0), (2, 2, 1), (2, 1, 2)])
def test_an_update_is_a_plain_loop_and_pieces_add_up(seed, epochs, minibatches, size):
    policy, batch = tiny_gpt(), ready_batch(seed)
    config = replace(ALL_TERMS, epochs=epochs, minibatches=minibatches, micro_batch=size)
    twin, sizes, steps = copy.deepcopy(policy), [], []
    optimizer, other = (torch.optim.SGD(x.parameters(), 0.1) for x in (policy, twin))

    def loss(model, rows, config):
        sizes.append(len(rows["scores"]))
        return ppo_loss(model, rows, config)

    torch.manual_seed(seed)
    stats = ppo_update(policy, optimizer, batch, config, loss)
    torch.manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(batch["mask"])).tensor_split(minibatches):
            total, numbers = ppo_loss(twin, {name: x[rows] for name, x in batch.items()}, config)
            other.zero_grad()
            total.backward()
            steps.append(numbers | {"grad_norm": gradient_step(other, config.max_grad_norm)})
    expected = {name: sum(x[name] for x in steps) / len(steps) for name in steps[0]}
    expected["ratio_max"] = max(x["ratio_max"] for x in steps)
    assert stats == pytest.approx(expected)
    assert_equal(weights(policy), weights(twin))
    assert max(sizes) <= (size or 6)
    with pytest.raises(ValueError, match=f"7 minibatches of only {len(batch['mask'])}"):
        ppo_update(policy, optimizer, batch, replace(config, minibatches=7))


@pytest.mark.parametrize("max_grad_norm, scale", [(1.0, 0.2), (inf, 1.0), (10.0, 1.0)])
def test_all_gradients_together_are_scaled_to_max_grad_norm(max_grad_norm, scale):
    x, y = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    x.grad, y.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer = torch.optim.SGD([{"params": [x]}, {"params": [y], "lr": 10.0}], 1.0)
    assert gradient_step(optimizer, max_grad_norm) == 5.0  # the norm before
    assert (x.item(), y.item()) == pytest.approx((-3 * scale, -40 * scale))


@pytest.mark.parametrize("value", [inf, nan])
def test_a_gradient_that_is_not_finite_changes_no_weight(value):
    x = torch.nn.Parameter(torch.zeros(2))
    x.grad = torch.tensor([1.0, value])
    with pytest.raises(FloatingPointError, match="norm of the gradient"):
        gradient_step(torch.optim.SGD([x], 1.0), 1.0)
    assert not x.any()


def test_explained_variance_is_1_for_perfect_values():
    returns, mask = f64([[nan, 1, 2], [3, 4, inf]]), marks(".xx", "xx.")
    for values, expected in ((returns, 1), (torch.full_like(returns, 7.0), 0), (-returns, -3)):
        assert explained_variance(values, returns, mask) == pytest.approx(expected, abs=1e-6)
    assert math.isfinite(explained_variance(returns, returns, marks(".x.", "...")))  # one token


@for_random_batches
def test_what_is_watched_is_what_the_names_say(seed):
    batch, config = random_batch(seed), PPOConfig(kl_coef=0.25)
    assert "explained_variance" not in batch_metrics(batch, config)
    batch |= compute_advantages(batch, config)
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    log_ratio = old_logprobs - batch["ref_logprobs"]
    k1, k3 = log_ratio.sum(1), ((-log_ratio).exp() - 1 + log_ratio).sum(1)
    assert_equal(kl_per_response(old_logprobs, batch["ref_logprobs"], mask), (k1, k3))
    means = {"score": scores, "kl": k1, "kl_k3": k3, "rlhf_reward": scores - 0.25 * k1}
    means |= {"entropy": -old_logprobs[mask], "response_length": mask.sum(1).double()}
    means["eos_rate"] = batch["ended"].double()
    expected = {name: x.mean().item() for name, x in means.items()} | {"kl_coef": 0.25}
    values, returns = batch["old_values"], batch["returns"]
    expected["explained_variance"] = explained_variance(values, returns, mask)
    assert batch_metrics(padded_otherwise(batch, 2, EOS, nan), config) == pytest.approx(expected)


# The parts together, and the example


def test_a_trace_is_the_table_turned_round():
    batch = drawn_batch()
    batch |= compute_advantages(batch, PPOConfig())
    batch["logprobs"] = f64([[9, *row("log pi now"), 9]])
    batch = {name: torch.cat([torch.zeros_like(x), x]) for name, x in batch.items()}
    spell = "Bees eat sweet nectar <eos> pad".split().__getitem__
    titles = "log pi", "log ref", "KL", "reward", "value", "return", "advantage", "log pi now"
    expected = {"action": ["sweet", "nectar", "<eos>"]} | {title: row(title) for title in titles}
    expected["advantage"] = row("whitened")
    assert table(trace(batch, 1, spell)) == table(expected)
    del batch["rewards"]
    assert "reward" not in trace(batch, 1, spell)
    lines = ["    action         x", "     sweet      0.00", "    nectar      1.20"]
    assert table({"action": ["sweet", "nectar"], "x": [-1e-9, 1.2]}) == lines  # no -0.00


def test_the_example_learns_where_there_is_only_torch():
    code = "import runpy, sys; sys.modules.update(numpy=None, tiktoken=None); "
    code += "runpy.run_path('minippo.py', run_name='__main__')"
    printed = shell("-c", code).stdout.splitlines()
    lines = [re.match(r"iteration +(\d+)  score +(\S+)  kl +(\S+)", x) for x in printed[:6]]
    steps, scores, kl = ([float(line[i]) for line in lines] for i in (1, 2, 3))
    assert steps == [1, 21, 41, 61, 81, 100]
    assert -3 < scores[0] < -1.5 and min(scores[2:]) > 3 and 3.5 < scores[-1] <= 4  # eight turns
    assert abs(kl[0]) < 0.3 and 8 < min(kl[2:]) <= max(kl) < 13  # at beta = 0: 19 to 20
    words, (title, *actions) = printed[5].split()[-4:], [line.split()[0] for line in printed[6:]]
    turns = [(a in "aeiou") != (b in "aeiou") for w in words for a, b in itertools.pairwise(w)]
    assert sum(turns) > 0.8 * len(turns) and all(x.isalpha() and len(x) <= 9 for x in words)
    assert title == "action" and actions == [*words[0][1:], "<eos>"]  # without the prompt


def test_the_example_starts_alike_and_lowers_its_learning_rate(monkeypatch):
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
