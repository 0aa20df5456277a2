"""FedBNN's exact properties: what is mixed, fitted, sent and averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from priory.bayes import gaussian
from priory.core import rng, trees
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.fed import privacy
from priory.fed.local import Optimiser, Work, each_batch
from priory.fed.method import Message
from priory.fed.shard import Shard
from priory.methods._blocks import coupled_vi
from priory.methods._blocks.coupled_vi import VariationalParams
from priory.methods.fedbnn import Client, FedBNN
from priory.models.likelihood import Gaussian
from priory.models.linen import Linen
from priory.models.model import Head, Params
from priory.models.nets import MLP
from tests.methods.problems import aligned_task, tiny_shards
from tests.methods.verbs import (
    aggregated,
    broadcast,
    distance,
    drawn,
    init_client,
    init_server,
    on_host,
    outputs,
    parameters,
    updated,
)

SHARDS = tiny_shards()
MODEL = Linen(MLP((), 3))
NUM, CLASSES = 6, 3  # as many inputs as a linear model can give any outputs, in two full minibatches
TASK = aligned_task()
TASK = replace(TASK, model=MODEL, is_head=Head(MODEL.last_layer((5,))), public=np.asarray(TASK.public)[:NUM])
# Work enough for the tests that need much of it, since another amount is another program.
METHOD = FedBNN(work=Work(epochs=300, batch_size=3), prior_epochs=150, samples=3)
STILL = 1e-9  # a step size at which nothing moves


says = jax.jit(lambda method, *arguments: method._says(*arguments))
prior_of = jax.jit(lambda method, *arguments: method._prior(*arguments))
gaussian_of = jax.jit(gaussian.of)
distance_of = jax.jit(lambda method, *arguments: method._distance(*arguments))


def probabilities(seed, shape=(NUM, CLASSES)):
    return softmax(2 * np.random.default_rng(seed).normal(size=shape), axis=-1).astype(np.float32)


def nobody():
    return broadcast(METHOD, init_server(METHOD, TASK, rng.root(0)))


def enrolled(method=METHOD, seed=1):
    return init_client(method, TASK, nobody(), rng.root(seed))


def spoken(method=METHOD, task=TASK, seed=1):
    """A client with a network that is sure of itself, and what it says."""
    start = parameters(task, rng.root(seed))
    sharp = jax.tree.map(lambda leaf: 3 * np.asarray(leaf) + np.float32(0.1), start.weights)
    q = VariationalParams(around(sharp, -4.0), start.stats)
    return Client(q, says(method, task, q, rng.root(seed + 50)))


def around(mean, rho):
    """The Gaussian with these means and the same ρ everywhere."""
    return gaussian.Free(mean, jax.tree.map(lambda leaf: np.full_like(leaf, rho), mean))


def visit(method, down, client=None, data=None, seed=7, task=TASK):
    client = enrolled(method) if client is None else client
    return updated(method, task, down, client, data or SHARDS.of(jnp.int32(0)), rng.root(seed))


def of_all(payload, weight=(1.0, 1.0, 1.0)):
    return Message(payload, np.asarray(weight, np.float32), np.arange(len(weight)))


def entropy(p):
    return -np.sum(p * np.log(p), axis=-1)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_without_mixing_nothing_of_the_others_reaches_a_client():
    method = replace(METHOD, gamma=0.0)
    ends = [visit(method, probabilities(seed), spoken(method)) for seed in (1, 2)]
    assert_same(*(end[0] for end in ends))
    assert_same(*(end[1].payload for end in ends))


def test_with_mixing_it_does():
    one, other = (visit(METHOD, probabilities(seed), spoken())[0].q.weights for seed in (1, 2))
    assert distance(one, other) > 1e-3


def test_identical_clients_agree_with_their_mean():
    phi = probabilities(3)
    server, _ = aggregated(
        METHOD, TASK, init_server(METHOD, TASK, rng.root(0)), of_all(np.stack([phi] * 3)), rng.root(0)
    )
    np.testing.assert_allclose(server.mean, phi, rtol=1e-6)


def test_the_mean_weighs_clients_by_their_weights():
    phis = probabilities(4, (3, NUM, CLASSES))
    messages = of_all(phis, (1.0, 3.0, 0.0))
    server, _ = aggregated(METHOD, TASK, init_server(METHOD, TASK, rng.root(0)), messages, rng.root(0))
    np.testing.assert_allclose(server.mean, 0.25 * phis[0] + 0.75 * phis[1], rtol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.3, 30.0])
def test_rows_stay_on_the_simplex_whatever_noise_they_carry(noise):
    drawn_noise = np.random.default_rng(5).normal(size=(3, NUM, CLASSES))
    noisy = np.float32(probabilities(4, (3, NUM, CLASSES)) + noise * drawn_noise)
    server, _ = aggregated(METHOD, TASK, init_server(METHOD, TASK, rng.root(0)), of_all(noisy), rng.root(0))
    assert np.all(server.mean >= 0)
    np.testing.assert_allclose(server.mean.sum(axis=-1), np.ones(NUM), rtol=1e-6)


def test_a_row_that_noise_left_nothing_of_is_uniform():
    server, _ = aggregated(
        METHOD,
        TASK,
        init_server(METHOD, TASK, rng.root(0)),
        of_all(-np.ones((3, NUM, CLASSES), np.float32)),
        rng.root(0),
    )
    np.testing.assert_allclose(server.mean, np.full((NUM, CLASSES), 1 / CLASSES), rtol=1e-6)


def test_the_cache_averages_what_everybody_said_last():
    method = replace(METHOD, cache=True)
    first, second = probabilities(6, (3, NUM, CLASSES)), probabilities(7, (2, NUM, CLASSES))
    server, _ = aggregated(
        method, TASK, init_server(method, TASK, rng.root(0)), of_all(first, (1.0, 2.0, 1.0)), rng.root(0)
    )
    # The second round hears clients 2 and 1, in that order, and a third message that did not come.
    lost = np.full((1, NUM, CLASSES), np.nan, np.float32)
    late = Message(np.concatenate([second, lost]), jnp.array([1.0, 2.0, 0.0]), jnp.array([2, 1, 0]))
    server, _ = aggregated(method, TASK, server, late, rng.root(0))
    np.testing.assert_allclose(server.mean, (first[0] + 2 * second[1] + second[0]) / 4, rtol=1e-5)


def test_a_message_is_as_long_as_the_alignment_set_whatever_the_network():
    sizes = set()
    for width in (2, 50):
        model = Linen(MLP((width,), 3))
        task = replace(TASK, model=model, is_head=Head(model.last_layer((5,))))
        client = jax.eval_shape(METHOD.init_client, task, nobody(), rng.root(0))
        arguments = METHOD, task, nobody(), client, SHARDS.of(jnp.int32(0)), rng.root(7)
        _, message, _ = jax.eval_shape(FedBNN.client_update, *arguments)
        sizes.add(sum(leaf.size for leaf in jax.tree.leaves(message.payload)))
    assert sizes == {NUM * CLASSES}
    assert nobody().size == NUM * CLASSES


def test_what_a_client_says_is_the_mean_of_its_networks_softmax():
    """In minibatches of four, the second of which is filled up."""
    client, method = spoken(), replace(METHOD, work=Work(batch_size=4))
    networks = drawn(method, TASK, client.q, rng.root(8), method.samples)
    said = [outputs(TASK, jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], networks), TASK.public) for i in range(3)]
    expected = np.mean(softmax(said, axis=-1), axis=0)
    np.testing.assert_allclose(says(method, TASK, client.q, rng.root(8)), expected, rtol=1e-5)


def test_the_cross_entropy_is_least_at_the_target_and_there_its_entropy():
    target, other = np.asarray(probabilities(1)), np.asarray(probabilities(2))
    at_target = distance_of(METHOD, other, target, target)
    np.testing.assert_allclose(at_target, entropy(target), rtol=1e-5)
    assert np.all(distance_of(METHOD, other, target, other) > at_target)


def test_the_target_is_the_mixture_of_both():
    """With γ = 0 a prior that already says Φ_i loses H(Φ_i); with γ = 1 its loss is the cross-entropy to Φ̄."""
    still = replace(METHOD, optimiser=Optimiser("adam", 1e-12), prior_sd=1e-6)
    client, down = spoken(), probabilities(3)
    # Widths of nearly nothing: Φ_ψ is the network of the means, and so is Φ_i here.
    centre = softmax(outputs(TASK, Params(client.q.weights.mean), TASK.public), axis=-1)
    client = replace(client, phi=centre)
    for gamma in (0.0, 0.4, 1.0):
        target = gamma * down + (1 - gamma) * centre
        _, loss = prior_of(replace(still, gamma=gamma), TASK, down, client, rng.root(0))
        expected = np.mean(-np.sum(np.asarray(target) * np.log(np.asarray(centre)), axis=-1))
        np.testing.assert_allclose(loss, expected, rtol=1e-4)


def prior_says(method, prior, client):
    return says(method, TASK, VariationalParams(prior, client.q.stats), rng.root(99))


def test_the_prior_learns_what_the_federation_says():
    method = replace(METHOD, gamma=1.0, optimiser=Optimiser("adam", 0.02))
    client, down = spoken(method), probabilities(3)
    far = np.mean(distance_of(method, down, down, prior_says(method, client.q.weights, client)))
    prior, _ = prior_of(method, TASK, down, client, rng.root(0))
    near = np.mean(distance_of(method, down, down, prior_says(method, prior, client)))
    least = np.mean(entropy(np.asarray(down)))
    assert near - least < 0.3 * (far - least)


def test_as_printed_all_global_knowledge_has_no_gradient():
    method = replace(METHOD, gamma=1.0, prior_loss="printed", optimiser=Optimiser("adam", 1.0))
    client = spoken()
    prior, _ = prior_of(method, TASK, probabilities(3), client, rng.root(0))
    assert_same(prior, around(client.q.weights.mean, gaussian.rho_of(jnp.float32(method.prior_sd))))


def test_as_printed_no_global_knowledge_pulls_to_the_others():
    method = replace(METHOD, gamma=0.0, prior_loss="printed", optimiser=Optimiser("adam", 0.02))
    client, down = spoken(), probabilities(3)
    prior, _ = prior_of(method, TASK, down, client, rng.root(0))
    before, after = (
        np.mean(distance_of(method, down, down, prior_says(method, p, client))) for p in (client.q.weights, prior)
    )
    assert after < before - 0.1


def test_before_anybody_has_spoken_the_prior_is_centred_at_zero():
    prior, loss = prior_of(METHOD, TASK, nobody(), spoken(), rng.root(0))
    at = on_host(gaussian_of(prior))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(at.mean))
    for sd in jax.tree.leaves(at.sd):
        np.testing.assert_allclose(sd, np.full(sd.shape, METHOD.prior_sd), rtol=1e-5)
    assert loss == 0


def test_the_local_work_begins_at_the_means_of_the_prior_with_its_own_widths():
    """Steps of the posterior too small to move it, and steps of the prior that are not."""
    method = replace(METHOD, optimiser=Optimiser("adam", STILL), prior_rate=0.01 / STILL)
    client, down = spoken(method), probabilities(3)
    after = visit(method, down, client)[0].q.weights
    prior, _ = prior_of(method, TASK, down, client, jax.random.split(rng.root(7), 3)[0])
    assert distance(prior.mean, client.q.weights.mean) > 0.1
    assert distance(prior.rho, client.q.weights.rho) > 0.1
    for one, other in ((after.mean, prior.mean), (after.rho, client.q.weights.rho)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


def test_before_anybody_has_spoken_it_begins_at_its_own():
    method = replace(METHOD, optimiser=Optimiser("adam", STILL))
    client = spoken(method)
    after = visit(method, nobody(), client)[0].q.weights
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), after, client.q.weights)


def test_few_draws_of_the_prior_bound_its_loss_from_above():
    """Jensen's inequality, over 200 draws of the loss; the gap is beyond four standard errors."""
    client, target = spoken(), probabilities(3)
    belief = VariationalParams(around(client.q.weights.mean, 0.0), client.q.stats)

    def loss(key, num):
        said = replace(METHOD, samples_per_step=num)._mean_softmax(TASK, belief, TASK.public, key)
        return jnp.mean(METHOD._distance(target, target, said))

    both = jax.jit(jax.vmap(lambda key: (loss(key, 1), loss(key, 16))))
    one, many = map(np.asarray, both(jax.random.split(jax.random.key(17), 200)))
    assert np.mean(one - many) > 4 * np.std(one - many) / np.sqrt(200)


