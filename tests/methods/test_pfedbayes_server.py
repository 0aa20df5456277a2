"""pFedBayes: what its server makes of what it receives, and a run of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import Optimiser, PFedBayes, UsageError, Work
from priory.bayes import gaussian
from priory.core import rng, trees
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods._blocks.coupled_vi import init_client_state
from priory.methods.pfedbayes import Moments
from tests.methods.gaussian_problem import (
    ADAM,
    COUNTS,
    DOWN,
    M_W,
    NUM,
    REGRESSION,
    S_W,
    SHARDS,
    TEN_STEPS,
    belief,
    flat,
    pinned,
    visited,
)
from tests.methods.gaussian_problem import (
    next_server as after,
)
from tests.methods.problems import tiny_task
from tests.methods.verbs import broadcast, init_server, parameters, updated

# --- the server ------------------------------------------------------------------------------------------------------


def stacked(members):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *members)


SENT = [belief(M_W + shift, S_W * factor) for shift, factor in ((0.3, 0.8), (-0.2, 1.5), (0.1, 1.0))]
WEIGHT = np.ones(3, np.float32)


@jax.jit
def moments_of(sent, centre):
    return Moments(*gaussian.moments(gaussian.of(sent.weights), centre), sent.stats)


def messages_of(method, sent=SENT, weight=WEIGHT):
    if method.average == "moments":
        centre = DOWN.weights.mean
        sent = [moments_of(one, centre) for one in sent]
    return Message(stacked(sent), weight)


def next_server(method, sent=SENT, weight=WEIGHT):
    return after(method, REGRESSION, DOWN, messages_of(method, sent, weight))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 1.5])
def test_the_server_goes_the_way_of_beta_to_the_mean_of_the_coordinates(beta):
    mean = np.mean([flat(one) for one in SENT], axis=0)
    expected = (1 - beta) * flat(DOWN) + beta * mean
    np.testing.assert_allclose(flat(next_server(pinned(beta=beta))), expected, atol=1e-6)


@pytest.mark.parametrize("average", ["params", "moments"])
def test_without_beta_the_server_is_frozen(average):
    np.testing.assert_array_equal(flat(next_server(pinned(beta=0.0, average=average))), flat(DOWN))


@pytest.mark.parametrize("average", ["params", "moments"])
def test_one_client_alone_makes_the_prior(average):
    found = next_server(pinned(average=average), SENT[:1], WEIGHT[:1])
    np.testing.assert_allclose(flat(found), flat(SENT[0]), atol=2e-6)


def test_an_average_of_moments_is_the_prior_of_least_mean_divergence():
    members = [gaussian.of(one.weights) for one in SENT]
    means, sds = (
        np.stack([flat(part) for part in parts]) for parts in zip(*((q.mean, q.sd) for q in members), strict=True)
    )
    centre = means.mean(axis=0)
    spread = np.sqrt(np.mean(sds**2 + (means - centre) ** 2, axis=0))
    found = gaussian.of(next_server(pinned(average="moments")).weights)
    np.testing.assert_allclose(flat(found.mean), centre, atol=1e-6)
    np.testing.assert_allclose(flat(found.sd), spread, rtol=1e-5)
    printed = gaussian.of(next_server(pinned()).weights)
    assert mean_divergence(members, found) < mean_divergence(members, printed) - 0.05


divergence = jax.jit(gaussian.kl)


def mean_divergence(members, w):
    return np.mean([float(divergence(q, w)) for q in members])


def test_moments_are_those_of_the_posterior_under_the_prior_that_was_broadcast():
    method = pinned(average="moments", optimiser=ADAM, work=TEN_STEPS)
    client, message, _ = visited(method)
    assert np.abs(flat(client.q) - flat(DOWN)).max() > 0.05  # ten steps of 0.01
    jax.tree.map(np.testing.assert_array_equal, message.payload, moments_of(client.q, DOWN.weights.mean))
    _, other, _ = visited(replace(method, prior_rate=5.0))
    np.testing.assert_array_equal(flat(other.payload), flat(message.payload))  # no copy of the prior follows it


def test_with_moments_beta_goes_the_way_to_the_matching_prior():
    matched = next_server(pinned(average="moments"))
    found = next_server(pinned(average="moments", beta=0.5))
    np.testing.assert_allclose(flat(found), 0.5 * flat(DOWN) + 0.5 * flat(matched), atol=1e-6)


@pytest.mark.parametrize("average", ["params", "moments"])
def test_an_absent_message_does_not_count(average):
    method, weight = pinned(average=average), np.array([1.0, 0.0, 1.0], np.float32)
    messages = messages_of(method, weight=weight)
    gone = np.array([0, np.nan, 0], np.float32)[:, None, None]
    payload = jax.tree.map(lambda leaf: leaf + gone, messages.payload)
    found = after(method, REGRESSION, DOWN, Message(payload, weight))
    np.testing.assert_allclose(flat(found), flat(next_server(method, SENT[::2], WEIGHT[:2])), atol=1e-6)


def test_a_stack_of_moments_is_as_good_as_its_mean():
    method, weight = pinned(average="moments"), np.array([1.0, 2.0, 0.5], np.float32)
    messages = messages_of(method, weight=weight)
    mean = jax.tree.map(lambda leaf: np.average(leaf, axis=0, weights=weight)[None], messages.payload)
    one = after(method, REGRESSION, DOWN, Message(mean, np.sum(weight)[None]))
    np.testing.assert_allclose(flat(one), flat(after(method, REGRESSION, DOWN, messages)), atol=1e-6)


@pytest.mark.parametrize("average", ["params", "moments"])
def test_twice_as_many_numbers_as_weights_go_each_way(average):
    method = pinned(average=average)
    assert trees.num_bytes(broadcast(method, DOWN)) == 2 * NUM * 4
    assert trees.num_bytes(visited(method)[1].payload) == 2 * NUM * 4


def test_all_clients_with_examples_weigh_the_same():
    for client in range(len(COUNTS)):
        assert float(visited(pinned(), data=SHARDS.of(jnp.int32(client)))[1].weight) == 1


def test_the_first_server_is_a_fresh_network_of_the_given_width():
    task, key = tiny_task(), jax.random.key(4)
    server = init_server(pinned(rho=-1.0), task, key)
    drawn = parameters(task, jax.random.clone(key))
    np.testing.assert_array_equal(flat(server.weights.mean), flat(drawn.weights))
    np.testing.assert_array_equal(flat(server.weights.rho), -1)
    np.testing.assert_array_equal(flat(server.stats), flat(drawn.stats))


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation():
    """Five clients and a newcomer, three features, numbers to predict."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(72, 3)).astype(np.float32)
    client = np.repeat(np.arange(6), 12)
    y = np.sum(x * draw.normal(size=(6, 3))[client], axis=1).astype(np.float32)
    return priory.data.from_arrays(x, y, client, test=0.25, newcomers=0.17, seed=0, task="regression")


