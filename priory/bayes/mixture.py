"""Mixtures of isotropic Gaussians with equal proportions, whose centres are prototypes: trees stacked on axis 0.

    p(θ | r) = Σ_j 1/K N(θ; r_j, σ² I)

Distances between networks are large beside σ², so everything stays in log space. Equation numbers are those of FedHB
(Kim and Hospedales, arXiv:2305.04979), appendix C.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.struct import struct

Weights = Any


@struct
class Shares:
    """How one point, or the mean of several, is shared out among the prototypes; means of it are all that EM needs.

    Attributes:
        share: Responsibilities c(j), (K,).
        offset: c(j) · (point − r_j), stacked on axis 0.
    """

    share: Array
    offset: Weights


def squared_distances(point: Weights, prototypes: Weights) -> Array:
    """Return ‖point − r_j‖², (K,)."""

    def one(a: Array, r: Array) -> Array:
        return jnp.sum(jnp.square(a[None] - r), axis=tuple(range(1, r.ndim)))

    return sum(jax.tree.leaves(jax.tree.map(one, point, prototypes)))  # type: ignore[return-value]


def penalty(point: Weights, prototypes: Weights, variance: Array | float) -> Array:
    """Return −log Σ_j exp(−‖point − r_j‖² / 2σ²), the client's penalty of eq. (70)."""
    return -jax.nn.logsumexp(-squared_distances(point, prototypes) / (2 * variance))


def responsibilities(point: Weights, prototypes: Weights, variance: Array | float) -> Array:
    """Return c(j), the softmax of −‖point − r_j‖² / 2σ², eq. (75), (K,).

    ‖point − r_j‖² is, up to what all j share, ‖δ_j‖² − 2 δ_j·(point − r_1) with δ_j = r_j − r_1. In a loop over
    minibatches only K − 1 products δ_j·point change, and a product is several times faster than a sum of squares.
    """

    def one(a: Array, r: Array) -> Array:
        delta = (r[1:] - r[:1]).reshape(r.shape[0] - 1, a.size)
        still = jnp.dot(delta, r[0].ravel(), precision="highest") + 0.5 * jnp.sum(delta**2, axis=1)
        return jnp.dot(delta, a.ravel(), precision="highest") - still

    logits = sum(jax.tree.leaves(jax.tree.map(one, point, prototypes)), start=jnp.float32(0))
    return jax.nn.softmax(jnp.concatenate([jnp.zeros(1), logits]) / variance)


def blend(share: Array, prototypes: Weights) -> Weights:
    """Return Σ_j share_j r_j; with the responsibilities of a point, its penalty has the gradient (point − blend)/σ²."""
    # Term by term, so that it melts into whatever reads it.
    return jax.tree.map(lambda r: sum(share[j] * r[j] for j in range(r.shape[0])), prototypes)


def middle(prototypes: Weights) -> Weights:
    """Return the mean of the prototypes; term by term, since XLA's own mean over a leading axis is slow on a CPU."""
    count = jax.tree.leaves(prototypes)[0].shape[0]
    return blend(jnp.full(count, 1 / count), prototypes)


def share_out(point: Weights, prototypes: Weights, variance: Array | float) -> Shares:
    """Take the E-step for one point, eq. (75)."""
    share = responsibilities(point, prototypes, variance)

    def one(a: Array, r: Array) -> Array:
        return share.reshape((-1,) + (1,) * a.ndim) * (a[None] - r)

    return Shares(share, jax.tree.map(one, point, prototypes))


def point_of(shares: Shares, prototypes: Weights) -> Weights:
    """Return the point that was shared out: Σ_j c(j) (point − r_j) + Σ_j c(j) r_j."""
    offset = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), shares.offset)
    return trees.add(offset, blend(shares.share, prototypes))


def maximise(mean: Shares, prototypes: Weights, shrinkage: Array | float, empty: float) -> Weights:
    """Take the M-step, eq. (77), for points whose mean shares are given; one with a share below `empty` stays.

    `shrinkage` is σ²/N for prototypes that are N(0, I) a priori, and 0 for a flat prior.
    """

    def one(r: Array, offset: Array) -> Array:
        share = mean.share.reshape((-1,) + (1,) * (r.ndim - 1))
        moved = (share * r + offset) / jnp.where(share < empty, 1.0, shrinkage + share)
        return jnp.where(share < empty, r, moved)

    return jax.tree.map(one, prototypes, mean.offset)


def expected_log_density(point: Weights, prototypes: Weights, variance: Array | float, width: Array | float) -> Array:
    """Return a lower bound, Jensen's, on E log p(θ | μ) for θ ~ N(point, width²) and μ_j ~ N(r_j, width²)."""
    num = trees.size(point)
    count = jax.tree.leaves(prototypes)[0].shape[0]
    blur = num * width**2 / variance
    constant = -0.5 * num * jnp.log(2 * jnp.pi * variance) - math.log(count) - blur
    return constant - penalty(point, prototypes, variance)


def pick(prototypes: Weights, index: Array) -> Weights:
    """Return one of the prototypes."""
    return jax.tree.map(lambda r: r[index], prototypes)
