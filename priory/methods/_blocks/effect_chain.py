"""A client's Markov chain on its random effects z, and the gradient of log p(z | β) along it.

FedPop, Kotelevskii et al., arXiv:2206.03611: lines 10 to 17 of Algorithm 1. Choices that the paper leaves open:

- γ is 1/L, L being the largest eigenvalue of Σ_j c_j A_jᵀA_j + diag(1/σ²), with A_j the Jacobian in z of the outputs of
  example j and c_j a bound on the curvature of its likelihood: a global bound where the outputs are linear in z.
- I has another form. With z = μ + σu, ∇_β log p(D | z(β, u)) has the same mean under the posterior, little noise where
  the prior rules and much where the data do. `scores` can take w I + (1 − w) of that, w = 1 − mean(1/σ²)/L being the
  share of the data in the posterior's curvature. Without it σ wanders where clients hardly differ. For a random
  intercept it is linear in z, so that the width that Langevin's bias adds to the draws leaves β alone.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import kernels, population
from priory.bayes.population import Normal, Population
from priory.core import trees
from priory.core.rng import Key
from priory.fed.shard import Batch, Shard
from priory.methods._blocks.mixed_effects import Mixed, Weights

BOUND_BATCHES = 8  # minibatches that a bound on the curvature is taken from


@dataclass(frozen=True)
class Target:
    """A client's posterior as a chain sees it; lives inside one trace.

    Attributes:
        log_likelihood: log p(D | φ, z).
        log_density: log p(z | D, φ, β) but for a constant.
        bound: A bound L on the curvature of −log_density.
        share: That of the data in it: 1 where they rule, 0 where the prior does.
    """

    log_likelihood: kernels.LogDensity
    log_density: kernels.LogDensity
    bound: Array
    share: Array


@dataclass(frozen=True)
class Sampler:
    """Settings of a client's chain on its random effects; lives inside one trace.

    Attributes:
        kernel: Markov kernel.
        gamma: γ, step size; None sets it from the bound on the curvature.
        leapfrog: Leapfrog steps of hmc.
        batch_size: Examples of a minibatch.
        steps: M, steps of a chain in a round.
    """

    kernel: kernels.Kind
    gamma: Array | float | None
    leapfrog: int
    batch_size: int
    steps: int

    @property
    def samples_data(self) -> bool:
        """Whether a step sees a minibatch."""
        return self.kernel in ("sgld", "psgld")

    def target(self, model: Mixed, beta: Population, data: Shard, z: Weights, rows: Batch, key: Key) -> Target:
        """Return the posterior of z under β; its curvature is bounded at z, from the examples of `rows`."""
        factor = bound_factor = jnp.float32(1)
        if self.samples_data:
            factor = data.count / self.batch_size
            bound_factor = factor / BOUND_BATCHES

        def log_likelihood(z: Weights, key: Key) -> Array:
            seen = model.seen(data.batch(key, self.batch_size)) if self.samples_data else rows
            return factor * model.log_likelihood(z, seen)

        def log_density(z: Weights, key: Key) -> Array:
            return log_likelihood(z, key) + population.log_prob(beta, z)

        precision = population.precision(beta, z)
        bound = model.curvature(z, rows, bound_factor, precision, key)
        mean = sum(map(jnp.sum, jax.tree.leaves(precision)), jnp.float32(0)) / max(1, trees.size(precision))
        return Target(log_likelihood, log_density, bound, jnp.clip(1 - mean / bound, 0.0, 1.0))

    def rows(self, model: Mixed, data: Shard, key: Key) -> Batch:
        """Return all examples of a client, or for a kernel that draws some, those that its curvature is bounded by."""
        if self.samples_data:
            return model.seen(data.batch(key, BOUND_BATCHES * self.batch_size))
        return model.seen_whole(data, self.batch_size)

    def step_size(self, target: Target, z: Weights) -> Array:
        """Return γ."""
        chosen = kernels.step_size_for(self.kernel, target.bound, trees.size(z)) if self.gamma is None else self.gamma
        return jnp.asarray(chosen, jnp.float32)

    def run(
        self, target: Target, start: Weights, key: Key, *, num_steps: int, burn_in: int, thin: int = 1
    ) -> kernels.Chain:
        """Return the chain from `start`, lines 10 to 15."""
        how = {"num_steps": num_steps, "burn_in": burn_in, "thin": thin, "leapfrog": self.leapfrog}
        return kernels.sample(self.kernel, target.log_density, start, self.step_size(target, start), key, **how)

    def over_priors(
        self, model: Mixed, rows: Batch, betas: Normal, start: Weights, data: Shard, key_bound: Key, key: Key
    ) -> Weights:
        """Return one draw of z under each draw of β (axis 0), the chain going on from one to the next."""

        def one(z: Weights, numbered: tuple[Normal, Array]) -> tuple[Weights, Weights]:
            beta, i = numbered
            target = self.target(model, beta, data, z, rows, jax.random.fold_in(key_bound, i))
            how = {"num_steps": self.steps, "burn_in": self.steps - 1}
            z = self.run(target, z, jax.random.fold_in(key, i), **how).last
            return z, z

        num = jax.tree.leaves(betas)[0].shape[0]
        return jax.lax.scan(one, start, (betas, jnp.arange(num)))[1]

    def figures(self, target: Target, z: Weights) -> dict[str, Array]:
        """Return whether γ is unstable, its limit, and the share of the data in the posterior."""
        limit = kernels.stability_limit(self.kernel, target.bound)
        unstable = (self.step_size(target, z) >= limit).astype("float32")
        return {"unstable": unstable, "gamma_limit": limit, "own_share": target.share}

    def advice(self, info: dict[str, float]) -> dict[str, str]:
        """Return what a user should know of the step size."""
        if not info.get("unstable", 0.0) > 0:
            return {}
        return {
            "unstable": f"gamma={self.gamma} is above the stability limit of {info['unstable']:.0%} of the clients "
            f"(their mean limit is {info['gamma_limit']:.3g}); choose less, or leave it out to have it set."
        }


def scores(target: Target, beta: Population, zs: Weights, key: Key, mixes: bool) -> Population:
    """Return ∇_β log p(z | β) of each z (axis 0), line 17, or an estimate with the same mean under the posterior.

    With z = μ + σu, ∇_β log p(D | z(β, u)) has that mean too; `mixes` weighs the two forms by the share of the data.
    """
    centred = jax.vmap(jax.grad(population.log_prob), in_axes=(None, 0))(beta, zs)
    if not mixes:
        return centred
    assert isinstance(beta, Normal), "the other form needs a Gaussian population"

    def along(z: Weights, key: Key) -> Population:
        u = jax.tree.map(lambda z, m, s: (z - m) / s, z, beta.mean, population.sd(beta, z))

        def log_likelihood(beta: Normal) -> Array:
            moved = jax.tree.map(lambda m, s, u: m + s * u, beta.mean, population.sd(beta, z), u)
            return target.log_likelihood(moved, key)

        return jax.grad(log_likelihood)(beta)

    num = jax.tree.leaves(zs)[0].shape[0]
    other = jax.vmap(along)(zs, jax.random.split(key, num))
    return jax.tree.map(lambda a, b: target.share * a + (1 - target.share) * b, centred, other)
