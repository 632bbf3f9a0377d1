"""The specification of minippo.py, in its order. `nan`: what must not matter."""

import ast
import copy
import inspect
import itertools
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import minippo
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, batch_metrics, center_values
from minippo import compute_advantages, draw, evaluate_actions, frozen_copy
from minippo import gae, generate, gradient_step, kl_adjusted_rewards, kl_per_response
from minippo import masked_mean, policy_loss, ppo_update, reward_model_loss, rollout
from minippo import row_lengths, set_lr, value_loss, whiten
from plumbing.batches import pad_completions
from tiny import EOS, assert_equal, biased, f64, inf, marks, nan, noise
from tiny import padded_otherwise, random_batch, stir, tiny_gpt, tiny_reward_model, weights

SOURCE = inspect.getsource(minippo)
for_random_batches = pytest.mark.parametrize("seed", range(8))


def row(name):
    """The numbers in the row of this name of a table of minippo.py."""
    line = rf"(?m)^[# ]+(?:The response of the header: +)?{re.escape(name)}  +(?:\. +)?(.*)"
    return [float(x) for x in re.search(line, SOURCE)[1].split()[:3]]


def test_the_tables_show_what_the_functions_give():
    batch = {"mask": marks("xxx"), "scores": f64([1.40]), "old_logprobs": f64([row("log pi")])}
    batch |= {"ref_logprobs": f64([row("log ref")]), "old_values": f64([row("value")])}
    A = compute_advantages(batch, PPOConfig())["advantages"]
    logprobs = f64([row("log pi now")]).requires_grad_()
    losses, stats = policy_loss(logprobs, batch["old_logprobs"], A, 0.2)
    losses.sum().backward()
    ratio = stats["ratio"]
    computed = {
        "KL": batch["old_logprobs"] - batch["ref_logprobs"],
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


def test_no_function_needs_one_below_it_or_more_than_torch():
    imports = re.findall(r"(?m)^ *(?:import|from) (\w+)", SOURCE)
    assert set(imports) - sys.stdlib_module_names == {"torch"}
    definitions = [node for node in ast.parse(SOURCE).body if hasattr(node, "name")]
    below = {node.name for node in definitions}
    for node in definitions:
        below.remove(node.name)
        names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        assert not names & below, node.name


# 1. The networks


def test_heads_share_the_channels():
    with pytest.raises(ValueError):
        GPTConfig(channels=10, heads=3)


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
    biases = [parameter for name, parameter in policy.named_parameters() if "bias" in name]
    assert not any(parameter.any() for parameter in [*biases, policy.value_head.weight])
    std = RewardModel(policy).score_head.weight.std().item()
    assert std == pytest.approx(193**-0.5, rel=0.15)


def test_a_score_is_read_at_the_last_token_scaled_and_capped():
    model = tiny_reward_model()
    tokens = torch.randint(EOS, (4, 4))
    last = [model.trunk(tokens[[i], : i + 1])[0, -1] for i in range(4)]  # each row alone
    raw = model.score_head(torch.stack(last)).squeeze(1)
    assert_equal(model(tokens, torch.arange(1, 5)), raw)
    model.mean.fill_(0.25)
    model.std.fill_(2.0)
    scaled = (raw - 0.25) / 2
    model.cap.copy_(scaled.median())
    assert_equal(model(tokens, torch.arange(1, 5)), scaled.clamp(max=scaled.median()))


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

MASK = marks(".xx", "x..")
PASTED = [  # function, number of tensors (B, T-1), what follows
    (policy_loss, 3, [0.2]),
    (value_loss, 3, [0.2]),
    (reward_model_loss, 2, []),
    (masked_mean, 1, [MASK]),
    (whiten, 1, [MASK]),
    (kl_per_response, 2, [MASK]),
    (gae, 2, [MASK, 1.0, 1.0]),
    (partial(kl_adjusted_rewards, f64([1, 2])), 2, [MASK, 0.1]),
    (partial(evaluate_actions, tiny_gpt(), torch.ones(2, 4).long()), 0, [MASK]),
]


@pytest.mark.parametrize("function, count, others", PASTED)
def test_unfit_shapes_and_types_are_refused(function, count, others):
    right = [*noise(count, 2, 3), *others]
    function(*right)
    wrong = [noise(2, 1), noise(3), noise(2, 3).half(), noise(2, 3).bfloat16()]
    cases = list(itertools.product(range(count), wrong))
    if any(x is MASK for x in others):
        cases += [(count, x) for x in (MASK.long(), MASK[:, :1], MASK[0])]
    for i, x in cases:
        with pytest.raises(ValueError):
            function(*right[:i], x, *right[i + 1 :])


def test_a_row_ends_with_its_last_action_and_has_one_score():
    assert row_lengths(marks("..xx.", "x....", "....x")).tolist() == [5, 2, 6]
    with pytest.raises(ValueError):
        row_lengths(marks("..xx", "...."))
    with pytest.raises(ValueError):
        kl_adjusted_rewards(noise(2, 1), noise(2, 3), noise(2, 3), MASK, 0.1)


def test_16_bits_are_inside_the_blocks_alone():
    policy = tiny_gpt(bfloat16=True).float()
    cache = [[] for _ in policy.trunk.blocks]
    hidden = policy.trunk(torch.arange(9)[None], cache)
    assert {x.dtype for block in cache for x in block} == {torch.bfloat16}
    numbers = evaluate_actions(policy.bfloat16(), *generate(policy, [[1, 2]], 9))
    assert {x.dtype for x in (hidden, *numbers)} == {torch.float32}


def read(policy, tokens):
    """tokens (T,) -> the logits (V,) of the next token, and the value."""
    logits, values = policy(tokens[None], torch.ones(1, len(tokens)).bool())
    return logits[-1], values[-1]


@for_random_batches
@torch.no_grad()
def test_index_t_is_the_choice_of_token_t_plus_1(seed):
    policy = tiny_gpt()
    batch = padded_otherwise(random_batch(seed), seed % 3, EOS, nan)
    tokens, mask = batch["tokens"], batch["mask"]
    logprobs = torch.zeros(mask.shape).double()
    values = logprobs.clone()
    for b, t in mask.nonzero().tolist():  # having read 0 .. t
        logits, values[b, t] = read(policy, tokens[b, : t + 1])
        logprobs[b, t] = (logits / 0.7).log_softmax(-1)[tokens[b, t + 1]]
    assert_equal(evaluate_actions(policy, tokens, mask, 0.7), (logprobs, values))


# 3. Sampling


def test_a_token_is_drawn_if_a_number_falls_into_its_piece(monkeypatch):
    logits = f64([0.0, 0.3, 0.0, 0.2, 0.5, 0.0]).log() + 7
    cases = {0.0: 1, 0.29: 1, 0.31: 3, 1 - 2**-53: 4}
    numbers = f64([*cases])
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: numbers.to(dtype).view(shape))
    assert draw(logits.expand(4, 6)).tolist() == [*cases.values()]
    # In float32 this probability would be lost.
    assert draw(torch.tensor([[0.0, -20.0]]).expand(4, 2))[-1] == 1
    for number in (nan, inf):
        with pytest.raises(FloatingPointError):
            draw(f64([[0.0, 1.0], [number, 1.0]]))


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [EOS, 9, 0], [1] * 6, [EOS]]


