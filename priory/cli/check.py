"""`priory check`: whether a method's posteriors hold the truth as often as they say."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import priory
from priory import report
from priory.calibration import Checked, Options, Verdict, enough, passing
from priory.calibration import check as check_method
from priory.cli import flags, start
from priory.cli.run import METHOD_GROUP, title_of
from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.fed.method import Method

REFUTED = 1
TEXT = (
    "Test whether a method's posteriors hold the truth as often as they say, on a problem where the truth is known: "
    "priory check METHOD [flags]. `priory check METHOD --help` adds the method's own flags."
)
MEANING = (
    "Truth: {problem}. Of right posteriors 99 in 100 pass a verdict. Settings that are not broadcast stay as they are. "
    "Local work runs until it has converged. To pass is necessary, and says nothing of deeper networks."
)


@dataclass(frozen=True)
class Output:
    """Where the verdict goes.

    Attributes:
        out: JSON file for the verdicts with all their numbers.
        devices: Host devices that share the clients; one for each core by default (CPU only).
    """

    out: str | None = None
    devices: int | None = None


def check(argv: Sequence[str]) -> int:
    """The exit code of `priory check`: 1 where the posteriors are refuted."""
    asked = read(argv)
    out = _writable(asked.output.out)
    start.start_jax(asked.output.devices)
    tried = [check_method(asked.method, asked.options)]
    other = None if tried[0].passes else passing(asked.method)
    if other is not None:
        tried.append(check_method(other, asked.options))
    settings = _settings([one.method for one in tried], asked.default)
    found = dict(zip(settings, tried, strict=True))
    _show(argv[0], found)
    if out is not None:
        write_atomically(out, json.dumps(_table(list(argv), found, asked.options), indent=2) + "\n")
    return 0 if tried[0].passes else REFUTED


@dataclass(frozen=True)
class Asked:
    """What the command line asks for: the method as it comes and as it is set, and how it is checked."""

    default: Any
    method: Method
    options: Options
    output: Output


def read(argv: Sequence[str]) -> Asked:
    """What the words after `priory check` ask for."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        raise UsageError("priory check needs a method; write `priory check METHOD`, such as `priory check pfedbayes`.")
    if argv[0] in ("-h", "--help"):
        name, rest, text, default = "METHOD", argv, TEXT, None
    else:
        name, rest, default = argv[0], argv[1:], enough(start.typed_method(argv[0]))
        text = title_of(default)
    groups = {} if default is None else {"method": flags.group("method", METHOD_GROUP, flags.flags_of(default))}
    groups["check"] = flags.group("check", "How it is checked.", flags.flags_of(Options()))
    groups["output"] = flags.group("output", "", flags.flags_of(Output()))
    values = flags.parse(groups, rest, prog=f"priory check {name}", text=text)
    method = flags.build(default, values["method"])
    return Asked(default, method, Options(**values["check"]), Output(**values["output"]))


def _show(name: str, found: dict[str, Checked]) -> None:
    for settings, checked in found.items():
        report.say(f"{name} {settings}".rstrip())
        report.say(f"  {verdict_line(checked)}")
        for known, verdict in checked.verdicts.items():
            held = "   ".join(f"{one.level:.0%}: {_percent(one.held, one.error)}" for one in verdict.coverage)
            report.say(f"  {known:26}intervals hold  {held}")
    report.say(MEANING.format(problem=next(iter(found.values())).problem.describe()))


def verdict_line(checked: Checked) -> str:
    """The verdicts in one line, each with what it rests on."""
    said = [f"{known}: {_verdict(verdict)}" for known, verdict in checked.verdicts.items()]
    if checked.true is None:
        said.insert(0, "at true hyper-parameters: not to be had, as no broadcast tells a known population")
    return "; ".join(said)


def _verdict(verdict: Verdict) -> str:
    ninety = verdict.at(0.9)
    reasons = [f"90 % intervals hold {_percent(ninety.held, ninety.error)}"]
    if verdict.width is not None:
        reasons.append(f"{verdict.width:.3g} times the exact width")
    if not verdict.passes:
        reasons.append("p < 1e-6" if verdict.p_value < 1e-6 else f"p = {verdict.p_value:.1g}")
    return f"{'passes' if verdict.passes else 'FAILS'} ({', '.join(reasons)})"


def _percent(share: float, error: float) -> str:
    return f"{100 * share:.1f} ± {100 * error:.1f} %"


def _settings(tried: Sequence[Any], default: Any) -> list[str]:
    """The settings of each method in which any of them differs from the default, as they are typed."""
    values = [{flag.typed: flag.default for flag in flags.flags_of(one)} for one in (default, *tried)]
    open_ = [name for name, usual in values[0].items() if any(one[name] != usual for one in values)]
    return [" ".join(_typed(name, one[name]) for name in open_) for one in values[1:]]


def _typed(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"


def _table(argv: list[str], found: dict[str, Checked], options: Options) -> dict[str, Any]:
    """The contents of the JSON file."""
    verdicts = [
        {
            "settings": settings,
            "method": repr(checked.method),
            "passes": checked.passes,
            "verdict": verdict_line(checked),
            "at_true_hyper_parameters": None if checked.true is None else checked.true.to_json(),
            "plug_in": None if checked.plug_in is None else checked.plug_in.to_json(),
        }
        for settings, checked in found.items()
    ]
    origin = {"command": shlex.join(["priory", "check", *argv]), "version": priory.__version__}
    origin["problem"] = next(iter(found.values())).problem.describe()
    return {**origin, "method": argv[0], "options": dataclasses.asdict(options), "verdicts": verdicts}


def _writable(out: str | None) -> Path | None:
    """The path of the JSON file, refused before anything is computed where it cannot be written."""
    if out is None:
        return None
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"out={out} cannot be written; give the path of a file in a directory that exists.")
    return path
