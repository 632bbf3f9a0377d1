"""The specification of plumbing/hf.py. Run: python -m pytest tests/test_hf.py"""

import json
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from cli import CPU, run, write_data
from data import zoo
from data.files import UserError
from minippo import GPT, GPTConfig, RewardModel
from plumbing import hf
from plumbing.models import load_checkpoint, save_checkpoint
from plumbing.text import Tokenizer
from tiny import assert_equal, stir

pytest.importorskip("transformers")
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

TEXTS = ["What does a bee eat?", " A bee eats nectar. Enjoy your visit!", "a<|endoftext|> <|pad|>"]
TEXTS += ["naïve ﬁ 日本語 🐝\n\n  x\t'll 12 , it 's .", ""]


def random_texts(seed):
    draw, letters = random.Random(seed), "aabbc dé日🐝  \n\t'lls12,."
    return ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(60)]


@torch.no_grad()
def assert_same_logits(model, theirs):
    tokens = torch.randint(model.config.vocab_size, (3, model.config.context))
    assert_equal(model.eval()(tokens)[0], theirs.eval()(tokens).logits, 1e-4)


def edit(path, **changes):
    """Change what a JSON file holds."""
    file = json.loads(path.read_text())
    for name, x in changes.items():
        file[name] = (file[name] or {}) | x if isinstance(x, dict) else x
    path.write_text(json.dumps(file))


def test_an_imported_gpt2_gives_the_logits_and_ids_of_transformers(tmp_path):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(zoo.PROMPTS, vocab_size=320, show_progress=False)
    bpe.save_model(str(tmp_path))
    (tmp_path / "vocab.json").write_text(json.dumps(bpe.get_vocab() | {hf.END: 320}))
    config = GPT2Config(vocab_size=321, n_positions=48, n_embd=24, n_layer=3, n_head=2, n_inner=96)
    theirs = stir(GPT2LMHeadModel(config), 0.05)
    theirs.save_pretrained(tmp_path)
    # As the first GPT-2: no "transformer." in the names, the causal mask as a weight.
    old = load_file(path := tmp_path / "model.safetensors")
    file = {"h.0.attn.bias": torch.ones(1, 1, 48, 48), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    file |= {name.removeprefix("transformer."): x for name, x in old.items()}
    save_file(file, path, metadata={"format": "pt"})
    model, tokenizer = hf.read_gpt2(tmp_path)
    assert model.training and not model.config.bfloat16
    half, tokens = hf.read_gpt2(tmp_path, True)[0], torch.arange(9)[None]
    assert half.trunk.config.bfloat16 and not torch.equal(half(tokens)[0], model(tokens)[0])
    assert_same_logits(model, theirs)
    their_ids = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True).encode
    for text in [*TEXTS, *zoo.PROMPTS, *random_texts(0)]:
        assert tokenizer.encode(text) == their_ids(text)


def exported(folder, kind):
    """A checkpoint with random weights and its export -> model, tokenizer, folder of the export."""
    tokenizer = Tokenizer.train([*zoo.PROMPTS, *TEXTS * 3], 400)
    model = stir(GPT(GPTConfig(400, 32, 2, heads=2, channels=16)), 0.2)
    if kind == "rm":
        model = stir(RewardModel(model), 0.1)
        model.mean.fill_(0.7), model.std.fill_(1.9)
    save_checkpoint(folder / f"{kind}.pt", kind, model, tokenizer)
    out = folder / "new" / "out"
    done = run("plumbing/hf.py", "export", folder / f"{kind}.pt", out)
    name = "GPT2ForSequenceClassification" if kind == "rm" else "GPT2LMHeadModel"
    assert done == (0, f"wrote {out}: {name}\n", "")
    return model.eval(), tokenizer, out


