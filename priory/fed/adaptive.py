"""A server that takes adaptive steps on the mean of what clients moved by: what FedAdam and FedYogi have in common.

    Δ = Σ_k n_k (w_k − w^t) / Σ_k n_k
    m ← β₁ m + (1 − β₁) Δ,   v ← the method's own rule,   w^{t+1} = w^t + η_s m / (√v + τ)

There is no bias correction, τ stands outside the root, and v begins at τ² (Reddi et al. 2021, Algorithm 2).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.struct import struct
from priory.fed.checks import positive
from priory.fed.method import Message
from priory.models.model import Params

Weights = Any


@struct
class Server:
    """What the server knows.

    Attributes:
        weights: w^t.
        stats: Batch-norm statistics, averaged plainly.
        first: m.
        second: v.
    """

    weights: Weights
    stats: Any
    first: Weights
    second: Weights


def start(params: Params, tau: Array | float) -> Server:
    """The server before the first round."""
    first = trees.zeros(params.weights)
    return Server(params.weights, params.stats, first, jax.tree.map(lambda leaf: leaf + tau**2, first))


def step(
    server: Server,
    messages: Message[Params],
    second: Callable[[Array, Array], Array],
    *,
    step_size: Array | float,
    beta1: Array | float,
    tau: Array | float,
) -> Server:
    """The next server; one that hears nobody stays as it is, moments included.

    `second` gives the new v from the old one and Δ².
    """
    mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=Params(server.weights, server.stats))
    delta = trees.sub(mean.weights, server.weights)
    m = jax.tree.map(lambda old, d: beta1 * old + (1 - beta1) * d, server.first, delta)
    v = jax.tree.map(lambda old, d: second(old, jnp.square(d)), server.second, delta)
    weights = jax.tree.map(lambda w, m, v: w + step_size * m / (jnp.sqrt(v) + tau), server.weights, m, v)
    return trees.select(jnp.sum(messages.weight) > 0, Server(weights, mean.stats, m, v), server)


def check(step_size: float, beta1: float, beta2: float, tau: float) -> None:
    """Raise on a step that cannot be meant."""
    positive("server-step-size", step_size)
    if not 0 <= beta1 < 1:
        raise UsageError(f"beta1={beta1} lies outside [0, 1); choose one such as 0.9.")
    if not 0 <= beta2 <= 1:
        raise UsageError(f"beta2={beta2} lies outside [0, 1]; choose one such as 0.99.")
    positive("tau", tau)
