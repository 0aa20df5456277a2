"""Certificates: reasons against one that several methods give, and a distribution that is known by its draws."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian
from priory.bayes.gaussian import Gaussian
from priory.fed.method import Task


def own_statistics(task: Task) -> str | None:
    """Return why a posterior with statistics of its own has no certificate; None where the model keeps none."""
    stats = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0))).stats
    if not jax.tree.leaves(stats):
        return None
    return (
        "the statistics of its batch norm are fitted to the client's own rows and are no draw of q; choose a model "
        "without batch norm"
    )


def trained_head(update: str) -> str | None:
    """Return why a head that is frozen in training has no certificate; None where all layers are learned together."""
    if update == "full":
        return None
    return (
        f"update={update} leaves a head that has no prior, and personalisation fits it to the client's own rows; "
        "choose update=full"
    )


def fitted_to_draws(draws: Any, priors: Gaussian) -> tuple[Gaussian, Array]:
    """Return a Gaussian with the moments of draws (axis 0), and its divergence from the equal mixture of the priors."""
    q = Gaussian(*(jax.tree.map(lambda leaf, of=of: of(leaf, axis=0), draws) for of in (jnp.mean, jnp.std)))
    each = jax.lax.map(lambda prior: gaussian.kl(q, prior), priors)
    # log Σ exp is convex, so its mean is no less than at the means.
    return q, jnp.log(each.shape[0]) - jax.nn.logsumexp(-each)
