"""The specification of plumbing/hf.py. Run: python -m pytest tests/test_hf.py (needs transformers)"""

import functools
import json
import os
import random
import sys

import pytest
import torch

from cli import run, shell
from data import zoo
from minippo import GPT, GPTConfig, RewardModel
from plumbing import hf
from plumbing.checkpoints import load_checkpoint, read_contents, save_checkpoint
from plumbing.errors import UserError
from plumbing.tokenizer import Tokenizer
from tiny import stir

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("transformers")
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer

TEXTS = [
    "What does a bee eat?",
    " A bee eats nectar. Enjoy your visit!",
    "naïve ﬁ 日本語 🐝\n\n  x\t'll 12 , it 's .",
    "a<|endoftext|> <|pad|>",
]
ENDS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), hf.END)
AUTO = transformers.AutoTokenizer.from_pretrained


def random_texts(seed, n=60):
    draw = random.Random(seed)
    return [
        "".join(draw.choices("aabbc dé日🐝  \n\t'lls12,.", k=draw.randint(1, 40))) for _ in range(n)
    ]


def assert_same_logits(model, theirs, order):
    """order: the id of theirs for each id of ours."""
    tokens = torch.randint(model.config.vocab_size, (3, model.config.context))
    with torch.no_grad():
        theirs = theirs.eval()(order[tokens]).logits[..., order]
        torch.testing.assert_close(model.eval()(tokens)[0], theirs, rtol=0, atol=1e-4)


