"""Scores that are functions of sums over examples, so that a bootstrap only has to weigh the sums.

ECE by equal mass   as ECE, with 15 bins that hold equally many examples of all clients together; equal confidences
                    share a bin, and the bins stay as they are when clients are resampled
Classwise ECE       mean over classes c of Σ_b n_b/n |mean p_c − share of class c|, over 15 equal bins of p_c
Brier score         summed over classes, each an event of its own forecast by p_c, in 15 equal bins b of p_c:
                    reliability − resolution + uncertainty, where
                    reliability   Σ_c Σ_b n_b/n (p̄_b − ō_b)²
                    uncertainty   Σ_c ō (1 − ō)
                    resolution    Σ_c Σ_b n_b/n (ō_b − ō)² − (variance of p_c in bins) + 2 (covariance with o in bins),
                    the generalised resolution of Stephenson, Coelho and Jolliffe, Two Extra Components in the Brier
                    Score Decomposition, Weather and Forecasting 2008: so the three add up exactly, whatever the bins
Rejection area      ∫₀¹ of the accuracy of the share κ of the examples with the smallest entropy; equal entropies are
                    kept in random order, in expectation
Interval score      (u − l) + 2/α (l − y)⁺ + 2/α (y − u)⁺ with α = 1 − level; Gneiting and Raftery, JASA 2007
AUROC, FPR95        of foreign against own test inputs of one client, see `placement` and `accepted`
"""

from dataclasses import dataclass

import numpy as np
import scipy

from priory.metrics import NUM_BINS
from priory.uncertainty.bootstrap import Units


@dataclass(frozen=True, eq=False)
class Binned:
    """Sums of columns over the examples of each unit and bin.

    Attributes:
        sums: (units, bins · columns).
        shape: Of the bins, and the number of columns.
    """

    sums: "scipy.sparse.csr_matrix"
    shape: tuple[int, ...]

    @classmethod
    def of(cls, units: Units, bins: np.ndarray, columns: list[np.ndarray], shape: tuple[int, ...]) -> "Binned":
        """The sums of the columns, each (examples, ...) like `bins`, which number the bins of `shape` from 0."""
        num = len(columns)
        unit = np.broadcast_to(units.of.reshape(-1, *(1,) * (bins.ndim - 1)), bins.shape).ravel()
        values = np.stack([np.asarray(column, float).ravel() for column in columns], axis=1)
        place = num * bins.reshape(-1, 1) + np.arange(num)
        entries = (values.ravel(), (np.repeat(unit, num), place.ravel()))
        size = int(np.prod(shape)) * num
        return cls(scipy.sparse.csr_matrix(entries, shape=(units.num, size)), (*shape, num))

    def total(self, weights: np.ndarray) -> np.ndarray:
        """The sums over all units, each with its weight, (bins, columns)."""
        return np.asarray(self.sums.T @ weights).reshape(self.shape)

    def each(self) -> np.ndarray:
        """The sums of each unit, (units, bins, columns)."""
        return self.sums.toarray().reshape(-1, *self.shape)


def equal_mass_bins(confidence: np.ndarray) -> np.ndarray:
    """Which of at most 15 bins of about equally many examples each confidence falls in, from 0; equals share one."""
    known = confidence[~np.isnan(confidence)]
    if not len(known):
        return np.zeros(len(confidence), int)
    edges = np.quantile(known, np.arange(1, NUM_BINS) / NUM_BINS, method="inverted_cdf")
    return np.where(np.isnan(confidence), 0, np.searchsorted(edges, confidence, side="left"))


def classwise_ece(total: np.ndarray) -> float:
    """Classwise ECE from sums (classes, bins, 5) of 1, p, o, p², p·o."""
    gaps = np.abs(total[..., 1] - total[..., 2]).sum(axis=1)
    return float(np.mean(gaps / total[..., 0].sum(axis=1)))


