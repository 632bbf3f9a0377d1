"""The specification of variations/with_transformers.py. Run:
python -m pytest tests/test_with_transformers.py (needs transformers; peft for LoRA)"""

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import minippo
from minippo import PPOConfig, evaluate_actions, row_lengths
from tiny import gradients, inf, stir

pytest.importorskip("transformers")
import transformers

from variations import rloo
from variations import with_transformers as hf

EOS = 63  # of the tiny models
SHAPE = {"vocab_size": EOS + 1, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": EOS}
SHAPE |= {"num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": None}
SHAPE |= {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": None}
SHAPE |= {"resid_pdrop": 0.5, "attention_dropout": 0.5}
PROMPTS = [[1, 2, 3], [4], [5, 6], [7] * 6]
IDS = SimpleNamespace(eos_token_id=EOS, decode=lambda ids, **_: str(ids))  # a tokenizer


def tiny(kind="Llama", head="CausalLM", size=0.1, **more):
    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    return stir(getattr(transformers, f"AutoModelFor{head}").from_config(config), size)


def tiny_policy(kind="Llama", bfloat16=False):
    return stir(hf.Policy(tiny(kind), IDS, bfloat16), 0.1)


def with_peft(model, config, *args, **more):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, getattr(peft, config)(*args, **more))


def last_token(tokens, mask):
    return tokens.gather(1, row_lengths(mask)[:, None] - 1).squeeze(1) / 20


# Sampling


def test_a_row_is_a_prompt_its_response_and_padding_whatever_the_model_would_generate():
    policy, prompts = tiny_policy(), PROMPTS * 100
    policy.model.generation_config.update(do_sample=False, min_p=0.3, max_length=3, num_beams=2)
    tokens, mask, logprobs, values = hf.sample(policy, prompts, 8, 0.3)
    assert len({*mask.sum(1).tolist()}) > 5 and mask.sum(1).max() == 8
    rows = zip(tokens.tolist(), mask.tolist(), row_lengths(mask).tolist(), prompts, strict=True)
    for row, inside, length, prompt in rows:
        response = row[len(prompt) : length]
        assert row[: len(prompt)] == prompt and inside.index(True) == len(prompt) - 1
        assert sum(inside) == len(response) and EOS not in response[:-1]
        assert len(response) == 8 or response[-1] == EOS
    found = evaluate_actions(policy, tokens, mask, 0.3)
    assert torch.equal(logprobs, found[0]) and torch.equal(values, found[1])
    assert found[0].requires_grad and not logprobs.requires_grad
    # k1 and k3 against any other model agree on average only if no token is cut off.
    other = torch.log_softmax(torch.randn(EOS + 1), -1)[tokens[:, 1:]]
    k1, k3 = minippo.kl_per_response(logprobs, other, mask)
    assert abs(k1.mean() - k3.mean()) < 5 * (k1 - k3).std() / len(k1) ** 0.5


def alone(policy, tokens, mask, temperature):
    """log pi and values of each row, by the model itself and without padding or other rows."""
    parts = []
    for row, inside, length in zip(tokens, mask, row_lengths(mask)):
        out = policy.model(row[None, :length], output_hidden_states=True)
        nats = (out.logits[0, :-1] / temperature).log_softmax(-1).gather(1, row[1:length, None])
        both = torch.cat([nats, policy.value_head(out.hidden_states[-1][0, :-1])], 1).T
        parts.append(F.pad(both, (0, len(inside) - length + 1)) * inside)
    return torch.stack(parts, 1)


@pytest.mark.parametrize("checkpointing, micro_batch", [(False, 0), (True, 3)])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2"])
def test_numbers_and_gradient_are_those_of_the_model_for_each_row_alone(
    kind, bfloat16, checkpointing, micro_batch
):
    def check(found, expected):
        off = (found - expected).norm() / expected.norm()
        assert 1e-4 < off < 0.05 if bfloat16 else (found - expected).abs().max() < 1e-5

    config = PPOConfig(
        8,
        0.7,
        clip_eps=inf,
        value_clip=inf,
        minibatches=1,
        micro_batch=micro_batch,
        max_grad_norm=inf,
    )
    policy, layers = tiny_policy(kind, bfloat16).train(), []
    ref, asked = stir(minippo.frozen_copy(policy), 0.05), PROMPTS * 4
    batch = minippo.rollout(policy, ref, last_token, asked, config, hf.sample)
    batch |= minippo.compute_advantages(batch, config)
    old, old_values, mask = batch["old_logprobs"], batch["old_values"], batch["mask"]
    logprobs, values = alone(policy, batch["tokens"], mask, 0.7)
    check(old, logprobs), check(old_values, values)
    loss, _ = minippo.policy_loss(logprobs, old, batch["credit"], mask, inf)
    more, _ = minippo.value_loss(values, old_values, batch["returns"], mask, inf)
    (loss + 0.1 * more).backward()
    expected = gradients(policy)
    if checkpointing:
        policy.model.activation_checkpointing_enable()
    mlp = next(x for name, x in policy.named_modules() if name.endswith(".mlp"))
    mlp.register_forward_pre_hook(lambda *_: layers.append(0))
    minippo.ppo_update(policy, torch.optim.SGD(policy.parameters(), 0.1), batch, config)
    check(gradients(policy), expected)
    assert len(layers) == (12 if checkpointing else 1)  # each of 6 pieces is computed twice
    layers.clear()
    tokens, *_ = hf.sample(policy, [[1, 2]], 60)
    assert len(layers) == tokens.shape[1] - 1  # read at once, and token by token; and for log pi


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}])
def test_lora_trains_the_adapter_and_the_reference_is_the_model_without_it(more):
    base = tiny(tie_word_embeddings=False)
    plain, more = hf.Policy(copy.deepcopy(base), IDS), more | {"target_modules": "all-linear"}
    policy = hf.Policy(with_peft(base, "LoraConfig", lora_dropout=0.5, **more), IDS)
    before = {name: x.clone() for name, x in policy.model.named_parameters()}
    run = partial(hf.train, policy, PROMPTS, last_token, PPOConfig(8), 0.05, 0.1, batch_size=16)
    log = run(steps=3)
    assert log[0]["kl"] == 0 and log[2]["kl_k3"] > 0.05
    after = dict(policy.model.named_parameters())
    moved = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert moved == {x for x in before if "lora" in x or "modules_to_save" in x}
    tokens, mask, found, _ = hf.sample(policy, PROMPTS, 8)
    known, expected = (evaluate_actions(x, tokens, mask)[0] for x in (policy.reference, plain))
    torch.testing.assert_close(known, expected)
    assert (found - expected).abs().max() > 0.1
    policy.reference = None
    with pytest.raises(ValueError, match="the adapter is not new"):
        run(steps=1)


