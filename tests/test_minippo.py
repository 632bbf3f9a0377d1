"""The specification of minippo.py, in its order. Run: python -m pytest tests/test_minippo.py

Tensors are literal and float64 wherever a result can be computed by hand; `nan` stands in for whatever must not matter.
"""

import ast
import inspect
import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import minippo
from minippo import (
    GPT,
    GPTConfig,
    PPOConfig,
    RewardModel,
    adapt_kl_coef,
    check_mask,
    describe,
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
    merge,
    policy_loss,
    ppo_iteration,
    ppo_update,
    response_mask,
    reward_model_loss,
    rollout,
    row_lengths,
    score_responses,
    value_loss,
    whiten,
)
from plumbing.training import adamw, add_critic
from tiny import EOS, assert_equal, biased, f64, inf, marks, nan, noise, stir, tiny_gpt, tiny_reward_model, weights

SOURCE = Path(minippo.__file__).read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)


# The drawing at the top of the file


def drawing():
    """The table of the header -> {row: its columns}; the rows below "lam = 0" that have come before end in "(lam 0)"."""
    rows = {}
    for line in minippo.__doc__.split("    index t  ")[1].splitlines()[1:]:
        if line.startswith("    "):
            name, cells = re.match(r" +((?:log )?\w+) +(.*)", line).groups()
            cells = [float(x) if re.fullmatch(r"-?[\d.]*\d", x) else x for x in cells.split()]
            rows[f"{name} (lam 0)" if name in rows else name] = cells
    return rows


def test_the_numbers_in_the_drawing_are_what_the_functions_give():
    rows = drawing()
    row = {name: f64([[0, *cells[1:4], 0]]) for name, cells in rows.items() if isinstance(cells[1], float)}
    assert all(rows[name][0] == rows[name][4] == "." for name in row)  # outside of the mask
    assert rows["mask"][:5] == [".", "x", "x", "x", "."] and rows["action"][:5] == rows["tokens"][1:6]
    assert len(rows) == 15 and len(row) == 12
    mask = response_mask(torch.tensor([2]), torch.tensor([5]), 6)
    assert_equal(mask, marks(".xxx."))

    def shown(x):  # as the drawing rounds
        return torch.round(x, decimals=2)

    assert_equal(row["KL"], shown(row["log pi"] - row["log ref"]))
    rewards = kl_adjusted_rewards(f64([1.40]), row["log pi"], row["log ref"], mask, 0.1)
    assert_equal(row["reward"], shown(rewards))
    for lam, which in ((1.0, ""), (0.0, " (lam 0)")):
        advantages, returns = gae(rewards, row["value"], mask, 1.0, lam)
        for name, x in {"advantage": advantages, "return": returns, "whitened": whiten(advantages, mask)}.items():
            assert_equal(row[name + which], shown(x), 1e-9)
    assert_equal(row["delta"], row["advantage (lam 0)"])
    assert "score of 1.40 and beta 0.1" in minippo.__doc__


# 1. The networks


def test_changing_a_token_changes_no_output_before_it():
    policy, tokens = tiny_gpt(), torch.tensor([[3, 1, 4, 1, 5, 9]])
    logits, values = policy(tokens)
    assert logits.shape == (1, 6, EOS + 1) and values.shape == (1, 6)
    for t in range(6):
        changed = tokens.clone()
        changed[0, t] = 2
        new_logits, new_values = policy(changed)
        assert_equal(new_logits[:, :t], logits[:, :t])
        assert_equal(new_values[:, :t], values[:, :t])
        assert ((new_logits - logits)[0, t:].abs().amax(-1) > 1e-6).all() and ((new_values - values)[0, t:].abs() > 1e-6).all()


@pytest.mark.parametrize("filler", [0, 7, EOS])
def test_padding_and_neighbours_change_nothing_of_a_row(filler):
    policy, scorer = tiny_gpt(), tiny_reward_model()
    alone = torch.tensor([[3, 1, 4]])
    batch = torch.tensor([[5, 5, 5, 5, 5], [3, 1, 4, filler, filler], [0, 0, filler, filler, filler]])
    assert_equal(policy(batch)[0][1, :3], policy(alone)[0][0])
    assert_equal(policy(batch)[1][1, :3], policy(alone)[1][0])
    lengths = torch.tensor([5, 3, 2])
    assert_equal(scorer(batch, lengths)[1], scorer(alone, lengths[1:2])[0], 1e-6)


def test_the_vocabulary_head_is_the_token_embedding():
    for policy in (tiny_gpt(), frozen_copy(tiny_gpt())):
        assert policy.lm_head.weight is policy.trunk.token_embedding.weight


def test_values_start_at_zero():
    policy = GPT(GPTConfig(EOS + 1, 8, 1, heads=2, channels=8))
    assert not policy(torch.tensor([[1, 2, 3]]))[1].any()


def test_positions_matter():
    logits, _ = tiny_gpt()(torch.tensor([[3, 3, 3]]))
    assert (logits[0, 0] - logits[0, 1]).abs().max() > 1e-3


def test_channels_that_the_heads_cannot_share_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        GPTConfig(channels=10, heads=3)


def test_the_end_token_is_the_last_of_the_vocabulary():
    assert GPTConfig(vocab_size=300).eos == 299 and replace(GPTConfig(300), vocab_size=7).eos == 6


def test_weights_start_at_gpt_2s_spread_and_less_where_branches_add_up():
    trunk = GPT(GPTConfig(400, 64, layers=8, heads=4, channels=192)).trunk
    for name, parameter in trunk.named_parameters():
        if parameter.dim() == 2:
            adds_up = name.endswith(("out.weight", "mlp.2.weight"))
            expected = 0.02 * 2 / (4 if adds_up else 1)  # sqrt(768 / 192) and sqrt(2 x 8)
            assert parameter.std().item() == pytest.approx(expected, rel=0.1) and abs(parameter.mean()) < 0.1 * expected, name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert (parameter == 1).all(), name  # norms


def test_dropout_drops_in_training_only_and_zero_dropout_never():
    tokens = torch.tensor([[3, 1, 4, 1]])
    for dropout in (0.0, 0.5):
        policy = tiny_gpt(dropout=dropout)
        still = policy(tokens)[0]
        assert torch.equal(policy(tokens)[0], still)
        assert torch.equal(policy.train()(tokens)[0], still) == (dropout == 0)


def test_a_reward_model_starts_with_a_copy_of_the_policy_and_shares_nothing():
    policy = tiny_gpt()
    model = RewardModel(policy).double()
    before = weights(policy)
    for name, parameter in model.trunk.named_parameters():
        assert_equal(parameter, policy.trunk.get_parameter(name))
    stir(model)
    assert_equal(weights(policy), before)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_score_is_read_at_the_last_token_and_sees_all_before_it(length):
    model, tokens = tiny_reward_model(), torch.tensor([[3, 1, 4, 1]])
    score = model(tokens, torch.tensor([length]))
    assert score.shape == (1,)
    for t in range(4):
        changed = tokens.clone()
        changed[0, t] = 2
        moved = (model(changed, torch.tensor([length])) - score).abs().item() > 1e-5
        assert moved == (t < length)


def test_a_score_is_shifted_and_scaled_by_mean_and_std():
    model, tokens, lengths = tiny_reward_model(), torch.tensor([[3, 1, 4], [2, 7, 0]]), torch.tensor([3, 2])
    scores = model(tokens, lengths)
    model.mean.fill_(0.25), model.std.fill_(2.0)
    assert_equal(model(tokens, lengths), (scores - 0.25) / 2, 1e-6)
    assert {"mean", "std"} <= model.state_dict().keys()


def test_a_new_score_head_has_standard_deviation_1_over_sqrt_channels_plus_1():
    head = RewardModel(GPTConfig(EOS + 1, 8, 1, heads=2, channels=1024)).score_head
    assert head.weight.std().item() == pytest.approx((1024 + 1) ** -0.5, rel=0.1) and not head.bias.any()


# 2. Log-probabilities and masks


def test_a_row_is_as_long_as_its_last_action_says():
    assert row_lengths(marks("..xx.", "x....", "....x", "xxxxx")).tolist() == [5, 2, 6, 6]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0,)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_gathered_logprobs_are_the_log_softmax_at_the_targets(shape, temperature):
    logits, targets = noise(*shape, 5), torch.randint(5, shape)
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    assert_equal(gather_logprobs(logits, targets, temperature), expected)
    if temperature == 1:
        assert_equal(gather_logprobs(logits, targets), expected)


