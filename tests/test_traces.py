"""The specification of plumbing/traces.py: what is recorded of a run, token by token. Run: python -m pytest tests/test_traces.py"""

import copy
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch

import minippo
from cli import metrics, same_weights
from data.zoo import judge
from plumbing import fast, traces
from plumbing.checkpoints import load_checkpoint
from plumbing.settings import RunConfig
from plumbing.text import Tokenizer
from plumbing.traces import Traces, clip_case, finite, recorded, spaced, spell
from runs import make_models, ppo
from tiny import f64, inf, nan

PLAIN = ("log_pi", "log_old", "log_ref", "kl", "reward", "value", "return", "advantage", "whitened", "ratio")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def lines(folder):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / "ppo_traces.jsonl").read_text().splitlines()]


def test_the_first_iterations_are_recorded_and_then_ever_fewer_and_the_last():
    assert [step for step in range(1, 731) if recorded(step, 730)] == [1, 2, 5, 10, 20, 50, 100, 200, 500, 730]


def test_what_is_chosen_is_spread_evenly_from_the_first_to_the_last():
    assert spaced(128, 6) == [0, 25, 50, 76, 101, 127]
    assert spaced(7, 6) == [0, 1, 2, 3, 4, 6] and spaced(6, 6) == [0, 1, 2, 3, 4, 5]
    assert spaced(2, 6) == [0, 1] and spaced(9, 1) == [0] and spaced(9, 2) == [0, 8] and spaced(0, 6) == []


@pytest.mark.parametrize("ratio, advantage, case", [
    (1.3, 1.0, "risen enough"), (0.7, -1.0, "fallen enough"), (0.7, 1.0, "pulled back up"), (1.3, -1.0, "pulled back down"),
    (1.1, 1.0, "in between"), (0.9, 1.0, "in between"), (1.1, -1.0, "in between"), (0.9, -1.0, "in between"),
    (1.3, 0.0, "in between"),
])  # fmt: skip
def test_the_clip_says_enough_exactly_where_the_loss_has_no_gradient(ratio, advantage, case):
    assert clip_case(ratio, advantage, 0.2) == case and clip_case(ratio, advantage, inf) == "in between"
    logprobs, mask = f64([[math.log(ratio)]]).requires_grad_(), torch.tensor([[True]])
    loss, _ = minippo.policy_loss(logprobs, f64([[0.0]]), f64([[advantage]]), mask, 0.2)
    loss.backward()
    assert (logprobs.grad.item() == 0) == case.endswith("enough") or advantage == 0


def test_infinity_and_nan_become_null():
    x = {"a": [1, 2.5, inf, {"b": nan}], "c": -inf, "d": "x", "e": True, "f": None}
    assert finite(x) == {"a": [1, 2.5, None, {"b": None}], "c": None, "d": "x", "e": True, "f": None}


def test_a_token_is_spelled_as_it_is_and_parts_of_letters_by_their_bytes():
    tokenizer = Tokenizer([b"a", b"\xe2", "é".encode(), b" b"])
    assert [spell(tokenizer, i) for i in range(5)] == ["a", "\\xe2", "é", " b", "<eos>"]


# The numbers, computed by hand


@pytest.fixture
def watched(monkeypatch):
    """-> a list that gets, for each iteration, copies of policy and reference before and of the policy after it, and the batch."""
    iterate, seen = minippo.ppo_iteration, []

    def ppo_iteration(policy, ref, *args):
        before = copy.deepcopy(policy), copy.deepcopy(ref)
        batch, stats = iterate(policy, ref, *args)
        seen.append((*before, copy.deepcopy(policy), batch))
        return batch, stats

    monkeypatch.setattr(minippo, "ppo_iteration", ppo_iteration)
    return seen


TEMPERATURE, GAMMA, LAM, BETA, EPS = 0.8, 0.9, 0.7, 0.3, 0.15


@torch.no_grad()
def by_hand(response, policy, ref, after, mean, std):
    """The numbers of a response, from nothing but the logits and values of three models, in plain loops."""
    ids, begin = response["prompt_ids"] + response["ids"], len(response["prompt_ids"])

    def read(model):
        logits, values = model(torch.tensor([ids]))
        nats = torch.log_softmax(logits[0].double() / TEMPERATURE, -1)
        return [nats[t - 1, ids[t]].item() for t in range(begin, len(ids))], values[0, begin - 1 : -1].tolist()

    (old, values), (refs, _), (new, _) = read(policy), read(ref), read(after)
    kl = [a - b for a, b in zip(old, refs, strict=True)]
    rewards = [-BETA * x for x in kl]
    rewards[-1] += response["score"]
    returns, advantages, following = [], [], 0.0
    for t in reversed(range(len(kl))):  # A_t = delta_t + gamma lambda A_{t+1}
        later = values[t + 1] if t + 1 < len(kl) else 0.0
        following = rewards[t] + GAMMA * later - values[t] + GAMMA * LAM * following
        advantages.insert(0, following)
        returns.insert(0, following + values[t])
    ratios = [math.exp(a - b) for a, b in zip(new, old)]
    whitened = [(x - mean) / std for x in advantages]
    return dict(zip(PLAIN, (new, old, refs, kl, rewards, values, returns, advantages, whitened, ratios), strict=True))


