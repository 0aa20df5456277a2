"""What a server accepts of a client: simulator and deployment call the same function."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.fed.method import Message


def usable(message: Message) -> Array:
    """Whether one message may enter a sum: every number finite, the weight not negative."""
    return jnp.isfinite(message.weight) & (message.weight >= 0) & trees.all_finite(message.payload)


def silence(message: Message, keep: Array) -> Message:
    """The message if it is kept, else an absent one of zeros: 0 · NaN is NaN, so weight 0 alone removes nothing."""
    payload = trees.select(keep, message.payload, jax.tree.map(jnp.zeros_like, message.payload))
    return Message(payload, jnp.where(keep, message.weight, 0.0), message.sender)


def most_uncertain(uncertainty: Array, uploads: Array, share: float) -> Array:
    """Which places are left out, (places,): of n uploaders the ⌊share · n⌋ most uncertain, of equals the first.

    Whoever has no finite uncertainty, for want of examples to measure it on, is not among the n and is never left out.

    Args:
        uncertainty: (places,), of each client's own predictive.
        uploads: (places,), whose message would count.
        share: In [0, 1).
    """
    ranked = uploads & jnp.isfinite(uncertainty)
    # A table, since the share is a decimal that somebody wrote: in floating point ⌊0.29 · 100⌋ is 28.
    allowed = [math.floor(Fraction(str(share)) * num) for num in range(uncertainty.shape[0] + 1)]
    order = jnp.argsort(jnp.where(ranked, -uncertainty, jnp.inf))
    return ranked & (jnp.argsort(order) < jnp.asarray(allowed)[jnp.sum(ranked)])