def test_logprobs_by_hand():
    logits = torch.log(f64([[1, 3], [9, 1]]))
    assert_equal(gather_logprobs(logits, torch.tensor([1, 0])).exp(), f64([0.75, 0.9]))
    assert_equal(gather_logprobs(logits, torch.tensor([1, 0]), temperature=0.5).exp(), f64([9 / 10, 81 / 82]))


WITH_A_MASK = {
    "masked_mean": lambda x, mask: masked_mean(x, mask),
    "whiten": lambda x, mask: whiten(x, mask),
    "kl_per_response": lambda x, mask: kl_per_response(x, noise(2, 3), mask),
    "kl_per_response, ref": lambda x, mask: kl_per_response(noise(2, 3), x, mask),
    "kl_adjusted_rewards": lambda x, mask: kl_adjusted_rewards(noise(2), x, noise(2, 3), mask, 0.1),
    "kl_adjusted_rewards, ref": lambda x, mask: kl_adjusted_rewards(noise(2), noise(2, 3), x, mask, 0.1),
    "gae": lambda x, mask: gae(x, noise(2, 3), mask, 1.0, 1.0),
    "gae, values": lambda x, mask: gae(noise(2, 3), x, mask, 1.0, 1.0),
    "policy_loss": lambda x, mask: policy_loss(x, noise(2, 3), noise(2, 3), mask, 0.2),
    "policy_loss, old": lambda x, mask: policy_loss(noise(2, 3), x, noise(2, 3), mask, 0.2),
    "policy_loss, advantages": lambda x, mask: policy_loss(noise(2, 3), noise(2, 3), x, mask, 0.2),
    "value_loss": lambda x, mask: value_loss(x, noise(2, 3), noise(2, 3), mask, 0.2),
    "value_loss, old": lambda x, mask: value_loss(noise(2, 3), x, noise(2, 3), mask, 0.2),
    "value_loss, returns": lambda x, mask: value_loss(noise(2, 3), noise(2, 3), x, mask, 0.2),
    "explained_variance": lambda x, mask: explained_variance(x, noise(2, 3), mask),
    "explained_variance, returns": lambda x, mask: explained_variance(noise(2, 3), x, mask),
}


@pytest.mark.parametrize("name", WITH_A_MASK)
def test_a_mask_that_is_not_boolean_and_shapes_that_do_not_fit_are_refused(name):
    function, mask = WITH_A_MASK[name], marks(".xx", "x..")
    function(noise(2, 3), mask)
    for wrong in (mask.long(), mask.double(), mask[:1], mask[:, :1], mask[0]):
        with pytest.raises(ValueError, match="boolean mask"):
            function(noise(2, 3), wrong)
    for wrong in (noise(2, 1), noise(1, 3), noise(3), noise(2, 4), noise(1, 2, 3)):
        with pytest.raises(ValueError, match="equal shapes"):
            function(wrong, mask)


def test_what_the_refusal_of_a_mask_says():
    with pytest.raises(ValueError, match=r"got torch.int64 and \[\(1, 2\), \(1, 3\)\]"):
        check_mask(torch.tensor([[0, 1]]), noise(1, 3))
    check_mask(marks("x."))


@pytest.mark.parametrize("scores", [(2, 1), (1, 2), (3,), ()], ids=str)
def test_scores_that_are_not_one_number_a_row_are_refused(scores):
    with pytest.raises(ValueError, match="equal shapes"):
        kl_adjusted_rewards(torch.zeros(scores), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.1)


@pytest.mark.parametrize("shape", [(2, 1), (1,), (3,)], ids=str)
def test_chosen_and_rejected_scores_of_different_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="differ"):
        reward_model_loss(noise(2), noise(*shape))


def test_actions_are_evaluated_with_a_boolean_mask_of_the_right_width_only():
    policy, tokens, mask = tiny_gpt(), torch.randint(EOS, (2, 4)), marks(".xx", "x..")
    for wrong in (mask.long(), mask[:, :2], F.pad(mask, (0, 1)), mask[:1]):
        with pytest.raises(ValueError, match="boolean mask"):
            evaluate_actions(policy, tokens, wrong)


def test_index_t_of_every_result_is_the_choice_of_token_t_plus_1_in_the_state_of_having_read_tokens_0_to_t():
    # The drawing at the top of minippo.py. Index 1 is the first response token, index 3 the end token.
    policy, tokens, mask = tiny_gpt(), torch.tensor([[3, 1, 4, 5, EOS, 0]]), marks(".xxx.")
    with torch.no_grad():
        logprobs, values, entropy = evaluate_actions(policy, tokens, mask)
        logits, all_values = policy(tokens)
    p = logits[0].softmax(-1)
    expected = [0, p[1, 4].log(), p[2, 5].log(), p[3, EOS].log(), 0]
    assert_equal(logprobs.double(), f64([expected]), 1e-6)
    assert_equal(values.double(), f64([[0, *all_values[0, 1:4], 0]]), 1e-6)
    assert_equal(entropy.double(), f64([[0, *(-(p * p.log()).sum(-1))[1:4], 0]]), 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_scored_distribution_is_the_softmax_of_the_logits_over_the_temperature(temperature):
    policy, tokens = tiny_gpt(), torch.randint(EOS + 1, (4, 9))
    logprobs, _, entropy = evaluate_actions(policy, tokens, torch.ones(4, 8, dtype=torch.bool), temperature)
    all_logprobs = (policy(tokens)[0][:, :-1] / temperature).log_softmax(-1)
    assert_equal(logprobs.double(), all_logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1), 1e-10)
    assert_equal(entropy.double(), -(all_logprobs.exp() * all_logprobs).sum(-1), 1e-10)


def test_the_entropy_is_0_where_it_is_not_asked_for_and_the_rest_stays():
    policy, tokens, mask = tiny_gpt(), torch.randint(EOS + 1, (2, 7)), marks("..xx..", ".xxx..")
    full, less = (evaluate_actions(policy, tokens, mask, 0.7, with_entropy=wish) for wish in (True, False))
    assert_equal(full[0], less[0])
    assert_equal(full[1], less[1])
    assert full[2][mask].min() > 0 and not less[2].any()


def test_what_lies_outside_the_mask_changes_neither_results_nor_gradients():
    policy, mask = tiny_gpt(), marks("..xx..", ".xxx..")
    tokens, other = torch.randint(EOS + 1, (2, 2, 7)).unbind(0)
    other[0, :5], other[1, :5] = tokens[0, :5], tokens[1, :5]  # what is read or written by an action of the mask stays
    results = []
    for x in (tokens, other):
        policy.zero_grad()
        parts = evaluate_actions(policy, x, mask)
        assert not any(part[~mask].any() for part in parts)
        sum(part.sum() for part in parts).backward()
        results.append([*parts, *(p.grad.clone() for p in policy.parameters())])
    for a, b in zip(*results, strict=True):
        assert_equal(a, b, 1e-6)


def test_vocabulary_logits_are_computed_at_response_tokens_only():
    policy, mask, rows = tiny_gpt(), marks("..xx..", ".xxx.."), []
    policy.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].numel() // 8))
    evaluate_actions(policy, torch.randint(EOS + 1, (2, 7)), mask)
    assert sum(rows) == 5


# 3. Sampling


def critic_gpt():
    policy = tiny_gpt()
    add_critic(policy, tiny_reward_model())
    return policy


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 8


def check_layout(tokens, mask, prompts, eos, max_new_tokens, context):
    """What must hold for every response, whatever was sampled."""
    assert tokens.shape[1] == mask.shape[1] + 1
    for row, marked, prompt in zip(tokens.tolist(), mask.tolist(), prompts, strict=True):
        assert row[: len(prompt)] == prompt
        first, response = len(prompt) - 1, list(itertools.compress(row[1:], marked))
        assert marked[first : first + len(response)] == [True] * len(response) and sum(marked) == len(response) > 0
        assert eos not in response[:-1]
        limit = min(max_new_tokens, context - len(prompt))
        assert len(response) == limit or (len(response) < limit and response[-1] == eos)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("bias", [-inf, 0.0, 2.0], ids=["never ends", "ends sometimes", "ends early"])
def test_sampled_logprobs_and_values_are_those_that_scoring_gives(temperature, max_new_tokens, bias):
    policy = biased(tiny_gpt(), {EOS: bias})
    tokens, mask, logprobs, values = generate(policy, PROMPTS, max_new_tokens, temperature)
    check_layout(tokens, mask, PROMPTS, EOS, max_new_tokens, context=16)
    with torch.no_grad():
        scored, expected, _ = evaluate_actions(policy, tokens, mask, temperature)
    assert_equal(logprobs, scored, 1e-10)
    assert_equal(values, expected, 1e-10)
    assert not logprobs[~mask].any() and not values[~mask].any()


