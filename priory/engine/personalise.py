"""Personal models out of a run: of a client that took part, and of one that comes later with whatever it has."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from priory import methods
from priory.certificate import TOOK_PART
from priory.core import rng
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.engine.certified import WITHOUT_LABELS, Basis, basis_of
from priory.engine.evaluator import Evaluator
from priory.engine.personal import PersonalModel, Source, Verb
from priory.evaluate import ClientSlot, EvaluationContext, evaluated_posterior
from priory.fed.capabilities import SharedModel, Unlabelled
from priory.fed.method import Task
from priory.fed.shard import Shard, Shards
from priory.uncertainty import validation_of


def participant(evaluator: Evaluator, index: int) -> PersonalModel:
    """Return the model of a participant, its prediction sets calibrated on its validation rows."""
    ready = evaluator.ready
    model = _personalised(evaluator, _shard(ready.train, index), index, TOOK_PART)
    if ready.settings.exclude_uncertain:  # these rows have chosen whose updates count
        return model
    return model.calibrated_on(_shard(validation_of(ready.federation, ready.test), index))


def newcomer(evaluator: Evaluator, data: Shard, group: np.ndarray | None) -> PersonalModel:
    """Return the model of a client that comes later with labelled rows; it learns as a participant would."""
    place = len(evaluator.ready.federation.clients)
    return _personalised(
        evaluator, data, place, basis_of(evaluator, data, place, group), evaluator.ready.settings.onboard_visits
    )


def without_labels(evaluator: Evaluator, data: Shard) -> PersonalModel:
    """Return the model of a client that comes later with inputs alone; that of the population if these are no use."""
    ready = evaluator.ready
    if not isinstance(ready.method, Unlabelled):
        return without_rows(evaluator, "labels", "y as well")
    key_infer, key_predict = _keys_of_newcomer(evaluator)
    posterior = _infer(ready.method, ready.task, ready.method.broadcast(evaluator.server), data, key_infer)
    return _model(evaluator, ready.task, posterior, key_predict, "infer", WITHOUT_LABELS)


def without_rows(evaluator: Evaluator, lacking: str, remedy: str) -> PersonalModel:
    """Return the model of the population, for a client that has nothing that the method can learn from."""
    ready = evaluator.ready
    if not isinstance(ready.method, SharedModel):
        name = methods.name_of(ready.method)
        raise UsageError(
            f"{name} has nothing for a client without {lacking}, since it has no global model; give {remedy}."
        )
    key_choice, key_predict = _keys_of_newcomer(evaluator)
    posterior = ready.method.population(ready.task, ready.method.broadcast(evaluator.server), None, key_choice)
    return _model(evaluator, ready.task, posterior, key_predict, "population", WITHOUT_LABELS)


def _personalised(evaluator: Evaluator, data: Shard, place: int, basis: Basis | str, visits: int = 0) -> PersonalModel:
    context, slot = evaluator.context(evaluator.ready.task_of(place)), evaluator.slot(place)
    posterior, key = _posterior(context, slot, data, visits=visits)
    return _model(evaluator, context.task, posterior, key, "personalise", basis, place)


def _model(
    evaluator: Evaluator,
    task: Task,
    posterior: Any,
    key: Key,
    verb: Verb,
    basis: Basis | str,
    place: int | None = None,
) -> PersonalModel:
    """Return the model of the client at a place, which is past the end for one that comes later."""
    ready = evaluator.ready
    names, method = ready.federation.clients, methods.name_of(ready.method)
    client = names[place] if place is not None and place < len(names) else None
    source = Source(method, verb, ready.model_text(place or 0), client, evaluator.completed)
    return PersonalModel(ready.method, task, posterior, ready.federation.form, key, source, basis=basis)


def _keys_of_newcomer(evaluator: Evaluator) -> tuple[Key, Key]:
    """Return a key for the posterior and one for predictions; a newcomer takes the next free number."""
    return _two_keys(evaluator.ready.root, evaluator.completed, len(evaluator.ready.federation.clients))


def _shard(shards: Shards, client: int) -> Shard:
    """Return the shard of one client, outside of any program."""
    start, lengths = _run_of(shards.start, shards.count, client)
    return Shard(shards.pool, start, lengths, shards.capacity)


@jax.jit
def _run_of(start: Array, count: Array, client: Array) -> tuple[Array, Array]:
    return start[client][None], count[client][None]


@jax.jit
def _two_keys(root: Key, t: Array, place: Array) -> tuple[Key, Key]:
    one, other = jax.random.split(rng.key(root, Stream.EVALUATION, t, place))
    return one, other


@jax.jit
def _infer(method: Unlabelled, task: Task, down: Any, data: Shard, key: Key) -> Any:
    return method.infer(task, down, data, key)


@partial(jax.jit, static_argnames="visits")
def _posterior(context: EvaluationContext, slot: ClientSlot, data: Shard, *, visits: int) -> tuple[Any, Key]:
    return evaluated_posterior(context, slot, data, visits=visits, batched=False)[:2]