@pytest.mark.parametrize("flags", [
    [], ["--ref_update_every", "2", "--micro_batch", "3", "--rollout_batch", "4"], ["--separate_critic"], ["--dtype", "bfloat16"],
], ids=" ".join)  # fmt: skip
def test_every_number_is_what_loops_over_the_logits_give(models, tmp_path, watched, flags):
    settings = f"--temperature {TEMPERATURE} --gamma {GAMMA} --lam {LAM} --kl_coef {BETA} --clip_eps {EPS} --lr 0.02 --epochs 2"
    status, _, error = ppo(models, tmp_path, *settings.split(), "--steps", 6, "--warmup", 0, "--no_report", *flags)
    assert (status, error) == (0, "")
    fast.uninstall()  # the networks as minippo.py has them
    coarse, cases, moved = "bfloat16" in flags, set(), set()
    close = {"rel": 0.05, "abs": 0.05} if coarse else {"rel": 1e-3, "abs": 1e-4}
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 5, 6]
    for line in lines(tmp_path):
        policy, ref, after, batch = watched[line["step"] - 1]
        moved.add(round(sum(p.sum().item() for p in ref.parameters()), 4))
        everything = []
        for row in range(8):
            inside = batch["mask"][row].tolist()
            ids = batch["tokens"][row].tolist()
            begin, end = inside.index(True) + 1, len(inside) - inside[::-1].index(True) + 1
            response = {"prompt_ids": ids[:begin], "ids": ids[begin:end], "score": batch["scores"][row].item()}
            everything += by_hand(response, policy, ref, after, 0, 1)["advantage"]
        mean = sum(everything) / len(everything)
        std = (sum((x - mean) ** 2 for x in everything) / len(everything)) ** 0.5
        assert (line["mean"], line["std"], line["kl_coef"]) == pytest.approx((mean, std, BETA), **close)
        for response in line["tracked"] + line["sampled"]:
            expected = by_hand(response, policy, ref, after, mean, std)
            for name in PLAIN:
                assert response[name] == pytest.approx(expected[name], **close), name
            for ratio, advantage, case in zip(response["ratio"], response["whitened"], response["clip"], strict=True):
                enough = ratio > 1 + EPS if advantage > 0 else ratio < 1 - EPS
                outside = abs(ratio - 1) > EPS
                assert case == ("in between" if not outside else {
                    (True, True): "risen enough", (True, False): "fallen enough", (False, True): "pulled back up",
                    (False, False): "pulled back down"}[enough, advantage > 0])  # fmt: skip
                cases.add(case)
    assert cases >= {"in between", "risen enough", "fallen enough"}
    assert len(moved) == (2 if "--ref_update_every" in flags else 1)  # it is another in iterations 5 and 6


def test_of_this_iterations_responses_the_numbers_are_those_of_the_batch_bit_for_bit(models, tmp_path, watched):
    assert ppo(models, tmp_path, "--steps", 2, "--no_report", "--lr", 0.01)[0] == 0
    tokenizer = load_checkpoint(models / "sft.pt", ["sft"])[1]
    first, second = lines(tmp_path)
    assert {response["ended"] for response in first["sampled"] + second["sampled"]} == {True, False}
    assert first["tracked"] == first["sampled"] and second["tracked"] != second["sampled"]
    names = {"log_old": "logprobs", "log_ref": "ref_logprobs", "reward": "rewards", "value": "values", "return": "returns",
             "whitened": "advantages"}  # fmt: skip
    for line, (*_, batch) in zip((first, second), watched, strict=True):
        order = sorted(range(8), key=lambda row: batch["scores"][row].item())  # stable, as argsort is
        for response, place in zip(line["sampled"], (0, 1, 2, 4, 5, 7), strict=True):
            row = order[place]
            mask, tokens = batch["mask"][row], batch["tokens"][row]
            assert response["ids"] == tokens[1:][mask].tolist() and response["score"] == batch["scores"][row].item()
            assert response["prompt_ids"] == tokens[: int(mask.nonzero()[0]) + 1].tolist()
            assert response["ended"] == (response["ids"][-1] == tokenizer.eos)
            assert response["prompt"] == tokenizer.decode(response["prompt_ids"])
            assert response["text"] == tokenizer.decode(response["ids"])
            assert response["tokens"] == [spell(tokenizer, i) for i in response["ids"]]
            for name, column in names.items():
                assert response[name] == batch[column][row][mask].tolist(), name
            assert response["kl"] == (batch["logprobs"] - batch["ref_logprobs"])[row][mask].tolist()


