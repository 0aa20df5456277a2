"""Differential privacy of what clients send, outside the methods: zCDP, noise on a message, noise on a sum.

A private channel sees payload − reference, where the reference is computed from the broadcast alone: one that looked at
the payload would tell something of it in the clear. Every message counts once, since its weight (a number of examples)
is private too, and a client that has nothing to send, or nothing finite, sends the reference, since its silence would
say so. What is guaranteed for which neighbours, and by which accountant, is the business of `engine.accounting`.

Bun and Steinke, Concentrated Differential Privacy, TCC 2016, arXiv:1605.02065, as used by FedBNN (B.1 to B.5).
"""

import math
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed import channel as uplink
from priory.fed.checks import positive
from priory.fed.method import Message, Method, Task
from priory.fed.parts import WHOLE, Parts

Payload = TypeVar("Payload")


def gaussian_rho(sensitivity: float, sd: float) -> float:
    """ρ of the Gaussian mechanism, Δ²/(2σ²), proposition B.5.

    >>> round(gaussian_rho(sensitivity=2**0.5, sd=6.23), 5)
    0.02576
    """
    return sensitivity**2 / (2 * sd**2)


def epsilon_of(rho: float, delta: float) -> float:
    """ε of (ε, δ)-DP that ρ-zCDP implies, ρ + √(4ρ log 1/δ), proposition B.1."""
    return rho + math.sqrt(4 * rho * math.log(1 / delta))


def rho_of(epsilon: float, delta: float) -> float:
    """ρ with `epsilon_of(ρ, δ)` = ε exactly, (√(log 1/δ + ε) − √log 1/δ)².

    B.1's ε²/(4 log 1/δ) is its value for small ε, and spends a little more than ε.

    >>> round(rho_of(epsilon=1.0, delta=1e-4), 5)
    0.02576
    """
    log = math.log(1 / delta)
    # As printed, the difference of the roots loses its digits for small ε; this is the same number.
    return (epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))) ** 2


def sequential(*rho: float) -> float:
    """ρ of several mechanisms on the same data, their sum, proposition B.2."""
    return math.fsum(rho)


def parallel(*rho: float) -> float:
    """ρ of mechanisms on disjoint data, each of one client, the largest, proposition B.3."""
    return max(rho, default=0.0)


@struct
class Canaries:
    """Clients of an auditor, whose messages are known but for a coin: each sends along a random direction of its own.

    Attributes:
        first: Number of the first canary; the others follow.
        signs: What the coins say, (canaries,): 1 and 0 for present and absent, 1 and −1 for two opposite messages.
        radius: The norm of a message, in units of its parts.
        key: Of the directions.
        parts: What is clipped apart, of which all get the same norm.
    """

    first: Array
    signs: Array
    radius: float
    key: Key
    parts: Parts = WHOLE

    @property
    def num(self) -> int:
        """The number of canaries."""
        return self.signs.shape[0]

    def direction(self, like: Payload, number: Array) -> Payload:
        """A vector of the shape of a payload with norm 1 in units of its parts, the same in every round."""
        drawn = _normal(jax.random.fold_in(self.key, number), like)
        return self.parts.each(lambda part, _: trees.scale(1 / (trees.norm(part) * self.parts.norm), part), drawn)

    def sing(self, difference: Payload, sender: Array) -> Payload:
        """What a sender sends: its own difference, or a canary's message in its place."""
        number = sender - self.first
        sign = self.signs[jnp.clip(number, 0, self.num - 1)]
        message = trees.scale(sign * self.radius, self.direction(difference, number))
        return trees.select(number >= 0, self.parts.from_units(message), difference)

    def score(self, seen: Any, sender: Array) -> Array:
        """What the observer of a client's own message learns of its coin; 0 for one that is no canary."""
        number = sender - self.first
        return jnp.where(number >= 0, trees.dot(self.parts.to_units(seen), self.direction(seen, number)), 0.0)

    def scores(self, seen: Any) -> Array:
        """What the observer of a sum learns of every coin, (canaries,)."""
        seen = self.parts.to_units(seen)
        return lax.map(lambda number: trees.dot(seen, self.direction(seen, number)), jnp.arange(self.num))