def test_the_vocabulary_head_sees_no_prompt_and_no_padding():
    policy, seen = tiny_gpt(), []
    policy.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    prompts = [[1] * 9, [2], [3] * 4]
    tokens, mask, *_ = generate(policy, prompts, 5)
    *steps, last = seen
    assert all(rows <= len(prompts) for rows, _ in steps) and len(steps) <= 5 and last == (int(mask.sum()), 8)
    seen.clear()
    evaluate_actions(policy, tokens, mask)
    assert seen == [(int(mask.sum()), 8)]


def test_the_values_of_a_rollout_come_from_the_separate_critic_where_there_is_one():
    policy = critic_gpt()
    tokens, mask, _, values = generate(policy, PROMPTS, 5)
    with torch.no_grad():
        assert_equal(values, evaluate_actions(policy, tokens, mask)[1], 1e-10)


def test_a_row_that_reaches_the_end_of_the_context_keeps_its_last_token_while_the_others_go_on():
    policy = biased(tiny_gpt(context=8), {EOS: -inf})
    prompts = [[1, 2, 3, 4, 5, 6], [1], [2], [3]]
    tokens, mask, logprobs, _ = generate(policy, prompts, 20)
    assert mask.sum(1).tolist() == [2, 7, 7, 7] and tokens.shape == (4, 8)
    with torch.no_grad():
        assert_equal(logprobs, evaluate_actions(policy, tokens, mask)[0], 1e-10)


@pytest.mark.parametrize("bias, lengths", [(inf, [1, 1, 1]), (-inf, [5, 5, 5])])
def test_a_response_stops_at_the_end_token_or_after_max_new_tokens(bias, lengths):
    policy = biased(tiny_gpt(), {EOS: math.copysign(1e4, bias)})
    tokens, mask, *_ = generate(policy, [[1], [2, 3], [4, 5, 6]], 5)
    assert mask.sum(1).tolist() == lengths and tokens.shape[1] == 3 + lengths[0]
    assert_equal(mask[:1], marks("x" * lengths[0] + ".."))


def test_the_longest_prompt_possible_still_gets_one_token():
    for max_new_tokens in (5, 10**12):  # what does not fit into the context takes no memory
        tokens, mask, *_ = generate(tiny_gpt(context=8), [[1, 2, 3, 4, 5, 6, 7]], max_new_tokens)
        assert tokens.shape == (1, 8) and mask.sum() == 1


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_an_empty_prompt_and_one_that_fills_the_context_are_refused(prompts):
    with pytest.raises(ValueError, match="15"):
        generate(tiny_gpt(), prompts, 5)


def test_the_same_seed_gives_the_same_samples_and_another_seed_others():
    policy, seen = tiny_gpt(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(generate(policy, PROMPTS, 9)[0].tolist())
    assert seen[0] == seen[1] != seen[2]


def three_token_gpt():
    """Vocabulary of 3: ids 0 and 1, and the end token 2."""
    return stir(GPT(GPTConfig(3, 8, layers=1, heads=1, channels=8)).double().eval(), 0.5)


def all_responses(policy, prompt, max_new_tokens, temperature):
    """{response: probability} by enumeration, without a cache."""
    done, going = {}, {(): 1.0}
    for _ in range(max_new_tokens):
        longer = {}
        for response, p in going.items():
            logits = policy(torch.tensor([prompt + list(response)]))[0][0, -1]
            for token, q in enumerate((logits / temperature).softmax(-1).tolist()):
                (done if token == policy.config.eos else longer)[(*response, token)] = p * q
        going = longer
    return done | going


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_every_response_is_sampled_as_often_as_its_probability_says(temperature):
    policy, n, prompts = three_token_gpt(), 3000, [[0, 1, 1], [1]]
    tokens, mask, *_ = generate(policy, [prompts[i % 2] for i in range(2 * n)], 3, temperature)
    for i, prompt in enumerate(prompts):
        counts = {}
        for row, inside in zip(tokens[i::2, 1:], mask[i::2], strict=True):
            response = tuple(row[inside].tolist())
            counts[response] = counts.get(response, 0) + 1
        expected = all_responses(policy, prompt, 3, temperature)
        assert sum(expected.values()) == pytest.approx(1) and len(expected) == 15 and counts.keys() <= expected.keys()
        chi2 = sum((counts.get(y, 0) - n * p) ** 2 / (n * p) for y, p in expected.items())
        assert chi2 < 45  # 14 degrees of freedom: 45 is passed once in 25,000 times


def test_a_draw_takes_the_token_in_whose_share_the_random_number_falls(monkeypatch):
    logits = torch.log(f64([[0.2, 0.0, 0.5, 0.3]] * 6))
    u = f64([[0.0], [0.199], [0.201], [0.699], [0.701], [1 - 2**-53]])
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device: u)
    assert minippo.draw(logits).tolist() == [0, 0, 2, 2, 3, 3]
    assert minippo.draw(logits.float()).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_token_of_very_small_probability_can_be_drawn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device: torch.full(shape, 1e-12, dtype=dtype))
    assert minippo.draw(torch.log(f64([[1e-11, 1 - 1e-11]]))).item() == 0


def test_another_way_to_draw_takes_the_place_of_the_default():
    policy = tiny_gpt()
    tokens, mask, logprobs, _ = generate(policy, PROMPTS, 4, 0.7, draw=lambda logits: torch.full((len(logits),), 3))
    assert set(tokens[:, 1:][mask].tolist()) == {3} and mask.sum(1).max() == 4
    assert_equal(logprobs, evaluate_actions(policy, tokens, mask, 0.7)[0], 1e-10)


def test_no_token_is_forbidden():
    policy = GPT(GPTConfig(5, 8, layers=1, heads=1, channels=8)).eval()
    torch.nn.init.zeros_(policy.lm_head.weight)  # all five are equally likely
    tokens, mask, logprobs, _ = generate(policy, [[1]] * 500, 2)
    assert torch.bincount(tokens[:, 1]).min() > 70
    assert_equal(logprobs[mask], torch.full_like(logprobs[mask], -math.log(5)), 1e-6)
    assert torch.bincount(tokens[:, 2][mask[:, 1]]).min() > 50


def test_sampling_builds_no_graph():
    assert not generate(tiny_gpt(), [[1]], 3)[2].requires_grad


# 4. The losses of the reward model and of SFT


