"""Split conformal prediction: the exact quantile, and the coverage that exchangeable rows promise."""

import math

import numpy as np
import pytest

from priory.uncertainty import conformal


@pytest.mark.parametrize(("num", "level", "rank"), [(9, 0.9, 9), (19, 0.9, 18), (10, 0.5, 6), (99, 0.95, 95)])
def test_the_threshold_is_the_score_of_the_right_rank(num, level, rank):
    scores = np.random.default_rng(0).permutation(np.arange(1.0, num + 1))
    assert conformal.threshold(scores, level) == rank


@pytest.mark.parametrize("num", [0, 1, 8])
def test_too_few_rows_for_the_level_leave_nothing_out(num):
    assert conformal.threshold(np.zeros(num), 0.9) == math.inf
    probs = np.array([[0.9, 0.1, 0.0]])
    assert conformal.sets(probs, np.tile(probs, (num, 1)), np.zeros(num, int), 0.9).all()


def test_a_score_that_is_not_a_number_is_the_worst():
    assert conformal.threshold(np.array([math.nan, 1.0, 2.0]), 0.75) == math.inf


def test_a_set_holds_the_classes_that_are_no_worse_than_the_threshold():
    calibration = np.column_stack([np.linspace(0.1, 0.9, 9), 1 - np.linspace(0.1, 0.9, 9)])
    # Scores 1 − p of class 0 are 0.1, …, 0.9; of ten rows the fifth smallest covers a half.
    found = conformal.sets(np.array([[0.6, 0.4], [0.45, 0.55]]), calibration, np.zeros(9, int), 0.5)
    assert found.tolist() == [[True, False], [False, True]]


def test_a_set_is_never_empty():
    sure = np.tile([1.0, 0.0, 0.0], (20, 1))  # and right, so that only certainty passes
    found = conformal.sets(np.array([[0.4, 0.35, 0.25]]), sure, np.zeros(20, int), 0.9)
    assert found.tolist() == [[True, False, False]]


def test_sets_of_exchangeable_rows_cover_at_the_level():
    draw, level, trials = np.random.default_rng(0), 0.8, 3000
    covered = np.zeros(trials)
    for trial in range(trials):  # a model that is wrong about everything, and 15 rows to find out
        probs = draw.dirichlet(np.ones(4), size=16)
        y = draw.integers(4, size=16)
        inside = conformal.sets(probs[:1], probs[1:], y[1:], level)
        covered[trial] = inside[0, y[0]]
    error = math.sqrt(level * (1 - level) / trials)
    assert covered.mean() >= level - 4 * error


def test_intervals_of_exchangeable_rows_cover_at_the_level_and_hardly_more():
    draw, level, trials, num = np.random.default_rng(0), 0.8, 3000, 19
    covered = np.zeros(trials)
    for trial in range(trials):
        y, sd = draw.standard_t(3, size=num + 1), draw.uniform(0.5, 2.0, size=num + 1)
        mean = np.full(num + 1, 0.3)
        low, high = conformal.intervals(mean[:1], sd[:1], (y[1:], mean[1:], sd[1:]), level)
        covered[trial] = low[0] <= y[0] <= high[0]
    # Of 20 exchangeable scores without ties the first is among the 16 smallest with probability 0.8.
    assert abs(covered.mean() - level) < 4 * math.sqrt(level * (1 - level) / trials)


def test_the_interval_scales_with_the_sd():
    calibration = (np.arange(1.0, 10.0), np.zeros(9), np.ones(9))
    low, high = conformal.intervals(np.array([0.0, 1.0]), np.array([1.0, 2.0]), calibration, 0.9)
    np.testing.assert_allclose([low, high], [[-9.0, -17.0], [9.0, 19.0]])
