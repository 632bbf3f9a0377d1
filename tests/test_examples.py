"""examples/, but for with_transformers.py."""

import shutil

import pytest
import torch

from data.rows import UserError, read_jsonl
from examples import ensemble, iterate, sums
from minippo import row_lengths
from plumbing.batches import pad_completions
from plumbing.models import load_checkpoint, text_score
from plumbing.text import read_ids
from tiny_run import write_models


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("run"))


def test_sums_are_scored_by_arithmetic():
    prompts = ["2 + 3 =", "36 + 31 =", "2 + 3 ="]
    assert sums.score(prompts=prompts, completions=[" 5", " 66", "5"], id=[1, 2, 3]) == [1, 0, 0]
    rows = sums.make_rows(0)
    parts = [{row["prompt"] for row in rows[f"prompts_{split}"]} for split in ("train", "val")]
    assert len(parts[0]) + len(parts[1]) == 10_000 and 980 < len(parts[1]) < 1000
    mirrored = {" ".join([b, "+", a, "="]) for a, _, b, _ in map(str.split, parts[1])}
    assert mirrored == parts[1] and not parts[0] & parts[1]
    texts = [(row["prompt"], row["completion"]) for row in rows["sft_train"]]
    assert {prompt for prompt, _ in texts} == parts[0]
    right = sum(sums.score(*zip(*texts)))
    assert right / len(texts) == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("limit", [None, 16, 1])
def test_new_pairs_are_of_answers_that_have_ended(out, tmp_path, limit):
    contents = torch.load(out / "ppo.pt")
    settings = contents["metadata"]["settings"]
    settings["max_new_tokens"] = limit
    if limit is None:  # a policy of DPO
        del settings["max_new_tokens"], settings["temperature"]
    torch.save(contents, tmp_path / "ppo.pt")
    data = out.parent / "data"
    iterate.main(iterate.Config(data, str(out), tmp_path, pairs=200))
    old = read_jsonl(data / "pref_train.jsonl")
    pairs = read_jsonl(tmp_path / "data" / "pref_train.jsonl")
    assert pairs[: len(old)] == old
    assert all(row["chosen"] != row["rejected"] for row in pairs)
    if limit == 1:  # too short for any answer but the empty one
        assert len(pairs) == len(old)
    else:
        new = len(pairs) - len(old)
        assert new == 200 if limit is None else 100 < new < 200
    assert (tmp_path / "sft.pt").read_bytes() == (out / "sft.pt").read_bytes()
    assert (tmp_path / "data" / "prompts_val.jsonl").exists()
    with pytest.raises(UserError, match="choose another"):
        iterate.main(iterate.Config(data, str(tmp_path), tmp_path))


def test_an_ensemble_gives_its_lowest_score(out, tmp_path, monkeypatch):
    model, tokenizer, _ = load_checkpoint(out / "rm.pt", ["rm"])
    contents = torch.load(out / "rm.pt")
    contents["model"]["score_head.weight"] *= -1
    for name in "ab":
        (tmp_path / name).mkdir()
    shutil.copy(out / "rm.pt", tmp_path / "a")
    torch.save(contents, tmp_path / "b" / "rm.pt")
    other, _, _ = load_checkpoint(tmp_path / "b" / "rm.pt", ["rm"])
    monkeypatch.setenv("ENSEMBLE", str(tmp_path))
    rows = read_ids(out.parent / "data", "sft", "train", tokenizer, 64)
    tokens, mask = pad_completions(rows)
    scores = [x(tokens, row_lengths(mask)) for x in (model, other)]
    lowest = text_score(ensemble.minimum, tokenizer)([x for x, _ in rows], tokens, mask)
    torch.testing.assert_close(lowest, torch.min(*scores))
    assert (scores[0] < scores[1]).any() and (scores[1] < scores[0]).any()
    with pytest.raises(UserError, match="another vocabulary"):
        ensemble.minimum(["a"], completions=["b"], completion_ids=[[99, 100]])
