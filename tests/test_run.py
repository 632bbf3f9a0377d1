"""The steps of a run, across interruptions: plumbing/run.py."""

import shutil
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import minippo
from cli import metrics, stage
from data.files import UserError, read_log
import plumbing.report
from minippo import GPT, GPTConfig, RewardModel
from plumbing import models, run as run_module
from plumbing.run import Run, adam
from plumbing.settings import RunConfig
from plumbing.text import Tokenizer
from tiny import nan

# A run that is stopped and resumed ends in the same files as one that is left alone.

STAGES = {
    "sft": "--batch_size 8 --epochs 3",
    "rm": "--batch_size 8 --epochs 3",
    "ppo": "--steps 6 --kl_target 1 --ref_update_every 1 --separate_critic",
}
CHANGES = {
    "sft": "--lr=0.5 --layers=2 --seed=9 data/sft_train.jsonl data/sft_val.jsonl",
    "rm": "--lr=0.5 data/pref_train.jsonl data/pref_val.jsonl data/prompts_train.jsonl sft.pt",
    "ppo": "--lr=0.5 --kl_coef=0.5 data/prompts_train.jsonl rm.pt",
}


@pytest.fixture(scope="module")
def begun(made, tmp_path_factory):
    """-> a function: a new folder with data and the models of the other stages."""

    def new_folder(kind):
        folder = tmp_path_factory.mktemp("run") / "out"
        return shutil.copytree(made, folder, ignore=shutil.ignore_patterns(f"{kind}.pt"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "ANSWERS", 64)
        yield new_folder


def go(kind, folder, *more):
    return stage(kind, folder / "data", folder, *STAGES[kind].split(), *more)


def results(folder, kind):
    """What must not depend on interruptions."""
    return metrics(folder / f"{kind}.jsonl"), (folder / f"{kind}.pt").read_bytes()


@pytest.fixture(scope="module")
def whole(begun):
    """-> what each stage ends with if it is left alone."""
    folders = {kind: begun(kind) for kind in STAGES}
    assert all(go(kind, folder)[::2] == (0, "") for kind, folder in folders.items())
    return {kind: results(folder, kind) for kind, folder in folders.items()}


PLACES = {"half": (torch, "save"), "report": (plumbing.report, "report")}
PLACES |= {"best": (run_module, "save_checkpoint"), "done": (Run, "save")}


def stop_in(monkeypatch, call, how):
    """Stop in that call of gradient_step, or of what PLACES names."""
    place, calls = PLACES.get(how, (minippo, "gradient_step")), []
    real = getattr(*place)

    def stopping(*arguments, **more):
        if how != "done" or arguments[0].done:
            calls.append(arguments)
        if len(calls) == call and how.startswith("SIG"):
            signal.raise_signal(signal.Signals[how])
        elif len(calls) == call:
            if how == "half":
                arguments[1].write(b"half of it")
            raise SystemExit("crash")  # as with kill -9
        return real(*arguments, **more)

    monkeypatch.setattr(*place, stopping)


STOPS = """
sft 5 SIGINT
sft 1 crash
sft 3 half
sft 3 best
rm 8 SIGTERM
rm 1 done
ppo 6 SIGINT
ppo 10 crash
ppo 1 report
"""


@pytest.mark.parametrize("stop", STOPS.strip().splitlines())
def test_a_stop_changes_no_result(begun, whole, monkeypatch, stop):
    kind, call, how = stop.split()
    folder, step = begun(kind), int(call) // (2 if kind == "ppo" else 1)
    with monkeypatch.context() as patch:
        stop_in(patch, int(call), how)
        status, printed, error = go(kind, folder)
    if how.startswith("SIG"):
        assert status == 130 and f"step {step} is saved, --resume goes on" in error
        assert "stopping after this step" in printed
        assert torch.load(folder / f"{kind}_state.pt")["step"] == step
    else:
        assert status == "crash"
        assert (folder / f"{kind}.pt").exists() == (how in ("report", "done"))
    status, printed, error = go(kind, folder, "--resume")
    assert (status, error) == (0, "") and results(folder, kind) == whole[kind]
    assert ("starts at the beginning" in printed) == (call == "1" and how == "crash")
    assert not [*folder.glob("*_best.pt"), *folder.glob(".*.tmp")]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("kind", STAGES)
def test_a_run_goes_on_with_the_same_settings_alone(begun, tmp_path, monkeypatch, kind):
    stopped = begun(kind)
    with monkeypatch.context() as patch:
        stop_in(patch, 2, "SIGINT")
        assert go(kind, stopped)[0] == 130
    for i, change in enumerate(CHANGES[kind].split()):
        folder = shutil.copytree(stopped, tmp_path / str(i))
        path, flags, says = folder / change, [], "other data"
        if change.startswith("--"):
            flags, says = [change], f"{change[2:].split('=')[0]} = "
        elif change.endswith(".pt"):
            says = f"other {change}; "
            torch.save(torch.load(path) | {"more": 1}, path)
        else:
            path.write_text(path.read_text().partition("\n")[2])
        status, _, error = go(kind, folder, "--resume", *flags)
        assert status == 2 and f"was saved with {says}" in error
        assert f" = {change.split('=')[-1]};" not in error  # but what it was
    assert go(kind, stopped, "--resume", "--micro_batch", 3)[0] == 0


# A Run by itself


def begin(out, kind="rm", **more):
    """-> a Run of a tiny reward model."""
    more = {"steps": 10, "lr": 0.5, "warmup": 2, "micro_batch": 7, "no_report": False} | more
    config = SimpleNamespace(**vars(RunConfig(out, out, "cpu")) | more)
    model, tokenizer = RewardModel(GPT(GPTConfig(257, 4, 1, 1, 4))), Tokenizer.train([], 257)
    validation = ([([0], [1])], lambda _: (None, {"loss": 0.25}), len) if kind == "rm" else None
    return Run(kind, config, model, tokenizer, *adam(model, config), [], validation=validation)


def finish(out):
    it = begin(out, overwrite=True)
    for _ in it.steps():
        it.end_step({})
    it.finish()


def test_a_run_is_overwritten_on_request_alone(tmp_path, capsys):
    finish(tmp_path)
    with pytest.raises(UserError, match="a run already exists; --resume continues it, --overwrite"):
        begin(tmp_path)
    with pytest.raises(SystemExit, match="^$"):
        begin(tmp_path, resume=True)
    assert "rm.pt is finished; --overwrite" in capsys.readouterr().out
    (tmp_path / "rm_state.pt").unlink()
    for resume in (False, True):
        with pytest.raises(UserError, match="rm.pt: a model already exists; --overwrite"):
            begin(tmp_path, resume=resume)
    finish(tmp_path)
    (tmp_path / "rm.pt").unlink()
    with pytest.raises(UserError, match="rm_best.pt: not found; --overwrite"):
        begin(tmp_path, resume=True).load_best()


def test_a_run_without_its_report_is_not_finished(tmp_path):
    (tmp_path / "ppo_traces.jsonl").touch()  # of an earlier run
    begin(tmp_path, "ppo").finish()
    assert not (tmp_path / "ppo_traces.jsonl").exists()
    begin(tmp_path, "ppo", resume=True)
    for no_report in (True, False):
        with pytest.raises(SystemExit):
            begin(tmp_path, "ppo", resume=True, no_report=no_report)
        (tmp_path / "report.json").touch()
    (tmp_path / "ppo.pt").unlink()
    it = begin(tmp_path, "ppo", resume=True)
    it.step = 1
    it.write_log({"step": 1})
    assert not (tmp_path / "report.json").exists()


def test_an_earlier_run_is_there_until_the_first_step(tmp_path):
    finish(tmp_path)
    it = begin(tmp_path, overwrite=True)
    assert next(it.steps()) == 0 and len(metrics(it.log_path)) == 10
    it.save = lambda: None  # killed before its first save
    it.end_step({})
    assert not it.state_path.exists() and len(metrics(it.log_path)) == 1


def test_a_gpu_goes_on_with_its_random_numbers(tmp_path, monkeypatch):
    state, restored = torch.arange(3).byte(), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", {"cuda": state}.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *x: restored.append(x))
    begin(tmp_path, device="cuda").save()
    for device in "cpu", "cuda":
        begin(tmp_path, device=device, resume=True)
    ((x, device),) = restored
    assert device == "cuda" and torch.equal(x, state)


@pytest.fixture
def clock(monkeypatch):
    """Time passes when a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(run_module, "VALIDATIONS", 2)
    return clock


def timed(clock, seconds, it):
    """Steps of so many seconds -> after which of them the state was saved."""
    saves, save = [], it.save

    def noted_save():
        assert len(metrics(it.log_path)) == it.step  # no line is lost if this is the last save
        saves.append(it.step), save()

    it.save = noted_save
    for _, passed in zip(it.steps(), seconds):
        clock.now += passed
        it.optimizer.step(), it.stateful["schedule"].step()
        it.end_step({"loss": 0.5, "idle": nan, "text": "é"}, "a rollout")
    return saves


def test_state_and_page_are_written_now_and_then(tmp_path, monkeypatch, clock):
    it, write = begin(tmp_path, "ppo", steps=13), run_module.write_contents
    pauses, pages = [0, 0, 0, 3], []

    def slow_at_first(*arguments):
        clock.now += pauses.pop()
        write(*arguments)

    monkeypatch.setattr(run_module, "write_contents", slow_at_first)
    monkeypatch.setattr(run_module, "watch", lambda *x: {"judge": 1.5} if x[0] is it else x)
    monkeypatch.setattr(run_module, "write_page", lambda *x: pages.append((it.step, *x)))
    saves = timed(clock, [10] * 13, it)
    assert saves == [1, 8, 12, 13]
    assert pages == [(step, it) for step in saves]
    assert {line["judge"] for line in metrics(it.log_path)} == {1.5}


def test_screen_and_log_show_steps_and_time_and_go_on(tmp_path, capsys, clock):
    it = begin(tmp_path, steps=8)
    timed(clock, [1, 1, 1, 1, 1, 2.5, 1.5], it)
    it.save()
    it = begin(tmp_path, steps=8, resume=True)
    assert it.best_loss == 0.25
    timed(clock, [60], it)
    assert capsys.readouterr().out.splitlines() == [
        "step    1/8  loss 0.5  0:01, 0:07 left",
        "step    4/8  loss 0.5  val_loss 0.25  0:04, 0:04 left",
        "step    7/8  loss 0.5  0:09, 0:01 left",
        "step    8/8  loss 0.5  val_loss 0.25  1:09, 0:00 left",
    ]
    line = {"step": 6, "loss": 0.5, "idle": None, "text": "é", "lr": 0.5 * 3 / 8, "seconds": 7.5}
    log = read_log(it.log_path)
    assert log[5] == line and len(log) == 8


def test_tensorboard_has_each_number_at_its_step(tmp_path, clock):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    timed(clock, [2, 2.5, 3], begin(tmp_path, steps=3, tensorboard=True))
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    events = board.Scalars("rm/seconds")
    assert [(x.step, x.value) for x in events] == [(1, 2.0), (2, 4.5), (3, 7.5)]


def test_ten_validations_find_the_best_weights(tmp_path):
    it, seen = begin(tmp_path, steps=25), []
    rows = [([0] * (i % 5), [1]) for i in range(2500)]
    losses = dict(zip((3, 5, 8, 10, 13, 15, 18, 20, 23, 25), [5, 3, 3, *[9] * 6, nan]))

    def loss_of(part):
        assert not it.model.training and not torch.is_grad_enabled()
        assert len(part) <= 7 and part == sorted(part)
        seen.extend((it.step, row) for row in part)
        length = sum(len(prompt) for prompt, _ in part) / len(part)
        return None, {"loss": losses[it.step], "length": length}

    it.validation = rows, loss_of, len
    it.model.eval()
    for step in it.steps():
        assert it.model.training
        it.model.mean.fill_(step + 1)
        it.end_step({})
    assert Counter(step for step, _ in seen) == dict.fromkeys(losses, 834)
    lengths = [len(prompt) for _, (prompt, _) in seen[:834]]
    line = metrics(it.log_path)[2]
    assert (line["val_loss"], line["val_length"]) == pytest.approx((5, sum(lengths) / 834))
    losses[25], seen[:] = 1.0, []
    assert it.load_best() == pytest.approx({"val_loss": 1, "val_length": 2})
    assert [row for _, row in seen] == sorted(rows)
    assert it.model.mean == 8 and not it.model.training
