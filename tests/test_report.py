"""The specification of bench/report.py: the limits that PPO is held against. Run: python -m pytest tests/test_report.py"""

import itertools

import pytest
import torch

from bench.report import best_of_n, optimal_objective
from tiny import assert_equal, f64, noise


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