def settled(logits):
    """Tokens that follow from the logits: (B, V) -> (B,)."""
    u = logits[:, :1] * 100 % 1
    return (logits.softmax(-1).cumsum(-1) < u).sum(-1)


@pytest.mark.parametrize("limit, temperature", [(6, 1.0), (1, 1.3), (10**12, 0.7)])
@pytest.mark.parametrize("bias", [-inf, 1.0, 50.0])  # to end: never, at any time, at once
def test_sampling_is_a_plain_loop_that_reads_whole_rows(monkeypatch, limit, temperature, bias):
    monkeypatch.setattr(minippo, "draw", settled)
    policy = biased(tiny_gpt(), {EOS: bias})
    rows = []
    for prompt in PROMPTS:
        response = []
        while len(response) < min(limit, 16 - len(prompt)) and EOS not in response:
            logits, _ = read(policy, torch.tensor(prompt + response))
            response.append(settled(logits[None] / temperature).item())
        rows.append((prompt, response))
    assert_equal(generate(policy, PROMPTS, limit, temperature), pad_completions(rows))


def test_empty_and_long_prompts_are_refused():
    for prompts in ([[1], []], [[1] * 16], [[1], [1] * 17]):
        with pytest.raises(ValueError):
            generate(tiny_gpt(), prompts, 5)


