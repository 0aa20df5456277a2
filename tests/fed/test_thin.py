"""Thin payloads: the bits that travel."""

import jax.numpy as jnp
import pytest

from priory.fed import thin
from priory.fed.thin import Thin

KEPT = {"a": jnp.array([[True, False, True]]), "b": jnp.arange(9) == 4}
NUMBERS = {"a": jnp.ones((1, 3)), "b": jnp.ones(9)}


def test_a_bit_travels_for_each_place_and_a_number_for_each_that_is_kept():
    whole = jnp.zeros(5)
    bitmaps = 8 + 16  # whole bytes for each leaf
    assert thin.bits(Thin(KEPT, (NUMBERS, NUMBERS), whole)) == bitmaps + 2 * 3 * 32 + 5 * 32


def test_a_payload_that_travels_whole_has_no_bitmap():
    assert thin.bits(Thin(None, (), NUMBERS)) == 12 * 32


@pytest.mark.parametrize(("num", "size"), [(0, 0), (1, 1), (8, 1), (9, 2)])
def test_a_bitmap_fills_whole_bytes(num, size):
    assert thin.bitmap_bytes(num) == size
