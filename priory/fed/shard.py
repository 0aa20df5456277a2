"""One client's view of a pool of examples, without padding.

The pool holds the examples of all clients, sorted by client; a shard is `(start, count)` into it, so that under `vmap`
or `scan` over clients only two integers vary. On a real client `start = 0` and `count = n`: the same type.
"""

import jax
import jax.numpy as jnp
from jax import Array

from priory.core.rng import Key
from priory.core.struct import replace, static, struct

DRAWN_BITS = 23  # of a uniform number in single precision
PLACE_BITS = 32 - DRAWN_BITS


@struct
class Batch:
    """A minibatch; rows whose mask is 0 are copies of real rows and count for nothing.

    Attributes:
        x: Inputs as the model wants them, (batch, ...).
        y: Labels or targets, (batch,); None when the data have none.
        scale: Known standard error of each target, (batch,), or None.
        mask: 1.0 for a row that counts, (batch,).
        position: Places of the rows among the client's own, (batch,); None where the batch is not of a shard.
    """

    x: Array
    y: Array | None
    scale: Array | None
    mask: Array
    position: Array | None = None


@struct
class Pool:
    """All examples in one place, as they came (images stay uint8); scaled when a batch is drawn.

    Attributes:
        x: Raw inputs, (examples, ...).
        y: Labels or targets, (examples,), or None.
        scale: Known standard errors of the targets, (examples,), or None.
        shift: Model inputs are (x − shift) · factor; a scalar, or one number a channel.
        factor: See `shift`.
    """

    x: Array
    y: Array | None
    scale: Array | None
    shift: Array
    factor: Array

    def rows(self, index: Array, mask: Array) -> Batch:
        """The batch of the given rows."""
        x = self.x[index].astype(jnp.float32)
        channels = (1,) * (x.ndim - jnp.ndim(self.shift)) + jnp.shape(self.shift)
        x = (x - jnp.reshape(self.shift, channels)) * jnp.reshape(self.factor, channels)
        return Batch(
            x=x,
            y=None if self.y is None else self.y[index],
            scale=None if self.scale is None else self.scale[index],
            mask=mask,
        )


@struct
class Shard:
    """One client's examples: `count` rows of the pool, from `start` on.

    Attributes:
        pool: Where the rows are.
        start: First row of each run, (runs,); a client has one run, a pooled cohort as many as it has clients.
        lengths: Rows in each run, (runs,).
        capacity: Upper bound on the total; sets the shapes of whole-set operations.
    """

    pool: Pool
    start: Array
    lengths: Array
    capacity: int = static()

    @property
    def count(self) -> Array:
        """The number of examples, as a traced integer."""
        return jnp.sum(self.lengths)

    def num_batches(self, size: int) -> Array:
        """How many batches of that size hold all examples, the last one perhaps in part."""
        return (self.count + size - 1) // size

    def row(self, position: Array) -> Array:
        """The pool rows of positions 0 … count − 1."""
        if self.start.shape[0] == 1:
            return self.start[0] + position
        ends = jnp.cumsum(self.lengths)
        run = jnp.searchsorted(ends, position, side="right")
        return self.start[run] + position - (ends - self.lengths)[run]

    def batch(self, key: Key, size: int) -> Batch:
        """`size` examples drawn uniformly with replacement; none of them counts where there are none to draw."""
        position = jax.random.randint(key, (size,), 0, jnp.maximum(self.count, 1))
        return self._rows(position, jnp.full(size, self.count > 0, jnp.float32))

    def order(self, key: Key) -> Array:
        """A random order of the positions, (capacity,); those past `count` come last.

        Random numbers have the prefix property (the first n draws do not depend on how many are drawn), so the order
        of a client's examples does not depend on the capacity of whoever simulates it.
        """
        draw, place = jax.random.uniform(key, (self.capacity,), jnp.float32), jnp.arange(self.capacity)
        if self.capacity > 1 << PLACE_BITS:
            return jnp.argsort(jnp.where(place < self.count, draw, jnp.inf))
        # The same order for less: a draw and its place fit into one word, and XLA sorts words faster than pairs.
        last = (1 << DRAWN_BITS) - 1
        high = jnp.where(place < self.count, (draw * (1 << DRAWN_BITS)).astype(jnp.uint32), jnp.uint32(last))
        words = jnp.sort((high << PLACE_BITS) | place.astype(jnp.uint32))
        return (words & ((1 << PLACE_BITS) - 1)).astype(place.dtype)

    def take(self, order: Array, step: Array, size: int) -> Batch:
        """The `step`-th batch of an order; past the end it wraps to real rows with mask 0."""
        place = step * size + jnp.arange(size)
        position = order[place % jnp.maximum(self.count, 1)]
        return self._rows(position, (place < self.count).astype(jnp.float32))

    def padded(self) -> Batch:
        """All examples in one batch of `capacity` rows; reductions over it are masked sums divided by `count`."""
        return self.take(jnp.arange(self.capacity), jnp.int32(0), self.capacity)

    def _rows(self, position: Array, mask: Array) -> Batch:
        return replace(self.pool.rows(self.row(position), mask), position=position)


@struct
class Shards:
    """The shards of all clients.

    Attributes:
        pool: Where the rows are.
        start: First row of each client, (clients,).
        count: Rows of each client, (clients,).
        capacity: The largest count.
    """

    pool: Pool
    start: Array
    count: Array
    capacity: int = static()

    def of(self, client: Array) -> Shard:
        """One client's shard."""
        return Shard(self.pool, self.start[client][None], self.count[client][None], self.capacity)

    def union(self, clients: Array, taken: Array) -> Shard:
        """The shards of several clients as one; those not taken add nothing."""
        lengths = jnp.where(taken, self.count[clients], 0)
        return Shard(self.pool, self.start[clients], lengths, self.capacity * clients.shape[0])
