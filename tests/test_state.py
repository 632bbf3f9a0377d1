"""Interruption and resume: plumbing/state.py; the lock of plumbing/flags.py.

Run: python -m pytest tests/test_state.py
"""

import errno
import json
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from data.files import UserError
import minippo
import plumbing.checkpoints
import plumbing.report
from cli import metrics, run, start, write_data, write_models
from plumbing import flags, state, training
from plumbing.flags import RunConfig
from plumbing.state import State

# --------------------------------------------------------------------------------------------------
# A run that is stopped and resumed ends in the same files as one that is left alone.

STAGES = {
    "sft": "--batch_size 8 --epochs 3 --dropout 0.3 --layers 1 --channels 16 --context 48",
    "rm": "--batch_size 8 --epochs 3 --answers 16 --max_new_tokens 6",
    "ppo": "--batch_size 8 --minibatches 2 --max_new_tokens 6 --steps 6 --kl_horizon 100 "
    "--kl_target 1 --ref_update_every 1 --separate_critic --seed 4 --no_report",
}
CHANGES = {
    "sft": "--lr=0.5 --layers=2 --dtype=bfloat16 data/sft_train.jsonl data/sft_val.jsonl",
    "rm": "--lr=0.5 --answers=17 data/pref_train.jsonl data/pref_val.jsonl "
    "data/prompts_train.jsonl sft.pt",
    "ppo": "--lr=0.5 --kl_coef=0.5 data/prompts_train.jsonl rm.pt",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """-> a function: a new folder with data and the models that a stage starts from."""
    begun = tmp_path_factory.mktemp("begun")
    write_data(begun / "data")
    write_models(begun)

    def new_folder(kind):
        folder = tmp_path_factory.mktemp("run") / "out"
        return shutil.copytree(begun, folder, ignore=shutil.ignore_patterns(f"{kind}.pt"))

    return new_folder


def words(kind, folder, *more):
    given = f"--device cpu --data {folder}/data --out {folder} {STAGES[kind]}".split()
    return f"train_{kind}.py", *given, *more


def go(*given):
    return run(*words(*given))


def results(folder, kind):
    """What must not depend on interruptions."""
    return metrics(folder / f"{kind}.jsonl"), (folder / f"{kind}.pt").read_bytes()


@pytest.fixture(scope="module")
def whole(begun):
    """-> what each stage ends with if it is left alone."""
    folders = {kind: begun(kind) for kind in STAGES}
    assert all(go(kind, folder)[::2] == (0, "") for kind, folder in folders.items())
    return {kind: results(folder, kind) for kind, folder in folders.items()}


def stop_in(monkeypatch, call, how):
    place = {"full": (torch, "save"), "report": (plumbing.report, "finish_run")}
    place |= {"best": (training, "save_checkpoint"), "finish": (State, "finish")}
    place["end"] = plumbing.checkpoints, "save_checkpoint"  # of the script itself
    place, calls = place.get(how, (minippo, "gradient_step")), []
    real = getattr(*place)

    def stopping(*args, **more):
        calls.append(args)
        if len(calls) == call and how.startswith("SIG"):
            signal.raise_signal(signal.Signals[how])
            assert signal.getsignal(signal.Signals[how]) == signal.SIG_DFL  # for a second one
        elif len(calls) == call and how == "full":
            args[1].write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        elif len(calls) == call:
            raise SystemExit("crash")  # as with kill -9
        return real(*args, **more)

    monkeypatch.setattr(*place, stopping)


# In that call of gradient_step, or of what stop_in() names
STOPS = "sft 5 SIGINT, sft 1 crash, sft 3 full, rm 8 SIGTERM, rm 5 crash, ppo 6 SIGHUP, "
STOPS += "ppo 10 crash, ppo 3 full, ppo 1 report, sft 8 best, sft 1 finish, sft 1 end, rm 1 end"


@pytest.mark.parametrize("stop", STOPS.split(", "))
def test_a_run_stopped_anywhere_ends_as_if_it_had_not_been(begun, whole, monkeypatch, stop):
    kind, call, how = stop.split()
    folder, step = begun(kind), int(call) // (2 if kind == "ppo" else 1)
    with monkeypatch.context() as patch:
        stop_in(patch, int(call), how)
        status, printed, error = go(kind, folder)
    if how.startswith("SIG"):
        stopped = f"stopped; step {step} is saved, --resume goes on from there"
        assert (status, error) == (130, f"train_{kind}.py: {stopped}\n")
        assert "stopping after this step" in printed
        assert torch.load(folder / f"{kind}_state.pt")["step"] == step
    elif how == "full":
        assert status == 2 and "cannot be written (No space left on device)" in error
    else:
        assert status == "crash"
        assert (folder / f"{kind}.pt").exists() == (how in ("report", "finish"))
    status, printed, error = go(kind, folder, "--resume")
    assert (status, error) == (0, "") and results(folder, kind) == whole[kind]
    assert ("so this run starts at the beginning" in printed) == (stop == "sft 1 crash")


def test_a_killed_process_unlocks_its_folder_and_can_be_resumed(begun):
    folder, long = begun("rm"), ["--epochs", 30]
    with start(folder / "rm.jsonl", *words("rm", folder, *long)) as process:
        status, _, error = go("rm", folder, *long)
        assert status == 2 and "another run is writing there" in error
        process.kill()
        process.wait(60)
    assert go("rm", folder, *long, "--resume")[::2] == (0, "")
    assert [row["step"] for row in metrics(folder / "rm.jsonl")] == [*range(1, 76)]


@pytest.mark.parametrize("kind", STAGES)
def test_a_run_goes_on_with_the_same_settings_data_and_models_alone(
    begun, tmp_path, monkeypatch, kind
):
    stopped = begun(kind)
    with monkeypatch.context() as patch:
        stop_in(patch, 2, "SIGINT")
        assert go(kind, stopped)[0] == 130
    for i, change in enumerate(CHANGES[kind].split()):
        folder = shutil.copytree(stopped, tmp_path / str(i))
        path, given, says = folder / change, [], "was saved with other data"
        if change.startswith("--"):
            given, says = [change], f"was saved with {change[2:].split('=')[0]} = "
        elif change.endswith(".pt"):
            contents, says = torch.load(path), f"was saved with other {change}; "
            contents["model"]["trunk.norm.bias"] += 1
            torch.save(contents, path)
        else:
            path.write_text(path.read_text().partition("\n")[2])
        status, _, error = go(kind, folder, "--resume", *given)
        assert status == 2 and says in error, (change, error)
        assert f" = {change.split('=')[-1]};" not in error  # but what it was
    assert go(kind, stopped, "--resume", "--grad_checkpoint")[0] == 0


# --------------------------------------------------------------------------------------------------
# A State by itself


def begin(out, kind="sft", steps=10, **given):
    """-> a State of one weight, and its steps."""
    out.mkdir(exist_ok=True)
    parts, run = {"model": torch.nn.Linear(1, 1)}, RunConfig(out=out, **given)
    it = State(kind, run, parts, [], {"lr": 1})
    return it, it.steps(steps)


def finish(out):
    it, steps = begin(out, overwrite=True)
    for step in steps:
        it.end_step({"loss": step}, 10, ["loss"])
    it.finish()
    it.model_path.touch()


def test_what_is_there_is_overwritten_on_request_alone(tmp_path, capsys):
    for lost, resume, says in (
        ("", False, "a run is there; --resume goes on with it, --overwrite begins again"),
        ("", True, "^$"),  # it is finished
        ("sft.pt", True, "sft.pt is gone; --overwrite makes it again"),
        ("sft_state.pt", False, "sft.pt: a model is there; --overwrite makes it again"),
        ("sft_state.pt", True, "sft.pt: a model is there"),
    ):
        finish(tmp_path)
        (tmp_path / (lost or "rm.pt")).unlink(missing_ok=True)
        with pytest.raises((UserError, SystemExit), match=says):
            begin(tmp_path, resume=resume)
    assert "sft.pt is finished; --overwrite makes it again" in capsys.readouterr().out
    finish(tmp_path)
    torch.save({**torch.load(tmp_path / "sft_state.pt"), "model": {}}, tmp_path / "sft_state.pt")
    with pytest.raises(UserError, match="damaged .*; --overwrite begins again"):
        begin(tmp_path, resume=True)


def test_an_earlier_run_is_there_until_the_first_step(tmp_path):
    finish(tmp_path)
    for name in (".sft.pt.1.tmp", ".sft_state.pt.1.tmp", ".mine.tmp"):
        (tmp_path / name).touch()
    it, steps = begin(tmp_path, overwrite=True)
    assert [x.name for x in tmp_path.glob(".*.tmp")] == [
        ".mine.tmp"
    ]  # the others were half written
    assert next(steps) == 0 and len(metrics(it.log_path)) == 10
    it.save = lambda: None  # killed before its first save
    it.end_step({}, 10, [])
    assert not it.path.exists() and len(metrics(it.log_path)) == 1


def test_these_settings_may_be_changed():
    free = (
        "data device grad_checkpoint micro_batch models no_report out overwrite resume tensorboard"
    )
    assert sorted(state.FREE_SETTINGS) == free.split()


def test_a_signal_saves_also_where_nobody_reads_that(tmp_path, monkeypatch):
    class Closed:
        def write(self, _):
            raise BrokenPipeError

    before, (it, steps) = signal.getsignal(signal.SIGINT), begin(tmp_path, steps=1)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(KeyboardInterrupt, match="step 1 is saved"):
        for _ in steps:
            assert signal.signal(signal.SIGHUP, hangup) == signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
            it.end_step({}, 1, [])
    assert signal.getsignal(signal.SIGINT) == before


@pytest.fixture
def clock(monkeypatch):
    """Time passes when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    time = SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now + 5000)
    monkeypatch.setattr(state, "time", time)
    return clock


def timed(clock, seconds, out, **given):
    """Steps of so many seconds -> after which of them the state was saved."""
    it, steps = begin(out, **given)
    saves, save = [], it.save

    def noted_save():
        assert len(metrics(it.log_path)) == it.step  # no line is lost if this is the last save
        saves.append(it.step), save()

    it.save = noted_save
    for step, passed in zip(steps, seconds):
        clock.now += passed
        more = {"val_loss": 0.25} if step == 1 else {}
        it.end_step({"loss": 0.5, "idle": 1} | more, 100, ["loss", "val_loss"])
    return saves


def test_the_state_is_saved_every_30_seconds_but_rarely_if_that_takes_long(
    tmp_path, monkeypatch, clock
):
    write, pauses = state.write_contents, iter([3, 0, 0, 0])

    def slow_at_first(*given):
        clock.now += next(pauses)
        write(*given)

    monkeypatch.setattr(state, "write_contents", slow_at_first)
    assert timed(clock, [10] * 13, tmp_path, steps=13) == [1, 8, 12, 13]


def test_the_screen_and_the_log_show_steps_and_their_time(tmp_path, capsys, clock):
    timed(clock, [1, 1, 1, 1, 1, 1.5, 1, 60], tmp_path, steps=8)
    assert capsys.readouterr().out.splitlines() == [
        "step    2/8  loss 0.5  val_loss 0.25  100 tokens/s  0:02, 0:06 left",
        "step    6/8  loss 0.5  67 tokens/s  0:06, 0:02 left",
        "step    8/8  loss 0.5  2 tokens/s  1:07, 0:00 left",
    ]
    line = {"step": 6, "loss": 0.5, "idle": 1, "tokens_per_second": 67, "seconds": 6.5}
    assert json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[5]) == line
    timed(clock, [2], tmp_path, steps=9, resume=True)  # its time is added
    line |= {"step": 9, "tokens_per_second": 50, "seconds": 69.5}
    assert json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[8]) == line


def test_tensorboard_has_each_number_once_at_its_time(tmp_path, monkeypatch, clock):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    timed(clock, [2, 2.5, 3], tmp_path, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard" / "sft"))
    events = board.Reload().Scalars("seconds")
    assert [x.wall_time - events[0].wall_time for x in events] == [0.0, 2.5, 5.5]
    timed(clock, [4, 5], tmp_path, tensorboard=True, resume=True, steps=3)
    events = board.Reload().Scalars("seconds")
    assert [(x.step, x.value) for x in events] == [(1, 2.0), (2, 6.0), (3, 11.0)]
    assert [x.value for x in board.Scalars("val_loss")] == [0.25]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="--tensorboard needs a package .* pip install tensorboard"):
        begin(tmp_path, tensorboard=True, overwrite=True)


def test_float32_is_float32_whatever_was_set_before(tmp_path):
    run = RunConfig(device="cpu", out=tmp_path, dtype="bfloat16")
    for run.device, precision in (("cuda", "high"), ("cpu", "highest")):
        torch.set_float32_matmul_precision("medium")
        flags.prepare(run)
        assert torch.get_float32_matmul_precision() == precision
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(flags, "fcntl", SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=flock))
    flags.lock(tmp_path / "new")
