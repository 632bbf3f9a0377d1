"""The specification of minippo.py, in its order. `nan`: what must not matter."""

import copy
import inspect
import math
import re
import subprocess
import sys
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import minippo
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, batch_metrics, center_values
from minippo import compute_advantages, draw, evaluate_actions, frozen_copy, gae, gather_logprobs
from minippo import generate, gradient_step, k3, kl_adjusted_rewards, kl_per_response, masked_mean
from minippo import pad_completions, policy_loss, ppo_loss, ppo_update, reward_model_loss, rollout
from minippo import row_lengths, set_lr, value_loss, whiten
from tiny import EOS, assert_equal, biased, f64, gradient, inf, marks, nan, noise, random_batch
from tiny import stir, tiny_gpt, weights

SOURCE = inspect.getsource(minippo)


def row(name):
    """The numbers in the row of this name of a table of minippo.py."""
    match = re.search(rf"\b{re.escape(name)}  +(?:\. +)?(-?\d.*)", SOURCE)
    return [float(x) for x in match[1].split()[:3]]


def test_the_tables_show_what_the_functions_give():
    batch = {"mask": marks("xxx"), "scores": f64([1.40]), "old_logprobs": f64([row("log pi")])}
    batch |= {"ref_logprobs": f64([row("log ref")]), "old_values": f64([row("value")])}
    A = compute_advantages(batch, PPOConfig())["advantages"]
    logprobs = f64([row("log pi now")]).requires_grad_()
    losses, stats = policy_loss(logprobs, batch["old_logprobs"], A, 0.2)
    losses.sum().backward()
    ratio = stats["ratio"]
    computed = {
        "d": batch["old_logprobs"] - batch["ref_logprobs"],
        "whitened": A,
        "A": A,
        "ratio": ratio,
        "clipped": ratio.clamp(0.8, 1.2),
        "ratio * A": ratio * A,
        "clipped * A": ratio.clamp(0.8, 1.2) * A,
        "gradient": -logprobs.grad,
    }
    for name, lam in (("delta", 0), ("lam 0", 0), ("lam 0.9", 0.9), ("lam 1", 1), ("advantage", 1)):
        plain = compute_advantages(batch, PPOConfig(lam=lam, whiten=False))
        computed[name] = plain["advantages"]
    computed["reward"] = plain["rewards"]
    computed["return"] = plain["returns"]
    for name, numbers in computed.items():
        assert row(name) == [round(x, 2) for x in numbers[0].tolist()], name
    assert f"/ 3 = {losses.mean():.2f}" in SOURCE


# 1. The networks


def test_the_network_is_torchs_transformer_with_a_value_head():
    policy = tiny_gpt(layers=3)
    tokens = torch.randint(EOS + 1, (3, 7))
    mask = torch.rand(3, 7) < 0.5
    embedding = policy.trunk.token_embedding.weight
    hidden = embedding[tokens] + policy.trunk.position_embedding.weight[:7]
    gelu = partial(F.gelu, approximate="tanh")
    for block in policy.trunk.blocks:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 32, 0.0, gelu, 1e-5, True, True)
        parts = [block.attention, block.mlp, block.norm1, block.norm2]
        vector = torch.cat([weights(part) for part in parts])
        torch.nn.utils.vector_to_parameters(vector, layer.parameters())
        hidden = layer(hidden, torch.ones(7, 7).triu(1).bool())
    hidden = policy.trunk.norm(hidden)[mask]
    assert_equal(policy(tokens, mask), (hidden @ embedding.T, policy.value_head(hidden)[:, 0]))


def test_weights_start_at_gpt_2s_spread_and_values_at_0():
    policy = GPT(GPTConfig(400, 64, layers=8, heads=4, channels=192))
    for name, parameter in policy.trunk.named_parameters():
        if parameter.dim() == 2:
            adds_up = name.endswith(("out.weight", "mlp.2.weight"))
            std = 0.02 * 2 / (4 if adds_up else 1)  # sqrt(768 / 192) and sqrt(2 x 8)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
    head = RewardModel(policy).score_head
    assert head.weight.std().item() == pytest.approx(193**-0.5, rel=0.15)
    zeros = [parameter for name, parameter in policy.named_parameters() if "bias" in name]
    assert not any(x.any() for x in [*zeros, policy.value_head.weight, head.bias])


