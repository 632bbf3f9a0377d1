"""Tokenizer, JSON lines, data folders, rows: the specification of plumbing/text.py. Run: python -m pytest tests/test_text.py"""

import ast
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minippo
from plumbing import text
from plumbing.settings import UserError
from plumbing.text import (
    KEYS, Tokenizer, encode_rows, load_jsonl, pad, pad_completions, pieces, printable, read_rows, texts_of, waiting,
)  # fmt: skip
from tiny import assert_equal, marks

TEXTS = ["low low low lower", "The cat sat.\n\nThe dog sat, too!", "ça là çà", "日本語 日本", "aaaa aaaaa", "won't 123 12"]
UNICODE = ["", " ", "What does a bee eat?", "\t\r\n\n  x ", "naïve ﬁ Å Å", "日本語", "👩‍👩‍👧 🐝",
           "\x00\x7f\u200b\ufeff\U0010ffff", "مرحبا", "' 'll 've"]  # fmt: skip


@pytest.mark.parametrize("text", UNICODE)
@pytest.mark.parametrize("texts", [[], TEXTS])
def test_any_text_survives_encoding_and_decoding(texts, text):
    tokenizer = Tokenizer.train(texts, 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_characters_survive_encoding_and_decoding():
    tokenizer, draw = Tokenizer.train(TEXTS, 300), random.Random(0)
    for _ in range(200):
        ranges = [(0, 0x250), (0, 0xD800), (0xE000, 0x110000)]
        text = "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(8))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_replaced_rather_than_fatal():
    half = json.loads(r'"\ud83d"')
    tokenizer = Tokenizer.train([half, half], 300)
    assert "\N{REPLACEMENT CHARACTER}" in tokenizer.decode(tokenizer.encode(half))


@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>"])
def test_text_that_spells_the_end_token_does_not_give_its_id(text):
    tokenizer = Tokenizer.train(["<|endoftext|> <|endoftext|>"] * 9, 400)
    assert tokenizer.eos not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_token_is_the_last_id_and_decodes_to_nothing():
    tokenizer = Tokenizer.train(TEXTS, 300)
    assert tokenizer.eos == len(tokenizer.tokens) == tokenizer.vocab_size - 1
    assert tokenizer.decode([*tokenizer.encode("hi"), tokenizer.eos]) == "hi"


def test_the_most_frequent_pair_is_merged_first_and_a_pair_seen_once_never():
    # "low" once, " low" twice, " lower" once: "ow" and "lo" 4 times each (the larger bytes win), then l+ow 4, then " "+low 3.
    assert Tokenizer.train(["low low low lower"], 1000).tokens[256:] == [b"ow", b"low", b" low"]


def test_all_256_bytes_are_in_the_vocabulary_under_their_own_number():
    assert Tokenizer.train(TEXTS, 300).tokens[:256] == [bytes([b]) for b in range(256)]


@pytest.mark.parametrize("texts", [[], [""], ["a"], ["ab"], ["aa aa aa"], TEXTS])
@pytest.mark.parametrize("size", [257, 258, 259, 280, 1000])
def test_the_vocabulary_is_never_larger_than_asked_and_holds_no_token_twice(texts, size):
    tokenizer = Tokenizer.train(texts, size)
    assert 257 <= tokenizer.vocab_size <= size and len(set(tokenizer.tokens)) == len(tokenizer.tokens)


def learn_slowly(words, size):
    """The same vocabulary, every pair counted anew for every merge. words: {word: how often}."""
    tokens, parts = [bytes([b]) for b in range(256)], {word: [bytes([b]) for b in word.encode()] for word in words}
    while len(tokens) + 1 < size:
        counts = {}
        for word, times in words.items():
            for a, b in itertools.pairwise(parts[word]):
                counts[a + b] = counts.get(a + b, 0) + times
        if max(counts.values(), default=0) < 2:
            break
        tokens.append(max(counts, key=lambda pair: (counts[pair], pair)))
        parts = {word: text.merge(part, tokens[-1]) for word, part in parts.items()}
    return tokens, parts


@pytest.mark.parametrize("seed", range(8))
def test_the_trained_merges_are_those_that_encoding_makes(seed):
    draw = random.Random(seed)
    words = {"".join(draw.choice("abc") for _ in range(draw.randint(1, 9))): draw.randint(1, 5) for _ in range(15)}
    texts = [word for word, times in words.items() for _ in range(times)]
    tokens, parts = learn_slowly(words, 290)
    tokenizer = Tokenizer.train(texts, 290)
    assert tokenizer.tokens == tokens
    for word in words:
        assert [tokenizer.tokens[i] for i in tokenizer.encode(word)] == parts[word]


def test_the_vocabulary_does_not_depend_on_the_order_of_the_texts_or_on_the_hash_seed():
    tokens = Tokenizer.train(TEXTS, 330).tokens
    assert Tokenizer.train(TEXTS[::-1], 330).tokens == tokens
    code = f"from plumbing.text import Tokenizer; print(Tokenizer.train({TEXTS!r}, 330).tokens)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONIOENCODING": "utf-8"}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=Path(minippo.__file__).parent)
    assert ast.literal_eval(printed.decode()) == tokens


