"""What a server accepts of a client."""

import jax
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


def left_out(uncertainty, share, uploads=None):
    uploads = np.full(len(uncertainty), True) if uploads is None else np.array(uploads)
    out = jax.jit(screen.most_uncertain, static_argnums=2)(jnp.asarray(uncertainty, jnp.float32), uploads, share)
    return np.flatnonzero(out).tolist()


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, []), (0.24, []), (0.25, [2]), (0.5, [0, 2]), (0.74, [0, 2]), (0.75, [0, 2, 3])]
)
def test_the_share_is_rounded_down_and_the_most_uncertain_go(share, expected):
    assert left_out([0.7, 0.1, 0.9, 0.4], share) == expected


def test_of_equals_the_first_place_goes():
    assert left_out([0.5, 0.5, 0.5, 0.1], 0.5) == [0, 1]


@pytest.mark.parametrize("unknown", [np.nan, np.inf, -np.inf])
def test_whoever_has_no_finite_uncertainty_stays_and_is_not_counted(unknown):
    assert left_out([unknown, 0.1, 0.9, unknown, 0.5], 0.5) == [2]  # one of three


def test_whoever_does_not_upload_is_not_counted():
    assert left_out([0.9, 0.1, 0.8, 0.2], 0.5, uploads=[False, True, True, False]) == [2]


@pytest.mark.parametrize("share", [0.07, 0.14, 0.28, 0.29, 0.55, 0.57, 0.58])
def test_a_decimal_share_of_a_hundred_is_exact(share):
    assert len(left_out(np.arange(100.0), share)) == round(100 * share)  # 100 * 0.29 is below 29 in floating point
