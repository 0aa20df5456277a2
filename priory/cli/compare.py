"""`priory compare`: several methods on the same federation with the same seeds, in one table."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from priory import methods, report, track
from priory import tune as tuner
from priory.cli import federation, flags, progress, start
from priory.cli.app import DIVERGED, INTERRUPTED
from priory.cli.failures import Failures
from priory.cli.flags import Flag
from priory.cli.run import (
    DATA_GROUP,
    RUN_GROUP,
    Tool,
    check_seeds,
    free_path,
    run_flags,
    settings_from,
    settled,
    write_report,
)
from priory.core.errors import UsageError
from priory.core.files import check_writable, write_atomically
from priory.core.reading import read_bytes
from priory.core.sealed import sealed, unsealed
from priory.data import Federation
from priory.engine import Settings, grid, manifest, resume, simulate
from priory.engine.divergence import is_diverged
from priory.engine.grid import Control
from priory.fed import schedule
from priory.fed.local import Optimiser, Work
from priory.fed.method import Method
from priory.store import RunDirectory

TEXT = (
    "Train several methods on the same federation with the same seeds and print one table. A method is a name of "
    "`priory methods`, path/file.py:Class or package.module:Class, with settings of its own by flag name where wanted: "
    "fedprox:mu=0.1,step-size=0.05 or ./mine.py:Mine:mu=0.1. All methods "
    "are checked before the first is trained, and if one fails later, the others finish and are printed. Finished "
    "runs are loaded and stopped ones resumed, so the same command goes on where it was left."
)
LOCAL_GROUP = "Optimiser and local work of all methods; a setting written behind a method overrides it."
METHODS = Flag(
    "method",
    (),
    tuple[str, ...],
    flags.REQUIRED,
    "What is compared; the first is the reference of paired differences.",
    placed="METHOD[:FIELD=VALUE,...]",
)


@dataclass(frozen=True)
class Output:
    """Where the comparison goes.

    Attributes:
        seeds: How many seeds; several give standard errors and paired differences to the first method.
        out: Directory for comparison.json and the run directories; runs/compare-DATA by default.
        devices: Host devices that share the clients; one for each core by default (CPU only).
        track: Tool that every run which is not finished yet is sent to besides (an extra of that name).
        report: Write report.html there at the end.
    """

    seeds: int = 1
    out: str | None = None
    devices: int | None = None
    track: Tool | None = None
    report: bool = False


@dataclass(frozen=True)
class Cell:
    """One run of a comparison, kept in a run directory.

    Attributes:
        name: Label of its method, of which no further run is made once one has failed.
    """

    name: str
    method: Method
    data: Federation
    settings: Settings
    path: Path

    @property
    def kind(self) -> str:
        """The seeds of a method differ in nothing that is checked."""
        return self.name

    def kept(self) -> dict[str, Any] | None:
        """Return the summary of this very run if it is finished; raise if the directory holds another one."""
        directory = RunDirectory(self.path)
        if not (self.path / "manifest.toml").exists():
            return None
        asked = manifest.identity(self.method, self.data, self.settings)
        manifest.check_same(asked, directory.manifest(), self.path, "run")
        return directory.summary()

    def check(self) -> None:
        """Raise whatever `run` would raise before its first round."""
        tuner.check(self.method, self.data, **dataclasses.asdict(self.settings))

    def run(self, method: Method, label: str, **how: Any) -> dict[str, Any] | None:
        """Return the summary of the run, which begins or goes on; None if it was stopped."""
        with progress.watching(label) as watcher:
            if (self.path / "manifest.toml").exists():
                # `kept` has compared the manifest with the command, so its model was typed by the user.
                known: dict[str, Any] = {"federation": self.data, "method": method}
                run = resume(self.path, listener=watcher, trust_code=True, **known, **how)
            else:
                settings = dataclasses.asdict(self.settings)
                run = simulate(method, self.data, out=self.path, listener=watcher, **how, **settings)
        return run.summary() if run.is_finished else None


@dataclass(frozen=True)
class Outcome:
    """How the runs of a comparison ended.

    Attributes:
        summaries: Those of the methods whose runs all finished, by label.
        failures: What went wrong, by label.
        stopped: The run during which Ctrl-C was pressed.
    """

    summaries: dict[str, list[dict[str, Any]]]
    failures: Failures
    stopped: Cell | None

    @property
    def diverged(self) -> list[str]:
        """The methods of which the training of a run diverged."""
        return [label for label, found in self.summaries.items() if any(map(is_diverged, found))]


def compare(argv: Sequence[str]) -> int:
    """The exit code of `priory compare`."""
    local = [flags.optional(flag) for flag in (*flags.flags_of(Optimiser()), *flags.flags_of(Work()))]
    values = flags.parse(
        {
            "compared": flags.group("compared", "", [METHODS]),
            "local": flags.group("local", LOCAL_GROUP, local),
            "data": flags.group("data", DATA_GROUP, federation.data_flags()),
            "run": flags.group("run", RUN_GROUP, run_flags()),
            "output": flags.group("output", "", flags.flags_of(Output())),
        },
        argv,
        prog="priory compare",
        text=TEXT,
    )
    output = Output(**values["output"])
    track.check(output.track)
    shared = {name: value for name, value in values["local"].items() if value is not None}
    named = methods_from(values["compared"]["method"], shared)
    check_seeds(output.seeds, values["run"]["seed"], len(named))
    if output.report:  # before anything is computed
        report.check_drawing()
    start.import_typed(values["run"])
    start.start_jax(output.devices)
    chosen = federation.from_values(values["data"])
    data, settings = chosen.federation(), settings_from(values["run"], chosen)
    directory = Path(output.out or Path("runs") / f"compare-{Path(data.name).stem}")
    settings.check(data.num_clients)
    cells = _with_recorded_clusters(list(_cells(named, data, settings, output.seeds, directory)))
    outcome = _run_all(cells, directory, output.track)
    finished = [cell for cell in cells if cell.name in outcome.summaries]
    if finished:
        _show(outcome, cells, directory)
    if outcome.stopped is not None:
        report.say(f"Stopped; the same command goes on from the checkpoint in {outcome.stopped.path}.")
        return INTERRUPTED
    if finished and output.report:
        write_report([cell.path for cell in finished], directory / "report.html", trust_code=True)  # as in `Cell.run`
    outcome.failures.conclude(f"of {len(named)} methods")
    return DIVERGED if outcome.diverged else 0


def methods_from(texts: Sequence[str], shared: dict[str, Any]) -> dict[str, Any]:
    """The methods by label, each with the shared settings and then its own."""
    if not texts:
        raise UsageError(f"There is no method to compare; name some of {', '.join(methods.names())}.")
    named: dict[str, Any] = {}
    for text in texts:
        name, settings = _split(text)
        if text in named:
            raise UsageError(f"{text} is named twice; give it other settings, such as {name}:epochs=2.")
        method = start.typed_method(name)
        for key in shared:
            flags.find(method, key.replace("_", "-"), name)
        own = dict(_own_settings(method, name, settings))
        named[text] = flags.build(method, shared | own)
    return named


def _split(text: str) -> tuple[str, str]:
    """Return a method, whose own name may contain one colon, and the settings behind it."""
    parts = text.split(":")
    words = 2 if parts[0] not in methods.names() and methods.is_code(":".join(parts[:2])) else 1
    return ":".join(parts[:words]), ":".join(parts[words:])


def _own_settings(method: Method, name: str, text: str) -> Iterator[tuple[str, Any]]:
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{item!r} in {name}:{text} is not FIELD=VALUE; write for example {name}:step-size=0.05.")
        flag = flags.find(method, key.strip(), name)
        yield flag.name, flags.read_value(flag, value.strip())


def _cells(named: dict[str, Any], data: Federation, settings: Settings, seeds: int, directory: Path) -> Iterator[Cell]:
    folders: dict[str, str] = {}
    for label, method in named.items():
        folder = label.removeprefix("./").replace(":", "-").replace("/", "_")
        folder = f"_{folder}" if folder.startswith(".") else folder  # which would be hidden
        if (other := folders.setdefault(folder, label)) != label:
            raise UsageError(f"{other} and {label} would have one directory, {folder}; rename one of the files.")
        for seed in range(settings.seed, settings.seed + seeds):
            yield Cell(label, method, data, dataclasses.replace(settings, seed=seed), directory / f"{folder}-s{seed}")


def _with_recorded_clusters(cells: list[Cell]) -> list[Cell]:
    """The cells, with the number of clusters that was chosen for `clusters=auto` where a run records it."""
    chosen: dict[str, Any] = {}
    for cell in cells:
        if tuner.is_open(cell.method) and (cell.path / "manifest.toml").exists():
            number = RunDirectory(cell.path).manifest().get("method", {}).get("clusters")
            if isinstance(number, int):
                chosen.setdefault(cell.name, schedule.put(cell.method, ("clusters",), number))
    return [dataclasses.replace(cell, method=chosen.get(cell.name, cell.method)) for cell in cells]


def _run_all(cells: list[Cell], directory: Path, tool: str | None) -> Outcome:
    """Check every run that is not finished, then make or finish each, up to one that is stopped."""
    failures = Failures()
    kept = {cell.path: cell.kept() for cell in cells}
    missing = [cell for cell in cells if kept[cell.path] is None]
    if missing:
        check_writable(directory)
    grid.check(missing, Cell.check)
    report.say(f"{len(cells)} runs on {cells[0].data.describe()}")
    if len(missing) < len(cells):
        loaded = f"{len(cells) - len(missing)} of them are finished already and are loaded from {directory}."
        report.console().print(loaded)
    chosen: dict[str, Any] = {}
    has_seeds = len({cell.settings.seed for cell in cells}) > 1

    def run(place: int, cell: Cell) -> dict[str, Any] | None:
        del place
        if cell.name not in chosen:
            chosen[cell.name] = settled(cell.method, cell.data, cell.settings, stop)
        if chosen[cell.name] is None:  # stopped while the number of clusters was being chosen
            return None
        label = f"{cell.name} seed {cell.settings.seed}" if has_seeds else cell.name
        return cell.run(chosen[cell.name], label, stop=stop, track=tool)

    with progress.interruptible() as stop:
        ended = grid.run(missing, run, Control(stop, failures.noted))
    kept |= {cell.path: summary for cell, summary in ended.results}
    by_label: dict[str, list[Any]] = {}
    for cell in cells:
        by_label.setdefault(cell.name, []).append(kept[cell.path])
    summaries = {label: found for label, found in by_label.items() if None not in found}  # means are over all seeds
    return Outcome(summaries, failures, None if ended.stopped is None else missing[ended.stopped])


def _show(outcome: Outcome, cells: list[Cell], directory: Path) -> None:
    """Print the tables of the methods that finished, and write them unless the comparison was stopped."""
    console, records = report.console(), report.compare(outcome.summaries)
    seeds = sorted({cell.settings.seed for cell in cells})
    for table in report.comparison_tables(records, len(seeds), console.width):
        console.print()
        console.print(table)
    console.print()
    if len(seeds) > 1:
        console.print(f"Means over {len(seeds)} seeds ± standard error; differences are paired by seed.")
    console.print(
        "Bytes are per client and round; from NLL to the worst client, scores are those of the personal models."
    )
    if any(record["communication"]["down_bytes"] is None for record in records):
        console.print("A reference is trained on the data of all clients in one place, which a federation cannot do.")
    if outcome.stopped is None:
        written = _write(records, outcome.failures, cells, directory)
        report.say(f"comparison: {written}")
    if outcome.diverged:
        report.say(f"diverged: {', '.join(outcome.diverged)}")


def _write(records: list[dict[str, Any]], failures: Failures, cells: list[Cell], directory: Path) -> Path:
    """Write the comparison and return its file."""
    for record in records:
        record["runs"] = [
            {"seed": cell.settings.seed, "path": cell.path.name} for cell in cells if cell.name == record["label"]
        ]
    comparison = {
        "federation": cells[0].data.describe(),
        "data": cells[0].data.spec,
        "seeds": sorted({cell.settings.seed for cell in cells}),
        "asked": list(dict.fromkeys(cell.name for cell in cells)),
        "methods": records,
        "failed": failures.sentences,
    }
    path = directory / "comparison.json"
    if path.exists() and not _is_same(path, comparison):
        path = free_path(path)  # another comparison of runs in this directory is kept
    write_atomically(path, sealed(comparison, indent=2))
    return path


def _is_same(path: Path, comparison: dict[str, Any]) -> bool:
    """Whether a file holds a comparison of the same; one that cannot be read is kept like another one."""
    try:
        return _asked(unsealed(read_bytes(path))) == _asked(comparison)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _asked(comparison: dict[str, Any]) -> list[Any]:
    """What a comparison was about."""
    # Those of older versions hold every method that was asked for.
    labels = comparison.get("asked", [record["label"] for record in comparison["methods"]])
    return [comparison["federation"], comparison["data"], comparison["seeds"], labels]
