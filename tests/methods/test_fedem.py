"""FedEM: responsibilities, mixture weights and weighted training in closed form, and that one component is FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedAvg, FedEM, Optimiser, UsageError, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Message
from priory.models.model import Params
from tests.methods.problems import a_round_of, constant_shards, quadratic_task, shards_from, tiny_shards, tiny_task
from tests.methods.verbs import aggregated, init_server, personalised, population, predicted, updated

TASK = quadratic_task()
TWO = FedEM(num_components=2, optimiser=Optimiser(step_size=0.1), work=Work(epochs=1, batch_size=4))


def at(*places):
    """Components of one number each."""
    body = jnp.array(places, jnp.float32)
    return Params({"body": body, "head": np.zeros(len(places), np.float32)})


def shard_of(*targets, capacity=None):
    """A client with these targets."""
    inputs = np.zeros((len(targets), 1), np.float32)
    return shards_from(inputs, np.array(targets, np.float32), (len(targets),), capacity).of(jnp.int32(0))


def shares(weights, places, target):
    """Responsibilities by hand, (components,)."""
    joint = np.array(weights) * np.exp(-0.5 * (target - np.array(places)) ** 2)
    return joint / joint.sum()


def test_one_component_is_fedavg():
    task, shards = tiny_task(), tiny_shards()
    options = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    mixture, average = FedEM(num_components=1, **options), FedAvg(**options)
    (server, sent), (alone, sent_alone) = (a_round_of(method, task, shards) for method in (mixture, average))
    new, _ = aggregated(mixture, task, server, sent, rng.root(0))
    new_alone, _ = aggregated(average, task, alone, sent_alone, rng.root(0))
    for one, other in ((server, alone), (new, new_alone)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), one, other)
    np.testing.assert_array_equal(sent.weight, sent_alone.weight)


def test_mixture_weights_are_the_mean_responsibilities():
    places, before, targets = (-1.0, 2.0), (0.3, 0.7), (-1.5, 0.2, 2.5)
    client, _, info = updated(TWO, TASK, at(*places), jnp.array(before), shard_of(*targets), rng.root(0))
    expected = np.mean([shares(before, places, target) for target in targets], axis=0)
    np.testing.assert_allclose(client, expected, rtol=1e-5)
    np.testing.assert_allclose([info["share_1"], info["share_2"]], expected, rtol=1e-5)


def test_a_step_of_a_component_weighs_each_example_by_its_responsibility():
    places, before, targets = (-1.0, 2.0), (0.3, 0.7), (-1.5, 0.2, 2.5)
    _, message, _ = updated(TWO, TASK, at(*places), jnp.array(before), shard_of(*targets), rng.root(0))
    share = np.array([shares(before, places, target) for target in targets])  # (examples, components)
    gap = np.array(targets)[:, None] - np.array(places)[None]
    moved = np.array(places) + 0.1 * np.mean(share * gap, axis=0)  # one batch holds all three
    np.testing.assert_allclose(message.payload.weights["body"], moved, rtol=1e-5)
    assert float(message.weight) == 3


def test_responsibilities_do_not_move_with_the_training_of_a_round():
    """Many steps end at the mean weighted by responsibilities under what was broadcast (M-step)."""
    places, before, targets = (-1.0, 2.0), (0.3, 0.7), (-1.5, 0.2, 2.5)
    method = replace(TWO, work=Work(epochs=300, batch_size=4))
    _, message, _ = updated(method, TASK, at(*places), jnp.array(before), shard_of(*targets), rng.root(0))
    share = np.array([shares(before, places, target) for target in targets])
    optimum = share.T @ np.array(targets) / share.sum(axis=0)
    weights = message.payload.weights
    np.testing.assert_allclose(weights["body"] + weights["head"], optimum, rtol=1e-4)


def test_rows_past_a_client_s_own_change_nothing():
    arguments = (TASK, at(-1.0, 2.0), jnp.array([0.3, 0.7]))
    tight, roomy = (
        updated(TWO, *arguments, shard_of(-1.5, 0.2, 2.5, capacity=room), rng.root(0))[:2] for room in (3, 400)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), tight, roomy)


def test_fitted_weights_are_the_shares_of_the_data():
    """Components that are told apart beyond doubt: π is the share of the examples of each."""
    data = shard_of(-20.0, -20.0, -20.0, 20.0)
    posterior = personalised(TWO, TASK, at(-20.0, 20.0), jnp.array([0.5, 0.5]), data, rng.root(0))
    np.testing.assert_allclose(posterior.weights, [0.75, 0.25], rtol=1e-6)


def test_more_weight_steps_never_lower_the_likelihood():
    targets, places = np.array([-1.5, 0.2, 2.5, 2.1]), np.array([-1.0, 2.0])
    density = np.exp(-0.5 * (targets[:, None] - places[None]) ** 2)
    likelihood = []
    for steps in (0, 1, 2, 5, 50):
        method = replace(TWO, weight_steps=steps)
        posterior = personalised(
            method, TASK, at(*places), jnp.array([0.5, 0.5]), shard_of(*map(float, targets)), rng.root(0)
        )
        likelihood.append(np.log(density @ np.asarray(posterior.weights)).sum())
    assert np.all(np.diff(likelihood) > -1e-6)
    assert likelihood[-1] > likelihood[0] + 0.01


def test_a_client_predicts_with_its_own_weights_and_the_population_with_equal_ones():
    down, x = at(-1.0, 2.0), jnp.zeros((3, 1))
    own = personalised(replace(TWO, weight_steps=0), TASK, down, jnp.array([0.9, 0.1]), shard_of(0.0), rng.root(0))
    for posterior, weights in ((own, [0.9, 0.1]), (population(TWO, TASK, down, None, rng.root(0)), [0.5, 0.5])):
        predictive = predicted(TWO, TASK, posterior, x, rng.root(1))
        np.testing.assert_allclose(predictive.outputs[:, 0, 0], [-1.0, 2.0])
        np.testing.assert_allclose(np.exp(predictive.log_weights), np.tile(weights, (3, 1)).T, rtol=1e-5)


def test_a_weight_of_nothing_stays_finite():
    """A component that explains nothing of a client has a weight of 0 in floating point."""
    client, message, _ = updated(TWO, TASK, at(0.0, 1e4), jnp.array([0.5, 0.5]), shard_of(0.1), rng.root(0))
    np.testing.assert_array_equal(client, [1.0, 0.0])
    again, message, _ = updated(TWO, TASK, at(0.0, 1e4), client, shard_of(0.1), rng.root(1))
    assert np.all(np.isfinite(again))
    assert np.all(np.isfinite(message.payload.weights["body"]))


def test_a_client_without_examples_keeps_its_weights_and_counts_for_nothing():
    data = constant_shards(3.0, 0.0, counts=(4, 0)).of(jnp.int32(1))
    client, message, _ = updated(TWO, TASK, at(-1.0, 2.0), jnp.array([0.3, 0.7]), data, rng.root(0))
    np.testing.assert_allclose(client, [0.3, 0.7])
    assert float(message.weight) == 0


def test_components_are_averaged_one_by_one_with_weights_n_k():
    sent = jax.tree.map(lambda *leaves: np.stack(leaves), at(0.0, 8.0), at(4.0, 4.0))
    new, _ = aggregated(TWO, TASK, at(1.0, 1.0), Message(sent, jnp.array([1.0, 3.0])), rng.root(0))
    np.testing.assert_allclose(new.weights["body"], [3.0, 5.0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_components": 0}, "num-components=0 is out of range; choose 1 or more"),
        ({"weight_steps": -1}, "weight-steps=-1 is out of range; choose 0 or more"),
        ({"optimiser": Optimiser(step_size=0.0)}, r"step-size=0\.0 is not a positive number"),
        ({"work": Work(batch_size=0)}, "batch-size=0 is out of range"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        replace(FedEM(), **options).check()


def test_fine_tuning_one_component_is_that_of_fedavg():
    task, data = tiny_task(), tiny_shards().of(jnp.int32(0))
    options = {"optimiser": Optimiser(step_size=0.05, momentum=0.9), "work": Work(epochs=2, batch_size=3)}
    tuned = {"finetune_epochs": 3, "finetune_step_size": 0.02}
    mixture, average = FedEM(num_components=1, **options, **tuned), FedAvg(**options, **tuned)
    down = init_server(average, task, rng.root(0))
    stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], down)
    own = personalised(mixture, task, stacked, np.ones(1, np.float32), data, rng.root(1)).components
    alone = personalised(average, task, down, (), data, rng.root(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), own, alone)
