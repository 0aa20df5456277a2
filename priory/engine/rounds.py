"""Compiled rounds: draw the cohort, run its clients, aggregate.

One function serves a laptop, several devices and several hosts. Everything runs inside `shard_map` over a mesh axis of
devices: each device works through its share of the cohort's places, by scan, by vmap or in chunks (`client_batch`), and
the server is computed on all of them alike. A linear method streams: only a running sum is kept, and `aggregate` sees a
stack of one (law 3). A block of rounds is a loop with a traced number of trips, so no block length compiles anew.
Clients whose networks differ are worked through group by group, each with a task of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from priory.core import rng, trees
from priory.core.rng import Key, Stream
from priory.core.struct import replace, struct
from priory.engine import architectures
from priory.engine.architectures import Tasks
from priory.engine.cohort import Participation, Slots, deal
from priory.evaluate import own_uncertainty
from priory.fed import channel as uplink
from priory.fed import privacy, schedule, screen
from priory.fed.method import Channel, Info, Message, Method, Task
from priory.fed.robust import Rule
from priory.fed.server_step import server_step
from priory.fed.shard import Shard, Shards
from priory.fed.visit import (
    COUNTED,
    EMPTY,
    HEARD,
    KEPT,
    REJECTED,
    Doubt,
    Record,
    RoundContext,
    Visited,
    Weighting,
    visit,
)

AXIS = "clients"
# XLA on a CPU would interleave independent operations of a client's step over all cores. The devices already share out
# the cores, so that only moves arrays between caches: a round of pFedBayes took half as long again.
SCHEDULING = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@struct
class Trace:
    """What happened in the rounds of a block, (rounds, ...).

    Attributes:
        ids: Client in each place, (rounds, places).
        status: EMPTY, COUNTED, KEPT, or from REJECTED on why not, (rounds, places).
        info: Means over the clients that ran, and what the server reports, (rounds,) each.
        discarded: Whether the new server was not finite, so that the old one was kept, (rounds,).
        scores: What an auditor learns of each canary, (rounds, canaries); None without any.
    """

    ids: Array
    status: Array
    info: Info
    discarded: Array
    scores: Array | None = None


@dataclass(frozen=True)
class Plan:
    """Everything about the rounds that is fixed at compile time.

    Attributes:
        participation: Who is drawn.
        rounds: T, which schedules refer to.
        schedules: Hyper-parameters that change with the round.
        client_batch: Clients that a device runs at once: 1 is a scan, the whole share a vmap.
        weighting: `method` keeps the weights that clients send; `uniform` and `examples` override them.
        stack: Whether `aggregate` sees all messages although the method is linear.
        block: Most rounds that are run between two looks.
        mesh: The devices.
        exclude: Share of the uploaders that is left out, the most uncertain ones; above 0 only with validation shards.
        robust: What centre of the messages `aggregate` sees in place of their weighted mean; linear methods only.
    """

    participation: Participation
    rounds: int
    schedules: tuple[schedule.Schedule, ...]
    client_batch: int
    weighting: Weighting
    stack: bool
    block: int
    mesh: Mesh
    exclude: float = 0.0
    robust: Rule | None = None

    @property
    def hands(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def chunk(self) -> int:
        """Clients that a device really runs at once, of the largest group."""
        return max(chunk for _, chunk in self.shares)

    @property
    def shares(self) -> tuple[tuple[int, int], ...]:
        """Places of each group on a device, a multiple of its chunk, and that chunk."""

        def share(capacity: int) -> tuple[int, int]:
            chunk = min(self.client_batch, -(-capacity // self.hands))
            return -(-capacity // (self.hands * chunk)) * chunk, chunk

        return tuple(map(share, self.participation.capacities))

    @property
    def places(self) -> int:
        """Places of a round over all devices."""
        return self.hands * sum(share for share, _ in self.shares)

    def rows(self, num: int) -> int:
        """Rows that hold `num` clients, shared out evenly over the devices."""
        return -(-num // self.hands) * self.hands


@struct
class RoundInputs:
    """Everything that the rounds of a run read and leave as it is.

    Attributes:
        method: As it was given; schedules resolve it for each round.
        tasks: The problem of each group of clients.
        channel: What uploads go through.
        train: Training examples of all clients.
        root: Of the run's randomness.
        validation: Examples by which uploaders judge themselves; None where none is left out.
        limits: What a message may be at most.
    """

    method: Method
    tasks: Tasks
    channel: Channel | None
    train: Shards
    root: Key
    validation: Shards | None = None
    limits: screen.Limits = screen.LIMITS

    @property
    def num_clients(self) -> int:
        """Clients that take part."""
        return self.tasks[0].num_clients


@partial(jax.jit, static_argnames="plan", donate_argnames=("server", "records"), compiler_options=SCHEDULING)
def run_block(
    inputs: RoundInputs, start: Array, stop: Array, server: Any, records: Record, *, plan: Plan
) -> tuple[Any, Record, Trace]:
    """The server and all clients' records after rounds start … stop − 1; records live on the devices, shared out."""

    def device(inputs: RoundInputs, start: Array, stop: Array, server: Any, records: Record) -> Any:
        @partial(jax.jit, inline=True)  # its shapes are needed before the loop: so it is traced once for both
        def one(t: Array, server: Any, records: Record) -> tuple[Any, Record, Trace]:
            slots = draw_slots(plan, inputs.train, inputs.root, t)
            here = _fetch(records, slots.ids, plan)
            server, here, happened = _round(plan, inputs, t, server, here, slots)
            return server, _store(records, slots, here, plan), happened

        def body(t: Array, carry: tuple[Any, Record, Trace]) -> tuple[Any, Record, Trace]:
            server, records, happened = one(t, *carry[:2])
            return server, records, jax.tree.map(lambda all_, new: all_.at[t - start].set(new), carry[2], happened)

        happened = jax.eval_shape(one, start, server, records)[2]
        trace = jax.tree.map(lambda leaf: jnp.zeros((plan.block, *leaf.shape), leaf.dtype), happened)
        return lax.fori_loop(start, stop, body, (server, records, trace))

    return _over_devices(device, plan, 4)(inputs, start, stop, server, records)


