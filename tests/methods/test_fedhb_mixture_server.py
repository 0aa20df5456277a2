"""FedHB-Mixture: the server's formulas, written again in float64 NumPy, and what travels.

Networks without batch normalisation have d numbers, which can be counted.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, Work
from priory.core import rng, trees
from priory.core.struct import replace
from priory.fed.method import Message
from priory.models import Params
from tests.methods.mixture_problem import (
    NUM_CLIENTS,
    each_prior,
    each_size,
    em_step,
    flat,
    messages_of,
    mlp_task,
    network_of,
    pinned,
    rows,
    server_at,
    shared_out,
    shares_of,
    some_points,
    stacked_messages,
)
from tests.methods.problems import quadratic_task, tiny_shards
from tests.methods.verbs import aggregated, init_client, init_server, personalised, population

# --- the server ------------------------------------------------------------------------------------------------------


@each_prior
@each_size
@pytest.mark.parametrize("num", [1, 2, 4])
def test_the_server_is_eq_24(num, num_heard, prior_mean):
    points, prototypes, variance = some_points(num_heard), some_points(num, seed=1), 0.4
    method = pinned(num_prototypes=num, variance=variance, prior_mean=prior_mean, gate=False)
    server, info = em_step(method, points, prototypes)
    share = shares_of(points, prototypes, variance)
    shrinkage = variance / NUM_CLIENTS if prior_mean == "zero" else 0.0
    expected = (share.T @ points / num_heard) / (shrinkage + share.mean(axis=0)[:, None])
    np.testing.assert_allclose(rows(server.networks), expected, atol=2e-6)
    np.testing.assert_allclose([info[f"share_{j + 1}"] for j in range(num)], share.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("variance", [0.1, 2.0])
@each_prior
@each_size
def test_one_prototype_is_a_multiple_of_the_plain_mean_of_whoever_took_part(num_heard, prior_mean, variance):
    points = some_points(num_heard)
    method = pinned(num_prototypes=1, variance=variance, prior_mean=prior_mean, gate=False)
    found = rows(em_step(method, points, np.zeros((1, 6)))[0].networks)[0]
    factor = 1 / (1 + variance / NUM_CLIENTS) if prior_mean == "zero" else 1.0
    np.testing.assert_allclose(found, factor * points.mean(axis=0), rtol=1e-5)
    if num_heard == NUM_CLIENTS and prior_mean == "zero":
        np.testing.assert_allclose(found, points.sum(axis=0) / (NUM_CLIENTS + variance), rtol=1e-5)


@pytest.mark.parametrize(("prior_mean", "variance"), [("zero", 1e-12), ("learned", 1e-12), ("learned", 2.0)])
def test_a_variance_of_nearly_zero_or_a_learned_prior_mean_is_the_average_of_fedavg(prior_mean, variance):
    points, prototypes = some_points(), some_points(1, seed=1)
    method = pinned(num_prototypes=1, variance=variance, prior_mean=prior_mean, gate=False)
    sent, start = Message(Params(network_of(points)), np.ones(5, np.float32)), Params(network_of(points[0]))
    plain, _ = aggregated(FedAvg(), quadratic_task(), start, sent, rng.root(0))
    np.testing.assert_allclose(rows(em_step(method, points, prototypes)[0].networks)[0], flat(plain.weights), rtol=1e-5)


@pytest.mark.parametrize("num", [1, 3])
def test_under_an_endless_variance_prototypes_are_zero(num):
    method = pinned(num_prototypes=num, variance=1e12, prior_mean="zero", gate=False)
    found = rows(em_step(method, some_points(), some_points(num, seed=1))[0].networks)
    assert np.max(np.abs(found)) < 1e-10


@pytest.mark.parametrize("num_heard", [1, 2, 4])
@pytest.mark.parametrize("linear", [False, True])
def test_participants_speak_for_all_without_bias(linear, num_heard):
    points, prototypes, variance = some_points(), some_points(2, seed=1), 0.4
    method = pinned(num_prototypes=2, variance=variance, prior_mean="zero", gate=False, linear=linear)

    def told(chosen):
        """Mean shares and mean offsets: all that the server learns from those who took part."""
        messages = shared_out(points[chosen], prototypes, variance) if linear else messages_of(points[chosen])
        server, info = aggregated(method, quadratic_task(NUM_CLIENTS), server_at(prototypes), messages, rng.root(0))
        share = np.array([info["share_1"], info["share_2"]], np.float64)[:, None]
        return share, rows(server.networks) * (variance / NUM_CLIENTS + share) - share * prototypes

    subsets = [told(list(chosen)) for chosen in itertools.combinations(range(NUM_CLIENTS), num_heard)]
    for mean, whole in zip(map(np.mean, zip(*subsets, strict=True), [0, 0]), told(list(range(5))), strict=True):
        np.testing.assert_allclose(mean, whole, atol=2e-6)
    assert np.ptp([share[0] for share, _ in subsets]) > 0.05  # they do differ


@each_prior
@pytest.mark.parametrize("num", [1, 3])
def test_shares_tell_the_server_as_much_as_the_networks(num, prior_mean):
    points, prototypes = some_points(), some_points(num, seed=1)
    method = pinned(num_prototypes=num, variance=0.4, prior_mean=prior_mean, gate=False)
    plain, _ = em_step(method, points, prototypes)
    linear, task = replace(method, linear=True), quadratic_task(NUM_CLIENTS)
    sums, _ = aggregated(linear, task, server_at(prototypes), shared_out(points, prototypes, 0.4), rng.root(0))
    np.testing.assert_allclose(flat(sums), flat(plain), atol=2e-6)


def test_a_stack_of_shares_and_its_weighted_mean_give_the_same_server():
    method, task = pinned(num_prototypes=2, linear=True, work=Work(epochs=2, batch_size=3)), mlp_task()
    server = init_server(method, task, rng.root(0))
    messages = stacked_messages(method, task, server, tiny_shards((5, 5, 5)))
    messages = replace(messages, weight=jnp.array([1.0, 0.0, 3.0]))
    mean = jax.jit(trees.weighted_mean)(
        messages.payload, messages.weight, jax.tree.map(lambda x: np.asarray(x)[0], messages.payload)
    )
    one = Message(jax.tree.map(lambda leaf: np.asarray(leaf)[None], mean), jnp.array([4.0]))
    assert method.linear
    found = [aggregated(method, task, server, sent, rng.root(0))[0] for sent in (messages, one)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), *found)


def test_clients_that_send_shares_give_the_server_that_networks_give():
    plain = pinned(num_prototypes=2, work=Work(epochs=2, batch_size=3))
    task, shards = mlp_task(), tiny_shards((5, 5, 5))
    server = init_server(plain, task, rng.root(0))
    found = [
        aggregated(method, task, server, stacked_messages(method, task, server, shards), rng.root(0))[0]
        for method in (plain, replace(plain, linear=True))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), *found)


@pytest.mark.parametrize(("empty", "prior_mean"), [("keep", "zero"), ("zero", "zero"), ("keep", "learned")])
@pytest.mark.parametrize("linear", [False, True])
def test_a_prototype_without_clients_is_kept_or_falls_to_zero(linear, empty, prior_mean):
    points, prototypes = some_points(), np.array([np.zeros(6), np.full(6, 100.0)])
    method = pinned(variance=0.4, gate=False, empty=empty, prior_mean=prior_mean, linear=linear)
    messages = shared_out(points, prototypes, 0.4) if linear else messages_of(points)
    server, info = aggregated(method, quadratic_task(NUM_CLIENTS), server_at(prototypes), messages, rng.root(0))
    assert float(info["share_2"]) == 0
    np.testing.assert_array_equal(rows(server.networks)[1], prototypes[1] if empty == "keep" else np.zeros(6))
    weight = 5.4 if prior_mean == "zero" else 5.0
    np.testing.assert_allclose(rows(server.networks)[0], points.sum(axis=0) / weight, rtol=1e-5)


@each_prior
def test_a_prototype_with_one_client_of_many_is_not_taken_for_empty(prior_mean):
    points = np.concatenate([np.zeros((9, 6)), np.full((1, 6), 3.0)])
    method = pinned(variance=0.1, prior_mean=prior_mean, gate=False)
    server, _ = em_step(method, points, np.array([np.zeros(6), np.full(6, 2.0)]), num_clients=10)
    np.testing.assert_allclose(
        rows(server.networks)[1], np.full(6, 3.0 / (1.1 if prior_mean == "zero" else 1.0)), rtol=1e-5
    )


# --- what travels ----------------------------------------------------------------------------------------------------


def num_floats(tree):
    assert trees.num_bytes(tree) % 4 == 0
    return trees.num_bytes(tree) // 4


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("num", [1, 3, 4])  # the gate has three outputs
def test_k_networks_and_a_gate_go_down_and_one_of_each_comes_up(num, gate):
    task, shards = mlp_task(num_clients=4, hidden=(4,)), tiny_shards((5, 5, 5))
    body, head = 5 * 4 + 4, 4 * 3 + 3
    d, gates = body + head, int(gate)

    def travels(**options):
        method = pinned(num_prototypes=num, gate=gate, **options)

        def both(key):
            key_init, key_enrol, key_update = jax.random.split(key, 3)
            down = method.broadcast(method.init_server(task, key_init))
            state = init_client(method, task, down, key_enrol)
            return down, method.client_update(task, down, state, shards.of(jnp.int32(0)), key_update)[1].payload

        down, up = jax.eval_shape(both, jax.eval_shape(lambda: jax.random.key(0)))
        return num_floats(down), num_floats(up)

    assert travels() == ((num + gates) * d, (1 + gates) * d)
    assert travels(start="last") == travels()
    assert travels(linear=True) == ((num + gates) * d, (num + gates) * d + num)
    # Under a frozen head, only bodies are learned: the head goes down once, and again as that of the gate.
    assert travels(update="body") == (num * body + head + gates * d, (1 + gates) * body)


def test_a_frozen_head_stays_as_it_was_drawn_until_a_client_is_personalised():
    task, shards = mlp_task(hidden=(4,)), tiny_shards((5, 5, 5))
    method = pinned(update="body", finetune_epochs=2)
    server = init_server(method, task, rng.root(0))
    after, _ = aggregated(method, task, server, stacked_messages(method, task, server, shards), rng.root(0))
    own = personalised(method, task, after, (), shards.of(jnp.int32(0)), rng.root(1))
    jax.tree.map(np.testing.assert_array_equal, after.frozen, server.frozen)
    gates = [trees.partition(one.gate.weights, task.is_head) for one in (server, after)]
    jax.tree.map(np.testing.assert_array_equal, gates[0][0], gates[1][0])
    assert np.max(np.abs(flat(gates[0][1]) - flat(gates[1][1]))) > 0
    shared = population(method, task, after, None, rng.root(2))
    head = trees.partition(shared.networks, task.is_head)[0]
    np.testing.assert_array_equal(rows(head), np.tile(flat(server.frozen), (2, 1)))
    assert np.max(np.abs(flat(trees.partition(own.networks, task.is_head)[0]) - flat(server.frozen))) > 0


reference = jax.jit(lambda method, *arguments: method.reference(*arguments))


@pytest.mark.parametrize("linear", [False, True])
def test_the_reference_of_a_client_is_the_prototype_it_is_near(linear):
    method, task, prototypes = pinned(gate=False, linear=linear), quadratic_task(NUM_CLIENTS), some_points(2)
    point = prototypes[1] + 0.01
    sent = shared_out(point[None], prototypes, 0.1) if linear else messages_of(point[None])
    payload = jax.tree.map(lambda leaf: np.asarray(leaf)[0], sent.payload)
    found = reference(method, task, server_at(prototypes), payload)
    assert jax.tree.structure(found) == jax.tree.structure(payload)
    expected = np.zeros(len(flat(payload))) if linear else flat(network_of(prototypes[1]))
    np.testing.assert_allclose(flat(found), expected, rtol=1e-6)