RUN = pinned(optimiser=Optimiser("adam", 0.01), work=Work(steps=3, batch_size=4))


@pytest.fixture(scope="module")
def run(federation):
    """One round in which all five run and two upload."""
    return priory.simulate(RUN, federation, model="linear", rounds=1, cohort=2, active=5, seed=0, eval_every=0)


@pytest.mark.slow  # a whole run; tests/engine/test_rounds.py has who is active
def test_all_clients_run_and_two_of_them_make_the_prior(run):
    root = rng.root(0)
    server = init_server(RUN, run.task, rng.key(root, rng.Stream.INIT))
    payloads = []
    for client in range(5):
        slot = run.evaluator.slot(client)
        joined, kept = slot.joined, slot.state
        data, key = run.evaluator.ready.train.of(jnp.int32(client)), rng.key(root, rng.Stream.CLIENT, 0, client)
        state, message, _ = updated(RUN, run.task, server, init_client_state(server, RUN.optimiser), data, key)
        assert joined
        np.testing.assert_allclose(flat(kept), flat(state), atol=1e-6)
        payloads.append(flat(message.payload))
    found = flat(run.server)
    fits = [
        np.allclose((payloads[i] + payloads[j]) / 2, found, atol=1e-6) for i, j in itertools.combinations(range(5), 2)
    ]
    assert sum(fits) == 1


@pytest.mark.slow  # needs the run of the test above
def test_a_run_counts_two_numbers_a_weight_each_way(run):
    weights = 3 + 1 + 1  # a kernel, a bias and the logarithm of the noise
    assert run.communication == {"down_bytes": 2 * weights * 4, "up_bytes": 2 * weights * 4}


@pytest.mark.slow  # needs the run of the test above
def test_a_client_that_never_took_part_is_onboarded_from_the_prior(run, federation):
    assert len(run.newcomers.per_client["rmse"]) == 1
    own = federation.rows(5, "train")
    model = run.onboard(federation.x[own], federation.y[own])
    moved = np.abs(flat(model.posterior.weights.mean) - flat(run.server.weights.mean))
    assert 0 < moved.max() <= 3 * 0.01 * 1.2  # three steps of Adam
    nothing = run.onboard(federation.x[own])
    np.testing.assert_array_equal(flat(nothing.posterior), flat(run.server))


def test_a_bad_value_ends_a_run_before_anything_is_traced(federation, monkeypatch):
    def never(*args):
        raise AssertionError("the method was traced")

    monkeypatch.setattr(PFedBayes, "init_server", never)
    with pytest.raises(UsageError, match=r"zeta=-1.0 is out of range"):
        priory.simulate(PFedBayes(zeta=-1.0), federation, model="linear", rounds=1)
