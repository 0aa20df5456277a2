"""Arrays of a .npz file, after its directory and its headers were checked against each other and against memory.

NumPy takes memory for what the header of an array declares, whatever the file holds, and a few bytes of a compressed
file can hold gigabytes.
"""

import tokenize
import zipfile
import zlib
from collections.abc import Container
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from priory.core import reading
from priory.core.errors import UsageError

__all__ = ["load", "read"]

LARGEST_HEADER = 10_000  # characters, as in NumPy


def load(path: Path, wanted: Container[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the arrays of these names, and the names of all; raises `OSError` or `ValueError` on any other file."""
    reading.check_regular(path)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise ValueError("two arrays have the same name")
            chosen = {name: info for name, info in members.items() if name in wanted}
            reading.check_memory(sum(info.file_size for info in chosen.values()), "its arrays need")
            return {name: _array(archive, name, info) for name, info in chosen.items()}, list(members)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OverflowError) as error:
        raise ValueError(reading.reason(error)) from None


def read(path: str, wanted: Container[str], called: str, sample: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return what `load` does; raise `UsageError` with the name that the file is called by, and a sample of arrays."""
    try:
        return load(Path(path), wanted)
    except FileNotFoundError:
        raise UsageError(f"{called} does not exist; give the path of a .npz file.") from None
    except (OSError, ValueError) as error:
        why = reading.reason(error)
        raise UsageError(f"{called} cannot be read ({why}); write it with numpy.savez(path, {sample}).") from None


def _array(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name!r} is compressed in a way that NumPy does not use")
    with archive.open(info) as member:
        _check_header(member, name, info)
    with archive.open(info) as member:
        return np.asarray(npy.read_array(member, allow_pickle=False, max_header_size=LARGEST_HEADER))


def _check_header(member: IO[bytes], name: str, info: zipfile.ZipInfo) -> None:
    """Raise unless an array has as many bytes as its header declares, and is made of numbers or text."""
    version = npy.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array {name!r} has fields, and numbers or text are expected")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, _, dtype = read(member, max_header_size=LARGEST_HEADER)
    except (RecursionError, MemoryError, TypeError, SyntaxError, tokenize.TokenError):  # of Python's own parser
        raise ValueError(f"the header of array {name!r} is damaged") from None
    if dtype.hasobject or dtype.kind == "V":
        raise ValueError(f"array {name!r} holds {dtype}, and numbers or text are expected")
    count = 1
    for size in shape:
        count *= size
    present = info.file_size - member.tell()
    if min(shape, default=0) < 0 or count * dtype.itemsize != present or (count and not dtype.itemsize):
        raise ValueError(f"array {name!r} declares shape {shape} of {dtype}, and the file has {present} bytes of it")
