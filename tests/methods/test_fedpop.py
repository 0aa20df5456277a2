"""FedPop's client against the closed forms of a linear mixed-effects model."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.bayes.population import Normal
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.fed.capabilities import MOST_EFFECTS
from priory.fed.method import Task
from priory.methods._blocks.effect_chain import scores
from priory.methods._blocks.mixed_effects import Mixed
from priory.methods.fedpop import FedPop
from priory.models import features
from priory.models.likelihood import Gaussian
from priory.models.linen import Linen
from priory.models.model import Head, Params
from priory.models.nets import Intercept
from tests.methods.mixed_problem import (
    COUNTS,
    DIM,
    NOISE,
    RANK,
    down_at,
    factor_task,
    log_marginal,
    posterior,
    problem,
    rows_of,
    wrap,
)  # fmt: skip
from tests.methods.problems import shards_from
from tests.methods.verbs import broadcast, init_client, init_server, personalised, population, predicted, updated

TASK = factor_task()
SHARDS, PHI, MEAN, SD = problem()
PLAIN = FedPop()  # its programs serve all tests of what does not depend on the kernel


def kernel_of(z):
    return np.asarray(z["Dense_1"]["kernel"])[..., 0]


@partial(jax.jit, static_argnames="num")
def many_updates(method, down, client, num):
    """Messages of so many independent rounds of one client, each from a draw of the prior."""

    def one(key):
        key_enrol, key_update = jax.random.split(key)
        state = method.init_client(TASK, down, key_enrol)
        return method.client_update(TASK, down, state, SHARDS.of(client), key_update)[1].payload

    return jax.vmap(one)(jax.random.split(jax.random.key(1), num))


marginal_slope = jax.jit(jax.grad(log_marginal, argnums=(2, 3, 4)))


@pytest.mark.parametrize(
    ("kernel", "score"),
    [
        ("mala", "centred"),
        ("mala", "mixed"),
        ("hmc", "centred"),
        pytest.param("nuts", "centred", marks=pytest.mark.slow),
    ],
)
def test_the_expected_message_is_the_gradient_of_the_marginal_likelihood(kernel, score):
    """Fisher's identity for β and φ; 5 standard errors over independent chains."""
    method = FedPop(kernel=kernel, score=score, steps=60, burn_in=40)
    down, client, num = down_at(method, TASK, PHI, MEAN, SD), 1, 400
    sent = many_updates(method, down, jnp.int32(client), num)
    x, y = rows_of(SHARDS, client)
    exact = marginal_slope(x, y, PHI, MEAN, np.log(SD))
    found = (sent.phi["Dense_0"]["kernel"], kernel_of(sent.beta.mean), kernel_of(sent.beta.log_sd))
    for ours, theirs in zip(found, exact, strict=True):
        ours = np.asarray(ours)
        error = np.std(ours, axis=0, ddof=1) / np.sqrt(num)
        assert np.all(np.abs(np.mean(ours, axis=0) - theirs) < 5 * error), (np.mean(ours, axis=0), theirs, error)


@partial(jax.jit, static_argnames=("batch_size", "whole"))
def body_gradient(down, zs, data, batch_size, whole, key):
    """J at given states."""
    model = Mixed(TASK, Params(down.phi, {}), jax.tree.map(lambda leaf: leaf[0], zs))
    return model.body_gradient(zs, data, batch_size, whole, key)[0]["Dense_0"]["kernel"]


def test_the_gradient_in_the_body_is_exact_given_the_states():
    """J at given states against its closed form, whatever the batch size cuts the examples into."""
    down = down_at(PLAIN, TASK, PHI, MEAN, SD)
    zs = wrap(PHI, [[0.3, -1.0], [1.2, 0.4], [0.0, 0.1]])[1]
    x, y = rows_of(SHARDS, 0)
    # Of the mean over states of −½‖(y − xφz)/s‖².
    each = [x.T @ np.outer(y - x @ PHI @ z, z) / NOISE**2 for z in kernel_of(zs)]
    for batch_size in (1, 4, 6, 32):
        gradient = body_gradient(down, zs, SHARDS.of(jnp.int32(0)), batch_size, True, jax.random.key(0))
        np.testing.assert_allclose(gradient, np.mean(each, axis=0), rtol=2e-5, atol=2e-5)


