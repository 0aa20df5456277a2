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
    x, y = np.arange(COUNTS.sum(), dtype=np.float32)[:, None], np.int32(OWNER)
    return Pool(**({"x": x, "y": y, "scale": None, "shift": np.float32(0), "factor": np.float32(1)} | other))


def shards(**other):
    return Shards(pool(**other), np.int32(STARTS), np.int32(COUNTS), int(COUNTS.max()))


# One program each, where an eager call is one for each operation.
of_client = jax.jit(Shards.of)
union_of = jax.jit(Shards.union)
order_of = jax.jit(Shard.order)
batch_of = jax.jit(Shard.batch, static_argnums=2)
take = jax.jit(Shard.take, static_argnums=3)
padded = jax.jit(Shard.padded)
rows_of_pool = jax.jit(Pool.rows)


def shard_of(client, **other):
    return of_client(shards(**other), np.int32(client))


def one(start, count, capacity):
    """The shard of so many rows."""
    return Shard(pool(), np.int32([start]), np.int32([count]), capacity)


def rows(batch, masked=True):
    taken = np.asarray(batch.x)[:, 0].astype(int)
    return taken[np.asarray(batch.mask) > 0] if masked else taken


@pytest.mark.parametrize("client", range(4))
def test_a_drawn_batch_holds_only_the_clients_own_rows(client):
    shard = shard_of(client)
    seen = set()
    for seed in range(10):
        batch = batch_of(shard, jax.random.key(seed), 7)
        assert (np.asarray(batch.y) == client).all()
        assert (np.asarray(batch.mask) == 1).all()
        seen |= set(rows(batch).tolist())
    assert seen == set(range(STARTS[client], STARTS[client] + COUNTS[client]))


