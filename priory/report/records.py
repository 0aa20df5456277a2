"""A run directory as plain tables: the only place of the report that reads files."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from priory.certificate import Certificate
from priory.core.errors import UsageError
from priory.core.reading import read_bytes
from priory.core.sealed import unsealed
from priory.effects import Effects
from priory.methods import canonical
from priory.report.tables import PARTS
from priory.store import ARCHITECTURES, CERTIFICATES, UNCERTAINTY, RunDirectory
from priory.uncertainty import Uncertainty

SCORES = ("accuracy", "nll", "ece", "brier", "rmse", "coverage_90")


@dataclass(frozen=True, eq=False)
class Record:
    """What a finished run left.

    Attributes:
        path: The run directory.
        manifest: Its settings.
        text: The same as TOML.
        summary: What it ended with.
        lines: One for each evaluation.
        clients: Scores of each client, columns by part.
        uncertainty: What the models do not know; None where it was not measured.
        missing: Why it was not, or the chains were not looked at, and what to do.
        architectures: Scores by model, where clients have several.
        effects: Random effects with R-hat and effective sample size, where the method has chains.
        certificates: Bounds on the error of newcomers, by name, where they were asked for.
    """

    path: Path
    manifest: dict[str, Any]
    text: str
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    clients: dict[str, dict[str, list[Any]]]
    uncertainty: Uncertainty | None = None
    missing: str | None = None
    architectures: dict[str, dict[str, float | None]] | None = None
    effects: Effects | None = None
    certificates: dict[str, Certificate] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Registered name of the method."""
        return str(self.manifest["method"].get("name", self.summary["method"]))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.manifest["run"].get("seed", 0))


def find(places: Iterable[Path | str]) -> tuple[list[Path], list[Path]]:
    """The run directories that the places are or hold, each once, and those among the held that are not finished."""
    finished: list[Path] = []
    open_: list[Path] = []
    for place in map(Path, places):
        place = place.parent if place.name == "manifest.toml" else place
        if (place / "manifest.toml").exists():
            finished.append(place)
            continue
        held = _held(place)
        if not held:
            raise UsageError(
                f"{place} holds no run, since there is no manifest.toml in it or in a directory below; "
                "name the directory of a run or of a comparison."
            )
        done = [path for path in held if (path / "summary.json").exists()]
        if not done:
            raise UsageError(f"{place} holds no finished run; end one with `priory resume {held[0]}`.")
        finished += done
        open_ += [path for path in held if path not in done]
    once = {path.resolve(): path for path in reversed(finished)}  # the first name of a run stays
    return [path for path in finished if once[path.resolve()] is path], open_


def read(path: Path) -> Record:
    """The record of a finished run; raises `UsageError` on what is damaged, unfinished or no run."""
    directory = RunDirectory(path)
    manifest = canonical(directory.manifest())
    for part in ("method", "run", "data"):
        if not isinstance(manifest.get(part), dict):
            raise UsageError(f"{path}/manifest.toml has no [{part}] table, so it is no run; name another directory.")
    summary = directory.summary()
    if summary is None:
        raise UsageError(f"{path} is not finished, and a report is of finished runs; end it: priory resume {path}.")
    directory.committed()  # a commit that cannot be read means a damaged run
    lines, clients = directory.metrics(), directory.per_client()
    _check(path, manifest, summary, lines, clients)
    uncertainty = _kept(directory, summary["rounds"])
    return Record(
        path=path,
        manifest=manifest,
        text=tomli_w.dumps(manifest),
        summary=summary,
        lines=lines,
        clients=clients,
        uncertainty=uncertainty,
        architectures=directory.read(ARCHITECTURES) or summary["extra"].get("architectures"),
        certificates=_certified(directory, summary["rounds"]),
    )


def _held(place: Path) -> list[Path]:
    """The runs in a directory, in the order of a comparison there, then by name with 2 before 10."""
    if not place.is_dir():
        return []
    held = [path.parent for path in place.glob("*/manifest.toml")]
    order = _compared(place / "comparison.json")

    def rank(path: Path) -> tuple[int, list[tuple[int, str]]]:
        words = [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", path.name)]
        return (order.index(path.name) if path.name in order else len(order)), words

    return sorted(held, key=rank)


def _compared(path: Path) -> list[str]:
    """The names of the runs of a comparison, none where there is no such file."""
    try:
        methods = unsealed(read_bytes(path))["methods"] if path.exists() else []
        return [run["path"] for method in methods for run in method["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is damaged; delete it, and runs are shown in the order of their names.") from None


def _kept(directory: RunDirectory, rounds: int) -> Uncertainty | None:
    """The uncertainty on file, if this version reads it and it is of the run's end."""
    table = directory.read(UNCERTAINTY)
    try:
        found = None if table is None else Uncertainty.from_json(table)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if found is not None and found.rounds == rounds else None


def _certified(directory: RunDirectory, rounds: int) -> dict[str, Certificate]:
    """The certificates on file that are of the run's end."""
    try:
        found = {name: Certificate.from_json(one) for name, one in (directory.read(CERTIFICATES) or {}).items()}
        return {name: one for name, one in found.items() if one.rounds == rounds}
    except (KeyError, TypeError):
        raise UsageError(
            f"{directory.path}/certificates.json holds no certificates of this version; ask for them again."
        ) from None


def _check(path: Path, manifest: Any, summary: Any, lines: Any, clients: Any) -> None:
    """Raises `UsageError` unless the files have the shape that this library writes."""

    def demand(right: bool, file: str, what: str) -> None:
        if not right:
            raise UsageError(f"{path}/{file} {what}, so it is not of this library, or damaged; name another run.")

    demand(isinstance(manifest["run"].get("seed", 0), int), "manifest.toml", "has a seed that is no whole number")
    wanted = {"method": str, "rounds": int, "communication": dict, "seconds": dict, "extra": dict}
    for name, kind in wanted.items():
        demand(isinstance(summary.get(name), kind), "summary.json", f"has no {name}")
    demand({"down_bytes", "up_bytes"} <= summary["communication"].keys(), "summary.json", "has no bytes")
    demand(all(map(_is_number, summary["seconds"].values())), "summary.json", "has seconds that are no numbers")
    for part in PARTS:
        demand(_are_scores(summary.get(part)), "summary.json", f"has no scores under {part}")
    for line in lines:
        demand(all(_are_scores(line.get(part)) for part in PARTS), "metrics.jsonl", "has a foreign line")
        demand(isinstance(line.get("info", {}), dict), "metrics.jsonl", "has a foreign line")
    demand(all(map(_are_columns, clients.values())), "clients.json", "has no columns")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _are_scores(scores: Any) -> bool:
    if scores is None:
        return True
    if not isinstance(scores, dict) or not isinstance(scores.get("clients", {}), dict) or "nll" not in scores:
        return False
    spread = scores.get("clients", {}).values()
    return all(_is_number(scores.get(name)) for name in SCORES) and all(map(_is_number, spread))


def _are_columns(columns: Any) -> bool:
    if not isinstance(columns, dict) or not isinstance(columns.get("client"), list):
        return False
    num = len(columns["client"])
    return all(isinstance(column, list) and len(column) == num for column in columns.values())
