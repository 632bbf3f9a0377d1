"""Text and token ids: plumbing/tokenizer.py and plumbing/rows.py."""

import gzip
import itertools
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cli import write_rows
from data.convert import held_out
from plumbing import rows as rows_module
from plumbing.errors import UserError, printable
from plumbing.rows import (
    by_length,
    count_tokens,
    encode_rows,
    load_jsonl,
    pad,
    pad_completions,
    read_ids,
    read_prompts,
    read_rows,
    progress,
)
from plumbing.tokenizer import Tokenizer, join_pairs, texts_of

BYTES = Tokenizer.train([], 257)
KINDS = [
    "abc ABC 012 .,'!?",
    "'s 're n't",
    " \t\n\r\u2028\x85\xa0",
    "éñüßçåÅﬁ",
    "日本語カナ한글مرحبא",
    "😀👩\u200d🐝🏽",
    "\x00\x07\x1b\x7f\u200b\u202e\ufeff",
    "\U0010ffff\ue000",
    "<|endoftext|>",
]


def random_text(rng, longest=30):
    """Of all kinds of characters, and of words that come more than once."""
    parts = [rng.choice(rng.choice(KINDS)) for _ in range(rng.randint(0, longest))]
    parts += rng.choices(
        ["<|endoftext|>", " low", "er", chr(rng.randrange(0xD800))], k=longest // 5
    )
    rng.shuffle(parts)
    return "".join(parts)


@pytest.mark.parametrize("seed", range(20))
def test_any_text_survives_encoding_and_decoding_and_none_gives_the_end_token(seed):
    rng = random.Random(seed)
    tokenizer = Tokenizer.train([random_text(rng) for _ in range(rng.randint(0, 9))], 320)
    assert tokenizer.tokens[:256] == [bytes([i]) for i in range(256)]
    assert tokenizer.eos == len(tokenizer.tokens) == len(set(tokenizer.tokens))
    assert tokenizer.vocab_size == tokenizer.eos + 1 <= 320
    for text in [random_text(rng) for _ in range(9)] + [
        "",
        "<|endoftext|>",
        "a<|endoftext|><|endoftext|>",
    ]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eos not in ids
        assert tokenizer.decode([*ids, tokenizer.eos]) == text
        assert b"".join(tokenizer.tokens[i] for i in ids) == text.encode()


def test_half_a_surrogate_pair_is_replaced():
    half = json.loads(r'"\ud83d"')
    tokenizer = Tokenizer.train([half, half, f"a{half}b"], 300)
    assert tokenizer.decode(tokenizer.encode(f"a{half}b")) == "a\N{REPLACEMENT CHARACTER}b"


def slow_merges(words, size):
    """The same vocabulary, every pair counted anew for every merge. words: {word: how often}."""
    tokens = [bytes([i]) for i in range(256)]
    parts = {word: [bytes([i]) for i in word.encode()] for word in words}
    while len(tokens) + 1 < size:
        pairs = Counter()
        for word, times in words.items():
            for a, b in itertools.pairwise(parts[word]):
                pairs[a + b] += times
        if max(pairs.values(), default=0) < 2:
            break
        tokens.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        parts = {word: join_pairs(part, tokens[-1]) for word, part in parts.items()}
    return tokens, parts


@pytest.mark.parametrize("seed", range(12))
def test_the_most_frequent_pair_is_merged_first_with_ties_the_same_everywhere(seed):
    rng = random.Random(seed)
    letters = ["".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(15)]
    words = {word: rng.randint(1, 5) for word in letters}
    texts = [word for word, times in words.items() for _ in range(times)]
    rng.shuffle(texts)
    size = rng.choice([257, 258, 270, 400])
    tokens, parts = slow_merges(words, size)
    tokenizer = Tokenizer.train(texts, size)
    assert tokenizer.tokens == tokens
    for word in words:
        assert [tokens[i] for i in tokenizer.encode(word)] == parts[word]


def test_words_are_those_of_gpt2_and_no_token_spans_two():
    # "low" twice and " low" twice: "ow" and "lo" count 4, and the larger bytes win.
    assert Tokenizer.train(["low low low lower"], 999).tokens[256:] == [b"ow", b"low", b" low"]
    tokens = Tokenizer.train(["it's 12 a-b  c"] * 9, 999).tokens[256:]
    assert set(tokens) == {b"it", b"'s", b"12", b" 12", b" a", b" c"}
    assert join_pairs([b"a", b"a", b"a", b"b"], b"aa") == [b"aa", b"a", b"b"]