# Refusals


def run(model):
    policy = hf.Policy(model, IDS, bfloat16=True)
    hf.train(policy, PROMPTS, last_token, PPOConfig(), 0.1, 0.1, steps=1, batch_size=4)


def rewarded(scores):
    tokens, mask, *_ = hf.sample(tiny_policy(), PROMPTS[:2], 4)
    hf.text_score(IDS, PROMPTS, lambda *_: scores)(tokens, mask)


def tuned():
    return with_peft(tiny(), "PromptTuningConfig", "CAUSAL_LM", num_virtual_tokens=2)


def lower_case(text):  # a tokenizer that puts a token before the text, like Llama's
    return {"input_ids": [5, *text.lower().encode()]}


lower_case.eos_token_id = EOS
CLASSIFIER = partial(tiny, head="SequenceClassification", num_labels=1, pad_token_id=0)
REFUSED = [
    ("Gemma-2", lambda: run(tiny("Gemma2", size=0.5))),
    ("Cohere", lambda: run(tiny("Cohere"))),
    ("Granite", lambda: run(tiny("Granite", logits_scaling=8.0))),
    ("tunes a prompt", lambda: run(tuned())),
    ("16 bits", lambda: run(tiny(max_position_embeddings=54).bfloat16())),
    ("end token", lambda: hf.Policy(tiny(), SimpleNamespace(eos_token_id=None))),
    ("a prompt is empty", lambda: hf.sample(tiny_policy(), [[1], []], 8)),
    ("exceed the context", lambda: run(tiny(max_position_embeddings=53))),
    ("the same tokens as 'B'", lambda: hf.text_score(lower_case, ["b", "b", "B"], None)),
    ("num_labels=1", lambda: hf.classifier_score(CLASSIFIER(num_labels=2))),
    ("pad_token_id", lambda: hf.classifier_score(CLASSIFIER(pad_token_id=None))),
    ("2 responses need as many", lambda: rewarded(1.0)),
    ("2 responses need as many", lambda: rewarded([1.0])),
    ("2 responses need as many", lambda: rewarded([[1.0], [2.0]])),
]


