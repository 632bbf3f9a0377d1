"""The specification of minippo.py, in its order. Run: python -m pytest tests/test_minippo.py

What holds for every batch is said of random batches (tiny.random_batch), what can be computed by
hand of literal ones. All numbers are float64; `nan` stands for what must not matter.
"""

import ast
import builtins
import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import minippo
from minippo import (
    GPT,
    GPTConfig,
    PPOConfig,
    RewardModel,
    adapt_kl_coef,
    average,
    compute_advantages,
    batch_metrics,
    evaluate_actions,
    explained_variance,
    frozen_copy,
    gae,
    gather_logprobs,
    generate,
    gradient_step,
    kl_adjusted_rewards,
    kl_per_response,
    masked_mean,
    policy_loss,
    ppo_iteration,
    ppo_loss,
    ppo_update,
    response_mask,
    reward_model_loss,
    rollout,
    row_lengths,
    score_responses,
    trace,
    value_loss,
    whiten,
)
from tiny import (
    EOS,
    all_responses,
    assert_equal,
    biased,
    f64,
    gradients,
    inf,
    marks,
    nan,
    noise,
    padded_otherwise,
    random_batch,
    stir,
    tiny_gpt,
    tiny_reward_model,
    weights,
)

TREE = ast.parse(Path(minippo.__file__).read_text(encoding="utf-8"))
for_random_batches = pytest.mark.parametrize("seed", range(20))


# The drawing at the top of the file


def drawing():
    """The table of the header -> {row: its columns}."""
    rows = {}
    for line in minippo.__doc__.split("    index t  ")[1].splitlines()[1:]:
        if line.startswith("    "):
            name, cells = re.match(r" +(\S+(?: \S+)*)  +(.*)", line).groups()
            cells = [float(x) if re.fullmatch(r"-?\d+\.\d+", x) else x for x in cells.split()]
            rows[name] = cells
    return rows


def drawn_batch():
    """The response of the drawing as a rollout."""
    rows = drawing()
    names = {"old_logprobs": "log pi", "ref_logprobs": "log ref", "old_values": "value"}
    batch = {name: f64([[0, *rows[row][1:4], 0]]) for name, row in names.items()}
    mask = response_mask(torch.tensor([2]), torch.tensor([5]), 6)
    return batch | {"tokens": torch.arange(6)[None], "mask": mask, "scores": f64([1.40])}


def test_the_numbers_in_the_drawing_are_what_the_functions_give():
    rows, batch = drawing(), drawn_batch()
    assert_equal(batch["mask"], marks(".xxx."))
    assert "score of 1.40 and beta 0.1" in minippo.__doc__
    computed = {"log pi": batch["old_logprobs"], "log ref": batch["ref_logprobs"]}
    computed |= {"KL": batch["old_logprobs"] - batch["ref_logprobs"], "value": batch["old_values"]}
    for name, x in compute_advantages(batch, PPOConfig(lam=1.0), 0.1).items():
        computed[name.removesuffix("s")] = x
    computed["delta"] = compute_advantages(batch, PPOConfig(lam=0.0), 0.1)["advantages"]
    now = f64([[0, *rows["log pi now"][1:4], 0]]).requires_grad_()
    ratio, A = (now - batch["old_logprobs"]).exp(), computed["whitened"]
    computed |= {"log pi now": now, "ratio": ratio, "clipped": ratio.clamp(0.8, 1.2)}
    computed |= {"ratio * A": ratio * A, "clipped * A": ratio.clamp(0.8, 1.2) * A}
    assert rows.keys() == computed.keys() | {"tokens", "action", "mask", "gradient"}
    loss, _ = policy_loss(now, batch["old_logprobs"], A, batch["mask"], 0.2)
    smaller = torch.min(computed["ratio * A"], computed["clipped * A"])
    assert_equal(loss, -smaller[0, 1:4].mean())
    loss.backward()
    said = ["yes" if x else "no" for x in now.grad[0, 1:4]]
    assert rows["gradient"][:5] == [".", *said, "."] and {*said} == {"yes", "no"}
    value = f64([[1.05]]).requires_grad_()
    loss, _ = value_loss(value, f64([[0.80]]), f64([[1.35]]), marks("x"), 0.2)
    loss.backward()
    text = " ".join(minippo.__doc__.split())
    assert "was 0.80 and is now 1.05; its clipped copy stops at 1.00" in text
    assert "(1.35 - 1.00)^2 = 0.12 and not 0.30^2 = 0.09. That error has no gradient" in text
    assert rows["return"][1] == 1.35 and rows["value"][1] == 0.80
    assert (
        value.grad.item() == 0
        and round(2 * loss.item(), 2) == 0.12
        and round((1.35 - 1.05) ** 2, 2) == 0.09
    )
    for name, x in computed.items():
        first, *cells, last = rows[name][:5]
        assert (first, last) == (".", ".") and cells == [round(v, 2) for v in x[0, 1:4].tolist()]
    assert rows["mask"][:5] == [*".xxx."] and rows["action"][:5] == rows["tokens"][1:6]


# 1. The networks


def test_the_defaults_are_those_that_were_measured():
    assert GPTConfig() == GPTConfig(1024, 128, 4, 4, 96, 0.0, False)
    first = {"max_new_tokens": 48, "temperature": 1.0, "length_penalty": 0.0}
    second = {"missing_eos_penalty": 1.0, "kl_coef": 0.1, "gamma": 1.0, "lam": 1.0, "whiten": True}
    third = {"epochs": 1, "minibatches": 4, "max_grad_norm": 1.0, "clip_eps": 0.2}
    fourth = {"value_clip": 0.2, "vf_coef": 0.1, "entropy_coef": 0.0, "kl_loss_coef": 0.0}
    assert asdict(PPOConfig()) == first | second | third | fourth


def test_the_end_token_is_the_last_of_the_vocabulary():
    assert GPTConfig(vocab_size=300).eos == 299 and replace(GPTConfig(300), vocab_size=7).eos == 6


def test_channels_that_the_heads_cannot_share_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        GPTConfig(channels=10, heads=3)


def by_formula(policy, tokens):
    """A row (T,) -> logits (T, V), values (T,), by the formulas of GPT-2."""

    def norm(x, layer):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * layer.weight + layer.bias

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

    hidden, critic = run(policy.trunk), policy.critic or policy.trunk
    values = linear(run(critic), policy.value_head).squeeze(-1)
    return hidden @ policy.trunk.token_embedding.weight.T, values


