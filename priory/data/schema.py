"""Schemas: the form of a table or of arrays, written in a TOML file by a person instead of read from rows.

    reviewed = true            # somebody replaced the values that a draft read from the rows
    name = "visits"
    clients = 3
    examples = 240             # training rows of all clients together; may be rounded up
    target = "outcome"
    classes = ["no", "yes"]    # left out for a regression
    client = "hospital"        # client, group, scale and drop name columns, as the flags do
    drop = ["id"]

    [columns]                  # the inputs, in this order
    age = { kind = "number", low = 0, high = 120 }
    sex = { kind = "category", categories = ["f", "m"], missing = true }

A number is clipped to its bounds and scaled by them (`encoder.bounded_encoder`). A value outside a column's categories
counts as missing. `missing = true` adds an input that marks gaps; without it a gap is the middle of the bounds, or no
category, and is not marked. The arrays of a .npz file have a table `inputs` in place of `columns`; roles are then the
names of arrays:

    [inputs]
    shape = [28, 28, 1]
    scaling = "unit"           # [0, 1], symmetric ([-1, 1]) or none
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from priory.core.errors import UsageError, explain_os_errors
from priory.core.reading import MOST_TEXT, parse_toml, read_bytes
from priory.data import arrays, checks, labels, tables
from priory.data import form as forms
from priory.data.columns import Column
from priory.data.dataset import Dataset
from priory.data.encoder import Encoder, Feature, bounded_encoder, raw_matrix
from priory.data.form import Form
from priory.data.options import ROLES

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Schema", "read"]

ARRAYS = {"target": "y", "client": "client", "group": "group", "scale": "scale"}  # the roles of a .npz file
SCALINGS = arrays.SCALINGS[1:]  # that take nothing from the rows
REQUIRED = object()


@dataclass(frozen=True, eq=False)
class Schema:
    """The form of data as a file states it.

    Attributes:
        path: Of the file.
        reviewed: Whether somebody says that nothing in it depends on the rows.
        name: Of the data.
        clients: How many take part.
        examples: Training rows of all clients together.
        classes: Names of the classes, in label order; none for a regression.
        roles: Columns (or arrays) that are no inputs, by role.
        features: The inputs of a table; none for arrays.
        shape: Of one input of arrays; None for a table.
        scaling: Of the inputs of arrays; None for a table.
    """

    path: str
    reviewed: bool
    name: str
    clients: int
    examples: int
    classes: tuple[str, ...]
    roles: dict[str, tuple[str, ...]]
    features: tuple[Feature, ...]
    shape: tuple[int, ...] | None
    scaling: str | None

    def role(self, name: str) -> str | None:
        """Return the column of that role."""
        return next(iter(self.roles.get(name, ())), None)

    @property
    def task(self) -> str:
        """The kind of the target."""
        return "classification" if self.classes else "regression"

    @cached_property
    def encoder(self) -> Encoder | None:
        """The encoder of a table; None for arrays."""
        return bounded_encoder(self.features) if self.features else None

    @cached_property
    def form(self) -> Form:
        """The form of data that fit the schema."""
        shape, roles = self.shape, self.roles
        if self.encoder is not None:
            shape = (len(self.encoder.names),)
        else:
            roles = {role: names for role, names in roles.items() if role == "group"}
        assert shape is not None
        shift, factor = arrays.fixed_scaling(self.scaling or "none")
        return Form(self.name, shape, shift, factor, len(self.classes) or None, self.classes, self.encoder, roles)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `load` that the schema stands for; raises where one of those given contradicts it."""
        own: dict[str, Any] = {} if self.shape is not None else {role: self.role(role) for role in ROLES[:-1]}
        if self.shape is None:
            own["drop"] = list(self.roles.get("drop", ()))
        stated = own | {"task": self.task, "scaling": self.scaling}
        for name, value in given.items():
            if value != stated.get(name):
                word = f"states {stated[name]!r}" if stated.get(name) else "states none"
                raise UsageError(f"{name}={value!r} contradicts {self.path}, which {word}; leave it out.")
        return {name: value for name, value in own.items() if value} | {"schema": str(Path(self.path).resolve())}

    def dataset(self, path: str) -> Dataset:
        """Return the data set in a .csv or .npz file, read as the schema states; nothing of its form is inferred."""
        is_table = Path(path).suffix == ".csv"
        if is_table != (self.shape is None):
            kinds = ("a table", "arrays") if is_table else ("arrays", "a table")
            raise UsageError(
                f"{path} holds {kinds[0]} and {self.path} describes {kinds[1]}; give the file's own schema."
            )
        try:
            return self._table(path) if is_table else self._arrays(path)
        except UsageError as error:
            prefix = "" if str(error).startswith(path) else f"{path}: "
            raise UsageError(f"{prefix}{error}") from None

    def _table(self, path: str) -> Dataset:
        frame = tables.read_csv(path, used=self.roles.get("drop", ()))
        frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
        named = {role: names[0] for role, names in self.roles.items() if role != "drop"}
        for column in named.values():
            if column not in frame.columns:
                raise checks.unknown("column", column, frame.columns)
        forms.check_columns(self.form, frame.columns)
        if not len(frame):
            raise UsageError("no rows; give at least one.")
        values = {role: frame[column].to_numpy() for role, column in named.items()}
        called = {role: f"{role} column {column!r}" for role, column in named.items()}
        dataset = Dataset(
            name=self.name,
            x=raw_matrix(frame, self.features),
            y=self._labels(values["target"], called["target"]),
            num_classes=len(self.classes) or None,
            classes=self.classes,
            features=self.features,
            encoder=self.encoder,
            **labels.read_roles(values, called),
        )
        described = tables.describe_columns(frame, dataset, named, self.task)
        return replace(dataset, columns=tuple(self._with_note(column, frame, dataset.x) for column in described))

    def _with_note(self, column: Column, frame: "pd.DataFrame", raw: np.ndarray) -> Column:
        """Return the description of a column with a note on those values that do not fit the schema."""
        if column.role != "feature":
            return column
        index = [feature.name for feature in self.features].index(column.name)
        feature, values = self.features[index], raw[:, index]
        notes, gaps = [], int(frame[column.name].isna().sum())
        if feature.bounds is not None:
            low, high = feature.bounds
            outside = int(((values < low) | (values > high)).sum())
            notes += [f"is outside {low:g} to {high:g} in {outside} rows, which are clipped"] if outside else []
        elif unknown := int(np.isnan(values).sum()) - gaps:
            notes.append(f"has none of its categories in {unknown} rows, which count as missing")
        if gaps and not feature.missing:
            notes.append(f"has {gaps} gaps, which are not marked under missing = false")
        return replace(column, note=f"column {column.name!r} {', and '.join(notes)}" if notes else "")

    def _arrays(self, path: str) -> Dataset:
        wanted = {role: ARRAYS[role] for role in self.roles}
        found = arrays.read_npz(path, needed=("x", *wanted.values()))
        x = checks.examples(found["x"])
        if x.shape[1:] != self.shape:
            raise UsageError(
                f"x has examples of shape {x.shape[1:]}, and {self.path} states {self.shape}; correct one."
            )
        return arrays.dataset(
            x,
            self._labels(found["y"], "y"),
            **{role: found[role] for role in ("client", "scale", "group") if role in wanted},
            task=self.task,
            classes=self.classes,
            scaling=self.scaling,
            name=self.name,
        )

    def _labels(self, values: Any, what: str) -> np.ndarray:
        if not self.classes:
            return labels.real_numbers(values, what)
        return labels.known_codes(values, self.classes, what)


