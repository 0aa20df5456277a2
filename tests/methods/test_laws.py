"""The contract of `priory.fed.method`, for every registered method.

A method compiles six programs here and no more: its first server and client (`first_of`), visits to clients in the
simulator and behind the wire (`_visited`), aggregations (`aggregates_of`, `_aggregate`), a block of the simulator's
rounds (`run_block`) and a prediction (`_predictive`). All laws look at what these return.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy.special import logsumexp

from priory import FedOpt, RandomGroups
from priory.core import rng, trees
from priory.core.rng import Stream
from priory.core.struct import replace, struct
from priory.deploy.wire import pack, unpack
from priory.engine import devices
from priory.engine import rounds as rounds_module
from priory.engine.cohort import Participation, Slots
from priory.engine.rounds import AXIS, Plan, RoundInputs, blank_record, run_block
from priory.fed import channel as uplink
from priory.fed import schedule
from priory.fed.channel import TopK
from priory.fed.local import Optimiser, Work
from priory.fed.method import Message, Predictive
from priory.fed.visit import Record, RoundContext, visit
from tests.methods.problems import METHODS, aligned_task, tiny_shards
from tests.methods.verbs import on_host

# In batches of three the last of an epoch is partial but never a single row, whose variance is pure rounding error:
# a batch norm would divide by it, and no two programs agree.
COUNTS = (8, 5, 5)
TASK = replace(aligned_task(), num_examples=sum(COUNTS))
SHARDS, ROOT = tiny_shards(COUNTS), rng.root(11)
SCHEDULES = (schedule.parse("step-size=step:0.5@0.5"),)


@struct
class Warm:
    """A channel whose memory does not start at zero, and which sends half of the numbers.

    No two numbers are alike, neither at the start nor later: which of two equal ones is sent would depend on rounding.
    The two biases of FedVI, for instance, have the same gradient.
    """

    inner: TopK = TopK(0.5)

    def check(self) -> None:
        self.inner.check()

    def init(self, payload: Any) -> Any:
        leaves, structure = jax.tree.flatten(payload)
        warm = [0.01 + 0.001 * jnp.arange(leaf.size) + 0.00037 * i for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, [row.reshape(leaf.shape) for row, leaf in zip(warm, leaves, strict=True)])

    def send(self, payload: Any, memory: Any, key: Any) -> tuple[Any, Any, Any]:
        apart = jax.tree.map(lambda number, offset: number + 0.1 * offset, payload, self.init(payload))
        return self.inner.send(apart, memory, key)


CHANNEL = Warm()
FORWARDS, BACKWARDS = np.array([0, 1, 2], np.int32), np.array([2, 0, 1], np.int32)


def over(names: list[str]) -> pytest.MarkDecorator:
    """One test a method; one worker takes all laws of a method, so that its compiled round is shared."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in names])


LAWFUL = {
    **{name: cls() for name, cls in METHODS.items()},
    "fedopt:yogi": FedOpt("yogi"),
    "random-groups:all": RandomGroups(predict_with="all"),
}
every_method = over(list(LAWFUL))
linear_methods = over([name for name, method in LAWFUL.items() if method.linear])
# Pooled data do not travel as messages.
sending_methods = over([name for name, method in LAWFUL.items() if not method.pools])


def assert_close(a: Any, b: Any, tolerance: float = 2e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@cache
def method_of(name: str) -> Any:
    """The method with momentum and two epochs on small batches: whatever a law may break on is switched on.

    Not Adam: where a gradient is zero (a bias before a batch norm) it makes full steps of rounding errors, and no two
    programs agree. Without it a narrow prior would need tiny steps, so it is wide. Steps are small because a batch norm
    over three rows amplifies what two programs round differently.
    """
    method = replace(LAWFUL[name], optimiser=Optimiser("sgd", 0.01, momentum=0.9))
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


@struct
class First:
    """What there is before the first round.

    Attributes:
        server: The server.
        down: What it broadcasts.
        client: The state of a client at first contact.
    """

    server: Any
    down: Any
    client: Any


@jax.jit
def _first(method: Any) -> First:
    server = method.init_server(TASK, rng.key(ROOT, Stream.INIT))
    down = method.broadcast(server)
    return First(server, down, method.init_client(TASK, down, rng.key(ROOT, Stream.ENROL, 1)))


@cache
def first_of(name: str) -> First:
    return on_host(_first(method_of(name)))


@cache
def messages_of(name: str) -> Message:
    """The messages of all clients in a first round, stacked."""
    return visited(name, first_of(name).down, FORWARDS)[1]


@struct
class Aggregates:
    """Servers made of the same messages: as they are, in another order, without weight, with one absent, as a mean."""

    plain: Any
    turned: Any
    silent: Any
    padded: Any
    one: Any


@cache
def aggregates_of(name: str) -> Aggregates:
    messages = messages_of(name)
    turned = jax.tree.map(lambda leaf: leaf[BACKWARDS], messages)
    silent = replace(messages, weight=np.zeros_like(messages.weight))
    same_size = jax.tree.map(lambda *leaves: np.stack(leaves), messages, turned, silent)
    absent = jax.tree.map(lambda leaf: np.concatenate([leaf, rubbish_like(leaf[:1])]), messages.payload)
    padded = Message(absent, np.append(messages.weight, np.float32(0)), np.append(messages.sender, np.int32(9)))
    return on_host(_aggregates(method_of(name), first_of(name).server, same_size, padded))


def rubbish_like(leaf: np.ndarray) -> np.ndarray:
    """NaN, or the most negative whole number."""
    return np.full_like(leaf, np.nan if leaf.dtype.kind == "f" else np.iinfo(leaf.dtype).min)


@jax.jit
def _aggregates(method: Any, server: Any, same_size: Message, padded: Message) -> Aggregates:
    def aggregated(messages: Message) -> Any:
        return method.aggregate(TASK, server, messages, rng.root(0))[0]

    one = None
    if method.linear:
        messages = jax.tree.map(lambda leaf: leaf[0], same_size)
        first = jax.tree.map(lambda leaf: leaf[0], messages.payload)
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=first)
        one = aggregated(Message(jax.tree.map(lambda leaf: leaf[None], mean), jnp.sum(messages.weight)[None]))
    servers = jax.lax.map(aggregated, same_size)
    plain, turned, silent = (jax.tree.map(lambda leaf, i=i: leaf[i], servers) for i in range(3))
    return Aggregates(plain, turned, silent, aggregated(padded), one)


