"""The specification of variations/with_transformers.py. Run:
python -m pytest tests/test_with_transformers.py (needs transformers)"""

import os
import random

import pytest
import torch

import minippo
from minippo import (
    GPT,
    GPTConfig,
    PPOConfig,
    evaluate_actions,
    frozen_copy,
    kl_per_response,
    ppo_loss,
    row_lengths,
)
from plumbing.hf import copy_trunk
from tiny import gradients, inf, stir, weights

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("transformers")
import transformers

from variations import with_transformers
from variations.with_transformers import (
    Policy,
    classifier_score,
    sample,
    text_score,
    train,
    update,
)

EOS, PAD = 63, 64  # of the tiny models; the policy does not know of PAD
SHAPE = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
PROMPTS = [[1, 2, 3], [4], [5, 6], [7] * 6]
TOKENIZER = transformers.ByT5Tokenizer(extra_ids=0)


def tiny_gpt2(kind=transformers.GPT2LMHeadModel, **more):
    ends = {"bos_token_id": None, "eos_token_id": None}
    return stir(kind(transformers.GPT2Config(**SHAPE | ends | {"vocab_size": EOS + 1} | more)), 0.1)


def tiny_policy(**more):
    return stir(Policy(tiny_gpt2(**more), EOS), 0.1).eval()


def classifier(**more):
    more = {"vocab_size": PAD + 1, "num_labels": 1} | more
    return tiny_gpt2(transformers.GPT2ForSequenceClassification, **more)


def autocast(enabled):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


# Sampling


def test_a_row_is_a_prompt_its_response_and_end_tokens():
    policy, prompts = tiny_policy(), PROMPTS * 30
    tokens, mask, logprobs, values = sample(policy, prompts, 8)
    assert len({*mask.sum(1).tolist()}) > 5 and mask.sum(1).max() == 8
    rows = zip(tokens.tolist(), mask.tolist(), row_lengths(mask).tolist(), prompts, strict=True)
    for row, inside, length, prompt in rows:
        response = row[len(prompt) : length]
        assert row[: len(prompt)] == prompt and inside.index(True) == len(prompt) - 1
        assert sum(inside) == len(response) and EOS not in response[:-1]
        assert len(response) == 8 or response[-1] == EOS
        assert {*row[length:]} <= {EOS}
    found = evaluate_actions(policy, tokens, mask)
    assert torch.equal(logprobs, found[0]) and torch.equal(values, found[1])
    assert found[0].requires_grad and not logprobs.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_numbers_are_those_of_each_row_alone(temperature):
    policy = tiny_policy()
    tokens, mask, logprobs, values = sample(policy, PROMPTS * 3, 8, temperature)
    for i, length in enumerate(row_lengths(mask).tolist()):
        row, inside = tokens[i, :length], mask[i, : length - 1]
        out = policy.gpt2(row[None], output_hidden_states=True)
        exact = (out.logits[0, :-1] / temperature).log_softmax(-1)[range(length - 1), row[1:]]
        torch.testing.assert_close(logprobs[i, : length - 1][inside], exact[inside])
        exact = policy.value_head(out.hidden_states[-1][0, :-1]).squeeze(-1)
        torch.testing.assert_close(values[i, : length - 1][inside], exact[inside])


def test_the_samples_are_those_of_the_whole_distribution():
    # k1 and k3 against any other model agree on average only if no token is cut off.
    tokens, mask, logprobs, _ = sample(tiny_policy(), PROMPTS * 100, 8)
    other = torch.log_softmax(torch.randn(EOS + 1), -1)[tokens[:, 1:]]
    k1, k3 = kl_per_response(logprobs, other, mask)
    assert abs(k1.mean() - k3.mean()) < 5 * (k1 - k3).std() / len(k1) ** 0.5
    assert len({*tokens[:, 1:][mask].tolist()}) == EOS + 1


