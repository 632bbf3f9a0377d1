"""examples/with_transformers.py against the models themselves. Needs peft."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

import minippo
from tiny import marks, nan, stir, weights

pytest.importorskip("peft")
import peft
import transformers

from examples import with_transformers as hf

PAD, EOS, BOS = 0, 1, 259
TOKENIZER = transformers.ByT5Tokenizer(extra_ids=0, bos_token="<s>")
TOKENIZER.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
TALK = [{"role": "user", "content": "Hi"}]
ANSWER = {"role": "assistant", "content": "c"}
SIZES = {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 32, "sliding_window": 3}
SIZES |= {
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 8,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}


def tiny(kind="Llama", head="CausalLM", size=0.1, **more):
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    return stir(getattr(transformers, f"AutoModelFor{head}").from_config(config), size)


def classifier(labels=1, **more):
    return tiny("GPT2", "SequenceClassification", num_labels=labels, **more)


def length_of(completions, **_):
    return [len(text) for text in completions]


def run(model, reward=length_of, prompt="A bee", steps=1):
    config = hf.Config(max_new_tokens=8, batch_size=8, steps=steps, lr=0.05)
    return hf.train(model, TOKENIZER, [{"prompt": prompt}], reward, config)


@pytest.mark.parametrize("kind", ["GPT2", "Mistral", "OPT"])
def test_pieces_have_the_numbers_of_the_model(kind):
    pieces = []

    def score(prompts, tokens, mask):
        pieces.append(prompts)
        return mask.sum(1)

    policy = stir(hf.Policy(tiny(kind, use_cache=False), EOS))
    config = hf.Config(max_new_tokens=8, batch_size=30, sample_batch=4, missing_eos_penalty=0)
    batch = hf.rollout(policy, policy, score, [[5] * n for n in range(1, 60)], config)
    assert all(len(piece) <= 4 and len(piece[-1]) - len(piece[0]) < 8 for piece in pieces)
    assert len(pieces) < 20 and len(pieces[-1][-1]) > 30 and len(batch["ended"]) == 30
    tokens, mask = batch["tokens"], batch["mask"]
    logprobs = minippo.gather_logprobs(policy.model(tokens).logits[:, :-1], tokens[:, 1:])
    values = policy.value_head(policy.model.base_model(tokens).last_hidden_state)[:, :-1, 0]
    torch.testing.assert_close(batch["old_logprobs"], logprobs * mask)
    torch.testing.assert_close(batch["old_values"], values * mask)
    assert torch.equal(batch["scores"], mask.sum(1))


def test_lora_trains_in_16_bits():
    adapter = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5)
    log = run(peft.get_peft_model(tiny().bfloat16(), adapter), steps=3)
    assert log[0]["kl"] == 0 and log[2]["kl_k3"] > 0.01


def test_what_would_go_wrong_is_refused():
    def refuses(words, *args):
        with pytest.raises(ValueError, match=words):
            run(*args)

    for kind in ("Mamba", "Jamba"):
        refuses(f"attention: {kind}", tiny(kind))
    refuses("log pi", tiny("Bert"))
    refuses("log pi", tiny("Gemma2", size=1))
    refuses("float32", tiny().bfloat16())
    refuses("float32", tiny().requires_grad_(False))
    refuses("num_labels", tiny(), classifier(2))
    refuses("pad_token", tiny(), classifier(pad_token_id=None))
    refuses("no prompt is left", tiny(), length_of, "")
    equal = classifier()
    torch.nn.init.zeros_(equal.score.weight)
    refuses("do not differ", tiny(), equal)
    chat = tiny()
    for ends in (5, [5, 6]):
        chat.generation_config.eos_token_id = ends
        refuses("the model with", chat)
    with pytest.raises(ValueError, match="no end token"):
        hf.train(tiny(), SimpleNamespace(eos_token_id=None), [], length_of, hf.Config())
    for prompt in ([*TALK, ANSWER], [5, PAD], [5, EOS, EOS], [EOS, EOS, 5], [BOS, BOS, 5]):
        refuses("a prompt", tiny(), length_of, prompt)


def test_prompts_without_room_are_told(capsys):
    rows = [{"prompt": prompt} for prompt in ("Hi", TALK, [EOS], [], "Hello")]
    assert hf.encode(TOKENIZER, rows, 3) == [[75, 108], [75, 108, 61], [EOS]]
    assert capsys.readouterr().out == "2 prompts are empty or above 3 tokens, first 4\n"


TOKENS = torch.tensor([[100, 101, EOS], [100, 102, PAD]])  # ab, ac
MASK = marks("xx", "x.")


def scores(reward):
    prompts = hf.encode(TOKENIZER, [{"prompt": "a"}, {"prompt": "a", "name": 2}], 9)
    return hf.text_scores(reward, TOKENIZER, prompts, TOKENS, MASK).tolist()


def test_a_reward_gets_the_rows_and_may_seed_torch():
    given = {}

    def reward(**columns):
        given.update(columns)
        torch.manual_seed(1)
        return torch.tensor([1, 2.5], requires_grad=True)

    state = torch.get_rng_state()
    assert scores(reward) == [1, 2.5]
    assert torch.equal(torch.get_rng_state(), state)
    assert given.pop("completion_ids") == [[101, EOS], [102]]
    assert given == {"prompts": ["a", "a"], "completions": ["b", "c"], "name": [None, 2]}
    rows = [{"prompt": "a"}, {"prompt": TALK}]
    hf.text_scores(reward, TOKENIZER, hf.encode(TOKENIZER, rows, 9), TOKENS, MASK)
    assert given["completions"] == ["b", [ANSWER]]


@pytest.mark.parametrize("numbers", [5.0, "12", {1: 1, 2: 2}, [1], [1, nan], torch.ones(2, 1)])
def test_a_reward_is_one_finite_number_per_completion(numbers):
    with pytest.raises((TypeError, ValueError)):
        scores(lambda **_: numbers)


def test_scores_of_a_classifier_are_its_own():
    model = classifier(pad_token_id=EOS)
    found = hf.classifier_scores(model.train(), TOKENS, MASK)
    alone = [model(TOKENS[:1]).logits[0, 0], model(TOKENS[1:, :2]).logits[0, 0]]
    torch.testing.assert_close(found, torch.stack(alone))


def test_the_first_scores_set_the_scale_and_the_values(monkeypatch):
    inputs = []
    monkeypatch.setattr(minippo, "ppo_update", lambda *args: inputs.extend(args))
    raw = iter([torch.arange(8.0), torch.full((8,), 10.0)])
    monkeypatch.setattr(hf, "classifier_scores", lambda *_: next(raw))
    run(tiny(), classifier())
    run(tiny(), lambda **_: [7.0] * 8)
    _, optimizer, batch, _, _, _, other, _ = inputs
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 3e-4]
    scores = 6.5 / torch.arange(8.0).std() - 1.0 * ~batch["ended"]
    torch.testing.assert_close(batch["scores"], scores)
    assert not batch["old_values"].any()
    assert (other["old_values"][other["mask"]] == 7).all()


def test_the_demonstration_learns():
    first, *_, last = hf.demo(steps=10)
    assert last["score"] > first["score"] + 1.5


def test_the_program_writes_what_the_next_run_reads(tmp_path, monkeypatch):
    def program(flags):
        flags += " --data . --steps 2 --max_new_tokens 8 --batch_size 8 --lr 0.01"
        monkeypatch.setattr(sys, "argv", flags.split())
        runpy.run_module("examples.with_transformers", run_name="__main__")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts_train.jsonl").write_text('\ufeff{"prompt": "A bee"}\n\n')
    for model, folder in (tiny(), "sft"), (classifier(), "rm"):
        model.save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
    program("x --policy sft --reward_model rm --out ppo")
    program(f"x --policy ppo --reward {__name__}:length_of --out lora --lora")
    read = transformers.AutoModelForCausalLM.from_pretrained
    sft, ppo, lora = [weights(read(name)) for name in ("sft", "ppo", "lora")]
    assert sft.shape == lora.shape and (sft != ppo).any() and (ppo != lora).any()
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained("rm")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    refused = {
        "not empty": "rm --out ppo",
        "adapter": "adapter --out b",
        "score.weight": "ppo --out b",
        "vocab": "rm --out b",
    }
    for words, rest in refused.items():
        with pytest.raises(ValueError, match=words):
            program(f"x --policy sft --reward_model {rest}")
