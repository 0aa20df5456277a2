"""Trees of one structure as bytes of one size, and the checksum that a stored record carries.

A container (the slots of `priory/records.py`) decides where the bytes go and what the checksum covers besides them.
"""

import struct
import zlib
from typing import Any

import jax
import numpy as np

PyTree = Any


class Codec:
    """Trees with the structure of `like`, their leaves one after another; nothing is pickled.

    Attributes:
        size: Bytes of one tree.
        structure: What tells two structures apart when it is printed.
    """

    def __init__(self, like: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(like)
        self._shapes = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in self._shapes]
        self.size = sum(self._sizes)
        self.structure = str(self._treedef), self._shapes

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


def checksum(body: bytes, *about: int) -> int:
    """Return the CRC-32 of numbers that say whose bytes these are, and of the bytes."""
    return zlib.crc32(body, zlib.crc32(struct.pack(f"<{len(about)}q", *about)))
