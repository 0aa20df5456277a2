"""What a server accepts of a client: simulator and deployment call the same function."""

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
