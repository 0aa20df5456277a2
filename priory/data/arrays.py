"""Arrays in memory or in a .npz file as a `Dataset` or a `Federation`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from priory.core.errors import UsageError
from priory.data import checks, labels, npz
from priory.data.dataset import Dataset
from priory.data.federation import Federation
from priory.data.options import PartitionOptions, check_names, names, takes

__all__ = ["ArrayOptions", "dataset", "fixed_scaling", "from_arrays", "from_npz", "pixel_scaling"]

SCALINGS = ("standard", "unit", "symmetric", "none")
KEYS = ("x", "y", "client", "scale", "group", "classes")


@dataclass(frozen=True, eq=False)
class ArrayOptions:
    """What is known of arrays besides inputs, targets and clients.

    Attributes:
        scale: (examples,) known standard errors of the targets.
        group: (examples,) units whose rows never fall on both sides of a split.
        task: 'classification' or 'regression'; by default inferred from `y`.
        classes: Names of all classes, when `y` already counts from 0 and may not have all of them.
        scaling: 'standard' (statistics of the training rows), 'unit' ([0, 1], uint8), 'symmetric' ([-1, 1], uint8)
            or 'none'; by default 'unit' for uint8 and 'none' otherwise.
        name: Of the data.
    """

    scale: ArrayLike | None = None
    group: ArrayLike | None = None
    task: Literal["classification", "regression"] | None = None
    classes: Sequence[str] = ()
    scaling: str | None = None
    name: str = "arrays"


@takes(ArrayOptions, PartitionOptions)
def from_arrays(x: ArrayLike, y: ArrayLike, client: ArrayLike, **options: Any) -> Federation:
    """Return the federation whose clients are named row by row in `client`.

    >>> from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1], ["a", "a", "b"], test=0.0)
    <Federation arrays: 2 clients, 1 float32, 2 classes, 3 train>

    Args:
        options: Those of `arrays.dataset` and of `Dataset.partition`.
    """
    check_names(options, ArrayOptions, PartitionOptions)
    of_arrays = {key: options.pop(key) for key in names(ArrayOptions) if key in options}
    return dataset(x, y, client, **of_arrays).partition(**options)


@takes(ArrayOptions)
def dataset(x: ArrayLike, y: ArrayLike, client: ArrayLike | None = None, **options: Any) -> Dataset:
    """Return the arrays as a data set.

    Args:
        x: (examples, ...) finite numbers; uint8 is kept and scaled in the batch, everything else becomes float32.
        y: (examples,) labels of any kind, renumbered from 0, or real numbers.
        client: (examples,) natural clients; without them the rows must be partitioned.
        options: Those of `ArrayOptions`.
    """
    check_names(options, ArrayOptions)
    chosen, pool = ArrayOptions(**options), checks.examples(x)
    roles = {"client": client, "scale": chosen.scale, "group": chosen.group}
    for what, values in {"y": y, **roles}.items():
        if values is not None and (rows := len(np.atleast_1d(np.asarray(values)))) != len(pool):
            raise UsageError(f"{what} has {rows} rows and x has {len(pool)}; give one value for each row of x.")
    label, num_classes, classes = labels.read_target(y, "y", chosen.task, tuple(chosen.classes))
    shift, factor = _scaling(pool, chosen.scaling)
    return Dataset(
        name=chosen.name,
        x=pool,
        y=label,
        num_classes=num_classes,
        classes=classes,
        pixel_max=255 if pool.dtype == np.uint8 and pool.ndim == 4 else None,
        shift=shift,
        factor=factor,
        source={"data": chosen.name, "memory": True},
        **labels.read_roles(roles, {role: role for role in roles}),
    )


def from_npz(path: str, *, task: str | None = None, scaling: str | None = None) -> Dataset:
    """Return the data set in a .npz file with arrays x, y and, as wanted, client, scale, group, classes."""
    arrays = read_npz(path, needed=("x", "y"))
    named = tuple(map(str, arrays.pop("classes", ())))
    return dataset(
        arrays.pop("x"), arrays.pop("y"), classes=named, task=task, scaling=scaling, name=Path(path).stem, **arrays
    )


def read_npz(path: str, needed: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file whose names mean something here, those needed among them."""
    arrays, found = npz.read(path, KEYS, path, "x=x, y=y, client=client")
    for key in needed:
        if key not in arrays:
            raise UsageError(
                f"{path} has no array {key!r}, only {checks.listing(found) or 'nothing'}; save it with x, y and client."
            )
    return arrays


def pixel_scaling(
    scaling: str, pixel_max: int, mean: Sequence[float], deviation: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return shift and factor for uint8 pixels; mean and deviation are those of pixels in [0, 1], one per channel."""
    if scaling == "standard":
        shift, factor = pixel_max * np.array(mean), 1.0 / (pixel_max * np.array(deviation))
    elif scaling == "unit":
        shift, factor = np.zeros(()), np.array(1.0 / pixel_max)
    elif scaling == "symmetric":
        shift, factor = np.array(pixel_max / 2), np.array(2.0 / pixel_max)
    else:
        raise checks.unknown("scaling", str(scaling), ("standard", "unit", "symmetric"))
    if shift.size == 1:  # one channel: plain numbers
        shift, factor = shift.reshape(()), factor.reshape(())
    return shift.astype(np.float32), factor.astype(np.float32)


def fixed_scaling(scaling: str) -> tuple[np.ndarray, np.ndarray]:
    """Return shift and factor that depend on no row: 'unit' and 'symmetric' for uint8 pixels, or 'none'."""
    if scaling == "none":
        return np.zeros((), np.float32), np.ones((), np.float32)
    return pixel_scaling(scaling, 255, (), ())


def _scaling(x: np.ndarray, scaling: str | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    scaling = scaling or ("unit" if x.dtype == np.uint8 else "none")
    if scaling not in SCALINGS:
        raise checks.unknown("scaling", str(scaling), SCALINGS)
    if scaling == "standard":
        return None, None
    if scaling != "none" and x.dtype != np.uint8:
        raise UsageError(f"scaling={scaling!r} is for uint8 pixels, and x is {x.dtype}; use 'standard' or 'none'.")
    return fixed_scaling(scaling)
