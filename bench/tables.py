"""Tables of cells, several methods on one federation over seeds, and the command that fills and prints them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import Cell, Column, difference, mean_of, run_missing


@dataclass(frozen=True)
class Table:
    """Runs on one federation.

    Attributes:
        data: Name of the data set, `{seed}` standing for the seed.
        partition: Arguments of `partition`.
        settings: Settings of the runs.
        rows: Name of a row: the method as `priory compare` spells it. The last is compared with the others.
        columns: What is shown.
        seeds: Of problem, split and run, so that methods are paired within a seed.
        seconds: About, for a cell on two cores.
        own: More settings of some rows.
        dealt: More arguments of `partition` of some rows.
        measure: More figures of a finished run.
        files: How the cells' files begin, if not with the table's name.
    """

    data: str
    partition: dict[str, Any]
    settings: dict[str, Any]
    rows: dict[str, str]
    columns: dict[str, Column]
    seeds: tuple[int, ...] = (0, 1, 2)
    seconds: float = 40
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    dealt: dict[str, dict[str, Any]] = field(default_factory=dict)
    measure: Callable[[Any], dict[str, float]] | None = None
    files: str | None = None


def main(tables: dict[str, Table], directory: Path, text: str, apart: dict[str, Table] | None = None) -> None:
    """Run what is missing in the directory, and print the tables; those `apart` only where they are asked for."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    parser.add_argument(
        "--only", nargs="+", choices={**tables, **(apart or {})}, default=list(tables), help="which tables"
    )
    options = parser.parse_args()
    tables = {**tables, **(apart or {})}
    for name in options.only:
        table = tables[name]
        cells = {(row, seed): cell(table, name, row, seed, directory) for seed in table.seeds for row in table.rows}
        print(f"\n{name}: ", end="")
        run_missing(list(cells.values()), table.seconds, options.estimate)
        if not options.estimate:
            print_table(table, {row: [cells[row, seed].summary() for seed in table.seeds] for row in table.rows})


def cell(table: Table, name: str, row: str, seed: int, directory: Path) -> Cell:
    return Cell(
        path=directory / f"{table.files or name}-{row}-{seed}.json",
        spec=table.rows[row],
        shared={},
        data=table.data.format(seed=seed),
        partition={**table.partition, **table.dealt.get(row, {}), "seed": seed},
        settings={"eval_every": 0, **table.settings, **table.own.get(row, {}), "seed": seed},
        measure=table.measure,
    )


def print_table(table: Table, found: dict[str, list[dict[str, Any]]]) -> None:
    """Means over the seeds with standard errors, then paired differences of the last row to the others."""
    print(f"\n| method | {' | '.join(table.columns)} |")
    print("|---" * (len(table.columns) + 1) + "|")
    for row, spec in table.rows.items():
        print(f"| `{spec}` | {' | '.join(mean_of(found[row], column) for column in table.columns.values())} |")
    *others, own = table.rows
    for other in others:
        row = " | ".join(difference(found[own], found[other], column) for column in table.columns.values())
        print(f"| {own} − {other} | {row} |")
