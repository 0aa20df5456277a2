"""Simulation-based calibration: where truths fall among draws of the posteriors that should hold them.

Talts et al., Validating Bayesian Inference Algorithms with Simulation-Based Calibration, 2018, arXiv:1804.06788. If a
client's truth comes from the prior and its draws from the posterior under that prior, the truth's place among them is
uniform. Whether it is, is judged by Neyman's smooth test (Neyman, Skandinavisk Aktuarietidskrift 1937): the first four
Legendre polynomials of the place answer to bias, width, skew and tails, which is where posteriors go wrong.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import legendre
from scipy import stats

from priory.stats import estimate

LEVELS = (0.5, 0.8, 0.9, 0.95)  # of the central intervals
ALPHA = 0.01  # share of right posteriors that are refuted
DEGREES = 4


@dataclass(frozen=True)
class Coverage:
    """How many truths lie in the central intervals of one level, with the standard error over clients."""

    level: float
    held: float
    error: float


@dataclass(frozen=True)
class Verdict:
    """Whether posteriors mean what they say.

    Attributes:
        coverage: Of each level, over all weights.
        p_value: That right posteriors would look this wrong: the least over the weights, times their number.
        width: Standard deviation of the draws over that of the exact posterior, a mean; None where that is not known.
        bias: Mean over clients of (mean of the draws − truth) in standard deviations of the draws, by weight.
        clients: How many truths there were of each weight.
    """

    coverage: tuple[Coverage, ...]
    p_value: float
    width: float | None
    bias: tuple[float, ...]
    clients: int

    @property
    def passes(self) -> bool:
        return self.p_value >= ALPHA

    def at(self, level: float) -> Coverage:
        """The coverage of a level."""
        return next(one for one in self.coverage if one.level == level)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        return {
            "passes": self.passes,
            "p_value": self.p_value,
            "coverage": {f"{one.level:g}": {"held": one.held, "error": one.error} for one in self.coverage},
            "width": self.width,
            "bias": list(self.bias),
            "clients": self.clients,
        }


def judge(draws: np.ndarray, truth: np.ndarray, exact_sd: float | None, seed: int) -> Verdict:
    """The verdict on draws (clients, draws, weights) that should be from the posteriors of truths (clients, weights).

    Draws that are not finite are as wrong as can be: they count as lying below every truth.
    """
    places = places_of(draws, truth, seed)
    p_values = [smooth_test(places[:, j]) for j in range(places.shape[1])]
    sd = np.std(draws, axis=1, ddof=1)
    off = np.mean(draws, axis=1) - truth
    return Verdict(
        coverage=tuple(coverage_of(places, level) for level in LEVELS),
        p_value=min(1.0, len(p_values) * min(p_values)),  # Bonferroni
        width=None if exact_sd is None else float(np.mean(sd) / exact_sd),
        bias=tuple(float(np.mean(one)) for one in (off / np.maximum(sd, np.finfo(np.float32).tiny)).T),
        clients=len(truth),
    )


def places_of(draws: np.ndarray, truth: np.ndarray, seed: int) -> np.ndarray:
    """The place of each truth among its draws, in (0, 1), (clients, weights); uniform if the posteriors are right.

    The rank is one of L + 1 numbers, and a truth may equal some draws: both are made smooth by lot.
    """
    lots = np.random.default_rng(seed)
    below = np.sum(~(draws >= truth[:, None]), axis=1)  # NaN is below
    equal = np.sum(draws == truth[:, None], axis=1)
    rank = below + lots.integers(0, equal + 1)
    return np.asarray((rank + lots.uniform(size=rank.shape)) / (draws.shape[1] + 1))


def smooth_test(places: np.ndarray) -> float:
    """The p-value of Neyman's test that places (clients,) are uniform on (0, 1)."""
    moments = [
        math.sqrt(2 * j + 1) * np.mean(legendre.Legendre.basis(j)(2 * places - 1)) for j in range(1, DEGREES + 1)
    ]
    return float(stats.chi2.sf(len(places) * np.sum(np.square(moments)), DEGREES))


def coverage_of(places: np.ndarray, level: float) -> Coverage:
    """The share of places inside the central interval, which is `level` if they are uniform."""
    each = np.mean(np.abs(places - 0.5) < level / 2, axis=1)  # the weights of a client may depend on each other
    found = estimate(each.tolist())
    assert found.value is not None
    assert found.error is not None
    return Coverage(level, found.value, found.error)
