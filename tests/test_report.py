"""The ruler and the report (plumbing/report.py). Run: python -m pytest tests/test_report.py"""

import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from cli import write_data, write_models
from data.rows import load_rows
from data.truth import entropies, margins
from minippo import PPOConfig
from plumbing import report
from plumbing.flags import RunConfig
from plumbing.models import Models, load_models
from plumbing.report import Ruler, best_of_n, distinct, estimate, optimal_objective, optimality
from plumbing.rows import encode_rows, read_prompts
from plumbing.tokenizer import Tokenizer
from plumbing.training import nats_of
from tiny import EOS, assert_equal, f64, noise, stir, tiny_gpt
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
    assert_equal(optimal_objective(scores.float(), 1e6), scores.mean(1), 1e-5)


@SEEDS
def test_best_of_n_is_the_mean_over_all_subsets_of_n(seed):
    torch.manual_seed(seed)
    scores, values = noise(1, 3 + seed), noise(1, 3 + seed)
    pairs = list(zip(scores[0].tolist(), values[0].tolist()))
    for n in range(1, 4 + seed):
        best = [max(x)[1] for x in itertools.combinations(pairs, n)]
        assert best_of_n(scores, values, n).item() == pytest.approx(sum(best) / len(best))


def test_an_estimate_is_a_mean_over_prompts_with_its_error():
    assert estimate("a", f64([[1, 3], [4, 4], [9, 9]])) == {"a": 5.0, "a_se": (13 / 3) ** 0.5}
    assert estimate("a", f64([[1, 2, 3]])) == {"a": 2.0}
    texts = ["a"] * 16 + ["b"] * 4 + list("abcd") * 5  # the share of different ones among 16
    assert distinct(texts, 20).tolist() == [1 / 16, 4 / 16]
    assert distinct(["a", "b", "b", "b"], 2).tolist() == [1, 0.5]


def test_optimality_is_a_ratio_of_means_with_the_error_of_a_ratio():
    J_sft, J_best = f64([[1, 1], [1, 3], [4, 2]]), f64([[3], [6], [9]])
    found = optimality(f64([2, 4, 9]), J_sft, J_best)  # gained 1, 2, 6 of 2, 4, 6
    rest = f64([1, 2, 6]) - 0.75 * f64([2, 4, 6])
    error = pytest.approx(rest.std().item() / 3**0.5 / 4)
    assert found == {"optimality": 0.75, "optimality_se": error}
    small = [x / 1e4 for x in (f64([2, 4, 9]), J_sft, J_best)]
    assert optimality(*small)["optimality"] == pytest.approx(0.75)
    assert optimality(J_best, J_sft, J_sft) == {}  # the scores do not differ


# The ruler, on tiny models

PROMPTS = [[1], [2, 3], [4, 5, 6]]


def grade(prompt, response):
    return 10.0 * len(prompt) + len(response)


def ruler_of(monkeypatch, folder="zoo", beta=0.5):
    monkeypatch.setattr(report, "judge_of", {"zoo": grade}.get)
    ref, tokenizer = tiny_gpt(), Tokenizer([bytes([65 + i]) for i in range(EOS)])
    policy, score = stir(tiny_gpt(), 0.1), lambda tokens, mask: tokens.sum(1) + mask.sum(1)
    config = PPOConfig(5, length_penalty=0.25, missing_eos_penalty=0.5, kl_coef=beta)
    return Ruler(Models(policy, ref, None, score, tokenizer, {}, {}), PROMPTS, folder, config)


