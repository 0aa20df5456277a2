"""Which runs belong together, how they are named, and means with standard errors."""

import dataclasses
import math

import pytest

from priory.core.errors import UsageError
from priory.report import numbers, records
from priory.report.measure import measured


def groups_of(*paths):
    return numbers.group([records.read(path) for path in paths])


def test_runs_that_differ_in_their_seed_alone_are_one_group(written):
    paths = [written("b", seed=1), written("a", seed=0), written("c", method="ditto")]
    groups = groups_of(*paths)
    assert [(group.label, [record.seed for record in group.records]) for group in groups] == [
        ("fedavg", [0, 1]),
        ("ditto", [0]),
    ]


def test_runs_of_one_method_are_named_by_the_settings_in_which_they_differ(written):
    paths = [written("a", optimiser={"step_size": 0.1}), written("b", optimiser={"step_size": 0.2})]
    assert [group.label for group in groups_of(*paths)] == ["fedavg: step-size=0.1", "fedavg: step-size=0.2"]


def test_labels_differ_even_where_the_settings_named_in_them_do_not(written):
    same = "x" * 40
    labels = [group.label for group in groups_of(written("a", note=same + "1"), written("b", note=same + "2"))]
    assert len(set(labels)) == 2


def test_a_mean_over_seeds_has_the_standard_error_of_a_mean(written):
    (group,) = groups_of(written("a", 0.6, seed=0), written("b", 0.8, seed=1))
    found = numbers.score(group, "personal", "accuracy")
    assert found.value == pytest.approx(0.7)
    assert found.error == pytest.approx(0.1)  # the standard deviation, 0.2/√2, over √2


def test_a_difference_is_paired_by_seed_so_that_what_a_seed_does_to_both_cancels(written):
    base = [written(f"a{seed}", value, seed) for seed, value in enumerate((0.5, 0.9))]
    other = [written(f"b{seed}", value, seed, method="ditto") for seed, value in ((1, 0.92), (0, 0.52), (2, 0.1))]
    first, second = groups_of(*base, *other)
    found = numbers.difference(second, first, "personal", "accuracy")
    assert found.value == pytest.approx(0.02)
    assert found.error == pytest.approx(0.0, abs=1e-12)


def test_one_seed_in_common_gives_no_difference(written):
    first, second = groups_of(written("a"), written("b", method="ditto"))
    assert numbers.difference(second, first, "personal", "accuracy") is None


def test_a_seed_that_diverged_leaves_no_mean(written):
    (group,) = groups_of(written("a", 0.6, seed=0), written("b", None, seed=1))
    assert numbers.score(group, "personal", "accuracy") == numbers.Estimate(None)


@pytest.mark.xdist_group("command line")
def test_one_seed_has_the_bootstrap_error_of_its_uncertainty(comparison):
    record = measured(records.read(comparison / "PFedBayes-s0"))
    error = record.uncertainty.parts["personal"].pooled["accuracy"].standard_error
    assert math.isfinite(error)
    for known, expected in ((record, error), (dataclasses.replace(record, uncertainty=None), None)):
        assert numbers.score(numbers.Group("", (known,)), "personal", "accuracy").error == expected


def test_the_same_run_twice_is_refused(written):
    with pytest.raises(UsageError, match="same settings with the same seed"):
        groups_of(written("a"), written("b"))


def test_classes_and_numbers_do_not_share_a_report(written):
    with pytest.raises(UsageError, match=r"predicts classes and .* a number"):
        groups_of(written("a"), written("b", kind="rmse", method="ditto"))


def test_only_rounds_that_all_seeds_have_are_told(written):
    (group,) = groups_of(written("a", 0.6, seed=0), written("b", 0.8, seed=1))
    ((at, mean),) = numbers.by_round(group, "personal.accuracy")
    assert (at, mean.value) == (2, pytest.approx(0.7))
