"""What survives a crash: a store of fixed-size records with two generations each, and the run directory around it.

A record (a client's state, or the server's) has two slots. A round writes the slot that does not hold the newest
*committed* generation, so whatever is torn when the process dies is never what a resumed run reads. Everything becomes
valid at once when `commit.json` is replaced, atomically; writing costs O(cohort), and nothing grows with the number of
clients. There is no pickle anywhere.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tomli_w

from priory.core.errors import UsageError
from priory.core.reading import parse_json, parse_toml, read_bytes, read_text

PyTree = Any
RECORDS, GENERATIONS = "records.bin", "generations.bin"
NEVER = 0  # the generation of a slot that was never written; round t writes generation t + 1


class RecordStore:
    """`num` records of one shape in a sparse file; generation g is the state after g rounds."""

    def __init__(self, directory: Path, like: PyTree, num: int, is_new: bool = True) -> None:
        leaves, self._treedef = jax.tree.flatten(like)
        self._shapes = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in self._shapes]
        self._bytes = sum(self._sizes) + 4  # a checksum in front
        self.schema = hashlib.sha256(repr((num, str(self._treedef), self._shapes)).encode()).hexdigest()[:16]
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._data = _open_sized(directory / RECORDS, 2 * num * self._bytes, is_new)
        self._index = _open_sized(directory / GENERATIONS, 2 * num * 8, is_new)
        sync_directory(directory)
        self._closing = weakref.finalize(self, _close_all, self._data, self._index)
        raw = os.pread(self._index, 2 * num * 8, 0)
        self._generations = np.frombuffer(raw, "<i8").reshape(num, 2).copy()

    def read(self, ids: np.ndarray, at: int) -> tuple[PyTree, np.ndarray]:
        """The newest records not younger than `at`, stacked, and which of them exist (the others are zeros)."""
        generations = np.where(self._generations[ids] <= at, self._generations[ids], NEVER)
        slots, found = generations.argmax(axis=1), generations.max(axis=1) > NEVER
        rows = np.zeros((len(ids), self._bytes), np.uint8)
        for row, (client, slot) in enumerate(zip(ids, slots, strict=True)):
            if found[row]:
                raw = os.pread(self._data, self._bytes, self._offset(client, slot))
                rows[row] = np.frombuffer(raw, np.uint8)
                if zlib.crc32(rows[row, 4:].tobytes()) != int(rows[row, :4].view("<u4")[0]):
                    raise UsageError(
                        f"The checkpoint's record {client} does not match its checksum, so the file was damaged; "
                        "start the run again in another directory."
                    )
        return self._unpack(rows[:, 4:]), found

    def write(self, ids: np.ndarray, records: PyTree, generation: int, committed: int) -> None:
        """Put stacked records down as `generation`, sparing the newest one that is not younger than `committed`."""
        rows = self._pack(records, len(ids))
        valid = np.where(self._generations[ids] <= committed, self._generations[ids], NEVER)
        slots = np.where(valid.max(axis=1) > NEVER, 1 - valid.argmax(axis=1), 0)
        for row, client, slot in zip(rows, ids, slots, strict=True):
            write_all(self._data, row.tobytes(), self._offset(client, slot))
            self._mark(client, slot, generation)

    def discard_after(self, generation: int) -> None:
        """Forget what a run that died had written after its last commit.

        On disk too: a later commit would otherwise bring back a record that the resumed run never wrote.
        """
        for client, slot in np.argwhere(self._generations > generation):
            self._mark(client, slot, NEVER)

    def lock(self) -> None:
        """Keep other processes away, or raise `BlockingIOError` if one of them has done so."""
        fcntl.flock(self._data, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Let other processes write again."""
        fcntl.flock(self._data, fcntl.LOCK_UN)

    def check_in_place(self) -> None:
        """Raise if somebody deleted or replaced a file since it was opened: what is written to it would be lost."""
        for path, handle in ((self._directory / RECORDS, self._data), (self._directory / GENERATIONS, self._index)):
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(handle)):
                raise gone(path)

    def sync(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._data)
        os.fsync(self._index)

    def close(self) -> None:
        """Give the files back; a store that nobody holds any more does so by itself."""
        self._closing()

    def _mark(self, client: int, slot: int, generation: int) -> None:
        self._generations[client, slot] = generation
        write_all(self._index, np.int64(generation).astype("<i8").tobytes(), (2 * int(client) + int(slot)) * 8)

    def _offset(self, client: int, slot: int) -> int:
        return (2 * int(client) + int(slot)) * self._bytes

    def _pack(self, records: PyTree, num: int) -> np.ndarray:
        # The width is known, and cannot be inferred where there are no records.
        columns = [
            np.ascontiguousarray(leaf).reshape(num, size // dtype.itemsize).view(np.uint8)
            for leaf, size, (_, dtype) in zip(jax.tree.leaves(records), self._sizes, self._shapes, strict=True)
        ]
        body = np.concatenate(columns, axis=1) if columns else np.zeros((num, 0), np.uint8)
        sums = np.array([zlib.crc32(row.tobytes()) for row in body], "<u4").view(np.uint8).reshape(num, 4)
        return np.concatenate([sums, body], axis=1)

    def _unpack(self, rows: np.ndarray) -> PyTree:
        leaves, place = [], 0
        for (shape, dtype), size in zip(self._shapes, self._sizes, strict=True):
            column = np.ascontiguousarray(rows[:, place : place + size])
            leaves.append(column.view(dtype).reshape(len(rows), *shape))
            place += size
        return jax.tree.unflatten(self._treedef, leaves)


class Checkpoint:
    """Server and clients of a run on disk, valid as of the round in `commit.json`."""

    def __init__(self, directory: Path, server: PyTree, record: PyTree, num_clients: int) -> None:
        commit = _read_commit(directory / "commit.json")
        for name in (f"{store}/{file}" for store in ("server", "clients") for file in (RECORDS, GENERATIONS)):
            if commit and not (directory / name).exists():
                raise UsageError(f"{directory / name} is missing, so the checkpoint is lost; start the run again.")
        self._path = directory / "commit.json"
        self.server = RecordStore(directory / "server", server, 1, is_new=not commit)
        self.clients = RecordStore(directory / "clients", record, num_clients, is_new=not commit)
        self._schema = f"{self.server.schema}-{self.clients.schema}"
        self.round: int = commit.get("round", -1)
        self.metrics_bytes: int = commit.get("metrics_bytes", 0)
        self.extra: dict[str, Any] = commit.get("extra", {})
        if commit and commit.get("schema") != self._schema:
            raise UsageError(
                f"The checkpoint in {directory} holds another method, model or federation; "
                "resume it with the settings of its manifest.toml, or choose another directory."
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing this run."""
        try:
            self.server.lock()
        except BlockingIOError:
            raise UsageError(f"{self._path.parents[1]} is being run by another process; wait for its end.") from None
        try:
            yield
        finally:
            self.server.unlock()

    def is_stale(self) -> bool:
        """Whether somebody has committed since this checkpoint was opened."""
        return bool(_read_commit(self._path).get("round", -1) != self.round)

    def read_server(self) -> PyTree:
        """The server as of the last commit."""
        stacked, found = self.server.read(np.array([0]), self.round + 1)
        if not found[0]:
            raise UsageError(f"The checkpoint in {self._path.parent} has lost its server; start the run again.")
        return jax.tree.map(lambda leaf: leaf[0], stacked)

    def check_in_place(self) -> None:
        """Raise if somebody deleted or replaced a file of the checkpoint since it was opened."""
        self.server.check_in_place()
        self.clients.check_in_place()
        if self.round >= 0 and not self._path.exists():
            raise gone(self._path)

    def commit(self, server: PyTree, completed: int, metrics_bytes: int, extra: dict[str, Any]) -> None:
        """Make everything written so far valid: the state after `completed` rounds, and what else is to be known."""
        self.check_in_place()
        stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], server)
        # Generation + 1: round 0 has a server too, and 0 means never written.
        self.server.write(np.array([0]), stacked, completed + 1, self.round + 1)
        self.server.sync()
        self.clients.sync()
        commit = {"round": completed, "metrics_bytes": metrics_bytes, "schema": self._schema, "extra": extra}
        write_atomically(self._path, json.dumps(commit) + "\n")
        self.round, self.metrics_bytes = completed, metrics_bytes

    def close(self) -> None:
        """Give the files back."""
        self.server.close()
        self.clients.close()


class RunDirectory:
    """The files of a run: `manifest.toml`, `metrics.jsonl`, `summary.json` and `checkpoint/`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint is."""
        return self.path / "checkpoint"

    def check_free(self) -> None:
        """Raise if the directory holds a run already or cannot be written."""
        if (self.path / "manifest.toml").exists():
            raise UsageError(
                f"out={str(self.path)!r} holds a run already, which is never overwritten; "
                f"go on with `priory resume {self.path}`, or choose another directory."
            )
        check_writable(self.path)

    def create(self, manifest: dict[str, Any]) -> None:
        """Make the directory and write the manifest; a directory that holds a run already is left alone."""
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "manifest.toml", tomli_w.dumps(manifest))
        except OSError as error:
            raise UsageError(
                f"out={str(self.path)!r} cannot be written ({error.strerror}); choose a directory that can."
            ) from None

    def manifest(self) -> dict[str, Any]:
        """The settings of the run."""
        path = self.path / "manifest.toml"
        table = read_manifest(path)
        if (self.path / "status.json").exists():
            raise UsageError(
                f"{self.path} is the server's directory of a deployed federation, which has nobody's rows; ask "
                f"`priory flower status {self.path}`, and clients for their models."
            )
        if "data_checksum" not in table.get("environment", {}):  # what a run writes last
            raise UsageError(f"{path} was cut or was not written by a run; name the directory of a run.")
        return table

    def is_committed(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return bool(_read_commit(self.checkpoint / "commit.json"))

    def append_metrics(self, line: dict[str, Any], at: int) -> int:
        """The length of `metrics.jsonl` after the line was put at byte `at`; whatever stood behind it is cut."""
        raw = json.dumps(line).encode() + b"\n"
        self.check_in_place(at)
        handle = os.open(self.path / "metrics.jsonl", os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.ftruncate(handle, at)
            write_all(handle, raw, at)
            os.fsync(handle)
        finally:
            os.close(handle)
        return at + len(raw)

    def check_in_place(self, metrics_bytes: int) -> None:
        """Raise if somebody deleted the directory, or deleted or cut its files, since so many bytes were written."""
        if not self.path.is_dir():
            raise gone(self.path)
        path = self.path / "metrics.jsonl"
        if metrics_bytes and (not path.exists() or path.stat().st_size < metrics_bytes):
            raise gone(path)

    def cut_metrics(self, length: int) -> None:
        """Drop the lines that were written after the last commit."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            os.truncate(path, length)

    def metrics(self, length: int | None = None) -> list[dict[str, Any]]:
        """The lines so far, or in the first `length` bytes; one that a crash or a full disk cut short is left out."""
        path = self.path / "metrics.jsonl"
        raw = read_bytes(path) if path.exists() else b""
        if length is not None and len(raw) < length:
            raise UsageError(
                f"{path} has {len(raw)} bytes where the last commit counts {length}, so it was cut; "
                "bring it back, or run the manifest again in another directory."
            )
        try:
            lines = [parse_json(line) for line in raw[:length].rpartition(b"\n")[0].splitlines()]
        except ValueError:
            lines = [None]
        if not all(isinstance(line, dict) and isinstance(line.get("round"), int) for line in lines):
            raise UsageError(
                f"{path} is damaged, since not every line tells of a round; "
                "bring it back, or run the manifest again in another directory."
            )
        return lines

    def write_summary(self, summary: dict[str, Any], per_client: dict[str, Any]) -> None:
        """Write `clients.json`, then `summary.json`: a run with a summary is finished."""
        write_atomically(self.path / "clients.json", json.dumps(per_client) + "\n")
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def committed(self) -> dict[str, Any]:
        """What the last commit holds beside the states; empty before the first."""
        return _read_commit(self.checkpoint / "commit.json").get("extra", {})

    def write_architectures(self, table: dict[str, Any]) -> None:
        """Write `architectures.json`: scores by model, and what the same clients reach alone."""
        write_atomically(self.path / "architectures.json", json.dumps(table, indent=2) + "\n")

    def architectures(self) -> dict[str, Any] | None:
        """What `write_architectures` wrote, if it did."""
        return self._json("architectures.json")

    def write_uncertainty(self, table: dict[str, Any]) -> None:
        """Write `uncertainty.json`: what the models know and do not know."""
        write_atomically(self.path / "uncertainty.json", json.dumps(table) + "\n")

    def uncertainty(self) -> dict[str, Any] | None:
        """What `write_uncertainty` wrote, if it did."""
        return self._json("uncertainty.json", "ask for it again")

    def write_tracked(self, names: dict[str, str]) -> None:
        """Write `track.json`: what the tools call this run that its metrics are sent to."""
        write_atomically(self.path / "track.json", json.dumps(names) + "\n")

    def tracked(self) -> dict[str, Any]:
        """What `write_tracked` wrote; empty before."""
        return self._json("track.json", "send the run again") or {}

    def write_certificates(self, table: dict[str, Any]) -> None:
        """Write `certificates.json`: bounds on the errors of newcomers."""
        write_atomically(self.path / "certificates.json", json.dumps(table, indent=2) + "\n")

    def certificates(self) -> dict[str, Any] | None:
        """What `write_certificates` wrote, if it did."""
        return self._json("certificates.json", "ask for it again")

    def per_client(self) -> dict[str, Any]:
        """The scores of each client."""
        return self._json("clients.json", "summary.json and resume the run") or {}

    def summary(self) -> dict[str, Any] | None:
        """What the run ended with, or None before its end."""
        return self._json("summary.json", needed=("rounds", "communication", "seconds", "extra"))

    def _json(self, name: str, remedy: str = "resume the run", needed: tuple[str, ...] = ()) -> dict[str, Any] | None:
        path = self.path / name
        try:
            table = parse_json(read_text(path)) if path.exists() else None
            if table is not None and not (isinstance(table, dict) and table.keys() >= set(needed)):
                raise ValueError
        except ValueError:
            raise UsageError(f"{path} is damaged; delete it and {remedy}.") from None
        return table


class TrialDirectory:
    """What is kept of a tuning, in `trials/` of its directory, so that the same command goes on where it was left.

    `manifest.toml` says what is tuned, `scores.json` has the scores of every trial so far, and `part-…/` is the
    checkpoint of the trials that are being trained side by side.
    """

    def __init__(self, path: Path | str, asked: dict[str, Any]) -> None:
        self.path, self.asked = Path(path) / "trials", asked

    def exists(self) -> bool:
        """Whether a tuning was begun here."""
        return (self.path / "manifest.toml").exists()

    def manifest(self) -> dict[str, Any]:
        """What is tuned here, which need not be what is asked for."""
        return read_manifest(self.path / "manifest.toml")

    def begin(self) -> None:
        """Make the directory, unless it is there."""
        if not self.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "manifest.toml", tomli_w.dumps(self.asked))

    def scores(self) -> dict[str, Any]:
        """The scores of the trials so far, by name."""
        path = self.path / "scores.json"
        try:
            found = parse_json(read_text(path)) if path.exists() else {}
            if not isinstance(found, dict):
                raise ValueError
        except ValueError:
            raise UsageError(f"{path} is damaged; delete it and run the command again.") from None
        return found

    def add(self, scores: dict[str, Any]) -> None:
        """Keep the scores of some more trials."""
        write_atomically(self.path / "scores.json", json.dumps(self.scores() | scores, indent=1) + "\n")

    def checkpoint(self, part: str, state: PyTree) -> Checkpoint:
        """The checkpoint of a part, whose server is the state of all its trials; a new one if it does not fit."""
        place = self.path / f"part-{part}"
        try:
            return Checkpoint(place, state, (), 1)
        except UsageError:  # made on another number of devices, or damaged: only the rounds of one part are lost
            shutil.rmtree(place)
            return Checkpoint(place, state, (), 1)

    def drop(self, part: str) -> None:
        """Delete the checkpoint of a part that is done."""
        shutil.rmtree(self.path / f"part-{part}", ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The settings in a manifest file."""
    try:
        table = parse_toml(read_text(path))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); name the directory or manifest of a run."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML ({error}); correct it or name another manifest.") from None
    for part in ("given", "environment"):
        if not isinstance(table.get(part, {}), dict):
            raise UsageError(f"{path} has {part}={table[part]!r} where a table belongs; name a run's manifest.toml.")
    return table


def check_writable(path: Path) -> None:
    """Raise if a directory can be neither made nor written."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "read-only" if there.is_dir() else f"{there} is a file"
        raise UsageError(f"out={str(path)!r} cannot be written ({reason}); choose a directory that can.")
    check_no_links(path)


def check_no_links(path: Path) -> None:
    """Raise if a directory that is to be written holds a link, which may lead to any file, or a pipe or device.

    The directory itself may be a link, since the user named it.
    """
    for place, directories, files in os.walk(path):
        for entry in (Path(place, name) for name in (*directories, *files)):
            mode = entry.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a directory"
                raise UsageError(
                    f"{entry} is {what}, and nothing is written to a directory that holds such; delete it, or choose "
                    "another directory."
                )


def gone(path: Path) -> UsageError:
    """The error for a file that somebody deleted while a run was writing it."""
    return UsageError(
        f"{path} was deleted, cut or replaced while the run was writing it, so it cannot be kept; start it again in "
        "another directory."
    )


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
    """Write bytes at a place of an open file."""
    while raw:
        written = os.pwrite(handle, raw, offset)
        raw, offset = raw[written:], offset + written


def _read_commit(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            return {}
        commit: dict[str, Any] = parse_json(read_text(path))
        found = {"extra": {}, **commit}
        for name, kind in (("round", int), ("metrics_bytes", int), ("schema", str), ("extra", dict)):
            if not isinstance(found[name], kind):
                raise TypeError
        if min(commit["round"], commit["metrics_bytes"]) < 0:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise UsageError(
            f"{path} is not a commit of this library, so the checkpoint cannot be trusted; "
            "start the run again in another directory."
        ) from None
    return commit


def _open_sized(path: Path, size: int, is_new: bool) -> int:
    """The open file; one that is new gets its size, and any other must have it."""
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