def test_reward_model_and_reference_start_as_copies():
    policy = tiny_gpt().train()
    trunk = RewardModel(policy).trunk.double()
    ref = frozen_copy(policy)
    stir(policy)
    assert_equal(weights(trunk), weights(ref.trunk))
    assert not torch.equal(weights(ref), weights(policy))
    assert not any(p.requires_grad for p in ref.parameters())
    assert not any(module.training for module in ref.modules())


# 2. Log-probabilities and masks


@torch.no_grad()
def test_other_shapes_16_bits_and_masks_of_numbers_are_refused():
    X, mask, tokens = noise(2, 3), marks(".xx", "x.."), torch.ones(2, 4).long()
    for function, *arguments in (
        (policy_loss, X, X, X, 0.2),
        (value_loss, X, X, X, 0.2),
        (reward_model_loss, X, X),
        (masked_mean, X, mask),
        (whiten, X, mask),
        (kl_per_response, X, X, mask),
        (gae, X, X, mask, 1.0, 1.0),
        (kl_adjusted_rewards, X[:, 0], X, X, mask, 0.1),
        (partial(evaluate_actions, tiny_gpt()), tokens, mask),
    ):
        function(*arguments)
        for i, x in enumerate(arguments):
            wrong = [x[..., :1], x.half(), x.bfloat16()] if torch.is_tensor(x) else []
            for y in [*wrong, mask.long()] if x is mask else wrong:
                with pytest.raises(ValueError):
                    function(*arguments[:i], y, *arguments[i + 1 :])
    with pytest.raises(ValueError):
        gather_logprobs(noise(2, 4, 9), tokens[:, 1:])  # all states, the actions of some


def test_rows_are_padded_on_the_right_and_completions_marked():
    tokens, mask = pad_completions([([1], [2, 3]), ([4, 5, 6], [7])])
    assert tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert_equal(mask, marks("xx.", "..x"))


def test_a_loss_without_a_gradient_is_refused():
    old_logprobs = noise(2, 3)
    with pytest.raises(ValueError, match="gradient"):
        policy_loss(old_logprobs, noise(2, 3).requires_grad_(), old_logprobs, 0.2)


def test_a_row_ends_with_its_last_action():
    assert row_lengths(marks("..xx.", "x....", "....x")).tolist() == [5, 2, 6]
    with pytest.raises(ValueError):
        row_lengths(marks("..xx", "...."))


def test_16_bits_stay_inside_the_blocks_and_train_them():
    policy = tiny_gpt(bfloat16=True).float()
    cache = [[], []]
    hidden = policy.trunk(torch.arange(9)[None], cache)
    assert {x.dtype for block in cache for x in block} == {torch.bfloat16}
    numbers = evaluate_actions(policy.bfloat16(), *generate(policy, [[1, 2]], 9))
    assert {x.dtype for x in (hidden, *numbers)} == {torch.float32}
    assert all(gradient(x.sum(), policy.trunk.blocks).any() for x in numbers)


# 3. Sampling


def test_a_token_is_drawn_if_a_number_falls_into_its_piece(monkeypatch):
    logits = f64([0.0, 0.3, 0.0, 0.2, 0.5, 0.0]).log() + 7
    cases = {0.0: 1, 0.29: 1, 0.31: 3, 1 - 2**-53: 4}
    numbers = f64([*cases])
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: numbers.to(dtype).view(shape))
    assert draw(logits.expand(4, 6)).tolist() == [*cases.values()]
    # 0.3 and 0.7; divided in 16 bits, they would be equal.
    halves = torch.tensor([[99.5, 100.0]], dtype=torch.bfloat16)
    assert draw(halves.expand(4, 2), temperature=0.59).tolist() == [0, 0, 1, 1]
    # In float32 this probability would be lost.
    assert draw(torch.tensor([[0.0, -20.0]]).expand(4, 2))[-1] == 1


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [9, EOS, 0], [1] * 6, [EOS]]
LONGER = [[4, 3, 2], [6, 7, 8, 9, 1]]  # three columns are read at once


def settled(logits, temperature=1.0):
    """Tokens that follow from the logits: (B, V) -> (B,)."""
    log_p = (logits / temperature).log_softmax(1)
    u = log_p[:, :1] * 100 % 1
    return (log_p.exp().cumsum(1) < u).sum(1)


