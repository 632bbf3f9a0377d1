"""Long phases say how far they are, and short ones nothing. Run: python -m pytest tests/test_waiting.py"""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

import train_rm
import train_sft
from data import zoo
from minippo import GPT, GPTConfig, PPOConfig, RewardModel
from plumbing import report, text, training
from plumbing.board import Board
from plumbing.progress import fingerprint
from plumbing.settings import RunConfig, UserError
from plumbing.text import Tokenizer, each, encode_rows, load_jsonl

BYTES = Tokenizer.train([], 257)


def small_gpt():
    return GPT(GPTConfig(257, 32, 1, heads=2, channels=16)).eval()


def write(path, n, *keys):
    """n rows, all different, the answers too."""
    path.write_text("".join(json.dumps({key: f" {key[0]}{i}" for key in keys}) + "\n" for i in range(n)))


def learn(folder):
    Tokenizer.train([f"ab{i:05}" for i in range(2500)], 263)


def first(folder):
    training.first_model([(f"a{i % 7}",) for i in range(2500)], GPTConfig(257), "")


def grade(folder):
    policy, config = small_gpt(), PPOConfig(max_new_tokens=1)
    report.respond(policy, policy, lambda tokens, mask: mask.sum(1), [[1]] * 2500, 1, BYTES, config, 5000, lambda *_: 1.0)


def entropy(folder):
    write(folder / "sft_val.jsonl", 200, "prompt", "completion")
    run = SimpleNamespace(data=folder, device="cpu")
    report.above_entropy(small_gpt(), BYTES, run, lambda prompt: {prompt.replace("p", "c"): 0.5})


def ceiling(folder):
    write(folder / "pref_val.jsonl", 200, "prompt", "chosen", "rejected")
    run = SimpleNamespace(data=folder, device="cpu")
    report.below_ceiling(RewardModel(small_gpt()).eval(), BYTES, run, lambda prompt, answer: len(answer))


def lines(folder):
    write(folder / "x.jsonl", 2500, "prompt")
    load_jsonl(folder / "x.jsonl", ("prompt",))


PHASES = {  # what does it: what is said of it, of how much
    lines: ("lines of {}/x.jsonl read", 2501),  # the last one is empty
    first: ("rows cut into words", 2500), learn: ("different words counted", 2501),  # also the letters before the digits
    lambda _: Tokenizer.train(["abcdefgh abcdefgh"], 263): ("tokens of the vocabulary learned", 6),
    lambda _: encode_rows([("a", "b")] * 2500, BYTES, 9): ("rows encoded", 2500),
    lambda _: fingerprint(["a"], ["b"] * 25_000): ("rows compared with those of an interrupted run", 25_000),
    lambda _: train_sft.validate(small_gpt(), [([1], [2])] * 12, "cpu", 4): ("pieces of the validation rows", 3),
    lambda _: train_rm.validate(RewardModel(small_gpt()), [([1], [2], [3])] * 12, "cpu", 4): ("pieces of the validation pairs", 3),
    grade: ("responses graded", 2500), entropy: ("demonstrations compared with their entropy", 200),
    ceiling: ("pairs compared with the judge", 200),
}  # fmt: skip


@pytest.mark.parametrize("phase, what, n", [(phase, *said) for phase, said in PHASES.items()], ids=[x for x, _ in PHASES.values()])
def test_a_long_phase_says_how_far_it_is_and_a_short_one_nothing(tmp_path, monkeypatch, capsys, phase, what, n):
    with torch.no_grad():
        phase(tmp_path)
        assert " left" not in capsys.readouterr().out
        clock = itertools.count(0, 3)  # three seconds between two looks
        monkeypatch.setattr(text.time, "perf_counter", lambda: next(clock))
        phase(tmp_path)
    said = re.findall(rf"^    ([\d,]+) of {n:,} {re.escape(what.format(tmp_path))}, \d+ s left$", capsys.readouterr().out, re.M)
    done = [int(x.replace(",", "")) for x in said]
    assert done and done == sorted(set(done)) and 0 < done[0] < n


def test_each_yields_every_row_once_in_order_and_looks_at_the_clock_now_and_then(capsys, monkeypatch):
    clock = itertools.count(0, 3)
    monkeypatch.setattr(text.time, "perf_counter", lambda: next(clock))
    assert list(each("rows", "abcdefg", 2)) == list("abcdefg") and list(each("rows", range(3), 1)) == [0, 1, 2]
    assert capsys.readouterr().out == "    4 of 7 rows, 4 s left\n    7 of 7 rows, 0 s left\n    2 of 3 rows, 3 s left\n"
    assert next(clock) == 3 * (1 + 4 + 1 + 3)
    assert list(each("rows", [])) == []


def test_the_default_data_is_the_same_whoever_looks_on(monkeypatch):
    monkeypatch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 30))
    seen = []

    def watch(what, rows):
        seen.append((what, len(rows)))
        return rows

    assert zoo.make_rows(3, watch) == zoo.make_rows(3)
    assert seen == [(f"rows of {name} made", 30) for name in ("sft_train", "sft_val", "pref_train", "pref_val")]


def test_who_waits_for_the_default_data_is_told_how_far_it_is(tmp_path, monkeypatch):
    def write_data(folder, seed, each):
        assert str(folder) == "data/zoo" and seed == 0 and each is text.each
        raise UserError("enough")

    monkeypatch.setattr(zoo, "write_data", write_data)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="enough"):
        train_sft.load(RunConfig(), GPTConfig(), "")


def test_the_rows_of_the_files_are_made_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 10))
    seen = []
    rows, _ = zoo.write_data(tmp_path / "zoo", 1, lambda what, rows: seen.append(what) or rows)
    assert len(seen) == 4 and rows == zoo.make_rows(1)


def test_the_reading_of_weights_is_said_before_it_begins(monkeypatch, capsys):
    def read(source, dropout):
        assert capsys.readouterr().out == "reading the weights and the vocabulary of gpt2-xl\n"
        return source, dropout

    monkeypatch.setattr("plumbing.hf.read_gpt2", read)
    assert training.first_model([], GPTConfig(257, dropout=0.25), "gpt2-xl") == ("gpt2-xl", 0.25)


def test_a_long_log_is_copied_to_tensorboard_with_a_word(tmp_path, monkeypatch, capsys):
    writer = SimpleNamespace(add_scalar=lambda *_: None, flush=lambda: None)
    monkeypatch.setattr("plumbing.board.need_tensorboard", lambda: lambda *_, **__: writer)
    clock = itertools.count(0, 3)
    monkeypatch.setattr(text.time, "perf_counter", lambda: next(clock))
    Board(tmp_path, ['{"step": 1, "seconds": 1}'] * 2500)
    assert "2,000 of 2,500 lines of the log for TensorBoard, " in capsys.readouterr().out
