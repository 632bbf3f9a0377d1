"""What the scripts share: plumbing/ without the page."""

import io
import json
import os
import random
import re
from pathlib import Path

import pytest
import torch

import evaluate
import sample
import train_rm
import train_sft
from data.rows import UserError
from minippo import frozen_copy, pad_completions
from plumbing import batches, files, gpt2, settings, watch
from plumbing.models import load_checkpoint, load_function, text_score
from plumbing.text import Prompt, Tokenizer, encode_rows
from tiny import assert_equal, biased, f64, inf, marks, nan, stir, tiny_gpt
from tiny_run import PROMPTS, write_data
from train_ppo import Config

SPACE, A, B, C, D, E, AB, END = *b" abcde", 256, 257
TOKENIZER = Tokenizer.train(["ab ab"], 258)


def refused(words, function, *arguments):
    with pytest.raises(UserError, match=words):
        function(*arguments)


def raising(error):
    def function(_):
        raise error

    return function


# Settings and files


def test_flags_are_the_fields_of_a_dataclass(capsys):
    def read(*flags):
        return settings.read_flags(Config, "", flags)

    config = read("--steps=8", "--resume", "--no-whiten", "--out=b", "--policy=c.pt")
    assert config == Config(out=Path("b"), policy="c.pt", resume=True, steps=8, whiten=False)
    with pytest.raises(SystemExit):
        read("-h")
    assert re.search(r"--gamma float +discount per token \(1.0\)\n", capsys.readouterr().out)
    for name in ("steps", "batch_size", "group_size", "sample_batch", "max_new_tokens"):
        refused(rf"{name} \(0\): should be at least 1", read, f"--{name}=0")
    for name in ("epochs", "minibatches"):
        refused(rf"{name} \(-1\): should be at least 1", read, f"--{name}=-1")
    for flag in ("--temperature=0", "--temperature=nan"):
        refused("temperature", read, flag)
    for flag in ("--gamma=1.1", "--gamma=-0.1", "--lam=nan"):
        refused("gamma and lam", read, flag)
    refused("another --out", read, "--policy=./out/ppo.pt")
    refused("batch_size .* multiple", read, "--batch_size=9", "--group_size=2")
    refused("--step", read, "--step=3")
    words = settings.read_flags(sample.Config, "", ["a.pt", "Hello", "--n=2", "you"])
    assert words == sample.Config(Path("a.pt"), ["Hello", "you"], n=2)
    refused("checkpoint", settings.read_flags, sample.Config, "", [])
    refused("--device gpu: .*cpu", settings.find_device, "gpu")
    refused(r"seed \(-1\)", Config(seed=-1, out=Path("none")).prepare, "ppo")
    refused(r"vocab_size \(256\)", lambda: train_sft.Config(vocab_size=256))
    refused(r"heads \(0\)", lambda: train_sft.Config(heads=0))
    refused("multiple of heads", settings.read_flags, train_sft.Config, "", ["--heads=5"])
    refused(r"micro_batch \(-1\)", read, "--micro_batch=-1")
    refused(r"answers \(1\)", lambda: train_rm.Config(answers=1))
    refused("temperature", settings.read_flags, train_rm.Config, "", ["--temperature=0"])
    refused("at least 1", settings.read_flags, evaluate.Config, "", ["out", "--prompts=0"])


def test_a_users_mistake_is_one_line_and_a_bug_of_ours_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["folder/x.py"])
    for error, status, words in (
        (UserError("\x1b[31m\nmore\u200d"), 2, r"^x.py: \\x1b\[31m\\nmore\\u200d$"),
        (KeyboardInterrupt(), 130, "--resume"),
        (ModuleNotFoundError("No module named 'trl'"), 2, "'trl'$"),
        (FloatingPointError("nan"), 2, "nan.*--lr"),
        (OSError(28, "No space left", "a.txt"), 2, "No space left: 'a.txt'$"),
    ):
        with pytest.raises(SystemExit, match=str(status)):
            settings.run_script(raising(error), Config, "")
        printed = capsys.readouterr().err
        assert re.search(words, printed) and printed.count("\n") == 1
    with pytest.raises(ValueError):
        settings.run_script(raising(ValueError()), Config, "")
    monkeypatch.setattr("sys.stdout", io.StringIO())  # as in a notebook
    monkeypatch.setattr("sys.argv", ["x.py"])
    settings.run_script(lambda config: None, Config, "")
    assert settings.printable("é\u200d\u00a0\n\u202e") == "é\u200d\u00a0\n\\u202e"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "x"
    steps = []
    with monkeypatch.context() as patch:
        for name, call in (("fsync", os.fsync), ("replace", os.replace)):
            patch.setattr(os, name, lambda *a, name=name, call=call: (steps.append(name), call(*a)))
        files.write_text(path, "é\ud800")
    assert steps == ["fsync", "replace"]  # on the disk before it takes the old one's place
    for error in (KeyboardInterrupt(), OSError(28, "disk full"), RuntimeError("disk full")):
        with pytest.raises((KeyboardInterrupt, UserError)):
            files.write_file(path, raising(error))
    assert path.read_bytes() == b"\xc3\xa9\\ud800" and list(path.parent.iterdir()) == [path]


