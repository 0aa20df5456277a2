"""Variational inference of a client's posterior q and of its own copy w of the prior, by steps that alternate.

Zhang et al., Personalized Federated Learning via Variational Bayesian Inference, ICML 2022, arXiv:2206.07977, and with
two more families arXiv:2303.04345; the equations are numbered as in the second one. The loops of ClientUpdate in
Algorithms 1, 2 and 3 are `fit_posterior_and_prior`, with the objectives

    Ω(q) = −(n/b) 1/a Σ_batch Σ_a log p(y | x, θ) + ζ KL(q ‖ w),   θ ~ q        eqs. (30), (43), (55)
    Ω_w(w) = KL(q ‖ w)                                                          eqs. (31), (42), (57)

Both are divided by n here, which Adam does not see: a step size then means the same for small and large clients.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.bayes import gaussian
from priory.bayes.gaussian import Gaussian
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.checks import at_least, choices, finite, positive
from priory.fed.local import Optimiser, Work, each_batch
from priory.fed.method import Task
from priory.fed.shard import Batch, Shard
from priory.models import noisy
from priory.models.model import Params

Distribution = Any
Free = Any
Likelihood = Callable[[Distribution, Any, Batch, Key], tuple[Array, Any]]


class Family(Protocol):
    """A family of independent distributions with free coordinates; `bayes.gaussian` and `bayes.spike_slab` are two.

    Coordinates are trees like the weights, `mean` among them, and everything acts on each weight alone.
    """

    def width(self, free: Any, /) -> Any:
        """Return the part of the distribution at free coordinates that must be computed."""

    def join(self, free: Any, width: Any, /) -> Any:
        """Return the distribution at free coordinates whose width is known."""

    def chain(self, free: Any, gradient: Any, /) -> Any:
        """Return the gradient with respect to free coordinates, from that with respect to the distribution there."""

    def kl_gradient(self, q: Any, w: Any, /) -> Any:
        """Return ∂KL(q ‖ w) / ∂q."""

    def kl_gradient_of_prior(self, q: Any, w: Any, /) -> Any:
        """Return ∂KL(q ‖ w) / ∂w."""


@struct
class VariationalParams:
    """A distribution over networks.

    Attributes:
        weights: Its free coordinates.
        stats: Statistics of a batch norm.
    """

    weights: Free
    stats: Any


@struct
class ClientState:
    """A client's posterior and the state of its optimiser, of coordinates as one vector each."""

    q: VariationalParams
    optimiser: Any


@struct
class CoupledFit:
    """Settings of the local work on both distributions.

    Attributes:
        optimiser: Local solver of q.
        work: Local work of a round.
        zeta: ζ, weight of the divergence.
        prior_rate: Step size of w as a multiple of that of q.
        moves_prior: Whether w takes steps towards q; otherwise it stays as it was broadcast.
    """

    optimiser: Optimiser
    work: Work
    zeta: float
    prior_rate: float
    moves_prior: bool = static(default=True)


def check(settings: Any) -> None:
    """Raise on a bad setting of those that the methods of this family share."""
    choices(settings)
    at_least("zeta", settings.zeta, 0)
    finite("rho", settings.rho)
    at_least("beta", settings.beta, 0)
    at_least("samples-per-step", settings.samples_per_step, 1)
    positive("prior-rate", settings.prior_rate)
    settings.optimiser.check()
    if settings.optimiser.weight_decay:
        raise UsageError(
            f"weight-decay={settings.optimiser.weight_decay} would shrink ρ too, and the prior already regularises; "
            "leave it at 0."
        )
    settings.work.check()


def likelihood(
    task: Task,
    draw: Literal["layers", "weights"],
    num_samples: int,
    gaussian_of: Callable[[Key, Any], Gaussian] = lambda key, q: q,
) -> Likelihood:
    """Return the first term of Ω by `num_samples` samples of the Gaussian that `gaussian_of` makes of q."""

    def nll(q: Distribution, stats: Any, batch: Batch, key: Key) -> tuple[Array, Any]:
        def once(key: Key) -> tuple[Array, Any]:
            weights = gaussian_of(key, q)
            outputs, new = noisy.apply(task.model, Params(weights.mean, stats), weights.sd, batch.x, key, draw)
            return task.mean_nll(outputs, batch), new

        if num_samples == 1:
            return once(key)
        losses, new = jax.vmap(once)(jax.random.split(key, num_samples))
        return jnp.mean(losses), jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), new)

    return nll


