"""The guard: whether new cells of a table agree with kept ones as well as two seeds of one setting do.

Floating point sums differ between machines and versions, so a cell of the same seed need not have the same numbers. A
number deviates when it is further from the mean of the kept ones than `WIDTH` standard deviations over seeds; the
deviation is pooled over the rows of a block, since three seeds alone know little of it, and never below `LEAST` of what
is shown.
"""

import math
import statistics
from pathlib import Path

from priory.core.errors import UsageError
from priory.reproduce.definition import Definition
from priory.reproduce.numbers import Part, fill

__all__ = ["check", "deviations"]

WIDTH = 5.0
LEAST = {2: 0.1, 3: 0.005, 4: 0.002}  # by the digits of a column: a tenth of a point of accuracy, and so on


def check(definition: Definition, kept: Path) -> None:
    """Raise where a directory has no cells of the table to compare with."""
    if fill(definition, kept).done == 0:
        raise UsageError(f"guard={kept} holds no run of {definition.name}; name a directory that does.")


def deviations(definition: Definition, out: Path, kept: Path) -> list[str]:
    """The numbers that are too far off, a sentence each."""
    found = []
    for new, old in zip(fill(definition, out).parts, fill(definition, kept).parts, strict=True):
        spread = {column.heading: _spread(old, column.heading) for column in old.columns}
        for key, (row, entries) in new.rows.items():
            for column in new.columns:
                mine, theirs = entries[column.heading], old.rows[key][1][column.heading]
                if not mine.values or not theirs.values:
                    continue
                room = math.sqrt(1 / len(mine.values) + 1 / len(theirs.values))
                most = max(WIDTH * spread[column.heading] * room, LEAST.get(column.digits, 0.0))
                if abs(mine.mean - theirs.mean) > most:
                    where = f"{new.block.title}, " if new.block.title else ""
                    found.append(
                        f"{definition.name}, {where}{row.label}, {column.heading}: {mine.mean:.{column.digits}f} where "
                        f"{theirs.mean:.{column.digits}f} ± {most:.{column.digits}f} was expected"
                    )
    return found


def _spread(part: Part, heading: str) -> float:
    """The standard deviation over seeds, pooled over the rows; 0 where every row has one seed."""
    known = [entries[heading].values for _, entries in part.rows.values() if len(entries[heading].values) > 1]
    return math.sqrt(statistics.mean(statistics.variance(values) for values in known)) if known else 0.0