@pytest.mark.slow  # test_features.py has it for a network alone
def test_features_change_nothing_but_the_time(monkeypatch):
    """The same messages from a network that does not split."""
    method = FedPop(kernel="mala", steps=6, burn_in=2)
    down = down_at(method, TASK, PHI, MEAN, SD)
    state = init_client(PLAIN, TASK, down, jax.random.key(3))
    data, split_up = SHARDS.of(jnp.int32(0)), []
    original = features.split

    def counted(*arguments):
        split_up.append(original(*arguments))
        return split_up[-1]

    def sent():
        update = jax.jit(lambda *arguments: method.client_update(*arguments))  # traced again each time
        return update(TASK, down, state, data, jax.random.key(4))[1].payload

    monkeypatch.setattr(features, "split", counted)
    split = sent()
    assert any(part is not None for part in split_up)
    monkeypatch.setattr(features, "split", lambda *_: None)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), split, sent())


@partial(jax.jit, static_argnames="num")
def many_posteriors(method, down, data, num):
    def one(key):
        key_enrol, key_chain = jax.random.split(key)
        return method.personalise(TASK, down, method.init_client(TASK, down, key_enrol), data, key_chain).z

    return jax.vmap(one)(jax.random.split(jax.random.key(2), num))


EXACT = FedPop(kernel="mala", leapfrog=6, chains=1, warm_up=60, samples=1)


@pytest.mark.parametrize(
    "kernel", ["mala", pytest.param("hmc", marks=pytest.mark.slow), pytest.param("nuts", marks=pytest.mark.slow)]
)
def test_personal_draws_have_the_posterior_mean_and_covariance(kernel):
    """5 standard errors over independent chains, of which the last draw counts."""
    method, num = replace(EXACT, kernel=kernel), 1500
    if kernel == "nuts":  # a step of it is many
        method = replace(method, warm_up=20)
    down, data = down_at(method, TASK, PHI, MEAN, SD), SHARDS.of(jnp.int32(1))
    z = kernel_of(many_posteriors(method, down, data, num))[:, 0, 0]
    mean, covariance = posterior(*rows_of(SHARDS, 1), PHI, MEAN, SD)
    assert np.all(np.abs(z.mean(0) - mean) < 5 * np.sqrt(np.diag(covariance) / num))
    products = (z - mean)[:, :, None] * (z - mean)[:, None, :]
    error = products.std(0, ddof=1) / np.sqrt(num)
    assert np.all(np.abs(products.mean(0) - covariance) < 5 * error)


def test_langevin_draws_have_the_covariance_that_their_step_size_leaves():
    """P⁻¹(I − γP/2)⁻¹ instead of P⁻¹; 5 standard errors."""
    gamma, num = 0.05, 2000
    method = FedPop(kernel="ula", gamma=gamma, chains=1, warm_up=100, samples=1)
    down, data = down_at(method, TASK, PHI, MEAN, SD), SHARDS.of(jnp.int32(1))
    z = kernel_of(many_posteriors(method, down, data, num))[:, 0, 0]
    mean, covariance = posterior(*rows_of(SHARDS, 1), PHI, MEAN, SD)
    precision = np.linalg.inv(covariance)
    assert gamma * np.linalg.eigvalsh(precision).max() > 0.2, "or the two could not be told apart"
    left = covariance @ np.linalg.inv(np.eye(RANK) - gamma * precision / 2)
    products = (z - mean)[:, :, None] * (z - mean)[:, None, :]
    error = products.std(0, ddof=1) / np.sqrt(num)
    assert np.all(np.abs(products.mean(0) - left) < 5 * error)
    assert np.any(np.abs(products.mean(0) - covariance) > 5 * error)


