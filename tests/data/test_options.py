"""The options of data are declared once: every place that takes them shows them and explains a mistyped one."""

import inspect

import pytest

from priory.core.errors import UsageError
from priory.data import Dataset, PartitionOptions, ReadOptions, from_arrays, from_frame, load
from priory.data.arrays import ArrayOptions, dataset
from priory.data.options import names

ROWS = ([[0.0], [1.0], [2.0], [3.0]], [0, 1, 1, 0], ["a", "a", "b", "b"])


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (Dataset.partition, [PartitionOptions]),
        (load, [ReadOptions]),
        (from_frame, [ReadOptions]),
        (dataset, [ArrayOptions]),
        (from_arrays, [ArrayOptions, PartitionOptions]),
    ],
)
def test_a_function_shows_its_options_with_defaults_and_explanations(function, kinds):
    shown = inspect.signature(function).parameters
    for kind in kinds:
        for name in names(kind):
            assert shown[name].default == getattr(kind(), name)
            assert f"\n    {name}: " in function.__doc__


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dataset(*ROWS).partition("iid", client=2), "'client' is not known; did you mean 'clients'"),
        (lambda: load("digits", scalling="unit"), "'scalling' is not known; did you mean 'scaling'"),
        (lambda: dataset(*ROWS, groups=[0, 0, 1, 1]), "'groups' is not known; did you mean 'group'"),
        (lambda: from_arrays(*ROWS, min_example=2), "'min_example' is not known; did you mean 'min_examples'"),
    ],
)
def test_a_mistyped_option_is_an_error_that_suggests_the_right_one(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_a_single_transform_or_column_may_be_given_as_text_and_counts_as_a_pair():
    assert PartitionOptions.make({"transform": "invert-half", "per_class": (50, 950)}) == PartitionOptions(
        transform=("invert-half",), per_class="50/950"
    )
    assert ReadOptions.make({"drop": "id"}) == ReadOptions(drop=("id",))
