"""FedVI: its divergence, what it reduces to, what its posterior depends on, and which labels it reads."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, FedVI, Optimiser, Work
from priory.bayes import gaussian
from priory.core import rng, trees
from priory.core.struct import replace
from priory.fed.method import Message, Task
from priory.fed.shard import Batch, Pool, Shard
from priory.methods._blocks import local_classifier
from priory.methods._blocks.embedding import Embedding
from priory.models import MLP, Head, Linen, Params, Reddi
from priory.models.likelihood import Categorical
from tests.methods.problems import a_round_of, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, broadcast, drawn, init_server, personalised, population, predicted, updated
from tests.monte_carlo import assert_mean

CLASSES, HIDDEN = 3, 10  # of the ten features, eight are global and two local
METHOD = FedVI(width=6)


def task_of(module, num_examples=15):
    model = Linen(module)
    return Task(model, Categorical(CLASSES), (5,), 3, num_examples, Head(model.last_layer((5,))))


TASK = task_of(MLP((HIDDEN,), CLASSES))  # without dropout or batch norm
SHARDS = tiny_shards()
DATA = SHARDS.of(jnp.int32(0))


@partial(jax.jit, static_argnums=0)
def _down(task, method):
    return broadcast(method, init_server(method, task, rng.root(3)))


def down_of(method=METHOD, task=TASK):
    """Return a new server's broadcast: it depends on these settings alone, so other methods share the program."""
    return _down(task, FedVI(width=method.width, local_share=method.local_share, gamma=method.gamma))


def silent(down):
    """θ whose constructor gives zeros, whatever it sees."""
    weights = down.weights | {"constructor": jax.tree.map(np.zeros_like, down.weights["constructor"])}
    return Params(weights, down.stats)


def batch_of(count, size=None, seed=0):
    """A minibatch of which the first `count` rows count."""
    size = size or count
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(size, 5)).astype(np.float32), draw.integers(0, CLASSES, size)
    return Batch(x, y.astype(np.int32), None, (np.arange(size) < count).astype(np.float32))


def shard_of(x, y=None):
    pool = Pool(jnp.asarray(x), None if y is None else jnp.asarray(y), None, jnp.float32(0), jnp.float32(1))
    return Shard(pool, np.zeros(1, np.int32), np.full(1, len(x), np.int32), len(x))


def inferred(x, y=None, method=METHOD, down=None):
    down = down_of(method) if down is None else down
    return _infer(method, down, shard_of(x, y))


@jax.jit
def _infer(method, down, data):
    return method.infer(TASK, down, data, rng.root(1))


@jax.jit
def visited(method, task, down, data, key):
    """What a client sends and tells."""
    return updated(method, task, down, (), data, key)[1:]


@jax.jit
def loss_of(method, down, batch):
    return method._loss(TASK, down, batch, rng.root(9))


@jax.jit
def gradient_of(method, down, batch):
    return jax.grad(lambda weights: method._loss(TASK, Params(weights, down.stats), batch, rng.root(9))[0])(
        down.weights
    )


