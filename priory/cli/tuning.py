"""`priory tune`: a grid on the validation rows, and the manifest of the best setting."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from priory import methods, report
from priory import tune as tuner
from priory.cli import federation, flags, progress, start
from priory.cli.app import DIVERGED, INTERRUPTED
from priory.cli.failures import Failures
from priory.cli.federation import DataFlags
from priory.cli.flags import Flag
from priory.cli.run import (
    DATA_GROUP,
    METHOD_GROUP,
    RUN_GROUP,
    check_seeds,
    numbered,
    run_flags,
    settings_from,
    trusting,
)
from priory.core.errors import UsageError
from priory.core.files import check_writable, write_atomically
from priory.core.sealed import sealed, sealed_lines
from priory.engine import Settings, manifest
from priory.engine.grid import Control
from priory.fed import schedule
from priory.fed.capabilities import SharedModel
from priory.fed.method import Method
from priory.store import TrialDirectory
from priory.tune import Axis, Setting

SYNTAX = "write FIELD=VALUE,VALUE,... or FIELD=log:FROM..TO:NUMBER or FIELD=linear:FROM..TO:NUMBER"
VALIDATION = 0.2
OVER = Flag(
    "over",
    (),
    tuple[str, ...],
    (),
    "What is tried: zeta=1,3,10 or step-size=log:1e-3..1e-1:5 or mu=linear:0..1:5; repeat it for a grid.",
)
MOST_VALUES = 100_000  # of an axis
SHOWN = 10  # settings in the table


@dataclass(frozen=True)
class Output:
    """What is tried how often, and where the result goes.

    Attributes:
        seeds: How many seeds each setting is run with.
        by: The score that decides, on the validation rows; personal.accuracy or personal.rmse by default.
        out: Directory for tuning.json, manifest.toml and the trials; runs/tune-METHOD-DATA by default, with -2, -3 …
            where another tuning has it.
        devices: Host devices that share the clients; one for each core by default (CPU only).
    """

    seeds: int = 1
    by: (
        Literal["personal.accuracy", "personal.nll", "personal.rmse", "global.accuracy", "global.nll", "global.rmse"]
        | None
    ) = None
    out: str | None = None
    devices: int | None = None


def tune(argv: Sequence[str]) -> int:
    """The exit code of `priory tune`."""
    if not argv:
        raise UsageError(f"There is no method to tune; name one of {', '.join(methods.names())}.")
    if not argv[0].startswith("-"):
        method, prog = start.typed_method(argv[0]), f"priory tune {argv[0]}"
    elif argv[0] in ("-h", "--help"):
        method, prog, argv = methods.make(methods.names()[0]), "priory tune METHOD", ["METHOD", "--help"]
    else:
        raise UsageError(f"{argv[0]} stands where the method should; write `priory tune METHOD {argv[0]} ...`.")
    values = flags.parse(
        {
            "tuning": flags.group("tuning", "What is tuned.", [flags.several(OVER), *flags.flags_of(Output())]),
            "method": flags.group("method", METHOD_GROUP, flags.flags_of(method)),
            "data": flags.group("data", DATA_GROUP, federation.data_flags(VALIDATION)),
            "run": flags.group("run", RUN_GROUP, run_flags()),
        },
        argv[1:],
        prog=prog,
        text="Try settings of a method, all traced numbers and seeds in one compiled run, and score them on the "
        "validation rows; test rows are never read. All settings are checked before the first is trained. Scores and "
        "checkpoints are kept, so the same command goes on where it was left. `priory methods` lists the methods.",
    )
    tuning = values["tuning"]
    over = flags.flatten(tuning.pop("over"))
    output = Output(**tuning)
    method = flags.build(method, values["method"])
    axes = axes_from(method, over)
    check_seeds(output.seeds, values["run"]["seed"], math.prod(len(axis.values) for axis in axes))
    share = values["run"]["exclude_uncertain"]
    if share:
        raise UsageError(
            f"exclude-uncertain={share} needs the rows that tuning scores on; leave it out, and run with it."
        )
    start.import_typed(values["run"])
    start.start_jax(output.devices)
    chosen = federation.from_values(values["data"])
    return _tune(method, axes, chosen, settings_from(values["run"], chosen), output)


def axes_from(method: Method, over: Sequence[str]) -> list[Axis]:
    """The axes of the grid that `--over` describes."""
    name = methods.name_of(method)
    if not over:
        raise UsageError(f"There is nothing to tune; {SYNTAX} behind --over.")
    axes: list[Axis] = []
    for text in over:
        typed, equals, described = text.partition("=")
        if not equals or not described:
            raise UsageError(f"over={text!r} is not understood; {SYNTAX}.")
        flag = flags.find(method, typed.strip(), name)
        if flag.typed in (axis.name for axis in axes):
            raise UsageError(f"{flag.typed} is given twice; name all its values behind one --over.")
        texts = dict.fromkeys(_listed(text, described))
        values = tuple(dict.fromkeys(flags.read_value(flag, one) for one in texts))
        axes.append(Axis(flag.typed, flag.path, values, flag.is_static))
    return axes


def _listed(text: str, described: str) -> list[str]:
    """The values of an axis as text; `log:` and `linear:` are spaced evenly, both ends included."""
    kind, colon, rest = described.partition(":")
    if not colon:
        return [value.strip() for value in described.split(",")]
    try:
        ends, number = rest.rsplit(":", 1)
        low, high = (float(end) for end in ends.split(".."))
        num = int(number)
        if (
            kind not in ("log", "linear")
            or not math.isfinite(low + high)
            or num < 2
            or (kind == "log" and min(low, high) <= 0)
        ):
            raise ValueError
    except ValueError:
        raise UsageError(f"over={text!r} is not understood; {SYNTAX}, such as step-size=log:1e-3..1e-1:5.") from None
    if num > MOST_VALUES:
        raise UsageError(f"over={text!r} spaces {num} values; choose at most {MOST_VALUES}.")
    shares = [i / (num - 1) for i in range(num)]
    if kind == "linear":
        points = [low + share * (high - low) for share in shares]
    else:
        points = [math.exp(math.log(low) + share * (math.log(high) - math.log(low))) for share in shares]
    return [f"{point:.4g}" for point in points]


def _tune(method: Method, axes: list[Axis], chosen: DataFlags, settings: Settings, output: Output) -> int:
    console, name = report.console(), methods.name_of(method)
    data = chosen.federation()
    by = _criterion(output.by, method, name, data.num_classes is None)
    # The best setting is to be trained on the validation rows too.
    final = manifest.identity(
        method, schedule.put(chosen, ("partition", "validation"), 0.0).federation(told=False), settings
    )
    grid = {axis.name: [str(value) for value in axis.values] for axis in axes}
    asked = {**manifest.identity(method, data, settings), "tuning": {"over": grid, "seeds": output.seeds, "by": by}}
    kept = _kept(output.out, Path("runs") / f"tune-{name}-{Path(data.name).stem}", asked)
    directory, failures = kept.path.parent, Failures()
    check_writable(directory)
    num = math.prod(len(axis.values) for axis in axes)
    report.say(f"{name} on {data.describe()}; settings: {num}, seeds of each: {output.seeds}")
    if kept.scores():
        scored = f"{len(kept.scores())} of {num * output.seeds} trials are scored already"
        report.say(f"{scored} and are loaded from {directory}.")
    with progress.interruptible() as stop, progress.counting(f"tuning {name}") as told:
        control = Control(stop, failures.noted, told)
        found = tuner.tune(method, data, axes, seeds=output.seeds, settings=settings, kept=kept, control=control)
    best = tuner.ranked(found, by)
    records = _records(best, data.num_classes is None)
    if records:
        console.print()
        console.print(report.tuning_table(records, by, most=SHOWN))
        console.print()
    if stop.pressed and len(found) < num:
        report.say(f"Stopped with {len(found)} of {num} settings scored; the same command goes on from {directory}.")
        return INTERRUPTED
    if records:
        final["method"] = {"name": name, **manifest.to_table(best[0].method)}
        result = {"method": name, "by": by, "seeds": output.seeds, "data": data.spec, "settings": records}
        write_atomically(directory / "tuning.json", sealed(result, indent=2))
        write_atomically(directory / "manifest.toml", sealed_lines(tomli_w.dumps(final)))
        if len(records) > SHOWN:
            report.say(f"The best {SHOWN} of {len(records)} settings; all of them are in {directory}/tuning.json.")
        console.print(
            f"Scores are means over seeds on {data.validation.total} validation rows; the test rows were not read. "
            f"The manifest of the best setting trains on the validation rows too (validation 0)."
        )
        report.say(f"priory run {directory}/manifest.toml{trusting(method, settings)}")
    failures.conclude("of the parts of the grid")
    if best and best[0].score(by).value is None:
        warnings.warn(f"Training diverged with every setting: no {by} is finite; try lower step sizes.", stacklevel=2)
        return DIVERGED
    return 0


def _kept(out: str | None, usual: Path, asked: dict[str, Any]) -> TrialDirectory:
    """Where the trials are kept: in `out`; by default in the usual place, with -2, -3 … where another tuning has it."""
    if out is not None:
        kept = TrialDirectory(out, asked)
        if kept.exists():
            manifest.check_same(asked, kept.manifest(), Path(out), "tuning")
        elif any((Path(out) / file).exists() for file in ("tuning.json", "manifest.toml")):
            raise UsageError(f"out={out!r} holds results already, which are never overwritten; choose another.")
        return kept

    def is_ours(kept: TrialDirectory, place: Path) -> bool:
        try:
            manifest.check_same(asked, kept.manifest(), place, "tuning")
        except UsageError:
            return False
        return True

    known = ((TrialDirectory(place, asked), place) for place in numbered(usual))
    return next(kept for kept, place in known if not place.exists() or is_ours(kept, place))


def _criterion(by: str | None, method: Method, name: str, regression: bool) -> str:
    if by is not None and by.startswith("global") and not isinstance(method, SharedModel):
        raise UsageError(
            f"by={by} scores a global model, and {name} has none; choose {by.replace('global', 'personal')}."
        )
    if by is None:
        return "personal.rmse" if regression else "personal.accuracy"
    if by.endswith("accuracy" if regression else "rmse"):
        raise UsageError(
            f"by={by} does not suit a {'regression' if regression else 'classification'}; choose the other."
        )
    return by


def _records(best: Sequence[Setting], regression: bool) -> list[dict[str, Any]]:
    first = "rmse" if regression else "accuracy"
    names = [f"{part}.{score}" for part in ("personal", "global") for score in (first, "nll")]
    return [
        {"values": setting.values, "scores": {name: setting.score(name).to_json() for name in names}}
        for setting in best
    ]
