"""Validation of replies: the server gets a message that may count, or a reason why it does not.

Nothing in a reply is believed before it is checked: which round it answers, the bytes (`wire.decode`), then the numbers
by the function that the simulator uses (`fed.screen.verdict`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.codec import DecodeError
from priory.core.struct import replace
from priory.deploy import wire
from priory.deploy.charter import Charter
from priory.deploy.exchange import Reply, sentence
from priory.fed import privacy, screen, visit
from priory.fed.channel import reference_of
from priory.fed.method import Message, Method, Task
from priory.fed.screen import Limits

MOST = 1e300  # of a figure; larger whole numbers are no floats
ROUNDING = 1e-4  # by how much float32 may miss a norm


@dataclass(frozen=True)
class Accepted:
    """A reply that counts; without a message if its client does not upload in this round."""

    message: Message | None
    metrics: dict[str, float]
    num_bytes: int


@dataclass(frozen=True)
class Refused:
    """A reply that does not count.

    Attributes:
        reason: The kind of fault, which metrics count: not finite, norm, weight, keys, shape, dtype, oversized,
            garbage, stale, node.
        sentence: What was wrong.
    """

    reason: str
    sentence: str


def validate_reply(
    charter: Charter, method: Method, task: Task, down: Any, reply: Reply, client: int, asked: dict[str, Any]
) -> Accepted | Refused:
    """Return what counts of a reply to the request of a round, or why it does not count.

    Args:
        method: As the schedules have it in this round.
        task: Of the client's group.
        asked: What the request said of run and round.
    """
    if fault := mismatch(reply, asked):
        return fault
    status = reply.config.get("status")
    if type(status) is not int or not 0 <= status < len(visit.STATUSES):
        return Refused("garbage", f"status={str(status)[:40]} is none of {len(visit.STATUSES)}.")
    if visit.is_rejected(status):
        return Refused(visit.reason_of(status), "The client found its own update unfit and kept its old state.")
    figures = {name: value for name, value in reply.metrics.items() if isinstance(value, int | float)}
    metrics = {str(name): float(value) for name, value in figures.items() if not abs(value) > MOST}
    num_bytes = sum(map(len, reply.arrays.values()))
    if status == visit.KEPT or not asked["uploads"]:
        return Accepted(None, metrics, num_bytes)
    try:
        thin = wire.decode(reply.arrays, charter.uplink)
        message = replace(thin, payload=charter.filled(task, down, thin.payload), sender=jnp.int32(client))
    except DecodeError as error:
        return Refused(error.reason, str(error))
    found = int(verdict(method, task, down, message, charter.channel, charter.limits))
    if found:
        return Refused(
            screen.REASONS[found], f"The update of client {client} was screened for its {screen.REASONS[found]}."
        )
    return Accepted(message, metrics, num_bytes)


def mismatch(reply: Reply, asked: dict[str, Any]) -> Refused | None:
    """Return why a reply does not answer the request, or None if it does."""
    if reply.error:
        return Refused("node", sentence(reply.error))
    for name in ("kind", "run", "round"):
        if reply.config.get(name) != asked[name]:
            said = sentence(str(reply.config.get(name)))[:60]
            return Refused("stale", f"It answers {name}={said} where {name}={asked[name]} was asked.")
    return None


def verdict(method: Method, task: Task, down: Any, message: Message, channel: Any, limits: Limits) -> Array:
    """Return the verdict of the simulator's screening on a message; 0 if it may count."""
    if isinstance(channel, privacy.NoisedSum):
        return _verdict_on_difference(message, channel)
    return _verdict(method, task, down, message, limits)


@jax.jit
def _verdict(method: Method, task: Task, down: Any, message: Message, limits: Limits) -> Array:
    message = jax.tree.map(jnp.asarray, message)
    return screen.verdict(message, reference_of(method, task, down, message.payload), limits)


@jax.jit
def _verdict_on_difference(message: Message, channel: privacy.NoisedSum) -> Array:
    """Return what is wrong with a clipped difference; the noise of the sum covers none above its norm."""
    message = jax.tree.map(jnp.asarray, message)
    found = screen.verdict(message, trees.zeros(message.payload), Limits(jnp.inf, 1.0))
    fits = privacy.within(message.payload, channel.clip * (1 + ROUNDING), channel.parts)
    return jnp.where((found == 0) & ~fits, jnp.int8(screen.REASONS.index("norm")), found)
