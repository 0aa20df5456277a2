"""Personal, global and newcomer evaluation of any method: personalise → predict → score, one client after another.

The whole path is one mapped function that returns sums, so no posterior is ever stacked over clients. The evidence of a
method that bounds log p(D) goes the same way, and so does what is said of each example, where sums do not do.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from priory.fed.capabilities import Draws, Evidence, SharedModel, Unlabelled
from priory.fed.method import Method, Predictive, Task
from priory.fed.shard import Batch, Shard, Shards
from priory.fed.visit import RoundContext
from priory.metrics import RegressionTally, Tally
from priory.models.likelihood import Categorical
from priory.models.model import Params

TEST_BATCH = 256
LEVELS = (0.5, 0.8, 0.9, 0.95)  # of the central intervals of a regression
BESIDE = 1 << 16  # sets keys apart from those of the evaluation, which splits its key in three
Result = TypeVar("Result")


@struct
class EvaluationContext:
    """Everything that an evaluation needs besides the clients and their examples.

    Attributes:
        method: As it personalises and predicts.
        settled: As the schedules left it: a newcomer's updates run this one.
        task: The problem.
        down: What is broadcast now.
        root: Key of the run.
        t: Rounds done.
    """

    method: Method
    settled: Method
    task: Task
    down: Any
    root: Key
    t: Array


@struct
class ClientSlot:
    """A client that is evaluated, or several, stacked.

    Attributes:
        id: Its number among all clients.
        joined: Whether it has a state; one that has not is enrolled.
        state: What it keeps, in the form of the task's network.
    """

    id: Array
    joined: Array
    state: Any


@dataclass(frozen=True)
class Layout:
    """How clients are shared out: over the devices of a mesh, each of which takes `batch` clients at once."""

    mesh: Mesh
    batch: int = 1

    def map(self, one: Callable[[Any, ClientSlot], Result], shared: Any, slots: ClientSlot) -> Result:
        """Return `one(shared, slot)` of every slot, stacked."""

        def device(shared: Any, slots: ClientSlot) -> Result:
            return lax.map(partial(one, shared), slots, batch_size=self.batch if self.is_batched else None)

        axis = self.mesh.axis_names[0]
        mapped = jax.shard_map(device, mesh=self.mesh, in_specs=(P(), P(axis)), out_specs=P(axis), check_vma=False)
        return mapped(shared, slots)

    @property
    def is_batched(self) -> bool:
        """Whether clients run under a `vmap`."""
        return self.batch > 1


@struct
class ClientTallies:
    """Sums for each client, (clients, ...).

    Attributes:
        personal: Of the client's own posterior.
        population: Of the global model, None if the method has none.
        unlabelled: Of the posterior from a newcomer's inputs alone; None if the method has none, and for participants.
    """

    personal: Tally | RegressionTally
    population: Tally | RegressionTally | None = None
    unlabelled: Tally | RegressionTally | None = None


@partial(jax.jit, static_argnames=("layout", "onboard_visits"))
def tally_clients(
    context: EvaluationContext,
    train: Shards,
    held: Shards,
    slots: ClientSlot,
    *,
    layout: Layout,
    onboard_visits: int | None = None,
) -> ClientTallies:
    """The tallies of the clients on their held-out examples, their slots stacked and shared out over the devices.

    Args:
        onboard_visits: None for clients that took part. For newcomers, how often each runs `client_update`, its message
            discarded, before it is personalised. The global model sees none of a newcomer's data, and what its inputs
            alone give is scored as well.
    """

    def one(shared: tuple[EvaluationContext, Shards, Shards], slot: ClientSlot) -> ClientTallies:
        context, train, held = shared
        test = held.of(slot.id)

        @partial(jax.jit, inline=True)  # traced once, for its shapes and for its work
        def tallies() -> ClientTallies:
            data = train.of(slot.id)
            parts = evaluated_parts(context, slot, data, onboard_visits=onboard_visits, batched=layout.is_batched)
            return tally_parts(context, parts, test)

        # No posterior is computed for nothing: of a million small clients many have no test examples.
        nothing = trees.zeros(jax.eval_shape(tallies))
        return trees.either(test.count > 0, tallies, lambda: nothing, batched=layout.is_batched)

    return layout.map(one, (context, train, held), slots)


def tally_parts(context: EvaluationContext, parts: dict[str, tuple[Any, Key]], test: Shard) -> ClientTallies:
    """The tallies of one client on its held-out examples, from the result of `evaluated_parts`."""
    method, task = context.method, context.task
    return ClientTallies(
        **{part: tally(method, task, posterior, test, key) for part, (posterior, key) in parts.items()}
    )


@struct
class ClassRows:
    """What a predictive mixture says of each example, (examples, ...).

    Attributes:
        log_probs: Of each class, (examples, classes).
        aleatoric: Mean entropy of the components, nats.
        epistemic: Mutual information, nats; the entropy of the mixture is the sum of the two.
    """

    log_probs: Array
    aleatoric: Array
    epistemic: Array


@struct
class TargetRows:
    """What a predictive mixture says of each example of a regression, (examples, ...).

    Attributes:
        mean: Of the target.
        aleatoric: √Σ_s w_s sd_s².
        epistemic: √Σ_s w_s (mean_s − mean)².
        cdf: The distribution function at y.
        nll: −log p(y | x).
        low: Lower ends of the central intervals, (examples, levels).
        high: Upper ends.
    """

    mean: Array
    aleatoric: Array
    epistemic: Array
    cdf: Array
    nll: Array
    low: Array
    high: Array


Rows = ClassRows | TargetRows


@struct
class ClientRows:
    """Rows of each client, (clients, rows, ...); those past its examples mean nothing.

    Attributes:
        test: By the part's name in `ClientTallies`.
        validation: Likewise; empty where nobody has validation examples.
        foreign: Uncertainty of the personal model about inputs from elsewhere, all of it and its epistemic part,
            (clients, 2, rows); None where there are none.
    """

    test: dict[str, Rows]
    validation: dict[str, Rows]
    foreign: Array | None


@partial(jax.jit, static_argnames=("batches", "layout", "onboard_visits"))
def rows_of_clients(
    context: EvaluationContext,
    data: tuple[Shards, Shards, Shards],
    foreign: Shard | None,
    slots: ClientSlot,
    *,
    batches: int,
    layout: Layout,
    onboard_visits: int | None = None,
) -> ClientRows:
    """The rows of the clients on their test and validation examples; the other arguments as above.

    Posteriors, keys and batches of the test rows are those of `tally_clients`, so that the scores of both agree.

    Args:
        data: Training, test and validation examples.
        foreign: Inputs from elsewhere, the same for all.
        batches: As many as the largest of these clients has of test or validation rows.
    """

    def one(shared: tuple, slot: ClientSlot) -> ClientRows:
        context, data, foreign = shared
        own, test, validation = (shards.of(slot.id) for shards in data)
        parts = evaluated_parts(context, slot, own, onboard_visits=onboard_visits, batched=layout.is_batched)
        method, task = context.method, context.task
        key = rng.key(context.root, Stream.EVALUATION, context.t, slot.id, BESIDE)
        key_foreign, *keys = jax.random.split(key, 1 + len(parts))
        beside = {part: (made[0], key) for (part, made), key in zip(parts.items(), keys, strict=True)}
        beside = beside if validation.capacity else {}
        return ClientRows(
            {part: rows_of(method, task, *made, test, batches) for part, made in parts.items()},
            {part: rows_of(method, task, *made, validation, batches) for part, made in beside.items()},
            None if foreign is None else doubts_of(method, task, parts["personal"][0], key_foreign, foreign),
        )

    return layout.map(one, (context, data, foreign), slots)


@partial(jax.jit, static_argnames="layout")
def evidence_of_clients(context: EvaluationContext, train: Shards, slots: ClientSlot, *, layout: Layout) -> Array:
    """The evidence of each client in nats, (clients,), their slots stacked and shared out over the devices.

    The q_k of a client is that of one `client_update` from the final broadcast, whose message is not sent: a client
    that missed the last round is treated as one that did not, and the bound holds for any q_k.
    """

    def one(shared: tuple[EvaluationContext, Shards], slot: ClientSlot) -> Array:
        context, train = shared
        settled, task, down = context.settled, context.task, context.down
        assert isinstance(settled, Evidence)
        key_update, key_evidence = jax.random.split(rng.key(context.root, Stream.EVIDENCE, context.t, slot.id))
        data = train.of(slot.id)
        state = current_state(context, slot, method=settled, batched=layout.is_batched)
        _, message, _ = settled.client_update(task, down, state, data, key_update)
        return settled.client_evidence(task, down, message.payload, data, key_evidence)

    return layout.map(one, (context, train), slots)


@jax.jit
def evidence_of_server(settled: Evidence, task: Task, down: Any) -> Array:
    """The evidence that belongs to no client, −KL(q(φ) ‖ p(φ)) in nats."""
    return settled.server_evidence(task, down)


@partial(jax.jit, static_argnames=("num", "layout"))
def draws_of_clients(
    context: EvaluationContext, train: Shards, slots: ClientSlot, *, num: int, layout: Layout
) -> Params:
    """So many networks of each client's posterior, leaves (clients, num, ...); for methods with `Draws`."""

    def one(shared: tuple[EvaluationContext, Shards], slot: ClientSlot) -> Params:
        context, train = shared
        posterior, key, _ = evaluated_posterior(context, slot, train.of(slot.id), batched=layout.is_batched)
        assert isinstance(context.method, Draws)
        return context.method.draws(context.task, posterior, key, num)

    return layout.map(one, (context, train), slots)


