"""Uplink transforms: what arrives, what is remembered, and the bits that it costs."""

from functools import partial

import jax
import numpy as np
import pytest

import priory
from priory.core import trees
from priory.core.errors import UsageError
from priory.fed.channel import Clip, On, Quantise, RandomK, TopK, is_statistic, memory_of, parse, transmit
from priory.fed.method import Message
from priory.models.model import Params

KEY = jax.random.key(0)
PAYLOAD = {"a": np.float32([3.0, -0.5, 0.25]), "b": np.float32([[0.0, -4.0]])}
NOTHING = {"a": np.zeros(3, np.float32), "b": np.zeros((1, 2), np.float32)}

UNBIASED = [Quantise(1), Quantise(4), RandomK(0.4), RandomK(1.0)]
DRAWS = 4000


def is_a(path):
    return path.startswith("a")


@partial(jax.jit, static_argnums=0)
def send(channel, payload, memory, key):
    """One program for each channel and shape, where an eager call is one for each operation."""
    return channel.send(payload, memory, key)


@partial(jax.jit, static_argnums=(0, 1))
def transmitted(channel, method, down, message, memory, key):
    return transmit(channel, method, None, down, message, memory, key)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_shortens_to_the_limit_and_keeps_the_direction(limit):
    sent, _, bits = send(Clip(limit), PAYLOAD, (), KEY)
    whole, part = flat(PAYLOAD).astype(np.float64), flat(sent).astype(np.float64)
    size = np.linalg.norm(whole)
    assert np.linalg.norm(part) == pytest.approx(min(limit, size), rel=1e-6)
    cosine = part @ whole / (np.linalg.norm(part) * size)
    assert cosine == pytest.approx(1, rel=1e-6)
    assert bits == 5 * 32


def test_clipping_nothing_gives_nothing():
    sent, _, _ = send(Clip(1.0), NOTHING, (), KEY)
    np.testing.assert_array_equal(flat(sent), np.zeros(5))


def test_the_largest_numbers_are_sent_and_the_rest_is_remembered():
    channel = TopK(0.4)
    sent, memory, bits = send(channel, PAYLOAD, channel.init(PAYLOAD), KEY)
    np.testing.assert_array_equal(sent["a"], [3.0, 0, 0])
    np.testing.assert_array_equal(sent["b"], [[0, -4.0]])
    np.testing.assert_array_equal(memory["a"], [0, -0.5, 0.25])
    assert bits == 2 * (32 + 3)  # five places need three bits


def test_nothing_is_lost_between_what_is_sent_and_what_is_remembered():
    channel, draw = TopK(0.3), np.random.default_rng(0)
    memory = channel.init(PAYLOAD)
    for _ in range(10):
        payload = jax.tree.map(lambda leaf: np.float32(draw.normal(size=leaf.shape)), PAYLOAD)
        sent, after, _ = send(channel, payload, memory, KEY)
        wanted = flat(payload) + flat(memory)
        np.testing.assert_array_equal(flat(sent) + flat(after), wanted)  # exactly: every number is in one of the two
        kept = np.abs(flat(sent))
        np.testing.assert_array_equal(np.sort(kept)[-2:], np.sort(np.abs(wanted))[-2:])
        assert np.count_nonzero(kept) == 2
        memory = after


def test_what_was_held_back_is_sent_in_the_end():
    channel = TopK(0.2)
    memory, total, payload = channel.init(PAYLOAD), np.zeros(5, np.float32), PAYLOAD
    for _ in range(5):
        sent, memory, _ = send(channel, payload, memory, KEY)
        total, payload = total + flat(sent), NOTHING
    np.testing.assert_array_equal(total, flat(PAYLOAD))


def test_at_least_one_number_is_sent_and_an_empty_payload_costs_nothing():
    ones, zeros = np.ones(7, np.float32), np.zeros(7, np.float32)
    assert np.count_nonzero(send(TopK(1e-6), {"a": ones}, {"a": zeros}, KEY)[0]["a"]) == 1
    assert TopK().send((), (), KEY)[2] == 0


@partial(jax.jit, static_argnums=0)
def arrivals(channel, payload):
    """What arrives of a payload that is sent often, (draws, ...)."""
    keys = jax.random.split(jax.random.key(1), DRAWS)
    return jax.vmap(lambda key: channel.send(payload, (), key)[0])(keys)


def normal(seed, size):
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def squared_error(channel, vector):
    """The mean of ‖C(v) − v‖² and its standard error."""
    error = np.sum(np.square(np.asarray(arrivals(channel, vector), np.float64) - np.asarray(vector)), axis=1)
    return error.mean(), error.std(ddof=1) / np.sqrt(DRAWS)


