"""The log of a client: one line for each request, chained by hashes, for the owner of its rows.

    STATE/client-3/log.jsonl    appended to and never rewritten; it outlives `forget`

A line ends with `previous`, the hash of the line before it (of the first line: `start_of` the client), and `hash`, the
SHA-256 of everything before it in the line. So a line that was changed, removed, inserted or moved does not fit. The
hash of the last line is the head. The chain alone cannot show that lines were cut off at the end, or that the whole
file was written again by someone who may write it; a head that was noted elsewhere shows both.

A line is on the disk before its answer leaves, and without it no answer leaves. So an answer that left is in the log,
while an answer in the log may not have arrived. A line that a crash cut short is replaced by one that says so.

The log contains no data and no secrets: of an answer it has size, norm and hash, and of a refusal the sentence that
was sent.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import locked, private_directory, sync_directory, write_all
from priory.core.reading import JsonDict
from priory.deploy import wire
from priory.deploy.budget import Budget
from priory.deploy.exchange import ABOUT, Reply, Request, content_of, sentence
from priory.deploy.journal import LOG, now
from priory.engine.manifest import version_of

NAME = "log.jsonl"
BLOCK = 4096  # bytes; more than most lines
LINE = re.compile(rb'(\{.*, "previous": "([0-9a-f]{64})"), "hash": "([0-9a-f]{64})"\}\n')
HASH = re.compile(r"[0-9a-f]{64}")
WEIGHT = "weight"  # of a message; often the number of rows, which would dwarf the norm of what was learned
REPAIR = "repair"
Outcome = Literal["answered", "repeated", "refused"]


@dataclass(frozen=True)
class Verdict:
    """Whether a log is whole.

    Attributes:
        entries: Number of lines that fit.
        head: Hash of the last of them.
        repairs: Line numbers at which a line that a crash cut short was replaced.
        torn: Bytes after the last line, which the next request repairs.
        fault: The first line that does not fit, in a sentence; empty if the chain holds.
        has_head: Whether the head that was asked for is in the chain.
    """

    entries: int
    head: str
    repairs: tuple[int, ...] = ()
    torn: int = 0
    fault: str = ""
    has_head: bool = True

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.fault and self.has_head


@dataclass(frozen=True)
class NodeLog:
    """The log of one client.

    Attributes:
        place: Directory of the client, of all its runs.
        client: Its number.
    """

    place: Path
    client: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.place / NAME

    def admit(self, request: Request, reply: Reply, outcome: Outcome, app: str | None, charter: str | None) -> Reply:
        """Return the reply that may leave: this one once the log has it, otherwise a refusal.

        Args:
            app: SHA-256 of the app's files, where it is known.
            charter: Digest of the app's charter, where it is known.
        """
        try:
            self.append(entry_of(request, reply, outcome, app, charter, self._epsilon()))
        except UsageError as error:
            LOG.error("%s", error)
            if not reply.error:
                about = {name: value for name, value in reply.config.items() if name in ABOUT}
                return Reply(about, error=sentence(str(error)))
        return reply

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and return once it is on the disk; raise if it cannot be written."""
        with self._opened() as handle:
            size = os.fstat(handle).st_size
            last, end = _last_line(handle, size)
            entries = [entry]
            if end < size:
                cut = os.pread(handle, size - end, end)
                LOG.warning("%s ended in a torn line of %d bytes, which is replaced", self.path, len(cut))
                entries.insert(0, _repair_of(cut))
            raw, previous = b"", _hash_of(last) if last else start_of(self.client)
            for one in entries:
                line = _chained(one, previous)
                raw, previous = raw + line, _hash_of(line)
            write_all(handle, raw, end)  # over a torn line, so that a crash here leaves a torn line again
            os.ftruncate(handle, end + len(raw))
            os.fsync(handle)
            if not size:
                sync_directory(self.place)

    def verify(self, head: str | None = None) -> Verdict:
        """Return whether every line follows the one before it.

        Args:
            head: A hash that was noted before and should be in the chain.
        """
        with self._read() as lines:
            return verdict_on(lines, self.client, head)

    def entries(self, last: int | None = None) -> list[JsonDict]:
        """Return the last entries, or all of them; lines that are damaged are left out."""
        with self._read() as lines:
            found = deque((entry for line in lines if (entry := _parsed(line))), last)
        return list(found)

    def _epsilon(self) -> float | None:
        """Return ε that the client has spent so far; None without privacy, or if the budget cannot be read."""
        try:
            return Budget(self.place, self.client).spent()
        except UsageError:
            return None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Hold the file for writing."""
        remedy = ", so nothing is answered; make room for it, or correct its permissions"
        with explain_os_errors(f"{self.path} cannot be written", remedy):
            private_directory(self.place)
            with locked(self.path) as handle:
                yield handle

    @contextmanager
    def _read(self) -> Iterator[Iterable[bytes]]:
        """Hold the file while it is read, so that no line is half written."""
        remedy = "; name the state directory of a node, which has a log of every client that was asked anything"
        with explain_os_errors(f"{self.path} cannot be read", remedy), self.path.open("rb") as lines:
            fcntl.flock(lines, fcntl.LOCK_SH)
            yield lines


def entry_of(
    request: Request,
    reply: Reply,
    outcome: Outcome,
    app: str | None,
    charter: str | None,
    epsilon: float | None,
) -> JsonDict:
    """Return the entry of a request and its answer."""
    run, t = request.config.get("run"), request.config.get("round")
    return {
        "time": now(),
        "kind": sentence(str(request.kind)),
        "run": None if run is None else sentence(str(run)),
        "round": t if type(t) is int else None,
        "outcome": outcome,
        "reason": reply.error or None,
        "sent": None if reply.error else _sent(reply),
        "epsilon": None if epsilon is None else _number(epsilon),
        "app": app,
        "charter": charter,
        "version": version_of("priory"),
    }


def start_of(client: int) -> str:
    """Return what the first line of a client's log names as the hash before it."""
    return hashlib.sha256(f"priory log of client {client}".encode()).hexdigest()