def assert_same(a, b, tolerance=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def differ(a, b):
    return any(not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


divergence = jax.jit(local_classifier.divergence)
divergence_of_theta = jax.jit(lambda method, weights: method._global_divergence(weights))
local_of = jax.jit(local_classifier.of_outputs, static_argnums=1)
halves_of = jax.jit(lambda method, mask: method._halves(mask))


@jax.jit
def outputs_of(networks, x):
    """The outputs of stacked networks."""
    return jax.vmap(lambda params: TASK.model.apply(params, x)[0])(networks)


@jax.jit
def mean_nll(posterior, data):
    """The mean negative log-likelihood of 500 networks of the posterior."""
    networks = METHOD.draws(TASK, posterior, rng.root(5), 500)
    return jax.vmap(lambda params: TASK.nll(params, data.padded())[0])(networks).mean()


# --- the divergence --------------------------------------------------------------------------------------------------


def test_the_divergence_is_the_integral():
    draw = np.random.default_rng(0)
    mean, sd = draw.normal(size=(2, 3)), np.exp(0.3 * draw.normal(size=(2, 3)))
    sd0 = math.sqrt(2 / 5)
    t = np.linspace(-12, 12, 40_001)  # in standard deviations of q
    total = 0.0
    for m, s in zip(mean.flat, sd.flat, strict=True):
        log_ratio = -0.5 * t**2 - math.log(s) + 0.5 * ((m + s * t) / sd0) ** 2 + math.log(sd0)
        total += np.trapezoid(np.exp(-0.5 * t**2) / math.sqrt(2 * math.pi) * log_ratio, t)
    local = local_classifier.Local(jnp.float32(mean), jnp.float32(sd), np.zeros(3, np.float32))
    np.testing.assert_allclose(divergence(local), total, rtol=1e-5)


def test_the_divergence_is_zero_at_the_prior():
    assert float(jax.jit(lambda: local_classifier.divergence(local_classifier.prior(26, 62)))()) == 0.0


def test_where_the_constructor_is_silent_only_the_floor_diverges():
    """Σ over 1612 numbers of (1e-5/σ₀)² = 7.1e-6, to first order."""
    local = local_of(np.zeros((2 * 26 + 1) * 62, np.float32), 26)
    np.testing.assert_allclose(divergence(local), 26 * 62 * (1e-5 / local_classifier.glorot(26, 62)) ** 2, rtol=0.01)
    np.testing.assert_allclose(divergence(local), 7.1e-6, rtol=0.01)


@pytest.mark.parametrize(("num_outputs", "sd"), [(62, 0.15076), (100, 0.12599)])
def test_the_prior_has_glorots_scale(num_outputs, sd):
    np.testing.assert_allclose(local_classifier.glorot(26, num_outputs), sd, atol=5e-6)


def test_the_outputs_of_the_constructor_are_mean_log_ratio_and_bias():
    """Eqs. (27) to (29), with d_local = 2 and three classes."""
    local = local_of(np.arange(15, dtype=np.float32), 2)
    np.testing.assert_allclose(local.mean, np.arange(6).reshape(2, 3) / 10, rtol=1e-6)
    expected = 1e-5 + math.sqrt(2 / 5) * np.exp(np.arange(6, 12).reshape(2, 3) / 100)
    np.testing.assert_allclose(local.sd, expected, rtol=1e-6)
    np.testing.assert_array_equal(local.bias, np.arange(12, 15))


# --- the published networks ------------------------------------------------------------------------------------------

FEMNIST = ((28, 28), Reddi(62), 62)
CIFAR = ((32, 32, 3), Reddi(100, (32, 64, 128, 256, 512)), 100)


@pytest.mark.parametrize(("problem", "constructor"), [(FEMNIST, 936_662), (CIFAR, 1_454_260)], ids=["femnist", "cifar"])
def test_the_networks_have_the_published_sizes(problem, constructor):
    shape, module, num_classes = problem
    model = Linen(module)
    task = Task(model, Categorical(num_classes), shape, 3, 10, Head(model.last_layer(shape)))
    assert FedVI()._features(Embedding(task)) == (102, 26)
    theta = jax.eval_shape(lambda key: init_server(FedVI(), task, key), rng.root(0)).weights
    assert trees.size(theta["constructor"]) == constructor
    assert theta["classifier"]["kernel"].shape == (102, num_classes)
    assert theta["classifier"]["bias"].shape == (num_classes,)
    if num_classes == 62:
        assert trees.size(theta["embedding"]) == 1_198_592


# --- what it reduces to ----------------------------------------------------------------------------------------------


def test_where_the_constructor_is_silent_the_logits_are_the_global_ones_plus_known_noise():
    """Variance (σ₀ + 1e-5)² ‖local features‖² for each class; five standard errors of mean and variance."""
    down, num = silent(down_of()), 4000
    theta = jax.tree.map(np.asarray, down.weights)
    hidden, classifier = theta["embedding"]["network"]["Dense_0"], theta["classifier"]
    x = np.random.default_rng(5).normal(size=(20, 5)).astype(np.float32)
    features = np.maximum(x @ hidden["kernel"] + hidden["bias"], 0)
    alive = np.any(features[:, 8:] > 0.1, axis=1)
    x, features = x[alive][:5], features[alive][:5]
    assert len(x) == 5
    method = replace(METHOD, samples=num)
    predictive = predicted(method, TASK, inferred(x, down=down), jnp.asarray(x), rng.root(2))
    outputs = np.asarray(predictive.outputs, float)
    assert_mean(outputs, features[:, :8] @ classifier["kernel"] + classifier["bias"])
    variance = (local_classifier.glorot(2, 3) + 1e-5) ** 2 * np.sum(features[:, 8:] ** 2, axis=1, keepdims=True)
    error = variance * math.sqrt(2 / (num - 1))
    assert np.all(np.abs(np.var(outputs, axis=0, ddof=1) - variance) < 5 * error)


def test_without_data_the_posterior_is_the_prior_and_its_mean_the_global_classifier():
    down = down_of()
    empty = replace(DATA, lengths=jnp.zeros(1, jnp.int32))
    posterior = _infer(METHOD, down, empty)
    assert_same(posterior.local, local_classifier.prior(2, 3))
    assert_same(population(METHOD, TASK, down, None, rng.root(0)).local, local_classifier.prior(2, 3))


class OnGlobal(nn.Module):
    """The network of `TASK` whose last layer sees the first eight features alone."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(HIDDEN)(x))
        return nn.Dense(CLASSES)(x[:, :8])


def test_without_a_local_branch_a_round_is_one_of_fedavg(monkeypatch):
    """β = 0 and b_β = 0: the same batches of the same clients give the same weights, step by step."""
    whole = local_classifier.last_layer
    monkeypatch.setattr(local_classifier, "last_layer", lambda shared, beta, bias: whole(shared, 0 * beta, 0 * bias))
    how = {"optimiser": Optimiser(step_size=0.1, momentum=0.5), "work": Work(epochs=2, batch_size=3)}
    method = FedVI(width=6, tau=0.0, overlap=True, server_step_size=1.0, server_momentum=0.0, **how)
    server, messages = a_round_of(method, TASK, SHARDS)
    found, _ = aggregated(method, TASK, server, messages, rng.root(0))

    def as_network(theta):
        return Params({"Dense_0": theta["embedding"]["network"]["Dense_0"], "Dense_1": theta["classifier"]})

    task, plain = task_of(OnGlobal()), FedAvg(**how)
    start = as_network(server.weights)
    root, sent = rng.root(3), []
    for client in range(3):
        data = SHARDS.of(jnp.int32(client))
        sent.append(updated(plain, task, start, (), data, rng.key(root, rng.Stream.CLIENT, 0, client))[1])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *sent)
    expected, _ = aggregated(plain, task, start, stacked, rng.root(0))
    assert differ(expected, start)
    assert_same(as_network(found.weights), expected, tolerance=1e-6)
    assert_same(found.weights["constructor"], server.weights["constructor"], tolerance=1e-7)


def messages_at(*values, like):
    payload = jax.tree.map(lambda leaf: np.stack([np.full(leaf.shape, v, np.float32) for v in values]), like)
    return Message(payload, np.arange(1, 1 + len(values), dtype=np.float32))


def test_with_step_size_one_and_no_momentum_the_server_takes_the_weighted_mean():
    method = replace(METHOD, server_step_size=1.0, server_momentum=0.0)
    server = init_server(method, TASK, rng.root(0))
    moved, _ = aggregated(method, TASK, server, messages_at(1.0, 4.0, like=broadcast(method, server)), rng.root(1))
    assert_same(moved.weights, jax.tree.map(lambda leaf: np.full(leaf.shape, 3.0), server.weights), tolerance=1e-6)


def test_the_servers_momentum_is_that_of_reddi():
    """v ← 0.9 v + (θ − mean), θ ← θ − η v, over two rounds."""
    method = replace(METHOD, server_step_size=0.3, server_momentum=0.9)
    server = init_server(method, TASK, rng.root(0))
    first = np.asarray(server.weights["classifier"]["kernel"])
    theta, velocity = first, 0.0
    for values in ((1.0, 4.0), (-2.0, 1.0)):
        server, _ = aggregated(method, TASK, server, messages_at(*values, like=broadcast(method, server)), rng.root(1))
        velocity = 0.9 * velocity + theta - (values[0] + 2 * values[1]) / 3
        theta = theta - 0.3 * velocity
    np.testing.assert_allclose(server.weights["classifier"]["kernel"], theta, rtol=1e-5, atol=1e-6)


# --- what the posterior depends on -----------------------------------------------------------------------------------

X = np.random.default_rng(7).normal(size=(9, 5)).astype(np.float32)


def test_the_posterior_does_not_depend_on_the_order_of_the_support():
    turned = inferred(X[np.random.default_rng(1).permutation(9)])
    assert_same(turned.local, inferred(X).local, tolerance=1e-6)


def test_a_support_twice_over_gives_the_same_posterior():
    assert_same(inferred(np.concatenate([X, X])).local, inferred(X).local, tolerance=1e-6)


def test_the_posterior_does_depend_on_the_support():
    assert np.max(np.abs(inferred(X + 1).local.mean - inferred(X).local.mean)) > 1e-3


@pytest.mark.parametrize("batch_size", [2, 4, 9, 256])
def test_the_posterior_does_not_depend_on_how_many_inputs_are_seen_at_once(batch_size):
    method = replace(METHOD, work=Work(batch_size=batch_size))
    assert_same(inferred(X, method=method).local, inferred(X).local, tolerance=1e-6)


@pytest.mark.parametrize("refines", [False, True])
def test_the_posterior_reads_no_labels_unless_it_refines(refines):
    poison = np.full(9, 2, np.int32), np.arange(9, dtype=np.int32) % 3
    method = replace(METHOD, refine_epochs=20 if refines else 0)
    found = [personalised(method, TASK, down_of(), (), shard_of(X, y), rng.root(2)).local for y in poison]
    assert differ(*found) == refines
    alone = [inferred(X, y).local for y in (*poison, None)]
    assert_same(alone[0], alone[1])
    assert_same(alone[0], alone[2])


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(8, 8), (7, 7), (5, 8)])
def test_the_labels_of_the_support_are_never_read(count, size):
    """Whatever they are, the gradient has the same bits; a label of the query changes it."""
    batch, num_support = batch_of(count, size), count // 2
    gradient = gradient_of(METHOD, down_of(), batch)
    other = (batch.y + 1) % CLASSES
    support = replace(batch, y=np.where(np.arange(size) < num_support, other, batch.y).astype(np.int32))
    assert_same(gradient_of(METHOD, down_of(), support), gradient)
    query = replace(batch, y=np.where(np.arange(size) == num_support, other, batch.y).astype(np.int32))
    assert differ(gradient_of(METHOD, down_of(), query), gradient)


def test_rows_that_do_not_count_are_not_read():
    batch = batch_of(5, 8)
    counts = batch.mask > 0
    x, y = np.where(counts[:, None], batch.x, np.float32(9)), np.where(counts, batch.y, 0).astype(np.int32)
    other = Batch(x, y, None, batch.mask)
    assert_same(gradient_of(METHOD, down_of(), other), gradient_of(METHOD, down_of(), batch))


def test_the_query_is_not_seen_by_the_posterior():
    batch = batch_of(8)
    late = np.arange(8)[:, None] >= 4
    other = replace(batch, x=batch.x + late.astype(np.float32))
    kls = [loss_of(METHOD, down_of(), b)[1][1]["kl"] for b in (batch, other)]
    assert kls[0] == kls[1]
    third = replace(batch, x=batch.x + (~late).astype(np.float32))
    assert loss_of(METHOD, down_of(), third)[1][1]["kl"] != kls[0]


HALVES = [
    ({}, [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]),
    ({}, [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]),
    ({}, [1, 1], [1, 0], [0, 1]),
    ({}, [1, 1, 1], [1, 0, 0], [0, 1, 1]),
    ({}, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0]),
    ({"support": 0.25}, [1] * 8, [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]),
    ({"support": 0.01}, [1, 1, 1], [1, 0, 0], [0, 1, 1]),
    ({"support": 0.99}, [1, 1, 1], [1, 1, 0], [0, 0, 1]),
    ({"overlap": True}, [1, 1, 0], [1, 1, 0], [1, 1, 0]),
    ({"overlap": True}, [1], [1], [1]),
]


@pytest.mark.parametrize(("fields", "mask", "support", "query"), HALVES)
def test_a_minibatch_falls_into_support_and_query(fields, mask, support, query):
    """The smaller half is support, both have one example at least, and rows that do not count are in neither."""
    halves = halves_of(replace(METHOD, **fields), np.asarray(mask, np.float32))
    np.testing.assert_array_equal(halves, [support, query])


def test_the_divergence_counts_tau_over_the_batch_size():
    batch = batch_of(8)
    for tau in (0.0, 1.0, 50.0):
        method = replace(METHOD, tau=tau, work=Work(batch_size=16))
        loss, (_, pieces) = loss_of(method, down_of(), batch)
        assert pieces["kl"] > 1e-3
        np.testing.assert_allclose(loss, pieces["risk"] + tau / 16 * pieces["kl"], rtol=1e-6)


@pytest.mark.parametrize(("count", "query"), [(8, 4), (7, 4), (2, 1)])
def test_a_sum_is_the_size_of_the_query_times_the_mean(count, query):
    losses = [
        loss_of(replace(METHOD, tau=0.0, reduction=reduction), down_of(), batch_of(count, 8))[0]
        for reduction in ("mean", "sum")
    ]
    np.testing.assert_allclose(losses[1], query * losses[0], rtol=1e-6)


def test_the_loss_is_that_of_the_network_which_predicts(monkeypatch):
    """At the mean of β, and with all examples support and query: `predict`'s network is the one that was trained."""
    monkeypatch.setattr(local_classifier, "draw", lambda key, local: local.mean)
    method, batch = replace(METHOD, overlap=True), batch_of(9)

    @jax.jit
    def risks(down):
        _, (_, pieces) = method._loss(TASK, down, batch, rng.root(9))
        posterior = method.infer(TASK, down, shard_of(batch.x), rng.root(1))
        outputs = method.predict(TASK, posterior, batch.x, rng.root(2)).outputs[0]
        network = jax.tree.map(lambda leaf: leaf[0], method.draws(TASK, posterior, rng.root(4), 1))
        return pieces["risk"], TASK.mean_nll(outputs, batch), TASK.nll(network, batch)[0]

    trained, predicting, drawn_once = risks(down_of())
    np.testing.assert_allclose(predicting, trained, rtol=1e-5)
    np.testing.assert_allclose(drawn_once, trained, rtol=1e-5)


def test_the_logits_are_those_of_both_classifiers_and_their_biases():
    """β · local + θ · global + b_β + b_θ, as in eq. (24), by hand."""
    theta = jax.tree.map(np.asarray, down_of().weights)
    theta["classifier"]["bias"] = np.array([0.3, -0.2, 0.1], np.float32)
    posterior = inferred(X, down=Params(theta))
    hidden, shared, local = theta["embedding"]["network"]["Dense_0"], theta["classifier"], posterior.local
    features = np.maximum(X @ hidden["kernel"] + hidden["bias"], 0)
    expected = features[:, :8] @ shared["kernel"] + shared["bias"] + features[:, 8:] @ np.asarray(local.mean)
    assert np.max(np.abs(local.bias)) > 0.1
    found = predicted(METHOD, TASK, posterior, jnp.asarray(X), rng.root(2)).outputs[0]
    np.testing.assert_allclose(found, expected + np.asarray(local.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # test_laws.py predicts, and the test below draws
@pytest.mark.parametrize("gamma", [None, 1.0])
def test_samples_predict_as_the_networks_that_are_drawn(gamma):
    method = replace(METHOD, samples=5, gamma=gamma)
    posterior = inferred(X, method=method, down=down_of(method))
    expected = outputs_of(drawn(method, TASK, posterior, rng.root(2), 5), X)
    found = predicted(method, TASK, posterior, jnp.asarray(X), rng.root(2)).outputs
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.max(np.std(np.asarray(expected), axis=0)) > 0.1


def test_draws_have_the_moments_of_the_posterior():
    """Five standard errors of mean and of variance, over 4000 draws of the local part of the last layer."""
    posterior, num = inferred(X), 4000
    kernels = np.asarray(drawn(METHOD, TASK, posterior, rng.root(2), num).weights["Dense_1"]["kernel"])
    np.testing.assert_array_equal(np.ptp(kernels[:, :8], axis=0), np.zeros((8, CLASSES)))
    assert_mean(kernels[:, 8:], np.asarray(posterior.local.mean))
    variance = np.asarray(posterior.local.sd) ** 2
    error = variance * math.sqrt(2 / (num - 1))
    assert np.all(np.abs(kernels[:, 8:].var(axis=0, ddof=1) - variance) < 5 * error)


# --- a Gaussian over θ -----------------------------------------------------------------------------------------------


def test_the_divergence_of_theta_is_that_of_gaussians_around_the_prior():
    method = replace(METHOD, gamma=1.0, prior_sd=0.5)
    weights = down_of(method).weights
    mean = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(weights.mean)]).astype(float)
    widths = jax.jit(gaussian.of)(weights).sd
    sd = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(widths)]).astype(float)
    np.testing.assert_allclose(sd, np.full_like(sd, 0.01), rtol=1e-5)
    expected = np.sum(np.log(0.5 / sd) + (sd**2 + mean**2) / (2 * 0.5**2) - 0.5)
    np.testing.assert_allclose(divergence_of_theta(method, weights), expected, rtol=1e-5)


