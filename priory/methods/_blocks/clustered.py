"""Clients that each belong to one of several networks: which one it is, what they send, and what becomes of it.

The networks are trees stacked on axis 0; statistics of a batch norm are one set for all of them, averaged plainly.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, struct
from priory.fed.method import Info, Message, Task
from priory.fed.shard import Shard
from priory.models.model import Params

State = TypeVar("State")
NUM_TRIED = 1000  # a client's examples on which networks are compared
TRIED_AT_ONCE = 250  # of them, a divisor


@struct
class Assigned:
    """The message of a client: the number of its cluster, its weights or a function of them, and statistics."""

    cluster: Array
    weights: Any
    stats: Any


def fresh(task: Task, key: Key, num: int, *, alike: bool, name: str = "clusters") -> Params:
    """Draw `num` first networks, all the same or independent; a single one has the whole key."""
    if num > task.num_clients:
        raise UsageError(
            f"{name}={num} exceeds the {task.num_clients} clients of this federation; choose 1 to {task.num_clients}."
        )
    drawn = [task.init(key)] * num if alike or num == 1 else [task.init(each) for each in jax.random.split(key, num)]
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(network.weights for network in drawn))
    return Params(weights, drawn[0].stats)


def pick(networks: Params, number: Array | int) -> Params:
    """Return one of the networks."""
    return Params(jax.tree.map(lambda leaf: leaf[number], networks.weights), networks.stats)


def several(networks: Params, index: Array) -> Params:
    """Return some of the networks, each with its own copy of the statistics, on axis 0."""
    num = index.shape[0]
    stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), networks.stats)
    return Params(jax.tree.map(lambda leaf: leaf[index], networks.weights), stats)


def split(key: Key, num: int) -> tuple[Key, Key]:
    """Return the key of a choice among `num` and that of the work; with nothing to choose, the work has all of it."""
    if num == 1:
        return key, key
    key_choice, key_work = jax.random.split(key)
    return key_choice, key_work


def draw_lots(key: Key, num: int) -> Array:
    """Draw numbers in [0, 1), (num,), to break ties; the key is spent only where there is something to choose."""
    return jnp.zeros(1) if num == 1 else jax.random.uniform(key, (num,))


def choose(task: Task, networks: Params, data: Shard, lots: Array) -> Array:
    """Return the network with the lowest loss on a client's own examples, at random among equals; 0 without any."""
    if lots.shape[0] == 1:
        return jnp.int32(0)
    best = least(total_nll(task, networks, data), lots)
    return jnp.where(data.count > 0, best, 0).astype("int32")


def population(task: Task, networks: Params, data: Shard | None, key: Key) -> Params:
    """Return all K networks on axis 0, or K copies of the one that a client's data choose: no shape follows data."""
    every = jnp.arange(_num(networks))
    if data is None:
        return several(networks, every)
    chosen = choose(task, networks, data, draw_lots(key, every.shape[0]))
    return several(networks, jnp.where(data.count > 0, chosen, every))


def total_nll(task: Task, networks: Params, data: Shard) -> Array:
    """Return the negative log-likelihood of at most `NUM_TRIED` of a client's examples under each network, (K,)."""
    size = max(1, min(TRIED_AT_ONCE, data.capacity))
    # Not a key of the round: from round to round the networks change, and the examples they are compared on do not.
    order = data.order(jax.random.key(0))

    def step(i: Array, total: Array) -> Array:
        batch = data.take(order, i, size)
        losses = jax.lax.map(lambda weights: task.nll(Params(weights, networks.stats), batch)[0], networks.weights)
        return total + jnp.sum(batch.mask) * losses

    num_batches = (jnp.minimum(data.count, NUM_TRIED) + size - 1) // size
    return jax.lax.fori_loop(0, num_batches, step, jnp.zeros(_num(networks)))


def least(losses: Array, lots: Array) -> Array:
    """Return the index of the smallest number, among equals that with the largest lot."""
    return jnp.argmax(jnp.where(losses == jnp.min(losses), lots, -1.0))


def reference(networks: Params, payload: Assigned) -> Assigned:
    """Return the message of a member of the same cluster that learned nothing."""
    return Assigned(payload.cluster, pick(networks, payload.cluster).weights, networks.stats)


def aggregate(
    server: State, messages: Message[Assigned], move: Callable[[Any, Any], Any] = lambda mean, old: mean
) -> tuple[State, Info]:
    """Return the server after each cluster's network moved to the mean of its members, and each cluster's share.

    A cluster without members keeps every bit.

    Args:
        server: Anything with `weights` on axis 0 and `stats`.
        move: Gives the new weights of a cluster from the mean of what its members sent and from its old weights.
    """
    old: Any = server
    sent = messages.payload
    num = _num(old)

    def one(place: tuple[Array, Any]) -> tuple[Any, Array]:
        number, before = place
        weight = jnp.where(sent.cluster == number, messages.weight, 0.0)
        mean: Any = trees.weighted_mean(sent.weights, weight)
        heard = jnp.sum(weight)
        return trees.select(heard > 0, move(mean, before), before), heard

    weights, heard = jax.lax.map(one, (jnp.arange(num), old.weights))
    stats = trees.weighted_mean(sent.stats, messages.weight, otherwise=old.stats)
    share = heard / jnp.maximum(jnp.sum(messages.weight), 1e-30)
    return replace(old, weights=weights, stats=stats), {f"share_{j + 1}": share[j] for j in range(num)}


def _num(networks: Any) -> int:
    """Return how many networks are on axis 0."""
    return int(jax.tree.leaves(networks.weights)[0].shape[0])