@struct
class Noised:
    """Local privacy: a message is scaled down to a norm, and every number of it gets noise before it leaves.

    Attributes:
        clip: C, the largest norm that passes unchanged; infinite where a method bounds what it sends itself.
        sd: σ of the noise N(0, σ²).
        canaries: An auditor's, or None.
        parts: What is clipped apart, each with a norm and noise of C and σ times its unit.
    """

    clip: float = 1.0
    sd: float = 1.0
    canaries: Canaries | None = None
    parts: Parts = WHOLE

    def check(self) -> None:
        if not math.isinf(self.clip):
            positive("clip", self.clip)
        positive("sd", self.sd)

    def init(self, payload: Any) -> tuple[()]:
        del payload
        return ()

    def send(self, payload: Payload, memory: tuple[()], key: Key) -> tuple[Payload, tuple[()], Array]:
        key_noise = jax.random.split(key)[1]
        sent = trees.add(clipped(payload, self.clip, self.parts), _noise(key_noise, payload, self.sd, self.parts))
        return sent, memory, uplink.num_bits(payload)


@struct
class NoisedSum:
    """Central privacy: a message is scaled down to a norm, and the sum of all messages of a round gets noise.

    Attributes:
        clip: C, the largest norm that passes unchanged.
        sd: σ of the noise N(0, σ²) on every number of the sum.
        expected: Clients that a round expects; how many came is private.
        canaries: An auditor's, or None.
        parts: What is clipped apart, each with a norm and noise of C and σ times its unit.
    """

    clip: float = 1.0
    sd: float = 1.0
    expected: float = 1.0
    canaries: Canaries | None = None
    parts: Parts = WHOLE

    def check(self) -> None:
        positive("clip", self.clip)
        positive("sd", self.sd)
        positive("expected", self.expected)

    def init(self, payload: Any) -> tuple[()]:
        del payload
        return ()

    def send(self, payload: Payload, memory: tuple[()], key: Key) -> tuple[Payload, tuple[()], Array]:
        del key
        return clipped(payload, self.clip, self.parts), memory, uplink.num_bits(payload)

    def release(self, total: Payload, key: Key) -> Payload:
        """The mean difference that leaves the sum: (Σ_k d_k + N(0, σ²)) / expected clients."""
        return trees.scale(1 / self.expected, trees.add(total, _noise(key, total, self.sd, self.parts)))


Private = Noised | NoisedSum


def clipped(payload: Payload, clip: Array | float, parts: Parts = WHOLE) -> Payload:
    """Return the payload with every part scaled down to a norm of at most `clip` of its units."""
    return parts.each(lambda part, unit: uplink.clipped(part, clip * unit), payload)


def within(payload: Any, clip: Array | float, parts: Parts = WHOLE) -> Array:
    """Return whether every part has a norm of at most `clip` of its units."""
    norms = jnp.stack([trees.norm(part) for part in parts.split(parts.to_units(payload))])
    return jnp.all(norms <= clip)


def is_private(channel: Any) -> TypeGuard[Private]:
    """Whether a channel gives differential privacy."""
    return isinstance(channel, Noised | NoisedSum)


def upload(
    channel: Private, method: Method, task: Task, down: Any, message: Message, fine: Array, key: Key
) -> tuple[Message, Array, Array]:
    """What a client sends through a private channel, the bits, and what an auditor learns of its coin.

    For `NoisedSum` the payload is the clipped difference, to be summed; for `Noised` it is whole, to be aggregated.

    Args:
        fine: Whether the client's update is finite.
    """
    reference = public_reference(method, task, down, message.payload)
    difference = trees.sub(message.payload, reference)
    difference = trees.select(fine & (message.weight > 0), difference, trees.zeros(difference))
    canaries, score = channel.canaries, jnp.float32(0)
    if canaries is not None:
        assert message.sender is not None
        difference = canaries.sing(difference, message.sender)
    sent, _, bits = channel.send(difference, (), key)
    if canaries is not None and message.sender is not None:
        score = canaries.score(sent, message.sender)
    payload = sent if isinstance(channel, NoisedSum) else trees.add(reference, sent)
    return Message(payload, jnp.float32(1), message.sender), bits, score


def released(channel: NoisedSum, method: Method, task: Task, down: Any, difference: Any) -> Message:
    """What `aggregate` sees of a noised mean difference: a stack of one, weighing what is expected."""
    payload = trees.add(public_reference(method, task, down, difference), difference)
    return jax.tree.map(lambda leaf: leaf[None], Message(payload, jnp.float32(channel.expected)))


def public_reference(method: Method, task: Task, down: Any, payload: Payload) -> Payload:
    """What a client that learned nothing would send, from the broadcast alone: of the payload only shapes are read."""
    return uplink.reference_of(method, task, down, trees.zeros(payload))


def _noise(key: Key, like: Payload, sd: float, parts: Parts) -> Payload:
    """Draw N(0, σ²) numbers in the shape of a tree, σ in units of its parts."""
    return parts.from_units(trees.scale(sd, _normal(key, like)))


def _normal(key: Key, like: Payload) -> Payload:
    """Standard normal numbers in the shape of a tree."""
    leaves, structure = jax.tree.flatten(like)
    drawn = [jax.random.normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)