def test_a_token_is_spelled_and_control_characters_steer_no_terminal():
    tokenizer = Tokenizer.train([" é é"] * 3, 300)
    assert tokenizer.spell(tokenizer.eos) == "<eos>" and tokenizer.spell(65) == "A"
    assert tokenizer.spell(tokenizer.encode(" é")[0]) == " é" and tokenizer.spell(0xC3) == "\\xc3"
    assert printable("a\x1b[31m\n\u202eé\tx🐝") == "a\\x1b[31m\n\\u202eé\\tx🐝"


@pytest.mark.parametrize("seed", range(5))
def test_prompts_and_responses_are_read_back_as_text(seed):
    rng = random.Random(seed)
    pairs = [(random_text(rng) + "x", random_text(rng) + "y") for _ in range(4)]
    rows = [(BYTES.encode(a), BYTES.encode(b) + [BYTES.eos]) for a, b in pairs]
    tokens, mask = pad_completions(rows)
    assert texts_of(BYTES, tokens, mask) == ([a for a, _ in pairs], [b for _, b in pairs])


# Rows


@pytest.mark.parametrize("seed", range(5))
def test_rows_stand_at_column_0_padded_on_the_right_with_a_mask_over_the_completion(seed):
    rng = random.Random(seed)
    rows = [([rng.randint(1, 9)] * rng.randint(1, 5), [7] * rng.randint(1, 5)) for _ in range(6)]
    tokens, mask = pad_completions(rows)
    same, lengths = pad([a + b for a, b in rows])
    assert torch.equal(tokens, same) and tokens.shape[1] == lengths.max() == mask.shape[1] + 1
    for (a, b), row, inside, length in zip(rows, tokens.tolist(), mask.tolist(), lengths.tolist()):
        assert row == a + b + [0] * (len(row) - length) and length == len(a + b)
        assert inside == [len(a) <= t < len(a + b) for t in range(1, len(row))]
    assert count_tokens(rows) == lengths.sum()
    for size in (1, 4, 9):
        parts = by_length(rows, size)
        assert [len(x) for x in parts[:-1]] == [size] * (len(parts) - 1)
        assert [len(a + b) for part in parts for a, b in part] == sorted(lengths.tolist())


def test_prompt_and_completion_are_encoded_apart_and_the_completion_gets_its_end_token():
    tokenizer = Tokenizer.train(["ab ab ab"], 300)
    assert tokenizer.encode("ab") == [256]  # together they would be one token
    got = encode_rows([("a", "b", "ab")], tokenizer, 10)
    assert got == [([97], [98, tokenizer.eos], [256, tokenizer.eos])]


def test_rows_that_do_not_fit_are_skipped_or_cut_and_counted(capsys):
    rows = [("", "b"), ("abcd", "e"), ("abcde", "f"), ("abc", ""), ("abc", "d"), ("abc", "de")]
    pairs = [("abc", "d", "de"), ("abc", "de", "dd"), ("abc", "def", "deg"), ("abc", "d", "d")]
    got = encode_rows(rows + pairs, BYTES, 5)
    a, b, c, d, e = map(ord, "abcde")
    end = BYTES.eos
    assert capsys.readouterr().out.splitlines() == [
        "    2 skipped: the prompt is empty or leaves no room in the context of 5 tokens",
        "    2 skipped: the two answers are the same, or the same up to the end of the context",
        "    4 cut at the end of the context of 5 tokens",
        "    1 of these pairs keep the end of one answer alone, which tells the two apart",
        "warning: 95 % of these rows would fit whole into a context of 7 tokens "
        "(train_sft.py --context, or another --init)",
    ]
    abc = [a, b, c]
    assert got[:4] == [([a, b, c, d], [e]), (abc, [end]), (abc, [d, end]), (abc, [d, e])]
    assert got[4:] == [(abc, [d, end], [d, e]), (abc, [d, e], [d, d])]
    with pytest.raises(UserError, match="no prompt leaves room in the context of 5 .*--context"):
        encode_rows(rows[2:3], BYTES, 5)
    with pytest.raises(UserError, match="no two answers differ within the context of 5"):
        encode_rows(pairs[2:], BYTES, 5)


@pytest.mark.parametrize("longer, context", [(0, None), (1, None), (2, 9)])
def test_a_context_that_keeps_95_percent_of_the_rows_whole_is_named(capsys, longer, context):
    for kind, more in (((), 3), (("bc",), 1), (("b", "bc"), 1)):
        rows = [("abc", *kind)] * (20 - longer) + [("abcdefg"[-more:] + "abcde", *kind)] * longer
        encode_rows(rows, BYTES, 6)
        said = capsys.readouterr().out
        assert ("warning" in said) == bool(context) == (f"context of {context} tokens (" in said)


