"""What server and clients say to each other, whatever carries it.

A `Link` carries requests to nodes and brings replies back. Flower's grid is one (`deploy.flower`); another keeps all
nodes in this process (`deploy.loopback`). The sender of a reply is who the link says, never what the reply claims.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["hello", "train", "evaluate"]
Value = bool | int | float | str
LONGEST = 300  # characters of a stranger's sentence that are kept
ABOUT = ("kind", "version", "run", "round", "attempt")  # of a reply's config: which request it answers, and by whom


@dataclass(frozen=True)
class Request:
    """What the server asks of one node.

    Attributes:
        kind: Who it is, a round of training, or its scores.
        config: Run, round, seed and versions.
        arrays: What is broadcast, encoded.
    """

    kind: Kind
    config: Mapping[str, Value]
    arrays: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What a node answers.

    Attributes:
        config: Which run and round it answers, and what became of the client's update.
        arrays: What the client sends, encoded.
        metrics: What it reports of its work.
        error: Why there is no answer; empty if there is one.
    """

    config: Mapping[str, Value] = field(default_factory=dict)
    arrays: Mapping[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


class Link(Protocol):
    """The way to the nodes."""

    def nodes(self) -> list[int]:
        """The nodes that are there now."""

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        """Who answered and what, as it comes in, until all have or the time is up."""


def digest_of(request: Request) -> str:
    """A hash of all that decides the answer to a request; not of how often it was asked."""
    config = {name: value for name, value in request.config.items() if name != "attempt"}
    digest = hashlib.sha256(json.dumps([request.kind, config], sort_keys=True).encode())
    for name in sorted(request.arrays):
        digest.update(f"{name}\0{len(request.arrays[name])}\0".encode())
        digest.update(request.arrays[name])
    return digest.hexdigest()


def content_of(reply: Reply) -> Iterator[bytes]:
    """Return the contents of a reply, piece by piece, without the fields that name its request."""
    told = {name: value for name, value in reply.config.items() if name not in ABOUT}
    yield json.dumps([told, dict(reply.metrics)], sort_keys=True).encode()
    for name in sorted(reply.arrays):
        yield f"{name}\0{len(reply.arrays[name])}\0".encode()
        yield reply.arrays[name]


def sentence(text: str) -> str:
    """What a stranger said, on one line of bounded length."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