def test_a_strong_prior_keeps_the_posterior():
    """With ζ beyond all data q becomes the prior: means of the round's start, widths of `prior_sd`."""
    method = replace(METHOD, zeta=1e6, prior_rate=STILL, optimiser=Optimiser("adam", 0.005))
    client = spoken(method)
    after = on_host(gaussian_of(visit(method, probabilities(3), client)[0].q.weights))
    for mean, start in zip(jax.tree.leaves(after.mean), jax.tree.leaves(client.q.weights.mean), strict=True):
        np.testing.assert_allclose(mean, start, atol=2e-3)
    for sd in jax.tree.leaves(after.sd):
        np.testing.assert_allclose(sd, np.full(sd.shape, method.prior_sd), rtol=0.05)


def test_the_gradient_of_a_step_is_that_of_the_printed_objective():
    """One step of plain sgd on all examples: ∇ of mean NLL + ζ KL / n by automatic differentiation, drawn weights."""
    eta = 0.1
    method = replace(
        METHOD,
        draw="weights",
        zeta=2.0,
        optimiser=Optimiser("sgd", eta),
        work=Work(epochs=1, batch_size=7),
    )
    client, data = spoken(), SHARDS.of(jnp.int32(0))
    prior = spoken(seed=2).q.weights

    def objective(free, batch, key):
        nll = coupled_vi.likelihood(TASK, "weights", 1)
        value, _ = nll(gaussian.of(free), client.q.stats, batch, key)
        return value + method.zeta / 7 * gaussian.kl(gaussian.of(free), gaussian.of(prior))

    def step(free, batch, key):
        return trees.axpy(-eta, jax.grad(objective)(free, batch, key), free)

    @jax.jit
    def both():
        moved, _ = method._posterior(TASK, client.q, prior, data, rng.root(5))
        return moved.weights, each_batch(step, client.q.weights, data, method.work, rng.root(5))

    moved, expected = both()
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_client_without_examples_sends_nothing_that_counts():
    empty = Shard(SHARDS.pool, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), SHARDS.capacity)
    _, message, _ = visit(METHOD, nobody(), data=empty)
    assert message.weight == 0