def test_every_draw_has_a_theta_of_its_own():
    """Mean and spread of q(θ) in the first layer, within five standard errors over 2000 draws."""
    method, num = replace(METHOD, gamma=1.0), 2000
    down = down_of(method)
    posterior = inferred(X, method=method, down=down)
    kernels = np.asarray(drawn(method, TASK, posterior, rng.root(2), num).weights["Dense_0"]["kernel"], float)
    assert_mean(kernels, np.asarray(down.weights.mean["embedding"]["network"]["Dense_0"]["kernel"]))
    assert np.all(np.abs(kernels.std(axis=0, ddof=1) - 0.01) < 5 * 0.01 / math.sqrt(2 * (num - 1)))


@pytest.mark.parametrize(("reduction", "size"), [("mean", 1), ("sum", 4)])
def test_the_divergence_of_theta_counts_gamma_over_all_examples(reduction, size):
    method, batch = replace(METHOD, reduction=reduction), batch_of(8)
    down = down_of(replace(METHOD, gamma=1.0))
    none, some = (loss_of(replace(method, gamma=gamma), down, batch) for gamma in (0.0, 30.0))
    divergence = some[1][1]["kl_global"]
    np.testing.assert_allclose(some[0] - none[0], size * 30.0 / TASK.num_examples * divergence, rtol=1e-4)