@pytest.mark.parametrize("separate_critic", [False, True])
def test_the_network_is_a_gpt_2_with_a_value_head(separate_critic):
    policy = tiny_gpt(separate_critic=separate_critic)
    tokens = torch.randint(EOS + 1, (3, 7))
    logits, values = policy(tokens)
    for i in range(3):
        expected = by_formula(policy, tokens[i])
        assert_equal(logits[i], expected[0])
        assert_equal(values[i], expected[1])
    for model in (policy, frozen_copy(policy)):
        assert model.lm_head.weight is model.trunk.token_embedding.weight


def test_values_start_at_zero():
    assert not GPT(GPTConfig(11, 8, 1, heads=2, channels=8))(torch.tensor([[1, 2]]))[1].any()


def test_weights_start_at_gpt_2s_spread_and_smaller_where_branches_add_up():
    trunk = GPT(GPTConfig(400, 64, layers=8, heads=4, channels=192)).trunk
    for name, parameter in trunk.named_parameters():
        if parameter.dim() == 2:
            adds_up = name.endswith(("out.weight", "mlp.2.weight"))
            std = 0.02 * 2 / (4 if adds_up else 1)  # sqrt(768 / 192) and sqrt(2 x 8)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(parameter.mean()) < 0.1 * std, name
        else:
            assert (parameter == ("norm" in name and name.endswith("weight"))).all(), name
    config = GPTConfig(11, 8, 1, heads=2, channels=1024)
    head = RewardModel(config).score_head
    assert head.weight.std().item() == pytest.approx(1025**-0.5, rel=0.1) and not head.bias.any()


@pytest.mark.parametrize("where", ["embeddings", "attention", "out", "mlp.2"])
def test_each_of_four_dropouts_drops_in_training_only(where):
    policy, tokens = tiny_gpt(layers=1, dropout=0.5), torch.randint(EOS, (5, 9))
    (block,) = policy.trunk.blocks
    for name, layer in {"out": block.attention.out, "mlp.2": block.mlp[2]}.items():
        if name != where:  # dropout acts on zeros
            layer.weight.data.zero_(), layer.bias.data.zero_()
    policy.trunk.dropout.p *= where == "embeddings"
    block.attention.dropout *= where == "attention"
    if where == "attention":
        stir(block.attention.out), setattr(block.dropout, "p", 0.0)
    still = policy(tokens)[0]
    assert torch.equal(policy(tokens)[0], still)
    assert not torch.equal(policy.train()(tokens)[0], still)


def test_a_reward_model_starts_with_a_copy_of_the_policy_and_shares_nothing():
    policy = tiny_gpt()
    model = RewardModel(policy).double()
    before = weights(policy)
    assert_equal(weights(model.trunk), weights(policy.trunk))
    stir(model)
    assert_equal(weights(policy), before)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_score_is_read_at_the_last_token_and_sees_all_before_it(length):
    model, tokens = tiny_reward_model(), torch.tensor([[3, 1, 4, 1]])
    score = model(tokens, torch.tensor([length]))
    for t in range(4):
        changed = tokens.clone()
        changed[0, t] = 2
        moved = (model(changed, torch.tensor([length])) - score).abs().item() > 1e-5
        assert moved == (t < length)


def test_a_score_is_shifted_and_scaled_by_mean_and_std():
    model, tokens = tiny_reward_model(), torch.tensor([[3, 1, 4], [2, 7, 0]])
    lengths = torch.tensor([3, 2])
    scores = model(tokens, lengths)
    model.mean.fill_(0.25), model.std.fill_(2.0)
    assert_equal(model(tokens, lengths), (scores - 0.25) / 2)
    assert {"mean", "std", "cap"} <= model.state_dict().keys()


def test_a_score_above_the_cap_is_cut_off_and_has_no_gradient():
    model, tokens = tiny_reward_model(), torch.tensor([[3, 1, 4], [2, 7, 0]])
    lengths = torch.tensor([3, 2])
    low, high = model(tokens, lengths).sort().values.tolist()
    model.cap.fill_((low + high) / 2)
    assert_equal(model(tokens, lengths).sort().values, f64([low, (low + high) / 2]))
    model(tokens, lengths).max().backward()
    assert not model.score_head.weight.grad.any()


# 2. Log-probabilities and masks


def test_the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token():
    # The drawing at the top of minippo.py: a prompt of two tokens, a response of three, one pad.
    assert_equal(response_mask(torch.tensor([2]), torch.tensor([5]), 6), marks(".xxx."))
    # A prompt of one token and no padding; a response of one token; none at all.
    prompt_lengths, lengths = torch.tensor([1, 2, 3]), torch.tensor([4, 3, 3])
    assert_equal(response_mask(prompt_lengths, lengths, 4), marks("xxx", ".x.", "..."))


def test_a_row_is_as_long_as_its_last_action_says_and_has_one():
    assert row_lengths(marks("..xx.", "x....", "....x", "xxxxx")).tolist() == [5, 2, 6, 6]
    with pytest.raises(ValueError, match="a response is empty"):
        row_lengths(marks("..xx", "...."))


def test_the_masked_mean_sees_the_mask_only():
    x = f64([[1, nan, 5], [inf, 3, nan]]).requires_grad_()
    mean = masked_mean(x, marks("x.x", ".x."))
    mean.backward()
    assert mean.item() == 3.0
    assert_equal(x.grad, f64([[1, 0, 1], [0, 1, 0]]) / 3)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0,)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gathered_logprobs_are_the_log_softmax_at_the_targets(shape, temperature):
    logits, targets = noise(*shape, 5), torch.randint(5, shape)
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    assert_equal(gather_logprobs(logits, targets, temperature), expected)
    if temperature == 1:
        assert_equal(gather_logprobs(logits, targets), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_probabilities_are_never_in_16_bits(dtype):
    policy, logits = tiny_gpt().float(), (8 * noise(50, 9)).to(dtype)
    targets = torch.randint(9, (50,))
    scored = gather_logprobs(logits, targets)
    assert scored.dtype == torch.float32
    assert_equal(scored.double(), gather_logprobs(logits.double(), targets), 1e-5)
    tokens, mask = torch.randint(11, (2, 5)), marks(".xx.", "..xx")
    full = evaluate_actions(policy, tokens, mask)
    with torch.autocast("cpu", torch.bfloat16):
        near = evaluate_actions(policy, tokens, mask)
    half = evaluate_actions(policy.to(torch.bfloat16), tokens, mask)
    for x, a, b in zip(full, near, half):
        assert a.dtype == b.dtype == torch.float32
        assert (x - a).abs().max() < 0.2 > (x - b).abs().max()


MASKED = {  # functions of tensors (B, T-1), and what they are called with besides
    "masked_mean": (1, lambda x, mask: masked_mean(x, mask)),
    "whiten": (1, lambda x, mask: whiten(x, mask)),
    "kl_per_response": (2, lambda x, y, mask: kl_per_response(x, y, mask)),
    "kl_adjusted_rewards": (2, lambda *x: kl_adjusted_rewards(noise(2), *x, 0.1)),
    "evaluate_actions": (
        0,
        lambda mask: evaluate_actions(tiny_gpt(), torch.ones(2, 4).long(), mask),
    ),
    "gae": (2, lambda *x: gae(*x, 1.0, 1.0)),
    "policy_loss": (3, lambda *x: policy_loss(*x, 0.2)),
    "value_loss": (3, lambda *x: value_loss(*x, 0.2)),
    "explained_variance": (2, lambda x, y, mask: explained_variance(x, y, mask)),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_is_not_boolean_and_shapes_that_do_not_fit_are_refused(name):
    (count, function), mask = MASKED[name], marks(".xx", "x..")
    tensors = [noise(2, 3) for _ in range(count)]
    function(*tensors, mask)
    for wrong in (mask.long(), mask[:1], mask[:, :1], mask[0]):
        with pytest.raises(ValueError, match="wanted a boolean mask and equal shapes, got torch."):
            function(*tensors, wrong)
    for i, shape in itertools.product(range(count), [(2, 1), (1, 3), (3,), (2, 4)]):
        with pytest.raises(ValueError, match=r"bool and \[\(2, 3\), .*\]"):
            function(*tensors[:i], noise(*shape), *tensors[i + 1 :], mask)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3,), (1,)], ids=str)
