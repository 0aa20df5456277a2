"""What travels as a flat dictionary of named arrays; no pickle, no structure on the wire.

The receiver knows the structure (`jax.eval_shape` of the verb itself), so only names, shapes and numbers travel, and
whatever does not fit is refused. Of a `Thin` there travel the bits of its bitmap and, in order, the numbers under it.

    pack    a tree → arrays by name          unpack    the arrays → the tree, checked
    encode  a tree → bytes by name           decode    whatever bytes arrived → the tree, or a `DecodeError`

The bytes of an array are those of NumPy's `.npy` format, which Flower's records hold too. `decode` believes nothing: it
compares a header with what is expected before it looks at the numbers, and reserves no memory that a header asks for.
"""

import io
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey
from numpy.lib import format as npy

from priory.core import trees
from priory.core.codec import Arrays, DecodeError, PyTree, array_at, check_names, from_arrays, to_arrays
from priory.fed.thin import Thin, bitmap_bytes

Tree = TypeVar("Tree")
HEADER_BYTES = 1024  # more than any array of ours needs, and little for a parser


def encode(tree: PyTree) -> dict[str, bytes]:
    """Return the leaves of a tree by their paths, each as the bytes of an `.npy` file."""
    return {name: _to_bytes(array) for name, array in pack(tree).items()}


def decode(parts: Mapping[str, bytes], like: Tree) -> Tree:
    """Return the tree of the shape of `like` that was encoded; raise `DecodeError` on anything else, whatever it is."""
    arrived, most = sum(map(len, parts.values())), most_bytes(like)
    if arrived > most:
        raise DecodeError(
            "oversized", f"The message has {arrived} bytes where {most} are the most; send what was asked."
        )
    check_names(parts, like)
    return unpack({name: from_bytes(name, raw) for name, raw in parts.items()}, like)


def most_bytes(like: PyTree) -> int:
    """Return the most bytes that `encode` makes of a tree of the shape of `like`."""
    return trees.num_bytes(like) + HEADER_BYTES * len(jax.tree.leaves(like))


def pack(tree: PyTree) -> Arrays:
    """Return the leaves of a tree by their paths; raise when two of them would share a name."""
    return to_arrays(jax.tree.map(lambda node: _squeeze(node) if _is_thin(node) else node, tree, is_leaf=_is_thin))


def unpack(packed: Arrays, like: Tree) -> Tree:
    """Return the tree of the shape of `like` that was packed; raise when names, shapes or types differ."""
    check_names(packed, like)
    shapes = jax.tree_util.tree_map_with_path(
        lambda path, node: _squeezed_shapes(packed, path, node) if _is_thin(node) else node, like, is_leaf=_is_thin
    )
    arrived = from_arrays(packed, shapes)
    return jax.tree.map(
        lambda node, squeezed: _spread(node, squeezed) if _is_thin(node) else squeezed, like, arrived, is_leaf=_is_thin
    )


def _squeeze(thin: Thin) -> Thin:
    """Return the bitmap as bytes, and the numbers under it in a row."""
    kept = jax.tree.map(np.asarray, thin.kept)
    values = tuple(jax.tree.map(lambda there, leaf: np.asarray(leaf)[there], kept, tree) for tree in thin.values)
    return Thin(jax.tree.map(lambda there: np.packbits(there.ravel()), kept), values, thin.rest)


def _squeezed_shapes(packed: Arrays, path: Any, thin: Thin) -> Thin:
    """Return the shapes of a squeezed `Thin`, which follow from the bitmaps that arrived."""

    def bitmap(below: Any, leaf: Any) -> np.ndarray:
        at = (*path, GetAttrKey("kept"), *below)
        return array_at(packed, at, (bitmap_bytes(leaf.size),), np.dtype("uint8"))

    def row(there: np.ndarray, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((int(_places(there, leaf).sum()),), leaf.dtype)

    kept = jax.tree_util.tree_map_with_path(bitmap, thin.kept)
    return Thin(kept, tuple(jax.tree.map(row, kept, tree) for tree in thin.values), thin.rest)


def _spread(thin: Thin, squeezed: Thin) -> Thin:
    """Return the `Thin` that was squeezed."""

    def whole(there: np.ndarray, leaf: Any, row: np.ndarray) -> np.ndarray:
        filled = np.zeros(leaf.shape, leaf.dtype)
        filled[there] = row
        return filled

    kept = jax.tree.map(_places, squeezed.kept, thin.kept)
    pairs = zip(thin.values, squeezed.values, strict=True)
    return Thin(kept, tuple(jax.tree.map(whole, kept, tree, rows) for tree, rows in pairs), squeezed.rest)


def _places(bitmap: np.ndarray, leaf: Any) -> np.ndarray:
    return np.unpackbits(bitmap, count=leaf.size).astype(bool).reshape(leaf.shape)


def _to_bytes(array: np.ndarray) -> bytes:
    written = io.BytesIO()
    npy.write_array(written, array, version=(1, 0), allow_pickle=False)
    return written.getvalue()


def from_bytes(name: str, raw: bytes) -> np.ndarray:
    """Return the array in the bytes, a view of them; raise `DecodeError` if there is none."""
    try:
        stream = io.BytesIO(raw[:HEADER_BYTES])
        if npy.read_magic(stream) != (1, 0):
            raise ValueError("another version")
        shape, is_fortran, dtype = npy.read_array_header_1_0(stream, max_header_size=HEADER_BYTES)
        start, size = stream.tell(), int(np.prod(shape, dtype=object))
        if is_fortran or dtype.hasobject or dtype.itemsize == 0 or start + size * dtype.itemsize != len(raw):
            raise ValueError("other bytes than the header says")
        body = np.frombuffer(raw, np.uint8, offset=start)
        return (body != 0 if dtype == np.bool_ else body.view(dtype)).reshape(shape)
    except Exception as error:  # NumPy's parser of headers raises whatever Python's own parser does
        said = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise DecodeError("garbage", f"{name[:80]} arrived as {len(raw)} bytes that hold no array ({said}).") from None


def _is_thin(node: Any) -> bool:
    return isinstance(node, Thin)
