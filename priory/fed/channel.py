"""Uplink transforms, composed outside the methods: what a payload goes through on its way, and the bits it costs.

A channel sees the difference between the payload and its reference (what a client that learned nothing would send), so
that clipping and compression act on what was learned. Statistics of a batch norm travel as they are, and so do whole
numbers, which name something and have no differences.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed import thin
from priory.fed.checks import positive
from priory.fed.method import Channel, Message, Reference, Task, Thins

Payload = TypeVar("Payload")


@struct
class Clip:
    """Scales a payload down to a norm of at most `norm`.

    Attributes:
        norm: The largest norm that passes unchanged.
    """

    norm: float = 1.0

    def check(self) -> None:
        positive("norm", self.norm)

    def init(self, payload: Any) -> tuple[()]:
        del payload
        return ()

    def send(self, payload: Payload, memory: tuple[()], key: Key) -> tuple[Payload, tuple[()], Array]:
        del key
        size = trees.norm(payload)
        factor = jnp.where(size > self.norm, self.norm / jnp.where(size > 0, size, 1.0), 1.0)
        return trees.scale(factor, payload), memory, _bits(payload)


@struct
class TopK:
    """Sends the largest numbers of a payload and remembers the rest for the next time (error feedback).

    Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599.

    Attributes:
        fraction: Share of the numbers that is sent.
    """

    fraction: float = static(default=0.1)

    def check(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UsageError(f"fraction={self.fraction} lies outside (0, 1]; choose one such as 0.1.")

    def init(self, payload: Payload) -> Payload:
        return jax.tree.map(jnp.zeros_like, payload)

    def send(self, payload: Payload, memory: Payload, key: Key) -> tuple[Payload, Payload, Array]:
        del key
        wanted = trees.add(payload, memory)
        flat, unravel = ravel_pytree(wanted)
        num = max(1, math.ceil(self.fraction * flat.size)) if flat.size else 0
        _, index = jax.lax.top_k(jnp.abs(flat), num)
        sent = unravel(jnp.zeros_like(flat).at[index].set(flat[index]))
        bits = num * (32 + max(1, math.ceil(math.log2(max(flat.size, 2)))))  # a value and its index
        return sent, trees.sub(wanted, sent), jnp.float32(bits)


@struct
class On:
    """Applies a channel to the part of a payload whose paths are selected; the rest travels as it is.

    Attributes:
        select: Predicate on "/"-joined paths, hashable.
        inner: The channel for the selected part.
    """

    select: Callable[[str], bool] = static()
    inner: Any

    def check(self) -> None:
        self.inner.check()

    def init(self, payload: Any) -> Any:
        return self.inner.init(trees.partition(payload, self.select)[0])

    def send(self, payload: Any, memory: Any, key: Key) -> tuple[Any, Any, Array]:
        chosen, rest = trees.partition(payload, self.select)
        sent, memory, bits = self.inner.send(chosen, memory, key)
        return trees.merge(sent, rest), memory, bits + _bits(rest)


def transmit(
    channel: Channel | None, method: Any, task: Task, down: Any, message: Message, memory: Any, key: Key
) -> tuple[Message, Any, Array]:
    """The message as it arrives, the sender's memory, and the bits that travelled; simulated or not."""
    if channel is None:
        whole = not isinstance(method, Thins)
        return message, memory, _bits(message.payload) if whole else thin.bits(method.thin(message.payload))
    statistics, learned = _apart(message.payload)
    reference = _apart(reference_of(method, task, down, message.payload))[1]
    sent, memory, bits = channel.send(trees.sub(learned, reference), memory, key)
    payload = trees.merge(statistics, trees.add(sent, reference))
    return Message(payload, message.weight, message.sender), memory, bits + _bits(statistics)


def memory_of(channel: Channel | None, payload: Any) -> Any:
    """The memory of a client that has sent nothing yet."""
    return () if channel is None else channel.init(_apart(payload)[1])


def reference_of(method: Any, task: Task, down: Any, payload: Payload) -> Payload:
    """What a client that learned nothing would send."""
    if isinstance(method, Reference):
        return method.reference(task, down, payload)
    return jax.tree.map(jnp.zeros_like, payload)


def is_statistic(path: str) -> bool:
    """Whether a path runs through the `stats` of some `Params`."""
    return "stats" in path.split("/")


def _apart(payload: Any) -> tuple[Any, Any]:
    """What travels as it is, and what a channel sees."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(payload)
    whole = {trees.path_of(path) for path, leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.inexact)}
    return trees.partition(payload, lambda path: is_statistic(path) or path in whole)


def _bits(payload: Any) -> Array:
    return jnp.float32(8 * trees.num_bytes(payload))
