"""Two distributions in turn: the steps of the printed algorithm, where they end, and what they leave alone."""

import itertools
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from priory.bayes import gaussian
from priory.bayes.gaussian import Free
from priory.core.rng import root
from priory.core.struct import replace, struct
from priory.fed.local import Optimiser, Work
from priory.fed.shard import Batch
from priory.methods._blocks.coupled_vi import (
    ClientState,
    CoupledFit,
    VariationalParams,
    fit_posterior_and_prior,
    init_client_state,
)
from priory.models import Linen, Params, noisy
from priory.models.likelihood import Categorical
from tests.methods.gaussian_problem import DOWN, EMPTY, FIRST, HELD, OWN, SHARDS, X, Y, expected_nll, flat, tempered
from tests.methods.problems import tiny_shards

FULL, MANY = Work(epochs=1, batch_size=10), Work(epochs=3000, batch_size=10)


@partial(jax.jit, static_argnums=0)
def run(nll, start, down, data, optimiser, work, key, zeta=1.0, prior_rate=1.0):
    how = CoupledFit(optimiser, work, zeta, prior_rate)
    return fit_posterior_and_prior(nll, gaussian, start, down, data, key, how)


def from_own(optimiser):
    """A client with a posterior of its own, its optimiser at rest."""
    return init_client_state(OWN, optimiser)


# --- the printed algorithm -------------------------------------------------------------------------------------------


class Small(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(3)(x))


SMALL = Linen(Small())
SMALL_DATA = tiny_shards().of(jnp.int32(0))  # seven examples


def drawn_nll(q, stats, batch, key):
    outputs, _ = noisy.apply(SMALL, Params(q.mean, {}), q.sd, batch.x, key, "weights")
    log_prob = Categorical(3).log_prob(outputs, batch.y)
    return -jnp.sum(batch.mask * log_prob) / jnp.maximum(jnp.sum(batch.mask), 1), stats


def printed_kl(free, free_w):
    """KL(q ‖ w) as printed, of free coordinates, by JAX's own softplus."""
    total = jnp.float32(0)
    for m, r, m_w, r_w in zip(*map(jax.tree.leaves, (free.mean, free.rho, free_w.mean, free_w.rho)), strict=True):
        variance, variance_w = jnp.square(jax.nn.softplus(r)), jnp.square(jax.nn.softplus(r_w))
        terms = jnp.log(variance_w / variance) + (variance + jnp.square(m - m_w)) / variance_w - 1
        total = total + 0.5 * jnp.sum(terms)
    return total


def omega_and_slope(free, free_w, zeta, batch, key):
    """The slope of Ω/n by automatic differentiation, and the likelihood term of Ω/n."""

    def omega(free):
        q = gaussian.Gaussian(free.mean, jax.tree.map(jax.nn.softplus, free.rho))
        num, size = SMALL_DATA.count, batch.x.shape[0]
        likelihood = num / size * (size * drawn_nll(q, {}, batch, key)[0])
        return (likelihood + zeta * printed_kl(free, free_w)) / num, likelihood / num

    return jax.grad(omega, has_aux=True)(free)


def slope_of_prior(free_w, free):
    return jax.grad(lambda free_w: printed_kl(free, free_w) / SMALL_DATA.count)(free_w)


@partial(jax.jit, static_argnames=("solver", "size"))
def step_by_hand(carry, key_data, key_step, zeta, prior_rate, solver, size):
    """One step of algorithm 1, and the likelihood term before it."""
    free, free_w, state, state_w = carry
    batch = SMALL_DATA.batch(key_data, size)
    slope, loss = omega_and_slope(free, free_w, zeta, batch, key_step)
    moves, state = solver(0.02).update(slope, state, free)
    free = optax.apply_updates(free, moves)
    moves, state_w = solver(0.02 * prior_rate).update(slope_of_prior(free_w, free), state_w, free_w)
    return (free, optax.apply_updates(free_w, moves), state, state_w), loss


def by_hand(free, free_w, work, solver, zeta, prior_rate, key):
    """Algorithm 1 step by step."""
    states = jax.jit(lambda *both: tuple(map(solver(0.02).init, both)))(free, free_w)
    carry, losses = (free, free_w, *states), []
    key_data, key_step = jax.random.split(key)
    for i in range(work.steps):
        keys = jax.random.fold_in(key_data, i), jax.random.fold_in(key_step, i)
        carry, loss = step_by_hand(carry, *keys, zeta, prior_rate, solver, work.batch_size)
        losses.append(float(loss))
    return carry[0], carry[1], np.mean(losses)


