"""Personal and global evaluation: sums over all examples of a shard, whatever the batches."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import priory
from priory import evaluate
from priory.core import rng
from priory.core.rng import Stream
from priory.core.struct import replace, struct
from priory.evaluate import ClientSlot, EvaluationContext
from priory.fed.method import Task, point
from priory.fed.shard import Pool, Shard
from priory.models.likelihood import Categorical, Gaussian
from priory.models.model import Head, Params, parse

NUM = 40
ROOT = rng.root(0)


def task(outputs: int = 3) -> Task:
    likelihood = Categorical(outputs) if outputs > 1 else Gaussian(0.5)
    model = parse("linear", input_shape=(2,), num_outputs=outputs)
    return Task(model, likelihood, (2,), 4, 40, Head(model.last_layer((2,))))


CLASSES, NUMBERS = task(), task(outputs=1)


@cache
def shard(count: int = NUM, classes: int | None = 3, start: int = 3) -> Shard:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(NUM + 6, 2)).astype(np.float32)
    y = draw.integers(classes, size=NUM + 6) if classes else x[:, 0].astype(np.float32)
    pool = Pool(jnp.asarray(x), jnp.asarray(y), None, jnp.zeros(()), jnp.ones(()))
    return Shard(pool, jnp.array([start]), jnp.array([count]), NUM)


@struct
class Visits:
    """A client's state is how often it was called and the value at which it enrolled."""

    def init_client(self, task: Any, down: Any, key: Any) -> dict[str, Any]:
        return {"calls": jnp.int32(0), "since": down}

    def client_update(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> tuple:
        return client | {"calls": client["calls"] + 1}, None, {}

    def personalise(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> Any:
        return client

    def predict(self, task: Any, posterior: Any, x: Any, key: Any) -> Any:
        return point(jax.random.normal(key, (x.shape[0], 3)))


@partial(jax.jit, static_argnames=("verb", "size", "batches"))
def ask(verb: str, size: int, problem: Task, *args: Any, **more: Any) -> Any:
    """Evaluate FedAvg by a function of `evaluate`, with batches of the given size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "TEST_BATCH", size)
        return getattr(evaluate, verb)(priory.FedAvg(), problem, *args, **more)


@cache
def first(problem: Task) -> tuple[Params, Any]:
    """The first network, and what it says of the rows of a shard."""
    params = jax.jit(problem.init)(jax.random.key(1))
    return params, np.asarray(problem.model.apply(params, shard().pool.x[3 : 3 + NUM])[0], np.float64)


def key() -> Any:
    return jax.random.key(0)


@pytest.mark.parametrize("size", [7, 40, 256])
def test_a_tally_counts_every_test_example_once(size):
    params, outputs = first(CLASSES)
    found = ask("tally", size, CLASSES, params, shard(), key())
    log_probs, y = log_softmax(outputs, axis=-1), np.asarray(shard().pool.y[3 : 3 + NUM])
    assert int(found.count) == NUM
    assert int(found.correct) == np.sum(log_probs.argmax(-1) == y)
    np.testing.assert_allclose(found.nll, -log_probs[np.arange(NUM), y].sum(), rtol=1e-5)


def test_a_tally_of_a_regression_adds_squared_errors():
    params, outputs = first(NUMBERS)
    found = ask("tally", 7, NUMBERS, params, shard(classes=None), key())
    y = np.asarray(shard(classes=None).pool.y[3 : 3 + NUM])
    assert int(found.count) == NUM
    np.testing.assert_allclose(found.squared_error, np.sum((outputs[:, 0] - y) ** 2), rtol=1e-5)


def test_a_client_without_test_examples_counts_nothing():
    found = ask("tally", 40, CLASSES, first(CLASSES)[0], shard(count=0), key())
    assert all(np.sum(leaf) == 0 for leaf in jax.tree.leaves(found))


def test_a_client_that_joined_keeps_its_state_and_another_is_enrolled_now():
    method, kept = Visits(), {"calls": jnp.int32(5), "since": jnp.float32(1)}
    for joined, expected in ((True, (5, 1.0)), (False, (0, 9.0))):
        context = EvaluationContext(method, method, None, jnp.float32(9), ROOT, jnp.int32(0))
        found = evaluate.current_state(context, ClientSlot(jnp.int32(0), jnp.bool_(joined), kept))
        assert (int(found["calls"]), float(found["since"])) == expected


def test_a_client_is_enrolled_for_evaluation_as_it_would_be_in_a_round():
    method = priory.FedRep()

    @jax.jit
    def both() -> tuple[Any, Any]:
        down = method.broadcast(method.init_server(CLASSES, jax.random.key(1)))
        in_a_round = method.init_client(CLASSES, down, rng.key(ROOT, Stream.ENROL, 2))
        blank = jax.tree.map(jnp.zeros_like, in_a_round)
        context = EvaluationContext(method, method, CLASSES, down, ROOT, jnp.int32(0))
        return evaluate.current_state(context, ClientSlot(jnp.int32(2), jnp.bool_(False), blank)), in_a_round

    for one, other in zip(*map(jax.tree.leaves, both()), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("visits", [0, 1, 3])
def test_onboarding_visits_a_client_so_often(visits):
    client = {"calls": jnp.int32(0), "since": jnp.float32(0)}
    context = EvaluationContext(Visits(), Visits(), None, jnp.float32(0), ROOT, jnp.int32(0))
    found = evaluate.personal_posterior(context, client, shard(), jax.random.key(0), visits=visits)
    assert int(found["calls"]) == visits


def test_every_test_batch_draws_anew(monkeypatch):
    monkeypatch.setattr(evaluate, "TEST_BATCH", 1)
    twice = Shard(shard().pool, jnp.array([0, 0]), jnp.array([1, 1]), 2)  # the same example two times
    seen = []
    monkeypatch.setattr(evaluate, "tally_batch", lambda task, predictive, batch: seen.append(predictive) or zero())

    def zero():
        return evaluate.metrics.zero(evaluate.Tally)

    with jax.disable_jit():
        evaluate.tally(Visits(), CLASSES, None, twice, jax.random.key(0))
    assert len(seen) == 2
    assert (seen[0].outputs != seen[1].outputs).all()


def entropy(outputs: np.ndarray) -> np.ndarray:
    log_probs = log_softmax(outputs, axis=-1)
    return -np.sum(np.exp(log_probs) * log_probs, axis=-1)


@pytest.mark.parametrize("size", [7, 256])
def test_uncertainty_is_the_mean_entropy_of_what_is_predicted_and_reads_no_label(size):
    params, outputs = first(CLASSES)
    unlabelled = replace(shard(), pool=replace(shard().pool, y=None))
    found = ask("mean_uncertainty", size, CLASSES, params, unlabelled, key())
    np.testing.assert_allclose(found, entropy(outputs).mean(), rtol=1e-5)


def test_uncertainty_of_a_point_in_a_regression_is_the_noise():
    found = ask("mean_uncertainty", 256, NUMBERS, first(NUMBERS)[0], shard(classes=None), key())
    np.testing.assert_allclose(found, 0.5, rtol=1e-6)


def test_a_client_without_held_out_examples_has_no_uncertainty():
    assert np.isnan(ask("mean_uncertainty", 256, CLASSES, first(CLASSES)[0], shard(count=0), key()))


@pytest.mark.parametrize("size", [7, 40, 256])
def test_rows_are_of_every_example_in_its_order(size):
    params, outputs = first(CLASSES)
    found = ask("rows_of", size, CLASSES, params, key(), shard(), batches=-(-NUM // size))
    np.testing.assert_allclose(found.log_probs[:NUM], log_softmax(outputs, axis=-1), rtol=1e-5, atol=1e-6)


def test_two_sure_components_that_disagree_are_all_epistemic():
    outputs = np.array([[[50.0, -50.0, -50.0]], [[-50.0, 50.0, -50.0]]], np.float32)
    mixture = evaluate.Predictive(outputs, np.log(np.full((2, 1), 0.5, np.float32)))
    batch = evaluate.Batch(np.zeros((1, 2), np.float32), None, None, np.ones(1, np.float32))
    aleatoric, epistemic = jax.jit(evaluate.split_of_batch)(CLASSES, mixture, batch)
    np.testing.assert_allclose(aleatoric, 0.0, atol=1e-6)
    np.testing.assert_allclose(epistemic, np.log(2), rtol=1e-6)


def test_doubts_about_inputs_read_no_label_and_leave_padding_out():
    params, outputs = first(CLASSES)
    unlabelled = replace(shard(), pool=replace(shard().pool, y=None))
    found = ask("doubts_of", 7, CLASSES, params, key(), unlabelled)
    np.testing.assert_allclose(found[0], entropy(outputs), rtol=1e-5)
    np.testing.assert_array_equal(found[1], np.zeros(NUM))


def test_a_client_without_test_examples_is_not_personalised():
    asked = []

    @struct
    class Asks(priory.FedAvg):
        """FedAvg that tells whom it personalises."""

        def personalise(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> Any:
            jax.debug.callback(lambda start: asked.append(int(start)), data.start[0])
            return super().personalise(task, down, client, data, key)

    x, y = np.random.default_rng(0).normal(size=(12, 2)), np.arange(12) % 2
    federation = priory.data.from_arrays(x, y, np.repeat(["a", "b", "c"], [1, 10, 1]), test=0.2)
    assert federation.test.count.tolist() == [0, 2, 0]
    run = priory.simulate(Asks(), federation, rounds=1, model="linear", eval_every=0)
    jax.effects_barrier()
    assert asked == [federation.train.start[1]]
    assert np.isnan(run.personal.per_client["accuracy"]).tolist() == [True, False, True]
