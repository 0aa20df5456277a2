"""What survives a crash: the checkpoint of server and clients, and the run directory around it.

The records of `priory/records.py` become valid at once when `commit.json` is replaced, atomically. Every file carries a
checksum, or another file has its own: `priory/core/sealed.py` for JSON and the manifest, `commit.json` and
`summary.json` for `metrics.jsonl`. There is no pickle anywhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tomli_w

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import check_writable, write_all, write_atomically
from priory.core.reading import JsonDict, parse_json, parse_toml, read_bytes
from priory.core.sealed import is_as_written, sealed, sealed_lines, unsealed
from priory.records import RecordStore, gone, missing_file

PyTree = Any
CLIENTS, ARCHITECTURES, UNCERTAINTY = "clients.json", "architectures.json", "uncertainty.json"
CERTIFICATES, TRACKED = "certificates.json", "track.json"
REMEDIES = {  # how to get a damaged file again after it was deleted
    CLIENTS: "summary.json and resume the run",
    ARCHITECTURES: "resume the run",
    UNCERTAINTY: "ask for it again",
    CERTIFICATES: "ask for it again",
    TRACKED: "send the run again",
}
METRICS_BYTES, METRICS_SHA256 = "metrics_bytes", "metrics_sha256"  # of what a commit or a summary counts


class Checkpoint:
    """Server and clients of a run on disk, valid as of the round in `commit.json`."""

    def __init__(self, directory: Path, server: PyTree, record: PyTree, num_clients: int) -> None:
        commit = _read_commit(directory / "commit.json")
        for place in (directory / "server", directory / "clients"):
            if commit and (name := missing_file(place)) is not None:
                raise UsageError(f"{place / name} is missing, so the checkpoint is lost; start the run again.")
        self._path = directory / "commit.json"
        self.server = RecordStore(directory / "server", server, 1, is_new=not commit)
        self.clients = RecordStore(directory / "clients", record, num_clients, is_new=not commit)
        self._schema = f"{self.server.schema}-{self.clients.schema}"
        self.round: int = commit.get("round", -1)
        self.metrics_bytes: int = commit.get("metrics_bytes", 0)
        self.extra: JsonDict = commit.get("extra", {})
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
        """Return whether another process has committed since this checkpoint was opened."""
        return bool(_read_commit(self._path).get("round", -1) != self.round)

    def read_server(self) -> PyTree:
        """Return the server of the last commit."""
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

    def commit(
        self,
        server: PyTree,
        completed: int,
        metrics_bytes: int,
        extra: JsonDict,
        metrics_sha256: str | None = None,
    ) -> None:
        """Make everything written so far valid: the state after `completed` rounds, and what else is to be known.

        Args:
            metrics_sha256: Of the first `metrics_bytes` of the metrics.
        """
        self.check_in_place()
        stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], server)
        # Generation + 1: round 0 has a server too, and 0 means never written.
        self.server.write(np.array([0]), stacked, completed + 1, self.round + 1)
        self.server.sync()
        self.clients.sync()
        commit = {"round": completed, "metrics_bytes": metrics_bytes, "schema": self._schema, "extra": extra}
        if metrics_sha256 is not None:
            commit[METRICS_SHA256] = metrics_sha256
        write_atomically(self._path, sealed(commit))
        self.round, self.metrics_bytes = completed, metrics_bytes

    def close(self) -> None:
        """Close the files."""
        self.server.close()
        self.clients.close()


class RunDirectory:
    """The files of a run: `manifest.toml`, `metrics.jsonl`, `summary.json` and `checkpoint/`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._hashed = 0, hashlib.sha256()  # so many bytes of the metrics, so that a round costs its line

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint."""
        return self.path / "checkpoint"

    def check_free(self) -> None:
        """Raise if the directory holds a run already or cannot be written."""
        if (self.path / "manifest.toml").exists():
            raise UsageError(
                f"out={str(self.path)!r} holds a run already, which is never overwritten; "
                f"go on with `priory resume {self.path}`, or choose another directory."
            )
        check_writable(self.path)

    def create(self, manifest: JsonDict) -> None:
        """Make the directory and write the manifest; a directory that holds a run already is left alone."""
        self.check_free()
        with explain_os_errors(f"out={str(self.path)!r} cannot be written", "; choose a directory that can"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "manifest.toml", sealed_lines(tomli_w.dumps(manifest)))

    def manifest(self) -> JsonDict:
        """Return the settings of the run."""
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
        """Return whether there is a checkpoint to go on from."""
        return bool(_read_commit(self.checkpoint / "commit.json"))

    def append_metrics(self, line: JsonDict, at: int) -> int:
        """Write a line at byte `at` of `metrics.jsonl`, cut what follows, and return the new length."""
        self.check_in_place(at)
        raw, digest = json.dumps(line).encode() + b"\n", self._hash(at).copy()
        handle = os.open(self.path / "metrics.jsonl", os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.ftruncate(handle, at)
            write_all(handle, raw, at)
            os.fsync(handle)
        finally:
            os.close(handle)
        digest.update(raw)
        self._hashed = at + len(raw), digest
        return at + len(raw)

    def check_in_place(self, metrics_bytes: int) -> None:
        """Raise if somebody deleted the directory, or deleted or cut its files, since so many bytes were written."""
        if not self.path.is_dir():
            raise gone(self.path)
        path = self.path / "metrics.jsonl"
        if metrics_bytes and (not path.exists() or path.stat().st_size < metrics_bytes):
            raise gone(path)

    def metrics_sha256(self, length: int) -> str:
        """Return the SHA-256 of the first `length` bytes of the metrics."""
        return str(self._hash(length).hexdigest())

    def cut_metrics(self, length: int) -> None:
        """Drop the lines that were written after the last commit."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            os.truncate(path, length)

    def metrics(self, length: int | None = None) -> list[JsonDict]:
        """Return the lines so far, or in the first `length` bytes, without one that a crash or a full disk cut short.

        Raises where the bytes that a commit or a summary counts are no longer what they were.
        """
        path = self.path / "metrics.jsonl"
        counted = [_read_commit(self.checkpoint / "commit.json"), self._results() or {}]  # before the lines they count
        raw = read_bytes(path) if path.exists() else b""
        for needed in (length or 0, *(table.get(METRICS_BYTES, 0) for table in counted)):
            if len(raw) < needed:
                raise UsageError(
                    f"{path} has {len(raw)} bytes where the last commit counts {needed}, so it was cut; "
                    "bring it back, or run the manifest again in another directory."
                )
        for table in counted:
            if METRICS_SHA256 in table:
                covered = raw[: table[METRICS_BYTES]]
                if hashlib.sha256(covered).hexdigest() != table[METRICS_SHA256]:
                    raise UsageError(
                        f"{path} does not match its checksum, so it was damaged; "
                        "bring it back, or run the manifest again in another directory."
                    )
        if length is None and METRICS_BYTES in counted[1]:
            length = counted[1][METRICS_BYTES]  # a finished run has no more lines
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

    def write_summary(self, summary: JsonDict, per_client: JsonDict) -> None:
        """Write `clients.json`, then `summary.json`: a run with a summary is finished.

        The summary has the checksum of all metrics, whose last line is part of no commit. Raises where the
        metrics are not those that this object wrote.
        """
        path = self.path / "metrics.jsonl"
        length = path.stat().st_size if path.exists() else 0
        written, digest = self._hashed
        if written and (written != length or digest.hexdigest() != _sha256_of(path)):
            raise gone(path)
        counted = {METRICS_BYTES: length, METRICS_SHA256: self.metrics_sha256(length)}
        self.write(CLIENTS, per_client)
        self.write("summary.json", {**summary, **counted}, indent=2)

    def committed(self) -> JsonDict:
        """Return what the last commit contains besides the states; empty before the first."""
        return _read_commit(self.checkpoint / "commit.json").get("extra", {})

    def write(self, name: str, table: JsonDict, indent: int | None = None) -> None:
        """Write one of the JSON files that are not part of a commit."""
        write_atomically(self.path / name, sealed(table, indent))

    def read(self, name: str) -> JsonDict | None:
        """Return the contents of such a file; None where there is none."""
        return _read_json(self.path / name, REMEDIES[name])

    def per_client(self) -> JsonDict:
        """Return the scores of each client."""
        return self.read(CLIENTS) or {}

    def summary(self) -> JsonDict | None:
        """Return the results of the run; None before its end."""
        table = self._results()
        return table and {name: value for name, value in table.items() if name not in (METRICS_BYTES, METRICS_SHA256)}

    def _results(self) -> JsonDict | None:
        """Return the contents of `summary.json`."""
        path = self.path / "summary.json"
        found = _read_json(path, "resume the run", needed=("rounds", "communication", "seconds", "extra"))
        if found is not None and not _counts_metrics({METRICS_BYTES: 0, **found}):
            raise UsageError(f"{path} is damaged; delete it and resume the run.")
        return found

    def _hash(self, length: int) -> Any:
        """Return the hash of the first `length` bytes of the metrics; read them only if another object wrote them."""
        there, digest = self._hashed
        if there != length:
            path = self.path / "metrics.jsonl"
            digest = hashlib.sha256(path.read_bytes()[:length] if length else b"")
            self._hashed = length, digest
        return digest


