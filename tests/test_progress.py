"""Length, learning rate, log and state of a run. Run: python -m pytest tests/test_progress.py"""

import io
import itertools
import json
import math
import os
import signal
import time

import pytest
import torch

from plumbing import progress as module
from plumbing import settings
from plumbing.checkpoints import read_file, write_file
from plumbing.progress import Progress, fingerprint, random_state, set_random_state
from plumbing.settings import RunConfig, UserError
from plumbing.training import FitConfig


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """No signal handler and nothing to be saved outlives a test."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))  # run_script() reads it as a terminal's
    monkeypatch.setattr("sys.argv", ["train_sft.py"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    settings.AT_ERROR.clear()


def start(out, steps=10, warmup=2, automatic=False, data=("rows",), config=None, made_from=None, kind="sft", **flags):
    """-> a Progress, and the one weight that it trains."""
    weight = torch.nn.Linear(1, 1)
    run, optimizer = RunConfig(out=out, device="cpu", **flags), torch.optim.SGD(weight.parameters(), 1.0)
    parts = {"model": weight, "optimizer": optimizer}
    return Progress(kind, run, [config or FitConfig()], steps, warmup, automatic, data, made_from, **parts), weight


def go(progress, weight, until=10**9):
    """Train: each step adds its number to the weight. -> the numbers of the batches."""
    seen = []
    for number in progress.remaining(itertools.count()):
        seen.append(number)
        with torch.no_grad():
            weight.weight += number + torch.rand(1)
        progress.end_step(10, ["loss"], loss=float(number))
        if number + 1 == until:
            break
    return seen


def test_all_steps_are_made_once_in_order_and_logged(tmp_path):
    progress, weight = start(tmp_path, 5)
    assert (progress.step, progress.steps) == (0, 5) and go(progress, weight) == [0, 1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(i + 1, float(i)) for i in range(5)]
    assert all(row["seconds"] >= 0 and row["tokens_per_second"] > 0 for row in rows)


def test_the_learning_rate_climbs_in_the_warm_up_and_falls_to_0_after_the_last_step(tmp_path):
    progress, _ = start(tmp_path, 12, warmup=2)
    shares = []
    for _ in progress.remaining(range(99)):
        shares.append(progress.rate())
        progress.end_step(1, [])
    assert shares == pytest.approx([1 / 3, 2 / 3, 1, *[(12 - step) / 10 for step in range(3, 12)]])  # one step further it is 0


@pytest.mark.parametrize("steps, warmup, share", [(1, 20, 1 / 21), (4, 0, 1.0)])
def test_a_run_shorter_than_its_warm_up_has_a_learning_rate(tmp_path, steps, warmup, share):
    assert start(tmp_path, steps, warmup)[0].rate() == pytest.approx(share)


def test_the_validation_loss_is_looked_at_ever_more_rarely_and_at_the_end(tmp_path):
    progress, _ = start(tmp_path, 300)
    due = []
    for _ in progress.remaining(range(999)):
        due += [progress.step + 1] * progress.due()
        progress.end_step(1, [])
    assert due == [50, 75, 112, 169, 253, 300]


def train(out, losses, steps=1000, automatic=True):
    """A run whose validation losses are given -> its Progress at the end, where each loss was the best, and its learning rates."""
    progress, _ = start(out, steps, 20, automatic)
    losses, best, rates = iter(losses), [], []
    for _ in progress.remaining(range(10**6)):
        rates.append(progress.rate())
        if progress.due():
            best.append((progress.step + 1, progress.is_best({"val_loss": next(losses)})))
        progress.end_step(1, [])
    return progress, best, rates


def test_a_loss_that_no_longer_falls_ends_the_run_after_a_quick_fall_of_the_learning_rate(tmp_path, capsys):
    progress, best, rates = train(tmp_path, [5, 4, 3, 2, 1.999, 1.9])  # a gain of 0.05 % is none
    assert best == [(50, True), (75, True), (112, True), (169, True), (253, True), (337, True)]
    assert progress.steps == progress.step == 253 + 253 // 3
    assert "step 253: the validation loss no longer falls; the learning rate does, to 0 at step 337" in capsys.readouterr().out
    assert progress.ending() == "the validation loss stopped falling at step 253"
    assert rates[252] == pytest.approx((1000 - 252) / 980) and rates[253] == pytest.approx((1000 - 253) / 980)
    assert rates[253:] == pytest.approx([rates[253] * (337 - step) / 84 for step in range(253, 337)])


def test_no_run_ends_itself_before_some_hundred_steps_and_the_best_model_is_from_before_the_loss_rose(tmp_path):
    progress, best, _ = train(tmp_path, [3, 2, 2.5, 2.6, 2.7, 2.8])
    assert [step for step, is_best in best if is_best] == [50, 75] and progress.steps == 337


def test_a_run_stops_once(tmp_path):
    progress, best, _ = train(tmp_path, [3, 2, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0], steps=300)
    assert progress.steps == 300 and [step for step, _ in best][-2:] == [253, 300]


@pytest.mark.parametrize("losses, says", [
    ([9, 8, 7, 6, 5, 4.7, 4.2], "warning: the validation loss was still falling when --max_steps 600"),  # from 5 at 253 to 4.2
    ([9, 8, 7, 6, 5, 4.7, 4.6, 4.55], "all 600 steps of --max_steps are done"),
])  # fmt: skip
def test_a_loss_that_still_falls_much_at_the_limit_is_said(tmp_path, losses, says):
    progress, _, rates = train(tmp_path, [*losses, losses[-1]], steps=600)
    assert progress.steps == 600 and progress.ending().startswith(says)
    assert rates[-1] == pytest.approx(1 / 580)


def test_a_run_too_short_to_tell_is_warned_of(tmp_path):
    assert train(tmp_path, [9], steps=30)[0].ending().startswith("warning")


def test_a_run_of_fixed_length_keeps_it(tmp_path):
    progress, best, _ = train(tmp_path, [3, 2, 2.5, 2.6, 2.7, 2.8, 2.9], steps=400, automatic=False)
    assert progress.steps == 400 and [step for step, is_best in best if is_best] == [50, 75]
    assert progress.ending() == "all 400 steps of --epochs are done"


def test_an_equal_loss_is_the_best_too_and_one_that_is_no_number_ends_the_run(tmp_path):
    progress, _ = start(tmp_path)
    assert progress.is_best({"val_loss": 2.0})
    progress.values["step"] = 1
    assert progress.is_best({"val_loss": 2.0}) and not progress.is_best({"val_loss": 2.1})
    for loss in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="step 2: the validation loss is"):
            progress.is_best({"val_loss": loss})


def test_every_validation_is_shown_and_the_last_step(tmp_path, capsys):
    progress, _ = start(tmp_path, 5)
    for number in progress.remaining(range(9)):
        progress.end_step(1, ["loss", "val_loss"], loss=0.5, **({"val_loss": 0.25} if number in (1, 2) else {}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/5", "3/5", "5/5"]
    assert "loss 0.5  val_loss 0.25" in lines[0] and "val_loss" not in lines[2]


def test_the_best_model_takes_the_place_of_the_one_in_training_and_is_read_whole(tmp_path):
    progress, weight = start(tmp_path)
    best = torch.nn.Linear(1, 1)
    write_file(progress.best, {"kind": "sft", "model": best.state_dict()})
    weight(torch.ones(1, 1)).backward()
    progress.load_best(weight.train())
    assert torch.equal(weight.weight, best.weight) and weight.weight.grad is None and not weight.training


# Stopping and going on


@pytest.mark.parametrize("stop", [1, 3, 9])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path, stop):
    torch.manual_seed(5)
    whole, expected = start(tmp_path / "whole")
    go(whole, expected)
    torch.manual_seed(5)
    go(*start(tmp_path / "cut", save_every=1), until=stop)
    torch.manual_seed(99)
    progress, weight = start(tmp_path / "cut", save_every=1, resume=True)
    assert progress.step == stop and go(progress, weight) == list(range(stop, 10))
    assert torch.equal(weight.weight, expected.weight)
    whole, cut = ((tmp_path / name / "sft.jsonl").read_text().splitlines() for name in ("whole", "cut"))
    assert [json.loads(row)["loss"] for row in whole] == [json.loads(row)["loss"] for row in cut]


def test_steps_after_the_last_save_are_made_and_logged_again(tmp_path):
    go(*start(tmp_path, save_every=4), until=7)
    progress, weight = start(tmp_path, save_every=4, resume=True)
    assert progress.step == 4 and go(progress, weight) == [4, 5, 6, 7, 8, 9]
    steps = [json.loads(line)["step"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))


def test_the_state_is_saved_by_time_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.02)
    progress, weight = start(tmp_path, 40)
    for number in progress.remaining(range(40)):
        time.sleep(0.03 if number == 3 else 0)
        progress.saving = 0.0
        progress.end_step(1, [])
        if number == 4:
            break
    assert read_file(tmp_path / "sft_state.pt", ["state"])["values"]["step"] >= 4


def test_a_state_that_takes_long_to_save_is_saved_rarely(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.0)
    progress, weight = start(tmp_path, 40)
    progress.saving = 1000.0
    go(progress, weight, until=5)
    assert not (tmp_path / "sft_state.pt").exists()


def test_an_interrupted_run_is_not_overwritten_by_forgetting_resume(tmp_path):
    go(*start(tmp_path, save_every=1), until=3)
    log = (tmp_path / "sft.jsonl").read_text()
    with pytest.raises(UserError, match="interrupted at step 3 of 10; --resume goes on with it, --overwrite begins again"):
        start(tmp_path)
    assert (tmp_path / "sft_state.pt").exists() and (tmp_path / "sft.jsonl").read_text() == log
    progress, weight = start(tmp_path, overwrite=True)
    assert progress.step == 0 and (tmp_path / "sft.jsonl").read_text() == log  # until the first step is made
    go(progress, weight, until=1)
    assert not (tmp_path / "sft_state.pt").exists() and len((tmp_path / "sft.jsonl").read_text().splitlines()) == 1


def test_all_steps_are_not_enough_for_a_run_to_be_finished_its_model_must_be_in_its_file(tmp_path):
    progress, weight = start(tmp_path)
    go(progress, weight)
    with pytest.raises(UserError, match="interrupted at step 10 of 10"):
        start(tmp_path)
    assert start(tmp_path, resume=True)[0].step == 10  # nothing to train, and the end is made again
    with pytest.raises(KeyboardInterrupt, match="step 10 is saved, --resume"):
        signal.raise_signal(signal.SIGINT)


def test_a_finished_run_may_be_made_again_without_a_word(tmp_path):
    progress, weight = start(tmp_path)
    go(progress, weight)
    progress.done()
    assert start(tmp_path)[0].step == 0


def test_resume_and_overwrite_exclude_each_other():
    with pytest.raises(UserError, match="one of them"):
        RunConfig(resume=True, overwrite=True)


def test_resuming_a_finished_stage_ends_at_once_unless_its_model_is_gone(tmp_path, capsys):
    progress, weight = start(tmp_path)
    go(progress, weight)
    progress.done()
    with pytest.raises(UserError, match="sft.pt is gone"):
        start(tmp_path, resume=True)
    (tmp_path / "sft.pt").touch()
    with pytest.raises(SystemExit) as stop:
        start(tmp_path, resume=True)
    assert not stop.value.code and "sft.pt is finished; --overwrite" in capsys.readouterr().out


def test_resuming_a_finished_ppo_run_goes_on_to_its_report(tmp_path):
    progress, weight = start(tmp_path, kind="ppo")
    go(progress, weight)
    progress.done()
    assert start(tmp_path, kind="ppo", resume=True)[0].step == 10


@pytest.mark.parametrize("stop", [200, 253, 300])
def test_a_run_that_ends_itself_does_so_also_when_it_was_interrupted(tmp_path, stop):
    losses = {50: 5, 75: 4, 112: 3, 169: 2, 253: 2.5, 337: 1}

    def train(progress, until=10**9):
        rates = []
        for _ in progress.remaining(range(10**6)):
            rates.append(progress.rate())
            if progress.due():
                progress.is_best({"val_loss": losses[progress.step + 1]})
            progress.end_step(1, [])
            if progress.step == until:
                break
        return rates

    shape = {"steps": 1000, "warmup": 20, "automatic": True, "save_every": 1}
    whole = train(start(tmp_path / "whole", **shape)[0])
    first = train(start(tmp_path / "cut", **shape)[0], until=stop)
    progress, _ = start(tmp_path / "cut", **shape, resume=True)
    assert first + train(progress) == whole and len(whole) == progress.steps == 337


@pytest.mark.parametrize("changed, says", [
    ({"data": ("others",)}, "data or vocabulary have changed"), ({"seed": 1}, "seed = 0"), ({"steps": 11}, "steps = 10"),
    ({"dtype": "bfloat16"}, "dtype = float32"), ({"config": FitConfig(lr=9)}, "lr = 0.001"),
    ({"made_from": {"sft": {"loss": 2}}}, "sft.pt has been made again"),
])  # fmt: skip
def test_a_run_goes_on_with_the_same_settings_and_data_alone(tmp_path, changed, says):
    go(*start(tmp_path, save_every=1, made_from={"sft": {"loss": 1}}), until=3)
    with pytest.raises(UserError, match=says + ".*--overwrite"):
        start(tmp_path, **{"made_from": {"sft": {"loss": 1}}, **changed}, resume=True)


def test_what_leaves_the_result_alone_may_change(tmp_path):
    go(*start(tmp_path, save_every=1), until=3)
    changes = {"config": FitConfig(micro_batch=2), "save_every": 7, "grad_checkpoint": True}
    assert start(tmp_path, **changes, resume=True)[0].step == 3


def test_a_state_of_another_version_is_refused(tmp_path):
    go(*start(tmp_path, save_every=1), until=3)
    state = torch.load(tmp_path / "sft_state.pt")
    del state["settings"]["rows"]
    torch.save(state, tmp_path / "sft_state.pt")
    with pytest.raises(UserError, match="another version; --overwrite"):
        start(tmp_path, resume=True)


def test_a_lost_log_does_not_stop_a_run(tmp_path, capsys):
    go(*start(tmp_path, save_every=1), until=3)
    (tmp_path / "sft.jsonl").unlink()
    progress, weight = start(tmp_path, resume=True)
    assert go(progress, weight)[0] == 3 and "0 of 3 steps" in capsys.readouterr().out
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 7


def test_a_log_without_its_end_keeps_what_it_has_and_nothing_stands_there_twice(tmp_path):
    go(*start(tmp_path, save_every=4), until=7)
    lines = (tmp_path / "sft.jsonl").read_text().splitlines(True)
    (tmp_path / "sft.jsonl").write_text("".join([lines[0], *lines[2:6], lines[6][:9]]))
    go(*start(tmp_path, save_every=4, resume=True))
    steps = [json.loads(line)["step"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert steps == [1, 3, 4, 5, 6, 7, 8, 9, 10]


def test_half_files_of_a_killed_run_are_taken_away(tmp_path):
    (tmp_path / ".sft.pt.123.tmp").touch()
    start(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_ctrl_c_ends_the_step_and_saves_and_a_second_one_kills(tmp_path):
    progress, weight = start(tmp_path)
    with pytest.raises(KeyboardInterrupt, match="step 3 is saved, --resume"):
        for number in progress.remaining(range(10)):
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
                assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the next one
            progress.end_step(1, [])
    assert read_file(tmp_path / "sft_state.pt", ["state"])["values"]["step"] == 3


def test_an_error_in_a_step_saves_the_steps_before_and_that_step_is_made_again(tmp_path, capsys):
    torch.manual_seed(5)
    whole, expected = start(tmp_path / "whole")
    go(whole, expected)
    torch.manual_seed(5)

    def main():
        progress, weight = start(tmp_path / "cut")
        go(progress, weight, until=6)
        for _ in progress.remaining(itertools.count()):
            torch.rand(3)
            raise UserError("the reward is no number")

    with pytest.raises(SystemExit) as stop:
        settings.run_script(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "train_sft.py: the reward is no number; step 6 is saved, --resume goes on from there\n"
    progress, weight = start(tmp_path / "cut", resume=True)
    assert go(progress, weight) == [6, 7, 8, 9] and torch.equal(weight.weight, expected.weight)


def test_an_error_before_the_first_step_or_after_the_last_saves_nothing(tmp_path):
    progress, weight = start(tmp_path)
    assert progress.rescue(UserError()) == "" and not (tmp_path / "sft_state.pt").exists()
    go(progress, weight)
    assert settings.AT_ERROR == []


def test_an_error_after_the_weights_have_changed_keeps_the_state_that_is_there(tmp_path):
    progress, weight = start(tmp_path, save_every=2)
    go(progress, weight, until=3)
    saved = (tmp_path / "sft_state.pt").read_bytes()
    for _ in progress.remaining(range(10)):
        progress.parts["optimizer"].step()
        break
    assert progress.rescue(UserError()) == "step 2 is saved, --resume goes on from there"
    assert (tmp_path / "sft_state.pt").read_bytes() == saved


def test_an_error_while_a_step_is_logged_saves_the_random_numbers_of_the_next(tmp_path):
    torch.manual_seed(5)
    whole, expected = start(tmp_path / "whole")
    go(whole, expected)
    torch.manual_seed(5)
    progress, weight = start(tmp_path / "cut")
    go(progress, weight, until=3)
    for number in progress.remaining(itertools.count()):
        with torch.no_grad():
            weight.weight += number + torch.rand(1)
        with pytest.raises(TypeError):
            progress.end_step(10, [], loss=object())  # cannot be logged
        break
    progress.rescue(UserError())
    progress, weight = start(tmp_path / "cut", resume=True)
    assert go(progress, weight)[0] == 4 and torch.equal(weight.weight, expected.weight)


def test_a_loss_that_is_no_number_does_not_advise_to_go_on(tmp_path):
    progress, weight = start(tmp_path)
    go(progress, weight, until=3)
    assert progress.rescue(FloatingPointError()) == "step 3 is saved"


def test_a_rescue_that_cannot_write_says_nothing(tmp_path, monkeypatch):
    progress, weight = start(tmp_path)
    go(progress, weight, until=2)

    def full(*args):
        raise UserError("disk")

    monkeypatch.setattr(module, "write_file", full)
    assert progress.rescue(UserError()) == ""


def test_random_states_of_more_gpus_than_there_are_can_be_read():
    state = random_state()
    torch.rand(1)
    set_random_state([*state, torch.zeros(16, dtype=torch.uint8)])
    assert torch.equal(random_state()[0], state[0])


def test_the_fingerprint_changes_with_any_row_its_order_and_the_vocabulary():
    rows = [([1, 2], [3]), ([4], [5])]
    others = [(rows[:1], [b"a"]), (rows[::-1], [b"a"]), (rows, [b"b"]), ([([1], [2, 3]), ([4], [5])], [b"a"])]
    assert len({fingerprint(*data) for data in [(rows, [b"a"]), *others]}) == 5
    assert fingerprint(rows, [b"a"]) == fingerprint([([1, 2], [3]), ([4], [5])], [b"a"])


# The folder of a run


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_two_runs_in_one_folder_are_refused_until_the_first_ends(tmp_path):
    def main():
        settings.lock(tmp_path)
        with pytest.raises(UserError, match="another run"):
            settings.lock(tmp_path)

    settings.run_script(main)
    settings.run_script(main)  # it was free again


@pytest.mark.parametrize("error, says", [
    (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
    (RuntimeError("shapes do not match"), ""),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory (CUDA out of memory"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "--micro_batch 1"),
    (MemoryError(), "not enough memory"), (FloatingPointError("the norm of the gradient is nan"), "smaller --lr"),
    (FileNotFoundError(2, "No such file", "x.pt"), "x.pt: No such file"), (UserError("as it is"), "as it is"),
])  # fmt: skip
def test_an_error_keeps_its_name(error, says):
    message = settings.explain(error)
    assert says in message and bool(says) == bool(message)


def test_an_error_that_is_no_users_keeps_its_traceback_and_the_steps_are_saved(tmp_path):
    def main():
        progress, weight = start(tmp_path)
        go(progress, weight, until=3)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        settings.run_script(main)
    assert read_file(tmp_path / "sft_state.pt", ["state"])["values"]["step"] == 3