# 4. The reward model's loss


def test_the_reward_models_loss_is_bradley_and_terrys():
    loss, stats = reward_model_loss(f64([2.0, 0.5, 1.0]), f64([1.0, 2.5, 1.0]))
    chances = 1 / (1 + f64([-1.0, 2.0, 0.0]).exp())
    assert_equal(loss, -chances.log().mean())
    accuracy = (1 + 0 + 0.5) / 3  # a tie is half right
    assert stats == pytest.approx({"loss": loss.item(), "accuracy": accuracy, "margin": -1 / 3})
    wrong, _ = reward_model_loss(f64([-5000.0]), f64([5000.0]))
    assert wrong == 10_000


# 5. From the policy gradient to PPO


@for_random_batches
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_rewards_returns_and_advantages_are_these(seed, gamma, lam):
    batch = random_batch(seed)
    mask, values = batch["mask"], batch["old_values"]
    rewards = 0.3 * (batch["ref_logprobs"] - batch["old_logprobs"])
    rewards[range(len(mask)), row_lengths(mask) - 2] += batch["scores"]
    batch = padded_otherwise(batch, 0, 0, nan)
    config = PPOConfig(kl_coef=0.3, gamma=gamma, lam=lam, whiten=False)
    numbers = compute_advantages(batch, config)
    A = numbers["advantages"]
    next_values, next_A = F.pad(torch.stack([values, A]), (0, 1))[..., 1:]  # 0 after the last
    delta = rewards + gamma * next_values - values
    assert_equal(A, torch.where(mask, delta + gamma * lam * next_A, 0.0))
    assert_equal(numbers, {"rewards": rewards, "returns": A + values, "advantages": A})
    numbers["advantages"] = whiten(A, mask)
    assert_equal(compute_advantages(batch, replace(config, whiten=True)), numbers)
    rewards = rewards.masked_fill(~mask, nan)
    assert_equal(gae(rewards, batch["old_values"], mask, gamma, lam), (A, A + values))


def test_means_and_whitening_see_the_mask_only():
    numbers = f64([[-4, -2, nan, 100], [inf, 0, 2, 4]])
    mask = marks("xx..", ".xxx")
    white = f64([[-4, -2, 0, 0], [0, 0, 2, 4]]) / 8**0.5
    assert_equal(whiten(numbers, mask), white, 1e-8)
    for scale in (0.1, 1.0, 1e9):
        assert_equal(masked_mean(scale * (numbers + 5), mask), f64(5 * scale))
        # The divisor grows by 1e-5 * 5 / 8**0.5 of itself.
        assert_equal(whiten(scale * (numbers + 5), mask), white, 3e-5)
    assert whiten(f64([[1, nan, 3]]), marks("xxx")).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1e3 / 3, -1e6 / 3, 1e-6 / 3])
def test_equal_numbers_are_whitened_to_almost_0(value, dtype):
    numbers = torch.full((7, 43), value, dtype=dtype)
    numbers[0, 0] *= 1 + torch.finfo(dtype).eps  # rounding
    white = whiten(numbers, torch.rand(7, 43) < 0.9)
    assert white.abs().max() < 4e5 * torch.finfo(dtype).eps


def test_the_clip_stops_ratios_that_moved_enough():
    ratio = f64([[0.5, 0.9, 1.1, 1.5], [0.5, 0.9, 1.1, 1.5]])
    A = f64([[2.0], [-3.0]]).expand(2, 4)
    logprobs = ratio.log().requires_grad_()
    zeros = logprobs - logprobs.detach()  # recorded with a gradient
    for eps in (0.2, inf):
        limited = torch.where(A > 0, ratio.clamp(max=1 + eps), ratio.clamp(min=1 - eps))
        losses, stats = policy_loss(logprobs, zeros, A + zeros, eps)
        assert_equal(losses, -limited * A)
        (grad,) = torch.autograd.grad(losses.sum(), logprobs, retain_graph=True)
        assert_equal(grad, torch.where(limited == ratio, -ratio * A, 0.0))
        assert stats["clip_frac"].tolist() == [[eps == 0.2, 0, 0, eps == 0.2]] * 2
        assert_equal(stats["approx_kl"], ratio - 1 - ratio.log())


