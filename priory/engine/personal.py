"""One client's posterior, ready to predict."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory import certificate, metrics
from priory.certificate import DELTA, DRAWS, Certificate
from priory.core import memory, rng, trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.data.form import Form
from priory.effects import arviz, draws_data
from priory.engine import certified
from priory.engine.certified import Basis
from priory.engine.prediction import Prediction
from priory.evaluate import doubts_of, tally
from priory.fed.capabilities import Draws, MixedEffects
from priory.fed.checks import countable
from priory.fed.method import Method, Predictive, Task
from priory.fed.shard import Batch, Pool, Shard
from priory.metrics import RegressionScores, Scores
from priory.models.likelihood import Categorical
from priory.uncertainty import conformal

Verb = Literal["personalise", "infer", "population"]


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

    method: Method
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
        inputs = _padded(shard_of(self.form, x, None, None, encoded)).x
        return self._predict(inputs, None if scale is None else jnp.asarray(scale, jnp.float32))

    def score(self, x: Any, y: Any, scale: Any = None, encoded: bool = False) -> Scores | RegressionScores:
        """The scores on labelled examples that the model was not made from; arguments as for `predict`."""
        data = shard_of(self.form, x, y, scale, encoded)
        sums = _tally(self.method, self.task, self.posterior, data, jax.random.clone(self.key))
        found = metrics.summarise(jax.tree.map(lambda leaf: np.asarray(leaf)[None], sums))
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
        return certified.certify(self.task, self.posterior, self.basis, delta, draws)

    def calibrated(self, x: Any, y: Any, scale: Any = None, encoded: bool = False) -> "PersonalModel":
        """The same model with prediction sets calibrated on labelled examples that it was not made from."""
        return self.calibrated_on(shard_of(self.form, x, y, scale, encoded))

    def calibrated_on(self, data: Shard) -> "PersonalModel":
        """The same model with prediction sets calibrated on a shard; without sets if that is empty."""
        count = int(data.count)
        if not count:
            return self
        rows = _padded(data)  # of one shape for all clients, so that one program does
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
        if isinstance(self.method, MixedEffects):
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
    if not isinstance(model.method, MixedEffects | Draws):
        raise UsageError(
            f"{model.source.method} has no posterior to draw from, since it has no `draws`; choose a Bayesian method, "
            "or export the weights alone with draws=0."
        )
    if draws < 1:
        raise UsageError(f"draws={draws} is below 1; give 1 or more, such as 500.")
    if not isinstance(model.method, MixedEffects):  # which has its own number of draws
        countable("draws", draws)
        network = jax.eval_shape(model.task.init, jax.eval_shape(rng.root, 0))
        memory.check(f"draws={draws}", draws * trees.num_bytes(network.weights), "choose fewer draws")


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
def _padded(data: Shard) -> Batch:
    return data.padded()


@jax.jit
def _predict(method: Method, task: Task, posterior: Any, x: Array, key: Key) -> Predictive:
    return method.predict(task, posterior, x, key)


@jax.jit
def _tally(method: Method, task: Task, posterior: Any, data: Shard, key: Key) -> Any:
    return tally(method, task, posterior, data, key)


@jax.jit
def _doubts(method: Method, task: Task, posterior: Any, key: Key, data: Shard) -> Array:
    return doubts_of(method, task, posterior, key, data)


@jax.jit
def _class_rows(predictive: Predictive) -> tuple[Array, Array, Array]:
    log_probs = metrics.mixture_log_probs(predictive.outputs, predictive.log_weights)
    return log_probs, metrics.entropy(log_probs), metrics.mutual_information(predictive.outputs, predictive.log_weights)


@jax.jit
def _target_rows(mean: Array, sd: Array, log_weights: Array) -> tuple[Array, Array, Array]:
    return *metrics.mixture_mean_and_sd(mean, sd, log_weights), metrics.mixture_sds(mean, sd, log_weights)[1]


@partial(jax.jit, static_argnames="num")
def _draw(method: Draws, task: Task, posterior: Any, key: Key, *, num: int) -> Any:
    return method.draws(task, posterior, key, num)
