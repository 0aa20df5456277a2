"""Trees as arrays, files and rows of bytes, and checksums that know whose they are."""

import zlib

import jax
import numpy as np
import pytest

from priory.core.codec import Codec, DecodeError, checksum, digest, from_arrays, from_file, to_arrays, to_file

LIKE = {"n": np.int32(0), "none": np.zeros((0, 2), np.float32), "w": (np.zeros((2, 3), np.float32), np.bool_(False))}


def stacked(num: int) -> dict:
    draw = np.random.default_rng(0)
    pair = draw.normal(size=(num, 2, 3)).astype(np.float32), draw.integers(0, 2, num).astype(bool)
    return {"n": np.arange(num, dtype=np.int32), "none": np.zeros((num, 0, 2), np.float32), "w": pair}


@pytest.mark.parametrize("num", [0, 1, 4])
def test_trees_come_back_with_their_bits(num):
    codec, trees = Codec(LIKE), stacked(num)
    rows = codec.pack(trees, num)
    assert rows.shape == (num, codec.size)
    back = codec.unpack(rows)
    for one, other in ((back["n"], trees["n"]), *zip(back["w"], trees["w"], strict=True)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_a_tree_without_leaves_has_no_bytes():
    assert Codec(()).pack((), 3).shape == (3, 0)


def test_two_structures_of_one_size_are_told_apart():
    turned = {**LIKE, "w": (np.zeros((3, 2), np.float32), np.bool_(False))}
    assert Codec(turned).size == Codec(LIKE).size
    assert Codec(turned).structure != Codec(LIKE).structure


def test_a_checksum_tells_clients_and_rounds_apart_and_is_the_plain_one_without_them():
    assert len({checksum(b"body", client, t) for client in range(20) for t in range(20)}) == 400
    assert checksum(b"body") == zlib.crc32(b"body")


@pytest.mark.parametrize("tree", [LIKE, np.arange(3), ()], ids=["a tree", "one array", "nothing"])
def test_arrays_and_texts_come_back_from_a_file(tree):
    arrays, about = from_file(to_file(to_arrays(tree), {"round": "3"}))
    assert about == {"round": "3"}
    assert jax.tree.structure(from_arrays(arrays, tree)) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, from_arrays(arrays, tree), tree)


def test_a_digest_covers_names_types_numbers_and_texts():
    arrays = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    others = [
        {"a": arrays["a"], "c": arrays["b"]},
        {**arrays, "a": np.zeros(2, np.int32)},
        {**arrays, "a": np.zeros((1, 2), np.float32)},
        {**arrays, "a": np.ones(2, np.float32)},
    ]
    digests = [digest(arrays, {}), digest(arrays, {"round": "3"}), *(digest(one, {}) for one in others)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 20, to_file({"a": np.ones(2)})[:-1]], ids=["empty", "other", "cut"])
def test_bytes_of_another_kind_are_refused(raw):
    with pytest.raises(DecodeError) as caught:
        from_file(raw)
    assert caught.value.reason == "garbage"
