"""PAC-Bayes bounds: their inversion, what they grow and shrink with, and that they hold as often as they say."""

import math

import numpy as np
import pytest
from scipy.special import gammaln

from priory.bayes import pac_bayes


def bisected(q: float, nats: float) -> float:
    """The inverse by halving [q, 1], which needs nothing but the divergence written out."""

    def divergence(p: float) -> float:
        first = 0.0 if q == 0 else q * math.log(q / p)
        return first + (1 - q) * (math.log1p(-q) - math.log1p(-p))

    low, high = q, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if divergence(middle) <= nats else (low, middle)
    return high


@pytest.mark.parametrize("q", [0.0, 1e-9, 1e-3, 0.05, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("nats", [1e-5, 1e-3, 0.02, 0.3, 2.0, 20.0])
def test_the_inversion_agrees_with_a_bisection(q, nats):
    assert pac_bayes.upper_inverse(q, nats) == pytest.approx(bisected(q, nats), abs=1e-10)


def test_the_divergence_of_coins_is_that_of_the_formula():
    assert pac_bayes.binary_kl(0.25, 0.5) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert pac_bayes.binary_kl(0.0, 0.3) == pytest.approx(-math.log(0.7))
    assert pac_bayes.binary_kl(0.4, 0.4) == 0
    assert pac_bayes.binary_kl(0.4, 0.0) == math.inf


@pytest.mark.parametrize(("q", "nats", "expected"), [(1.0, 0.1, 1.0), (0.2, math.inf, 1.0), (0.2, 0.0, 0.2)])
def test_the_ends_of_the_inversion(q, nats, expected):
    assert pac_bayes.upper_inverse(q, nats) == expected


def test_twice_the_root_covers_the_sum_that_it_stands_for():
    """Maurer's ξ(n) = Σ_k C(n, k) (k/n)^k (1 − k/n)^(n−k) ≤ 2√n, which he proves from n = 8 on."""
    for n in range(1, 200):
        k = np.arange(n + 1)
        log = np.where(k > 0, k * np.log(np.maximum(k, 1) / n), 0) + np.where(
            k < n, (n - k) * np.log(np.maximum(n - k, 1) / n), 0
        )
        total = np.exp(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + log).sum()
        assert total <= 2 * math.sqrt(n) * (1 + 1e-12)


@pytest.mark.parametrize("error", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("cost", [0.003, 0.05, 0.4])
def test_the_best_weight_is_the_best_of_a_grid_and_never_beats_the_inversion(error, cost):
    found, weight = pac_bayes.lambda_bound(error, cost)
    grid = np.linspace(0.001, 1.999, 20_000)
    values = error / (1 - grid / 2) + cost / (grid * (1 - grid / 2))
    assert found == pytest.approx(min(1.0, values.min()), abs=1e-6)
    assert abs(weight - grid[values.argmin()]) < 1e-3
    assert found >= pac_bayes.kl_bound(error, cost)


def test_the_bound_falls_with_rows_and_grows_with_divergence_error_and_certainty():
    def bound(error=0.1, divergence=20.0, rows=200, delta=0.05):
        cost = pac_bayes.complexity(divergence, rows, delta)
        return pac_bayes.kl_bound(error, cost), pac_bayes.lambda_bound(error, cost)[0]

    for kind in (0, 1):
        by_rows = [bound(rows=n)[kind] for n in (50, 200, 1000, 10_000)]
        assert by_rows == sorted(by_rows, reverse=True)
        assert by_rows[0] > by_rows[-1]
        assert bound(divergence=40.0)[kind] > bound()[kind]
        assert bound(error=0.2)[kind] > bound()[kind]
        assert bound(delta=0.01)[kind] > bound()[kind]


def test_the_mean_over_draws_covers_the_error_as_often_as_it_says():
    random, delta, trials = np.random.default_rng(0), 0.1, 2000
    for error in (0.02, 0.4):
        seen = random.binomial(200, error, trials) / 200
        missed = np.mean([pac_bayes.sampled_error(value, 200, delta) < error for value in seen])
        assert missed <= delta + 4 * math.sqrt(delta * (1 - delta) / trials)
