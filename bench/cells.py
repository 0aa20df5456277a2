"""Cells of a table: one run each, kept as a JSON file of its own with the command that makes it again."""

import json
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import priory
from priory.cli.compare import methods_from
from priory.engine.run import NEWCOMERS


@dataclass(frozen=True)
class Column:
    """One number of a summary: the path to it, and how it is written."""

    path: tuple[str, ...]
    factor: float
    digits: int


SHOWN = {
    "global accuracy": Column(("global", "clients", "mean"), 100, 2),
    "personal accuracy": Column(("personal", "clients", "mean"), 100, 2),
    "personal NLL": Column(("personal", "nll"), 1, 4),
    "personal ECE": Column(("personal", "ece"), 1, 4),
    "worst client": Column(("personal", "clients", "worst"), 100, 2),
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        path: Where its summary is kept.
        spec: The method as `priory compare` spells it, NAME[:FIELD=VALUE,...].
        shared: Fields given to every method of the table.
        data: Name of the data set.
        partition: Arguments of `partition`, `spec` among them.
        settings: Settings of the run.
        measure: More figures of a finished run, kept under `measured`.
    """

    path: Path
    spec: str
    shared: dict[str, Any]
    data: str
    partition: dict[str, Any]
    settings: dict[str, Any]
    measure: Callable[[Any], dict[str, float]] | None = None

    @property
    def method(self) -> Any:
        return methods_from([self.spec], dict(self.shared))[self.spec]

    @property
    def is_current(self) -> bool:
        """Whether it was run with the settings that the method has today, for as many rounds."""
        if not self.path.exists():
            return False
        kept = json.loads(self.path.read_text())
        return kept["settings"] == repr(self.method) and kept["rounds"] == self.settings["rounds"]

    @property
    def command(self) -> str:
        """The command that makes the run again."""
        name, _, own = self.spec.partition(":")
        fields = dict(item.split("=", 1) for item in filter(None, own.split(",")))
        partition = dict(self.partition)
        flags = {
            **fields,
            "data": self.data,
            "partition": partition.pop("spec"),
            "data-seed": partition.pop("seed"),
            **partition,
            **self.settings,
            **self.shared,
        }
        words = ["priory", "run", name]
        for flag, value in flags.items():
            for one in value if isinstance(value, tuple) else (value,):
                words += [f"--{flag.replace('_', '-')}"] + ([] if one in (True, "True") else [str(one)])
        return shlex.join(words)

    def run(self) -> None:
        """Run it and keep its summary."""
        federation = priory.data.load(self.data).partition(**self.partition)
        done = priory.simulate(self.method, federation, **self.settings)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        origin = {"command": self.command, "settings": repr(self.method), "version": priory.__version__}
        origin["data_checksum"] = federation.checksum
        summary = {**done.summary(), "curve": [curve_point(line) for line in done.history]}
        if self.measure is not None:
            summary["measured"] = self.measure(done)
        self.path.write_text(json.dumps({**origin, **summary}, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())


def main_score(scores: dict[str, Any]) -> str:
    return "accuracy" if "accuracy" in scores else "rmse"


def curve_point(line: dict[str, Any]) -> dict[str, float]:
    """Round, and the accuracy (of a regression, RMSE) of each part that was scored at one evaluation."""
    parts = [part for part in ("personal", "global", *NEWCOMERS) if line.get(part)]
    return {"round": line["round"], **{part: round(line[part][main_score(line[part])], 4) for part in parts}}


def run_missing(cells: Sequence[Cell], seconds: float, estimate_only: bool) -> None:
    """Run the cells that are not there, or only say how long that would take at so many seconds each."""
    missing = [cell for cell in cells if not cell.is_current]
    print(f"{len(missing)} cells to run, about {len(missing) * seconds / 60:.0f} minutes on two cores", flush=True)
    for cell in [] if estimate_only else missing:
        started = time.perf_counter()
        cell.run()
        print(f"{cell.path.name}  {time.perf_counter() - started:.0f} s", flush=True)


def values(summaries: list[dict[str, Any]], column: Column) -> list[float] | None:
    """The column's number of each summary; None where a method has no such number."""
    found = []
    for value in summaries:
        for part in column.path:
            value = value.get(part)
            if value is None:
                return None
        found.append(column.factor * value)
    return found


def mean_of(summaries: list[dict[str, Any]], column: Column) -> str:
    found = values(summaries, column)
    return "–" if found is None else written(found, column)


def difference(own: list[dict[str, Any]], other: list[dict[str, Any]], column: Column) -> str:
    """The mean of paired differences with its standard error."""
    first, second = values(own, column), values(other, column)
    if first is None or second is None:
        return "–"
    return written([a - b for a, b in zip(first, second, strict=True)], column, sign=True)


def written(numbers: list[float], column: Column, sign: bool = False) -> str:
    text = f"{statistics.mean(numbers):{'+' if sign else ''}.{column.digits}f}"
    if len(numbers) == 1:
        return text
    return f"{text} ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.{column.digits}f}"
