"""Records of one size in a sparse file, two generations of each.

A record (a client's state, or the server's) has two slots. A round writes the slot that does not hold the newest
*committed* generation, so whatever is torn when the process dies is never what a resumed run reads.

    records.bin   each slot: CRC-32 of client, generation and body; generation; body
    index.bin     each slot: generation, CRC-32 of slot and generation; zeros where nothing was written

Writing costs O(cohort), and nothing is read or kept in memory of clients that nobody asks for. A record or an entry
that does not match its checksum is refused, and so is one that belongs to another client or round.
"""

import fcntl
import hashlib
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from priory.core.codec import Codec, checksum
from priory.core.errors import UsageError
from priory.core.files import sync_directory, write_all

PyTree = Any
RECORDS, INDEX, OLD_INDEX = "records.bin", "index.bin", "generations.bin"
NEVER = 0  # the generation of a slot that was never written; round t writes generation t + 1
UNKNOWN = -1
ENTRY = 8  # bytes in the index
SCANNED = 1 << 20  # bytes of the index that are read at once


@dataclass(frozen=True)
class Format:
    """How slots and entries are written.

    Attributes:
        index: Name of the index.
        head: Bytes of a slot before the body.
        is_old: Whether the index is unprotected and checksums cover bodies alone, as in files of format 1, which
            continue in their format.
    """

    index: str
    head: int
    is_old: bool

    def entry(self, slot: int, generation: int) -> bytes:
        """Return the entry of a slot in the index."""
        if self.is_old:
            return struct.pack("<q", generation)
        return bytes(ENTRY) if generation == NEVER else struct.pack("<II", generation, checksum(b"", slot, generation))

    def generation(self, slot: int, entry: bytes) -> int | None:
        """Return the generation in an entry of the index; None if it does not match its checksum."""
        if self.is_old:
            return int.from_bytes(entry, "little", signed=True)
        generation, claimed = struct.unpack("<II", entry)
        whole = generation != NEVER and claimed == checksum(b"", slot, generation)
        return generation if whole or entry == bytes(ENTRY) else None

    def record(self, client: int, generation: int, body: bytes) -> bytes:
        """Return the bytes of a slot."""
        if self.is_old:
            return struct.pack("<I", checksum(body)) + body
        return struct.pack("<II", checksum(body, client, generation), generation) + body

    def generation_of(self, client: int, record: bytes) -> int | None:
        """Return the generation of a stored record, `UNKNOWN` if it has none; None if its checksum does not match."""
        if self.is_old:
            return UNKNOWN if int.from_bytes(record[:4], "little") == checksum(record[4:]) else None
        claimed, generation = struct.unpack("<II", record[:8])
        return generation if claimed == checksum(record[8:], client, generation) else None


FORMAT_1, FORMAT_2 = Format(OLD_INDEX, 4, is_old=True), Format(INDEX, 8, is_old=False)


