"""Grids of runs: every cell is checked before the first one runs, and a cell that fails does not stop the others.

`compare`, `tune` and `reproduce` each say what a cell is, where its result is kept and how it is shown. A cell is one
run, or several that are run side by side; a finished one is found where it is kept, so the same command goes on.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from priory.core.errors import UsageError


class Cell(Protocol):
    """A cell of a grid.

    Attributes:
        name: As failures name it. Of cells that share a name, none runs after one that failed.
        kind: Cells of one kind differ in nothing that is checked.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Hashable: ...


@dataclass(frozen=True)
class Control:
    """How a grid is watched and stopped.

    Attributes:
        stop: Asked between blocks of rounds.
        guard: A context for each cell by its name; if it swallows an exception, the other cells go on.
        told: Given how many of how many rounds are done, over all cells.
    """

    stop: Callable[[], bool] = lambda: False
    guard: Callable[[str], AbstractContextManager[object]] = nullcontext
    told: Callable[[int, int], None] = lambda done, total: None


UNWATCHED = Control()
AnyCell = TypeVar("AnyCell", bound=Cell)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ended(Generic[AnyCell, Result]):
    """How a grid ended.

    Attributes:
        results: Of the cells that ran to their end.
        stopped: The place of the cell that was stopped, or that no time was left for; None if all cells had their turn.
    """

    results: list[tuple[AnyCell, Result]]
    stopped: int | None = None


def check(cells: Sequence[AnyCell], one: Callable[[AnyCell], None]) -> None:
    """Raise whatever `one` raises for any cell, with the name of the cell."""
    for kind in dict.fromkeys(cell.kind for cell in cells):
        cell = next(cell for cell in cells if cell.kind == kind)
        try:
            one(cell)
        except UsageError as error:
            raise UsageError(named(cell.name, str(error))) from None


def run(
    cells: Sequence[AnyCell],
    one: Callable[[int, AnyCell], Result | None],
    control: Control,
    done: Callable[[int], None] = lambda place: None,
    seconds: float | None = None,
) -> Ended[AnyCell, Result]:
    """Run the cells in their order.

    Args:
        one: Runs the cell at a place and keeps its result; returns None if it was stopped.
        done: Called after each cell, also one that failed.
        seconds: No cell begins after so many.
    """
    began, failed = time.monotonic(), set[str]()
    results: list[tuple[AnyCell, Result]] = []
    for place, cell in enumerate(cells):
        if cell.name in failed:
            continue
        if seconds is not None and time.monotonic() - began > seconds:
            return Ended(results, place)
        failed.add(cell.name)  # until it has ended
        with control.guard(cell.name):
            result = one(place, cell)
            if result is None:
                return Ended(results, place)
            results.append((cell, result))
            failed.remove(cell.name)
        done(place)
    return Ended(results)


def named(name: str, sentence: str) -> str:
    """Return the sentence with the name of the cell that it is about."""
    return sentence if sentence.startswith(f"{name} ") else f"{name}: {sentence}"
