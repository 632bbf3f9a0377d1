"""kill -9 at a random moment, then --resume: nothing may differ from a run that was left alone.

Run: python -m pytest tests/test_kill.py; with KILLS=20 before it, as many kills, spread over the three stages.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from data import zoo

ROOT = Path(zoo.__file__).parents[1]
KILLS = int(os.environ.get("KILLS", 3))
SMALL = ["--layers", "1", "--heads", "2", "--channels", "16", "--context", "32", "--batch_size", "16", "--epochs", "25"]
PPO = ["--steps", "60", "--batch_size", "8", "--minibatches", "2", "--max_new_tokens", "8", "--kl_horizon", "100", "--no_report"]
STAGES = {"sft": SMALL, "rm": ["--batch_size", "16", "--epochs", "25"], "ppo": PPO}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Data, and the three stages without any interruption."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 100))
        zoo.write_data(folder / "data", seed=0)
    for stage in STAGES:
        assert start(stage, folder, folder).wait(120) == 0
    return folder


def start(stage, folder, data, *more):
    command = [sys.executable, f"train_{stage}.py", "--data", data / "data", "--out", folder, "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    flags = [*map(str, command), "--save_every", "7", *STAGES[stage], *more]
    return subprocess.Popen(flags, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def metrics(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in row.items() if name not in ("tokens_per_second", "seconds")} for row in rows]


@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(whole, tmp_path, kill):
    stage, moment = list(STAGES)[kill % 3], random.Random(kill).random()
    for name in {"sft": [], "rm": ["sft.pt"], "ppo": ["sft.pt", "rm.pt"]}[stage]:
        shutil.copy(whole / name, tmp_path)
    log, steps = tmp_path / f"{stage}.jsonl", len(metrics(whole / f"{stage}.jsonl"))
    process = start(stage, tmp_path, whole)
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= moment * steps):
        time.sleep(0.001)
    time.sleep(random.Random(kill).random() / 50)  # anywhere within a step, or in the middle of a save
    process.kill()
    assert process.wait(60) != 0, "too late to kill"
    assert start(stage, tmp_path, whole, "--resume").wait(120) == 0
    assert metrics(log) == metrics(whole / f"{stage}.jsonl")
    ours, theirs = (torch.load(folder / f"{stage}.pt", weights_only=True)["model"] for folder in (tmp_path, whole))
    assert all(torch.equal(ours[name], x) for name, x in theirs.items())