GOOD = b'{"prompt": "a", "completion": "b"}'


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        GOOD + b"\n",
        b"\xef\xbb\xbf" + GOOD + b"\r\n",
        b"\n\n \t\n" + GOOD + b"\n\t\r\n\n",
        b'{"x": [1], "completion": "b", "prompt": "a", "y": null}',
        b'{"prompt": "c", "prompt": "a", "completion": "b"}',
    ],
)
def test_odd_but_harmless_json_lines_are_read(tmp_path, data):
    (tmp_path / "x.jsonl").write_bytes(data)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("x.jsonl", "x.jsonl.gz"):
        assert load_jsonl(tmp_path / name, ("prompt", "completion")) == [("a", "b")]


def test_values_are_read_as_they_are_in_their_order(tmp_path):
    texts = [" a\n", "", "\u2028é\x85", "\ud800", "z"]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"prompt": x}) for x in texts))
    assert load_jsonl(tmp_path / "x.jsonl", ["prompt"]) == [(x,) for x in texts]


@pytest.mark.parametrize("packed", [False, True])
def test_a_data_folder_is_read_file_by_file(tmp_path, capsys, packed):
    files = {"sft_train": [("a", "b")], "sft_val": [("c", "d")], "prompts_train": [("h",)]}
    files |= {
        "prompts_val": [("i",)],
        "pref_train": [("e", "f", "g")],
        "pref_val": [("j", "k", "l")],
    }
    write_rows(tmp_path, **files)
    for name in files if packed else ():
        path = tmp_path / f"{name}.jsonl"
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for name, rows in files.items():
        assert read_rows(tmp_path, *name.split("_")) == rows
        path = tmp_path / f"{name}.jsonl{'.gz' * packed}"
        assert capsys.readouterr().out == f"read {path}: 1 rows\n"
    assert read_prompts(tmp_path, "val", BYTES, 9) == [[ord("i")]]
    assert read_ids(tmp_path, "sft", "val", BYTES, 9) == [([ord("c")], [ord("d"), BYTES.eos])]


def test_without_a_val_file_some_prompts_are_held_out_with_all_their_rows(tmp_path, capsys):
    rows = [(f"prompt {i % 500}", f"{i}") for i in range(1000)]
    write_rows(tmp_path, sft_train=rows)
    val, train = (read_rows(tmp_path, "sft", split) for split in ("val", "train"))
    assert "1,000 rows" not in (said := capsys.readouterr().out)
    assert f"{len(val)} rows for val; there is no sft_val.jsonl, so one prompt in twenty is" in said
    aside = held_out(prompt for prompt, _ in rows)
    assert [row for row in rows if row[0] in aside] == val and 20 <= len(val) <= 90
    assert [row for row in rows if row[0] not in aside] == train
    write_rows(tmp_path, sft_train=[("a", "b")])
    with pytest.raises(UserError, match="too few prompts to hold any out; write a sft_val.jsonl"):
        read_rows(tmp_path, "sft", "val")


def test_pairs_alone_are_enough(tmp_path, capsys):
    write_rows(tmp_path, pref_train=[(f"p{i % 200}", f"good {i}", f"bad {i}") for i in range(400)])
    pairs = {split: read_rows(tmp_path, "pref", split) for split in ("train", "val")}
    for split, rows in pairs.items():
        capsys.readouterr()
        assert read_rows(tmp_path, "sft", split) == [row[:2] for row in rows]
        assert "no sft_train.jsonl: chosen responses serve instead" in capsys.readouterr().out
        prompts = read_rows(tmp_path, "prompts", split)
        assert prompts == list(dict.fromkeys((row[0],) for row in rows))
        assert (
            "no prompts_train.jsonl: prompts of pref_train.jsonl serve" in capsys.readouterr().out
        )
    write_rows(tmp_path / "sft", sft_train=[("a", "x"), ("b", "y"), ("a", "z")])
    prompts = [read_rows(tmp_path / "sft", "prompts", split) for split in ("train", "val")]
    assert sorted(sum(prompts, [])) == [("a",), ("b",)]
    assert "prompts of sft_train.jsonl serve" in capsys.readouterr().out
    write_rows(tmp_path / "sft", pref_train=[(f"p{i % 200}", "x", "y") for i in range(400)])
    read_rows(tmp_path / "sft", "prompts", "train")
    assert "prompts of pref_train.jsonl serve" in capsys.readouterr().out
    write_rows(tmp_path, sft_val=[("x", "y")])
    assert read_rows(tmp_path, "sft", "val") == [("x", "y")]
    assert read_rows(tmp_path, "sft", "train") == [row[:2] for row in pairs["train"]]


def test_who_waits_is_told_how_far_it_is(capsys, monkeypatch):
    times = iter(range(0, 1000, 3))
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(rows_module, "time", clock)
    assert list(progress("answers", list(range(7)), 2)) == [[0, 1], [2, 3], [4, 5], [6]]
    said = ["    4 of 7 answers, 4 s left", "    7 of 7 answers, 0 s left"]
    assert capsys.readouterr().out.splitlines() == said
