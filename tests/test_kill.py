"""kill -9 at a random moment, then --resume: nothing may differ from a run that was left alone.

Run: python -m pytest tests/test_kill.py; with KILLS=20 before it, as many kills, spread over the three stages.
"""

import os
import random
import shutil
import subprocess
import time

import pytest

from cli import ONE_THREAD, ROOT, command, metrics, run, same_weights
from data import zoo

KILLS = int(os.environ.get("KILLS", 3))
SMALL = ["--layers", "1", "--heads", "2", "--channels", "16", "--context", "32", "--batch_size", "16", "--epochs", "8"]
PPO = ["--steps", "24", "--batch_size", "8", "--minibatches", "2", "--max_new_tokens", "8", "--kl_horizon", "100", "--no_report"]
STAGES = {"sft": SMALL, "rm": ["--batch_size", "16", "--epochs", "8"], "ppo": PPO}


def flags(stage, out, data):
    return ["--data", data / "data", "--out", out, "--device", "cpu", "--save_every", "5", *STAGES[stage]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Data, and the three stages without any interruption."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 100))
        zoo.write_data(folder / "data", seed=0)
    for stage in STAGES:
        assert run(f"train_{stage}.py", *flags(stage, folder, folder))[0] == 0
    return folder


@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(whole, tmp_path, kill):
    stage, moment = list(STAGES)[kill % 3], random.Random(kill).random()
    for name in {"sft": [], "rm": ["sft.pt"], "ppo": ["sft.pt", "rm.pt"]}[stage]:
        shutil.copy(whole / name, tmp_path)
    script, log = f"train_{stage}.py", tmp_path / f"{stage}.jsonl"
    steps = len(metrics(whole / f"{stage}.jsonl"))
    process = subprocess.Popen(command(script, *flags(stage, tmp_path, whole)), cwd=ROOT, env=ONE_THREAD, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= moment * steps):
        time.sleep(0.001)
    time.sleep(random.Random(kill).random() / 50)  # anywhere within a step, or in the middle of a save
    process.kill()
    assert process.wait(60) != 0, "too late to kill"
    assert run(script, *flags(stage, tmp_path, whole), "--resume")[0] == 0
    assert metrics(log) == metrics(whole / f"{stage}.jsonl")
    assert same_weights(tmp_path / f"{stage}.pt", whole / f"{stage}.pt")