@pytest.mark.parametrize("why, do", REFUSED)
def test_what_would_go_wrong_in_silence_is_refused(why, do):
    with pytest.raises(ValueError, match=why):
        do()
    hf.sample(hf.Policy(tiny(size=0.5), IDS, bfloat16=True), PROMPTS, 8)  # rounding is not


@pytest.mark.parametrize("ends, count", [(EOS, 0), ([EOS], 0), (None, 0), ([EOS, 7], 1), (7, 1)])
def test_other_ends_of_the_model_are_warned_of(ends, count):
    model = tiny()
    model.generation_config.eos_token_id = ends
    with warnings.catch_warnings(record=True) as found:
        policy = hf.Policy(model, IDS)
    assert len(found) == count and not any(x.any() for x in policy.value_head.parameters())


# Texts and scores


def test_prompts_are_texts_conversations_or_ids_and_rewards_see_them_as_they_were():
    template = "{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0, chat_template=template)  # 1: its end token
    prompts, seen = ["ab", [{"role": "user", "content": "ab"}], [3, 4]], []
    rows, answers = (
        hf.encode_rows(tokenizer, [(x, "é", "!") for x in prompts]),
        ([198, 172, 1], [36, 1]),
    )
    assert rows == [(ids, *answers) for ids in ([100, 101], [100, 101, 61], [3, 4])]

    def reward(*texts):
        seen.extend(texts)
        return torch.tensor([1, 2, 3])

    scores = hf.text_score(tokenizer, ["c", *prompts], reward)(
        *hf.pad([x[:2] for x in rows], "cpu")
    )
    assert (
        seen == [prompts, ["é"] * 3] and scores.tolist() == [1, 2, 3] and scores.is_floating_point()
    )
    assert hf.encode(lower_case, "Ab") == [5, 97, 98]


@pytest.mark.parametrize("kind, pad", [("GPT2", 60), ("Llama", EOS), ("Llama", 0), ("Bert", 0)])
def test_a_classifier_scores_a_row_in_a_batch_as_the_row_alone(kind, pad):
    model = CLASSIFIER(kind, pad_token_id=pad).train()
    tokens, mask, *_ = hf.sample(tiny_policy(), PROMPTS * 10, 8)
    scores = hf.classifier_score(model)(tokens, mask)
    assert scores.shape == (40,) and scores.std() > 0.01
    for i, length in enumerate(row_lengths(mask).tolist()):
        torch.testing.assert_close(scores[i], model(tokens[i : i + 1, :length]).logits[0, 0])


def test_scores_are_normalised_over_answers_of_the_policy_and_capped():
    policy, seen = tiny_policy(), []

    def score(tokens, mask):
        seen.append((tokens * F.pad(mask, (1, 0))).sum(1).float())
        return seen[-1]

    normal = hf.normalised(score, policy, PROMPTS, 4, answers=70)
    raw = torch.cat(seen)
    assert [len(x) for x in seen] == [32, 32, 6] and raw.max() <= 4 * EOS
    found = normal(*hf.sample(policy, PROMPTS * 9, 8)[:2]) * raw.std() + raw.mean()
    assert seen[-1].max() > raw.quantile(0.99)
    torch.testing.assert_close(found, seen[-1].clamp(max=raw.quantile(0.99)))
    equal = hf.normalised(lambda tokens, _: torch.ones(len(tokens)), policy, PROMPTS, 4, answers=4)
    assert equal(torch.ones(2, 3), None).tolist() == [0, 0]