@pytest.mark.slow  # two long visits; the divergence itself is tested below
def test_training_pulls_q_of_theta_towards_its_prior_as_gamma_says():
    kls = {}
    for gamma in (0.0, 15.0):
        method = FedVI(width=6, gamma=gamma, optimiser=Optimiser(step_size=0.1), work=Work(epochs=3, batch_size=7))
        down = down_of(method)
        message, info = visited(method, TASK, down, DATA, rng.root(2))
        assert differ(message.payload.weights.rho, down.weights.rho)
        kls[gamma] = divergence_of_theta(method, message.payload.weights)
        np.testing.assert_allclose(info["kl_global"], kls[gamma], rtol=0.1)
    assert kls[15.0] < 0.97 * kls[0.0]


def test_a_point_travels_in_half_the_bytes_of_a_gaussian():
    sizes = [trees.num_bytes(down_of(replace(METHOD, gamma=gamma))) for gamma in (None, 1.0)]
    assert 2 * sizes[0] == sizes[1]
    message, info = visited(METHOD, TASK, down_of(), DATA, rng.root(2))
    assert trees.num_bytes(message.payload) == sizes[0]
    assert info["kl_global"] == 0.0


# --- clients with little ---------------------------------------------------------------------------------------------

NORMED = tiny_task()  # batch norm and dropout


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(4)(x)))
        return nn.Dense(CLASSES)(x)


