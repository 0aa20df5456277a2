"""What a personal model says of a batch of inputs: probabilities or means, with their doubts, sets and intervals."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory import metrics
from priory.core.errors import UsageError
from priory.fed.method import Predictive
from priory.uncertainty import conformal

NO_CALIBRATION = (
    "There are no prediction sets, since this client has no held-out rows to calibrate on that the run did not use "
    "itself; partition the data with validation=0.2 and run again, or give rows to `calibrated`."
)
ASSUMPTION = (
    "the held-out rows and the rows that are predicted are exchangeable, and the held-out rows had no part in training "
    "or in choosing settings."
)


@dataclass(frozen=True)
class Prediction:
    """What a personal model says about a batch of inputs.

    Attributes:
        probabilities: Of each class, (batch, classes); None for a regression.
        label: Number of the most probable class, (batch,); None for a regression.
        mean: Of the target, (batch,); None for classes.
        sd: Standard deviation of the target, (batch,); None for classes.
        classes: Names of the classes, in the order of `probabilities`.
        predictive: The mixture that these were computed from.
        entropy: Of the class in nats, (batch,); None for a regression.
        epistemic: What the posterior's draws disagree about, (batch,): nats that are a part of the entropy, or the
            standard deviation of their means. 0 for a point estimate, which does not say.
        calibration: Conformal scores of held-out rows that sets are calibrated on; None where there are none.
        components: Means and standard deviations of the mixture's parts, (samples, batch); None for classes.
    """

    probabilities: np.ndarray | None
    label: np.ndarray | None
    mean: np.ndarray | None
    sd: np.ndarray | None
    classes: tuple[str, ...]
    predictive: Predictive = field(repr=False)
    entropy: np.ndarray | None = field(repr=False)
    epistemic: np.ndarray = field(repr=False)
    calibration: np.ndarray | None = field(repr=False)
    components: tuple[Array, Array] | None = field(repr=False)

    @property
    def name(self) -> np.ndarray:
        """Name of the most probable class, (batch,)."""
        if self.label is None:
            raise UsageError("A regression has no classes; use `mean`, `sd` and `interval`.")
        return np.array(self.classes)[self.label]

    @property
    def epistemic_share(self) -> np.ndarray:
        """The epistemic part of the entropy, or of the variance, from 0 to 1, (batch,); 0 where there is none."""
        part, whole = (self.epistemic, self.entropy) if self.sd is None else (self.epistemic**2, self.sd**2)
        assert whole is not None
        share = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
        return np.minimum(share, 1.0)  # rounding

    def interval(self, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central credible interval of the target: quantiles of the mixture, right as far as the model is."""
        if self.components is None:
            raise UsageError("An interval belongs to a regression; use `probabilities` and `sets` for classes.")
        check_level(level)
        ends = jnp.array([(1 - level) / 2, (1 + level) / 2])
        low, high = _quantiles(ends, *self.components, self.predictive.log_weights)
        return np.asarray(low), np.asarray(high)

    def conformal_interval(self, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The interval of split conformal prediction, mean ± q · sd; infinite where held-out rows are too few.

        It covers with probability `level` if the held-out rows and this one are exchangeable, however wrong the model.
        """
        if self.mean is None or self.sd is None:
            raise UsageError("An interval belongs to a regression; use `sets` for classes.")
        reach = self._limit(level) * self.sd
        return self.mean - reach, self.mean + reach

    def sets(self, level: float = 0.9) -> np.ndarray:
        """Which classes are in the set of each row, (batch, classes), by split conformal prediction.

        A set holds the label with probability `level` if the held-out rows and this one are exchangeable, however
        wrong the model.
        """
        if self.probabilities is None:
            raise UsageError("A set belongs to classes; use `interval` for a regression.")
        return conformal.sets_within(self.probabilities, self._limit(level))

    def abstain(self, least: float) -> np.ndarray:
        """Which rows the model should not decide: those whose top probability is below `least`, (batch,)."""
        if self.probabilities is None:
            raise UsageError("abstain belongs to classes; for a regression look at the width of `interval`.")
        check_abstain(least)
        return ~(self.probabilities.max(axis=-1) >= least)  # NaN decides nothing

    def columns(self, level: float = 0.9, abstain: float | None = None) -> dict[str, np.ndarray]:
        """All of it by name, a value or a list for each row, as `priory predict` writes it.

        Classes have `label`, a `p_CLASS` each, `entropy`, `epistemic_share` and `set`; a regression has `mean`, `sd`,
        `epistemic_share`, `low`, `high`, `conformal_low` and `conformal_high`. What needs held-out rows to calibrate on
        is left out where there are none.

        Args:
            level: Of sets and intervals.
            abstain: Adds `abstain`, see there.
        """
        found: dict[str, Any] = {}
        if self.probabilities is None:
            low, high = self.interval(level)
            found |= {"mean": self.mean, "sd": self.sd, "epistemic_share": self.epistemic_share}
            found |= {"low": low, "high": high}
            if self.calibration is not None:
                found["conformal_low"], found["conformal_high"] = self.conformal_interval(level)
        else:
            chances = {f"p_{name}": self.probabilities[:, place] for place, name in enumerate(self.classes)}
            found |= {"label": self.name, **chances, "entropy": self.entropy, "epistemic_share": self.epistemic_share}
            if self.calibration is not None:
                names = np.array(self.classes)
                found["set"] = np.empty(len(self.name), object)
                found["set"][:] = [names[row].tolist() for row in self.sets(level)]
        return found if abstain is None else found | {"abstain": self.abstain(abstain)}

    def _limit(self, level: float) -> float:
        check_level(level)
        if self.calibration is None:
            raise UsageError(NO_CALIBRATION)
        return conformal.threshold(self.calibration, level)


def check_abstain(least: float) -> None:
    """Raise unless it is a probability that a class can have."""
    if not 0 < least <= 1:
        raise UsageError(f"abstain={least:g} is no probability; give a number above 0 and at most 1, such as 0.9.")


def check_level(level: float) -> None:
    """Raise unless the level is a probability of a set or an interval."""
    if not 0 < level < 1:
        raise UsageError(f"level={level} is no probability between 0 and 1; give one such as 0.9.")


@jax.jit
def _quantiles(levels: Array, mean: Array, sd: Array, log_weights: Array) -> Array:
    return jax.lax.map(lambda level: metrics.mixture_quantile(level, mean, sd, log_weights), levels)