@pytest.mark.parametrize("client", range(4))
@pytest.mark.parametrize("size", [1, 3, 10])
def test_the_batches_of_an_order_hold_every_row_once_and_wrap_to_own_rows_with_mask_zero(client, size):
    shard = shard_of(client)
    order = order_of(shard, jax.random.key(0))
    taken = []
    for step in range(-(-COUNTS[client] // size)):
        batch = take(shard, order, np.int32(step), size)
        assert (np.asarray(batch.y) == client).all()
        taken += rows(batch).tolist()
    assert sorted(taken) == list(range(STARTS[client], STARTS[client] + COUNTS[client]))


@pytest.mark.parametrize("client", range(4))
def test_a_batch_tells_the_places_of_its_rows_among_the_clients_own(client):
    shard = shard_of(client)
    order = order_of(shard, jax.random.key(0))
    drawn, taken = batch_of(shard, jax.random.key(1), 7), take(shard, order, np.int32(1), 3)
    for batch in (drawn, taken, padded(shard)):
        np.testing.assert_array_equal(STARTS[client] + np.asarray(batch.position), rows(batch, masked=False))


def test_a_step_past_the_end_is_all_masked():
    shard = shard_of(1)
    assert not np.any(take(shard, order_of(shard, jax.random.key(0)), np.int32(1), 3).mask)


def test_the_padded_batch_holds_everything_once_in_the_order_of_the_pool():
    for client in range(4):
        batch = padded(shard_of(client))
        assert batch.mask.shape == (8,)
        assert rows(batch).tolist() == list(range(STARTS[client], STARTS[client] + COUNTS[client]))


def test_the_order_of_a_client_does_not_depend_on_the_capacity():
    tight, roomy = (order_of(one(0, 5, capacity), jax.random.key(4)) for capacity in (5, 500))
    np.testing.assert_array_equal(tight, np.asarray(roomy)[:5])


@pytest.mark.parametrize(("capacity", "count"), [(1, 1), (7, 0), (300, 290), (512, 512), (512, 1), (513, 512)])
def test_an_order_is_that_of_the_draws_with_ties_by_place_and_missing_places_last(capacity, count, monkeypatch):
    shard, random = one(0, count, capacity), np.random.default_rng(0)
    largest = 1 - 2.0**-23
    tied = random.choice(np.float32([0, 2.0**-23, 0.5, largest]), capacity)

    @jax.jit
    def order_by(draw, key):
        with monkeypatch.context() as patched:
            patched.setattr(jax.random, "uniform", lambda key, shape, dtype: draw)
            return shard.order(key)

    # Random numbers have 23 bits, as in JAX.
    for draw in (np.float32(random.integers(0, 2**23, capacity) / 2**23), tied):
        expected = np.lexsort((np.arange(capacity), np.where(np.arange(capacity) < count, draw, np.inf)))
        np.testing.assert_array_equal(order_by(draw, jax.random.key(0)), expected)


def test_orders_of_different_keys_differ_and_each_is_a_permutation():
    shard = shard_of(2)
    orders = {tuple(order_of(shard, jax.random.key(seed)).tolist()) for seed in range(5)}
    assert len(orders) == 5
    assert all(sorted(order) == list(range(8)) for order in orders)


def test_a_union_maps_positions_to_the_rows_of_its_members():
    union = union_of(shards(), np.int32([2, 0, 3, 1]), np.array([True, False, True, True]))
    assert int(union.count) == 8 + 3 + 1
    assert union.capacity == 4 * 8
    expected = [*range(6, 14), *range(14, 17), 5]
    assert jax.jit(Shard.row)(union, np.arange(12, dtype=np.int32)).tolist() == expected
    assert rows(padded(union)).tolist() == expected


def test_an_epoch_over_a_union_sees_every_row_of_its_members_once():
    union = union_of(shards(), np.int32([1, 3, 2]), np.array([True, True, False]))
    order = order_of(union, jax.random.key(0))
    taken = np.concatenate([rows(take(union, order, np.int32(step), 3)) for step in range(2)])
    assert sorted(taken.tolist()) == [5, 14, 15, 16]


def test_an_empty_shard_gives_a_masked_batch():
    empty = one(3, 0, 8)
    assert int(empty.count) == 0
    assert not np.any(padded(empty).mask)


@pytest.mark.parametrize("start", [3, 17], ids=["in-the-middle", "past-the-last-row"])
def test_no_row_counts_of_a_batch_drawn_where_there_is_nothing_to_draw(start):
    batch = batch_of(one(start, 0, 8), jax.random.key(0), 4)
    assert batch.mask.tolist() == [0, 0, 0, 0]
    assert np.isfinite(batch.x).all()


def test_pixels_are_scaled_when_a_batch_is_drawn_and_stay_bytes_in_the_pool():
    pixels = np.uint8([[0, 51], [102, 255]])
    scaled = pool(x=pixels, shift=np.float32(51), factor=np.float32(0.5))
    batch = rows_of_pool(scaled, np.arange(2, dtype=np.int32), np.ones(2, np.float32))
    assert batch.x.dtype == jnp.float32
    np.testing.assert_array_equal(batch.x, [[-25.5, 0], [25.5, 102]])


def test_a_scaling_by_channel_meets_the_last_axis():
    pixels = np.full((3, 2, 2, 3), 100, np.uint8)
    scaled = pool(x=pixels, shift=np.float32([100.0, 90.0, 0.0]), factor=np.float32([1.0, 2.0, 0.1]))
    x = np.asarray(rows_of_pool(scaled, np.arange(3, dtype=np.int32), np.ones(3, np.float32)).x)
    assert x.shape == (3, 2, 2, 3)
    np.testing.assert_allclose(x[1, 0, 1], [0.0, 20.0, 10.0], rtol=1e-6)


def test_data_without_labels_give_batches_without_labels():
    batch = padded(shard_of(0, y=None))
    assert batch.y is None
    assert batch.scale is None


def test_known_errors_travel_with_their_rows():
    batch = padded(shard_of(3, scale=np.arange(17, dtype=np.float32) / 2))
    np.testing.assert_array_equal(np.asarray(batch.scale)[:3], [7.0, 7.5, 8.0])
