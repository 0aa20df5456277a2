"""Noise on a grid: its law, the norms under it, and the adversary that floating-point noise gives in to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import rng
from priory.core.errors import UsageError
from priory.deploy import noise
from priory.engine.accountants import GRID_BITS, grid_of
from priory.fed.parts import Parts
from priory.fed.privacy import Noised


def test_small_noise_has_the_probabilities_of_the_discrete_gaussian():
    drawn = noise.discrete_gaussian((20_000,), 1.5)
    values = np.arange(-12, 13)
    law = np.exp(-(values**2) / (2 * 1.5**2))
    expected = len(drawn) * law / law.sum()
    counts = np.array([(drawn == value).sum() for value in values])
    often = expected > 20
    errors = (counts - expected)[often] / np.sqrt(expected * (1 - law / law.sum()))[often]
    assert np.abs(errors).max() < 4.5  # standard errors, of 9 values


def test_large_noise_has_the_moments_of_a_gaussian():
    scale, num = 1.37 * 2.0**GRID_BITS, 20_000
    drawn = noise.discrete_gaussian((num,), scale) / scale
    assert abs(drawn.mean()) < 4.5 / num**0.5
    assert abs((drawn**2).mean() - 1) < 4.5 * (2 / num) ** 0.5
    assert abs((drawn**4).mean() - 3) < 4.5 * (96 / num) ** 0.5


def test_no_two_draws_are_alike():
    assert not np.array_equal(noise.discrete_gaussian((8,), 1e6), noise.discrete_gaussian((8,), 1e6))


def test_noise_that_integers_do_not_hold_is_not_drawn():
    with pytest.raises(ValueError, match="64 bits hold less"):
        noise.discrete_gaussian((1,), 2.0**62)


def test_an_array_without_numbers_gets_no_noise():
    assert noise.discrete_gaussian((0, 3), 1.0).shape == (0, 3)


@pytest.mark.parametrize("size", [0.3, 1.0, 7.0])
def test_what_is_summed_has_at_most_the_clipping_norm_to_the_last_bit(monkeypatch, size):
    monkeypatch.setattr(noise, "discrete_gaussian", lambda shape, scale: np.zeros(shape, np.int64))
    grid, clip = grid_of(2.0), 1.0
    raw = np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32)
    raw *= size / np.linalg.norm(raw, axis=1, keepdims=True)
    for row in raw:
        made = noise.release({"a": row[None, :100], "b": row[None, 100:]}, clip, 2.0, grid)
        whole = [round(float(number) / grid) for leaf in made.values() for number in leaf]
        assert sum(number**2 for number in whole) <= (clip / grid) ** 2
        bound = row * min(1.0, clip / float(np.linalg.norm(row.astype(np.float64))))
        np.testing.assert_allclose(np.concatenate([made["a"], made["b"]]), bound, atol=2 * grid + 2e-9)


def test_a_sum_is_that_of_clipped_parts(monkeypatch):
    monkeypatch.setattr(noise, "discrete_gaussian", lambda shape, scale: np.zeros(shape, np.int64))
    stack = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(noise.release(stack, 1.0, 1.0, grid_of(1.0)), [0.9, 1.2], atol=1e-6)


APART = Parts(("a", "b"), (0.3, 50.0))


@pytest.mark.parametrize("size", [0.1, 1.0, 7.0])
def test_every_part_of_what_is_summed_has_at_most_its_own_norm_to_the_last_bit(monkeypatch, size):
    monkeypatch.setattr(noise, "discrete_gaussian", lambda shape, scale: np.zeros(shape, np.int64))
    grid, draw = grid_of(2.0), np.random.default_rng(0)
    for _ in range(20):
        raw = {name: draw.normal(size=(1, 100)).astype(np.float32) for name in APART.names}
        raw = {name: size * leaf / np.linalg.norm(leaf) for name, leaf in raw.items()}
        made = noise.release(raw, 1.0, 2.0, grid, APART)
        for name, unit in zip(APART.names, APART.units, strict=True):
            whole = [round(float(number) / unit / grid) for number in made[name]]
            assert sum(number**2 for number in whole) <= (1 / grid) ** 2
            norm = float(np.linalg.norm(raw[name].astype(np.float64)))
            bound = raw[name][0] * min(1.0, unit / norm)
            np.testing.assert_allclose(made[name], bound, atol=unit * (2 * grid + 2e-9))


def test_every_part_gets_noise_of_its_unit():
    num, sd = 4000, 3.0
    zero = {name: np.zeros((1, num), np.float32) for name in APART.names}
    made = noise.release(zero, 1.0, sd, grid_of(sd), APART)
    for name, unit in zip(APART.names, APART.units, strict=True):
        drawn = made[name] / (unit * sd)
        assert abs(drawn.mean()) < 4.5 / num**0.5
        assert abs((drawn**2).mean() - 1) < 4.5 * (2 / num) ** 0.5


def test_a_message_that_is_not_finite_adds_nothing(monkeypatch):
    monkeypatch.setattr(noise, "discrete_gaussian", lambda shape, scale: np.zeros(shape, np.int64))
    stack = np.array([[np.nan, 0.5], [np.inf, 0.5], [0.25, 0.5]], np.float32)
    for clip in (1.0, np.inf):
        assert noise.release(stack, clip, 1.0, grid_of(1.0)).tolist() == [0.25, 0.5]


def test_a_number_beyond_the_grid_is_held_at_its_end(monkeypatch):
    monkeypatch.setattr(noise, "discrete_gaussian", lambda shape, scale: np.zeros(shape, np.int64))
    grid = grid_of(1.0)
    made = noise.release(np.array([[1e30, -1e30, 1.0]], np.float32), np.inf, 1.0, grid)
    assert made.tolist() == [noise.LARGEST * grid, -noise.LARGEST * grid, 1.0]


def test_opendp_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opendp.prelude", None)
    with pytest.raises(UsageError, match=r"install priory\[privacy\]"):
        noise.sampler()


# The adversary knows that a client sends one of two updates, and which numbers a float32 generator can add to each.

CLIP, SD, TRIES = 1.0, 8.0, 60  # a noise multiplier of 4


def candidates() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1).normal(size=(2, 200)).astype(np.float32)
    first, second = draw / np.linalg.norm(draw, axis=1, keepdims=True) * np.float32(0.9)
    return first, second


def reachable(reply: np.ndarray, update: np.ndarray) -> int:
    """Count the numbers of a reply that the update and a number of a float32 normal generator add up to.

    `jax.random.normal` maps 2²³ uniform numbers to normal ones. Its inverse, rounded, and forward again gives back what
    it can make; neighbours are tried for rounding.
    """
    wanted = (reply - update) / np.float32(SD)
    uniform = jax.lax.erf(jnp.asarray(wanted) / np.float32(np.sqrt(2)))
    low = np.nextafter(np.float32(-1), np.float32(0))
    step = np.round((np.asarray(uniform, np.float64) - low) / 2 * 2**23)
    found = np.zeros(len(wanted), bool)
    for shift in range(-6, 7):
        mantissa = jnp.asarray(np.clip(step + shift, 0, 2**23 - 1) / 2**23, jnp.float32)
        uniform = jnp.maximum(low, mantissa * (1 - low) + low)
        normal = np.float32(np.sqrt(2)) * np.asarray(jax.lax.erf_inv(uniform))
        found |= np.float32(SD) * normal + update == reply
    return int(found.sum())


def guessed(send) -> int:
    """Count the tries in which the adversary tells which of two updates was sent."""
    updates, coins = candidates(), np.random.default_rng(2).integers(0, 2, TRIES)
    right = 0
    for number, coin in enumerate(coins):
        reply = send(updates[coin], number)
        counts = [reachable(reply, update) for update in updates]
        right += int(np.argmax(counts)) == coin
    return right


def test_noise_in_floating_point_gives_every_update_away():
    channel, root = Noised(CLIP, SD), rng.root(5)
    send = jax.jit(lambda update, number: channel.send(update, (), jax.random.fold_in(root, number))[0])
    assert guessed(lambda update, number: np.asarray(send(update, number))) == TRIES


def test_noise_on_a_grid_does_not():
    grid = grid_of(SD)
    right = guessed(lambda update, _: np.float32(noise.release(update[None], CLIP, SD, grid)))
    # At this noise no adversary does much better than guessing; this one does not at all.
    assert right <= TRIES * 0.5 + 4 * (TRIES * 0.25) ** 0.5