def evaluated_posterior(
    context: EvaluationContext, slot: ClientSlot, data: Shard, *, visits: int = 0, batched: bool
) -> tuple[Any, Key, Key]:
    """The posterior of a client with these training examples, and keys for what is done with it."""
    keys = jax.random.split(rng.key(context.root, Stream.EVALUATION, context.t, slot.id), 3)
    key_post, key_personal, key_global = keys
    state = current_state(context, slot, batched=batched)
    posterior = personal_posterior(context, state, data, key_post, visits=visits)
    return posterior, key_personal, key_global


def evaluated_parts(
    context: EvaluationContext, slot: ClientSlot, data: Shard, *, onboard_visits: int | None = None, batched: bool
) -> dict[str, tuple[Any, Key]]:
    """Everything that is scored of a client, by its name in `ClientTallies`: posterior and key."""
    method, task, down, is_new = context.method, context.task, context.down, onboard_visits is not None
    posterior, key_personal, key_global = evaluated_posterior(
        context, slot, data, visits=onboard_visits or 0, batched=batched
    )
    parts = {"personal": (posterior, key_personal)}
    if is_new and isinstance(method, Unlabelled):
        key_global, key_infer, key_inferred = jax.random.split(key_global, 3)
        parts["unlabelled"] = (method.infer(task, down, inputs_of(data), key_infer), key_inferred)
    if isinstance(method, SharedModel):
        key_choice, key_draw = jax.random.split(key_global)
        parts["population"] = (method.population(task, down, None if is_new else data, key_choice), key_draw)
    return parts


