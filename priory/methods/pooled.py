"""Pooled: one model on the data of all clients in one place, which a federation may not have.

The "centralised" rows of Kim and Hospedales, FedHB, tables 3 and 4: minibatches come from the pooled data of the
round's cohort, so a round costs as many steps as a federated round of the same cohort.

Server keeps   w^t   the weights
Client keeps   nothing
Client sends   its data: the runner hands the cohort's examples to one `client_update` (`pools`)
"""

from typing import ClassVar

from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.about import About
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Predictive, Task, point
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Pooled:
    """Centralised training, the number everyone wants beside a federation.

    Attributes:
        optimiser: Solver; its state starts anew each round.
        work: Passes over the cohort's pooled data in a round.
    """

    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(paper="baseline", keeps="nothing", sends="its training data")
    linear: ClassVar[bool] = True
    pools: ClassVar[bool] = True  # the runner gives the whole cohort's data to one update

    def check(self) -> None:
        self.optimiser.check()
        self.work.check()

    def init(self, task: Task, key: Key) -> Params:
        return task.init(key)

    def broadcast(self, server: Params) -> Params:
        return server

    def enrol(self, task: Task, down: Params, key: Key) -> tuple[()]:
        del task, down, key
        return ()

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Params], key: Key) -> tuple[Params, Info]:
        del task, key
        return trees.weighted_mean(messages.payload, messages.weight, otherwise=server), {}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        del task, client, data, key
        return down

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return down

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        return point(task.model.apply(posterior, x)[0])

    def reference(self, task: Task, down: Params, payload: Params) -> Params:
        del task, payload
        return down