DROPPED = task_of(Dropping())
SKIPPING = FedVI(
    width=6,
    local_share=0.5,
    optimiser=Optimiser(step_size=0.1, momentum=0.9, weight_decay=0.1),
    work=Work(epochs=1, batch_size=3),
)


FEW = tiny_shards((1, 4, 7))


def one_example(method):
    down = down_of(method, NORMED)
    return down, *visited(method, NORMED, down, FEW.of(jnp.int32(0)), rng.root(2))


def test_a_client_with_one_example_changes_nothing_and_is_counted():
    down, message, info = one_example(SKIPPING)
    assert_same(message.payload, down)
    assert message.weight == 0.0
    assert info["skipped"] == 1.0


def test_with_overlap_a_client_with_one_example_learns():
    down, message, info = one_example(replace(SKIPPING, overlap=True))
    assert differ(message.payload.weights, down.weights)
    assert message.weight == 1.0
    assert info["skipped"] == 0.0


def test_a_minibatch_of_one_example_changes_nothing():
    """Of four examples in threes, the last one neither steps nor counts: momentum, decay and statistics stand still."""
    data, down = FEW.of(jnp.int32(1)), down_of(SKIPPING, NORMED)
    message, info = visited(SKIPPING, NORMED, down, data, rng.root(2))

    @jax.jit
    def first_step(data, down, key):
        key_data, key_step = jax.random.split(key)
        batch = data.take(data.order(jax.random.fold_in(key_data, 0)), jnp.int32(0), 3)
        key_first = jax.random.fold_in(jax.random.fold_in(key_step, 0), 0)

        def loss(weights):
            return SKIPPING._loss(NORMED, Params(weights, down.stats), batch, key_first)

        return jax.grad(loss, has_aux=True)(down.weights)

    gradient, (stats, pieces) = jax.tree.map(np.asarray, first_step(data, down, rng.root(2)))
    stepped = jax.tree.map(lambda w, g: w - 0.1 * (g + 0.1 * w), down.weights, gradient)
    assert_same(message.payload, Params(stepped, stats), tolerance=1e-6)
    assert message.weight == 4.0
    for name in ("risk", "kl"):
        np.testing.assert_allclose(info[name], pieces[name], rtol=1e-5)


