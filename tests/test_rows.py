"""Files, rows and token ids: data/files.py, data/rows.py, plumbing/rows.py, plumbing/tokenizer.py."""

import os
import random
import time

import numpy as np
import pytest

from cli import write_rows
from data import files
from data.files import UserError
from data.rows import held_out, load_rows, read_rows
from plumbing.rows import batch_of, count_tokens, encode_rows, in_parts, pad, pad_completions
from plumbing.rows import read_prompts, spread_over
from plumbing.tokenizer import Tokenizer, texts_of

TOKENIZER = Tokenizer.train(["ab ab"], 258)  # bytes, "ab", and the end
A, B, C, D, E = map(ord, "abcde")
END = 257


def test_a_file_is_written_whole_beside_its_place_or_not_at_all(tmp_path, monkeypatch):
    path, new, full, synced = tmp_path / "new" / "er" / "x", b"\xc3\xa9\n", "No space left", []

    def fail(file):
        file.write(b"half")
        assert sorted(os.listdir(path.parent)) == [f".x.{os.getpid()}.tmp", "x"]
        raise errors.pop()

    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    for contents in ("é\n", new, lambda file: file.write(new)):
        files.write_file(str(path), contents)
        assert path.read_bytes() == new and synced.pop() == 3
    # torch.save hides the system's error behind its own.
    errors = [KeyboardInterrupt(), OSError(28, full), RuntimeError(full + "\nat"), RuntimeError()]
    errors[1].__context__, errors[3].__context__ = KeyError(), OSError(28, full)
    for _ in range(3):
        with pytest.raises(UserError, match=rf"x: cannot be written \({full}\); what was there"):
            files.write_file(path, fail)
    with pytest.raises(KeyboardInterrupt):
        files.write_file(path, fail)
    assert path.read_bytes() == new and os.listdir(path.parent) == ["x"]


