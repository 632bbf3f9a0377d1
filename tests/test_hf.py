"""The specification of plumbing/hf.py, and of sample.py with the folders that it writes.

Run: python -m pytest tests/test_hf.py (needs transformers; .ci/run installs it)
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli import ONE_THREAD, ROOT, command, run, shell
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
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

TEXTS = ["What does a bee eat?", " A bee eats nectar. Enjoy your visit!", "naïve ﬁ 日本語 🐝\n\n  x\t'll 12 , it 's .",
         "<|endoftext|>", ""]  # fmt: skip


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


def renumber(folder, new_id):
    """Give the tokens of a folder other ids: new_id(id, how many there are)."""
    ids = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({word: new_id(i, len(ids)) for word, i in ids.items()}))


@pytest.mark.parametrize("new_id", [
    lambda i, n: (i + 1) % n, lambda i, n: random.Random(0).sample(range(n), n)[i],
], ids=["end token first", "shuffled"])  # fmt: skip
def test_a_vocabulary_with_other_ids_is_read_and_the_weights_with_it(folder, new_id):
    renumber(folder, new_id)
    model, ours = hf.read_gpt2(folder)
    ids = json.loads((folder / "vocab.json").read_text())
    order = torch.tensor([ids[hf.spell(token)] for token in ours.tokens] + [ids[hf.END]])
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = torch.randint(model.config.vocab_size, (3, 48))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens)[0], theirs(order[tokens]).logits[..., order], rtol=0, atol=1e-4)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS[:3], *zoo.PROMPTS]:
        assert order[ours.encode(text)].tolist() == fast.encode(text)


def write_bpe(folder, **settings):
    """What the package tokenizers makes by default: tokenizer.json alone, the special tokens first."""
    bpe = Fast(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(zoo.PROMPTS, trainers.BpeTrainer(vocab_size=321, show_progress=False, **settings))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    bpe.save(str(folder / "tokenizer.json"))
    return bpe


def test_a_vocabulary_of_the_package_tokenizers_is_read(folder):
    bpe = write_bpe(folder, special_tokens=[hf.END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    _, ours = hf.read_gpt2(folder)
    for text in [*TEXTS[:3], *zoo.PROMPTS]:
        assert [i + 1 for i in ours.encode(text)] == bpe.encode(text).ids


@pytest.mark.parametrize("specials, found", [
    (["<pad>", hf.END], r"here <pad> has the id 0, \S+ has the id 320$"),
    ([hf.END, "<a>", "<b>"], r"here <a> has the id 1, <b> has the id 2, \S+ has the id 319, \.\.\.$"),
], ids=["one", "two"])  # fmt: skip
def test_further_special_tokens_are_refused_by_name(folder, specials, found):
    write_bpe(folder, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    with pytest.raises(UserError, match=f"should hold the 256 bytes.*{re.escape(hf.END)}; {found}"):
        hf.read_gpt2(folder)


def small(kind, tokenizer):
    policy = stir(GPT(GPTConfig(tokenizer.vocab_size, 32, 2, heads=2, channels=16, dropout=0.25)), 0.2).eval()
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
    assert fast.eos_token_id == tokenizer.eos == theirs.config.eos_token_id == theirs.config.bos_token_id
    assert theirs.generation_config.eos_token_id == tokenizer.eos
    assert fast.special_tokens_map == dict.fromkeys(("bos_token", "eos_token", "unk_token"), hf.END)
    assert len(fast) == tokenizer.vocab_size
    assert fast.model_max_length == theirs.config.n_positions == 32
    assert theirs.config.resid_pdrop == theirs.config.embd_pdrop == theirs.config.attn_pdrop == 0.25


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


def test_an_exported_reward_model_is_read_back_as_a_function_of_texts(tmp_path, tokenizer):
    scorer = small("rm", tokenizer)
    save_checkpoint(tmp_path / "rm.pt", "rm", scorer, tokenizer)
    hf.export(tmp_path / "rm.pt", tmp_path / "out")
    prompts, responses = [TEXTS[0]] * 2, [TEXTS[1], ""]
    scores = hf.read_scorer(tmp_path / "out")(prompts, responses)
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        ids = tokenizer.encode(prompt) + tokenizer.encode(response) + [tokenizer.eos]
        assert score == pytest.approx(scorer(torch.tensor([ids]), torch.tensor([len(ids)])).item(), abs=1e-4)


def test_the_tokenizer_of_an_exported_reward_model_ends_and_pads_texts_so_that_the_scores_are_ours(tmp_path, tokenizer):
    scorer = small("rm", tokenizer)
    save_checkpoint(tmp_path / "rm.pt", "rm", scorer, tokenizer)
    hf.export(tmp_path / "rm.pt", tmp_path / "out")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pairs = [(TEXTS[0], TEXTS[1]), ("Where do bees live?", " In a hive.")]
    rows = [tokenizer.encode(prompt) + tokenizer.encode(response) + [tokenizer.eos] for prompt, response in pairs]
    lengths = list(map(len, rows))
    assert fast([prompt + response for prompt, response in pairs])["input_ids"] == rows and lengths[0] != lengths[1]
    padded = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows])
    together = fast([prompt + response for prompt, response in pairs], padding=True, return_tensors="pt")
    apart = fast(*map(list, zip(*pairs)), padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = scorer(padded, torch.tensor(lengths))
        torch.testing.assert_close(theirs(**together).logits[:, 0], ours, rtol=0, atol=1e-4)
        torch.testing.assert_close(theirs(**apart).logits[:, 0], ours, rtol=0, atol=1e-4)
    border = [*tokenizer.encode("Wh"), *tokenizer.encode("at"), tokenizer.eos]
    assert fast("Wh", "at")["input_ids"] == border != fast("What")["input_ids"]
    long = fast(TEXTS[0] * 9, truncation=True)["input_ids"]
    assert len(long) == 32 and long[-1] == tokenizer.eos


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


def test_the_scripts_export_with_one_line_and_sample_from_what_was_exported(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "ppo.pt", "ppo", small("ppo", tokenizer), tokenizer)
    status, printed, error = run("plumbing/hf.py", "export", tmp_path / "ppo.pt", tmp_path / "new" / "out")
    assert (status, error) == (0, "") and re.fullmatch(r"wrote .*out: GPT2LMHeadModel, 0\.01 M parameters\n", printed)
    flags = [*TEXTS[:2], "--max_new_tokens", 9, "--n", 3]
    done = shell("sample.py", tmp_path / "new" / "out", *flags)
    assert done.returncode == 0 and done.stderr == "" and done.stdout == run("sample.py", tmp_path / "ppo.pt", *flags)[1]
    assert set(TEXTS[:2]) < set(done.stdout.splitlines())


def test_the_sampler_takes_all_of_the_standard_input_for_one_prompt_if_told_to(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "ppo.pt", "ppo", small("ppo", tokenizer), tokenizer)
    for prompt in ("\n\nHuman: a\n\nAssistant:", "a\n", "a"):
        status, printed, error = run("sample.py", tmp_path / "ppo.pt", "--whole", stdin=prompt + "\n")
        assert (status, error) == (0, "") and printed == run("sample.py", tmp_path / "ppo.pt", prompt)[1]
    assert run("sample.py", tmp_path / "ppo.pt", "--whole") == (0, "", "")
    assert run("sample.py", tmp_path / "ppo.pt", stdin="a \n\nb")[1].splitlines()[::2] == ["a ", "b"]


def test_a_sampler_without_a_prompt_and_a_standard_input_ends(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "ppo.pt", "ppo", small("ppo", tokenizer), tokenizer)
    done = subprocess.run(["sh", "-c", '"$@" <&-', "-", *command("sample.py", tmp_path / "ppo.pt")], cwd=ROOT,
                          env=ONE_THREAD, capture_output=True, encoding="utf-8", timeout=120)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def assert_refused(script, *args, says):
    status, printed, error = run(script, *args)
    assert (status, printed) == (2, "") and error.startswith(f"{Path(script).name}: ") and error.count("\n") == 1
    assert says in error


def test_an_export_into_a_file_is_refused(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "ppo.pt", "ppo", small("ppo", tokenizer), tokenizer)
    (tmp_path / "out").write_text("mine")
    assert_refused("plumbing/hf.py", "export", tmp_path / "ppo.pt", tmp_path / "out", says="a file; should be a folder")
    assert_refused("plumbing/hf.py", "export", tmp_path / "ppo.pt", tmp_path / "out" / "more", says="Not a directory")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("words", [["export", "x.pt"], ["import", "x.pt", "out"], ["export", "x.pt", "out", "more"]])
def test_other_words_than_export_checkpoint_folder_are_refused(words):
    assert_refused("plumbing/hf.py", *words, says="export CHECKPOINT FOLDER")


def test_a_folder_without_a_model_or_with_a_reward_model_is_no_policy_to_sample_from(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "rm.pt", "rm", small("rm", tokenizer), tokenizer)
    hf.export(tmp_path / "rm.pt", tmp_path / "out")
    done = shell("sample.py", tmp_path / "out", "a")  # in a process of its own, to see whatever transformers says
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "its weights are not those of a GPT-2 language model" in done.stderr
    assert_refused("sample.py", tmp_path, "a", says="give a folder that holds config.json")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("changes", [
    {"activation_function": "relu"}, {"n_inner": 48}, {"layer_norm_epsilon": 1e-6}, {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True}, {"reorder_and_upcast_attn": True},
], ids=str)  # fmt: skip
def test_a_gpt2_that_computes_something_else_is_refused(folder, changes):
    edit(folder / "config.json", **changes)
    with pytest.raises(UserError, match="another activation, width or scaling"):
        hf.read_gpt2(folder)


def test_a_head_with_weights_of_its_own_is_refused_whatever_config_json_says(folder):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder)
    theirs.config.tie_word_embeddings = False
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
    theirs.save_pretrained(folder)
    hf.read_gpt2(folder)  # equal weights may stand in the file twice
    stir(theirs.lm_head)
    theirs.save_pretrained(folder)
    for tied in (False, True):
        edit(folder / "config.json", tie_word_embeddings=tied)
        with pytest.raises(UserError, match="lm_head has weights of its own"):
            hf.read_gpt2(folder)


@pytest.mark.parametrize("changes, name", [
    ({"n_layer": 4}, "h.3.attn"), ({"n_layer": 2}, "h.2.attn"), ({"n_positions": 40}, "wpe.weight"),
], ids=["missing", "unknown", "another size"])  # fmt: skip
def test_weights_that_do_not_fit_config_json_are_refused_and_named(folder, changes, name):
    edit(folder / "config.json", **changes)
    with pytest.raises(UserError, match=f"its weights are not those .* of another size: .*{name}"):
        hf.read_gpt2(folder)


def test_a_file_in_the_way_of_the_first_gpt2_is_read(folder):
    """No "transformer." in the names, the causal mask as a weight, the width of the MLP in config.json."""
    before, _ = hf.read_gpt2(folder)
    weights = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    for i in range(3):
        weights[f"h.{i}.attn.bias"], weights[f"h.{i}.attn.masked_bias"] = torch.ones(1, 1, 48, 48).tril(), torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", n_inner=96)
    after, _ = hf.read_gpt2(folder)
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters(), strict=True))


def test_weights_of_half_precision_are_read_as_float32(folder):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).bfloat16()
    theirs.save_pretrained(folder)
    model, _ = hf.read_gpt2(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight.float())


def test_dropout_is_what_the_caller_says(folder):
    assert [hf.read_gpt2(folder, *more)[0].config.dropout for more in ([], [0.25])] == [0.0, 0.25]


def test_a_vocabulary_that_is_too_small_out_of_order_damaged_or_missing_is_refused(folder):
    merges, sizes = (folder / "merges.txt").read_text(), (folder / "vocab.json").read_text()
    first, *others = merges.splitlines()
    (folder / "merges.txt").write_text("\n".join([first, *reversed(others)]))
    with pytest.raises(UserError, match="is merged before"):
        hf.read_gpt2(folder)
    (folder / "merges.txt").write_text(merges)
    renumber(folder, lambda i, n: i + (i == n - 1))
    with pytest.raises(UserError, match=f"{re.escape(hf.END)} has the id {len(json.loads(sizes))}"):
        hf.read_gpt2(folder)
    (folder / "vocab.json").write_text(sizes)
    (folder / "merges.txt").write_text("\n".join([first, *others[:-1]]))
    with pytest.raises(UserError, match="has the id"):
        hf.read_gpt2(folder)
    (folder / "vocab.json").write_text("{")
    with pytest.raises(UserError, match="could not be read"):
        hf.read_gpt2(folder)
    (folder / "vocab.json").unlink(), (folder / "merges.txt").unlink()
    with pytest.raises(UserError, match="tokenizer.json, or vocab.json and merges.txt.*is missing"):
        hf.read_gpt2(folder)


@pytest.mark.parametrize("merges, found", [
    (["ab c", "a b"], "abc is merged before ab or c"), (["c ab", "a b"], "cab is merged before c or ab"),
    (["<x> a"], "<x> has the id"),
])  # fmt: skip
def test_a_merge_of_what_is_not_made_yet_is_refused(folder, merges, found):
    words = [*hf.CHARACTERS.values(), *(pair.replace(" ", "") for pair in merges), hf.END, "<x>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    with pytest.raises(UserError, match=found):
        hf.read_gpt2(folder)


def test_a_vocabulary_without_all_bytes_is_refused(folder):
    write_bpe(folder, special_tokens=[hf.END])
    with pytest.raises(UserError, match="256 bytes.* is missing, .*, ..."):
        hf.read_gpt2(folder)


def test_weights_for_more_tokens_than_the_vocabulary_has_are_refused(folder):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder)
    theirs.resize_token_embeddings(384)
    theirs.save_pretrained(folder)
    with pytest.raises(UserError, match="weights for 384 tokens, a vocabulary of"):
        hf.read_gpt2(folder)


@pytest.mark.parametrize("part, changes", [
    ("pre_tokenizer", {"type": "Whitespace"}), ("pre_tokenizer", {"add_prefix_space": True}),
    ("pre_tokenizer", {"use_regex": False}), ("pre_tokenizer", None), ("normalizer", {"type": "Lowercase"}),
    ("model", {"type": "WordPiece", "unk_token": hf.END, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}),
], ids=str)  # fmt: skip
def test_a_tokenizer_that_cuts_text_in_another_way_is_refused(tmp_path, tokenizer, part, changes):
    save_checkpoint(tmp_path / "ppo.pt", "ppo", small("ppo", tokenizer), tokenizer)
    hf.export(tmp_path / "ppo.pt", tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    edit(tmp_path / "tokenizer.json", **{part: changes and (file[part] or {}) | changes})
    with pytest.raises(UserError, match="does not cut text"):
        hf.read_gpt2(tmp_path)


def test_an_error_without_a_text_is_named(folder, monkeypatch):
    def fail(*args, **more):
        raise OSError

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", fail)
    with pytest.raises(UserError, match="could not be read .OSError: .;"):
        hf.read_gpt2(folder)


def test_without_the_package_transformers_its_installation_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        hf.read_gpt2(folder)


def test_the_benchmark_for_a_gpu_runs_on_a_tiny_model_too():
    command = [sys.executable, "-m", "bench.gpu", "--try"]
    printed = subprocess.check_output(command, cwd=Path(hf.__file__).parents[1], encoding="utf-8")
    lines = printed.splitlines()
    assert sum(re.match(r"(64|256) prompts, eager: rollout \d.*, scoring \d.*, update \d", line) is not None for line in lines) == 2
    assert sum("transformers: generate()" in line for line in lines) == 2
