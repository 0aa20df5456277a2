"""Likelihoods: how a network's outputs become a distribution of the target.

All are hashable descriptions. `log_prob` maps outputs `(..., num)` and targets `(...)` to `(...)`; targets lacking the
leading axes of the outputs (samples of a posterior) are broadcast.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.models.model import Model, Params, shapes

__all__ = ["Categorical", "Gaussian", "Likelihood", "WithScale"]

PyTree = Any

_UNNAMED = "unnamed"  # holds the wrapped model's weights where these are not a dict of layers
_RESERVED = {"log_scale", _UNNAMED}


@runtime_checkable
class Likelihood(Protocol):
    """A distribution of the target given the network's outputs."""

    @property
    def num_outputs(self) -> int:
        """How many outputs the network has for one example."""
        ...

    def log_prob(self, outputs: Array, y: Array, scale: Array | None = None) -> Array:
        """Return the log density of `y`; `scale` is a standard error known for each row, where the data has one."""
        ...

    def curvature(self, outputs: Array, y: Array, scale: Array | None = None) -> Array:
        """Return a bound `(...)` on the largest eigenvalue of −∇² log_prob in the outputs, for step sizes."""
        ...


@dataclass(frozen=True)
class Categorical:
    """One of `num_classes` classes; the outputs are logits."""

    num_classes: int

    @property
    def num_outputs(self) -> int:
        return self.num_classes

    def log_prob(self, outputs: Array, y: Array, scale: Array | None = None) -> Array:
        """Return the log probability of the class `y`."""
        del scale
        labels = jnp.broadcast_to(y, outputs.shape[:-1])[..., None]
        chosen = jnp.take_along_axis(outputs, labels, axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(outputs, axis=-1)

    def curvature(self, outputs: Array, y: Array, scale: Array | None = None) -> Array:
        """Return ½, since the eigenvalues of diag(p) − ppᵀ are at most ½, whatever p."""
        del y, scale
        return jnp.full(outputs.shape[:-1], 0.5)

    def probabilities(self, outputs: Array) -> Array:
        """Return class probabilities `(..., num_classes)`."""
        return jax.nn.softmax(outputs, axis=-1)


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution around the network's one output.

    Attributes:
        scale: A number: the standard deviation. "learned": a second output is its logarithm, which `WithScale` adds to
            a model. "column": known for each row and passed as `scale`.
    """

    scale: float | Literal["learned", "column"] = 1.0

    def __post_init__(self) -> None:
        valid = self.scale in ("learned", "column") if isinstance(self.scale, str) else 0 < self.scale < math.inf
        if not valid:
            raise UsageError(f"scale={self.scale!r} is no scale; give a positive number, 'learned' or 'column'.")

    @property
    def num_outputs(self) -> int:
        return 1

    def log_prob(self, outputs: Array, y: Array, scale: Array | None = None) -> Array:
        """Return the log density of `y`: -½((y - mean)/sd)² - log sd - ½ log 2π."""
        mean, sd = self.mean_and_scale(outputs, scale)
        error = (jnp.broadcast_to(y, mean.shape) - mean) / sd
        return -0.5 * error**2 - jnp.log(sd) - 0.5 * math.log(2 * math.pi)

    def curvature(self, outputs: Array, y: Array, scale: Array | None = None) -> Array:
        """Return 1/sd², plus 2((y − mean)/sd)² where log sd is an output too: the trace bounds every eigenvalue."""
        mean, sd = self.mean_and_scale(outputs, scale)
        if self.scale != "learned":
            return 1 / sd**2
        return (1 + 2 * (jnp.broadcast_to(y, mean.shape) - mean) ** 2) / sd**2

    def mean_and_scale(self, outputs: Array, scale: Array | None = None) -> tuple[Array, Array]:
        """Return mean and standard deviation, each `(...)`."""
        mean = outputs[..., 0]
        if self.scale == "learned":
            if outputs.shape[-1] != 2:
                raise UsageError(
                    f"outputs of shape {outputs.shape} hold no scale, but scale='learned' needs mean and log scale; "
                    "wrap the model in WithScale."
                )
            return mean, jnp.exp(outputs[..., 1])
        if self.scale == "column":
            if scale is None:
                raise UsageError(
                    "scale='column' needs the standard error of each row; name its column with --scale COL."
                )
            return mean, jnp.broadcast_to(scale, mean.shape).astype(mean.dtype)
        return mean, jnp.full_like(mean, self.scale)


@dataclass(frozen=True)
class WithScale:
    """A model with one more trainable weight, `log_scale`: outputs `(..., 1)` become `(..., 2)`, mean and log scale.

    The weight starts at 0, stands beside the model's own layers, and belongs to the last layer.
    """

    model: Model

    def init(self, key: Array, input_shape: tuple[int, ...]) -> Params:
        params = self.model.init(key, input_shape)
        taken = _RESERVED & set(params.weights) if isinstance(params.weights, dict) else set()
        if taken:
            raise UsageError(
                f"{min(taken)} names a layer of this model, but a learned scale needs that name; rename it."
            )
        return replace(params, weights=_join(params.weights, jnp.zeros(())))

    def apply(self, params: Params, x: Array, *, key: Array | None = None) -> tuple[Array, PyTree]:
        weights, log_scale = _part(params.weights)
        mean, stats = self.model.apply(replace(params, weights=weights), x, key=key)
        return jnp.concatenate([mean, jnp.broadcast_to(log_scale, mean.shape)], axis=-1), stats

    def last_layer(self, input_shape: tuple[int, ...]) -> str:
        last = self.model.last_layer(input_shape)
        if not last:
            return ""
        weights = shapes(self.model, input_shape).weights
        return f"log_scale|{last}" if isinstance(weights, dict) else f"log_scale|{_UNNAMED}/(?:{last})"


def _join(weights: PyTree, log_scale: Array) -> dict[str, PyTree]:
    # Layers keep their paths, so that a head given by the user means the same with and without a learned scale.
    own = weights if isinstance(weights, dict) else {_UNNAMED: weights}
    return {**own, "log_scale": log_scale}


def _part(weights: dict[str, PyTree]) -> tuple[PyTree, Array]:
    own = {name: tree for name, tree in weights.items() if name != "log_scale"}
    return own.get(_UNNAMED, own), weights["log_scale"]