@pytest.mark.parametrize("channel", UNBIASED, ids=str)
def test_what_arrives_is_right_in_the_mean(channel):
    for found, wanted in zip(jax.tree.leaves(arrivals(channel, PAYLOAD)), jax.tree.leaves(PAYLOAD), strict=True):
        found = np.asarray(found, np.float64)
        error = found.std(axis=0, ddof=1) / np.sqrt(DRAWS)
        assert (np.abs(found.mean(axis=0) - wanted) <= 4.5 * error + 1e-6).all()  # 4.5 standard errors, 20 comparisons


@pytest.mark.parametrize("size", [3, 50])
@pytest.mark.parametrize("levels", [1, 2, 8])
def test_quantising_errs_no_more_than_omega(size, levels):
    channel, vector = Quantise(levels), normal(size, size)
    mean, error = squared_error(channel, vector)
    assert mean - 4 * error <= channel.omega(size) * float(np.vdot(vector, vector))


def test_quantising_equal_numbers_errs_as_computed():
    mean, error = squared_error(Quantise(1), np.full(100, 0.3, np.float32))
    assert abs(mean - 9.0 * (np.sqrt(100) - 1)) <= 4 * error  # ‖v‖² Σ_j p(1 − p) with p = 1/√d; ω is √d
    assert Quantise(1).omega(100) == 10


def test_omega_of_quantising_is_the_smaller_of_two_bounds():
    assert Quantise(4).omega(9) == pytest.approx(9 / 16)
    assert Quantise(4).omega(64) == pytest.approx(8 / 4)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_random_choice_errs_by_omega_exactly(fraction):
    channel, vector = RandomK(fraction), normal(2, 20)
    mean, error = squared_error(channel, vector)
    assert channel.omega(20) == pytest.approx(1 / fraction - 1)
    assert abs(mean - channel.omega(20) * float(np.vdot(vector, vector))) <= 4 * error + 1e-6


def test_a_random_choice_has_its_size_and_is_scaled_up():
    sent, _, bits = send(RandomK(0.4), {"a": np.arange(1, 6, dtype=np.float32)}, (), jax.random.key(5))
    values = np.asarray(sent["a"])
    chosen = np.flatnonzero(values)
    assert len(chosen) == 2
    np.testing.assert_allclose(values[chosen], (chosen + 1) * 5 / 2, rtol=1e-6)
    assert bits == 2 * 32 + 32  # two values, and the seed of their places


def test_quantised_numbers_are_levels_of_the_norm_of_their_leaf():
    payload = {"small": np.float32([3e-6, -4e-6]), "large": np.float32([-5e5, 0.0, 12e5])}
    sent, _, bits = send(Quantise(16), payload, (), KEY)
    for name, norm in (("small", 5e-6), ("large", 13e5)):
        levels = np.asarray(sent[name]) / norm * 16
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
        assert (np.abs(levels - np.asarray(payload[name]) / norm * 16) < 1).all()
    assert bits == 2 * 32 + 5 * (1 + 5)  # two norms; a sign and one of 17 levels each


def test_a_single_number_is_quantised_without_error():
    for value in (0.1, -1 / 3, 7e-5, 12345.678):
        sent, _, _ = send(Quantise(3), np.float32([value]), (), KEY)
        assert float(sent[0]) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("channel", UNBIASED, ids=str)
def test_nothing_compressed_is_nothing(channel):
    sent, memory, _ = send(channel, NOTHING, channel.init(PAYLOAD), jax.random.key(4))
    assert (flat(sent) == 0).all()
    assert memory == ()
    assert channel.send((), (), KEY)[2] == 0
    assert channel.omega(0) == 0


@pytest.mark.parametrize("channel", [Quantise(4), RandomK(0.1)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_compression_never_hides_that_an_update_is_not_finite(channel, value):
    for place in range(10):
        payload = np.where(np.arange(10) == place, np.float32(value), np.float32(1))
        sent, _, _ = send(channel, payload, (), jax.random.key(place))
        assert not np.isfinite(sent).all()


@pytest.mark.parametrize("channel", UNBIASED, ids=str)
def test_clients_side_by_side_and_in_turn_send_the_same(channel):
    payloads = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf, -leaf]), PAYLOAD)

    def one(payload_and_client):
        payload, client = payload_and_client
        return channel.send(payload, (), jax.random.fold_in(jax.random.key(3), client))

    everyone = (payloads, np.arange(3, dtype=np.int32))
    together, in_turn = jax.jit(lambda everyone: (jax.vmap(one)(everyone), jax.lax.map(one, everyone)))(everyone)
    alone_too = jax.jit(one)
    for i in range(3):
        alone = alone_too(jax.tree.map(lambda leaf, i=i: leaf[i], everyone))
        for several in (together, in_turn):
            for found, wanted in zip(jax.tree.leaves(several), jax.tree.leaves(alone), strict=True):
                np.testing.assert_allclose(np.asarray(found)[i], wanted, rtol=1e-6)


