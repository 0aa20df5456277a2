"""Figures from numbers that were written by hand."""

from types import SimpleNamespace

import numpy as np

from priory.report import figures
from priory.report.numbers import Group
from priory.uncertainty.tables import Coverage


def with_coverage(label: str, reached: list[float], error: float) -> Group:
    found = Coverage(np.array([0.5, 0.9]), np.array(reached), np.array([error, np.nan]))
    uncertainty = SimpleNamespace(parts={"personal": SimpleNamespace(coverage=found)})
    return Group(label, (SimpleNamespace(uncertainty=uncertainty),))


def test_coverage_has_a_point_and_a_bar_of_one_standard_error_for_each_level_of_each_run():
    unmeasured = Group("unmeasured", (SimpleNamespace(uncertainty=None),))
    (figure,) = figures.coverage(
        [with_coverage("a", [0.4, 0.85], 0.05), unmeasured, with_coverage("b", [0.6, 0.95], 0.1)]
    )
    rows = {(row["run"], row["level"]): row for row in figure.spec["data"]["values"]}
    assert rows.keys() == {("a", 0.5), ("a", 0.9), ("b", 0.5), ("b", 0.9)}
    assert rows["a", 0.5] == {"run": "a", "level": 0.5, "reached": 0.4, "low": 0.4 - 0.05, "high": 0.4 + 0.05}
    assert rows["b", 0.9]["low"] == rows["b", 0.9]["high"] == 0.95  # one client has no spread
    assert "b covers 0.950 where 0.9 is asked" in figure.alt


def test_no_figure_of_coverage_is_drawn_where_none_was_measured():
    assert figures.coverage([with_coverage("a", [np.nan, np.nan], 0.05)]) == []
