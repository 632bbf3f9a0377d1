"""The specification of plumbing/report.py: the limits that PPO is held against. Run: python -m pytest tests/test_report.py"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from data import zoo
from minippo import PPOConfig, evaluate_actions, frozen_copy, generate, row_lengths
from plumbing import report
from plumbing.report import (
    best_of_n, estimate, means, number, optima, optimal_objective, optimality, optimum, print_systems, respond, sample, spread_out,
    systems, truth_about, unseen, wins,
)  # fmt: skip
from plumbing.settings import RunConfig, UserError
from plumbing.text import Tokenizer
from runs import REPORT
from tiny import EOS, assert_equal, f64, noise, tiny_gpt


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_the_optimal_objective_is_what_the_best_policy_gets_and_no_other_gets_more(beta):
    scores = noise(2, 4)  # four responses, equally likely under the reference, to each of two prompts
    optimum = optimal_objective(scores, beta)

    def objective(policy):
        return (policy * (scores - beta * (policy * 4).log())).sum(1)

    assert_equal(objective((scores / beta).softmax(1)), optimum)
    for _ in range(100):
        assert (objective(noise(2, 4).mul(3).softmax(1)) <= optimum + 1e-12).all()


def test_at_a_large_beta_the_optimum_is_the_reference_and_at_a_small_one_the_best_response():
    scores = f64([[1.0, 2.0, 6.0]])
    assert optimal_objective(scores, 1e6).item() == pytest.approx(3.0, abs=1e-4)
    assert optimal_objective(scores, 1e-3).item() == pytest.approx(6.0, abs=2e-3)


def test_the_optimum_weights_each_answer_by_exp_of_score_over_beta():
    odds = math.exp(2 / 0.5)  # of an answer with score 2 against one with score 0, at beta 0.5
    p = odds / (1 + odds)
    got = optimum({"score": f64([[0, 2]]), "judge": f64([[5, -1]]), "kl": f64([[9, 9]])}, 0.5)
    expected = {"score": 2 * p, "judge": 5 * (1 - p) - p, "kl": p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))}
    assert got == pytest.approx(expected)
    assert optimum({"score": f64([[0, 0], [1, 1]])}, 0.1, f64([1, 3])) == pytest.approx({"score": 0.75, "kl": 0.0})


@pytest.mark.parametrize("beta", [0.03, 0.3, 3.0])
def test_score_less_beta_kl_of_the_optimum_is_the_optimal_objective(beta):
    measured = {"score": noise(5, 40)}
    got = optimum(measured, beta)
    assert got["score"] - beta * got["kl"] == pytest.approx(optimal_objective(measured["score"], beta).mean().item())
    assert got["kl"] <= math.log(40)


def test_the_optima_are_those_at_the_price_that_was_paid_and_at_others_around_the_spread_of_the_scores():
    measured = {"score": f64([[-3, 3], [3, -3]])}
    rows = optima(measured, 0.7)
    shares = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0]
    assert [row["beta"] for row in rows] == pytest.approx(sorted([0.7, *(3 * share for share in shares)]))
    for row in rows:
        assert row == {"beta": row["beta"]} | optimum(measured, row["beta"])
    assert [row["kl"] for row in rows] == sorted((row["kl"] for row in rows), reverse=True)
    assert len(optima(measured, 0.0)) == 10 and [row["beta"] for row in optima({"score": f64([[1, 1]])}, 0.7)] == [0.7]
    assert optima(measured, 3.0, f64([1, 2]))[5] == {"beta": 1.5} | optimum(measured, 1.5, f64([1, 2]))


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_best_of_n_is_the_average_over_all_subsets_of_n(n):
    scores, values = noise(2, 6), noise(2, 6)
    for row in range(2):
        best = [values[row, max(subset, key=lambda i: scores[row, i])] for subset in itertools.combinations(range(6), n)]
        assert_equal(best_of_n(scores, values, n)[row], torch.stack(best).mean(), 1e-6)


def test_best_of_1_is_the_mean_and_best_of_all_the_maximum():
    scores = noise(3, 256)
    assert_equal(best_of_n(scores, scores, 1), scores.mean(1), 1e-6)
    assert_equal(best_of_n(scores, scores, 256), scores.amax(1), 1e-6)


def test_an_estimate_is_a_mean_over_prompts_with_its_standard_error():
    x = noise(50, 4)
    prompts = x.mean(1)
    expected = {"a": prompts.mean().item(), "a_se": (prompts.std() / 50**0.5).item()}
    assert estimate("a", x) == pytest.approx(expected)
    assert estimate("a", x, torch.full((50,), 7.0)) == pytest.approx(expected)
    assert estimate("a", f64([[1, 2, 3]])) == {"a": 2.0, "a_se": None}


def test_a_prompt_of_twice_the_weight_counts_twice():
    got = estimate("a", f64([1, 4]), f64([2, 1]))
    assert got["a"] == pytest.approx(2.0)
    # Each prompt's part is weight x (its value - the mean); with n / (n - 1) as in any sample.
    assert got["a_se"] == pytest.approx(((2 / 3 * -1) ** 2 + (1 / 3 * 2) ** 2) ** 0.5 * 2**0.5)


def test_optimality_is_the_share_of_what_can_be_gained_and_its_error_that_of_a_ratio():
    J_sft, J_best = noise(4000), noise(4000) + 10
    J = J_sft + 0.9 * (J_best - J_sft) + 0.5 * noise(4000)
    got = optimality(J, J_sft, J_best)
    assert got["optimality"] == pytest.approx(((J - J_sft).mean() / (J_best - J_sft).mean()).item())
    assert got["optimality"] == pytest.approx(0.9, abs=4 * 0.05 / 4000**0.5)
    assert got["optimality_se"] == pytest.approx(0.05 / 4000**0.5, rel=0.1)  # 0.5 / 10 per prompt: what is common cancels out
    repeats = [optimality(*(x[i : i + 40] for x in (J, J_sft, J_best)))["optimality"] for i in range(0, 4000, 40)]
    assert torch.tensor(repeats).std().item() == pytest.approx(0.05 / 40**0.5, rel=0.2)


@pytest.mark.parametrize("n, unseen, seen", [(8, 4, 4), (100, 5, 20), (12, 5, 7), (2, 1, 1)])
def test_half_of_the_prompts_looked_at_closely_are_unseen_ones_and_the_weights_make_up_for_it(n, unseen, seen):
    prompts = [[i] for i in range(25)]
    chosen, weights = spread_out(prompts, {(i,) for i in range(20)}, n)
    new = [prompt[0] >= 20 for prompt in chosen]
    assert (sum(new), len(new) - sum(new)) == (unseen, seen)
    assert len({tuple(prompt) for prompt in chosen}) == len(chosen) == len(weights)
    assert weights[torch.tensor(new)].sum().item() == pytest.approx(5) and weights.sum().item() == pytest.approx(25)


def test_where_all_prompts_are_seen_or_none_are_they_weigh_the_same():
    prompts = [[i] for i in range(9)]
    for seen in (set(), {(i,) for i in range(9)}):
        chosen, weights = spread_out(prompts, seen, 4)
        assert len(chosen) == 4 and len(set(weights.tolist())) == 1


def test_the_worst_tenth_is_chosen_by_one_half_of_the_samples_and_measured_by_the_other():
    # 11 prompts, so that a tenth is two of them, rounded up; two samples each. What is missing, by the first samples and by the
    # second: prompts 0 and 1 miss most by the first, 1 and 2 by the second. Prompt 11 is not asked for.
    missing = torch.ones(12, 2, dtype=torch.float64)
    missing[0], missing[1], missing[2], missing[11] = f64([[9, 2], [8, 7], [3, 6], [99, 99]])
    rows = torch.arange(12) < 11
    held = (2 + 7) + (8 + 3)  # prompts 0 and 1 by the second samples, 1 and 2 by the first
    got = report.worst_tenth(5 - missing, f64([[5.0]] * 12), rows)
    assert got == {"worst_tenth": pytest.approx(held / missing[rows].sum().item())}


def test_where_all_prompts_miss_the_same_the_worst_tenth_holds_a_tenth():
    got = report.worst_tenth(torch.zeros(20, 8), torch.ones(20, 1), torch.ones(20, dtype=torch.bool))
    assert got == {"worst_tenth": pytest.approx(0.1)}


def test_a_tie_is_half_a_win():
    assert wins(f64([3, 1, 2]), f64([1, 3, 2])).tolist() == [1.0, 0.0, 0.5]


def test_the_unseen_prompts_are_those_that_ppo_was_not_trained_on():
    assert unseen([[1, 2], [3], [2, 1]], {(1, 2), (4,)}) == [False, True, True]


def test_every_response_is_measured_for_its_own_prompt_in_pieces_too(monkeypatch):
    policy, ref, prompts = tiny_gpt(), frozen_copy(tiny_gpt()), [[1], [2, 3], [4, 5, 6]]
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    tokenizer, config = Tokenizer([bytes([i]) for i in range(EOS)]), PPOConfig(max_new_tokens=5, missing_eos_penalty=0.5)
    seen = []

    def watched(model, rows, *settings):
        out = generate(model, rows, *settings)
        seen.append((rows, *out))
        return out

    def judge(prompt, text):
        return len(prompt) + 10 * len(text)

    monkeypatch.setattr("plumbing.report.generate", watched)
    asked = lambda tokens, mask: 100.0 * tokens[:, 0] + mask.sum(1)  # noqa: E731
    measured, texts = respond(policy, ref, asked, prompts, 4, tokenizer, config, size=5, judge=judge)
    assert [len(rows) for rows, *_ in seen] == [5, 5, 2] and all(x.shape == (3, 4) for x in measured.values())
    i = 0
    for rows, tokens, mask, logprobs, _ in seen:
        with torch.no_grad():
            there = evaluate_actions(ref, tokens, mask)[0]
        for j, row in enumerate(rows):
            assert row == prompts[i // 4]
            n, length = int(mask[j].sum()), int(row_lengths(mask)[j])
            ended = tokens[j, length - 1].item() == EOS
            here = {name: x.flatten()[i].item() for name, x in measured.items()}
            assert here["length"] == n and here["ended"] == ended
            assert here["score"] == pytest.approx(100 * row[0] + n - 0.5 * (not ended))
            assert here["kl"] == pytest.approx((logprobs[j] - there[j]).sum().item(), abs=1e-4)
            assert texts[i] == tokenizer.decode(tokens[j, len(row) : length].tolist())
            assert here["judge"] == len(row) + 10 * len(texts[i])
            i += 1
    assert not respond(ref, ref, asked, prompts, 2, tokenizer, config)[0]["kl"].any()


def test_the_figures_have_the_names_of_the_report():
    assert means({"ended": f64([[1, 0], [1, 1]]), "kl": f64([[2.0], [4.0]])}) == pytest.approx(
        {"eos_rate": 0.75, "eos_rate_se": 0.25, "kl": 3.0, "kl_se": 1.0}
    )


def test_a_number_is_printed_with_its_error_if_it_has_one():
    assert number({"kl": 1.239, "kl_se": 0.04}, "kl", 2) == "1.24 ± 0.04"
    assert number({"kl": 1.2}, "kl", 2) == number({"kl": 1.2, "kl_se": None}, "kl", 2) == "1.20"


PRINTED = """
                         judge            score               kl         eos_rate  response_length
