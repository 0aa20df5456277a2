"""Who takes part in a round: drawn at a cost that depends on the cohort, not on the number of clients."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import struct

FLOYD_LIMIT = 10_000  # above it, shuffling a million clients is the cheaper draw


@struct
class Slots:
    """The places of a round, (capacity,); a place may stay empty.

    Attributes:
        ids: Client id of each place.
        filled: Whether a client runs there and keeps its state.
        uploads: Whether its message counts.
    """

    ids: Array
    filled: Array
    uploads: Array


@dataclass(frozen=True)
class Participation:
    """How clients are drawn.

    Attributes:
        num_clients: N.
        cohort: Clients whose messages count in a round, on average for `bernoulli`.
        active: Clients that run and keep their state; the cohort is a part of them.
        kind: `fixed` draws exactly so many; `bernoulli` draws each client independently.
        groups: G, sampled apart (stratified): client i is in group i mod G, and each group gives its part of a cohort.
    """

    num_clients: int
    cohort: int
    active: int
    kind: Literal["fixed", "bernoulli"] = "fixed"
    groups: int = 1

    @property
    def capacities(self) -> tuple[int, ...]:
        """Places that a round needs for each group."""
        return tuple(self._capacity(size) for size in self._sizes)

    @property
    def capacity(self) -> int:
        """Places that a round needs; a Bernoulli draw above mean + 8 standard deviations is cut there."""
        return sum(self.capacities)

    def check(self) -> None:
        """Raise on a cohort that this federation cannot fill."""
        for name, value in (("cohort", self.cohort), ("active", self.active)):
            if not 1 <= value <= self.num_clients:
                raise UsageError(
                    f"{name}={value} does not fit the {self.num_clients} clients of this federation; "
                    f"choose 1 to {self.num_clients}."
                )
        if self.active < self.cohort:
            raise UsageError(f"active={self.active} is smaller than cohort={self.cohort}, a part of it; choose more.")
        if self.kind == "bernoulli" and self.active != self.cohort:
            raise UsageError(f"active={self.active} needs fixed participation; leave it out for bernoulli.")
        if self.cohort < self.groups:
            raise UsageError(
                f"cohort={self.cohort} cannot hold a client of each of the {self.groups} models; choose a cohort of "
                f"{self.groups} or more, or fewer models."
            )

    def draw_groups(self, key: Key) -> tuple[Slots, ...]:
        """The places of one round, group by group; all clients are equally likely to be drawn."""
        if self.groups == 1:
            return (self.draw(key),)
        key_share, *keys = jax.random.split(key, self.groups + 1)
        start = jax.random.uniform(key_share)
        counts = zip(self._dealt(self.active, start), self._dealt(self.cohort, start), strict=True)
        drawn = []
        for group, (size, key, (active, cohort)) in enumerate(zip(self._sizes, keys, counts, strict=True)):
            key_ids, key_size = jax.random.split(key)
            capacity = self._capacity(size)
            place, ids = jnp.arange(capacity), subset(key_ids, size, capacity)
            if self.kind == "bernoulli":
                active = cohort = jax.random.binomial(key_size, size, self.cohort / self.num_clients)
            filled = place < active
            drawn.append(Slots(group + self.groups * ids, filled, filled & (place < cohort)))
        return tuple(drawn)

    def draw(self, key: Key) -> Slots:
        """The places of one round, where there is one group."""
        key_ids, key_size = jax.random.split(key)
        ids = subset(key_ids, self.num_clients, self.capacity)
        place = jnp.arange(self.capacity)
        if self.kind == "fixed":
            return Slots(ids, jnp.full(self.capacity, True), place < self.cohort)
        size = jax.random.binomial(key_size, self.num_clients, self.cohort / self.num_clients)
        return Slots(ids, place < size, place < size)

    @property
    def _sizes(self) -> list[int]:
        """Clients of each group."""
        return [len(range(group, self.num_clients, self.groups)) for group in range(self.groups)]

    def _capacity(self, size: int) -> int:
        """Places for a group of so many clients."""
        if self.kind == "fixed":
            return -(-self.active * size // self.num_clients)
        rate = self.cohort / self.num_clients
        deviation = math.sqrt(rate * size * (1 - rate))
        return min(size, -(-self.cohort * size // self.num_clients) + math.ceil(8 * deviation) + 1)

    def _dealt(self, total: int, start: Array) -> list[Array]:
        """How many of so many places each group gets: its part rounded up or down, by chance so that it is fair.

        Systematic sampling: marks at start + 0, 1, 2 … on a line on which the groups lie one after another.
        """
        ends = np.cumsum([0, *self._sizes]) * (total / self.num_clients)
        marks = jnp.floor(jnp.asarray(ends, jnp.float32) + start).astype(jnp.int32)
        return list(marks[1:] - marks[:-1])


def subset(key: Key, num: int, size: int) -> Array:
    """`size` distinct numbers of 0 … num − 1 in random order, every ordered choice equally likely.

    Floyd's algorithm (Bentley and Floyd, 1987), whose cost does not depend on `num`: an urn of 10⁶ clients would cost
    more than the round it feeds. Its size² comparisons are outweighed by shuffling everybody for large cohorts.
    """
    if 8 * size >= num or size > FLOYD_LIMIT:
        return jax.random.permutation(key, num)[:size]
    key_draw, key_order = jax.random.split(key)
    last = jnp.arange(num - size, num)
    draws = jax.random.randint(key_draw, (size,), 0, last + 1)

    def step(i: Array, chosen: Array) -> Array:
        return chosen.at[i].set(jnp.where(jnp.any(chosen == draws[i]), last[i], draws[i]))

    chosen = jax.lax.fori_loop(0, size, step, jnp.full(size, -1, draws.dtype))
    return jax.random.permutation(key_order, chosen)


def deal(slots: Slots, size: Array, places: int, hands: int) -> Slots:
    """The slots ordered for `hands` devices, filled up with empty ones to `places`, (hands · places / hands,).

    Large clients first and round robin, so that devices finish together and a chunk holds clients of like size.
    """
    empty = places - slots.ids.shape[0]
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.zeros(empty, leaf.dtype)]), slots)
    order = jnp.argsort(jnp.where(padded.filled, -size[padded.ids], 1))
    order = order.reshape(places // hands, hands).T.reshape(places)
    return jax.tree.map(lambda leaf: leaf[order], padded)