def test_scores_that_are_not_one_number_a_row_are_refused(shape):
    with pytest.raises(ValueError, match="equal shapes"):
        kl_adjusted_rewards(noise(*shape), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.1)
    with pytest.raises(ValueError, match="differ"):
        reward_model_loss(noise(2), noise(*shape))


def test_index_t_is_the_choice_of_token_t_plus_1_in_the_state_of_having_read_tokens_0_to_t():
    # The drawing at the top of minippo.py: index 1 is the first response token, 3 the end token.
    policy, tokens = tiny_gpt(), torch.tensor([[3, 1, 4, 5, EOS, 0]])
    with torch.no_grad():
        logprobs, values, entropy = evaluate_actions(policy, tokens, marks(".xxx."))
        logits, all_values = policy(tokens)
    p = logits[0].softmax(-1)
    assert_equal(logprobs, f64([[0, p[1, 4].log(), p[2, 5].log(), p[3, EOS].log(), 0]]))
    assert_equal(values, f64([[0, *all_values[0, 1:4], 0]]))
    assert_equal(entropy, f64([[0, *(-(p * p.log()).sum(-1))[1:4], 0]]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_scored_distribution_is_the_softmax_of_the_logits_over_the_temperature(temperature):
    policy, tokens = tiny_gpt(), torch.randint(EOS + 1, (4, 9))
    mask = torch.ones(4, 8, dtype=torch.bool)
    logprobs, values, entropy = evaluate_actions(policy, tokens, mask, temperature)
    expected = (policy(tokens)[0][:, :-1] / temperature).log_softmax(-1)
    assert_equal(logprobs, expected.gather(-1, tokens[:, 1:, None]).squeeze(-1))
    assert_equal(entropy, -(expected.exp() * expected).sum(-1))
    without = evaluate_actions(policy, tokens, mask, temperature, with_entropy=False)
    assert torch.equal(without[0], logprobs) and torch.equal(without[1], values)
    assert not without[2].any()


def numbers_of_rows(policy, ref, batch):
    """All that an iteration computes about each row before it averages: {name: (B,) or (B, T-1)}"""
    tokens, mask, scores = batch["tokens"], batch["mask"], batch["scores"]
    logprobs, values, entropy = evaluate_actions(policy, tokens, mask)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask)
    rewards = kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, 0.2)
    advantages, returns = gae(rewards, batch["old_values"], mask, 0.9, 0.8)
    k1, k3 = kl_per_response(logprobs, batch["ref_logprobs"], mask)
    scored, ended = score_responses(lambda *_: scores, tokens, mask, PPOConfig(), EOS)
    x = {"logprobs": logprobs, "values": values, "entropy": entropy, "rewards": rewards}
    x |= {"advantages": advantages, "returns": returns, "k1": k1, "k3": k3}
    return {name: y.detach() for name, y in (x | {"scores": scored, "ended": ended}).items()}


@for_random_batches
def test_padding_neighbours_and_order_change_no_number_of_a_row(seed):
    policy, ref, batch = tiny_gpt(), tiny_gpt(), random_batch(seed)
    width, B = batch["mask"].shape[1], len(batch["scores"])
    x = numbers_of_rows(policy, ref, batch)
    for columns, token, number in ((0, 7, nan), (3, EOS, inf)):
        padded = padded_otherwise(batch, columns, token, number)
        for name, y in numbers_of_rows(policy, ref, padded).items():
            assert_equal(y[:, :width] if y.dim() == 2 else y, x[name])
            assert y.dim() == 1 or not y[:, width:].any()
    order = torch.randperm(B)
    shuffled = {name: y[order] for name, y in batch.items()}
    for name, y in numbers_of_rows(policy, ref, shuffled).items():
        assert_equal(y, x[name][order])
    for i, length in enumerate(row_lengths(batch["mask"]).tolist()):
        alone = {name: y[i : i + 1, : length - 1] for name, y in batch.items() if y.dim() == 2}
        alone |= {"tokens": batch["tokens"][i : i + 1, :length], "scores": batch["scores"][[i]]}
        for name, y in numbers_of_rows(policy, ref, alone).items():
            assert_equal(y[0], x[name][i, : length - 1] if y.dim() == 2 else x[name][i])


def test_vocabulary_logits_are_computed_at_response_tokens_only():
    policy, tokens, seen = tiny_gpt(), torch.randint(EOS + 1, (2, 7)), []
    policy.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    evaluate_actions(policy, tokens, marks("..xx..", ".xxx.."))
    assert seen == [(5, 8)]