def test_the_loss_is_minus_the_log_probability_of_the_choices_under_bradley_terry():
    chosen, rejected = f64([2.0, 0.5, 1.0]), f64([1.0, 2.5, 1.0])
    loss, stats = reward_model_loss(chosen, rejected)
    expected = [-math.log(1 / (1 + math.exp(-margin))) for margin in (1.0, -2.0, 0.0)]
    assert loss.item() == pytest.approx(sum(expected) / 3)
    assert stats["accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)  # a tie is half a hit
    assert stats["margin"] == pytest.approx(-1 / 3)


def test_a_step_down_the_loss_raises_the_chosen_score_and_lowers_the_rejected_one():
    chosen, rejected = f64([2.0]).requires_grad_(), f64([1.0]).requires_grad_()
    reward_model_loss(chosen, rejected)[0].backward()
    p = 1 / (1 + math.exp(-1.0))
    assert chosen.grad.item() == pytest.approx(p - 1) and rejected.grad.item() == pytest.approx(1 - p)


def test_the_loss_stays_finite_however_wrong_the_scores():
    assert reward_model_loss(f64([-5000.0]), f64([5000.0]))[0].item() == pytest.approx(10_000)


def test_the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token():
    # The drawing at the top of minippo.py: two prompt tokens, "A bee <eos>", one column of padding.
    assert_equal(response_mask(torch.tensor([2]), torch.tensor([5]), 6), marks(".xxx."))
    # A prompt of one token and no padding; a response of one token; none at all.
    assert_equal(response_mask(torch.tensor([1, 2, 3]), torch.tensor([4, 3, 3]), 4), marks("xxx", ".x.", "..."))


def test_the_masked_mean_sees_the_mask_only():
    x = torch.tensor([[1.0, nan, 5.0], [inf, 3.0, nan]], dtype=torch.float64, requires_grad=True)
    mean = masked_mean(x, marks("x.x", ".x."))
    assert mean.item() == 3.0
    mean.backward()
    assert_equal(x.grad, f64([[1, 0, 1], [0, 1, 0]]) / 3)


# 5. PPO: the KL and the rewards


def test_both_kl_estimates_are_right_on_average_and_k3_is_never_negative():
    p, q = f64([0.5, 0.3, 0.15, 0.05]), f64([0.1, 0.2, 0.3, 0.4])  # policy and reference; every sample once, weighted by p
    k1, k3 = kl_per_response(p.log()[:, None], q.log()[:, None], marks("x", "x", "x", "x"))
    kl = (p * (p / q).log()).sum()
    assert_equal((p * k1).sum(), kl)
    assert_equal((p * k3).sum(), kl)
    assert (k3 >= 0).all() and k1.min() < 0
    assert_equal(k1[0], f64(math.log(5)))
    assert_equal(k3[0], f64(0.2 - 1 + math.log(5)))


def test_the_kl_of_a_response_is_the_sum_over_its_tokens_and_sees_the_mask_only():
    logprobs, ref_logprobs = f64([[nan, -1, -2, inf], [-1, 0, 0, 9]]), f64([[0, -2, -2.5, nan], [-1, 0, 0, 0]])
    k1, k3 = kl_per_response(logprobs, ref_logprobs, marks(".xx.", "xxx."))
    assert_equal(k1, f64([1.5, 0]))
    assert_equal(k3, f64([math.exp(-1) + math.exp(-0.5) - 2 + 1.5, 0]))


def test_the_score_is_paid_at_the_last_action_of_the_response():
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    rewards = kl_adjusted_rewards(f64([1, 2, 3]), zeros, zeros, marks(".xx.", "xxxx", "x..."), 0.1)
    assert_equal(rewards, f64([[0, 0, 1, 0], [0, 0, 0, 2], [3, 0, 0, 0]]))


def test_a_token_that_the_policy_likes_more_than_the_reference_does_costs_and_the_opposite_pays():
    logprobs, ref_logprobs = f64([[nan, -1.0, -4.0, nan]]), f64([[inf, -3.0, -3.5, nan]])
    rewards = kl_adjusted_rewards(f64([1.0]), logprobs, ref_logprobs, marks(".xx."), 0.1)
    assert_equal(rewards, f64([[0, -0.2, 1 + 0.05, 0]]))


def test_a_beta_of_0_leaves_nothing_but_the_score():
    rewards = kl_adjusted_rewards(f64([1.5]), noise(1, 4), noise(1, 4), marks(".xx."), 0.0)
    assert_equal(rewards, f64([[0, 0, 1.5, 0]]))


def test_the_rewards_of_a_response_sum_to_score_minus_beta_kl():
    mask, scores, logprobs, ref_logprobs = marks("..xx.", ".xxxx"), noise(2), noise(2, 5), noise(2, 5)
    k1, _ = kl_per_response(logprobs, ref_logprobs, mask)
    assert_equal(kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, 0.3).sum(1), scores - 0.3 * k1)


@pytest.mark.parametrize("kl, horizon, expected", [
    (6.0, 10_000, 0.1), (6.6, 10_000, 0.1 * (1 + 0.1 * 0.0256)), (60.0, 10_000, 0.1 * (1 + 0.2 * 0.0256)),
    (5.4, 10_000, 0.1 * (1 - 0.1 * 0.0256)), (-3.0, 10_000, 0.1 * (1 - 0.2 * 0.0256)), (60.0, inf, 0.1), (0.0, inf, 0.1),
])  # fmt: skip
def test_beta_rises_when_the_kl_is_above_its_target_falls_below_and_stays_at_an_infinite_horizon(kl, horizon, expected):
    assert adapt_kl_coef(0.1, kl, 6.0, 256, horizon) == pytest.approx(expected, rel=1e-12)


# 5. PPO: advantages


MASK = marks("..xxx..", "xxxxxxx", "x......", ".....xx", ".xxxx..")


