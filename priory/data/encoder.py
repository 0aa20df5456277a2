"""Encoders: how the raw columns of a table become inputs.

Numeric columns are standardised and their gaps filled with the mean; text becomes one column per category; a column
with gaps gains an indicator column. The means and deviations come from the training rows of the participants, pooled,
never from validation rows, test rows or newcomers: in a real federation the clients would share them as sums. A schema
that states bounds takes the place of these statistics.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from priory.core.errors import UsageError
from priory.data import checks, labels

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Encoder", "Feature", "bounded_encoder", "check_range", "fit_encoder", "raw_matrix"]


@dataclass(frozen=True)
class Feature:
    """One column of a table: its categories (None for numbers), whether it has gaps, and the bounds of its numbers.

    Only a schema states bounds. Numbers outside them are clipped.
    """

    name: str
    categories: tuple[str, ...] | None
    missing: bool
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Encoder:
    """How raw columns become inputs: fitted on training rows or stated by a schema, applied to every row."""

    features: tuple[Feature, ...]
    mean: np.ndarray  # (features,) 0 for categories
    deviation: np.ndarray  # (features,) 1 for categories and for constant columns

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each encoded column."""
        columns = []
        for feature in self.features:
            columns += [f"{feature.name}={value}" for value in feature.categories or ()]
            columns += [feature.name] if feature.categories is None else []
            columns += [f"{feature.name} missing"] if feature.missing else []
        return tuple(columns)

    def encode(self, raw: np.ndarray) -> np.ndarray:
        """Return (rows, columns) float32 inputs from the (rows, features) raw matrix."""
        columns = []
        for index, feature in enumerate(self.features):
            value = raw[:, index]
            gap = np.isnan(value)
            if feature.bounds is not None:
                value = np.clip(value, *feature.bounds)
            if feature.categories is None:
                columns.append(np.where(gap, 0.0, (value - self.mean[index]) / self.deviation[index])[:, None])
            else:
                columns.append(value[:, None] == np.arange(len(feature.categories)))
            if feature.missing:
                columns.append(gap[:, None])
        return np.concatenate(columns, axis=1).astype(np.float32)

    def encode_frame(self, frame: "pd.DataFrame") -> np.ndarray:
        """Return (rows, columns) float32 inputs from a new data frame; a category never seen counts as missing."""
        named = frame.set_axis([str(column) for column in frame.columns], axis=1)
        return self.encode(raw_matrix(named, self.features))


def fit_encoder(features: tuple[Feature, ...], raw: np.ndarray) -> Encoder:
    """Return the encoder whose means and deviations are those of the given (training) rows."""
    numeric = np.array([feature.categories is None for feature in features])
    seen = ~np.isnan(raw)
    count = np.maximum(seen.sum(axis=0), 1)
    mean = np.where(seen, raw, 0.0).sum(axis=0) / count
    deviation = np.sqrt(np.where(seen, (raw - mean) ** 2, 0.0).sum(axis=0) / count)
    return Encoder(features, np.where(numeric, mean, 0.0), np.where(numeric & (deviation > 1e-12), deviation, 1.0))


def bounded_encoder(features: tuple[Feature, ...]) -> Encoder:
    """Return the encoder of features with bounds: a value that is uniform between them gets mean 0 and deviation 1.

    x' = √12 (x - (low + high)/2) / (high - low), which is between -√3 and √3.
    """
    low, high = np.array([feature.bounds or (0.0, 0.0) for feature in features]).T
    numeric = np.array([feature.categories is None for feature in features])
    return Encoder(features, low / 2 + high / 2, np.where(numeric, (high - low) / math.sqrt(12), 1.0))


def raw_matrix(frame: "pd.DataFrame", features: tuple[Feature, ...]) -> np.ndarray:
    """Return float64 (rows, features): numbers as they are, categories as codes, NaN for a gap or unknown category."""
    absent = [feature.name for feature in features if feature.name not in frame.columns]
    if absent:
        raise UsageError(f"column {absent[0]!r} is absent; the columns are {checks.listing(frame.columns)}.")
    raw = np.full((len(frame), len(features)), np.nan)
    for index, feature in enumerate(features):
        column = frame[feature.name]
        if feature.categories is None:
            try:
                raw[:, index] = column.to_numpy(float, na_value=np.nan)
            except (TypeError, ValueError):
                raise UsageError(f"column {feature.name!r} is not numeric; make it a number.") from None
            check_range(feature.name, raw[:, index])
        else:
            present = np.flatnonzero(column.notna())
            code, names = labels.codes(column.iloc[present].to_numpy(), f"column {feature.name!r}")
            place = {name: float(place) for place, name in enumerate(feature.categories)}
            known = np.array([place.get(name, np.nan) for name in names])
            raw[present, index] = known[code]
    return raw


def check_range(name: str, values: np.ndarray, otherwise: str = "") -> None:
    """Raise where a number, which is no gap, has no single precision."""
    given = values[~np.isnan(values)]
    bad = given[~np.isfinite(checks.as_single(given))]
    if len(bad):
        what = "infinite" if np.isinf(bad).all() else checks.unusable(bad)
        raise UsageError(f"column {name!r} is {what} in {len(bad)} rows; correct those rows{otherwise}.")