def brier_parts(total: np.ndarray) -> tuple[float, float, float]:
    """Reliability, generalised resolution and uncertainty from sums (classes, bins, 5) of 1, p, o, p², p·o."""
    count, p, o, p_squared, product = np.moveaxis(total, -1, 0)
    num = count.sum(axis=1, keepdims=True)
    # Every sum is divided by n once; an empty bin holds zeros and adds nothing.
    per = np.where(count > 0, count, 1.0)
    rate = o.sum(axis=1, keepdims=True) / num
    reliability = np.sum((p - o) ** 2 / per / num)
    between = np.sum((o - count * rate) ** 2 / per / num)
    variance = np.sum((p_squared - p**2 / per) / num)
    covariance = np.sum((product - p * o / per) / num)
    return float(reliability), float(between - variance + 2 * covariance), float(np.sum(rate * (1 - rate)))


@dataclass(frozen=True, eq=False)
class Order:
    """Examples from the most to the least certain; equals are one step.

    Attributes:
        step: Of each example, (examples,).
        num: How many steps there are.
        is_defined: Whether every example has an entropy.
    """

    step: np.ndarray
    num: int
    is_defined: bool

    @classmethod
    def by(cls, entropy: np.ndarray) -> "Order":
        """The order of the entropies."""
        levels, step = np.unique(entropy, return_inverse=True)
        return cls(step, len(levels), not np.isnan(entropy).any())

    def sums(self, correct: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The weight kept and the weight that is correct after each step, from 0, (steps + 1,) each."""
        kept = np.bincount(self.step, weights, self.num)
        right = np.bincount(self.step, weights * correct, self.num)
        return np.append(0.0, np.cumsum(kept)), np.append(0.0, np.cumsum(right))

    def accuracy(self, correct: np.ndarray, share: np.ndarray) -> np.ndarray:
        """The accuracy of the most certain share of the examples, for each share in (0, 1]."""
        if not self.is_defined:
            return np.full(len(share), np.nan)
        kept, right = self.sums(correct, np.ones(len(correct)))
        return np.interp(share * kept[-1], kept, right) / (share * kept[-1])

    def area(self, correct: np.ndarray, weights: np.ndarray) -> float:
        """The area under the accuracy as a function of the share, exactly.

        Within a step the number of correct ones is linear in what is kept, c + s (m − m₀), whose quotient by m has the
        integral s (m₁ − m₀) + (c − s m₀) log(m₁/m₀).
        """
        if not self.is_defined:
            return float("nan")
        kept, right = self.sums(correct, weights)
        drawn = np.diff(kept) > 0
        start, stop, before = kept[:-1][drawn], kept[1:][drawn], right[:-1][drawn]
        slope = np.diff(right)[drawn] / (stop - start)
        first = np.where(start > 0, start, stop)  # nothing is kept before the first step, and its quotient is its slope
        return float(np.sum(slope * (stop - start) + (before - slope * start) * np.log(stop / first)) / kept[-1])


def interval_score(y: np.ndarray, low: np.ndarray, high: np.ndarray, level: float) -> np.ndarray:
    """The score of each interval; smaller is better."""
    outside = np.maximum(low - y, 0.0) + np.maximum(y - high, 0.0)
    return high - low + 2 / (1 - level) * outside


def placement(own: np.ndarray, foreign: np.ndarray) -> np.ndarray:
    """The share of foreign scores above each own score, equals half; its mean is the AUROC. NaN where a score is."""
    if np.isnan(foreign).any():
        return np.full(len(own), np.nan)
    ordered = np.sort(foreign)
    below, not_above = (np.searchsorted(ordered, own, side=side) for side in ("left", "right"))
    return np.where(np.isnan(own), np.nan, 1 - (below + not_above) / (2 * len(ordered)))


def accepted(own: np.ndarray, foreign: np.ndarray, weights: np.ndarray, share: float = 0.95) -> float:
    """The share of foreign scores not above the smallest score that at least so much of the own ones stay within."""
    if np.isnan(own).any() or np.isnan(foreign).any():
        return float("nan")
    order = np.argsort(own, kind="stable")
    mass = np.cumsum(weights[order])
    # The tolerance is for sums such as 0.95 · 20, which may round above 19.
    threshold = own[order][np.searchsorted(mass, share * mass[-1] - 1e-9)]
    return float(np.mean(foreign <= threshold))
