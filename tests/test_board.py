"""--tensorboard shows the numbers of the log. Run: python -m pytest tests/test_board.py (needs tensorboard; .ci/run installs it)"""

import json
import os
import sys
import time

import pytest
import torch

from cli import run
from plumbing.progress import Progress
from plumbing.settings import AT_ERROR, RunConfig
from plumbing.training import FitConfig

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture(autouse=True)
def nothing_to_save():
    yield
    AT_ERROR.clear()


def train(out, until=10, first=0.0, kind="sft", **flags):
    """Steps 1 to `until` of 10, or from where the run was saved on; the loss of step n is first + n."""
    run = RunConfig(out=out, device="cpu", **flags)
    progress = Progress(kind, run, [FitConfig()], 10, data=("rows",), model=torch.nn.Linear(1, 1))
    for number in progress.remaining(range(until)):
        more = {"val_loss": 0.5} if number == 4 else {}
        progress.end_step(10, [], loss=first + number + 1, passes=[{"loss": 1.0}], **more)
    return progress


def shown(out, kind="sft"):
    """What TensorBoard shows: {name: [(step, value, time)]}."""
    events = EventAccumulator(str(out / "tensorboard" / kind), size_guidance={"scalars": 0}).Reload()
    curves = {name: [(x.step, x.value, x.wall_time) for x in events.Scalars(name)] for name in events.Tags()["scalars"]}
    return {name: points for name, points in curves.items() if points}


def assert_as_logged(out, kind="sft"):
    """-> the steps. The numbers of the log, each once, at the distances in time that they had."""
    rows = [json.loads(line) for line in (out / f"{kind}.jsonl").read_text().splitlines()]
    curves = shown(out, kind)
    assert curves.keys() == {name for row in rows for name in row} - {"step", "passes"}
    for name, points in curves.items():
        logged = [row for row in rows if name in row]
        assert [step for step, *_ in points] == [row["step"] for row in logged]
        assert [value for _, value, _ in points] == pytest.approx([row[name] for row in logged], rel=1e-6)
        times = [time - points[0][2] for *_, time in points]
        assert times == pytest.approx([row["seconds"] - logged[0]["seconds"] for row in logged], abs=2e-3)
    return [row["step"] for row in rows]


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_the_numbers_of_the_log_are_shown_also_while_the_run_goes_on(tmp_path, kind):
    train(tmp_path, until=6, kind=kind, tensorboard=True)
    assert assert_as_logged(tmp_path, kind) == [1, 2, 3, 4, 5, 6]
    assert [step for step, *_ in shown(tmp_path, kind)["val_loss"]] == [5]


def test_without_the_flag_there_is_no_such_folder(tmp_path):
    train(tmp_path)
    assert not (tmp_path / "tensorboard").exists()


def test_steps_that_are_made_again_are_shown_once(tmp_path):
    train(tmp_path, until=7, tensorboard=True, save_every=4)
    train(tmp_path, first=100.0, tensorboard=True, save_every=4, resume=True)
    assert assert_as_logged(tmp_path) == list(range(1, 11))
    assert [value for _, value, _ in shown(tmp_path)["loss"]] == [1, 2, 3, 4, *range(105, 111)]


@pytest.mark.parametrize("before, after", [(False, True), (True, False)])
def test_the_flag_may_change_when_a_run_goes_on_and_what_was_logged_without_it_is_shown_too(tmp_path, before, after):
    train(tmp_path, until=4, tensorboard=before, save_every=4)
    train(tmp_path, until=8, tensorboard=after, save_every=4, resume=True)
    if after:
        assert assert_as_logged(tmp_path) == list(range(1, 9))
    train(tmp_path, tensorboard=True, save_every=4, resume=True)
    assert assert_as_logged(tmp_path) == list(range(1, 11))


def test_a_run_from_the_beginning_hides_the_one_before(tmp_path):
    train(tmp_path, tensorboard=True).done()
    train(tmp_path, until=3, first=50.0, tensorboard=True)
    assert assert_as_logged(tmp_path) == [1, 2, 3]
    assert "val_loss" not in shown(tmp_path)


def test_the_newest_step_was_made_just_now_and_the_time_that_a_run_has_lost_is_not_shown(tmp_path):
    train(tmp_path, until=3, tensorboard=True, save_every=1)
    assert shown(tmp_path)["loss"][-1][2] == pytest.approx(time.time(), abs=0.5)
    log = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    for row, seconds in zip(log, (10.0, 20.0, 500.0), strict=True):
        row["seconds"] = seconds  # as if the steps had taken so long
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    state = torch.load(tmp_path / "sft_state.pt")
    state["values"]["seconds"] = 500.0
    torch.save(state, tmp_path / "sft_state.pt")
    train(tmp_path, until=5, tensorboard=True, resume=True)
    times = [at - time.time() for *_, at in shown(tmp_path)["loss"]]
    assert times == pytest.approx([-490, -480, 0, 0, 0], abs=0.5)


def test_without_the_package_no_script_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for script in ("train_sft.py", "train_rm.py", "train_ppo.py"):
        status, printed, error = run(script, "--tensorboard", "--out", tmp_path / "out")
        assert (status, printed) == (2, "") and error.count("\n") == 1
        assert error.startswith(f"{script}: --tensorboard needs a package that is missing (") and "pip install tensorboard" in error
    assert not (tmp_path / "out").exists()
