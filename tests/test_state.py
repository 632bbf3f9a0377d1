"""How long a run is, its log, and the state that --resume needs: plumbing/state.py."""

import copy
import json
import math
import random
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from minippo import PPOConfig
from plumbing import state
from plumbing.checkpoints import read_contents
from plumbing.errors import UserError
from plumbing.settings import RunConfig
from plumbing.state import Schedule, State, clock, fingerprint, settings_of
from plumbing.training import FitConfig
from train_ppo import StageConfig

# Schedule


@pytest.mark.parametrize("seed", range(20))
def test_the_learning_rate_climbs_to_its_peak_and_falls_to_0_in_equal_steps(seed):
    rng = random.Random(seed)
    warmup = rng.randint(0, 20)
    steps = warmup + rng.randint(1, 50)
    schedule = Schedule(steps, warmup, automatic=False)
    shares = [schedule.share(step) for step in range(steps + 1)]
    climb, fall = shares[: warmup + 1], shares[warmup:]
    assert climb == pytest.approx([(i + 1) / (warmup + 1) for i in range(warmup + 1)])
    assert fall == pytest.approx([1 - i / (steps - warmup) for i in range(len(fall))])
    assert Schedule(1, 20, False).share(0) == 1 / 21  # shorter than its climb


def train(losses, steps=1000, automatic=True, warmup=20, one_pass=200):
    """A schedule that got these validation losses -> it, its shares, and which losses were best."""
    schedule, losses = Schedule(steps, warmup, automatic, one_pass), iter(losses)
    shares, best, step = [], {}, 0
    while step < schedule.steps:
        shares.append(schedule.share(step))
        if schedule.check_due(step):
            best[step + 1] = schedule.is_best(step, next(losses))
        step += 1
    return schedule, shares, best


def test_validation_is_ever_rarer_and_comes_with_the_last_step():
    assert list(train([9] * 9, 300, automatic=False)[2]) == [50, 75, 112, 169, 253, 300]


@pytest.mark.parametrize(
    "one_pass, checks, stopped",
    [
        (254, [50, 75, 112, 169, 253, 380, 506], 380),
        (253, [50, 75, 112, 169, 253, 337], 253),
        (200, [50, 75, 112, 169, 253, 337], 253),
        (199, [49, 74, 110, 165, 248, 330], 248),
        (100, [25, 38, 56, 84, 127, 169], 127),
        (8.2, [2, 3, 4, 7, 10, 13], 10),
        (0.1, [1, 2], 2),
    ],
)
def test_few_rows_are_validated_within_a_quarter_of_a_pass_and_a_rise_after_it_ends_the_run(
    one_pass, checks, stopped
):
    schedule, _, found = train(range(3, 99), one_pass=one_pass)
    assert list(found) == checks and schedule.stopped == stopped
    flat = train([1, *[1.09] * 40], one_pass=8.2)[0]  # as before something is understood
    assert flat.stopped == 259 and train([1, *[1.11] * 40], one_pass=8.2)[0].stopped == 10


def test_a_loss_that_no_longer_falls_ends_the_run_with_a_short_fall(capsys):
    schedule, shares, best = train([5, 4, 3, 2, 1.998, 1.997, 1])  # a gain of 0.15 % is none
    assert all(best.values()) and list(best) == [50, 75, 112, 169, 253, 380, 506]
    assert schedule.steps == len(shares) == 380 + 380 // 3 and schedule.stopped == 380
    here = (1000 - 380) / 980
    assert shares[379:381] == pytest.approx([(1000 - 379) / 980, here])
    assert shares[380:] == pytest.approx([here * (506 - step) / 126 for step in range(380, 506)])
    said = "step 380: the validation loss no longer falls; the learning rate does, to 0 at step 506"
    assert said in capsys.readouterr().out
    assert "no longer fell at step 380" in schedule.ending() and "step 506, " in schedule.ending()