# 3. Sampling


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("bias", [-inf, 0.0, 2.0], ids=["never", "sometimes", "early"])
def test_a_row_is_a_prompt_and_a_response_with_the_numbers_that_scoring_gives(
    temperature, max_new_tokens, bias
):
    policy = biased(tiny_gpt(separate_critic=bias == 0), {EOS: bias})
    tokens, mask, logprobs, values = generate(policy, PROMPTS, max_new_tokens, temperature)
    for row, inside, prompt in zip(tokens.tolist(), mask.tolist(), PROMPTS, strict=True):
        response = row[len(prompt) :][: sum(inside)]
        assert row[: len(prompt)] == prompt and EOS not in response[:-1]
        begin = len(prompt) - 1
        assert inside == [begin <= t < begin + len(response) for t in range(len(inside))]
        limit = min(max_new_tokens, 16 - len(prompt))
        assert len(response) == limit or (len(response) < limit and response[-1] == EOS)
    assert tokens.shape[1] == row_lengths(mask).max() == mask.shape[1] + 1
    assert bias <= 0 or max_new_tokens < 7 or len(set(mask.sum(1).tolist())) > 3
    scored, expected, _ = evaluate_actions(policy, tokens, mask, temperature)
    assert_equal(logprobs, scored.detach())
    assert_equal(values, expected.detach())
    assert not logprobs.requires_grad and not values.requires_grad


def test_the_longest_prompt_possible_still_gets_one_token():
    for max_new_tokens in (5, 10**12):  # what does not fit into the context takes no memory
        tokens, mask, *_ = generate(tiny_gpt(context=8), [[1, 2, 3, 4, 5, 6, 7]], max_new_tokens)
        assert tokens.shape == (1, 8) and mask.sum() == 1


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_an_empty_prompt_and_one_that_fills_the_context_are_refused(prompts):
    with pytest.raises(ValueError, match="1 to 15 tokens"):
        generate(tiny_gpt(), prompts, 5)


def three_token_gpt():
    """Vocabulary of 3: ids 0 and 1, and the end token 2."""
    return stir(GPT(GPTConfig(3, 8, layers=1, heads=1, channels=8)).double().eval(), 0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_every_response_is_sampled_as_often_as_its_probability_says(temperature):
    policy, n, prompts = three_token_gpt(), 3000, [[0, 1, 1], [1]]
    options = {} if temperature == 1 else {"temperature": temperature}
    tokens, mask, *_ = generate(policy, prompts * n, 3, **options)
    for i, prompt in enumerate(prompts):
        rows = zip(tokens[i::2, 1:], mask[i::2])
        counts = dict.fromkeys(map(tuple, all_responses(3, 3)), 0.0)
        for row, inside in rows:
            counts[tuple(row[inside].tolist())] += 1  # KeyError: goes on after the end
        chi2 = total = 0.0
        for response, count in counts.items():
            logits = policy(torch.tensor([prompt + list(response)]))[0][0, len(prompt) - 1 : -1]
            log_p = (logits / temperature).log_softmax(-1).gather(1, torch.tensor([response]).T)
            p = log_p.sum().exp().item()
            chi2, total = chi2 + (count - n * p) ** 2 / (n * p), total + p
        assert total == pytest.approx(1) and len(counts) == 15
        assert chi2 < 45  # 14 degrees of freedom: 45 is passed once in 25,000 times


def test_another_draw_takes_the_place_of_the_default_and_gets_logits_over_the_temperature():
    policy, seen = tiny_gpt(), []

    def third(logits):
        seen.append(logits)
        return torch.full((len(logits),), 3)

    tokens, mask, logprobs, _ = generate(policy, PROMPTS, 4, 0.7, draw=third)
    assert set(tokens[:, 1:][mask].tolist()) == {3} and mask.sum(1).tolist() == [4] * len(PROMPTS)
    assert_equal(logprobs, evaluate_actions(policy, tokens, mask, 0.7)[0].detach())
    assert_equal(seen[0][1], policy(torch.tensor([PROMPTS[1]]))[0][0, -1].detach() / 0.7)


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


def test_the_loss_stays_finite_however_wrong_the_scores():
    assert reward_model_loss(f64([-5000.0]), f64([5000.0]))[0].item() == pytest.approx(10_000)


# 5. PPO: the KL and the rewards


def test_both_kl_estimates_are_right_on_average_and_k3_is_never_negative():
    # Policy and reference; every sample once, weighted by its probability p.
    p, q = f64([0.5, 0.3, 0.15, 0.05]), f64([0.1, 0.2, 0.3, 0.4])
    k1, k3 = kl_per_response(p.log()[:, None], q.log()[:, None], marks("x", "x", "x", "x"))
    kl = (p * (p / q).log()).sum()
    assert_equal((p * k1).sum(), kl)
    assert_equal((p * k3).sum(), kl)
    assert (k3 >= 0).all() and k1.min() < 0
    assert_equal(k3[0], f64(0.2 - 1 + math.log(5)))


def test_the_kl_of_a_response_is_the_sum_over_its_tokens():
    logprobs = f64([[nan, -1, -2, inf], [-1, 0, 0, 9]])
    ref_logprobs = f64([[0, -2, -2.5, nan], [-1, 0, 0, 0]])
    k1, k3 = kl_per_response(logprobs, ref_logprobs, marks(".xx.", "xxx."))
    assert_equal(k1, f64([1.5, 0]))
    assert_equal(k3, f64([math.exp(-1) + math.exp(-0.5) - 2 + 1.5, 0]))


def test_the_score_is_paid_at_the_last_action_of_the_response():
    zeros, mask = torch.zeros(3, 4, dtype=torch.float64), marks(".xx.", "xxxx", "x...")
    rewards = kl_adjusted_rewards(f64([1, 2, 3]), zeros, zeros, mask, 0.1)
    assert_equal(rewards, f64([[0, 0, 1, 0], [0, 0, 0, 2], [3, 0, 0, 0]]))


@for_random_batches
def test_the_rewards_of_a_response_add_up_to_score_minus_beta_kl(seed):
    batch = random_batch(seed)
    inputs = batch["old_logprobs"], batch["ref_logprobs"], batch["mask"]
    kl, _ = kl_per_response(*inputs)
    for beta in (0.0, 0.3):
        rewards = kl_adjusted_rewards(batch["scores"], *inputs, beta)
        assert_equal(rewards.sum(1), batch["scores"] - beta * kl)


# 5. PPO: advantages


def test_there_is_no_value_after_the_last_action():
    advantages, _ = gae(f64([[1.0, 5.0]]), f64([[3.0, 100.0]]), marks("x."), 1.0, 0.95)
    assert_equal(advantages, f64([[1 - 3, 0]]))


@for_random_batches
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.9, 1.0), (0.5, 0.0), (0.0, 0.5)])
def test_advantages_are_sums_of_deltas_and_returns_are_advantages_plus_values(seed, gamma, lam):
    batch = random_batch(seed)
    mask, values = batch["mask"], batch["old_values"]
    rewards = torch.where(mask, noise(*mask.shape), nan)
    advantages, returns = gae(rewards, torch.where(mask, values, inf), mask, gamma, lam)
    for b in range(len(mask)):
        t = mask[b].nonzero().flatten()
        r, V = rewards[b, t], torch.cat([values[b, t], f64([0.0])])  # 0 after the last action
        delta = r + gamma * V[1:] - V[:-1]
        ahead = (
            torch.arange(len(t)) - torch.arange(len(t))[:, None]
        ).double()  # from row to column
        A = ((ahead >= 0) * (gamma * lam) ** ahead.clamp(min=0) * delta).sum(1)
        assert_equal(advantages[b, t], A)
        assert_equal(returns[b, t], A + values[b, t])
        if gamma == lam == 1:
            assert_equal(returns[b, t], r.flip(0).cumsum(0).flip(0))  # rewards from here on
        if lam == 0:
            assert_equal(advantages[b, t], delta)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_whitening_by_hand():
    white = whiten(f64([[1, 3, nan, 100], [inf, 5, 7, 9]]), marks("xx..", ".xxx"))
    assert_equal(white, (f64([[1, 3, 5, 5], [5, 5, 7, 9]]) - 5) / 8**0.5)
    assert_equal(whiten(f64([[2, 2, 2]]), marks("xx.")), f64([[0, 0, 0]]))