@pytest.mark.parametrize("limit, temperature", [(6, 1.0), (1, 1.3), (10**12, 0.7)])
@pytest.mark.parametrize("bias", [-inf, 1.0, 50.0])  # to end: never, at any time, at once
@pytest.mark.parametrize("prompts", [PROMPTS, LONGER])
def test_a_rollout_is_what_each_row_would_give_alone(
    monkeypatch, prompts, limit, temperature, bias
):
    monkeypatch.setattr(minippo, "draw", settled)
    policy, ref = biased(tiny_gpt(), {EOS: bias}), tiny_gpt()
    rows, scores, numbers = [], [], []
    for prompt in prompts:
        response = []
        while len(response) < min(limit, 16 - len(prompt)) and EOS not in response:
            tokens = torch.tensor([prompt + response])
            logits, values = policy(tokens, tokens >= 0)
            ref_logits, _ = ref(tokens, tokens >= 0)
            log_p = (torch.stack([logits[-1], ref_logits[-1]]) / temperature).log_softmax(1)
            response += settled(log_p[:1]).tolist()
            numbers.append([*log_p[:, response[-1]].tolist(), values[-1].item()])
        rows.append((prompt, response))
        penalty = 0.25 * len(response) + 0.5 * (EOS not in response)
        scores.append(len(prompt) + sum(response) - penalty)

    def score(prompts, tokens, mask):
        return f64([len(prompt) for prompt in prompts]) + (tokens[:, 1:] * mask).sum(1)

    config = PPOConfig(limit, temperature, length_penalty=0.25, missing_eos_penalty=0.5)
    batch = rollout(policy, ref, score, prompts, config)
    assert not any(x.requires_grad for x in batch.values())
    tokens, mask = pad_completions(rows)
    expected = {"tokens": tokens, "mask": mask, "scores": f64(scores)}
    expected["ended"] = torch.tensor([EOS in response for _, response in rows])
    for name, x in zip(("old_logprobs", "ref_logprobs", "old_values"), f64(numbers).T):
        expected[name] = torch.zeros(mask.shape).double().masked_scatter(mask, x)
    assert_equal(batch, expected)
    with pytest.raises(ValueError):
        rollout(policy, ref, lambda *_: torch.zeros(len(prompts), 1), prompts, config)


def test_prompts_that_do_not_fit_are_refused():
    for prompts in ([[1], []], [[1], [1] * 16]):
        with pytest.raises(ValueError):
            generate(tiny_gpt(), prompts, 5)


# 4. The reward model


def test_a_score_is_read_at_the_last_token_scaled_and_capped():
    model = stir(RewardModel(tiny_gpt()).double())
    model.mean.fill_(0.25)
    model.std.fill_(2.0)
    tokens = torch.randint(EOS, (4, 4))
    last = [model.trunk(tokens[[i], : i + 1])[0, -1] for i in range(4)]  # each row alone
    scores = (model.score_head(torch.stack(last)).squeeze(1) - 0.25) / 2
    model.cap.copy_(scores.median())
    assert_equal(model(tokens, torch.arange(1, 5)), scores.clamp(max=model.cap))


def test_the_reward_models_loss_is_bradley_and_terrys():
    loss, stats = reward_model_loss(f64([2.0, 0.5, 1.0]), f64([1.0, 2.5, 1.0]))
    chances = 1 / (1 + f64([-1.0, 2.0, 0.0]).exp())
    assert_equal(loss, -chances.log().mean())
    # A tie is half right.
    assert stats == pytest.approx({"loss": loss.item(), "accuracy": 1.5 / 3, "margin": -1 / 3})
    wrong, _ = reward_model_loss(f64([-5000.0]), f64([5000.0]))
    assert wrong == 10_000


# 5. From the policy gradient to PPO; see test_exact.py


def test_what_is_outside_the_mask_changes_nothing():
    rewards, values = noise(2, 3), noise(2, 3)
    mask = marks("..xxx.", "xxx...")
    wide = [torch.full(mask.shape, nan).double().masked_scatter(mask, x) for x in (rewards, values)]
    whole = gae(rewards, values, marks("xxx", "xxx"), 0.9, 0.8)
    for x, y in zip(gae(*wide, mask, 0.9, 0.8), whole):
        assert_equal(x[mask].view(2, 3), y)
        assert not x[~mask].any()