def test_a_ratio_that_overflows_has_a_finite_loss():
    logprobs = torch.tensor([[100.0, -100.0]] * 3).requires_grad_()
    A = torch.tensor([[0.0], [1.0], [-1.0]]).expand(3, 2)
    losses, stats = policy_loss(logprobs, torch.zeros(3, 2), A, 0.2)
    losses.sum().backward()
    assert all(x.isfinite().all() for x in (logprobs.grad, *stats.values()))


def test_a_value_gains_nothing_beyond_the_clip():
    values = f64([[1.10, 0.90, 0.50, 1.60]]).requires_grad_()
    zeros = values - values.detach()
    for clip, limited in ((0.2, [[1.00, 0.90, 0.50, 1.00]]), (inf, values.tolist())):
        losses, _ = value_loss(values, 0.80 + zeros, 1.35 + zeros, clip)
        assert_equal(losses, (f64(limited) - 1.35) ** 2 / 2)
        (grad,) = torch.autograd.grad(losses.sum(), values, retain_graph=True)
        assert_equal(grad, torch.where(f64(limited) == values, values.detach() - 1.35, 0.0))


# 6. The loop


def test_a_rollout_records_what_the_next_phases_need(monkeypatch):
    monkeypatch.setattr(minippo, "draw", settled)
    policy, ref, model = tiny_gpt(), tiny_gpt(), tiny_reward_model()
    config = PPOConfig(5, 0.7, length_penalty=0.25, missing_eos_penalty=0.5)

    def score(prompts, tokens, mask):
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        return model(tokens, row_lengths(mask)) + prompt_lengths

    batch = rollout(policy, ref, score, PROMPTS * 2, config)
    assert not any(x.requires_grad for x in batch.values())
    tokens, mask = generate(policy, PROMPTS * 2, 5, 0.7)
    ended = (mask & (tokens[:, 1:] == EOS)).any(1)
    assert 0 < ended.sum() < 12
    logprobs, values = evaluate_actions(policy, tokens, mask, 0.7)
    expected = {
        "tokens": tokens,
        "mask": mask,
        "old_logprobs": logprobs,
        "old_values": values,
        "ref_logprobs": evaluate_actions(ref, tokens, mask, 0.7)[0],
        "scores": score(PROMPTS * 2, tokens, mask) - 0.25 * mask.sum(1) - 0.5 * ~ended,
        "ended": ended,
    }
    assert_equal(batch, expected)


PLAIN = PPOConfig(5, 0.7, clip_eps=0.15, value_clip=0.4, vf_coef=0.5, minibatches=1)


def test_centred_values_have_the_mean_of_the_scores():
    policy = tiny_gpt()
    before = policy.value_head.bias.item()
    batch = {"mask": marks(".x", "xx"), "scores": f64([2.0, 5.0])}
    center_values(policy, batch | {"old_values": f64([[nan, 0.5], [1.0, 1.5]])})
    assert policy.value_head.bias.item() == pytest.approx(before + 3.5 - 1.0)


