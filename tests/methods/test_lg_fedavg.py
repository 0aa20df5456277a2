"""LG-FedAvg: bodies stay, the head travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, LGFedAvg, Local, Optimiser, UsageError, Work
from priory.core import rng, trees
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods.lg_fedavg import Shared
from priory.models.model import Head, Params
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, distance, init_client, init_server, parameters, personalised, updated

WORK, OPTIMISER = Work(epochs=2, batch_size=3), Optimiser(step_size=0.05, momentum=0.9)
METHOD = LGFedAvg(OPTIMISER, WORK)


def joined(down: Shared, body: Params) -> Params:
    return Params(trees.merge(down.weights, body.weights), trees.merge(down.stats, body.stats))


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


def test_head_and_body_take_one_gradient_step_together():
    """On ½(y − body − head)² both have the same gradient; the head is sent, the body kept."""
    size, data = 0.1, constant_shards(4.0).of(jnp.int32(0))
    down = Shared({"body": None, "head": jnp.float32(0.5)}, {}, jnp.uint32(0))
    method = LGFedAvg(Optimiser(step_size=size), Work(batch_size=4))
    client = Params({"body": jnp.float32(1.0), "head": None})
    body, message, _ = updated(method, quadratic_task(), down, client, data, rng.root(0))
    np.testing.assert_allclose(body.weights["body"], 1.0 + size * 2.5, atol=1e-6)
    np.testing.assert_allclose(message.payload.weights["head"], 0.5 + size * 2.5, atol=1e-6)
    assert body.weights["head"] is None
    assert message.payload.weights["body"] is None
    assert float(message.weight) == 4


def test_local_and_shared_parts_settle_so_that_every_client_reaches_its_own_optimum():
    """Gaps shrink by 1 − 2η + η = 1 − η a round: heads of ±1 cancel out in the mean, bodies do not."""
    task, shards, size, rounds = quadratic_task(), constant_shards(-1.0, 1.0), 0.1, 10
    method = LGFedAvg(Optimiser(step_size=size), Work(batch_size=4))
    server = init_server(method, task, rng.root(0))
    bodies = [init_client(method, task, server, rng.root(c)) for c in range(2)]
    for t in range(rounds):
        visits = [updated(method, task, server, bodies[c], shards.of(jnp.int32(c)), rng.root(t)) for c in range(2)]
        bodies = [visit[0] for visit in visits]
        stack = jax.tree.map(lambda *leaves: np.stack(leaves), *[visit[1] for visit in visits])
        server, _ = aggregated(method, task, server, stack, rng.root(t))
    for body, centre in zip(bodies, (-1.0, 1.0), strict=True):
        personal = personalised(method, task, server, body, shards.of(jnp.int32(0)), rng.root(0))
        np.testing.assert_allclose(personal.weights["head"], 0, atol=1e-6)
        np.testing.assert_allclose(personal.weights["body"], centre * (1 - (1 - size) ** rounds), atol=1e-6)


def test_nothing_shared_is_local_training():
    task, data = replace(tiny_task(), is_head=Head("nothing")), tiny_shards().of(jnp.int32(0))
    down = init_server(METHOD, task, rng.root(0))
    mine = parameters(task, rng.root(1))
    body, message, _ = updated(METHOD, task, down, mine, data, rng.root(2))
    alone, _, _ = updated(Local(OPTIMISER, WORK), task, (), mine, data, rng.root(2))
    close(body, alone)
    assert jax.tree.leaves(message.payload) == []
    close(personalised(METHOD, task, down, body, data, rng.root(3)), alone)


def test_everything_shared_is_fedavg():
    task, data = replace(tiny_task(), is_head=Head("")), tiny_shards().of(jnp.int32(0))
    down = init_server(METHOD, task, rng.root(0))
    body = init_client(METHOD, task, down, rng.root(1))
    assert jax.tree.leaves(body) == []
    _, message, _ = updated(METHOD, task, down, body, data, rng.root(2))
    plain = updated(FedAvg(OPTIMISER, WORK), task, Params(down.weights, down.stats), (), data, rng.root(2))[1]
    close(message.payload, plain.payload)
    assert float(message.weight) == float(plain.weight)


def test_all_clients_begin_with_one_network():
    task = tiny_task()
    down = init_server(METHOD, task, rng.root(0))
    first, second = (init_client(METHOD, task, down, rng.root(c)) for c in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other = init_server(METHOD, task, rng.root(1))
    assert distance(init_client(METHOD, task, other, rng.root(1)).weights, first.weights) > 0.1
    assert jax.tree.structure(joined(down, first)) == jax.tree.structure(parameters(task, rng.root(0)))


def test_the_seed_outlives_a_round():
    server = Shared({"body": None, "head": jnp.float32(0.5)}, {}, jnp.uint32(7))
    stack = Message(Params({"body": None, "head": jnp.array([1.0, 4.0])}), jnp.array([1.0, 2.0]))
    after, _ = aggregated(METHOD, quadratic_task(), server, stack, rng.root(0))
    assert int(after.seed) == 7
    np.testing.assert_allclose(after.weights["head"], 3.0)  # weighted by examples


@pytest.mark.parametrize(("head", "travels"), [("Dense_1", False), ("BatchNorm_0|Dense_1", True)])
def test_statistics_stay_with_the_part_that_they_are_in(head, travels):
    task, data = replace(tiny_task(), is_head=Head(head)), tiny_shards().of(jnp.int32(0))
    down = init_server(METHOD, task, rng.root(0))
    body, message, _ = updated(METHOD, task, down, init_client(METHOD, task, down, rng.root(1)), data, rng.root(2))
    assert bool(jax.tree.leaves(message.payload.stats)) is travels
    assert bool(jax.tree.leaves(body.stats)) is not travels
    kept = message.payload.stats if travels else body.stats
    before = parameters(task, jax.random.key(down.seed)).stats
    assert distance(jax.tree.leaves(kept), jax.tree.leaves(before)) > 0.1


def test_a_bad_rate_ends_in_one_sentence():
    with pytest.raises(UsageError, match=r"step-size=-1\.0 .*\.$"):
        LGFedAvg(optimiser=Optimiser(step_size=-1.0)).check()
