"""Mean-field Gaussians over trees of weights: every weight has a mean and a standard deviation of its own.

    q(θ) = Π_m N(θ_m; μ_m, σ_m²),   σ_m = log(1 + exp ρ_m)

What is learned, sent and averaged are the free coordinates (μ, ρ), which may be any numbers; a loop carries σ beside
them, since the step from ρ to σ is the dearest part of an update. Gradients are written out: at
q = w automatic differentiation of the divergence leaves rounding errors of some 1e-8 in place of zeros, which an
optimiser such as Adam, blind to scale, turns into full steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.struct import struct

Weights = Any


@struct
class Gaussian:
    """A mean-field Gaussian, or a gradient with respect to one.

    Attributes:
        mean: μ, a tree.
        sd: σ, a tree like it.
    """

    mean: Weights
    sd: Weights


@struct
class Free:
    """The coordinates of a Gaussian without bounds, or a gradient with respect to them.

    Attributes:
        mean: μ, a tree.
        rho: ρ, a tree like it; σ = softplus(ρ).
    """

    mean: Weights
    rho: Weights


def around(mean: Weights, rho: Array | float) -> Free:
    """Return the Gaussian around a network, all weights with the same ρ."""
    return Free(mean, jax.tree.map(lambda leaf: jnp.full(leaf.shape, rho, leaf.dtype), mean))


def width(free: Free) -> Weights:
    """Return σ at free coordinates."""
    return jax.tree.map(softplus, free.rho)


def join(free: Free, sd: Weights) -> Gaussian:
    """Return the Gaussian at free coordinates whose width is known."""
    return Gaussian(free.mean, sd)


def of(free: Free) -> Gaussian:
    """Return the Gaussian at free coordinates."""
    return join(free, width(free))


def chain(free: Free, gradient: Gaussian) -> Free:
    """Return the gradient with respect to free coordinates, from that with respect to the Gaussian there."""
    return Free(gradient.mean, jax.tree.map(lambda r, g: jax.nn.sigmoid(r) * g, free.rho, gradient.sd))


def draw(key: Array, q: Gaussian) -> Weights:
    """Draw one network θ = μ + σ g with g ~ N(0, I)."""
    leaves, structure = jax.tree.flatten(q.mean)
    noise = [jax.random.normal(jax.random.fold_in(key, i), leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.map(lambda m, s, g: m + s * g, q.mean, q.sd, jax.tree.unflatten(structure, noise))


def kl(q: Gaussian, w: Gaussian) -> Array:
    """Return KL(q ‖ w) in nats, summed over all weights."""
    terms = jax.tree.map(kl_of_each, q.mean, q.sd, w.mean, w.sd)
    return sum(map(jnp.sum, jax.tree.leaves(terms)), jnp.float32(0))


def kl_of_each(m: Array, s: Array, m_w: Array, s_w: Array) -> Array:
    """Return KL(N(m, s²) ‖ N(m_w, s_w²)) of each weight."""
    excess = (s - s_w) / s_w
    # ½ (r² − 1) − log r with r = σ/σ_w, without cancellation where the two agree.
    return _above_its_log(excess) + 0.5 * jnp.square(excess) + 0.5 * jnp.square((m - m_w) / s_w)


def kl_gradient(q: Gaussian, w: Gaussian) -> Gaussian:
    """Return ∂KL(q ‖ w) / ∂q; exactly zero at q = w."""

    def mean(m: Array, m_w: Array, s_w: Array) -> Array:
        return (m - m_w) / jnp.square(s_w)

    def sd(s: Array, s_w: Array) -> Array:
        return (s - s_w) * (s + s_w) / (s * jnp.square(s_w))

    return Gaussian(jax.tree.map(mean, q.mean, w.mean, w.sd), jax.tree.map(sd, q.sd, w.sd))


def kl_gradient_of_prior(q: Gaussian, w: Gaussian) -> Gaussian:
    """Return ∂KL(q ‖ w) / ∂w; exactly zero at w = q."""

    def mean(m: Array, m_w: Array, s_w: Array) -> Array:
        return (m_w - m) / jnp.square(s_w)

    def sd(m: Array, s: Array, m_w: Array, s_w: Array) -> Array:
        return ((s_w - s) * (s_w + s) - jnp.square(m - m_w)) / (s_w * jnp.square(s_w))

    return Gaussian(jax.tree.map(mean, q.mean, w.mean, w.sd), jax.tree.map(sd, q.mean, q.sd, w.mean, w.sd))


def moments(q: Gaussian, centre: Weights) -> tuple[Weights, Weights]:
    """Return E(θ − c) and E(θ − c)²: means of these over several q give the w of `matching`."""
    offset = trees.sub(q.mean, centre)
    return offset, jax.tree.map(lambda d, s: jnp.square(s) + jnp.square(d), offset, q.sd)


def matching(offset: Weights, square: Weights, centre: Weights) -> Free:
    """Return the w that minimises the mean of KL(q_i ‖ w) for q_i with these mean moments around c.

    μ_w is the mean of μ_i, and σ_w² the mean of σ_i² + (μ_i − μ_w)².
    """

    def rho(d: Array, s: Array) -> Array:
        return rho_of(jnp.sqrt(jnp.maximum(s - jnp.square(d), jnp.finfo(jnp.float32).tiny)))

    return Free(trees.add(centre, offset), jax.tree.map(rho, offset, square))


def softplus(rho: Array) -> Array:
    """Return log(1 + exp ρ) to the last bits, at less than half the cost of `log1p`, not vectorised on CPU.

    log(1 + e) = 2 artanh(s) with s = e/(2 + e) ≤ 1/3, whose series has terms s^{2i+1}/(2i + 1).
    """
    e = jnp.exp(-jnp.abs(rho))
    s = e / (2 + e)
    square = s * s
    series = jnp.full_like(s, 1 / 15)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / odd
    return jnp.maximum(rho, 0) + 2 * s * series


def rho_of(sd: Array) -> Array:
    """Return the ρ with softplus(ρ) = σ, for σ > 0."""
    return sd + jnp.log(-jnp.expm1(-sd))


def _above_its_log(x: Array) -> Array:
    """Return the excess of x over log(1 + x) to the last bits, also near 0, where it is ½ x².

    log(1 + x) = 2 artanh(s) with s = x/(2 + x), and x − 2s = s x.
    """
    s = x / (2 + x)
    square = s * s
    series = jnp.full_like(s, 1 / 13)
    for odd in (11, 9, 7, 5, 3):
        series = series * square + 1 / odd
    return jnp.where(jnp.abs(x) < 0.5, s * x - 2 * s * square * series, x - jnp.log1p(x))
