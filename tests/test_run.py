"""The steps of a run, across interruptions: plumbing/run.py. Run: python -m pytest tests/test_run.py"""

import errno
import json
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from cli import metrics, run, write_data, write_models
from data.files import UserError
import minippo
import plumbing.report
from plumbing import models, run as room
from plumbing.run import FitConfig, Run
from plumbing.settings import RunConfig
from plumbing.text import Tokenizer
from tiny import inf, nan

# --------------------------------------------------------------------------------------------------
# A run that is stopped and resumed ends in the same files as one that is left alone.

STAGES = {
    "sft": "--batch_size 8 --epochs 3 --layers 1 --channels 16 --context 48",
    "rm": "--batch_size 8 --epochs 3 --max_new_tokens 6",
    "ppo": "--batch_size 8 --minibatches 2 --max_new_tokens 6 --steps 6 "
    "--kl_target 1 --ref_update_every 1 --separate_critic --seed 4 --no_report",
}
CHANGES = {
    "sft": "--lr=0.5 --layers=2 --seed=9 data/sft_train.jsonl data/sft_val.jsonl",
    "rm": "--lr=0.5 data/pref_train.jsonl data/pref_val.jsonl data/prompts_train.jsonl sft.pt",
    "ppo": "--lr=0.5 --kl_coef=0.5 data/prompts_train.jsonl rm.pt",
}


@pytest.fixture(autouse=True, scope="module")
def few_answers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "ANSWERS", 64)
        yield


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
    flags = f"--device cpu --data {folder}/data --out {folder} {STAGES[kind]}".split()
    return f"train_{kind}.py", *flags, *more


def go(*arguments):
    return run(*words(*arguments))


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
    """Stop in that call of gradient_step, or of what `how` names."""
    place = {"full": (torch, "save"), "report": (plumbing.report, "report")}
    place |= {"best": (room, "save_checkpoint"), "finish": (Run, "finish"), "done": (Run, "save")}
    place, calls = place.get(how, (minippo, "gradient_step")), []
    real = getattr(*place)

    def stopping(*arguments, **more):
        if how != "done" or arguments[0].done:
            calls.append(arguments)
        if len(calls) == call and how.startswith("SIG"):
            signal.raise_signal(signal.Signals[how])
        elif len(calls) == call and how == "full":
            arguments[1].write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        elif len(calls) == call:
            raise SystemExit("crash")  # as with kill -9
        return real(*arguments, **more)

    monkeypatch.setattr(*place, stopping)


STOPS = "sft 5 SIGINT, sft 1 crash, sft 3 full, sft 3 best, sft 1 finish, sft 1 done, "
STOPS += "rm 8 SIGTERM, rm 5 crash, rm 1 done, ppo 6 SIGINT, ppo 10 crash, ppo 3 full, ppo 1 report"


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
        assert (folder / f"{kind}.pt").exists() == (how in ("report", "done"))
    status, printed, error = go(kind, folder, "--resume")
    assert (status, error) == (0, "") and results(folder, kind) == whole[kind]
    assert ("so this run starts at the beginning" in printed) == (stop == "sft 1 crash")
    assert not (folder / f"{kind}_best.pt").exists()


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
        path, flags, says = folder / change, [], "was saved with other data"
        if change.startswith("--"):
            flags, says = [change], f"was saved with {change[2:].split('=')[0]} = "
        elif change.endswith(".pt"):
            contents, says = torch.load(path), f"was saved with other {change}; "
            torch.save(contents | {"more": 1}, path)
        else:
            path.write_text(path.read_text().partition("\n")[2])
        status, _, error = go(kind, folder, "--resume", *flags)
        assert status == 2 and (says in error or "was not made from" in error), (change, error)
        assert f" = {change.split('=')[-1]};" not in error  # but what it was
    assert go(kind, stopped, "--resume", "--micro_batch", 3)[0] == 0


# --------------------------------------------------------------------------------------------------
# A Run by itself


