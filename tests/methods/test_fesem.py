"""FeSEM: clients go to the nearest centre, centres to the mean of their clients, and one cluster is FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import FedAvg, FeSEM, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods._blocks.clustered import Assigned
from priory.models.model import Params
from tests.methods.problems import a_round_of, constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, init_server, personalised, population, predicted, updated

TASK = quadratic_task(num_clients=4)
METHOD = FeSEM(optimiser=Optimiser(step_size=0.1), work=Work(epochs=1, batch_size=4))
FAR = replace(METHOD, work=Work(epochs=200, batch_size=4))  # trains to the optimum
NONE = jnp.int32(-1)


def centres_at(*places):
    """Networks of one number each."""
    body = jnp.array(places, jnp.float32)
    return Params({"body": body, "head": np.zeros(len(places), np.float32)})


def shard_of(centre, count=4):
    return constant_shards(centre, 0.0, counts=(count, 1)).of(jnp.int32(0))


def test_one_cluster_is_fedavg():
    task, shards = tiny_task(), tiny_shards()
    options = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    clustered, average = FeSEM(clusters=1, **options), FedAvg(**options)
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


def test_most_seeds_find_two_separate_groups():
    """Seed 1 does; chance parts the clients first, and need not part them well."""
    found = []
    for seed in range(5):
        data = priory.data.load(f"synthetic:clusters:clients=8,examples=60,dim=5,classes=3,distance=4,seed={seed}")
        federation, method = data.partition("natural", seed=seed), FeSEM(work=Work(epochs=2, batch_size=20))
        run = priory.simulate(method, federation, rounds=10, model="linear", seed=seed, eval_every=0)
        found.append(run.extra["adjusted_rand_index"] == 1)
    assert found[1]
    assert sum(found) >= 3


def test_a_client_trains_from_its_own_centre_and_goes_to_the_nearest():
    """Body and head move alike from (0, 0) to (1.5, 1.5), which is nearer to (2.5, 0) than to where it began."""
    down, data = centres_at(0.0, 2.5), shard_of(3.0)
    client, message, _ = updated(METHOD, TASK, down, jnp.int32(0), data, rng.root(0))
    np.testing.assert_allclose(message.payload.weights["body"], 0.3, rtol=1e-5)  # one step from its own centre
    assert int(client) == int(message.payload.cluster) == 0
    client, message, info = updated(FAR, TASK, down, jnp.int32(0), data, rng.root(0))
    np.testing.assert_allclose(message.payload.weights["body"], 1.5, rtol=1e-4)
    assert int(client) == int(message.payload.cluster) == 1
    np.testing.assert_allclose(info["distance"], np.hypot(1.0, 1.5), rtol=1e-4)


def test_among_equally_near_centres_a_client_stays():
    down = centres_at(0.0, 0.0, 0.0)
    for before in range(3):
        method = replace(METHOD, clusters=3)
        client, message, _ = updated(method, TASK, down, jnp.int32(before), shard_of(3.0), rng.root(0))
        assert int(client) == int(message.payload.cluster) == before


def test_a_client_begins_at_the_centre_with_the_lowest_loss_and_by_lot_among_equals():
    _, message, _ = updated(METHOD, TASK, centres_at(-3.0, 4.0), NONE, shard_of(5.0), rng.root(0))
    assert int(message.payload.cluster) == 1
    np.testing.assert_allclose(message.payload.weights["body"], 4.1, rtol=1e-5)
    keys, down = jax.random.split(rng.root(6), 400), centres_at(0.3, 0.3)
    drawn = jax.jit(jax.vmap(lambda key: updated(METHOD, TASK, down, NONE, shard_of(1.0), key)[0]))(keys)
    assert abs(np.mean(drawn) - 0.5) < 4 * 0.5 / np.sqrt(400)  # four standard errors


def test_statistics_are_no_part_of_a_distance():
    """Weights that have not moved are nearest to where they started, whatever the statistics did."""
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    method = FeSEM(first_networks="independent", optimiser=Optimiser(step_size=0.0), work=Work(batch_size=3))
    down = init_server(method, task, rng.root(0))
    client, message, info = updated(method, task, down, jnp.int32(1), data, rng.root(1))
    assert int(client) == 1
    assert float(info["distance"]) == 0
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), message.payload.stats, down.stats)
    assert any(jax.tree.leaves(moved))


def test_a_centre_is_the_mean_of_its_clients_by_n_k_and_one_without_any_keeps_every_bit():
    server = centres_at(0.1, 1.7)
    sent = Assigned(jnp.array([0, 0, 1]), centres_at(2.0, 6.0, np.nan).weights, {})
    new, info = aggregated(METHOD, TASK, server, Message(sent, jnp.array([3.0, 1.0, 0.0])), rng.root(0))
    np.testing.assert_allclose(new.weights["body"][0], 3.0, rtol=1e-6)
    assert float(new.weights["body"][1]) == float(server.weights["body"][1])
    assert [float(info["share_1"]), float(info["share_2"])] == [1.0, 0.0]


def test_the_personal_model_is_the_client_s_centre_and_by_loss_that_of_one_without():
    down, data = centres_at(-3.0, 4.0), shard_of(5.0)
    method = replace(METHOD, finetune_epochs=0)
    for client, place in ((0, -3.0), (1, 4.0), (-1, 4.0)):
        posterior = personalised(method, TASK, down, jnp.int32(client), data, rng.root(0))
        np.testing.assert_array_equal(posterior.weights["body"], [place])


def test_data_choose_the_global_model_and_without_any_all_count_equally():
    down = centres_at(-3.0, 4.0)
    chosen = population(METHOD, TASK, down, shard_of(5.0), rng.root(0))
    np.testing.assert_array_equal(chosen.weights["body"], [4.0, 4.0])
    predictive = predicted(
        METHOD, TASK, population(METHOD, TASK, down, None, rng.root(0)), jnp.zeros((1, 1)), rng.root(1)
    )
    np.testing.assert_array_equal(predictive.outputs[:, 0, 0], [-3.0, 4.0])
    np.testing.assert_allclose(np.exp(predictive.log_weights[:, 0]), 0.5, rtol=1e-6)


def test_a_client_without_examples_sends_nothing_and_is_in_no_cluster():
    data = constant_shards(3.0, 0.0, counts=(4, 0)).of(jnp.int32(1))
    client, message, _ = updated(METHOD, TASK, centres_at(-3.0, 4.0), NONE, data, rng.root(0))
    assert int(METHOD.cluster(client)) == -1
    assert float(message.weight) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clusters": 0}, "clusters=0 is out of range; choose 1 or more"),
        ({"first_networks": "far"}, "first-networks='far' is not known; choose from equal, independent"),
        ({"finetune_epochs": -1}, "finetune-epochs=-1 is out of range"),
        ({"finetune_step_size": 0.0}, r"finetune-step-size=0\.0 is not a positive number"),
        ({"optimiser": Optimiser(step_size=0.0)}, r"step-size=0\.0 is not a positive number"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        replace(FeSEM(), **options).check()
