"""Spike and slab over trees of weights: every weight is drawn from a Gaussian of its own, or is zero.

    θ_m = γ_m (μ_m + σ_m g_m),   γ_m ~ Bern(λ_m),   g_m ~ N(0, 1),   σ_m = log(1 + exp ρ_m),   λ_m = sigmoid(a_m)

Zhang et al., arXiv:2303.04345, eqs. (32) to (43). Learned are the free coordinates (μ, ρ, a);
λ stays in [1e-6, 1 − 1e-6]. The divergence is the bound (34), that of the pairs (θ, γ), and its gradients are written
out for the same reason as those of `bayes.gaussian`: they are exactly zero at q = w. Those of λ are with respect to a,
where they need no logarithm.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.bayes import gaussian
from priory.bayes.gaussian import Gaussian, softplus
from priory.core import trees
from priory.core.struct import struct

Weights = Any

# λ lies between this and one minus this.
LEAST = 1e-6
_FARTHEST = 13.815510  # logit(1 − LEAST)
# The gates' part of a key: far from the small numbers that a Gaussian draw folds or splits it by.
_GATES = 0x67617465


@struct
class SpikeSlab:
    """A spike and slab, or a gradient with respect to one.

    Attributes:
        mean: μ, a tree.
        sd: σ, a tree like it.
        logit: a = log λ/(1 − λ), a tree like it.
        inclusion: λ, which goes with the logit because it is dear to compute; a gradient is zero here.
    """

    mean: Weights
    sd: Weights
    logit: Weights
    inclusion: Weights


@struct
class Free:
    """The coordinates of a spike and slab without bounds, or a gradient with respect to them.

    Attributes:
        mean: μ, a tree.
        rho: ρ, a tree like it; σ = softplus(ρ).
        logit: a, a tree like it; λ = sigmoid(a), cut off at both ends.
    """

    mean: Weights
    rho: Weights
    logit: Weights


def around(mean: Weights, rho: Array | float, inclusion: Array | float) -> Free:
    """Return the spike and slab around a network, all weights with the same ρ and λ."""
    logit = logit_of(jnp.asarray(inclusion, jnp.float32))
    return Free(
        mean,
        jax.tree.map(lambda leaf: jnp.full(leaf.shape, rho, leaf.dtype), mean),
        jax.tree.map(lambda leaf: jnp.full(leaf.shape, logit, leaf.dtype), mean),
    )


def width(free: Free) -> tuple[Weights, Weights]:
    """Return σ and λ at free coordinates."""
    return jax.tree.map(softplus, free.rho), jax.tree.map(lambda a: jax.nn.sigmoid(_bounded(a)), free.logit)


def join(free: Free, width: tuple[Weights, Weights]) -> SpikeSlab:
    """Return the spike and slab at free coordinates whose width is known."""
    sd, inclusion = width
    return SpikeSlab(free.mean, sd, jax.tree.map(_bounded, free.logit), inclusion)


def of(free: Free) -> SpikeSlab:
    """Return the spike and slab at free coordinates."""
    return join(free, width(free))


def chain(free: Free, gradient: SpikeSlab) -> Free:
    """Return the gradient with respect to free coordinates, from that with respect to the distribution there.

    A logit beyond its bounds gets the gradient at the bound, so that it can come back.
    """
    rho = jax.tree.map(lambda r, g: jax.nn.sigmoid(r) * g, free.rho, gradient.sd)
    return Free(gradient.mean, rho, gradient.logit)


def gated(key: Array, q: SpikeSlab, temperature: Array | float) -> Gaussian:
    """Return the Gaussian that is left once the gates γ are drawn; its mean and sd are zero where γ is.

    Gates are hard forward, and relaxed at this temperature backward: eq. (41). They have a part of the key to
    themselves, so that the same key may draw from the Gaussian.
    """
    # As one vector: starting a draw or a pass for each leaf costs more than it does.
    mean, restore = ravel_pytree(q.mean)
    sd, logit, inclusion = (ravel_pytree(tree)[0] for tree in (q.sd, q.logit, q.inclusion))
    u = jax.random.uniform(jax.random.fold_in(key, _GATES), inclusion.shape, inclusion.dtype)
    gates = gate(logit, inclusion, u, jnp.asarray(temperature, inclusion.dtype))
    return Gaussian(restore(gates * mean), restore(gates * sd))


@jax.custom_jvp
def gate(logit: Array, inclusion: Array, u: Array, temperature: Array) -> Array:
    """Return γ = 1[η > 0] with η = logit λ + logit u, u uniform; backward it has the slope of the relaxed gate.

    η > 0 is u > 1 − λ, which needs no logarithm.
    """
    del logit, temperature
    return (u >= 1 - inclusion).astype(inclusion.dtype)


@gate.defjvp
def _gate_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    logit, _, u, temperature = primals
    relaxed = relaxed_gate(logit, u, temperature)
    return gate(*primals), relaxed * (1 - relaxed) / temperature * tangents[0]


def relaxed_gate(logit: Array, u: Array, temperature: Array) -> Array:
    """Return γ̃ = sigmoid(η/τ), eq. (41)."""
    return jax.nn.sigmoid((logit + jnp.log(u / (1 - u))) / temperature)


def draw(key: Array, q: SpikeSlab, temperature: Array | float) -> Weights:
    """Draw one network θ = γ (μ + σ g), eq. (40); with λ = 1 that of `gaussian.draw` with the same key."""
    return gaussian.draw(key, gated(key, q, temperature))


def mean_of(q: SpikeSlab) -> Weights:
    """Return E θ = λ μ."""
    return jax.tree.map(jnp.multiply, q.inclusion, q.mean)


def median_of(q: SpikeSlab) -> Weights:
    """Return the median model: μ where λ > ½, else zero."""
    return jax.tree.map(lambda inclusion, m: jnp.where(inclusion > 0.5, m, 0), q.inclusion, q.mean)


def density(q: SpikeSlab) -> Array:
    """Return the expected share of weights that are not zero, the mean of λ."""
    return sum(jax.tree.leaves(jax.tree.map(jnp.sum, q.inclusion)), jnp.float32(0)) / trees.size(q.inclusion)


def kl(q: SpikeSlab, w: SpikeSlab) -> Array:
    """Return the bound (34) in nats, summed over all weights: KL of the pairs (θ, γ).

    The paper's inequality is an equality, for θ tells γ: it is zero just where γ is.
    """

    def gates(a: Array, a_w: Array) -> Array:
        # Seen from the rarer of γ = 0 and γ = 1, whose probability has all its digits.
        turn = jnp.where(a > 0, -1.0, 1.0)
        a, a_w = turn * a, turn * a_w
        return jax.nn.sigmoid(a) * (a - a_w) - (softplus(a) - softplus(a_w))

    def one(inclusion: Array, a: Array, a_w: Array, *slabs: Array) -> Array:
        return jnp.sum(gates(a, a_w) + inclusion * gaussian.kl_of_each(*slabs))

    terms = jax.tree.map(one, q.inclusion, q.logit, w.logit, q.mean, q.sd, w.mean, w.sd)
    return sum(jax.tree.leaves(terms), jnp.float32(0))


def kl_gradient(q: SpikeSlab, w: SpikeSlab) -> SpikeSlab:
    """Return the gradient of the bound with respect to q; exactly zero at q = w."""

    def logit(inclusion: Array, a: Array, a_w: Array, *slabs: Array) -> Array:
        return inclusion * (1 - inclusion) * ((a - a_w) + gaussian.kl_of_each(*slabs))

    slab = gaussian.kl_gradient(Gaussian(q.mean, q.sd), Gaussian(w.mean, w.sd))
    slope = jax.tree.map(logit, q.inclusion, q.logit, w.logit, q.mean, q.sd, w.mean, w.sd)
    return _weighted(q, slab, slope)


def kl_gradient_of_prior(q: SpikeSlab, w: SpikeSlab) -> SpikeSlab:
    """Return the gradient of the bound with respect to w; exactly zero at w = q."""
    slab = gaussian.kl_gradient_of_prior(Gaussian(q.mean, q.sd), Gaussian(w.mean, w.sd))
    return _weighted(q, slab, trees.sub(w.inclusion, q.inclusion))


def logit_of(inclusion: Array) -> Array:
    """Return the a with sigmoid(a) = λ, of the nearest λ within the bounds."""
    inclusion = jnp.clip(inclusion, LEAST, 1 - LEAST)
    return jnp.log(inclusion) - jnp.log1p(-inclusion)


def _weighted(q: SpikeSlab, slab: Gaussian, logit: Weights) -> SpikeSlab:
    """Return a gradient of the bound: that of the Gaussians counts where the weight is there."""
    mean, sd = (jax.tree.map(jnp.multiply, q.inclusion, part) for part in (slab.mean, slab.sd))
    return SpikeSlab(mean, sd, logit, trees.zeros(q.inclusion))


def _bounded(logit: Array) -> Array:
    return jnp.clip(logit, -_FARTHEST, _FARTHEST)
