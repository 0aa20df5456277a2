"""Files of users, read with limits: what they declare is checked before memory is taken for it.

Every function raises `OSError` or `ValueError`, which the reader of a format turns into a sentence of its own.
"""

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from priory.core import memory

__all__ = ["check_memory", "check_regular", "parse_json", "parse_toml", "read_bytes", "read_text"]

MOST_TEXT = 1 << 30  # bytes of a JSON file; the scores of a million clients are a fifth of it
MOST_TOML = 1 << 24
MOST_DOTS = 200  # of one TOML key: Python's reader takes memory in proportion to their square
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'")
NO_KEY = re.compile(r"[^\w\" \t.-]+")


def check_regular(path: Path) -> int:
    """Return the size of a file; raise for a directory, and for a pipe or a device, which might never end."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def check_memory(size: int, what: str) -> None:
    """Raise where so many bytes are more than half of the memory that is free; readers convert what they read."""
    free = memory.free()
    if size > free // 2:
        raise ValueError(f"{what} {memory.shown(size)}, and {memory.shown(free)} of memory are free")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the contents of a regular file that fits into memory and has at most so many bytes."""
    size = check_regular(path)
    try:
        if most is not None and size > most:
            raise ValueError(f"it has {memory.shown(size)}, more than {memory.shown(most)}")
        check_memory(size, "it has")
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from None
    return path.read_bytes()


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return the text of a regular file of at most so many bytes."""
    return read_bytes(path, most).decode()


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value; raise `ValueError` where it is nested too deeply as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return a TOML table; raise `ValueError` where it is nested too deeply as well."""
    if len(text) > MOST_TOML:
        raise ValueError(f"it has {memory.shown(len(text))}, more than {memory.shown(MOST_TOML)}")
    if any(piece.count(".") > MOST_DOTS for piece in NO_KEY.split(STRING.sub('""', text))):
        raise ValueError(f"a key has more than {MOST_DOTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
