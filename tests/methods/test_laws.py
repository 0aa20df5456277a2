"""The contract of `priory.fed.method`, for every registered method. One compiled round a method serves all laws."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from priory.core import rng, trees
from priory.core.rng import Stream
from priory.core.struct import replace, struct
from priory.deploy.wire import pack, unpack
from priory.engine import devices
from priory.engine import rounds as rounds_module
from priory.engine.cohort import Participation, Slots
from priory.engine.rounds import AXIS, Plan, blank_record, run_block
from priory.fed import channel as uplink
from priory.fed import schedule
from priory.fed.channel import TopK
from priory.fed.local import Optimiser, Work
from priory.fed.method import Message
from priory.fed.visit import Record, visit
from tests.methods.problems import ALL_METHODS, COUNTS, METHODS, a_round_of, aligned_task, tiny_shards

TASK, SHARDS, ROOT = aligned_task(), tiny_shards(), rng.root(11)
SCHEDULES = (schedule.parse("step-size=step:0.5@0.5"),)


@struct
class Warm:
    """A channel whose memory does not start at zero, and which sends half of the numbers.

    No two numbers of a leaf are alike at the start: which of two equal ones is sent would be up to rounding.
    """

    inner: TopK = TopK(0.5)

    def check(self) -> None:
        self.inner.check()

    def init(self, payload: Any) -> Any:
        return jax.tree.map(lambda leaf: 0.01 + 0.001 * jnp.arange(leaf.size).reshape(leaf.shape), payload)

    def send(self, payload: Any, memory: Any, key: Any) -> tuple[Any, Any, Any]:
        return self.inner.send(payload, memory, key)


CHANNEL = Warm()


def over(names: list[str]) -> pytest.MarkDecorator:
    """One test a method; one worker takes all laws of a method, so that its compiled round is shared."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in names])


every_method = over(ALL_METHODS)
linear_methods = over([name for name in ALL_METHODS if METHODS[name]().linear])
# Pooled data do not travel as messages.
sending_methods = over([name for name in ALL_METHODS if not getattr(METHODS[name], "pools", False)])


def assert_close(a: Any, b: Any, tolerance: float = 2e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@cache
def method_of(name: str) -> Any:
    """The method with momentum and two epochs on small batches: whatever a law may break on is switched on.

    Not Adam: where a gradient is zero (a bias before a batch norm) it makes full steps of rounding errors, and no two
    programs agree. Without it a narrow prior would need tiny steps, so it is wide.
    """
    method = replace(METHODS[name](), optimiser=Optimiser("sgd", 0.05, momentum=0.9))
    if hasattr(method, "work"):
        method = replace(method, work=Work(epochs=2, batch_size=3))
    if hasattr(method, "batch_size"):
        method = replace(method, batch_size=3)
    if name == "fedpop":
        # FedPop's message is a gradient summed over examples: with heads as large as 1 the rounding errors of its zeros
        # (again the bias before a batch norm) are larger than the tolerance.
        method = replace(method, prior_sd=0.1)
    if name == "fedpa":
        method = replace(method, burn_in=0)  # two samples
    if hasattr(method, "width"):
        method = replace(method, width=8)  # the first memory of the channel grows with a leaf; of 4 units all are dead
    return replace(method, rho=0.0) if hasattr(method, "rho") else method


@jax.jit
def _round(method: Any) -> tuple[Any, Message]:
    return a_round_of(method, TASK, SHARDS)


@cache
def round_of(name: str) -> tuple[Any, Message]:
    return _round(method_of(name))


def aggregated(name: str, messages: Message) -> Any:
    return method_of(name).aggregate(TASK, round_of(name)[0], messages, rng.root(0))[0]


@every_method
def test_the_order_of_messages_does_not_matter(name):
    messages = round_of(name)[1]
    turned = jax.tree.map(lambda leaf: leaf[np.array([2, 0, 1])], messages)
    assert_close(aggregated(name, turned), aggregated(name, messages))


@every_method
def test_an_absent_client_changes_nothing(name):
    messages = round_of(name)[1]
    absent = jax.tree.map(lambda leaf: jnp.full_like(leaf[:1], jnp.nan), messages.payload)
    payload = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), messages.payload, absent)
    padded = Message(payload, jnp.append(messages.weight, 0.0), jnp.append(messages.sender, 9))
    assert_close(aggregated(name, padded), aggregated(name, messages))


@every_method
def test_a_round_without_messages_leaves_the_server(name):
    server, messages = round_of(name)
    silent = replace(messages, weight=jnp.zeros_like(messages.weight))
    assert_close(aggregated(name, silent), server, tolerance=0)