GOOD_ROW = '{"prompt": "a", "completion": "b"}'


@pytest.mark.parametrize("content", [
    GOOD_ROW.encode(), GOOD_ROW.encode() + b"\n", b"\xef\xbb\xbf" + GOOD_ROW.encode(), GOOD_ROW.encode() + b"\r\n",
    b"\n\n  \n" + GOOD_ROW.encode() + b"\n\t\r\n\n", b'{"x": [1], "completion": "b", "prompt": "a", "y": null}',
], ids=["no newline at the end", "newline", "byte-order mark", "CRLF", "blank lines", "other keys, other order"])  # fmt: skip
def test_odd_but_harmless_json_lines_are_read(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert load_jsonl(tmp_path / "rows.jsonl", ("prompt", "completion")) == [("a", "b")]


def test_a_value_given_twice_is_the_last_and_half_a_surrogate_pair_can_be_encoded(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a", "prompt": "b\\ud800"}')
    (row,) = load_jsonl(tmp_path / "rows.jsonl", ["prompt"])
    assert row == ("b\ud800",) and Tokenizer.train(row, 300).encode(*row)[0] == ord("b")


def test_rows_keep_their_order_and_values_their_spaces_and_line_ends(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": " a\\n"}\n{"prompt": ""}\n{"prompt": "\u2028é"}', encoding="utf-8")
    assert load_jsonl(tmp_path / "rows.jsonl", ["prompt"]) == [(" a\n",), ("",), ("\u2028é",)]


@pytest.mark.parametrize("content, says", [
    (b"", ["no rows", "prompt"]),
    (b"\n \n", ["no rows"]),
    (b"prompt,completion\n", ["line 1", "not JSON"]),
    (GOOD_ROW.encode() + b'\n{"prompt": "a",', ["line 2", "not JSON"]),
    (b'\n\n{"prompt": "a"} {"prompt": "b"}', ["line 3", "not JSON"]),
    (b"[" * 100_000, ["line 1", "a JSON array", "data/convert.py"]),
    (b"1" * 10_000, ["line 1"]),
    (b'["a", "b"]', ["line 1", "list", "object", "data/convert.py"]),
    (b'"a"', ["line 1", "str", "object"]),
    (b"null", ["line 1", "object"]),
    (b'{"prompt": "a"}', ["line 1", "'completion'", "'prompt'"]),
    (b"{}", ["line 1", "'prompt'", "no key"]),
    (b'{"prompt": 7, "completion": "b"}', ["line 1", "'prompt'", "string", "7"]),
    (b'{"prompt": "a", "completion": null}', ["line 1", "'completion'", "string", "null"]),
    (b'{"prompt": "a", "completion": ["b"]}', ["line 1", "'completion'", '["b"]']),
    (b"[{}]", ["line 1", "list", "object"]),
    (b"[\n" + GOOD_ROW.encode() + b"\n]", ["line 1", "a JSON array", "data/convert.py", "one JSON object a line"]),
    (b"7", ["line 1", "int", "object"]),
    (b"true", ["line 1", "bool", "object"]),
    (b"NaN", ["line 1", "float", "object"]),
    (b"prompt: a", ["line 1", "not JSON"]),
    (b"{'prompt': 'a', 'completion': 'b'}", ["line 1", "not JSON"]),
    (b'{"prompt": "a", "completion": "b",}', ["line 1", "not JSON"]),
    (b"// rows\n" + GOOD_ROW.encode(), ["line 1", "not JSON"]),
    (b'{"prompt": "a\tb", "completion": "c"}', ["line 1", "not JSON"]),
    (GOOD_ROW.encode() + b"\n\x00\x00", ["line 2", "not JSON"]),
    (b'{"Prompt": "a", "completion": "b"}', ["line 1", "no key 'prompt'", "'Prompt'"]),
    (b'{"text": "a"}', ["line 1", "no key 'prompt'", "'text'"]),
    (b'{"messages": [{"role": "user", "content": "a"}]}', ["line 1", "no key 'prompt'", "'messages'", "as one text"]),
    (b'{"prompt": true, "completion": "b"}', ["line 1", "'prompt'", "string", "true"]),
    (b'{"prompt": {"text": "a"}, "completion": "b"}', ["line 1", "'prompt'", "string", '{"text": "a"}']),
    (b'{"prompt": "a", "completion": NaN}', ["line 1", "'completion'", "string", "NaN"]),
    (b'{"prompt": "a", "completion": ' + b"[" * 50 + b"]" * 50 + b"}", ["line 1", "'completion'", "[[["]),
    ("{\"prompt\": \"é\"}".encode("latin-1"), ["line 1", "not UTF-8"]),
    (GOOD_ROW.replace("b", "é").encode()[:-3], ["line 1", "not UTF-8"]),
    (gzip.compress(GOOD_ROW.encode()), ["line 1", "not UTF-8"]),
    (GOOD_ROW.encode() + b'\n{"prompt": "\xff"}', ["line 2", "not UTF-8"]),
    (GOOD_ROW.encode("utf-16"), ["line 1", "not UTF-8"]),
], ids=str)  # fmt: skip
def test_a_bad_row_is_refused_with_the_file_the_line_and_what_was_found(tmp_path, content, says):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_jsonl(path, ("prompt", "completion"))
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in [str(path), *says])


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read") as error:
            load_jsonl(path, ("prompt",))
        assert str(path) in str(error.value) and "prompt" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not gzip", gzip.compress(b'{"prompt": "a"}' * 99)[:-9], gzip.compress(b"x" * 99)[:30]])
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "rows.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match="rows.jsonl.gz"):
        load_jsonl(tmp_path / "rows.jsonl.gz", ("prompt",))


@pytest.mark.parametrize("row, hint", [
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}, "convert.py cuts whole transcripts"),
    ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}, "messages of a chat"),
])  # fmt: skip
def test_transcripts_and_chats_are_refused_with_a_hint(tmp_path, row, hint):
    (tmp_path / "pref_train.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=hint):
        load_jsonl(tmp_path / "pref_train.jsonl", ("prompt", "chosen", "rejected"))


def test_padding_is_on_the_right_and_every_row_starts_at_column_0():
    tokens, lengths = pad([[7, 8], [5, 6, 9, 4], [3]])
    assert lengths.tolist() == [2, 4, 1] and tokens.shape == (3, 4)
    assert [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)] == [[7, 8], [5, 6, 9, 4], [3]]


