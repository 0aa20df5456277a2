"""Uplink transforms, composed outside the methods: what a payload goes through on its way, and the bits it costs.

A channel sees the difference between the payload and its reference (what a client that learned nothing would send), so
that clipping and compression act on what was learned. Statistics of a batch norm travel as they are, and so do whole
numbers, which name something and have no differences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
from priory.fed.capabilities import SparseUplink
from priory.fed.checks import positive
from priory.fed.method import Channel, Message, Method, Task

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
        return clipped(payload, self.norm), memory, num_bits(payload)


def clipped(payload: Payload, norm: Array | float) -> Payload:
    """The payload scaled down to a norm of at most `norm`."""
    size = trees.norm(payload)
    factor = jnp.where(size > norm, norm / jnp.where(size > 0, size, 1.0), 1.0)
    return trees.scale(factor, payload)


@struct
class TopK:
    """Sends the largest numbers of a payload and remembers the rest for the next time (error feedback).

    Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599.

    Attributes:
        fraction: Share of the numbers that is sent.
    """

    fraction: float = static(default=0.1)

    def check(self) -> None:
        _check_fraction(self.fraction)

    def init(self, payload: Payload) -> Payload:
        return jax.tree.map(jnp.zeros_like, payload)

    def send(self, payload: Payload, memory: Payload, key: Key) -> tuple[Payload, Payload, Array]:
        del key
        wanted = trees.add(payload, memory)
        flat, unravel = ravel_pytree(wanted)
        num = _num_kept(self.fraction, flat.size)
        _, index = jax.lax.top_k(jnp.abs(flat), num)
        sent = unravel(jnp.zeros_like(flat).at[index].set(flat[index]))
        bits = num * (32 + max(1, math.ceil(math.log2(max(flat.size, 2)))))  # a value and its index
        return sent, trees.sub(wanted, sent), jnp.float32(bits)


@struct
class Quantise:
    """Rounds the numbers of a payload at random to `levels` + 1 sizes, so that they are right in the mean (QSGD).

    Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132: C(v)_j = ‖v‖ sign(v_j) ξ_j, where ξ_j is one of the two
    multiples of 1/s around |v_j|/‖v‖. Each leaf has a norm of its own, since ω grows with the numbers that share one.
    The bits are those of a fixed-length code, 32 for a norm and for each number its sign and its level; the Elias code
    of the paper takes fewer where most levels are 0.

    Attributes:
        levels: s, the levels above 0.
    """

    levels: int = static(default=16)

    def check(self) -> None:
        if not isinstance(self.levels, int) or self.levels < 1:
            raise UsageError(f"levels={self.levels} is not a whole number above 0; choose one such as 16.")

    def init(self, payload: Any) -> tuple[()]:
        del payload
        return ()

    def send(self, payload: Payload, memory: tuple[()], key: Key) -> tuple[Payload, tuple[()], Array]:
        leaves, structure = jax.tree.flatten(payload)
        sent = [self._round(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(leaves)]
        bits = sum(32 + leaf.size * (1 + self.levels.bit_length()) for leaf in leaves if leaf.size)
        return jax.tree.unflatten(structure, sent), memory, jnp.float32(bits)

    def omega(self, size: int) -> float:
        """ω with E‖C(v) − v‖² ≤ ω‖v‖², min(d/s², √d/s), if the largest leaf has `size` numbers."""
        return min(size / self.levels**2, math.sqrt(size) / self.levels)

    def _round(self, leaf: Array, key: Key) -> Array:
        norm = trees.norm(leaf)
        # At most s: |v_j|/‖v‖ may come out a little above 1, and the code has no level for that.
        place = jnp.minimum(self.levels * (jnp.abs(leaf) / jnp.where(norm > 0, norm, 1)), self.levels)
        below = jnp.floor(place)
        level = jnp.where(jax.random.uniform(key, leaf.shape) < place - below, below + 1, below)
        return (norm * jnp.sign(leaf) * (level / self.levels)).astype(leaf.dtype)


@struct
class RandomK:
    """Sends a random choice of the numbers of a payload, enlarged so that they are right in the mean.

    Of all d numbers k are chosen uniformly and multiplied by d/k. Their places cost a seed of 32 bits, from which the
    receiver draws the same choice.

    Attributes:
        fraction: Share of the numbers that is sent.
    """

    fraction: float = static(default=0.1)

    def check(self) -> None:
        _check_fraction(self.fraction)

    def init(self, payload: Any) -> tuple[()]:
        del payload
        return ()

    def send(self, payload: Payload, memory: tuple[()], key: Key) -> tuple[Payload, tuple[()], Array]:
        flat, unravel = ravel_pytree(payload)
        num = _num_kept(self.fraction, flat.size)
        if num == 0:
            return payload, memory, jnp.float32(0)
        index = jax.random.permutation(key, flat.size)[:num]
        # 0 · NaN is NaN: an update that is not finite is left out whole, wherever in it that was.
        sent = (0 * flat).at[index].set(flat[index] * (flat.size / num))
        return unravel(sent), memory, jnp.float32(32 * num + 32)

    def omega(self, size: int) -> float:
        """ω with E‖C(v) − v‖² = ω‖v‖² for a payload of `size` numbers: d/k − 1."""
        return size / _num_kept(self.fraction, size) - 1 if size else 0.0


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
        return trees.merge(sent, rest), memory, bits + num_bits(rest)


@dataclass(frozen=True)
class Compressible:
    """The predicate of what a method lets be compressed, equal for methods that differ in traced numbers alone.

    A bound method would be another one for each of them, and compile anew.
    """

    structure: Any  # of the method as a tree: its class and its static fields
    method: Method = field(compare=False, repr=False)

    def __call__(self, path: str) -> bool:
        return self.method.compressible(path)


def compressing(channel: Channel, method: Method) -> Channel:
    """The channel on that part of a payload which the method lets be compressed: all of it, unless it says so."""
    if type(method).compressible is Method.compressible:
        return channel
    return On(Compressible(jax.tree.structure(method), method), channel)


def parse(text: str) -> Quantise | RandomK | TopK:
    """The compression that a text names, checked.

    >>> parse("qsgd:16"), parse("random:0.1"), parse("top:0.1")
    (Quantise(levels=16), RandomK(fraction=0.1), TopK(fraction=0.1))
    """
    name, _, value = str(text).partition(":")
    made: Quantise | RandomK | TopK
    try:
        match name:
            case "qsgd":
                made = Quantise(int(value))
            case "random":
                made = RandomK(float(value))
            case "top":
                made = TopK(float(value))
            case _:
                raise ValueError
    except ValueError:
        raise UsageError(
            f"compress={text!r} is not understood; write qsgd:LEVELS, random:FRACTION or top:FRACTION, such as qsgd:16."
        ) from None
    made.check()
    return made


def is_biased(channel: Channel | None) -> bool:
    """Whether a channel is known to be wrong in the mean."""
    return isinstance(channel.inner if isinstance(channel, On) else channel, TopK | Clip)


def transmit(
    channel: Channel | None, method: Method, task: Task, down: Any, message: Message, memory: Any, key: Key
) -> tuple[Message, Any, Array]:
    """The message as it arrives, the sender's memory, and the bits that travelled; simulated or not."""
    if channel is None:
        if isinstance(method, SparseUplink):
            return message, memory, thin.bits(method.thin(message.payload))
        return message, memory, num_bits(message.payload)
    statistics, learned = _apart(message.payload)
    reference = _apart(reference_of(method, task, down, message.payload))[1]
    sent, memory, bits = channel.send(trees.sub(learned, reference), memory, key)
    payload = trees.merge(statistics, trees.add(sent, reference))
    return Message(payload, message.weight, message.sender), memory, bits + num_bits(statistics)


