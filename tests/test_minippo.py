"""The specification of minippo.py, in its order. Run: python -m pytest tests/test_minippo.py

Tensors are literal and float64 wherever a result can be worked out by hand; `nan` stands in for whatever must not matter.
"""

import ast
import contextlib
import gzip
import inspect
import itertools
import json
import math
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import minippo
import plumbing
from minippo import (
    GPT,
    GPTConfig,
    PPOConfig,
    RewardModel,
    Tokenizer,
    UserError,
    adapt_kl_coef,
    by_length,
    distinct,
    evaluate_actions,
    explained_variance,
    frozen_copy,
    gae,
    gather_logprobs,
    generate,
    kl_adjusted_rewards,
    kl_per_response,
    last_action,
    load_checkpoint,
    load_jsonl,
    masked_mean,
    pad,
    policy_loss,
    ppo_update,
    response_mask,
    reward_model_loss,
    save_checkpoint,
    score_responses,
    value_loss,
    whiten,
)
from tiny import EOT, assert_equal, biased, f64, inf, marks, nan, noise, stir, tiny_gpt, tiny_reward_model, weights


# 1. Text


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
    assert tokenizer.eot not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_token_is_the_last_id_and_decodes_to_nothing():
    tokenizer = Tokenizer.train(TEXTS, 300)
    assert tokenizer.eot == len(tokenizer.tokens) == tokenizer.vocab_size - 1
    assert tokenizer.decode([*tokenizer.encode("hi"), tokenizer.eot]) == "hi"


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
        parts = {word: minippo.merge(part, tokens[-1]) for word, part in parts.items()}
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
    code = f"from minippo import Tokenizer; print(Tokenizer.train({TEXTS!r}, 330).tokens)"
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
    (b"[" * 100_000, ["line 1", "not JSON"]),
    (b"1" * 10_000, ["line 1"]),
    (b'["a", "b"]', ["line 1", "list", "object"]),
    (b'"a"', ["line 1", "str", "object"]),
    (b"null", ["line 1", "object"]),
    (b'{"prompt": "a"}', ["line 1", "'completion'", "'prompt'"]),
    (b"{}", ["line 1", "'prompt'", "no key"]),
    (b'{"prompt": 7, "completion": "b"}', ["line 1", "'prompt'", "string", "7"]),
    (b'{"prompt": "a", "completion": null}', ["line 1", "'completion'", "string", "null"]),
    (b'{"prompt": "a", "completion": ["b"]}', ["line 1", "'completion'", '["b"]']),
    (b"[{}]", ["line 1", "list", "object"]),
    (b"[\n" + GOOD_ROW.encode() + b"\n]", ["line 1", "not JSON", "one JSON object a line"]),
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
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}, "hh_rlhf.py"),
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


def test_work_by_length_sees_every_row_once_beside_rows_of_similar_length_and_keeps_the_order():
    rows, shapes = [[i] * n for i, n in enumerate((5, 1, 4, 1, 5, 9, 2))], []

    def count(numbers, tokens, lengths):
        shapes.append(tokens.shape)
        assert [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)] == [rows[i] for i in numbers]
        return lengths

    assert by_length(count, rows, 3).tolist() == [5, 1, 4, 1, 5, 9, 2]
    assert shapes == [(3, 2), (3, 5), (1, 9)]


def test_work_by_length_keeps_pairs_together_and_puts_rows_that_begin_alike_side_by_side():
    rows = [[4, 4, 4], [4, 4], [1] * 9, [1], [4, 1], [3, 3, 1], [1, 2], [3, 3, 3]]
    pieces = []

    def count(numbers, tokens, lengths):
        pieces.append(numbers)
        return lengths

    assert by_length(count, rows, 4, together=2).tolist() == [len(row) for row in rows]
    assert [sorted(piece) for piece in pieces] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert pieces[0] == [5, 4, 1, 0]  # in the order of their tokens: [3, 3, 1], [4, 1], [4, 4], [4, 4, 4]


def test_what_rows_that_begin_alike_share_is_worked_out_once():
    tokens = torch.tensor([[7, 8, 9, 0], [7, 8, 5, 9], [7, 8, 5, 9], [3, 8, 5, 9], [7, 8, 9, 0]])
    used = torch.arange(4) < torch.tensor([[3], [4], [2], [4], [1]])
    first, spread = distinct(tokens, used)
    # Row 1 shares two tokens with row 0. Row 2 shares all. Row 3 differs in its first token, and so everywhere. Row 4 begins
    # like rows 0 to 2, but row 3 stands between.
    assert first.tolist() == [0, 1, 2, 6, 7, 12, 13, 14, 15, 16]
    assert_equal(spread[used], torch.tensor([0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 6, 7, 8, 9]))
    assert_equal(tokens.flatten()[first][spread[used]], tokens[used])  # each place gets its own token back


def test_a_place_beyond_the_end_of_the_row_above_is_no_repetition_of_it():
    tokens, used = torch.tensor([[7, 8, 9], [7, 8, 9]]), torch.tensor([[True, True, False], [True, True, True]])
    first, spread = distinct(tokens, used)
    assert first.tolist() == [0, 1, 5] and spread[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("separate_critic", [False, True])
def test_sharing_what_rows_have_in_common_changes_no_number_and_no_gradient(separate_critic):
    rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5], [2, 2, 3, 5], [2, 2, 3, 5]]  # the last two are the same
    model = tiny_gpt().with_critic(tiny_reward_model()) if separate_critic else tiny_gpt()
    stir(model)

    def gradient(rows):
        model.zero_grad()
        tokens, lengths = pad(rows)
        mask = response_mask(torch.full_like(lengths, 2), lengths, tokens.shape[1])
        outputs = evaluate_actions(model, tokens, mask)
        sum((x * x).sum() for x in outputs).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), [x[mask] for x in outputs]

    whole, outputs = gradient(rows)
    alone, outputs_alone = zip(*(gradient([row]) for row in rows), strict=True)
    assert_equal(whole, sum(alone), 1e-8)
    for x, parts in zip(outputs, zip(*outputs_alone, strict=True), strict=True):
        assert_equal(x, torch.cat(parts), 1e-10)


def test_the_mask_marks_the_actions_from_the_first_response_token_to_the_end_token():
    # The drawing at the top of minippo.py: two prompt tokens, "A bee <eot>", one column of padding.
    assert_equal(response_mask(torch.tensor([2]), torch.tensor([5]), 6), marks(".xxx."))
    # A prompt of one token and no padding; a response of one token; none at all.
    assert_equal(response_mask(torch.tensor([1, 2, 3]), torch.tensor([4, 3, 3]), 4), marks("xxx", ".x.", "..."))


# 2. The networks


def test_changing_a_token_changes_no_output_before_it():
    policy, tokens = tiny_gpt(), torch.tensor([[3, 1, 4, 1, 5, 9]])
    logits, values = policy(tokens)
    assert logits.shape == (1, 6, EOT + 1) and values.shape == (1, 6)
    for t in range(6):
        changed = tokens.clone()
        changed[0, t] = 2
        new_logits, new_values = policy(changed)
        assert_equal(new_logits[:, :t], logits[:, :t])
        assert_equal(new_values[:, :t], values[:, :t])
        assert ((new_logits - logits)[0, t:].abs().amax(-1) > 1e-6).all() and ((new_values - values)[0, t:].abs() > 1e-6).all()


@pytest.mark.parametrize("filler", [0, 7, EOT])
def test_padding_and_neighbours_change_nothing_of_a_row(filler):
    policy, scorer = tiny_gpt(), tiny_reward_model()
    alone = torch.tensor([[3, 1, 4]])
    batch = torch.tensor([[5, 5, 5, 5, 5], [3, 1, 4, filler, filler], [0, 0, filler, filler, filler]])
    assert_equal(policy(batch)[0][1, :3], policy(alone)[0][0])
    assert_equal(policy(batch)[1][1, :3], policy(alone)[1][0])
    lengths = torch.tensor([5, 3, 2])
    assert_equal(scorer(batch, lengths)[1], scorer(alone, lengths[1:2])[0], 1e-6)


