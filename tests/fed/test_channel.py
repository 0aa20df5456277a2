"""Uplink transforms: what arrives, what is remembered, and the bits that it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.core import trees
from priory.core.errors import UsageError
from priory.fed.channel import Clip, On, TopK, is_statistic, memory_of, transmit
from priory.fed.method import Message
from priory.models.model import Params

KEY = jax.random.key(0)
PAYLOAD = {"a": jnp.array([3.0, -0.5, 0.25]), "b": jnp.array([[0.0, -4.0]])}


def is_a(path):
    return path.startswith("a")


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_shortens_to_the_limit_and_keeps_the_direction(limit):
    sent, _, bits = Clip(limit).send(PAYLOAD, (), KEY)
    size = float(trees.norm(PAYLOAD))
    assert float(trees.norm(sent)) == pytest.approx(min(limit, size), rel=1e-6)
    cosine = float(trees.dot(sent, PAYLOAD) / (trees.norm(sent) * size))
    assert cosine == pytest.approx(1, rel=1e-6)
    assert bits == 5 * 32


def test_clipping_nothing_gives_nothing():
    sent, _, _ = Clip(1.0).send({"a": jnp.zeros(3)}, (), KEY)
    np.testing.assert_array_equal(sent["a"], jnp.zeros(3))


def test_the_largest_numbers_are_sent_and_the_rest_is_remembered():
    channel = TopK(0.4)
    sent, memory, bits = channel.send(PAYLOAD, channel.init(PAYLOAD), KEY)
    np.testing.assert_array_equal(sent["a"], [3.0, 0, 0])
    np.testing.assert_array_equal(sent["b"], [[0, -4.0]])
    np.testing.assert_array_equal(memory["a"], [0, -0.5, 0.25])
    assert bits == 2 * (32 + 3)  # five places need three bits


def test_nothing_is_lost_between_what_is_sent_and_what_is_remembered():
    channel, draw = TopK(0.3), np.random.default_rng(0)
    memory = channel.init(PAYLOAD)
    for _ in range(10):
        payload = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32), PAYLOAD)
        sent, after, _ = channel.send(payload, memory, KEY)
        wanted = trees.add(payload, memory)
        for total, leaf in zip(jax.tree.leaves(trees.add(sent, after)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(total, leaf)  # exactly: every number is in one of the two
        flat = np.sort(np.abs(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wanted)])))
        kept = np.abs(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(sent)]))
        np.testing.assert_array_equal(np.sort(kept)[-2:], flat[-2:])
        assert np.count_nonzero(kept) == 2
        memory = after


def test_what_was_held_back_is_sent_in_the_end():
    channel = TopK(0.2)
    memory, total = channel.init(PAYLOAD), channel.init(PAYLOAD)
    payload = PAYLOAD
    for _ in range(5):
        sent, memory, _ = channel.send(payload, memory, KEY)
        total, payload = trees.add(total, sent), jax.tree.map(jnp.zeros_like, PAYLOAD)
    for found, wanted in zip(jax.tree.leaves(total), jax.tree.leaves(PAYLOAD), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_at_least_one_number_is_sent_and_an_empty_payload_costs_nothing():
    assert np.count_nonzero(TopK(1e-6).send({"a": jnp.ones(7)}, {"a": jnp.zeros(7)}, KEY)[0]["a"]) == 1
    assert TopK().send((), (), KEY)[2] == 0


def test_a_channel_on_a_part_leaves_the_rest_as_it_is():
    channel = On(is_a, Clip(0.5))
    sent, _, bits = channel.send(PAYLOAD, channel.init(PAYLOAD), KEY)
    np.testing.assert_array_equal(sent["b"], PAYLOAD["b"])
    assert float(trees.norm(sent["a"])) == pytest.approx(0.5, rel=1e-6)
    assert bits == 5 * 32


def test_a_channel_on_a_part_remembers_that_part_only():
    channel = On(is_a, TopK(0.34))
    memory = channel.init(PAYLOAD)
    assert jax.tree.leaves(memory)[0].shape == (3,)
    sent, memory, bits = channel.send(PAYLOAD, memory, KEY)
    np.testing.assert_array_equal(sent["b"], PAYLOAD["b"])
    np.testing.assert_array_equal(trees.add(sent["a"], memory["a"]), PAYLOAD["a"])
    assert bits == 2 * (32 + 2) + 2 * 32


def params(weight, mean=0.0):
    return Params({"w": jnp.array(weight)}, {"mean": jnp.array([mean])})


def test_a_channel_sees_the_difference_to_the_reference():
    down, up = params([10.0, 20.0]), params([13.0, 24.0])
    message = Message(up, jnp.float32(7), jnp.int32(3))
    arrived, _, _ = transmit(Clip(1.0), priory.FedAvg(), None, down, message, (), KEY)
    np.testing.assert_allclose(arrived.payload.weights["w"], [10.6, 20.8], rtol=1e-6)
    assert (float(arrived.weight), int(arrived.sender)) == (7, 3)


def test_without_a_reference_a_channel_sees_the_payload():
    arrived, _, _ = transmit(Clip(1.0), object(), None, None, Message({"w": jnp.array([3.0, 4.0])}, 1.0), (), KEY)
    np.testing.assert_allclose(arrived.payload["w"], [0.6, 0.8], rtol=1e-6)


def test_statistics_bypass_the_channel_and_are_counted():
    down, up = params([0.0, 0.0], mean=1.0), params([3.0, 4.0], mean=50.0)
    arrived, _, bits = transmit(Clip(1.0), priory.FedAvg(), None, down, Message(up, 1.0), (), KEY)
    assert float(arrived.payload.stats["mean"][0]) == 50
    np.testing.assert_allclose(arrived.payload.weights["w"], [0.6, 0.8], rtol=1e-6)
    assert bits == 3 * 32


def test_whole_numbers_bypass_the_channel_and_are_counted():
    payload = {"cluster": jnp.int32(7), "w": jnp.array([3.0, 4.0])}
    memory = memory_of(TopK(0.5), payload)
    assert trees.num_bytes(memory) == 8
    arrived, _, bits = transmit(TopK(0.5), object(), None, None, Message(payload, 1.0), memory, KEY)
    assert arrived.payload["cluster"] == 7
    np.testing.assert_array_equal(arrived.payload["w"], [0.0, 4.0])
    assert bits == 32 + (32 + 1)  # the number, and one value with its index


def test_the_memory_of_a_client_has_no_place_for_statistics():
    assert trees.num_bytes(memory_of(TopK(), params([1.0, 2.0]))) == 8
    assert memory_of(None, params([1.0])) == ()


def test_without_a_channel_the_message_arrives_as_it_is():
    message = Message(params([1.0, 2.0]), 1.0)
    arrived, memory, bits = transmit(None, priory.FedAvg(), None, params([0.0, 0.0]), message, (), KEY)
    assert arrived is message
    assert memory == ()
    assert bits == 3 * 32


@pytest.mark.parametrize(("path", "found"), [("stats/mean", True), ("weights/stats_0", False), ("a/stats/b", True)])
def test_a_statistic_is_known_by_its_path(path, found):
    assert is_statistic(path) is found


@pytest.mark.parametrize(
    ("channel", "sentence"),
    [
        (Clip(0.0), r"norm=0.0 is not a positive number"),
        (TopK(0.0), r"fraction=0.0 lies outside \(0, 1\]"),
        (TopK(1.5), r"fraction=1.5 lies outside \(0, 1\]"),
        (On(is_a, Clip(-1.0)), r"norm=-1.0 is not a positive number"),
    ],
)
def test_a_bad_channel_ends_in_a_sentence(channel, sentence):
    with pytest.raises(UsageError, match=sentence):
        channel.check()
