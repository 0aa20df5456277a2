"""Files that survive a crash, and directories that no other user of the machine can enter or lead elsewhere."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from priory.core.errors import UsageError

TRACKERS = ("wandb", "mlruns")  # directories of trackers, which make links
WRITTEN = (".json", ".jsonl", ".toml", ".bin", ".html", ".lock", ".log", ".db")  # endings of files that Priory writes


def check_writable(path: Path) -> None:
    """Raise if a directory can be neither made nor written."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "read-only" if there.is_dir() else f"{there} is a file"
        raise UsageError(f"out={str(path)!r} cannot be written ({reason}); choose a directory that can.")
    check_no_links(path)


def check_no_links(path: Path) -> None:
    """Raise if a directory that is to be written contains a link, pipe or device that Priory could write through.

    The directory itself may be a link, since the user named it. Links to files that Priory never writes are left alone,
    such as data of the user, and so are hidden entries and the directories of trackers.
    """
    for place, directories, files in os.walk(path):
        directories[:], files = filter(_is_looked_at, directories), list(filter(_is_looked_at, files))
        for entry in (Path(place, name) for name in (*directories, *files)):
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                mode = entry.lstat().st_mode
                if (stat.S_ISLNK(mode) and entry.is_dir()) or (not stat.S_ISDIR(mode) and _could_be_written(entry)):
                    _check_regular(entry, mode)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[int]:
    """Lock a private file, made if it is missing, against other processes that do so, and yield its handle.

    Args:
        wait: Whether to wait for the others; else `BlockingIOError` is raised.
    """
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def private_directory(path: Path, ours: bool = True) -> None:
    """Make a directory that only its owner can enter, and the parents that it lacks.

    Args:
        ours: Whether a directory that exists already is closed to others too. If it is not ours, this is done only
            while it is empty.
    """
    for place in (*reversed(path.parents), path):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_mode & 0o077 and (ours or not any(path.iterdir())):
        with suppress(PermissionError):  # it belongs to another user, or its file system has no modes
            path.chmod(0o700)


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace a file so that a reader sees the old content or the new one, never a part.

    Args:
        mode: Permissions of the new file, from which the umask takes away as usual; 0o600 for secrets.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # the mode is that of a new file only
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as handle:  # x follows no link
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Return when the names in a directory are on the disk; a renamed file may else come back under its old name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, raw: bytes, offset: int) -> None:
    """Write all of the bytes at an offset of an open file."""
    while raw:
        written = os.pwrite(handle, raw, offset)
        raw, offset = raw[written:], offset + written


def _is_looked_at(name: str) -> bool:
    return not name.startswith(".") and name not in TRACKERS


def _could_be_written(entry: Path) -> bool:
    """Return whether an entry has a name like the files that Priory writes in place."""
    # SQLite writes state.db-wal beside state.db.
    return entry.name == "lock" or entry.suffix.lower().partition("-")[0] in WRITTEN


def _check_regular(entry: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what, it = ("a symbolic link", "the link") if stat.S_ISLNK(mode) else ("neither a file nor a directory", "it")
        raise UsageError(
            f"{entry} is {what}, and Priory does not write to a directory that contains one; choose another "
            f"directory, or remove {it}."
        )
