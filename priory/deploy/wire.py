"""What travels as a flat dictionary of named arrays; no pickle, no structure on the wire.

The receiver knows the structure (`jax.eval_shape` of the verb itself), so only names, shapes and numbers travel, and
whatever does not fit is refused. Of a `Thin` there travel the bits of its bitmap and, in order, the numbers under it.

    pack    a tree → arrays by name          unpack    the arrays → the tree, checked
    encode  a tree → bytes by name           decode    whatever bytes arrived → the tree, or a `WireError`

The bytes of an array are those of NumPy's `.npy` format, which Flower's records hold too. `decode` believes nothing: it
compares a header with what is expected before it looks at the numbers, and reserves no memory that a header asks for.
"""

import io
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey, SequenceKey
from numpy.lib import format as npy

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.trees import path_of
from priory.fed.thin import Thin, bitmap_bytes

Tree = TypeVar("Tree")
Reason = Literal["keys", "shape", "dtype", "oversized", "garbage"]
HEADER_BYTES = 1024  # more than any array of ours needs, and little for a parser


class WireError(UsageError):
    """What arrived is not what was expected.

    Attributes:
        reason: The kind of fault, in one word.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def encode(tree: Any) -> dict[str, bytes]:
    """The leaves of a tree by their paths, each as the bytes of an `.npy` file."""
    return {name: _to_bytes(array) for name, array in pack(tree).items()}


def decode(parts: Mapping[str, bytes], like: Tree) -> Tree:
    """The tree of the shape of `like` that was encoded; raises `WireError` on anything else, whatever the bytes are."""
    arrived, most = sum(map(len, parts.values())), most_bytes(like)
    if arrived > most:
        raise WireError("oversized", f"The message has {arrived} bytes where {most} are the most; send what was asked.")
    _check_names(parts, like)
    return unpack({name: from_bytes(name, raw) for name, raw in parts.items()}, like)


def most_bytes(like: Any) -> int:
    """The most bytes that `encode` makes of a tree of the shape of `like`."""
    return trees.num_bytes(like) + HEADER_BYTES * len(jax.tree.leaves(like))


def pack(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths; raises when two of them would share a name."""
    squeezed = jax.tree.map(lambda node: _squeeze(node) if _is_thin(node) else node, tree, is_leaf=_is_thin)
    leaves, _ = jax.tree_util.tree_flatten_with_path(squeezed)
    packed = {path_of(path): np.asarray(leaf) for path, leaf in leaves}
    if len(packed) != len(leaves):
        names = [path_of(path) for path, _ in leaves]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"Two parts of the message are named {', '.join(twice)}; rename one of them.")
    return packed


def unpack(packed: dict[str, np.ndarray], like: Tree) -> Tree:
    """The tree of the shape of `like` that was packed; raises when names, shapes or types differ."""
    _check_names(packed, like)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_thin)
    return jax.tree.unflatten(treedef, [_restore(packed, path, node) for path, node in nodes])


def _check_names(packed: Mapping[str, Any], like: Any) -> None:
    """Raise unless the names are those of the leaves of `like`."""
    names = {path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(like)[0]}
    if set(packed) != names:
        missing, extra = sorted(names - set(packed)), sorted(map(str, set(packed) - names))
        raise WireError(
            "keys",
            f"The message lacks {_few(missing)} and has {_few(extra)} besides; sender and receiver run different "
            "methods.",
        )


def _few(names: list[str], most: int = 5) -> str:
    """The names as a list that stays short, whatever a stranger calls things."""
    shown = [name[:80] for name in names[:most]]
    return f"{shown}" if len(names) <= most else f"{shown} and {len(names) - most} more"


def _squeeze(thin: Thin) -> Thin:
    """The bitmap as bytes, and the numbers under it in a row."""
    kept = jax.tree.map(np.asarray, thin.kept)
    values = tuple(jax.tree.map(lambda there, leaf: np.asarray(leaf)[there], kept, tree) for tree in thin.values)
    return Thin(jax.tree.map(lambda there: np.packbits(there.ravel()), kept), values, thin.rest)


def _restore(packed: dict[str, np.ndarray], path: Any, node: Any) -> Any:
    """The leaf or `Thin` at a path."""
    if not _is_thin(node):
        return _checked(packed, path, node.shape, node.dtype)

    def bitmap(below: Any, leaf: Any) -> np.ndarray:
        at = (*path, GetAttrKey("kept"), *below)
        bytes_ = _checked(packed, at, (bitmap_bytes(leaf.size),), np.dtype("uint8"))
        return np.unpackbits(bytes_, count=leaf.size).astype(bool).reshape(leaf.shape)

    def spread(number: int, below: Any, there: np.ndarray, leaf: Any) -> np.ndarray:
        at = (*path, GetAttrKey("values"), SequenceKey(number), *below)
        whole = np.zeros(leaf.shape, leaf.dtype)
        whole[there] = _checked(packed, at, (int(there.sum()),), leaf.dtype)
        return whole

    kept = jax.tree_util.tree_map_with_path(bitmap, node.kept)
    values = tuple(
        jax.tree_util.tree_map_with_path(lambda below, *leaves, i=i: spread(i, below, *leaves), kept, tree)
        for i, tree in enumerate(node.values)
    )
    rest = jax.tree_util.tree_map_with_path(
        lambda below, leaf: _checked(packed, (*path, GetAttrKey("rest"), *below), leaf.shape, leaf.dtype), node.rest
    )
    return Thin(kept, values, rest)


def _checked(packed: dict[str, np.ndarray], path: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array at a path; raises unless it has this shape and type."""
    name = path_of(path)
    got = packed[name]
    if got.shape != shape or got.dtype != dtype:
        raise WireError(
            "shape" if got.dtype == dtype else "dtype",
            f"{name} arrived as {got.dtype}{list(got.shape)} where {dtype}{list(shape)} was expected; "
            "sender and receiver run different models.",
        )
    return got


def _to_bytes(array: np.ndarray) -> bytes:
    written = io.BytesIO()
    npy.write_array(written, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
    return written.getvalue()


def from_bytes(name: str, raw: bytes) -> np.ndarray:
    """The array that the bytes hold, a view of them; raises `WireError` if they hold none."""
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
        raise WireError("garbage", f"{name[:80]} arrived as {len(raw)} bytes that hold no array ({said}).") from None


def _is_thin(node: Any) -> bool:
    return isinstance(node, Thin)