@every_method
def test_the_order_of_messages_does_not_matter(name):
    assert_close(aggregates_of(name).turned, aggregates_of(name).plain)


@every_method
def test_an_absent_client_changes_nothing(name):
    assert_close(aggregates_of(name).padded, aggregates_of(name).plain)


@every_method
def test_a_round_without_messages_leaves_the_server(name):
    assert_close(aggregates_of(name).silent, first_of(name).server, tolerance=0)


@linear_methods
def test_a_stack_of_one_is_as_good_as_the_stack(name):
    assert_close(aggregates_of(name).one, aggregates_of(name).plain)


@every_method
def test_a_result_depends_on_the_client_and_not_on_its_place(name):
    forwards, backwards = (visited(name, first_of(name).down, order) for order in (FORWARDS, BACKWARDS))
    assert_close(jax.tree.map(lambda leaf: leaf[np.argsort(BACKWARDS)], backwards), forwards)


@every_method
def test_what_travels_survives_the_wire(name):
    message = jax.tree.map(lambda leaf: leaf[0], messages_of(name))
    for tree in (first_of(name).down, message, first_of(name).client):
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
    messages = messages_of(name)
    statistics, _ = trees.partition(messages.payload, uplink.is_statistic)
    if not jax.tree.leaves(statistics):
        # No weights, or those of the head alone, which has no batch norm.
        sends_none = ("local", "fedbnn", "lg-fedavg")
        assert name in sends_none, "a method that sends weights sends the statistics that belong to them"
        return
    share = messages.weight / messages.weight.sum()
    mean = jax.tree.map(lambda leaf: np.tensordot(share, leaf, 1), statistics)
    assert_close(trees.partition(aggregates_of(name).plain, uplink.is_statistic)[0].stats, mean.stats)
    one = jax.tree.map(lambda leaf: leaf[0], messages)
    assert_close(_sent(method_of(name), first_of(name).down, one).payload.stats, one.payload.stats, tolerance=0)


@jax.jit
def _sent(method: Any, down: Any, message: Message) -> Message:
    memory = uplink.memory_of(CHANNEL, message.payload)
    return uplink.transmit(CHANNEL, method, TASK, down, message, memory, rng.root(5))[0]


@every_method
def test_predictions_are_mixtures(name):
    predictive = on_host(_predictive(method_of(name), first_of(name)))
    samples, batch = predictive.log_weights.shape
    assert predictive.outputs.shape == (samples, batch, 3)
    np.testing.assert_allclose(logsumexp(predictive.log_weights, axis=0), np.zeros(batch), atol=1e-6)


@jax.jit
def _predictive(method: Any, first: First) -> Predictive:
    data = SHARDS.of(jnp.int32(1))
    posterior = method.personalise(TASK, first.down, first.client, data, rng.root(3))
    return method.predict(TASK, posterior, data.padded().x, rng.root(4))


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
    sent = []
    for method in (still, pulled):
        messages = visited(name, on_host(_first(method)).down, FORWARDS, method)[1]
        sent.append(trees.partition(messages.payload, uplink.is_statistic)[0])
    assert_close(*sent, tolerance=0)


PARTICIPATION = Participation(len(COUNTS), 2, 2)


@cache
def cohort(t: int) -> list[int]:
    """The clients that are drawn in round t."""
    return [int(client) for client in _drawn(np.int32(t))]