@for_random_batches
def test_whitening_gives_mean_0_and_standard_deviation_1_whatever_the_shift_and_the_scale(seed):
    batch = random_batch(seed)
    x, mask = batch["old_values"], batch["mask"]
    white = whiten(x, mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert white[mask].std(correction=0).item() == pytest.approx(1)
    assert not white[~mask].any()
    assert_equal(whiten(3 + 50 * torch.where(mask, x, nan), mask), white, 1e-10)


def test_whitening_does_not_enlarge_rounding_but_scales_whatever_is_more():
    small, mask = f64([[0.0, 1e-7, -1e-7, 2e-7]]), marks("xxxx")
    assert whiten(small, mask).abs().max() < 0.01
    assert whiten(1e4 * small, mask).std(correction=0).item() == pytest.approx(1)


# 5. PPO: losses


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "advantage, ratio, clipped",
    [
        (1, 0.5, None),  # below the range, and should rise: pulled back up
        (1, 0.81, None),
        (1, 1.0, None),
        (1, 1.19, None),
        (1, 1.21, 1.2),  # has risen enough
        (1, 50.0, 1.2),
        (-1, 1e-3, 0.8),
        (-1, 0.79, 0.8),  # has fallen enough
        (-1, 0.81, None),
        (-1, 1.0, None),
        (-1, 1.19, None),
        (-1, 1.5, None),  # above the range, and should fall: pulled back down
    ],
)
def test_a_token_has_a_gradient_unless_it_has_moved_far_enough(size, advantage, ratio, clipped):
    old = f64([[-1.5]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, _ = policy_loss(logprobs, old, f64([[size * advantage]]), marks("x"), 0.2)
    loss.backward()
    objective = size * advantage * (clipped or ratio)
    gradient = 0 if clipped else objective  # grad (ratio A) = ratio A grad log pi
    assert (-loss.item(), -logprobs.grad.item()) == pytest.approx((objective, gradient))


def test_the_policy_loss_and_its_stats_by_hand():
    ratios = [1.0, 1.5, 0.9, 0.7]
    logprobs = torch.log(f64([[7, 1.0, 1.5], [0.9, 0.7, 9]])).requires_grad_()
    old = f64([[nan, 0, 0], [0, 0, inf]])
    advantages = f64([[nan, 1, 1], [2, 3, nan]])
    loss, stats = policy_loss(logprobs, old, advantages, marks(".xx", "xx."), 0.2)
    assert loss.item() == pytest.approx(-(1.0 + 1.2 + 1.8 + 2.1) / 4)
    k3 = sum(r - 1 - math.log(r) for r in ratios) / 4
    expected = {"policy_loss": loss.item(), "approx_kl": k3, "clip_frac": 2 / 4, "ratio_max": 1.5}
    assert stats == pytest.approx(expected)  # clip_frac counts both sides
    loss.backward()
    assert_equal(logprobs.grad, f64([[0, -1, 0], [-1.8, -2.1, 0]]) / 4)


def test_only_what_is_computed_now_has_a_gradient():
    x = f64([[0.1, -0.2]]).requires_grad_()
    recorded, mask = 2 * x, marks("xx")  # carelessly, with its gradient
    policy_loss(x, recorded, recorded, mask, math.inf)[0].backward()
    assert_equal(x.grad, -(-x.detach()).exp() * recorded.detach() / 2)  # grad ratio = ratio
    x.grad = None
    value_loss(x, recorded, 3 * x, mask, math.inf)[0].backward()
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
    assert values.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    "kl, horizon, change",
    [
        (6.0, 10_000, 0.0),
        (6.6, 10_000, 0.1 * 0.0256),
        (60.0, 10_000, 0.2 * 0.0256),
        (5.4, 10_000, -0.1 * 0.0256),
        (-3.0, 10_000, -0.2 * 0.0256),
        (60.0, inf, 0.0),
    ],
)
def test_beta_rises_with_a_kl_above_its_target_falls_below_and_stays_at_an_infinite_horizon(
    kl, horizon, change
):
    assert adapt_kl_coef(0.1, kl, 6.0, 256, horizon) == pytest.approx(0.1 * (1 + change), rel=1e-12)


# 6. The loop


@pytest.mark.parametrize("make", [tiny_gpt, tiny_reward_model])
def test_a_frozen_copy_is_a_copy_without_gradients_or_dropout(make):
    model = make(dropout=0.5).train()
    frozen = frozen_copy(model)
    before = weights(model)
    assert_equal(weights(frozen), before)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(module.training for module in frozen.modules())
    assert all(p.requires_grad for p in model.parameters()) and model.training
    stir(model)
    assert_equal(weights(frozen), before)


def test_penalties_are_taken_off_for_each_token_and_for_a_response_that_was_cut_off():
    # An end token in the prompt, as in the last row, or in the padding ends no response.
    tokens = torch.tensor(
        [[1, 2, 3, EOS, 0], [1, 2, 3, 4, 5], [1, EOS, 0, 0, 0], [EOS, 1, 2, EOS, EOS]]
    )
    mask, seen = marks(".xx.", ".xxx", "x...", ".x.."), []

    def score(*arguments):
        seen.append(arguments)
        return f64([1.0, 2.0, 3.0, 4.0])

    config = PPOConfig(length_penalty=0.25, missing_eos_penalty=0.5)
    scores, ended = score_responses(score, tokens, mask, config, EOS)
    assert seen == [(tokens, mask)] and ended.tolist() == [True, False, True, False]
    assert_equal(scores, f64([1 - 0.5, 2 - 0.75 - 0.5, 3 - 0.25, 4 - 0.25 - 0.5]))
    neutral = PPOConfig(length_penalty=0, missing_eos_penalty=0)
    assert_equal(score_responses(score, tokens, mask, neutral, EOS)[0], f64([1, 2, 3, 4]))


def score_by_length(tokens, mask):
    return -0.3 * mask.sum(1).double() + tokens[:, 0]


def test_a_rollout_holds_what_the_policy_the_reference_and_the_score_say():
    policy, ref = tiny_gpt(), frozen_copy(tiny_gpt())
    config = PPOConfig(max_new_tokens=5, temperature=0.7, missing_eos_penalty=0.5)
    asked = []

    def watched(*arguments):
        asked.append(arguments)
        return generate(*arguments)

    batch = rollout(policy, ref, score_by_length, PROMPTS, config, watched)
    assert asked == [(policy, PROMPTS, 5, 0.7)]
    tokens, mask = batch["tokens"], batch["mask"]
    logprobs, values, _ = evaluate_actions(policy, tokens, mask, 0.7)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, 0.7)
    ended = torch.stack([row[1:][inside][-1] == EOS for row, inside in zip(tokens, mask)])
    assert 0 < ended.sum() < len(ended)
    expected = {"scores": score_by_length(tokens, mask) - 0.5 * ~ended, "ended": ended}
    expected |= {"old_logprobs": logprobs, "old_values": values, "ref_logprobs": ref_logprobs}
    assert batch.keys() == {"tokens", "mask", *expected}
    for name, x in expected.items():
        assert_equal(batch[name], x.detach())
    torch.manual_seed(1)
    plain = rollout(policy, ref, score_by_length, PROMPTS, config)
    torch.manual_seed(1)
    assert torch.equal(plain["tokens"], generate(policy, PROMPTS, 5, 0.7)[0])