def verdict_on(lines: Iterable[bytes], client: int, head: str | None = None) -> Verdict:
    """Return whether lines, with their ends, are a client's log."""
    verdict = Verdict(0, start_of(client), has_head=head in (None, start_of(client)))
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return dataclasses.replace(verdict, torn=len(line))
        match = LINE.fullmatch(line)
        if match is None or hashlib.sha256(match[1]).hexdigest() != match[3].decode():
            return dataclasses.replace(verdict, fault=f"Line {number} was changed: its hash does not fit it.")
        if match[2].decode() != verdict.head:
            before = f"line {number - 1}" if number > 1 else f"the start of the log of client {client}"
            fault = f"Line {number} does not follow {before}: lines were removed, inserted or moved."
            return dataclasses.replace(verdict, fault=fault)
        repairs = (*verdict.repairs, number) if line.startswith(_REPAIRED) else verdict.repairs
        has_head = verdict.has_head or head == match[3].decode()
        verdict = Verdict(number, match[3].decode(), repairs, has_head=has_head)
    return verdict


def _parsed(line: bytes) -> JsonDict:
    """Return the entry in a line; an empty one if there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sent(reply: Reply) -> JsonDict:
    """Return size, norm and SHA-256 of what leaves with a reply."""
    digest, size, squares = hashlib.sha256(), 0, 0.0
    for piece in content_of(reply):
        digest.update(piece)
        size += len(piece)
    for name, raw in reply.arrays.items():
        numbers = wire.from_bytes(name, raw).ravel()
        if numbers.dtype.kind == "f" and name != WEIGHT:
            squares += float(np.einsum("i,i->", numbers, numbers, dtype=np.float64))  # makes no copy
    norm = float(f"{math.sqrt(squares):.6g}")  # the last digits depend on the order of a sum
    return {"bytes": size, "norm": _number(norm), "sha256": digest.hexdigest()}


def _repair_of(cut: bytes) -> JsonDict:
    """Return the entry that replaces a line that a crash cut short."""
    return {"kind": REPAIR, "time": now(), "bytes": len(cut), "sha256": hashlib.sha256(cut).hexdigest()}


_REPAIRED = json.dumps({"kind": REPAIR})[:-1].encode() + b","


def _chained(entry: Mapping[str, Any], previous: str) -> bytes:
    """Return the line of an entry, with the hash before it and its own at the end."""
    body = json.dumps({**entry, "previous": previous}, allow_nan=False)[:-1].encode()
    return body + f', "hash": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def _hash_of(line: bytes) -> str:
    """Return the hash of a line; of a line that is damaged, the SHA-256 of its bytes, which verification reports."""
    match = LINE.fullmatch(line)
    return hashlib.sha256(line).hexdigest() if match is None else match[3].decode()


def _last_line(handle: int, size: int) -> tuple[bytes, int]:
    """Return the last whole line of a file and where it ends, without reading what comes before."""
    tail, start = b"", size
    while tail.count(b"\n") < 2 and start > 0:
        step = min(BLOCK, start)
        start -= step
        tail = os.pread(handle, step, start) + tail
    whole, newline, torn = tail.rpartition(b"\n")
    return (whole.rpartition(b"\n")[2] + newline, size - len(torn)) if newline else (b"", 0)


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)
