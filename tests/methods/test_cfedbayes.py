"""cFedBayes: who chooses which prior, what each cluster learns, and that one cluster is pFedBayes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import CFedBayes, Optimiser, PFedBayes, UsageError, Work
from priory.bayes.gaussian import Free
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods._blocks.clustered import Assigned
from priory.methods._blocks.coupled_vi import VariationalParams
from priory.methods.cfedbayes import Moments
from priory.models import MLP, Head, Linen
from tests.methods.problems import constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import (
    aggregated,
    broadcast,
    init_client,
    init_server,
    personalised,
    population,
    predicted,
    updated,
)

TASK = quadratic_task(num_clients=4)
STILL = Optimiser("sgd", 0.0)
METHOD = CFedBayes(optimiser=Optimiser("sgd", 0.01), work=Work(steps=3, batch_size=4))


def priors_at(*places, rho=-2.5):
    """A server of one number a network: priors around these places."""
    body = np.array(places, np.float32)
    mean = {"body": body, "head": np.zeros_like(body)}
    return VariationalParams(Free(mean, jax.tree.map(lambda leaf: np.full_like(leaf, rho), mean)), {})


def messages_at(clusters, places, weight=None, rho=-2.0):
    """Messages of clients in these clusters, whose w_k lie at these places."""
    weights = priors_at(*places, rho=rho).weights
    weight = np.ones(len(clusters), np.float32) if weight is None else np.array(weight, np.float32)
    return Message(Assigned(np.array(clusters, np.int32), weights, {}), weight)


def linear_task():
    """The classes and inputs of `tiny_task` for a linear model."""
    model = Linen(MLP((), 3))
    return replace(tiny_task(), model=model, is_head=Head(model.last_layer((5,))))


@jax.jit
def choices(down, data, key):
    """The clusters that a client chooses with 400 keys."""
    return jax.vmap(lambda key: METHOD.population(TASK, down, data, key).cluster[0])(jax.random.split(key, 400))


reference = jax.jit(lambda method, *arguments: method.reference(TASK, *arguments))
divergence = jax.jit(lambda method, *arguments: method.certified(TASK, *arguments).divergence)


def after(method, task, shards, num_rounds, ids=None):
    """Server and client states after some rounds; client k has the data and the key of `ids[k]`."""
    root = rng.root(3)
    ids = range(shards.count.shape[0]) if ids is None else ids
    server = init_server(method, task, rng.key(root, rng.Stream.INIT))
    states = [init_client(method, task, broadcast(method, server), rng.root(0)) for _ in ids]
    for t in range(num_rounds):
        messages = []
        for place, number in enumerate(ids):
            key = rng.key(root, rng.Stream.CLIENT, t, number)
            data = shards.of(jnp.int32(number))
            states[place], message, _ = updated(method, task, broadcast(method, server), states[place], data, key)
            messages.append(message)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *messages)
        server, _ = aggregated(method, task, server, stacked, rng.root(1))
    return server, states


def assert_close(one, other, atol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=atol), one, other)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="{}"),
        pytest.param(
            {"stateful": False, "average": "moments", "samples_per_step": 2}, id="moments", marks=pytest.mark.slow
        ),
    ],
)
def test_one_cluster_is_pfedbayes(options):
    task, shards = linear_task() if options else tiny_task(), tiny_shards()
    # Not Adam: where a gradient is zero, as that of a bias before a batch norm, it makes full steps of rounding errors.
    how = {"work": Work(steps=3, batch_size=4), "optimiser": Optimiser("sgd", 0.01), **options}
    alone, _ = after(PFedBayes(**how), task, shards, 2)
    clustered, states = after(CFedBayes(clusters=1, **how), task, shards, 2)
    assert_close(jax.tree.map(lambda leaf: np.asarray(leaf)[0], clustered.weights), alone.weights, atol=1e-7)
    assert_close(clustered.stats, alone.stats, atol=1e-7)
    assert [int(state.cluster) for state in states] == [0, 0, 0]


@pytest.mark.slow  # a whole run; test_ifca.py finds groups
def test_two_separate_groups_are_found_and_the_bytes_are_2kd_down_and_2d_and_one_up():
    data = priory.data.load("synthetic:clusters:clients=8,examples=60,dim=5,classes=3,distance=4,seed=1")
    federation = data.partition("natural", test=0.0, seed=1)
    method = CFedBayes(zeta=1.0, optimiser=Optimiser("adam", 0.01))
    run = priory.simulate(method, federation, rounds=8, model="linear", seed=1, eval_every=0)
    assert run.extra["adjusted_rand_index"] == 1
    found = np.array([run.extra["clusters"][name] for name in federation.clients])
    truth = federation.truth["cluster"]
    assert len(set(zip(found.tolist(), truth.tolist(), strict=True))) == 2  # one number for each group, no other
    num_weights = 5 * 3 + 3
    assert run.communication == {"down_bytes": 4 * 2 * 2 * num_weights, "up_bytes": 4 * (2 * num_weights + 1)}


def test_copies_of_clients_change_neither_clusters_nor_priors():
    method = replace(METHOD, first_priors="equal")
    shards = constant_shards(-3.0, -3.2, 3.0, 3.2)
    server, states = after(method, TASK, shards, 3, ids=[0, 1, 2, 3])
    server_twice, states_twice = after(method, TASK, shards, 3, ids=[0, 1, 2, 3] * 2)
    assert [int(state.cluster) for state in states_twice] == 2 * [int(state.cluster) for state in states]
    assert_close(server_twice, server, atol=1e-6)


def test_a_client_chooses_the_prior_that_expects_its_examples():
    down, shards = priors_at(-3.0, 0.5, 4.0), constant_shards(-2.5, 5.0, 0.4)
    method = replace(METHOD, clusters=3)
    chosen = [population(method, TASK, down, shards.of(jnp.int32(k)), rng.root(k)).cluster for k in range(3)]
    np.testing.assert_array_equal(chosen, [[0, 0, 0], [2, 2, 2], [1, 1, 1]])


def test_the_choice_follows_the_priors_and_not_their_order():
    """Priors that differ less than their noise: with noise of its own for each, the order would decide."""
    data = constant_shards(0.0).of(jnp.int32(0))
    there, back = (
        np.asarray(choices(priors_at(*places, rho=1.0), data, rng.root(5))) for places in ((-0.3, 0.2), (0.2, -0.3))
    )
    np.testing.assert_array_equal(there, 1 - back)
    assert 0 < np.mean(there) < 1  # the noise does decide


def test_equal_priors_are_chosen_by_lot():
    drawn = choices(priors_at(0.3, 0.3), constant_shards(1.0).of(jnp.int32(0)), rng.root(6))
    assert abs(np.mean(drawn) - 0.5) < 4 * 0.5 / np.sqrt(400)  # four standard errors


@pytest.mark.parametrize(("first_priors", "distinct"), [("equal", 1), ("independent", 3)])
def test_first_priors_are_one_network_or_several(first_priors, distinct):
    task = tiny_task()
    server = init_server(replace(METHOD, clusters=3, first_priors=first_priors), task, rng.root(0))
    kernel = np.asarray(server.weights.mean["Dense_0"]["kernel"])
    assert len(np.unique(kernel.reshape(3, -1), axis=0)) == distinct


def test_at_full_step_a_lone_client_becomes_the_prior_of_its_cluster():
    server, messages = priors_at(0.0, 1.0), messages_at([1, 0, 0], [5.0, 2.0, 4.0])
    new, info = aggregated(METHOD, TASK, server, messages, rng.root(0))
    assert_close(jax.tree.map(lambda leaf: leaf[1], new.weights), priors_at(5.0, rho=-2.0).weights, atol=1e-6)
    np.testing.assert_allclose(new.weights.mean["body"][0], 3.0, rtol=1e-6)  # by those that chose it, and no others
    assert float(info["share_2"]) == pytest.approx(1 / 3)


def test_the_server_goes_the_share_beta_of_the_way():
    server, messages = priors_at(0.0, 1.0), messages_at([1, 1], [5.0, 7.0])
    new, _ = aggregated(replace(METHOD, beta=0.25), TASK, server, messages, rng.root(0))
    np.testing.assert_allclose(new.weights.mean["body"], [0.0, 1.0 + 0.25 * 5.0], rtol=1e-6)


@pytest.mark.parametrize("absent", [1.0, np.nan])
def test_a_cluster_that_nobody_present_chose_keeps_every_bit(absent):
    server = priors_at(0.1, 1.7)
    messages = messages_at([0, 1], [5.0, absent], weight=[1.0, 0.0])
    new, _ = aggregated(METHOD, TASK, server, messages, rng.root(0))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), new.weights, server.weights)
    np.testing.assert_allclose(new.weights.mean["body"][0], 5.0, rtol=1e-6)


def test_moments_give_each_cluster_the_prior_nearest_to_its_clients():
    """μ is the mean of μ_k, and σ² the mean of σ_k² + (μ_k − μ)², over the clients of the cluster (Lemma A.3)."""
    server, sd = priors_at(-3.0, 3.0), np.array([0.3, 0.5, 0.2], np.float32)
    offset = np.array([2.0, 4.0, -2.0], np.float32) - np.array([3.0, 3.0, -3.0], np.float32)  # from the old means
    moments = Moments(*({"body": m, "head": np.ones(3, np.float32)} for m in (offset, offset**2 + sd**2)))
    messages = Message(Assigned(np.array([1, 1, 0], np.int32), moments, {}), np.ones(3, np.float32))
    new, _ = aggregated(replace(METHOD, average="moments"), TASK, server, messages, rng.root(0))
    np.testing.assert_allclose(new.weights.mean["body"], [-2.0, 3.0], rtol=1e-6)
    width = np.log1p(np.exp(new.weights.rho["body"]))
    np.testing.assert_allclose(width, [0.2, np.sqrt((0.3**2 + 0.5**2) / 2 + 1.0)], rtol=1e-5)


def test_moments_are_those_of_the_posterior_around_the_prior_of_the_choice():
    down, data = priors_at(2.0, -5.0), constant_shards(-4.0).of(jnp.int32(0))
    method = replace(METHOD, average="moments")
    client, message, _ = updated(method, TASK, down, init_client(method, TASK, down, rng.root(0)), data, rng.root(1))
    q, sent = client.personal.q.weights, message.payload.weights
    offset = np.asarray(q.mean["body"]) + 5.0
    assert 0.01 < offset < 1.0  # on its way from the prior to the examples
    np.testing.assert_allclose(sent.offset["body"], offset, rtol=1e-5)
    np.testing.assert_allclose(sent.square["body"], offset**2 + np.log1p(np.exp(q.rho["body"])) ** 2, rtol=1e-5)
    faster = updated(replace(method, prior_rate=50.0), TASK, down, client, data, rng.root(2))[1]
    again = updated(method, TASK, down, client, data, rng.root(2))[1]
    jax.tree.map(np.testing.assert_array_equal, faster, again)  # no copy of the prior that follows the posterior


@pytest.mark.parametrize("average", ["params", "moments"])
def test_a_client_that_learned_nothing_sends_the_reference(average):
    method, down = replace(METHOD, average=average, optimiser=STILL), priors_at(2.0, -5.0)
    data = constant_shards(-4.0).of(jnp.int32(0))
    _, message, _ = updated(method, TASK, down, init_client(method, TASK, down, rng.root(0)), data, rng.root(1))
    assert_close(reference(method, down, message.payload), message.payload)


def test_a_client_takes_its_posterior_along_into_another_cluster():
    method = replace(METHOD, optimiser=STILL)
    data = constant_shards(3.0).of(jnp.int32(0))
    first, message, _ = updated(
        method,
        TASK,
        priors_at(2.0, -5.0),
        init_client(method, TASK, priors_at(2.0, -5.0), rng.root(0)),
        data,
        rng.root(1),
    )
    assert int(first.cluster) == int(message.payload.cluster) == 0
    assert float(first.personal.q.weights.mean["body"]) == 2.0  # q starts at the prior of the choice
    second, message, _ = updated(method, TASK, priors_at(-6.0, 3.5), first, data, rng.root(2))
    assert int(second.cluster) == int(message.payload.cluster) == int(method.cluster(second)) == 1
    assert float(second.personal.q.weights.mean["body"]) == 2.0
    assert float(message.payload.weights.mean["body"]) == 3.5  # and w_k at what was broadcast


def test_a_client_without_examples_sends_nothing_and_is_in_no_cluster():
    down = priors_at(2.0, -5.0)
    data = constant_shards(3.0, 0.0, counts=(4, 0)).of(jnp.int32(1))
    client, message, _ = updated(METHOD, TASK, down, init_client(METHOD, TASK, down, rng.root(0)), data, rng.root(1))
    assert float(message.weight) == 0
    assert int(METHOD.cluster(client)) == -1
    posterior = personalised(METHOD, TASK, down, client, data, rng.root(2))
    np.testing.assert_array_equal(posterior.weights.mean["body"], [2.0])


def test_a_client_that_never_took_part_has_the_prior_of_its_choice():
    down, data = priors_at(2.0, -5.0), constant_shards(-4.0).of(jnp.int32(0))
    posterior = personalised(METHOD, TASK, down, init_client(METHOD, TASK, down, rng.root(0)), data, rng.root(2))
    np.testing.assert_array_equal(posterior.weights.mean["body"], [-5.0])
    np.testing.assert_array_equal(posterior.cluster, [1])


@pytest.mark.parametrize("samples", [0, 3])
@pytest.mark.parametrize("given", ["nothing", "no examples"])
def test_without_examples_all_clusters_predict_with_equal_weight(samples, given):
    data = None if given == "nothing" else constant_shards(3.0, 0.0, counts=(4, 0)).of(jnp.int32(1))
    method = replace(METHOD, samples=samples)
    posterior = population(method, TASK, priors_at(10.0, -10.0), data, rng.root(0))
    predictive = predicted(method, TASK, posterior, jnp.zeros((1, 1)), rng.root(1))
    signs = np.sign(predictive.outputs[:, 0, 0])
    assert signs.tolist() == [1, -1] * (1 if samples == 0 else 2)  # rounded up to as many of each
    np.testing.assert_allclose(np.exp(predictive.log_weights[:, 0]), 1 / len(signs), rtol=1e-6)


def test_the_divergence_of_a_prior_is_the_choice_among_k():
    down = priors_at(2.0, -5.0, 1.0)
    method = replace(METHOD, clusters=3)
    posterior = population(method, TASK, down, None, rng.root(0))
    assert float(divergence(method, down, posterior)) == pytest.approx(np.log(3), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clusters": 0}, "clusters=0 is out of range; choose 1 or more"),
        ({"clusters": "auto"}, "clusters=auto is no number yet; let `priory run`"),
        ({"clusters": "two"}, "clusters='two' is not understood; give a whole number"),
        ({"clusters": 2.5}, r"clusters=2\.5 is not understood"),
        ({"zeta": -1.0}, r"zeta=-1\.0 is out of range"),
        ({"rho": np.inf}, "rho=inf is not a finite number"),
        ({"beta": -0.1}, r"beta=-0\.1 is out of range"),
        ({"choice_samples": -1}, "choice-samples=-1 is out of range"),
        ({"samples_per_step": 0}, "samples-per-step=0 is out of range"),
        ({"samples": -1}, "samples=-1 is out of range"),
        ({"prior_rate": 0.0}, r"prior-rate=0\.0 is not a positive number"),
        ({"first_priors": "far"}, "first-priors='far' is not known"),
        ({"average": "median"}, "average='median' is not known"),
        ({"optimiser": Optimiser(weight_decay=0.1)}, r"weight-decay=0\.1 would shrink ρ too"),
        ({"work": Work(steps=0)}, "steps=0 is out of range"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        replace(CFedBayes(), **options).check()


def test_more_clusters_than_clients_end_in_a_sentence():
    with pytest.raises(UsageError, match="clusters=5 exceeds the 4 clients of this federation; choose 1 to 4"):
        init_server(replace(METHOD, clusters=5), TASK, rng.root(0))