@pytest.mark.parametrize(
    "losses, steps, automatic, stopped, best",
    [
        ([3, 2, 2.5, 2.6, 2.7, 2.8], 1000, True, 253, [50, 75]),  # not before step 200
        ([3, 2, 2.5, 2.6, 2.7, 2.9], 300, True, 253, [50, 75]),  # once, and within --max_steps
        ([5, 4, 3, 2, 1.997, 1.995, 0.9], 400, True, None, [50, 75, 112, 169, 253, 380, 400]),
        ([5, 4, 3, 2, 2.3, 1], 1000, True, 253, [50, 75, 112, 169, 337]),  # a rise by a tenth
        ([5, 4, 3, 2, 2.1, 1.5, 1.51, 1.6, 1], 1200, True, 854, [50, 75, 112, 169, 380, 1138]),
        ([3, 2, 2.5, 2.6, 2.7, 2.0, 2.9], 400, False, None, [50, 75, 380]),  # as good is best, too
        ([1, 1, 1, 1], 169, True, None, [50, 75, 112, 169]),
    ],
)
def test_where_a_run_ends_and_which_model_is_the_best(losses, steps, automatic, stopped, best):
    schedule, _, found = train(losses, steps, automatic)
    assert schedule.stopped == stopped and [x for x in found if found[x]] == best
    assert schedule.steps == (steps if stopped is None else min(steps, stopped + stopped // 3))


@pytest.mark.parametrize(
    "losses, says",
    [
        ([9, 8, 7, 6, 5, 4.7, 4.24], "warning: the validation loss was still falling when"),
        ([9, 8, 7, 6, 5, 4.7, 4.26], "all 600 steps of --max_steps are done"),
    ],
)
def test_a_loss_that_fell_by_15_percent_in_the_second_half_is_warned_of(losses, says):
    schedule = train([*losses, losses[-1]], 600)[0]  # 5 at step 253, and then
    assert schedule.ending().startswith(says) and "step 600, " in schedule.ending()
    schedule = train([*losses, losses[-1] + 1], 600)[0]  # it has risen at the end
    assert schedule.ending().startswith("all 600 steps") and "step 570, " in schedule.ending()
    schedule = train([9, 8, 7, 6, 5, 4.7, 4.3], 506)[0]  # of which 253 is exactly the half
    assert schedule.ending().startswith("all 506 steps")
    for losses, steps, best in (([9], 30, 30), ([1, 9, 9, 9, 9], 200, 50), ([9, 9, 8], 112, 112)):
        ending = train(losses, steps)[0].ending()  # not known, long ago, or too little
        assert ending.startswith(f"all {steps} steps of --max_steps") and f"step {best}, " in ending
    ending = train([9, 9, 9, 9, 9, 1], 300, False)[0].ending()
    assert ending.startswith("all 300 steps of --epochs are done") and "step 300, " in ending


@pytest.mark.parametrize("stop", [0, 200, 253, 300])
def test_an_interrupted_schedule_goes_on(stop):
    losses = {50: 5, 75: 4, 112: 3, 169: 2, 253: 2.5, 337: 1}
    schedule, whole = train(losses.values())[:2]
    other = Schedule(1000, 20, True, 200)
    for step in range(stop):
        if other.check_due(step):
            other.is_best(step, losses[step + 1])
    resumed = Schedule(1000, 20, True, 200)
    resumed.load_state_dict(copy.deepcopy(other.state_dict()))
    shares = []
    for step in range(stop, 337):
        shares.append(resumed.share(step))
        if resumed.check_due(step):
            resumed.is_best(step, losses[step + 1])
    assert shares == whole[stop:] and vars(resumed) == vars(schedule)
    shorter = Schedule(270, 20, True, 200)
    shorter.load_state_dict(other.state_dict())
    assert shorter.steps == 270 and shorter.checks == other.checks


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_loss_that_is_no_number_ends_the_run(loss):
    with pytest.raises(FloatingPointError, match="step 50: the validation loss is"):
        train([loss])


# State


def begin(out, steps=10, kind="sft", made_from=None, settings=None, values=None, **flags):
    """-> a State of one weight, and that weight."""
    out.mkdir(exist_ok=True)
    weight = torch.nn.Linear(1, 1)
    parts = {"model": weight, "optimizer": torch.optim.SGD(weight.parameters()), "loss_of": print}
    run = RunConfig(out=out, device="cpu", **flags)
    settings = settings or settings_of(run, FitConfig(), data=[[1]])
    it = State(kind, run, settings, made_from, **parts)
    it.values |= values or {}
    it.schedule = SimpleNamespace(steps=steps)
    return it, weight


def go(it, weight, until=99, metrics=None):
    """Each step adds its number and a random one -> the numbers of the steps."""
    seen = []
    for step in it.steps_left(it.schedule):
        if step == until:
            break
        seen.append(step)
        with torch.no_grad():
            weight.weight += step + torch.rand(1)
        it.end_step({"loss": float(step)} | (metrics or {}), 10, ["loss", "val_loss"])
    return seen


def log_of(out, kind="sft"):
    return [json.loads(line) for line in (out / f"{kind}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stop, left", [(0, 0), (3, 1), (4, 4), (7, 4), (10, 10)])
def test_a_run_goes_on_from_its_last_save(tmp_path, stop, left):
    torch.manual_seed(5)
    whole, expected = begin(tmp_path / "whole")
    assert go(whole, expected) == list(range(10))
    torch.manual_seed(5)
    it, weight = begin(tmp_path / "cut", save_every=4, values={"kl_coef": 0.5})
    start = weight.weight.clone()
    go(it, weight, until=stop)
    torch.manual_seed(5 if stop < 4 else 99)
    it, weight = begin(tmp_path / "cut", save_every=4, resume=True)
    assert it.step == left and it.values == ({"kl_coef": 0.5} if left else {})
    assert stop > 4 or torch.equal(weight.weight, start) == (left == 0)
    assert go(it, weight) == list(range(left, 10)) and torch.equal(weight.weight, expected.weight)
    log = log_of(tmp_path / "cut")
    assert [row["step"] for row in log] == list(range(1, 11))
    assert [row["loss"] for row in log] == [float(i) for i in range(10)]


def test_a_run_or_a_model_that_is_there_is_overwritten_on_request_alone(tmp_path):
    go(*begin(tmp_path, save_every=1), until=3)
    with pytest.raises(UserError, match="a run is there; --resume goes on .* --overwrite"):
        begin(tmp_path)
    it, weight = begin(tmp_path, overwrite=True)
    assert it.step == 0 and len(log_of(tmp_path)) == 3  # as long as no step has been made
    it.save = lambda: None  # killed before its first save
    go(it, weight, until=1)
    assert not (tmp_path / "sft_state.pt").exists() and len(log_of(tmp_path)) == 1
    go(*begin(tmp_path, overwrite=True))
    begin(tmp_path, resume=True)[0].finish()
    (tmp_path / "rm.pt").touch()  # of another stage
    for _ in range(2):
        with pytest.raises(UserError, match="sft_state.pt: a run is there"):
            begin(tmp_path)
        (tmp_path / "sft.pt").touch()
    (tmp_path / "sft_state.pt").unlink()
    for resume in (False, True):
        with pytest.raises(UserError, match="sft.pt: a model is there; --overwrite makes it again"):
            begin(tmp_path, resume=resume)
    assert begin(tmp_path, overwrite=True)[0].step == 0


def test_a_finished_stage_ends_at_once_if_its_model_is_there_and_ppo_reports(tmp_path, capsys):
    for kind in ("sft", "ppo"):
        it, weight = begin(tmp_path, kind=kind)
        go(it, weight)
        it.finish()
    assert begin(tmp_path, kind="ppo", resume=True)[0].step == 10
    with pytest.raises(UserError, match="sft.pt is gone; --overwrite makes it again"):
        begin(tmp_path, resume=True)
    (tmp_path / "sft.pt").touch()
    with pytest.raises(SystemExit) as stop:
        begin(tmp_path, resume=True)
    assert not stop.value.code and "sft.pt is finished; --overwrite" in capsys.readouterr().out


def loss_of(policy, batch, config, strength):
    pass


def test_settings_are_what_changes_the_gradients():
    run = RunConfig(seed=3, dtype="bfloat16", save_every=7, grad_checkpoint=True)
    parts = FitConfig(lr=0.5, micro_batch=9), partial(loss_of, strength=2), loss_of
    found = settings_of(run, *parts, data=([1], "ab"))
    assert found == {
        "seed": 3,
        "dtype": "bfloat16",
        "data": fingerprint([1], "ab"),
        "strength": 2,
    } | {name: x for name, x in vars(FitConfig(lr=0.5)).items() if name != "micro_batch"}
    assert settings_of(run, PPOConfig(lam=0.5), data=[])["lam"] == 0.5
    free = {"models", "no_report", "report_prompts", "micro_batch", "rollout_batch"}
    stage = vars(StageConfig()).keys()
    assert stage - settings_of(run, StageConfig(), data=[]).keys() == free


def test_a_fingerprint_tells_all_data_apart_and_knows_odd_text():
    data = [
        ([1],),
        ([2],),
        ([1], []),
        ([], [1]),
        ([1, 2],),
        ([2, 1],),
        ([b"\xff"],),
        (["\ud800"],),
        ([], []),
    ]
    assert len({fingerprint(*x) for x in data}) == len(data)
    assert fingerprint([1], [2]) == fingerprint([1], [2])


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"settings": {"lr": 2, "seed": 0, "data": 1}},
            r"saved with lr = 1; repeat that, or --over",
        ),
        ({"settings": {"lr": 1, "seed": 5, "data": 1}}, r"saved with seed = 0"),
        ({"settings": {"lr": 2, "seed": 5, "data": 1}}, r"saved with lr = 1, seed = 0"),
        ({"settings": {"lr": 1, "seed": 0, "data": 2}}, "data or vocabulary have changed"),
        (
            {"settings": {"lr": 1, "seed": 0, "data": 1, "new": 0}},
            "another version or algorithm; --overwrite",
        ),
        ({"made_from": {"sft": {"loss": 2}}}, "sft.pt has been made again since"),
        ({"made_from": {"sft": {"loss": 1}, "rm": {}}}, "rm.pt has been made again since"),
    ],
)
def test_a_run_goes_on_with_the_same_settings_data_and_models_alone(tmp_path, change, says):
    same = {"settings": {"lr": 1, "seed": 0, "data": 1}, "made_from": {"sft": {"loss": 1}}}
    go(*begin(tmp_path, save_every=1, **same), until=3)
    assert begin(tmp_path, resume=True, **same)[0].step == 3
    with pytest.raises(UserError, match=says):
        begin(tmp_path, resume=True, **same | change)


