"""The specification of plumbing/hf.py. Run: python -m pytest tests/test_hf.py (needs transformers; .ci/run installs it)"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import zoo
from minippo import GPT, GPTConfig, RewardModel
from plumbing import hf
from plumbing.checkpoints import save_checkpoint
from plumbing.settings import UserError
from plumbing.text import Tokenizer
from tiny import stir

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("transformers")
import transformers
from tokenizers import ByteLevelBPETokenizer

TEXTS = ["What does a bee eat?", " A bee eats nectar. Enjoy your visit!", "naïve ﬁ 日本語 🐝\n\n  x\t'll 12", "<|endoftext|>", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([*zoo.PROMPTS, *TEXTS * 3], 400)


@pytest.fixture
def folder(tmp_path):
    """A GPT-2 with random weights and a vocabulary that transformers' own tools have trained, in their format."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(zoo.PROMPTS, vocab_size=320, show_progress=False)
    bpe.save_model(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {hf.END: len(vocabulary)}))
    config = transformers.GPT2Config(vocab_size=len(vocabulary) + 1, n_positions=48, n_embd=24, n_layer=3, n_head=2)
    stir(transformers.GPT2LMHeadModel(config), 0.05).save_pretrained(tmp_path)
    return tmp_path


def test_gpt2_read_from_a_folder_gives_the_logits_and_the_ids_of_transformers(folder):
    model, ours = hf.read_gpt2(str(folder))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = torch.randint(model.config.vocab_size, (3, 48))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens)[0], theirs(tokens).logits, rtol=0, atol=1e-4)
    their_ids = ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for text in [*TEXTS[:3], *zoo.PROMPTS]:
        assert ours.encode(text) == their_ids.encode(text).ids and ours.decode(ours.encode(text)) == text
    assert ours.eos == model.config.vocab_size - 1


def small(kind, tokenizer):
    policy = stir(GPT(GPTConfig(tokenizer.vocab_size, 32, 2, heads=2, channels=16)), 0.2).eval()
    if kind != "rm":
        return policy
    scorer = stir(RewardModel(policy), 0.1).eval()
    scorer.mean.fill_(0.7), scorer.std.fill_(1.9)
    return scorer


def test_an_exported_policy_gives_the_same_logits_ids_and_text_in_transformers(tmp_path, tokenizer):
    model = small("ppo", tokenizer)
    save_checkpoint(tmp_path / "ppo.pt", "ppo", model, tokenizer)
    hf.export(tmp_path / "ppo.pt", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(tokenizer.vocab_size, (3, 32))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens)[0], rtol=0, atol=1e-4)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXTS[:3], *zoo.PROMPTS]:
        assert fast.encode(text) == tokenizer.encode(text) and fast.decode(fast.encode(text)) == text
    assert fast.eos_token_id == tokenizer.eos == theirs.config.eos_token_id


def test_an_exported_reward_model_gives_the_normalised_scores_in_transformers_also_with_padding(tmp_path, tokenizer):
    scorer = small("rm", tokenizer)
    save_checkpoint(tmp_path / "rm.pt", "rm", scorer, tokenizer)
    hf.export(tmp_path / "rm.pt", tmp_path / "out")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    rows = [tokenizer.encode(TEXTS[0]) + tokenizer.encode(TEXTS[1]) + [tokenizer.eos], tokenizer.encode(TEXTS[0]) + [tokenizer.eos]]
    pad = theirs.config.pad_token_id
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        ours = scorer(torch.where(tokens == pad, 0, tokens), torch.tensor([len(row) for row in rows]))
        torch.testing.assert_close(theirs(tokens, attention_mask=(tokens != pad).long()).logits[:, 0], ours, rtol=0, atol=1e-4)
    assert theirs.config.num_labels == 1 and ours.std() > 1e-3


def test_what_was_exported_can_be_read_again(tmp_path, tokenizer):
    model = small("ppo", tokenizer)
    save_checkpoint(tmp_path / "ppo.pt", "ppo", model, tokenizer)
    hf.export(tmp_path / "ppo.pt", tmp_path / "out")
    again, same = hf.read_gpt2(str(tmp_path / "out"))
    assert same.tokens == tokenizer.tokens
    assert all(torch.equal(a, b) for a, b in zip(again.trunk.parameters(), model.trunk.parameters(), strict=True))


def test_a_folder_that_is_not_there_is_named_with_what_to_do(tmp_path):
    with pytest.raises(UserError, match="give a folder that holds config.json"):
        hf.read_gpt2(str(tmp_path / "none"))


def test_another_activation_a_foreign_vocabulary_and_a_missing_one_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "relu"}))
    with pytest.raises(UserError, match="another activation"):
        hf.read_gpt2(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    merges = (folder / "merges.txt").read_text().splitlines()
    (folder / "merges.txt").write_text("\n".join([merges[0], *reversed(merges[1:])]))
    with pytest.raises(UserError, match="order of its merges"):
        hf.read_gpt2(str(folder))
    (folder / "vocab.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json"):
        hf.read_gpt2(str(folder))


def test_the_benchmark_for_a_gpu_runs_on_a_tiny_model_too():
    command = [sys.executable, "-m", "bench.gpu", "--try"]
    printed = subprocess.check_output(command, cwd=Path(hf.__file__).parents[1], encoding="utf-8")
    lines = printed.splitlines()
    assert sum(re.match(r"(64|256) prompts, eager: rollout \d.*, scoring \d.*, update \d", line) is not None for line in lines) == 2
    assert sum("transformers: generate()" in line for line in lines) == 2
