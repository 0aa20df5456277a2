"""Centres of messages against NumPy, with absent ones among them."""

import jax
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.fed import robust
from priory.fed.method import Message

RULES = ("median", "trimmed:0.3", "trimmed:0", "krum", "krum:1", "norm-clip:0.7")
every_rule = pytest.mark.parametrize("text", RULES)
SHAPES = {"w": (2, 3), "b": (2,), "s": ()}
ALL = 9


def rows(num: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Payloads of so many clients, stacked.

    Most tests stack `ALL` and make some of them absent, whatever number they need: a rule compiles once for a size.
    """
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=(num, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def flat(payload) -> np.ndarray:
    return np.concatenate([np.reshape(payload[name], (len(payload[name]), -1)) for name in SHAPES], axis=1)


def message(payload, absent=()) -> Message:
    """Stacked messages of odd weights; those at `absent` are NaN and weigh nothing."""
    num = len(payload["w"])
    out = np.isin(np.arange(num), absent)
    weight = np.where(out, 0.0, 1.0 + 10.0 * np.arange(num))
    spoilt = {name: np.where(out.reshape(-1, *(1,) * (leaf.ndim - 1)), np.nan, leaf) for name, leaf in payload.items()}
    return Message(spoilt, np.float32(weight), np.arange(num, dtype=np.int32))


REFERENCE = rows(ALL, seed=1)
_centre = jax.jit(robust.centre, static_argnums=0)


def centre(text: str, messages: Message, reference=None) -> np.ndarray:
    """The centre as one row; it weighs as many as are present."""
    num = messages.weight.shape[0]
    reference = {name: leaf[:num] for name, leaf in (reference or REFERENCE).items()}
    found = _centre(robust.parse(text), messages, reference)
    assert found.weight.tolist() == [int(np.sum(np.asarray(messages.weight) > 0))]
    assert {name: leaf.shape for name, leaf in found.payload.items()} == {n: (1, *s) for n, s in SHAPES.items()}
    return flat(found.payload)[0]


def by_hand(text: str, x: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The same by NumPy, of rows that are all present."""
    name, _, value = text.partition(":")
    num = len(x)
    if name == "median":
        return np.median(x, axis=0)
    if name == "trimmed":
        drop = int(float(value) * num + 1e-9)
        return np.sort(x, axis=0)[drop : num - drop].mean(axis=0)
    if name == "norm-clip":
        learned = x - reference
        size = np.linalg.norm(learned, axis=1, keepdims=True)
        return (reference + learned * np.minimum(1, float(value) / size)).mean(axis=0)
    false = int(value) if value else max(0, (num - 3) // 2)
    far = np.sort(np.sum((x[:, None] - x[None]) ** 2, axis=-1), axis=1)[:, 1:]
    score = far[:, : max(1, num - false - 2)].sum(axis=1)
    return x[score <= score.min() * (1 + 1e-6)].mean(axis=0)


@every_rule
@pytest.mark.parametrize("absent", [(), (0,), (2, 5), (1, 2, 3, 8), (0, 1, 2, 3, 4, 5, 6), tuple(range(8))])
def test_a_centre_is_that_of_the_messages_that_are_present(text, absent):
    payload = rows(ALL)
    there = ~np.isin(np.arange(ALL), absent)
    wanted = by_hand(text, flat(payload)[there], flat(REFERENCE)[there])
    np.testing.assert_allclose(centre(text, message(payload, absent)), wanted, rtol=1e-5, atol=1e-6)


@every_rule
def test_nobody_gives_zeros_of_weight_zero(text):
    assert not centre(text, message(rows(ALL), absent=range(ALL))).any()


@every_rule
@pytest.mark.parametrize("num", [2, 3, 7])
def test_the_order_of_messages_does_not_matter(text, num):
    size = 2 if num == 2 else ALL  # a stack of two, and more that are present in a larger one
    messages, order = message(rows(size), absent=range(num, size)), np.roll(np.arange(size), 1)
    turned = jax.tree.map(lambda leaf: leaf[order], messages)
    reference = {name: leaf[:size] for name, leaf in REFERENCE.items()}
    moved = {name: leaf[order] for name, leaf in reference.items()}
    np.testing.assert_allclose(centre(text, turned, moved), centre(text, messages, reference), rtol=1e-6, atol=1e-6)


@every_rule
@pytest.mark.parametrize("num", [1, 2, 6, 7])
def test_equal_messages_come_back_as_they_are(text, num):
    size = num if num < 3 else ALL
    alike = {name: np.repeat(leaf, size, axis=0) for name, leaf in rows(1).items()}
    near = {name: leaf + np.float32(0.01) for name, leaf in alike.items()}  # within the norm that passes unchanged
    found = centre(text, message(alike, absent=range(num, size)), near)
    np.testing.assert_allclose(found, flat(alike)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ["median", "trimmed:0.2", "krum", "krum:1"])
@pytest.mark.parametrize("wild", [1e6, -1e6, 1e18])
def test_one_wild_message_moves_the_centre_no_further_than_the_honest_spread(text, wild):
    payload = {name: leaf.copy() for name, leaf in rows(ALL).items()}
    honest = flat(payload)[1:7]
    for leaf in payload.values():
        leaf[0] = wild
    found = centre(text, message(payload, absent=(7, 8)))
    assert (found >= honest.min(axis=0)).all()
    assert (found <= honest.max(axis=0)).all()


def test_clipping_bounds_what_one_message_adds():
    payload = {name: leaf.copy() for name, leaf in rows(ALL).items()}
    calm = centre("norm-clip:0.7", message(payload))
    payload["w"][0] += 1e18
    assert np.linalg.norm(centre("norm-clip:0.7", message(payload)) - calm) <= 2 * 0.7 / ALL + 1e-6


def test_krum_sees_small_differences_of_large_numbers():
    payload = {name: np.float32(1e-3 * leaf + 100) for name, leaf in rows(ALL).items()}
    x = flat(payload)[:8]
    found = centre("krum", message(payload, absent=(8,)))
    np.testing.assert_array_equal(found, by_hand("krum", x.astype(np.float64), x).astype(np.float32))


@pytest.mark.parametrize("share", [0.07, 0.14, 0.29])
def test_a_decimal_share_of_a_hundred_is_exact(share):
    values, drop = np.arange(100.0) ** 2, round(100 * share)
    found = _centre(robust.Trimmed(share), Message(np.float32(values), np.ones(100, np.float32)), None)
    np.testing.assert_allclose(found.payload, [values[drop : 100 - drop].mean()], rtol=1e-5)


@every_rule
def test_a_message_without_numbers_has_a_centre(text):
    found = _centre(robust.parse(text), Message((), np.ones(3, np.float32)), ())
    assert (found.payload, found.weight.tolist()) == ((), [3])


def test_whole_numbers_have_none():
    with pytest.raises(UsageError, match="cluster of a message has whole numbers, which have no centre; leave out"):
        robust.centre(robust.Median(), Message({"cluster": np.arange(3)}, np.ones(3)), None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mean", r"robust='mean' is not understood; write median, trimmed:SHARE"),
        ("median:2", r"robust='median:2' is not understood"),
        ("trimmed", r"robust='trimmed' is not understood"),
        ("krum:few", r"robust='krum:few' is not understood"),
        ("krum:-1", r"robust='krum:-1' has a negative number of false messages; choose krum:1"),
        ("trimmed:0.5", r"robust='trimmed:0.5' drops a share outside \[0, 0.5\) at each end; choose"),
        ("trimmed:nan", r"robust='trimmed:nan' drops a share outside"),
        ("norm-clip:0", r"robust='norm-clip:0' clips to no positive number; choose"),
        ("norm-clip:inf", r"robust='norm-clip:inf' clips to no positive number"),
    ],
)
def test_what_is_no_rule_ends_in_a_sentence(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        robust.parse(text)
