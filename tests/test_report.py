"""The check before PPO, what watches it (in plumbing/page.py), and the report at its end."""

import itertools
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import minippo
from cli import write_models
from data.files import UserError, read_log
from minippo import PPOConfig, evaluate_actions, frozen_copy
from plumbing import page, report
from plumbing.models import load_checkpoint, load_models
from plumbing.report import Evaluator, best_of_n, distinct, estimate, optimal_objective, optimality
from plumbing.text import Tokenizer, pad_completions, read_prompts
from tiny import EOS, assert_equal, f64, noise, stir, tiny_gpt
from train_ppo import Settings, TrainConfig


def test_the_optimal_objective_is_that_of_the_optimum():
    scores, beta = noise(3, 5), 0.3
    policy = (scores / beta).softmax(1)  # the reference: 5 answers, equally likely
    objective = (policy * (scores - beta * (policy * 5).log())).sum(1)
    assert_equal(optimal_objective(scores, beta), objective, 1e-9)


def test_best_of_n_is_the_mean_over_all_subsets():
    pairs = noise(6, 2)
    for n in range(1, 7):
        best = [max(x)[1] for x in itertools.combinations(pairs.tolist(), n)]
        assert best_of_n(*pairs.T[:, None], n).item() == pytest.approx(sum(best) / len(best))


def test_an_estimate_is_a_mean_and_its_error():
    assert estimate("a", f64([2, 4, 9])) == {"a": 5.0, "a_se": (13 / 3) ** 0.5}
    assert estimate("a", f64([2])) == {"a": 2.0}
    texts = ["a"] * 16 + ["b"] * 4 + list("abcd") * 5  # the share of different ones among 16
    assert distinct(texts, 20).tolist() == [1 / 16, 4 / 16]
    assert distinct(["a", "b", "b", "b"], 2).tolist() == [1, 0.5]


def test_optimality_is_a_ratio_of_means():
    J, J_sft, J_best = (f64(x) / 1e4 for x in ([2, 4, 9], [1, 2, 3], [3, 6, 9]))
    rest = f64([1, 2, 6]) - 0.75 * f64([2, 4, 6])  # gained 1, 2, 6 of 2, 4, 6
    expected = {"optimality": 0.75, "optimality_se": rest.std().item() / 3**0.5 / 4}
    assert optimality(J, J_sft, J_best) == pytest.approx(expected)
    assert optimality(J_best, J_sft, J_sft) == {}  # the scores do not differ


# The evaluator, on tiny models

PROMPTS = [[1], [2, 3], [4, 5, 6]]
TOKENIZER = Tokenizer([bytes([65 + i]) for i in range(EOS)])


def grade(prompt, response):
    return 10.0 * len(prompt) + len(response)


def evaluator_of(monkeypatch, **more):
    monkeypatch.setattr(report, "judge_of", {"zoo": grade}.get)
    config = PPOConfig(5, length_penalty=0.25, missing_eos_penalty=0.5, kl_coef=0.5, **more)
    config.data, config.sizes = "zoo", []

    def score(tokens, mask):
        config.sizes.append(len(mask))
        return tokens.sum(1) + mask.sum(1)

    return Evaluator(tiny_gpt(), score, TOKENIZER, PROMPTS, config)