def test_a_narrow_prior_leaves_the_gradient_of_federated_averaging():
    """σ → 0: every z is μ, and J is ∇_φ log p(D | φ, μ)."""
    method = PLAIN
    down = down_at(method, TASK, PHI, MEAN, np.full(RANK, 1e-4))
    state = init_client(method, TASK, down, jax.random.key(0))
    _, message, _ = updated(method, TASK, down, state, SHARDS.of(jnp.int32(2)), jax.random.key(1))
    x, y = rows_of(SHARDS, 2)
    exact = x.T @ ((y - x @ PHI @ MEAN) / NOISE**2)[:, None] * MEAN[None, :]
    np.testing.assert_allclose(message.payload.phi["Dense_0"]["kernel"], exact, rtol=0.01, atol=0.02)


def test_a_wide_prior_leaves_the_head_to_the_client():
    """σ → ∞: the iterates end where the likelihood alone is largest, as FedRep's head does."""
    method = FedPop(kernel="map", gamma=0.02, chains=1, warm_up=2000, samples=1)
    down = down_at(method, TASK, PHI, MEAN, np.full(RANK, 1e3))
    x, y = rows_of(SHARDS, 0)
    state = wrap(PHI, np.zeros(RANK, np.float32))[1]
    z = kernel_of(personalised(method, TASK, down, state, SHARDS.of(jnp.int32(0)), jax.random.key(1)).z)[0, 0]
    np.testing.assert_allclose(z, np.linalg.lstsq(x @ PHI, y, rcond=None)[0], atol=2e-3)


def test_a_newcomer_without_data_has_the_predictive_of_the_population():
    """N(xᵀφμ, s² + σ²‖φᵀx‖²): mean and variance of the mixture within 5 standard errors."""
    num = 4000
    method = FedPop(newcomer_draws=num)
    down = down_at(method, TASK, PHI, MEAN, SD)
    x = np.random.default_rng(1).normal(size=(3, DIM)).astype(np.float32)
    posterior = population(method, TASK, down, None, jax.random.key(0))
    outputs = np.asarray(predicted(method, TASK, posterior, x, jax.random.key(1)).outputs)[..., 0]
    spread = np.sqrt(np.sum((x @ PHI * SD) ** 2, axis=1))
    assert np.all(np.abs(outputs.mean(0) - x @ PHI @ MEAN) < 5 * spread / np.sqrt(num))
    assert np.all(np.abs(outputs.var(0) - spread**2) < 5 * spread**2 * np.sqrt(2 / num))


@pytest.mark.parametrize("kernel", ["sgld", "psgld"])
def test_a_minibatch_of_the_whole_shard_in_expectation_gives_the_whole_gradient(kernel):
    """The mean over draws of the n/b-scaled J equals J; 5 standard errors."""
    down = down_at(FedPop(kernel=kernel), TASK, PHI, MEAN, SD)
    zs = wrap(PHI, [[0.3, -1.0]])[1]
    data, num = SHARDS.of(jnp.int32(4)), 4000
    drawn = np.asarray(body_gradients(down, zs, data, jax.random.split(jax.random.key(0), num)))
    whole = body_gradient(down, zs, data, 4, True, jax.random.key(0))
    assert np.all(np.abs(drawn.mean(0) - whole) < 5 * drawn.std(0, ddof=1) / np.sqrt(num))


@jax.jit
def body_gradients(down, zs, data, keys):
    """J of minibatches of two, one for each key."""
    return jax.vmap(lambda key: body_gradient(down, zs, data, 2, False, key))(keys)


def test_the_step_size_is_one_over_the_largest_curvature():
    method = PLAIN
    down = down_at(method, TASK, PHI, MEAN, SD)
    state = init_client(method, TASK, down, jax.random.key(0))
    _, _, info = updated(method, TASK, down, state, SHARDS.of(jnp.int32(0)), jax.random.key(1))
    _, covariance = posterior(*rows_of(SHARDS, 0), PHI, MEAN, SD)
    largest = 1 / np.linalg.eigvalsh(covariance).min()
    np.testing.assert_allclose(info["gamma_limit"], 2 / largest, rtol=1e-3)
    assert info["unstable"] == 0


