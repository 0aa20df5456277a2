"""Means over seeds, their standard errors, and paired differences."""

import pytest

from priory.stats import Estimate, estimate, paired, standard_error


def test_the_error_is_the_deviation_over_the_root_of_the_number():
    found = estimate([0.5, 0.7])
    assert (found.value, found.error) == pytest.approx((0.6, 0.1))


@pytest.mark.parametrize("values", [[], [None], [0.5, None]])
def test_a_mean_with_a_missing_value_is_unknown(values):
    assert estimate(values) == Estimate(None)


def test_a_single_value_has_no_error():
    assert estimate([0.5]) == Estimate(0.5)
    assert standard_error([0.5]) is None


def test_what_a_seed_does_to_both_values_of_a_pair_cancels():
    assert paired([1.5, 2.5], [1.0, 2.0]) == Estimate(0.5, 0.0)
    assert paired([1.5, None], [1.0, 2.0]) == Estimate(None)