def test_the_vocabulary_head_is_the_token_embedding():
    for policy in (tiny_gpt(), frozen_copy(tiny_gpt())):
        assert policy.lm_head.weight is policy.trunk.tokens.weight


def test_values_start_at_zero():
    policy = GPT(GPTConfig(EOT + 1, 8, 1, heads=2, channels=8))
    assert not policy(torch.tensor([[1, 2, 3]]))[1].any()


def test_positions_matter():
    logits, _ = tiny_gpt()(torch.tensor([[3, 3, 3]]))
    assert (logits[0, 0] - logits[0, 1]).abs().max() > 1e-3


def test_channels_that_the_heads_cannot_share_are_refused():
    with pytest.raises(UserError, match="multiple"):
        GPTConfig(channels=10, heads=3)


def test_dropout_drops_in_training_only_and_zero_dropout_never():
    tokens = torch.tensor([[3, 1, 4, 1]])
    for dropout in (0.0, 0.5):
        policy = tiny_gpt(dropout=dropout)
        still = policy(tokens)[0]
        assert torch.equal(policy(tokens)[0], still)
        assert torch.equal(policy.train()(tokens)[0], still) == (dropout == 0)


def test_a_reward_model_starts_with_a_copy_of_the_policy_and_shares_nothing():
    policy = tiny_gpt()
    model = RewardModel(policy).double()
    before = weights(policy)
    for name, parameter in model.trunk.named_parameters():
        assert_equal(parameter, policy.trunk.get_parameter(name))
    stir(model)
    assert_equal(weights(policy), before)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_score_is_read_at_the_last_token_and_sees_all_before_it(length):
    model, tokens = tiny_reward_model(), torch.tensor([[3, 1, 4, 1]])
    score = model(tokens, torch.tensor([length]))
    assert score.shape == (1,)
    for t in range(4):
        changed = tokens.clone()
        changed[0, t] = 2
        moved = (model(changed, torch.tensor([length])) - score).abs().item() > 1e-5
        assert moved == (t < length)


def test_a_score_is_the_raw_score_shifted_and_scaled():
    model, tokens, lengths = tiny_reward_model(), torch.tensor([[3, 1, 4], [2, 7, 0]]), torch.tensor([3, 2])
    raw = model.raw_scores(tokens, lengths)
    assert_equal(model(tokens, lengths), raw)
    model.mean.fill_(0.25), model.std.fill_(2.0)
    assert_equal(model(tokens, lengths), (raw - 0.25) / 2, 1e-6)
    assert_equal(model.raw_scores(tokens, lengths), raw)


def test_a_new_score_head_has_standard_deviation_1_over_sqrt_channels_plus_1():
    head = RewardModel(GPTConfig(EOT + 1, 8, 1, heads=2, channels=1024)).score_head
    assert head.weight.std().item() == pytest.approx((1024 + 1) ** -0.5, rel=0.1) and not head.bias.any()


@pytest.mark.parametrize("make", [tiny_gpt, tiny_reward_model])
def test_a_frozen_copy_is_a_copy_without_gradients_or_dropout(make):
    model = make(dropout=0.5).train()
    frozen = frozen_copy(model)
    assert_equal(weights(frozen), weights(model))
    assert not any(p.requires_grad for p in frozen.parameters()) and not any(m.training for m in frozen.modules())
    assert all(p.requires_grad for p in model.parameters()) and model.training
    before = weights(frozen)
    stir(model)
    assert_equal(weights(frozen), before)


# 3. Log-probabilities, and averages over responses


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0,)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_gathered_logprobs_are_the_log_softmax_at_the_targets(shape, temperature):
    logits, targets = noise(*shape, 5), torch.randint(5, shape)
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    assert_equal(gather_logprobs(logits, targets, temperature), expected)
    if temperature == 1:
        assert_equal(gather_logprobs(logits, targets), expected)


def test_logprobs_by_hand():
    logits = torch.log(f64([[1, 3], [9, 1]]))
    assert_equal(gather_logprobs(logits, torch.tensor([1, 0])).exp(), f64([0.75, 0.9]))
    assert_equal(gather_logprobs(logits, torch.tensor([1, 0]), temperature=0.5).exp(), f64([9 / 10, 81 / 82]))


def test_the_masked_mean_sees_the_mask_only():
    x = torch.tensor([[1.0, nan, 5.0], [inf, 3.0, nan]], dtype=torch.float64, requires_grad=True)
    mean = masked_mean(x, marks("x.x", ".x."))
    assert mean.item() == 3.0
    mean.backward()
    assert_equal(x.grad, f64([[1, 0, 1], [0, 1, 0]]) / 3)


def test_whitening_gives_mean_0_and_standard_deviation_1_over_the_mask_and_0_outside():
    mask = marks("xx..", ".xxx")
    white = whiten(f64([[1, 3, nan, 100], [inf, 5, 7, 9]]), mask)
    assert_equal(white, (f64([[1, 3, 5, 5], [5, 5, 7, 9]]) - 5) / 8**0.5, 1e-7)
    assert abs(white[mask].mean()) < 1e-12 and white[mask].std(correction=0).item() == pytest.approx(1)
    assert not white[~mask].any()


def test_whitening_a_constant_gives_zeros():
    assert_equal(whiten(f64([[2, 2, 2]]), marks("xx.")), f64([[0, 0, 0]]))


def test_index_t_of_every_result_is_the_choice_of_token_t_plus_1_in_the_state_of_having_read_tokens_0_to_t():
    # The drawing at the top of minippo.py. Index 1 is the first response token, index 3 the end token.
    policy, tokens, mask = tiny_gpt(), torch.tensor([[3, 1, 4, 5, EOT, 0]]), marks(".xxx.")
    with torch.no_grad():
        logprobs, values, entropy = evaluate_actions(policy, tokens, mask)
        logits, all_values = policy(tokens)
    p = logits[0].softmax(-1)
    expected = [0, p[1, 4].log(), p[2, 5].log(), p[3, EOT].log(), 0]
    assert_equal(logprobs.double(), f64([expected]), 1e-6)
    assert_equal(values.double(), f64([[0, *all_values[0, 1:4], 0]]), 1e-6)
    assert_equal(entropy.double(), f64([[0, *(-(p * p.log()).sum(-1))[1:4], 0]]), 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_scored_distribution_is_the_softmax_of_the_logits_over_the_temperature(temperature):
    policy, tokens = tiny_gpt(), torch.randint(EOT + 1, (4, 9))
    logprobs, _, entropy = evaluate_actions(policy, tokens, torch.ones(4, 8, dtype=torch.bool), temperature)
    all_logprobs = (policy(tokens)[0][:, :-1] / temperature).log_softmax(-1)
    assert_equal(logprobs.double(), all_logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1), 1e-10)
    assert_equal(entropy.double(), -(all_logprobs.exp() * all_logprobs).sum(-1), 1e-10)


def test_what_lies_outside_the_mask_changes_neither_results_nor_gradients():
    policy, mask = tiny_gpt(), marks("..xx..", ".xxx..")
    tokens, other = torch.randint(EOT + 1, (2, 2, 7)).unbind(0)
    other[0, :5], other[1, :5] = tokens[0, :5], tokens[1, :5]  # what is read or written by an action of the mask stays
    results = []
    for x in (tokens, other):
        policy.zero_grad()
        parts = evaluate_actions(policy, x, mask)
        assert not any(part[~mask].any() for part in parts)
        sum(part.sum() for part in parts).backward()
        results.append([*parts, *(p.grad.clone() for p in policy.parameters())])
    for a, b in zip(*results, strict=True):
        assert_equal(a, b, 1e-6)


