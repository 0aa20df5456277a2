"""The pool: sorted, summed, and the same bytes for the same arguments."""

import jax
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.data import from_arrays, from_spec, load

OPTIONS = {"clients": 20, "seed": 3, "validation": 0.1, "newcomers": 0.2, "transform": "rotate-by-client"}


def test_the_readme_line_works():
    federation = load("digits").partition("dirichlet:0.3", clients=20, seed=0)
    assert (federation.num_clients, federation.input_shape, federation.num_classes) == (20, (8, 8, 1), 10)
    assert federation.x.dtype == np.uint8


def test_the_runs_of_the_splits_tile_the_pool():
    federation = load("digits").partition("dirichlet:0.3", **OPTIONS)
    start = np.stack([federation.train.start, federation.validation.start, federation.test.start], axis=1).ravel()
    count = np.stack([federation.train.count, federation.validation.count, federation.test.count], axis=1).ravel()
    assert start.tolist() == (np.cumsum(count) - count).tolist()
    assert count.sum() == len(federation.x) == len(federation.y) == 1797


def test_the_same_arguments_give_the_same_bytes():
    first, second = (load("digits").partition("dirichlet:0.3", **OPTIONS) for _ in range(2))
    assert first.checksum == second.checksum
    assert (first.x == second.x).all()


def test_another_seed_gives_another_checksum():
    data = load("digits")
    assert data.partition("iid", clients=5, seed=0).checksum != data.partition("iid", clients=5, seed=1).checksum


@pytest.mark.parametrize("change", ["x", "y", "scale", "client"])
def test_the_checksum_sees_every_array(change):
    arrays = {"x": [[1.0], [2.0]], "y": [0.5, 1.5], "scale": [1.0, 1.0], "client": [0, 1]}
    other = {**arrays, change: {"x": [[1.0], [3.0]], "y": [0.5, 1.0], "scale": [1.0, 2.0], "client": [0, 0]}[change]}
    sums = [
        from_arrays(a["x"], a["y"], a["client"], scale=a["scale"], task="regression", test=0.0).checksum
        for a in (arrays, other)
    ]
    assert sums[0] != sums[1]


@pytest.mark.parametrize("spec", ["dirichlet:0.123456789", "classes:5:paired"])
def test_the_spec_makes_the_federation_again(spec):
    federation = load("digits", scaling="symmetric").partition(
        spec, sizes="0.333333333=5,0.333333333=6,0.333333334=7", min_examples=8, **OPTIONS
    )
    again = from_spec(federation.spec)
    assert (again.checksum, again.spec) == (federation.checksum, federation.spec)
    assert again.factor == federation.factor


def test_the_spec_holds_only_what_toml_can_write():
    spec = load("digits").partition("classes:5", clients=2, per_class=(5, 5), transform=["invert-half"]).spec
    assert {type(value) for value in spec.values()} <= {str, int, float, bool, list}


def test_inputs_are_shifted_and_scaled():
    federation = load("digits", scaling="symmetric").partition("iid", clients=2)
    inputs = federation.inputs(federation.x)
    assert (inputs.dtype, inputs.min(), inputs.max()) == (np.float32, -1.0, 1.0)


def test_standard_scaling_of_arrays_uses_the_training_rows_of_participants():
    rng = np.random.default_rng(0)
    x = rng.normal(5.0, 2.0, size=(60, 3))
    federation = from_arrays(
        x, rng.normal(size=60), np.arange(60) % 6, scaling="standard", newcomers=0.3, validation=0.2
    )
    training = np.concatenate([federation.inputs(federation.x[federation.rows(k)]) for k in range(4)])
    assert np.allclose(training.mean(axis=0), 0.0, atol=1e-5)
    assert np.allclose(training.std(axis=0), 1.0, atol=1e-5)


def test_a_federation_describes_itself_in_one_line():
    federation = load("digits").partition("iid", clients=10, newcomers=0.2)
    assert repr(federation) == (  # 179 or 180 rows each, 36 of them to test
        "<Federation digits: 8 clients + 2 newcomers, 8x8x1 uint8, 10 classes, 1437 train, 360 test>"
    )


@pytest.mark.parametrize(("client", "words"), [("x", "client 'x'"), (9, "client=9"), (-1, "client=-1")])
def test_an_unknown_client_is_refused(client, words):
    federation = from_arrays([[0.0], [1.0]], [0, 1], ["a", "b"])
    with pytest.raises(UsageError, match=words):
        federation.rows(client)


def test_host_devices_read_the_pool_where_it_is():
    draw = np.random.default_rng(0)
    made = from_arrays(draw.normal(size=(4001, 7)), np.arange(4001) % 3, np.arange(4001) % 5, test=0.2)
    for array in (made.x, made.y):
        placed = jax.device_put(array, jax.devices("cpu")[0])
        assert placed.unsafe_buffer_pointer() == array.ctypes.data
