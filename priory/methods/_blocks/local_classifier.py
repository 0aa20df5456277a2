"""A client's part of a last layer: a Gaussian over its weights β, computed from the outputs of a network on inputs.

Vedadi et al., Federated Variational Inference, 2023, arXiv:2305.13672, appendix D, equations (24)
to (29). Choices that the paper leaves open:

- g has 2·d_local·|Y| + |Y| outputs; its last |Y| are the bias of the local classifier, a mean over the support like the
  others, since as printed, at x itself, it would be a second global classifier.
- σ₀ = √(2/(d_local + |Y|)) is a standard deviation.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.local import Optimiser, Work, fit
from priory.fed.shard import Batch, Shard
from priory.methods._blocks.embedding import Layer
from priory.models.model import Params

FLOOR = 1e-5  # least σ, eq. (28)
MEAN_SCALE, SD_SCALE = 0.1, 0.01  # of g's outputs, eqs. (27) and (28): q is nearly r at the start


@struct
class Local:
    """q(β | support), and the bias that goes with it.

    Attributes:
        mean: (d_local, outputs).
        sd: The same.
        bias: (outputs,).
    """

    mean: Array
    sd: Array
    bias: Array


def of_outputs(outputs: Array, num_local: int) -> Local:
    """Return the Gaussian that the constructor's outputs describe."""
    num_outputs = outputs.shape[0] // (2 * num_local + 1)
    mean, log_ratio, bias = jnp.split(outputs, [num_local * num_outputs, 2 * num_local * num_outputs])
    sd = FLOOR + glorot(num_local, num_outputs) * jnp.exp(SD_SCALE * log_ratio)  # eq. (28)
    shape = (num_local, num_outputs)
    return Local(MEAN_SCALE * mean.reshape(shape), sd.reshape(shape), bias)  # eqs. (26), (27) and (29)


def glorot(num_local: int, num_outputs: int) -> float:
    """Return σ₀, Glorot's scale."""
    return math.sqrt(2 / (num_local + num_outputs))


def prior(num_local: int, num_outputs: int) -> Local:
    """Return r(β), without a bias."""
    shape = (num_local, num_outputs)
    return Local(jnp.zeros(shape), jnp.full(shape, glorot(*shape)), jnp.zeros(num_outputs))  # eq. (25)


def divergence(local: Local) -> Array:
    """Return KL(q(β) ‖ r) in nats."""
    r = prior(*local.mean.shape)
    return jnp.sum(gaussian.kl_of_each(local.mean, local.sd, r.mean, r.sd))


def draw(key: Key, local: Local) -> Array:
    """Draw β."""
    return local.mean + local.sd * jax.random.normal(key, local.mean.shape)


def last_layer(classifier: dict[str, Any], beta: Array, bias: Array) -> Layer:
    """Return a client's own last layer: the global classifier above, the local one below."""
    return Layer(jnp.concatenate([classifier["kernel"], beta]), classifier["bias"] + bias)


def fitted(
    mean_nll: Callable[[Local, Batch, Key], Array],
    start: Local,
    data: Shard,
    tau: Array | float,
    optimiser: Optimiser,
    work: Work,
    key: Key,
) -> Local:
    """Return the Gaussian after training on labelled examples; `mean_nll` draws β by the key."""

    def local_at(weights: tuple[Array, Array, Array]) -> Local:
        mean, log_sd, bias = weights
        return Local(mean, jnp.exp(log_sd), bias)

    def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
        local = local_at(params.weights)
        # The likelihood is a mean, and the divergence counts once for all of the client's examples.
        penalty = tau / jnp.maximum(data.count, 1) * divergence(local)
        return mean_nll(local, batch, key) + penalty, params.stats

    params = Params((start.mean, jnp.log(start.sd), start.bias))
    return local_at(fit(objective, params, data, optimiser, work, key)[0].weights)