class TrialDirectory:
    """The files of a tuning, in `trials/` of its directory, from which the same command goes on.

    `manifest.toml` says what is tuned, `scores.json` has the scores of every trial so far, and `part-…/` is the
    checkpoint of the trials that are being trained side by side.
    """

    def __init__(self, path: Path | str, asked: JsonDict) -> None:
        self.path, self.asked = Path(path) / "trials", asked

    def exists(self) -> bool:
        """Return whether a tuning was begun here."""
        return (self.path / "manifest.toml").exists()

    def manifest(self) -> JsonDict:
        """Return the settings of the tuning in this directory, which may differ from those asked for."""
        return read_manifest(self.path / "manifest.toml")

    def begin(self) -> None:
        """Make the directory, unless it is there."""
        if not self.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "manifest.toml", sealed_lines(tomli_w.dumps(self.asked)))

    def scores(self) -> JsonDict:
        """Return the scores of the trials so far, by name."""
        return _read_json(self.path / "scores.json", "run the command again") or {}

    def add(self, scores: JsonDict) -> None:
        """Keep the scores of some more trials."""
        write_atomically(self.path / "scores.json", sealed(self.scores() | scores, indent=1))

    def checkpoint(self, part: str, state: PyTree) -> Checkpoint:
        """Return the checkpoint of a part, whose server is the state of its trials; begin one if it does not fit."""
        place = self.path / f"part-{part}"
        try:
            return Checkpoint(place, state, (), 1)
        except UsageError:  # made on another number of devices, or damaged: only the rounds of one part are lost
            shutil.rmtree(place)
            return Checkpoint(place, state, (), 1)

    def drop(self, part: str) -> None:
        """Delete the checkpoint of a part that is done."""
        shutil.rmtree(self.path / f"part-{part}", ignore_errors=True)


