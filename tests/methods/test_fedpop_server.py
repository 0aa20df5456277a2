"""FedPop's server: where its steps lead, and what a round of some clients stands for."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from priory.core.struct import replace
from priory.engine import manifest
from priory.fed.local import Optimiser
from priory.fed.method import Message
from priory.methods.fedpop import FedPop, Gradients, Server
from tests.methods.mixed_problem import RANK, best_prior, down_at, factor_task, posteriors, problem, sufficient
from tests.methods.test_fedpop import kernel_of
from tests.methods.verbs import aggregated, init_server

COUNTS = (6, 3, 5, 4, 8) * 4
TASK = factor_task(COUNTS)
SHARDS, PHI, MEAN, SD = problem(COUNTS, seed=3)


def server_at(method: FedPop, phi, mean, sd) -> Server:
    server = init_server(method, TASK, jax.random.key(0))
    down = down_at(method, TASK, phi, mean, sd)
    return replace(server, phi=down.phi, beta=down.beta)


@partial(jax.jit, static_argnames="num")
def run(method: FedPop, server: Server, num: int, rates, key):
    """Server after so many rounds of everybody, and β after each; step sizes of β are given round by round."""
    ids = jnp.arange(len(COUNTS))
    key_enrol, key_rounds = jax.random.split(key)
    down = method.broadcast(server)
    clients = jax.vmap(lambda key: method.init_client(TASK, down, key))(jax.random.split(key_enrol, len(COUNTS)))

    def one_round(carry, place):
        server, clients = carry
        rate, key = place
        key_clients, key_server = jax.random.split(key)
        now, down = replace(method, prior_step_size=rate), method.broadcast(server)

        def one(client, state, key):
            return now.client_update(TASK, down, state, SHARDS.of(client), key)[:2]

        clients, messages = jax.vmap(one)(ids, clients, jax.random.split(key_clients, len(COUNTS)))
        server, _ = now.aggregate(TASK, server, messages, key_server)
        return (server, clients), server.beta

    (server, _), trace = jax.lax.scan(one_round, (server, clients), (rates, jax.random.split(key_rounds, num)))
    return server, trace


def some_messages(num: int) -> Message:
    like = jax.eval_shape(FedPop().init_server, TASK, jax.random.key(0))
    draw = np.random.default_rng(2)
    beta, phi = jax.tree.map(
        lambda leaf: draw.normal(size=(num, *leaf.shape)).astype(np.float32), (like.beta, like.phi)
    )
    return Message(Gradients(beta, phi, {}), np.ones(num, np.float32))


@pytest.mark.slow  # eight runs of 300 rounds
def test_the_prior_ends_at_the_fixed_point_of_em():
    """Mean over the last half of the rounds, 8 runs; 5 standard errors over runs, and these are small."""
    still = Optimiser("sgd", 0.0)
    method = FedPop(kernel="mala", steps=12, burn_in=4, optimiser=still)
    num, runs = 300, 8
    mean, sd = best_prior(SHARDS, PHI)
    rates = np.float32(0.1 / (1 + np.arange(num) / 50))
    start = server_at(method, PHI, MEAN + 1.0, SD * 2)
    keys = jax.random.split(jax.random.key(1), runs)
    with jax.debug_key_reuse(False):  # in a vmap of a vmap JAX takes the keys for used twice
        trace = jax.vmap(lambda key: run(method, start, num, rates, key)[1])(keys)
    for found, exact in ((trace.mean, mean), (trace.log_sd, np.log(sd))):
        ends = kernel_of(found)[:, num // 2 :].mean(1)
        error = ends.std(0, ddof=1) / np.sqrt(runs)
        assert np.all(error < 0.02), error
        assert np.all(np.abs(ends.mean(0) - exact) < 5 * error), (ends.mean(0), exact, error)


def test_some_clients_stand_for_all_without_bias():
    """Over all subsets of 2 and of 3 of 5 clients the mean step is that of everybody: b/|A| is right."""
    method = FedPop(optimiser=Optimiser("sgd", 0.1), prior_step_size=0.3)
    task = replace(TASK, num_clients=5)
    server, messages = server_at(method, PHI, MEAN, SD), some_messages(5)

    def stepped(chosen):
        weight = np.isin(np.arange(5), chosen).astype(np.float32)
        after, _ = aggregated(method, task, server, replace(messages, weight=weight), jax.random.key(0))
        return after.phi, after.beta

    for size in (2, 3):
        steps = [stepped(chosen) for chosen in itertools.combinations(range(5), size)]
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *steps)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), mean, stepped(range(5)))


def test_a_step_goes_along_the_gradient_of_the_log_posterior():
    """φ by (b/|A|) ΣJ/|D|, β by ΣI/|A| and the prior's slope over b."""
    method = FedPop(optimiser=Optimiser("sgd", 0.1), prior_step_size=0.3, prior_sigma="gamma:2,0.5")
    server, messages = server_at(method, PHI, MEAN, SD), some_messages(4)
    after, _ = aggregated(method, TASK, server, messages, jax.random.key(0))
    b, n = len(COUNTS), sum(COUNTS)
    body = messages.payload.phi["Dense_0"]["kernel"].mean(0)
    np.testing.assert_allclose(
        after.phi["Dense_0"]["kernel"], server.phi["Dense_0"]["kernel"] + 0.1 * b / n * body, rtol=1e-5
    )
    np.testing.assert_allclose(
        kernel_of(after.beta.mean), MEAN + 0.3 * kernel_of(messages.payload.beta.mean).mean(0), rtol=1e-5
    )
    slope = 1 - 0.5 * SD  # σ ∂/∂σ of log σ − σ/2
    expected = np.log(SD) + 0.3 * (kernel_of(messages.payload.beta.log_sd).mean(0) + slope / b)
    np.testing.assert_allclose(kernel_of(after.beta.log_sd), expected, rtol=1e-5, atol=1e-6)