def test_a_damaged_file_or_one_of_another_kind_is_refused(tmp_path):
    def load(words, kind="sft"):
        refused(f"sft.pt: {words}", load_checkpoint, path, [kind])

    path = tmp_path / "sft.pt"
    load("no such file; train_sft.py makes it")
    for contents in ({"kind": Path.cwd}, {"kind": "sft"}):  # code, which is not run; no model
        torch.save(contents, path)
        load("damaged")
    load("holds 'sft', not ppo", "ppo")
    path.write_bytes(path.read_bytes()[:-9])
    load("damaged")


def test_a_state_is_saved_every_half_minute(tmp_path, capsys):
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters())
    record = files.Record(Config(out=tmp_path, steps=10), "x", 9, model, optimizer)
    record.begin(resume=False)
    assert "9 steps" in capsys.readouterr().out
    for step, seconds in ((3, 31), (4, 25)):
        record.next_save -= seconds
        record.save_if_due(step)
    for _ in range(2):  # resumed, killed at once and resumed
        assert record.begin(resume=True) == 3
        assert "after step 3" in capsys.readouterr().out


# Text and batches


def test_any_text_survives_and_none_gives_the_end_token():
    texts = ["", "a<|endoftext|>", "it's low, lower\n\n\t  12", "👩\u200d🐝\ufeff", " " * 1_000_000]
    tokenizer = Tokenizer.train(texts[:4] * 2, 300)
    for x in texts:
        ids = tokenizer.encode(x)
        assert tokenizer.eos not in ids and tokenizer.decode([*ids, tokenizer.eos]) == x
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


def test_the_most_frequent_pair_is_merged_first():
    letters = "".join(random.Random(0).choices("abc ", k=400))
    learned = "cb|aa| b|ac|ab| c|  | cb| bb| ac|cbb| aa|acb|cc|abc|ccbb|cac|abb|aac"
    tokens = Tokenizer.train([letters[:155], letters[155:]], 276).tokens[256:]
    assert b"|".join(tokens).decode() == learned  # as if pairs were counted anew every time
    # No token spans two words of GPT-2, and pairs that occur once give none.
    tokens = Tokenizer.train(["it's 12 a-b  c", "it's 12 a-b  c de"], 999).tokens[256:]
    assert set(tokens) == {b"it", b"'s", b"12", b" 12", b" a", b" c"}


def test_rows_are_encoded_cut_or_skipped(capsys):
    table = [
        ("a", "b", "ab"),  # encoded apart: "ab" would be one token
        ("cde", "dc", "d"),  # does not fit into 5 tokens
        ("", "b", "c"),
        ("cdedc", "", "b"),
        ("cde", "dec", "ded"),  # differ only in what is cut off
    ]
    rows = [dict(zip(("prompt", "a", "b"), texts)) for texts in table]
    encoded = encode_rows(rows, "ab", TOKENIZER, 5)
    assert encoded == [([A], [B, END], [AB, END]), ([C, D, E], [D, C], [D, END])]
    printed = capsys.readouterr().out
    assert re.search(r"skipped \(.*\): 3\n.* cut at 5 tokens \(.*\): 1\n", printed)
    refused("no row is left", encode_rows, rows[3:4], "ab", TOKENIZER, 5)


