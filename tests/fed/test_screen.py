"""What a server accepts of a client."""

import jax.numpy as jnp
import numpy as np
import pytest

from priory.fed import screen
from priory.fed.method import Message


def message(value=1.0, weight=2.0):
    payload = {"w": jnp.array([0.0, value], jnp.float32), "n": jnp.array([3])}
    return Message(payload, jnp.float32(weight), jnp.int32(4))


@pytest.mark.parametrize(("value", "weight"), [(1.0, 2.0), (-1e30, 2.0), (1.0, 0.0)])
def test_finite_numbers_with_a_weight_are_usable(value, weight):
    assert screen.usable(message(value, weight))


@pytest.mark.parametrize(
    ("value", "weight"), [(np.nan, 1.0), (np.inf, 1.0), (-np.inf, 1.0), (1.0, np.nan), (1.0, np.inf), (1.0, -1.0)]
)
def test_anything_else_is_not(value, weight):
    assert not screen.usable(message(value, weight))


def test_a_kept_message_is_as_it_was():
    kept = screen.silence(message(), jnp.bool_(True))
    np.testing.assert_array_equal(kept.payload["w"], [0, 1])
    assert (float(kept.weight), int(kept.sender)) == (2, 4)


def test_a_silenced_message_is_zeros_of_weight_zero():
    silent = screen.silence(message(np.nan, np.inf), jnp.bool_(False))
    np.testing.assert_array_equal(silent.payload["w"], [0, 0])
    assert silent.payload["n"].tolist() == [0]
    assert float(silent.weight) == 0