CHANGED = {
    "min_p": 0.3,
    "typical_p": 0.8,
    "repetition_penalty": 1.3,
    "epsilon_cutoff": 0.03,
    "suppress_tokens": [3, 4],
    "no_repeat_ngram_size": 1,
    "forced_eos_token_id": EOS,
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_samples_from_another_distribution_is_refused(name):
    policy = tiny_policy()
    for temperature in (1.0, 0.7):
        sample(policy, PROMPTS * 8, 8, temperature)
    setattr(policy.gpt2.generation_config, name, CHANGED[name])
    with pytest.raises(ValueError, match=name):
        sample(policy, PROMPTS * 8, 8)


def test_in_bfloat16_rounding_passes_and_another_distribution_is_refused():
    policy = tiny_policy()
    with autocast(True):
        _, _, logprobs, values = sample(policy, PROMPTS * 8, 8)
        assert logprobs.dtype == values.dtype == torch.float32
        policy.gpt2.generation_config.min_p = 0.3
        with pytest.raises(ValueError, match="min_p"):
            sample(policy, PROMPTS * 8, 8)


def test_settings_that_are_known_are_made_neutral_and_the_values_begin_at_0():
    policy = Policy(tiny_gpt2(), EOS).eval()
    policy.gpt2.generation_config.update(top_k=2, top_p=0.5, temperature=3.0, max_length=5)
    tokens, mask, _, values = sample(policy, PROMPTS * 8, 8)
    assert mask.sum(1).max() == 8 and len({*tokens[:, 1:][mask].tolist()}) > EOS / 2
    assert not values.any()


def test_dropout_and_an_empty_prompt_are_refused():
    with pytest.raises(ValueError, match="dropout"):
        sample(tiny_policy(resid_pdrop=0.5).train(), PROMPTS * 8, 8)
    with pytest.raises(ValueError, match="empty"):
        sample(tiny_policy(), [[1], []], 8)


# Scores


def test_a_function_scores_the_texts_of_prompt_and_response_without_end_tokens():
    rows, seen = [("Do bees", " fly?", 2), ("a", "é", 0), ("bc", "d", 5)], []
    ids = [TOKENIZER(prompt + response)["input_ids"] for prompt, response, _ in rows]
    starts = torch.tensor([len(prompt) for prompt, *_ in rows])
    ends = torch.tensor(list(map(len, ids)))
    eos = TOKENIZER.eos_token_id
    tokens = torch.tensor([row + [eos] * (15 - len(row)) for row in ids])
    mask = minippo.response_mask(starts, ends, 15)

    def reward(prompts, responses):
        seen.extend(zip(prompts, responses))
        return [len(response) for response in responses]

    scores = text_score(TOKENIZER, reward)(tokens, mask)
    assert seen == [(prompt, response) for prompt, response, _ in rows]
    assert scores.tolist() == [5, 1, 1] and scores.dtype == torch.float32


@pytest.mark.parametrize("pad", [EOS, PAD, 0])
def test_a_classifier_scores_a_row_in_a_batch_as_the_row_alone(pad):
    model = classifier(pad_token_id=pad, resid_pdrop=0.5).train()
    tokens, mask, *_ = sample(tiny_policy(), PROMPTS * 10, 8)
    score = classifier_score(model)
    scores = score(tokens, mask)
    assert scores.shape == (40,) and scores.std() > 0.01 and not scores.requires_grad
    for i, length in enumerate(row_lengths(mask).tolist()):
        alone = model.eval()(tokens[i : i + 1, :length]).logits[0, 0]
        torch.testing.assert_close(scores[i], alone)
    with autocast(True):
        assert score(tokens, mask).dtype == torch.float32


# The gradient step


ALL_TERMS = {"max_new_tokens": 8, "max_grad_norm": inf, "entropy_coef": 0.1, "kl_loss_coef": 0.1}


def a_batch(policy, config):
    """A rollout with whatever an update needs; the policy has moved away since."""
    ref, prompts = stir(frozen_copy(policy), 0.05), PROMPTS * 4
    batch = minippo.rollout(
        policy, ref, lambda tokens, mask: mask.sum(1).float(), prompts, config, sample
    )
    stir(policy, 0.02)
    return batch | minippo.compute_advantages(batch, config, 0.1)


def step(policy, batch, config, micro_batch=1000, bfloat16=False):
    """Where the weights are after an update, less where they were."""
    start = weights(policy)
    torch.manual_seed(0)
    update(
        policy,
        torch.optim.SGD(policy.parameters(), 0.1),
        batch,
        config,
        micro_batch,
        autocast(bfloat16),
    )
    return weights(policy) - start


@pytest.mark.parametrize("micro_batch", [1, 3, 16, 1000])
def test_the_gradient_of_pieces_is_that_of_the_whole(micro_batch):
    policy, config = tiny_policy(), PPOConfig(minibatches=1, **ALL_TERMS)
    batch = a_batch(policy, config)
    ppo_loss(policy, batch, config)[0].backward()
    whole = gradients(policy)
    step(policy, batch, config, micro_batch)
    assert whole.norm() > 0.1 and len({*batch["mask"].sum(1).tolist()}) > 2
    torch.testing.assert_close(gradients(policy), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [inf, 0.1])
def test_the_steps_are_those_of_minippos_own_gpt_with_the_same_weights(max_grad_norm):
    policy = tiny_policy()
    config = PPOConfig(minibatches=3, epochs=2, **ALL_TERMS | {"max_grad_norm": max_grad_norm})
    batch, before, after = a_batch(policy, config), own_gpt(policy), own_gpt(policy)
    torch.manual_seed(0)
    minippo.ppo_update(after, torch.optim.SGD(after.parameters(), 0.1), batch, config)
    step(policy, batch, config, 2)
    assert (weights(after) - weights(before)).norm() > 0.01
    torch.testing.assert_close(weights(own_gpt(policy)), weights(after), rtol=0, atol=1e-5)


def own_gpt(policy):
    own = GPT(GPTConfig(EOS + 1, 32, 2, heads=2, channels=16)).eval()
    copy_trunk(policy.gpt2.transformer, own.trunk)
    own.value_head.load_state_dict(policy.value_head.state_dict())
    return own


def test_in_bfloat16_each_step_starts_from_the_weights_of_the_step_before():
    # While it is open, autocast keeps the first weights that it has rounded to 16 bits.
    policy, config = tiny_policy(), PPOConfig(minibatches=4, **ALL_TERMS)
    batch, moved = a_batch(policy, config), []
    for bfloat16 in (False, True):
        model = frozen_copy(policy).requires_grad_(True)
        moved.append(step(model, batch, config, 2, bfloat16))
    assert 0 < (moved[0] - moved[1]).norm() < 0.05 * moved[0].norm()


# The whole


def letters(prompts, responses):
    return [sum("a" <= letter <= "z" for letter in text) / 2 for text in responses]


QUICK = {"steps": 12, "batch_size": 32, "lr": 1e-2}


def short_run(score, **more):
    random.seed(0)
    gpt2 = tiny_gpt2(vocab_size=len(TOKENIZER), n_embd=32, resid_pdrop=0.5)
    config = PPOConfig(max_new_tokens=8, missing_eos_penalty=0.0, kl_coef=0.2)
    return train(gpt2, TOKENIZER, ["a", "bees"], score, config, **QUICK | more)


def test_the_example_learns_to_write_letters(monkeypatch, capsys, recwarn):
    logs = []
    monkeypatch.setattr(
        with_transformers, "train", lambda *x: logs.append(train(*x, **QUICK, micro_batch=5))
    )
    with_transformers.main()
    ((first, *_, last),) = logs
    assert last["score"] > first["score"] + 2 and last["response_length"] > 10
    assert abs(first["kl"]) < 1e-3 and last["kl"] > 1 and first["kl_coef"] == 0.1
    assert abs(first["explained_variance"]) < 1e-6 < abs(last["explained_variance"])
    assert not [x for x in recwarn if "spread" in str(x.message)]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed] == ["1", "11", "12"]
    assert float(printed[2][3]) == pytest.approx(last["score"], abs=0.01)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_it_learns_from_a_classifier_in_either_precision(bfloat16):
    model = classifier(vocab_size=len(TOKENIZER), pad_token_id=TOKENIZER.pad_token_id)
    stir(model.score, 1.0)
    score = classifier_score(model)

    def watched(tokens, mask):
        assert torch.is_autocast_enabled("cpu") == bfloat16
        return score(tokens, mask)

    log = short_run(watched, bfloat16=bfloat16, steps=24)
    assert log[-1]["score"] > log[0]["score"] + 1
    assert not torch.is_autocast_enabled("cpu")


