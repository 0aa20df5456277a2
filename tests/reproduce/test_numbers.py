"""Outcomes of comparisons with published numbers."""

import random

import pytest
from scipy import stats

from priory.reproduce.definition import Block, Column, Row
from priory.reproduce.numbers import Comparison, Entry, Outcome, tally

SEEDS = (-1.0, 0.0, 1.0)  # of which the standard error is 1/√3


def compare(values, published, error=None, is_lower=False) -> Comparison:
    column = Column("accuracy", "personal.accuracy", 1.0, 2, is_lower)
    entry = Entry(dict(enumerate(values)), (published, error), column.digits)
    return Comparison(Block("all", "", len(values), ("a",)), Row("a", "A", "fedavg", "a"), column, entry)


def around(mean: float) -> list[float]:
    return [mean + step for step in SEEDS]


def test_a_mean_that_is_at_least_as_good_to_its_decimals_is_reached():
    for mean in (90.0, 90.1, 89.996):
        assert compare(around(mean), 90.0).outcome is Outcome.REACHED


@pytest.mark.parametrize("error", [None, 0.5])
def test_a_worse_mean_is_missed_just_where_students_interval_of_the_difference_excludes_zero(error):
    width = stats.t.ppf(0.975, df=2) * ((1 / 3) + (error or 0.0) ** 2) ** 0.5
    assert compare(around(90 - 0.99 * width), 90.0, error).outcome is Outcome.OPEN
    assert compare(around(90 - 1.01 * width), 90.0, error).outcome is Outcome.MISSED


def test_less_is_better_where_the_column_says_so():
    assert compare(around(10.0), 90.0, is_lower=True).outcome is Outcome.REACHED
    assert compare(around(90.0), 10.0, is_lower=True).outcome is Outcome.MISSED


@pytest.mark.parametrize("value", [0.0, 89.99, 90.0, 100.0])
def test_one_seed_resolves_nothing(value):
    assert compare([value], 90.0).outcome is Outcome.OPEN


def test_seeds_that_all_agree_miss_what_they_do_not_reach():
    assert compare([89.0, 89.0], 90.0).outcome is Outcome.MISSED


def test_an_equal_method_misses_a_known_number_in_one_of_forty_cases():
    """Within 4 standard errors of the proportion."""
    draw, times = random.Random(0), 4000
    found = [compare([draw.gauss(90.0, 1.0) for _ in SEEDS], 90.0).outcome for _ in range(times)]
    assert found.count(Outcome.MISSED) / times == pytest.approx(0.025, abs=4 * (0.025 * 0.975 / times) ** 0.5)


def test_a_tally_has_every_comparison_once():
    found = [compare(around(mean), 90.0) for mean in (91.0, 89.0, 10.0)] + [compare([mean], 90.0) for mean in (91, 89)]
    assert tally(found) == {
        "published": 5,
        "reached": 1,
        "missed": 1,
        "not resolved": 3,
        "one seed, at least as good": 1,
        "one seed, worse": 1,
    }