def read(path: str) -> Schema:
    """Return the schema in a TOML file, checked; the first fault is raised."""
    with explain_os_errors(f"{path} cannot be read", "; draft a schema with `priory flower schema`"):
        raw = read_bytes(Path(path), MOST_TEXT)
    try:
        table = parse_toml(raw.decode())
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML ({error}); correct it.") from None
    reader = Reader(path, table)
    if ("columns" in table) == ("inputs" in table):
        raise UsageError(
            f"{path} needs one of [columns], for a table, and [inputs], for arrays; describe the inputs in one of them."
        )
    is_table = "columns" in table
    schema = Schema(
        path=path,
        reviewed=reader.take("reviewed", bool, "true or false"),
        name=reader.text("name"),
        clients=reader.count("clients"),
        examples=reader.count("examples"),
        classes=reader.names("classes", least=2, default=()),
        roles=_roles(reader, is_table),
        features=_features(reader.inner("columns")) if is_table else (),
        **({"shape": None, "scaling": None} if is_table else _inputs(reader.inner("inputs"))),
    )
    reader.end()
    named = [name for names in schema.roles.values() for name in names] + [one.name for one in schema.features]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{path} names {twice!r} twice; give every column one role.")
    return schema


class Reader:
    """The values of one table of a schema file, each taken out and checked; what is left over is unknown."""

    def __init__(self, where: str, table: dict[str, Any]) -> None:
        self.where, self._left, self._known = where, dict(table), list[str]()

    def take(self, name: str, kind: type | tuple[type, ...], rule: str, default: Any = REQUIRED) -> Any:
        """Return a value of one of the types, without it the default."""
        self._known.append(name)
        if name not in self._left:
            if default is REQUIRED:
                raise UsageError(f"{self.where} does not state {name}, which is {rule}; add it.")
            return default
        value = self._left.pop(name)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:
            raise self.wrong(name, value, rule)
        return value

    def wrong(self, name: str, value: Any, rule: str) -> UsageError:
        """Return the error for a value that breaks its rule."""
        return UsageError(f"{self.where} states {name} = {value!r}, which is not {rule}; correct it.")

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a text that is not empty."""
        value = self.take(name, str, "a text", default)
        if value == "":
            raise self.wrong(name, value, "a text of one character or more")
        return value

    def count(self, name: str) -> int:
        """Return a whole number of at least 1."""
        value = self.take(name, int, rule := "a whole number of 1 or more")
        if value < 1:
            raise self.wrong(name, value, rule)
        return int(value)

    def number(self, name: str) -> float:
        """Return a number that single precision holds."""
        value = self.take(name, (int, float), rule := f"a number between ±{checks.LARGEST:.2g}")
        if not abs(value) <= checks.LARGEST:
            raise self.wrong(name, value, rule)
        return float(value)

    def names(self, name: str, least: int = 0, default: Any = REQUIRED) -> tuple[str, ...]:
        """Return a list of different names, as values of these names in a table are called."""
        rule = f"a list of {least} or more different names" if least > 1 else "a list of different names"
        values = self.take(name, list, rule, default)
        found = tuple(labels.plain(value) for value in values)
        if values is default:
            return found
        fit = all(type(value) in (str, int, float, bool) for value in values)
        if not fit or len(found) < least or len(set(found)) < len(found):
            raise self.wrong(name, values, rule)
        return found

    def inner(self, name: str) -> "Reader":
        """Return the values of a table in this one."""
        return Reader(f"{self.where} [{name}]", self.take(name, dict, "a table"))

    def inners(self) -> list[tuple[str, "Reader"]]:
        """Return the tables in this one by name, all of them."""
        return [(name, Reader(f"{self.where} {name}", self.take(name, dict, "a table"))) for name in list(self._left)]

    def end(self) -> None:
        """Raise on what nothing asked for."""
        for name in self._left:
            raise UsageError(f"{self.where}: {checks.unknown('key', name, self._known)}")


def _roles(reader: Reader, is_table: bool) -> dict[str, tuple[str, ...]]:
    """Return the columns of each role, in the order of `ROLES`."""
    names: dict[str, tuple[str, ...]] = {"target": (reader.text("target"),)}
    for role in ("client", "group", "scale"):
        names[role] = tuple(filter(None, [reader.text(role, None)]))
    names["drop"] = reader.names("drop", default=()) if is_table else ()
    for role, array in ARRAYS.items():
        if not is_table and names[role] not in ((), (array,)):
            raise reader.wrong(role, names[role][0], f"{array!r}, as the array of a .npz file is called")
    return {role: names[role] for role in ROLES if names[role]}


def _features(reader: Reader) -> tuple[Feature, ...]:
    features = tuple(_feature(name, column) for name, column in reader.inners())
    if not features:
        raise UsageError(f"{reader.where} has no column to predict from; describe one or more.")
    return features


def _feature(name: str, column: Reader) -> Feature:
    kind = column.take("kind", str, rule := "'number' or 'category'")
    missing = column.take("missing", bool, "true or false", False)
    if kind == "category":
        feature = Feature(name, column.names("categories", least=1), missing)
    elif kind == "number":
        low, high = column.number("low"), column.number("high")
        if not low < high:
            raise column.wrong("high", high, f"above low = {low:g}")
        feature = Feature(name, None, missing, (low, high))
    else:
        raise column.wrong("kind", kind, rule)
    column.end()
    return feature


def _inputs(reader: Reader) -> dict[str, Any]:
    shape = reader.take("shape", list, rule := "a list of whole numbers of 1 or more")
    if not shape or not all(type(size) is int and size >= 1 for size in shape):
        raise reader.wrong("shape", shape, rule)
    scaling = reader.take("scaling", str, among := f"one of {checks.listing(map(repr, SCALINGS))}", "none")
    if scaling not in SCALINGS:
        raise reader.wrong("scaling", scaling, among)
    reader.end()
    return {"shape": tuple(shape), "scaling": scaling}
