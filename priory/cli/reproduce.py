"""`priory reproduce`: a published table again, ours beside theirs."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from priory import report, reproduce
from priory.cli import flags, progress, start
from priory.cli.app import DIVERGED, INTERRUPTED
from priory.cli.failures import Failures
from priory.cli.flags import Flag
from priory.cli.run import check_seeds
from priory.core.errors import UsageError
from priory.core.files import check_writable, write_atomically
from priory.data import describe
from priory.engine import grid
from priory.engine.divergence import is_diverged
from priory.engine.grid import Control
from priory.reproduce import guard, pages
from priory.reproduce.cells import Cell, Federations, cells_of
from priory.reproduce.definition import Definition
from priory.reproduce.numbers import Filled, fill

TEXT = (
    "Make published tables again, ours beside theirs, with standard errors. Every run is kept as a JSON file of its "
    "own with its manifest; the same command goes on where it was left, and ends with a Markdown and an HTML page. All "
    "runs are checked before the first one starts, and if one fails later, the others finish. "
    "`priory reproduce --list` names the tables."
)
TABLES = Flag("table", (), tuple[str, ...], (), "Names of tables, or all.", placed="[NAME ...]")
REFUTED = 1  # the exit code of a guard that found something


@dataclass(frozen=True)
class Options:
    """What is made, and where it goes.

    Attributes:
        list: List the tables with what is there already and the time that the rest would take.
        quick: Run the short form, which guards against regressions and is not comparable with the paper.
        seeds: Seeds of every cell; by default as many as the table has.
        minutes: Begin no run after so many; the same command goes on later.
        estimate: Only say what is missing and about how long it would take.
        out: Directory of the cells and pages, one directory a table.
        guard: Directory with cells of the same tables: exit with 1 where a number is further off than seeds explain.
        devices: Host devices that share the clients; one for each core by default (CPU only).
    """

    list: bool = False
    quick: bool = False
    seeds: int | None = None
    minutes: float | None = None
    estimate: bool = False
    out: str = "results"
    guard: str | None = None
    devices: int | None = None


def reproduce_command(argv: Sequence[str]) -> int:
    """The exit code of `priory reproduce`."""
    groups = {
        "tables": flags.group("tables", "", [TABLES]),
        "options": flags.group("options", "", flags.flags_of(Options())),
    }
    values = flags.parse(groups, argv, prog="priory reproduce", text=TEXT)
    options, named = Options(**values["options"]), values["tables"]["table"]
    if options.list:
        console = report.console()
        console.print(_listing(Path(options.out)))
        console.print("\nMinutes are those that are left, on the machine that measured the cells. ", end="")
        console.print("`priory reproduce NAME` makes a table, `--quick` a small one.")
        return 0
    if not named:
        raise UsageError("There is no table to make; name some, or see `priory reproduce --list`.")
    definitions = _definitions(named, options)
    _check(options, definitions)
    cells = _once(cell for one in definitions for cell in cells_of(one, Path(options.out)))
    missing = _told(cells)
    if options.estimate:
        return 0
    code, failures = 0, Failures()
    if missing:
        _check_data(definitions)
        check_writable(Path(options.out))
        start.start_jax(options.devices)
        code = _run_all(missing, options.minutes, failures)
    for one in definitions:
        filled = fill(one, Path(options.out))
        _show(filled)
        report.say(f"written: {_write(filled, Path(options.out))}")
        if options.guard is not None and code != INTERRUPTED:
            code = max(code, _guard(one, options))
    if code != INTERRUPTED:
        failures.conclude(f"of {len(missing)} runs")
    return code


def _definitions(named: Sequence[str], options: Options) -> list[Definition]:
    found = reproduce.names() if list(named) == ["all"] else list(dict.fromkeys(named))
    if "all" in found:
        raise UsageError("all stands for every table, and others are named beside it; give it alone.")
    every = [reproduce.read(name) for name in found]  # an unknown name is told before anything else
    if options.seeds is not None:
        check_seeds(options.seeds, 0, sum(len(list(one.places())) for one in every))
    if list(named) == ["all"] and options.quick:
        found = [one.name for one in every if one.has_quick]
    return [reproduce.read(name, options.quick, options.seeds) for name in found]


def _check(options: Options, definitions: Sequence[Definition]) -> None:
    if options.minutes is not None and not options.minutes > 0:
        raise UsageError(f"minutes={options.minutes:g} leaves no time for a run; choose more than 0.")
    if options.guard is not None:
        if Path(options.guard).resolve() == Path(options.out).resolve():
            raise UsageError(
                f"guard={options.guard} is where the cells go, which proves nothing; choose another --out."
            )
        for one in definitions:
            guard.check(one, Path(options.guard))


def _check_data(definitions: Sequence[Definition]) -> None:
    here = {entry.name for entry in describe() if entry.available}
    for one in definitions:
        lacking = [name for name in one.data_sets if name not in here]
        if lacking:
            raise UsageError(
                f"{one.name} needs {' and '.join(lacking)}, which cannot be found; set PRIORY_DATA to the directory "
                "with the files (see `priory datasets`)."
            )


def _once(cells: Iterable[Cell]) -> list[Cell]:
    """The cells without those that another row or table has too."""
    found: dict[Path, Cell] = {}
    for cell in cells:
        found.setdefault(cell.path, cell)
    return list(found.values())


def _told(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that are missing, after saying how many and how long they take."""
    missing = [cell for cell in cells if cell.kept() is None]
    minutes = sum(seconds_of(cell) for cell in missing) / 60
    rest = f"; the others take about {_minutes(minutes)} minutes" if missing else ""
    report.console().print(f"{len(cells) - len(missing)} of {len(cells)} runs are there{rest}")
    return missing