@pytest.mark.parametrize("name, least", [("steps", 3), ("max_steps", 4)])
def test_an_interrupted_run_may_end_earlier_than_it_was_to(tmp_path, name, least):
    """Not before the steps that are done; stages 1 and 2 make one more, which is validated."""
    go(*begin(tmp_path, save_every=1, settings={name: 9, "data": 1}), until=3)
    for steps in (least, 8):
        assert begin(tmp_path, resume=True, settings={name: steps, "data": 1})[0].step == 3
    early = f"step 3 is done; --{name} {least} or more"
    for steps, says in ((least - 1, early), (10, f"saved with {name} = 9")):
        with pytest.raises(UserError, match=says):
            begin(tmp_path, resume=True, settings={name: steps, "data": 1})
    it, weight = begin(tmp_path, least, resume=True, settings={name: least, "data": 1})
    assert go(it, weight) == list(range(3, least))
    it.finish()  # and now it is a run of so many steps
    with pytest.raises(UserError, match=f"saved with {name} = {least}"):
        begin(tmp_path, resume=True, settings={name: 9, "data": 1})


def test_a_log_that_is_lost_or_damaged_stops_no_run_and_is_said(tmp_path, capsys):
    go(*begin(tmp_path, save_every=4), until=7)
    lines = (tmp_path / "sft.jsonl").read_text().splitlines(True)
    lines[1] = "[1]\n"  # JSON, but no object
    (tmp_path / "sft.jsonl").write_text("".join([*lines[:6], lines[6][:9]]))
    go(*begin(tmp_path, save_every=4, resume=True))
    assert [row["step"] for row in log_of(tmp_path)] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert "sft.jsonl holds 3 of 4 steps" in capsys.readouterr().out