@linear_methods
def test_a_stack_of_one_is_as_good_as_the_stack(name):
    _, messages = round_of(name)
    mean = trees.weighted_mean(
        messages.payload, messages.weight, otherwise=jax.tree.map(lambda x: x[0], messages.payload)
    )
    one = Message(jax.tree.map(lambda leaf: leaf[None], mean), jnp.sum(messages.weight)[None])
    assert_close(aggregated(name, one), aggregated(name, messages))


@every_method
def test_a_result_depends_on_the_client_and_not_on_its_place(name):
    orders = [np.array([0, 1, 2]), np.array([2, 0, 1])]
    results = [visited(method_of(name), jnp.asarray(order)) for order in orders]
    by_client = [
        jax.tree.map(lambda leaf, o=order: leaf[np.argsort(o)], r) for order, r in zip(orders, results, strict=True)
    ]
    assert_close(*by_client)


@every_method
def test_what_travels_survives_the_wire(name):
    method = method_of(name)
    server, messages = round_of(name)
    down = method.broadcast(server)
    message = jax.tree.map(lambda leaf: leaf[0], messages)
    client = method.enrol(TASK, down, rng.root(1))
    for tree in (down, message, client):
        like = jax.eval_shape(lambda tree=tree: tree)
        assert_close(unpack(pack(tree), like), tree, tolerance=0)


@sending_methods
def test_simulator_and_wire_give_the_same_server(name):
    """Momentum, a schedule, a channel with memory, epochs, late enrolment, and a round that is asked twice."""
    server, records = simulated(name, rounds=3)
    behind_wire, states = over_the_wire(name, rounds=3)
    assert_close(behind_wire, server)
    assert set(states) == {0, 1, 2}, "all clients have taken part, one of them late"
    for client, state in states.items():
        assert_close(state, jax.tree.map(lambda leaf, c=client: leaf[c], records))


@every_method
def test_a_new_value_of_a_traced_hyper_parameter_compiles_nothing(name):
    simulated(name, rounds=1)
    before = run_block._cache_size()
    method = method_of(name)
    for path in schedule.traced_fields(method):
        method = schedule.put(method, path, schedule.get(method, path) * 0.5 + 0.001)
    simulated(name, rounds=1, method=method)
    assert run_block._cache_size() == before


@every_method
def test_statistics_are_averaged_plainly(name):
    """Batch-norm statistics of the new server are the weighted mean of those sent, untouched by channel or penalty."""
    server, messages = round_of(name)
    statistics, _ = trees.partition(messages.payload, uplink.is_statistic)
    if not jax.tree.leaves(statistics):
        # No weights, or those of the head alone, which has no batch norm.
        sends_none = ("local", "fedbnn", "lg-fedavg")
        assert name in sends_none, "a method that sends weights sends the statistics that belong to them"
        return
    mean = trees.weighted_mean(statistics, messages.weight, otherwise=jax.tree.map(lambda x: x[0], statistics))
    assert_close(trees.partition(aggregated(name, messages), uplink.is_statistic)[0].stats, mean.stats)
    one = jax.tree.map(lambda leaf: leaf[0], messages)
    down = method_of(name).broadcast(server)
    memory = uplink.memory_of(CHANNEL, one.payload)
    sent, _, _ = uplink.transmit(CHANNEL, method_of(name), TASK, down, one, memory, rng.root(5))
    assert_close(sent.payload.stats, one.payload.stats, tolerance=0)


@every_method
def test_predictions_are_mixtures(name):
    method = method_of(name)
    server = round_of(name)[0]
    down = method.broadcast(server)
    data = SHARDS.of(jnp.int32(1))
    client = method.enrol(TASK, down, rng.root(2))
    posterior = jax.jit(method.personalise)(TASK, down, client, data, rng.root(3))
    predictive = method.predict(TASK, posterior, data.padded().x, rng.root(4))
    samples, batch = predictive.log_weights.shape
    assert predictive.outputs.shape == (samples, batch, 3)
    np.testing.assert_allclose(jax.nn.logsumexp(predictive.log_weights, axis=0), np.zeros(batch), atol=1e-6)


@every_method
def test_no_hyper_parameter_touches_the_statistics(name):
    """With a step size of 0 the weights stand still: what a penalty, prior or pull changed would be statistics.

    ρ and λ are another matter: they set the noise in the network, which its statistics rightly see.
    """
    still = schedule.put(method_of(name), ("optimiser", "step_size"), 0.0)
    pulled = still
    for path in schedule.traced_fields(still):
        if path not in (("optimiser", "step_size"), ("rho",), ("inclusion",)):
            pulled = schedule.put(pulled, path, schedule.get(pulled, path) * 3 + 0.5)
    sent = [trees.partition(_round(method)[1].payload, uplink.is_statistic)[0] for method in (still, pulled)]
    assert_close(*sent, tolerance=0)