def test_a_step_size_above_the_limit_is_told():
    method = FedPop(gamma=10.0)
    down = down_at(method, TASK, PHI, MEAN, SD)
    state = init_client(PLAIN, TASK, down, jax.random.key(0))
    _, _, info = updated(method, TASK, down, state, SHARDS.of(jnp.int32(0)), jax.random.key(1))
    assert info["unstable"] == 1
    said = method.advice(TASK, {name: float(value) for name, value in info.items()})
    assert said["unstable"].startswith("gamma=10.0 is above the stability limit of 100% of the clients")


def test_a_mixed_score_has_little_noise_where_clients_hardly_differ():
    """σ is a hundredth of what the data can tell: the printed score of log σ has noise of order 1."""
    down = down_at(PLAIN, TASK, PHI, MEAN, np.full(RANK, 0.002))
    spread = {}
    for score in ("centred", "mixed"):
        method = FedPop(kernel="mala", score=score, steps=60, burn_in=40)
        sent = many_updates(method, down, jnp.int32(1), 400)
        spread[score] = kernel_of(sent.beta.log_sd).std(0)
    assert np.all(spread["mixed"] < 0.05 * spread["centred"]), spread


def test_a_collapsed_sigma_is_told():
    method = PLAIN
    down = down_at(method, TASK, PHI, MEAN, np.full(RANK, 0.001))
    state = init_client(method, TASK, down, jax.random.key(0))
    _, _, info = updated(method, TASK, down, state, SHARDS.of(jnp.int32(0)), jax.random.key(1))
    figures = {name: float(value) for name, value in info.items()} | {"sigma": 0.001, "projected": 7.0}
    said = method.advice(TASK, figures)["collapse"]
    assert said.startswith("σ has collapsed to 0.001 (stopped 7 times at sigma-min=0.001) and leaves clients 0.0%")
    assert "--prior-sigma gamma:2,0.1" in said
    wide = updated(
        method, TASK, down_at(method, TASK, PHI, MEAN, SD), state, SHARDS.of(jnp.int32(0)), jax.random.key(2)
    )[2]
    assert "collapse" not in method.advice(TASK, figures | {"own_share": float(wide["own_share"])})


MOVING = {"mean_moved": 0.2, "sd_moved": 0.1, "progress": 1.0}


def test_a_population_that_moves_at_the_end_of_a_run_is_told():
    said = PLAIN.advice(TASK, MOVING)["moving"]
    assert "moves the mean by 0.2 standard deviations and the standard deviation by a factor of 1.11; take more" in said
    assert set(PLAIN.advice(TASK, MOVING | {"progress": 0.5})) == set()
    assert set(PLAIN.advice(TASK, MOVING | {"mean_moved": 0.1})) == set()


def test_a_population_that_only_serves_to_predict_may_move():
    """More random effects than a table of them shows are a layer of a network."""
    wide = replace(
        TASK, model=Linen(nn.Dense(MOST_EFFECTS + 1, use_bias=False)), input_shape=(1,), is_head=Head("kernel")
    )
    assert PLAIN.advice(wide, MOVING) == {}
    narrow = replace(wide, model=Linen(nn.Dense(MOST_EFFECTS, use_bias=False)))
    assert set(PLAIN.advice(narrow, MOVING)) == {"moving"}


def test_langevin_bias_leaves_the_mixed_score_of_an_intercept_alone():
    """Draws of twice the variance have the mixed score of draws from the posterior, and another centred one."""
    y, s, mean, sd = 3.0, 2.0, 0.5, 0.7
    task = Task(Linen(Intercept(1)), Gaussian(s), (1,), 1, 1, Head("intercept"))
    data = shards_from(np.ones((1, 1), np.float32), np.float32([y]), (1,)).of(jnp.int32(0))
    beta = Normal({"intercept": np.float32([mean])}, {"intercept": np.log(np.float32([sd]))})
    precision = 1 / s**2 + 1 / sd**2
    unit = np.random.default_rng(0).normal(size=(4000, 1))
    slopes = {}
    for score in ("centred", "mixed"):
        for variance in (1, 2):
            zs = (y / s**2 + mean / sd**2) / precision + np.sqrt(variance / precision) * unit
            found = score_of(FedPop(score=score), task, beta, {"intercept": zs.astype(np.float32)}, data)
            slopes[score, variance] = float(jnp.mean(found.log_sd["intercept"]))
    exact = ((y - mean) ** 2 / (s**2 + sd**2) - 1) * sd**2 / (s**2 + sd**2)  # of log N(y | μ, s² + σ²) in log σ
    error = 2 / np.sqrt(len(unit))  # of the mean of (z − μ)²/σ², at most
    assert abs(slopes["mixed", 2] - exact) < 4 * error > abs(slopes["mixed", 1] - exact)
    assert abs(slopes["centred", 1] - exact) < 4 * error
    assert abs(slopes["centred", 2] - exact) > 8 * error


