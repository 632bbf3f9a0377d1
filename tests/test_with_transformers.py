"""The specification of examples/with_transformers.py (needs transformers; peft for LoRA)."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import minippo
from minippo import PPOConfig, evaluate_actions, row_lengths
from tiny import gradient, nan, stir

pytest.importorskip("transformers")
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from examples import with_transformers as hf

EOS = 63  # of the tiny models
SHAPE = {"vocab_size": EOS + 1, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": EOS}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
SHAPE |= {"head_dim": 8, "intermediate_size": 32, "word_embed_proj_dim": 8, "pad_token_id": None}
SHAPE |= {"resid_pdrop": 0.5, "attention_dropout": 0.5, "dropout": 0.0, "sliding_window": 3}
KINDS = "GPT2", "Mistral", "OPT"  # learned positions; a short memory; a head narrower than the body
PROMPTS = [[1, 2, 3], [4], [5, 6], [7] * 6]
ROWS, PAIRS = [([1, 2], [3, 4, EOS]), ([5], [6])], [([1], [2], [3, 4]), ([5], [6], [7])]
IDS = SimpleNamespace(eos_token_id=EOS, bos_token_id=None, decode=lambda ids, **_: str(ids))


def tiny(kind="Llama", head="CausalLM", size=0.1, **more):
    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    return stir(getattr(transformers, f"AutoModelFor{head}").from_config(config), size)


def tiny_policy(kind="Llama", bfloat16=False):
    return stir(hf.Policy(tiny(kind), IDS, bfloat16), 0.1)


def classifier(kind="Llama", labels=1):
    return tiny(kind, "SequenceClassification", num_labels=labels)


def lora(base, **more):
    peft = pytest.importorskip("peft")
    more |= {"target_modules": "all-linear", "lora_dropout": 0.5}
    return peft.get_peft_model(base, peft.LoraConfig(**more))


def last_token(tokens, mask):
    return tokens.gather(1, row_lengths(mask)[:, None] - 1).squeeze(1) / 20


# The model, its reference


def alone(policy, tokens, mask, temperature):
    """log pi, values, and which tokens are the likeliest, by the model itself and without padding
    or other rows."""
    rows = []
    for row, inside, length in zip(tokens, mask, row_lengths(mask)):
        logits = policy.model(row[None, :length]).logits[0, :-1]
        nats = minippo.gather_logprobs(logits, row[1:length], temperature)
        hidden = policy.model.base_model(row[None, : length - 1]).last_hidden_state[0]
        likeliest = logits.argmax(1) == row[1:length]
        numbers = torch.stack([nats, policy.value_head(hidden).squeeze(1), likeliest])
        rows.append(F.pad(numbers, (0, len(inside) - length + 1)) * inside)
    return torch.stack(rows, 1).tensor_split([2])


@pytest.mark.parametrize("bfloat16, checkpoints", [(False, True), (True, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_the_numbers_of_each_row_alone(kind, bfloat16, checkpoints, monkeypatch):
    def check(x, expected):
        off = (x - expected).norm() / expected.norm()
        assert 1e-4 < off < 0.1 if bfloat16 else (x - expected).abs().max() < 1e-4

    policy, calls = tiny_policy(kind, bfloat16).train(), []
    if checkpoints:
        policy.model.gradient_checkpointing_enable()
    monkeypatch.setattr(minippo, "draw", lambda logits: logits.argmax(1))
    tokens, mask, *old = hf.sample(policy, [*PROMPTS, [8] * 60], 8, 0.7)
    assert tokens.shape[1] == 64  # the context
    for name, layer in policy.model.named_modules():
        if name.endswith(("0.mlp", "0.fc1")):
            layer.register_forward_pre_hook(lambda *_: calls.append(0))
    numbers = torch.stack(evaluate_actions(policy.train(), tokens, mask, 0.7)[:2])
    weights = torch.randn_like(numbers)
    grad = gradient((weights * numbers).sum(), policy)
    assert torch.equal(torch.stack(old), numbers) and len(calls) == (2 if checkpoints else 1)
    expected, (likeliest,) = alone(policy, tokens, mask, 0.7)
    check(numbers, expected), check(grad, gradient((weights * expected).sum(), policy))
    assert bfloat16 or likeliest[mask].all()


@pytest.mark.parametrize("dtype, saved", [("float32", ["lm_head"]), ("bfloat16", None)])
def test_lora_trains_an_adapter_that_the_reference_lacks(dtype, saved, monkeypatch):
    base = tiny(tie_word_embeddings=False).to(getattr(torch, dtype))
    plain = hf.Policy(minippo.frozen_copy(base), IDS)
    policy, draw, drawn = hf.Policy(lora(base, modules_to_save=saved), IDS), minippo.draw, set()
    monkeypatch.setattr(minippo, "draw", lambda x: drawn.add(x.dtype) or draw(x))
    before = {name: x.clone() for name, x in policy.model.named_parameters()}
    run = partial(hf.train, policy, PROMPTS, last_token, PPOConfig(8), 0.05, 0.1, batch_size=16)
    log = run(steps=3)
    assert log[0]["kl"] == 0 and log[2]["kl_k3"] > 0.05 and drawn == {torch.float32}
    after = dict(policy.model.named_parameters())
    moved = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert moved == {x for x in before if "lora" in x or "modules_to_save" in x}
    tokens, mask, logprobs, _ = hf.sample(policy, PROMPTS, 8)
    ref, expected = (evaluate_actions(x, tokens, mask)[0] for x in (policy.reference, plain))
    torch.testing.assert_close(ref, expected)
    assert (logprobs - expected).abs().max() > 0.1
    policy.reference = None
    with pytest.raises(ValueError, match="the adapter is not new"):
        run(steps=1)


# Refusals


def run(model, bfloat16=True):
    policy, config = hf.Policy(model, IDS, bfloat16), PPOConfig(8)
    return hf.train(policy, PROMPTS, last_token, config, 0.1, 0.1, steps=1, batch_size=4)


def sft(model):
    hf.fit(hf.Policy(model, IDS), ROWS, hf.sft_loss, 0.1)


def rewarded(scores):
    tokens, mask, *_ = hf.sample(tiny_policy(), PROMPTS[:2], 4)
    hf.text_score(IDS, PROMPTS, lambda *_: scores)(tokens, mask)


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model


def times(factor):
    """A model whose last hidden states are multiplied by factor(x)."""
    model = tiny()
    model.model.norm.register_forward_hook(lambda _, __, x: x * factor(x))
    return model


REFUSED = [
    ("capped", lambda: run(tiny("Gemma2", size=0.5))),
    ("dropout", lambda: run(checkpointed(tiny("OPT", dropout=0.5)))),
    ("capped", lambda: sft(tiny("Gemma2", size=0.5))),
    ("nan nats off", lambda: run(times(lambda x: nan if x.requires_grad else 1))),
    ("log pi is 0.0", lambda: run(times(lambda x: 1 + 0.1 * (x.shape[1] == 1)), False)),
    ("16 bits", lambda: run(tiny().bfloat16())),
    ("no weight is trainable", lambda: run(tiny().requires_grad_(False))),
    ("the reference is trained", lambda: run(lora(tiny("GPT2"), bias="all"))),
    ("end token", lambda: hf.Policy(tiny(), SimpleNamespace(eos_token_id=None))),
    ("twice", lambda: hf.encode(SimpleNamespace(bos_token_id=5), [5, 5, 6])),
    ("num_labels=1", lambda: hf.classifier_score(classifier(labels=2))),
    ("the shape", lambda: rewarded([1.0])),
    ("the shape", lambda: rewarded([[1.0], [2.0]])),
]


@pytest.mark.parametrize("why, do", REFUSED)
def test_what_would_go_wrong_in_silence_is_refused(why, do):
    with pytest.raises(ValueError, match=why):
        do()


def test_rounding_is_not_refused():
    run(tiny(size=0.5)), run(lora(checkpointed(tiny().bfloat16())), bfloat16=False)
    sft(tiny())


def test_values_start_at_zero_and_other_ends_are_told(capsys):
    for ends in (EOS, [EOS], None, [EOS, 7]):
        model = tiny()
        model.generation_config.eos_token_id = ends
        assert not hf.Policy(model, IDS).value_head.weight.any()
    printed = capsys.readouterr().out
    assert "not all of [63, 7]" in printed and printed.count("only 63") == 1


# Texts and scores


@pytest.mark.parametrize("template", ["<s> $A", "$A </s>"])
def test_texts_become_ids_and_back(template):
    words = "<unk> <s> </s> <think> ▁Bees ▁meat meat | ▁| ▁ a ▁a . |. ▁. :".split()
    core = Tokenizer(models.Unigram([(x, -len(words) + i / 9) for i, x in enumerate(words)], 0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = [("<s>", 1), ("</s>", 2)]
    core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<think>"],
        clean_up_tokenization_spaces=True,
        chat_template="{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}",
    )
    start = [1] * ("<s>" in template)
    prompts = ["Bees", "Bees</s>", [{"role": "user", "content": "Bees"}], [5, 4]]
    ids = [*start, 4], [*start, 4, 2], [4, 15], [5, 4]  # that end is meant
    texts, seen = ["meat", " meat", ".", " .", "meat<think>", "meat</s>"], []
    rows = hf.encode_rows(tokenizer, [(x, *texts) for x in prompts])
    assert rows == [(x, [6, 2], [5, 2], [12, 2], [14, 2], [6, 3, 2], [6, 2]) for x in ids]

    batch = hf.pad([(a, b) for a, *more in rows for b in more], "cpu")
    score = hf.text_score(tokenizer, prompts, lambda *x: seen.extend(x) or torch.arange(24))
    scores = score(*batch)
    assert seen[0] == [x for x in prompts for _ in texts]
    assert seen[1] == [x.removesuffix("</s>") for x in texts] * 4
    assert scores.is_floating_point() and scores.tolist() == [*range(24)]


def test_a_score_is_that_of_the_row_alone():
    model = classifier("GPT2").train()
    tokens, mask, *_ = hf.sample(tiny_policy(), PROMPTS * 10, 8)
    scores = hf.classifier_score(model)(tokens, mask)
    assert scores.shape == (40,) and scores.std() > 0.01
    for i, length in enumerate(row_lengths(mask).tolist()):
        torch.testing.assert_close(scores[i], model.eval()(tokens[i : i + 1, :length]).logits[0, 0])


# The three stages


def test_losses_are_those_of_transformers_and_bradley_and_terry():
    labels = torch.tensor([[-100, -100, 3, 4, EOS], [-100, 6, -100, -100, -100]])
    policy = hf.Policy(tiny(), IDS)
    loss = hf.sft_loss(policy, ROWS)
    torch.testing.assert_close(loss, policy.model(hf.pad(ROWS, "cpu")[0], labels=labels).loss)
    model, rows = classifier(), [(a, b) for a, *more in PAIRS for b in more]
    a, b, c, d = hf.classifier_score(model)(*hf.pad(rows, "cpu"))
    expected = -(F.logsigmoid(a - b) + F.logsigmoid(c - d)) / 2
    torch.testing.assert_close(hf.rm_loss(model, PAIRS), expected)


def test_fit_takes_a_step_for_each_random_batch(capsys):
    model, seen = classifier(), []
    start, rows = model.score.weight.detach().clone(), [([1], [i]) for i in range(41)]

    def loss_of(model, rows):
        assert model.score.weight.grad is None
        seen.append([row[1][0] for row in rows])
        return 10 * model.score.weight.sum()

    hf.fit(model, rows, loss_of, 0.3, batch_size=4)
    assert [len(x) for x in seen] == [4] * 10 + [1] and sorted(sum(seen, [])) == [*range(41)]
    assert seen[0] != [0, 1, 2, 3] and model.score.weight.grad.norm() == pytest.approx(1)  # not 40
    shares = [min((i + 1) / 5, 1 - i / 11) for i in range(11)]
    torch.testing.assert_close(start - model.score.weight, torch.full((1, 16), 0.3 * sum(shares)))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [x[1] for x in printed] == ["1", "11"]
    assert float(printed[0][-1]) == pytest.approx(10 * start.sum().item(), abs=0.001)


def test_train_calls_the_four_phases_in_a_loop(monkeypatch, capsys):
    policy, rates, texts = tiny_policy(), [], []

    def record(policy, optimizer, batch, config):
        starts = batch["mask"].int().argmax(1).view(-1, 3)
        assert len(starts) == 4 and (starts == starts[:, :1]).all() and "returns" in batch
        assert abs(batch["old_values"][batch["mask"]].mean() - 1000) < 3
        body, head = optimizer.param_groups
        assert body["params"] == [*policy.model.parameters()]
        assert head["params"] == [*policy.value_head.parameters()]
        rates.extend([body["lr"], head["lr"]])
        texts.append(str(batch["tokens"][0, : row_lengths(batch["mask"])[0]]))
        optimizer.step()
        stir(policy.model, 0.05)

    def score(*x):
        return 1000 + last_token(*x)

    monkeypatch.setattr(minippo, "ppo_update", record)
    for steps in (2, 1):
        log = hf.train(policy, PROMPTS, score, PPOConfig(4, k=3), 1.0, 2.0, steps, 12)
        assert (log[0]["kl_k3"] < 1e-6) == (steps == 2) and log[-1]["kl_k3"] > 0.01
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.8, 0.2, 0.4])
    printed = capsys.readouterr().out
    assert 0.1 < float(re.search("standard deviation ([^;]+);", printed)[1]) < 3
    assert re.findall("iteration .*?'(.*)'", printed) == texts


def test_the_example_learns_to_write_capitals(monkeypatch, capsys):
    monkeypatch.setattr(hf, "train", partial(hf.train, steps=17, batch_size=32))
    first, *_, last = hf.main()
    assert last["score"] > first["score"] + 1 and last["kl"] > 1 and abs(first["kl"]) < 1e-3
    printed = re.findall(r"iteration (\d+)  score (\S+)", capsys.readouterr().out)
    assert [step for step, _ in printed] == ["1", "6", "11", "16", "17"]
    assert float(printed[-1][1]) == pytest.approx(last["score"], abs=0.01)