@for_random_batches
def test_credit_is_kl_adjusted_rewards_gae_and_whitening(seed):
    batch = random_batch(seed)
    mask, before = batch["mask"], {name: x.clone() for name, x in batch.items()}
    config = PPOConfig(
        gamma=0.9, lam=0.8, kl_coef=123.0
    )  # compute_advantages() gets beta as it is now
    x = compute_advantages(batch, config, 0.3)
    inputs = batch["old_logprobs"], batch["ref_logprobs"], mask
    rewards = kl_adjusted_rewards(batch["scores"], *inputs, 0.3)
    advantages, returns = gae(rewards, batch["old_values"], mask, 0.9, 0.8)
    expected = {"rewards": rewards, "advantages": advantages, "returns": returns}
    expected["whitened"] = whiten(advantages, mask)
    assert x.keys() == expected.keys() and all(torch.equal(x[k], y) for k, y in expected.items())
    plain = compute_advantages(batch, replace(config, whiten=False), 0.3)
    assert torch.equal(plain["whitened"], advantages)
    assert all(torch.equal(batch[name], y) for name, y in before.items())  # nothing is overwritten


def credited(seed, **changes):
    """-> policy, a random batch with phase 3 done, and a config with all terms of the loss on."""
    more = {"entropy_coef": 0.1, "kl_loss_coef": 0.3, "vf_coef": 0.5, "value_clip": 0.4, "lam": 0.9}
    config = PPOConfig(**{"minibatches": 1, "max_grad_norm": inf, **more, **changes})
    batch = random_batch(seed)
    return tiny_gpt(), batch | compute_advantages(batch, config, 0.1), config


@for_random_batches
def test_the_loss_of_ppo_is_the_sum_of_its_weighted_terms(seed):
    policy, batch, config = credited(seed, temperature=0.7, clip_eps=0.15)
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    loss, stats = ppo_loss(policy, batch, config)
    logprobs, values, entropy = evaluate_actions(policy, batch["tokens"], mask, 0.7)
    first, stats_of_policy = policy_loss(logprobs, old_logprobs, batch["whitened"], mask, 0.15)
    second, stats_of_values = value_loss(
        values, batch["old_values"], batch["returns"], mask, config.value_clip
    )
    k2 = 0.5 * ((logprobs - batch["ref_logprobs"])[mask] ** 2).mean()
    expected = first + 0.5 * second + 0.3 * k2 - 0.1 * entropy[mask].mean()
    assert_equal(loss, expected)
    assert stats == pytest.approx(
        {"loss": loss.item(), "count": mask.sum().item()} | stats_of_policy | stats_of_values
    )


@for_random_batches
def test_neutral_values_switch_everything_off(seed):
    policy, batch, config = credited(
        seed, entropy_coef=0, kl_loss_coef=0, vf_coef=0, clip_eps=inf, value_clip=inf, lam=1
    )
    mask, inputs = batch["mask"], (batch["tokens"], batch["mask"])
    logprobs, values, _ = evaluate_actions(policy, *inputs)
    ratio = (logprobs - batch["old_logprobs"]).exp()
    assert_equal(ppo_loss(policy, batch, config)[0], -(ratio * batch["whitened"])[mask].mean())
    _, stats = ppo_loss(policy, batch, replace(config, vf_coef=1.0))
    squares = 0.5 * ((values - batch["returns"])[mask] ** 2).mean()
    assert stats["value_loss"] == pytest.approx(squares.item())
    x = compute_advantages(batch, replace(config, whiten=False), 0.0)
    scores = torch.where(mask, batch["scores"][:, None], 0.0)
    assert_equal(x["returns"], scores)  # with beta 0, gamma 1, lam 1 each token answers for it
    assert_equal(x["whitened"], scores - batch["old_values"])


@for_random_batches
def test_nothing_outside_the_mask_reaches_the_loss_its_gradient_or_what_is_watched(seed):
    policy, batch, config = credited(seed)
    seen = []
    for x in (batch, padded_otherwise(batch, 0, 7, nan), padded_otherwise(batch, 2, EOS, 1e9)):
        policy.zero_grad()
        loss, stats = ppo_loss(policy, x, config)
        loss.backward()
        seen.append((loss, gradients(policy), stats | batch_metrics(x, 0.1)))
    for loss, gradient, stats in seen[1:]:
        assert_equal(loss, seen[0][0])
        assert_equal(gradient, seen[0][1])
        assert stats == pytest.approx(seen[0][2])
    assert seen[0][1].norm() > 1e-3


def sgd(policy, lr):
    """Plain gradient descent, so that a step is the gradient."""
    return torch.optim.SGD(policy.parameters(), lr)


