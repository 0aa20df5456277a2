"""Personal, global and newcomer evaluation of any method: personalise → predict → score, one client after another.

The whole path is one mapped function that returns sums, so no posterior is ever stacked over clients. The evidence of a
method that bounds log p(D) goes the same way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from priory import metrics
from priory.core import rng, trees
from priory.core.rng import Key, Stream
from priory.core.struct import replace, struct
from priory.fed.method import Population, Predictive, Task, Unlabelled
from priory.fed.shard import Batch, Shard, Shards
from priory.metrics import RegressionTally, Tally
from priory.models.likelihood import Categorical

TEST_BATCH = 256
Result = TypeVar("Result")


@struct
class ClientTallies:
    """Sums for each client, (clients, ...).

    Attributes:
        personal: Of the client's own posterior.
        population: Of the global model, None if the method has none.
        unlabelled: Of the posterior from a newcomer's inputs alone; None if the method has none, and for participants.
    """

    personal: Tally | RegressionTally
    population: Tally | RegressionTally | None
    unlabelled: Tally | RegressionTally | None = None


@partial(jax.jit, static_argnames=("mesh", "visits", "arriving", "batch"))
def tally_clients(
    method: Any,
    settled: Any,
    task: Task,
    down: Any,
    train: Shards,
    held: Shards,
    root: Key,
    t: Array,
    ids: Array,
    joined: Array,
    clients: Any,
    *,
    mesh: Mesh,
    visits: int = 0,
    arriving: bool = False,
    batch: int = 1,
) -> ClientTallies:
    """The tallies of the clients on their held-out examples, their states stacked and shared out over the devices.

    `visits` is how often a client that never took part runs `client_update`, its message discarded, before it is
    personalised; 0 for those that took part. It does so as `settled`, the method as the schedules left it. `arriving`
    clients are newcomers: the global model sees none of their data, and what their inputs alone give is scored as well.
    """

    def one(shared: tuple, place: tuple[Array, Array, Any]) -> ClientTallies:
        method, settled, task, down, train, held, root, t = shared
        problem = (method, settled, task, down, train, root, t)
        posterior, key_personal, key_global = evaluated_posterior(*problem, place, visits=visits, batched=batch > 1)
        data, test = train.of(place[0]), held.of(place[0])
        personal = tally(method, task, posterior, test, key_personal)
        population = unlabelled = None
        if arriving and isinstance(method, Unlabelled):
            key_global, key_infer, key_inferred = jax.random.split(key_global, 3)
            inferred = method.infer(task, down, inputs_of(data), key_infer)
            unlabelled = tally(method, task, inferred, test, key_inferred)
        if isinstance(method, Population):
            key_choice, key_draw = jax.random.split(key_global)
            chosen = method.population(task, down, None if arriving else data, key_choice)
            population = tally(method, task, chosen, test, key_draw)
        return ClientTallies(personal, population, unlabelled)

    shared = (method, settled, task, down, train, held, root, t)
    return for_each(one, shared, (ids, joined, clients), mesh, batch)


@partial(jax.jit, static_argnames=("mesh", "batch"))
def evidence_of_clients(
    settled: Any,
    task: Task,
    down: Any,
    train: Shards,
    root: Key,
    t: Array,
    ids: Array,
    joined: Array,
    clients: Any,
    *,
    mesh: Mesh,
    batch: int = 1,
) -> Array:
    """The evidence of each client in nats, (clients,), their states stacked and shared out over the devices.

    Everybody's q_k is what one `client_update` from the final broadcast tells, its message sent nowhere: a client that
    missed the last round is treated as one that did not, and the bound holds for any q_k.
    """

    def one(shared: tuple, place: tuple[Array, Array, Any]) -> Array:
        settled, task, down, train, root, t = shared
        client_id, has_joined, client = place
        key_update, key_evidence = jax.random.split(rng.key(root, Stream.EVIDENCE, t, client_id))
        data = train.of(client_id)
        client = current_client(settled, task, down, root, client_id, has_joined, client, batched=batch > 1)
        _, message, _ = settled.client_update(task, down, client, data, key_update)
        return settled.client_evidence(task, down, message.payload, data, key_evidence)

    return for_each(one, (settled, task, down, train, root, t), (ids, joined, clients), mesh, batch)


@jax.jit
def evidence_of_server(settled: Any, task: Task, down: Any) -> Array:
    """The evidence that belongs to no client, −KL(q(φ) ‖ p(φ)) in nats."""
    return settled.server_evidence(task, down)


def evaluated_posterior(
    method: Any,
    settled: Any,
    task: Task,
    down: Any,
    train: Shards,
    root: Key,
    t: Array,
    place: tuple[Array, Array, Any],
    *,
    visits: int,
    batched: bool,
) -> tuple[Any, Key, Key]:
    """The posterior of the client at a place (id, whether it joined, state), and keys for what is done with it."""
    client_id, joined, client = place
    key_post, key_personal, key_global = jax.random.split(rng.key(root, Stream.EVALUATION, t, client_id), 3)
    client = current_client(method, task, down, root, client_id, joined, client, batched=batched)
    posterior = personal_posterior(method, settled, task, down, client, train.of(client_id), key_post, visits)
    return posterior, key_personal, key_global


def current_client(
    method: Any, task: Task, down: Any, root: Key, client_id: Array, joined: Array, client: Any, batched: bool = False
) -> Any:
    """The client's state, or that of a first contact if it has not joined."""
    key = rng.key(root, Stream.ENROL, client_id)
    return trees.either(joined, lambda: client, lambda: method.enrol(task, down, key), batched=batched)


