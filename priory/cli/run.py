"""`priory run` and `priory resume`: one method on one federation, from flags, from a manifest or from a checkpoint."""

import contextlib
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from priory import certificate, methods, report, track
from priory import tune as tuner
from priory.cli import effect_tables, federation, flags, progress, start
from priory.cli.app import DIVERGED, INTERRUPTED
from priory.cli.flags import Flag
from priory.core.errors import UsageError
from priory.core.reading import read_bytes
from priory.core.sealed import is_as_written
from priory.data import Federation
from priory.engine import Run, Settings, manifest, resume, simulate
from priory.engine.problem import tasks_of
from priory.fed import schedule
from priory.fed.capabilities import AdviceWarning
from priory.fed.method import Method
from priory.models.model import code_named
from priory.store import ARCHITECTURES, TRACKED, RunDirectory, read_manifest

TRUST = Flag(
    "trust_code",
    (),
    bool,
    False,
    "Import the Python code that a file names as its model or method (module:factory), from installed packages or the "
    "current directory; only if you trust whoever wrote the file.",
)
METHOD_GROUP = "Hyper-parameters of the method, its optimiser and its local work."
DATA_GROUP = "The federation."
MOST_RUNS = 1_000_000  # of one command
SEEDS = 1 << 32
RUN_GROUP = "How the federation is run."
Tool = Literal["tensorboard", "mlflow", "wandb"]


@dataclass(frozen=True)
class Output:
    """Where the run goes.

    Attributes:
        out: Run directory; runs/METHOD-DATA-sSEED by default, with -2, -3 … where that is taken.
        devices: Host devices that share the clients; by default one per core, or as the manifest says (CPU only).
        alone: With several models, train every client alone as well and compare at the end.
        certify: At the end, bound the error of every newcomer (certificates.json); needs --newcomers.
        track: Tool that settings, metrics and summary are sent to besides (an extra of that name).
        report: Write report.html into the run directory at the end.
    """

    out: str | None = None
    devices: int | None = None
    alone: bool = True
    certify: bool = False
    track: Tool | None = None
    report: bool = False


def run(argv: Sequence[str]) -> int:
    """The exit code of `priory run`."""
    if not argv or argv[0] in ("-h", "--help"):
        return _overview(argv)
    if argv[0].endswith(".toml"):
        return _run_manifest(Path(argv[0]), argv[1:])
    if argv[0].startswith("-"):
        raise UsageError(f"{argv[0]} stands where the method should; write `priory run METHOD {argv[0]} ...`.")
    method = start.typed_method(argv[0])
    values = flags.parse(
        {
            "method": flags.group("method", METHOD_GROUP, flags.flags_of(method)),
            "data": flags.group("data", DATA_GROUP, federation.data_flags()),
            "run": flags.group("run", RUN_GROUP, run_flags()),
            "output": flags.group("output", "", flags.flags_of(Output())),
        },
        argv[1:],
        prog=f"priory run {argv[0]}",
        text=title_of(method),
    )
    output = Output(**values["output"])
    _check_end(output)
    start.import_typed(values["run"])
    start.start_jax(output.devices)
    chosen = federation.from_values(values["data"])
    method, settings = flags.build(method, values["method"]), settings_from(values["run"], chosen)
    return _simulate(method, chosen.federation(), settings, output)


def resume_command(argv: Sequence[str]) -> int:
    """The exit code of `priory resume`."""
    text = "Go on with a run from its last checkpoint; the result has the same bits as a run that was never stopped."
    ends = [flags.find(Output(), name, "resume") for name in ("alone", "certify", "track", "report")]
    groups = run_groups("resume") | {"end": flags.group("end", "", ends)}
    values = flags.parse(groups, argv, prog="priory resume", text=text)
    end = Output(**values["end"])
    _check_end(end)
    path, table = opened(values)
    was_finished = RunDirectory(path).summary() is not None
    if was_finished:
        report.console().print(f"{path} is finished already.")
    with progress.interruptible() as stop, progress.watching(_label(table)) as watcher:
        how: dict[str, Any] = {"listener": watcher, "stop": stop, "track": end.track}
        finished = resume(path, trust_code=values["output"]["trust_code"], **how)
    if was_finished and finished.diverged:
        warnings.warn(finished.diverged, AdviceWarning, stacklevel=2)
    return _end(finished, end)


def named_run(argv: Sequence[str], command: str, text: str) -> tuple[Path, dict[str, Any]]:
    """The run directory that a command was given and its manifest; JAX is started on the devices it was run on."""
    return opened(flags.parse(run_groups(command), argv, prog=f"priory {command}", text=text))


def run_groups(command: str) -> dict[str, type[Any]]:
    """The flags of a command that reads a run directory."""
    directory = Flag("directory", (), str, flags.REQUIRED, "The run directory.", placed="DIR")
    devices = flags.find(Output(), "devices", command)
    return {"run": flags.group("run", "", [directory]), "output": flags.group("output", "", [devices, TRUST])}


