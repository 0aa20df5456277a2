"""Normal-inverse-Wishart distributions with a diagonal scale, over the mean and covariance of weights in a tree.

    NIW(μ, Σ; m, V, l, n) = N(μ; m, Σ/l) · IW(Σ; V, n)

`dim` is the size of the covariance: all d weights together (one Σ, of which V is the diagonal of the scale), or 1,
which makes d independent variances. Equation numbers are those of FedHB (Kim and Hospedales, arXiv:2305.04979),
appendix B.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import static, struct

Weights = Any


@struct
class NIW:
    """A normal-inverse-Wishart.

    Attributes:
        mean: m, where the mean of the weights is expected.
        scale: diag V, of the shapes of `mean`.
        strength: l, how many observations the mean is worth.
        dof: n > dim − 1, degrees of freedom of the covariance.
        dim: Size of the covariance: the number of all weights, or 1 for independent variances.
    """

    mean: Weights
    scale: Weights
    strength: float = static()
    dof: float = static()
    dim: int = static()


@struct
class StudentT:
    """A Student-t distribution over weights.

    Attributes:
        mean: Location.
        sd: Square root of the scale, coordinate by coordinate.
        dof: Degrees of freedom.
        shared: Whether one χ² draw serves all coordinates (a multivariate t), or each has its own.
    """

    mean: Weights
    sd: Weights
    dof: float = static()
    shared: bool = static()


@struct
class Observed:
    """The first two moments of `count` spiky mixtures keep · N(m_i, width²) + (1 − keep) · N(0, width²).

    Attributes:
        mean: Plain mean of m_i.
        spread: Plain mean of (m_i − mean)².
        keep: Probability of the component at m_i, a scalar for each leaf.
        width: ε.
        count: How many there are.
    """

    mean: Weights
    spread: Weights
    keep: Weights
    width: Array | float
    count: int = static()


def mode_variance(q: NIW) -> Weights:
    """Return the mode of the covariance's marginal, V / (n + dim + 1), eq. (34)."""
    return jax.tree.map(lambda v: v / (q.dof + q.dim + 1), q.scale)


def expected_precision(q: NIW) -> Weights:
    """Return E[Σ⁻¹] = n V⁻¹, eq. (52)."""
    return jax.tree.map(lambda v: q.dof / v, q.scale)


def expected_log_det(q: NIW) -> Array:
    """Return E log|Σ| over all weights, eq. (51)."""
    log_scale = sum(jnp.sum(jnp.log(v)) for v in jax.tree.leaves(q.scale))
    blocks = trees.size(q.scale) // q.dim
    half = (q.dof - np.arange(q.dim)) / 2
    return log_scale - jnp.float32(blocks * (q.dim * math.log(2) + np.sum(scipy.special.digamma(half))))


def kl(q: NIW, p: NIW) -> Array:
    """Return KL(q ‖ p) in nats with every constant, eq. (49); the two must have one `dim`."""
    assert q.dim == p.dim, "both must be joint or both factorised"
    num, blocks = trees.size(q.mean), trees.size(q.mean) // q.dim
    half_q, half_p = q.dof / 2, p.dof / 2
    # Differences of huge numbers where dim is large: the constants are summed as float64, before any tracing, and the
    # scales are compared by the precisions n V⁻¹ that they make, which differ little.
    normaliser = float(scipy.special.multigammaln(half_p, q.dim) - scipy.special.multigammaln(half_q, q.dim))
    normaliser += (half_q - half_p) * np.sum(scipy.special.digamma((q.dof - np.arange(q.dim)) / 2))
    constant = blocks * normaliser + num * (half_p * (1 + math.log(q.dof / p.dof)) - half_q)
    constant += 0.5 * num * (p.strength / q.strength - 1)
    constant += 0.5 * num * math.log(q.strength / p.strength)

    def one(m: Array, v: Array, m_p: Array, v_p: Array) -> Array:
        excess = (q.dof / p.dof * v_p - v) / v
        pull = p.strength * q.dof * (m_p - m) ** 2 / v  # eq. (55)
        return jnp.sum(p.dof * (excess - jnp.log1p(excess)) + pull)  # eq. (53)

    varying = sum(jax.tree.leaves(jax.tree.map(one, q.mean, q.scale, p.mean, p.scale)))
    return jnp.float32(constant) + 0.5 * varying