@jax.jit
def score_of(method, task, beta, zs, data):
    """I of each state."""
    first = jax.tree.map(lambda leaf: leaf[0], zs)
    model = Mixed(task, Params({"intercept": None}, {}), first)
    key_size, key_score = jax.random.split(jax.random.key(0))
    sampler = method._sampler
    target = sampler.target(model, beta, data, first, sampler.rows(model, data, key_size), key_score)
    return scores(target, beta, zs, jax.random.key(1), method._mixes)


def test_down_and_up_are_as_many_numbers_as_the_paper_says():
    method = PLAIN
    server = init_server(method, TASK, jax.random.key(0))
    down = broadcast(method, server)
    state = init_client(method, TASK, down, jax.random.key(0))
    _, message, _ = updated(method, TASK, down, state, SHARDS.of(jnp.int32(0)), jax.random.key(1))
    fixed, random = DIM * RANK, RANK
    assert trees.size(down) == fixed + 2 * random
    assert trees.size(message.payload) == fixed + 2 * random
    assert trees.size(state) == random


def test_a_client_without_examples_says_nothing_and_has_the_prior():
    data = replace(SHARDS, count=jnp.asarray([0, *COUNTS[1:]])).of(jnp.int32(0))
    down = down_at(PLAIN, TASK, PHI, MEAN, SD)
    state = init_client(PLAIN, TASK, down, jax.random.key(0))
    _, message, _ = updated(PLAIN, TASK, down, state, data, jax.random.key(1))
    assert message.weight == 0
    num = 1500
    z = kernel_of(many_posteriors(EXACT, down, data, num))[:, 0, 0]
    assert np.all(np.abs(z.mean(0) - MEAN) < 5 * SD / np.sqrt(num))
    assert np.all(np.abs(z.var(0) - SD**2) < 5 * SD**2 * np.sqrt(2 / num))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gamma": 0.0}, "gamma=0.0 is not a positive number; choose one above 0."),
        ({"gamma": -1.0}, "gamma=-1.0 is not a positive number; choose one above 0."),
        ({"steps": 5, "burn_in": 5}, "burn-in=5 leaves nothing of steps=5; choose fewer, or more steps."),
        ({"kernel": "gibbs"}, "kernel='gibbs' is not known; choose from ula, sgld, mala, hmc, nuts, psgld, map."),
        ({"prior_sigma": "gamma:2"}, "'gamma:2' is no prior of standard deviations"),
        ({"sigma_min": 0.0}, "sigma-min=0.0 is not a positive number"),
        ({"chains": 0}, "chains=0 is out of range; choose 1 or more."),
        ({"prior": "energy", "prior_draws": 10}, "prior-draws=10 needs a Gaussian prior that is learned"),
        ({"prior": "energy", "prior_sigma": "gamma:2,0.1"}, "prior-sigma=gamma:2,0.1 belongs to a Gaussian prior"),
        ({"prior": "energy", "score": "mixed"}, "score=mixed needs a Gaussian prior whose σ is maximised"),
        ({"radius": 0.0}, "radius=0.0 is not a positive number"),
    ],
)
def test_bad_settings_end_in_a_sentence(settings, sentence):
    with pytest.raises(UsageError) as raised:
        FedPop(**settings).check()
    assert str(raised.value).startswith(sentence)
