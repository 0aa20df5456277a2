"""Examples in a file, checked against what a model was trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import arrays, checks, labels, splits, tables
from priory.data.form import Form
from priory.models.likelihood import Gaussian, Likelihood

TABLES = (".csv", ".parquet")
Columns = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]  # y, scale, group


@dataclass(frozen=True)
class Rows:
    """Examples from a file: inputs in the form of the federation's pool, labels as the file has them.

    Attributes:
        table: The data frame that they were read from, where they were.
        group: The group of each row, where the run keeps the rows of a group together and the file has them.
    """

    x: np.ndarray
    y: np.ndarray | None
    scale: np.ndarray | None
    table: Any = None
    group: np.ndarray | None = None

    def where(self, mask: np.ndarray) -> "Rows":
        """Return the rows under the mask."""
        arrays = (self.x, self.y, self.scale, self.group)
        x, y, scale, group = (None if array is None else array[mask] for array in arrays)
        assert x is not None
        return Rows(x, y, scale, group=group)

    def held_out(self, form: Form, file: str, fraction: float, seed: int) -> np.ndarray:
        """Return the mask of a random part of the rows, whatever their labels; the rows of a group are on one side.

        Raises `UsageError` where the form has groups and the file does not say which row is of which.
        """
        name = form.role("group")
        what = f"{file}: {'array' if form.encoder is None else 'column'} {name!r}"
        if name is not None and self.group is None:
            raise UsageError(
                f"{what} is absent, and rows with the same {name!r} stay on one side of every split; add it."
            )
        group = None if self.group is None else labels.codes(self.group, what)[0]
        random, alike = splits.stream(seed, splits.Purpose.TEST), np.zeros(len(self.x), np.int32)
        return splits.hold_out_units(alike, alike, group, fraction, random)


def read_rows(
    form: Form, likelihood: Likelihood, file: str, target: str | None = None, with_labels: bool = False
) -> Rows:
    """Return the examples in a .npz, .csv or .parquet file, checked against a form.

    Args:
        target: Column of the labels; by default the one that the training data named.
        with_labels: Whether labels and groups are read as well.
    """
    ending = Path(file).suffix
    if ending not in (".npz", *TABLES):
        raise UsageError(f"{file} is neither a .npz nor a .csv or .parquet file; convert it to one of those.")
    if not Path(file).is_file():
        raise UsageError(f"{file} is no file; give the path of a .npz, .csv or .parquet file.")
    is_table = form.encoder is not None
    if is_table != (ending in TABLES):
        columns = f"a .csv file with the columns {checks.listing(form.columns)}"
        wanted = columns if is_table else "a .npz file with x, and y if known"
        raise UsageError(f"{file} does not have the form of the run's data; give {wanted}.")
    raw_x, y, scale, group = _read_table(form, file, target) if is_table else _read_npz(form, file)
    if not with_labels:
        y = group = None
    try:
        if not len(raw_x):
            raise UsageError("no rows, and a client has at least one; give some, or leave --data out.")
        for what, values in (("y", y), ("scale", scale), ("group", group)):
            if values is not None and np.shape(values)[:1] != (len(raw_x),):
                raise UsageError(
                    f"{what} has shape {np.shape(values)} and x {len(raw_x)} rows; give one value for each."
                )
        x = form.read_inputs(raw_x)
        if y is not None:
            form.read_labels(y)
        if scale is None and likelihood == Gaussian("column"):
            raise UsageError(f"no {_scale_name(form)!r}, and the run knows every target's standard error; add it.")
        errors = None if scale is None else labels.standard_errors(scale, "scale")
        return Rows(x, y, errors, raw_x if is_table else None, group)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _read_npz(form: Form, file: str) -> tuple[Any, *Columns]:
    found = arrays.read_npz(file, needed=("x",))
    group = None if form.role("group") is None else found.get("group")
    return np.atleast_1d(found["x"]), found.get("y"), found.get("scale"), group


def _read_table(form: Form, file: str, target: str | None) -> tuple[Any, *Columns]:
    frame = tables.read_csv(file) if Path(file).suffix == ".csv" else tables.read_parquet(file)
    if target is not None and target not in frame.columns:
        raise checks.unknown("column", target, frame.columns)
    names = (target or form.role("target"), _scale_name(form), form.role("group"))
    y, scale, group = (frame[name].to_numpy() if name in frame.columns else None for name in names)
    return frame, y, scale, group


def _scale_name(form: Form) -> str:
    return form.role("scale") or "scale"
