"""Keys that follow from (root, stream, round, id) alone, and the property of JAX's draws that the rest relies on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import rng
from priory.core.rng import Stream


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_every_stream_round_and_client_has_a_key_of_its_own():
    root = rng.root(0)
    keys = {bits(rng.key(root, stream, t, k)) for stream, t, k in itertools.product(Stream, range(4), range(4))}
    assert len(keys) == len(Stream) * 16


def test_the_order_of_the_numbers_matters():
    assert bits(rng.key(rng.root(0), Stream.CLIENT, 1, 2)) != bits(rng.key(rng.root(0), Stream.CLIENT, 2, 1))


def test_a_key_is_rebuilt_from_its_numbers_in_compiled_code_as_outside():
    root = rng.root(3)
    inside = jax.jit(jax.vmap(lambda k: rng.key(root, Stream.CLIENT, 5, k)))(jnp.arange(4))
    for k in range(4):
        assert bits(inside[k]) == bits(rng.key(rng.root(3), Stream.CLIENT, 5, k))


def test_other_seeds_give_other_keys():
    assert len({bits(rng.key(rng.root(seed), Stream.INIT)) for seed in range(20)}) == 20


def test_the_numbers_of_the_streams_are_part_of_every_saved_run():
    numbers = {"INIT": 0, "COHORT": 1, "CLIENT": 2, "ENROL": 3, "SERVER": 4, "CHANNEL": 5, "EVALUATION": 6}
    assert {stream.name: int(stream) for stream in Stream if stream.name in numbers} == numbers


def test_draws_of_different_streams_are_uncorrelated():
    root, num = rng.root(0), 4000
    first = jax.random.normal(rng.key(root, Stream.CLIENT, 0, 0), (num,))
    second = jax.random.normal(rng.key(root, Stream.ENROL, 0, 0), (num,))
    assert abs(float(jnp.mean(first * second))) < 4 / np.sqrt(num)  # four standard errors


@pytest.mark.parametrize("sizes", [(3, 8), (5, 1000), (8, 9)])
@pytest.mark.parametrize(
    "draw",
    [
        jax.random.uniform,
        jax.random.normal,
        lambda key, shape: jax.random.randint(key, shape, 0, 17),
        lambda key, shape: jax.random.key_data(jax.random.split(key, shape)),
    ],
    ids=["uniform", "normal", "randint", "split"],
)
def test_the_first_draws_do_not_depend_on_how_many_are_drawn(draw, sizes):
    few, many = (np.asarray(draw(jax.random.key(0), (size,))) for size in sizes)
    np.testing.assert_array_equal(few, many[: sizes[0]])
