"""Split conformal prediction, a client at a time, calibrated on its validation rows.

Classes      score 1 − p_y; the set of x is every class c with 1 − p_c ≤ q, and always the most probable class: a set
             is never empty, which can only raise the coverage
Regression   score |y − mean| / sd; the interval is mean ± q · sd

q is the ⌈(n + 1) · level⌉-th smallest of the n scores of the client's validation rows, and +∞ when n is too small for
that (n < level / (1 − level)): the set then holds every class, the interval is the whole line. If the validation rows
and a test row of a client are exchangeable, the test row is covered with probability at least `level`, whatever the
model (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Lei et al., JASA 2018). That is on
average over draws of both parts, and not for every class or every kind of input.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from priory.uncertainty.answers import Answers, Examples

ASSUMPTION = (
    "Validation and test rows of a client are exchangeable, and the validation rows had no part in training or in "
    "choosing settings."
)


def threshold(scores: np.ndarray, level: float) -> float:
    """The ⌈(n + 1) · level⌉-th smallest of n scores, +∞ when there are not so many; NaN counts as +∞."""
    rank = _rank(len(scores), level)
    if rank > len(scores):
        return math.inf
    return float(np.sort(np.where(np.isnan(scores), np.inf, scores))[rank - 1])


def _rank(num: int, level: float) -> int:
    # The tolerance is for products such as 10 · 0.9, which may round above 9.
    return math.ceil((num + 1) * level - 1e-9)


def sets(probs: np.ndarray, calibration: np.ndarray, labels: np.ndarray, level: float) -> np.ndarray:
    """Which classes (rows, classes) are in the set of each row.

    Args:
        probs: (rows, classes).
        calibration: Likewise, of the validation rows.
        labels: Of the validation rows.
    """
    return sets_within(probs, threshold(class_scores(calibration, labels), level))


def class_scores(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """1 − p_y of each row."""
    return 1 - probs[np.arange(len(labels)), labels]


def sets_within(probs: np.ndarray, limit: float) -> np.ndarray:
    """Which classes (rows, classes) have 1 − p at most the limit, or are the most probable of their row."""
    # A model that says NaN says nothing, so no class is left out.
    found = ~(1 - probs > limit)
    found[np.arange(len(probs)), probs.argmax(axis=1)] = True
    return found


def intervals(
    mean: np.ndarray, sd: np.ndarray, calibration: tuple[np.ndarray, np.ndarray, np.ndarray], level: float
) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the interval of each row; infinite where the validation rows are too few.

    Args:
        calibration: Targets, means and sds of the validation rows.
    """
    limit = threshold(target_scores(*calibration), level)
    return mean - limit * sd, mean + limit * sd


def target_scores(y: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """|y − mean| / sd of each row."""
    return np.abs(y - mean) / sd


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Clients that can be calibrated.

    Attributes:
        validation: Rows to calibrate on.
        clients: Those with test and with validation rows.
        counts: Validation rows of each of them.
        test: Which test rows are theirs.
        without: Clients with test rows and no validation rows.
    """

    validation: Examples
    clients: np.ndarray
    counts: np.ndarray
    test: np.ndarray
    without: int

    def described(self, level: float) -> dict[str, Any]:
        """Return the fields of `Conformal` except for the coverage."""
        too_few = sum(_rank(count, level) > count for count in self.counts.tolist())
        rows = int(self.counts.sum())
        return {
            "level": level,
            "calibration": rows,
            "assumption": ASSUMPTION,
            "without": self.without,
            "too_few": too_few,
        }


def calibrated(answers: Answers, missing: str | None) -> Calibrated | str:
    """Return the clients that can be calibrated, or why none can; `missing` says so where it is known already."""
    if missing is not None:
        return missing
    tested, held = np.unique(answers.test.client), answers.validation
    clients = np.intersect1d(tested, [] if held is None else held.client)
    if held is None or not len(clients):
        return "No client has validation rows to calibrate on; partition the data with validation=0.2 and run again."
    counts = np.bincount(held.client, minlength=len(answers.clients))[clients]
    return Calibrated(held, clients, counts, np.isin(answers.test.client, clients), len(tested) - len(clients))