@pytest.mark.parametrize("epochs, minibatches", [(1, 1), (1, 4), (3, 1), (2, 5)])
def test_an_update_takes_epochs_times_minibatches_steps_and_sees_each_row_once_in_a_pass(
    epochs, minibatches
):
    policy, batch, config = credited(5, epochs=epochs, minibatches=minibatches)
    optimizer, B, events = sgd(policy, 1e-3), len(batch["scores"]), []
    optimizer.register_step_post_hook(lambda *_: events.append("step"))
    batch["number"] = torch.arange(B)

    def loss_of(model, rows, given):
        assert model is policy and given is config and rows.keys() == batch.keys()
        for name, x in rows.items():
            assert torch.equal(x, batch[name][rows["number"]])
        assert not gradients(policy).any()  # those of the step before are gone
        events.append(rows["number"].tolist())
        return ppo_loss(model, rows, given)

    ppo_update(policy, optimizer, batch, config, loss_of)
    assert events[1::2] == ["step"] * epochs * minibatches
    passes = [events[::2][i * minibatches :][:minibatches] for i in range(epochs)]
    for sizes in ([len(rows) for rows in one] for one in passes):
        assert len(sizes) == minibatches and max(sizes) - min(sizes) <= 1
    orders = [list(itertools.chain(*one)) for one in passes]
    assert all(sorted(order) == list(range(B)) for order in orders)
    assert epochs == 1 or orders[0] != orders[1]
    assert orders[0] != list(range(B))


def test_the_stats_of_a_pass_are_means_over_its_steps_and_the_largest_ratio():
    given = iter([(1.0, 1.5), (3.0, 1.2), (5.0, 1.1), (9.0, 1.4)])
    policy, batch, config = credited(5, epochs=2, minibatches=2)

    def loss_of(model, rows, config):
        loss, ratio_max = next(given)
        return 0.0 * weights_sum(model), {"loss": loss, "ratio_max": ratio_max}

    def weights_sum(model):
        return sum(p.sum() for p in model.parameters())

    first, second = ppo_update(policy, sgd(policy, 0.1), batch, config, loss_of)
    assert first == {"loss": 2.0, "ratio_max": 1.5, "grad_norm": 0.0}
    assert second == {"loss": 7.0, "ratio_max": 1.4, "grad_norm": 0.0}
    assert average([first, second]) == {"loss": 4.5, "ratio_max": 1.5, "grad_norm": 0.0}


def test_before_the_first_step_the_ratio_is_1_and_then_it_moves_and_the_clip_acts():
    policy = tiny_gpt(dropout=0.5)  # in eval mode, and it stays there
    config = PPOConfig(max_new_tokens=8, temperature=0.7, epochs=4, minibatches=1)
    batch = rollout(policy, policy, score_by_length, PROMPTS, config)
    batch |= compute_advantages(batch, config, 0.1)
    optimizer = torch.optim.Adam(policy.parameters(), 0.01)
    first, *_, last = ppo_update(policy, optimizer, batch, config)
    assert first["ratio_max"] == pytest.approx(1) and first["clip_frac"] == 0
    assert first["approx_kl"] == pytest.approx(0, abs=1e-12) and last["approx_kl"] > 1e-4
    assert last["ratio_max"] > 1.2 and 0 < last["clip_frac"] < 1
    change = evaluate_actions(policy, batch["tokens"], batch["mask"], 0.7)[0]
    assert ((change - batch["old_logprobs"]) * batch["whitened"]).sum() > 0


def test_one_norm_is_taken_over_all_parameters_and_scaled_down_to_max_grad_norm():
    for max_grad_norm, scale in ((1.0, 0.2), (inf, 1.0), (10.0, 1.0)):
        x, y = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        x.grad, y.grad = torch.tensor([3.0]), torch.tensor([4.0])
        optimizer = torch.optim.SGD([{"params": [x]}, {"params": [y], "lr": 10.0}], 1.0)
        assert gradient_step(optimizer, max_grad_norm) == 5.0  # the norm before
        assert (x.item(), y.item()) == pytest.approx((-3 * scale, -40 * scale))
    policy, batch, config = credited(5, max_grad_norm=1e-3)
    before = weights(policy)
    ppo_update(policy, sgd(policy, 1.0), batch, config)
    assert (weights(policy) - before).norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("name", ["returns", "whitened"])
@pytest.mark.parametrize("value", [inf, nan])
def test_an_update_that_is_not_finite_stops_before_the_weights_are_touched(name, value):
    policy, batch, config = credited(5)
    before = weights(policy)
    batch[name] = batch[name] + value
    with pytest.raises(FloatingPointError, match="norm of the gradient is"):
        ppo_update(policy, sgd(policy, 0.1), batch, config)
    assert torch.equal(weights(policy), before)


def test_no_gradient_reaches_the_reference_or_the_reward_model():
    policy, ref, scorer = tiny_gpt(), tiny_gpt(), tiny_reward_model()
    before = weights(policy)
    config = PPOConfig(epochs=2, kl_loss_coef=0.1, max_new_tokens=6)

    def score(tokens, mask):
        return scorer(tokens, row_lengths(mask))

    batch, _ = ppo_iteration(policy, ref, score, PROMPTS, sgd(policy, 0.1), config, 0.1)
    assert not gradients(ref).any() and not gradients(scorer).any()
    assert not any(x.requires_grad for x in batch.values())
    assert not torch.equal(weights(policy), before)


def test_explained_variance_is_1_for_perfect_values_and_0_for_constant_ones():
    returns, mask = f64([[nan, 1, 2], [3, 4, inf]]), marks(".xx", "xx.")
    for values, expected in ((returns, 1), (torch.full_like(returns, 7.0), 0), (-returns, -3)):
        assert explained_variance(values, returns, mask) == pytest.approx(expected, abs=1e-6)
    assert math.isfinite(explained_variance(returns, returns, marks(".x.", "...")))  # one token