# The three stages


def test_the_losses_are_those_of_transformers_and_of_bradley_and_terry():
    policy, rows = tiny_policy(), [([1, 2], [3, 4, EOS]), ([5], [6])]
    labels = torch.tensor([[-100, -100, 3, 4, EOS], [-100, 6, -100, -100, -100]])
    expected = policy.model(hf.pad(rows, "cpu")[0], labels=labels).loss
    torch.testing.assert_close(hf.sft_loss(policy, rows), expected)
    model, rows = CLASSIFIER(), [([1], [2]), ([1], [3, 4]), ([5], [6]), ([5], [7])]
    a, b, c, d = hf.classifier_score(model)(*hf.pad(rows, "cpu"))
    loss = hf.rm_loss(model, [([1], [2], [3, 4]), ([5], [6], [7])])
    torch.testing.assert_close(loss, -(F.logsigmoid(a - b) + F.logsigmoid(c - d)) / 2)


def test_fit_takes_a_step_of_adam_for_each_batch_in_random_order(capsys):
    model, seen = torch.nn.Linear(1, 1, bias=False), []
    start = model.weight.item()

    def loss_of(model, rows):
        assert model.weight.grad is None
        seen.append(rows)
        return 10 * model.weight.sum()

    hf.fit(model, [*range(41)], loss_of, 0.3, batch_size=4)
    assert [len(x) for x in seen] == [4] * 10 + [1] and sorted(sum(seen, [])) == [*range(41)]
    assert seen[0] != [0, 1, 2, 3] and model.weight.grad.item() == pytest.approx(1)  # not 10
    shares = [min((i + 1) / 5, 1 - i / 11) for i in range(11)]
    assert start - model.weight.item() == pytest.approx(0.3 * sum(shares))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [x[1] for x in printed] == ["1", "11"]
    assert float(printed[0][-1]) == pytest.approx(10 * start, abs=0.001)


def test_train_has_both_rates_groups_of_k_and_the_reference_of_the_first_call(monkeypatch):
    policy, rates = tiny_policy(), []

    def record(policy, optimizer, batch, config, loss):
        starts = batch["mask"].int().argmax(1).view(-1, 3)
        assert loss is rloo.loss and len(starts) == 4 and (starts == starts[:, :1]).all()
        body, head = optimizer.param_groups
        assert body["params"] == [*policy.model.parameters()] and "returns" not in batch
        assert head["params"] == [*policy.value_head.parameters()]
        rates.extend([body["lr"], head["lr"]])
        optimizer.step()
        stir(policy.model, 0.05)

    monkeypatch.setattr(hf, "ppo_update", record)
    algorithm = rloo.compute_advantages, rloo.loss
    for steps in (2, 1):
        config = rloo.Settings(4, k=3)
        log = hf.train(policy, PROMPTS, last_token, config, 1.0, 2.0, steps, 12, algorithm)
        assert (log[0]["kl_k3"] < 1e-6) == (steps == 2) and log[-1]["kl_k3"] > 0.01
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.8, 0.2, 0.4])


def test_the_example_learns_to_write_letters(monkeypatch, capsys):
    monkeypatch.setattr(hf, "train", partial(hf.train, steps=17, batch_size=32))
    first, *_, last = hf.main()
    assert last["score"] > first["score"] + 1 and last["kl"] > 1 and abs(first["kl"]) < 1e-3
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed] == ["1", "6", "11", "16", "17"]
    assert float(printed[-1][3]) == pytest.approx(last["score"], abs=0.01)
