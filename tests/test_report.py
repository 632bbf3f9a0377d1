"""The check before PPO, what watches it (in plumbing/page.py), and the report at its end."""

import itertools
import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import minippo
from cli import write_models
from data.files import UserError
from data.rows import load_rows
from data.truth import margins, surprisals
from minippo import GPTConfig, PPOConfig, frozen_copy
from plumbing import page, report
from plumbing.models import load_checkpoint, load_models, nll
from plumbing.report import Evaluator, best_of_n, distinct, estimate, optimal_objective, optimality
from plumbing.text import Tokenizer, encode_rows, read_prompts
from tiny import EOS, assert_equal, f64, nan, noise, stir, tiny_gpt
from train_ppo import Settings, LoopConfig
from train_rm import pair_scores

SEEDS = pytest.mark.parametrize("seed", range(4))


@SEEDS
def test_no_policy_has_more_than_the_optimal_objective_and_the_optimum_has_it(seed):
    torch.manual_seed(seed)
    scores, beta = noise(3, 5), 10 ** (seed / 2 - 1)
    best = optimal_objective(scores, beta)

    def objective(policy):  # the reference: 5 answers, equally likely
        return (policy * (scores - beta * (policy * 5).log())).sum(-1)

    assert_equal(objective((scores / beta).softmax(1)), best, 1e-9)
    assert (objective(noise(99, 3, 5).softmax(2)) <= best + 1e-9).all()


@SEEDS
def test_best_of_n_is_the_mean_over_all_subsets_of_n(seed):
    torch.manual_seed(seed)
    scores, values = noise(1, 3 + seed), noise(1, 3 + seed)
    pairs = list(zip(scores[0].tolist(), values[0].tolist()))
    for n in range(1, 4 + seed):
        best = [max(x)[1] for x in itertools.combinations(pairs, n)]
        assert best_of_n(scores, values, n).item() == pytest.approx(sum(best) / len(best))


def test_an_estimate_is_a_mean_over_prompts_with_its_error():
    assert estimate("a", f64([2, 4, 9])) == {"a": 5.0, "a_se": (13 / 3) ** 0.5}
    assert estimate("a", f64([2])) == {"a": 2.0}
    texts = ["a"] * 16 + ["b"] * 4 + list("abcd") * 5  # the share of different ones among 16
    assert distinct(texts, 20).tolist() == [1 / 16, 4 / 16]
    assert distinct(["a", "b", "b", "b"], 2).tolist() == [1, 0.5]


def test_optimality_is_a_ratio_of_means_with_the_error_of_a_ratio():
    J, J_sft, J_best = f64([2, 4, 9]), f64([1, 2, 3]), f64([3, 6, 9])
    rest = f64([1, 2, 6]) - 0.75 * f64([2, 4, 6])  # gained 1, 2, 6 of 2, 4, 6
    expected = {"optimality": 0.75, "optimality_se": rest.std().item() / 3**0.5 / 4}
    assert optimality(J, J_sft, J_best) == pytest.approx(expected)
    assert optimality(J / 1e4, J_sft / 1e4, J_best / 1e4) == pytest.approx(expected)
    assert optimality(J_best, J_sft, J_sft) == {}  # the scores do not differ


# The evaluator, on tiny models

PROMPTS = [[1], [2, 3], [4, 5, 6]]


def grade(prompt, response):
    return 10.0 * len(prompt) + len(response)


def evaluator_of(monkeypatch, folder="zoo", beta=0.5):
    monkeypatch.setattr(report, "judge_of", {"zoo": grade}.get)
    ref, tokenizer = tiny_gpt(), Tokenizer([bytes([65 + i]) for i in range(EOS)])
    config = PPOConfig(5, length_penalty=0.25, missing_eos_penalty=0.5, kl_coef=beta)
    config.data, config.sizes = folder, []

    def score(tokens, mask):
        config.sizes.append(len(mask))
        return tokens.sum(1) + mask.sum(1)

    return Evaluator(ref, score, tokenizer, PROMPTS, config)