def begin(out, kind="sft", steps=10, **more):
    """-> a Run of one weight, without validation."""
    out.mkdir(exist_ok=True)
    settings = vars(RunConfig()) | {"out": out, "data": out, "steps": steps, "micro_batch": 0}
    config, model = SimpleNamespace(**settings | more), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    it = Run(kind, config, model, Tokenizer.train([], 257), optimizer, schedule, data=[])
    it.validate, it.validated = lambda *_: {}, dict
    return it


def finish(out):
    it = begin(out, overwrite=True)
    for step in it.steps():
        it.end_step({"loss": step}, [[[1] * 10]])
    it.done = True
    it.save()
    it.path.touch()


def test_what_is_there_is_overwritten_on_request_alone(tmp_path, capsys):
    for lost, resume, says in (
        ("", False, "a run is there; --resume continues it, --overwrite starts over"),
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
    with pytest.raises(UserError, match="damaged .*; --overwrite starts over"):
        begin(tmp_path, resume=True)


def test_a_finished_run_of_ppo_whose_report_was_interrupted_makes_it(tmp_path):
    finish(tmp_path)
    (tmp_path / "sft_state.pt").rename(tmp_path / "ppo_state.pt")
    (tmp_path / "sft.pt").rename(tmp_path / "ppo.pt")
    assert [*begin(tmp_path, "ppo", resume=True, no_report=False).steps()] == []
    for no_report in (True, False):
        with pytest.raises(SystemExit):
            begin(tmp_path, "ppo", resume=True, no_report=no_report)
        (tmp_path / "report.json").touch()


def test_an_earlier_run_is_there_until_the_first_step(tmp_path):
    finish(tmp_path)
    for name in (".sft.pt.1.tmp", ".sft_state.pt.1.tmp", ".mine.tmp"):
        (tmp_path / name).touch()
    it = begin(tmp_path, overwrite=True)
    assert [x.name for x in tmp_path.glob(".*.tmp")] == [".mine.tmp"]  # half written ones go
    assert next(it.steps()) == 0 and len(metrics(it.log_path)) == 10
    it.save = lambda: None  # killed before its first save
    it.end_step({}, [[[1]]])
    assert not it.state_path.exists() and len(metrics(it.log_path)) == 1


def test_a_line_that_cannot_be_written_names_its_file_and_every_line_is_strict_json(tmp_path):
    it = begin(tmp_path)
    next(it.steps())
    it.end_step({"loss": nan, "kl": -inf, "text": "é"}, [[[1]]])
    (line,) = metrics(it.log_path)  # no NaN, no Infinity
    assert line == {"step": 1, "loss": None, "kl": None, "text": "é", "lr": 0.5}

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    it.log = SimpleNamespace(write=full)
    with pytest.raises(UserError, match=r"sft.jsonl: cannot be written \(No space left on device"):
        it.end_step({"loss": 1.0}, [[[1]]])


@pytest.fixture
def clock(monkeypatch):
    """Time passes when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def timed(clock, seconds, out, **more):
    """Steps of so many seconds -> after which of them the state was saved."""
    it = begin(out, **more)
    saves, save = [], it.save

    def noted_save():
        assert len(metrics(it.log_path)) == it.step  # no line is lost if this is the last save
        saves.append(it.step), save()

    it.save = noted_save
    for step, passed in zip(it.steps(), seconds):
        clock.now += passed
        figures = {"val_loss": 0.25} if step == 1 else {}
        it.end_step({"loss": 0.5, "idle": 1} | figures, [[[1] * 40, [2] * 60]])
        it.optimizer.step(), it.parts["schedule"].step()
    return saves


def test_the_state_is_saved_every_30_seconds_but_rarely_if_that_takes_long(
    tmp_path, monkeypatch, clock
):
    write, pauses = room.write_contents, iter([3, 0, 0, 0])

    def slow_at_first(*arguments):
        clock.now += next(pauses)
        write(*arguments)

    monkeypatch.setattr(room, "write_contents", slow_at_first)
    assert timed(clock, [10] * 13, tmp_path, steps=13) == [1, 8, 12, 13]


def test_the_screen_and_the_log_show_steps_their_time_and_the_learning_rate(
    tmp_path, capsys, clock
):
    timed(clock, [1, 1, 1, 1, 1, 1.5, 1, 60], tmp_path, steps=8)
    assert capsys.readouterr().out.splitlines() == [
        "step    2/8  loss 0.5  val_loss 0.25  100 tokens/s  0:02, 0:06 left",
        "step    6/8  loss 0.5  67 tokens/s  0:06, 0:02 left",
        "step    8/8  loss 0.5  2 tokens/s  1:07, 0:00 left",
    ]
    line = {"step": 6, "loss": 0.5, "idle": 1, "lr": 0.5 / 6}
    line |= {"tokens_per_second": 67, "seconds": 6.5}
    assert json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[5]) == line
    timed(clock, [2], tmp_path, steps=8, resume=True)  # nothing is left to do
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 8


def test_a_page_is_written_every_minute_while_ppo_runs(tmp_path, monkeypatch, clock):
    it, pages = begin(tmp_path, kind="ppo"), []
    it.validate, it.config.models = None, tmp_path
    monkeypatch.setattr(room, "watch", lambda *_: {"judge": 1.5})
    monkeypatch.setattr(room, "write_page", lambda *x: pages.append((it.step, *x)))
    for _ in it.steps():
        clock.now += 25
        it.end_step({}, {"mask": torch.ones(200, 3).bool()})
    assert pages == [(step, tmp_path, tmp_path, it.settings, None) for step in (3, 6, 9)]
    line = json.loads(it.log_path.read_text().splitlines()[0])
    assert (line["judge"], line["tokens_per_second"]) == (1.5, 200 * 4 // 25)


def test_tensorboard_has_each_number_at_its_step(tmp_path, monkeypatch, clock):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    timed(clock, [2, 2.5, 3], tmp_path, steps=3, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    events = board.Reload().Scalars("sft/seconds")
    assert [(x.step, x.value) for x in events] == [(1, 2.0), (2, 4.5), (3, 7.5)]
    assert [x.value for x in board.Scalars("sft/val_loss")] == [0.25]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="--tensorboard needs a package .* pip install tensorboard"):
        begin(tmp_path, tensorboard=True, overwrite=True)


# --------------------------------------------------------------------------------------------------
# Steps and validations


def test_fewer_steps_than_asked_for_are_said(capsys):
    for epochs, steps, says in (
        (2, 6, "6 steps, not 30: --epochs 2 of 171 rows\n"),
        (12, 30, ""),
        (10, 27, "27 steps, not 30: --epochs 10 of 171 rows\n"),
    ):
        config = FitConfig(steps=30, epochs=epochs, batch_size=64)
        config.limit_steps(171)
        assert (config.steps, capsys.readouterr().out) == (steps, says)


def test_validation_comes_ten_times_the_best_weights_are_kept_and_infinity_stops(tmp_path):
    it = begin(tmp_path, steps=25)
    del it.validated
    losses = iter([5.0, 4.0, 3.0, 3.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0, 1.0, inf])
    sizes, saved = [], []
    it.val_rows = [*range(2500)]

    def validate(model, rows, size):
        assert not model.training
        sizes.append((it.step, len(rows), size))
        return {"val_loss": next(losses)}

    it.validate, it.model.config = validate, SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "save_checkpoint", lambda path, *_: saved.append((it.step, path.name)))
        for _ in it.steps():
            it.end_step({}, [[[1]]])
            assert it.model.training
        assert [x[0] for x in sizes] == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
        assert {x[1:] for x in sizes} == {(834, 0)}
        assert saved == [(step, "sft_best.pt") for step in (3, 5, 8, 10)] and it.best_step == 10
        patch.setattr(
            room, "read_contents", lambda *_: {"model": torch.nn.Linear(1, 1).state_dict()}
        )
        it.config.micro_batch = 7
        assert it.load_best() == {"val_loss": 1.0} and sizes[-1][1:] == (2500, 7)
        assert not it.model.training
        it.step = 25
        with pytest.raises(FloatingPointError, match="step 25: the validation loss is inf"):
            it.validated()