def personal_posterior(
    method: Any, settled: Any, task: Task, down: Any, client: Any, data: Shard, key: Key, visits: int
) -> Any:
    """The client's posterior, after so many updates of the `settled` method whose messages nobody reads."""
    key_visit, key_post = jax.random.split(key)

    def visit(i: Array, client: Any) -> Any:
        return settled.client_update(task, down, client, data, jax.random.fold_in(key_visit, i))[0]

    client = lax.fori_loop(0, visits, visit, client)
    return method.personalise(task, down, client, data, key_post)


def inputs_of(data: Shard) -> Shard:
    """The shard without labels and their standard errors, so that nobody can read them."""
    return replace(data, pool=replace(data.pool, y=None, scale=None))


def tally(method: Any, task: Task, posterior: Any, data: Shard, key: Key) -> Tally | RegressionTally:
    """The sums over all examples of a shard, a batch at a time."""
    zero = metrics.zero(Tally) if isinstance(task.likelihood, Categorical) else metrics.zero(RegressionTally)

    def step(total: Any, batch: Batch, key: Key) -> Any:
        predictive = method.predict(task, posterior, batch.x, key)
        return metrics.add(total, tally_batch(task, predictive, batch))

    return _over_batches(step, zero, data, key)


def own_uncertainty(
    method: Any,
    task: Task,
    down: Any,
    train: Shards,
    held: Shards,
    root: Key,
    t: Array,
    client_id: Array,
    client: Any,
) -> Array:
    """The mean uncertainty of a client's own posterior over its held-out inputs, as its state is in round t."""
    key_post, key_predict = jax.random.split(rng.key(root, Stream.CONFIDENCE, t, client_id))
    posterior = method.personalise(task, down, client, train.of(client_id), key_post)
    return mean_uncertainty(method, task, posterior, held.of(client_id), key_predict)


def mean_uncertainty(method: Any, task: Task, posterior: Any, data: Shard, key: Key) -> Array:
    """The mean uncertainty of the predictive over the inputs of a shard, whose labels are not read; NaN without any.

    It is the entropy in nats of a class, or the standard deviation of a target.
    """

    def step(total: Array, batch: Batch, key: Key) -> Array:
        predictive = method.predict(task, posterior, batch.x, key)
        return total + jnp.sum(jnp.where(batch.mask > 0, uncertainty_of_batch(task, predictive, batch), 0.0))

    return _over_batches(step, jnp.float32(0), data, key) / data.count


def tally_batch(task: Task, predictive: Predictive, batch: Batch) -> Tally | RegressionTally:
    """The sums over the rows of a batch that count."""
    assert batch.y is not None
    if isinstance(task.likelihood, Categorical):
        log_probs = metrics.mixture_log_probs(predictive.outputs, predictive.log_weights)
        return metrics.tally_classification(log_probs, batch.y, batch.mask)
    mean, sd = _mean_and_scale(task, predictive, batch)
    return metrics.tally_regression(mean, sd, predictive.log_weights, batch.y, batch.mask)


def uncertainty_of_batch(task: Task, predictive: Predictive, batch: Batch) -> Array:
    """The uncertainty of the predictive for each row, (batch,)."""
    if isinstance(task.likelihood, Categorical):
        return metrics.entropy(metrics.mixture_log_probs(predictive.outputs, predictive.log_weights))
    return metrics.mixture_mean_and_sd(*_mean_and_scale(task, predictive, batch), predictive.log_weights)[1]


def _mean_and_scale(task: Task, predictive: Predictive, batch: Batch) -> tuple[Array, Array]:
    scale = None if batch.scale is None else jnp.broadcast_to(batch.scale, predictive.outputs.shape[:-1])
    return task.likelihood.mean_and_scale(predictive.outputs, scale)  # type: ignore[attr-defined]


def _over_batches(step: Callable[[Result, Batch, Key], Result], start: Result, data: Shard, key: Key) -> Result:
    """What `step(total, batch, key)` makes of all examples of a shard, a batch at a time."""
    size = max(1, min(TEST_BATCH, data.capacity))
    order = jnp.arange(max(1, data.capacity))

    def one(i: Array, total: Result) -> Result:
        return step(total, data.take(order, i, size), jax.random.fold_in(key, i))

    return lax.fori_loop(0, data.num_batches(size), one, start)


def for_each(one: Callable[[Any, Any], Result], shared: Any, places: Any, mesh: Mesh, batch: int) -> Result:
    """What `one(shared, place)` gives for each place, stacked; places are shared out over the devices."""

    def device(shared: Any, places: Any) -> Result:
        return lax.map(partial(one, shared), places, batch_size=batch if batch > 1 else None)

    axis = mesh.axis_names[0]
    mapped = jax.shard_map(device, mesh=mesh, in_specs=(P(), P(axis)), out_specs=P(axis), check_vma=False)
    return mapped(shared, places)