def test_the_tracked_responses_are_the_same_in_every_line_and_only_the_numbers_change(models, tmp_path):
    assert ppo(models, tmp_path, "--steps", 3, "--no_report", "--lr", 0.01)[0] == 0
    one, *others = lines(tmp_path)
    assert len(one["tracked"]) == 6 and len(others) == 2
    scores = [response["score"] for response in one["tracked"]]
    assert scores == sorted(scores) and scores[0] < scores[-1]
    for other in others:
        for a, b in zip(one["tracked"], other["tracked"], strict=True):
            for name in ("prompt", "text", "prompt_ids", "ids", "tokens", "score", "ended", "judge"):
                assert a[name] == b[name]
            assert a["log_old"] != b["log_old"] and a["log_ref"] == pytest.approx(b["log_ref"], abs=1e-5)


def test_the_judge_looks_on_where_there_is_one_and_knows_the_prompts(models, tmp_path, watched):
    assert ppo(models, tmp_path, "--steps", 1, "--no_report")[0] == 0
    (line,), batch = lines(tmp_path), watched[0][-1]
    for response in line["sampled"]:
        assert response["judge"] == judge(response["prompt"], response["text"])
    tokenizer = load_checkpoint(models / "sft.pt", ["sft"])[1]
    texts = [tokenizer.decode(ids[1:][mask].tolist()) for ids, mask in zip(batch["tokens"], batch["mask"])]
    prompts = [tokenizer.decode(ids[: int(mask.nonzero()[0]) + 1].tolist()) for ids, mask in zip(batch["tokens"], batch["mask"])]
    assert line["judge"] == pytest.approx(sum(map(judge, prompts, texts)) / 8)
    it = Traces.__new__(Traces)
    it.judge = judge
    assert it.grades(["no such question"], ["x"]) == []
    it.judge = None
    assert it.grades(prompts, texts) == []


def test_a_line_holds_the_settings_and_what_json_cannot_write_is_null(models, tmp_path):
    assert ppo(models, tmp_path, "--steps", 1, "--no_report", "--clip_eps", "inf", "--seed", 3)[0] == 0
    (line,) = lines(tmp_path)
    assert line["settings"].items() >= {"clip_eps": None, "seed": 3, "steps": 1, "gamma": 1.0, "reward": "", "lr": 8e-4}.items()
    assert {case for response in line["sampled"] for case in response["clip"]} == {"in between"}


# Recording changes nothing


class Nothing:
    def __init__(self, *args):
        pass

    def around(self, rollout):
        return rollout

    def record(self, *args):
        pass


@pytest.mark.parametrize("flags", [
    [], ["--dtype", "bfloat16", "--rollout_batch", "3"], ["--separate_critic", "--epochs", "2"],
], ids=" ".join)  # fmt: skip
def test_a_run_that_is_recorded_ends_bit_for_bit_as_one_that_is_not(models, tmp_path, monkeypatch, flags):
    assert ppo(models, tmp_path / "with", "--steps", 3, "--no_report", *flags)[0] == 0
    monkeypatch.setattr(traces, "Traces", Nothing)
    assert ppo(models, tmp_path / "without", "--steps", 3, "--no_report", *flags)[0] == 0
    assert (tmp_path / "with" / "ppo_traces.jsonl").exists() and not (tmp_path / "without" / "ppo_traces.jsonl").exists()
    a, b = (torch.load(tmp_path / name / "ppo_state.pt") for name in ("with", "without"))
    assert all(torch.equal(x, y) for x, y in zip(a["random"], b["random"], strict=True))
    assert metrics(tmp_path / "with" / "ppo.jsonl") == metrics(tmp_path / "without" / "ppo.jsonl")
    assert same_weights(tmp_path / "with" / "ppo.pt", tmp_path / "without" / "ppo.pt")


# Going on


@pytest.mark.parametrize("flags", [[], ["--ref_update_every", "1", "--separate_critic"]], ids=" ".join)
def test_a_run_that_was_interrupted_leaves_the_same_file(models, tmp_path, monkeypatch, flags):
    update = minippo.ppo_update

    def press_ctrl_c(*args):
        signal.raise_signal(signal.SIGINT)
        return update(*args)

    assert ppo(models, tmp_path / "whole", "--steps", 3, "--no_report", *flags)[0] == 0
    monkeypatch.setattr(minippo, "ppo_update", press_ctrl_c)
    assert ppo(models, tmp_path / "cut", "--steps", 3, "--no_report", *flags)[0] == 130
    assert [line["step"] for line in lines(tmp_path / "cut")] == [1]
    monkeypatch.setattr(minippo, "ppo_update", update)
    assert ppo(models, tmp_path / "cut", "--steps", 3, "--no_report", *flags, "--resume")[0] == 0
    assert (tmp_path / "cut" / "ppo_traces.jsonl").read_bytes() == (tmp_path / "whole" / "ppo_traces.jsonl").read_bytes()