def test_vocabulary_logits_are_computed_at_response_tokens_only():
    policy, mask, rows = tiny_gpt(), marks("..xx..", ".xxx.."), []
    policy.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].numel() // 8))
    evaluate_actions(policy, torch.randint(EOT + 1, (2, 7)), mask)
    assert sum(rows) == 5


def test_the_last_action_is_the_last_index_of_the_mask():
    assert last_action(marks("..xx.", "x....", "....x", "xxxxx")).tolist() == [3, 0, 4, 4]


# 4. Sampling


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 8


def check_layout(tokens, mask, prompts, eot, max_new_tokens, context):
    """What must hold for every response, whatever was sampled."""
    assert tokens.shape[1] == mask.shape[1] + 1
    for row, marked, prompt in zip(tokens.tolist(), mask.tolist(), prompts, strict=True):
        assert row[: len(prompt)] == prompt
        first, response = len(prompt) - 1, list(itertools.compress(row[1:], marked))
        assert marked[first : first + len(response)] == [True] * len(response) and sum(marked) == len(response) > 0
        assert eot not in response[:-1]
        limit = min(max_new_tokens, context - len(prompt))
        assert len(response) == limit or (len(response) < limit and response[-1] == eot)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("bias", [-inf, 0.0, 2.0], ids=["never ends", "ends sometimes", "ends early"])
def test_decoding_with_a_cache_gives_the_logprobs_that_scoring_the_whole_rows_gives(temperature, max_new_tokens, bias):
    policy = biased(tiny_gpt(), {EOT: bias})
    tokens, mask, logprobs, values = generate(policy, PROMPTS, max_new_tokens, temperature)
    check_layout(tokens, mask, PROMPTS, EOT, max_new_tokens, context=16)
    with torch.no_grad():
        scored, expected, _ = evaluate_actions(policy, tokens, mask, temperature)
    assert_equal(logprobs, scored, 1e-10)
    assert_equal(values, expected, 1e-10)
    assert not logprobs[~mask].any() and not values[~mask].any()


class FakeGPU:
    """CUDA's graphs on the CPU: what is called while a graph is being recorded is called again, on the same tensors, at replay.

    As on a GPU, the results of the recorded call do not come about before the first replay, and stand where they stood.
    """

    def __init__(self, monkeypatch):
        self.recording, self.calls = None, []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", self.record)

    @contextlib.contextmanager
    def record(self, graph):
        self.recording = graph
        yield
        self.recording = None

    def wrap(self, function):
        def called(*inputs):
            result = function(*inputs)
            self.calls.append((self.recording, inputs))
            if self.recording:
                self.recording.replay = lambda: result.copy_(function(*inputs))
                result.fill_(math.nan)
            return result

        return called