def read_manifest(path: Path, may_be_edited: bool = False) -> JsonDict:
    """Return the settings in a manifest file.

    Args:
        may_be_edited: Whether the file may differ from what Priory wrote, which its last line has the checksum of.
    """
    with explain_os_errors(f"{path} cannot be read", "; name the directory or manifest of a run"):
        raw = read_bytes(path)
    try:
        table = parse_toml(raw.decode())
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML ({error}); correct it or name another manifest.") from None
    for part in ("given", "environment"):
        if not isinstance(table.get(part, {}), dict):
            raise UsageError(f"{path} has {part}={table[part]!r} where a table belongs; name a run's manifest.toml.")
    if not may_be_edited and not is_as_written(raw):
        raise UsageError(
            f"{path} does not match the checksum in its last line, so it was damaged or edited; bring the original "
            "back, or delete its last line if you edited it on purpose, or run it in another directory: "
            f"priory run {path}."
        )
    return table


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path, remedy: str, needed: tuple[str, ...] = ()) -> JsonDict | None:
    """Return the table in a JSON file; None where there is no file."""
    try:
        table = unsealed(read_bytes(path)) if path.exists() else None
        if table is not None and not (isinstance(table, dict) and table.keys() >= set(needed)):
            raise ValueError
    except ValueError:
        raise UsageError(f"{path} is damaged; delete it and {remedy}.") from None
    return table


def _read_commit(path: Path) -> JsonDict:
    try:
        if not path.exists():
            return {}
        commit: JsonDict = unsealed(read_bytes(path))
        found = {"extra": {}, **commit}
        for name, kind in (("round", int), ("schema", str), ("extra", dict)):
            if not isinstance(found[name], kind):
                raise TypeError
        if commit["round"] < 0 or not _counts_metrics(commit):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise UsageError(
            f"{path} is not a commit of this library, so the checkpoint cannot be trusted; "
            "start the run again in another directory."
        ) from None
    return commit


def _counts_metrics(table: JsonDict) -> bool:
    """Return whether a table has a number of bytes of metrics, and their checksum or none."""
    length, digest = table.get(METRICS_BYTES), table.get(METRICS_SHA256, "")
    return isinstance(length, int) and length >= 0 and isinstance(digest, str)