def expected_divergence(q: NIW, mean: Weights, keep: Weights, width: Array | float) -> Array:
    """Return E_q KL(q_i ‖ N(μ, Σ)) for the spiky mixture q_i of keep · N(mean, width²) and (1 − keep) · N(0, width²).

    The divergence of a mixture is bounded by the mixture of divergences (eq. (35) takes it as equal), so an ELBO made
    of this is still a lower bound.
    """
    num = trees.size(mean)

    def one(m: Array, m_q: Array, v: Array, p: Array) -> Array:
        return jnp.sum((_deviation(m, m_q, p) + width**2) / v)

    scatter = q.dof * sum(jax.tree.leaves(jax.tree.map(one, mean, q.mean, q.scale, keep)))
    entropy = num * (1 + 2 * jnp.log(width))  # less the log 2π that both terms have
    return 0.5 * (expected_log_det(q) - entropy + scatter + num / q.strength)


def update(prior: NIW, observed: Observed, dof: float, strength: float, centre: Weights, learn_scale: bool) -> NIW:
    """Return the q(μ, Σ) of given degrees of freedom that is optimal for what was observed, eq. (41), around `centre`.

    Args:
        centre: m of the result; `shrunk_mean` is the optimal one.
        learn_scale: Whether the scale of the prior is replaced by the one that maximises the bound, leaf by leaf.
    """
    count = observed.count

    def scatter(m: Array, s: Array, p: Array, c: Array, m_prior: Array) -> Array:
        deviation = p * s + _deviation(m, c, p)  # ρ, averaged over i
        return count * (observed.width**2 + deviation) + prior.strength * (c - m_prior) ** 2

    total = jax.tree.map(scatter, observed.mean, observed.spread, observed.keep, centre, prior.mean)
    before = jax.tree.map(lambda s: _marginal_scale(s, count, prior.dof), total) if learn_scale else prior.scale
    scale = jax.tree.map(lambda v, s: dof / (count + prior.dof) * (v + s), before, total)
    return NIW(centre, scale, strength, dof, prior.dim)


def shrunk_mean(prior: NIW, observed: Observed) -> Weights:
    """Return the optimal m of `update`, eq. (41): the prior's mean counts as `strength` more observations."""
    count = observed.count

    def one(m: Array, p: Array, m_prior: Array) -> Array:
        return (prior.strength * m_prior + p * count * m) / (prior.strength + count)

    return jax.tree.map(one, observed.mean, observed.keep, prior.mean)


def marginal_scale(q: NIW, dof: float) -> Weights:
    """Return the scale of a prior with `dof` degrees of freedom that maximises the bound given q, one per leaf."""
    return jax.tree.map(lambda v: jnp.broadcast_to(dof / (q.dof * jnp.mean(1 / v)), v.shape), q.scale)


def predictive(q: NIW) -> StudentT:
    """Return ∫ N(θ; μ, Σ) q(μ, Σ), a Student-t, eq. (42)."""
    dof = q.dof - q.dim + 1
    factor = (q.strength + 1) / (q.strength * dof)
    return StudentT(q.mean, jax.tree.map(lambda v: jnp.sqrt(factor * v), q.scale), dof, q.dim > 1)


def draw(key: Key, t: StudentT) -> Weights:
    """Draw weights."""
    key_normal, key_scale = jax.random.split(key)
    # All leaves in one draw: the sampler of χ² takes seconds to compile.
    sd, unravel = ravel_pytree(t.sd)
    noise = jax.random.normal(key_normal, sd.shape)
    if not math.isinf(t.dof):
        noise = noise * _widening(key_scale, () if t.shared else sd.shape, t.dof)
    return trees.add(t.mean, unravel(sd * noise))


def _deviation(m: Array, centre: Array, keep: Array) -> Array:
    """Return E(θ − centre)² less the width: ρ of eq. (41), p·m² − 2p·m·c + c² written without cancellation."""
    return keep * (m - centre) ** 2 + (1 - keep) * centre**2


def _marginal_scale(scatter: Array, count: int, dof: float) -> Array:
    """Return the t for which the prior scale t·I and the resulting V are jointly optimal: mean S/(t + S) = N/(N + ν).

    The left side falls with t, so halving the interval of log t finds it; alternating the two steps would need
    thousands of rounds where ν is large.
    """
    target = count / (count + dof)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        t = jnp.exp(middle)
        above = jnp.mean(scatter / (t + scatter)) < target
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    largest = jnp.log(jnp.maximum(jnp.max(scatter), 1e-30) * (dof + count) / count)
    ends = jax.lax.fori_loop(0, 40, halve, (largest - 40.0, largest + 1.0))
    return jnp.broadcast_to(jnp.exp(ends[1]), scatter.shape)


def _widening(key: Key, shape: tuple[int, ...], dof: float) -> Array:
    return jnp.sqrt(dof / jax.random.chisquare(key, dof, shape))
