"""kill -9 at a random moment, then --resume: nothing may differ from a run that was left alone.

Run: python -m pytest tests/test_kill.py; with KILLS=100 before it, as many kills, spread over the three stages.
"""

import os
import random
import shutil
import subprocess
import time

import pytest

from cli import ONE_THREAD, ROOT, command, metrics, run, same_weights
from data import zoo

KILLS = int(os.environ.get("KILLS", 4))
SMALL = ["--layers", "1", "--heads", "2", "--channels", "16", "--context", "32", "--batch_size", "16", "--epochs", "8"]
PPO = ["--steps", "24", "--batch_size", "8", "--minibatches", "2", "--max_new_tokens", "8", "--kl_horizon", "5000", "--no_report"]
RM = ["--batch_size", "16", "--max_steps", "60"]  # of a length that is found on the way
STAGES = {"sft": SMALL, "rm": RM, "ppo": PPO, "other ppo": [*PPO, "--separate_critic", "--ref_update_every", "5"]}


def flags(stage, out, data):
    return ["--data", data / "data", "--out", out, "--device", "cpu", "--save_every", "5", *STAGES[stage]]


def name(stage):
    return stage.split()[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Data, and the three stages without any interruption."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 100))
        zoo.write_data(folder / "data", seed=0)
    for stage in STAGES:
        out = folder / stage
        if stage != "sft":
            shutil.copytree(folder / ("sft" if stage == "rm" else "rm"), out)
        assert run(f"train_{name(stage)}.py", *flags(stage, out, folder))[0] == 0
    return folder


@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(whole, tmp_path, kill):
    stage, moment = list(STAGES)[kill % len(STAGES)], random.Random(kill).random()
    before, after = whole / {"rm": "sft"}.get(stage, "rm"), whole / stage
    for model in {"sft": [], "rm": ["sft.pt"]}.get(stage, ["sft.pt", "rm.pt"]):
        shutil.copy(before / model, tmp_path)
    script, log = f"train_{name(stage)}.py", tmp_path / f"{name(stage)}.jsonl"
    steps = len(metrics(after / log.name))
    process = subprocess.Popen(command(script, *flags(stage, tmp_path, whole)), cwd=ROOT, env=ONE_THREAD, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= moment * steps):
        time.sleep(0.001)
    time.sleep(random.Random(kill).random() / 50)  # anywhere within a step, or in the middle of a save
    process.kill()
    assert process.wait(60) != 0, "too late to kill"
    assert run(script, *flags(stage, tmp_path, whole), "--resume")[0] == 0
    assert metrics(log) == metrics(after / log.name)
    assert same_weights(tmp_path / f"{name(stage)}.pt", after / f"{name(stage)}.pt")
