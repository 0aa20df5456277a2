"""What a server accepts of a client: simulator and deployment call the same function."""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.struct import struct
from priory.fed.method import Message

REASONS = ("", "not finite", "weight", "norm")  # by verdict


@struct
class Limits:
    """What a message may be at most.

    Attributes:
        norm: Largest norm of payload − reference.
        weight: Largest weight.
    """

    norm: float = 1e8
    weight: float = math.inf


LIMITS = Limits()  # where nobody says otherwise
UNLIMITED = Limits(math.inf, math.inf)


def verdict(message: Message, reference: Any, limits: Limits) -> Array:
    """0 if one message may enter a sum, else the place in `REASONS` of the first thing that is wrong with it.

    A number of its payload or its weight is not finite; its weight is negative or above the limit; the norm of
    payload − reference is above the limit, or too large to be computed. Whole numbers name something, and have no norm.
    """
    finite = jnp.isfinite(message.weight) & trees.all_finite(message.payload)
    weight = (message.weight >= 0) & (message.weight <= limits.weight)
    norm = trees.norm(_difference(message.payload, reference)) <= limits.norm
    return jnp.select([~finite, ~weight, ~norm], [1, 2, 3], 0).astype(jnp.int8)


def usable(message: Message, reference: Any, limits: Limits) -> Array:
    """Whether one message may enter a sum."""
    return verdict(message, reference, limits) == 0


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


def _difference(payload: Any, reference: Any) -> list[Array]:
    """Payload − reference of all leaves but whole numbers."""
    pairs = zip(jax.tree.leaves(payload), jax.tree.leaves(reference), strict=True)
    return [a - b for a, b in pairs if jnp.issubdtype(a.dtype, jnp.inexact)]
