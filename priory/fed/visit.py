"""One client's part of a round: simulator and deployment call the same function."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from priory.core import rng, trees
from priory.core.rng import Key, Stream
from priory.core.struct import replace, static, struct
from priory.fed import channel as uplink
from priory.fed import privacy, screen
from priory.fed.method import Channel, Info, Message, Method, Task
from priory.fed.shard import Shard

# Status of a place: nobody, counted, ran without uploading (its turn or its uncertainty said so), rejected; from
# `REJECTED` on it tells the reason.
EMPTY, COUNTED, KEPT, REJECTED = range(4)
STATUSES = ("empty", "counted", "kept", *screen.REASONS[1:])  # in words
HEARD = "heard"  # an auditor's figure of a visit, kept apart from what is averaged


Weighting = Literal["method", "uniform", "examples"]


@struct
class RoundContext:
    """Everything that the clients and the server of a round share.

    Attributes:
        method: As the schedules have it in round t.
        task: The problem, with the network of the clients' group.
        channel: What uploads go through.
        down: What was broadcast.
        root: Of the run's randomness.
        t: The round.
        limits: What a message may be at most; a private channel has its own.
        weighting: `method` keeps the weight that a client sends; `uniform` and `examples` override it.
    """

    method: Method
    task: Task
    channel: Channel | None
    down: Any
    root: Key
    t: Array
    limits: screen.Limits = screen.LIMITS
    weighting: Weighting = static(default="method")


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
    context: RoundContext,
    data: Shard,
    record: Record,
    client: Array,
    uploads: Array,
    *,
    batched: bool = False,
    judge: Callable[[Array, Any], Array] | None = None,
) -> Visited:
    """One client's part of a round: its record, message, info and status, and its doubt if there is a judge.

    Args:
        data: The client's training examples.
        record: What was kept of it; zeros if it is called for the first time.
        client: Its number among all clients.
        uploads: Whether its message may count; else it runs and keeps its state alone.
        batched: Whether this is called under a `vmap`.
        judge: Uncertainty of a client with a number and a state, asked if it uploads.
    """
    method, task, channel, down = context.method, context.task, context.channel, context.down
    root, t = context.root, context.t

    def enrol() -> Any:
        return method.init_client(task, down, rng.key(root, Stream.ENROL, client))

    state = trees.either(record.joined, lambda: record.client, enrol, batched=batched)
    state, message, info = method.client_update(task, down, state, data, rng.key(root, Stream.CLIENT, t, client))
    message = replace(message, sender=client)
    if context.weighting != "method":
        weight = 1.0 if context.weighting == "uniform" else data.count.astype(jnp.float32)
        message = replace(message, weight=jnp.where(message.weight > 0, weight, message.weight))
    memory = trees.select(record.joined, record.memory, uplink.memory_of(channel, message.payload))
    key = rng.key(root, Stream.CHANNEL, t, client)
    if privacy.is_private(channel):
        return _in_private(context, channel, record, uploads, (state, message, info), key)
    message, sent, bits = uplink.transmit(channel, method, task, down, message, memory, key)
    doubt = None
    if judge is not None:
        uncertainty = partial(judge, client, state)
        unknown = partial(jnp.float32, jnp.nan)
        doubt = Doubt(trees.either(uploads, uncertainty, unknown, batched=batched), memory)
    memory = trees.select(uploads, sent, memory)  # who does not upload has sent nothing
    reference = uplink.reference_of(method, task, down, message.payload)
    found = _verdict(message, reference, context.limits, state)
    good = found == 0
    kept = trees.select(good, Record(jnp.bool_(True), state, memory), record)
    return kept, screen.silence(message, good & uploads), {**info, "bits": bits}, _status(found, uploads), doubt


def _in_private(
    context: RoundContext,
    channel: privacy.Private,
    record: Record,
    uploads: Array,
    updated: tuple[Any, Message, Info],
    key: Key,
) -> Visited:
    """The end of a visit through a private channel: whoever uploads is heard, even if there is nothing to say."""
    state, message, info = updated
    found = _verdict(message, message.payload, screen.UNLIMITED, state)  # the channel itself bounds what is sent
    good = found == 0
    message, bits, heard = privacy.upload(channel, context.method, context.task, context.down, message, good, key)
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