def test_a_captured_function_is_called_on_new_inputs_in_the_old_places(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    replay = minippo.captured(gpu.wrap(torch.add), a, b)
    assert [graph is None for graph, _ in gpu.calls] == [True, False]  # once to set things up, once to record
    first = replay(a, b)
    assert first.tolist() == [11, 22]
    second = replay(b, b)
    assert second.tolist() == [20, 40] and second is first and len(gpu.calls) == 2
    assert a.tolist() == [1, 2]  # the graph works on copies


@pytest.mark.parametrize("separate_critic", [False, True])
@pytest.mark.parametrize("bias", [-inf, 0.0, 2.0], ids=["never ends", "ends sometimes", "ends early"])
def test_with_a_cuda_graph_the_tokens_are_the_same(monkeypatch, separate_critic, bias):
    gpu, captured = FakeGPU(monkeypatch), minippo.captured
    monkeypatch.setattr(minippo, "captured", lambda function, *inputs: captured(gpu.wrap(function), *inputs))
    policy = biased(tiny_gpt().with_critic(tiny_reward_model()) if separate_critic else tiny_gpt(), {EOT: bias})
    results = []
    for cuda_graph in (False, True):
        torch.manual_seed(3)
        results.append(generate(policy, PROMPTS * 3, 12, 0.9, cuda_graph=cuda_graph))
    for plain, graphed in zip(*results, strict=True):
        assert_equal(plain, graphed, 1e-10)
    shapes = [tuple(x.shape for x in inputs) for graph, inputs in gpu.calls if graph]
    assert len(shapes) == len(set(shapes)) <= 4  # recorded anew only for fewer rows
    if bias == -inf:
        assert len(shapes) == 1


def test_hidden_states_that_are_read_are_the_same_when_the_others_are_left_out():
    policy = tiny_gpt().with_critic(tiny_reward_model())
    tokens, read = torch.randint(EOT + 1, (4, 9)), torch.rand(4, 9) < 0.4
    for some, whole in zip(policy.hidden(tokens, read), policy.hidden(tokens), strict=True):
        assert_equal(some, whole[read])


def test_the_vocabulary_head_sees_no_prompt_and_no_padding():
    policy, seen = tiny_gpt(), []
    policy.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    prompts = [[1] * 9, [2], [3] * 4]
    tokens, mask, *_ = generate(policy, prompts, 5)
    assert all(rows <= len(prompts) for rows, _ in seen) and len(seen) <= 5
    seen.clear()
    evaluate_actions(policy, tokens, mask)
    assert seen == [(int(mask.sum()), 8)]


def test_the_values_of_a_rollout_come_from_the_separate_critic_where_there_is_one():
    policy = tiny_gpt().with_critic(tiny_reward_model())
    tokens, mask, _, values = generate(policy, PROMPTS, 5)
    with torch.no_grad():
        assert_equal(values, evaluate_actions(policy, tokens, mask)[1], 1e-10)


def test_a_sample_does_not_depend_on_when_the_rows_that_have_ended_are_dropped():
    policy, seen = biased(tiny_gpt(context=32), {EOT: 1.0}), []
    for prompts in (PROMPTS, PROMPTS[:1] * len(PROMPTS)):  # the first row among others, and among copies of itself
        torch.manual_seed(3)
        tokens, mask, *_ = generate(policy, prompts, 20)
        seen.append(tokens[0, 1:][mask[0]].tolist())
    assert seen[0] == seen[1]


def test_a_row_that_reaches_the_end_of_the_context_keeps_its_last_token_while_the_others_go_on():
    policy = biased(tiny_gpt(context=8), {EOT: -inf})
    prompts = [[1, 2, 3, 4, 5, 6], [1], [2], [3]]
    tokens, mask, logprobs, _ = generate(policy, prompts, 20)
    assert mask.sum(1).tolist() == [2, 7, 7, 7] and tokens.shape == (4, 8)
    with torch.no_grad():
        assert_equal(logprobs, evaluate_actions(policy, tokens, mask)[0], 1e-10)


@pytest.mark.parametrize("bias, lengths", [(inf, [1, 1, 1]), (-inf, [5, 5, 5])])
def test_a_response_stops_at_the_end_token_or_after_max_new_tokens(bias, lengths):
    policy = biased(tiny_gpt(), {EOT: math.copysign(1e4, bias)})
    tokens, mask, *_ = generate(policy, [[1], [2, 3], [4, 5, 6]], 5)
    assert mask.sum(1).tolist() == lengths and tokens.shape[1] == 3 + lengths[0]
    assert_equal(mask[:1], marks("x" * lengths[0] + ".."))


def test_the_longest_prompt_possible_still_gets_one_token():
    for max_new_tokens in (5, 10**12):  # what does not fit into the context takes no memory
        tokens, mask, *_ = generate(tiny_gpt(context=8), [[1, 2, 3, 4, 5, 6, 7]], max_new_tokens)
        assert tokens.shape == (1, 8) and mask.sum() == 1


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_an_empty_prompt_and_one_that_fills_the_context_are_refused(prompts):
    with pytest.raises(ValueError, match="15"):
        generate(tiny_gpt(), prompts, 5)


def test_the_same_seed_gives_the_same_samples_and_another_seed_others():
    policy, seen = tiny_gpt(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(generate(policy, PROMPTS, 9)[0].tolist())
    assert seen[0] == seen[1] != seen[2]


def three_token_gpt():
    """Vocabulary of 3: ids 0 and 1, and the end token 2."""
    return stir(GPT(GPTConfig(3, 8, layers=1, heads=1, channels=8)).double().eval(), 0.5)


def all_responses(policy, prompt, max_new_tokens, temperature):
    """{response: probability} by enumeration, without a cache."""
    done, going = {}, {(): 1.0}
    for _ in range(max_new_tokens):
        longer = {}
        for response, p in going.items():
            logits = policy(torch.tensor([prompt + list(response)]))[0][0, -1]
            for token, q in enumerate((logits / temperature).softmax(-1).tolist()):
                (done if token == policy.config.eot else longer)[(*response, token)] = p * q
        going = longer
    return done | going


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_every_response_is_sampled_as_often_as_its_probability_says(temperature):
    policy, n, prompts = three_token_gpt(), 3000, [[0, 1, 1], [1]]
    tokens, mask, *_ = generate(policy, [prompts[i % 2] for i in range(2 * n)], 3, temperature)
    for i, prompt in enumerate(prompts):
        counts = {}
        for row, inside in zip(tokens[i::2, 1:], mask[i::2], strict=True):
            response = tuple(row[inside].tolist())
            counts[response] = counts.get(response, 0) + 1
        expected = all_responses(policy, prompt, 3, temperature)
        assert sum(expected.values()) == pytest.approx(1) and len(expected) == 15 and counts.keys() <= expected.keys()
        chi2 = sum((counts.get(y, 0) - n * p) ** 2 / (n * p) for y, p in expected.items())
        assert chi2 < 45  # 14 degrees of freedom: 45 is passed once in 25,000 times


def test_no_token_is_forbidden():
    policy = GPT(GPTConfig(5, 8, layers=1, heads=1, channels=8)).eval()
    torch.nn.init.zeros_(policy.lm_head.weight)  # all five equally likely
    tokens, mask, logprobs, _ = generate(policy, [[1]] * 500, 2)
    assert torch.bincount(tokens[:, 1]).min() > 70
    assert_equal(logprobs[mask], torch.full_like(logprobs[mask], -math.log(5)), 1e-6)
    assert torch.bincount(tokens[:, 2][mask[:, 1]]).min() > 50


def test_top_k_1_always_takes_the_likeliest_token():
    policy, prompts = tiny_gpt(), PROMPTS[:6]
    tokens, mask, *_ = generate(policy, prompts, 6, top_k=1)
    for row, inside, prompt in zip(tokens, mask, prompts, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 6 and (len(ids) == len(prompt) or ids[-1] != EOT):
            ids.append(policy(torch.tensor([ids]))[0][0, -1].argmax().item())
        assert row[1:][inside].tolist() == ids[len(prompt) :]


def test_top_k_samples_among_the_likeliest_tokens_only_and_reports_their_full_probability():
    policy = biased(tiny_gpt(), {3: 20.0, 4: 20.0})
    tokens, mask, logprobs, _ = generate(policy, PROMPTS, 4, temperature=50.0, top_k=2)
    assert set(tokens[:, 1:][mask].tolist()) == {3, 4}
    assert_equal(logprobs, evaluate_actions(policy, tokens, mask, 50.0)[0])


@pytest.mark.parametrize("top_k", [0, EOT + 1, 1000])
def test_a_top_k_of_0_or_of_the_whole_vocabulary_forbids_nothing(top_k):
    tokens, mask, *_ = generate(tiny_gpt(), [[1]] * 300, 1, temperature=1000.0, top_k=top_k)
    assert set(tokens[:, 1:][mask].tolist()) == set(range(EOT + 1))


def test_sampling_builds_no_graph():
    assert not generate(tiny_gpt(), [[1]], 3)[2].requires_grad


# 5. The reward model's loss


def test_the_loss_is_minus_the_log_probability_of_the_choices_under_bradley_terry():
    chosen, rejected = f64([2.0, 0.5, 1.0]), f64([1.0, 2.5, 1.0])
    loss, stats = reward_model_loss(chosen, rejected)
    expected = [-math.log(1 / (1 + math.exp(-margin))) for margin in (1.0, -2.0, 0.0)]
    assert loss.item() == pytest.approx(sum(expected) / 3)
    assert stats["accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)  # a tie is half a hit
    assert stats["margin"] == pytest.approx(-1 / 3)


def test_a_step_down_the_loss_raises_the_chosen_score_and_lowers_the_rejected_one():
    chosen, rejected = f64([2.0]).requires_grad_(), f64([1.0]).requires_grad_()
    reward_model_loss(chosen, rejected)[0].backward()
    p = 1 / (1 + math.exp(-1.0))
    assert chosen.grad.item() == pytest.approx(p - 1) and rejected.grad.item() == pytest.approx(1 - p)


def test_the_loss_stays_finite_however_wrong_the_scores():
    assert reward_model_loss(f64([-5000.0]), f64([5000.0]))[0].item() == pytest.approx(10_000)


# 6. PPO: scores and rewards


def test_a_response_is_scored_as_a_whole_row_up_to_its_last_token():
    seen = []

    def scorer(tokens, lengths):
        seen.append(lengths.tolist())
        return f64([1.0, 2.0, 3.0])

    tokens = torch.tensor([[1, 2, 3, EOT, 0], [1, 2, 3, 4, EOT], [1, EOT, 0, 0, 0]])
    scores, ended = score_responses(scorer, tokens, marks(".xx.", ".xx.", "x..."), EOT, 0.25, 0.5)
    assert seen == [[4, 4, 2]] and ended.tolist() == [True, False, True]
    assert_equal(scores.double(), f64([1 - 2 * 0.25, 2 - 2 * 0.25 - 0.5, 3 - 0.25]))


def test_penalties_of_0_leave_the_score_alone():
    model, tokens, mask = tiny_reward_model(), torch.randint(EOT + 1, (3, 6)), marks(".xx..", "xxxxx", "...x.")
    scores, _ = score_responses(model, tokens, mask, EOT)
    assert_equal(scores, model(tokens, torch.tensor([4, 6, 5])))


def test_scoring_builds_no_graph_even_through_a_model_that_is_not_frozen():
    assert not score_responses(tiny_reward_model(), torch.tensor([[1, 2, 3]]), marks(".x"), EOT)[0].requires_grad


def test_the_score_is_paid_at_the_last_action_of_the_response():
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    rewards = kl_adjusted_rewards(f64([1, 2, 3]), zeros, zeros, marks(".xx.", "xxxx", "x..."), 0.1)
    assert_equal(rewards, f64([[0, 0, 1, 0], [0, 0, 0, 2], [3, 0, 0, 0]]))


def test_a_token_that_the_policy_likes_more_than_the_reference_does_costs_and_the_opposite_pays():
    logprobs, ref_logprobs = f64([[nan, -1.0, -4.0, nan]]), f64([[inf, -3.0, -3.5, nan]])
    rewards = kl_adjusted_rewards(f64([1.0]), logprobs, ref_logprobs, marks(".xx."), 0.1)
    assert_equal(rewards, f64([[0, -0.2, 1 + 0.05, 0]]))


def test_a_beta_of_0_leaves_nothing_but_the_score():
    rewards = kl_adjusted_rewards(f64([1.5]), noise(1, 4), noise(1, 4), marks(".xx."), 0.0)
    assert_equal(rewards, f64([[0, 0, 1.5, 0]]))


def test_the_rewards_of_a_response_sum_to_score_minus_beta_kl():
    mask, scores, logprobs, ref_logprobs = marks("..xx.", ".xxxx"), noise(2), noise(2, 5), noise(2, 5)
    k1, _ = kl_per_response(logprobs, ref_logprobs, mask)
    assert_equal(kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, 0.3).sum(1), scores - 0.3 * k1)


def test_both_kl_estimates_are_right_on_average_and_k3_is_never_negative():
    p, q = f64([0.5, 0.3, 0.15, 0.05]), f64([0.1, 0.2, 0.3, 0.4])  # policy and reference; every sample once, weighted by p
    k1, k3 = kl_per_response(p.log()[:, None], q.log()[:, None], marks("x", "x", "x", "x"))
    kl = (p * (p / q).log()).sum()
    assert_equal((p * k1).sum(), kl)
    assert_equal((p * k3).sum(), kl)
    assert (k3 >= 0).all() and k1.min() < 0
    assert_equal(k1[0], f64(math.log(5)))
    assert_equal(k3[0], f64(0.2 - 1 + math.log(5)))


def test_the_kl_of_a_response_is_the_sum_over_its_tokens_and_sees_the_mask_only():
    logprobs, ref_logprobs = f64([[nan, -1, -2, inf], [-1, 0, 0, 9]]), f64([[0, -2, -2.5, nan], [-1, 0, 0, 0]])
    k1, k3 = kl_per_response(logprobs, ref_logprobs, marks(".xx.", "xxx."))
    assert_equal(k1, f64([1.5, 0]))
    assert_equal(k3, f64([math.exp(-1) + math.exp(-0.5) - 2 + 1.5, 0]))


@pytest.mark.parametrize("kl, horizon, expected", [
    (6.0, 10_000, 0.1), (6.6, 10_000, 0.1 * (1 + 0.1 * 0.0256)), (60.0, 10_000, 0.1 * (1 + 0.2 * 0.0256)),
    (5.4, 10_000, 0.1 * (1 - 0.1 * 0.0256)), (-3.0, 10_000, 0.1 * (1 - 0.2 * 0.0256)), (60.0, inf, 0.1), (0.0, inf, 0.1),
])  # fmt: skip
def test_beta_rises_when_the_kl_is_above_its_target_falls_below_and_stays_at_an_infinite_horizon(kl, horizon, expected):
    assert adapt_kl_coef(0.1, kl, 6.0, 256, horizon) == pytest.approx(expected, rel=1e-12)


# 6. PPO: advantages


MASK = marks("..xxx..", "xxxxxxx", "x......", ".....xx", ".xxxx..")


def by_definition(rewards, values, mask, gamma, lam):
    """The double sum: A_t = sum over l of (gamma lam)^l (r_t+l + gamma V_t+l+1 - V_t+l), with V = 0 after the last action."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(mask)):
        inside = mask[b].nonzero().squeeze(1).tolist()
        V = {t: values[b, t] for t in inside}
        for t in inside:
            for l, s in enumerate(s for s in inside if s >= t):
                advantages[b, t] += (gamma * lam) ** l * (rewards[b, s] + gamma * V.get(s + 1, 0.0) - V[s])
    return advantages


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.9, 1.0), (1.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_gae_is_the_discounted_sum_of_td_errors(gamma, lam):
    rewards, values = noise(*MASK.shape), noise(*MASK.shape)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    assert_equal(advantages, by_definition(rewards, values, MASK, gamma, lam))
    assert_equal(returns[MASK], (advantages + values)[MASK])


def test_with_lambda_1_the_advantage_is_the_return_that_followed_less_the_value():
    rewards, values = f64([[0, 1, 2, 4, 0]]), f64([[9, 10, 20, 30, 9]])
    advantages, returns = gae(rewards, values, marks(".xxx."), 1.0, 1.0)
    assert_equal(advantages, f64([[0, 7 - 10, 6 - 20, 4 - 30, 0]]))
    assert_equal(returns, f64([[0, 7, 6, 4, 0]]))
    assert_equal(gae(rewards, values, marks(".xxx."), 0.5, 1.0)[1], f64([[0, 1 + 1 + 1, 2 + 2, 4, 0]]))


def test_with_lambda_0_the_advantage_is_the_reward_and_the_next_value_less_the_value():
    advantages, _ = gae(f64([[0, 1, 2, 4, 0]]), f64([[9, 10, 20, 30, 9]]), marks(".xxx."), 0.5, 0.0)
    assert_equal(advantages, f64([[0, 1 + 10 - 10, 2 + 15 - 20, 4 - 30, 0]]))


def test_there_is_no_value_after_the_last_action():
    advantages, _ = gae(f64([[1.0, 5.0]]), f64([[3.0, 100.0]]), marks("x."), 1.0, 0.95)
    assert_equal(advantages, f64([[1 - 3, 0]]))


def test_returns_are_advantages_plus_values_before_any_whitening():
    rewards, values = noise(*MASK.shape) + 5, noise(*MASK.shape)
    advantages, returns = gae(rewards, values, MASK, 1.0, 1.0)
    totals = torch.where(MASK, rewards, 0.0).flip(1).cumsum(1).flip(1)
    assert_equal(returns[MASK], totals[MASK])
    assert abs(advantages[MASK].mean()) > 1


def test_nothing_outside_the_mask_reaches_an_advantage_or_a_return():
    rewards, values = noise(*MASK.shape), noise(*MASK.shape)
    clean = gae(torch.where(MASK, rewards, 0.0), torch.where(MASK, values, 0.0), MASK, 0.9, 0.8)
    for junk in (nan, inf, 1e6):
        dirty = gae(torch.where(MASK, rewards, junk), torch.where(MASK, values, junk), MASK, 0.9, 0.8)
        assert_equal(dirty[0], clean[0])
        assert_equal(dirty[1], clean[1])
    assert not clean[0][~MASK].any()


# 6. PPO: losses


def at_ratio(ratio, advantage, clip_eps=0.2):
    """-> objective (what PPO maximises) and its gradient with respect to the log-probability, for one token."""
    old = f64([[-1.5]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, _ = policy_loss(logprobs, old, f64([[float(advantage)]]), marks("x"), clip_eps)
    loss.backward()
    return -loss.item(), -logprobs.grad.item()


@pytest.mark.parametrize("advantage, ratio, objective", [(1, 1.5, 1.2), (-1, 0.5, -0.8), (3, 1.21, 3.6), (-2, 0.79, -1.6)])
def test_a_clipped_token_has_zero_gradient(advantage, ratio, objective):
    assert at_ratio(ratio, advantage) == (pytest.approx(objective), 0.0)


@pytest.mark.parametrize("advantage, ratio", [(1.0, 0.5), (-1.0, 1.5), (1.0, 1e-3), (-1.0, 50.0)])
def test_a_token_that_has_moved_the_harmful_way_gets_its_full_gradient_back(advantage, ratio):
    assert at_ratio(ratio, advantage) == (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.81, 1.0, 1.19])
def test_inside_the_clip_range_the_gradient_is_ratio_times_advantage(advantage, ratio):
    assert at_ratio(ratio, advantage) == (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1.0, 1.5, 1e3])
def test_an_infinite_clip_range_does_not_clip(advantage, ratio):
    assert at_ratio(ratio, advantage, inf) == (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage))


def test_at_ratio_1_the_gradient_is_that_of_the_policy_gradient():
    mask, advantages = marks(".xx", "xx."), noise(2, 3)
    logprobs = noise(2, 3).requires_grad_()
    policy_loss(logprobs, logprobs.detach().clone(), advantages, mask, 0.2)[0].backward()
    assert_equal(logprobs.grad, torch.where(mask, -advantages / 4, 0.0))


def test_the_policy_loss_and_its_stats_see_the_mask_only():
    ratios = [1.0, 1.5, 0.9]  # approx_kl by k3: ratio - 1 - log ratio
    logprobs = torch.log(f64([[7, 1.0, 1.5], [0.9, 9, 9]])).requires_grad_()
    old = f64([[nan, 0, 0], [0, nan, inf]])
    advantages = f64([[nan, 1, 1], [2, inf, nan]])
    loss, stats = policy_loss(logprobs, old, advantages, marks(".xx", "x.."), 0.2)
    assert loss.item() == pytest.approx(-(1.0 + 1.2 + 1.8) / 3) and stats["policy_loss"] == pytest.approx(loss.item())
    assert stats["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert stats["clip_frac"] == pytest.approx(1 / 3) and stats["ratio_max"] == pytest.approx(1.5)
    loss.backward()
    assert_equal(logprobs.grad, f64([[0, -1 / 3, 0], [-0.6, 0, 0]]))


def test_approx_kl_is_never_negative():
    for _ in range(20):
        assert policy_loss(noise(2, 3), noise(2, 3), noise(2, 3), marks("xxx", "x.."), 0.2)[1]["approx_kl"] >= 0


@pytest.mark.parametrize("value, old, target, loss, gradient", [
    (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9),  # inside the range: plain
    (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved to 2, counted as 1.2: it has gone far enough towards 3
    (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0),  # moved away from the target: full gradient back
    (2.0, 1.0, 1.0, 0.5 * 1.0**2, 1.0),  # moved past the target: full gradient back
])  # fmt: skip
def test_the_value_loss_clips_against_the_old_values_and_takes_the_worse_error(value, old, target, loss, gradient):
    values = f64([[value]]).requires_grad_()
    result, stats = value_loss(values, f64([[old]]), f64([[target]]), marks("x"), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss) == stats["value_loss"]
    assert values.grad.item() == pytest.approx(gradient)


def test_an_infinite_value_clip_gives_half_the_mean_squared_error_over_the_mask():
    values = f64([[nan, 1, 5], [2, inf, 0]]).requires_grad_()
    loss, _ = value_loss(values, f64([[0, -9, 9], [99, nan, 0]]), f64([[7, 2, 2], [4, nan, nan]]), marks(".xx", "x.."), inf)
    assert loss.item() == pytest.approx(0.5 * (1 + 9 + 4) / 3)
    loss.backward()
    assert_equal(torch.nan_to_num(values.grad), f64([[0, -1 / 3, 1], [-2 / 3, 0, 0]]))


def test_explained_variance_is_1_for_perfect_values_0_for_constant_ones_and_sees_the_mask_only():
    returns, mask = f64([[nan, 1, 2], [3, 4, inf]]), marks(".xx", "xx.")
    assert explained_variance(returns, returns, mask) == pytest.approx(1, abs=1e-6)
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0, abs=1e-6)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3, abs=1e-6)


# 6. PPO: the update


def rollout(policy, ref=None, n=12, temperature=1.0):
    """A batch for ppo_update, with advantages and returns from a random score."""
    prompts = [[1 + i % 3] * (1 + i % 4) for i in range(n)]
    tokens, mask, *_ = generate(policy, prompts, 8, temperature)
    with torch.no_grad():
        logprobs, values, _ = evaluate_actions(policy, tokens, mask, temperature)
        ref_logprobs, _, _ = evaluate_actions(ref or policy, tokens, mask, temperature)
    rewards = kl_adjusted_rewards(torch.randn(n), logprobs, ref_logprobs, mask, 0.1)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    batch = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values}
    return batch | {"advantages": whiten(advantages, mask), "returns": returns}


def sgd(policy, lr):
    """Plain gradient descent, so that a step is the gradient."""
    return torch.optim.SGD(policy.parameters(), lr)


def settings(**changes):
    return PPOConfig(**({"epochs": 1, "minibatches": 1, "max_grad_norm": inf, "batch_size": 12} | changes))


@pytest.mark.parametrize("epochs, minibatches", [(1, 1), (1, 4), (3, 1), (2, 5), (4, 12)])
def test_an_update_takes_exactly_epochs_times_minibatches_steps(epochs, minibatches):
    policy, steps = tiny_gpt(), []
    optimizer = sgd(policy, 1e-3)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    ppo_update(policy, optimizer, rollout(policy), settings(epochs=epochs, minibatches=minibatches))
    assert len(steps) == epochs * minibatches


def test_every_pass_sees_every_response_once():
    policy = tiny_gpt()
    batch, seen = rollout(policy), []
    batch["advantages"] = torch.where(batch["mask"], torch.arange(12.0)[:, None], 0.0)
    real = minippo.policy_loss

    def watched(logprobs, old_logprobs, advantages, mask, clip_eps):
        seen.extend(advantages.amax(1).tolist())
        return real(logprobs, old_logprobs, advantages, mask, clip_eps)

    minippo.policy_loss = watched
    try:
        ppo_update(policy, sgd(policy, 0.0), batch, settings(epochs=2, minibatches=5))
    finally:
        minippo.policy_loss = real
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12)) and seen[:12] != seen[12:]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_the_first_step_the_ratio_is_1_everywhere(temperature):
    policy = tiny_gpt(dropout=0.5)  # in eval mode, and it must stay there
    stats = ppo_update(policy, sgd(policy, 0.1), rollout(policy, temperature=temperature), settings(temperature=temperature))
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert stats["approx_kl"] == pytest.approx(0, abs=1e-6) and stats["clip_frac"] == 0


def test_with_several_epochs_the_ratio_moves_and_the_clip_acts():
    policy = tiny_gpt()
    stats = ppo_update(policy, torch.optim.Adam(policy.parameters(), 0.01), rollout(policy), settings(epochs=4, minibatches=2))
    assert stats["ratio_max"] > 1.2 and stats["approx_kl"] > 1e-4 and 0 < stats["clip_frac"] < 1


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely():
    policy = tiny_gpt()
    batch = rollout(policy)
    ppo_update(policy, sgd(policy, 1e-3), batch, settings(vf_coef=0.0))
    change = evaluate_actions(policy, batch["tokens"], batch["mask"])[0] - batch["logprobs"]
    assert (change * batch["advantages"]).sum() > 0


def test_the_gradient_is_scaled_down_to_max_grad_norm():
    policy = tiny_gpt()
    before = weights(policy)
    stats = ppo_update(policy, sgd(policy, 1.0), rollout(policy), settings(max_grad_norm=1e-3))
    assert stats["grad_norm"] > 1e-2  # what is reported is the norm before
    assert (weights(policy) - before).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_an_infinite_max_grad_norm_leaves_the_gradient_alone():
    policy = tiny_gpt()
    before = weights(policy)
    stats = ppo_update(policy, sgd(policy, 1.0), rollout(policy), settings())
    assert (weights(policy) - before).norm().item() == pytest.approx(stats["grad_norm"], rel=1e-6)


def test_a_learning_rate_of_0_leaves_the_weights_alone():
    policy = tiny_gpt()
    before = weights(policy)
    ppo_update(policy, plumbing.adamw(policy, 0.0), rollout(policy), settings(epochs=2, minibatches=3))
    assert torch.equal(weights(policy), before)


def without_advantages(policy, ref=None):
    batch = rollout(policy, ref)
    return batch | {"advantages": torch.zeros_like(batch["advantages"])}


def test_without_advantages_value_loss_or_bonus_nothing_moves():
    policy, ref = tiny_gpt(), tiny_gpt()
    before = weights(policy)
    config = settings(vf_coef=0.0, entropy_coef=0.0, kl_loss_coef=0.0)
    ppo_update(policy, sgd(policy, 1.0), without_advantages(policy, ref), config)
    assert_equal(weights(policy), before)


def test_the_entropy_bonus_raises_the_entropy():
    policy = tiny_gpt()
    batch = without_advantages(policy)
    tokens, mask = batch["tokens"], batch["mask"]
    before = masked_mean(evaluate_actions(policy, tokens, mask)[2], mask)
    ppo_update(policy, sgd(policy, 0.01), batch, settings(vf_coef=0.0, entropy_coef=1.0))
    assert masked_mean(evaluate_actions(policy, tokens, mask)[2], mask) > before


def test_the_kl_loss_pulls_the_policy_to_the_reference():
    policy, ref = tiny_gpt(), tiny_gpt()
    batch = without_advantages(policy, ref)

    def distance():
        logprobs = evaluate_actions(policy, batch["tokens"], batch["mask"])[0]
        return masked_mean((logprobs - batch["ref_logprobs"]) ** 2, batch["mask"]).item()

    before = distance()
    ppo_update(policy, sgd(policy, 0.01), batch, settings(vf_coef=0.0, kl_loss_coef=1.0))
    assert distance() < before


def test_the_gradient_of_the_kl_loss_is_on_average_that_of_the_kl():
    # All responses of one token, weighted by sampling: 4,000 of them stand for the expectation.
    policy, ref = three_token_gpt(), three_token_gpt()
    tokens, mask, *_ = generate(policy, [[1]] * 4000, 1)
    with torch.no_grad():
        old = [evaluate_actions(model, tokens, mask) for model in (policy, ref)]
    zeros = torch.zeros_like(old[0][0])
    batch = {"tokens": tokens, "mask": mask, "logprobs": old[0][0], "ref_logprobs": old[1][0], "values": zeros}
    batch |= {"advantages": zeros, "returns": zeros}
    p, q = (model(torch.tensor([[1]]))[0][0, 0].log_softmax(-1) for model in (policy, ref))
    (p.exp() * (p - q)).sum().backward()
    exact = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in policy.parameters()])
    before = weights(policy)
    ppo_update(policy, sgd(policy, 1.0), batch, settings(batch_size=4000, vf_coef=0.0, kl_loss_coef=1.0))
    assert_equal(before - weights(policy), exact, 0.05 * exact.norm().item())
    assert exact.norm() > 0.1


def test_vf_coef_weighs_the_value_loss_and_0_leaves_the_values_untrained():
    moved = []
    for vf_coef in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        policy = tiny_gpt()
        before = policy.value_head.weight.detach().clone()
        ppo_update(policy, sgd(policy, 1.0), rollout(policy), settings(vf_coef=vf_coef, value_clip=inf))
        moved.append(policy.value_head.weight.detach() - before)
    assert not moved[0].any() and moved[1].any()
    assert_equal(2 * moved[1], moved[2], 1e-5)


def test_the_value_clip_of_an_update_is_around_the_values_of_the_rollout():
    policy = tiny_gpt()
    batch = rollout(policy)
    batch["returns"] = batch["values"] + 10.0  # far above: every value wants to rise, and may do so by value_clip
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    ppo_update(policy, sgd(policy, 1e-3), batch, settings(epochs=60, value_clip=0.3))
    step = (evaluate_actions(policy, batch["tokens"], batch["mask"])[1] - batch["values"])[batch["mask"]]
    assert 0.25 < step.mean() < 0.7  # without the clip, or with one around the values of the step before, it would go on rising


def test_no_gradient_reaches_the_reference_or_the_reward_model():
    policy = tiny_gpt()
    ref, scorer = frozen_copy(tiny_gpt()), frozen_copy(tiny_reward_model())
    before = weights(ref), weights(scorer)
    batch = rollout(policy, ref)
    scores, _ = score_responses(scorer, batch["tokens"], batch["mask"], EOT)
    batch["returns"] = batch["returns"] + scores[:, None]
    ppo_update(policy, sgd(policy, 0.1), batch, settings(epochs=2, kl_loss_coef=0.1))
    assert all(p.grad is None for model in (ref, scorer) for p in model.parameters())
    assert torch.equal(weights(ref), before[0]) and torch.equal(weights(scorer), before[1])


@pytest.mark.parametrize("padding", ["other values", "more columns"])
def test_padding_changes_neither_the_weights_nor_the_stats_of_an_update(padding):
    results = []
    for dirty in (False, True):
        torch.manual_seed(0)
        policy, ref = tiny_gpt(), tiny_gpt()
        batch = rollout(policy, ref)
        mask, after = batch["mask"], torch.arange(batch["tokens"].shape[1]) > last_action(batch["mask"])[:, None] + 1
        assert after.any()
        if dirty and padding == "other values":
            batch = {k: torch.where(mask, x, nan) if x.is_floating_point() else x for k, x in batch.items()}
            batch["tokens"] = torch.where(after, 7, batch["tokens"])
        elif dirty:
            batch = {k: F.pad(x, (0, 2), value=False if k == "mask" else 5) for k, x in batch.items()}
        torch.manual_seed(1)
        config = settings(epochs=2, minibatches=3, kl_loss_coef=0.1, entropy_coef=0.1)
        stats = ppo_update(policy, sgd(policy, 0.1), batch, config)
        results.append((weights(policy), stats))
    assert_equal(results[0][0], results[1][0], 1e-6)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)


def test_the_stats_of_an_update_are_means_over_all_tokens_however_they_were_split():
    def stats_of(minibatches):
        torch.manual_seed(5)
        policy, ref = tiny_gpt(), tiny_gpt()
        batch = rollout(policy, ref)
        batch["logprobs"] = batch["logprobs"] - 0.3 * batch["advantages"].abs()  # as if steps had been taken already
        return ppo_update(policy, sgd(policy, 0.0), batch, settings(epochs=2, minibatches=minibatches)), batch, policy

    whole, batch, policy = stats_of(1)
    mask = batch["mask"]
    assert len(set(mask.sum(1).tolist())) > 2  # responses of several lengths
    logprobs, _, _ = evaluate_actions(policy, batch["tokens"], mask)
    expected = policy_loss(logprobs, batch["logprobs"], batch["advantages"], mask, 0.2)[1]
    assert {name: whole[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    for minibatches in (3, 5, 12):
        split, _, _ = stats_of(minibatches)
        del split["grad_norm"]
        assert split == pytest.approx({name: whole[name] for name in split}, rel=1e-4)


def test_an_update_that_is_not_finite_stops_before_the_weights_are_touched():
    policy = tiny_gpt()
    batch = rollout(policy)
    before = weights(policy)
    batch["returns"] = batch["returns"] + inf
    with pytest.raises(UserError, match="step 7"):
        ppo_update(policy, sgd(policy, 0.1), batch, settings(), 7)
    assert torch.equal(weights(policy), before)


def test_more_minibatches_than_responses_are_refused():
    with pytest.raises(UserError, match="minibatches"):
        PPOConfig(batch_size=2, minibatches=3)


# 6. PPO: a critic of its own


def test_a_separate_critic_starts_with_the_normalised_scores_of_the_reward_model_and_leaves_the_policy_alone():
    policy, scorer = tiny_gpt(), tiny_reward_model()
    scorer.mean.fill_(0.7), scorer.std.fill_(1.9)
    both = policy.with_critic(scorer)
    tokens = torch.randint(EOT + 1, (3, 6))
    logits, values = both(tokens)
    assert_equal(logits, policy(tokens)[0])
    for length in range(1, 7):
        assert_equal(values[:, length - 1].float(), scorer(tokens, torch.full((3,), length)).float(), 1e-5)
    before = weights(policy), weights(scorer)
    stir(both)
    assert torch.equal(weights(policy), before[0]) and torch.equal(weights(scorer), before[1])


def test_the_value_loss_of_a_separate_critic_does_not_touch_the_policy_nor_the_policy_loss_the_critic():
    policy = tiny_gpt().with_critic(tiny_reward_model())
    tokens, mask = torch.randint(EOT + 1, (3, 6)), marks(".xx..", "xxxxx", "...x.")
    logprobs, values, entropy = evaluate_actions(policy, tokens, mask)
    values.pow(2).sum().backward(retain_graph=True)
    assert all(p.grad is None or not p.grad.any() for p in policy.trunk.parameters())
    assert all(p.grad.any() for p in policy.critic.blocks.parameters())
    policy.zero_grad()
    (logprobs + entropy).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.critic.parameters())
    assert policy.trunk.blocks[0].mlp[0].weight.grad.any()


def test_a_separate_critic_is_sampled_and_updated_like_any_policy():
    policy = tiny_gpt().with_critic(tiny_reward_model())
    before = weights(policy.critic)
    stats = ppo_update(policy, sgd(policy, 0.01), rollout(policy), settings())
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-5) and not torch.equal(weights(policy.critic), before)


# The parts together: a task that PPO must learn


def train(beta, steps=40, lr=0.01, separate_critic=False, **changes):
    """Responses of two tokens, a reward of 1 if the first is 3. -> P(3) for each prompt before and after, and the KL at the end."""
    policy = GPT(GPTConfig(5, 8, layers=1, heads=1, channels=8)).eval()
    ref = frozen_copy(policy)
    if separate_critic:
        policy = policy.with_critic(RewardModel(policy))
    prompts = [[0], [1], [2, 0]]
    optimizer = plumbing.adamw(policy, lr)
    config = PPOConfig(batch_size=96, epochs=4, minibatches=2, **changes)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        tokens, mask, *_ = generate(policy, prompts * 32, 2)
        lengths = torch.tensor([1, 1, 2] * 32)
        scores = (tokens[torch.arange(96), lengths] == 3).float()
        with torch.no_grad():
            logprobs, values, _ = evaluate_actions(policy, tokens, mask)
            ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask)
        rewards = kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, beta)
        advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
        batch = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values}
        ppo_update(policy, optimizer, batch | {"advantages": whiten(advantages, mask), "returns": returns}, config)

    def chance(model):
        return torch.stack([model(torch.tensor([prompt]))[0][0, -1].softmax(-1)[3] for prompt in prompts]).detach()

    return chance(ref), chance(policy), kl_per_response(logprobs, ref_logprobs, mask)[1].mean().item()


@pytest.mark.parametrize("separate_critic", [False, True])
def test_ppo_learns_to_write_what_is_rewarded(separate_critic):
    before, after, _ = train(0.02, separate_critic=separate_critic)
    assert before.max() < 0.5 and after.min() > 0.95


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_ppo_ends_at_the_best_policy_that_theory_knows(beta):
    # pi*(y) ~ ref(y) exp(r(y) / beta), so the odds of a first token 3 rise by exp(1 / beta), and nothing else changes.
    before, after, _ = train(beta)
    odds = before / (1 - before) * math.exp(1 / beta)
    assert_equal(after, odds / (1 + odds), 0.05)


def test_with_a_large_beta_the_policy_stays_at_the_reference():
    before, after, kl = train(50.0)
    assert_equal(after, before, 0.05)
    assert kl < 0.05


# 7. Checkpoints


@pytest.mark.parametrize("kind", ["sft", "ppo", "critic", "rm"])
def test_a_checkpoint_brings_back_the_same_outputs_the_tokenizer_and_the_facts(tmp_path, kind):
    tokenizer = Tokenizer.train(TEXTS, 280)
    model = stir(GPT(GPTConfig(tokenizer.vocab_size, 16, 1, heads=2, channels=8, dropout=0.5)))
    tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    if kind == "rm":
        model = stir(RewardModel(model))
        model.mean.fill_(0.5), model.std.fill_(3.0)
    elif kind == "critic":
        kind, model = "ppo", model.with_critic(stir(RewardModel(model)))
    save_checkpoint(tmp_path / "folder" / "x.pt", kind, model.train(), tokenizer, val_loss=1.25)
    loaded, same_tokenizer, facts = load_checkpoint(tmp_path / "folder" / "x.pt", (kind,))
    assert same_tokenizer.tokens == tokenizer.tokens and facts == {"val_loss": 1.25} and not loaded.training
    arguments = (tokens, lengths) if kind == "rm" else (tokens,)
    for a, b in zip(loaded(*arguments), model.eval()(*arguments), strict=True):
        assert torch.equal(a, b)
    if kind != "rm":
        assert loaded.lm_head.weight is loaded.trunk.tokens.weight
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["x.pt"]  # no temporary file is left


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = Tokenizer.train([], 257)
    save_checkpoint(tmp_path / "sft.pt", "sft", GPT(GPTConfig(257, 8, 1, heads=1, channels=8)), tokenizer)
    return tmp_path / "sft.pt"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_is_refused(checkpoint, share):
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(checkpoint, ("sft",))


@pytest.mark.parametrize("contents", [
    [1, 2], {"model": {}}, {"kind": "sft"}, {"kind": "sft", "config": {}, "vocabulary": [], "model": {}, "facts": {}},
])  # fmt: skip
def test_a_checkpoint_without_the_right_contents_is_refused(tmp_path, contents):
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(UserError, match="x.pt"):
        load_checkpoint(tmp_path / "x.pt", ("sft",))


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, 2))], ids=["torch", "pickle"])
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not(tmp_path, write):
    write({"kind": "sft", "config": Attack(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="damaged, or no checkpoint"):
        load_checkpoint(tmp_path / "x.pt", ("sft",))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind, script", [("sft", "train_sft.py"), ("rm", "train_rm.py"), ("ppo", "train_ppo.py")])
def test_a_missing_checkpoint_and_one_of_the_wrong_kind_name_the_script_that_makes_it(tmp_path, checkpoint, kind, script):
    with pytest.raises(UserError, match=script) as error:
        load_checkpoint(tmp_path / "none.pt", (kind,))
    assert "none.pt" in str(error.value)
    if kind != "sft":
        with pytest.raises(UserError, match=script) as error:
            load_checkpoint(checkpoint, (kind,))
        assert "'sft'" in str(error.value) and kind in str(error.value)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one_as_it_was(checkpoint, monkeypatch):
    old = checkpoint.read_bytes()

    def full_disk(contents, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match="No space left"):
        save_checkpoint(checkpoint, "sft", tiny_gpt(), Tokenizer.train([], 257))
    assert checkpoint.read_bytes() == old and list(checkpoint.parent.iterdir()) == [checkpoint]


# What makes the file what it is


SOURCE = Path(minippo.__file__).read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)


def names_bound_by(node):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def test_nothing_is_used_before_it_is_defined():
    later = set()
    for node in reversed(TREE.body):  # `later`: bound further down, and not (yet seen to be) bound further up
        bound = names_bound_by(node)
        local = {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)} | {
            name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}
        later -= bound
        too_early = (used & later) - local
        assert not too_early, f"line {node.lineno} uses {sorted(too_early)}, defined further down"
        later |= bound


def test_the_file_needs_nothing_but_torch_numpy_tiktoken_and_what_comes_with_them():
    modules = set()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules - sys.stdlib_module_names <= {"torch", "numpy", "tiktoken", "regex"}


COPIED = {
    "gather_logprobs": lambda f: f(noise(2, 3, 5), torch.randint(5, (2, 3)), 0.7),
    "masked_mean": lambda f: f(noise(2, 3), marks(".xx", "x..")),
    "whiten": lambda f: f(noise(2, 3), marks(".xx", "x..")),
    "frozen_copy": lambda f: weights(f(tiny_gpt().train())),
    "evaluate_actions": lambda f: f(tiny_gpt(), torch.randint(EOT + 1, (2, 4)), marks(".xx", "x.."), 0.7),
    "reward_model_loss": lambda f: f(noise(5), noise(5)),
    "kl_adjusted_rewards": lambda f: f(noise(2), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.1),
    "gae": lambda f: f(noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.9, 0.8),
    "policy_loss": lambda f: f(noise(2, 3), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.2),
    "value_loss": lambda f: f(noise(2, 3), noise(2, 3), noise(2, 3), marks(".xx", "x.."), 0.2),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_function_copied_elsewhere_works_with_import_torch_alone(name):
    needed, source = [name], "import torch\n"
    for function in needed:  # grows while it is read: the other functions of this list that one names come along
        text = inspect.getsource(getattr(minippo, function))
        used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        needed += [other for other in COPIED if other in used and other not in needed]
        source += text
    namespace = {}
    exec(source, namespace)
    results = []
    for function in (getattr(minippo, name), namespace[name]):
        torch.manual_seed(0)
        results.append(COPIED[name](function))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
