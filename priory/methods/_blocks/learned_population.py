"""The population p(z | β) of random effects, learned by the server: line 21 of Algorithm 1 of FedPop.

Kotelevskii et al., arXiv:2206.03611. β is maximised by an optimiser, or drawn by a Gibbs step. A crowd goes with it:
draws of β (full Bayes), or particles of z that stand for the prior of an energy; it is empty otherwise.

Choices that the paper leaves open:

- Scale of β: log σ has no unit, and μ moves in units u of its population, u = σ or σ at the start if that is larger:
  the optimiser sees u ∇_μ, and μ moves by u times its step (without momentum and with u = σ, along the natural gradient
  of p(z | β)). So outcomes in another unit, with σ at the start and its prior in it, lead to the same answer in that
  unit. With `units="outcome"`, u = 1.
- Full Bayes over β: instead of a gradient step, β is drawn from p(β | z_1 … z_b), which with a kernel that keeps
  p(z | D, β) invariant and all clients in every round is a Gibbs sampler for (β, z); φ stays a point.
- The energy's ∇ log Z(β) is a mean over particles that the server moves by steps of `mala` under β, round after round.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import kernels, population
from priory.bayes.population import Energy, Normal, Population
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.fed.capabilities import MOST_EFFECTS
from priory.fed.checks import positive
from priory.fed.local import Optimiser
from priory.methods._blocks.mixed_effects import Weights

RECENT = 4.0  # of t rounds, the recent average of β lags by t / (1 + RECENT) rounds: a fifth of them
SHORTEST = 100  # rounds; shorter runs are judged by their pace
SETTLED = 0.15  # the most that β may have moved in a fifth of the rounds, in units of σ and of log σ
SIGMA_MAX = 1e6  # where a draw of σ ends, for want of a prior


@dataclass(frozen=True)
class Learner:
    """Settings by which the server learns β; lives inside one trace.

    Attributes:
        kind: Gaussian with a σ for each coordinate, with one σ, or an energy.
        is_frozen: Whether β stays as it is.
        prior_sd: σ at the start.
        sigma: Prior on σ, as text.
        sigma_min: Smallest σ.
        num_draws: Draws of β that are kept; 0 maximises instead.
        units: Unit of the steps of μ.
        width: Hidden units of the energy.
        particles: Particles of the energy's prior.
        steps: Steps of their chains in a round.
        optimiser: Optimiser of β.
    """

    kind: Literal["diagonal", "scalar", "energy"]
    is_frozen: bool
    prior_sd: float
    sigma: str
    sigma_min: float
    num_draws: int
    units: Literal["sd", "outcome"]
    width: int
    particles: int
    steps: int
    optimiser: Optimiser

    def check(self) -> None:
        """Raise on a bad setting."""
        positive("prior-sd", self.prior_sd)
        positive("sigma-min", self.sigma_min)
        hyper = population.parse(self.sigma)
        if self.num_draws and (self.kind == "energy" or self.is_frozen):
            raise UsageError(
                f"prior-draws={self.num_draws} needs a Gaussian prior that is learned; choose one, or 0 draws."
            )
        if self.kind == "energy" and hyper != population.parse("flat"):
            raise UsageError(f"prior-sigma={self.sigma} belongs to a Gaussian prior; choose prior=diagonal.")

    @property
    def follows(self) -> bool:
        """Whether the server compares β with its recent average."""
        return self.units == "sd" and not self.is_frozen and not self.num_draws

    def init_around(self, z: Weights, key_energy: Key, key_crowd: Key) -> tuple[Population, Any]:
        """Return the first β, around z unless it is frozen, and its crowd."""
        mean = trees.zeros(z) if self.is_frozen else z
        shape: population.Shape = "scalar" if self.kind == "scalar" else "diagonal"
        return self.init(population.normal_around(mean, self.prior_sd, shape), key_energy, key_crowd)

    def init(self, normal: Normal, key_energy: Key, key_crowd: Key) -> tuple[Population, Any]:
        """Return β where the population is a normal one, and its crowd."""
        if self.kind == "energy":
            crowd = jax.vmap(lambda key: population.draw(normal, key))(jax.random.split(key_crowd, self.particles))
            return population.energy_around(normal, self.width, key_energy), crowd
        if self.num_draws:
            return normal, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.num_draws, *leaf.shape)), normal)
        return normal, ()

    def draw(self, beta: Population, crowd: Any, key: Key) -> Weights:
        """Draw z from the population."""
        key_which, key_draw = jax.random.split(key)
        if self.kind == "energy":
            which = jax.random.randint(key_which, (), 0, self.particles)
            return jax.tree.map(lambda leaf: leaf[which], crowd)
        if self.num_draws:
            which = jax.random.randint(key_which, (), 0, self.num_draws)
            beta = jax.tree.map(lambda leaf: leaf[which], crowd)
        assert isinstance(beta, Normal), "an energy is drawn from by its particles"
        return population.draw(beta, key_draw)

    def draws(self, beta: Population, crowd: Any, keys: Key) -> Weights:
        """Draw a z for each key."""
        return jax.vmap(lambda key: self.draw(beta, crowd, key))(keys)

    def update(
        self, beta: Population, state: Any, crowd: Any, score: Population, num_clients: int, count: Array, key: Key
    ) -> tuple[Population, Any, Any]:
        """Return β after a round, the state of its optimiser, and the crowd; `score` is the clients' mean I."""
        hyper = population.parse(self.sigma)
        if self.is_frozen:
            return beta, state, crowd
        if self.num_draws:
            assert isinstance(beta, Normal)
            assert isinstance(score, Normal)
            bounds = (self.sigma_min, SIGMA_MAX)
            beta = population.draw_given_score(key, beta, score, num_clients, hyper, bounds)
            # The oldest place, and with it those that were never filled.
            places = jnp.arange(self.num_draws)
            is_new = (places == count % self.num_draws) | (places > count)
            return beta, state, jax.vmap(lambda is_new, old: trees.select(is_new, beta, old))(is_new, crowd)
        if self.kind == "energy":
            crowd = self._moved(beta, crowd, key)
            pull = jax.vmap(jax.grad(population.log_prob), in_axes=(None, 0))(beta, crowd)
            score = trees.sub(score, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), pull))
        else:
            hyper_score = jax.grad(lambda beta: hyper.log_density(population.sd_of(beta)))(beta)
            score = trees.axpy(1 / num_clients, hyper_score, score)
        unit = self._unit(beta)
        uphill = population.times_mean(unit, score)
        step, state = ascend(self.optimiser, trees.zeros(beta), uphill, state)
        return trees.add(beta, population.times_mean(unit, step)), state, crowd

    def followed(self, beta: Population, recent: Any, count: Array) -> Any:
        """Return the average of (μ, log σ) over the recent rounds after round `count`; () where β is not followed."""
        if not self.follows:
            return recent
        return trees.axpy(RECENT / (count + RECENT), trees.sub(population.base_of(beta), recent), recent)

    def figures(self, beta: Population, recent: Any, count: Array, like: Weights) -> dict[str, Array]:
        """Return the root mean square of σ, and how far μ (in units of σ) and log σ moved in a fifth of the rounds.

        In a run shorter than SHORTEST it is how far they would move in a fifth of that.
        """
        sd = population.sd(beta, like)
        rms = jnp.sqrt(trees.norm_squared(sd) / max(1, trees.size(sd)))
        if not self.follows:
            return {"sigma": rms}
        base = population.base_of(beta)
        away = trees.scale(jnp.maximum(1.0, SHORTEST / jnp.maximum(count, 1)), trees.sub(base, recent))
        mean = jax.tree.map(jnp.divide, away.mean, population.sd(base, base.mean))
        return {"sigma": rms, "mean_moved": _largest(mean), "sd_moved": _largest(away.log_sd)}

    def advice(self, info: dict[str, float], num_effects: int) -> dict[str, str]:
        """Return what a user should know of the population of so many random effects."""
        advised = {}
        is_over = info.get("progress", 1.0) == 1  # until then β may be small and on its way
        if is_over and info.get("own_share", 1.0) < 0.01:
            advised["collapse"] = (
                f"σ has collapsed to {info['sigma']:.3g} (stopped {info['projected']:.0f} times at sigma-min="
                f"{self.sigma_min:g}) and leaves clients {info['own_share']:.1%} of their own: the likelihood is "
                "largest where they do not differ, which with few clients happens by chance; give a prior on σ, such "
                "as --prior-sigma gamma:2,0.1, or draw it with --prior-draws."
            )
        moved = [info.get(name, 0.0) for name in ("mean_moved", "sd_moved")]
        if is_over and max(moved) > SETTLED and num_effects <= MOST_EFFECTS:
            advised["moving"] = (
                "The population has not settled, so its mean and standard deviation are not estimates yet: at the pace "
                f"of the last rounds, a fifth of all rounds (or {SHORTEST / 5:.0f}) moves the mean by {moved[0]:.2g} "
                f"standard deviations and the standard deviation by a factor of {math.exp(moved[1]):.2f}; take more "
                "--rounds or a larger --prior-step-size, or if it moves to and fro, --schedule prior-step-size=cosine."
            )
        if self.num_draws and info.get("participation", 1.0) < 1:
            advised["participation"] = (
                f"prior-draws={self.num_draws} draws the prior given everybody's random effects, but "
                f"{info['participation']:.0%} of the clients took part; let all take part."
            )
        return advised

    def _moved(self, beta: Population, particles: Weights, key: Key) -> Weights:
        """Return the particles after some steps of a chain on the energy's prior."""
        assert isinstance(beta, Energy)

        def log_density(z: Weights, key: Key) -> Array:
            del key
            return population.log_prob(beta, z)

        like = jax.tree.map(lambda leaf: leaf[0], particles)
        steepest = jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(population.precision(beta, like))]).max()
        gamma = kernels.step_size_for("mala", steepest, trees.size(like))

        def one(z: Weights, key: Key) -> Weights:
            return kernels.sample("mala", log_density, z, gamma, key, num_steps=self.steps).last

        return jax.vmap(one)(particles, jax.random.split(key, self.particles))

    def _unit(self, beta: Population) -> Weights:
        """Return the unit of the steps of μ, by coordinate."""
        mean = population.base_of(beta).mean
        if self.units == "outcome":
            return jax.tree.map(jnp.ones_like, mean)
        # No less than at the start: a σ that collapses must not keep μ from where the data want it.
        return jax.tree.map(lambda sd: jnp.maximum(sd, self.prior_sd), population.sd(beta, mean))


def ascend(optimiser: Optimiser, values: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
    """Return values after a step uphill, and the state of the optimiser."""
    updates, state = optimiser.build().update(trees.scale(-1.0, gradient), state, values)
    return trees.add(values, updates), state


def _largest(tree: Any) -> Array:
    """Return the largest number of a tree in magnitude."""
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)]))
