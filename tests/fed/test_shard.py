"""A client's view of the pool: its own rows and nobody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.fed.shard import Pool, Shard, Shards

COUNTS = np.array([5, 1, 8, 3])
STARTS = np.array([0, 5, 6, 14])
OWNER = np.repeat(np.arange(4), COUNTS)


def pool(**other):
    """A pool whose rows tell their number, and whose labels tell their owner."""
    x = jnp.arange(COUNTS.sum(), dtype=jnp.float32)[:, None]
    return Pool(
        **({"x": x, "y": jnp.array(OWNER), "scale": None, "shift": jnp.zeros(()), "factor": jnp.ones(())} | other)
    )


def shards(**other):
    return Shards(pool(**other), jnp.array(STARTS), jnp.array(COUNTS), int(COUNTS.max()))


def rows(batch, masked=True):
    taken = np.asarray(batch.x)[:, 0].astype(int)
    return taken[np.asarray(batch.mask) > 0] if masked else taken


@pytest.mark.parametrize("client", range(4))
def test_a_drawn_batch_holds_only_the_clients_own_rows(client):
    shard = shards().of(jnp.int32(client))
    seen = set()
    for seed in range(10):
        batch = shard.batch(jax.random.key(seed), 7)
        assert (np.asarray(batch.y) == client).all()
        assert (np.asarray(batch.mask) == 1).all()
        seen |= set(rows(batch).tolist())
    assert seen == set(range(STARTS[client], STARTS[client] + COUNTS[client]))


@pytest.mark.parametrize("client", range(4))
@pytest.mark.parametrize("size", [1, 3, 10])
def test_the_batches_of_an_order_hold_every_row_once_and_wrap_to_own_rows_with_mask_zero(client, size):
    shard = shards().of(jnp.int32(client))
    order = shard.order(jax.random.key(0))
    taken = []
    for step in range(-(-COUNTS[client] // size)):
        batch = shard.take(order, jnp.int32(step), size)
        assert (np.asarray(batch.y) == client).all()
        taken += rows(batch).tolist()
    assert sorted(taken) == list(range(STARTS[client], STARTS[client] + COUNTS[client]))


@pytest.mark.parametrize("client", range(4))
def test_a_batch_tells_the_places_of_its_rows_among_the_clients_own(client):
    shard = shards().of(jnp.int32(client))
    order = shard.order(jax.random.key(0))
    for batch in (shard.batch(jax.random.key(1), 7), shard.take(order, jnp.int32(1), 3), shard.padded()):
        np.testing.assert_array_equal(STARTS[client] + np.asarray(batch.position), rows(batch, masked=False))


def test_a_step_past_the_end_is_all_masked():
    shard = shards().of(jnp.int32(1))
    assert not shard.take(shard.order(jax.random.key(0)), jnp.int32(1), 4).mask.any()


def test_the_padded_batch_holds_everything_once_in_the_order_of_the_pool():
    for client in range(4):
        batch = shards().of(jnp.int32(client)).padded()
        assert batch.mask.shape == (8,)
        assert rows(batch).tolist() == list(range(STARTS[client], STARTS[client] + COUNTS[client]))


def test_the_order_of_a_client_does_not_depend_on_the_capacity():
    tight = Shard(pool(), jnp.array([0]), jnp.array([5]), 5).order(jax.random.key(4))
    roomy = Shard(pool(), jnp.array([0]), jnp.array([5]), 500).order(jax.random.key(4))
    np.testing.assert_array_equal(tight, roomy[:5])


@pytest.mark.parametrize(("capacity", "count"), [(1, 1), (7, 0), (300, 290), (512, 512), (512, 1), (513, 512)])
def test_an_order_is_that_of_the_draws_with_ties_by_place_and_missing_places_last(capacity, count, monkeypatch):
    shard = Shard(pool(), jnp.array([0]), jnp.array([count]), capacity)
    largest = 1 - 2.0**-23
    tied = np.random.default_rng(0).choice(np.float32([0, 2.0**-23, 0.5, largest]), capacity)
    for draw in (jax.random.uniform(jax.random.key(1), (capacity,)), jnp.asarray(tied)):
        monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype, draw=draw: draw)
        expected = np.lexsort((np.arange(capacity), np.where(np.arange(capacity) < count, draw, np.inf)))
        np.testing.assert_array_equal(shard.order(jax.random.key(0)), expected)


def test_orders_of_different_keys_differ_and_each_is_a_permutation():
    shard = shards().of(jnp.int32(2))
    orders = {tuple(shard.order(jax.random.key(seed)).tolist()) for seed in range(5)}
    assert len(orders) == 5
    assert all(sorted(order) == list(range(8)) for order in orders)


def test_a_union_maps_positions_to_the_rows_of_its_members():
    union = shards().union(jnp.array([2, 0, 3, 1]), jnp.array([True, False, True, True]))
    assert int(union.count) == 8 + 3 + 1
    assert union.capacity == 4 * 8
    expected = [*range(6, 14), *range(14, 17), 5]
    assert union.row(jnp.arange(12)).tolist() == expected
    assert rows(union.padded()).tolist() == expected


def test_an_epoch_over_a_union_sees_every_row_of_its_members_once():
    union = shards().union(jnp.array([1, 3, 2]), jnp.array([True, True, False]))
    order = union.order(jax.random.key(0))
    taken = np.concatenate([rows(union.take(order, jnp.int32(step), 3)) for step in range(2)])
    assert sorted(taken.tolist()) == [5, 14, 15, 16]


def test_an_empty_shard_gives_a_masked_batch():
    empty = Shard(pool(), jnp.array([3]), jnp.array([0]), 8)
    assert int(empty.count) == 0
    assert not empty.padded().mask.any()


@pytest.mark.parametrize("start", [3, 17], ids=["in-the-middle", "past-the-last-row"])
def test_no_row_counts_of_a_batch_drawn_where_there_is_nothing_to_draw(start):
    batch = Shard(pool(), jnp.array([start]), jnp.array([0]), 8).batch(jax.random.key(0), 4)
    assert batch.mask.tolist() == [0, 0, 0, 0]
    assert np.isfinite(batch.x).all()


def test_pixels_are_scaled_when_a_batch_is_drawn_and_stay_bytes_in_the_pool():
    pixels = jnp.array([[0, 51], [102, 255]], jnp.uint8)
    batch = pool(x=pixels, shift=jnp.float32(51), factor=jnp.float32(0.5)).rows(jnp.arange(2), jnp.ones(2))
    assert batch.x.dtype == jnp.float32
    np.testing.assert_array_equal(batch.x, [[-25.5, 0], [25.5, 102]])


def test_a_scaling_by_channel_meets_the_last_axis():
    pixels = jnp.full((3, 2, 2, 3), 100, jnp.uint8)
    scaled = pool(x=pixels, shift=jnp.array([100.0, 90.0, 0.0]), factor=jnp.array([1.0, 2.0, 0.1]))
    x = scaled.rows(jnp.arange(3), jnp.ones(3)).x
    assert x.shape == (3, 2, 2, 3)
    np.testing.assert_allclose(x[1, 0, 1], [0.0, 20.0, 10.0], rtol=1e-6)


def test_data_without_labels_give_batches_without_labels():
    batch = shards(y=None).of(jnp.int32(0)).padded()
    assert batch.y is None
    assert batch.scale is None


def test_known_errors_travel_with_their_rows():
    batch = shards(scale=jnp.arange(17.0) / 2).of(jnp.int32(3)).padded()
    np.testing.assert_array_equal(batch.scale[:3], [7.0, 7.5, 8.0])
