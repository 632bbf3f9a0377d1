"""What the scripts share: plumbing/ without the page."""

from __future__ import annotations  # so the types of Example's fields are strings

import json
import os
import random
import re
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_sft
from cli import write_data
from data.rows import UserError
from minippo import frozen_copy
from plumbing import files, gpt2, text
from plumbing.models import load_checkpoint, load_function, text_score
from plumbing.settings import RunConfig, find_device, printable, read_flags, run_script
from plumbing.text import Tokenizer, batch_of, encode_rows, pad_completions
from plumbing.watch import check_start, warn, watch
from tiny import inf, nan, stir, tiny_gpt

A, B, C, D, E, AB, END = *b"abcde", 256, 257
TOKENIZER = Tokenizer.train(["ab ab"], 258)


def refused(words, function, *arguments):
    with pytest.raises(UserError, match=words):
        function(*arguments)


# Settings


@dataclass
class Example(RunConfig):
    size: int = 4  # how large, 100% sure
    calm: bool = True  # say little
    words: str = ""

    def __post_init__(self):
        self.at_least_1("size")


def test_flags_are_the_fields_of_a_dataclass(monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/me")
    config = read_flags(Example, "", ["x", "--size=8", "--resume", "y", "--no_calm", "--out=~/b"])
    assert config == Example(out=Path("/me/b"), resume=True, size=8, calm=False, words=["x", "y"])
    with pytest.raises(SystemExit, match="0"):
        read_flags(Example, "Text.", ["-h"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--size int how large, 100% sure (4)" in printed


MISTAKES = [
    (["--size=0"], None, 2, r"^x.py: size \(0\)"),
    (["--siz=3"], None, 2, "--siz"),
    ([], UserError("\x1b[31m\nmore"), 2, r"^x.py: \\x1b\[31m\\nmore$"),
    ([], KeyboardInterrupt(), 130, "--resume"),
    ([], ModuleNotFoundError("", name="trl"), 2, "pip install trl$"),
    ([], FloatingPointError("nan"), 2, "nan.*--lr"),
    ([], OSError(28, "No space left", "a.txt"), 2, "a.txt: No space left$"),
    ([], RuntimeError("CUDA out of memory.\nmore"), 2, "memory.*--micro_batch"),
]
BUGS = [ValueError("b"), OSError("c"), ModuleNotFoundError("", name="my")]


def raising(error):
    def function(argument):
        raise error

    return function


def test_a_users_mistake_is_one_line_and_a_bug_of_ours_a_traceback(monkeypatch, capsys):
    for flags, error, status, words in MISTAKES:
        monkeypatch.setattr("sys.argv", ["folder/x.py", *flags])
        with pytest.raises(SystemExit, match=str(status)):
            run_script(raising(error), Example, "")
        printed = capsys.readouterr().err
        assert re.search(words, printed) and printed.count("\n") == 1, printed
    for error in BUGS:
        with pytest.raises(type(error)):
            run_script(raising(error), Example, "")
    for name in ("gpu", "cuda:99"):
        refused(f"--device {name}: .*cpu", find_device, name)


def test_no_text_controls_the_terminal_but_joiners_are_kept():
    kept = "é 日本\u200c\u200d\u00a0\n\t"
    assert printable(kept + "\x1b\u202e\r") == kept + r"\x1b\u202e\r"
    assert printable("é\u200d\n", keep="") == r"é\u200d\n"


# Files


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "x"
    files.write_text(path, "é\ud800")
    for error in (KeyboardInterrupt(), OSError(28, "disk full"), RuntimeError("disk full")):
        with pytest.raises((KeyboardInterrupt, UserError)):
            files.write_file(path, raising(error))
    assert path.read_bytes() == b"\xc3\xa9\\ud800" and list(path.parent.iterdir()) == [path]


class Code:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_damaged_file_or_one_of_another_kind_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("sft.pt")
    refused("sft.pt: not found; train_sft.py makes it", load_checkpoint, path, ["sft"])
    torch.save({"kind": "sft"}, path)
    refused("sft.pt: holds 'sft', not ppo or rm", load_checkpoint, path, ["ppo", "rm"])
    whole = path.read_bytes()
    for contents in (b"", b"text", whole[:-9], whole, [1], {"a": 1}, {"kind": Code()}):
        if isinstance(contents, bytes):
            path.write_bytes(contents)
        else:
            torch.save(contents, path)
        refused("sft.pt: damaged, or ", load_checkpoint, path, ["sft"])
    assert not Path("evil").exists()


def test_a_state_is_saved_now_and_then_and_the_log_goes_on(tmp_path):
    record = files.Record(RunConfig(out=tmp_path), "x", 9, {})
    assert 25 < record.next_save - record.last_log <= 31
    for step, due, step_saved in ((1, inf, 0), (2, 0.0, 2), (3, inf, 2), (9, inf, 9), (1, 0.0, 1)):
        record.next_save = due
        record.save_if_due(step)
        assert files.read_torch(record.path, "")["step"] == step_saved
    files.write_text(tmp_path / "x.jsonl", '{"step": 1, "seconds": 70.0}\n')
    files.Record(RunConfig(out=tmp_path, resume=True), "x", 9, {}).log(2, {"loss": nan}, 10, [])
    *_, line = files.read_log(tmp_path / "x.jsonl")
    assert line["loss"] is None and 70 <= line["seconds"] < 80


# Text and batches


def test_any_text_survives_and_none_gives_the_end_token():
    texts = ["", "a<|endoftext|>", "it's low, lower\n\n\t  12", "👩\u200d🐝\ufeff\U0010ffff" * 9]
    texts += [" " * 1_000_000, "".join(map(chr, range(0, 0xD800, 7)))]
    for learned in ([], texts[1:4] * 2):
        tokenizer = Tokenizer.train(learned, 300)
        assert len(set(tokenizer.tokens)) == tokenizer.eos == tokenizer.vocab_size - 1 < 300
        for x in texts:
            ids = tokenizer.encode(x)
            assert tokenizer.eos not in ids and tokenizer.decode([*ids, tokenizer.eos]) == x
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83db")) == "a\ufffdb"


def test_the_most_frequent_pair_is_merged_first():
    letters = "".join(random.Random(0).choices("abc ", k=400))
    learned = "cb|aa| b|ac|ab| c|  | cb| bb| ac|cbb| aa|acb|cc|abc|ccbb|cac|abb|aac"
    tokens = Tokenizer.train([letters[:155], letters[155:]], 276).tokens[256:]
    assert b"|".join(tokens).decode() == learned  # as if pairs were counted anew every time
    assert len(Tokenizer.train(["abcd"], 300).tokens) == 256  # no pair occurs twice
    # No token spans two words of GPT-2; those of 65 letters are left out.
    tokens = Tokenizer.train(["it's 12 a-b  c " + 65 * "x"] * 9, 999).tokens[256:]
    assert set(tokens) == {b"it", b"'s", b"12", b" 12", b" a", b" c"}


ROWS = [  # prompt, answers, what is said
    ("a", "b", "ab", ""),  # encoded apart: "ab" would be one token
    ("cde", "dc", "d", "1 cut at the end of the context of 5 tokens .*; the first is row 2"),
    ("", "b", "c", "2 skipped: the prompt is empty; the first is row 3"),
    ("cdedc", "", "b", "1 skipped: the prompt leaves no room .*; the first is row 4"),
    ("cde", "dec", "ded", "1 skipped: the two answers do not differ .*; the first is row 5"),
    ("", "b", "c", ""),
]


def test_rows_are_encoded_cut_or_skipped(capsys):
    rows = [{"prompt": prompt, "a": a, "b": b} for prompt, a, b, _ in ROWS]
    encoded = encode_rows(rows, "ab", TOKENIZER, 5)
    assert encoded == [([A], [B, END], [AB, END]), ([C, D, E], [D, C], [D, END])]
    assert encoded[1][0].row is rows[1]
    notes = "".join(f"    {note}\n" for *_, note in ROWS if note)
    assert re.fullmatch(notes, capsys.readouterr().out)
    refused("no row is left: 1 skipped: .* no room", encode_rows, rows[3:4], "ab", TOKENIZER, 5)


def test_a_pass_has_every_row_once_and_depends_on_seed_and_step_alone():
    rows = sum((batch_of(range(7), step, 3, seed=1) for step in range(7)), [])
    first, second, third = text.chunks(rows, 7)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(7))
    assert first != second != third != first
    assert batch_of(range(7), 0, 7, seed=1) == first != batch_of(range(7), 0, 7, seed=2)
    assert sorted(batch_of([1, 2], 0, 6, 0)) == [1, 1, 1, 2, 2, 2]
    prompts = [[i] * (1 + i % 4) for i in range(12)]
    batch = text.prompt_batch(prompts, 5, SimpleNamespace(batch_size=24, group_size=2, seed=3))
    assert batch[::2] == batch[1::2] == sorted(batch[::2], key=len)
    assert sorted(batch[::2]) == prompts


def test_pairs_of_a_batch_are_similar_and_each_comes_once():
    rows = [([0] * (1 + i % 7), [1] * (i % 5), [i] * (i % 11)) for i in range(470)]
    batches = text.similar_batches(rows, 157, 3, seed=1)
    assert sorted(sum(batches, [])) == sorted(rows)
    lengths = [[len(x) + max(len(a), len(b)) for x, a, b in batch] for batch in batches]
    assert sum(max(batch) - min(batch) for batch in lengths) < 100 and lengths != sorted(lengths)


# Rewards

READ = encode_rows([{"prompt": "ab", "id": 7}, {"prompt": "ab"}], [], TOKENIZER, 9)
BATCH = [prompt for (prompt,) in READ]  # two rows with the same ids
TOKENS, MASK = pad_completions(list(zip(BATCH, [[C, END], [D, E]])))
ASKED = {"prompts": ["ab", "ab"], "completions": ["c", "de"], "id": [7, None]}
ASKED["completion_ids"] = [[C, END], [D, E]]


def reward(function):
    return text_score(function, TOKENIZER)(BATCH, TOKENS, MASK)


def test_a_reward_has_trls_signature_and_may_seed_everything():
    def function(**arguments):
        torch.manual_seed(0)
        assert arguments == ASKED
        return 1, 2.5

    before = torch.get_rng_state()
    assert reward(function).tolist() == [1, 2.5]
    assert torch.get_rng_state().equal(before)


def pooled(completions, **_):
    with get_context("fork").Pool(2) as pool:
        return pool.map(len, completions)


def one_by_one(completions, **_):
    yield from map(len, completions)


X = torch.tensor([1.0, 2.0])
RETURNED = [[1, 2], (True, 2.0), np.array([1, 2]), X.bfloat16(), X.clone().requires_grad_()]
REFUSED = [None, 3.0, "12", b"12", {1, 2}, {"c": 1, "de": 2}, [1], [1, 2, 3], X[0], X[:, None]]
REFUSED_DE = [nan, -inf, None, "2", [2], 1.1e6, 10**400]


def test_a_reward_returns_one_number_for_each_response():
    for function in (pooled, one_by_one, *(lambda x=x, **_: x for x in RETURNED)):
        assert reward(function).tolist() == [1, 2]
    for x in [*REFUSED, iter([1])]:
        refused("should return a list of 2 numbers", reward, lambda x=x, **_: x)
    for x in REFUSED_DE:
        refused("not .* for 'abde'", reward, lambda x=x, **_: [1, x])
    for name in ("math", "math:other", "math:pi", "no_such:x"):
        refused(f"{name}: .*my:score", load_function, name)


# Warnings


def check(policy, ref, scores=(0.0, 1.0), path=""):
    config = SimpleNamespace(max_new_tokens=6, temperature=0.7, policy=path)
    check_start(policy, ref, lambda *_: torch.tensor(scores), [[1], [2, 3]], config)


def test_ppo_starts_only_if_sampling_update_and_reference_agree(capsys):
    policy = tiny_gpt()
    ref = frozen_copy(policy)
    for scores in ((0.0, 1.0), (7.0, 7.0), (0.0, 30.0), (0.0, 0.01)):
        check(policy, ref, scores)
        unusual = "warning: the standard deviation" in capsys.readouterr().out
        assert unusual == (scores[1] in (30.0, 0.01))
    stir(ref)
    check(policy, ref, path="out/ppo.pt")  # a second round
    refused("nats from the reference", check, policy, ref)
    forward = policy.trunk.forward
    policy.trunk.forward = lambda tokens, cache=None, start=0: forward(tokens, cache)
    refused("a ratio is .* off 1", check, policy, policy)


HEALTHY = {"kl": 0.5, "entropy": 1.0, "eos_rate": 0.9}
WARNINGS = [
    (1, {"kl": -0.1}, [-0.1] * 16, "the KL is -0.100, below 0"),
    (1, {"kl": -0.1}, [-0.6, 0.4] * 8, ""),  # within its error
    (2, {"entropy": 0.01}, [0.5] * 16, "--lr"),
    (101, {"eos_rate": 0.0}, [0.5] * 16, "--max_new_tokens"),
    (3, {"eos_rate": 0.0}, [0.5] * 16, ""),
]


def test_what_looks_wrong_is_said_now_and_then(capsys):
    for step, stats, kl, words in WARNINGS:
        logprobs = torch.tensor(kl)[:, None]
        batch = {"old_logprobs": logprobs, "ref_logprobs": 0 * logprobs, "mask": logprobs < inf}
        warn(step, HEALTHY | stats, batch)
        printed = capsys.readouterr().out
        assert words in printed and bool(words) == bool(printed), words


def test_the_judge_grades_the_responses():
    zeros = 0.0 * MASK
    batch = {"tokens": TOKENS, "mask": MASK, "old_logprobs": zeros, "ref_logprobs": zeros}
    grades = {("ab", "c"): 3, ("ab", "de"): 0}
    watched = watch(2, HEALTHY, batch, BATCH, TOKENIZER, lambda *texts: grades[texts])
    assert watched == {"judge": 1.5}


# GPT-2


@torch.no_grad()
def assert_same_logits(ours, theirs):
    tokens = torch.randint(ours.config.vocab_size, (3, 32))
    logits = theirs.eval()(tokens).logits.flatten(0, 1)
    torch.testing.assert_close(ours(tokens, tokens >= 0)[0], logits, atol=1e-4, rtol=0)


def test_a_gpt_2_is_read_trained_and_written_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "gpt2"
    tokens = [*gpt2.BYTE_OF, "ab", "Ġc", "<|endoftext|>"]  # Ġ: a space
    files.write_text(folder / "vocab.json", json.dumps({x: i for i, x in enumerate(tokens)}))
    files.write_text(folder / "merges.txt", "#version: 0.2\na b\nĠ c\n")
    size = {"n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 3}
    config = transformers.GPT2Config(vocab_size=len(tokens), **size)
    theirs = stir(transformers.GPT2LMHeadModel(config), 0.3)
    theirs.save_pretrained(folder)
    assert_same_logits(gpt2.read_gpt2(folder)[0], theirs)
    write_data(tmp_path / "data")
    paths = {"data": tmp_path / "data", "out": tmp_path, "device": "cpu"}
    train_sft.train(train_sft.Config(**paths, init=str(folder), steps=3, lr=0.1))
    gpt2.main(gpt2.Config([tmp_path / "sft.pt", folder, tmp_path / "new"]))
    ours, _, _ = load_checkpoint(tmp_path / "sft.pt", ["sft"])
    assert_same_logits(ours, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "new"))
    config.activation_function = "relu"
    config.save_pretrained(folder)
    refused("gpt2: .* logits are", gpt2.read_gpt2, folder)
