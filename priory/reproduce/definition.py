"""Definitions: which runs make a published table again, and what was published. One TOML file each, in `tables/`.

    paper, title        where the numbers were published, and what the table shows
    reduced             what is smaller here than in the paper, in sentences
    notes               what is to be known of the outcome, in sentences
    seeds, seconds      seeds of a cell, and about how long one takes on two cores before any was measured
    measure             a function of `measures`, for figures that no summary has
    measured_on         data sets that it reads beside those of the runs
    comparable          false where the published numbers are of other data: they are shown, and not held against ours
    cells               the definition whose cells these are, where two tables are made of the same runs
    [columns]           heading = "dotted.name" of a number in a summary, or {at, factor, digits, lower}; lower = true
                        where less is better
    [data]              data = the data set, and the arguments of `partition`; {seed} stands for the seed
    [run]               settings of the runs
    [method]            settings that all methods share, by flag name; "none" stands for None
    [[block]]           a part of the table: key, title, and data, run, method, seeds of its own; rows = some of them
    [[row]]             key, label, method, set = its own settings, data, run and seeds of its own; shared = false does
                        without [method]; blocks = some of them; published = {BLOCK = {HEADING = number or [number,
                        error]}}; of = the row whose runs these are, and columns = {HEADING = "dotted.name"} where they
                        are read elsewhere, as the global model of a run whose personal models have a row of their own
    [quick]             seeds, seconds, rows, blocks, data, run and method of the short form; a row's run yields to its

The seed is that of the partition and of the run, so methods are paired within a seed.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from priory.core.errors import UsageError
from priory.data import checks

PERCENT, PLAIN = (100.0, 2), (1.0, 4)
SHAPES = {"accuracy": PERCENT, "mean": PERCENT, "worst": PERCENT, "p10": PERCENT, "rmse": (1.0, 3)}
ONLY = "all"  # the key of the block of a definition that names none
RUNS = ("method", "set", "shared", "data", "run", "seeds", "seconds", "blocks")  # what a row's runs are made of
Table = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One number of a summary: its dotted name, how it is written, and whether less of it is better."""

    heading: str
    at: str
    factor: float
    digits: int
    is_lower: bool = False


@dataclass(frozen=True)
class Block:
    """A part of a table: one federation and one way of running it."""

    key: str
    title: str
    seeds: int
    rows: tuple[str, ...]
    data: Table = field(default_factory=dict)
    run: Table = field(default_factory=dict)
    method: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A method of a table with its own settings, and what was published of it by block and heading.

    Attributes:
        cells: The key that its runs are kept under, its own or that of the row whose runs they are.
        columns: Dotted names by heading, where they are not those of the table.
    """

    key: str
    label: str
    method: str
    cells: str
    columns: dict[str, str] = field(default_factory=dict)
    settings: Table = field(default_factory=dict)
    shared: bool = True
    data: Table = field(default_factory=dict)
    run: Table = field(default_factory=dict)
    seeds: int | None = None
    seconds: float | None = None
    published: dict[str, dict[str, tuple[float, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    """A published table, and the runs that make it again."""

    name: str
    paper: str
    title: str
    seconds: float
    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]
    rows: tuple[Row, ...]
    directory: str
    reduced: str = ""
    notes: tuple[str, ...] = ()
    measure: str | None = None
    measured_on: tuple[str, ...] = ()
    is_comparable: bool = True
    data: Table = field(default_factory=dict)
    run: Table = field(default_factory=dict)
    method: Table = field(default_factory=dict)
    is_quick: bool = False
    has_quick: bool = False

    def places(self) -> Iterator[tuple[Block, Row]]:
        """Every method of every block, in the order of the table."""
        for block in self.blocks:
            for row in self.rows:
                if row.key in block.rows:
                    yield block, row

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The data sets that are read, without arguments."""
        found: dict[str, None] = {}
        for block, row in self.places():
            data = self.data | block.data | row.data
            name, *arguments = str(data["data"]).split(":")
            found[":".join([name, *arguments[:1]]) if name == "synthetic" else name] = None
            mixed, aligned = str(data.get("transform", "")), str(data.get("align", "own"))
            if mixed.startswith("mix:"):
                found[mixed.removeprefix("mix:")] = None
            if not aligned.startswith("own"):
                found[aligned.partition(":")[0]] = None
        return tuple(found | dict.fromkeys(self.measured_on))