def test_a_part_that_is_compressed_at_random_leaves_the_rest_as_it_is():
    sent, _, bits = send(On(is_a, Quantise(1)), PAYLOAD, (), KEY)
    np.testing.assert_array_equal(sent["b"], PAYLOAD["b"])
    assert (sent["a"] != PAYLOAD["a"]).any()
    assert bits == (32 + 3 * 2) + 2 * 32


@pytest.mark.parametrize(
    ("text", "channel"), [("qsgd:16", Quantise(16)), ("random:0.1", RandomK(0.1)), ("top:1", TopK(1.0))]
)
def test_a_text_names_a_compression(text, channel):
    assert parse(text) == channel


@pytest.mark.parametrize("text", ["", "zip:3", "qsgd", "qsgd:", "qsgd:2.5", "random:half", "top"])
def test_a_text_that_names_none_is_refused(text):
    with pytest.raises(UsageError, match=f"compress='{text}' is not understood; write qsgd:LEVELS"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("qsgd:0", "levels=0 is not"), ("random:0", "fraction=0.0 lies"), ("top:nan", "fraction=nan")],
)
def test_a_compression_out_of_range_is_refused(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse(text)


def test_a_channel_on_a_part_leaves_the_rest_as_it_is():
    channel = On(is_a, Clip(0.5))
    sent, _, bits = send(channel, PAYLOAD, channel.init(PAYLOAD), KEY)
    np.testing.assert_array_equal(sent["b"], PAYLOAD["b"])
    assert np.linalg.norm(sent["a"]) == pytest.approx(0.5, rel=1e-6)
    assert bits == 5 * 32


def test_a_channel_on_a_part_remembers_that_part_only():
    channel = On(is_a, TopK(0.34))
    memory = channel.init(PAYLOAD)
    assert jax.tree.leaves(memory)[0].shape == (3,)
    sent, memory, bits = send(channel, PAYLOAD, memory, KEY)
    np.testing.assert_array_equal(sent["b"], PAYLOAD["b"])
    np.testing.assert_array_equal(np.asarray(sent["a"]) + np.asarray(memory["a"]), PAYLOAD["a"])
    assert bits == 2 * (32 + 2) + 2 * 32


def params(weight, mean=0.0):
    return Params({"w": np.float32(weight)}, {"mean": np.float32([mean])})


def test_a_channel_sees_the_difference_to_the_reference():
    down, up = params([10.0, 20.0]), params([13.0, 24.0])
    message = Message(up, np.float32(7), np.int32(3))
    arrived, _, _ = transmitted(Clip(1.0), priory.FedAvg(), down, message, (), KEY)
    np.testing.assert_allclose(arrived.payload.weights["w"], [10.6, 20.8], rtol=1e-6)
    assert (float(arrived.weight), int(arrived.sender)) == (7, 3)


def test_a_channel_sees_a_payload_of_another_form_than_the_broadcast_as_it_is():
    message = Message({"w": np.float32([3.0, 4.0])}, np.float32(1))
    arrived, _, _ = transmitted(Clip(1.0), priory.FedAvg(), np.float32(9), message, (), KEY)
    np.testing.assert_allclose(arrived.payload["w"], [0.6, 0.8], rtol=1e-6)


def test_statistics_bypass_the_channel_and_are_counted():
    down, up = params([0.0, 0.0], mean=1.0), params([3.0, 4.0], mean=50.0)
    message = Message(up, np.float32(7), np.int32(3))
    arrived, _, bits = transmitted(Clip(1.0), priory.FedAvg(), down, message, (), KEY)
    assert float(arrived.payload.stats["mean"][0]) == 50
    np.testing.assert_allclose(arrived.payload.weights["w"], [0.6, 0.8], rtol=1e-6)
    assert bits == 3 * 32


def test_whole_numbers_bypass_the_channel_and_are_counted():
    payload = {"cluster": np.int32(7), "w": np.float32([3.0, 4.0])}
    memory = memory_of(TopK(0.5), payload)
    assert trees.num_bytes(memory) == 8
    arrived, _, bits = transmitted(TopK(0.5), priory.FedAvg(), None, Message(payload, np.float32(1)), memory, KEY)
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
        (RandomK(0.0), r"fraction=0.0 lies outside \(0, 1\]"),
        (RandomK(1.5), r"fraction=1.5 lies outside \(0, 1\]"),
        (Quantise(0), r"levels=0 is not a whole number above 0"),
        (Quantise(2.5), r"levels=2.5 is not a whole number above 0"),
        (On(is_a, Clip(-1.0)), r"norm=-1.0 is not a positive number"),
    ],
)
def test_a_bad_channel_ends_in_a_sentence(channel, sentence):
    with pytest.raises(UsageError, match=sentence):
        channel.check()
