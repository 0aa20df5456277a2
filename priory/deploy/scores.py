"""What clients say of their models: sums over their own held-out rows, made into scores as the simulator makes them.

The server takes their word for it. Under differential privacy they say nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from priory import metrics
from priory.core import trees
from priory.core.errors import UsageError
from priory.deploy import wire
from priory.deploy.accept import mismatch
from priory.deploy.charter import Charter
from priory.deploy.client import tallies_like
from priory.deploy.exchange import Reply
from priory.deploy.journal import Journal
from priory.evaluate import ClientTallies
from priory.fed import privacy
from priory.metrics import RegressionScores, Scores


@dataclass(frozen=True)
class Scored:
    """Scores of the clients that told theirs; None where nobody did.

    Attributes:
        clients: Who they are.
        personal: Of their own models.
        population: Of the global model, if the method has one.
    """

    clients: tuple[int, ...] = ()
    personal: Scores | RegressionScores | None = None
    population: Scores | RegressionScores | None = None

    def to_json(self) -> dict[str, Any]:
        """The scores as metrics and summary hold them."""
        return {name: None if part is None else part.to_json() for name, part in self._parts().items()}

    def per_client(self) -> dict[str, Any]:
        """The scores of each client, as clients.json holds them."""
        return {
            name: {"client": list(map(str, self.clients))}
            | {k: [metrics.finite_or_none(float(v)) for v in vs] for k, vs in part.per_client.items()}
            for name, part in self._parts().items()
            if part is not None
        }

    def _parts(self) -> dict[str, Scores | RegressionScores | None]:
        return {"personal": self.personal, "global": self.population}


def scored(
    charter: Charter,
    replies: Iterable[tuple[int, Reply]],
    asked: Mapping[int, int],
    config: dict[str, Any],
    journal: Journal,
) -> Scored:
    """The scores of those whose replies are fit; why others are not is in the journal.

    Args:
        asked: The client of each node that was asked.
        config: What it was asked.
    """
    like, found = tallies_like(charter), {}
    for node, reply in replies:
        client = asked.get(node, -1)
        try:
            if client < 0 or client in found:
                raise UsageError("Nothing was asked of it, or it has answered.")
            if fault := mismatch(reply, config):
                raise UsageError(fault.sentence)
            if not reply.arrays and privacy.is_private(charter.channel):
                continue  # it has scored its model for itself
            sums = wire.decode(reply.arrays, like)
            if not bool(trees.all_finite(sums)):
                raise UsageError("Its sums are not finite.")
            found[client] = sums
        except UsageError as error:
            journal.tell("unscored", client=client, sentence=str(error))
    if not found:
        return Scored()
    clients = tuple(sorted(found))
    total: ClientTallies = jax.tree.map(lambda *leaves: np.stack(leaves), *(found[client] for client in clients))
    personal, population = (
        None if part is None else metrics.summarise(part) for part in (total.personal, total.population)
    )
    return Scored(clients, personal, population)
