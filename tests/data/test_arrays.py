"""Own arrays and .npz files: labels renumbered, tasks inferred, bad values refused."""

import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.data import from_arrays, load

X, Y, CLIENT = np.arange(6.0).reshape(6, 1), [7, -1, 7, -1, 7, -1], list("aabbcc")


def test_labels_are_renumbered_and_keep_their_names():
    federation = from_arrays(X, Y, CLIENT, test=0.0)
    assert federation.classes == ("-1", "7")
    assert federation.y.tolist() == [1, 0, 1, 0, 1, 0]
    assert federation.y.dtype == np.int32


def test_named_classes_keep_room_for_the_absent_ones():
    federation = from_arrays(X, [0, 2, 0, 2, 0, 2], CLIENT, classes=["a", "b", "c"], test=0.0)
    assert federation.num_classes == 3
    assert federation.y.tolist() == [0, 2, 0, 2, 0, 2]


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        ([0, 1, 2, 0, 1, 2], 3),
        ([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], 2),
        (["x", "y", "x", "y", "x", "y"], 2),
        ([True, False, True, False, True, False], 2),
        ([5, 5, 5, 5, 5, 5], 1),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], None),
    ],
)
def test_the_task_is_inferred_from_the_target(y, classes):
    assert from_arrays(X, y, CLIENT).num_classes == classes


def test_many_whole_numbers_are_a_quantity():
    assert from_arrays(np.zeros((101, 1)), np.arange(101), np.zeros(101)).num_classes is None


def test_bytes_stay_bytes_and_are_scaled_in_the_batch():
    federation = from_arrays(np.full((6, 2, 2, 1), 255, np.uint8), Y, CLIENT)
    assert federation.x.dtype == np.uint8
    assert (federation.inputs(federation.x) == 1.0).all()


def test_options_of_partition_apply():
    federation = from_arrays(X, Y, CLIENT, newcomers=0.3, test=0.5)
    assert (federation.num_clients, federation.num_newcomers, federation.test.total) == (2, 1, 3)


def test_an_npz_file_is_read_like_the_arrays(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=X, y=Y, client=CLIENT)
    assert load(path).partition().checksum == from_arrays(X, Y, CLIENT).checksum


def test_an_npz_file_without_clients_can_be_dealt(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=X, y=Y)
    assert load(path).partition("iid", clients=3).num_clients == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.array([[np.nan]] + [[0.0]] * 5)}, "x is NaN or infinite in 1 of 6 rows, first in row 0"),
        ({"x": np.array([[0.0]] * 5 + [[np.inf]])}, "first in row 5"),
        ({"x": np.array([[1e300]] * 6)}, r"x is beyond single precision \(±3.4e\+38\) in 6 of 6 rows"),
        ({"x": np.array([["a"]] * 6)}, "not numeric"),
        ({"x": [[1.0], [1.0, 2.0]]}, "ragged"),
        ({"x": np.zeros((0, 1)), "y": [], "client": []}, "holds no numbers"),
        ({"x": X[:5]}, "y has 6 rows and x has 5"),
        ({"y": np.zeros((6, 2))}, r"y has shape \(6, 2\)"),
        ({"y": [np.nan] * 6, "task": "classification"}, "y is missing in 6 of 6"),
        ({"y": [0.5, np.inf] * 3}, "y is NaN or infinite in 3 of 6"),
        ({"y": [0, 3] * 3, "classes": ["a", "b"]}, "labels 0, 3, and 2 classes are named"),
        ({"y": [0, -1] * 3, "classes": ["a", "b"]}, "from 0 to 1"),
        ({"y": np.zeros(6, complex)}, "type complex128"),
        ({"client": ["a", None] * 3}, "client is missing in 3 of 6"),
        ({"client": ["a"]}, "client has 1 rows"),
        ({"scale": [1.0, -1.0] * 3, "y": np.linspace(0, 0.5, 6)}, "standard error is above 0"),
        ({"scaling": "unit"}, "for uint8"),
        ({"scaling": "units"}, "did you mean 'unit'"),
    ],
)
def test_bad_arrays_end_in_one_sentence(change, words):
    given = {"x": X, "y": Y, "client": CLIENT, **change}
    with pytest.raises(UsageError, match=words) as caught:
        from_arrays(given.pop("x"), given.pop("y"), given.pop("client"), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_an_unreadable_npz_file_ends_in_one_sentence(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.npz cannot be read"):
        load(path)


def test_an_npz_file_with_objects_is_not_unpickled(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, x=np.array([{}], object), y=[0])
    with pytest.raises(UsageError, match="cannot be read"):
        load(path)


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "keys.npz"
    np.savez(path, X=X, y=Y)
    with pytest.raises(UsageError, match="has no array 'x', only X, y"):
        load(path)
