"""The wire format: what fits comes back as it was, what does not is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.deploy.wire import pack, unpack
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
