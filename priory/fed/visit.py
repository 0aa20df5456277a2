"""One client's part of a round: simulator and deployment call the same function."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from priory.core import rng, trees
from priory.core.rng import Key, Stream
from priory.core.struct import replace, struct
from priory.fed import channel as uplink
from priory.fed import privacy, screen
from priory.fed.method import Channel, Info, Message, Method, Task
from priory.fed.shard import Shard

# Status of a place: nobody, counted, ran without uploading (its turn or its uncertainty said so), rejected; from
# `REJECTED` on it tells the reason.
EMPTY, COUNTED, KEPT, REJECTED = range(4)
STATUSES = ("empty", "counted", "kept", *screen.REASONS[1:])  # in words
HEARD = "heard"  # an auditor's figure of a visit, kept apart from what is averaged


@struct
class Record:
    """What is kept of a client between rounds.

    Attributes:
        joined: Whether it has enrolled; a client enrols when it is first called, in simulation as in deployment.
        client: The method's client state, packed into words where networks differ.
        memory: The uplink channel's memory.
    """

    joined: Array
    client: Any
    memory: Any


@struct
class Doubt:
    """What decides whether an uploader is left out, and what it has then.

    Attributes:
        uncertainty: Of its own posterior on its validation inputs; NaN without any, and for whoever does not upload.
        memory: The uplink channel's memory as it was before sending.
    """

    uncertainty: Array
    memory: Any


Visited = tuple[Record, Message, Info, Array, Doubt | None]


def is_rejected(status: Any) -> Any:
    """Whether a status, or each of several, says that the client's update was rejected."""
    return status >= REJECTED


def reason_of(status: int) -> str:
    """Why a client's update was rejected, in the words of `screen.REASONS`; "" if it was not."""
    return STATUSES[status] if is_rejected(status) else ""


def visit(
    method: Method,
    task: Task,
    channel: Channel | None,
    down: Any,
    data: Shard,
    record: Record,
    client: Array,
    uploads: Array,
    t: Array,
    root: Key,
    *,
    weighting: Literal["method", "uniform", "examples"] = "method",
    limits: screen.Limits = screen.LIMITS,
    batched: bool = False,
    judge: Callable[[Array, Any], Array] | None = None,
) -> Visited:
    """One client's part of round t: its record, message, info and status, and its doubt if there is a judge.

    Args:
        method: As the schedules have it in round t.
        down: What was broadcast.
        data: The client's training examples.
        record: What was kept of it; zeros if it is called for the first time.
        client: Its number among all clients.
        uploads: Whether its message may count; else it runs and keeps its state alone.
        root: Of the run's randomness.
        weighting: `method` keeps the weight that the client sends; `uniform` and `examples` override it.
        limits: What its message may be at most; a private channel has its own.
        batched: Whether this is called under a `vmap`.
        judge: Uncertainty of a client with a number and a state, asked if it uploads.
    """

    def enrol() -> Any:
        return method.init_client(task, down, rng.key(root, Stream.ENROL, client))

    state = trees.either(record.joined, lambda: record.client, enrol, batched=batched)
    key = rng.key(root, Stream.CLIENT, t, client)
    state, message, info = method.client_update(task, down, state, data, key)
    message = replace(message, sender=client)
    if weighting != "method":
        weight = 1.0 if weighting == "uniform" else data.count.astype(jnp.float32)
        message = replace(message, weight=jnp.where(message.weight > 0, weight, message.weight))
    memory = trees.select(record.joined, record.memory, uplink.memory_of(channel, message.payload))
    key = rng.key(root, Stream.CHANNEL, t, client)
    if privacy.is_private(channel):
        return _in_private(channel, method, task, down, record, uploads, (state, message, info), key)
    message, sent, bits = uplink.transmit(channel, method, task, down, message, memory, key)
    doubt = None
    if judge is not None:
        uncertainty = partial(judge, client, state)
        unknown = partial(jnp.float32, jnp.nan)
        doubt = Doubt(trees.either(uploads, uncertainty, unknown, batched=batched), memory)
    memory = trees.select(uploads, sent, memory)  # who does not upload has sent nothing
    reference = uplink.reference_of(method, task, down, message.payload)
    found = _verdict(message, reference, limits, state)
    good = found == 0
    kept = trees.select(good, Record(jnp.bool_(True), state, memory), record)
    return kept, screen.silence(message, good & uploads), {**info, "bits": bits}, _status(found, uploads), doubt


def _in_private(
    channel: privacy.Private,
    method: Method,
    task: Task,
    down: Any,
    record: Record,
    uploads: Array,
    updated: tuple[Any, Message, Info],
    key: Key,
) -> Visited:
    """The end of a visit through a private channel: whoever uploads is heard, even if there is nothing to say."""
    state, message, info = updated
    found = _verdict(message, message.payload, screen.UNLIMITED, state)  # the channel itself bounds what is sent
    good = found == 0
    message, bits, heard = privacy.upload(channel, method, task, down, message, good, key)
    info = {**info, "bits": bits}
    if isinstance(channel, privacy.Noised) and channel.canaries is not None:
        info[HEARD] = jnp.where(uploads, heard, 0.0)
    kept = trees.select(good, Record(jnp.bool_(True), state, record.memory), record)
    return kept, screen.silence(message, uploads), info, _status(found, uploads), None


def _verdict(message: Message, reference: Any, limits: screen.Limits, state: Any) -> Array:
    """What is wrong with a client's update, its new state included."""
    return jnp.where(trees.all_finite(state), screen.verdict(message, reference, limits), jnp.int8(1))


def _status(verdict: Array, uploads: Array) -> Array:
    heard = jnp.where(uploads, COUNTED, KEPT)
    return jnp.where(verdict == 0, heard, REJECTED - 1 + verdict).astype(jnp.int8)
