"""Scores of a predictive distribution, row by row and as sums.

`class_scores` and `target_scores` define the scores of a row, for JAX in a compiled loop and for NumPy on the host. A
`Tally` holds sums over examples, so tallies add up over batches inside a compiled loop and over clients outside it;
division happens once, on the host, in `summarise`. Every sum is taken after a `where`: a masked row may hold NaN.

Accuracy     share of examples whose most probable class is the label
NLL          mean of −log p(y | x), nats
Brier        mean of Σ_c (p_c − 1[y = c])², between 0 and 2 (summed over classes, not halved)
ECE, MCE     mean and largest gap |confidence − accuracy| over 15 bins of confidence, (i−1)/15 < p ≤ i/15, p = 0 in the
             first; the mean weighs a bin by its examples, and an empty bin is left out of both
Reliability  the curve behind ECE and MCE: examples, mean confidence and accuracy of each bin
Coverage     share of examples inside the central 90 % predictive interval
Uncertainty  mean entropy −Σ_c p_c log p_c of the predictive mixture, nats; for a regression the mean standard deviation
             of y under it; labels have no part in it
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtri
from jax.scipy.stats import norm

from priory.core.struct import struct

NUM_BINS = 15
EDGES = np.arange(1, NUM_BINS, dtype=np.float32) * (np.float32(1) / np.float32(NUM_BINS))  # i/15 as XLA rounds it
HALVINGS = 40  # of the bracket of a quantile; single precision is reached before
SCORES = {"correct": "accuracy", "covered": "coverage_90", "squared_error": "rmse"}  # names of scores by their sums
CURVE = ("count", "confidence", "accuracy")  # the columns of `Scores.reliability`


@struct
class Tally:
    """Sums over the examples of a classification task.

    Attributes:
        count: Examples.
        correct: Examples whose most probable class is the label.
        nll: Σ −log p(y | x).
        brier: Σ Σ_c (p_c − 1[y = c])².
        uncertainty: Σ −Σ_c p_c log p_c.
        bins: (15, 3); per bin of confidence the examples, the sum of confidences, the correct ones.
    """

    count: Array
    correct: Array
    nll: Array
    brier: Array
    uncertainty: Array
    bins: Array


@struct
class RegressionTally:
    """Sums over the examples of a regression task.

    Attributes:
        count: Examples.
        squared_error: Σ (y − predictive mean)².
        nll: Σ −log p(y | x).
        covered: Examples inside the central 90 % predictive interval.
        uncertainty: Σ sd of y under the predictive mixture.
    """

    count: Array
    squared_error: Array
    nll: Array
    covered: Array
    uncertainty: Array


T = TypeVar("T", Tally, RegressionTally)


def zero(kind: type[T]) -> T:
    """The tally of no example, where a loop over batches starts."""
    shapes = {"bins": (NUM_BINS, 3)}
    return kind(**{entry.name: jnp.zeros(shapes.get(entry.name, ())) for entry in fields(kind)})


def add(a: T, b: T) -> T:
    """The tally of the examples of both."""
    return jax.tree.map(jnp.add, a, b)


def mixture_log_probs(logits: Array, log_weights: Array) -> Array:
    """Log-probabilities (batch, classes) of the mixture log Σ_s w_s softmax(logits_s): probabilities are averaged.

    Args:
        logits: (samples, batch, classes).
        log_weights: (samples, batch); each column log-sums to 0.
    """
    return jax.nn.logsumexp(jax.nn.log_softmax(logits, axis=-1) + log_weights[..., None], axis=0)


def entropy(log_probs: Array) -> Array:
    """The entropy −Σ_c p_c log p_c of each row of log-probabilities (batch, classes), in nats, (batch,)."""
    probs = jnp.exp(log_probs)
    # 0 · log 0 is 0, and NaN stays NaN; rounding may leave a probability just above 1, whose entropy is not negative.
    return jnp.maximum(-jnp.sum(jnp.where(probs == 0, 0.0, probs * log_probs), axis=-1), 0.0)


def mutual_information(logits: Array, log_weights: Array) -> Array:
    """What the components disagree about, Σ_s w_s KL(p_s ‖ Σ_s w_s p_s) in nats, (batch,); arguments as above.

    It is the entropy of the mixture less the mean entropy of its components, and exactly 0 for a single one.
    """
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    ratio = log_probs - mixture_log_probs(logits, log_weights)[None]
    probs, weights = jnp.exp(log_probs), jnp.exp(log_weights)
    divergence = jnp.sum(jnp.where(probs == 0, 0.0, probs * ratio), axis=-1)
    return jnp.maximum(jnp.sum(jnp.where(weights == 0, 0.0, weights * divergence), axis=0), 0.0)


def mixture_mean_and_sd(mean: Array, sd: Array, log_weights: Array) -> tuple[Array, Array]:
    """Mean and standard deviation (batch,) of Σ_s w_s N(mean_s, sd_s²): Var = Σ_s w_s sd_s² + Σ_s w_s (mean_s − mean)².

    All three arguments are (samples, batch); each column of `log_weights` log-sums to 0.
    """
    weights = jnp.exp(log_weights)
    centre = jnp.sum(weights * mean, axis=0)
    return centre, jnp.sqrt(jnp.sum(weights * (sd**2 + (mean - centre[None]) ** 2), axis=0))


def mixture_sds(mean: Array, sd: Array, log_weights: Array) -> tuple[Array, Array]:
    """The roots (batch,) of the two sums of Var above: √Σ_s w_s sd_s² and √Σ_s w_s (mean_s − mean)².

    The first is noise in y (aleatoric), the second what the components disagree about (epistemic).
    """
    weights = jnp.exp(log_weights)
    centre = jnp.sum(weights * mean, axis=0)
    within, between = weights * sd**2, weights * (mean - centre[None]) ** 2
    return jnp.sqrt(jnp.sum(within, axis=0)), jnp.sqrt(jnp.sum(between, axis=0))


def mixture_cdf(y: Array, mean: Array, sd: Array, log_weights: Array) -> Array:
    """The distribution function Σ_s w_s Φ((y − mean_s)/sd_s) at y, (batch,)."""
    return jnp.sum(jnp.exp(log_weights) * norm.cdf(y[None], mean, sd), axis=0)


def mixture_nll(y: Array, mean: Array, sd: Array, log_weights: Array) -> Array:
    """−log Σ_s w_s N(y; mean_s, sd_s²), (batch,)."""
    return -jax.nn.logsumexp(log_weights + norm.logpdf(y[None], mean, sd), axis=0)


def mixture_quantile(level: Array, mean: Array, sd: Array, log_weights: Array) -> Array:
    """The quantile (batch,) of Σ_s w_s N(mean_s, sd_s²) at a level in (0, 1), by halving a bracket.

    It lies between the smallest and the largest quantile of a component; those of weight 0 only widen the bracket.
    """
    own = mean + ndtri(level) * sd

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = low + (high - low) / 2
        is_below = mixture_cdf(middle, mean, sd, log_weights) < level
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    low, high = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.min(own, axis=0), jnp.max(own, axis=0)))
    return low + (high - low) / 2


def class_scores(log_probs: Any, y: Any) -> dict[str, Any]:
    """Return accuracy, NLL, Brier score and confidence of each row, (batch,) each.

    Args:
        log_probs: (batch, classes), log-probabilities of the predictive mixture; an array of JAX or NumPy.
        y: (batch,), labels from 0.
    """
    xp: Any = jnp if isinstance(log_probs, Array) else np
    probs = xp.exp(log_probs)
    hit = y[:, None] == xp.arange(log_probs.shape[-1])[None]
    # argmax picks the first NaN, which must not pass for a prediction.
    right = (xp.argmax(log_probs, axis=-1) == y) & ~xp.isnan(log_probs).any(axis=-1)
    return {
        "accuracy": right.astype(probs.dtype),
        "nll": -xp.take_along_axis(log_probs, y[:, None], axis=-1)[:, 0],
        "brier": xp.sum((probs - hit.astype(probs.dtype)) ** 2, axis=-1),
        "confidence": xp.max(probs, axis=-1),
    }


def target_scores(y: Any, mean: Any, cdf: Any, levels: Sequence[float]) -> dict[str, Any]:
    """Return the squared error of each row and whether the central interval of each level covers it, (batch,) each.

    The interval of 90 % covers a row when 0.05 ≤ F(y) ≤ 0.95.

    Args:
        y: (batch,), targets; an array of JAX or NumPy, as are the next two.
        mean: Of the predictive mixture.
        cdf: F(y), of its distribution function.
    """
    cdf = cdf.astype(np.float32)  # in which an evaluation computes it, so that NumPy rounds the ends in the same way
    covered = {
        f"coverage_{round(100 * level)}": (cdf >= np.float32((1 - level) / 2)) & (cdf <= np.float32((1 + level) / 2))
        for level in levels
    }
    return {"squared_error": (y - mean) ** 2, **{name: inside.astype(mean.dtype) for name, inside in covered.items()}}


def confidence_bins(confidence: Any) -> Any:
    """Return which of the 15 right-closed bins each confidence falls in, from 0; NaN falls in the first."""
    # Counting the edges below p is exact at an edge, where ceil(15 p) may round over it.
    return sum((confidence > edge).astype(np.int32) for edge in EDGES)


def tally_classification(log_probs: Array, y: Array, mask: Array) -> Tally:
    """Return the sums over the rows under the mask (batch,); the other arguments are those of `class_scores`."""
    mask = mask.astype(bool)
    scores, kept = class_scores(log_probs, y), _sum_under(mask)
    confidence, one = scores["confidence"], jnp.ones_like(scores["confidence"])
    per_bin = jnp.stack([one, confidence, scores["accuracy"]], axis=-1)
    return Tally(
        count=kept(one),
        correct=kept(scores["accuracy"]),
        nll=kept(scores["nll"]),
        brier=kept(scores["brier"]),
        uncertainty=kept(entropy(log_probs)),
        bins=jax.ops.segment_sum(jnp.where(mask[:, None], per_bin, 0.0), confidence_bins(confidence), NUM_BINS),
    )


def tally_regression(mean: Array, sd: Array, log_weights: Array, y: Array, mask: Array) -> RegressionTally:
    """Return the sums over the rows under the mask (batch,), for targets y (batch,) and Σ_s w_s N(mean_s, sd_s²)."""
    cdf = mixture_cdf(y, mean, sd, log_weights)
    centre, spread = mixture_mean_and_sd(mean, sd, log_weights)
    scores, kept = target_scores(y, centre, cdf, (0.9,)), _sum_under(mask.astype(bool))
    return RegressionTally(
        count=kept(jnp.ones_like(cdf)),
        squared_error=kept(scores["squared_error"]),
        nll=kept(mixture_nll(y, mean, sd, log_weights)),
        covered=kept(scores["coverage_90"]),
        uncertainty=kept(spread),
    )


@dataclass(frozen=True)
class Spread:
    """How a score differs between the clients that have test examples, each client counting once.

    Attributes:
        mean: Mean over clients.
        worst: The worst client: the lowest accuracy, the largest RMSE.
        p10: The 10 % worst clients do no better than this: the 10th percentile of accuracy, the 90th of RMSE.
    """

    mean: float
    worst: float
    p10: float

    def to_json(self) -> dict[str, float | None]:
        """The three numbers by name; what is not finite becomes None."""
        return {name: finite_or_none(value) for name, value in vars(self).items()}


class _Plain:
    """The pooled scores of a task as JSON has them."""

    clients: Spread

    def to_json(self) -> dict[str, Any]:
        """Return the pooled scores and the spread as plain numbers; what is not finite becomes None."""
        pooled = {name: finite_or_none(value) for name, value in vars(self).items() if isinstance(value, float)}
        return pooled | {"clients": self.clients.to_json()}


@dataclass(frozen=True)
class Scores(_Plain):
    """Scores of a classification task, pooled over all examples; `clients` spreads the accuracy over clients.

    Attributes:
        uncertainty: Mean entropy of the predictive, nats.
        per_client: `accuracy`, `nll`, `brier`, `uncertainty` and `count`, each (clients,); NaN for a client without
            test examples.
        reliability: (15, 3); per bin of confidence the examples, their mean confidence and their accuracy, both NaN in
            a bin without examples.
    """

    accuracy: float
    nll: float
    ece: float
    mce: float
    brier: float
    uncertainty: float
    clients: Spread
    per_client: dict[str, np.ndarray] = field(repr=False, compare=False)
    reliability: np.ndarray = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the pooled scores, the spread and the curve as plain numbers; what is not finite becomes None."""
        columns = zip(CURVE, self.reliability.T.tolist(), strict=True)
        curve = {name: [finite_or_none(value) for value in values] for name, values in columns}
        return super().to_json() | {"reliability": curve}


