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

JsonDict = dict[str, Any]  # the contents of a JSON or TOML file, and lines of logs
MOST_TEXT = 1 << 30  # bytes of a JSON file; the scores of a million clients are a fifth of it
MOST_TOML = 1 << 24
SMALL = 1 << 20  # bytes that are never too many
MOST_DOTS = 200  # of one TOML key: Python's reader takes memory in proportion to their square
# Strings and comments, whose dots are no part of a key. Each alternative matches whatever follows its first characters,
# terminated or not, and gives nothing back (*+), so the time is linear.
NO_KEYS = re.compile(
    r'"{3}(?:[^"\\]|\\[\s\S]|"(?!""))*+"{0,5}'
    r"|'{3}(?:[^']|'(?!''))*+'{0,5}"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+"
)
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
    """Raise where so many bytes, if they are more than 1 MiB, exceed half of the free memory; readers convert them."""
    free = memory.free()
    if size > max(SMALL, free // 2):
        raise ValueError(f"{what} {memory.shown(size)}, and {memory.shown(free)} of memory are free")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the contents of a regular file that fits into memory and has at most so many bytes.

    Args:
        most: By default `MOST_TEXT` for a JSON file, and any number for others.
    """
    size = check_regular(path)
    if most is None and path.suffix == ".json":
        most = MOST_TEXT
    try:
        if most is not None and size > most:
            raise ValueError(f"it has {memory.shown(size)}, more than {memory.shown(most)}")
        check_memory(size, "it needs")
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from None
    return path.read_bytes()


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return the text of a regular file of at most so many bytes."""
    return read_bytes(path, most).decode()


def reason(error: Exception) -> str:
    """Return in one line why a file could not be read."""
    return getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value; raise `ValueError` where it is nested too deeply as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> JsonDict:
    """Return a TOML table; raise `ValueError` where it is nested too deeply as well."""
    if len(text) > MOST_TOML:
        raise ValueError(f"it has {memory.shown(len(text))}, more than {memory.shown(MOST_TOML)}")
    if any(piece.count(".") > MOST_DOTS for piece in NO_KEY.split(NO_KEYS.sub(_blank, text))):
        raise ValueError(f"a key has more than {MOST_DOTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _blank(found: re.Match[str]) -> str:
    """Return what stands for a string or a comment when the parts of keys are counted."""
    return "" if found[0].startswith("#") else '""'
