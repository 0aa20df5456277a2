"""Figures that no summary has."""

import pytest

from priory.reproduce import definition
from priory.reproduce.cells import Federations, cells_of

pytestmark = pytest.mark.xdist_group("command line")  # `test_cells` trains the same method


def test_density_is_the_inclusion_that_a_run_starts_with_but_for_the_steps_of_its_logit(table, tmp_path):
    settings = {"inclusion": 0.3, "step_size": 0.001, "steps": 1, "samples": 2}
    table |= {"measure": "density", "seeds": 1, "row": [{"key": "s", "method": "sfedbayes", "set": settings}]}
    table["block"], table["run"] = table["block"][:1], {"rounds": 2, "model": "linear"}
    found = cells_of(definition.parse("digits-table-0", table), tmp_path)[0].run(Federations())
    assert found is not None
    moved = 0.3 * 0.7 * 0.001  # of λ, by one step of Adam
    assert set(found["measured"]) == {"personal", "global"}
    for value in found["measured"].values():
        assert value == pytest.approx(0.3, abs=2.1 * moved)
        assert value != 0.3