def by_definition(rewards, values, mask, gamma, lam):
    """The double sum: A_t = sum over l of (gamma lam)^l (r_t+l + gamma V_t+l+1 - V_t+l), with V = 0 after the last action."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(mask)):
        inside = mask[b].nonzero().squeeze(1).tolist()
        V = {t: values[b, t] for t in inside}
        for t in inside:
            for l, s in enumerate(s for s in inside if s >= t):
                advantages[b, t] += (gamma * lam) ** l * (rewards[b, s] + gamma * V.get(s + 1, 0.0) - V[s])
    return advantages


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.9, 1.0), (1.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_gae_is_the_discounted_sum_of_td_errors(gamma, lam):
    rewards, values = noise(*MASK.shape), noise(*MASK.shape)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    assert_equal(advantages, by_definition(rewards, values, MASK, gamma, lam))
    assert_equal(returns[MASK], (advantages + values)[MASK])


def test_with_lambda_1_the_advantage_is_the_return_that_followed_less_the_value():
    rewards, values = f64([[0, 1, 2, 4, 0]]), f64([[9, 10, 20, 30, 9]])
    advantages, returns = gae(rewards, values, marks(".xxx."), 1.0, 1.0)
    assert_equal(advantages, f64([[0, 7 - 10, 6 - 20, 4 - 30, 0]]))
    assert_equal(returns, f64([[0, 7, 6, 4, 0]]))
    assert_equal(gae(rewards, values, marks(".xxx."), 0.5, 1.0)[1], f64([[0, 1 + 1 + 1, 2 + 2, 4, 0]]))


def test_with_lambda_0_the_advantage_is_the_reward_and_the_next_value_less_the_value():
    advantages, _ = gae(f64([[0, 1, 2, 4, 0]]), f64([[9, 10, 20, 30, 9]]), marks(".xxx."), 0.5, 0.0)
    assert_equal(advantages, f64([[0, 1 + 10 - 10, 2 + 15 - 20, 4 - 30, 0]]))


def test_there_is_no_value_after_the_last_action():
    advantages, _ = gae(f64([[1.0, 5.0]]), f64([[3.0, 100.0]]), marks("x."), 1.0, 0.95)
    assert_equal(advantages, f64([[1 - 3, 0]]))


def test_returns_are_advantages_plus_values_before_any_whitening():
    rewards, values = noise(*MASK.shape) + 5, noise(*MASK.shape)
    advantages, returns = gae(rewards, values, MASK, 1.0, 1.0)
    totals = torch.where(MASK, rewards, 0.0).flip(1).cumsum(1).flip(1)
    assert_equal(returns[MASK], totals[MASK])
    assert abs(advantages[MASK].mean()) > 1


def test_nothing_outside_the_mask_reaches_an_advantage_or_a_return():
    rewards, values = noise(*MASK.shape), noise(*MASK.shape)
    clean = gae(torch.where(MASK, rewards, 0.0), torch.where(MASK, values, 0.0), MASK, 0.9, 0.8)
    for junk in (nan, inf, 1e6):
        dirty = gae(torch.where(MASK, rewards, junk), torch.where(MASK, values, junk), MASK, 0.9, 0.8)
        assert_equal(dirty[0], clean[0])
        assert_equal(dirty[1], clean[1])
    assert not clean[0][~MASK].any()


def test_whitening_gives_mean_0_and_standard_deviation_1_over_the_mask_and_0_outside():
    mask = marks("xx..", ".xxx")
    white = whiten(f64([[1, 3, nan, 100], [inf, 5, 7, 9]]), mask)
    assert_equal(white, (f64([[1, 3, 5, 5], [5, 5, 7, 9]]) - 5) / 8**0.5, 1e-7)
    assert abs(white[mask].mean()) < 1e-12 and white[mask].std(correction=0).item() == pytest.approx(1)
    assert not white[~mask].any()


def test_whitening_a_constant_gives_zeros():
    assert_equal(whiten(f64([[2, 2, 2]]), marks("xx.")), f64([[0, 0, 0]]))


def test_whitening_does_not_blow_up_rounding_but_scales_whatever_is_more():
    tiny = f64([[0.0, 1e-7, -1e-7, 2e-7]])
    assert whiten(tiny, marks("xxxx")).abs().max() < 0.01
    small = whiten(1e4 * tiny, marks("xxxx"))
    assert small.std(correction=0).item() == pytest.approx(1)


# 5. PPO: losses


def at_ratio(ratio, advantage, clip_eps=0.2):
    """-> objective (what PPO maximises) and its gradient with respect to the log-probability, for one token."""
    old = f64([[-1.5]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, _ = policy_loss(logprobs, old, f64([[float(advantage)]]), marks("x"), clip_eps)
    loss.backward()
    return -loss.item(), -logprobs.grad.item()


@pytest.mark.parametrize("advantage, ratio, objective", [(1, 1.5, 1.2), (-1, 0.5, -0.8), (3, 1.21, 3.6), (-2, 0.79, -1.6)])
def test_a_clipped_token_has_zero_gradient(advantage, ratio, objective):
    assert at_ratio(ratio, advantage) == (pytest.approx(objective), 0.0)


@pytest.mark.parametrize("advantage, ratio", [(1.0, 0.5), (-1.0, 1.5), (1.0, 1e-3), (-1.0, 50.0)])
def test_a_token_that_has_moved_the_harmful_way_gets_its_full_gradient_back(advantage, ratio):
    assert at_ratio(ratio, advantage) == (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.81, 1.0, 1.19])
def test_inside_the_clip_range_the_gradient_is_ratio_times_advantage(advantage, ratio):
    assert at_ratio(ratio, advantage) == (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1.0, 1.5, 1e3])
def test_an_infinite_clip_range_does_not_clip(advantage, ratio):
    assert at_ratio(ratio, advantage, inf) == (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage))


def test_at_ratio_1_the_gradient_is_that_of_the_policy_gradient():
    mask, advantages = marks(".xx", "xx."), noise(2, 3)
    logprobs = noise(2, 3).requires_grad_()
    policy_loss(logprobs, logprobs.detach().clone(), advantages, mask, 0.2)[0].backward()
    assert_equal(logprobs.grad, torch.where(mask, -advantages / 4, 0.0))


def test_the_policy_loss_and_its_stats_see_the_mask_only():
    ratios = [1.0, 1.5, 0.9]  # approx_kl by k3: ratio - 1 - log ratio
    logprobs = torch.log(f64([[7, 1.0, 1.5], [0.9, 9, 9]])).requires_grad_()
    old = f64([[nan, 0, 0], [0, nan, inf]])
    advantages = f64([[nan, 1, 1], [2, inf, nan]])
    loss, stats = policy_loss(logprobs, old, advantages, marks(".xx", "x.."), 0.2)
    assert loss.item() == pytest.approx(-(1.0 + 1.2 + 1.8) / 3) and stats["policy_loss"] == pytest.approx(loss.item())
    assert stats["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert stats["clip_frac"] == pytest.approx(1 / 3) and stats["ratio_max"] == pytest.approx(1.5)
    loss.backward()
    assert_equal(logprobs.grad, f64([[0, -1 / 3, 0], [-0.6, 0, 0]]))


def test_approx_kl_is_never_negative():
    for _ in range(20):
        assert policy_loss(noise(2, 3), noise(2, 3), noise(2, 3), marks("xxx", "x.."), 0.2)[1]["approx_kl"] >= 0


@pytest.mark.parametrize("value, old, target, loss, gradient", [
    (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9),  # inside the range: plain
    (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved to 2, counted as 1.2: it has gone far enough towards 3
    (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0),  # moved away from the target: full gradient back
    (2.0, 1.0, 1.0, 0.5 * 1.0**2, 1.0),  # moved past the target: full gradient back
])  # fmt: skip
def test_the_value_loss_clips_against_the_old_values_and_takes_the_worse_error(value, old, target, loss, gradient):
    values = f64([[value]]).requires_grad_()
    result, stats = value_loss(values, f64([[old]]), f64([[target]]), marks("x"), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss) == stats["value_loss"]
    assert values.grad.item() == pytest.approx(gradient)


def test_an_infinite_value_clip_gives_half_the_mean_squared_error_over_the_mask():
    values = f64([[nan, 1, 5], [2, inf, 0]]).requires_grad_()
    loss, _ = value_loss(values, f64([[0, -9, 9], [99, nan, 0]]), f64([[7, 2, 2], [4, nan, nan]]), marks(".xx", "x.."), inf)
    assert loss.item() == pytest.approx(0.5 * (1 + 9 + 4) / 3)
    loss.backward()
    assert_equal(torch.nan_to_num(values.grad), f64([[0, -1 / 3, 1], [-2 / 3, 0, 0]]))


# 6. The loop


@pytest.mark.parametrize("make", [tiny_gpt, tiny_reward_model])
def test_a_frozen_copy_is_a_copy_without_gradients_or_dropout(make):
    model = make(dropout=0.5).train()
    frozen = frozen_copy(model)
    assert_equal(weights(frozen), weights(model))
    assert not any(p.requires_grad for p in frozen.parameters()) and not any(m.training for m in frozen.modules())
    assert all(p.requires_grad for p in model.parameters()) and model.training
    before = weights(frozen)
    stir(model)
    assert_equal(weights(frozen), before)


def test_penalties_are_taken_off_for_each_token_and_for_a_response_that_was_cut_off():
    tokens, mask = torch.tensor([[1, 2, 3, EOS, 0], [1, 2, 3, 4, 5], [1, EOS, 0, 0, 0]]), marks(".xx.", ".xxx", "x...")
    seen = []

    def score(*arguments):
        seen.append(arguments)
        return f64([1.0, 2.0, 3.0])

    config = PPOConfig(length_penalty=0.25, missing_eos_penalty=0.5)
    scores, ended = score_responses(score, tokens, mask, config, EOS)
    assert seen == [(tokens, mask)] and ended.tolist() == [True, False, True]
    assert_equal(scores, f64([1 - 2 * 0.25, 2 - 3 * 0.25 - 0.5, 3 - 0.25]))
    free = PPOConfig(length_penalty=0, missing_eos_penalty=0)
    assert_equal(score_responses(score, tokens, mask, free, EOS)[0], f64([1, 2, 3]))


def test_an_end_token_in_the_prompt_or_in_the_padding_ends_no_response():
    tokens, mask = torch.tensor([[EOS, 2, 3, EOS]]), marks(".x.")
    assert score_responses(lambda *_: f64([0.0]), tokens, mask, PPOConfig(), EOS)[1].tolist() == [False]


def score_by_length(tokens, mask):
    """A score that any sampler can get: short responses are better."""
    return -0.3 * mask.sum(1).double() + tokens[:, 0]


def test_a_rollout_holds_what_the_policy_the_reference_and_the_score_say():
    policy, ref = tiny_gpt(), frozen_copy(tiny_gpt())
    config = PPOConfig(batch_size=12, minibatches=1, max_new_tokens=5, temperature=0.7, missing_eos_penalty=0.5)
    batch = rollout(policy, ref, score_by_length, PROMPTS[:12], config)
    tokens, mask = batch["tokens"], batch["mask"]
    check_layout(tokens, mask, PROMPTS[:12], EOS, 5, context=16)
    with torch.no_grad():
        logprobs, values, _ = evaluate_actions(policy, tokens, mask, 0.7)
        ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, 0.7)
    ended = torch.tensor([row[1:][inside][-1] == EOS for row, inside in zip(tokens, mask, strict=True)])
    assert 0 < ended.sum() < 12
    expected = {"logprobs": logprobs, "values": values, "ref_logprobs": ref_logprobs, "ended": ended}
    expected |= {"scores": score_by_length(tokens, mask) - 0.5 * ~ended}
    for name, x in expected.items():
        assert_equal(batch[name], x, 1e-10)
    assert batch.keys() == {"tokens", "mask", *expected}
    assert not any(x.requires_grad for x in batch.values())


def sampled(policy, ref=None, n=12, temperature=1.0):
    """A batch for ppo_update, with advantages and returns from a random score."""
    prompts = [[1 + i % 3] * (1 + i % 4) for i in range(n)]
    config = PPOConfig(max_new_tokens=8, temperature=temperature)
    batch = rollout(policy, ref or policy, lambda tokens, mask: torch.randn(n), prompts, config)
    mask = batch["mask"]
    rewards = kl_adjusted_rewards(batch["scores"], batch["logprobs"], batch["ref_logprobs"], mask, 0.1)
    advantages, returns = gae(rewards, batch["values"], mask, 1.0, 0.95)
    return batch | {"advantages": whiten(advantages, mask), "returns": returns}


def sgd(policy, lr):
    """Plain gradient descent, so that a step is the gradient."""
    return torch.optim.SGD(policy.parameters(), lr)


def settings(**changes):
    return PPOConfig(**({"epochs": 1, "minibatches": 1, "max_grad_norm": inf, "batch_size": 12} | changes))


def update(*arguments, **more):
    """ppo_update, its stats over all passes."""
    return merge(ppo_update(*arguments, **more))


@pytest.mark.parametrize("epochs, minibatches", [(1, 1), (1, 4), (3, 1), (2, 5), (4, 12)])
def test_an_update_takes_exactly_epochs_times_minibatches_steps(epochs, minibatches):
    policy, steps = tiny_gpt(), []
    optimizer = sgd(policy, 1e-3)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    ppo_update(policy, optimizer, sampled(policy), settings(epochs=epochs, minibatches=minibatches))
    assert len(steps) == epochs * minibatches


def test_every_pass_sees_every_response_once():
    policy = tiny_gpt()
    batch, seen = sampled(policy), []
    batch["advantages"] = torch.where(batch["mask"], torch.arange(12.0)[:, None], 0.0)
    real = minippo.policy_loss

    def watched(logprobs, old_logprobs, advantages, mask, clip_eps):
        seen.extend(advantages.amax(1).tolist())
        return real(logprobs, old_logprobs, advantages, mask, clip_eps)

    minippo.policy_loss = watched
    try:
        ppo_update(policy, sgd(policy, 0.0), batch, settings(epochs=2, minibatches=5))
    finally:
        minippo.policy_loss = real
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12)) and seen[:12] != seen[12:]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_the_first_step_the_ratio_is_1_everywhere(temperature):
    policy = tiny_gpt(dropout=0.5)  # in eval mode, and it must stay there
    stats = update(policy, sgd(policy, 0.1), sampled(policy, temperature=temperature), settings(temperature=temperature))
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert stats["approx_kl"] == pytest.approx(0, abs=1e-6) and stats["clip_frac"] == 0


def test_with_several_epochs_the_ratio_moves_and_the_clip_acts():
    policy = tiny_gpt()
    stats = update(policy, torch.optim.Adam(policy.parameters(), 0.01), sampled(policy), settings(epochs=4, minibatches=2))
    assert stats["ratio_max"] > 1.2 and stats["approx_kl"] > 1e-4 and 0 < stats["clip_frac"] < 1


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely():
    policy = tiny_gpt()
    batch = sampled(policy)
    ppo_update(policy, sgd(policy, 1e-3), batch, settings(vf_coef=0.0))
    change = evaluate_actions(policy, batch["tokens"], batch["mask"])[0] - batch["logprobs"]
    assert (change * batch["advantages"]).sum() > 0


def test_the_gradient_is_scaled_down_to_max_grad_norm():
    policy = tiny_gpt()
    before = weights(policy)
    stats = update(policy, sgd(policy, 1.0), sampled(policy), settings(max_grad_norm=1e-3))
    assert stats["grad_norm"] > 1e-2  # what is reported is the norm before
    assert (weights(policy) - before).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_each_network_has_a_gradient_norm_of_its_own():
    policy = critic_gpt()
    batch = sampled(policy)
    batch["returns"] = 1000 * batch["returns"]  # a value spike: it must not scale the policy's step down
    policy_part = [p for name, p in policy.named_parameters() if not name.startswith(("critic", "value_head"))]
    critic_part = [*policy.critic.parameters(), *policy.value_head.parameters()]
    groups = [{"params": policy_part, "network": "policy"}, {"params": critic_part, "network": "critic"}]
    before = [torch.cat([p.detach().flatten() for p in group["params"]]) for group in groups]
    stats = update(policy, torch.optim.SGD(groups, 1.0), batch, settings(max_grad_norm=1e-2))
    moved = [torch.cat([p.detach().flatten() for p in g["params"]]) - x for g, x in zip(groups, before, strict=True)]
    assert [x.norm().item() for x in moved] == pytest.approx([1e-2, 1e-2], rel=1e-3)
    assert 1e-2 < stats["grad_norm"] < 100  # of the policy; that of the critic is in the thousands


def test_groups_of_one_network_have_one_norm_together():
    x, y = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    x.grad, y.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert gradient_step(torch.optim.SGD([{"params": [x]}, {"params": [y], "weight_decay": 0.1}], 1.0), 1.0) == 5.0
    assert (x.item(), y.item()) == pytest.approx((-0.6, -0.8))


def test_an_infinite_max_grad_norm_leaves_the_gradient_alone():
    policy = tiny_gpt()
    before = weights(policy)
    stats = update(policy, sgd(policy, 1.0), sampled(policy), settings())
    assert (weights(policy) - before).norm().item() == pytest.approx(stats["grad_norm"], rel=1e-6)


def test_a_learning_rate_of_0_leaves_the_weights_alone():
    policy = tiny_gpt()
    before = weights(policy)
    ppo_update(policy, adamw(policy, 0.0), sampled(policy), settings(epochs=2, minibatches=3))
    assert torch.equal(weights(policy), before)


def without_advantages(policy, ref=None):
    batch = sampled(policy, ref)
    return batch | {"advantages": torch.zeros_like(batch["advantages"])}


def test_without_advantages_value_loss_or_bonus_nothing_moves():
    policy, ref = tiny_gpt(), tiny_gpt()
    before = weights(policy)
    config = settings(vf_coef=0.0, entropy_coef=0.0, kl_loss_coef=0.0)
    ppo_update(policy, sgd(policy, 1.0), without_advantages(policy, ref), config)
    assert_equal(weights(policy), before)


def test_the_entropy_bonus_raises_the_entropy():
    policy = tiny_gpt()
    batch = without_advantages(policy)
    tokens, mask = batch["tokens"], batch["mask"]
    before = masked_mean(evaluate_actions(policy, tokens, mask)[2], mask)
    ppo_update(policy, sgd(policy, 0.01), batch, settings(vf_coef=0.0, entropy_coef=1.0))
    assert masked_mean(evaluate_actions(policy, tokens, mask)[2], mask) > before


def test_the_kl_loss_pulls_the_policy_to_the_reference():
    policy, ref = tiny_gpt(), tiny_gpt()
    batch = without_advantages(policy, ref)

    def distance():
        logprobs = evaluate_actions(policy, batch["tokens"], batch["mask"])[0]
        return masked_mean((logprobs - batch["ref_logprobs"]) ** 2, batch["mask"]).item()

    before = distance()
    ppo_update(policy, sgd(policy, 0.01), batch, settings(vf_coef=0.0, kl_loss_coef=1.0))
    assert distance() < before


def test_the_gradient_of_the_kl_loss_is_on_average_that_of_the_kl():
    # All responses of one token, weighted by sampling: 4,000 of them stand for the expectation.
    policy, ref = three_token_gpt(), three_token_gpt()
    tokens, mask, *_ = generate(policy, [[1]] * 4000, 1)
    with torch.no_grad():
        old = [evaluate_actions(model, tokens, mask) for model in (policy, ref)]
    zeros = torch.zeros_like(old[0][0])
    batch = {"tokens": tokens, "mask": mask, "logprobs": old[0][0], "ref_logprobs": old[1][0], "values": zeros}
    batch |= {"advantages": zeros, "returns": zeros}
    p, q = (model(torch.tensor([[1]]))[0][0, 0].log_softmax(-1) for model in (policy, ref))
    (p.exp() * (p - q)).sum().backward()
    exact = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in policy.parameters()])
    before = weights(policy)
    ppo_update(policy, sgd(policy, 1.0), batch, settings(batch_size=4000, vf_coef=0.0, kl_loss_coef=1.0))
    assert_equal(before - weights(policy), exact, 0.05 * exact.norm().item())
    assert exact.norm() > 0.1


def test_vf_coef_weighs_the_value_loss_and_0_leaves_the_values_untrained():
    moved = []
    for vf_coef in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        policy = tiny_gpt()
        before = policy.value_head.weight.detach().clone()
        ppo_update(policy, sgd(policy, 1.0), sampled(policy), settings(vf_coef=vf_coef, value_clip=inf))
        moved.append(policy.value_head.weight.detach() - before)
    assert not moved[0].any() and moved[1].any()
    assert_equal(2 * moved[1], moved[2], 1e-5)


def test_the_value_clip_of_an_update_is_around_the_values_of_the_rollout():
    policy = tiny_gpt()
    batch = sampled(policy)
    batch["returns"] = batch["values"] + 10.0  # far above: every value wants to rise, and may do so by value_clip
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    ppo_update(policy, sgd(policy, 1e-3), batch, settings(epochs=60, value_clip=0.3))
    step = (evaluate_actions(policy, batch["tokens"], batch["mask"])[1] - batch["values"])[batch["mask"]]
    assert 0.25 < step.mean() < 0.7  # without the clip, or with one around the values of the step before, it would go on rising


def test_no_gradient_reaches_the_reference_or_the_reward_model():
    policy, ref, scorer = tiny_gpt(), frozen_copy(tiny_gpt()), frozen_copy(tiny_reward_model())
    before = weights(ref), weights(scorer), weights(policy)
    for model in (ref, scorer):
        model.requires_grad_(True)  # frozen or not, nothing may reach them: sampling and scoring build no graph
    config = settings(epochs=2, kl_loss_coef=0.1, max_new_tokens=6)

    def score(tokens, mask):
        return scorer(tokens, row_lengths(mask))

    ppo_iteration(policy, ref, score, PROMPTS[:12], sgd(policy, 0.1), config, 0.1)
    assert all(p.grad is None for model in (ref, scorer) for p in model.parameters())
    assert torch.equal(weights(ref), before[0]) and torch.equal(weights(scorer), before[1])
    assert not torch.equal(weights(policy), before[2])


@pytest.mark.parametrize("padding", ["other values", "more columns"])
def test_padding_changes_neither_the_weights_nor_the_stats_of_an_update(padding):
    results = []
    for dirty in (False, True):
        torch.manual_seed(0)
        policy, ref = tiny_gpt(), tiny_gpt()
        batch = sampled(policy, ref)
        mask, after = batch["mask"], torch.arange(batch["tokens"].shape[1]) > row_lengths(batch["mask"])[:, None] - 1
        assert after.any()
        if dirty and padding == "other values":
            batch = {k: torch.where(mask, x, nan) if x.dim() == 2 and x.is_floating_point() else x for k, x in batch.items()}
            batch["tokens"] = torch.where(after, 7, batch["tokens"])
        elif dirty:
            batch = {k: F.pad(x, (0, 2), value=False if k == "mask" else 5) if x.dim() == 2 else x for k, x in batch.items()}
        torch.manual_seed(1)
        config = settings(epochs=2, minibatches=3, kl_loss_coef=0.1, entropy_coef=0.1)
        stats = update(policy, sgd(policy, 0.1), batch, config)
        results.append((weights(policy), stats))
    assert_equal(results[0][0], results[1][0], 1e-6)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)


def test_the_stats_of_an_update_are_means_over_all_tokens_however_they_were_split():
    def stats_of(minibatches):
        torch.manual_seed(5)
        policy, ref = tiny_gpt(), tiny_gpt()
        batch = sampled(policy, ref)
        batch["logprobs"] = batch["logprobs"] - 0.3 * batch["advantages"].abs()  # as if steps had been taken already
        return update(policy, sgd(policy, 0.0), batch, settings(epochs=2, minibatches=minibatches)), batch, policy

    whole, batch, policy = stats_of(1)
    mask = batch["mask"]
    assert len(set(mask.sum(1).tolist())) > 2  # responses of several lengths
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask)
    expected = policy_loss(logprobs, batch["logprobs"], batch["advantages"], mask, 0.2)[1]
    assert {name: whole[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    for minibatches in (3, 5, 12):
        split, _, _ = stats_of(minibatches)
        del split["grad_norm"]
        assert split == pytest.approx({name: whole[name] for name in split}, rel=1e-4)


def test_the_stats_of_each_pass_tell_the_passes_apart():
    policy = tiny_gpt()
    batch = sampled(policy)
    passes = ppo_update(policy, torch.optim.Adam(policy.parameters(), 0.003), batch, settings(epochs=4, minibatches=3), 2)
    tokens = int(batch["mask"].sum())
    assert len(passes) == 4 and all(one["tokens"] == tokens for one in passes)
    assert passes[0]["approx_kl"] < passes[1]["approx_kl"] < passes[3]["approx_kl"]
    assert passes[0]["clip_frac"] <= passes[1]["clip_frac"] <= passes[3]["clip_frac"] and passes[3]["clip_frac"] > 0
    whole = merge(passes)
    assert whole["tokens"] == 4 * tokens and whole["ratio_max"] == max(one["ratio_max"] for one in passes)
    assert whole["policy_loss"] == pytest.approx(sum(one["policy_loss"] for one in passes) / 4)


def test_merged_stats_weigh_each_part_by_its_tokens_and_take_the_largest_ratio():
    parts = [{"tokens": 3, "loss": 1.0, "ratio_max": 1.5}, {"tokens": 1, "loss": 5.0, "ratio_max": 1.2}]
    assert merge(parts) == {"tokens": 4, "loss": 2.0, "ratio_max": 1.5}


@pytest.mark.parametrize("name", ["returns", "advantages"])
@pytest.mark.parametrize("value", [inf, nan])
def test_an_update_that_is_not_finite_stops_before_the_weights_are_touched(name, value):
    policy = tiny_gpt()
    batch, before = sampled(policy), weights(policy)
    batch[name] = batch[name] + value
    with pytest.raises(FloatingPointError, match="norm of the gradient is"):
        ppo_update(policy, sgd(policy, 0.1), batch, settings())
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize(
    "changes", [{"batch_size": 2, "minibatches": 3}, {"batch_size": 8, "kl_horizon": 7}, {"epochs": 0}], ids=str
)
def test_settings_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError, match="batch_size should be between minibatches and kl_horizon"):
        PPOConfig(**changes)


def test_the_clip_fraction_counts_both_sides():
    logprobs = f64([[0.0, math.log(0.7), math.log(1.3), math.log(1.1)]])
    _, stats = policy_loss(logprobs, torch.zeros(1, 4).double(), torch.ones(1, 4).double(), marks("xxxx"), 0.2)
    assert stats["clip_frac"] == pytest.approx(2 / 4)


def test_explained_variance_is_1_for_perfect_values_0_for_constant_ones_and_sees_the_mask_only():
    returns, mask = f64([[nan, 1, 2], [3, 4, inf]]), marks(".xx", "xx.")
    assert explained_variance(returns, returns, mask) == pytest.approx(1, abs=1e-6)
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0, abs=1e-6)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3, abs=1e-6)
    assert math.isfinite(explained_variance(returns, returns, marks(".x.", "...")))  # a single token has no variance


def test_what_is_watched_is_what_the_names_say():
    mask = marks(".xx.", "x...", ".xxx")
    logprobs, ref_logprobs = noise(3, 4) - 2, noise(3, 4) - 2
    batch = {"mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": noise(3, 4), "returns": noise(3, 4)}
    batch |= {"scores": f64([1.0, 2.0, 6.0]), "ended": torch.tensor([True, False, True])}
    log_ratio = torch.where(mask, logprobs - ref_logprobs, 0.0)
    kl, kl_k3 = log_ratio.sum() / 3, ((-log_ratio).exp() - 1 + log_ratio).sum() / 3
    assert describe(batch, 0.25) == pytest.approx({
        "score": 3.0, "kl": kl.item(), "kl_k3": kl_k3.item(), "kl_coef": 0.25, "rlhf_reward": 3.0 - 0.25 * kl.item(),
        "entropy": -(logprobs[mask]).sum().item() / 6, "response_length": 2.0, "eos_rate": 2 / 3,
        "explained_variance": explained_variance(batch["values"], batch["returns"], mask),
    })  # fmt: skip


def test_an_iteration_is_rollout_rewards_advantages_and_update(monkeypatch):
    policy, ref = tiny_gpt(), frozen_copy(tiny_gpt())
    config = settings(max_new_tokens=6, gamma=0.9, lam=0.8, temperature=0.7, kl_coef=123.0)
    first, calls = frozen_copy(policy), []
    update = minippo.ppo_update

    def watched(*arguments):
        calls.append(arguments)
        return update(*arguments)

    monkeypatch.setattr(minippo, "ppo_update", watched)
    optimizer = sgd(policy, 0.1)
    batch, stats = ppo_iteration(policy, ref, score_by_length, PROMPTS[:12], optimizer, config, 0.3, micro_batch=5)
    mask = batch["mask"]
    with torch.no_grad():
        logprobs, values, _ = evaluate_actions(first, batch["tokens"], mask, 0.7)
    rewards = kl_adjusted_rewards(batch["scores"], logprobs, batch["ref_logprobs"], mask, 0.3)  # beta as it is now
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    for name, x in {"rewards": rewards, "returns": returns, "advantages": whiten(advantages, mask)}.items():
        assert_equal(batch[name], x, 1e-9)
    assert calls == [(policy, optimizer, batch, config, 5)] and not torch.equal(weights(policy), weights(first))
    assert stats.keys() == describe(batch, 0.3).keys() | {
        "loss", "policy_loss", "value_loss", "approx_kl", "clip_frac", "ratio_max", "grad_norm", "tokens", "passes"}  # fmt: skip
    assert len(stats["passes"]) == 1 and stats["passes"][0]["loss"] == stats["loss"]
    assert stats["kl_coef"] == 0.3 and stats["score"] == pytest.approx(batch["scores"].mean().item())


def test_an_iteration_takes_another_way_to_sample():
    policy, asked = tiny_gpt(), []

    def other(*arguments):
        asked.append(arguments)
        return rollout(*arguments)

    config = settings(max_new_tokens=4)
    ppo_iteration(policy, policy, score_by_length, PROMPTS[:12], sgd(policy, 0.1), config, 0.1, rollout=other)
    assert asked == [(policy, policy, score_by_length, PROMPTS[:12], config)]


# A critic of its own


def test_a_separate_critic_starts_with_the_normalised_scores_of_the_reward_model_and_leaves_the_policy_alone():
    policy, scorer = tiny_gpt(), frozen_copy(tiny_reward_model())
    scorer.mean.fill_(0.7), scorer.std.fill_(1.9)
    before, tokens = weights(scorer), torch.randint(EOS + 1, (3, 6))
    old_logits = policy(tokens)[0]
    add_critic(policy, scorer)
    logits, values = policy(tokens)
    assert_equal(logits, old_logits)
    for length in range(1, 7):
        assert_equal(values[:, length - 1].float(), scorer(tokens, torch.full((3,), length)).float(), 1e-5)
    assert policy.config.separate_critic and all(p.requires_grad for p in policy.parameters())
    stir(policy)
    assert torch.equal(weights(scorer), before)


def test_the_value_loss_of_a_separate_critic_does_not_touch_the_policy_nor_the_policy_loss_the_critic():
    policy = critic_gpt()
    tokens, mask = torch.randint(EOS + 1, (3, 6)), marks(".xx..", "xxxxx", "...x.")
    logprobs, values, entropy = evaluate_actions(policy, tokens, mask)
    values.pow(2).sum().backward(retain_graph=True)
    assert all(p.grad is None or not p.grad.any() for p in policy.trunk.parameters())
    assert all(p.grad.any() for p in policy.critic.blocks.parameters())
    policy.zero_grad()
    (logprobs + entropy).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.critic.parameters())
    assert policy.trunk.blocks[0].mlp[0].weight.grad.any()


def test_a_separate_critic_is_sampled_and_updated_like_any_policy():
    policy = critic_gpt()
    before = weights(policy.critic)
    stats = update(policy, sgd(policy, 0.01), sampled(policy), settings())
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-5) and not torch.equal(weights(policy.critic), before)


# The parts together: a task that PPO must learn


def train(beta, steps=40, lr=0.01, separate_critic=False, **changes):
    """Responses of two tokens, a reward of 1 if the first is 3. -> P(3) for each prompt before and after, and the KL at the end."""
    policy = GPT(GPTConfig(5, 8, layers=1, heads=1, channels=8)).eval()
    ref = frozen_copy(policy)
    if separate_critic:
        add_critic(policy, RewardModel(policy))
    prompts = [[0], [1], [2, 0]]
    optimizer = adamw(policy, lr)
    config = PPOConfig(batch_size=96, epochs=4, minibatches=2, max_new_tokens=2, missing_eos_penalty=0.0, **changes)

    def score(tokens, mask):
        return (tokens[torch.arange(96), torch.tensor([1, 1, 2] * 32)] == 3).float()

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        batch, stats = ppo_iteration(policy, ref, score, prompts * 32, optimizer, config, beta)

    def chance(model):
        return torch.stack([model(torch.tensor([prompt]))[0][0, -1].softmax(-1)[3] for prompt in prompts]).detach()

    return chance(ref), chance(policy), stats["kl_k3"]


@pytest.mark.parametrize("separate_critic", [False, True])
def test_ppo_learns_to_write_what_is_rewarded(separate_critic):
    before, after, _ = train(0.02, steps=80, separate_critic=separate_critic)
    assert before.max() < 0.5 and after.min() > 0.9


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_ppo_ends_at_the_best_policy_that_theory_knows(beta):
    # pi*(y) ~ ref(y) exp(r(y) / beta), so the odds of a first token 3 rise by exp(1 / beta), and nothing else changes.
    before, after, _ = train(beta)
    odds = before / (1 - before) * math.exp(1 / beta)
    assert_equal(after, odds / (1 + odds), 0.05)


def test_with_a_large_beta_the_policy_stays_at_the_reference():
    before, after, kl = train(50.0)
    assert_equal(after, before, 0.05)
    assert kl < 0.05


# What makes the file what it is


def names_bound_by(node):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def test_nothing_is_used_before_it_is_defined():
    later = set()
    for node in reversed(TREE.body):  # `later`: bound further down, and not (yet seen to be) bound further up
        bound = names_bound_by(node)
        local = {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)} | {
            name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}
        later -= bound
        too_early = (used & later) - local
        assert not too_early, f"line {node.lineno} uses {sorted(too_early)}, defined further down"
        later |= bound


def test_the_file_needs_nothing_but_torch_and_the_standard_library():
    modules = set()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules - sys.stdlib_module_names == {"torch"}


def test_the_file_is_read_in_one_sitting():
    lines = SOURCE.splitlines()
    docstrings = set()
    for node in ast.walk(TREE):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, node.name
    code = [n for n, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#") and n not in docstrings]
    assert len(lines) <= 700 and len(code) <= 410 and max(map(len, lines)) <= 100
    (loss,) = [node.lineno for node in TREE.body if getattr(node, "name", "") == "reward_model_loss"]
    assert loss < 330


def test_the_file_ends_with_the_loop_of_one_iteration_and_an_example_of_it():
    assert [node.name for node in TREE.body if isinstance(node, ast.FunctionDef)][-3:] == ["ppo_iteration", "trace", "main"]


COPIED = {
    "check_mask": lambda f: f(marks("x."), noise(1, 2)),
    "row_lengths": lambda f: f(marks(".xx", "x..")),
    "response_mask": lambda f: f(torch.tensor([1, 2]), torch.tensor([3, 4]), 5),
    "kl_per_response": lambda f: f(noise(2, 3), noise(2, 3), marks(".xx", "x..")),
    "explained_variance": lambda f: f(noise(2, 3), noise(2, 3), marks(".xx", "x..")),
    "adapt_kl_coef": lambda f: f(0.1, 5.0, 6.0, 128, 1e4),
    "gather_logprobs": lambda f: f(noise(2, 3, 5), torch.randint(5, (2, 3)), 0.7),
    "masked_mean": lambda f: f(noise(2, 3), marks(".xx", "x..")),
    "whiten": lambda f: f(noise(2, 3), marks(".xx", "x..")),
    "frozen_copy": lambda f: weights(f(tiny_gpt().train())),
    "evaluate_actions": lambda f: f(tiny_gpt(), torch.randint(EOS + 1, (2, 4)), marks(".xx", "x.."), 0.7),
    "reward_model_loss": lambda f: f(noise(5), noise(5)),
    "kl_adjusted_rewards": lambda f: f(noise(2), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.1),
    "gae": lambda f: f(noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.9, 0.8),
    "policy_loss": lambda f: f(noise(2, 3), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.2),
    "value_loss": lambda f: f(noise(2, 3), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.2),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_function_copied_elsewhere_works_with_import_torch_alone(name):
    torch.manual_seed(0)
    needed, source = [name], "import torch\n"
    for function in needed:  # grows while it is read: the other functions of this list that one names come along
        text = inspect.getsource(getattr(minippo, function))
        used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        needed += [other for other in COPIED if other in used and other not in needed]
        source += text
    namespace = {}
    exec(source, namespace)
    results = []
    for function in (getattr(minippo, name), namespace[name]):
        torch.manual_seed(0)
        results.append(COPIED[name](function))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.fixture(scope="module")
def printed():
    """What `python minippo.py` prints where there is nothing but torch."""
    run = f"runpy.run_path({minippo.__file__!r}, run_name='__main__')"
    code = f"import runpy, sys; sys.modules.update(numpy=None, tiktoken=None); {run}"
    return subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], encoding="utf-8").splitlines()


def test_the_example_learns_what_its_score_function_likes(printed):
    scores = [float(line.split("score")[1].split()[0]) for line in printed if line.startswith("iteration")]
    assert len(scores) == 6 and scores[0] < 0 and min(scores[2:]) > 3
    words = printed[5].split()[-3:]
    turns = [(a in "aeiou") != (b in "aeiou") for word in words for a, b in itertools.pairwise(word)]
    assert sum(turns) > 0.8 * len(turns)


def test_the_example_shows_one_response_token_by_token(printed):
    head, *rows = printed[6:]
    names = ["action", "log pi", "log ref", "KL", "reward", "value", "advantage", "return", "whitened"]
    assert head.split() == " ".join(names).split()
    table = [dict(zip(names[1:], map(float, row.split()[1:]), strict=True)) for row in rows]
    for row in table:
        assert row["KL"] == pytest.approx(row["log pi"] - row["log ref"], abs=0.011)
        assert row["advantage"] == pytest.approx(row["return"] - row["value"], abs=0.011)
    for row, later in itertools.pairwise(table):
        assert row["reward"] == pytest.approx(-0.1 * row["KL"], abs=0.006)
        assert row["return"] == pytest.approx(row["reward"] + later["return"], abs=0.011)
    assert rows[-1].split()[0] == "<eos>" and table[-1]["reward"] == table[-1]["return"] > 1
