"""Text as token ids, rows as lists of ids: plumbing/text.py."""

import random

import pytest

from cli import write_rows
from data.files import UserError
from plumbing.text import Tokenizer, by_length, completion_tokens, encode_rows, in_parts, pad
from plumbing.text import pad_completions, read_prompts, spread_over, texts_of

TOKENIZER = Tokenizer.train(["ab ab"], 258)  # bytes, "ab", and the end
A, B, C, D, E = map(ord, "abcde")
END = 257


def test_rows_are_encoded_skipped_or_cut_and_what_happened_is_said(tmp_path, capsys):
    rows = [("", "b"), ("", "c"), ("a", "b"), ("cded", "e"), ("cdedc", ""), ("cdedce", "")]
    rows += [("cde", ""), ("cde", "dc"), ("cde", "d", "de"), ("cde", "dec", "ded")]
    rows += [("cde", "d", "d"), ("e", "cab", "ab"), ("a", "b")]
    # Prompt and answer apart: together "ab" would be one token.
    encoded, cde = encode_rows(rows, TOKENIZER, 5), [C, D, E]
    assert encoded[:3] == [([A], [B, END]), ([*cde, D], [E]), (cde, [END])]
    assert encoded[3:5] == [(cde, [D, C]), (cde, [D, END], [D, E])]
    assert encoded[5:] == [([E], [C, 256, END], [256, END]), encoded[0]]
    notes = [
        "2 skipped: the prompt is empty",
        "2 skipped: the prompt leaves no room in the context of 5 tokens (--context of SFT)",
        "2 skipped: the two answers are the same",
        "3 cut at the end of the context of 5 tokens (--context of SFT)",
    ]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"    {x}" for x in notes)
    with pytest.raises(UserError, match=f"no row is left: {notes[0]}; {notes[2]}"):
        encode_rows([*rows[:2], *[("a", "b", "b")] * 2], TOKENIZER, 5)
    encode_rows([("a", "b")], TOKENIZER, 5)
    assert not capsys.readouterr().out
    write_rows(tmp_path, prompts_val=[("a",)])
    assert read_prompts(tmp_path, "val", TOKENIZER, 9) == [[A]]


def test_rows_stand_at_column_0_padded_on_the_right_with_a_mask_over_the_completion():
    rows = [([1, 2], [7]), ([3], [8, 9, 10]), ([4, 5, 6], [11, 12])]
    tokens, mask = pad_completions(rows)
    assert tokens.tolist() == [[1, 2, 7, 0, 0], [3, 8, 9, 10, 0], [4, 5, 6, 11, 12]]
    assert mask.int().tolist() == [[0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]
    assert pad([[1], [2, 3]])[1].tolist() == [1, 2] and completion_tokens(rows) == 6


def test_rows_are_sorted_spread_and_cut():
    rows = [("ab", "c"), ("d", "e"), ("", "fgh"), ("", "i")]
    assert by_length(rows) == [rows[i] for i in (3, 1, 0, 2)]
    for n, step in ((1, 10), (3, 4), (4, 3), (9, 2), (10, 1), (99, 1)):
        assert spread_over(list(range(10)), n) == list(range(0, 10, step))
    assert in_parts("abcdefg", 2) == ["ab", "cd", "ef", "g"]


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
    assert tokenizer.decode(tokenizer.encode(" " * 1_000_000)) == " " * 1_000_000


def test_the_most_frequent_pair_is_merged_first_with_ties_the_same_everywhere():
    text = "".join(random.Random(0).choices("abc ", k=400))
    learned = "cb|aa| b|ac|ab| c|  | cb| bb| ac|cbb| aa|acb|cc|abc|ccbb|cac|abb|aac"
    tokens = Tokenizer.train([text[:155], text[155:]], 256 + 20).tokens[256:]
    assert b"|".join(tokens).decode() == learned  # as if pairs were counted anew for every merge
    assert len(Tokenizer.train(["abcd"], 300).tokens) == 256  # no pair occurs twice
    tokens = Tokenizer.train(["x" * 65] * 3 + ["y" * 64] * 3, 400).tokens[256:]
    assert len(max(tokens, key=len)) == 64 and b"xx" not in tokens  # longer words are left out
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