@for_random_batches
@pytest.mark.parametrize("epochs, minibatches, size", [(1, 1, 0), (3, 2, 0), (2, 2, 1), (2, 1, 2)])
def test_an_update_is_a_plain_loop_and_pieces_add_up(seed, epochs, minibatches, size):
    policy = tiny_gpt()
    twin = copy.deepcopy(policy)
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (policy, twin))
    batch = random_batch(seed)
    batch |= compute_advantages(batch, PLAIN)
    config = replace(PLAIN, epochs=epochs, minibatches=minibatches, micro_batch=size)
    sizes = []
    policy.trunk.register_forward_hook(lambda *x: sizes.append(len(x[2])))
    torch.manual_seed(seed)
    stats = ppo_update(policy, optimizer, padded_otherwise(batch, 2, EOS, nan), config)
    torch.manual_seed(seed)
    seen = defaultdict(list)
    for _ in range(epochs):
        for rows in torch.randperm(len(batch["mask"])).tensor_split(minibatches):
            x = {name: numbers[rows] for name, numbers in batch.items()}
            logprobs, values = evaluate_actions(twin, x["tokens"], x["mask"], 0.7)
            losses, step = policy_loss(logprobs, x["old_logprobs"], x["advantages"], 0.15)
            value_losses, value_step = value_loss(values, x["old_values"], x["returns"], 0.4)
            step |= value_step | {"loss": losses + 0.5 * value_losses}
            other.zero_grad()
            step["loss"][x["mask"]].mean().backward()
            seen["grad_norm"].append(gradient_step(other, 1.0))
            for name, numbers in step.items():
                seen[name] += numbers[x["mask"]].tolist()
    assert_equal(weights(policy), weights(twin))
    assert size in (0, max(sizes))
    expected = {name: sum(x) / len(x) for name, x in seen.items()}
    expected["ratio_max"] = max(seen["ratio"])
    assert stats == pytest.approx(expected)


def test_the_learning_rate_climbs_and_falls():
    groups = [{"params": torch.zeros(1), "peak": peak} for peak in (1.0, 30.0)]
    optimizer = torch.optim.SGD(groups, 5.0)
    fall = [n / 20 for n in range(20, 0, -1)]
    climb = [1 / 3, 2 / 3, *(n / 18 for n in range(18, 0, -1))]
    for warmup, rates in ((0, fall), (2, climb), (1000, climb)):
        for step, rate in enumerate(rates):
            set_lr(optimizer, step, 20, warmup)
            lrs = [group["lr"] for group in optimizer.param_groups]
            assert lrs == pytest.approx([rate, 30 * rate])


def test_all_gradients_together_are_scaled_to_max_grad_norm():
    x = torch.zeros(1)
    y = torch.zeros(1)
    optimizer = torch.optim.SGD([{"params": x}, {"params": y, "lr": 10.0}], 1.0)
    for number in (inf, nan):
        x.grad = torch.tensor([1.0])
        y.grad = torch.tensor([number])
        with pytest.raises(FloatingPointError):
            gradient_step(optimizer, 1.0)
    assert (x, y) == (0, 0)
    x.grad = torch.tensor([-3.0])
    y.grad = torch.tensor([-4.0])
    assert gradient_step(optimizer, 10.0) == 5.0  # the norm before
    assert (x, y) == (3, 40)
    gradient_step(optimizer, 1.0)
    assert (x.item(), y.item()) == pytest.approx((3.6, 48))


@for_random_batches
def test_what_is_watched_is_what_the_names_say(seed):
    batch = random_batch(seed)
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    log_ratio = old_logprobs - batch["ref_logprobs"]
    kl = log_ratio.sum(1)
    means = {
        "score": scores,
        "kl": kl,
        "kl_k3": ((-log_ratio).exp() - 1 + log_ratio).sum(1),
        "kl_coef": f64(0.25),
        "objective": scores - 0.25 * kl,
        "entropy": -old_logprobs[mask],
        "response_length": mask.sum(1).double(),
        "eos_rate": batch["ended"].double(),
    }
    metrics = batch_metrics(padded_otherwise(batch, 2, EOS, nan), PPOConfig(kl_coef=0.25))
    assert metrics == pytest.approx({name: x.mean().item() for name, x in means.items()})


def test_the_example_learns_with_torch_alone(tmp_path):
    code = "import runpy, sys; sys.modules['numpy'] = None; "
    code += f"runpy.run_path({minippo.__file__!r}, run_name='__main__')"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    numbers = re.findall(r"score +(\S+)  kl +(\S+)", printed)
    (score, kl), *_, (last_score, last_kl) = [map(float, pair) for pair in numbers]
    assert score < -1.5 and 3.5 < last_score <= 4  # eight turns
    assert abs(kl) < 0.3 and 8 < last_kl < 13  # at beta = 0: 19 to 20