def test_the_mean_moves_in_units_of_its_sd_and_no_less_than_at_the_start():
    """A step of sgd goes u² times as far along ∇_μ, and that of log σ as far as ever."""
    method = FedPop(optimiser=Optimiser("sgd", 0.1), prior_step_size=0.3, prior_sd=0.6)
    server, messages = server_at(method, PHI, MEAN, SD), some_messages(4)
    after, _ = aggregated(method, TASK, server, messages, jax.random.key(0))
    unit = np.array([0.8, 0.6])  # SD is 0.8 and 0.5
    slope = jax.tree.map(lambda leaf: leaf.mean(0), messages.payload.beta)
    np.testing.assert_allclose(kernel_of(after.beta.mean), MEAN + 0.3 * unit**2 * kernel_of(slope.mean), rtol=1e-5)
    np.testing.assert_allclose(kernel_of(after.beta.log_sd), np.log(SD) + 0.3 * kernel_of(slope.log_sd), rtol=1e-5)


@jax.jit
def movement_after(method, server, messages, num):
    """What a server says of its movement after so many rounds of the same messages."""

    def one(_, carry):
        return method.aggregate(TASK, carry[0], messages, jax.random.key(0))

    start = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: one(0, (server, {}))[1]))
    return jax.lax.fori_loop(0, num, one, (server, start))[1]


@pytest.mark.parametrize(("rounds", "counted"), [(1000, 200), (10, 20)])
def test_a_steady_movement_is_that_of_a_fifth_of_the_rounds_or_of_twenty(rounds, counted):
    """Of log σ, which sgd moves by as much in every round."""
    pace = 1e-4
    method = FedPop(optimiser=Optimiser("sgd", 0.0), prior_step_size=pace)
    slope = jax.tree.map(np.ones_like, some_messages(1))
    slope = replace(slope, payload=jax.tree.map(np.ones_like, slope.payload))
    server = server_at(method, PHI, MEAN, SD)
    found = movement_after(method, replace(server, recent=server.beta), slope, rounds)["sd_moved"]
    assert found == pytest.approx(pace * counted, rel=0.01)


def test_runs_from_before_the_units_have_the_server_that_they_had():
    """Their steps have the unit of the outcome, and what they keep is not compared with where it was."""
    kept = manifest.to_table(FedPop(prior_units="outcome", score="centred", prior_step_size=0.01))
    del kept["prior_units"]
    method = manifest.from_table(FedPop, kept)
    assert method.prior_units == "outcome"
    server = init_server(method, TASK, jax.random.key(0))
    assert jax.tree.leaves(server.recent) == []
    assert jax.tree.leaves(init_server(FedPop(), TASK, jax.random.key(0)).recent) != []


