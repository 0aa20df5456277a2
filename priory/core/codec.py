"""Trees as arrays and bytes, for every file and message that contains one; nothing is pickled.

No structure is written: a reader knows the tree (`like`, of arrays or shapes), and what does not fit it is refused.

    Codec                     stacked trees as rows of one size: records of simulated clients
    to_arrays, from_arrays    arrays by the paths of the leaves: messages, and what a file contains
    to_file, from_file        such arrays and texts about them in one file: states of deployed clients, exported models
    checksum, digest          of a row and whose it is, of a file's arrays and texts; the container stores them
"""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from priory.core.errors import UsageError
from priory.core.reading import parse_json
from priory.core.trees import path_of

PyTree = Any
Tree = TypeVar("Tree")
Arrays = dict[str, np.ndarray]
Reason = Literal["keys", "shape", "dtype", "oversized", "garbage"]

# Names of classes are part of the structure that a row is checked against, so a class keeps its first one there.
FIRST_NAMES = {"VariationalParams": "Belief", "ClientState": "Personal"}


class DecodeError(UsageError):
    """Bytes or arrays are not the tree that was expected.

    Attributes:
        reason: The kind of fault, in one word.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Codec:
    """Trees with the structure of `like`, their leaves one after another.

    Attributes:
        size: Bytes of one tree.
        structure: What tells two structures apart when it is printed.
    """

    def __init__(self, like: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(like)
        self._shapes = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in self._shapes]
        self.size = sum(self._sizes)
        first = {name: FIRST_NAMES[name] for name in FIRST_NAMES.keys() & _own_classes(self._treedef)}
        named = re.sub(r"(?<=CustomNode\()\w+", lambda name: first.get(name[0], name[0]), str(self._treedef))
        self.structure = named, self._shapes

    def pack(self, trees: PyTree, num: int) -> np.ndarray:
        """Return stacked trees as bytes, (num, size)."""
        # The width is known, and cannot be inferred where there are no trees.
        columns = [
            np.ascontiguousarray(leaf).reshape(num, size // dtype.itemsize).view(np.uint8)
            for leaf, size, (_, dtype) in zip(jax.tree.leaves(trees), self._sizes, self._shapes, strict=True)
        ]
        return np.concatenate(columns, axis=1) if columns else np.zeros((num, 0), np.uint8)

    def unpack(self, rows: np.ndarray) -> PyTree:
        """Return the stacked trees of bytes, (num, size)."""
        leaves, place = [], 0
        for (shape, dtype), size in zip(self._shapes, self._sizes, strict=True):
            column = np.ascontiguousarray(rows[:, place : place + size])
            leaves.append(column.view(dtype).reshape(len(rows), *shape))
            place += size
        return jax.tree.unflatten(self._treedef, leaves)


def _own_classes(treedef: Any) -> set[str]:
    """Return the names of this package's classes in a structure."""
    node = treedef.node_data()
    own = {node[0].__name__} if node and node[0].__module__.startswith("priory.") else set()
    return own.union(*map(_own_classes, treedef.children()))


def to_arrays(tree: PyTree) -> Arrays:
    """Return the leaves of a tree by their paths; raise where two of them would share a name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [path_of(path) for path, _ in leaves]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"Two parts of the message are named {', '.join(twice)}; rename one of them.")
    return {name: np.asarray(leaf, order="C") for name, (_, leaf) in zip(names, leaves, strict=True)}


def from_arrays(arrays: Mapping[str, np.ndarray], like: Tree) -> Tree:
    """Return the tree of the shapes of `like`; raise `DecodeError` where names, shapes or types differ."""
    check_names(arrays, like)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: array_at(arrays, path, leaf.shape, leaf.dtype), like)


def check_names(parts: Mapping[str, Any], like: PyTree) -> None:
    """Raise unless the names are those of the leaves of `like`."""
    names = {path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)}
    if set(parts) != names:
        missing, extra = sorted(names - set(parts)), sorted(map(str, set(parts) - names))
        raise DecodeError(
            "keys",
            f"The message lacks {_few(missing)} and has {_few(extra)} besides; sender and receiver run different "
            "methods.",
        )


def array_at(arrays: Mapping[str, np.ndarray], path: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the array of a path; raise unless it has this shape and type."""
    array = arrays[path_of(path)]
    if array.shape != shape or array.dtype != dtype:
        raise DecodeError(
            "shape" if array.dtype == dtype else "dtype",
            f"{path_of(path)} arrived as {array.dtype}{list(array.shape)} where {dtype}{list(shape)} was expected; "
            "sender and receiver run different models.",
        )
    return array


def to_file(arrays: Arrays, about: Mapping[str, str] | None = None) -> bytes:
    """Return arrays, and texts about them, as the bytes of a safetensors file."""
    from safetensors.numpy import save

    return save(_named(arrays), None if about is None else dict(about))


def from_file(raw: bytes) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays in the bytes of a safetensors file and the texts about them; raise `DecodeError` on others."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        header = parse_json(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        arrays, about = load(raw), dict(header.get("__metadata__", {}))
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise DecodeError("garbage", str(error)) from None
    return {"" if name == "." else name: array for name, array in arrays.items()}, about


def checksum(body: bytes, *about: int) -> int:
    """Return the CRC-32 of numbers that say whose bytes these are, and of the bytes."""
    return zlib.crc32(body, zlib.crc32(struct.pack(f"<{len(about)}q", *about)))


def digest(arrays: Arrays, about: Mapping[str, str]) -> str:
    """Return the SHA-256 of arrays by name, and of the texts about them."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode() if about else b"")
    for name, array in sorted(_named(arrays).items()):
        found.update(f"{name}{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _named(arrays: Arrays) -> Arrays:
    """Return the arrays by names that a file can hold: a tree that is one array has no path."""
    return {name or ".": array for name, array in arrays.items()}


def _few(names: list[str], most: int = 5) -> str:
    """Return the names as a list that stays short, whatever a stranger calls things."""
    shown = [name[:80] for name in names[:most]]
    return f"{shown}" if len(names) <= most else f"{shown} and {len(names) - most} more"
