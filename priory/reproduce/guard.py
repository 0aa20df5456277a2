"""The guard: whether new cells of a table agree with kept ones as well as two seeds of one setting do.

Floating point sums differ between machines and versions, so a cell of the same seed need not have the same numbers. A
number deviates when it is further from the mean of all kept seeds than `WIDTH` standard deviations over seeds; the
deviation is pooled over the rows of a block, since three seeds alone know little of it, and never below `LEAST` of what
is shown. A number that is missing on one side, as that of a run which diverged, deviates too.
"""

import math
import statistics
from pathlib import Path

from priory.core.errors import UsageError
from priory.reproduce import definition as definitions
from priory.reproduce.definition import Definition
from priory.reproduce.numbers import Entry, Part, fill

WIDTH = 5.0
LEAST = {0: 1.0, 1: 0.5, 2: 0.1, 3: 0.005, 4: 0.002}  # by the digits of a column: a tenth of a point of accuracy
MOST_KEPT = 5  # seeds of a short form that are looked for


def check(definition: Definition, kept: Path) -> None:
    """Raise where a directory has no cells of the table to compare with."""
    if fill(_kept(definition), kept).done == 0:
        place = kept / definition.directory
        raise UsageError(f"guard={kept} holds no run of {definition.name}, which would be in {place}; name another.")


def deviations(definition: Definition, out: Path, kept: Path) -> list[str]:
    """The numbers that are too far off, a sentence each."""
    found = []
    for new, old in zip(fill(definition, out).parts, fill(_kept(definition), kept).parts, strict=True):
        spread = {column.heading: _spread(old, column.heading) for column in old.columns}
        for key, (row, entries) in new.rows.items():
            for column in new.columns:
                mine, theirs = entries[column.heading], old.rows[key][1][column.heading]
                wrong = _deviation(mine, theirs, spread[column.heading])
                if wrong is not None:
                    where = f"{new.block.title}, " if new.block.title else ""
                    found.append(f"{definition.name}, {where}{row.label}, {column.heading}: {wrong}")
    return found


def _kept(definition: Definition) -> Definition:
    """The definition with all the seeds that can be kept of it, however few are run now."""
    return definitions.read(definition.name, definition.is_quick, MOST_KEPT if definition.is_quick else None)


def _deviation(mine: Entry, theirs: Entry, spread: float) -> str | None:
    """What is wrong with a number, if anything is."""
    if not mine.values and not theirs.values:
        return None  # what the method does not have
    if not mine.values or not theirs.values:
        return f"{mine} where {theirs} was expected"
    room = math.sqrt(1 / len(mine.values) + 1 / len(theirs.values))
    most = max(WIDTH * spread * room, LEAST[mine.digits])
    if abs(mine.mean - theirs.mean) <= most:
        return None
    return f"{mine.mean:.{mine.digits}f} where {theirs.mean:.{mine.digits}f} ± {most:.{mine.digits}f} was expected"


def _spread(part: Part, heading: str) -> float:
    """The standard deviation over seeds, pooled over the rows; 0 where every row has one seed."""
    known = [entries[heading].values for _, entries in part.rows.values() if len(entries[heading].values) > 1]
    return math.sqrt(statistics.mean(statistics.variance(values) for values in known)) if known else 0.0
