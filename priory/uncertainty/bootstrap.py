"""Standard errors by resampling clients, which are what a federation is a sample of.

With a single client its examples are resampled instead. Whatever a replicate drew of a unit is a weight: 0, 1, 2, …
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from priory.uncertainty.tables import Metric

SEED = 0


@dataclass(frozen=True, eq=False)
class Units:
    """What is resampled.

    Attributes:
        of: The unit of each example, (examples,).
        num: How many there are.
    """

    of: np.ndarray
    num: int


def units_of(client: np.ndarray) -> Units:
    """The clients that the examples belong to, or the examples where all belong to one client."""
    present, unit = np.unique(client, return_inverse=True)
    return Units(np.arange(len(client)), len(client)) if len(present) == 1 else Units(unit, len(present))


def bootstrap(figures: Callable[[np.ndarray], dict[str, float]], num: int, replicates: int) -> dict[str, Metric]:
    """The figures at weight 1 for each of the `num` units, and their standard deviations over replicates, by name."""
    draw = np.random.default_rng(SEED)
    with np.errstate(divide="ignore", invalid="ignore"):  # what is not defined is NaN
        found = figures(np.ones(num))
        again = [figures(_weights(draw, num)) for _ in range(replicates)]
        return {name: Metric(value, _deviation([one[name] for one in again])) for name, value in found.items()}


def _weights(draw: np.random.Generator, num: int) -> np.ndarray:
    return np.bincount(draw.integers(num, size=num), minlength=num).astype(float)


def _deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