def test_k3_neither_overflows_nor_pushes_where_it_is_cut():
    d = f64([-1000.0, -1.0, 0.0, 2.0]).requires_grad_()
    numbers = k3(d)
    numbers.sum().backward()
    assert_equal(numbers[1:], f64([math.e - 2, 0, math.exp(-2) + 1]))
    assert [round(x, 3) for x in k3(f64(row("d"))).tolist()] == [0.107, 0.021, 0.019]  # section 5.7
    assert numbers.isfinite().all() and d.grad[0] == 0


@pytest.mark.parametrize("value", [0.0, 1e3 / 3, -1e6 / 3, 1e-6 / 3])
def test_equal_numbers_are_whitened_to_almost_0(value):
    numbers = torch.full((7, 43), value)
    numbers[0, 0] *= 1 + 2**-23  # rounding
    numbers[1, 1] = nan
    assert whiten(numbers, ~numbers.isnan()).abs().max() < 0.05


def test_the_clip_stops_ratios_that_moved_enough():
    ratio = f64([0.5, 0.9, 1.1, 1.21, math.exp(20)]).expand(2, 5)
    A = f64([[2.0], [-3.0]]).expand(2, 5)
    logprobs = ratio.log()
    logprobs[:, 4] = 100.0  # cut off at 20: in 32 bits it would overflow
    logprobs.requires_grad_()
    zeros = logprobs - logprobs.detach()  # recorded with a gradient
    for eps in (0.2, inf):
        limited = torch.where(A > 0, ratio.clamp(max=1 + eps), ratio.clamp(min=1 - eps))
        losses, stats = policy_loss(logprobs, zeros, A + zeros, eps)
        assert_equal(losses, -limited * A)
        assert_equal(losses, stats["policy_loss"])
        (grad,) = torch.autograd.grad(losses.sum(), logprobs, retain_graph=True)
        assert_equal(grad, torch.where((limited == ratio) & (ratio < 2), -ratio * A, 0.0))
        assert stats["clip_frac"].tolist() == [[eps == 0.2, 0, 0, eps == 0.2, eps == 0.2]] * 2
        assert_equal(stats["approx_kl"], ratio - 1 - ratio.log())


def test_a_value_gains_nothing_beyond_the_clip():
    for sign, clip in ((1, 0.2), (-1, 0.2), (1, inf)):
        values = (0.80 + sign * f64([[0.3, 0.1, -0.3, 0.8]])).requires_grad_()
        zeros = values - values.detach()
        losses, stats = value_loss(values, 0.80 + zeros, 0.80 + sign * 0.55 + zeros, clip)
        moves = f64([[min(0.3, clip), 0.1, -0.3, min(0.8, clip)]])
        assert_equal(losses, (moves - 0.55) ** 2 / 2)
        assert_equal(losses, stats["value_loss"])
        losses.sum().backward()
        free = f64([[clip == inf, True, True, clip == inf]])
        assert_equal(values.grad, sign * (moves - 0.55) * free)


def test_centred_values_have_the_mean_of_the_scores():
    policy = tiny_gpt()
    before = policy.value_head.bias.item()
    batch = {"mask": marks(".x", "xx"), "scores": f64([2.0, 5.0])}
    center_values(policy, batch | {"old_values": f64([[nan, 0.5], [1.0, 1.5]])})
    assert policy.value_head.bias.item() == pytest.approx(before + 3.5 - 1.0)


# 6. The loop