def test_a_new_client_says_nothing_in_particular():
    np.testing.assert_allclose(enrolled().phi, np.full((NUM, CLASSES), 1 / CLASSES), rtol=1e-6)


def test_the_sensitivity_is_reached_by_two_clients_that_are_sure_of_different_classes():
    sure = np.tile(np.eye(CLASSES)[:2, None], (1, NUM, 1))
    np.testing.assert_allclose(METHOD.sensitivity(TASK), np.linalg.norm(sure[0] - sure[1]), rtol=1e-6)
    assert METHOD.sensitivity(TASK) == pytest.approx(np.sqrt(2 * NUM))


def test_the_sensitivity_to_one_client_more_is_reached_by_one_that_is_sure():
    """The sum that central privacy adds noise to, with and without the client; nothing is clipped."""
    reach = METHOD.sensitivity(TASK, replaces=False)
    channel = privacy.NoisedSum(clip=reach)
    rows = np.random.default_rng(0).integers(CLASSES, size=NUM)
    sure = np.eye(CLASSES, dtype=np.float32)[rows]
    sent, _, _ = privacy.upload(
        channel, METHOD, TASK, nobody(), Message(sure, jnp.float32(1)), jnp.bool_(True), rng.root(0)
    )
    np.testing.assert_allclose(sent.payload, sure, rtol=1e-6)
    assert reach == pytest.approx(np.linalg.norm(sent.payload), rel=1e-6)
    others = [np.linalg.norm(probabilities(seed)) for seed in range(20)]
    assert max(others) < reach < METHOD.sensitivity(TASK)


def test_only_a_server_without_memory_is_linear():
    assert METHOD.linear
    assert not replace(METHOD, cache=True).linear


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", -0.1),
        ("gamma", 1.5),
        ("zeta", -1.0),
        ("prior_sd", 0.0),
        ("prior_epochs", -1),
        ("prior_rate", 0.0),
        ("samples", 0),
        ("samples_per_step", 0),
        ("prior_loss", "other"),
    ],
)
def test_what_cannot_be_meant_is_refused(field, value):
    with pytest.raises(UsageError, match=field.replace("_", ".")):
        replace(METHOD, **{field: value}).check()


def test_a_federation_without_an_alignment_set_is_refused():
    with pytest.raises(UsageError, match="--align own:500"):
        init_server(METHOD, replace(TASK, public=None), rng.root(0))


def test_a_regression_is_refused():
    with pytest.raises(UsageError, match="regression"):
        init_server(METHOD, replace(TASK, likelihood=Gaussian(1.0)), rng.root(0))