def test_the_mask_of_a_completion_begins_at_its_first_token_and_ends_at_its_last():
    tokens, mask = pad_completions([([1, 2], [3, 4, 9]), ([5], [9])])
    assert tokens.tolist() == [[1, 2, 3, 4, 9], [5, 9, 0, 0, 0]]
    assert_equal(mask, marks(".xxx", "x..."))


@pytest.mark.parametrize("size, sizes", [(2, [2, 2, 1]), (3, [3, 2]), (5, [5]), (7, [5]), (0, [5])])
def test_pieces_hold_every_row_once_with_rows_of_similar_length_together(size, sizes):
    rows = [([i] * n, [i]) for i, n in enumerate((5, 1, 4, 2, 3))]
    cut = pieces(rows, size)
    assert [len(piece) for piece in cut] == sizes
    assert [len(prompt) for piece in cut for prompt, _ in piece] == [1, 2, 3, 4, 5]


def test_prompts_and_responses_are_read_back_as_text():
    tokenizer = Tokenizer.train([], 257)
    tokens = torch.tensor([[*b"ab c", tokenizer.eos, 0], [*b"abc", *b"de", tokenizer.eos]])
    assert texts_of(tokenizer, tokens, marks(".xxx.", "..xxx")) == (["ab", "abc"], [" c", "de"])


