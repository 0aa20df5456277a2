"""Who is there: the server meets nodes as they come, learns which client each of them is, and waits for enough."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from priory.core.errors import UsageError
from priory.deploy.accept import mismatch
from priory.deploy.exchange import Link, Reply, Request
from priory.deploy.journal import Journal
from priory.deploy.roster import Roster

LOOK = 0.5  # seconds between two looks at who is there
PAUSE, LONGEST_PAUSE = 30.0, 3600.0  # seconds until a node that was turned away is asked again; doubles each time


class TooFewReplies(UsageError):
    """Too few clients are there or answer usably; the run can be started again and goes on from where it is."""


@dataclass
class Attendance:
    """The clients that are there.

    Attributes:
        patience: Seconds to wait for clients.
        clients: The client of each node that is there.
    """

    link: Link
    roster: Roster
    journal: Journal
    num_clients: int
    patience: float
    clients: dict[int, int] = field(default_factory=dict)
    _turned_away: dict[int, tuple[float, float]] = field(default_factory=dict)  # node → until when, and for how long

    @property
    def nodes(self) -> dict[int, int]:
        """The node of each client that is there."""
        return {client: node for node, client in self.clients.items()}

    def wait(self, hello: Request, needed: int, wanted: int = 0, among: Mapping[int, bool] | None = None) -> None:
        """Return when as many clients are there as are wanted, or after some time as many as are needed; else raise.

        Args:
            hello: The question which client a node is.
            among: The clients that count, where it is True; all by default.
        """
        until = time.monotonic() + self.patience
        while True:
            self.meet(hello)
            there = sum(among is None or among.get(client, False) for client in self.clients.values())
            late = time.monotonic() > until
            if there >= max(wanted, needed) or (late and there >= needed):
                return
            if late:
                raise TooFewReplies(
                    f"{there} clients are there after {self.patience:g} seconds and {needed} are needed; "
                    "start their nodes, then start the server again."
                )
            time.sleep(LOOK)

    def meet(self, hello: Request) -> None:
        """Ask nodes that are new which client they are, and let go of those that are gone."""
        present, now = self.link.nodes(), time.monotonic()
        for node in [node for node in self.clients if node not in present]:
            self.journal.tell("left", client=self.clients.pop(node), node=str(node))
        new = [
            node for node in present if node not in self.clients and self._turned_away.get(node, (0.0, 0.0))[0] <= now
        ]
        if not new:
            return
        silent = set(new)
        for node, reply in self.link.ask(dict.fromkeys(new, hello), self.patience):
            silent.discard(node)
            self._welcome(node, reply, hello, present)
        for node in silent:
            self._turn_away(node, "It did not say which client it is.")

    def _welcome(self, node: int, reply: Reply, hello: Request, present: list[int]) -> None:
        """Let a node speak for the client that it says it is, or turn it away."""
        try:
            if fault := mismatch(reply, dict(hello.config)):
                raise UsageError(fault.sentence)
            client = reply.config.get("client")
            if type(client) is not int or not 0 <= client < self.num_clients:
                raise UsageError(f"Node {node} says that it is client {str(client)[:40]}, which nobody is.")
            self.roster.bind(client, node, present)
        except UsageError as error:
            self._turn_away(node, str(error))
            return
        for other in [other for other, its in self.clients.items() if its == client and other != node]:
            del self.clients[other]  # the client has a new key, and the node with the old one is still there
            self.journal.tell("left", client=client, node=str(other))
        self.clients[node] = client
        self._turned_away.pop(node, None)
        examples = reply.config.get("examples")
        known = examples if isinstance(examples, int) else None  # a stranger's word, which the journal may not hold
        self.journal.tell("joined", client=client, node=str(node), examples=known)

    def _turn_away(self, node: int, sentence: str) -> None:
        pause = min(2 * self._turned_away.get(node, (0.0, PAUSE / 2))[1], LONGEST_PAUSE)
        self._turned_away[node] = (time.monotonic() + pause, pause)
        self.journal.tell("turned away", node=str(node), sentence=sentence)
