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

from priory.uncertainty.answers import Answers

ASSUMPTION = (
    "Validation and test rows of a client are exchangeable, and the validation rows had no part in training or in "
    "choosing settings."
)


def threshold(scores: np.ndarray, level: float) -> float:
    """The ⌈(n + 1) · level⌉-th smallest of n scores, +∞ when there are not so many; NaN counts as +∞."""
    # The tolerance is for products such as 10 · 0.9, which may round above 9.
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        return math.inf
    return float(np.sort(np.where(np.isnan(scores), np.inf, scores))[rank - 1])


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
    """Who can be calibrated.

    Attributes:
        clients: Those with test and with validation rows.
        counts: Validation rows of each of them.
        test: Which test rows are theirs.
        without: Clients with test rows and no validation rows.
    """

    clients: np.ndarray
    counts: np.ndarray
    test: np.ndarray
    without: int

    @property
    def rows(self) -> int:
        """Validation rows of all of them."""
        return int(self.counts.sum())

    def too_few(self, level: float) -> int:
        """Clients whose validation rows are too few for the level."""
        return sum(threshold(np.zeros(count), level) == math.inf for count in self.counts)

    def told(self, level: float) -> dict[str, Any]:
        """What is said of the calibration beside coverage and size: the fields that `Sets` and `Intervals` share."""
        return {
            "level": level,
            "calibration": self.rows,
            "assumption": ASSUMPTION,
            "without": self.without,
            "too_few": self.too_few(level),
        }


def calibrated(answers: Answers, missing: str | None) -> Calibrated | str:
    """Who can be calibrated, or why nobody can; `missing` says so where it is known already."""
    if missing is not None:
        return missing
    tested = np.unique(answers.test.client)
    held = np.array([], int) if answers.validation is None else answers.validation.client
    clients = np.intersect1d(tested, held)
    if not len(clients):
        return "No client has validation rows to calibrate on; partition the data with validation=0.2 and run again."
    counts = np.bincount(held, minlength=len(answers.clients))[clients]
    return Calibrated(clients, counts, np.isin(answers.test.client, clients), len(tested) - len(clients))
