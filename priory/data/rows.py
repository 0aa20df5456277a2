"""Examples in a file, checked against what a model was trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from priory.core.errors import UsageError
from priory.data import arrays, checks, tables
from priory.data.form import Form
from priory.models.likelihood import Gaussian, Likelihood

TABLES = (".csv", ".parquet")


@dataclass(frozen=True)
class Rows:
    """Examples from a file: inputs in the form of the federation's pool, labels as the file has them.

    Attributes:
        table: The data frame that they were read from, where they were.
    """

    x: np.ndarray
    y: np.ndarray | None
    scale: np.ndarray | None
    table: Any = None

    def where(self, mask: np.ndarray) -> "Rows":
        """The rows under the mask."""
        x, y, scale = (None if array is None else array[mask] for array in (self.x, self.y, self.scale))
        assert x is not None
        return Rows(x, y, scale)


def read_rows(form: Form, likelihood: Likelihood, file: str, target: str | None = None, labels: bool = False) -> Rows:
    """The examples in a .npz, .csv or .parquet file, checked against a form; with labels if these are read.

    Args:
        target: Column of the labels; by default the one that the training data named.
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
    raw_x, y, scale = _read_table(form, file, target) if is_table else _read_npz(file)
    y = y if labels else None
    try:
        if not len(raw_x):
            raise UsageError("no rows, and a client has at least one; give some, or leave --data out.")
        for what, values in (("y", y), ("scale", scale)):
            if values is not None and np.shape(values)[:1] != (len(raw_x),):
                raise UsageError(
                    f"{what} has shape {np.shape(values)} and x {len(raw_x)} rows; give one value for each."
                )
        x = form.read_inputs(raw_x)
        if y is not None:
            form.read_labels(y)
        if scale is None and likelihood == Gaussian("column"):
            raise UsageError(f"no {_scale_name(form)!r}, and the run knows every target's standard error; add it.")
        errors = None if scale is None else tables.standard_errors(scale, "scale")
        return Rows(x, y, errors, raw_x if is_table else None)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _read_npz(file: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    found = arrays.read_npz(file, needed=("x",))
    return np.atleast_1d(found["x"]), found.get("y"), found.get("scale")


def _read_table(form: Form, file: str, target: str | None) -> tuple[Any, np.ndarray | None, np.ndarray | None]:
    frame = tables.read_csv(file) if Path(file).suffix == ".csv" else tables.read_parquet(file)
    if target is not None and target not in frame.columns:
        raise checks.unknown("column", target, frame.columns)
    target, scale = target or form.role("target"), _scale_name(form)
    found = [frame[name].to_numpy() if name in frame.columns else None for name in (target, scale)]
    return frame, found[0], found[1]


def _scale_name(form: Form) -> str:
    return form.role("scale") or "scale"