@cache
def two_networks():
    """Free coordinates of a posterior and of a prior, some way apart."""
    init, pair = jax.jit(lambda key: SMALL.init(key, (5,)).weights), []
    for seed, rho in ((0, -2.0), (1, -1.5)):
        mean, spread = init(jax.random.key(seed)), np.random.default_rng(seed)
        pair.append(Free(mean, jax.tree.map(lambda m, r=rho, d=spread: np.float32(d.normal(r, 0.2, m.shape)), mean)))
    return tuple(pair)


@pytest.mark.parametrize(("zeta", "prior_rate"), [(0.0, 1.0), (3.0, 1.0), (3.0, 0.5)])
@pytest.mark.parametrize(("kind", "solver"), [("sgd", optax.sgd), ("adam", optax.adam)])
def test_the_steps_are_those_of_the_printed_algorithm(kind, solver, zeta, prior_rate):
    (free, free_w), optimiser, work = two_networks(), Optimiser(kind, 0.02), Work(steps=5, batch_size=4)
    start, down = init_client_state(VariationalParams(free, {}), optimiser), VariationalParams(free_w, {})
    personal, localised, loss = run(
        drawn_nll, start, down, SMALL_DATA, optimiser, work, jax.random.key(2), zeta, prior_rate
    )
    q, w, mean_loss = by_hand(free, free_w, work, solver, zeta, prior_rate, jax.random.key(2))
    np.testing.assert_allclose(flat(personal.q.weights), flat(q), atol=1e-5)
    np.testing.assert_allclose(flat(localised.weights), flat(w), atol=1e-5)
    assert float(loss) == pytest.approx(mean_loss, abs=1e-5)
    assert np.abs(flat(q) - flat(free)).max() > 0.01
    assert np.abs(flat(w) - flat(free_w)).max() > 0.01


def test_w_follows_the_new_q_of_the_same_step():
    rate = 0.05
    start, optimiser = init_client_state(DOWN, Optimiser(step_size=rate)), Optimiser(step_size=rate)
    personal, localised, _ = run(expected_nll, start, DOWN, FIRST, optimiser, FULL, root(0))

    @jax.jit
    def slope(q, w):
        return gaussian.chain(w, gaussian.kl_gradient_of_prior(gaussian.of(q), gaussian.of(w)))

    # Had it seen the old q, which is w, it would not have moved.
    wanted = flat(DOWN.weights) - rate / 10 * flat(slope(personal.q.weights, DOWN.weights))
    np.testing.assert_allclose(flat(localised.weights), wanted, rtol=1e-5)
    assert np.abs(flat(localised.weights) - flat(DOWN.weights)).max() > 1e-3


def test_q_sees_the_w_that_moved_in_the_step_before():
    # Two steps: if q saw w a step late, both would be the same.
    optimiser, both = Optimiser(step_size=0.05), Work(epochs=2, batch_size=10)
    moved, _, _ = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, both, root(0), 3.0, 1.0)
    held, _, _ = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, both, root(0), 3.0, HELD)
    assert np.abs(flat(moved.q) - flat(held.q)).max() > 1e-3


# --- scaling ---------------------------------------------------------------------------------------------------------


@struct
class Given:
    """A shard of ten examples that always draws the same ones."""

    x: jax.Array
    y: jax.Array

    @property
    def count(self):
        return jnp.int32(10)

    def batch(self, key, size):
        del key
        assert size == len(self.x)
        return Batch(self.x, self.y, None, jnp.ones(size))


def given(rows):
    rows = np.array(rows)
    return Given(np.float32(X[rows]), np.float32(Y[rows]))


def moved_by(rows):
    """How far one unit step of gradient descent on a minibatch takes q."""
    optimiser, work = Optimiser(step_size=1.0), Work(steps=1, batch_size=len(rows))
    personal, _, _ = run(expected_nll, from_own(optimiser), DOWN, given(rows), optimiser, work, root(0), 3.0)
    return flat(personal.q) - flat(OWN)


@pytest.mark.parametrize("size", [1, 9])
def test_the_mean_gradient_over_all_minibatches_is_the_full_one(size):
    moves = [moved_by(rows) for rows in itertools.combinations(range(10), size)]
    np.testing.assert_allclose(np.mean(moves, axis=0), moved_by(range(10)), rtol=1e-4, atol=1e-5)
    assert np.std(moves, axis=0).max() > 0.01


def test_a_step_of_q_descends_the_printed_objective_over_n():
    zeta, num = 3.0, 10

    def omega(free):
        batch = given(range(10)).batch(None, 10)
        return num * expected_nll(gaussian.of(free), {}, batch, None)[0] + zeta * printed_kl(free, DOWN.weights)

    np.testing.assert_allclose(
        moved_by(range(10)), -flat(jax.jit(jax.grad(omega))(OWN.weights)) / num, rtol=1e-4, atol=1e-5
    )