@partial(jax.jit, static_argnames="plan", donate_argnames=("server", "here"), compiler_options=SCHEDULING)
def run_round(inputs: RoundInputs, t: Array, server: Any, here: Record, *, plan: Plan) -> tuple[Any, Record, Trace]:
    """The server and the cohort's records after round t; records come from a store and go back to it."""

    def device(inputs: RoundInputs, t: Array, server: Any, here: Record) -> tuple[Any, Record, Trace]:
        return _round(plan, inputs, t, server, here, draw_slots(plan, inputs.train, inputs.root, t))

    return _over_devices(device, plan, 3)(inputs, t, server, here)


def _over_devices(device: Callable[..., Any], plan: Plan, whole: int) -> Callable[..., Any]:
    """Return the function on all devices, which share out its last argument and have all others whole."""
    specs = (P(),) * whole + (P(AXIS),)
    return jax.shard_map(device, mesh=plan.mesh, in_specs=specs, out_specs=(P(), P(AXIS), P()), check_vma=False)


def draw_slots(plan: Plan, shards: Shards, root: Key, t: Array) -> Slots:
    """The places of round t in the order in which devices take them; place d · places / hands is device d's first.

    A device has its places group by group.
    """
    drawn = plan.participation.draw_groups(rng.key(root, Stream.COHORT, t))
    dealt = [
        deal(slots, shards.count, plan.hands * share, plan.hands)
        for slots, (share, _) in zip(drawn, plan.shares, strict=True)
    ]
    if len(dealt) == 1:
        return dealt[0]

    def side_by_side(*leaves: Array) -> Array:
        return jnp.concatenate([leaf.reshape(plan.hands, -1) for leaf in leaves], axis=1).reshape(-1)

    return jax.tree.map(side_by_side, *dealt)


def blank_record(method: Method, tasks: Tasks, channel: Channel | None, shards: Shards) -> Record:
    """The shapes of a client's record."""
    contact = architectures.first_contact(method, tasks[0], shards)
    memory = jax.eval_shape(partial(uplink.memory_of, channel), contact.message.payload)
    client = contact.client
    if len(tasks) > 1:
        client = jax.ShapeDtypeStruct((_record_words(method, tasks),), jnp.uint32)
    return Record(jax.eval_shape(lambda: jnp.bool_(False)), client, memory)


def _record_words(method: Method, tasks: Tasks) -> int:
    """Words that hold what a client of any group keeps."""
    return max(architectures.num_words(architectures.client_shape(method, task)) for task in tasks)


