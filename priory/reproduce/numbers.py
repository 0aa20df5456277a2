"""Numbers of a table from its cells: means over seeds with errors, paired differences, outcomes against the paper."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import scipy

from priory.report import value_at
from priory.reproduce.cells import cells_of
from priory.reproduce.definition import Block, Column, Definition, Row
from priory.stats import standard_error

LEVEL = 0.95  # of the two-sided interval of a difference from a published number


class Outcome(StrEnum):
    """Outcome of a comparison with a published number."""

    REACHED = "reached"
    MISSED = "missed"
    OPEN = "not resolved"


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
        return statistics.fmean(self.values)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        return standard_error(self.values)

    def __str__(self) -> str:
        return _written(self.mean, self.error, self.digits) if self.values else "–"

    @property
    def theirs(self) -> str:
        """The published number as it is written."""
        return "–" if self.published is None else _written(*self.published, self.digits)


@dataclass(frozen=True)
class Comparison:
    """A number of ours beside the published one."""

    block: Block
    row: Row
    column: Column
    entry: Entry

    @property
    def is_worse(self) -> bool:
        """Whether our mean is worse, to the decimals that are shown."""
        return round(self._lack, self.column.digits) > 0

    @property
    def has_one_seed(self) -> bool:
        """Whether our number is that of a single run, which has no standard error."""
        return self.entry.error is None

    @property
    def outcome(self) -> Outcome:
        """Judge the difference by Student's t.

        The error is √(ours² + the published one's²) with n − 1 degrees of freedom, n being our seeds: no more than
        Welch and Satterthwaite's if the paper has as many. A published number without an error is taken as exact.
        """
        if self.entry.error is None:
            return Outcome.OPEN
        if not self.is_worse:
            return Outcome.REACHED
        quantile = scipy.special.stdtrit(len(self.entry.values) - 1, (1 + LEVEL) / 2)
        assert self.entry.published is not None
        error = math.hypot(self.entry.error, self.entry.published[1] or 0.0)
        return Outcome.MISSED if self._lack > quantile * error else Outcome.OPEN

    @property
    def _lack(self) -> float:
        assert self.entry.published is not None
        lack = self.entry.published[0] - self.entry.mean
        return -lack if self.column.is_lower else lack

    def __str__(self) -> str:
        where = f"{self.block.title}, " if self.block.title else ""
        return f"{self.row.label}, {where}{self.column.heading}: {self.entry} against {self.entry.theirs}"


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
        entries = {key: own for key, (_, own) in self.rows.items()}
        return [
            (own, other, {name: _less(entries[own][name], entries[other][name]) for name in entries[own]})
            for place, own in enumerate(entries)
            for other in list(entries)[:place]
        ]


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


def comparisons(filled: Filled) -> list[Comparison]:
    """Every number that has a published one beside it; none where the data or the runs are not those of the paper."""
    if filled.definition.is_quick or not filled.definition.is_comparable:
        return []
    return [
        Comparison(part.block, row, column, entry)
        for part in filled.parts
        for row, entries in part.rows.values()
        for column in part.columns
        if (entry := entries[column.heading]).published is not None and entry.values
    ]


def tally(found: Iterable[Comparison]) -> dict[str, int]:
    """Count the comparisons, their outcomes, and those with one seed by whether ours is worse."""
    every = list(found)
    alone = [one for one in every if one.has_one_seed]
    worse = sum(one.is_worse for one in alone)
    counts = {outcome.value: sum(one.outcome is outcome for one in every) for outcome in Outcome}
    return {
        "published": len(every),
        **counts,
        "one seed, worse": worse,
        "one seed, at least as good": len(alone) - worse,
    }


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
