"""Command lines with random flags, drawn from the flags that each command declares.

Nobody lists flags here: a command is asked for the groups of flags that it is about to parse, and their types, choices
and help say which values to try. A flag that is added to a command is therefore tested as soon as it exists.
"""

import dataclasses
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import tyro
from hypothesis import strategies as st

from priory.cli import app, flags

WHOLE = ["0", "1", "-1", "2", "3", "7", "100", "2147483647", "2147483648", "-2147483649", "4294967295"]
WHOLE += ["1099511627776", "9223372036854775807", "9223372036854775808", "1000000000000000000", "1" + 400 * "0"]
REAL = ["0.5", "0.25", "-0.5", "1e-3", "1e-30", "1e-320", "1e39", "-1e39", "1e308", "1e400", "inf", "-inf", "nan"]
JUNK = [
    "",
    " ",
    "x",
    "-",
    "--",
    ":",
    "=",
    ",",
    ",,",
    "..",
    "%s",
    "{}",
    "[bold]",
    "\\",
    "*",
    "('",
    "١٢",
    "1_0",
    "0x10",
    "1 2",
]
JUNK += ["ß·漢字", "\u202ebidi", "\x1b[31mred", "line\nbreak", "tab\t", "\udcff", "a/b", "absent/file.csv", 5000 * "9"]
JUNK += [5000 * "x", "True", "None", "digits", "linear", "auto", "default"]
WORD = re.compile(r"[\w.:=,/@%-]*[\w%]")  # a word of a help text, with the signs of the small languages of values
HOLE = re.compile(r"[A-Z][A-Z_]*|\d+(?:\.\d+)?(?:e-?\d+)?")  # for which a number is put
NAMED = {"DATASET": ["digits", "absent"], "FILE": ["table", "absent"]}


@dataclass(frozen=True)
class Declared:
    """A flag as a command declares it."""

    name: str
    type: Any
    help: str
    is_placed: bool


class _Asked(Exception):
    """Raised in the place of parsing."""


def declared(words: Sequence[str]) -> list[Declared]:
    """Return the flags that a command would parse, which these words name."""
    found: dict[str, type[Any]] = {}

    def parse(groups: dict[str, type[Any]], argv: Sequence[str], prog: str, text: str) -> None:
        del argv, prog, text
        found.update(groups)
        raise _Asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "parse", parse)
        with pytest.raises(_Asked):
            app.dispatch(list(words), app.COMMANDS, "priory", "", "")
    return [_declared(field) for group in found.values() for field in dataclasses.fields(group)]


def random_flags(known: Sequence[Declared], most: int = 3) -> st.SearchStrategy[list[str]]:
    """Draw values of at most so many flags, as they are typed."""
    numbers = [flag.name for flag in known if _plain(flag.type) is float]
    if not known:
        return st.sampled_from([[], ["--absent"], ["absent"]])
    some = st.lists(st.sampled_from(list(known)), max_size=most, unique_by=lambda flag: flag.name)
    typed = some.flatmap(lambda chosen: st.tuples(*(_typed(flag, numbers) for flag in chosen)))
    return typed.map(lambda words: [word for one in words for word in one])


def _declared(field: dataclasses.Field) -> Declared:
    marks = field.type.__metadata__ if hasattr(field.type, "__metadata__") else ()
    text = next((str(mark.help or "") for mark in marks if hasattr(mark, "help_behavior_hint")), "")
    return Declared(field.name.replace("_", "-"), field.type, text, tyro.conf.Positional in _marks(field.type))


def _marks(annotation: Any) -> tuple[Any, ...]:
    """Return what an annotation says besides its type."""
    return getattr(annotation, "__metadata__", ())


def _plain(annotation: Any) -> Any:
    """Return the type of a flag without annotations and without None."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    return _plain(parts[0]) if len(parts) == 1 and type(None) in typing.get_args(annotation) else annotation


def _typed(flag: Declared, numbers: Sequence[str]) -> st.SearchStrategy[list[str]]:
    """Draw the words of a flag with its value."""
    kind = _plain(flag.type)
    if kind is bool:
        return st.sampled_from([[f"--{flag.name}"], [f"--no-{flag.name}"]])
    is_row = typing.get_origin(kind) is tuple
    values = st.lists(_texts(flag.help, numbers), max_size=3) if is_row else _values(kind, flag.help, numbers)
    row = values if is_row else values.map(lambda value: [value])
    if flag.is_placed:
        return row
    # `--flag=value`, since a value that starts with a dash would be read as a flag.
    return row.map(lambda some: [f"--{flag.name}", *some] if len(some) != 1 else [f"--{flag.name}={some[0]}"])


def _values(kind: Any, text: str, numbers: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw a value of a type as text, now and then one of another type."""
    junk = st.sampled_from(JUNK)
    if kind is int:
        usual: st.SearchStrategy[str] = st.sampled_from(WHOLE) | st.integers(-3, 40).map(str)
    elif kind is float:
        usual = st.sampled_from(WHOLE + REAL) | st.floats().map(str)
    elif typing.get_origin(kind) is Literal:
        usual = st.sampled_from([str(one) for one in typing.get_args(kind)])
    else:
        return _texts(text, numbers)
    return st.one_of(usual, usual, usual, junk)


def _texts(help: str, numbers: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw a text: one that the help gives as a form, with other numbers, or junk."""
    forms = [word for word in WORD.findall(help) if any(sign in word for sign in ":=@/-,") or word.isupper()]
    words = sorted({*forms, *WORD.findall(help)})
    plain = st.sampled_from(JUNK) | st.text(max_size=8)
    if not words:
        return plain
    filled = st.sampled_from(sorted(forms) or words).flatmap(lambda form: _filled(form, numbers))
    return st.one_of(filled, filled, st.sampled_from(words), plain)


def _filled(form: str, numbers: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw a text of a form: numbers and words in capitals are replaced."""
    parts, places = HOLE.split(form), HOLE.findall(form)

    def hole(name: str) -> st.SearchStrategy[str]:
        if name == "FIELD" and numbers:
            return st.sampled_from(list(numbers))
        if name in NAMED:
            return st.sampled_from(NAMED[name])
        return st.one_of(
            st.just(name), st.integers(0, 9).map(str), st.sampled_from(WHOLE + REAL), st.sampled_from(JUNK)
        )

    def joined(values: tuple[str, ...]) -> str:
        return parts[0] + "".join(value + part for value, part in zip(values, parts[1:], strict=True))

    return st.tuples(*map(hole, places)).map(joined)
