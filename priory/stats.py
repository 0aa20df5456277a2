"""Means over repeated runs with their standard errors, and differences that are paired by seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; None where they are not known."""

    value: float | None
    error: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Both by name."""
        return {"mean": self.value, "standard_error": self.error}


def estimate(values: Sequence[float | None]) -> Estimate:
    """Estimate the mean; a missing value leaves it unknown, since a seed that failed is not passed over in silence."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Estimate(None)
    return Estimate(statistics.fmean(known), standard_error(known))


def paired(own: Sequence[float | None], base: Sequence[float | None]) -> Estimate:
    """Estimate the mean difference, so that what a seed does to both values of a pair cancels."""
    return estimate([None if a is None or b is None else a - b for a, b in zip(own, base, strict=True)])


def standard_error(values: Sequence[float]) -> float | None:
    """Return s / √n, the standard error of the mean; None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
