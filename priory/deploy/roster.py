"""Who is who: which node speaks for which client.

A node says at first contact which client it is (`partition-id` of its node-config), and from then on the server knows
it by the number that Flower gives to its key. Where nodes prove who they are (`authenticated`), a client belongs to the
node that was first to claim it, for as long as the run lasts; else it passes on to another node once that is gone.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from priory.core.errors import UsageError
from priory.store import write_atomically

NODES = "nodes.json"


@dataclass
class Roster:
    """The nodes of the clients, kept in `nodes.json` of the run directory."""

    path: Path
    authenticated: bool
    bound: dict[int, int] = field(default_factory=dict)  # client → node

    @classmethod
    def open(cls, directory: Path, authenticated: bool) -> "Roster":
        """What an earlier server of the same run has written down."""
        path = directory / NODES
        try:
            table = json.loads(path.read_text()) if path.exists() else {}
            bound = {int(client): int(node) for client, node in table.items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise UsageError(f"{path} is damaged; delete it, and nodes are bound to clients anew.") from None
        return cls(path, authenticated, bound)

    def bind(self, client: int, node: int, present: Collection[int]) -> None:
        """Let a node speak for a client; raises where another one does."""
        other = self.bound.get(client, node)
        if other != node and (self.authenticated or other in present):
            remedy = f"give it another partition-id, or take client {client} out of {self.path.name}"
            raise UsageError(f"Node {node} says that it is client {client}, which is bound to node {other}; {remedy}.")
        if self.bound.get(client) != node:
            self.bound[client] = node
            table = {str(client): str(node) for client, node in sorted(self.bound.items())}
            write_atomically(self.path, json.dumps(table, indent=1) + "\n")