def test_lines_are_read_as_they_are_and_a_fault_is_named_with_its_line(tmp_path):
    path, rows = tmp_path / "x", [{"a": "é\u2028\x85 \n"}, {"a": "\ud83d"}, {}]
    files.write_jsonl(path, rows)
    assert path.read_bytes() == '{"a": "é\u2028\x85 \\n"}\n{"a": "\\ud83d"}\n{}\n'.encode()
    path.write_bytes(b"\xef\xbb\xbf\r\n \n" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert files.read_jsonl(path) == dict(zip((3, 4, 5), rows))
    wanted = "wanted is one JSON object a line with prompt"
    for data, says in (
        (b"{}\n\xc3\xa9\n\xff\n", r"x, line 3: not UTF-8 \(.*\); save"),
        (b"{}\n{", r"x, line 2: not JSON \("),
        (b"[" * 100_000, r"x, line 1: not JSON \("),
        (b"\n[1]", f"x, line 2: found list; {wanted}"),
        (b'{"prompt": "a"}', f"x, line 1: no 'completion'; {wanted}"),
        (b'{"completion": "", "prompt": 7}', "'prompt' is 7; .*, completion as strings"),
        (b"\n", f"x: no rows; {wanted}"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=says):
            load_rows(path, "sft")
    path.write_text('{"completion": "b", "prompt": "a"}\n')
    assert load_rows(path, "sft") == [("a", "b")]
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')  # the last line of a log, half written
    assert files.read_log(path) == [{"step": 1}, {"step": 2}]
    assert files.read_log(tmp_path / "no") == []


def test_a_hash_holds_out_one_prompt_in_twenty_and_one_at_least():
    numbers = [f"{i}" for i in range(1000)]
    assert held_out(numbers[:40] * 2) == {"39"} and held_out(numbers[39::-1], 0.1) == {"9", "39"}
    assert len(held_out(numbers)) == 55 and held_out(numbers, 1) == set(numbers)
    assert held_out(["\ud83d", "b", "c"], 1e-9) == {"c"}
    assert held_out("abcdefgh", 1 - 1e-9) == {*"abcdefh"}
    assert held_out(numbers, 0) == held_out("aa", 0.5) == held_out([], 0.5) == set()


def test_without_a_val_file_some_prompts_are_held_out_with_all_their_rows(tmp_path, capsys):
    def read(task):
        return [read_rows(tmp_path, task, split) for split in ("train", "val")]

    sft = [("9", "1"), ("39", "2"), ("39", "3"), ("9", "4")]
    pref = [("5", "a", "b"), ("39", "c", "d"), ("5", "a", "f")]
    write_rows(tmp_path, sft_train=sft)
    assert read("sft") == [[sft[0], sft[3]], sft[1:3]]
    says = f"read {tmp_path}/sft_train.jsonl: 2 rows for val; there is no sft_val.jsonl, so"
    assert says in capsys.readouterr().out
    # Demonstrations serve for prompts; pairs serve for all, and come first.
    assert read("prompts") == [[("9",)], [("39",)]]
    with pytest.raises(UserError, match="pref_train.jsonl: not found; --data names the folder"):
        read("pref")
    write_rows(tmp_path, pref_train=pref)
    assert read("prompts") == [[("5",)], [("39",)]]
    assert "no prompts_train.jsonl: pref_train.jsonl serves" in capsys.readouterr().out
    (tmp_path / "sft_train.jsonl").unlink()
    assert read("sft") == [[("5", "a"), ("5", "a")], [("39", "c")]]
    write_rows(tmp_path, pref_val=pref[:1], prompts_train=[("5",)])
    assert read("pref") == [pref, pref[:1]]
    assert capsys.readouterr().out.endswith("pref_val.jsonl: 1 rows\n")
    with pytest.raises(UserError, match="too few prompts to hold any out; write a prompts_val"):
        read("prompts")


def test_rows_are_encoded_skipped_or_cut_and_what_happened_is_said(tmp_path, capsys):
    rows = [("", "b"), ("a", "b"), ("cded", "e"), ("cdedc", ""), ("cde", ""), ("cde", "dc")]
    pairs = [("cde", "d", "de"), ("cde", "dec", "ded"), ("cde", "d", "d"), ("e", "cab", "ab")]
    got, cde = encode_rows(rows + pairs + rows[1:2], TOKENIZER, 5), [C, D, E]
    # Prompt and answer apart: together "ab" would be one token.
    assert got[:3] == [([A], [B, END]), ([C, D, E, D], [E]), (cde, [END])]
    assert got[3:5] == [(cde, [D, C]), (cde, [D, END], [D, E])]
    assert got[5:] == [([E], [C, 256, END], [256, END]), got[0]]
    assert capsys.readouterr().out == (
        "    2 skipped: the prompt is empty or leaves no room in the context\n"
        "    2 skipped: the two answers are the same\n    3 cut at the end of the context\n"
        "    the longest has 7 tokens, the context 5 (train_sft.py --context)\n"
    )
    with pytest.raises(UserError, match="no row fits into a context of 5 tokens"):
        encode_rows(rows[:1], TOKENIZER, 5)
    write_rows(tmp_path, prompts_val=[("a",)])
    assert read_prompts(tmp_path, "val", TOKENIZER, 9) == [[A]]
    for length, says in ((5, False), (6, True)):  # a prompt alone needs room for one token
        encode_rows([("c",), ("c" * length,)], TOKENIZER, 6)
        assert ("the longest has 7 tokens" in capsys.readouterr().out) == says


def test_rows_stand_at_column_0_padded_on_the_right_with_a_mask_over_the_completion():
    rows = [([1, 2], [7]), ([3], [8, 9, 10]), ([4, 5, 6], [11, 12])]
    tokens, mask = pad_completions(rows)
    assert tokens.tolist() == [[1, 2, 7, 0, 0], [3, 8, 9, 10, 0], [4, 5, 6, 11, 12]]
    assert mask.int().tolist() == [[0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]
    assert pad([[1], [2, 3]])[1].tolist() == [1, 2] and count_tokens(rows) == 12


def test_in_each_pass_every_row_comes_once_in_the_order_of_seed_and_pass(capsys, monkeypatch):
    got = [x for step in range(7) for x in batch_of("abcdefg", step, 3, 5)]
    orders = [np.random.default_rng([5, epoch]).permutation(7) for epoch in range(3)]
    assert got == ["abcdefg"[i] for i in np.concatenate(orders)]
    for n, step in ((1, 10), (3, 4), (4, 3), (9, 2), (10, 1), (99, 1)):
        assert spread_over(list(range(10)), n) == list(range(0, 10, step))
    # Who waits more than four seconds is told how far it is.
    times = iter([9, 13, 14, 18, 19, 0, 9, 18])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    assert list(in_parts("abcdefg", 2, "answers")) == ["ab", "cd", "ef", "g"]
    says = "    4 of 7 answers, 4 s left\n    7 of 7 answers, 0 s left\n"
    assert list(in_parts("abc", 2)) == ["ab", "c"] and capsys.readouterr().out == says


def test_any_text_survives_encoding_and_decoding_and_none_gives_the_end_token():
    texts = ["", "a<|endoftext|>", "it's low, lower\n\n\t  12", "👩\u200d🐝\ufeff\U0010ffff" * 9]
    texts += ["".join(map(chr, range(i, 0xD800, 99))) for i in range(99)]
    for learned in ([], texts[:20]):
        tokenizer = Tokenizer.train(learned, 300)
        assert tokenizer.vocab_size == tokenizer.eos + 1 == len(set(tokenizer.tokens)) + 1 <= 300
        for text in texts:
            ids = tokenizer.encode(text)
            assert tokenizer.eos not in ids and tokenizer.decode([*ids, tokenizer.eos]) == text
            assert b"".join(tokenizer.tokens[i] for i in ids) == text.encode()


def test_the_most_frequent_pair_is_merged_first_with_ties_the_same_everywhere():
    text = "".join(random.Random(0).choices("abc ", k=400))
    learned = "cb|aa| b|ac|ab| c|  | cb| bb| ac|cbb| aa|acb|cc|abc|ccbb|cac|abb|aac"
    tokens = Tokenizer.train([text[:155], text[155:]], 256 + 20).tokens[256:]
    assert b"|".join(tokens).decode() == learned  # as if pairs were counted anew for every merge
    assert len(Tokenizer.train(["abcd"], 300).tokens) == 256  # no pair occurs twice
    # No token spans two words, which are those of GPT-2.
    tokens = Tokenizer.train(["it's 12 a-b  c"] * 9, 999).tokens[256:]
    assert set(tokens) == {b"it", b"'s", b"12", b" 12", b" a", b" c"}


def test_tokens_are_spelled_and_prompts_and_responses_read_back():
    tokenizer = Tokenizer.train([" é é", "\ud83d", "a\ud83db"], 300)  # half a pair is replaced
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\N{REPLACEMENT CHARACTER}b"
    spelled = [tokenizer.spell(i) for i in (tokenizer.eos, 65, 0xC3, *tokenizer.encode(" é"))]
    assert spelled == ["<eos>", "A", "\\xc3", " é"]
    pairs = [("Hé", "y"), ("a", "two words"), ("abc", "")]
    ids = [(tokenizer.encode(a), [*tokenizer.encode(b), tokenizer.eos]) for a, b in pairs]
    prompts, responses = texts_of(tokenizer, *pad_completions(ids))
    assert list(zip(prompts, responses)) == pairs
