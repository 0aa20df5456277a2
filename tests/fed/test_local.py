"""Local work: what the loop over minibatches sees, and where the optimisers end."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from priory.core.errors import UsageError
from priory.fed.local import Optimiser, Pull, Work, each_batch, fit, total_nll
from priory.fed.method import Task
from priory.fed.shard import Pool, Shard
from priory.models import Head, as_model
from priory.models.likelihood import Gaussian
from priory.models.model import Params

NUM = 12


def shard(count=10, start=1, capacity=NUM):
    """Rows that tell their number; a few before and after belong to others."""
    x = np.arange(NUM, dtype=np.float32)[:, None]
    pool = Pool(x, np.zeros(NUM, np.float32), None, np.float32(0), np.float32(1))
    return Shard(pool, np.int32([start]), np.int32([count]), capacity)


@jax.jit
def _tallied(data, work, key):

    def step(carry, batch, key):
        del key
        seen, trips, sizes = carry
        seen = seen.at[batch.x[:, 0].astype(jnp.int32)].add(batch.mask)
        return seen, trips + 1, sizes.at[trips].set(jnp.sum(batch.mask))

    return each_batch(step, (jnp.zeros(NUM), jnp.int32(0), jnp.zeros(64)), data, work, key)


def tallied(data, work, seed=0):
    """How often every row was counted, the trips of the loop, and the rows that counted in each."""
    seen, trips, sizes = _tallied(data, work, jax.random.key(seed))
    return np.asarray(seen), int(trips), np.asarray(sizes)[: int(trips)].tolist()


@pytest.mark.parametrize("epochs", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 10, 32])
def test_every_epoch_sees_every_row_of_the_client_exactly_once(epochs, batch_size):
    seen, trips, _ = tallied(shard(), Work(epochs=epochs, batch_size=batch_size))
    np.testing.assert_array_equal(seen, [0, *[epochs] * 10, 0])
    assert trips == epochs * -(-10 // batch_size)


def test_an_epoch_ends_with_a_partial_batch():
    assert tallied(shard(), Work(epochs=3, batch_size=4))[2] == [4, 4, 2, 4, 4, 2, 4, 4, 2]


def test_a_small_client_costs_fewer_trips_than_the_largest():
    assert tallied(shard(count=4), Work(batch_size=4))[1] == 1
    assert tallied(shard(count=10), Work(batch_size=4))[1] == 3


def test_a_client_without_examples_costs_nothing():
    assert tallied(shard(count=0), Work(batch_size=4))[1] == 0


def test_epochs_differ_in_their_order():
    def step(carry, batch, key):
        del key
        order, place = carry
        return order.at[place].set(batch.x[0, 0]), place + 1

    def run(data, key):
        return each_batch(step, (jnp.zeros(20), jnp.int32(0)), data, Work(epochs=2, batch_size=1), key)[0]

    order = np.asarray(jax.jit(run)(shard(), jax.random.key(0)))
    assert order[:10].tolist() != order[10:].tolist()


def test_steps_override_epochs_and_draw_full_batches_of_own_rows():
    seen, trips, sizes = tallied(shard(), Work(epochs=9, steps=30, batch_size=4))
    assert (trips, set(sizes)) == (30, {4.0})
    assert (seen[[0, -1]] == 0).all()
    assert (seen[1:-1] > 0).all()


def test_every_step_gets_a_key_of_its_own():
    def step(carry, batch, key):
        del batch
        keys, place = carry
        return keys.at[place].set(jax.random.uniform(key)), place + 1

    run = jax.jit(lambda *args: each_batch(step, (jnp.zeros(9), jnp.int32(0)), *args)[0])
    for work in (Work(epochs=3, batch_size=4), Work(steps=9)):
        keys = run(shard(), work, jax.random.key(0))
        assert len(set(keys.tolist())) == 9


def quadratic_fit(optimiser, work, pull=None):
    """Where a fit of `quadratic` from −3 ends, and its loss."""
    start = Params({"w": np.float32(-3.0)}, {"steps": np.int32(0)})
    return jax.jit(lambda *args: fit(quadratic, *args, pull))(start, shard(), optimiser, work, jax.random.key(0))


def quadratic(params, batch, key):
    """½ mean (w − x)²; its minimum is the mean of the rows."""
    del key
    error = 0.5 * jnp.sum(batch.mask * (params.weights["w"] - batch.x[:, 0]) ** 2) / jnp.sum(batch.mask)
    return error, {"steps": params.stats["steps"] + 1}


def test_fitting_a_quadratic_reaches_the_closed_form_and_carries_statistics():
    params, loss = quadratic_fit(Optimiser(step_size=0.5), Work(epochs=40, batch_size=16))
    assert float(params.weights["w"]) == pytest.approx(5.5, abs=1e-4)
    assert int(params.stats["steps"]) == 40
    assert float(loss) > 0.5 * np.var(np.arange(1, 11))


def test_one_full_step_is_gradient_descent():
    params, loss = quadratic_fit(Optimiser(step_size=0.1), Work(batch_size=10))
    assert float(params.weights["w"]) == pytest.approx(-3.0 + 0.1 * 8.5, rel=1e-6)
    assert float(loss) == pytest.approx(0.5 * np.mean((np.arange(1, 11) + 3.0) ** 2), rel=1e-6)


@pytest.mark.parametrize(
    ("optimiser", "reference"),
    [
        (Optimiser("sgd", 0.1), optax.sgd(0.1)),
        (Optimiser("sgd", 0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
        (Optimiser("adam", 0.1), optax.adam(0.1)),
        (Optimiser("adam", 0.1, weight_decay=0.2), optax.adamw(0.1, weight_decay=0.2)),
        (Optimiser("rmsprop", 0.1), optax.rmsprop(0.1)),
        (Optimiser("sgd", 0.1, clip=0.5), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "rmsprop", "clip"],
)
def test_an_optimiser_takes_the_steps_of_its_namesake_in_optax(optimiser, reference):
    def path(weights, transform):
        state = transform.init(weights)
        for _ in range(5):
            updates, state = transform.update(jax.tree.map(lambda w: w**3, weights), state, weights)
            weights = optax.apply_updates(weights, updates)
        return weights["w"]

    found, expected = jax.jit(lambda weights: [path(weights, one) for one in (optimiser.build(), reference)])(
        {"w": np.float32([1.0, -2.0])}
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


HESSIAN, TARGET = np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([1.0, -2.0])
STRENGTH, CENTRE = np.array([0.5, 4.0]), np.array([2.0, 3.0])


@jax.jit
def _pulled(optimiser, strength, steps):
    hessian, target, centre = (jnp.asarray(numbers, jnp.float32) for numbers in (HESSIAN, TARGET, CENTRE))
    transform = optimiser.build(Pull(lambda _: {"w": centre}, {"w": strength}))

    def step(_, carry):
        weights, state, largest = carry
        updates, state = transform.update({"w": hessian @ (weights["w"] - target)}, state, weights)
        weights = optax.apply_updates(weights, updates)
        return weights, state, jnp.maximum(largest, jnp.max(jnp.abs(weights["w"])))

    start = {"w": jnp.array([-1.0, 5.0])}
    return jax.lax.fori_loop(0, steps, step, (start, transform.init(start), jnp.float32(0)))


def pulled(optimiser, strength=STRENGTH, steps=400):
    """Where gradient steps on ½(w − t)ᵀH(w − t) end beside a pull, and the largest weight on the way."""
    weights, _, largest = _pulled(optimiser, np.float32(strength), steps)
    return np.asarray(weights["w"], np.float64), float(largest)


SOLVERS = [
    Optimiser(step_size=0.1),
    Optimiser(step_size=0.05, momentum=0.9),
    Optimiser("adam", 0.02),
    Optimiser("rmsprop", 0.002),
]


@pytest.mark.parametrize("optimiser", SOLVERS, ids=["sgd", "momentum", "adam", "rmsprop"])
def test_a_pull_ends_where_its_penalty_and_the_loss_balance(optimiser):
    expected = np.linalg.solve(HESSIAN + np.diag(STRENGTH), HESSIAN @ TARGET + STRENGTH * CENTRE)
    found, _ = pulled(optimiser, steps=4000)
    # RMSprop goes on in steps of its rate.
    np.testing.assert_allclose(found, expected, atol=4e-3 if optimiser.kind == "rmsprop" else 1e-5)


@pytest.mark.parametrize("optimiser", SOLVERS[:2], ids=["sgd", "momentum"])
@pytest.mark.parametrize("product", [3.0, 1e3, 1e6], ids=str)
def test_a_pull_of_any_strength_is_stable(optimiser, product):
    strength = np.full(2, product / optimiser.step_size)
    found, largest = pulled(optimiser, strength)
    expected = np.linalg.solve(HESSIAN + np.diag(strength), HESSIAN @ TARGET + strength * CENTRE)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert largest < 5.0  # explicit steps of rate · strength > 2 would grow without end


def test_one_step_minimises_the_linearised_loss_with_the_penalty_exactly():
    start, rate = np.array([-1.0, 5.0]), 0.1
    gradient = HESSIAN @ (start - TARGET)
    # The minimum over w of gᵀw + ‖w − start‖²/(2 rate) + ½ Σ strength (w − centre)²: the derivative below is zero.
    found, _ = pulled(Optimiser(step_size=rate), steps=1)
    derivative = gradient + (found - start) / rate + STRENGTH * (found - CENTRE)
    np.testing.assert_allclose(derivative, 0, atol=2e-5)
    expected = (start - rate * gradient + rate * STRENGTH * CENTRE) / (1 + rate * STRENGTH)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def first_steps(cases):
    """The first step of each transform, with the gradient of a penalty added or not."""

    @jax.jit
    def steps(weights, gradient):
        found = []
        for transform, penalty in cases:
            slope = gradient if penalty is None else jax.tree.map(jnp.add, gradient, jax.grad(penalty)(weights))
            found.append(transform.update(slope, transform.init(weights), weights)[0])
        return found

    return steps({"w": np.float32([1.0, -2.0])}, {"w": np.float32([0.3, 0.1])})


def test_a_pull_without_strength_changes_no_step():
    optimiser = Optimiser(step_size=0.05, momentum=0.9)
    still = Pull(lambda _: {"w": np.float32([5.0, 5.0])}, {"w": np.float32(0)})  # one number for the leaf
    found, expected = first_steps([(optimiser.build(still), None), (optimiser.build(), None)])
    np.testing.assert_allclose(found["w"], expected["w"], atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_adaptive_optimisers_see_the_gradient_of_the_penalty(kind):
    strength, centre = np.float32(STRENGTH), np.float32(CENTRE)

    def penalty(weights):
        return 0.5 * jnp.sum(strength * (weights["w"] - centre) ** 2)

    pull = Pull(lambda _: {"w": centre}, {"w": strength})
    optimiser = Optimiser(kind, 0.1)
    found, expected = first_steps([(optimiser.build(pull), None), (optimiser.build(), penalty)])
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


def test_the_centre_of_a_pull_may_depend_on_where_the_weights_are():
    nearest = Pull(lambda weights: {"w": jnp.round(weights["w"])}, {"w": jnp.float32(1e6)})
    transform = Optimiser(step_size=0.1).build(nearest)
    weights, zeros = {"w": np.float32([0.2, 0.9, 3.4])}, {"w": np.zeros(3, np.float32)}
    updates, _ = jax.jit(lambda w: transform.update(zeros, transform.init(w), w))(weights)
    np.testing.assert_allclose(weights["w"] + np.asarray(updates["w"]), [0, 1, 3], atol=1e-4)


def test_a_fit_is_pulled_too():
    pull = Pull(lambda _: {"w": np.float32(-1.0)}, {"w": np.float32(3.0)})
    params, loss = quadratic_fit(Optimiser(step_size=0.1), Work(epochs=200, batch_size=16), pull)
    assert float(params.weights["w"]) == pytest.approx((5.5 - 3.0) / 4, abs=1e-5)
    # The reported loss leaves the pull out.
    assert float(loss) == pytest.approx(0.5 * np.mean((np.arange(1, 11) - 0.625) ** 2), rel=0.05)


def linear_task():
    """Outputs w·x, targets 0, a Gaussian of width 2."""
    model = as_model((lambda key, shape: {"w": jnp.zeros(())}, lambda weights, x: weights["w"] * x))
    return Task(model, Gaussian(2.0), (1,), 1, NUM, Head(""))


@partial(jax.jit, static_argnums=1)
def nll_of_all(data, batch_size):
    return total_nll(linear_task(), Params({"w": jnp.float32(0.3)}), data, batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 64])
def test_the_total_is_that_of_every_row_of_the_client_once(batch_size):
    rows = np.arange(1.0, 11.0)
    expected = np.sum(0.5 * (0.3 * rows / 2) ** 2 + np.log(2) + 0.5 * np.log(2 * np.pi))
    total = nll_of_all(shard(), batch_size)
    assert float(total) == pytest.approx(expected, rel=1e-6)


def test_the_total_of_no_rows_is_zero():
    assert float(nll_of_all(shard(count=0), 3)) == 0


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (Optimiser(step_size=0.0), r"step-size=0.0 is not a positive number; choose one above 0"),
        (Optimiser(step_size=float("nan")), r"step-size=nan is not a positive number"),
        (Optimiser(weight_decay=-0.1), r"weight-decay=-0.1 is out of range; choose 0 or more"),
        (Optimiser(momentum=1.0), r"momentum=1.0 lies outside \[0, 1\); choose one such as 0.9"),
        (Optimiser("adam", momentum=0.9), r"momentum=0.9 belongs to sgd, not to adam; leave it at 0"),
        (Optimiser(clip=0.0), r"clip=0.0 is not a positive number"),
        (Work(epochs=-1), r"epochs=-1 is out of range; choose 0 or more"),
        (Work(steps=0), r"steps=0 is out of range; choose 1 or more"),
        (Work(batch_size=0), r"batch-size=0 is out of range; choose 1 or more"),
    ],
)
def test_a_bad_value_ends_in_a_sentence(what, sentence):
    with pytest.raises(UsageError, match=sentence):
        what.check()


def test_the_defaults_are_good():
    Optimiser().check()
    Work().check()


def test_epochs_beside_steps_are_refused():
    with pytest.raises(UsageError, match=r"^epochs=5 has no effect beside steps=20; add steps=None .*\.$"):
        Work(epochs=5, steps=20).check()
    Work(epochs=5, steps=None).check()
