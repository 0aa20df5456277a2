"""Flags made from dataclasses: a setting is declared and documented once, where it is used, and tyro parses it.

Nested dataclasses become flat names, so `--step-size` is the `step_size` of the method's optimiser; a name is unique
over method, local work, optimiser, data and run.
"""

import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import docstring_parser
import tyro

from priory.core.errors import UsageError
from priory.fed import schedule

REQUIRED = tyro.MISSING
PANEL_EXIT = 2  # what tyro exits with after its panel
# Groups are made at run time, so there are no comments; looking for them would parse a module with every command.
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)


@dataclass(frozen=True)
class Flag:
    """One setting.

    Attributes:
        name: The flag as a Python name; `step_size` is typed `--step-size`.
        path: Field names that lead to the value.
        type: Its annotation.
        default: Its value when the flag is not given; `tyro.MISSING` if it must be.
        help: What the docstring says of it.
        is_static: Whether a new value means a new compilation.
        placed: What stands for it in `--help` if it is told by its place, without a flag.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    is_static: bool = True
    placed: str = ""

    @property
    def typed(self) -> str:
        """The name as a user types it."""
        return self.name.replace("_", "-")


def flags_of(value: Any, path: tuple[str, ...] = ()) -> list[Flag]:
    """Return the flags of a dataclass, nested ones included, with its values as defaults."""
    hints, texts = typing.get_type_hints(type(value), include_extras=True), _attribute_texts(type(value))
    found: list[Flag] = []
    for field in dataclasses.fields(value):
        here, current = (*path, field.name), getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            found += flags_of(current, here)
        else:
            name = field.metadata.get("flag", schedule.RENAMED.get(field.name, field.name))
            is_static = bool(field.metadata.get("static"))
            found.append(Flag(name, here, hints[field.name], current, texts.get(field.name, ""), is_static))
    _check_once([flag.name for flag in found])
    return found


def group(title: str, text: str, flags: Iterable[Flag]) -> type[Any]:
    """Return a flat dataclass of the flags, shown by `--help` under one title."""
    made = dataclasses.make_dataclass(
        title, [(flag.name, _annotated(flag), dataclasses.field(default=flag.default)) for flag in flags]
    )
    made.__doc__ = text
    return made


def parse(groups: dict[str, type[Any]], argv: Sequence[str], prog: str, text: str) -> dict[str, dict[str, Any]]:
    """Return the values of each group of flags; tyro prints its panel and exits on a bad one."""
    _check_once([field.name for group in groups.values() for field in dataclasses.fields(group)])
    joined = dataclasses.make_dataclass("Flags", list(groups.items()))
    joined.__doc__ = text
    parsed: Any = tyro.cli(joined, args=list(argv), prog=prog, description=text, config=CONFIG)
    return {name: dataclasses.asdict(getattr(parsed, name)) for name in groups}


def build(default: Any, values: dict[str, Any]) -> Any:
    """Return the dataclass with the values of its flags in place."""
    for flag in flags_of(default):
        if flag.name in values:
            default = schedule.put(default, flag.path, values[flag.name])
    return default


def find(default: Any, typed: str, owner: str) -> Flag:
    """Return the flag of that name, with a sentence for one that does not exist."""
    flags = flags_of(default)
    for flag in flags:
        if flag.name == typed.replace("-", "_"):
            return flag
    names = [flag.typed for flag in flags]
    close = difflib.get_close_matches(typed, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}."
    raise UsageError(f"{typed} is not a setting of {owner}; {hint}")


def read_value(flag: Flag, text: str) -> Any:
    """Return the text as a value of the flag's type."""
    one = dataclasses.make_dataclass("One", [("value", flag.type)])
    silence = io.StringIO()  # the sentence below replaces tyro's panel
    try:
        with redirect_stdout(silence), redirect_stderr(silence):
            return tyro.cli(one, args=["--value", text]).value
    except SystemExit:
        raise UsageError(f"{flag.typed}={text!r} is not understood; give {metavar(flag.type)}.") from None


def metavar(annotation: Any) -> str:
    """Return what stands for a value in `--help` and in errors: FLOAT, INT, TEXT or the choices."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return metavar(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return "|".join(dict.fromkeys(metavar(part) for part in arguments if part is not type(None)))
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    return {float: "FLOAT", int: "INT", bool: "True or False"}.get(annotation, "TEXT")


def optional(flag: Flag) -> Flag:
    """Return the flag with nothing as its default, for settings that several methods share."""
    return dataclasses.replace(flag, type=flag.type | None, default=None)


def several(flag: Flag) -> Flag:
    """Return the flag so that it takes several values at once, may be repeated, or both."""
    return dataclasses.replace(flag, type=tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], default=())


def flatten(values: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the values of a flag made by `several`, in one row."""
    return tuple(text for some in values for text in some)


def _check_once(names: list[str]) -> None:
    """Raise if two settings have one name, which a method from outside may do."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is the name of two flags; give the setting of the method another name.")


def _annotated(flag: Flag) -> Any:
    if flag.placed:
        shown = tyro.conf.arg(help=flag.help, metavar=flag.placed, help_behavior_hint="(required)")
        return Annotated[flag.type, tyro.conf.Positional, shown]
    if typing.get_origin(flag.type) is Annotated:  # `several`: tyro's own text says how it is used
        return Annotated[flag.type, tyro.conf.arg(help=flag.help, metavar="TEXT ...")]
    if flag.type is bool:  # a switch, --stateful or --no-stateful, takes no value
        return Annotated[flag.type, tyro.conf.arg(help=flag.help)]
    hint = "(optional)" if flag.default is None else None
    return Annotated[flag.type, tyro.conf.arg(help=flag.help, metavar=metavar(flag.type), help_behavior_hint=hint)]


def _attribute_texts(cls: type[Any]) -> dict[str, str]:
    """Return the "Attributes:" of a Google docstring by name."""
    parsed = docstring_parser.parse(cls.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    return {entry.arg_name: " ".join((entry.description or "").split()) for entry in parsed.params}
