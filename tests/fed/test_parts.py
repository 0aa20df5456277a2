"""Parts of a payload: where they are, their units, and what clipping does to each."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from priory.core import trees
from priory.fed import privacy
from priory.fed.parts import WHOLE, Parts

PAYLOAD = {"prior": {"mean": jnp.array([3.0, 4.0]), "log_sd": jnp.array(0.0)}, "body": jnp.array([[30.0], [40.0]])}
UNITS = Parts(("prior", "body"), (2.0, 100.0))
ONE, OTHER = 3, 5  # numbers in each part of what hypothesis makes
NUMBERS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
UNIT = st.floats(2**-10, 2**10, width=32)
clip = jax.jit(privacy.clipped)


def norms(parts, payload):
    """Return the norm of each part, computed by hand."""
    leaves = {name: jax.tree.leaves(payload[name]) for name in parts.names}
    return [
        math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in leaves[name])) for name in leaves
    ]


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float32, ONE, elements=NUMBERS), arrays.arrays(np.float32, OTHER, elements=NUMBERS), UNIT, UNIT)
def test_no_part_exceeds_its_clip_and_one_below_it_is_untouched(one, other, first, second):
    payload, parts = {"one": one, "other": other}, Parts(("one", "other"), (first, second))
    made = clip(payload, 1.0, parts)
    for name, before, after, unit in zip(
        parts.names, norms(parts, payload), norms(parts, made), parts.units, strict=True
    ):
        assert after <= unit * (1 + 1e-5)  # float32
        if before < unit * (1 - 1e-6):
            np.testing.assert_array_equal(made[name], payload[name])
        elif before > unit * (1 + 1e-6):
            assert after == pytest.approx(unit, rel=1e-5)


def test_a_part_is_all_that_is_at_or_below_its_path():
    prior, body = UNITS.split(PAYLOAD)
    assert jax.tree.leaves(prior) == jax.tree.leaves({"prior": PAYLOAD["prior"]})
    assert body["prior"] == {"mean": None, "log_sd": None}
    np.testing.assert_array_equal(body["body"], PAYLOAD["body"])


def test_a_path_that_only_begins_like_a_part_is_not_in_it():
    with pytest.raises(ValueError, match="priors is in no part of prior; name one for it"):
        Parts(("prior",), (1.0,)).split({"prior": jnp.ones(1), "priors": jnp.ones(1)})


def test_in_units_numbers_are_divided_by_them_and_come_back():
    inside = UNITS.to_units(PAYLOAD)
    np.testing.assert_allclose(inside["prior"]["mean"], [1.5, 2.0])
    np.testing.assert_allclose(inside["body"], [[0.3], [0.4]], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), UNITS.from_units(inside), PAYLOAD)


def test_a_payload_without_parts_is_one_part_in_the_unit_1():
    assert WHOLE.to_units(PAYLOAD) is WHOLE.from_units(PAYLOAD) is WHOLE.split(PAYLOAD)[0] is PAYLOAD
    assert (WHOLE.norm, WHOLE.by_name(0.5)) == (1.0, 0.5)


def test_a_clipped_payload_has_the_norm_of_its_parts_together():
    full = clip(jax.tree.map(lambda leaf: 1e4 * (leaf + 1), PAYLOAD), 1.0, UNITS)
    assert float(trees.norm(UNITS.to_units(full))) == pytest.approx(UNITS.norm, rel=1e-6)
    assert UNITS.norm == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("prior", "body", "fits"), [(1.99, 99.9, True), (2.01, 1.0, False), (0.1, 100.1, False)])
def test_within_looks_at_every_part(prior, body, fits):
    payload = {"prior": jnp.array([prior]), "body": jnp.array([body])}
    assert bool(privacy.within(payload, 1.0, UNITS)) == fits


def test_a_number_that_is_infinite_is_not_within():
    assert not privacy.within({"prior": jnp.array([jnp.inf]), "body": jnp.zeros(1)}, 1.0, UNITS)
