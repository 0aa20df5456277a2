"""`priory compare`: several methods on the same federation with the same seeds, in one table."""

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from priory import methods, report, track
from priory import tune as tuner
from priory.cli import federation, flags, progress, start
from priory.cli.app import INTERRUPTED
from priory.cli.flags import Flag
from priory.cli.run import DATA_GROUP, RUN_GROUP, Tool, free_path, run_flags, settings_from, settled, write_report
from priory.core.errors import UsageError
from priory.data import Federation
from priory.engine import Settings, manifest, resume, simulate
from priory.fed.local import Optimiser, Work
from priory.store import RunDirectory, write_atomically

TEXT = (
    "Train several methods on the same federation with the same seeds and print one table. A method is a name of "
    "`priory methods`, with settings of its own by flag name where wanted: fedprox:mu=0.1,step-size=0.05. Finished "
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
    """One run of a comparison."""

    label: str
    method: Any
    settings: Settings
    path: Path


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
    if output.seeds < 1:
        raise UsageError(f"seeds={output.seeds} is too small; choose 1 or more.")
    if output.report:  # before anything is computed
        report.check_drawing()
    start.start_jax(output.devices)
    chosen = federation.from_values(values["data"])
    data, settings = chosen.federation(), settings_from(values["run"], chosen)
    directory = Path(output.out or Path("runs") / f"compare-{Path(data.name).stem}")
    for method in named.values():
        (dataclasses.replace(method, clusters=1) if tuner.is_open(method) else method).check()
        settings.schedules(method)
        settings.check_exclusion(method, int(data.validation.count[: data.num_clients].sum()))
    settings.check(data.num_clients)
    cells = list(_cells(named, settings, output.seeds, directory))
    code = _run_all(_with_clusters(cells, data), data, directory, output.track)
    if code == 0 and output.report:
        write_report([cell.path for cell in cells], directory / "report.html")
    return code


def methods_from(texts: Sequence[str], shared: dict[str, Any]) -> dict[str, Any]:
    """The methods by label, each with the shared settings and then its own."""
    if not texts:
        raise UsageError(f"There is no method to compare; name some of {', '.join(methods.REGISTRY)}.")
    named: dict[str, Any] = {}
    for text in texts:
        if text in named:
            raise UsageError(
                f"{text} is named twice; give it other settings, such as {text.partition(':')[0]}:epochs=2."
            )
        name, _, settings = text.partition(":")
        method = methods.get(name)()
        for key in shared:
            flags.find(method, key.replace("_", "-"), name)
        own = dict(_own_settings(method, name, settings))
        named[text] = flags.build(method, shared | own)
    return named


def _own_settings(method: Any, name: str, text: str) -> Iterator[tuple[str, Any]]:
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{item!r} in {name}:{text} is not FIELD=VALUE; write for example {name}:step-size=0.05.")
        flag = flags.find(method, key.strip(), name)
        yield flag.name, flags.read_value(flag, value.strip())


def _cells(named: dict[str, Any], settings: Settings, seeds: int, directory: Path) -> Iterator[Cell]:
    for label, method in named.items():
        for seed in range(settings.seed, settings.seed + seeds):
            folder = f"{label.replace(':', '-').replace('/', '_')}-s{seed}"
            yield Cell(label, method, dataclasses.replace(settings, seed=seed), directory / folder)


def _with_clusters(cells: list[Cell], data: Federation) -> list[Cell]:
    """The cells with a number for every `clusters=auto`: chosen with the first seed, or what a run there records."""
    chosen: dict[str, Any] = {}
    for cell in cells:
        if tuner.is_open(cell.method) and cell.label not in chosen:
            recorded = (cell.path / "manifest.toml").exists()
            number = RunDirectory(cell.path).manifest().get("method", {}).get("clusters") if recorded else None
            known = dataclasses.replace(cell.method, clusters=number) if isinstance(number, int) else None
            chosen[cell.label] = known or settled(cell.method, data, cell.settings)
    return [dataclasses.replace(cell, method=chosen.get(cell.label, cell.method)) for cell in cells]


def _run_all(cells: list[Cell], data: Federation, directory: Path, tool: str | None) -> int:
    console = report.console()
    console.print(f"{len(cells)} runs on {data.describe()}", markup=False, soft_wrap=True)
    loaded = [cell for cell in cells if _is_finished(cell, data)]
    if loaded:
        console.print(f"{len(loaded)} of them are finished already and are loaded from {directory}.", markup=False)
    summaries: dict[str, list[dict[str, Any]]] = {}
    with progress.interruptible() as stop:
        for cell in cells:
            label = (
                cell.label if len({c.settings.seed for c in cells}) == 1 else f"{cell.label} seed {cell.settings.seed}"
            )
            summary = _summary(cell, data, label, stop=stop, track=tool)
            if summary is None:
                console.print(f"Stopped; the same command goes on from the checkpoint in {cell.path}.", markup=False)
                return INTERRUPTED
            summaries.setdefault(cell.label, []).append(summary)
    records = report.compare(summaries)
    seeds = sorted({cell.settings.seed for cell in cells})
    written = _write(records, cells, data, seeds, directory)
    for table in report.comparison_tables(records, len(seeds), console.width):
        console.print()
        console.print(table)
    console.print()
    if len(seeds) > 1:
        console.print(f"Means over {len(seeds)} seeds ± standard error; differences are paired by seed.")
    console.print(
        "Bytes are per client and round; from NLL to the worst client, scores are those of the personal models."
    )
    console.print(f"comparison: {written}", markup=False, soft_wrap=True)
    return 0


def _summary(cell: Cell, data: Federation, label: str, **how: Any) -> dict[str, Any] | None:
    """What the run ended with, made, finished or only loaded; None if it was stopped before."""
    if _is_finished(cell, data):
        return RunDirectory(cell.path).summary()
    with progress.watching(label) as watcher:
        if (cell.path / "manifest.toml").exists():
            run = resume(cell.path, federation=data, listener=watcher, **how)
        else:
            settings = dataclasses.asdict(cell.settings)
            run = simulate(cell.method, data, out=cell.path, listener=watcher, **how, **settings)
    return run.summary() if run.completed == run.session.last_round else None


def _is_finished(cell: Cell, data: Federation) -> bool:
    """Whether the directory holds this very run with its summary; raises if it holds another one."""
    directory = RunDirectory(cell.path)
    if not (cell.path / "manifest.toml").exists():
        return False
    there = directory.manifest()
    asked = tomllib.loads(tomli_w.dumps(manifest.describe(cell.method, data, cell.settings)))
    for part, table in asked.items():
        for name in {**table, **there.get(part, {})}:
            old, new = there.get(part, {}).get(name), table.get(name)
            if old != new:
                raise UsageError(
                    f"{cell.path} holds a run with {name}={old} where this comparison has {name}={new}; "
                    "choose another --out."
                )
    if there.get("environment", {}).get("data_checksum") != data.checksum:
        raise UsageError(f"{cell.path} holds a run on other data of the same name; choose another --out.")
    return directory.summary() is not None


def _write(
    records: list[dict[str, Any]], cells: list[Cell], data: Federation, seeds: list[int], directory: Path
) -> Path:
    """The file that the comparison was written to."""
    for record in records:
        record["runs"] = [
            {"seed": cell.settings.seed, "path": cell.path.name} for cell in cells if cell.label == record["label"]
        ]
    comparison = {"federation": data.describe(), "data": data.spec, "seeds": seeds, "methods": records}
    path = directory / "comparison.json"
    if path.exists() and _asked(json.loads(path.read_text())) != _asked(comparison):
        path = free_path(path)  # another comparison of runs in this directory is kept
    write_atomically(path, json.dumps(comparison, indent=2) + "\n")
    return path


def _asked(comparison: dict[str, Any]) -> list[Any]:
    """What a comparison was about."""
    labels = [record["label"] for record in comparison["methods"]]
    return [comparison["federation"], comparison["data"], comparison["seeds"], labels]
