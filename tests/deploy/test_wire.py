"""The wire format: what fits comes back as it was, what does not is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.deploy.wire import pack, unpack
from priory.fed import thin
from priory.fed.method import Message
from priory.fed.thin import Thin
from priory.models.model import Params

TREE = {"params": Params({"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}), "round": jnp.int32(4)}


def test_a_tree_comes_back_with_its_structure_and_bits():
    again = unpack(pack(TREE), jax.eval_shape(lambda: TREE))
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    jax.tree.map(np.testing.assert_array_equal, again, TREE)


def test_leaves_travel_by_their_paths_as_plain_arrays():
    packed = pack(TREE)
    assert sorted(packed) == ["params/weights/Dense_0/bias", "params/weights/Dense_0/kernel", "round"]
    assert all(type(array) is np.ndarray for array in packed.values())


def test_nothing_at_all_can_travel():
    assert unpack(pack(()), ()) == ()


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(UsageError, match="Two parts of the message are named a/b; rename one"):
        pack({"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda packed: packed.pop("round"), r"lacks \['round'\] and has \[\] besides"),
        (lambda packed: packed.update(extra=np.ones(1)), r"lacks \[\] and has \['extra'\] besides"),
        (lambda packed: packed.update(round=np.ones(2, np.int32)), r"round arrived as int32\[2\] where int32\[\]"),
        (lambda packed: packed.update(round=np.float32(1)), r"round arrived as float32\[\] where int32\[\]"),
    ],
    ids=["missing", "extra", "shape", "type"],
)
def test_what_does_not_fit_is_refused_by_name(change, sentence):
    packed = pack(TREE)
    change(packed)
    with pytest.raises(UsageError, match=sentence):
        unpack(packed, jax.eval_shape(lambda: TREE))


def thin_message(kept) -> Message:
    """Two numbers for each place that is kept, of eleven places in a matrix and a scalar, and three numbers besides."""
    kept = {"a": jnp.asarray(kept[:10]).reshape(5, 2), "b": jnp.asarray(kept[10])}
    number = {"a": jnp.arange(1.0, 11).reshape(5, 2), "b": jnp.float32(11)}
    values = tuple(jax.tree.map(lambda k, v, f=f: jnp.where(k, f * v, 0), kept, number) for f in (1, -2))
    return Message(Thin(kept, values, {"stats": jnp.arange(3.0)}), jnp.float32(1))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_thin_payload_comes_back_and_costs_the_bits_that_are_counted(share):
    message = thin_message(np.random.default_rng(0).random(11) < share)
    packed = pack(message)
    again = unpack(packed, jax.eval_shape(lambda: message))
    assert jax.tree.structure(again) == jax.tree.structure(message)
    jax.tree.map(np.testing.assert_array_equal, again, message)
    assert sum(array.nbytes for array in packed.values()) - 4 == thin.bits(message.payload) / 8  # 4: the weight


def test_a_thin_payload_at_the_root_has_plain_names():
    packed = pack(thin_message(np.arange(11) < 3).payload)
    assert sorted(packed) == ["kept/a", "kept/b", "rest/stats", "values/0/a", "values/0/b", "values/1/a", "values/1/b"]
    assert packed["kept/a"].dtype == np.uint8
    np.testing.assert_array_equal(packed["values/1/a"], [-2, -4, -6])


def test_a_payload_thinned_to_nothing_but_its_rest_travels_whole():
    whole = Thin(None, (), {"a": jnp.ones(3)})
    again = unpack(pack(whole), jax.eval_shape(lambda: whole))
    np.testing.assert_array_equal(again.rest["a"], np.ones(3))


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("values/0/a", np.ones(4, np.float32), r"values/0/a arrived as float32\[4\] where float32\[3\]"),
        ("kept/a", np.ones(3, np.uint8), r"kept/a arrived as uint8\[3\] where uint8\[2\]"),
        ("rest/stats", np.ones(3), r"rest/stats arrived as float64\[3\] where float32\[3\]"),
    ],
)
def test_a_thin_payload_that_does_not_fit_is_refused_by_name(name, array, sentence):
    payload = thin_message(np.arange(11) < 3).payload
    with pytest.raises(UsageError, match=sentence):
        unpack(pack(payload) | {name: array}, jax.eval_shape(lambda: payload))
