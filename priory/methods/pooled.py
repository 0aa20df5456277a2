"""Pooled: one model on the data of all clients in one place, which a federation may not have.

The "centralised" rows of Kim and Hospedales, FedHB, tables 3 and 4: minibatches come from the pooled data of the
round's cohort, so a round costs as many steps as a federated round of the same cohort.

Server keeps   w^t   the weights
Client keeps   nothing
Client sends   its data: the runner hands the cohort's examples to one `client_update` (`pools`)
"""

from typing import ClassVar

from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.about import About
from priory.fed.capabilities import SharedModel
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Pooled(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
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

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        del task, client, data, key
        return down
