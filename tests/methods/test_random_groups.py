"""Random groups: fixed groups with a network each, and that one network is FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, Optimiser, RandomGroups, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods._blocks.clustered import Assigned
from priory.models.model import Params
from tests.methods.problems import a_round_of, constant_shards, quadratic_task, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, init_client, init_server, personalised, population, predicted, updated

TASK = quadratic_task(num_clients=4)
METHOD = RandomGroups(optimiser=Optimiser(step_size=0.1), work=Work(epochs=1, batch_size=4), finetune_step_size=0.05)
ENSEMBLE = replace(METHOD, predict_with="all")
both = pytest.mark.parametrize("predict_with", ["group", "all"])


def networks_at(*places):
    """Networks of one number each."""
    body = jnp.array(places, jnp.float32)
    return Params({"body": body, "head": np.zeros(len(places), np.float32)})


def shard_of(centre, count=4):
    return constant_shards(centre, 0.0, counts=(count, 1)).of(jnp.int32(0))


@both
def test_one_network_is_fedavg(predict_with):
    task, shards = tiny_task(), tiny_shards()
    options = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    grouped, average = RandomGroups(1, predict_with, **options), FedAvg(**options)
    (server, sent), (alone, sent_alone) = (a_round_of(method, task, shards) for method in (grouped, average))
    new, _ = aggregated(grouped, task, server, sent, rng.root(0))
    new_alone, _ = aggregated(average, task, alone, sent_alone, rng.root(0))
    for one, other in ((server, alone), (new, new_alone)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), one.weights, other.weights)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one.stats, other.stats)
    np.testing.assert_array_equal(sent.weight, sent_alone.weight)
    data, x = shards.of(jnp.int32(1)), shards.of(jnp.int32(0)).padded().x
    own = personalised(grouped, task, new, jnp.int32(0), data, rng.root(1))
    own_alone = personalised(average, task, new_alone, (), data, rng.root(1))
    said, said_alone = (predicted(m, task, q, x, rng.root(2)) for m, q in ((grouped, own), (average, own_alone)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), said, said_alone)


def test_groups_are_drawn_evenly_at_enrolment():
    keys = jax.random.split(rng.root(0), 3000)
    method = replace(METHOD, num_networks=3)
    drawn = np.asarray(jax.vmap(lambda key: init_client(method, TASK, networks_at(0.0, 1.0, 2.0), key))(keys))
    share = np.bincount(drawn, minlength=3) / 3000
    assert np.all(np.abs(share - 1 / 3) < 4 * np.sqrt(2 / 9 / 3000))  # four standard errors


def test_a_client_trains_the_network_of_its_group_whatever_the_losses_and_stays_there():
    down = networks_at(-3.0, 4.0)
    client, message, _ = updated(METHOD, TASK, down, jnp.int32(0), shard_of(5.0), rng.root(0))
    assert int(client) == int(message.payload.cluster) == int(METHOD.cluster(client)) == 0
    np.testing.assert_allclose(message.payload.weights["body"], -3.0 + 0.1 * 8.0, rtol=1e-5)


def test_the_server_averages_within_groups_by_n_k_and_a_group_without_uploaders_keeps_every_bit():
    server = networks_at(0.1, 1.7, -2.0)
    sent = Assigned(jnp.array([0, 0, 1, 2]), networks_at(2.0, 6.0, 9.0, np.nan).weights, {})
    new, _ = aggregated(METHOD, TASK, server, Message(sent, jnp.array([3.0, 1.0, 4.0, 0.0])), rng.root(0))
    np.testing.assert_allclose(new.weights["body"][:2], [3.0, 9.0], rtol=1e-6)
    assert float(new.weights["body"][2]) == float(server.weights["body"][2])


def test_first_networks_are_independent():
    server = init_server(RandomGroups(num_networks=3), tiny_task(), rng.root(0))
    kernel = np.asarray(server.weights["Dense_0"]["kernel"])
    assert len(np.unique(kernel.reshape(3, -1), axis=0)) == 3


def test_a_client_fine_tunes_and_predicts_with_the_network_of_its_group():
    down, data = networks_at(-3.0, 4.0), shard_of(5.0)
    for group, epochs, place in ((0, 0, -3.0), (1, 0, 4.0), (0, 1, -3.0 + 0.05 * 8.0), (1, 1, 4.0 + 0.05)):
        method = replace(METHOD, finetune_epochs=epochs)
        posterior = personalised(method, TASK, down, jnp.int32(group), data, rng.root(0))
        np.testing.assert_allclose(posterior.weights["body"], place, rtol=1e-6)


def test_an_ensemble_fine_tunes_all_networks_which_then_count_equally():
    down, data = networks_at(-3.0, 4.0), shard_of(5.0)
    for group in range(2):
        method = replace(ENSEMBLE, finetune_epochs=1)
        posterior = personalised(method, TASK, down, jnp.int32(group), data, rng.root(0))
        np.testing.assert_allclose(posterior.weights["body"], [-3.0 + 0.05 * 8.0, 4.0 + 0.05], rtol=1e-6)
        predictive = predicted(method, TASK, posterior, jnp.zeros((1, 1)), rng.root(1))
        np.testing.assert_allclose(np.exp(predictive.log_weights[:, 0]), 0.5, rtol=1e-6)


def test_the_global_model_of_an_ensemble_is_all_networks_with_equal_weights():
    posterior = population(ENSEMBLE, TASK, networks_at(-3.0, 4.0), None, rng.root(0))
    predictive = predicted(ENSEMBLE, TASK, posterior, jnp.zeros((1, 1)), rng.root(1))
    np.testing.assert_array_equal(predictive.outputs[:, 0, 0], [-3.0, 4.0])
    np.testing.assert_allclose(np.exp(predictive.log_weights[:, 0]), 0.5, rtol=1e-6)


def test_the_global_model_is_that_of_a_group_by_lot():
    down, keys = networks_at(0.0, 1.0), jax.random.split(rng.root(0), 400)
    drawn = jax.vmap(lambda key: population(METHOD, TASK, down, None, key).weights["body"])(keys)
    assert set(np.asarray(drawn).tolist()) == {0.0, 1.0}
    assert abs(np.mean(drawn) - 0.5) < 4 * 0.5 / np.sqrt(400)  # four standard errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_networks": 0}, "num-networks=0 is out of range; choose 1 or more"),
        ({"finetune_epochs": -1}, "finetune-epochs=-1 is out of range"),
        ({"finetune_step_size": 0.0}, r"finetune-step-size=0\.0 is not a positive number"),
        ({"work": Work(batch_size=0)}, "batch-size=0 is out of range"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        replace(RandomGroups(), **options).check()


def test_more_networks_than_clients_end_in_a_sentence():
    with pytest.raises(UsageError, match="num-networks=5 exceeds the 4 clients of this federation; choose 1 to 4"):
        init_server(replace(METHOD, num_networks=5), TASK, rng.root(0))