def plan_of(rounds: int) -> Plan:
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    return Plan(
        participation=Participation(len(COUNTS), 2, 2),
        rounds=rounds,
        schedules=SCHEDULES,
        client_batch=1,
        weighting="method",
        stack=False,
        block=4,
        mesh=mesh,
    )


@jax.jit
def visited(method: Any, order: Any) -> tuple[Record, Message]:
    """Records and messages of all clients, visited in the given order."""
    records = jax.tree.map(
        lambda leaf: jnp.zeros((len(COUNTS), *leaf.shape), leaf.dtype), blank_record(method, (TASK,), CHANNEL, SHARDS)
    )
    slots = Slots(order, jnp.full(len(COUNTS), True), jnp.full(len(COUNTS), True))
    down = method.broadcast(method.init(TASK, rng.key(ROOT, Stream.INIT)))

    def place(record, slot):
        who = (record, slot.ids, slot.uploads)
        return visit(method, TASK, CHANNEL, down, SHARDS.of(slot.ids), *who, jnp.int32(1), ROOT)

    return rounds_module._work_through(place, records, slots, chunk=1, stream=False)[:2]


def simulated(name: str, rounds: int, method: Any = None) -> tuple[Any, Record]:
    """Server and records after some rounds of two of the three clients; every count of rounds shares a compilation."""
    method, plan = method or method_of(name), plan_of(3)
    record = blank_record(method, (TASK,), CHANNEL, SHARDS)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4, *leaf.shape), leaf.dtype), record)
    records = devices.zeros_shared_out(shapes, plan.mesh)
    placed = devices.everywhere((SHARDS, ROOT), plan.mesh)
    server = devices.everywhere(method.init(TASK, rng.key(ROOT, Stream.INIT)), plan.mesh)
    span = devices.everywhere((np.int32(0), np.int32(rounds)), plan.mesh)
    server, records, _ = run_block(method, (TASK,), CHANNEL, *placed, *span, server, records, plan=plan)
    return devices.to_host((server, records), plan.mesh)


def over_the_wire(name: str, rounds: int) -> tuple[Any, dict[int, Record]]:
    """The same federation with clients that hold only their own data and exchange packed messages."""
    method, plan = method_of(name), plan_of(rounds)
    server = method.init(TASK, rng.key(ROOT, Stream.INIT))
    states: dict[int, Record] = {}
    shapes = blank_record(method, (TASK,), CHANNEL, SHARDS)
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    like_down = jax.eval_shape(lambda: method.broadcast(server))
    for t in range(rounds):
        now = schedule.resolve(method, SCHEDULES, t, rounds)
        sent = pack(now.broadcast(server))
        replies = []
        for client in np.asarray(plan.participation.draw(rng.key(ROOT, Stream.COHORT, t)).ids):
            before = states.get(int(client), blank)
            for _ in range(2):  # asked twice: the answer starts from the same state and is the same
                state, reply = answered(now, unpack(sent, like_down), before, int(client), t)
            states[int(client)] = state
            replies.append(reply)
        like = jax.eval_shape(lambda reply=replies[0]: reply)
        arrived = [unpack(pack(reply), like) for reply in replies]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrived)
        server, _ = now.aggregate(TASK, server, stacked, rng.key(ROOT, Stream.SERVER, t))
    return server, states


def answered(method: Any, down: Any, record: Record, client: int, t: int) -> tuple[Record, Message]:
    """One client's reply, from a pool that holds its own rows alone."""
    rows = slice(int(SHARDS.start[client]), int(SHARDS.start[client]) + COUNTS[client])
    own = replace(SHARDS.pool, x=SHARDS.pool.x[rows], y=SHARDS.pool.y[rows])
    data = replace(
        SHARDS, pool=own, start=jnp.zeros(1, jnp.int32), count=jnp.array(COUNTS[client])[None], capacity=COUNTS[client]
    )
    return _answer(method, down, record, data, jnp.int32(client), jnp.int32(t))


@jax.jit
def _answer(method: Any, down: Any, record: Record, data: Any, client: Any, t: Any) -> tuple[Record, Message]:
    uploads = jnp.bool_(True)
    return visit(method, TASK, CHANNEL, down, data.of(jnp.int32(0)), record, client, uploads, t, ROOT)[:2]
