"""SCAFFOLD: control variates are gradients, and local steps that they correct have the right fixed point."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, Optimiser, Scaffold, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods.scaffold import Control
from priory.models.model import Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, init_client, init_server, personalised, updated

CENTRE, START = 3.0, 1.0


def tree(value: float) -> dict[str, Any]:
    return {"body": jnp.float32(value), "head": jnp.float32(value)}


def at(body: float, variate: float = 0.0) -> Control:
    return Control({"body": jnp.float32(body), "head": jnp.float32(0)}, tree(variate), {})


@pytest.mark.parametrize(("client", "steps"), [(0, 4), (1, 8)])
def test_the_new_variate_is_the_mean_gradient_of_the_steps_that_a_client_took(client, steps):
    size, data = 0.1, constant_shards(CENTRE, CENTRE, counts=(3, 8)).of(jnp.int32(client))
    method = Scaffold(optimiser=Optimiser(step_size=size), work=Work(epochs=2, batch_size=2))
    variate, message, _ = updated(method, quadratic_task(), at(START), tree(0.0), data, rng.root(0))
    # Body and head move alike: the gap to the centre shrinks by 1 − 2η a step, and the gradient of each is −gap.
    gradients = -(CENTRE - START) * (1 - 2 * size) ** np.arange(steps)
    np.testing.assert_allclose(variate["body"], gradients.mean(), atol=1e-6)
    np.testing.assert_allclose(message.payload.variate["body"], gradients.mean(), atol=1e-6)


def test_a_step_is_corrected_by_the_difference_of_the_variates():
    size, own, server = 0.1, 0.7, -0.4
    method = Scaffold(optimiser=Optimiser(step_size=size), work=Work(steps=1))
    data = constant_shards(CENTRE).of(jnp.int32(0))
    variate, message, info = updated(method, quadratic_task(), at(START, server), tree(own), data, rng.root(0))
    gradient = -(CENTRE - START)
    np.testing.assert_allclose(message.payload.weights["body"], START - size * (gradient - own + server), atol=1e-6)
    np.testing.assert_allclose(variate["body"], gradient, atol=1e-5)  # option II undoes the correction
    np.testing.assert_allclose(message.payload.variate["body"], gradient - own, atol=1e-5)
    np.testing.assert_allclose(info["loss"], (CENTRE - START) ** 2 / 2 + np.log(2 * np.pi) / 2, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_with_momentum_the_variate_of_a_constant_gradient_is_that_gradient(steps):
    """Nearly constant: 40 steps go no further than 400 step sizes, which close 2 · 400 · 1e-5 of the gap."""
    method = Scaffold(optimiser=Optimiser(step_size=1e-5, momentum=0.9), work=Work(steps=steps))
    data = constant_shards(CENTRE).of(jnp.int32(0))
    variate, _, _ = updated(method, quadratic_task(), at(0.0), tree(0.0), data, rng.root(0))
    np.testing.assert_allclose(variate["body"], -CENTRE, rtol=1e-2)


@partial(jax.jit, static_argnums=1)
def a_round(method: Any, clients: int, server: Any, states: Any, shards: Any, key: Any) -> tuple[Any, Any]:
    task = quadratic_task(clients)

    def one(state: Any, client: Any) -> Any:
        new, message, _ = updated(method, task, server, state, shards.of(client), jax.random.fold_in(key, client))
        return new, replace(message, weight=jnp.float32(1))

    states, messages = jax.lax.map(lambda pair: one(*pair), (states, jnp.arange(clients)))
    return aggregated(method, task, server, messages, key)[0], states


def test_clients_with_different_work_agree_on_the_minimum_of_the_mean_loss():
    """FedAvg ends elsewhere: a client that takes K steps pulls by 1 − (1 − 2η)^K."""
    centres, counts, size = np.array([0.0, 4.0]), (1, 8), 0.1
    shards, optimiser, work = constant_shards(*centres, counts=counts), Optimiser(step_size=size), Work(batch_size=1)
    corrected, plain = Scaffold(optimiser=optimiser, work=work), FedAvg(optimiser, work)
    states = jax.tree.map(lambda leaf: np.zeros(2, np.float32), tree(0.0))
    server, other, nothing = at(START), Params(at(START).weights, {}), ()
    for t in range(100):
        server, states = a_round(corrected, 2, server, states, shards, rng.root(t))
        other, nothing = a_round(plain, 2, other, nothing, shards, rng.root(t))
    np.testing.assert_allclose(server.weights["body"] + server.weights["head"], centres.mean(), atol=1e-4)
    pull = 1 - (1 - 2 * size) ** np.array(counts)
    drifted = np.sum(pull * centres) / np.sum(pull)
    np.testing.assert_allclose(other.weights["body"] + other.weights["head"], drifted, atol=1e-4)
    assert abs(drifted - centres.mean()) > 1
    np.testing.assert_allclose(server.variate["body"], np.mean(states["body"]), atol=1e-5)  # c is the mean of the c_k


def test_variates_of_zero_are_fedavg():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    work, optimiser = Work(epochs=2, batch_size=3), Optimiser(step_size=0.05)
    method = Scaffold(optimiser=optimiser, work=work)
    server = init_server(method, task, rng.root(0))
    client = init_client(method, task, server, rng.root(1))
    _, message, _ = updated(method, task, server, client, data, rng.root(2))
    down = Params(server.weights, server.stats)
    _, plain, _ = updated(FedAvg(optimiser, work), task, down, (), data, rng.root(2))
    sent = Params(message.payload.weights, message.payload.stats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sent, plain.payload)
    personal, tuned = (
        personalised(one, task, broadcast, (), data, rng.root(3))
        for one, broadcast in ((method, server), (FedAvg(optimiser, work), down))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), personal, tuned)


@pytest.mark.parametrize("weight", [1.0, 7.0])
def test_the_server_variate_moves_by_the_share_of_clients_that_were_heard(weight):
    sent = Control({"body": jnp.array([2.0, 6.0, 9.0]), "head": np.zeros(3, np.float32)}, tree(0.0), {})
    sent = replace(sent, variate={"body": jnp.array([1.0, 2.0, 9.0]), "head": np.zeros(3, np.float32)})
    stack = Message(sent, weight * jnp.array([1.0, 1.0, 0.0]))
    server, _ = aggregated(Scaffold(server_step_size=0.5), quadratic_task(8), at(1.0, 0.25), stack, rng.root(0))
    np.testing.assert_allclose(server.variate["body"], 0.25 + 2 / 8 * 1.5)
    np.testing.assert_allclose(server.weights["body"], 1.0 + 0.5 * (4.0 - 1.0))


@pytest.mark.parametrize(("epochs", "count"), [(0, 4), (1, 0)])
def test_a_client_that_does_nothing_keeps_its_variate(epochs, count):
    data = constant_shards(0.0, CENTRE, counts=(4, count)).of(jnp.int32(1))
    method = Scaffold(work=Work(epochs=epochs))
    variate, message, _ = updated(method, quadratic_task(), at(START, 0.2), tree(0.7), data, rng.root(0))
    np.testing.assert_allclose(variate["body"], 0.7)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(message.payload.variate))
    assert float(message.weight) == float(count > 0)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Scaffold(server_step_size=0.0), "server-step-size=0.0"),
        (Scaffold(optimiser=Optimiser("adam")), "kind=adam .*; use sgd"),
        (Scaffold(optimiser=Optimiser(clip=1.0)), "clip=1.0 .*; leave it out"),
        (Scaffold(finetune_epochs=-1), "finetune-epochs=-1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_ends_in_one_sentence(method, says):
    with pytest.raises(UsageError, match=says):
        method.check()