def test_a_finished_run_that_is_resumed_for_its_report_keeps_its_file(models, tmp_path):
    assert ppo(models, tmp_path, "--steps", 1, "--no_report")[0] == 0
    before = (tmp_path / "ppo_traces.jsonl").read_bytes()
    assert ppo(models, tmp_path, "--steps", 1, "--no_report", "--resume")[0] == 0
    assert (tmp_path / "ppo_traces.jsonl").read_bytes() == before


def progress_at(folder, step, steps=100):
    """What Traces wants to know of a Progress that goes on after so many steps."""
    it = SimpleNamespace(run=RunConfig(out=folder, data=folder), step=step, steps=steps, log=None, settings={})
    it.open_log = lambda: setattr(it, "log", "opened")
    return it


def a_line(step):
    response = {"prompt_ids": [1], "ids": [step, 3], "score": 0.5, "ended": True}
    return json.dumps({"step": step, "tracked": [response]}) + "\n"


@pytest.mark.parametrize("step, kept", [(3, [1, 2]), (5, [1, 2, 5]), (0, [])])
def test_lines_after_the_last_saved_step_are_cut_and_a_new_run_begins_with_none(tmp_path, step, kept):
    path = tmp_path / "ppo_traces.jsonl"
    path.write_text(a_line(1) + a_line(2) + a_line(5) + a_line(10)[:20])
    before, progress = path.read_text(), progress_at(tmp_path, step)
    it = Traces(progress, None)
    assert path.read_text() == before  # nothing is lost before the first step is done
    assert [row["ids"][0] for row in it.tracked] == kept[-1:]
    it.record(None, {}, {}, None) if step else it.begin()  # iterations 4 and 6 are not recorded
    assert path.read_text() == "".join(map(a_line, kept)) and progress.log == "opened"


@pytest.mark.parametrize("text", [
    "[]\n", '{"step": 1}\n', '{"step": 1, "tracked": [{}]}\n', '{"step": 1, "tracked": 5}\n', "\xff\n", "7\n",
])  # fmt: skip
def test_a_damaged_file_begins_anew_and_stops_no_run(tmp_path, capsys, text):
    (tmp_path / "ppo_traces.jsonl").write_bytes(text.encode("latin-1"))
    it = Traces(progress_at(tmp_path, 3), None)
    assert it.lines == [] == it.tracked
    assert ("begins anew" in capsys.readouterr().out) == (text != "\xff\n")  # a line that is not whole: as after a kill
    it.begin()
    assert (tmp_path / "ppo_traces.jsonl").read_text() == ""


def test_a_run_whose_file_is_lost_tracks_new_responses(models, tmp_path, monkeypatch):
    save = ["--save_every", 1, "--steps", 3, "--no_report"]
    update, calls = minippo.ppo_update, []

    def fail_at_second(*args):
        calls.append(1)
        if len(calls) == 2:
            raise FloatingPointError("no")
        return update(*args)

    monkeypatch.setattr(minippo, "ppo_update", fail_at_second)
    assert ppo(models, tmp_path, *save)[0] == 2
    (tmp_path / "ppo_traces.jsonl").unlink()
    assert ppo(models, tmp_path, *save, "--resume")[0] == 0
    second, third = lines(tmp_path)
    assert (second["step"], third["step"]) == (2, 3) and second["tracked"] == second["sampled"]
    assert [row["ids"] for row in third["tracked"]] == [row["ids"] for row in second["tracked"]]


def test_an_earlier_file_stays_if_the_log_cannot_be_written(tmp_path):
    (tmp_path / "ppo_traces.jsonl").write_text("earlier")
    progress = progress_at(tmp_path, 0)

    def fail():
        raise IsADirectoryError

    progress.open_log = fail
    with pytest.raises(IsADirectoryError):
        Traces(progress, None).begin()
    assert (tmp_path / "ppo_traces.jsonl").read_text() == "earlier"


def test_nothing_is_scored_again_and_no_gradient_is_kept(models, tmp_path, monkeypatch):
    asked, evaluate = [], traces.evaluate_actions
    score = minippo.score_responses

    def counted(*args):
        asked.append(len(args[1]))
        return score(*args)

    def watched(*args, **more):
        out = evaluate(*args, **more)
        assert not any(x.requires_grad for x in out) and not args[0].training
        return out

    monkeypatch.setattr(minippo, "score_responses", counted)
    monkeypatch.setattr(traces, "evaluate_actions", watched)
    assert ppo(models, tmp_path, "--steps", 2, "--no_report")[0] == 0
    assert asked == [8, 8]
