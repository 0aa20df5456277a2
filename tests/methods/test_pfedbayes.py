"""pFedBayes: where its clients end, what it reduces to, what it keeps and draws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import priory
from priory import Optimiser, PFedBayes, Work, metrics
from priory.bayes import gaussian
from priory.core import rng
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.methods._blocks.coupled_vi import init_client_state
from tests.methods.gaussian_problem import (
    ADAM,
    DOWN,
    EMPTY,
    FIRST,
    HELD,
    M_W,
    OWN,
    REGRESSION,
    S_W,
    TEN_STEPS,
    belief,
    expected_nll,
    flat,
    pinned,
    tempered,
    visited,
)
from tests.methods.problems import tiny_task
from tests.methods.verbs import drawn, init_client, init_server, outputs, personalised, predicted

# --- where a client ends ---------------------------------------------------------------------------------------------

WAYS = {
    "layers": {"draw": "layers", "work": Work(epochs=800, batch_size=10)},
    "weights": {"draw": "weights", "work": Work(epochs=800, batch_size=10)},
    "minibatches": {"draw": "layers", "work": Work(steps=800, batch_size=4)},
}


@jax.jit
@partial(jax.vmap, in_axes=(None, 0, 0))
def all_visited(method, client, key):
    return method.client_update(REGRESSION, DOWN, client, FIRST, key)[0]


@pytest.mark.parametrize(("way", "zeta"), [("layers", 1.0), ("layers", 10.0), ("weights", 1.0), ("minibatches", 1.0)])
def test_with_w_held_a_client_ends_at_the_tempered_posterior(way, zeta):
    repeats = 16
    client = jax.tree.map(lambda leaf: np.stack([leaf] * repeats), init_client_state(DOWN, Optimiser()))
    for i, rate in enumerate((0.2, 0.05, 0.01, 0.002)):
        optimiser = Optimiser(step_size=rate / (1 + zeta / 5))
        method = pinned(zeta=zeta, prior_rate=HELD, optimiser=optimiser, **WAYS[way])
        client = all_visited(method, client, jax.random.split(jax.random.key(i), repeats))
    q, (mean, sd) = gaussian.of(client.q.weights), tempered(zeta)
    for found, expected in ((q.mean, mean), (q.sd, sd)):
        rows = np.asarray(found["kernel"], np.float64)[..., 0]
        error = rows.std(axis=0) / np.sqrt(repeats)
        assert error.max() < 0.006
        np.testing.assert_array_less(np.abs(rows.mean(axis=0) - expected), 5 * error)


def test_a_huge_zeta_leaves_a_client_no_posterior_but_the_prior():
    zeta = 1e6
    method = pinned(
        zeta=zeta, prior_rate=HELD, optimiser=Optimiser(step_size=0.4 / zeta), work=Work(epochs=400, batch_size=10)
    )
    client, _, info = visited(method, client=init_client_state(OWN, method.optimiser))
    np.testing.assert_allclose(flat(client.q), flat(DOWN), atol=1e-4)
    assert float(info["divergence"]) < 1e-6


def test_without_zeta_a_client_learns_alone():
    elsewhere = belief(M_W + 1, S_W / 2)
    for zeta, alike in ((0.0, True), (1.0, False)):
        method = pinned(zeta=zeta, work=Work(epochs=5, batch_size=10))
        here, there = (
            visited(method, down, init_client_state(OWN, method.optimiser))[0].q for down in (DOWN, elsewhere)
        )
        assert (flat(here) == flat(there)).all() == alike


def test_the_localised_w_goes_towards_the_posterior():
    method = pinned(zeta=0.0, optimiser=Optimiser(step_size=0.02), work=Work(epochs=20, batch_size=10))
    client, message, info = visited(method)
    q, sent = gaussian.of(client.q.weights), gaussian.of(message.payload.weights)
    before = float(gaussian.kl(q, gaussian.of(DOWN.weights)))
    assert float(info["divergence"]) == pytest.approx(before, rel=1e-6)
    assert 0 < float(gaussian.kl(q, sent)) < 0.8 * before


# --- noise -----------------------------------------------------------------------------------------------------------


def steps_of(method, repeats=400):
    """How far one unit step of gradient descent takes q, (repeats, 2d)."""
    method = replace(method, optimiser=Optimiser(step_size=1.0), zeta=0.0)

    def step(key):
        return method.client_update(REGRESSION, DOWN, init_client_state(OWN, method.optimiser), FIRST, key)[0].q.weights

    # One after another: in a vmap JAX's key check takes the samples' keys for used twice.
    moved = jax.jit(partial(jax.lax.map, step))(jax.random.split(jax.random.key(0), repeats))
    rows = np.concatenate([np.reshape(leaf, (repeats, -1)) for leaf in jax.tree.leaves(moved)], axis=1)
    return rows.astype(np.float64) - flat(OWN)


def test_the_noise_of_a_step_has_no_bias_and_falls_with_the_samples():
    q = gaussian.of(OWN.weights)
    slope = jax.jit(jax.grad(lambda q: expected_nll(q, {}, FIRST.padded(), None)[0]))(q)
    expected = -flat(gaussian.chain(OWN.weights, slope))
    spread = {}
    for draw, num in (("weights", 1), ("weights", 8), ("layers", 1)):
        rows = steps_of(pinned(draw=draw, samples_per_step=num))
        error = rows.std(axis=0) / np.sqrt(len(rows))
        np.testing.assert_array_less(np.abs(rows.mean(axis=0) - expected), 5 * error)
        spread[draw, num] = rows.std(axis=0)
    # Independent samples divide the variance by their number; each ratio of deviations is known to about 7 %.
    np.testing.assert_allclose(spread["weights", 1] / spread["weights", 8], np.sqrt(8), rtol=0.35)
    assert spread["layers", 1].mean() < 0.7 * spread["weights", 1].mean()


# --- what a client keeps ---------------------------------------------------------------------------------------------


def test_a_new_client_starts_at_the_prior():
    method = pinned(optimiser=ADAM)
    client = init_client(method, REGRESSION, DOWN, rng.root(0))
    np.testing.assert_array_equal(flat(client.q), flat(DOWN))
    np.testing.assert_array_equal(flat(client.optimiser), 0)
    assert init_client(replace(method, stateful=False), REGRESSION, DOWN, rng.root(0)) == ()


def test_a_client_without_state_is_always_a_new_one():
    method = pinned(stateful=False, optimiser=ADAM, work=TEN_STEPS)
    state, message, info = visited(method)
    assert state == ()
    posterior = personalised(method, REGRESSION, DOWN, (), FIRST, rng.root(0))
    new, sent, _ = visited(replace(method, stateful=True))
    np.testing.assert_array_equal(flat(posterior), flat(new.q))
    np.testing.assert_array_equal(flat(message.payload), flat(sent.payload))
    assert float(info["divergence"]) == pytest.approx(
        float(method.certified(REGRESSION, DOWN, posterior).divergence), rel=1e-6
    )


def test_a_client_goes_on_with_its_posterior_and_its_optimiser():
    # Without examples there is no noise: with w held, two rounds of ten steps are one of twenty.
    method = pinned(prior_rate=HELD, optimiser=ADAM, work=TEN_STEPS)
    twice = init_client_state(OWN, method.optimiser)
    for _ in range(2):
        twice, _, _ = visited(method, client=twice, data=EMPTY)
    once, _, _ = visited(
        replace(method, work=Work(steps=20, batch_size=4)), client=init_client_state(OWN, method.optimiser), data=EMPTY
    )
    np.testing.assert_array_equal(flat(twice), flat(once))
    rested, _, _ = visited(method, client=init_client_state(OWN, method.optimiser), data=EMPTY)
    rested, _, _ = visited(method, client=init_client_state(rested.q, method.optimiser), data=EMPTY)
    assert np.abs(flat(rested.q) - flat(once.q)).max() > 1e-4


def test_two_rounds_with_state_are_not_two_without():
    method = pinned(optimiser=ADAM, work=TEN_STEPS)
    client, _, _ = visited(method)
    kept, sent, _ = visited(method, client=client, seed=1)
    new, other, _ = visited(method, seed=1)
    assert np.abs(flat(kept.q) - flat(new.q)).max() > 0.01
    assert np.abs(flat(sent.payload) - flat(other.payload)).max() > 0.001
    np.testing.assert_array_equal(flat(personalised(method, REGRESSION, DOWN, kept, FIRST, rng.root(7))), flat(kept.q))


@pytest.mark.parametrize(
    ("work", "average", "stateful"),
    [(TEN_STEPS, "params", True), (Work(epochs=2, batch_size=4), "moments", True), (TEN_STEPS, "moments", False)],
)
def test_where_nothing_is_to_be_learned_nothing_moves_by_a_bit(work, average, stateful):
    method = pinned(zeta=10.0, average=average, stateful=stateful, optimiser=ADAM, work=work)
    client, message, info = visited(method, data=EMPTY)
    if stateful:
        np.testing.assert_array_equal(flat(client.q), flat(DOWN))
    np.testing.assert_array_equal(flat(message.payload), flat(method.reference(REGRESSION, DOWN, message.payload)))
    assert float(message.weight) == 0
    assert float(info["divergence"]) == float(info["loss"]) == 0


@pytest.mark.parametrize("stateful", [True, False])
def test_a_client_without_examples_has_the_present_prior_for_its_posterior(stateful):
    method = pinned(stateful=stateful, optimiser=ADAM, work=TEN_STEPS)
    client, _, _ = visited(method, OWN, data=EMPTY)  # it joined when the prior was another
    client, _, _ = visited(method, DOWN, client, EMPTY)
    posterior = personalised(method, REGRESSION, DOWN, client, EMPTY, rng.root(0))
    np.testing.assert_array_equal(flat(posterior), flat(DOWN))


# --- prediction ------------------------------------------------------------------------------------------------------

TINY, TINY_X = tiny_task(), np.random.default_rng(3).normal(size=(7, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def posterior():
    return init_server(pinned(rho=-1.0), TINY, jax.random.key(0))


def test_no_samples_predict_with_the_mean_of_the_weights(posterior):
    found = predicted(pinned(samples=0), TINY, posterior, TINY_X, rng.root(0))
    expected = outputs(TINY, priory.models.Params(posterior.weights.mean, posterior.stats), TINY_X)
    np.testing.assert_array_equal(found.outputs, expected[None])
    np.testing.assert_array_equal(found.log_weights, 0)


def test_samples_predict_with_the_mean_of_their_probabilities(posterior):
    method = pinned(samples=6)
    found = predicted(method, TINY, posterior, TINY_X, rng.root(5))
    networks = drawn(method, TINY, posterior, rng.root(5), 6)
    each = [outputs(TINY, jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], networks), TINY_X) for i in range(6)]
    probabilities = np.mean(softmax(each, axis=-1), axis=0)
    mixed = np.exp(metrics.mixture_log_probs(found.outputs, found.log_weights))
    np.testing.assert_allclose(mixed, probabilities, atol=1e-6)
    assert np.abs(mixed - softmax(np.mean(each, axis=0), axis=-1)).max() > 0.01  # the logits' mean is another


def test_draws_have_the_moments_of_the_posterior_and_keep_its_statistics():
    num = 4000
    posterior = replace(OWN, stats={"seen": jnp.float32(3)})
    networks = drawn(pinned(), REGRESSION, posterior, rng.root(0), num)
    rows = np.asarray(networks.weights["kernel"], np.float64)[..., 0]
    q = gaussian.of(OWN.weights)
    standard = (rows - flat(q.mean)) / flat(q.sd)
    np.testing.assert_allclose(standard.mean(axis=0), 0, atol=5 / np.sqrt(num))
    np.testing.assert_allclose(standard.std(axis=0), 1, atol=5 / np.sqrt(2 * num))
    np.testing.assert_array_equal(networks.stats["seen"], np.full(num, 3.0))


def test_the_divergence_is_that_of_the_posterior_from_what_was_broadcast():
    q, w = gaussian.of(OWN.weights), gaussian.of(DOWN.weights)
    ratio = flat(q.sd) / flat(w.sd)
    expected = np.sum(0.5 * (ratio**2 - 1) - np.log(ratio) + 0.5 * ((flat(q.mean) - flat(w.mean)) / flat(w.sd)) ** 2)
    assert float(pinned().certified(REGRESSION, DOWN, OWN).divergence) == pytest.approx(expected, rel=1e-6)


def test_the_global_model_is_the_prior_whatever_the_data():
    for data in (None, FIRST):
        assert pinned().population(REGRESSION, DOWN, data, rng.root(0)) is DOWN


# --- bad values ------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (PFedBayes(zeta=-1.0), r"^zeta=-1.0 is out of range; choose 0 or more\.$"),
        (PFedBayes(zeta=NAN), r"^zeta=nan is out of range"),
        (PFedBayes(zeta=INF), r"^zeta=inf is out of range"),
        (PFedBayes(rho=NAN), r"^rho=nan is not a finite number; choose one"),
        (PFedBayes(rho=INF), r"^rho=inf is not a finite number"),
        (PFedBayes(rho=-INF), r"^rho=-inf is not a finite number"),
        (PFedBayes(beta=-0.1), r"^beta=-0.1 is out of range; choose 0 or more\.$"),
        (PFedBayes(beta=NAN), r"^beta=nan is out of range"),
        (PFedBayes(samples_per_step=0), r"^samples-per-step=0 is out of range; choose 1 or more\.$"),
        (PFedBayes(samples=-1), r"^samples=-1 is out of range; choose 0 or more\.$"),
        (PFedBayes(prior_rate=0.0), r"^prior-rate=0.0 is not a positive number; choose one above 0\.$"),
        (PFedBayes(prior_rate=-1.0), r"^prior-rate=-1.0 is not a positive number"),
        (PFedBayes(draw="units"), r"^draw='units' is not known; choose from layers, weights\.$"),
        (PFedBayes(average="median"), r"^average='median' is not known; choose from params, moments\.$"),
        (PFedBayes(optimiser=Optimiser("adam", 0.0)), r"^step-size=0.0 is not a positive number"),
        (PFedBayes(optimiser=Optimiser(weight_decay=0.1)), r"^weight-decay=0.1 would shrink .*; leave it at 0\.$"),
        (PFedBayes(work=Work(batch_size=0)), r"^batch-size=0 is out of range"),
    ],
)  # fmt: skip
def test_a_bad_value_ends_in_a_sentence(method, sentence):
    with pytest.raises(UsageError, match=sentence):
        method.check()


def test_the_bounds_of_what_is_allowed_are_good():
    PFedBayes().check()
    PFedBayes(zeta=0.0, beta=0.0, samples=0, samples_per_step=1).check()