def test_an_exported_policy_gives_the_same_logits_and_can_be_read_again(tmp_path):
    model, tokenizer, out = exported(tmp_path, "sft")
    theirs = GPT2LMHeadModel.from_pretrained(out)
    assert_same_logits(model, theirs)
    c = theirs.config
    assert (c.resid_pdrop, c.embd_pdrop, c.attn_pdrop, c.n_positions) == (0.0, 0.0, 0.0, 32)
    assert c.bos_token_id == c.eos_token_id == theirs.generation_config.eos_token_id == 399
    again, same = hf.read_gpt2(str(out))
    assert same.tokens == tokenizer.tokens
    for a, b in zip(again.trunk.parameters(), model.trunk.parameters(), strict=True):
        assert torch.equal(a, b)
    given = "--data", write_data(tmp_path / "data"), "--out", tmp_path / "run", "--init", out
    with open(tmp_path / "data" / "sft_train.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "~" * 20, "completion": "~" * 20}) + "\n")
    status, said, error = run("train_sft.py", *CPU, *given, "--steps", 1)
    assert (status, error) == (0, "") and " 1 cut at the end of the context" in said
    assert load_checkpoint(tmp_path / "run" / "sft.pt", ["sft"])[0].config.context == 32
    words = [*TEXTS[:2], "--max_new_tokens", 9, "--n", 3]
    assert run("sample.py", out, *words) == run("sample.py", tmp_path / "sft.pt", *words)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_vocabulary_gives_the_same_ids_and_comes_back(tmp_path, seed):
    tokenizer = Tokenizer.train(random_texts(seed), 257 + 30 * seed)
    hf.write_tokenizer(tokenizer, tmp_path, 99, scorer=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "we've they're I'd I'm don't", *random_texts(seed), *random_texts(-1)]:
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos and theirs.model_max_length == 99
    assert hf.read_vocabulary(theirs).tokens == tokenizer.tokens


@torch.no_grad()
def test_an_exported_reward_model_gives_our_scores_of_texts(tmp_path):
    scorer, ours, out = exported(tmp_path, "rm")
    prompts = [*TEXTS[:3], "Where do bees live?", "a"]
    answers = [" In a hive.", "", hf.END, TEXTS[1], "b"]
    rows = [[*ours.encode(x), *ours.encode(y), ours.eos] for x, y in zip(prompts, answers)]
    scores = [scorer(torch.tensor([row]), torch.tensor([len(row)])) for row in rows]
    assert max(scores) - min(scores) > 0.1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    theirs, c = AutoTokenizer.from_pretrained(out), model.config
    logits = model(**theirs(prompts, answers, padding=True, return_tensors="pt")).logits
    assert_equal(logits, torch.stack(scores), 1e-4)
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=theirs)
    (out,) = pipeline([{"text": prompts[0], "text_pair": answers[0]}])
    assert out["score"] == pytest.approx(scores[0].item(), abs=1e-4)  # no sigmoid
    assert c.pad_token_id == theirs.pad_token_id == 400
    assert theirs(TEXTS)["input_ids"] == [[*ours.encode(text), ours.eos] for text in TEXTS]
    assert theirs("Wh", "at")["input_ids"] == [*ours.encode("Wh"), *ours.encode("at"), ours.eos]
    assert theirs(TEXTS[0] * 9, truncation=True)["input_ids"][31:] == [ours.eos]
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.unk_token_id == ours.eos


LOGITS, SPLITS = (
    "0 weights are missing, 400 tokens, logits ",
    "splits text differently from GPT-2's",
)
BROKEN = [  # what is changed in an exported policy, and what is said of it
    ({"activation_function": "relu"}, LOGITS),
    ({"scale_attn_by_inverse_layer_idx": True}, LOGITS),
    ({"tie_word_embeddings": False}, "1 weights are missing"),
    ({"n_inner": 48}, "could not be read ("),
    ({"vocab_size": 401}, "400 tokens, logits"),
    ({"model": {"merges": []}}, SPLITS),
    ({"pre_tokenizer": {"add_prefix_space": True}}, SPLITS),
    ({"normalizer": {"type": "NFC"}}, SPLITS),
]


@pytest.mark.parametrize("changes, says", BROKEN)
def test_what_is_no_gpt2_is_refused_in_a_sentence(tmp_path, changes, says):
    _, _, out = exported(tmp_path, "ppo")
    kind = "tokenizer" if changes.keys() & {"model", "pre_tokenizer", "normalizer"} else "config"
    edit(out / f"{kind}.json", **changes)
    if changes.keys() & {"n_inner", "vocab_size"}:  # with weights of this size
        GPT2LMHeadModel(GPT2Config.from_pretrained(out)).save_pretrained(out)
    with pytest.raises(UserError) as error:
        hf.read_gpt2(out)
    said = str(error.value)
    assert said.startswith(f"{out}: ") and "\n" not in said and len(said) < len(str(out)) + 400
    assert says in said, said


def test_a_missing_weight_and_two_words_of_the_same_bytes_are_refused(tmp_path):
    _, _, out = exported(tmp_path, "ppo")
    file = load_file(path := out / "model.safetensors")
    del file["transformer.h.0.mlp.c_fc.weight"]
    save_file(file, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="1 weights are missing"):
        hf.read_gpt2(out)
    words = ["日", *(hf.CHARACTERS[byte] for byte in range(256)), hf.END]
    theirs = SimpleNamespace(get_vocab=lambda: {x: i for i, x in enumerate(words)})
    theirs.encode = lambda text, **_: [1 + byte for byte in text.encode()]
    with pytest.raises(ValueError, match="splits text differently"):
        hf.read_vocabulary(theirs)


def test_other_folders_are_refused_and_full_ones_overwritten_on_request_alone(
    tmp_path, monkeypatch
):
    _, _, out = exported(tmp_path, "rm")
    words = "plumbing/hf.py", "export", tmp_path / "rm.pt", out
    assert "is not empty; give another folder, or --overwrite" in run(*words)[2]
    assert run(*words, "--overwrite")[0] == 0
    with pytest.raises(UserError, match="should be a GPT-2"):
        hf.read_gpt2(out)
    with pytest.raises(UserError, match="without a network, give a folder with config.json"):
        hf.read_gpt2(tmp_path)
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        hf.read_gpt2("gpt2")