@pytest.fixture
def folder(tmp_path):
    """A GPT-2 with random weights, and a vocabulary that their own tools have trained."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(zoo.PROMPTS, vocab_size=320, show_progress=False)
    bpe.save_model(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {hf.END: 320}))
    config = transformers.GPT2Config(vocab_size=321, n_positions=48, n_embd=24, n_layer=3, n_head=2)
    stir(transformers.GPT2LMHeadModel(config), 0.05).save_pretrained(tmp_path)
    return tmp_path


def test_stage_1_goes_on_from_a_gpt2_of_its_own_context(folder, tmp_path):
    rows = [{"prompt": "What?", "completion": " long" * n} for n in range(1, 60)]
    for split in ("train", "val"):
        (tmp_path / f"sft_{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--init", folder, "--data", tmp_path, "--out", tmp_path / "out", "--device", "cpu"]
    status, printed, error = run("train_sft.py", *flags, "--epochs", 1)
    assert (status, error) == (0, "") and "context of 48 tokens" in printed
    model, _, _ = load_checkpoint(tmp_path / "out" / "sft.pt", ["sft"])
    settings = read_contents(tmp_path / "out" / "sft_state.pt", ["state"])["settings"]
    assert settings["context"] == model.config.context == 48


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_imported_gpt2_gives_the_logits_and_ids_of_transformers(folder, shuffled):
    new_ids = random.Random(0).sample(range(321), 321) if shuffled else range(321)
    ids = {word: new_ids[i] for word, i in json.loads((folder / "vocab.json").read_text()).items()}
    (folder / "vocab.json").write_text(json.dumps(ids))
    model, tokenizer = hf.read_gpt2(folder, 0.25)
    assert (
        model.training
        and model.config.dropout == 0.25
        and hf.read_gpt2(folder)[0].config.dropout == 0
    )
    words = ["".join(hf.CHARACTERS[byte] for byte in token) for token in tokenizer.tokens]
    order = torch.tensor([ids[word] for word in [*words, hf.END]])
    assert shuffled or order.tolist() == [*range(321)]
    assert_same_logits(model, transformers.GPT2LMHeadModel.from_pretrained(folder), order)
    theirs = AUTO(folder, split_special_tokens=True)
    for text in [*TEXTS, *zoo.PROMPTS, *random_texts(0)]:
        assert order[tokenizer.encode(text)].tolist() == theirs.encode(text)


def test_a_file_in_the_way_of_the_first_gpt2_is_read(folder):
    """No "transformer." in the names, the causal mask as a weight, n_inner in config.json."""
    before, _ = hf.read_gpt2(folder)
    weights = {
        name.removeprefix("transformer."): x
        for name, x in load_file(folder / "model.safetensors").items()
    }
    for i in range(3):
        weights[f"h.{i}.attn.bias"], weights[f"h.{i}.attn.masked_bias"] = (
            torch.ones(1, 1, 48, 48).tril(),
            torch.tensor(-1e4),
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", n_inner=96)
    after, _ = hf.read_gpt2(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters(), strict=True)
    )


@functools.cache
def trained():
    return Tokenizer.train([*zoo.PROMPTS, *TEXTS[:3] * 3], 400)


def exported(folder, kind):
    """A checkpoint with random weights and its export -> model, tokenizer, folder of the export."""
    model = stir(GPT(GPTConfig(400, 32, 2, heads=2, channels=16, dropout=0.25)), 0.2)
    if kind == "rm":
        model = stir(RewardModel(model), 0.1)
        model.mean.fill_(0.7), model.std.fill_(1.9), model.cap.fill_(-0.55)
    save_checkpoint(folder / f"{kind}.pt", kind, model, trained())
    hf.export(folder / f"{kind}.pt", folder / "out")
    return model.eval(), trained(), folder / "out"


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_an_exported_policy_gives_the_same_logits_in_transformers_and_can_be_read_again(
    tmp_path, kind, capsys
):
    model, tokenizer, out = exported(tmp_path, kind)
    assert capsys.readouterr().out == f"wrote {out}: GPT2LMHeadModel\n"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_same_logits(model, theirs, torch.arange(tokenizer.vocab_size))
    c = theirs.config
    assert (
        c.resid_pdrop == c.embd_pdrop == c.attn_pdrop == 0.25
        and c.n_positions == AUTO(out).model_max_length == 32
    )
    assert (
        tokenizer.eos == c.bos_token_id == c.eos_token_id == theirs.generation_config.eos_token_id
    )
    again, same = hf.read_gpt2(str(out))
    assert same.tokens == tokenizer.tokens
    assert [AUTO(out).encode(text) for text in TEXTS] == [*map(same.encode, TEXTS)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.trunk.parameters(), model.trunk.parameters(), strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_random_vocabulary_gives_the_same_ids_over_random_texts_and_comes_back(tmp_path, seed):
    tokenizer = Tokenizer.train(random_texts(seed, 20 * seed), 300 + 10 * seed)
    hf.write_tokenizer(tokenizer, tmp_path, 99, scorer=False)
    theirs = AUTO(tmp_path)
    for text in ["", *TEXTS, *random_texts(seed), *random_texts(-1)]:
        assert (
            theirs.encode(text) == tokenizer.encode(text)
            and theirs.decode(theirs.encode(text)) == text
        )
    assert (
        theirs.special_tokens_map == ENDS
        and theirs.eos_token_id == tokenizer.eos
        and len(theirs) == tokenizer.vocab_size
    )
    same, ids = hf.read_vocabulary("x", theirs, len(theirs))
    assert same.tokens == tokenizer.tokens and ids == [*range(len(theirs))]


def test_an_exported_reward_model_gives_our_scores_of_texts_alone_or_padded(tmp_path):
    scorer, tokenizer, out = exported(tmp_path, "rm")
    prompts, responses = (
        [*TEXTS[:2], "Where do bees live?", "a", hf.END],
        [" In a hive.", "", TEXTS[1], "b", hf.END],
    )
    rows = [
        [*tokenizer.encode(x), *tokenizer.encode(y), tokenizer.eos]
        for x, y in zip(prompts, responses)
    ]
    ours = torch.cat(
        [scorer(torch.tensor([row]), torch.tensor([len(row)])) for row in rows]
    ).tolist()
    assert max(ours) - min(ours) > 0.1 and ours.count(max(ours)) == 2  # the cap
    score = hf.read_scorer(out)
    assert score(prompts, responses) == pytest.approx(ours, abs=1e-4)
    assert [score([x], [y])[0] for x, y in zip(prompts, responses)] == pytest.approx(ours, abs=1e-4)


def test_the_tokenizer_of_an_exported_reward_model_ends_what_it_encodes(tmp_path):
    _, tokenizer, out = exported(tmp_path, "rm")
    theirs, config = AUTO(out), transformers.AutoConfig.from_pretrained(out)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == [*tokenizer.encode(text), tokenizer.eos]
    apart = [*tokenizer.encode("Wh"), *tokenizer.encode("at"), tokenizer.eos]
    assert theirs("Wh", "at")["input_ids"] == apart != theirs("What")["input_ids"]
    assert theirs(TEXTS[0] * 9, truncation=True)["input_ids"][31:] == [tokenizer.eos]
    assert theirs.special_tokens_map == ENDS | {"pad_token": "<|pad|>"} and config.num_labels == 1
    assert config.pad_token_id == theirs.pad_token_id == 400


def edit(path, *keys, **changes):
    """Change what a JSON file holds: file[key][key]... |= changes."""
    file = part = json.loads(path.read_text())
    for key in keys:
        part = part[key]
    part |= changes
    path.write_text(json.dumps(file))


def config(**changes):
    return lambda out: edit(out / "config.json", **changes)


def vocabulary(*keys, **changes):
    return lambda out: edit(out / "tokenizer.json", *keys, **changes)


def reverse_merges(out):
    merges = json.loads((out / "tokenizer.json").read_text())["model"]["merges"]
    edit(out / "tokenizer.json", "model", merges=merges[::-1])


def separate_head(out, tied):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(out)
    theirs.config.tie_word_embeddings = False
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
    theirs.save_pretrained(out)
    hf.read_gpt2(out)  # equal weights may stand in the file twice
    stir(theirs.lm_head)
    theirs.save_pretrained(out)
    edit(out / "config.json", tie_word_embeddings=tied)


def resize(out, inner=None, tokens=400):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(out)
    c = transformers.GPT2Config(
        **theirs.config.to_diff_dict() | {"n_inner": inner, "vocab_size": tokens}
    )
    transformers.GPT2LMHeadModel(c).save_pretrained(out)


SHOULD = "should have 400 tokens, as its weights: 256 bytes, what each merge makes, "
SHOULD += "and <|endoftext|>; it has "
CUTS = "cuts text in another way"
BROKEN = {  # what is done to an exported policy, and what is said of it
    "relu": (
        config(activation_function="relu"),
        ["GPT-2 language model", "here activation_function relu"],
    ),
    "epsilon": (config(layer_norm_epsilon=1e-6), ["here layer_norm_epsilon 1e-06"]),
    "unscaled": (config(scale_attn_weights=False), ["here scale_attn_weights False"]),
    "scaled": (
        config(scale_attn_by_inverse_layer_idx=True),
        ["here scale_attn_by_inverse_layer_idx True"],
    ),
    "missing": (
        config(n_layer=3),
        ["h.2.attn.c_attn.bias in missing_keys, ", "h.2.attn.c_proj.bias in missing_keys"],
    ),
    "unknown": (config(n_layer=1), ["h.1.attn.c_attn.weight in unexpected_keys"]),
    "size": (config(n_positions=40), ["wpe.weight", "40", "in mismatched_keys"]),
    "MLP": (lambda out: resize(out, inner=48), ["h.0.mlp.c_fc.bias", "in mismatched_keys"]),
    "head": (lambda out: separate_head(out, False), ["lm_head without the weights of wte"]),
    "tied head": (lambda out: separate_head(out, True), ["lm_head without the weights of wte"]),
    "more weights": (
        lambda out: resize(out, tokens=401),
        ["have 401 tokens", "it has 400, with ids up to 399"],
    ),
    "one more": (
        vocabulary("model", "vocab", **{"<a>": 400}),
        [SHOULD + "401, with ids up to 400; missing or unknown: <a>"],
    ),
    "hole": (
        vocabulary("model", "vocab", Ġwe=400),
        [SHOULD + "400, with ids up to 400; missing or unknown: none"],
    ),
    "no merges": (vocabulary("model", merges=[]), [SHOULD, "missing or unknown: Do, My, Please"]),
    "merges": (reverse_merges, [CUTS]),
    "type": (
        vocabulary(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        [SHOULD],
    ),
    "words": (vocabulary("pre_tokenizer", type="Whitespace"), [CUTS]),
    "space": (vocabulary("pre_tokenizer", add_prefix_space=True), [CUTS]),
    "regex": (vocabulary("pre_tokenizer", use_regex=False), [CUTS]),
    "none": (vocabulary(pre_tokenizer=None), [CUTS]),
    "normalizer": (vocabulary(normalizer={"type": "NFC"}), [CUTS]),
    "damaged": (
        lambda out: (out / "config.json").write_text("{"),
        ["could not be read (OSError: It "],
    ),
}


@pytest.mark.parametrize("break_it, says", BROKEN.values(), ids=BROKEN)
def test_what_is_no_gpt2_is_refused_and_named(tmp_path, break_it, says):
    _, _, out = exported(tmp_path, "ppo")
    break_it(out)
    with pytest.raises(UserError) as error:
        hf.read_gpt2(out)
    assert str(error.value).startswith(f"{out}: ") and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(out)) + 400
    for words in says:
        assert words in str(error.value)


def test_a_reward_model_and_an_empty_folder_are_no_policy(tmp_path):
    _, _, out = exported(tmp_path, "rm")
    done = shell(
        "sample.py", out, "a"
    )  # in a process of its own, to see whatever transformers says
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("here score.weight in unexpected_keys\n")
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            UserError,
            match="could not be read .* without a network, give a folder with config.json",
        ):
            hf.read_gpt2(nothing)


def test_one_line_exports_and_another_samples_from_what_was_exported(tmp_path):
    exported(tmp_path, "ppo")
    status, printed, error = run(
        "plumbing/hf.py", "export", tmp_path / "ppo.pt", tmp_path / "new" / "out"
    )
    assert (status, printed, error) == (
        0,
        f"wrote {tmp_path / 'new' / 'out'}: GPT2LMHeadModel\n",
        "",
    )
    flags = [*TEXTS[:2], "--max_new_tokens", 9, "--n", 3]
    done = run("sample.py", tmp_path / "new" / "out", *flags)
    assert done == (0, run("sample.py", tmp_path / "ppo.pt", *flags)[1], "")
    assert set(TEXTS[:2]) < set(done[1].splitlines())


def test_a_model_that_is_there_is_replaced_on_request_alone(tmp_path):
    exported(tmp_path, "rm")
    for name in ("config.json", "generation_config.json"):
        out = tmp_path / name.split(".")[0]
        out.mkdir()
        (out / name).write_text("another")
        words = ["plumbing/hf.py", "export", tmp_path / "rm.pt", out]
        status, _, error = run(*words)
        assert status == 2 and "--overwrite" in error and error.count("\n") == 1
        assert [path.read_text() for path in out.iterdir()] == ["another"]
        assert run(*words, "--overwrite")[0] == 0 and len(hf.read_scorer(out)(["a"], ["b"])) == 1


def test_an_export_into_a_file_and_other_words_are_refused(tmp_path):
    exported(tmp_path, "ppo")
    model, file = tmp_path / "ppo.pt", tmp_path / "file"
    file.write_text("mine")
    for words, says in [
        (["export", model, file], f"{file}: File exists"),
        (["export", model, file / "more"], "Not a directory"),
        (["export", model], "export CHECKPOINT FOLDER"),
        (["import", model, "out"], "export CHECKPOINT FOLDER"),
        (["export", model, "out", "more"], "export CHECKPOINT FOLDER"),
        (["export", file, "out"], "damaged"),
    ]:
        status, printed, error = run("plumbing/hf.py", *words)
        assert (
            (status, printed) == (2, "")
            and error.startswith("hf.py: ")
            and error.count("\n") == 1
            and says in error
        )
    assert file.read_text() == "mine"


def test_without_transformers_its_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        hf.read_gpt2("gpt2")


def test_only_a_download_shows_its_progress(tmp_path, monkeypatch):
    calls = []
    for name in ("enable", "disable"):
        monkeypatch.setattr(
            transformers.logging, f"{name}_progress_bar", lambda name=name: calls.append(name)
        )
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", lambda *_, **__: 1 / 0)
    for source, last in [("gpt2", "enable"), (tmp_path, "disable")]:
        with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
            hf.read_gpt2(source)
        assert calls[-1] == last
