"""Populations of random effects: the distribution p(z | β) of trees z that differ from one individual to the next.

A `Normal` has everything in closed form. An `Energy` bends one by a small network and is known up to its normaliser,
whose gradient needs draws of the model. Learned standard deviations tend to collapse to zero, where the likelihood of
the effects has no bound: `project` keeps them in a box, and a `HyperPrior` pulls them away from it.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.bayes import gaussian
from priory.bayes.gaussian import Gaussian
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, struct

Effects = Any
Shape = Literal["diagonal", "scalar"]

Bounds = tuple[Array | float, Array | float]

ANY: Bounds = (1e-6, 1e6)
STEEPEST = 4 / (3 * math.sqrt(3))  # the largest |tanh″|
CELLS, NEGLIGIBLE = 256, 16.0  # of the grid for σ: how many, and by how many nats density may fall before it is none


@struct
class Normal:
    """Independent normal effects z_j ~ N(μ_j, σ_j²), or a gradient with respect to β = (μ, log σ).

    Attributes:
        mean: μ, a tree like z.
        log_sd: log σ, a tree like z (diagonal), or one number for all coordinates (scalar).
    """

    mean: Effects
    log_sd: Effects


@struct
class Energy:
    """Effects with density exp(−E(z)) / Z(β), E(z) = ½‖(z − μ)/σ‖² + w₂ · tanh(W₁ᵀ z + b₁), z as a vector.

    The network's part stays within ±Σ|w₂|, so that the quadratic rules far out and Z is finite whatever the weights.

    Attributes:
        base: μ and σ.
        w1: W₁, (coordinates, hidden).
        b1: (hidden,).
        w2: (hidden,); at zero the population is `base`.
    """

    base: Normal
    w1: Array
    b1: Array
    w2: Array


Population = Normal | Energy


def normal_around(mean: Effects, sd: Array | float, shape: Shape = "diagonal") -> Normal:
    """Return normal effects around a mean, all with one σ for now; `shape` says whether it stays one."""
    log_sd = jnp.log(jnp.asarray(sd, jnp.float32))
    if shape == "scalar":
        return Normal(mean, log_sd)
    return Normal(mean, jax.tree.map(lambda leaf: jnp.broadcast_to(log_sd, leaf.shape), mean))


def energy_around(base: Normal, num_hidden: int, key: Key) -> Energy:
    """Return an energy equal to its base so far: random features of z, each with weight zero."""
    size = trees.size(base.mean)
    w1 = jax.random.normal(key, (size, num_hidden)) / math.sqrt(size)
    return Energy(base, w1, jnp.zeros(num_hidden), jnp.zeros(num_hidden))


def sd(beta: Population, like: Effects) -> Effects:
    """Return σ of every coordinate, a tree like z for either shape."""
    own = sd_of(beta)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(own, leaf.shape), like) if _is_shared(own) else own


def sd_of(beta: Population) -> Effects:
    """Return σ as it is learned, one number if all coordinates share it: what a `HyperPrior` is to count."""
    return jax.tree.map(jnp.exp, base_of(beta).log_sd)


def base_of(beta: Population) -> Normal:
    """Return μ and log σ of either kind of population."""
    return beta.base if isinstance(beta, Energy) else beta


def draw(beta: Normal, key: Key) -> Effects:
    """Draw z ~ p(z | β); an energy is drawn from by a chain on its `log_prob`."""
    return gaussian.draw(key, Gaussian(beta.mean, sd(beta, beta.mean)))


def log_prob(beta: Population, z: Effects) -> Array:
    """Return the log density of z in nats, for an energy without −log Z(β), which a chain over z does not miss."""
    if isinstance(beta, Energy):
        return -energy(beta, z)

    def one(x: Array, m: Array, s: Array) -> Array:
        return jnp.sum(0.5 * jnp.square((x - m) / s) + jnp.log(s)) + 0.5 * math.log(2 * math.pi) * x.size

    return -sum(jax.tree.leaves(jax.tree.map(one, z, beta.mean, sd(beta, z))), jnp.float32(0))


def energy(beta: Energy, z: Effects) -> Array:
    """Return E(z; β)."""
    features = jnp.tanh(ravel_pytree(z)[0] @ beta.w1 + beta.b1)
    away = jax.tree.map(lambda x, m, s: (x - m) / s, z, beta.base.mean, sd(beta, z))
    return 0.5 * trees.norm_squared(away) + jnp.dot(beta.w2, features)


def score(beta: Energy, z: Effects, model_draws: Effects) -> Energy:
    """Return ∇_β log p(z | β) = −∇_β E(z) + E_p ∇_β E, the last by the mean over draws of the model, stacked on axis 0.

    For ∇_β log Z = −E_p ∇_β E. Unbiased for draws from p(· | β), whatever their number.
    """

    def gap(beta: Energy) -> Array:
        return jnp.mean(jax.vmap(lambda x: energy(beta, x))(model_draws)) - energy(beta, z)

    return jax.grad(gap)(beta)


def precision(beta: Population, like: Effects) -> Effects:
    """Return a bound on the curvature of −log p(z | β) per coordinate: 1/σ², plus for an energy that of its network.

    The Hessian of w₂ · tanh(W₁ᵀ z + b₁) has no eigenvalue beyond Σ_h |w₂h| ‖w₁h‖² max|tanh″|.
    """
    network: Array | float = 0.0
    if isinstance(beta, Energy):
        network = STEEPEST * jnp.dot(jnp.abs(beta.w2), jnp.sum(beta.w1**2, axis=0))
    return jax.tree.map(lambda s: 1 / s**2 + network, sd(beta, like))


def times_mean(unit: Effects, gradient: Population) -> Population:
    """Return a gradient or step of β with its part in μ multiplied by a number for each coordinate."""
    base = base_of(gradient)
    base = replace(base, mean=jax.tree.map(jnp.multiply, unit, base.mean))
    return replace(gradient, base=base) if isinstance(gradient, Energy) else base


def project(beta: Population, low: Array | float, high: Array | float = math.inf) -> tuple[Population, Array]:
    """Return β with every σ moved into [low, high], and how many of them lie at the lower end."""
    base, least = base_of(beta), jnp.log(jnp.asarray(low, jnp.float32))
    log_sd = jax.tree.map(lambda s: jnp.clip(s, least, jnp.log(high)), base.log_sd)
    at_end = (jnp.sum(s <= least, dtype=jnp.float32) for s in jax.tree.leaves(log_sd))
    base = replace(base, log_sd=log_sd)
    return replace(beta, base=base) if isinstance(beta, Energy) else base, sum(at_end, jnp.float32(0))


@dataclass(frozen=True)
class HyperPrior:
    """A density of each standard deviation σ, made by `parse`.

    `gamma:SHAPE,RATE` with shape 2 and a small rate vanishes at σ = 0, but no faster than σ, so that data can still
    argue for a small one (Chung et al., A nondegenerate penalized likelihood estimator for variance parameters in
    multilevel models, Psychometrika 2013). `half-normal:SCALE` bounds σ from above only. `flat` is no prior.
    """

    kind: str
    numbers: tuple[float, ...] = ()

    def log_density(self, sd: Effects) -> Array:
        """Return the log of a density in σ (not in log σ), summed over the coordinates of a tree."""
        return sum((jnp.sum(self.of_each(leaf)) for leaf in jax.tree.leaves(sd)), jnp.float32(0))

    def of_each(self, sd: Array) -> Array:
        """Return the log density of each σ_j."""
        if self.kind == "gamma":
            shape, rate = self.numbers
            return (shape - 1) * jnp.log(sd) - rate * sd + (shape * math.log(rate) - math.lgamma(shape))
        if self.kind == "half-normal":
            (scale,) = self.numbers
            return -0.5 * jnp.square(sd / scale) + (0.5 * math.log(2 / math.pi) - math.log(scale))
        return jnp.zeros_like(sd)


def parse(text: str) -> HyperPrior:
    """Return the prior of standard deviations that a text names.

    >>> parse("gamma:2,0.1")
    HyperPrior(kind='gamma', numbers=(2.0, 0.1))
    """
    kind, _, rest = text.partition(":")
    try:
        numbers = tuple(float(number) for number in rest.split(",")) if rest else ()
    except ValueError:
        numbers = (math.nan,)
    known = {"gamma": 2, "half-normal": 1, "flat": 0}
    if known.get(kind) != len(numbers) or not all(0 < number < math.inf for number in numbers) or text.endswith(":"):
        raise UsageError(
            f"{text!r} is no prior of standard deviations; write gamma:SHAPE,RATE, half-normal:SCALE or flat, "
            "with numbers above 0, such as gamma:2,0.1."
        )
    return HyperPrior(kind, numbers)


def draw_given_score(
    key: Key, beta: Normal, score: Normal, num: Array | float, hyper: HyperPrior, bounds: Bounds = ANY
) -> Normal:
    """Draw β given `num` effects by their mean ∇_β log p(z_i | β), which is all that matters."""
    own = sd_of(beta)
    shared_by = trees.size(beta.mean) if _is_shared(own) else 1
    offset = jax.tree.map(lambda s, g: num * s * s * g, sd(beta, beta.mean), score.mean)
    square = jax.tree.map(lambda s, g: num * s * s * (shared_by + g), own, score.log_sd)
    return sample_normal_given_effects(key, beta.mean, offset, square, num, hyper, bounds)


def sample_normal_given_effects(
    key: Key,
    centre: Effects,
    sum_offset: Effects,
    sum_square: Effects,
    num: Array | float,
    hyper: HyperPrior,
    bounds: Bounds = ANY,
) -> Normal:
    """Draw β = (μ, log σ) independently from its posterior given effects z_1 … z_b; flat in μ, `hyper` in σ.

    With S = Σ(z_i − z̄)²: p(σ | z) ∝ σ^{−(b−1)} exp(−S/2σ²) p(σ), μ integrated out, and μ | σ, z ~ N(z̄, σ²/b). The first
    is drawn from a grid of cells of equal log σ where the density is not negligible, uniformly within a cell, which
    makes the variance of log σ too large by less than a thousandth.

    Args:
        centre: c, near the effects (such as the last μ), or else S is lost to rounding.
        sum_offset: Σ(z_i − c), which adds up over parties, as does the next.
        sum_square: Σ(z_i − c)², a tree like z; or its sum over coordinates, one number, if they share σ.
        num: b, at least 2.
        bounds: Least and largest σ; the posterior is cut off there, which makes it proper under any prior.
    """
    key_mean, key_sd = jax.random.split(key)
    lost = jax.tree.map(lambda d: d * d / num, sum_offset)  # b (z̄ − c)²
    dof: Array | float = num - 1.0
    if _is_shared(sum_square):
        lost = sum(map(jnp.sum, jax.tree.leaves(lost)), jnp.float32(0))
        dof = dof * trees.size(centre)
    scatter, unravel = ravel_pytree(jax.tree.map(lambda s, less: jnp.maximum(s - less, 0.0), sum_square, lost))
    log_sd = unravel(_draw_log_sd(key_sd, scatter, dof, hyper, bounds))
    mean = trees.axpy(1 / num, sum_offset, centre)
    width = trees.scale(1 / jnp.sqrt(num), sd(Normal(mean, log_sd), mean))
    return Normal(gaussian.draw(key_mean, Gaussian(mean, width)), log_sd)


def _draw_log_sd(key: Key, scatter: Array, dof: Array | float, hyper: HyperPrior, bounds: Bounds) -> Array:
    """Draw log σ, one for each S in a vector, where σ has density σ^{−dof} exp(−S/2σ²) p(σ)."""
    key_cell, key_within = jax.random.split(key)
    low, high = (jnp.full((1, *scatter.shape), jnp.log(bound), jnp.float32) for bound in bounds)
    # log σ counts from its likeliest value, since dof · log σ may be large and float32 is short.
    likeliest = jnp.clip(0.5 * jnp.log(scatter[None] / dof), low, high)

    def cells(low: Array, high: Array) -> tuple[Array, Array, Array]:
        width = (high - low) / CELLS
        log_sd = low + (jnp.arange(CELLS, dtype=jnp.float32)[:, None] + 0.5) * width  # their middles
        fit = -dof * (log_sd - likeliest) - 0.5 * scatter[None] * jnp.exp(-2 * log_sd)
        return log_sd, width, fit + hyper.of_each(jnp.exp(log_sd)) + log_sd  # the last is dσ/d log σ

    # The density is concave in log σ, so what is not negligible is one interval. Twice: b may be 10 or 10⁵.
    for _ in range(2):
        log_sd, width, density = cells(low, high)
        counts = density > jnp.max(density, axis=0, keepdims=True) - NEGLIGIBLE
        first = jnp.min(log_sd, axis=0, keepdims=True, where=counts, initial=jnp.inf)
        last = jnp.max(log_sd, axis=0, keepdims=True, where=counts, initial=-jnp.inf)
        low, high = jnp.maximum(first - 1.5 * width, low), jnp.minimum(last + 1.5 * width, high)
    _, width, density = cells(low, high)
    cell = jax.random.categorical(key_cell, density, axis=0).astype(jnp.float32)
    return low[0] + (cell + jax.random.uniform(key_within, cell.shape)) * width[0]


def _is_shared(tree: Effects) -> bool:
    """Return whether a tree is the one number of a scalar shape."""
    return jax.tree_util.all_leaves([tree]) and jnp.ndim(tree) == 0
