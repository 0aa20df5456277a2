"""What travels as a flat dictionary of named arrays; no pickle, no structure on the wire.

The receiver knows the structure (`jax.eval_shape` of the verb itself), so only names, shapes and numbers travel, and
whatever does not fit is refused. Of a `Thin` there travel the bits of its bitmap and, in order, the numbers under it.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey, SequenceKey

from priory.core.errors import UsageError
from priory.core.trees import path_of
from priory.fed.thin import Thin, bitmap_bytes

Tree = TypeVar("Tree")


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
    names = [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(like)[0]]
    if set(packed) != set(names):
        missing, extra = sorted(set(names) - set(packed)), sorted(set(packed) - set(names))
        raise UsageError(
            f"The message lacks {missing} and has {extra} besides; sender and receiver run different methods."
        )
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_thin)
    return jax.tree.unflatten(treedef, [_restore(packed, path, node) for path, node in nodes])


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
        raise UsageError(
            f"{name} arrived as {got.dtype}{list(got.shape)} where {dtype}{list(shape)} was expected; "
            "sender and receiver run different models."
        )
    return got


def _is_thin(node: Any) -> bool:
    return isinstance(node, Thin)