# --- where it ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeta", [0.5, 1.0, 10.0])
def test_with_w_held_q_ends_at_the_tempered_posterior(zeta):
    optimiser = Optimiser(step_size=0.3 / (1 + zeta))
    personal, localised, _ = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, MANY, root(0), zeta, HELD)
    q, (mean, sd) = jax.jit(gaussian.of)(personal.q.weights), tempered(zeta)
    np.testing.assert_allclose(flat(q.mean), mean, atol=1e-5)
    np.testing.assert_allclose(flat(q.sd), sd, rtol=1e-4)
    np.testing.assert_array_equal(flat(localised), flat(DOWN))


def test_where_w_may_follow_both_end_at_the_same_place():
    # The divergence is then zero, so that q minimises the likelihood term alone.
    optimiser = Optimiser(step_size=0.05)
    personal, localised, _ = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, MANY, root(0), 1.0, 1.0)
    least_squares, *_ = np.linalg.lstsq(X[:10], Y[:10])
    np.testing.assert_allclose(flat(personal.q.weights.mean), least_squares, atol=1e-3)
    np.testing.assert_allclose(flat(localised.weights.mean), least_squares, atol=1e-3)


# --- what stays ------------------------------------------------------------------------------------------------------

AT_THE_END = replace(EMPTY, start=jnp.array([SHARDS.pool.x.shape[0]]))  # its first row is nobody's
WORKS = [Work(steps=5, batch_size=4), Work(epochs=2, batch_size=4)]


@pytest.mark.parametrize("data", [EMPTY, AT_THE_END], ids=["in-the-middle", "at-the-end"])
@pytest.mark.parametrize(("kind", "work"), [("adam", WORKS[0]), ("adam", WORKS[1]), ("sgd", WORKS[0])])
def test_without_examples_a_posterior_at_w_does_not_move_by_a_bit(kind, work, data):
    optimiser = Optimiser(kind, 0.1)
    personal, localised, loss = run(
        expected_nll, init_client_state(DOWN, optimiser), DOWN, data, optimiser, work, root(0)
    )
    np.testing.assert_array_equal(flat(personal.q), flat(DOWN))
    np.testing.assert_array_equal(flat(localised), flat(DOWN))
    assert float(loss) == 0.0


def test_the_optimiser_goes_on_where_it_was():
    optimiser, whole = Optimiser("adam", 0.05), Work(epochs=10, batch_size=10)

    def after_ten_visits(forget):
        client = from_own(optimiser)
        for _ in range(10):
            client, _, _ = run(expected_nll, client, DOWN, FIRST, optimiser, FULL, root(0), 1.0, HELD)
            client = ClientState(client.q, from_own(optimiser).optimiser) if forget else client
        return client

    once, _, _ = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, whole, root(0), 1.0, HELD)
    # A full batch sums its rows in another order.
    np.testing.assert_allclose(flat(after_ten_visits(forget=False)), flat(once), atol=1e-5)
    assert np.abs(flat(after_ten_visits(forget=True).q) - flat(once.q)).max() > 1e-3


def test_w_starts_from_what_was_broadcast_whatever_the_client_keeps():
    optimiser = Optimiser("adam", 0.05)
    used, _, _ = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, FULL, root(0))
    rested = ClientState(used.q, from_own(optimiser).optimiser)
    w = [run(expected_nll, start, DOWN, EMPTY, optimiser, Work(steps=1), root(0), 0.0)[1] for start in (used, rested)]
    # With ζ = 0 and no examples nothing but momentum moves q, and the first step of a fresh Adam is by its rate.
    step = np.abs(flat(w[0]) - flat(DOWN))
    np.testing.assert_allclose(step, 0.05, rtol=1e-3)
    np.testing.assert_allclose(flat(w[1]), flat(w[0]), rtol=1e-4)


def test_statistics_start_from_what_was_broadcast_and_go_with_both():
    def counting(q, stats, batch, key):
        return expected_nll(q, None, batch, key)[0], {"steps": stats["steps"] + 1}

    optimiser = Optimiser(step_size=0.1)
    start = init_client_state(replace(OWN, stats={"steps": jnp.int32(100)}), optimiser)
    down = replace(DOWN, stats={"steps": jnp.int32(7)})
    personal, localised, _ = run(counting, start, down, FIRST, optimiser, Work(epochs=2, batch_size=4), root(0))
    assert int(personal.q.stats["steps"]) == int(localised.stats["steps"]) == 7 + 2 * 3


def test_the_loss_is_the_mean_of_the_likelihood_term_alone():
    optimiser = Optimiser(step_size=1e-30)
    loss = run(expected_nll, from_own(optimiser), DOWN, FIRST, optimiser, FULL, root(0), 100.0)[2]
    wanted = jax.jit(lambda free: expected_nll(gaussian.of(free), {}, FIRST.padded(), None)[0])(OWN.weights)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