@pytest.mark.parametrize("epochs, minibatches, size", [(1, 9, 0), (3, 4, 0), (2, 2, 1), (2, 1, 2)])
def test_an_update_is_a_plain_loop_and_pieces_add_up(epochs, minibatches, size):
    config = PPOConfig(5, 0.7, clip_eps=0.15, value_clip=0.4, vf_coef=0.5, max_grad_norm=0.1)
    config.epochs, config.minibatches, config.micro_batch = epochs, minibatches, size
    batch = random_batch(5, outside=nan)
    batch |= compute_advantages(batch, config)
    policy = tiny_gpt()
    twin = copy.deepcopy(policy)
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (policy, twin))
    sizes = []

    def loss(logprobs, values, x, config):
        sizes.append(len(logprobs))
        losses, stats = policy_loss(logprobs, x["old_logprobs"], x["advantages"], 0.15)
        value_losses, value_stats = value_loss(values, x["old_values"], x["returns"], 0.4)
        return losses + 0.5 * value_losses, stats | value_stats

    torch.manual_seed(1)
    stats = ppo_update(policy, optimizer, batch, config, loss)
    assert size in (0, max(sizes))
    torch.manual_seed(1)
    seen = defaultdict(list)
    for _ in range(epochs):
        for rows in torch.randperm(6).tensor_split(min(minibatches, 6)):
            x = {name: numbers[rows] for name, numbers in batch.items()}
            numbers = evaluate_actions(twin, x["tokens"], x["mask"], 0.7)
            losses, step = loss(*numbers, x, config)
            assert_equal(ppo_loss(*numbers, x, config), (losses, step))
            other.zero_grad()
            losses[x["mask"]].mean().backward()
            seen["grad_norm"].append(gradient_step(other, 0.1))
            for name, numbers in {"loss": losses, **step}.items():
                seen[name] += numbers[x["mask"]].tolist()
    assert_equal(weights(policy), weights(twin))
    expected = {name: sum(x) / len(x) for name, x in seen.items()}
    expected["ratio_max"] = max(seen["ratio"])
    assert stats == pytest.approx(expected)


def test_the_learning_rate_climbs_and_falls():
    groups = [{"params": torch.zeros(1), "peak": peak} for peak in (1.0, 30.0)]
    optimizer = torch.optim.SGD(groups)
    fall = [n / 20 for n in range(20, -1, -1)]
    climb = [1 / 3, 2 / 3, *(n / 18 for n in range(18, -1, -1)), 0]  # the last is one too many
    for warmup, rates in ((0, fall), (2, climb), (1000, climb)):
        for step, rate in enumerate(rates):
            set_lr(optimizer, step, 20, warmup)
            lrs = [group["lr"] for group in optimizer.param_groups]
            assert lrs == pytest.approx([rate, 30 * rate])


def test_all_gradients_together_are_scaled_to_max_grad_norm():
    x, y = torch.zeros(2, 1)
    x.grad, y.grad = torch.tensor([[-3.0], [-4.0]])
    optimizer = torch.optim.SGD([{"params": x}, {"params": y}], 1.0)
    assert gradient_step(optimizer, 10.0) == 5.0  # the norm before
    assert (x, y) == (3, 4)
    assert gradient_step(optimizer, 1.0) == 5.0
    for number in (inf, nan):
        y.grad.fill_(number)
        with pytest.raises(FloatingPointError):
            gradient_step(optimizer, 1.0)
    assert (x.item(), y.item()) == pytest.approx((3.6, 4.8))


def test_what_is_watched_is_what_the_names_say():
    batch = {
        "mask": marks("xx.", ".x."),
        "scores": f64([1.0, 4.0]),
        "ended": torch.tensor([True, True]),
        "old_logprobs": f64([[-1.0, -2.0, nan], [nan, -3.0, nan]]),
        "ref_logprobs": f64([[-2.0, -1.5, nan], [nan, -2.0, nan]]),
    }  # log pi - log ref is 1 and -0.5 in the first row, -1 in the second
    expected = {
        "score": 2.5,
        "kl": (0.5 - 1) / 2,
        "kl_k3": (0.3679 + 0.1487 + 0.7183) / 2,
        "objective": (0.75 + 4.5) / 2,
        "entropy": 2.0,
        "response_length": 1.5,
        "eos_rate": 1.0,
    }
    assert batch_metrics(batch, PPOConfig(kl_coef=0.5)) == pytest.approx(expected, abs=1e-4)


def test_the_example_learns_with_torch_alone(tmp_path):
    assert minippo.turns_score([], torch.tensor([[1, 20, 23]]), marks("xx")) == 1  # "bux"
    code = "import runpy, sys; sys.modules['numpy'] = None; "
    code += f"runpy.run_path({minippo.__file__!r}, run_name='__main__')"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    numbers = re.findall(r"score +(\S+)  kl +(\S+)", printed)
    (score, kl), *_, (last_score, last_kl) = [map(float, pair) for pair in numbers]
    assert score < -1.5 and 3.5 < last_score <= 4  # eight turns
    assert abs(kl) < 0.3 and 8 < last_kl < 13  # at beta = 0: 19 to 20