def current_state(
    context: EvaluationContext, slot: ClientSlot, *, method: Method | None = None, batched: bool = False
) -> Any:
    """The state of a client, or that of its first contact if it has not joined."""
    method, key = method or context.method, rng.key(context.root, Stream.ENROL, slot.id)
    enrolled = partial(method.init_client, context.task, context.down, key)
    return trees.either(slot.joined, lambda: slot.state, enrolled, batched=batched)


def personal_posterior(context: EvaluationContext, state: Any, data: Shard, key: Key, *, visits: int = 0) -> Any:
    """The posterior of a client after so many updates of the `settled` method, whose messages are not sent."""
    task, down = context.task, context.down
    key_visit, key_post = jax.random.split(key)

    def visit(i: Array, state: Any) -> Any:
        return context.settled.client_update(task, down, state, data, jax.random.fold_in(key_visit, i))[0]

    if visits:  # a loop without a trip would be traced and compiled all the same
        state = lax.fori_loop(0, visits, visit, state)
    return context.method.personalise(task, down, state, data, key_post)


def inputs_of(data: Shard) -> Shard:
    """The shard without labels and their standard errors, so that nobody can read them."""
    return replace(data, pool=replace(data.pool, y=None, scale=None))


def tally(method: Method, task: Task, posterior: Any, data: Shard, key: Key) -> Tally | RegressionTally:
    """The sums over all examples of a shard, a batch at a time."""
    zero = metrics.zero(Tally) if _has_classes(task) else metrics.zero(RegressionTally)

    def step(total: Any, batch: Batch, key: Key) -> Any:
        predictive = method.predict(task, posterior, batch.x, key)
        return metrics.add(total, tally_batch(task, predictive, batch))

    return _over_batches(step, zero, data, key)


