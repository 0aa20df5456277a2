"""Who is who: which node speaks for which client.

A node says at first contact which client it is (`partition-id` of its node-config), and from then on the server knows
it by the number that Flower gives to its key. Where nodes prove who they are (`authenticated`), a client belongs to the
node that was first to claim it, for as long as the run lasts, until its operator gives it to another key (`rebind`);
else it passes on to another node once that is gone.

    OUT/nodes.json    the node of each client, as text: the numbers exceed what JSON readers keep exactly
    OUT/nodes.lock    held while it is read and changed, by the server and by `priory flower keys`
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from priory.core.errors import UsageError
from priory.core.files import locked, write_atomically
from priory.core.reading import parse_json, read_text

NODES, LOCK = "nodes.json", "nodes.lock"


@dataclass
class Roster:
    """The nodes of the clients, kept in `nodes.json` of the run directory."""

    path: Path
    authenticated: bool
    bound: dict[int, int] = field(default_factory=dict)  # client → node

    @classmethod
    def open(cls, directory: Path, authenticated: bool) -> "Roster":
        """Read the roster of a run; it is empty before the first node came."""
        roster = cls(directory / NODES, authenticated)
        roster._read()
        return roster

    def bind(self, client: int, node: int, present: Collection[int]) -> None:
        """Let a node speak for a client; raise where another one does."""
        with self._changed():
            other = self.bound.get(client, node)
            if other != node and (self.authenticated or other in present):
                remedy = f"give it another partition-id, or take client {client} out of {self.path.name}"
                raise UsageError(
                    f"Node {node} says that it is client {client}, which is bound to node {other}; {remedy}."
                )
            self.bound[client] = node

    def rebind(self, client: int, node: int) -> None:
        """Give a client to a node whichever had it before; a running server follows at the next contact."""
        with self._changed():
            self.bound[client] = node

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Hold the file, read what another process has changed, and write what is changed here unless it fails."""
        with locked(self.path.with_name(LOCK)):
            self._read()
            before = dict(self.bound)
            yield
            if self.bound != before:
                table = {str(client): str(node) for client, node in sorted(self.bound.items())}
                write_atomically(self.path, json.dumps(table, indent=1) + "\n")

    def _read(self) -> None:
        """Take over what the file says; without a file nothing changes."""
        try:
            if self.path.exists():
                self.bound = {int(client): int(node) for client, node in parse_json(read_text(self.path)).items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise UsageError(
                f"{self.path} is damaged; delete it, and nodes are bound to clients as they come."
            ) from None