@for_random_batches
def test_what_is_watched_is_what_the_names_say(seed):
    batch = random_batch(seed)
    batch |= compute_advantages(batch, PPOConfig(), 0.1)
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    log_ratio = torch.where(mask, old_logprobs - batch["ref_logprobs"], 0.0).sum(1)
    _, k3 = kl_per_response(old_logprobs, batch["ref_logprobs"], mask)
    assert batch_metrics(batch, 0.25) == pytest.approx({
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


def test_an_iteration_is_rollout_credit_and_update_as_they_are_given():
    policy, ref, calls = tiny_gpt(), tiny_gpt(), []
    config = PPOConfig(minibatches=2, epochs=2, max_new_tokens=6, kl_coef=123.0)
    optimizer = sgd(policy, 0.1)

    def watch(name, function):
        def watched(*arguments):
            calls.append((name, *arguments))
            return function(*arguments)

        return watched

    def other_advantages(batch, config, kl_coef):
        return {name: 2 * x for name, x in compute_advantages(batch, config, kl_coef).items()}

    batch, metrics = ppo_iteration(
        policy,
        ref,
        score_by_length,
        PROMPTS,
        optimizer,
        config,
        0.3,
        rollout=watch("rollout", rollout),
        compute_advantages=watch("compute_advantages", other_advantages),
        loss_of=watch("loss", ppo_loss),
    )
    assert [call[0] for call in calls] == ["rollout", "compute_advantages", *["loss"] * 4]
    assert calls[0][1:] == (policy, ref, score_by_length, PROMPTS, config)
    assert calls[1][2:] == (config, 0.3)  # beta as it is now
    for name, x in compute_advantages(batch, config, 0.3).items():
        assert torch.equal(batch[name], 2 * x)
    passes = metrics.pop("passes")
    assert len(passes) == 2 and metrics == batch_metrics(batch, 0.3) | average(passes)
    assert {"policy_loss", "value_loss", "approx_kl", "clip_frac", "grad_norm"} <= metrics.keys()


# The parts together: a task that PPO must learn


def train(beta, steps=40, lr=0.01):
    """Responses of two tokens; the score is 1 if the first is 3. -> P(3) for each prompt before and
    after, and the KL at the end."""
    policy = GPT(GPTConfig(5, 8, layers=1, heads=1, channels=8)).eval()
    ref, prompts = frozen_copy(policy), [[0], [1], [2, 0]]
    optimizer = torch.optim.AdamW(policy.parameters(), lr)
    config = PPOConfig(epochs=4, minibatches=2, max_new_tokens=2, missing_eos_penalty=0.0)

    def score(tokens, mask):
        return (tokens[torch.arange(96), torch.tensor([1, 1, 2] * 32)] == 3).float()

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        _, stats = ppo_iteration(policy, ref, score, prompts * 32, optimizer, config, beta)

    def chance(model):
        logits = [model(torch.tensor([prompt]))[0][0, -1] for prompt in prompts]
        return torch.stack(logits).softmax(-1)[:, 3].detach()

    return chance(ref), chance(policy), stats["kl_k3"]


@pytest.mark.parametrize("beta", [0.5, 50.0])
def test_ppo_ends_at_the_best_policy_that_theory_knows(beta):
    # pi*(y) ~ ref(y) exp(score(y) / beta): the odds of a first token 3 rise by exp(1 / beta).
    before, after, kl = train(beta)
    odds = before / (1 - before) * math.exp(1 / beta)
    assert_equal(after, odds / (1 + odds), 0.05)
    assert kl < 0.05 or beta < 50  # with a large beta the policy stays at the reference


# What makes the file what it is


def names(node, kind):
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind)}


def test_nothing_is_used_before_it_is_defined():
    bound = [{node.name} if hasattr(node, "name") else names(node, ast.Store) for node in TREE.body]
    for i, node in enumerate(TREE.body):
        local = names(node, ast.Store) | {x.arg for x in ast.walk(node) if isinstance(x, ast.arg)}
        later = set().union(*bound[i + 1 :]) - set().union(*bound[: i + 1])
        assert not names(node, ast.Load) & later - local


def test_the_file_needs_nothing_but_torch_and_the_standard_library():
    source = ast.unparse(TREE)
    modules = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.M))
    assert modules - sys.stdlib_module_names == {"torch"}


def test_functions_of_tensors_can_be_pasted_elsewhere_with_torch_and_those_that_they_call():
    functions = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}
    lines = [functions[name].lineno for name in ("check_mask", "adapt_kl_coef")]
    of_tensors = [f for f in functions.values() if lines[0] <= f.lineno <= lines[1]]
    assert len(of_tensors) == 17
    for function in of_tensors:
        local = names(function, ast.Store) | {
            x.arg for x in ast.walk(function) if isinstance(x, ast.arg)
        }
        free = names(function, ast.Load) - local - set(dir(builtins)) - {"torch"}
        assert free <= {f.name for f in of_tensors}, function.name


# The example


def test_a_trace_is_the_table_of_the_drawing_turned_round():
    batch, rows = drawn_batch(), drawing()
    batch |= compute_advantages(batch, PPOConfig(), 0.1)
    head, *lines = trace(batch, 0, rows["tokens"].__getitem__)
    titles = ["log pi", "log ref", "KL", "reward", "value", "advantage", "return", "whitened"]
    assert head == "".join(f"{title:>10}" for title in ["action", *titles])
    for t, line in enumerate(lines, 1):
        cells = [rows["action"][t], *(f"{rows[title][t]:.2f}" for title in titles)]
        assert line == "".join(f"{cell:>10}" for cell in cells)
    assert len(lines) == 3
    batch["rewards"] = f64([[0, -1e-9, 0, 0, 0]])
    assert "-0.00" not in trace(batch, 0, str)[1]  # of what rounds to zero, no sign is shown


@pytest.fixture(scope="module")
def printed():
    """What `python minippo.py` prints where there is nothing but torch."""
    run = f"runpy.run_path({minippo.__file__!r}, run_name='__main__')"
    code = f"import runpy, sys; sys.modules.update(numpy=None, tiktoken=None); {run}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.check_output(command, env=one_thread, encoding="utf-8").splitlines()


def test_the_example_learns_what_its_score_function_likes(printed):
    found = [re.match(r"iteration +(\d+)  score +(\S+)  kl +(\S+)", x) for x in printed[:6]]
    assert [int(x[1]) for x in found] == [1, 21, 41, 61, 81, 100]
    scores = [float(x[2]) for x in found]
    assert -3 < scores[0] < -1.5 and min(scores[2:]) > 3 and 3.5 < scores[-1] <= 4  # eight turns
    kl = [float(x[3]) for x in found]
    assert abs(kl[0]) < 0.3 and 8 < min(kl[2:]) <= max(kl) < 13  # at beta = 0: 19 to 20
    words = printed[5].split()[-4:]
    actions = [line.split()[0] for line in printed[7:]]
    assert words[0][1:] == "".join(actions).removesuffix("<eos>")  # its first letter is the prompt
    assert all(word.isalpha() and len(word) <= 9 for word in words)
    turns = [(a in "aeiou") != (b in "aeiou") for w in words for a, b in itertools.pairwise(w)]
    assert sum(turns) > 0.8 * len(turns)
    assert printed[6].split()[0] == "action" and printed[-1].split()[0] == "<eos>"
    assert 8 <= len(printed) <= 15