def _round(
    plan: Plan, inputs: RoundInputs, t: Array, server: Any, here: Record, slots: Slots
) -> tuple[Any, Record, Trace]:
    """One round as a device sees it: `here` are the records of its own places, `slots` are those of all devices."""
    method, channel = schedule.resolve(inputs.method, plan.schedules, t, plan.rounds), inputs.channel
    down = method.broadcast(server)
    context = RoundContext(method, inputs.tasks[0], channel, down, inputs.root, t, inputs.limits, plan.weighting)
    pooled = None
    if method.pools:  # one visit with the data of the whole cohort, in the first place
        pooled = inputs.train.union(slots.ids, slots.uploads)
        slots = replace(slots, filled=jnp.arange(plan.places) == 0, uploads=slots.filled)
    stream = method.linear and not plan.stack and plan.robust is None
    # Who is left out is known when all have run, so until then the messages of a linear method are kept apart too.
    streaming = stream and inputs.validation is None
    mine = _own_share(slots, plan)
    work = _worker(plan, inputs, context, pooled, streaming)
    here, messages, info, status, doubt = _by_group(work, method, inputs.tasks, plan, here, mine, streaming)
    status, left_out = _gathered(status), {}
    if doubt is not None:
        out = screen.most_uncertain(_gathered(doubt.uncertainty), status == COUNTED, plan.exclude)
        here, messages = jax.vmap(_leave_out)(_own_share(out, plan), here, messages, doubt)
        status, left_out = jnp.where(out, jnp.int8(KEPT), status), {"excluded": jnp.sum(out)}
        messages = _weighted_sum(messages) if stream else messages
    info, scores = _gathered(info), None
    if isinstance(channel, privacy.NoisedSum):
        messages = channel.release(lax.psum(messages.payload, AXIS), rng.key(inputs.root, Stream.NOISE, t))
        scores = None if channel.canaries is None else channel.canaries.scores(messages)
    else:
        messages = _summed(messages) if stream else _gathered(messages)
        if isinstance(channel, privacy.Noised) and channel.canaries is not None:
            scores = _heard(channel.canaries, slots.ids, info.pop(HEARD))
    key = rng.key(inputs.root, Stream.SERVER, t)
    server, server_info, discarded = server_step(context, server, messages, key, rule=plan.robust)
    # Figures of an update that is too large tell what is wrong with it; one that is not finite has none to tell.
    info = _mean_info(info, (status != EMPTY) & (status != REJECTED))
    return server, here, Trace(slots.ids, status, {**info, **server_info, **left_out}, discarded, scores)


def _worker(
    plan: Plan, inputs: RoundInputs, context: RoundContext, pooled: Shard | None, streaming: bool
) -> Callable[[Task, int, Record, Slots], Visited]:
    """Return the function that visits the places of this device that belong to a group with a task and a chunk."""

    def work(task: Task, chunk: int, here: Record, mine: Slots) -> Visited:
        own, judge = replace(context, task=task), None
        if inputs.validation is not None:  # personalisation knows no schedule
            judge = partial(own_uncertainty, replace(own, method=inputs.method), inputs.train, inputs.validation)

        def place(record: Record, slot: Slots) -> Visited:
            data = inputs.train.of(slot.ids) if pooled is None else pooled
            return visit(own, data, record, slot.ids, slot.uploads, batched=plan.chunk > 1, judge=judge)

        return _work_through(place, here, mine, chunk, streaming)

    return work


def _by_group(
    work: Callable[[Task, int, Record, Slots], Visited],
    method: Method,
    tasks: Tasks,
    plan: Plan,
    here: Record,
    mine: Slots,
    stream: bool,
) -> Visited:
    """What `work` makes of this device's places, group after group; their states are unpacked on the way."""
    if len(tasks) == 1:
        return work(tasks[0], plan.chunk, here, mine)
    size, first, parts = _record_words(method, tasks), 0, []
    for task, (share, chunk) in zip(tasks, plan.shares, strict=True):
        records, slots = jax.tree.map(lambda leaf, a=first, n=share: leaf[a : a + n], (here, mine))
        like = architectures.client_shape(method, task)
        records = replace(records, client=jax.vmap(partial(architectures.unpack, like=like))(records.client))
        records, *rest = work(task, chunk, records, slots)
        packed = jax.vmap(partial(architectures.pack, size=size))(records.client)
        parts.append((replace(records, client=packed), *rest))
        first += share

    def joined(some: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *some)

    records, messages, *others = zip(*parts, strict=True)
    sent = reduce(trees.add, messages) if stream else joined(messages)
    info, status, doubt = map(joined, others)
    return joined(records), sent, info, status, doubt


def _leave_out(out: Array, record: Record, message: Message, doubt: Doubt) -> tuple[Record, Message]:
    """A client's record and message, as if it had not uploaded if it is left out."""
    memory = trees.select(out, doubt.memory, record.memory)
    return replace(record, memory=memory), screen.silence(message, ~out)


Visit = Callable[[Record, Slots], Visited]