def opened(values: dict[str, dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The run directory that the values of `run_groups` name, and its manifest; JAX is started on its devices."""
    path = Path(values["run"]["directory"])
    path = path.parent if path.name == "manifest.toml" else path
    table = RunDirectory(path).manifest()
    if values["output"]["trust_code"]:
        start.import_from_here()
    start.start_jax(values["output"]["devices"], recorded_devices(table))
    return path, table


def run_flags() -> list[Flag]:
    """The flags of `Settings`; the scale of a regression is a flag of the data."""
    found = [flag for flag in flags.flags_of(Settings()) if flag.name != "scale"]
    return [flags.several(flag) if flag.name == "schedule" else flag for flag in found]


def settings_from(values: dict[str, Any], chosen: federation.DataFlags) -> Settings:
    """The parsed flags of a run."""
    scale = chosen.noise()
    return Settings(**{**values, "schedule": flags.flatten(values["schedule"]), "scale": scale})


def check_seeds(seeds: int, first: int, settings: int) -> None:
    """Raise on a number of seeds that gives no run, a seed that none can have, or more than a million runs.

    Args:
        first: The first seed.
        settings: How many settings are run with each seed.
    """
    if seeds < 1:
        raise UsageError(f"seeds={seeds} is too small; choose 1 or more.")
    if seeds * settings > MOST_RUNS:
        raise UsageError(
            f"seeds={seeds} of {settings} settings are {seeds * settings} runs; choose at most {MOST_RUNS} in all."
        )
    if 0 <= first < SEEDS < first + seeds:
        raise UsageError(f"seeds={seeds} from seed={first} on end above 2^32 - 1; choose fewer, or a smaller seed.")


def recorded_devices(table: dict[str, Any]) -> int | None:
    """The number of devices that a manifest records, on which its numbers depend in the last bits."""
    devices = table.get("environment", {}).get("devices")
    return devices if isinstance(devices, int) else None


def free_path(path: Path) -> Path:
    """The path, or the first of path-2, path-3 … that does not exist."""
    return next(place for place in numbered(path) if not place.exists())


def numbered(path: Path) -> Iterator[Path]:
    """The path, path-2, path-3 and so on."""
    yield path
    # Only a real ending is one: the name of a run may hold a dot, as in lam=0.3.
    end = ".json" if path.suffix == ".json" else ""
    for number in itertools.count(2):
        yield path.with_name(f"{path.name.removesuffix(end)}-{number}{end}")


def title_of(method: Method) -> str:
    """The first paragraph of a method's module, which names what it does."""
    text = sys.modules[type(method).__module__].__doc__ or ""
    return text.split("\n\nServer keeps")[0]


def settled(method: Method, data: Federation, settings: Settings, stop: Callable[[], bool] = lambda: False) -> Any:
    """The method; with its number of clusters chosen, and printed, where that is left to the validation rows.

    None if it was told to stop meanwhile.
    """
    if not tuner.is_open(method):
        return method
    with progress.counting("choosing the clusters") as told:
        tried = tuner.try_clusters(method, data, told=told, stop=stop, **dataclasses.asdict(settings))
    if stop():
        return None
    number = tuner.fewest(tried)
    scores = ", ".join(f"{np.mean(one.nll):.4f} with {one.clusters}" for one in tried)
    report.console().print(
        f"clusters={number}, the fewest within one standard error of the best validation nll: {scores}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return schedule.put(method, ("clusters",), number)


def conclude(finished: Run, certify: bool = False) -> int:
    """The exit code of a run, after printing what it ended with or how to go on."""
    console = report.console()
    if not finished.is_finished:
        trusted = trusting(finished.method, finished.settings)
        console.print(
            f"Stopped after round {finished.completed} of {finished.settings.rounds}; "
            f"go on with: priory resume {finished.path}{_tracked(finished)}{trusted}",
            markup=False,
            soft_wrap=True,
        )
        return INTERRUPTED
    summary = finished.summary()
    console.print()
    console.print(report.run_table(summary))
    effect_tables.conclude(console, finished)
    console.print()
    for line in report.run_lines(summary):
        console.print(line, markup=False)
    if certify:
        console.print(certificate.summary(finished.certificates()), markup=False, soft_wrap=True)
    console.print(f"run directory: {finished.path}", markup=False, soft_wrap=True)
    return DIVERGED if finished.diverged else 0


def _simulate(method: Method, data: Federation, settings: Settings, output: Output) -> int:
    name = methods.name_of(method)
    if output.certify:  # before anything is computed
        certificate.check(method, name, tasks_of(data, settings)[0], certificate.DELTA, certificate.DRAWS)
        certificate.check_newcomers(data)
    path = (
        Path(output.out) if output.out else free_path(Path("runs") / f"{name}-{Path(data.name).stem}-s{settings.seed}")
    )
    if tuner.is_open(method):  # before runs that only choose the number of clusters
        tuner.check(method, data, out=path, track=output.track, **dataclasses.asdict(settings))
    report.say(f"{name} on {data.describe()}")
    method = settled(method, data, settings)
    with progress.interruptible() as stop, progress.watching(name) as watcher:
        how: dict[str, Any] = {"listener": watcher, "stop": stop, "track": output.track}
        finished = simulate(method, data, out=path, **how, **dataclasses.asdict(settings))
    return _end(finished, output)


def _end(finished: Run, output: Output) -> int:
    """The exit code, after all that a run ends with."""
    code = conclude(finished, output.certify)
    code = code or _compare_architectures(finished, output.alone)
    if code in (0, DIVERGED) and output.report:
        assert finished.path is not None
        write_report([finished.path], finished.path / "report.html", runs={finished.path: finished})
    return code


def _check_end(output: Output) -> None:
    """Raise before anything is computed where an extra is missing that the end of a run needs."""
    track.check(output.track)
    if output.report:
        report.check_drawing()


def write_report(places: Sequence[Path | str], out: Path, **options: Any) -> None:
    """Write the report of the runs and say where it is; `options` are those of `report.write`."""
    console = report.console()

    def told(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    told(f"report: {report.write(places, out, told=told, **options)}")


def trusting(method: Method, settings: Settings) -> str:
    """The flag that a command needs to read a run with a model or method of the user's own."""
    origin = methods.origin_of(type(method))
    is_code = origin is not None and origin.code is not None
    return " --trust-code" if is_code or code_named(settings.model, settings.models) is not None else ""


def _tracked(run: Run) -> str:
    """The flag with which a run goes on being sent to where it was."""
    tools = [] if run.path is None else list(RunDirectory(run.path).read(TRACKED) or ())
    return f" --track {tools[-1]}" if tools else ""


def _compare_architectures(finished: Run, alone: bool) -> int:
    """The exit code, after a table of the models that clients have, where these differ."""
    assert finished.path is not None
    directory = RunDirectory(finished.path)
    found: dict[str, dict[str, float | None]] = directory.read(ARCHITECTURES) or finished.extra.get("architectures", {})
    if not found:
        return 0
    apart_method = finished.method.local_baseline() if alone else None
    if apart_method is not None and directory.read(ARCHITECTURES) is None:
        # A run may have ended with its budget; who trains alone sends nothing that needs noise.
        settings = dataclasses.replace(finished.settings.in_the_clear(), eval_every=0, rounds=finished.completed)
        with progress.interruptible() as stop, progress.watching("alone") as watcher:
            apart = simulate(
                apart_method,
                finished.federation,
                listener=watcher,
                stop=stop,
                **dataclasses.asdict(settings),
            )
        if apart.completed < settings.rounds:
            again = f"priory resume {finished.path}{trusting(finished.method, finished.settings)}"
            report.say(f"Stopped; compare with the clients alone by: {again}")
            return INTERRUPTED
        for model, row in apart.extra["architectures"].items():
            found[model] |= _gained(found[model], row)
        directory.write(ARCHITECTURES, found, indent=2)
    report.console().print()
    report.console().print(report.architectures_table(found))
    return 0


def _gained(together: dict[str, float | None], alone: dict[str, float | None]) -> dict[str, float | None]:
    """The score of clients alone, and by how much the federation is better."""
    (name,) = alone.keys() - {"clients"}
    one, other = together[name], alone[name]
    if one is None or other is None:
        return {"alone": other, "gain": None}
    return {"alone": other, "gain": one - other if name == "accuracy" else other - one}


def _run_manifest(path: Path, argv: Sequence[str]) -> int:
    values = flags.parse(
        {
            "output": flags.group("output", "", flags.flags_of(Output())),
            "trust": flags.group("trust", "", [TRUST]),
        },
        argv,
        prog=f"priory run {path}",
        text="Run a manifest again; the same devices give the same numbers.",
    )
    output, trust_code = Output(**values["output"]), values["trust"]["trust_code"]
    _check_end(output)
    table = read_manifest(path, may_be_edited=True)
    if not is_as_written(read_bytes(path)):
        warnings.warn(f"{path} was edited since Priory wrote it, so the numbers may differ.", stacklevel=2)
    if trust_code:
        start.import_from_here()
    start.start_jax(output.devices, recorded_devices(table))
    recipe = manifest.read(table, file=path, trust_code=trust_code)
    for name, value in recipe.given.items():
        raise UsageError(f"{path} was given {name}={value}, which a manifest cannot hold; run it again from Python.")
    return _simulate(recipe.method, recipe.federation, recipe.settings, output)


def _overview(argv: Sequence[str]) -> int:
    """Usage, the methods, and the flags that all of them share."""
    text = (
        "Train a method on a federation: priory run METHOD [flags], or priory run FILE.toml to run a manifest again. "
        f"Methods: {', '.join(methods.names())}; your own is path/file.py:Class or package.module:Class. "
        "`priory run METHOD --help` adds the method's own flags."
    )
    with contextlib.suppress(SystemExit):  # the help itself is no fault, but to name no method is one
        flags.parse(
            {
                "data": flags.group("data", DATA_GROUP, federation.data_flags()),
                "run": flags.group("run", RUN_GROUP, run_flags()),
                "output": flags.group("output", "", flags.flags_of(Output())),
            },
            ["--help"],
            prog="priory run METHOD",
            text=text,
        )
    return 0 if argv else flags.PANEL_EXIT


def _label(table: dict[str, Any]) -> str:
    return str(table.get("method", {}).get("name", "run"))