def test_a_response_is_measured_by_its_definition(monkeypatch):
    evaluator = evaluator_of(monkeypatch, micro_batch=2)
    policy, ref = stir(tiny_gpt(), 0.1), evaluator.ref
    measured, texts = evaluator.sample(policy, 4)
    assert evaluator.config.sizes == [32] * 18 + [12]
    assert {x.dtype for x in measured.values()} == {torch.float64}
    for i, text in enumerate(texts):
        row, prompt = {name: x.flatten()[i].item() for name, x in measured.items()}, PROMPTS[i // 4]
        shown = {"text": text} | {name: row[name] for name in ("judge", "score", "kl")}
        assert evaluator.answer(measured, texts, i) == shown
        ids = [ord(c) - 65 for c in text] + [EOS] * round(row["eos_rate"])
        new, old = (
            evaluate_actions(x, *pad_completions([(prompt, ids)]))[0] for x in (policy, ref)
        )
        expected = {"judge": grade(prompt, text), "eos_rate": float(ids[-1] == EOS)}
        expected["score"] = sum(prompt + ids) + 0.75 * len(ids) - 0.5 * (ids[-1] != EOS)
        expected |= {"kl": (new - old).sum().item(), "response_length": len(ids)}
        assert row == pytest.approx(expected, abs=1e-4)


def test_figures_are_means_over_prompts(monkeypatch):
    evaluator = evaluator_of(monkeypatch)
    assert evaluator.config.sizes == [512, 64]
    measured, texts = evaluator.sample(stir(tiny_gpt(), 0.1), 4)
    sft, rows, expected = evaluator.reference["score"], [0, 2], {}
    for name, x in measured.items():
        expected |= estimate(name, x.mean(1)[rows])
    expected |= estimate("distinct", distinct(texts, 4)[rows])
    J, best = measured["score"] - 0.5 * measured["kl"], optimal_objective(sft, 0.5)
    expected |= optimality(J.mean(1)[rows], sft.mean(1)[rows], best[rows])
    assert evaluator.figures(measured, texts, rows) == pytest.approx(expected)
    expected = {"kl": math.log(16) - 15 / 16}
    for name in evaluator.reference.keys() - {"kl"}:
        expected |= estimate(name, best_of_n(sft, evaluator.reference[name], 16))
    assert evaluator.best_of(16) == expected
    evaluator.judge, evaluator.config.kl_coef = None, 0.0
    measured, texts = evaluator.sample(evaluator.ref, 2)
    figures = evaluator.figures(measured, texts)
    assert figures["score"] == pytest.approx(measured["score"].mean().item())
    assert not {"optimality", "judge"} & figures.keys()


def test_an_answer_far_off_with_a_high_score_is_suspect(monkeypatch):
    monkeypatch.setattr(report, "REFERENCE_SAMPLES", 8)  # log 8 = 2.08
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.questions = ["a?", "b?", "c?", "d?", "a?"]
    evaluator.reference = {"score": f64([[0, 2]] * 3 + [[0, 4.5], [0, 2]])}
    score = f64([[7, 9, 9], [2, 4, 9], [2.5, 1, 1], [9, 5, 1], [8, 1, 1]])
    a, b, c, d = (8, 9, "a?", "12"), (4, 9, "b?", "4"), (2.5, 9, "c?", "6"), (5, 2.2, "d?", "10")
    for m, count, best in ((1.0, 5, [a, d, b]), (1.5, 3, [a, b, c])):  # m: the median
        kl = f64([[2.2, m, 2.05], [9, 9, m], [9, m, m], [m, 2.2, m], [9, m, m]])
        rows = [{"prompt": q, "text": x, "score": s, "kl": k} for s, k, q, x in best]
        suspects = evaluator.suspects({"score": score, "kl": kl}, [str(i) for i in range(15)])
        assert suspects == {"count": count, "examples": rows}


def test_the_report_holds_what_ruler_and_truth_say(tmp_path, monkeypatch, capsys):
    assert (report.PROMPTS, report.POLICY_SAMPLES) == (128, 16)
    for name, n in (("PROMPTS", 7), ("REFERENCE_SAMPLES", 64), ("POLICY_SAMPLES", 2)):
        monkeypatch.setattr(report, name, n)
    data, path = write_models(tmp_path) / "data", tmp_path / "report.json"
    config = SimpleNamespace(**vars(Settings(max_new_tokens=8)) | vars(TrainConfig()))
    vars(config).update(data=data, models=tmp_path, out=tmp_path, device="cpu", seed=3)
    policy, _, score, tokenizer = load_models(config)
    run, pages = SimpleNamespace(config=config, model=stir(policy, 0.02), tokenizer=tokenizer), []

    def write_page(_, figures):
        assert not path.exists()  # with this file, the run has ended
        pages.append(figures)
        return "page"

    monkeypatch.setattr(report, "write_page", write_page)
    train, val = (read_prompts(data, x, tokenizer, 48) for x in ("train", "val"))
    report.report(run, score, train)
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert pages == [written] and config.micro_batch == 0 and "open page in a browser" in printed
    assert written["table"] == report.table(written)
    assert written["notes"] == list(report.notes(written))
    assert all(text in printed for text in sum(written["table"].values(), written["notes"]))

    torch.manual_seed(3)
    prompts = [val[i] for i in torch.randperm(10)[:7]]
    ref = load_checkpoint(tmp_path / "sft.pt", ["sft"])[0]
    evaluator = Evaluator(ref, score, tokenizer, prompts, config)
    before, after = (evaluator.reference, evaluator.reference_texts), evaluator.sample(run.model, 2)
    new = torch.tensor([x not in train for x in prompts])
    figures = {
        "sft": evaluator.figures(*before),
        "policy": evaluator.figures(*after),
        "unseen": evaluator.figures(*after, new),
        "seen": evaluator.figures(*after, ~new),
    }
    for part, expected in figures.items():
        assert written[part] == pytest.approx(expected, rel=1e-4)
    assert written["best_of_n"] == {n: evaluator.best_of(int(n)) for n in ("4", "16", "64")}
    assert written["suspects"] == evaluator.suspects(*after)
    sample = {"sft": evaluator.answer(*before, 64 * 5), "policy": evaluator.answer(*after, 2 * 5)}
    assert written["samples"][5:] == [{"prompt": evaluator.questions[5]} | sample]

    config.no_report = True
    report.report(run, score, train)
    assert not path.exists() and pages[1] is None
    everything = report.make_report(run, score, val, val)  # all prompts were trained on
    assert not {"seen", "unseen"} & everything.keys()


def test_table_and_notes_show_figures_and_safe_text():
    bad = {"prompt": "Why\x1b?", "text": " So\x1b." + 9999 * "x", "score": 3.456, "kl": 13.2}
    parts = {"sft": {"score": -0.001}, "best_of_n": {"4": {"kl": 0}}}
    parts |= {"policy": {"score": 1.47, "score_se": 0.126, "optimality": 0.5}}
    parts |= {"unseen": {"optimality": 0.4, "optimality_se": 0.1}}
    rows = {"": ["score"], "SFT": ["0.00"], "best of 4": ["-"], "policy": ["1.47 ± 0.13"]}
    assert report.table(parts) == rows | {"policy, unseen": ["-"]}
    parts |= {"suspects": {"count": 1234, "examples": [bad]}}
    *limits, count, line = report.notes(parts)
    says = "optimality 0.5000:", "0.4000 ± 0.1000 on prompts"
    assert all(x in limit for x, limit in zip(says, limits, strict=True))
    assert " 1,234 responses score above all 192" in count
    assert line == f"    Why\\x1b? -> So\\x1b.{395 * 'x'}   (score 3.46, KL 13.20)"


# Before the first update, and while PPO trains

# What is changed, and what is said; an exclamation mark if the run ends.
START = """
off=0.0005, batch_size=40, micro_batch=1 -> checked: before the first update the ratio is 1 and the KL
off=0.002 -> !a ratio is 0.0020 off 1: sampling and update disagree
off=float("nan") -> !a ratio is nan
off=0.2, half=True, moved=0.01, policy="x.pt" -> checked:
off=1.0, half=True -> !a ratio is
moved=0.01 -> !nats away from the reference, not 0
scale=0.19 -> the first scores is 0.19: divide by it
scale=0.21 -> checked:
scale=4.9 -> checked:
scale=5.1 -> the first scores is 5.1: divide by it
scale=0 -> checked:
batch_size=7, k=2 -> !--batch_size 7: should be a multiple of --k 2
batch_size=4, micro_batch=2 -> checked:
batch_size=3 -> !--batch_size 3: should be a multiple of --k 1 and at least --minibatches 4
"""


class Start(SimpleNamespace):
    """The settings, and how far from right things are."""

    max_new_tokens, temperature, minibatches, kl_target = 6, 0.7, 4, 0
    batch_size, k, micro_batch, policy = 16, 1, 0, ""
    off, moved, scale, half = 0.0, 0.0, 1.0, False


@pytest.mark.parametrize("line", START.strip().splitlines())
def test_a_run_starts_if_sampling_and_scoring_agree(capsys, monkeypatch, line):
    words, says = line.split(" -> ")
    x, model, sizes = eval(f"Start({words})"), tiny_gpt(), []
    ref = stir(frozen_copy(model), x.moved)
    model.config = replace(model.config, bfloat16=x.half)  # not its trunk's

    def gather_logprobs(logits, token):
        sizes.append(len(token))
        logprobs = minippo.gather_logprobs(logits, token)
        logprobs[-1] -= x.off
        return logprobs

    def score(tokens, mask):
        return x.scale * (-1.0) ** torch.arange(len(mask))

    monkeypatch.setattr(report, "gather_logprobs", gather_logprobs)
    prompts = [[1] * (1 + i % 5) for i in range(50)]
    with pytest.raises(UserError, match=says[1:]) if says[0] == "!" else nullcontext():
        report.check_start(model, ref, score, prompts, x)
        printed = capsys.readouterr().out
        assert says in printed and ("divide" in printed) == ("divide" in says)
        assert max(sizes) == min(16, x.batch_size) and ("KL" in printed) != bool(x.policy)


def test_what_is_wrong_with_an_iteration_is_said():
    for kl, more, says in (
        ([-0.1, -0.01] * 8, {}, "KL -0.055 ± 0.011 is below 0"),
        ([-0.1, 0.03] * 8, {}, ""),  # the mean is 2.2 times its error
        ([-9e-5] * 16, {}, ""),
        ([99.0] * 16, {"entropy": 0.021, "eos_rate": 0.1}, ""),
        ([101.0] * 16, {}, "KL 101, entropy 0.200 nats per token: the policy may"),
        ([1.0] * 16, {"entropy": 0.019}, "KL 1, entropy 0.019"),
        ([1.0] * 16, {"eos_rate": 0.0}, "no response has ended"),
        ([-1.0] * 15, {"entropy": 0.0, "eos_rate": 0.0}, ""),  # few
    ):
        stats = {"entropy": 0.2, "eos_rate": 1.0} | more
        wrong = page.warnings_of(stats, torch.tensor(kl))
        assert [x.startswith(says) for x in wrong.values()] == [True] * bool(says), wrong


def test_an_iteration_is_judged_shown_and_traced(tmp_path, capsys):
    before, ref, now = models = [tiny_gpt() for _ in range(3)]
    scores, prompts = torch.arange(16.0).roll(3), [[0, 1 + i % 9] for i in range(16)]
    batch = minippo.rollout(before, ref, lambda *_: scores, prompts, PPOConfig(7, 0.7))
    batch["scores"] = scores
    run = SimpleNamespace(model=now, models_before=[before, ref], warned=set(), tokenizer=TOKENIZER)
    run.config = SimpleNamespace(out=tmp_path, steps=44, temperature=0.7)
    run.judge = lambda x, y: float(len(x) == 2)
    path = tmp_path / "ppo_traces.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 9}\n')
    for run.step, eos_rate in ((2, 0.5), (41, 0.0), (44, 0.0)):
        assert page.watch(run, {"entropy": 0.0, "eos_rate": eos_rate}, batch) == {"judge": 1.0}
    *warned, shown = capsys.readouterr().out.splitlines()
    nats = (batch["old_logprobs"] - batch["ref_logprobs"]).sum() / 16
    says = f"iteration 2: KL {nats:.0f}", "iteration 41: no response"
    assert all(x in line for x, line in zip(says, warned, strict=True))
    assert shown.startswith("    'AB") and "score 13.00  KL " in shown
    lines = read_log(path)
    assert [line["step"] for line in lines] == [1, 2, 44]
    responses = lines[-1]["responses"]
    assert [x["score"] for x in responses] == [0, 3, 6, 9, 12, 15]

    i, lowest = scores.argmin().item(), responses[0]
    assert lowest["prompt"] == TOKENIZER.decode(prompts[i])
    tokens, mask = batch["tokens"], batch["mask"]
    batch["logprobs"] = minippo.evaluate_actions(now, tokens, mask, 0.7)[0].detach()
    assert lowest["columns"] == minippo.trace(batch, i, TOKENIZER.spell)
    chances = [(x(tokens[[i], :-1])[0][0, mask[i]].detach() / 0.7).softmax(1) for x in models]
    actions = tokens[i, 1:][mask[i]].tolist()
    for p, action, likely in zip(torch.stack(chances, 2), actions, lowest["likely"], strict=True):
        ids = [*dict.fromkeys([*p[:, 0].argsort(descending=True)[:3].tolist(), action])]
        assert [text for text, *_ in likely] == [TOKENIZER.spell(i) for i in ids]
        assert_equal(f64([row[1:] for row in likely]), p[ids])