def test_a_collapsing_sigma_is_stopped_at_its_bound_and_counted():
    method = FedPop(prior_step_size=1e4, sigma_min=0.01, optimiser=Optimiser("sgd", 0.0))
    server, messages = server_at(method, PHI, MEAN, SD), some_messages(3)
    down = jax.tree.map(lambda leaf: -np.abs(leaf), messages.payload.beta.log_sd)
    messages = replace(messages, payload=replace(messages.payload, beta=replace(messages.payload.beta, log_sd=down)))
    after, info = aggregated(method, TASK, server, messages, jax.random.key(0))
    np.testing.assert_allclose(np.exp(kernel_of(after.beta.log_sd)), 0.01, rtol=1e-5)
    assert info["projected"] == RANK
    assert after.projected == RANK


def test_fixed_effects_stay_in_their_ball():
    method = FedPop(optimiser=Optimiser("sgd", 100.0), radius=2.0)
    after, _ = aggregated(method, TASK, server_at(method, PHI, MEAN, SD), some_messages(3), jax.random.key(0))
    np.testing.assert_allclose(np.linalg.norm(after.phi["Dense_0"]["kernel"]), 2.0, rtol=1e-5)


def test_a_frozen_prior_stays():
    method = FedPop(freeze_prior=True, prior_sd=0.7)
    server = init_server(method, TASK, jax.random.key(0))
    assert kernel_of(server.beta.mean).tolist() == [0.0, 0.0]
    after, _ = aggregated(method, TASK, server, some_messages(3), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, after.beta, server.beta)
    np.testing.assert_allclose(np.exp(kernel_of(after.beta.log_sd)), 0.7, rtol=1e-6)


@pytest.mark.parametrize("hyper", ["gamma:2,1"])
def test_full_bayes_draws_the_prior_from_its_posterior(hyper):
    """Against a Gibbs sampler in numpy with exact conditionals; 5 standard errors of both by batch means."""
    method = FedPop(
        kernel="mala", steps=10, burn_in=0, prior_draws=800, prior_sigma=hyper, optimiser=Optimiser("sgd", 0.0)
    )
    server, _ = run(method, server_at(method, PHI, MEAN, SD), 800, np.zeros(800, np.float32), jax.random.key(5))
    ours = np.concatenate([kernel_of(server.crowd.mean), np.exp(kernel_of(server.crowd.log_sd))], axis=1)[100:]
    draw = np.random.default_rng(0)
    mean, sd = MEAN.copy(), SD.copy()
    said = sufficient(SHARDS, PHI)
    grid = np.linspace(0.02, 4, 2000)
    b, log_hyper = len(COUNTS), stats.gamma.logpdf(grid, 2, scale=1.0) - (len(COUNTS) - 1) * np.log(grid)
    kept = []
    for _ in range(3000):
        centre, covariance = posteriors(*said, mean, sd)
        z = centre + np.einsum("kij,kj->ki", np.linalg.cholesky(covariance), draw.normal(size=centre.shape))
        for j in range(RANK):
            log_p = log_hyper - np.sum((z[:, j] - z[:, j].mean()) ** 2) / (2 * grid**2)
            p = np.exp(log_p - log_p.max())
            sd[j] = draw.choice(grid, p=p / p.sum())
            mean[j] = draw.normal(z[:, j].mean(), sd[j] / np.sqrt(b))
        kept.append(np.concatenate([mean, sd]))
    theirs = np.array(kept)[200:]

    def estimate(draws):
        batches = np.array([part.mean(0) for part in np.array_split(draws, 20)])
        return draws.mean(0), batches.std(0, ddof=1) / np.sqrt(20)

    for power in (1, 2):
        (a, error_a), (c, error_c) = estimate(ours**power), estimate(theirs**power)
        assert np.all(np.abs(a - c) < 5 * np.hypot(error_a, error_c)), (a, c, error_a, error_c)
