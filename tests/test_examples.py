"""examples/sums.py."""

import pytest

from examples import sums


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