def draw_networks(params: VariationalParams, key: Key, num: int) -> Params:
    """Draw `num` networks from a Gaussian, stacked on axis 0."""
    q = gaussian.of(params.weights)

    def one(key: Key) -> Params:
        return Params(gaussian.draw(key, q), params.stats)

    return jax.lax.map(one, jax.random.split(key, num))


def init_client_state(down: VariationalParams, optimiser: Optimiser) -> ClientState:
    """Return a posterior at what was broadcast, its optimiser at rest."""
    return ClientState(down, optimiser.build().init(_flat(down.weights)[0]))


def fit_posterior_and_prior(
    nll: Likelihood,
    family: Family,
    start: ClientState,
    down: VariationalParams,
    data: Shard,
    key: Key,
    how: CoupledFit,
) -> tuple[ClientState, VariationalParams, Array]:
    """Return the posterior and the localised w after the local work, and the mean likelihood term of its steps.

    Args:
        nll: `nll(q, stats, batch, key)` estimates the mean over the batch of −E_q log p(y | x, θ), and gives the new
            statistics.
        family: The family of q and w.
        start: The posterior from which q continues.
        down: w as it was broadcast, from which its copy starts.
        data: The client's examples.
        key: A fresh key.
        how: Solver, work and weights.
    """
    transform = how.optimiser.build()
    transform_w = replace(how.optimiser, step_size=how.optimiser.step_size * how.prior_rate).build()
    share = 1 / jnp.maximum(data.count, 1).astype(jnp.float32)

    # One vector for all leaves: starting a pass over a small one costs more than the pass.
    (free, restore), (free_w, _) = _flat(start.q.weights), _flat(down.weights)  # Algorithm 1, v_{w,0} = v^t

    def loss(q: Distribution, stats: Any, batch: Batch, key: Key) -> tuple[Array, Any]:
        return nll(restore(q), stats, batch, key)

    def step(carry: tuple, batch: Batch, key: Key) -> tuple:
        (free, width, state), prior, stats, total, steps = carry
        free_w, width_w, state_w = prior
        q, w = family.join(free, width), family.join(free_w, width_w)
        (value, stats), slope = jax.value_and_grad(loss, has_aux=True)(q, stats, batch, key)  # eq. (30), first term
        slope = trees.axpy(how.zeta * share, family.kl_gradient(q, w), slope)  # eq. (30), second term
        moves, state = transform.update(family.chain(free, slope), state, free)
        free = optax.apply_updates(free, moves)  # Algorithm 1, step on v_r
        width = family.width(free)
        if how.moves_prior:
            slope_w = trees.scale(share, family.kl_gradient_of_prior(family.join(free, width), w))  # eq. (31)
            moves, state_w = transform_w.update(family.chain(free_w, slope_w), state_w, free_w)
            free_w = optax.apply_updates(free_w, moves)  # Algorithm 1, step on v_{w,r}
            prior = free_w, family.width(free_w), state_w
        return (free, width, state), prior, stats, total + value, steps + 1

    both = (free, family.width(free), start.optimiser), (free_w, family.width(free_w), transform_w.init(free_w))
    carry = (*both, down.stats, jnp.float32(0), jnp.int32(0))
    (free, _, state), (free_w, _, _), stats, total, steps = each_batch(step, carry, data, how.work, key)
    fitted = ClientState(VariationalParams(restore(free), stats), state)
    return fitted, VariationalParams(restore(free_w), stats), total / jnp.maximum(steps, 1)


def _flat(free: Free) -> tuple[Free, Callable[[Any], Any]]:
    """Return coordinates as one vector each, and the function that gives such vectors the shape of the weights."""
    outline: Any = jax.tree.structure(free.mean)
    unravel = ravel_pytree(free.mean)[1]

    def is_tree(node: Any) -> bool:
        return bool(jax.tree.structure(node) == outline)

    vectors = jax.tree.map(lambda tree: ravel_pytree(tree)[0], free, is_leaf=is_tree)
    return vectors, lambda flat: jax.tree.map(unravel, flat)