def test_a_pass_has_every_row_once_and_depends_on_seed_and_step_alone():
    rows = sum((batches.batch_of(range(7), step, 3, seed=1) for step in range(7)), [])
    first, second, third = batches.chunks(rows, 7)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(7))
    other = batches.batch_of(range(7), 0, 7, seed=2)
    assert len({tuple(order) for order in (first, second, third, other)}) == 4
    prompts = [[i] * (1 + i % 4) for i in range(12)]
    batch = batches.prompt_batch(prompts, 5, Config(batch_size=24, group_size=2))  # side by side
    assert batch[::2] == batch[1::2] == sorted(batch[::2], key=len)
    assert sorted(batch[::2]) == prompts


def test_rows_are_spread_over_all_or_repeated():
    assert batches.take([*range(9)], 3) == [0, 3, 6]
    assert batches.take([*range(5)], 4) == [0, 1, 2, 3]
    assert batches.take([7, 8, 9], 5) == [7, 8, 9, 7, 8]


def test_pairs_of_a_batch_are_similar_and_each_comes_once():
    rows = [([0] * (1 + i % 7), [1] * (i % 5), [i] * (i % 11)) for i in range(470)]
    first, second = batches.chunks(batches.similar_batches(rows, 314, 3, seed=1), 157)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == sorted(rows)
    assert first != second
    lengths = [[len(x) + max(len(a), len(b)) for x, a, b in batch] for batch in first]
    assert sum(max(batch) - min(batch) for batch in lengths) < 100
    assert lengths[:10] != sorted(lengths[:10])  # short and long batches in random order


def test_a_rollout_in_pieces_is_in_the_order_asked_for():
    def score(prompts, tokens, mask):
        return f64(len(prompts) * [len(prompts)])

    policy = biased(tiny_gpt(context=64), {9: 99.0})  # always writes 9
    prompts = [[1] * n for n in (9, 10, 11, 40)]
    rows = pad_completions([(prompt, [9, 9, 9]) for prompt in prompts])
    for size, sizes in ((512, [3, 3, 3, 1]), (2, [2, 2, 1, 1])):  # of similar length
        config = Config(max_new_tokens=3, missing_eos_penalty=0.0, sample_batch=size)
        batch = batches.rollout_in_pieces(policy, policy, score, prompts, config)
        assert_equal((batch["tokens"], batch["mask"]), rows)
        assert batch["scores"].tolist() == sizes


# PPO: rewards, the check before the first update, warnings


def reward(function):
    rows = [{"prompt": "ab"}, {"prompt": "ab", "id": 7}]
    prompts = [prompt for (prompt,) in encode_rows(rows, [], TOKENIZER, 9)]
    tokens, mask = pad_completions(list(zip(prompts, [[C, END], [D, E]])))
    return text_score(function, TOKENIZER)(prompts, tokens, mask).tolist()


def test_a_reward_has_trls_signature_and_may_seed_everything():
    def function(**arguments):
        torch.manual_seed(1)
        assert arguments.pop("completion_ids") == [[C, END], [D, E]]
        assert arguments == {"prompts": 2 * ["ab"], "completions": ["c", "de"], "id": [None, 7]}
        return [1, 2.5]

    before = torch.get_rng_state()
    assert reward(function) == [1, 2.5]
    assert torch.get_rng_state().equal(before)


def test_a_reward_returns_one_number_for_each_response():
    x = torch.tensor([1.0, 2.0])
    for returned in ((True, 2.0), x.bfloat16(), [*x], x.clone().requires_grad_()):
        assert reward(lambda y=returned, **_: y) == [1, 2]
    for returned in (None, "12", {"c": 1, "de": 2}, 3.0, [1], [1, nan], [1, -inf], [1, "2"]):
        refused("--reward: .* 2 completions, not", reward, lambda y=returned, **_: y)
    for name in ("math", "math:pi"):
        refused(f"{name}: ", load_function, name)


def check(policy, ref, scores=(0.0, 1.0), path=""):
    config = Config(max_new_tokens=6, temperature=0.7, policy=path)
    watch.check_start(policy, ref, lambda *_: torch.tensor(scores), [[1], [2, 3]], config)


