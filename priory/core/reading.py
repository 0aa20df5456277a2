"""Files of users, read with limits: what they declare is checked before memory is taken for it.

Every function raises `OSError` or `ValueError`, which the reader of a format turns into a sentence of its own.
"""

import errno
import json
import os
import re
import resource
import stat
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    free = _free_memory()
    if size > free // 2:
        raise ValueError(f"{what} {_words(size)}, and {_words(free)} of memory are free")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the contents of a regular file that fits into memory and has at most so many bytes."""
    size = check_regular(path)
    try:
        if most is not None and size > most:
            raise ValueError(f"it has {_words(size)}, more than {_words(most)}")
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
        raise ValueError(f"it has {_words(len(text))}, more than {_words(MOST_TOML)}")
    if any(piece.count(".") > MOST_DOTS for piece in NO_KEY.split(STRING.sub('""', text))):
        raise ValueError(f"a key has more than {MOST_DOTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _free_memory() -> int:
    """The bytes that this process may still take, as far as the system tells."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError, IndexError):
        limits.append(int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10)
    with suppress(OSError, ValueError):  # in a container
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()) - used)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min([*limits, limit] if limit != resource.RLIM_INFINITY else limits)


def _words(size: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size} bytes"
        size /= 1000  # type: ignore[assignment]
    return f"{size:,.0f} TB"
