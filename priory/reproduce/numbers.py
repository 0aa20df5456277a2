"""What the cells of a table come to: means over seeds with standard errors, paired differences, what falls short."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from priory.report import value_at
from priory.reproduce.cells import cells_of
from priory.reproduce.definition import Block, Column, Definition, Row

__all__ = ["Entry", "Filled", "Part", "fill", "shortfalls"]

FEW = 0.005  # what a single seed may miss, half a point of an accuracy, since it has no standard error


@dataclass(frozen=True)
class Entry:
    """A number of the table.

    Attributes:
        by_seed: One a seed, in the unit that is shown.
        published: What the paper has, and its ± where it prints one.
        digits: Decimals that are shown.
    """

    by_seed: dict[int, float]
    published: tuple[float, float | None] | None
    digits: int

    @property
    def values(self) -> tuple[float, ...]:
        """Those numbers, in the order of the seeds."""
        return tuple(self.by_seed[seed] for seed in sorted(self.by_seed))

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.values)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else None

    def __str__(self) -> str:
        return _written(self.mean, self.error, self.digits) if self.values else "–"

    @property
    def theirs(self) -> str:
        """The published number as it is written."""
        return "–" if self.published is None else _written(*self.published, self.digits)


@dataclass(frozen=True)
class Part:
    """A block of a table with its numbers, by row and heading."""

    block: Block
    columns: tuple[Column, ...]
    rows: dict[str, tuple[Row, dict[str, Entry]]]
    num_seeds: int

    @property
    def published(self) -> tuple[str, ...]:
        """Headings under which the paper has numbers."""
        return tuple(
            column.heading
            for column in self.columns
            if any(entries[column.heading].published for _, entries in self.rows.values())
        )

    def differences(self) -> list[tuple[str, str, dict[str, Entry]]]:
        """Every later row less every earlier one, paired by seed."""
        found = []
        keys = list(self.rows)
        for place, own in enumerate(keys):
            for other in keys[:place]:
                mine, theirs = self.rows[own][1], self.rows[other][1]
                found.append((own, other, {c.heading: _less(mine[c.heading], theirs[c.heading]) for c in self.columns}))
        return found


@dataclass(frozen=True)
class Filled:
    """A table with what was measured: its parts, how many of its cells are there, and what they took."""

    definition: Definition
    parts: tuple[Part, ...]
    done: int
    total: int
    seconds: float
    versions: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every cell is there."""
        return self.done == self.total


def fill(definition: Definition, out: Path) -> Filled:
    """The table, from the cells in a directory; what is not there is left open."""
    kept: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    cells = cells_of(definition, out)
    seconds: dict[Path, float] = {}  # by file, since two rows can have the same runs
    versions: dict[str, None] = {}
    for cell in cells:
        found = cell.kept()
        if found is not None:
            kept.setdefault((cell.block.key, cell.row.key), {})[cell.seed] = found
            seconds[cell.path] = sum(found["seconds"].values())
            environment = found["manifest"]["environment"]
            versions[f"priory {environment.get('priory')}, jax {environment.get('jax')}"] = None
    parts = []
    for block in definition.blocks:
        rows = {
            row.key: (row, _entries(definition, block, row, kept.get((block.key, row.key), {})))
            for row in definition.rows
            if row.key in block.rows
        }
        parts.append(Part(block, definition.columns, rows, block.seeds))
    total = len({cell.path for cell in cells})
    return Filled(definition, tuple(parts), len(seconds), total, sum(seconds.values()), tuple(versions))


def shortfalls(filled: Filled) -> list[str]:
    """The published numbers that are not reached: by more than two standard errors, or `FEW` with one seed."""
    found = []
    for part in filled.parts:
        for row, entries in part.rows.values():
            for column in part.columns:
                entry = entries[column.heading]
                if entry.published is None or not entry.values:
                    continue
                slack = FEW * column.factor if entry.error is None else 2 * entry.error
                lack = entry.published[0] - entry.mean
                if (-lack if column.is_lower else lack) > slack:
                    where = f"{part.block.title}, " if part.block.title else ""
                    found.append(f"{row.label}, {where}{column.heading}: {entry} against {entry.theirs}")
    return found


def _entries(definition: Definition, block: Block, row: Row, kept: dict[int, dict[str, Any]]) -> dict[str, Entry]:
    published = row.published.get(block.key, {})
    found = {}
    for column in definition.columns:
        name = row.columns.get(column.heading, column.at)
        raw = {seed: value_at(summary, name) for seed, summary in kept.items()}
        # A seed without the number, one that diverged, may not be passed over in silence: then there is no mean.
        whole = {
            seed: column.factor * value for seed, value in raw.items() if value is not None and math.isfinite(value)
        }
        found[column.heading] = Entry(
            whole if len(whole) == len(raw) else {}, published.get(column.heading), column.digits
        )
    return found


def _less(mine: Entry, theirs: Entry) -> Entry:
    both = mine.by_seed.keys() & theirs.by_seed.keys()
    return Entry({seed: mine.by_seed[seed] - theirs.by_seed[seed] for seed in both}, None, mine.digits)


def _written(value: float, error: float | None, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"