def rows_of(method: Method, task: Task, posterior: Any, key: Key, data: Shard, batches: int) -> Rows:
    """The rows of all examples of a shard that has at most so many batches, a batch at a time, as in `tally`."""
    size = batch_size(data.capacity)

    def rows(batch: Batch, key: Key) -> Rows:
        return rows_of_batch(task, method.predict(task, posterior, batch.x, key), batch)

    # The shapes alone; the key is one that nobody else uses.
    shapes = jax.eval_shape(rows, data.take(jnp.arange(size), jnp.int32(0), size), jax.random.key(0))
    start = jax.tree.map(lambda leaf: jnp.zeros((batches * size, *leaf.shape[1:]), leaf.dtype), shapes)

    def step(total: Rows, batch: Batch, key: Key, i: Array) -> Rows:
        write = partial(lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
        return jax.tree.map(write, total, rows(batch, key))

    return _over_numbered_batches(step, start, data, key)


def doubts_of(method: Method, task: Task, posterior: Any, key: Key, data: Shard) -> Array:
    """Uncertainty about every input of a shard, (2, capacity): all of it, and its epistemic part; reads no label."""
    size = batch_size(data.capacity)

    def one(i: Array) -> Array:
        batch = data.take(jnp.arange(max(1, data.capacity)), i, size)
        predictive = method.predict(task, posterior, batch.x, jax.random.fold_in(key, i))
        aleatoric, epistemic = split_of_batch(task, predictive, batch)
        both = aleatoric + epistemic if _has_classes(task) else jnp.hypot(aleatoric, epistemic)
        return jnp.stack([both, epistemic])

    found = lax.map(one, jnp.arange(-(-data.capacity // size)))
    return jnp.concatenate(found, axis=-1)[:, : data.capacity]


def rows_of_batch(task: Task, predictive: Predictive, batch: Batch) -> Rows:
    """The rows of a batch."""
    assert batch.y is not None
    aleatoric, epistemic = split_of_batch(task, predictive, batch)
    if _has_classes(task):
        log_probs = metrics.mixture_log_probs(predictive.outputs, predictive.log_weights)
        return ClassRows(log_probs, aleatoric, epistemic)
    mixture = (*_mean_and_scale(task, predictive, batch), predictive.log_weights)
    levels = jnp.array([0.5 + side * level / 2 for side in (-1, 1) for level in LEVELS])
    # One level after another: a mixture may have thousands of components.
    low, high = jnp.split(lax.map(lambda level: metrics.mixture_quantile(level, *mixture), levels).T, 2, axis=1)
    return TargetRows(
        mean=metrics.mixture_mean_and_sd(*mixture)[0],
        aleatoric=aleatoric,
        epistemic=epistemic,
        cdf=metrics.mixture_cdf(batch.y, *mixture),
        nll=metrics.mixture_nll(batch.y, *mixture),
        low=low,
        high=high,
    )


def split_of_batch(task: Task, predictive: Predictive, batch: Batch) -> tuple[Array, Array]:
    """Aleatoric and epistemic uncertainty of each row, (batch,): nats that add up, or sds whose squares do."""
    if not _has_classes(task):
        return metrics.mixture_sds(*_mean_and_scale(task, predictive, batch), predictive.log_weights)
    own = metrics.entropy(jax.nn.log_softmax(predictive.outputs, axis=-1))
    weights = jnp.exp(predictive.log_weights)
    return (
        jnp.sum(jnp.where(weights == 0, 0.0, weights * own), axis=0),
        metrics.mutual_information(predictive.outputs, predictive.log_weights),
    )


def own_uncertainty(context: RoundContext, train: Shards, held: Shards, client_id: Array, client: Any) -> Array:
    """The mean uncertainty of a client's own posterior over its held-out inputs, as its state is in this round."""
    method, task, down = context.method, context.task, context.down
    key_post, key_predict = jax.random.split(rng.key(context.root, Stream.CONFIDENCE, context.t, client_id))
    posterior = method.personalise(task, down, client, train.of(client_id), key_post)
    return mean_uncertainty(method, task, posterior, held.of(client_id), key_predict)


def mean_uncertainty(method: Method, task: Task, posterior: Any, data: Shard, key: Key) -> Array:
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
    if _has_classes(task):
        log_probs = metrics.mixture_log_probs(predictive.outputs, predictive.log_weights)
        return metrics.tally_classification(log_probs, batch.y, batch.mask)
    mean, sd = _mean_and_scale(task, predictive, batch)
    return metrics.tally_regression(mean, sd, predictive.log_weights, batch.y, batch.mask)


def uncertainty_of_batch(task: Task, predictive: Predictive, batch: Batch) -> Array:
    """The uncertainty of the predictive for each row, (batch,)."""
    if _has_classes(task):
        return metrics.entropy(metrics.mixture_log_probs(predictive.outputs, predictive.log_weights))
    return metrics.mixture_mean_and_sd(*_mean_and_scale(task, predictive, batch), predictive.log_weights)[1]


def _mean_and_scale(task: Task, predictive: Predictive, batch: Batch) -> tuple[Array, Array]:
    scale = None if batch.scale is None else jnp.broadcast_to(batch.scale, predictive.outputs.shape[:-1])
    return task.likelihood.mean_and_scale(predictive.outputs, scale)  # type: ignore[attr-defined]


def _over_batches(step: Callable[[Result, Batch, Key], Result], start: Result, data: Shard, key: Key) -> Result:
    """What `step(total, batch, key)` makes of all examples of a shard, a batch at a time."""
    return _over_numbered_batches(lambda total, batch, key, i: step(total, batch, key), start, data, key)


def _over_numbered_batches(
    step: Callable[[Result, Batch, Key, Array], Result], start: Result, data: Shard, key: Key
) -> Result:
    size = batch_size(data.capacity)
    order = jnp.arange(max(1, data.capacity))

    def one(i: Array, total: Result) -> Result:
        return step(total, data.take(order, i, size), jax.random.fold_in(key, i), i)

    return lax.fori_loop(0, data.num_batches(size), one, start)


def batch_size(capacity: int) -> int:
    """Examples predicted at once, where the largest client has `capacity`."""
    return max(1, min(TEST_BATCH, capacity))


def _has_classes(task: Task) -> bool:
    return isinstance(task.likelihood, Categorical)
