"""IFCA: who chooses which network, what each cluster learns, and that one cluster is FedAvg."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import IFCA, FedAvg, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods._blocks.clustered import Assigned
from priory.models.model import Params
from tests.methods.problems import a_round_of, constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, init_server, personalised, population, predicted, updated

TASK = quadratic_task(num_clients=4)
METHOD = IFCA(optimiser=Optimiser(step_size=0.1), work=Work(epochs=1, batch_size=4))


def networks_at(*places):
    """Networks of one number each."""
    body = jnp.array(places, jnp.float32)
    return Params({"body": body, "head": np.zeros(len(places), np.float32)})


def shard_of(centre, count=4):
    return constant_shards(centre, 0.0, counts=(count, 1)).of(jnp.int32(0))


def test_one_cluster_is_fedavg():
    task, shards = tiny_task(), tiny_shards()
    options = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    clustered, average = IFCA(clusters=1, **options), FedAvg(**options)
    (server, sent), (alone, sent_alone) = (a_round_of(method, task, shards) for method in (clustered, average))
    new, _ = aggregated(clustered, task, server, sent, rng.root(0))
    new_alone, _ = aggregated(average, task, alone, sent_alone, rng.root(0))
    data = shards.of(jnp.int32(1))
    own = personalised(clustered, task, new, jnp.int32(0), data, rng.root(1))
    own_alone = personalised(average, task, new_alone, (), data, rng.root(1))
    for one, other in ((server, alone), (new, new_alone), (own, own_alone)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), one.weights, other.weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new.stats, new_alone.stats)
    np.testing.assert_array_equal(sent.weight, sent_alone.weight)


@cache
def found(seed):
    data = priory.data.load(f"synthetic:clusters:clients=8,examples=60,dim=5,classes=3,distance=4,seed={seed}")
    method = IFCA(work=Work(epochs=2, batch_size=20))
    federation = data.partition("natural", seed=seed)
    return priory.simulate(method, federation, rounds=10, model="linear", seed=seed, eval_every=0)


def test_two_separate_groups_are_found_and_the_bytes_are_kd_down_and_d_and_one_up():
    run = found(seed=1)
    assert run.extra["adjusted_rand_index"] == 1
    num_weights = 5 * 3 + 3
    assert run.communication == {"down_bytes": 4 * 2 * num_weights, "up_bytes": 4 * (num_weights + 1)}


def test_most_seeds_find_two_separate_groups():
    """Chance parts the clients first, and need not part them well."""
    assert sum(found(seed).extra["adjusted_rand_index"] == 1 for seed in range(5)) >= 3


def test_a_client_chooses_the_network_with_the_lowest_loss_and_trains_it():
    down = networks_at(-3.0, 0.5, 4.0)
    for centre, chosen, start in ((-2.5, 0, -3.0), (5.0, 2, 4.0), (0.4, 1, 0.5)):
        arguments = (TASK, down, jnp.int32(-1), shard_of(centre), rng.root(0))
        client, message, _ = updated(replace(METHOD, clusters=3), *arguments)
        assert int(client) == int(message.payload.cluster) == chosen
        np.testing.assert_allclose(message.payload.weights["body"], start + 0.1 * (centre - start), rtol=1e-5)


def test_equal_networks_are_chosen_by_lot():
    data, keys = shard_of(1.0), jax.random.split(rng.root(6), 400)
    down = networks_at(0.3, 0.3)
    drawn = jax.jit(jax.vmap(lambda key: updated(METHOD, TASK, down, jnp.int32(-1), data, key)[0]))(keys)
    assert abs(np.mean(drawn) - 0.5) < 4 * 0.5 / np.sqrt(400)  # four standard errors


@pytest.mark.parametrize(("first_networks", "distinct"), [("equal", 1), ("independent", 3)])
def test_first_networks_are_one_or_several(first_networks, distinct):
    server = init_server(IFCA(clusters=3, first_networks=first_networks), tiny_task(), rng.root(0))
    kernel = np.asarray(server.weights["Dense_0"]["kernel"])
    assert len(np.unique(kernel.reshape(3, -1), axis=0)) == distinct


@pytest.mark.parametrize("absent", [1.0, np.nan])
def test_means_are_within_a_cluster_by_n_k_and_one_without_clients_keeps_every_bit(absent):
    server = networks_at(0.1, 1.7, -2.0)
    sent = Assigned(jnp.array([0, 0, 1, 2]), networks_at(2.0, 6.0, 9.0, absent).weights, {})
    messages = Message(sent, jnp.array([3.0, 1.0, 4.0, 0.0]))
    new, info = aggregated(METHOD, TASK, server, messages, rng.root(0))
    np.testing.assert_allclose(new.weights["body"][:2], [3.0, 9.0], rtol=1e-6)
    assert float(new.weights["body"][2]) == float(server.weights["body"][2])
    assert [float(info[f"share_{j}"]) for j in (1, 2, 3)] == [0.5, 0.5, 0.0]


def test_the_personal_model_is_that_of_the_chosen_cluster_and_moves_by_fine_tuning():
    down, data = networks_at(-3.0, 4.0), shard_of(5.0)
    for epochs, place in ((0, 4.0), (1, 4.0 + 0.05)):
        method = replace(METHOD, finetune_epochs=epochs, finetune_step_size=0.05)
        posterior = personalised(method, TASK, down, jnp.int32(0), data, rng.root(0))  # its last cluster is not read
        np.testing.assert_allclose(posterior.weights["body"], [place], rtol=1e-6)


def test_data_choose_the_global_model_and_without_any_all_count_equally():
    down = networks_at(-3.0, 4.0)
    chosen = population(METHOD, TASK, down, shard_of(5.0), rng.root(0))
    np.testing.assert_array_equal(chosen.weights["body"], [4.0, 4.0])
    empty = constant_shards(3.0, 0.0, counts=(4, 0)).of(jnp.int32(1))
    for data in (None, empty):
        posterior = population(METHOD, TASK, down, data, rng.root(0))
        predictive = predicted(METHOD, TASK, posterior, jnp.zeros((1, 1)), rng.root(1))
        np.testing.assert_array_equal(predictive.outputs[:, 0, 0], [-3.0, 4.0])
        np.testing.assert_allclose(np.exp(predictive.log_weights[:, 0]), 0.5, rtol=1e-6)


def test_a_client_without_examples_sends_nothing_and_is_in_no_cluster():
    data = constant_shards(3.0, 0.0, counts=(4, 0)).of(jnp.int32(1))
    client, message, _ = updated(METHOD, TASK, networks_at(-3.0, 4.0), jnp.int32(-1), data, rng.root(0))
    assert int(METHOD.cluster(client)) == -1
    assert float(message.weight) == 0


def test_a_client_that_learned_nothing_sends_the_reference():
    still = replace(METHOD, optimiser=Optimiser(step_size=0.0))
    down = networks_at(-3.0, 4.0)
    _, message, _ = updated(still, TASK, down, jnp.int32(-1), shard_of(5.0), rng.root(0))
    reference = METHOD.reference(TASK, down, message.payload)
    jax.tree.map(np.testing.assert_array_equal, message.payload, reference)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clusters": 0}, "clusters=0 is out of range; choose 1 or more"),
        ({"first_networks": "far"}, "first-networks='far' is not known; choose from equal, independent"),
        ({"finetune_epochs": -1}, "finetune-epochs=-1 is out of range"),
        ({"finetune_step_size": 0.0}, r"finetune-step-size=0\.0 is not a positive number"),
        ({"work": Work(batch_size=0)}, "batch-size=0 is out of range"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        replace(IFCA(), **options).check()


def test_more_clusters_than_clients_end_in_a_sentence():
    with pytest.raises(UsageError, match="clusters=5 exceeds the 4 clients of this federation; choose 1 to 4"):
        init_server(replace(METHOD, clusters=5), TASK, rng.root(0))
