"""APFL: a mixture of the global model and a client's own, and the share that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import APFL, FedAvg, Local, Optimiser, UsageError, Work
from priory.core import rng
from priory.methods.apfl import Own
from priory.models.model import Params
from tests.methods.problems import constant_shards, plain_task, quadratic_task, tiny_shards
from tests.methods.verbs import distance, init_client, parameters, personalised, updated

CENTRE = 3.0


def at(body: float) -> Params:
    return Params({"body": jnp.float32(body), "head": jnp.float32(0)})


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_a_step_moves_both_models_by_the_chain_rule(alpha):
    shared, own, size = 1.0, 2.0, 0.1
    data = constant_shards(CENTRE).of(jnp.int32(0))
    method = APFL(alpha=alpha, optimiser=Optimiser(step_size=size), work=Work(steps=1))
    client = Own(at(own), jnp.float32(alpha))
    client, message, _ = updated(method, quadratic_task(), at(shared), client, data, rng.root(0))
    mixed = alpha * own + (1 - alpha) * shared
    np.testing.assert_allclose(message.payload.weights["body"], shared + size * (CENTRE - shared), atol=1e-6)
    np.testing.assert_allclose(client.network.weights["body"], own + size * alpha * (CENTRE - mixed), atol=1e-6)


def test_the_mixture_goes_to_the_client_s_own_optimum_though_the_global_weights_stay():
    alpha, size, rounds, start = 0.5, 0.1, 20, -1.0
    data, task = constant_shards(CENTRE).of(jnp.int32(0)), quadratic_task()
    method = APFL(alpha=alpha, optimiser=Optimiser(step_size=size), work=Work(steps=1))
    client = init_client(method, task, at(start), rng.root(0))
    for t in range(rounds):
        client, _, _ = updated(method, task, at(start), client, data, rng.root(t))
    personal = personalised(method, task, at(start), client, data, rng.root(0))
    gap = (CENTRE - start) * (1 - 2 * size * alpha**2) ** rounds  # α from the chain rule, α from the mixture
    np.testing.assert_allclose(personal.weights["body"] + personal.weights["head"], CENTRE - gap, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_what_is_sent_is_fedavg(alpha):
    task, data = plain_task(), tiny_shards().of(jnp.int32(0))
    down, mine = parameters(task, rng.root(0)), parameters(task, rng.root(1))
    work, optimiser = Work(epochs=2, batch_size=3), Optimiser(step_size=0.05, momentum=0.9)
    method = APFL(alpha=alpha, optimiser=optimiser, work=work)
    _, sent, _ = updated(method, task, down, Own(mine, jnp.float32(alpha)), data, rng.root(2))
    _, plain, _ = updated(FedAvg(optimiser, work), task, down, (), data, rng.root(2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sent.payload, plain.payload)


def test_a_share_of_one_is_local_training():
    task, data = plain_task(), tiny_shards().of(jnp.int32(0))
    down, mine = parameters(task, rng.root(0)), parameters(task, rng.root(1))
    work, optimiser = Work(epochs=2, batch_size=3), Optimiser(step_size=0.05, momentum=0.9)
    method = APFL(alpha=1.0, optimiser=optimiser, work=work)
    client, _, _ = updated(method, task, down, Own(mine, jnp.float32(1)), data, rng.root(2))
    alone, _, _ = updated(Local(optimiser, work), task, (), mine, data, rng.root(2))
    personal = personalised(method, task, down, client, data, rng.root(3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), personal, alone)


def test_a_share_of_zero_is_the_global_model():
    task, data = plain_task(), tiny_shards().of(jnp.int32(0))
    down, mine = parameters(task, rng.root(0)), parameters(task, rng.root(1))
    method = APFL(alpha=0.0, work=Work(batch_size=3))
    client, _, _ = updated(method, task, down, Own(mine, jnp.float32(0)), data, rng.root(2))
    jax.tree.map(np.testing.assert_array_equal, client.network.weights, mine.weights)  # it takes no step
    personal = personalised(method, task, down, client, data, rng.root(3))
    jax.tree.map(np.testing.assert_array_equal, personal.weights, down.weights)


def test_an_adaptive_share_takes_one_gradient_step_a_round():
    shared, own, alpha, size = 1.0, 2.0, 0.5, 0.1
    data = constant_shards(CENTRE).of(jnp.int32(0))
    method = APFL(alpha=0.9, adaptive=True, optimiser=Optimiser(step_size=size), work=Work(steps=3))
    client = Own(at(own), jnp.float32(alpha))  # what the client has learned, and not the 0.9 that it began with
    client, _, info = updated(method, quadratic_task(), at(shared), client, data, rng.root(0))
    gap = CENTRE - (alpha * own + (1 - alpha) * shared)
    expected = alpha + size * (own - shared) * gap  # along −⟨v − w, ∇f(v̄)⟩ at the first minibatch
    np.testing.assert_allclose(client.alpha, expected, atol=1e-6)
    np.testing.assert_allclose(info["alpha"], expected, atol=1e-6)


@pytest.mark.parametrize(("own", "end"), [(2.0, 1.0), (-5.0, 0.0)])
def test_an_adaptive_share_stays_between_zero_and_one(own, end):
    data = constant_shards(30.0).of(jnp.int32(0))
    method = APFL(adaptive=True, optimiser=Optimiser(step_size=0.4), work=Work(steps=1))
    client = Own(at(own), jnp.float32(0.5))
    client, _, _ = updated(method, quadratic_task(), at(1.0), client, data, rng.root(0))
    assert float(client.alpha) == end


def test_a_fixed_share_is_that_of_the_method():
    """So that a schedule can change it, whatever was kept at enrolment."""
    down, client = at(0.0), Own(at(4.0), jnp.float32(0.5))
    data = constant_shards(CENTRE).of(jnp.int32(0))
    personal = personalised(APFL(alpha=0.25), quadratic_task(), down, client, data, rng.root(0))
    np.testing.assert_allclose(personal.weights["body"], 1.0)


def test_a_client_begins_with_the_global_model():
    task = plain_task()
    down = parameters(task, rng.root(0))
    client = init_client(APFL(alpha=0.3, adaptive=True), task, down, rng.root(1))
    assert distance(client.network, down) == 0
    np.testing.assert_allclose(client.alpha, 0.3)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_a_share_outside_the_unit_interval_ends_in_one_sentence(alpha):
    with pytest.raises(UsageError, match=rf"alpha={alpha} lies outside \[0, 1\]; choose one such as 0.5\.$"):
        APFL(alpha=alpha).check()
