"""Clients whose networks differ: client i has the architecture of group i mod G.

A round runs one compiled function for each group, and what they send is aggregated together, so Down and Up must have
the same shape whatever the network. What clients keep does differ in shape: it is packed into words, as many as the
largest group needs, so that homes, stores and checkpoints know nothing of groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from priory.core import rng
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shards

Tasks = tuple[Task, ...]  # one for each group


def num_words(shapes: Any) -> int:
    """Words that hold a tree of these shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def pack(tree: Any, size: int) -> Array:
    """The tree as `size` words, its own first; a number of less than 32 bits takes a whole word."""
    leaves = [_to_words(leaf) for leaf in jax.tree.leaves(tree)]
    words = jnp.concatenate([jnp.zeros(0, jnp.uint32), *leaves])
    return jnp.pad(words, (0, size - words.size))


def unpack(words: Array, like: Any) -> Any:
    """The tree that was packed; `like` has its shapes."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves], dtype=int)
    found = [
        _from_words(words[end - leaf.size : end], leaf.dtype).reshape(leaf.shape)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


@struct
class Contact:
    """The shapes of what a first contact with a client shows.

    Attributes:
        down: What is broadcast.
        client: What the client keeps.
        message: What it sends.
        info: What it reports.
    """

    down: Any
    client: Any
    message: Message
    info: Info


def first_contact(method: Method, task: Task, shards: Shards) -> Contact:
    """What is broadcast, kept, sent and reported, as shapes; nothing is computed."""
    return jax.eval_shape(_contact, method, task, shards, jax.eval_shape(rng.root, 0))


def traced_contact(method: Method, task: Task, shards: Shards) -> Any:
    """Return the program of a first contact, traced; nothing is compiled."""
    return _contact.trace(method, task, shards, jax.eval_shape(rng.root, 0))


@jax.jit  # never run: a second run of the same method finds the shapes without tracing again
def _contact(method: Method, task: Task, shards: Shards, key: Key) -> Contact:
    key_init, key_enrol, key_client = jax.random.split(key, 3)
    down = method.broadcast(method.init_server(task, key_init))
    client = method.init_client(task, down, key_enrol)
    client, message, info = method.client_update(task, down, client, shards.of(jnp.int32(0)), key_client)
    return Contact(down, client, message, info)


def client_shape(method: Method, task: Task) -> Any:
    """The shapes of what a client keeps."""

    def enrolled(key: Key) -> Any:
        key_init, key_enrol = jax.random.split(key)
        return method.init_client(task, method.broadcast(method.init_server(task, key_init)), key_enrol)

    return jax.eval_shape(enrolled, jax.eval_shape(rng.root, 0))


def check(method: Method, name: str, tasks: Tasks, shards: Shards) -> None:
    """Raise when what a method exchanges depends on the network, and networks differ."""
    if len(tasks) == 1:
        return
    if method.pools:
        raise UsageError(f"{name} trains one model on everybody's data, but {len(tasks)} were given; give one model.")
    first, *others = (first_contact(method, task, shards) for task in tasks)
    if any((other.down, other.message, other.info) != (first.down, first.message, first.info) for other in others):
        raise UsageError(
            f"{name} exchanges what depends on the network, so its clients cannot have {len(tasks)} different models; "
            "give one model, or choose fedbnn or local."
        )


def _to_words(leaf: Array) -> Array:
    flat = jnp.ravel(leaf)
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.uint32)
    return lax.bitcast_convert_type(flat, _unsigned(flat.dtype)).astype(jnp.uint32)


def _from_words(words: Array, dtype: Any) -> Array:
    if dtype == jnp.bool_:
        return words.astype(dtype)
    return lax.bitcast_convert_type(words.astype(_unsigned(dtype)), dtype)


def _unsigned(dtype: Any) -> Any:
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize]