SFT               -0.33 ± 0.04     -0.01 ± 0.03      0.00 ± 0.00    1.000 ± 0.000      9.90 ± 0.09
best of 4          1.67 ± 0.02      0.93 ± 0.04             0.64                -                -
best of 16         2.58 ± 0.03      1.42 ± 0.04             1.84                -                -
PPO                2.63 ± 0.03      1.47 ± 0.02      2.73 ± 0.03    1.000 ± 0.000     12.36 ± 0.08
PPO, unseen                  -      1.41 ± 0.06      2.57 ± 0.10                -                -
best possible             3.00
"""


def test_the_systems_are_printed_a_line_each(capsys):
    print_systems(REPORT)
    assert capsys.readouterr().out == PRINTED
    no_judge = {"sft": {"score": 0.5, "kl": 0.0}, "best_of_n": {}, "ppo": {"score": 1.0, "kl": 2.0, "eos_rate": 0.5}}
    names, rows = systems(no_judge)
    assert names == ["score", "kl", "eos_rate", "response_length"]
    assert rows == {"SFT": ["0.50", "0.00", "-", "-"], "PPO": ["1.00", "2.00", "0.500", "-"]}


def test_the_truth_is_known_of_the_default_data_alone(tmp_path):
    assert truth_about(tmp_path) == (None, None, {})
    (tmp_path / "ceilings.json").write_text('{"best_judge": 3}')
    assert truth_about(tmp_path) == (zoo.crowd, zoo.judge, {"best_judge": 3})
    (tmp_path / "ceilings.json").write_text('{"best_judge"')
    with pytest.raises(UserError, match="ceilings.json: is no JSON; delete it"):
        truth_about(tmp_path)


def test_a_sample_has_the_figures_of_both_and_the_judges_only_where_there_is_one():
    before = {"score": f64([[1, 9], [2, 9]]), "judge": f64([[3, 9], [4, 9]]), "kl": f64([[0, 0], [0, 0]])}
    after = {name: x + 10 for name, x in before.items()}
    both = {"prompt": "p", "sft": "s", "ppo": "q", "kl": 10.0}
    assert sample("p", "s", "q", before, after, 1) == both | {"score": 12.0, "judge": 14.0, "sft_score": 2.0, "sft_judge": 4.0}
    for x in (before, after):
        del x["judge"]
    assert sample("p", "s", "q", before, after, 0) == both | {"score": 11.0, "sft_score": 1.0}


def test_prompts_that_ppo_was_trained_on_and_others_are_measured_apart(monkeypatch, tmp_path):
    # The SFT model's scores are 0 and 2 in turn, so at beta = 1 the optimum is the log of the mean of 1 and exp(2).
    prompts = [[i] for i in range(1, 9)]

    def respond(policy, ref, score, rows, n, *rest):
        level = torch.tensor([[1.3 if row[0] < 6 else 1.1] for row in rows]).expand(-1, n)
        scores = torch.tensor([0.0, 2.0]).repeat(len(rows), n // 2) if policy is ref else level
        zeros = torch.zeros_like(scores)
        return {"score": scores, "ended": zeros, "kl": zeros, "length": zeros}, ["text"] * (len(rows) * n)

    monkeypatch.setattr(report, "respond", respond)
    models = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), facts={"sft": {}}, score=None, reward_model=None)
    run, stage = RunConfig(data=tmp_path, out=tmp_path), SimpleNamespace(report_prompts=0, rollout_batch=0, models="")
    got = report.make_report("ppo", "sft", models, prompts, prompts[:5], run, PPOConfig(kl_coef=1.0), stage)
    best = math.log((1 + math.exp(2)) / 2) - 1
    assert (got["ppo_seen"]["prompts"], got["ppo_unseen"]["prompts"]) == (5, 3)
    assert got["ppo_seen"]["score"] == pytest.approx(1.3) and got["ppo_unseen"]["score"] == pytest.approx(1.1)
    for kind, gained, worst in (("ppo_seen", 0.3, 1 / 5), ("ppo_unseen", 0.1, 1 / 3)):
        assert got[kind]["optimality"] == pytest.approx(gained / best) and got[kind]["worst_tenth"] == pytest.approx(worst)
    assert got["ppo"]["score"] == pytest.approx((5 * 1.3 + 3 * 1.1) / 8)
    same = report.make_report("ppo", "sft", models, prompts, prompts, run, PPOConfig(kl_coef=1.0), stage)
    assert "ppo_seen" not in same and "ppo_unseen" not in same  # there is but one kind
