"""What the examples of a federation look like: all that reading a new one takes, without any of the old ones."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike

from priory.core.errors import UsageError
from priory.data import checks, labels
from priory.data.encoder import Encoder, Feature

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Form", "check_columns", "from_table", "to_table"]


@dataclass(frozen=True, eq=False)
class Form:
    """The form of inputs and labels.

    Attributes:
        name: Of the data.
        input_shape: Of one example.
        shift: float32, one number or one per channel; a model sees (x - shift) * factor.
        factor: As `shift`.
        num_classes: None for regression.
        classes: Class names, in label order.
        encoder: How the columns of a table become inputs; None for arrays and images.
        roles: Columns of the table that are no inputs, by what they are: target, client, group, scale, drop.
    """

    name: str
    input_shape: tuple[int, ...]
    shift: np.ndarray
    factor: np.ndarray
    num_classes: int | None
    classes: tuple[str, ...]
    encoder: Encoder | None
    roles: dict[str, tuple[str, ...]]

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that are inputs; none for arrays and images."""
        return () if self.encoder is None else tuple(feature.name for feature in self.encoder.features)

    def role(self, name: str) -> str | None:
        """Return the column of that role, where the data named one."""
        return next(iter(self.roles.get(name, ())), None)

    def read_inputs(self, x: "ArrayLike | pd.DataFrame", encoded: bool = False) -> np.ndarray:
        """Return new examples in the form of the pool; the encoder fitted on training rows is applied to a data frame.

        Args:
            encoded: Whether an array has the columns of a federation's `x` of a table, and not raw ones.
        """
        if self.encoder is not None and hasattr(x, "columns"):
            check_columns(self, x.columns)
            return self.encoder.encode_frame(cast("pd.DataFrame", x))
        if self.encoder is not None and not encoded:
            raise UsageError(
                f"An array does not say which column is which; give a data frame with {checks.listing(self.columns)}, "
                "or encoded=True for rows of the federation's x."
            )
        rows = checks.examples(x)
        if rows.shape[1:] != self.input_shape:
            raise UsageError(f"Examples of shape {rows.shape[1:]} do not fit; each has shape {self.input_shape}.")
        return rows

    def read_labels(self, y: ArrayLike) -> np.ndarray:
        """Return new labels or targets in the form of the pool."""
        if self.num_classes is None:
            return labels.real_numbers(y, "y")
        return labels.known_codes(y, self.classes, "y")

    def extra(self, columns: Iterable[object]) -> list[str]:
        """Return those of the columns that are neither inputs nor have a role in the data."""
        known = {*self.columns, *(name for names in self.roles.values() for name in names)}
        return [str(name) for name in columns if str(name) not in known]


def to_table(form: Form) -> dict[str, Any]:
    """Return the form as JSON values; the shape of an input is not among them."""
    return {
        "name": form.name,
        "num_classes": form.num_classes,
        "classes": list(form.classes),
        "shift": np.asarray(form.shift).tolist(),
        "factor": np.asarray(form.factor).tolist(),
        "columns": None if form.encoder is None else _columns_table(form.encoder),
        "roles": {role: list(names) for role, names in form.roles.items()},
    }


def from_table(table: dict[str, Any], input_shape: tuple[int, ...]) -> Form:
    """Return the form that `to_table` wrote down."""
    columns = table["columns"]
    return Form(
        table["name"],
        input_shape,
        np.array(table["shift"], np.float32),
        np.array(table["factor"], np.float32),
        table["num_classes"],
        tuple(table["classes"]),
        None if columns is None else _encoder(columns),
        {role: tuple(names) for role, names in table["roles"].items()},
    )


def check_columns(form: Form, columns: Iterable[object]) -> None:
    """Raise when inputs are missing among the columns of a table, naming these and what stands there instead."""
    given = [str(name) for name in columns]
    missing = [name for name in form.columns if name not in given]
    if not missing:
        return
    extra = form.extra(given)
    besides = f", and {_named(extra, 'unknown')}" if extra else ""
    raise UsageError(
        f"{_named(missing, 'absent')}{besides}; name the columns as the training data did: "
        f"{checks.listing(form.columns)}."
    )


def _named(names: list[str], what: str) -> str:
    """Return the sentence that columns are something."""
    one = len(names) == 1
    return f"column{'' if one else 's'} {checks.listing(map(repr, names))} {'is' if one else 'are'} {what}"


def _columns_table(encoder: Encoder) -> list[dict[str, Any]]:
    statistics = zip(encoder.features, encoder.mean.tolist(), encoder.deviation.tolist(), strict=True)
    return [
        {
            "name": feature.name,
            "categories": None if feature.categories is None else list(feature.categories),
            "missing": feature.missing,
            "mean": mean,
            "deviation": deviation,
            **({} if feature.bounds is None else {"bounds": list(feature.bounds)}),
        }
        for feature, mean, deviation in statistics
    ]


def _encoder(columns: list[dict[str, Any]]) -> Encoder:
    def optional(values: Any) -> Any:
        return None if values is None else tuple(values)

    features = [
        Feature(one["name"], optional(one["categories"]), bool(one["missing"]), optional(one.get("bounds")))
        for one in columns
    ]
    mean, deviation = (np.array([one[name] for one in columns], np.float64) for name in ("mean", "deviation"))
    return Encoder(tuple(features), mean, deviation)
