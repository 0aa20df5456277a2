"""One client's posterior, ready to predict, and what it says of a batch of inputs."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory import certificate, metrics
from priory.certificate import DELTA, DRAWS, Certificate
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.data.form import Form
from priory.effects import arviz, draws_data
from priory.engine import certified
from priory.engine.certified import Basis
from priory.evaluate import doubts_of, tally
from priory.fed.method import Draws, Effects, Predictive, Task
from priory.fed.shard import Pool, Shard
from priory.metrics import RegressionScores, Scores
from priory.models.likelihood import Categorical
from priory.uncertainty import conformal

Verb = Literal["personalise", "infer", "population"]


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


NO_CALIBRATION = (
    "There are no prediction sets, since this client has no held-out rows to calibrate on; partition the data with "
    "validation=0.2 and run again, or give rows to `calibrated`."
)


ASSUMPTION = (
    "the held-out rows and the rows that are predicted are exchangeable, and the held-out rows had no part in training "
    "or in choosing settings."
)


def check_abstain(least: float) -> None:
    """Raise unless it is a probability that a class can have."""
    if not 0 < least <= 1:
        raise UsageError(f"abstain={least:g} is no probability; give a number above 0 and at most 1, such as 0.9.")


def check_level(level: float) -> None:
    """Raise unless the level is a probability of a set or an interval."""
    if not 0 < level < 1:
        raise UsageError(f"level={level} is no probability between 0 and 1; give one such as 0.9.")


@dataclass(frozen=True)
class Source:
    """Where a personal model comes from.

    Attributes:
        method: Registered name of its method.
        verb: The verb that made the posterior, which so has the structure of what that verb returns.
        model: Text that names the network; None where an object was given.
        client: Name of the client, where it has one.
        rounds: Rounds that the federation had done.
    """

    method: str
    verb: Verb
    model: str | None
    client: str | None
    rounds: int


@dataclass(frozen=True)
class PersonalModel:
    """One client's posterior, ready to predict from raw inputs (as they were given to the federation).

    Attributes:
        form: What inputs and labels look like.
        source: Where it comes from.
        calibration: Conformal scores of rows that it was not made from; None where there are none.
        basis: What a certificate needs beside the model, or why it has none.
    """

    method: Any
    task: Task
    posterior: Any = field(repr=False)
    form: Form = field(repr=False)
    key: Key = field(repr=False)
    source: Source
    calibration: np.ndarray | None = field(default=None, repr=False)
    basis: Basis | str = field(default=certified.WITHOUT_ROWS, repr=False)

    def predict(self, x: Any, scale: Any = None, encoded: bool = False) -> Prediction:
        """The prediction for a batch of inputs: an array, (batch, ...), or a data frame where the data came as a table.

        Args:
            scale: Standard errors, where they come with the data.
            encoded: That an array holds rows of the federation's own `x` of a table.
        """
        inputs = shard_of(self.form, x, None, None, encoded).padded().x
        return self._predict(inputs, None if scale is None else jnp.asarray(scale, jnp.float32))

    def score(self, x: Any, y: Any, scale: Any = None, encoded: bool = False) -> Scores | RegressionScores:
        """The scores on labelled examples that the model was not made from; arguments as for `predict`."""
        data = shard_of(self.form, x, y, scale, encoded)
        sums = _tally(self.method, self.task, self.posterior, data, jax.random.clone(self.key))
        found = metrics.summarise(jax.tree.map(lambda leaf: leaf[None], sums))
        assert found is not None  # no examples at all have been refused
        return found

    def doubts(self, x: Any, scale: Any = None, encoded: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """How unsure the model is of each input, (batch,), and the epistemic part, which more data would lessen.

        Nats of a class, or standard deviations of a target; arguments as for `predict`.
        """
        data = shard_of(self.form, x, None, scale, encoded)
        both = np.asarray(_doubts(self.method, self.task, self.posterior, jax.random.clone(self.key), data))
        return both[0], both[1]

    def certificate(self, delta: float = DELTA, draws: int = DRAWS) -> Certificate:
        """A bound, at 1 − delta, on the error on new rows of a client that took no part, from the rows it learned from.

        Args:
            draws: Networks drawn from the posterior, 1000 or more; their key follows from the run.
        """
        certificate.check(self.method, self.source.method, self.task, delta, draws)
        if isinstance(self.basis, str):
            raise UsageError(f"The model has no certificate: {self.basis}.")
        return certified.certify(self.method, self.task, self.posterior, self.basis, delta, draws)

    def calibrated(self, x: Any, y: Any, scale: Any = None, encoded: bool = False) -> "PersonalModel":
        """The same model with prediction sets calibrated on labelled examples that it was not made from."""
        return self.calibrated_on(shard_of(self.form, x, y, scale, encoded))

    def calibrated_on(self, data: Shard) -> "PersonalModel":
        """The same model with prediction sets calibrated on a shard; without sets if that is empty."""
        count = int(data.count)
        if not count:
            return self
        rows = data.padded()  # of one shape for all clients, so that one program does
        found, y = self._predict(rows.x, rows.scale), np.asarray(rows.y)[:count]
        if found.probabilities is not None:
            return replace(self, calibration=conformal.class_scores(found.probabilities[:count], y))
        assert found.mean is not None
        assert found.sd is not None
        return replace(self, calibration=conformal.target_scores(y, found.mean[:count], found.sd[:count]))

    def named(self, client: str) -> "PersonalModel":
        """The same model under the name of the client that it is for."""
        return replace(self, source=replace(self.source, client=client))

    def inference_data(self, draws: int = 500, seed: int = 0) -> Any:
        """Draws of the posterior as `arviz.InferenceData`; needs the extra `priory[arviz]`.

        They are the chains of the client's random effects where the method has some (all of them, whatever `draws`
        says), else independent draws of the network's weights, in one chain.
        """
        check_draws(self, draws)
        arviz()  # before anything is computed
        if isinstance(self.method, Effects):
            tree = self.method.effects(self.task, self.posterior)
        else:
            networks = _draw(self.method, self.task, self.posterior, jax.random.key(seed), num=draws)
            tree = jax.tree.map(lambda leaf: leaf[None], networks.weights)
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)  # a single client
        who = self.source.client or "newcomer"
        return draws_data(one, (who,), method=self.source.method, data=self.form.name)

    def _predict(self, inputs: Array, scale: Array | None) -> Prediction:
        # The same draws of the posterior each time, so that sets are calibrated on the mixture that predicts.
        predictive = _predict(self.method, self.task, self.posterior, inputs, jax.random.clone(self.key))
        if isinstance(self.task.likelihood, Categorical):
            log_probs, entropy, epistemic = map(np.asarray, _class_rows(predictive))
            probs = np.exp(log_probs)
            return Prediction(
                probs, probs.argmax(-1), None, None, self.form.classes, predictive, entropy, epistemic,
                self.calibration, None,
            )  # fmt: skip
        if scale is not None:
            scale = jnp.broadcast_to(scale, predictive.outputs.shape[:-1])
        parts = self.task.likelihood.mean_and_scale(predictive.outputs, scale)  # type: ignore[attr-defined]
        mean, sd, epistemic = map(np.asarray, _target_rows(*parts, predictive.log_weights))
        return Prediction(None, None, mean, sd, (), predictive, None, epistemic, self.calibration, parts)


def check_draws(model: PersonalModel, draws: int) -> None:
    """Raise where a posterior gives no draws, or fewer than one is asked for."""
    if not isinstance(model.method, Effects | Draws):
        raise UsageError(
            f"{model.source.method} has no posterior to draw from, since it has no `draws`; choose a Bayesian method, "
            "or export the weights alone with draws=0."
        )
    if draws < 1:
        raise UsageError(f"draws={draws} is below 1; give 1 or more, such as 500.")


def shard_of(form: Form, x: Any, y: Any, scale: Any, encoded: bool) -> Shard:
    """The shard of a client that has nothing but these raw examples."""
    x = form.read_inputs(x, encoded)
    y = None if y is None else form.read_labels(y)
    if y is not None and len(y) != len(x):
        raise UsageError(f"{len(y)} labels do not fit {len(x)} inputs; give one for each.")
    labels = None if y is None else jnp.asarray(y)
    errors = None if scale is None else jnp.asarray(scale, jnp.float32)
    own = Pool(jnp.asarray(x), labels, errors, jnp.asarray(form.shift), jnp.asarray(form.factor))
    return Shard(own, jnp.zeros(1, jnp.int32), jnp.full(1, len(x), jnp.int32), len(x))


@jax.jit
def _predict(method: Any, task: Task, posterior: Any, x: Array, key: Key) -> Predictive:
    return method.predict(task, posterior, x, key)


@jax.jit
def _tally(method: Any, task: Task, posterior: Any, data: Shard, key: Key) -> Any:
    return tally(method, task, posterior, data, key)


@jax.jit
def _doubts(method: Any, task: Task, posterior: Any, key: Key, data: Shard) -> Array:
    return doubts_of(method, task, posterior, key, data)


@jax.jit
def _class_rows(predictive: Predictive) -> tuple[Array, Array, Array]:
    log_probs = metrics.mixture_log_probs(predictive.outputs, predictive.log_weights)
    return log_probs, metrics.entropy(log_probs), metrics.mutual_information(predictive.outputs, predictive.log_weights)


@jax.jit
def _target_rows(mean: Array, sd: Array, log_weights: Array) -> tuple[Array, Array, Array]:
    return *metrics.mixture_mean_and_sd(mean, sd, log_weights), metrics.mixture_sds(mean, sd, log_weights)[1]


@jax.jit
def _quantiles(levels: Array, mean: Array, sd: Array, log_weights: Array) -> Array:
    return jax.lax.map(lambda level: metrics.mixture_quantile(level, mean, sd, log_weights), levels)


@partial(jax.jit, static_argnames="num")
def _draw(method: Any, task: Task, posterior: Any, key: Key, *, num: int) -> Any:
    return method.draws(task, posterior, key, num)