def names() -> list[str]:
    """The definitions, by name."""
    return sorted(
        path.name.removesuffix(".toml") for path in files(__package__).joinpath("tables").iterdir() if _is_table(path)
    )


@cache
def read(name: str, quick: bool = False, seeds: int | None = None) -> Definition:
    """The definition of that name, in its short form where that is wanted, and with so many seeds in every block."""
    if name not in names():
        raise checks.unknown("table", name, names())
    table = tomllib.loads(files(__package__).joinpath("tables", f"{name}.toml").read_text())
    if quick and "quick" not in table:
        raise UsageError(f"{name} has no short form; leave out --quick.")
    return parse(name, table, table["quick"] if quick else None, seeds)


def parse(name: str, table: Table, quick: Table | None = None, seeds: int | None = None) -> Definition:
    """A definition from the table of its file."""
    short: Table = quick or {}
    defaults: Table = {"seeds": 1, "seconds": 60.0} | table | short
    pace: Table = {"seconds": None} if "seconds" in short else {}  # those of a row are of its full form
    if quick or seeds is not None:
        pace["seeds"] = None
    every = _with_runs(table["row"])
    keys = [row["key"] for row in every if row["key"] in short.get("rows", [row["key"]])]

    def block(one: Table) -> Block:
        rows = tuple(
            row["key"]
            for row in every
            if row["key"] in keys
            and row["key"] in one.get("rows", keys)
            and one["key"] in row.get("blocks", [one["key"]])
        )
        own: int = defaults["seeds"] if quick or "seeds" not in one else one["seeds"]
        return Block(
            one["key"],
            one.get("title", ""),
            own if seeds is None else seeds,
            rows,
            *(one.get(part, {}) | short.get(part, {}) for part in ("data", "run", "method")),
        )

    blocks = [block(one) for one in table.get("block", [{"key": ONLY}])]
    return Definition(
        name=name,
        paper=table["paper"],
        title=table["title"],
        seconds=defaults["seconds"],
        columns=tuple(_column(heading, value) for heading, value in table["columns"].items()),
        blocks=tuple(one for one in blocks if one.rows and one.key in short.get("blocks", [one.key])),
        rows=tuple(
            _row(row | pace | {"run": row.get("run", {}) | short.get("run", {})}) for row in every if row["key"] in keys
        ),
        directory=("quick/" if quick else "") + str(table.get("cells", name)),
        reduced=" ".join(str(table.get("reduced", "")).split()),
        notes=tuple(" ".join(str(one).split()) for one in table.get("notes", ())),
        measured_on=tuple(table.get("measured_on", ())),
        is_comparable=table.get("comparable", True),
        is_quick=quick is not None,
        has_quick="quick" in table,
        **_given(table, "measure", "data", "run", "method"),
    )


def _with_runs(rows: list[Table]) -> list[Table]:
    """The rows; one that has the runs of another has its method and settings too."""
    runs = {row["key"]: {name: row[name] for name in RUNS if name in row} for row in rows}
    return [runs[row.get("of", row["key"])] | row for row in rows]


def _row(table: Table) -> Row:
    published = {
        block: {heading: _published(value) for heading, value in numbers.items()}
        for block, numbers in table.get("published", {}).items()
    }
    return Row(
        key=table["key"],
        label=str(table.get("label", table["key"])),
        method=table["method"],
        cells=str(table.get("of", table["key"])),
        settings=table.get("set", {}),
        published=published,
        **_given(table, "columns", "shared", "data", "run", "seeds", "seconds"),
    )


def _given(table: Table, *names: str) -> Table:
    """Return those entries that are in the table; the others have their defaults."""
    return {name: table[name] for name in names if name in table}


def _published(value: Any) -> tuple[float, float | None]:
    return (float(value[0]), float(value[1])) if isinstance(value, list) else (float(value), None)


def _column(heading: str, value: str | Table) -> Column:
    given = {"at": value} if isinstance(value, str) else value
    factor, digits = SHAPES.get(given["at"].rpartition(".")[2], PLAIN)
    return Column(
        heading,
        given["at"],
        float(given.get("factor", factor)),
        int(given.get("digits", digits)),
        bool(given.get("lower", False)),
    )


def _is_table(path: Any) -> bool:
    return path.name.endswith(".toml")
