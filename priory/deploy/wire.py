"""What travels as a flat dictionary of named arrays; no pickle, no structure on the wire.

The receiver knows the structure (`jax.eval_shape` of the verb itself), so only names, shapes and numbers travel, and
whatever does not fit is refused.
"""

from typing import Any, TypeVar

import jax
import numpy as np

from priory.core.errors import UsageError
from priory.core.trees import path_of

Tree = TypeVar("Tree")


def pack(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths; raises when two of them would share a name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    packed = {path_of(path): np.asarray(leaf) for path, leaf in leaves}
    if len(packed) != len(leaves):
        names = [path_of(path) for path, _ in leaves]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"Two parts of the message are named {', '.join(twice)}; rename one of them.")
    return packed


def unpack(packed: dict[str, np.ndarray], like: Tree) -> Tree:
    """The tree of the shape of `like` that was packed; raises when names, shapes or types differ."""
    places, treedef = jax.tree_util.tree_flatten_with_path(like)
    names = [path_of(path) for path, _ in places]
    if set(packed) != set(names):
        missing, extra = sorted(set(names) - set(packed)), sorted(set(packed) - set(names))
        raise UsageError(
            f"The message lacks {missing} and has {extra} besides; sender and receiver run different methods."
        )
    for name, (_, leaf) in zip(names, places, strict=True):
        got = packed[name]
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise UsageError(
                f"{name} arrived as {got.dtype}{list(got.shape)} where {leaf.dtype}{list(leaf.shape)} was expected; "
                "sender and receiver run different models."
            )
    return jax.tree.unflatten(treedef, [packed[name] for name in names])