_drawn = jax.jit(lambda t: PARTICIPATION.draw(rng.key(ROOT, Stream.COHORT, t)).ids)


def plan_of(rounds: int) -> Plan:
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    return Plan(
        participation=PARTICIPATION,
        rounds=rounds,
        schedules=SCHEDULES,
        client_batch=1,
        weighting="method",
        stack=False,
        block=4,
        mesh=mesh,
    )


def visited(name: str, down: Any, order: np.ndarray, method: Any = None) -> tuple[Record, Message]:
    """Records and messages of all clients, visited in the given order."""
    records = jax.tree.map(lambda leaf: np.zeros((len(COUNTS), *leaf.shape), leaf.dtype), blank_of(name))
    now = schedule.resolve(method or method_of(name), SCHEDULES, 0, 3)
    return on_host(_visited(now, down, records, order, SHARDS, np.int32(1)))


@jax.jit
def _visited(method: Any, down: Any, records: Record, order: Any, shards: Any, t: Any) -> tuple[Record, Message]:
    slots = Slots(order, jnp.full(len(COUNTS), True), jnp.full(len(COUNTS), True))

    context = RoundContext(method, TASK, CHANNEL, down, ROOT, t)

    def place(record, slot):
        return visit(context, shards.of(slot.ids), record, slot.ids, slot.uploads)

    return rounds_module._work_through(place, records, slots, chunk=1, stream=False)[:2]


def simulated(name: str, rounds: int, method: Any = None) -> tuple[Any, Record]:
    """Server and records after some rounds of two of the three clients; every count of rounds shares a compilation."""
    method, plan = method or method_of(name), plan_of(3)
    zeros = jax.tree.map(lambda leaf: np.zeros((4, *leaf.shape), leaf.dtype), blank_of(name))
    records = devices.shared_out(zeros, plan.mesh)
    shards, root = devices.everywhere((SHARDS, ROOT), plan.mesh)
    inputs = RoundInputs(method, (TASK,), CHANNEL, shards, root)
    server = devices.everywhere(first_of(name).server, plan.mesh)
    span = devices.everywhere((np.int32(0), np.int32(rounds)), plan.mesh)
    server, records, _ = run_block(inputs, *span, server, records, plan=plan)
    return devices.to_host((server, records), plan.mesh)


@cache
def blank_of(name: str) -> Record:
    """The shapes of a client's record."""
    return blank_record(method_of(name), (TASK,), CHANNEL, SHARDS)


def over_the_wire(name: str, rounds: int) -> tuple[Any, dict[int, Record]]:
    """The same federation with clients that hold only their own data and exchange packed messages."""
    method, server = method_of(name), first_of(name).server
    states: dict[int, Record] = {}
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), blank_of(name))
    like_down = jax.eval_shape(lambda: method.broadcast(server))
    for t in range(rounds):
        now = schedule.resolve(method, SCHEDULES, t, rounds)
        sent = pack(now.broadcast(server))
        replies = []
        for client in cohort(t):
            before = states.get(client, blank)
            states[client], reply = answered(now, unpack(sent, like_down), before, client, t)
            replies.append(reply)
        like = jax.eval_shape(lambda reply=replies[0]: reply)
        arrived = [unpack(pack(reply), like) for reply in replies]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *arrived)
        server = on_host(_aggregate(now, server, stacked, np.int32(t)))
    return server, states


@jax.jit
def _aggregate(method: Any, server: Any, messages: Message, t: Any) -> Any:
    return method.aggregate(TASK, server, messages, rng.key(ROOT, Stream.SERVER, t))[0]


def answered(method: Any, down: Any, record: Record, client: int, t: int) -> tuple[Record, Message]:
    """One client's reply, from a pool with its own rows alone; as in a deployment, the rest is filled up.

    The client is asked once in every place, so that a request that comes twice is tried as well.
    """
    first, count = int(SHARDS.start[client]), COUNTS[client]
    x, y = (np.asarray(rows) for rows in (SHARDS.pool.x, SHARDS.pool.y))
    own_x, own_y = rubbish_like(x), np.zeros_like(y)
    own_x[:count], own_y[:count] = x[first : first + count], y[first : first + count]
    own = replace(SHARDS.pool, x=own_x, y=own_y)
    start, counts = np.zeros_like(SHARDS.start), np.full_like(SHARDS.count, count)
    data = replace(SHARDS, pool=own, start=start, count=counts)
    records = jax.tree.map(lambda leaf: np.stack([leaf] * len(COUNTS)), record)
    replies = on_host(_visited(method, down, records, np.full(len(COUNTS), client, np.int32), data, np.int32(t)))
    first, *others = (jax.tree.map(lambda leaf, i=i: leaf[i], replies) for i in range(len(COUNTS)))
    for other in others:
        assert_close(other, first, tolerance=0)
    return first
