"""LG-FedAvg: every client has a representation of its own, under a head that all share.

Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, arXiv:2001.01523.

Server keeps   head     the shared layers, and the seed of the first network; broadcast as they are
Client keeps   body_k   its own layers below, with the batch-norm statistics in them
Client sends   head_k   after head and body were trained together, weighted by n_k

The counterpart of FedRep, which shares the body. The head is small, so little travels; there is no global model, for a
head without a body predicts nothing.

Bodies begin alike, or one head could not serve them: all clients draw theirs from the seed, which is four bytes where a
body is most of a network. The authors' code does the same by copying, from a network that FedAvg has trained; here
training begins at once. It also averages heads equally (`--weighting uniform`).
"""

from typing import Any, ClassVar

import jax
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.about import About, Paper
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Shared:
    """The state of the server.

    Attributes:
        weights: The head.
        stats: Statistics of a batch norm in the head.
        seed: Of the network that all begin with.
    """

    weights: Any
    stats: Any
    seed: Array


@struct
class LGFedAvg(Method[Shared, Shared, Params, Params, Params]):
    """LG-FedAvg.

    Attributes:
        optimiser: Local solver of head and body together.
        work: Local work of a round.
    """

    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(
        paper=Paper(
            "Liang et al.",
            "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
            2020,
            arxiv="2001.01523",
        ),
        keeps="its body (all layers below the head)",
        sends="its head (the last layer)",
    )
    linear: ClassVar[bool] = True

    def init_server(self, task: Task, key: Key) -> Shared:
        seed = jax.random.bits(key, (), "uint32")
        head = _apart(task, task.init(jax.random.key(seed)))[0]
        return Shared(head.weights, head.stats, seed)

    def init_client(self, task: Task, down: Shared, key: Key) -> Params:
        del key
        return _apart(task, task.init(jax.random.key(down.seed)))[1]

    def client_update(
        self, task: Task, down: Shared, client: Params, data: Shard, key: Key
    ) -> tuple[Params, Message[Params], Info]:
        # Algorithm 1, head and body together
        trained, loss = fit(task.nll, _whole(down, client), data, self.optimiser, self.work, key)
        head, body = _apart(task, trained)
        return body, Message(head, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Shared, messages: Message[Params], key: Key) -> tuple[Shared, Info]:
        del task, key
        before = Params(server.weights, server.stats)
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=before)
        return Shared(mean.weights, mean.stats, server.seed), {}

    def personalise(self, task: Task, down: Shared, client: Params, data: Shard, key: Key) -> Params:
        del task, data, key
        return _whole(down, client)

    def reference(self, task: Task, down: Shared, payload: Params) -> Params:
        del task, payload
        return Params(down.weights, down.stats)


def _apart(task: Task, network: Params) -> tuple[Params, Params]:
    """Return head and body of a network, each with the statistics in it."""

    def in_head(path: str) -> bool:
        # Linen puts the name of the collection before that of the layer: batch_stats/BatchNorm_0/mean.
        return task.is_head(path) or task.is_head(path.partition("/")[2])

    head, body = trees.partition(network.weights, task.is_head)
    head_stats, body_stats = trees.partition(network.stats, in_head)
    return Params(head, head_stats), Params(body, body_stats)


def _whole(head: Shared, body: Params) -> Params:
    """Return the network of which these are head and body."""
    return Params(trees.merge(head.weights, body.weights), trees.merge(head.stats, body.stats))