EPOCHS, STEPS = (
    FedVI(width=6, local_share=0.5, work=Work(epochs=2)),
    FedVI(width=6, local_share=0.5, work=Work(steps=3)),
)


@pytest.mark.parametrize(
    ("task", "method"),
    [
        pytest.param(DROPPED, EPOCHS, id="dropout-epochs"),
        pytest.param(NORMED, STEPS, id="batch norm-steps"),
        pytest.param(DROPPED, STEPS, id="dropout-steps", marks=pytest.mark.slow),
        pytest.param(NORMED, EPOCHS, id="batch norm-epochs", marks=pytest.mark.slow),
    ],
)
def test_a_client_learns_the_same_whatever_the_capacity_of_its_shard(task, method):
    """In a simulation the capacity is that of the largest client, behind a network its own."""
    down = down_of(method, task)
    sent = [visited(method, task, down, replace(DATA, capacity=num), rng.root(2))[0] for num in (7, 20)]
    assert_same(*sent, tolerance=1e-6)
    assert differ(sent[0].payload, down)


def test_steps_are_counted_instead_of_epochs():
    down = down_of(STEPS, DROPPED)
    once, thrice = (
        visited(replace(STEPS, work=Work(steps=num)), DROPPED, down, DATA, rng.root(2))[0] for num in (1, 3)
    )
    assert differ(once, thrice)


# --- refining --------------------------------------------------------------------------------------------------------


def test_refining_lowers_the_objective_on_the_labels_of_a_client():
    """E NLL + τ/n KL over 500 draws, the same noise before and after."""
    y = (np.arange(9) % 3).astype(np.int32)
    x = X + 2 * np.eye(3, 5, dtype=np.float32)[y]
    data = shard_of(x, y)

    def objective(method):
        posterior = personalised(method, TASK, down_of(), (), data, rng.root(2))
        return mean_nll(posterior, data) + method.tau / 9 * float(divergence(posterior.local))

    tau = {"width": 6, "tau": 0.1}
    values = [objective(FedVI(refine_epochs=epochs, **tau)) for epochs in (0, 20, 100)]
    assert values[0] > values[1] + 0.02
    assert values[1] > values[2] + 0.02