def test_every_response_is_measured_by_its_definition_in_pieces_too(monkeypatch):
    sizes, rollout = [], report.rollout
    monkeypatch.setattr(report, "rollout", lambda *x: sizes.append(len(x[3])) or rollout(*x))
    ruler = ruler_of(monkeypatch)
    ruler.config.micro_batch = 5
    policy, ref = ruler.models.policy, ruler.models.ref
    measured, texts = ruler.ask(policy, 4)
    assert sizes == [512, 64, 5, 5, 2] and ruler.reference["score"].shape == (3, 192)
    for i, text in enumerate(texts):
        row, prompt = {name: x.flatten()[i].item() for name, x in measured.items()}, PROMPTS[i // 4]
        shown = {"text": text} | {name: row[name] for name in ("judge", "score", "kl")}
        assert ruler.answer(measured, texts, i) == shown
        ids = [ord(c) - 65 for c in text] + [EOS] * round(row["eos_rate"])
        kl = nats_of(ref, [(prompt, ids)], 1) - nats_of(policy, [(prompt, ids)], 1)
        expected = {"judge": grade(prompt, text), "eos_rate": float(ids[-1] == EOS)}
        expected["score"] = sum(prompt + ids) + 0.75 * len(ids) - 0.5 * (ids[-1] != EOS)
        expected |= {"kl": kl.item(), "response_length": len(ids)}
        assert row == pytest.approx(expected, abs=1e-4)
    assert i == 11


def test_figures_are_means_over_prompts_and_the_reference_has_optimality_0(monkeypatch):
    ruler = ruler_of(monkeypatch)
    same = ruler.figures(ruler.reference, ruler.reference_texts)
    assert same["kl"] == same["kl_se"] == same["optimality"] == same["optimality_se"] == 0
    (measured, texts), some = ruler.ask(ruler.models.policy, 4), torch.tensor([True, False, True])
    sft, expected = ruler.reference["score"], {}
    for name, x in (measured | {"distinct": distinct(texts, 4)}).items():
        expected |= estimate(name, x[some])
    pair = [measured[x][some].flatten().tolist() for x in ("score", "response_length")]
    expected["length_correlation"] = statistics.correlation(*pair)
    J, best = measured["score"] - 0.5 * measured["kl"], optimal_objective(sft, 0.5)
    expected |= optimality(J[some], sft[some], best[some])
    assert ruler.figures(measured, texts, some) == pytest.approx(expected, abs=1e-5)
    expected = {"kl": math.log(16) - 15 / 16}
    for name in ruler.reference.keys() - {"kl"}:
        expected |= estimate(name, best_of_n(sft, ruler.reference[name], 16))
    assert ruler.best_of(16) == expected
    ruler = ruler_of(monkeypatch, "other", beta=0.0)
    measured, texts = ruler.ask(ruler.models.ref, 2)
    assert not {"optimality", "judge"} & ruler.figures(measured, texts).keys()
    measured["score"] = torch.zeros(3, 2)
    assert ruler.figures(measured, texts)["length_correlation"] == 0


def test_an_answer_is_suspect_with_a_score_above_the_reference_and_a_kl_far_from_it(monkeypatch):
    monkeypatch.setattr(report, "REFERENCE", 8)  # log 8 = 2.08
    ruler = Ruler.__new__(Ruler)
    ruler.questions = ["a?", "b?", "c?", "d?", "a?"]
    ruler.reference = {"score": f64([[0, 2]] * 5)}
    score = f64([[7, 9, 9], [2, 4, 9], [2.5, 1, 1], [9, 5, 1], [8, 1, 1]])
    a, b, c, d = (8, 9, "a?", "12"), (4, 9, "b?", "4"), (2.5, 9, "c?", "6"), (5, 2.2, "d?", "10")
    for m, count, best in ((1.0, 5, [a, d, b]), (1.5, 3, [a, b, c])):  # m: the median
        kl = f64([[2.2, m, 2.05], [9, 9, m], [9, m, m], [m, 2.2, m], [9, m, m]])
        rows = [{"prompt": q, "text": x, "score": s, "kl": k} for s, k, q, x in best]
        found = ruler.suspects({"score": score, "kl": kl}, [str(i) for i in range(15)])
        assert found == {"count": count, "examples": rows}


def test_the_report_holds_what_ruler_and_truth_say_and_goes_with_its_policy(
    tmp_path, monkeypatch, capsys
):
    assert (report.PROMPTS, report.REFERENCE, report.SAMPLES) == (128, 192, 16)
    for name, n in (("PROMPTS", 7), ("REFERENCE", 64), ("SAMPLES", 2)):
        monkeypatch.setattr(report, name, n)
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    models, config = load_models(write_models(tmp_path), "cpu"), PPOConfig(max_new_tokens=8)
    models.policy = stir(load_models(tmp_path, "cpu").policy, 0.02)
    train, val = (read_prompts(data, x, models.tokenizer, 48) for x in ("train", "val"))
    (tmp_path / "sft.jsonl").write_text('{"step": 1, "loss": 7.25}\n')
    run = RunConfig(data=data, out=out, seed=3, device="cpu")
    stage = SimpleNamespace(algorithm="ipo", no_report=False, models=tmp_path)
    report.finish_run(models, train, val, run, config, stage)
    page, path, about = out / "report.html", out / "report.json", "loss 5.0000"
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert about in capsys.readouterr().out and about in page.read_text()

    for line in ("sft val_loss", "sft above_entropy", "rm val_accuracy", "rm below_ceiling"):
        part, name = line.split()
        assert report.number(found[part], name, 4) in " ".join(found["notes"])
    assert report.number(found["ppo"], "optimality", 4) in " ".join(found["notes"])
    assert found["table"][""] == "judge score kl eos_rate response_length distinct".split()
    torch.manual_seed(3)
    prompts = [val[i] for i in torch.randperm(10)[:7]]
    ruler = Ruler(models, prompts, data, config)
    before, after = (ruler.reference, ruler.reference_texts), ruler.ask(models.policy, 2)
    expected = {"algorithm": "ipo", "beta": 0.1, "ppo": ruler.figures(*after)}
    expected |= {"sft": models.facts["sft"] | ruler.figures(*before), "rm": models.facts["rm"]}
    expected["best_of_n"] = {n: ruler.best_of(int(n)) for n in ("4", "16", "64")}
    expected |= {"suspects": ruler.suspects(*after), "samples": []}
    for i, prompt in enumerate(ruler.questions[:6]):
        answers = {"sft": ruler.answer(*before, 64 * i), "ppo": ruler.answer(*after, 2 * i)}
        expected["samples"].append({"prompt": prompt} | answers)
    new = torch.tensor([x not in train for x in prompts])
    for kind, rows in (("ppo_unseen", new), ("ppo_seen", ~new)):
        expected[kind] = ruler.figures(*after, rows) | {"prompts": int(rows.sum())}

    rows = {x: load_rows(data / f"{x}_val.jsonl", x) for x in ("sft", "pref")}
    ids = {x: encode_rows(rows[x], models.tokenizer, 48) for x in rows}
    excess = nats_of(models.ref, ids["sft"], 64) - f64(entropies(rows["sft"]))
    excess *= 10 / sum(len(x) for _, x in ids["sft"])  # in nats per token
    a, b = pair_scores(models.reward_model, ids["pref"])
    more = (f64(margins(rows["pref"])).sign() - (a - b).sign()) / 2
    wanted = estimate("above_entropy", excess), estimate("below_ceiling", more)
    for part, figures in zip(("sft", "rm"), wanted):
        assert {x: found[part].pop(x) for x in figures} == pytest.approx(figures, rel=1e-4)
    assert found == expected | {x: found[x] for x in ("table", "notes")}

    stage.no_report, models.reward_model = True, None
    report.finish_run(models, train, val, run, config, stage)
    assert not path.exists() and "7.25" in page.read_text() and about not in page.read_text()
    found = report.make_report(models, val, val, run, config, stage)  # all prompts are seen
    assert "ppo_unseen" not in found and found["ppo_seen"]["prompts"] == 7
    report.add_truth(found := {"sft": {}, "rm": {}}, models, run, 3)
    assert found["sft"] and not found["rm"]
    models.ref.config.context = 30  # a row does not fit whole
    report.add_truth(found := {"sft": {}, "rm": {}}, models, run, 3)
    assert found == {"sft": {}, "rm": {}}
    models.ref.config.context = 48
    for name in ("sft", "pref"):
        (data / f"{name}_val.jsonl").unlink()
    report.add_truth(found, load_models(tmp_path, "cpu"), run, 3)
    assert found == {"sft": {}, "rm": {}}


PRINTED = """
                           score               kl
SFT                  0.00 ± 0.02             0.00
best of 4                   0.93                -
GRPO                        1.47      2.73 ± 0.02
GRPO, unseen                1.41                -

SFT validation loss 0.5000 ± 0.2000 nats/token
    0.8340 on 50 prompts that it was not trained on
reward hacking? 1,234 responses score higher than all 192 of the SFT model, far from it:
    Why\\x1b? -> So\\x1b.   (score 3.46, KL 13.20)

Samples, before and after:
  Why\\x1b?
    SFT  So\\x1b.   (score 3.46, KL 13.20)
    GRPO No   (score 0.00, KL 0.00)
"""


def test_the_report_is_printed_and_no_text_steers_the_terminal(capsys):
    bad = {"prompt": "Why\x1b?", "text": " So\x1b.", "score": 3.456, "kl": 13.2}
    sft = {"score": -0.001, "score_se": 0.016, "kl": 0, "val_loss": 0.5, "val_loss_se": 0.2}
    parts = {"sft": sft, "algorithm": "grpo", "best_of_n": {"4": {"score": 0.93}}}
    parts["ppo"] = {"score": 1.47, "kl": 2.734, "kl_se": 0.016}
    parts["ppo_unseen"] = {"score": 1.41, "optimality": 0.834, "prompts": 50}
    parts["suspects"] = {"count": 1234, "examples": [bad]}
    parts["samples"] = [bad | {"sft": bad, "ppo": {"text": "No", "score": 0, "kl": 0}}]
    report.print_report(parts | {"table": report.table(parts), "notes": report.notes(parts)})
    assert capsys.readouterr().out == PRINTED
