"""plumbing/text.py"""

import random

import pytest

from cli import write_rows
from data.files import UserError
from plumbing.text import Tokenizer, encode_rows
from plumbing.text import chunks, pad_completions, read_prompts, similar_batches, texts_of

TOKENIZER = Tokenizer.train(["ab ab"], 258)
A, B, C, D, E = map(ord, "abcde")
AB, END = 256, 257


def test_rows_are_encoded_skipped_or_cut(tmp_path, capsys):
    rows = [("", "b"), ("", "c"), ("a", "b"), ("cded", "e"), ("cdedc", ""), ("cdedce", "")]
    rows += [("cde", ""), ("cde", "dc"), ("cde", "d", "de"), ("cde", "dec", "ded")]
    rows += [("cde", "d", "d"), ("e", "cab", "ab"), ("a", "b")]
    # Prompt and answer apart: together "ab" would be one token.
    encoded, cde = encode_rows(rows, TOKENIZER, 5), [C, D, E]
    assert encoded[:3] == [([A], [B, END]), ([*cde, D], [E]), (cde, [END])]
    assert encoded[3:5] == [(cde, [D, C]), (cde, [D, END], [D, E])]
    assert encoded[5:] == [([E], [C, AB, END], [AB, END]), encoded[0]]
    limit = "the context of 5 tokens (--context of SFT)"
    assert capsys.readouterr().out.splitlines() == [
        "    2 skipped: the prompt is empty",
        f"    3 cut at the end of {limit}",
        f"    2 skipped: the prompt leaves no room in {limit}",
        f"    2 skipped: the two answers do not differ in {limit}",
    ]
    says = (
        "no row is left: 2 skipped: the prompt is empty; 1 skipped: the two answers do not differ"
    )
    with pytest.raises(UserError, match=says):
        encode_rows([*rows[:2], ("a", "b", "b")], TOKENIZER, 5)
    encode_rows([("a", "b")], TOKENIZER, 5)
    assert not capsys.readouterr().out
    write_rows(tmp_path, prompts_val=[("a",)])
    assert read_prompts(tmp_path, "val", TOKENIZER, 9) == [[A]]


def test_batches_are_of_similar_rows_and_hold_each_once():
    rows = [([i] * (1 + i % 7), [1] * (i % 5), [2] * (i % 11)) for i in range(470)]
    batches = similar_batches(rows, 3, seed=1)
    assert sorted(sum(batches, [])) == rows and {*map(len, batches[:-1])} == {3}
    for part in chunks(batches, 50):  # of 150 rows
        longest = [len(x) + max(len(a), len(b)) for x, a, b in sum(part, [])]
        assert longest == sorted(longest) and longest[0] < 6
        first = [x[0] for x, *_ in sum(part, [])]
        assert min(first) < 150 and max(first) > 300  # from all over the file
    assert batches == similar_batches(rows, 3, seed=1) != similar_batches(rows, 3, seed=2)


def test_any_text_survives_and_none_gives_the_end_token():
    texts = ["", "a<|endoftext|>", "it's low, lower\n\n\t  12", "👩\u200d🐝\ufeff\U0010ffff" * 9]
    texts += ["".join(map(chr, range(i, 0xD800, 99))) for i in range(99)]
    for learned in ([], texts[:20]):
        tokenizer = Tokenizer.train(learned, 300)
        assert tokenizer.vocab_size == tokenizer.eos + 1 == len(set(tokenizer.tokens)) + 1 <= 300
        for text in texts:
            ids = tokenizer.encode(text)
            assert tokenizer.eos not in ids and tokenizer.decode([*ids, tokenizer.eos]) == text
    assert tokenizer.decode(tokenizer.encode(" " * 1_000_000)) == " " * 1_000_000


def test_the_most_frequent_pair_is_merged_first():
    text = "".join(random.Random(0).choices("abc ", k=400))
    learned = "cb|aa| b|ac|ab| c|  | cb| bb| ac|cbb| aa|acb|cc|abc|ccbb|cac|abb|aac"
    tokens = Tokenizer.train([text[:155], text[155:]], 256 + 20).tokens[256:]
    assert b"|".join(tokens).decode() == learned  # as if pairs were counted anew every time
    assert len(Tokenizer.train(["abcd"], 300).tokens) == 256  # no pair occurs twice
    tokens = Tokenizer.train(["x" * 65] * 3 + ["y" * 64] * 3, 400).tokens[256:]
    assert len(max(tokens, key=len)) == 64 and b"xx" not in tokens  # longer words are left out
    # No token spans two words, which are those of GPT-2.
    tokens = Tokenizer.train(["it's 12 a-b  c"] * 9, 999).tokens[256:]
    assert set(tokens) == {b"it", b"'s", b"12", b" 12", b" a", b" c"}


def test_tokens_prompts_and_responses_are_read_back():
    tokenizer = Tokenizer.train([" é é", "\ud83d", "a\ud83db"], 300)  # half a pair is replaced
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\N{REPLACEMENT CHARACTER}b"
    spelled = [tokenizer.spell(i) for i in (tokenizer.eos, 65, 0xC3, *tokenizer.encode(" é"))]
    assert spelled == ["<eos>", "A", "\\xc3", " é"]
    pairs = [("Hé", "y"), ("a", "two words"), ("abc", "")]
    batch = pad_completions(encode_rows(pairs, tokenizer, 99))
    assert list(zip(*texts_of(tokenizer, *batch))) == pairs
