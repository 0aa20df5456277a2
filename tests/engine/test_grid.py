"""The loop over the cells of a grid: checks first, failures that stop no other cell, and where it was stopped."""

import contextlib
from dataclasses import dataclass

import pytest

from priory import UsageError
from priory.engine import grid
from priory.engine.grid import Control, Ended


@dataclass(frozen=True)
class Cell:
    name: str
    seed: int = 0

    @property
    def kind(self) -> str:
        return self.name


CELLS = [Cell("a"), Cell("b"), Cell("b", 1), Cell("c")]
FORGIVING = Control(guard=lambda name: contextlib.suppress(UsageError))


def failing_at(*names):
    """A run that gives its place, and fails for some cells."""

    def one(place, cell):
        if cell.name in names:
            raise UsageError("it diverged.")
        return place

    return one


def test_a_cell_that_fails_stops_none_but_those_of_its_name():
    tried, done = [], []
    one = failing_at("b")
    ended = grid.run(CELLS, lambda place, cell: tried.append(cell) or one(place, cell), FORGIVING, done.append)
    assert ended == Ended([(CELLS[0], 0), (CELLS[3], 3)])
    assert tried == [CELLS[0], CELLS[1], CELLS[3]]
    assert done == [0, 1, 3]


def test_without_a_guard_a_failure_is_raised():
    with pytest.raises(UsageError, match="it diverged"):
        grid.run(CELLS, failing_at("b"), grid.UNWATCHED)


def test_nothing_runs_after_a_cell_that_was_stopped():
    ended = grid.run(CELLS, lambda place, cell: "ran" if place < 2 else None, grid.UNWATCHED)
    assert ended == Ended([(CELLS[0], "ran"), (CELLS[1], "ran")], stopped=2)


def test_no_cell_begins_when_the_time_is_over():
    assert grid.run(CELLS, failing_at(), grid.UNWATCHED, seconds=-1.0) == Ended([], stopped=0)


def test_one_cell_of_each_kind_is_checked_and_named():
    checked = []
    grid.check(CELLS, checked.append)
    assert checked == [CELLS[0], CELLS[1], CELLS[3]]
    with pytest.raises(UsageError, match="b: mu is negative"):
        grid.check(CELLS[1:], lambda cell: (_ for _ in ()).throw(UsageError("mu is negative")))
