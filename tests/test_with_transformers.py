"""examples/with_transformers.py against the models themselves. Needs transformers and peft."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import minippo
from tiny import marks, nan, stir, weights

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers

from examples import with_transformers as hf

PAD, EOS, BOS = 0, 1, 259
TOKENIZER = transformers.ByT5Tokenizer(extra_ids=0, bos_token="<s>")  # byte b is token b + 3
TOKENIZER.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
TALK = [{"role": "user", "content": "Hi"}]
ANSWER = {"role": "assistant", "content": "c"}
SIZES = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32, "sliding_window": 3}
SIZES |= {"max_position_embeddings": 64, "word_embed_proj_dim": 8, "pad_token_id": PAD}
TOKENS, MASK = torch.tensor([[100, 101, EOS], [100, 102, PAD]]), marks("xx", "x.")  # ab, ac


def tiny(kind="Llama", head="CausalLM", size=0.1, **more):
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    return stir(getattr(transformers, f"AutoModelFor{head}").from_config(config), size)


def classifier(**more):
    return tiny("GPT2", "SequenceClassification", **{"num_labels": 1} | more)


def length_of(completions, **_):
    return [len(text) for text in completions]


def run(model, prompts=("A bee", TALK), reward=length_of, steps=1):
    config = hf.Config(max_new_tokens=8, batch_size=8, steps=steps, lr=0.05)
    return hf.train(model, TOKENIZER, prompts, reward, config)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "Mistral", "OPT"])
def test_each_row_has_the_numbers_of_the_model_itself(kind, checkpoints, monkeypatch):
    model = tiny(kind, dropout=0.0)
    if checkpoints:
        model.gradient_checkpointing_enable()
    policy = hf.Policy(model, EOS)
    assert not policy.value_head.weight.any()
    stir(policy)
    monkeypatch.setattr(minippo, "draw", lambda logits: logits.argmax(1))
    tokens, mask = minippo.generate(policy, [[5, 6, 7], [8], [9] * 60], 8)
    passes = []
    layers = dict(model.named_modules())
    layer = next(layers[name] for name in layers if name.endswith(("0.mlp", "0.fc1")))
    layer.register_forward_pre_hook(lambda *_: passes.append(1))
    numbers = minippo.evaluate_actions(policy, tokens, mask)
    numbers[0].sum().backward()
    assert len(passes) == 1 + checkpoints
    for row, inside, *found in zip(tokens, mask, *numbers):
        end = inside.nonzero().max() + 1
        logits = model(row[None, : end + 1]).logits[0, :-1]
        values = policy.value_head(model.base_model(row[None, :end]).last_hidden_state[0])
        nats = minippo.gather_logprobs(logits, row[1 : end + 1])
        expected = torch.stack([nats, values.squeeze(1)]) * inside[:end]
        torch.testing.assert_close(torch.stack(found)[:, :end], expected)
        assert torch.equal(logits.argmax(1)[inside[:end]], row[1:][inside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_trains_the_adapter_alone_and_the_reference_is_the_model_without_it(dtype):
    adapter = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5)
    model = peft.get_peft_model(tiny().to(dtype), adapter)
    model.gradient_checkpointing_enable()
    before = {name: p.clone() for name, p in model.named_parameters()}
    log = run(model, steps=3)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora" in name}
    assert log[0]["kl"] == 0 and log[2]["kl_k3"] > 0.01


REFUSED = {
    "MambaModel": lambda: run(tiny("Mamba")),
    "RwkvModel": lambda: run(tiny("Rwkv")),
    "JambaModel": lambda: run(tiny("Jamba")),
    "Qwen3NextModel": lambda: run(tiny("Qwen3Next")),
    "BertModel": lambda: run(tiny("Bert")),
    "Gemma2Model": lambda: run(tiny("Gemma2", size=1)),
    "bfloat16": lambda: run(tiny().bfloat16()),
    "float32: set": lambda: run(tiny().requires_grad_(False)),
    "a list of prompts: 'A": lambda: run(tiny(), "A bee"),
    "a list of prompts: {": lambda: run(tiny(), {"prompt": ["A bee"]}),
    "answer": lambda: run(tiny(), [[*TALK, ANSWER]]),
    "padding .*0, 5": lambda: run(tiny(), [[PAD, 5]]),
    "padding .*5, 0": lambda: run(tiny(), [[5, PAD]]),
    "twice": lambda: run(tiny(), [[BOS, BOS, 5]]),
    "num_labels": lambda: run(tiny(), reward=classifier(num_labels=2)),
    "pad_token": lambda: run(tiny(), reward=classifier(pad_token_id=None)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_go_wrong_is_refused(words):
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


def test_prompts_become_ids_and_those_without_room_are_told(capsys):
    rows = ["Hi", TALK, [5, 6], {"prompt": "Hi"}, "", "Hello"]
    assert hf.encode(TOKENIZER, rows, 3) == [[75, 108], [75, 108, 61], [5, 6], [75, 108]]
    assert capsys.readouterr().out.startswith("2 prompts left out, the first is 5:")


def scores(reward, prompt="a"):
    rows = [{"prompt": prompt, "name": 1}, {"prompt": prompt, "name": 2}]
    prompts = hf.encode(TOKENIZER, rows, 9)
    return hf.text_scores(reward, TOKENIZER, prompts, TOKENS, MASK).tolist()


def test_a_reward_gets_the_row_of_each_prompt_and_may_seed_torch():
    given = {}

    def reward(**columns):
        given.update(columns)
        torch.manual_seed(1)
        yield from (1, 2.5)

    state = torch.get_rng_state()
    assert scores(reward) == [1, 2.5]
    assert torch.equal(torch.get_rng_state(), state)
    assert given.pop("completion_ids") == [[101, EOS], [102]]
    assert given == {"prompts": ["a", "a"], "completions": ["b", "c"], "name": [1, 2]}
    scores(reward, TALK)
    assert given["completions"][1] == [ANSWER]


RIGHT = (1, 2.5), torch.tensor([1, 2.5], requires_grad=True), [torch.tensor(True), 2.5]
WRONG = [None, 5.0, "12", {1: 1, 2: 2}, {1, 2}, [1], [1, 2, 3], [1, None], [1, "2"], [1, nan]]


@pytest.mark.parametrize("returned", [*RIGHT, *WRONG, torch.ones(2, 1), iter([1])])
def test_a_reward_is_one_finite_number_for_each_completion(returned):
    if any(returned is numbers for numbers in RIGHT):
        assert scores(lambda **_: returned) == [1, 2.5]
    else:
        with pytest.raises(ValueError, match="reward .*: ('b'|'c'|None)$"):
            scores(lambda **_: returned)


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_scores_of_a_classifier_are_its_own(pad):
    model = classifier(pad_token_id=pad)
    found = hf.classifier_scores(model.train(), TOKENS, MASK)
    alone = [model(TOKENS[:1]).logits[0, 0], model(TOKENS[1:, :2]).logits[0, 0]]
    torch.testing.assert_close(found, torch.stack(alone))


def test_scores_of_a_classifier_are_scaled_by_the_first_ones(monkeypatch):
    raw = iter([torch.arange(8.0), torch.full((8,), 10.0)])
    monkeypatch.setattr(hf, "classifier_scores", lambda *_: next(raw))
    stats = run(tiny(), reward=classifier())[0]
    expected = (10 - 3.5) / torch.arange(8.0).std() - (1 - stats["eos_rate"])
    assert stats["score"] == pytest.approx(expected.item())


def test_the_value_head_has_its_own_rate_and_starts_at_the_mean_score(monkeypatch):
    seen = []
    monkeypatch.setattr(minippo, "ppo_update", lambda *inputs: seen.extend(inputs))
    run(tiny(), reward=lambda completions, **_: [7.0] * len(completions))
    policy, optimizer, batch, _ = seen
    assert (batch["old_values"][batch["mask"]] == 7).all()
    body, head = optimizer.param_groups
    assert (body["lr"], head["lr"]) == (0.05, 3e-4)
    assert body["params"] == [*policy.model.parameters()]
    assert head["params"] == [*policy.value_head.parameters()]


def test_a_long_rope_ends_at_its_original_context():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    model = tiny("Phi3", rope_parameters=rope, original_max_position_embeddings=16)
    assert hf.Policy(model, EOS).config.context == 16


def test_the_demonstration_learns():
    first, *_, last = hf.demonstrate(steps=8)
    assert last["score"] > first["score"] + 0.7


def test_the_program_writes_what_transformers_and_the_next_run_read(tmp_path, monkeypatch):
    def program(flags):
        flags += " --data . --steps 2 --max_new_tokens 8 --batch_size 8 --lr 0.01"
        monkeypatch.setattr(sys, "argv", ["with_transformers.py", *flags.split()])
        runpy.run_module("examples.with_transformers", run_name="__main__")

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my.py").write_text("def score(completions, **_):\n    return map(len, completions)")
    Path("prompts_train.jsonl").write_text(json.dumps({"prompt": "A bee"}))
    for model, folder in (tiny(), "sft"), (classifier(), "rm"):
        model.save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
    program("--policy sft --reward_model rm --out ppo")
    program("--policy ppo --reward my:score --out lora --lora")
    kind = transformers.AutoModelForCausalLM
    sft, ppo, merged = [weights(kind.from_pretrained(name)) for name in ("sft", "ppo", "lora")]
    assert sft.shape == merged.shape and (sft != ppo).any() and (ppo != merged).any()
    refused = {
        "exists": "rm --out ppo",
        "score.weight": "ppo --out new",
        "vocabulary": "rm --out new",
    }
    for words, rest in refused.items():
        with pytest.raises(ValueError, match=words):
            program(f"--policy sft --reward_model {rest}")
        transformers.ByT5Tokenizer(extra_ids=0).save_pretrained("rm")