def test_half_written_files_of_a_killed_run_go(tmp_path):
    for name in (".sft.pt.123.tmp", ".sft_state.pt.123.tmp", ".mine.tmp"):
        (tmp_path / name).touch()
    begin(tmp_path)
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".mine.tmp"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves_and_a_second_one_is_not_held_up(tmp_path, number):
    it, weight = begin(tmp_path)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="step 3 is saved, --resume goes on from there"):
        for step in it.steps_left(it.schedule):
            assert signal.getsignal(number) == it.interrupt
            if step == 2:
                signal.raise_signal(number)
                assert signal.getsignal(number) == signal.SIG_DFL
            it.end_step({}, 1, [])
    assert read_contents(it.path, ["state"])["step"] == 3 and not (tmp_path / "sft.pt").exists()
    assert signal.getsignal(number) == before


class Clock:
    """Time passes when a test says so."""

    def __init__(self, patch):
        self.now = 1000.0
        here = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: self.now + 5000)
        patch.setattr(state, "time", here)


def timed(it, clock, seconds, metrics=None):
    """Steps that last so many seconds -> after which of them the state was saved."""
    saves, save = [], it.save
    it.save = lambda: (saves.append(it.step), save())
    seconds = iter(seconds)
    for step in it.steps_left(it.schedule):
        clock.now += next(seconds)
        it.end_step(
            {"loss": 0.5} | ((metrics or {}).get(step + 1) or {}), 100, ["loss", "val_loss"]
        )
    return saves


