"""A payload of which only a part travels: a bitmap and the numbers under it, several trees sharing one bitmap."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.struct import struct


@struct
class Thin:
    """Trees of one shape of which the same places travel, and what travels whole.

    Attributes:
        kept: Which places travel, a tree of booleans; None with no values.
        values: Trees like it; zero where nothing travels.
        rest: What travels whole.
    """

    kept: Any
    values: tuple[Any, ...]
    rest: Any


def bits(thin: Thin) -> Array:
    """The bits that travel: one for each place, 32 for each number that is kept, and the rest whole."""
    kept = sum((jnp.sum(leaf) for leaf in jax.tree.leaves(thin.kept)), jnp.int32(0))
    whole = 8 * trees.num_bytes(thin.rest)
    bitmap = sum(8 * bitmap_bytes(leaf.size) for leaf in jax.tree.leaves(thin.kept))
    return jnp.float32(bitmap + whole) + 32.0 * len(thin.values) * kept.astype(jnp.float32)


def bitmap_bytes(num: int) -> int:
    """The bytes of the bitmap of one leaf of `num` numbers; every leaf starts a byte of its own."""
    return -(-num // 8)