def memory_of(channel: Channel | None, payload: Any) -> Any:
    """The memory of a client that has sent nothing yet."""
    return () if channel is None else channel.init(_apart(payload)[1])


def reference_of(method: Method, task: Task, down: Any, payload: Payload) -> Payload:
    """What a client that learned nothing would send."""
    return method.reference(task, down, payload)


def references_of(method: Method, task: Task, down: Any, payloads: Payload) -> Payload:
    """What the senders of stacked payloads would send had they learned nothing, stacked likewise."""
    return jax.vmap(partial(reference_of, method, task, down))(payloads)


def is_statistic(path: str) -> bool:
    """Whether a path runs through the `stats` of some `Params`."""
    return "stats" in path.split("/")


def _apart(payload: Any) -> tuple[Any, Any]:
    """What travels as it is, and what a channel sees."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(payload)
    whole = {trees.path_of(path) for path, leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.inexact)}
    return trees.partition(payload, lambda path: is_statistic(path) or path in whole)


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction} lies outside (0, 1]; choose one such as 0.1.")


def _num_kept(fraction: float, size: int) -> int:
    """How many of `size` numbers a share of them is: at least one if there are any."""
    return max(1, math.ceil(fraction * size)) if size else 0


def num_bits(payload: Any) -> Array:
    """The bits of a payload that travels as it is."""
    return jnp.float32(8 * trees.num_bytes(payload))