@dataclass(frozen=True)
class RegressionScores(_Plain):
    """Scores of a regression task, pooled over all examples; `clients` spreads the RMSE over clients.

    Attributes:
        uncertainty: Mean standard deviation of y under the predictive.
        per_client: `rmse`, `nll`, `coverage_90`, `uncertainty` and `count`, each (clients,); NaN for a client without
            test examples.
    """

    rmse: float
    nll: float
    coverage_90: float
    uncertainty: float
    clients: Spread
    per_client: dict[str, np.ndarray] = field(repr=False, compare=False)


@overload
def summarise(tallies: Tally) -> Scores | None: ...
@overload
def summarise(tallies: RegressionTally) -> RegressionScores | None: ...
def summarise(tallies: Tally | RegressionTally) -> Scores | RegressionScores | None:
    """Return the scores of a stack of tallies, one per client on axis 0; None when no client has a test example."""
    # Double precision: single sums stop counting at 2²⁴ examples.
    host: Any = jax.tree.map(lambda leaf: np.asarray(leaf, dtype=np.float64), tallies)
    num = host.count.sum()
    if num == 0:
        return None
    sums = {entry.name: getattr(host, entry.name) for entry in fields(host) if entry.name not in ("count", "bins")}
    per_client = {SCORES.get(name, name): _ratio(values, host.count) for name, values in sums.items()}
    pooled = {SCORES.get(name, name): float(values.sum() / num) for name, values in sums.items()}
    if isinstance(tallies, Tally):
        reliability = curve_of(host.bins.sum(axis=0))
        ece, mce = calibration_errors(reliability)
        clients = spread_over(per_client["accuracy"][host.count > 0], higher_is_better=True)
        per_client |= {"count": host.count}
        return Scores(ece=ece, mce=mce, clients=clients, per_client=per_client, reliability=reliability, **pooled)
    per_client["rmse"], pooled["rmse"] = np.sqrt(per_client["rmse"]), math.sqrt(pooled["rmse"])
    clients = spread_over(per_client["rmse"][host.count > 0], higher_is_better=False)
    return RegressionScores(clients=clients, per_client=per_client | {"count": host.count}, **pooled)


