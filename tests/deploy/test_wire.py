"""The wire format: what fits comes back as it was, what does not is refused by name."""

import io
import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.codec import DecodeError
from priory.core.errors import UsageError
from priory.deploy.wire import decode, encode, most_bytes, pack, unpack
from priory.fed import thin
from priory.fed.method import Message
from priory.fed.thin import Thin
from priory.models.model import Params

TREE = {"params": Params({"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}), "round": jnp.int32(4)}


def test_a_tree_comes_back_with_its_structure_and_bits():
    again = unpack(pack(TREE), jax.eval_shape(lambda: TREE))
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    jax.tree.map(np.testing.assert_array_equal, again, TREE)


def test_leaves_travel_by_their_paths_as_plain_arrays():
    packed = pack(TREE)
    assert sorted(packed) == ["params/weights/Dense_0/bias", "params/weights/Dense_0/kernel", "round"]
    assert all(type(array) is np.ndarray for array in packed.values())


def test_nothing_at_all_can_travel():
    assert unpack(pack(()), ()) == ()


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(UsageError, match="Two parts of the message are named a/b; rename one"):
        pack({"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda packed: packed.pop("round"), r"lacks \['round'\] and has \[\] besides"),
        (lambda packed: packed.update(extra=np.ones(1)), r"lacks \[\] and has \['extra'\] besides"),
        (lambda packed: packed.update(round=np.ones(2, np.int32)), r"round arrived as int32\[2\] where int32\[\]"),
        (lambda packed: packed.update(round=np.float32(1)), r"round arrived as float32\[\] where int32\[\]"),
    ],
    ids=["missing", "extra", "shape", "type"],
)
def test_what_does_not_fit_is_refused_by_name(change, sentence):
    packed = pack(TREE)
    change(packed)
    with pytest.raises(UsageError, match=sentence):
        unpack(packed, jax.eval_shape(lambda: TREE))


def thin_message(kept) -> Message:
    """Two numbers for each place that is kept, of eleven places in a matrix and a scalar, and three numbers besides."""
    kept = {"a": jnp.asarray(kept[:10]).reshape(5, 2), "b": jnp.asarray(kept[10])}
    number = {"a": jnp.arange(1.0, 11).reshape(5, 2), "b": jnp.float32(11)}
    values = tuple(jax.tree.map(lambda k, v, f=f: jnp.where(k, f * v, 0), kept, number) for f in (1, -2))
    return Message(Thin(kept, values, {"stats": jnp.arange(3.0)}), jnp.float32(1))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_thin_payload_comes_back_and_costs_the_bits_that_are_counted(share):
    message = thin_message(np.random.default_rng(0).random(11) < share)
    packed = pack(message)
    again = unpack(packed, jax.eval_shape(lambda: message))
    assert jax.tree.structure(again) == jax.tree.structure(message)
    jax.tree.map(np.testing.assert_array_equal, again, message)
    assert sum(array.nbytes for array in packed.values()) - 4 == thin.bits(message.payload) / 8  # 4: the weight


def test_a_thin_payload_at_the_root_has_plain_names():
    packed = pack(thin_message(np.arange(11) < 3).payload)
    assert sorted(packed) == ["kept/a", "kept/b", "rest/stats", "values/0/a", "values/0/b", "values/1/a", "values/1/b"]
    assert packed["kept/a"].dtype == np.uint8
    np.testing.assert_array_equal(packed["values/1/a"], [-2, -4, -6])


def test_a_payload_thinned_to_nothing_but_its_rest_travels_whole():
    whole = Thin(None, (), {"a": jnp.ones(3)})
    again = unpack(pack(whole), jax.eval_shape(lambda: whole))
    np.testing.assert_array_equal(again.rest["a"], np.ones(3))


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("values/0/a", np.ones(4, np.float32), r"values/0/a arrived as float32\[4\] where float32\[3\]"),
        ("kept/a", np.ones(3, np.uint8), r"kept/a arrived as uint8\[3\] where uint8\[2\]"),
        ("rest/stats", np.ones(3), r"rest/stats arrived as float64\[3\] where float32\[3\]"),
    ],
)
def test_a_thin_payload_that_does_not_fit_is_refused_by_name(name, array, sentence):
    payload = thin_message(np.arange(11) < 3).payload
    with pytest.raises(UsageError, match=sentence):
        unpack(pack(payload) | {name: array}, jax.eval_shape(lambda: payload))


def npy(array, **how) -> bytes:
    written = io.BytesIO()
    np.lib.format.write_array(written, np.asarray(array), **how)
    return written.getvalue()


def header(text: str, body: bytes = b"") -> bytes:
    """An `.npy` file with a header of somebody's own making."""
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + body


ODD = {
    "scalar": jnp.float32(2.5),
    "truths": jnp.array([[True, False]]),
    "truth": jnp.bool_(True),
    "empty": jnp.zeros((0, 3)),
    "words": jnp.arange(4, dtype=jnp.uint32),
    "small": jnp.int8(-3),
}


@pytest.mark.parametrize(
    "tree",
    [TREE, ODD, (), jnp.arange(3.0), thin_message(np.arange(11) < 3), thin_message(np.arange(11) < 0)],
    ids=["plain", "odd", "nothing", "a bare array", "thin", "thin and empty"],
)
def test_bytes_give_the_tree_back_with_its_bits(tree):
    again = decode(encode(tree), jax.eval_shape(lambda: tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("tree", [TREE, ODD, thin_message(np.arange(11) < 11)], ids=["plain", "odd", "thin"])
def test_no_message_has_more_bytes_than_the_most(tree):
    assert sum(map(len, encode(tree).values())) <= most_bytes(jax.eval_shape(lambda: tree))


def test_an_array_that_is_not_contiguous_travels():
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(decode(encode({"a": turned}), {"a": turned})["a"], turned)


LIKE = jax.eval_shape(lambda: {"a": jnp.zeros((2, 3)), "b": jnp.int32(0)})
GOOD = {"a": npy(np.ones((2, 3), np.float32)), "b": npy(np.int32(4))}
FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}"


@pytest.mark.parametrize(
    ("changed", "reason", "sentence"),
    [
        ({"c": b""}, "keys", r"lacks \[\] and has \['c'\] besides; sender and receiver run different methods"),
        ({"a": npy(np.ones((3, 2), np.float32))}, "shape", r"a arrived as float32\[3, 2\] where float32\[2, 3\] was"),
        ({"a": npy(np.ones((2, 3), np.int32))}, "dtype", r"a arrived as int32\[2, 3\] where float32\[2, 3\] was exp"),
        ({"a": npy(np.ones((2, 3), ">f4"))}, "dtype", r"a arrived as >f4\[2, 3\] where"),
        ({"b": npy(np.int64(4))}, "dtype", r"b arrived as int64\[\] where int32\[\]"),
        ({"a": npy(np.array("text"))}, "dtype", r"a arrived as <U4\[\] where"),
        ({"a": b"x" * 3000}, "oversized", "The message has 3132 bytes where 2076 are the most; send what was asked"),
        ({"a": b""}, "garbage", "a arrived as 0 bytes that hold no array"),
        ({"a": b"no array"}, "garbage", "a arrived as 8 bytes that hold no array"),
        ({"a": GOOD["a"][:-1]}, "garbage", "other bytes than the header says"),
        ({"a": GOOD["a"] + b"!"}, "garbage", "other bytes than the header says"),
        ({"a": npy(np.ones((2, 3), np.float32, order="F"))}, "garbage", "other bytes than the header says"),
        ({"a": npy(np.ones((2, 3), np.float32), version=(2, 0))}, "garbage", "another version"),
        ({"a": npy(np.array([[1, None]], object), allow_pickle=True)}, "garbage", "that hold no array"),
        ({"a": pickle.dumps(np.ones((2, 3), np.float32))}, "garbage", "that hold no array"),
        ({"a": header(FLOATS.replace("(2, 3)", "(-2, -3)"), bytes(24))}, "garbage", "that hold no array"),
        ({"a": header(FLOATS.replace("<f4", "|V0"))}, "garbage", "that hold no array"),
        ({"a": header("__import__('os').getcwd()")}, "garbage", "that hold no array"),
        ({"a": header("(" * 100)}, "garbage", "that hold no array"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_what_was_not_asked_for_is_refused_with_a_reason(changed, reason, sentence):
    with pytest.raises(DecodeError, match=sentence) as caught:
        decode(GOOD | changed, LIKE)
    assert caught.value.reason == reason


def test_a_missing_part_is_refused_by_name():
    with pytest.raises(DecodeError, match=r"lacks \['b'\] and has \[\] besides"):
        decode({"a": GOOD["a"]}, LIKE)


def test_a_pickle_among_the_arrays_is_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    for raw in (pickle.dumps(Trap()), npy(np.array([Trap()], object), allow_pickle=True)):
        with pytest.raises(DecodeError, match="that hold no array"):
            decode(GOOD | {"a": raw}, LIKE)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(1000000, 1000000)", f"({'9' * 30},)"])
def test_a_header_that_claims_many_numbers_reserves_no_memory(shape):
    raw = header(FLOATS.replace("(2, 3)", shape), bytes(24))
    tracemalloc.start()
    with pytest.raises(DecodeError) as caught:
        decode(GOOD | {"a": raw}, LIKE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason == "garbage"
    assert peak < 1 << 20


def test_a_bitmap_with_more_bits_than_numbers_is_refused():
    message = thin_message(np.arange(11) < 3)
    parts = encode(message) | {"payload/kept/a": npy(np.full(2, 255, np.uint8))}
    with pytest.raises(DecodeError, match=r"payload/values/0/a arrived as float32\[3\] where float32\[10\]"):
        decode(parts, jax.eval_shape(lambda: message))


def test_the_padding_of_a_bitmap_means_nothing():
    message = thin_message(np.arange(11) < 3)
    bits = np.packbits(np.arange(10) < 3) | np.array([0, 0b111111], np.uint8)
    again = decode(encode(message) | {"payload/kept/a": npy(bits)}, jax.eval_shape(lambda: message))
    jax.tree.map(np.testing.assert_array_equal, again, message)


@pytest.mark.parametrize(
    "changed",
    [{"x" * 10_000: b""}, {f"{i}" + "y" * 1000: b"" for i in range(500)}, {"\n\x1b[31m" * 100: b""}],
    ids=["one long", "many", "with control characters"],
)
def test_what_a_stranger_calls_things_is_told_in_a_short_line(changed):
    with pytest.raises(DecodeError) as caught:
        decode(GOOD | changed, LIKE)
    assert len(str(caught.value)) < 3000
    assert str(caught.value).isprintable()


def test_a_truth_is_0_or_1_whatever_its_byte_was():
    raw = header("{'descr': '|b1', 'fortran_order': False, 'shape': (3,)}", bytes([0, 7, 255]))
    found = decode({"a": raw}, {"a": jax.ShapeDtypeStruct((3,), np.bool_)})["a"]
    assert found.view(np.uint8).tolist() == [0, 1, 1]
