"""A federation in one process: the bytes that would travel do, between a server and clients that share nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from priory.deploy.client import Client
from priory.deploy.exchange import Reply, Request


@dataclass
class Loopback:
    """A link to clients in this process, by the number of their node."""

    clients: dict[int, Client] = field(default_factory=dict)

    def nodes(self) -> list[int]:
        """All of them."""
        return list(self.clients)

    def ask(self, requests: Mapping[int, Request], timeout: float) -> Iterator[tuple[int, Reply]]:
        """What each answers, one after another."""
        del timeout
        for node, request in requests.items():
            if node in self.clients:
                yield node, self.clients[node].answer(request)