def curve_of(sums: np.ndarray) -> np.ndarray:
    """Return examples, mean confidence and accuracy (bins, 3), NaN in an empty bin, from sums of the three."""
    count = sums[:, :1]
    return np.concatenate([count, _ratio(sums[:, 1:], count)], axis=1)


def calibration_errors(reliability: np.ndarray) -> tuple[float, float]:
    """Return ECE and MCE of a curve (bins, 3): Σ_b n_b |gap_b| / n and the largest |gap_b|; NaN without examples."""
    count, confidence, accuracy = reliability[reliability[:, 0] > 0].T
    if not len(count):
        return math.nan, math.nan
    gaps = np.abs(confidence - accuracy)
    return float((count * gaps).sum() / count.sum()), float(gaps.max())


def spread_over(values: np.ndarray, *, higher_is_better: bool) -> Spread:
    """The spread of a score, one value a client; there is at least one."""
    with np.errstate(invalid="ignore"):  # interpolating between two infinities gives NaN, which is the answer
        if higher_is_better:
            worst, p10 = values.min(), np.percentile(values, 10)
        else:
            worst, p10 = values.max(), np.percentile(values, 90)
    return Spread(mean=float(values.mean()), worst=float(worst), p10=float(p10))


def _sum_under(mask: Array) -> Callable[[Array], Array]:
    return lambda values: jnp.sum(jnp.where(mask, values, 0.0))