class RecordStore:
    """`num` records of one structure; generation g is the state after g rounds."""

    def __init__(self, directory: Path, like: PyTree, num: int, is_new: bool = True) -> None:
        self._codec, self._num = Codec(like), num
        self._format = FORMAT_1 if (directory / OLD_INDEX).exists() else FORMAT_2
        self._bytes = self._format.head + self._codec.size
        self.schema = hashlib.sha256(repr((num, *self._codec.structure)).encode()).hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / RECORDS
        self._data = _open_sized(directory / RECORDS, 2 * num * self._bytes, is_new)
        self._index = _open_sized(directory / self._format.index, 2 * num * ENTRY, is_new)
        sync_directory(directory)
        self._closing = weakref.finalize(self, _close_all, self._data, self._index)

    def read(self, ids: np.ndarray, at: int) -> tuple[PyTree, np.ndarray]:
        """Return the newest records not younger than `at`, stacked, and which of them exist (the others are zeros).

        Raises where a run that goes on in another process has replaced one of them.
        """
        rows, found = np.zeros((len(ids), self._codec.size), np.uint8), np.zeros(len(ids), bool)
        for row, client in enumerate(map(int, ids)):
            entries = self._entries(client)
            generations = self._usable(client, entries, at)
            newest = max(generations)
            if newest == NEVER:
                if NEVER not in entries:  # a run writes the second slot after its next commit
                    self._miss()
                continue
            record = self._record(client, generations.index(newest))
            held = self._format.generation_of(client, record)
            if held is not None and held > at:
                self._miss()
            if held not in (newest, UNKNOWN):
                self._refuse(client)
            rows[row], found[row] = np.frombuffer(record, np.uint8)[self._format.head :], True
        return self._codec.unpack(rows), found

    def write(self, ids: np.ndarray, records: PyTree, generation: int, committed: int) -> None:
        """Write stacked records as `generation`, and leave the newest that is not younger than `committed` as it is."""
        for client, row in zip(map(int, ids), self._codec.pack(records, len(ids)), strict=True):
            generations = self._usable(client, self._entries(client), committed)
            slot = 0 if max(generations) == NEVER else 1 - generations.index(max(generations))
            record = self._format.record(client, generation, row.tobytes())
            write_all(self._data, record, (2 * client + slot) * self._bytes)
            self._mark(client, slot, generation)

    def discard_after(self, generation: int) -> None:
        """Forget what a run that died had written after its last commit.

        On disk too: a later commit would otherwise bring back a record that the resumed run never wrote.
        """
        for client in self._written():
            entries = self._entries(client)
            usable = self._usable(client, entries, generation)
            if NEVER in usable:
                for slot, (entry, wanted) in enumerate(zip(entries, usable, strict=True)):
                    if wanted == NEVER != entry:
                        self._mark(client, slot, NEVER)

    def lock(self) -> None:
        """Keep other processes away, or raise `BlockingIOError` if one of them has done so."""
        fcntl.flock(self._data, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Let other processes write again."""
        fcntl.flock(self._data, fcntl.LOCK_UN)

    def check_in_place(self) -> None:
        """Raise if somebody deleted or replaced a file since it was opened: what is written to it would be lost."""
        for path, handle in ((self._path, self._data), (self._path.with_name(self._format.index), self._index)):
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(handle)):
                raise gone(path)

    def sync(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._data)
        os.fsync(self._index)

    def close(self) -> None:
        """Close the files; the garbage collector does so too."""
        self._closing()

    def _usable(self, client: int, entries: list[int | None], at: int) -> list[int]:
        """Return the generations in the two slots, `NEVER` in place of one after `at`; raise if the index is damaged.

        A process that dies may leave a torn entry, but only of a record that it wrote whole before and that is not
        wanted: it is younger than every commit, or as old as the one in the other slot. Any other entry that does not
        match its checksum was damaged.
        """
        usable = [NEVER if entry is None or entry > at else entry for entry in entries]
        for slot, entry in enumerate(entries):
            if entry is None:
                held = self._format.generation_of(client, self._record(client, slot))
                if held is None or max(usable) < held <= at:
                    self._refuse(client)
        return usable

    def _entries(self, client: int) -> list[int | None]:
        """Return the generations of the two slots in the index, None where one does not match its checksum."""
        raw, first = _read_all(self._index, 2 * ENTRY, 2 * client * ENTRY), 2 * client
        return [self._format.generation(first, raw[:ENTRY]), self._format.generation(first + 1, raw[ENTRY:])]

    def _written(self) -> Iterator[int]:
        """Yield the clients that have an entry in the index, in order."""
        for start in range(0, 2 * self._num * ENTRY, SCANNED):
            raw = _read_all(self._index, min(SCANNED, 2 * self._num * ENTRY - start), start)
            slots = np.flatnonzero(np.frombuffer(raw, "<u8")) + start // ENTRY
            yield from np.unique(slots // 2).tolist()

    def _mark(self, client: int, slot: int, generation: int) -> None:
        place = 2 * client + slot
        write_all(self._index, self._format.entry(place, generation), place * ENTRY)

    def _record(self, client: int, slot: int) -> bytes:
        return _read_all(self._data, self._bytes, (2 * client + slot) * self._bytes)

    def _miss(self) -> NoReturn:
        raise UsageError(f"The run that writes {self._path} went on meanwhile; load it again.")

    def _refuse(self, client: int) -> NoReturn:
        raise UsageError(
            f"Record {client} of {self._path} does not match its checksum, so the file or its index was damaged; "
            "start the run again in another directory."
        )


def missing_file(directory: Path) -> str | None:
    """Return the name of a file that a store in a directory lacks; None if it has all of them."""
    if not (directory / RECORDS).exists():
        return RECORDS
    return None if any((directory / name).exists() for name in (INDEX, OLD_INDEX)) else INDEX


def gone(path: Path) -> UsageError:
    """Return the error for a file that was deleted while a run was writing it."""
    return UsageError(
        f"{path} was deleted, cut or replaced while the run was writing it, so it cannot be kept; start it again in "
        "another directory."
    )


def _open_sized(path: Path, size: int, is_new: bool) -> int:
    """Open a file; a new one gets its size, and any other must have it."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:  # a run that may only be read can still be loaded
        handle = os.open(path, os.O_RDONLY)
    present = os.fstat(handle).st_size
    if present == 0 and is_new:
        os.ftruncate(handle, size)  # sparse: no block is taken before it is written
    elif present != size:
        os.close(handle)
        raise UsageError(
            f"{path} has {present} bytes where this run needs {size}, so it was cut or belongs to another run; "
            "start the run again in another directory."
        )
    return handle


def _close_all(*handles: int) -> None:
    for handle in handles:
        os.close(handle)


def _read_all(handle: int, size: int, offset: int) -> bytes:
    raw = os.pread(handle, size, offset)
    if len(raw) < size:
        raise UsageError("The checkpoint was cut while it was open; start the run again in another directory.")
    return raw