def test_control_characters_are_spelled_out_and_line_ends_stay():
    assert printable("a\x1b[31m\n\u200bé\tx") == "a\\x1b[31m\n\\u200bé\\tx"


def test_prompt_and_completion_are_encoded_apart_and_the_completion_gets_its_end_token():
    tokenizer = Tokenizer.train(["ab ab ab"], 300)
    assert tokenizer.encode("ab") == [256]  # together they would be one token
    assert encode_rows([("a", "b", "ab")], tokenizer, 10) == [([97], [98, tokenizer.eos], [256, tokenizer.eos])]


def test_rows_that_do_not_fit_are_skipped_or_cut_and_counted(capsys):
    tokenizer = Tokenizer.train([], 257)
    rows = [("", "b"), ("abcd", "e"), ("abcde", "f"), ("abc", ""), ("abc", "d"), ("abc", "de"), ("abc", "d", "de")]
    rows += [("abc", "de", "dd")]
    encoded = encode_rows(rows, tokenizer, 5)
    a, b, c, d, e = map(ord, "abcde")
    skipped, cut, uneven = capsys.readouterr().out.splitlines()
    assert "2 skipped" in skipped and "4 cut" in cut  # no prompt, and one that fills the context; "e", "de", again "de", and both
    assert "1 of these pairs keep the end of one answer alone" in uneven  # "d" does, "de" does not
    assert encoded[0] == ([a, b, c, d], [e])
    assert encoded[1:3] == [([a, b, c], [tokenizer.eos]), ([a, b, c], [d, tokenizer.eos])]
    assert encoded[3:] == [([a, b, c], [d, e]), ([a, b, c], [d, tokenizer.eos], [d, e]), ([a, b, c], [d, e], [d, d])]
    with pytest.raises(UserError, match="--context"):
        encode_rows([("abcde", "f")], tokenizer, 5)


def test_pairs_that_are_equal_or_become_so_by_cutting_are_skipped_and_counted(capsys):
    tokenizer = Tokenizer.train([], 257)
    rows = [("abc", "de", "df"), ("abc", "def", "deg"), ("abc", "d", "d"), ("abc", "d", "e")]
    assert len(encode_rows(rows, tokenizer, 5)) == 2 and "2 skipped: the two answers are the same" in capsys.readouterr().out
    with pytest.raises(UserError, match="no two answers differ.*--context"):
        encode_rows(rows[1:3], tokenizer, 5)


def test_who_waits_is_told_how_far_it_is(capsys, monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(text.time, "perf_counter", lambda: next(clock))
    assert list(waiting("answers", list(range(7)), 2)) == [[0, 1], [2, 3], [4, 5], [6]]
    assert capsys.readouterr().out.splitlines() == ["    4 of 7 answers, 4 s left", "    7 of 7 answers, 0 s left"]
    assert list(waiting("answers", [1], 2)) == [[1]]


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