def _work_through(visit: Visit, records: Record, slots: Slots, chunk: int, stream: bool) -> Visited:
    """Every place of this device visited, `chunk` at a time; messages stacked, or streamed into a sum of one."""
    visit = jax.jit(visit, inline=True)  # traced once, for its shapes and for its work
    first = jax.tree.map(lambda leaf: leaf[0], (records, slots))
    nobody = trees.zeros(jax.eval_shape(visit, *first)[1:])

    def place(record: Record, slot: Slots) -> Visited:
        return trees.either(slot.filled, lambda: visit(record, slot), lambda: (record, *nobody), batched=chunk > 1)

    def group(total: Message | None, members: tuple[Record, Slots]) -> tuple[Message | None, tuple]:
        if chunk == 1:  # no vmap: it would batch the loop's own trip count
            record, message, *rest = _stack_of_one(place(*jax.tree.map(lambda leaf: leaf[0], members)))
        else:
            record, message, *rest = jax.vmap(place)(*members)
        if total is None:
            return None, (record, message, *rest)
        here = _weighted_sum(message)
        total = Message(trees.add(total.payload, here.payload), total.weight + here.weight)
        return total, (record, None, *rest)

    grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), (records, slots))
    total = Message(nobody[0].payload, jnp.float32(0)) if stream else None
    total, visited = lax.scan(group, total, grouped)
    records, messages, *rest = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), visited)
    return records, messages if total is None else total, *rest


def _weighted_sum(messages: Message) -> Message:
    """The weighted sum of stacked messages with the total weight, not yet divided by it."""
    return Message(trees.weighted_sum(messages.payload, messages.weight), jnp.sum(messages.weight))


def _summed(total: Message) -> Message:
    """The weighted mean over all devices with the total weight, as a stack of one."""
    payload, weight = lax.psum((total.payload, total.weight), AXIS)
    mean = trees.scale(1 / jnp.where(weight > 0, weight, 1.0), payload)
    return _stack_of_one(Message(mean, weight))


def _heard(canaries: privacy.Canaries, ids: Array, told: Array) -> Array:
    """What was heard of each canary in a round, (canaries,)."""
    place = jnp.where(ids >= canaries.first, ids - canaries.first, canaries.num)  # past the end: dropped
    return jnp.zeros(canaries.num).at[place].add(told, mode="drop")


def _gathered(tree: Any) -> Any:
    """What all devices have, stacked in the order of places."""
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS, tiled=True), tree)


def _own_share(tree: Any, plan: Plan) -> Any:
    """The places of this device out of what is known of all."""
    share = plan.places // plan.hands
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, lax.axis_index(AXIS) * share, share), tree)


def _stack_of_one(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _mean_info(info: Info, ran: Array) -> Info:
    """Means over the clients that ran and have figures; NaN when none did."""
    num = jnp.sum(ran)
    return {
        name: jnp.where(num > 0, jnp.sum(jnp.where(ran, values, 0)) / num, jnp.nan) for name, values in info.items()
    }


def _fetch(records: Record, ids: Array, plan: Plan) -> Record:
    """The records of this device's places, out of the shares that the devices hold."""
    mine = _own_share(ids, plan)
    if plan.hands == 1:
        return jax.tree.map(lambda leaf: leaf[mine], records)
    held, local = _whose(records, ids)

    def one(leaf: Array) -> Array:
        rows = leaf[local]
        rows = jnp.where(held.reshape((-1,) + (1,) * (leaf.ndim - 1)), rows, jnp.zeros_like(rows))
        summed = lax.psum_scatter(rows.astype(jnp.int32) if leaf.dtype == jnp.bool_ else rows, AXIS, tiled=True)
        return summed.astype(leaf.dtype)

    return jax.tree.map(one, records)


def _store(records: Record, slots: Slots, here: Record, plan: Plan) -> Record:
    """The shares of the devices with this round's records in place; an empty place writes nothing."""
    everyone = here if plan.hands == 1 else _gathered(here)
    held, local = _whose(records, slots.ids)
    target = jnp.where(held & slots.filled, local, records.joined.shape[0])  # past the end: dropped
    return jax.tree.map(lambda leaf, new: leaf.at[target].set(new, mode="drop"), records, everyone)


def _whose(records: Record, ids: Array) -> tuple[Array, Array]:
    """Which of the ids this device holds, and where (0 for the others)."""
    held_here = records.joined.shape[0]
    local = ids - lax.axis_index(AXIS) * held_here
    held = (local >= 0) & (local < held_here)
    return held, jnp.where(held, local, 0)
