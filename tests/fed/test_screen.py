"""What a server accepts of a client."""

import jax
import numpy as np
import pytest

from priory.fed import screen
from priory.fed.method import Message


def message(value=1.0, weight=2.0):
    payload = {"w": np.float32([0.0, value]), "n": np.int32([3])}
    return Message(payload, np.float32(weight), np.int32(4))


REFERENCE = {"w": np.float32([0.0, 1.0]), "n": np.int32([7])}
LIMITS = screen.Limits(norm=10.0, weight=5.0)


# One program each, where an eager call is one for each operation.
verdict, usable, silence = map(jax.jit, (screen.verdict, screen.usable, screen.silence))


def reason(*args, limits=LIMITS):
    found = message(*args)
    index = int(verdict(found, REFERENCE, limits))
    assert bool(usable(found, REFERENCE, limits)) == (index == 0)
    return screen.REASONS[index]


@pytest.mark.parametrize(("value", "weight"), [(1.0, 2.0), (11.0, 5.0), (-9.0, 0.0)])
def test_finite_numbers_within_the_limits_are_usable(value, weight):
    assert reason(value, weight) == ""


@pytest.mark.parametrize(
    ("value", "weight"), [(np.nan, 1.0), (np.inf, 1.0), (-np.inf, -1.0), (1.0, np.nan), (1.0, np.inf), (1.0, -np.inf)]
)
def test_what_is_not_finite_is_called_so(value, weight):
    assert reason(value, weight) == reason(value, weight, limits=screen.UNLIMITED) == "not finite"


@pytest.mark.parametrize(("value", "weight"), [(1.0, -1.0), (1.0, 5.1), (1e30, 6.0)])
def test_a_weight_is_between_zero_and_its_limit(value, weight):
    assert reason(value, weight) == "weight"


@pytest.mark.parametrize("value", [11.1, -9.1, 1e15, -3e38])  # the square of the last is too large for a float
def test_the_norm_of_what_was_learned_is_at_most_its_limit(value):
    assert reason(value, 1.0) == "norm"


def test_without_limits_any_finite_number_is_usable():
    assert reason(-3e38, 1e30, limits=screen.UNLIMITED) == ""


def test_whole_numbers_have_no_norm():
    far = Message({"n": np.int32([1000])}, np.float32(1))
    assert usable(far, {"n": np.int32([0])}, LIMITS)


def test_new_limits_compile_nothing():
    judge = jax.jit(screen.verdict)
    for norm in (10.0, 0.5, np.inf):
        judge(message(), REFERENCE, screen.Limits(norm, 2 * norm))
    assert judge._cache_size() == 1


def test_a_kept_message_is_as_it_was():
    kept = silence(message(), True)
    np.testing.assert_array_equal(kept.payload["w"], [0, 1])
    assert (float(kept.weight), int(kept.sender)) == (2, 4)


def test_a_silenced_message_is_zeros_of_weight_zero():
    silent = silence(message(np.nan, np.inf), False)
    np.testing.assert_array_equal(silent.payload["w"], [0, 0])
    assert silent.payload["n"].tolist() == [0]
    assert float(silent.weight) == 0


def left_out(uncertainty, share, uploads=None):
    uploads = np.full(len(uncertainty), True) if uploads is None else np.array(uploads)
    out = jax.jit(screen.most_uncertain, static_argnums=2)(np.float32(uncertainty), uploads, share)
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