def test_every_response_is_measured_by_its_definition_in_pieces_too(monkeypatch):
    evaluator = evaluator_of(monkeypatch)
    evaluator.config.micro_batch = 2
    again = Evaluator(
        evaluator.ref, lambda *x: x[0].sum(1), evaluator.tokenizer, [[1]], evaluator.config
    )
    assert again.config.micro_batch == 32
    evaluator.config.micro_batch = 5
    policy, ref = stir(tiny_gpt(), 0.1), evaluator.ref
    measured, texts = evaluator.sample(policy, 4)
    assert evaluator.config.sizes == [512, 64, 5, 5, 2]
    assert {x.dtype for x in measured.values()} == {torch.float64}
    for i, text in enumerate(texts):
        row, prompt = {name: x.flatten()[i].item() for name, x in measured.items()}, PROMPTS[i // 4]
        shown = {"text": text} | {name: row[name] for name in ("judge", "score", "kl")}
        assert evaluator.answer(measured, texts, i) == shown
        ids = [ord(c) - 65 for c in text] + [EOS] * round(row["eos_rate"])
        kl = nll(ref, [(prompt, ids)], 1) - nll(policy, [(prompt, ids)], 1)
        expected = {"judge": grade(prompt, text), "eos_rate": float(ids[-1] == EOS)}
        expected["score"] = sum(prompt + ids) + 0.75 * len(ids) - 0.5 * (ids[-1] != EOS)
        expected |= {"kl": kl.item(), "response_length": len(ids)}
        assert row == pytest.approx(expected, abs=1e-4)
    assert i == 11


def test_figures_are_means_over_prompts_and_the_reference_has_optimality_0(monkeypatch):
    evaluator = evaluator_of(monkeypatch)
    same = evaluator.figures(evaluator.reference, evaluator.reference_texts)
    assert same["kl"] == same["kl_se"] == same["optimality"] == same["optimality_se"] == 0
    measured, texts = evaluator.sample(stir(tiny_gpt(), 0.1), 4)
    rows = torch.tensor([True, False, True])
    sft, expected = evaluator.reference["score"], {}
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
    evaluator = evaluator_of(monkeypatch, "other", beta=0.0)
    measured, texts = evaluator.sample(evaluator.ref, 2)
    assert not {"optimality", "judge"} & evaluator.figures(measured, texts).keys()


def test_an_answer_is_suspect_with_a_score_above_the_reference_and_a_kl_far_from_it(monkeypatch):
    monkeypatch.setattr(report, "REFERENCE", 8)  # log 8 = 2.08
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


def test_the_report_holds_what_ruler_and_truth_say_and_goes_with_its_policy(
    tmp_path, monkeypatch, capsys
):
    assert (report.PROMPTS, report.REFERENCE, report.SAMPLES) == (128, 192, 16)
    for name, n in (("PROMPTS", 7), ("REFERENCE", 64), ("SAMPLES", 2)):
        monkeypatch.setattr(report, name, n)
    data, path = write_models(tmp_path) / "data", tmp_path / "report.json"
    config = SimpleNamespace(**vars(Settings(max_new_tokens=8)) | vars(LoopConfig()))
    config.data, config.models, config.out, config.device = data, tmp_path, tmp_path, "cpu"
    config.seed, pages = 3, []
    policy, _, score, tokenizer = load_models(config)
    run = SimpleNamespace(config=config, model=stir(policy, 0.02), tokenizer=tokenizer)
    run.write_page = lambda figures: pages.append(figures) or "page"
    train, val = (read_prompts(data, x, tokenizer, 48) for x in ("train", "val"))
    report.report(run, score, train)
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert pages == [written] and config.micro_batch == 0
    assert "open page in a browser" in printed and "\n".join(written["notes"]) in printed
    cells = [report.number(written["unseen"], name) for name in report.COLUMNS]
    assert written["table"]["policy, unseen"] == cells
    for line in written["table"].values():
        assert all(cell in printed for cell in line)
    for part, name in (("sft", "above_entropy"), ("rm", "below_ceiling"), ("unseen", "optimality")):
        assert report.number(written[part], name, 4) in printed

    torch.manual_seed(3)
    prompts = [val[i] for i in torch.randperm(10)[:7]]
    ref = load_checkpoint(tmp_path / "sft.pt", ["sft"])[0]
    evaluator = Evaluator(ref, score, tokenizer, prompts, config)
    before, after = (evaluator.reference, evaluator.reference_texts), evaluator.sample(run.model, 2)
    rows = {x: load_rows(data / f"{x}_val.jsonl", x) for x in ("sft", "pref")}
    ids = {x: encode_rows(rows[x], tokenizer, 48) for x in rows}
    excess = nll(ref, ids["sft"], 64) - f64(surprisals(rows["sft"]))
    excess *= 10 / sum(len(x) for _, x in ids["sft"])  # in nats per token
    a, b = pair_scores(load_checkpoint(tmp_path / "rm.pt", ["rm"])[0], ids["pref"])
    more = (f64(margins(rows["pref"])).sign() - (a - b).sign()) / 2
    limits = {"sft": estimate("above_entropy", excess), "rm": estimate("below_ceiling", more)}
    for part, figures in limits.items():
        assert {x: written[part].pop(x) for x in figures} == pytest.approx(figures, rel=1e-4)
    expected = {"sft": evaluator.figures(*before), "rm": {}, "policy": evaluator.figures(*after)}
    expected["best_of_n"] = {n: evaluator.best_of(int(n)) for n in ("4", "16", "64")}
    expected["suspects"] = evaluator.suspects(*after)
    new = torch.tensor([x not in train for x in prompts])
    expected["unseen"] = evaluator.figures(*after, new)
    expected["seen"] = evaluator.figures(*after, ~new)
    assert {name: written[name] for name in expected} == expected
    sample = {"sft": evaluator.answer(*before, 64 * 5), "policy": evaluator.answer(*after, 2 * 5)}
    assert written["samples"][5:] == [{"prompt": evaluator.questions[5]} | sample]

    config.no_report = True
    report.report(run, score, train)
    assert not path.exists() and pages[1] is None
    everything = report.make_report(run, score, val, val)  # all prompts were trained on
    assert not {"seen", "unseen"} & everything.keys()
    evaluator.config.reward = "other:score"
    sft, rm = report.stages_before(evaluator)
    assert "above_entropy" in sft and rm == {}
    evaluator.ref.config.context = 30  # a row does not fit whole
    assert report.stages_before(evaluator)[0] == {}
    (data / "sft_val.jsonl").unlink()
    assert report.stages_before(evaluator)[0] == {}


def test_table_and_notes_show_figures_and_no_text_steers_the_terminal_or_fills_it():
    bad = {"prompt": "Why\x1b?", "text": " So\x1b." + 9999 * "x", "score": 3.456, "kl": 13.2}
    parts = {"sft": {"score": -0.001}, "rm": {}, "best_of_n": {"4": {"kl": 0}}}
    parts |= {"policy": {"score": 1.47, "score_se": 0.126, "optimality": 0.5}}
    rows = {"": ["score"], "SFT": ["0.00"], "best of 4": ["-"], "policy": ["1.47 ± 0.13"]}
    assert report.table(parts) == rows
    parts |= {"suspects": {"count": 1234, "examples": [bad]}}
    limit, count, line = report.notes(parts)
    assert limit.startswith("optimality 0.5000: ")
    assert " 1,234 responses score above all 192" in count
    assert line == f"    Why\\x1b? -> So\\x1b.{395 * 'x'}   (score 3.46, KL 13.20)"


# Before the first update, and while PPO trains

# What is changed, and what is said; an exclamation mark if the run ends.
START = """
off=0.0005, micro_batch=4 -> checked: before the first update the ratio is 1 and the KL to the reference is 0
off=0.002 -> !a ratio is 0.0020 off 1: sampling and scoring disagree
off=nan -> !a ratio is nan
off=0.2, half=True, moved=0.01, policy="x.pt" -> checked: before the first update the ratio is 1
off=1.0, half=True -> !a ratio is
moved=0.01 -> !nats away from the reference, not 0
scale=0.19 -> the standard deviation of the first scores is 0.19: divide by it
scale=0.21 -> checked:
scale=4.9 -> checked:
scale=5.1 -> the standard deviation of the first scores is 5.1: divide by it
scale=0 -> checked:
batch_size=7, k=2 -> !--batch_size 7: should be a multiple of --k 2
batch_size=4 -> checked:
batch_size=3 -> !--batch_size 3: should be a multiple of --k 1 and at least --minibatches 4
"""


@pytest.mark.parametrize("line", START.strip().splitlines())
def test_a_run_starts_only_if_sampling_and_scoring_agree_and_says_what_does_not_suit(
    capsys, monkeypatch, line
):
    words, says = line.split(" -> ")
    x = {"off": 0.0, "moved": 0.0, "scale": 1.0, "half": False, "batch_size": 16, "k": 1}
    x |= {"micro_batch": 0, "policy": ""} | eval(f"dict({words})", {"nan": nan})
    x = SimpleNamespace(**x, max_new_tokens=6, temperature=0.7, minibatches=4, kl_target=0)
    model, sizes = tiny_gpt(), []
    ref = stir(frozen_copy(model), x.moved)
    model.config = GPTConfig(**asdict(model.config) | {"bfloat16": x.half})  # not its trunk's

    def generate(policy, prompts, *rest):
        sizes.append(len(prompts))
        tokens, mask, logprobs, values = minippo.generate(policy, prompts, *rest)
        logprobs[-1, mask[-1]] += x.off
        return tokens, mask, logprobs, values

    def score(tokens, mask):
        return x.scale * (-1.0) ** torch.arange(len(mask))

    prompts = [[1] * (1 + i % 5) for i in range(20)]
    monkeypatch.setattr(report, "generate", generate)
    if says[0] == "!":
        with pytest.raises(UserError, match=says[1:]):
            report.check_start(model, ref, score, prompts, x)
    else:
        report.check_start(model, ref, score, prompts, x)
        printed = capsys.readouterr().out
        assert says in printed and ("divide" in printed) == ("divide" in says)
        assert sizes == [x.micro_batch or x.batch_size]


def test_what_is_wrong_with_an_iteration_is_said():
    for kl, more, says in (
        ([-0.1, -0.01] * 8, {}, "KL -0.055 ± 0.011 is below 0: sampling and scoring disagree"),
        ([-0.1, 0.03] * 8, {}, ""),  # the mean is 2.2 times its error
        ([-9e-5] * 16, {}, ""),
        ([99.0] * 16, {"entropy": 0.021, "eos_rate": 0.1}, ""),
        ([101.0] * 16, {}, "KL 101, entropy 0.200 nats per token: the policy may have collapsed"),
        ([1.0] * 16, {"entropy": 0.019}, "KL 1, entropy 0.019 nats"),
        ([1.0] * 16, {"eos_rate": 0.0}, "no response has ended by itself"),
        ([-1.0] * 15, {"entropy": 0.0, "eos_rate": 0.0}, ""),  # few
    ):
        stats = {"entropy": 0.2, "eos_rate": 1.0} | more
        wrong = page.faults(stats, torch.tensor(kl))
        assert [x.startswith(says) for x in wrong.values()] == [True] * bool(says), wrong


def test_an_iteration_is_judged_shown_and_traced(tmp_path, monkeypatch, capsys):
    kinds = iter(["a", "ab", "ab"])  # of faults in an iteration
    monkeypatch.setattr(page, "faults", lambda _, kl: dict.fromkeys(next(kinds), f"{kl.sum():.3f}"))
    policy = stir(minippo.GPT(GPTConfig(257, 16, 1, 2, 8)).eval(), 0.2)
    ref, scores = stir(frozen_copy(policy), 0.1), torch.arange(11.0).roll(3)
    prompts, settings = [[65, 66 + i] for i in range(11)], PPOConfig(7, 0.7)
    batch = minippo.rollout(policy, ref, lambda *_: scores, prompts, settings)
    batch["scores"] = scores
    config = SimpleNamespace(out=tmp_path, steps=44, temperature=0.7)
    run = SimpleNamespace(config=config, model=policy, before=[policy, ref], warned=set())
    run.tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    run.judge = lambda x, y: float(len(x) == 2)
    (tmp_path / "ppo_traces.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 9}\n')
    for run.step in (2, 41, 44):
        assert page.watch(run, {"kl": 2.0}, batch) == {"judge": 1.0}
    *warned, shown = capsys.readouterr().out.splitlines()
    nats = (batch["old_logprobs"] - batch["ref_logprobs"]).sum()
    assert warned == [f"warning: iteration {i}: {nats:.3f}" for i in (2, 41)]
    assert "AB" in shown and "score 8.00  KL " in shown
    lines = [json.loads(x) for x in (tmp_path / "ppo_traces.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 44]
    assert [x["score"] for x in lines[-1]["responses"]] == [0, 2, 4, 6, 8, 10]
    steps = [step for step in range(1, 300) if page.traced(step, 250)]
    assert steps == [1, 2, 5, 10, 20, 50, 100, 200, 250]
