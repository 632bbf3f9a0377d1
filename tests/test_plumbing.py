"""Data folders, batches, and what else plumbing.py does that no script shows. Run: python -m pytest tests/test_plumbing.py"""

import gzip
import itertools
import json
import math

import pytest
import torch

from minippo import Tokenizer, UserError
from plumbing import KEYS, batches, encode_rows, join_rows, read_rows


@pytest.mark.parametrize("rows, batch_size", [(1, 64), (5, 64), (64, 64), (65, 64), (130, 4)])
def test_every_row_comes_once_per_pass_also_when_there_are_fewer_than_a_batch(rows, batch_size):
    count = math.ceil(rows / batch_size)
    stream = batches(rows, batch_size, seed=3)
    passes = [list(itertools.islice(stream, count)) for _ in range(3)]
    for one in passes:
        assert sorted(itertools.chain.from_iterable(one)) == list(range(rows))
        assert all(0 < len(numbers) <= batch_size for numbers in one)
    assert list(itertools.islice(batches(rows, batch_size, seed=3), 3 * count)) == sum(passes, [])
    if rows >= 5:
        assert passes[0] != passes[1] and list(itertools.islice(batches(rows, batch_size, seed=4), count)) != passes[0]


def test_prompt_and_completion_are_encoded_apart_and_the_completion_gets_its_end_token():
    tokenizer = Tokenizer.train(["ab ab ab"], 300)
    assert tokenizer.encode("ab") == [256]  # together they would be one token
    assert encode_rows([("a", "b", "ab")], tokenizer, 10) == [([97], [98, tokenizer.eot], [256, tokenizer.eot])]


def test_rows_that_do_not_fit_are_skipped_or_cut_and_counted(capsys):
    tokenizer = Tokenizer.train([], 257)
    rows = [("", "b"), ("abcd", "e"), ("abcde", "f"), ("abc", ""), ("abc", "d"), ("abc", "de"), ("abc", "d", "de")]
    encoded = encode_rows(rows, tokenizer, 5)
    a, b, c, d, e = map(ord, "abcde")
    skipped, cut = capsys.readouterr().out.splitlines()
    assert "2 skipped" in skipped and "3 cut" in cut  # no prompt, and one that fills the context; then "e", "de" and again "de"
    assert encoded[0] == ([a, b, c, d], [e])
    assert encoded[1:3] == [([a, b, c], [tokenizer.eot]), ([a, b, c], [d, tokenizer.eot])]
    assert encoded[3:] == [([a, b, c], [d, e]), ([a, b, c], [d, tokenizer.eot], [d, e])]
    with pytest.raises(UserError, match="--context"):
        encode_rows([("abcde", "f")], tokenizer, 5)


def write_rows(folder, **files):
    """write_rows(folder, pref_train=[("a", "b", "c"), ...]) writes pref_train.jsonl."""
    for name, rows in files.items():
        keys = KEYS[name.split("_")[0]]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))


def test_a_data_folder_is_read_file_by_file(tmp_path, capsys):
    pairs = {"pref_train": [("e", "f", "g")], "pref_val": [("i", "j", "k")]}
    write_rows(tmp_path, sft_train=[("a", "b")], sft_val=[("c", "d")], prompts_val=[("h",)], **pairs)
    assert read_rows(tmp_path, "sft", "train") == [("a", "b")] and read_rows(tmp_path, "sft", "val") == [("c", "d")]
    assert read_rows(tmp_path, "pref", "train") == [("e", "f", "g")] and read_rows(tmp_path, "pref", "val") == [("i", "j", "k")]
    assert read_rows(tmp_path, "prompts", "train") == [("e",)] and read_rows(tmp_path, "prompts", "val") == [("h",)]
    assert "sft_train.jsonl: 1 rows\n" in capsys.readouterr().out


def test_a_file_may_be_gzipped(tmp_path):
    write_rows(tmp_path, sft_train=[("a", "b")], sft_val=[("c", "d")])
    for name in ("sft_train", "sft_val"):
        plain = tmp_path / f"{name}.jsonl"
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert read_rows(tmp_path, "sft", "train") == [("a", "b")] and read_rows(tmp_path, "sft", "val") == [("c", "d")]


def test_without_a_val_file_a_twentieth_of_the_prompts_is_held_out_always_the_same_and_never_trained_on(tmp_path, capsys):
    write_rows(tmp_path, sft_train=[(f"prompt {i % 500}", f"{i}") for i in range(1000)])
    train, val = read_rows(tmp_path, "sft", "train"), read_rows(tmp_path, "sft", "val")
    assert "one prompt in twenty is held out" in capsys.readouterr().out
    assert len(train) + len(val) == 1000 and 20 <= len(val) <= 90
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in val}
    write_rows(tmp_path, sft_train=[(f"prompt {i % 500}", f"{i}") for i in reversed(range(1000))])
    assert sorted(read_rows(tmp_path, "sft", "val")) == sorted(val)


def test_pairs_alone_are_enough(tmp_path, capsys):
    pairs = [(f"prompt {i % 200}", f"good {i}", f"bad {i}") for i in range(400)]
    write_rows(tmp_path, pref_train=pairs)
    sft, prompts = read_rows(tmp_path, "sft", "train"), read_rows(tmp_path, "prompts", "train")
    said = capsys.readouterr().out
    assert "chosen responses serve" in said and "prompts of the pairs serve" in said
    train = read_rows(tmp_path, "pref", "train")
    assert sft == [(prompt, chosen) for prompt, chosen, _ in train]
    assert len(prompts) == len(set(prompts)) == len({prompt for prompt, *_ in train})
    val = read_rows(tmp_path, "prompts", "val")
    assert val and not set(val) & set(prompts)


def test_too_few_prompts_to_hold_any_out_are_refused(tmp_path):
    write_rows(tmp_path, sft_train=[("a", "b")])
    with pytest.raises(UserError, match="sft_val.jsonl"):
        read_rows(tmp_path, "sft", "val")


def test_joined_rows_are_those_of_the_parts_padded_on_the_right():
    one = torch.tensor([[1, 2]]), torch.tensor([[True]]), torch.tensor([0.5])
    two = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[True, True], [False, True]]), torch.tensor([1.5, 2.5])
    tokens, mask, scores = join_rows([one, two])
    assert tokens.tolist() == [[1, 2, 0], [3, 4, 5], [6, 7, 8]] and scores.tolist() == [0.5, 1.5, 2.5]
    assert mask.tolist() == [[True, False], [True, True], [False, True]] and mask.dtype == torch.bool
