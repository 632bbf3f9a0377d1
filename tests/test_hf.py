"""The specification of plumbing/hf.py."""

import json
import random

import pytest
import torch

from cli import CPU, run, write_data
from data import zoo
from data.files import UserError
from minippo import GPT, GPTConfig, RewardModel
from plumbing import hf
from plumbing.models import save_checkpoint
from plumbing.text import Tokenizer
from tiny import assert_equal, stir, weights

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


def test_an_imported_gpt2_gives_logits_and_ids_of_transformers(tmp_path):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(zoo.PROMPTS, vocab_size=320, show_progress=False)
    bpe.save_model(str(tmp_path))
    (tmp_path / "vocab.json").write_text(json.dumps(bpe.get_vocab() | {hf.END: 320}))
    config = GPT2Config(vocab_size=321, n_positions=48, n_embd=24, n_layer=3, n_head=2)
    theirs = stir(GPT2LMHeadModel(config), 0.05)
    theirs.save_pretrained(tmp_path)
    # The first GPT-2 has no "transformer." in its names, and its causal mask as a weight.
    old = load_file(path := tmp_path / "model.safetensors")
    file = {name.removeprefix("transformer."): x for name, x in old.items()}
    file["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    save_file(file, path, metadata={"format": "pt"})
    model, tokenizer = hf.read_gpt2(tmp_path)
    assert_same_logits(model, theirs)
    their_ids = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True).encode
    for text in [*TEXTS, *zoo.PROMPTS, *random_texts(0)]:
        assert tokenizer.encode(text) == their_ids(text)
    theirs.transformer.wte.weight.data *= 1e3
    theirs.bfloat16().save_pretrained(tmp_path)  # such a file is read in 32 bits
    assert_same_logits(hf.read_gpt2(tmp_path)[0], theirs.float())
    file["ln_f.bias"].fill_(torch.nan)
    save_file(file, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="its logits are nan off"):
        hf.read_gpt2(tmp_path)
    del file["h.0.mlp.c_fc.weight"]
    save_file(file, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="weights or tokens are missing"):
        hf.read_gpt2(tmp_path)


def exported(folder, kind):
    """-> a random model, its tokenizer, the folder to which it was exported"""
    tokenizer = Tokenizer.train([*zoo.PROMPTS, *TEXTS * 3], 400)
    model = stir(GPT(GPTConfig(400, 32, 2, heads=2, channels=16)), 0.2)
    if kind == "rm":
        model = stir(RewardModel(model), 0.1)
        model.mean.fill_(0.7), model.std.fill_(1.9)
    save_checkpoint(folder / f"{kind}.pt", kind, model, tokenizer)
    out = folder / "new" / "out"
    status, said, error = run("plumbing/hf.py", "export", folder / f"{kind}.pt", out)
    assert (status, error) == (0, "") and said.startswith(f"wrote {out}: GPT2")
    return model.eval(), tokenizer, out


def test_an_exported_policy_is_the_same_there_and_back(tmp_path):
    model, tokenizer, out = exported(tmp_path, "sft")
    theirs = GPT2LMHeadModel.from_pretrained(out)
    assert_same_logits(model, theirs)
    c = theirs.config
    assert c.resid_pdrop == c.embd_pdrop == c.attn_pdrop == 0
    assert c.bos_token_id == c.eos_token_id == 399
    again, same = hf.read_gpt2(str(out))
    assert same.tokens == tokenizer.tokens
    assert_equal(weights(again.trunk), weights(model.trunk))
    data = write_data(tmp_path / "data")
    with open(data / "sft_train.jsonl", "a") as file:  # a row longer than the context
        file.write(json.dumps({"prompt": "~" * 20, "completion": "~" * 20}) + "\n")
    flags = "--init", out, "--data", data, "--out", tmp_path / "run", "--steps", 1
    status, said, error = run("train_sft.py", *CPU, *flags)
    assert (status, error) == (0, "") and " 1 cut at the end of the context" in said


@pytest.mark.parametrize("seed", range(4))
def test_any_vocabulary_is_the_same_there_and_back(tmp_path, seed):
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
    prompts = [*TEXTS[:3], "Where do bees live?", "Wh"]
    answers = [" In a hive.", "", hf.END, TEXTS[1], "at"]
    rows = [[*ours.encode(x), *ours.encode(y), ours.eos] for x, y in zip(prompts, answers)]
    scores = [scorer(torch.tensor([row]), torch.tensor([len(row)])) for row in rows]
    assert max(scores) - min(scores) > 0.1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    theirs, c = AutoTokenizer.from_pretrained(out), model.config
    logits = model(**theirs(prompts, answers, padding=True, return_tensors="pt")).logits
    assert_equal(logits, torch.stack(scores), 1e-4)
    assert c.problem_type == "regression"  # the score, not its sigmoid
    assert c.pad_token_id == theirs.pad_token_id == 400
    assert theirs(TEXTS)["input_ids"] == [[*ours.encode(text), ours.eos] for text in TEXTS]
    assert theirs(TEXTS[0] * 9, truncation=True)["input_ids"][31:] == [ours.eos]


SPLIT = "splits text differently"
BROKEN = [  # what is changed in an exported policy, and what is said of it
    ("config", {"activation_function": "relu"}, "its logits are"),
    ("config", {"vocab_size": 401}, "tokens are missing"),
    ("tokenizer", {"model": {"merges": []}}, SPLIT),
    ("tokenizer", {"pre_tokenizer": {"add_prefix_space": True}}, SPLIT),
    ("tokenizer", {"normalizer": {"type": "NFC"}}, SPLIT),
]


@pytest.mark.parametrize("name, changes, says", BROKEN)
def test_what_is_no_gpt2_is_refused(tmp_path, name, changes, says):
    _, _, out = exported(tmp_path, "ppo")
    file = json.loads((out / f"{name}.json").read_text())
    for key, x in changes.items():
        file[key] = (file[key] or {}) | x if isinstance(x, dict) else x
    (out / f"{name}.json").write_text(json.dumps(file))
    if name == "config":  # with weights of this size
        stir(GPT2LMHeadModel(GPT2Config.from_pretrained(out))).save_pretrained(out)
    with pytest.raises(UserError, match=f"could not be read .*{says}.* give gpt2"):
        hf.read_gpt2(out)


def test_what_holds_no_policy_is_refused(tmp_path):
    _, _, out = exported(tmp_path, "rm")
    with pytest.raises(UserError, match="the last token should be <.endoftext"):
        hf.read_gpt2(out)
    with pytest.raises(UserError, match="could not be read .* give gpt2"):
        hf.read_gpt2(tmp_path)
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
