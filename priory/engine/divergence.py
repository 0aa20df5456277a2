"""Whether training diverged, and the likely cause, from what is on the host when a run ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np

from priory.data import Federation
from priory.engine.rounds import Trace
from priory.fed import schedule
from priory.fed.method import Method
from priory.fed.visit import COUNTED, STATUSES
from priory.metrics import RegressionScores, Scores

DIVERGED = "diverged"  # the kind of the advice
FAR = 100.0  # quartile deviations from the median at which a number is called an outlier
LARGE = 100.0  # typical magnitude at which numbers are called unscaled
MOST_ROWS = 20_000  # that medians are taken of
SPOILT = [STATUSES.index(reason) for reason in ("not finite", "norm")]

AnyScores = Scores | RegressionScores | None


def is_finite(scores: AnyScores) -> bool:
    """Return whether scores are numbers; an infinite nll alone is that of a class with probability 0."""
    if scores is None:
        return True
    error = scores.rmse if isinstance(scores, RegressionScores) else scores.accuracy
    return bool(np.isfinite(error) and not np.isnan(scores.nll))


def is_diverged(summary: Mapping[str, Any]) -> bool:
    """Return whether the summary of a run says that it diverged."""
    return DIVERGED in summary.get("extra", {}).get("advice", {})


@dataclass(frozen=True)
class Progress:
    """What came of the uploads so far.

    Attributes:
        learned: Whether any round has changed the server.
        lost: Uploads since the last round that did: not finite, too large, or part of a server that was not finite.
    """

    learned: bool = False
    lost: int = 0

    def after(self, trace: Trace) -> "Progress":
        """Return the progress after a block of rounds, whose trace is on the host."""
        counted = np.asarray(trace.status) == COUNTED
        fruitful = np.flatnonzero(counted.any(axis=1) & ~np.asarray(trace.discarded))
        lost = (np.isin(trace.status, SPOILT) | counted).sum(axis=1)
        if not len(fruitful):
            return Progress(self.learned, self.lost + int(lost.sum()))
        return Progress(True, int(lost[fruitful[-1] + 1 :].sum()))

    def has_stopped(self, num_clients: int) -> bool:
        """Return whether nothing is learned any more: as many uploads as there are clients were lost, or all so far."""
        return self.lost >= num_clients or (self.lost > 0 and not self.learned)


def sentence(method: Method, federation: Federation, scores: Mapping[str, AnyScores], progress: Progress) -> str | None:
    """Return what diverged with the likely cause and the remedy; None where training did not diverge.

    Args:
        scores: Of the last evaluation, by name.
    """
    broken = [name for name, found in scores.items() if not is_finite(found)]
    if progress.has_stopped(federation.num_clients):
        fact = f"the last {progress.lost} updates of clients were not finite or above --max-norm, so nothing is learned"
    elif broken:
        fact = f"the {' and '.join(broken)} scores are not finite"
    else:
        return None
    cause = _outlier(federation) or _unscaled(federation) or _step_size(method)
    return f"Training diverged: {fact}; {cause}; the state after the last finite round is kept."


def _outlier(federation: Federation) -> str | None:
    """Name the number of the training rows that is farthest from the others, if it is far."""
    far = [found for found in starmap(_farthest, _columns(federation).items()) if found is not None]
    if not far:
        return None
    ratio, value, name, row = max(far)
    client = federation.clients[int(np.searchsorted(np.cumsum(_counts(federation)), row, side="right"))]
    return (
        f"the likely cause is an outlier, {name} = {value:.6g} of client {client} ({ratio:.2g} times as far from the "
        "median as the quartiles are), so correct or drop such rows"
    )


def _unscaled(federation: Federation) -> str | None:
    """Name the column that is farthest from unit size, if it is far."""
    sizes = [(float(np.median(np.abs(_some(values)))), name) for name, values in _columns(federation).items()]
    size, name = max(sizes, default=(0.0, ""))
    if size <= LARGE:
        return None
    return f"the likely cause is the scale of {name}, which is around {size:.2g}, so divide it to be around 1"


def _step_size(method: Method) -> str:
    """The step sizes of the method that could be lower."""
    paths = schedule.paths_of(method)
    chosen = {name: schedule.get(method, paths[name]) for name in ("step_size", "gamma") if name in paths}
    named = [
        f"--{name.replace('_', '-')} ({'set by itself' if value is None else f'now {value:g}'})"
        for name, value in chosen.items()
    ]
    return f"the likely cause is a step size that is too large, so choose a lower {' or '.join(named) or 'one'}"


def _columns(federation: Federation) -> dict[str, np.ndarray]:
    """What could be out of range in the training rows: a target, and inputs as a model sees them but for pixels."""
    counts = _counts(federation)
    rows = np.repeat(np.asarray(federation.train.start)[: len(counts)] - np.cumsum(counts) + counts, counts)
    rows = rows + np.arange(len(rows))
    found = {} if federation.num_classes is not None else {"the target": np.asarray(federation.y)[rows]}
    if federation.x.dtype != np.uint8:
        inputs = federation.inputs(federation.x[rows]).reshape(len(rows), -1)
        names = federation.encoder.names if federation.encoder is not None else range(inputs.shape[1])
        found |= {f"input {name}": column for name, column in zip(names, inputs.T, strict=True)}
    return found


def _counts(federation: Federation) -> np.ndarray:
    """The training rows of each client that takes part."""
    return np.asarray(federation.train.count)[: federation.num_clients]


def _farthest(name: str, values: np.ndarray) -> tuple[float, float, str, int] | None:
    """How far the farthest number is in quartile deviations, the number, its column and its place, if it is far."""
    low, median, high = np.quantile(_some(values), [0.25, 0.5, 0.75])
    if not high > low:
        return None  # most are equal, as the zeros of a sparse column, so there is nothing to measure by
    distance = np.abs(values.astype(float) - median) / (0.5 * (high - low))
    place = int(distance.argmax())
    return (float(distance[place]), float(values[place]), name, place) if distance[place] > FAR else None


def _some(values: np.ndarray) -> np.ndarray:
    return values[:: -(-len(values) // MOST_ROWS)].astype(float)