def test_ppo_starts_only_if_sampling_update_and_reference_agree(capsys):
    policy = tiny_gpt()
    ref = frozen_copy(policy)
    for scores, warnings in (((0, 1.0), 0), ((7.0, 7.0), 0), ((0, 30.0), 1), ((0, 0.01), 1)):
        check(policy, ref, scores)
        assert capsys.readouterr().out.count("warning: the standard deviation") == warnings
    stir(ref)
    check(policy, ref, path="first/ppo.pt")  # a second round
    refused("nats from the reference", check, policy, ref)
    forward = policy.trunk.forward
    policy.trunk.forward = lambda tokens, cache=None, start=0: forward(tokens, cache)
    refused("a ratio is .* off 1", check, policy, policy)


def test_what_looks_wrong_is_said_now_and_then(capsys):
    for step, changes, kl, words in (
        (11, {"kl": -0.1}, [-0.1, -0.1], "the KL is -0.100, below 0"),
        (11, {"kl": -0.2}, [-0.7, 0.3], ""),  # within its error
        (11, {"entropy": 0.01}, [0.5, 0.5], "--lr"),
        (101, {"eos_rate": 0.4}, [0.5, 0.5], "--max_new_tokens"),
        (2, {"eos_rate": 0.0}, [0.5, 0.5], ""),
    ):
        kl = f64([kl] * 8).view(16, 1)
        batch = {"old_logprobs": kl, "ref_logprobs": 0 * kl, "mask": kl < inf}
        stats = {"kl": 0.5, "entropy": 1.0, "eos_rate": 0.9} | changes
        watch.show(step, batch, stats, [], TOKENIZER)
        printed = capsys.readouterr().out
        assert words in printed and bool(words) == bool(printed)


def test_a_response_in_40_is_shown_and_all_are_graded(capsys):
    prompts = [Prompt([A]), Prompt([B])]
    prompts[0].row, prompts[1].row = {"prompt": "a"}, {"prompt": "b"}
    batch = {"tokens": torch.tensor([[A, AB, C, END], [B, SPACE, END, 0]])}
    batch |= {"mask": marks("xxx", "xx."), "scores": f64([2, 1])}
    batch |= {"old_logprobs": f64([[1.0] * 3] * 2), "ref_logprobs": f64([[0.0] * 3] * 2)}
    for step in (1, 2, 40, 41):
        watch.show(step, batch, {"kl": 0.5, "entropy": 1.0, "eos_rate": 0.9}, prompts, TOKENIZER)
    assert capsys.readouterr().out == 2 * "       'b '  score 1.00\n"
    grades = {("a", "abc"): 3, ("b", " "): -2}
    stats = watch.metrics(batch, prompts, lambda *texts: grades[texts], TOKENIZER)
    assert stats == {"judge": 0.5}
    batch["returns"] = f64([[nan, 1, 2], [3, 4, inf]])
    batch |= {"old_values": -batch["returns"], "mask": marks(".xx", "xx.")}
    stats = watch.metrics(batch, prompts, None, TOKENIZER)
    assert stats == pytest.approx({"explained_variance": -3})


def test_a_gpt_2_is_read_trained_and_written_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "gpt2"
    words = [*gpt2.BYTE_OF, "ab", "Ġc", "<|endoftext|>"]  # Ġ: a space
    files.write_text(folder / "vocab.json", json.dumps({x: i for i, x in enumerate(words)}))
    files.write_text(folder / "merges.txt", "#version: 0.2\na b\nĠ c\n")
    size = {"vocab_size": len(words), "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 3}
    config = transformers.GPT2Config(**size)
    stir(transformers.GPT2LMHeadModel(config), 0.3).save_pretrained(folder)
    write_data(tmp_path / "data", [*PROMPTS, 10 * "bc"])  # the last answers are cut at 32 tokens
    paths = {"data": tmp_path / "data", "out": tmp_path, "device": "cpu"}
    train_sft.train(train_sft.Config(**paths, init=str(folder), steps=3, lr=0.1))
    gpt2.main(gpt2.Config(tmp_path / "sft.pt", folder, tmp_path / "new"))
    refused("exists already", gpt2.main, gpt2.Config(tmp_path / "sft.pt", folder, folder))
    ours, _, _ = load_checkpoint(tmp_path / "sft.pt", ["sft"])
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "new").eval()
    tokens = torch.randint(len(words), (3, 32))
    logits, _ = ours(tokens, tokens >= 0)
    assert_equal(logits, theirs(tokens).logits.flatten(0, 1), 1e-4)
    config.activation_function = "relu"
    config.save_pretrained(folder)
    refused("gpt2: .* logits are", gpt2.read_gpt2, folder)
