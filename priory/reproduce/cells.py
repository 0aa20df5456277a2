"""Cells of a table: one run each, kept as a JSON file of its own with its manifest and the command that makes it."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from priory import data, methods
from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.core.reading import parse_json, read_text
from priory.data import Federation
from priory.engine import Listener, Settings, check, manifest, resume, settings, simulate
from priory.engine.evaluator import NEWCOMERS
from priory.engine.run import Run
from priory.fed import schedule
from priory.fed.method import Method
from priory.reproduce import measures
from priory.reproduce.definition import Block, Definition, Row
from priory.store import RunDirectory

NONE = "none"  # TOML has no word for it
RUNNING = ".running"  # where runs that are not finished keep their checkpoints


class Federations:
    """Federations by what was asked for; the last one is kept, since the cells of a block share it."""

    def __init__(self) -> None:
        self._asked, self._made = "", None  # type: tuple[str, Federation | None]

    def __call__(self, spec: dict[str, Any]) -> Federation:
        """The federation of a data table."""
        asked = json.dumps(spec, sort_keys=True)
        if self._made is None or asked != self._asked:
            self._made = None  # before the next one is made: two at once may not fit
            self._asked, self._made = asked, data.from_spec(spec)
        return self._made


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    definition: Definition
    block: Block
    row: Row
    seed: int
    out: Path

    @property
    def path(self) -> Path:
        """Where its summary is kept."""
        words = [self.row.cells, str(self.seed)]
        if len(self.block.title) > 0:
            words.insert(0, self.block.key)
        return self.out / self.definition.directory / f"{'-'.join(words)}.json"

    @property
    def name(self) -> str:
        """The table and the name of the file."""
        return f"{self.definition.name} {self.path.stem}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """The seeds of a method differ in nothing that is checked."""
        return self.definition.name, self.block.key, self.row.cells

    @cached_property
    def method(self) -> Any:
        """The method with its settings."""
        shared = self.definition.method | self.block.method if self.row.shared else {}
        return _method(self.row.method, shared | self.row.settings)

    @cached_property
    def settings(self) -> Settings:
        """How it is run."""
        asked = self.definition.run | self.block.run | self.row.run
        return settings.make({"eval_every": 0, **asked, "seed": self.seed})

    @property
    def data(self) -> dict[str, Any]:
        """The data set and the arguments of its partition."""
        asked = self.definition.data | self.block.data | self.row.data
        return {**asked, "data": str(asked["data"]).format(seed=self.seed), "seed": self.seed}

    @property
    def command(self) -> str:
        """The command that makes the run again."""
        given: dict[str, Any] = {"data_seed" if name == "seed" else name: value for name, value in self.data.items()}
        usual = dataclasses.asdict(Settings())
        given |= {name: value for name, value in dataclasses.asdict(self.settings).items() if value != usual[name]}
        words = ["priory", "run", self.row.method, *_flags(_changed(self.method)), *_flags(given)]
        return shlex.join(words)

    def kept(self) -> dict[str, Any] | None:
        """What the run ended with; None where it was not run, or with other settings."""
        if not self.path.exists():
            return None
        try:
            found: dict[str, Any] = parse_json(read_text(self.path))
            there = found["manifest"]
            same = (
                manifest.read_method(there, self.path, trust_code=False) == self.method
                and _is_as_asked(settings.make(there["run"]), self.settings)
                and there["data"] == self.data
                and (self.definition.measure is None or "measured" in found)
            )
        except (ValueError, KeyError, TypeError, UsageError):
            return None
        return found if same else None

    def check(self, federations: Federations) -> None:
        """Raise whatever `run` would raise before its first round."""
        federation = federations(self.data)
        self._check_data(federation)
        check(self.method, federation, **dataclasses.asdict(self.settings))

    def run(
        self, federations: Federations, listener: Listener | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any] | None:
        """What the run ended with, written to its file; None if it was stopped, and then it goes on from there."""
        federation, place = federations(self.data), self.path.parent / RUNNING / self.path.stem
        self._check_data(federation)
        if (place / "manifest.toml").exists() and self._is_same(place, federation):
            run = resume(place, federation=federation, listener=listener, stop=stop)
        else:
            shutil.rmtree(place, ignore_errors=True)
            asked = dataclasses.asdict(self.settings)
            run = simulate(self.method, federation, out=place, listener=listener, stop=stop, **asked)
        if not run.is_finished:
            return None
        found = self._record(run, RunDirectory(place).manifest()["environment"])
        write_atomically(self.path, json.dumps(found, indent=1) + "\n")
        shutil.rmtree(place, ignore_errors=True)
        return found

    def _check_data(self, federation: Federation) -> None:
        """Raise where a method beside this one, with the same data and seed, was given other examples."""
        for row in self.definition.rows:
            beside = dataclasses.replace(self, row=row)
            found = beside.kept() if row.key in self.block.rows and beside.data == self.data else None
            made_of = found["manifest"]["environment"].get("data_checksum") if found is not None else None
            if made_of is not None and made_of != federation.checksum:
                raise UsageError(
                    f"{beside.path} was made of other examples than {self.data['data']} has here, so that this run "
                    "would not compare with it; choose another --out."
                )

    def _is_same(self, place: Path, federation: Federation) -> bool:
        """Whether the directory holds this very run; what is left of an older definition does not count."""
        try:
            recipe = manifest.read(RunDirectory(place).manifest(), federation)
        except UsageError:
            return False
        return recipe.method == self.method and recipe.settings == self.settings

    def _record(self, run: Run, environment: dict[str, Any]) -> dict[str, Any]:
        table = manifest.describe(self.method, run.federation, self.settings, has_model=True)
        measure = self.definition.measure
        return {
            "table": self.definition.name,
            "manifest": {"method": table["method"], "run": table["run"], "data": self.data, "environment": environment},
            "command": self.command,
            **run.summary(),
            "curve": [_curve_point(line) for line in run.history],
            **({"measured": measures.of(measure, run)} if measure else {}),
        }


def cells_of(definition: Definition, out: Path) -> list[Cell]:
    """The cells of a table, seed by seed within a block, so that methods are paired early."""
    return [
        Cell(definition, block, row, seed, out)
        for block in definition.blocks
        for seed in range(block.seeds)
        for row in definition.rows
        if row.key in block.rows and (row.seeds is None or seed < row.seeds)
    ]


def _method(name: str, flat: dict[str, Any]) -> Any:
    """The method with settings given by flag name."""
    method = methods.get(name)()
    paths = schedule.paths_of(method)
    for key, value in flat.items():
        path = paths.get(key.replace("-", "_"))
        if path is None:
            raise UsageError(f"{key} is not a setting of {name}; choose from {', '.join(paths)}.")
        usual = schedule.get(method, path)
        is_none = value == NONE and not isinstance(usual, str)
        method = schedule.put(method, path, None if is_none else manifest.like(usual, value, key))
    return method


def _changed(method: Method) -> dict[str, Any]:
    """The settings of a method that are not its defaults, by flag name."""
    default, paths = type(method)(), schedule.paths_of(method)
    values = {name: (schedule.get(method, path), schedule.get(default, path)) for name, path in paths.items()}
    return {name: value for name, (value, usual) in values.items() if value != usual}


def _flags(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            yield from (f"--{flag}", str(one))


def _is_as_asked(found: Settings, asked: Settings) -> bool:
    """Whether runs are the same; one that was scored on the way more often than is asked has the same numbers."""
    if asked.eval_every == 0 or (found.eval_every and asked.eval_every and asked.eval_every % found.eval_every == 0):
        found = dataclasses.replace(found, eval_every=asked.eval_every)
    return found == asked


def _curve_point(line: dict[str, Any]) -> dict[str, float]:
    """Round, and the accuracy (of a regression, RMSE) of each part that was scored at one evaluation."""
    parts = [part for part in ("personal", "global", *NEWCOMERS) if line.get(part)]
    score = "accuracy" if any("accuracy" in line[part] for part in parts) else "rmse"
    return {"round": line["round"], **{part: round(line[part][score], 4) for part in parts}}