def test_the_state_is_saved_by_steps_by_time_and_at_the_end_but_rarely_if_that_takes_long(
    tmp_path, monkeypatch
):
    clock = Clock(monkeypatch)
    it, _ = begin(tmp_path, 12, save_every=5)
    assert timed(it, clock, [10] * 12) == [1, 5, 9, 10, 12]  # first, more than 30 s ago, 5 steps
    write = state.write_contents

    def slowly(*args):
        clock.now += 3
        write(*args)

    monkeypatch.setattr(state, "write_contents", slowly)
    it, _ = begin(tmp_path / "slow", 12, save_every=99)
    assert timed(it, clock, [10] * 12) == [1, 8, 12]  # 3 s each: not before 60 s have passed


def test_lines_on_the_screen_and_in_the_log(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    it, _ = begin(tmp_path, 8)
    timed(it, clock, [1, 1, 1, 1, 1, 10, 1, 0.5], {2: {"val_loss": 0.25}})
    assert capsys.readouterr().out.splitlines() == [
        "step    2/8  loss 0.5  val_loss 0.25  100 tokens/s  0:02, 0:06 left",
        "step    6/8  loss 0.5  10 tokens/s  0:15, 0:05 left",
        "step    8/8  loss 0.5  200 tokens/s  0:16, 0:00 left",
    ]
    first = {"step": 1, "loss": 0.5, "tokens_per_second": 100, "seconds": 1.0}
    assert log_of(tmp_path)[0] == first and log_of(tmp_path)[5]["seconds"] == 15.0


def test_the_seconds_go_on_after_an_interruption(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    it, _ = begin(tmp_path, 4, save_every=2)
    with pytest.raises(StopIteration):
        timed(it, clock, [3, 3, 3])
    clock.now += 500
    it, _ = begin(tmp_path, 4, resume=True)
    timed(it, clock, [2, 2])
    assert [row["seconds"] for row in log_of(tmp_path)] == [3.0, 6.0, 8.0, 10.0]


def test_a_time_is_minutes_and_seconds():
    assert [clock(x) for x in (0, 59.9, 61, 3600)] == ["0:00", "0:59", "1:01", "60:00"]


def test_tensorboard_gets_each_number_at_its_step_and_time_and_old_ones_again(
    tmp_path, monkeypatch
):
    made, added, flushed = [], [], []
    writer = SimpleNamespace(
        add_scalar=lambda *x: added.append(x), flush=lambda: flushed.append(len(added))
    )
    monkeypatch.setattr(
        state, "summary_writer", lambda: lambda *x, **y: made.append((x, y)) or writer
    )
    clock = Clock(monkeypatch)
    it, _ = begin(tmp_path, 3, save_every=1, tensorboard=True)
    with pytest.raises(StopIteration):
        timed(it, clock, [2, 2], {2: {"passes": [{}]}})
    first = [
        ("loss", 0.5, 1, 6002.0),
        ("tokens_per_second", 50, 1, 6002.0),
        ("seconds", 2.0, 1, 6002.0),
    ]
    assert made == [((tmp_path / "tensorboard" / "sft",), {"purge_step": 0})]
    assert added[:3] == first and [x[:3] for x in added[3:]] == [
        ("loss", 0.5, 2),
        ("tokens_per_second", 50, 2),
        ("seconds", 4.0, 2),
    ]
    assert flushed == [3, 6]
    added.clear()
    timed(begin(tmp_path, 3, resume=True, tensorboard=True)[0], clock, [2])
    assert [x[:3] for x in added[::3]] == [("loss", 0.5, 1), ("loss", 0.5, 2), ("loss", 0.5, 3)]
    assert added[3][3] - added[0][3] == 2.0  # seconds, as when they were computed


def test_a_missing_tensorboard_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="--tensorboard needs a package .* pip install tensorboard"):
        state.summary_writer()


def test_a_missing_tensorboard_costs_no_earlier_run(tmp_path, monkeypatch):
    def missing():
        raise UserError("--tensorboard needs a package that is missing")

    monkeypatch.setattr(state, "summary_writer", missing)
    run = RunConfig(out=str(tmp_path), tensorboard=True)
    with pytest.raises(UserError, match="missing"):
        state.State("sft", run, {})


def test_a_first_ctrl_c_saves_also_where_nobody_reads_the_output(tmp_path, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    it = state.State("sft", RunConfig(out=str(tmp_path)), {"data": 1})
    with pytest.raises((KeyboardInterrupt, BrokenPipeError)):
        for _ in it.steps_left(state.Schedule(5, 0, False)):
            with monkeypatch.context() as patch:
                patch.setattr("builtins.print", closed)
                it.interrupt(signal.SIGINT, None)
                it.end_step({"loss": 1.0, "val_loss": 1.0}, 1, ["loss"])
    assert read_contents(it.path, ["state"])["step"] == 1


def test_ctrl_c_after_the_last_step_ends_the_run(tmp_path):
    it = state.State("sft", RunConfig(out=str(tmp_path)), {"data": 1})
    with pytest.raises(KeyboardInterrupt, match="step 1 is saved"):
        for _ in it.steps_left(state.Schedule(1, 0, False)):
            it.end_step({"loss": 1.0}, 1, ["loss"])
            it.interrupt(signal.SIGINT, None)
