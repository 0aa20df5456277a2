"""FedHB-Mixture: clients that reduce to those of FedProx and FedAvg, where they start, and the gate.

On the quadratic problem every optimum is known. `Work(epochs=0)` sends the start.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import softmax

from priory import FedAvg, FedHBMixture, FedProx, Optimiser, Work
from priory.core import rng
from priory.core.struct import replace
from priory.methods.fedhb_mixture import Kept, Prototypes
from priory.models import Params
from tests.methods.mixture_problem import (
    BODY,
    SOME_X,
    flat,
    location,
    mlp_task,
    pinned,
    rows,
    shared_prediction,
    shares_of,
    stacked_messages,
)
from tests.methods.problems import constant_shards, quadratic_task, shards_from, tiny_shards
from tests.methods.verbs import aggregated, init_client, init_server, outputs, personalised, predicted, updated

# --- the client ------------------------------------------------------------------------------------------------------

FULL_BATCH = {"optimiser": Optimiser(step_size=0.3), "work": Work(epochs=200, batch_size=8)}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_prototype_is_fedprox_in_its_optimum(momentum):
    centre, start, variance, count = 3.0, 1.0, 0.2, 4
    mu, data, task = 1 / (variance * count), constant_shards(centre).of(jnp.int32(0)), quadratic_task()
    options = {"optimiser": Optimiser(step_size=0.3 * (1 - momentum), momentum=momentum), "work": Work(steps=300)}
    method = pinned(num_prototypes=1, variance=variance, gate=False, **options)
    weights = {"body": jnp.float32(start), "head": jnp.float32(0)}
    down = Prototypes(
        jax.tree.map(lambda leaf: np.asarray(leaf)[None], weights), {"body": None, "head": None}, {}, None
    )
    found = updated(method, task, down, (), data, rng.root(0))[1].payload.network
    prox = updated(FedProx(mu=mu, **options), task, Params(weights), (), data, rng.root(0))[1].payload.weights
    moved = (centre - start) / (2 + mu)  # minimises ½(centre − start − 2δ)² + ½μ·2δ²
    np.testing.assert_allclose(flat(found), [start + moved, moved], atol=1e-5)
    np.testing.assert_allclose(flat(found), flat(prox), atol=1e-5)


def test_one_prototype_takes_the_steps_of_fedprox():
    """Adam sees the gradients of both penalties, and on whole batches both see the same data."""
    task, data, variance = mlp_task(), tiny_shards((5, 5, 5)).of(jnp.int32(1)), 0.5
    options = {"optimiser": Optimiser("adam", step_size=0.01), "work": Work(epochs=20, batch_size=5)}
    method = pinned(num_prototypes=1, variance=variance, gate=False, **options)
    down = init_server(method, task, rng.root(0))
    start = Params(jax.tree.map(lambda leaf: np.asarray(leaf)[0], down.networks))
    found = flat(updated(method, task, down, (), data, rng.root(1))[1].payload.network)
    prox, other = (
        flat(updated(FedProx(mu=mu, **options), task, start, (), data, rng.root(1))[1].payload)
        for mu in (1 / (variance * 5), 1.02 / (variance * 5))
    )
    np.testing.assert_allclose(found, prox, atol=1e-5)
    assert np.max(np.abs(found - other)) > 1e-4


@pytest.mark.parametrize("places", [(0.0, 0.5), (-1.0, 0.2, 1.0)])
@pytest.mark.parametrize("update", ["client", "personal"])
def test_a_client_ends_where_data_and_all_near_prototypes_balance(places, update):
    centre, variance, count = 0.6, 0.3, 2
    task, data = quadratic_task(), constant_shards(centre, counts=(count,)).of(jnp.int32(0))
    method = replace(BODY, num_prototypes=len(places), variance=variance, finetune_epochs=200, finetune_step_size=0.3)
    method, down = replace(method, **FULL_BATCH), location(*places)
    if update == "client":
        found = float(updated(method, task, down, (), data, rng.root(0))[1].payload.network["body"])
    else:
        # The head is trained too, and not pulled: it takes up whatever the body leaves, so that data weigh nothing.
        found = float(personalised(method, task, down, (), data, rng.root(0)).networks["body"][0])

    def slope(m):
        share = shares_of(np.array([[m]]), np.array(places)[:, None], variance)[0]
        return (m - centre) * (update == "client") + (m - share @ np.array(places)) / (variance * count)

    share = shares_of(np.array([[found]]), np.array(places)[:, None], variance)[0]
    assert np.sort(share)[-2] > 0.1  # more than one prototype pulls
    assert found == pytest.approx(brentq(slope, -2, 2, xtol=1e-12), abs=2e-5)


@pytest.mark.parametrize(("centre", "near"), [(4.0, 5.0), (-3.0, -5.0)])
def test_a_personal_network_lies_between_data_and_the_nearest_prototype(centre, near):
    variance, count = 0.2, 4
    task, data = quadratic_task(), constant_shards(centre, counts=(count,)).of(jnp.int32(0))
    method = pinned(variance=variance, gate=False, finetune_epochs=300, finetune_step_size=0.3)
    down = Prototypes(
        {"body": np.float32([5, -5]), "head": np.zeros(2, np.float32)}, {"body": None, "head": None}, {}, None
    )
    found = personalised(method, task, down, (), data, rng.root(0))
    mu = 1 / (variance * count)
    moved = (centre - near) / (2 + mu)  # minimises ½(centre − near − 2δ)² + ½μ·2δ², eq. (84)
    np.testing.assert_allclose(flat(found.networks), [near + moved, moved], atol=1e-5)
    outputs = predicted(method, task, found, np.zeros((3, 1), np.float32), rng.root(1))
    np.testing.assert_allclose(outputs.outputs, np.full((1, 3, 1), near + 2 * moved), atol=1e-5)
    np.testing.assert_array_equal(outputs.log_weights, np.zeros((1, 3)))


def test_under_an_endless_variance_a_client_is_that_of_fedavg():
    task, data = mlp_task(), tiny_shards((5, 5, 5)).of(jnp.int32(0))
    options = {"optimiser": Optimiser("adam", step_size=0.01), "work": Work(epochs=20, batch_size=5)}
    method = pinned(num_prototypes=1, variance=1e12, gate=False, **options)
    down = init_server(method, task, rng.root(0))
    start = Params(jax.tree.map(lambda leaf: np.asarray(leaf)[0], down.networks))
    found = updated(method, task, down, (), data, rng.root(1))[1].payload.network
    plain = updated(FedAvg(**options), task, start, (), data, rng.root(1))[1].payload.weights
    np.testing.assert_allclose(flat(found), flat(plain), atol=1e-5)


def test_under_a_tiny_variance_a_client_stays_at_its_prototype():
    task, data, down = quadratic_task(), constant_shards(1.0).of(jnp.int32(0)), location(0.5, -2.0)
    method = replace(BODY, num_prototypes=2, variance=1e-8, optimiser=Optimiser(step_size=0.1), work=Work(epochs=50))
    found = float(updated(method, task, down, (), data, rng.root(0))[1].payload.network["body"])
    assert found == pytest.approx(0.5 + 0.5 * 4e-8, abs=1e-6)


def test_minibatches_agree_with_the_whole_on_average():
    """A step is affine in the gradient, so its mean over all batches of one example is the step on all of them."""
    task, y, down = quadratic_task(), np.array([0.3, -1.2, 2.0, 0.9, 1.4], np.float32), location(0.1, 0.7)
    method = replace(BODY, num_prototypes=2, variance=0.3, start="centre", optimiser=Optimiser(step_size=0.2))

    def stepped(targets, size):
        data = shards_from(np.zeros((5, 1), np.float32), targets, (5,)).of(jnp.int32(0))
        one_step = replace(method, work=Work(steps=1, batch_size=1) if size == 1 else Work(epochs=1, batch_size=5))
        return float(updated(one_step, task, down, (), data, rng.root(0))[1].payload.network["body"])

    # A client with five copies of one example draws that example, and has the size of the whole.
    each = [stepped(np.full(5, value), 1) for value in y]
    assert np.ptp(each) > 0.1
    assert np.mean(each) == pytest.approx(stepped(y, 5), abs=1e-6)


def test_permuting_prototypes_permutes_the_server_and_leaves_clients_and_predictions():
    task, shards, order = mlp_task(), tiny_shards((5, 5, 5)), np.array([2, 0, 1])
    method = pinned(num_prototypes=3, variance=0.5, work=Work(epochs=2, batch_size=3))

    def turned(server, permutation):
        networks = jax.tree.map(lambda leaf: np.asarray(leaf)[permutation], server.networks)
        weights = dict(server.gate.weights)
        last = task.model.last_layer((5,))
        weights[last] = jax.tree.map(lambda leaf: np.asarray(leaf)[..., permutation], weights[last])
        return replace(server, networks=networks, gate=replace(server.gate, weights=weights))

    def a_round(server):
        messages = stacked_messages(method, task, server, shards)
        after, _ = aggregated(method, task, server, messages, rng.root(0))
        predictive = shared_prediction(method, task, after, SOME_X)
        probabilities = softmax(predictive.outputs, axis=-1) * np.exp(predictive.log_weights)[..., None]
        own = personalised(method, task, server, (), shards.of(jnp.int32(0)), rng.root(3))
        return messages.payload.network, after, np.sum(probabilities, axis=0), own

    first = init_server(method, task, rng.root(0))
    sent, after, predicted, own = a_round(first)
    sent_turned, after_turned, predicted_turned, own_turned = a_round(turned(first, order))
    assert np.max(np.abs(flat(after) - flat(after_turned))) > 0.1
    expected = (sent, turned(after, order), predicted, own)
    found = (sent_turned, after_turned, predicted_turned, own_turned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), expected, found)


# --- where a client starts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [-3.0, 0.4, 2.0])
@pytest.mark.parametrize("start", ["best", "centre", "last"])
def test_a_client_starts_from_the_best_prototype_the_centre_or_its_own(start, centre):
    places = (-2.0, 0.0, 3.5)
    method = replace(BODY, num_prototypes=3, start=start, work=Work(epochs=0))
    task, down, data = quadratic_task(), location(*places), constant_shards(centre).of(jnp.int32(0))

    def started(client):
        kept, message, _ = updated(method, task, down, client, data, rng.root(0))
        return kept, float(message.payload.network["body"])

    kept, found = started(init_client(method, task, down, rng.root(1)))
    best = min(places, key=lambda place: abs(place - centre))
    assert found == pytest.approx(0.5 if start == "centre" else best)
    if start != "last":
        assert kept == ()
        return
    assert bool(kept.is_own)
    kept, found = started(Kept({"body": np.float32(0.7), "head": None}, jnp.bool_(True)))
    assert found == float(kept.network["body"]) == pytest.approx(0.7)


def test_a_stateful_client_goes_on_from_its_last_network():
    method = replace(BODY, start="last", optimiser=Optimiser(step_size=0.1), work=Work(epochs=1, batch_size=4))
    task, down, data = quadratic_task(), location(0.0), constant_shards(1.0).of(jnp.int32(0))
    first, _, _ = updated(method, task, down, init_client(method, task, down, rng.root(0)), data, rng.root(1))
    second, message, _ = updated(method, task, down, first, data, rng.root(2))
    assert 0 < float(first.network["body"]) < float(second.network["body"])
    np.testing.assert_array_equal(message.payload.network["body"], second.network["body"])


def test_a_personal_network_of_a_stateful_client_begins_with_its_own():
    method = replace(BODY, start="last", finetune_epochs=0)
    task, down, data = quadratic_task(), location(0.0), constant_shards(1.0).of(jnp.int32(0))
    client = Kept({"body": np.float32(0.7), "head": None}, jnp.bool_(True))
    found = personalised(method, task, down, client, data, rng.root(0))
    assert float(found.networks["body"][0]) == pytest.approx(0.7)


def test_separation_is_the_way_from_the_first_network_to_others():
    task = mlp_task()
    # Not compiled as a whole: that may round a copy of the first network in another way.
    servers = [pinned(num_prototypes=3, separation=s).init_server(task, rng.root(0)) for s in (0.0, 0.25, 1.0)]
    none, some, whole = (rows(server.networks) for server in servers)
    np.testing.assert_array_equal(none, np.tile(whole[:1], (3, 1)))
    np.testing.assert_allclose(some, 0.75 * none + 0.25 * whole, atol=1e-6)
    assert np.min(np.linalg.norm(whole[[0, 0, 1]] - whole[[1, 2, 2]], axis=1)) > 0.5


# --- the gate --------------------------------------------------------------------------------------------------------


def test_the_gate_of_one_prototype_has_weight_one():
    method, task = pinned(num_prototypes=1), mlp_task()
    down = init_server(method, task, rng.root(0))
    found = shared_prediction(method, task, down, SOME_X)
    np.testing.assert_array_equal(found.log_weights, np.zeros((1, 6)))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_without_a_gate_prototypes_predict_alike_and_none_travels(num):
    method, task, shards = pinned(num_prototypes=num, gate=False), mlp_task(4), tiny_shards((5, 5, 5))
    down = init_server(method, task, rng.root(0))
    arguments = method, task, down, (), shards.of(jnp.int32(0)), rng.root(1)
    sent = jax.eval_shape(FedHBMixture.client_update, *arguments)[1].payload
    assert down.gate is None
    assert sent.gate is None
    found = shared_prediction(method, task, down, SOME_X)
    np.testing.assert_allclose(found.log_weights, np.full((num, 6), -math.log(num)), rtol=1e-6)
    for j in range(num):
        own = Params(jax.tree.map(lambda leaf, j=j: np.asarray(leaf)[j], down.networks))
        np.testing.assert_allclose(np.asarray(found.outputs)[j], outputs(task, own, SOME_X), atol=1e-6)


def test_the_gate_learns_to_tell_the_nearest_prototype():
    """Two clients whose inputs a line parts, and prototypes that say the opposite about the labels."""
    task = mlp_task(num_clients=2, num_classes=2, hidden=(), num_examples=80)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 5)).astype(np.float32)
    x[:, 0] = np.abs(x[:, 0]) + 0.5
    x[40:, 0] *= -1
    side = np.repeat([0, 1], 40)
    y = ((x[:, 1] > 0) ^ (side == 1)).astype(np.int32)
    kernel = np.zeros((2, 5, 2), np.float32)
    kernel[0, 1], kernel[1, 1] = (-5, 5), (5, -5)
    networks = {"Dense_0": {"kernel": jnp.asarray(kernel), "bias": jnp.zeros((2, 2))}}
    wrong = np.zeros((5, 2), np.float32)
    wrong[0] = (-1, 1)  # names the other prototype for every input
    method = pinned(optimiser=Optimiser(step_size=0.5), work=Work(epochs=5, batch_size=20))
    first = init_server(method, task, rng.root(0))
    gate = Params({"Dense_0": {"kernel": jnp.asarray(wrong), "bias": jnp.zeros(2)}})
    server, shards = replace(first, networks=networks, gate=gate), shards_from(x, y, (40, 40))

    def accuracies(server):
        """Of the gate, and of the predictions that it weighs."""
        found = shared_prediction(method, task, server, jnp.asarray(x))
        mixed = np.sum(softmax(found.outputs, axis=-1) * np.exp(found.log_weights)[..., None], axis=0)
        named = np.argmax(found.log_weights, axis=0)
        return np.mean(named == side), np.mean(np.argmax(mixed, axis=1) == y)

    assert accuracies(server) == (0.0, 0.0)
    for _ in range(20):
        messages = stacked_messages(method, task, server, shards)
        after, info = aggregated(method, task, server, messages, rng.root(0))
        assert float(info["share_1"]) == pytest.approx(0.5)  # each client is near a prototype of its own
        server = replace(server, gate=after.gate)
    assert accuracies(server) == (1.0, 1.0)


@pytest.mark.parametrize("num", [3, 4, 10])
def test_every_prototype_can_win_the_gate_even_with_fewer_outputs(num):
    method = pinned(num_prototypes=num)  # of a gate with three outputs
    line = np.linspace(-6, 6, 41, dtype=np.float32)
    outputs = np.stack([axis.ravel() for axis in np.meshgrid(line, line, line)], axis=1)
    winners = np.argmax(jax.jit(method._logits)(outputs), axis=1)
    assert set(winners.tolist()) == set(range(num))


@pytest.mark.parametrize("num", [2, 5])
def test_gate_weights_are_those_of_eq_82(num):
    """The networks' outputs beside a softmax of the first K outputs of the gate, or of its distances to anchors."""
    method, task = pinned(num_prototypes=num), mlp_task(num_clients=5)
    down = init_server(method, task, rng.root(0))
    found = shared_prediction(method, task, down, SOME_X)
    scores = np.asarray(outputs(task, down.gate, SOME_X), np.float64)
    if num <= 3:
        logits = scores[:, :num]
    else:
        anchors = np.asarray(2 * jax.random.normal(jax.random.key(0), (3, num)), np.float64).T
        logits = -0.5 * np.sum((scores[:, None] - anchors) ** 2, axis=-1)
    np.testing.assert_allclose(np.exp(found.log_weights).T, softmax(logits, axis=1), atol=1e-5)
