"""The examples of one node: from its own file, dealt to it beforehand, or of a data set that is known by name."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from priory.core.errors import UsageError
from priory.core.files import private_directory, write_atomically
from priory.data import Federation, npz
from priory.data.rows import read_rows

if TYPE_CHECKING:
    from priory.deploy.charter import Charter

ARRAYS = ("x", "y", "scale", "is_test")


@dataclass(frozen=True, eq=False)
class Examples:
    """What one client has, in the form of the federation's data.

    Attributes:
        x: Inputs, (rows, ...).
        y: Labels or targets, (rows,).
        scale: Known standard errors of the targets, or None.
        is_test: Which rows score the client's model and are not learned from, (rows,).
    """

    x: np.ndarray
    y: np.ndarray
    scale: np.ndarray | None
    is_test: np.ndarray

    def check(self, charter: "Charter", client: int) -> None:
        """Raise unless the rows have the form that the charter says."""
        num, shape, classes = len(self.x), charter.question.input_shape, charter.question.num_classes
        if self.x.shape[1:] != shape:
            raise UsageError(f"Client {client} has examples of shape {self.x.shape[1:]} not {shape}; correct them.")
        if self.y.shape != (num,):
            raise UsageError(f"Client {client} has {num} inputs and {len(self.y)} labels; give one label for each.")
        if self.is_test.dtype != np.bool_ or self.is_test.shape != (num,):
            raise UsageError(
                f"Client {client} marks its held-out rows by {self.is_test.dtype}{list(self.is_test.shape)}; give one "
                f"truth value for each of its {num} rows."
            )
        for name, values in (("inputs", self.x), ("labels", self.y)):
            if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
                raise UsageError(f"Client {client} has {name} that are not finite numbers; correct or drop these rows.")
        if classes is not None and self.y.dtype.kind not in "iu":
            raise UsageError(f"Client {client} has labels of type {self.y.dtype}; give whole numbers below {classes}.")
        if classes is not None and num and not 0 <= self.y.min() <= self.y.max() < classes:
            raise UsageError(f"Client {client} has labels outside 0 to {classes - 1}; code them as the app's data are.")
        if not (~self.is_test).sum():
            raise UsageError(f"Client {client} has no rows to learn from; give its node data, or stop the node.")
        if charter.question.has_scale and self.scale is None:
            raise UsageError(f"Client {client} has no standard errors, which targets have here; add `scale`.")


def from_file(path: str | Path, charter: "Charter", test: float = 0.2, seed: int = 0) -> Examples:
    """Return the rows of a .csv, .parquet or .npz file with labels; some are held out to score the model."""
    rows = read_rows(charter.form, charter.tasks[0].likelihood, str(path), with_labels=True)
    if rows.y is None:
        raise UsageError(f"{path} has no labels; add the column {charter.form.role('target') or 'y'!r}.")
    is_test = rows.held_out(charter.form, str(path), test, seed)
    return Examples(rows.x, charter.form.read_labels(rows.y), rows.scale, is_test)


def of_client(federation: Federation, client: int) -> Examples:
    """Return the training and test rows of one client of a federation that is all in one place."""
    if not 0 <= client < federation.num_clients:
        raise UsageError(
            f"client {client} does not fit the {federation.num_clients} clients of {federation.name}; "
            f"choose 0 to {federation.num_clients - 1}."
        )
    train, test = federation.rows(client, "train"), federation.rows(client, "test")
    rows = np.r_[train, test]
    is_test = np.arange(len(rows)) >= train.stop - train.start
    scale = None if federation.scale is None else federation.scale[rows]
    return Examples(federation.x[rows], federation.y[rows], scale, is_test)


def save(examples: Examples, path: Path) -> None:
    """Write a client's rows to a file that `load` reads and other users do not."""
    arrays = {name: getattr(examples, name) for name in ARRAYS if getattr(examples, name) is not None}
    written = io.BytesIO()
    np.savez_compressed(written, **arrays)
    private_directory(path.parent, ours=False)
    write_atomically(path, written.getvalue(), mode=0o600)


def load(path: str | Path) -> Examples:
    """Return the rows that `save` wrote."""
    try:
        found, _ = npz.load(Path(path), ARRAYS)
        return Examples(found["x"], found["y"], found.get("scale"), found["is_test"])
    except OSError as error:
        why = error.strerror or "damaged"
        raise UsageError(f"{path} cannot be read ({why}); deal the rows again, or name a file of your own.") from None
    except Exception:  # zipfile and NumPy raise half a dozen kinds on a damaged file
        raise UsageError(f"{path} holds no dealt rows; deal them again, or name a file of your own.") from None