def test_a_batch_may_be_smaller_than_the_number_of_minibatches():
    log = short_run(text_score(TOKENIZER, letters), steps=1, batch_size=2)
    assert log[0]["response_length"] >= 1


def test_scores_of_another_spread_are_warned_about():
    score = text_score(TOKENIZER, letters)
    for factor in (0.1, 10):
        with pytest.warns(UserWarning, match="spread"):
            short_run(lambda *x, factor=factor: factor * score(*x), steps=1)


def test_an_iteration_has_both_learning_rates_all_weights_and_all_prompts(monkeypatch):
    lrs, head_lrs = [], []

    def record(policy, optimizer, batch, config, micro_batch, autocast):
        assert len(batch["mask"]) == 6 and micro_batch == 4
        assert not torch.is_autocast_enabled("cpu")  # it would keep weights that are old
        body, head = optimizer.param_groups
        lrs.append(body["lr"]), head_lrs.append(head["lr"])
        assert {*body["params"], *head["params"]} == {*policy.parameters()}
        assert head["params"] == [*policy.value_head.parameters()]
        assert {*batch["mask"].int().argmax(1).tolist()} == {0, 3}  # both prompts
        rewards = minippo.compute_advantages(batch, config, 0.2)["rewards"]
        torch.testing.assert_close(batch["rewards"], rewards)
        optimizer.step()
        stir(policy, 0.05)  # so the KL is not 0

    monkeypatch.setattr(with_transformers, "update", record)
    more = {
        "steps": 4,
        "batch_size": 6,
        "micro_batch": 4,
        "lr": 1.0,
        "head_lr": 8.0,
        "bfloat16": True,
    }
    short_run(lambda tokens, mask: mask.sum(1).float() + tokens[:, -1] % 3, **more)
    assert lrs == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert head_lrs == pytest.approx([8.0, 6.0, 4.0, 2.0])