def _ratio(sums: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The quotient, NaN for a client or a bin without examples."""
    return np.divide(sums, count, out=np.full_like(sums, np.nan), where=count > 0)


def finite_or_none(value: float) -> float | None:
    """The value as JSON can hold it."""
    return value if math.isfinite(value) else None


def from_json(pooled: dict[str, Any], per_client: dict[str, list[float | None]]) -> Scores | RegressionScores:
    """Return the scores that `to_json` wrote; null, and what an older version did not write, becomes NaN."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    clients = Spread(**{name: number(value) for name, value in pooled["clients"].items()})
    columns = {name: np.array([number(v) for v in vs]) for name, vs in per_client.items() if name != "client"}
    columns.setdefault("uncertainty", np.full(max(map(len, columns.values()), default=0), math.nan))
    pooled = {"uncertainty": None, **pooled}
    rest = {name: number(value) for name, value in pooled.items() if name not in ("clients", "reliability")}
    if "accuracy" not in pooled:
        return RegressionScores(**rest, clients=clients, per_client=columns)
    curve = pooled.get("reliability", dict.fromkeys(CURVE, [None] * NUM_BINS))
    reliability = np.array([[number(value) for value in curve[name]] for name in CURVE]).T
    return Scores(**rest, clients=clients, per_client=columns, reliability=reliability)