def seconds_of(cell: Cell) -> float:
    """About how long a cell takes: as long as its row did with another seed, else what the definition says."""
    for seed in range(cell.block.seeds):
        found = Cell(cell.definition, cell.block, cell.row, seed, cell.out).kept()
        if found is not None:
            return float(sum(found["seconds"].values()))
    return cell.row.seconds or cell.definition.seconds


def _run_all(missing: Sequence[Cell], minutes: float | None, failures: Failures) -> int:
    """Check the cells, run them, note those that fail, and return the exit code."""
    federations = Federations()
    expected = [seconds_of(cell) for cell in missing]
    labels = [f"{place + 1}/{len(missing)} {cell.name}" for place, cell in enumerate(missing)]
    grid.check(missing, lambda cell: cell.check(federations))
    began = time.monotonic()

    def run(place: int, cell: Cell) -> dict[str, Any] | None:
        with progress.watching(labels[place]) as watcher:
            return cell.run(federations, watcher, stop)

    def done(place: int) -> None:
        pace = (time.monotonic() - began) / sum(expected[: place + 1])
        left = pace * sum(expected[place + 1 :]) / 60
        report.say(f"{labels[place]}: about {_minutes(left)} minutes left")

    with progress.interruptible() as stop:
        ended = grid.run(missing, run, Control(stop, failures.noted), done, None if minutes is None else 60 * minutes)
    if ended.stopped is not None:
        over = f"The time is over with {len(missing) - ended.stopped} runs left; the same command goes on."
        report.console().print("Stopped; the same command goes on from there." if stop() else over)
        return INTERRUPTED
    return DIVERGED if any(is_diverged(found) for _, found in ended.results) else 0


def _write(filled: Filled, out: Path) -> Path:
    """The Markdown page, which stands beside the HTML page."""
    place = out / ("quick" if filled.definition.is_quick else "") / filled.definition.name
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / "table.html", pages.html(filled))
    write_atomically(place / "table.md", pages.markdown(filled))
    return place / "table.md"


def _show(filled: Filled) -> None:
    console = report.console()
    console.print()
    console.print(f"{filled.definition.name}: {filled.definition.title}")
    for part in filled.parts:
        header, rows = pages.grid(part)
        table = Table(title=part.block.title or None, title_justify="left", box=None)
        for place, word in enumerate(header):
            table.add_column(word, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in pages.lines(filled):
        console.print(f"- {line}")


def _guard(definition: Definition, options: Options) -> int:
    assert options.guard is not None
    found = guard.deviations(definition, Path(options.out), Path(options.guard))
    for line in found:
        report.say(f"DEVIATES {line}")
    if not found:
        report.console().print(f"{definition.name} is within what seeds explain of {options.guard}")
    return REFUTED if found else 0


def _listing(out: Path) -> Table:
    table = Table(box=None)
    for heading in ("name", "what", "data", "runs", "minutes"):
        table.add_column(heading, justify="right" if heading in ("runs", "minutes") else "left")
    for name in reproduce.names():
        one = reproduce.read(name)
        cells = _once(cells_of(one, out))
        missing = [cell for cell in cells if cell.kept() is None]
        minutes = _minutes(sum(seconds_of(cell) for cell in missing) / 60)
        table.add_row(name, one.title, ", ".join(one.data_sets), f"{len(cells) - len(missing)}/{len(cells)}", minutes)
    return table


def _minutes(value: float) -> str:
    return str(math.ceil(max(value, 0.0)))
