"""Skeleton: copy this file to `priory/methods/NAME.py`, change what differs, and register it.

Author et al., Title, Venue 2000, arXiv:0000.00000.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   v_k   a running mean of its own weights
Client sends   w_k   its weights after local training, weighted by n_k

Differs from the paper: say here what and why.
"""

from typing import ClassVar

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Skeleton(Method[Params, Params, Params | tuple[()], Params, Params], SharedModel[Params, Params]):
    """A method that works: FedAvg whose clients keep an exponential mean of what they sent.

    Attributes:
        kappa: κ in eq. (7), weight of the newest weights in the running mean.
        keeps: Whether clients keep anything at all: it sets the shape of their state, so it is static.
        optimiser: Local solver.
        work: Local work of a round.
    """

    kappa: float = 0.5
    keeps: bool = static(default=True)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(  # a row of `priory methods`
        paper=Paper("Author et al.", "Title", 2000, venue="Venue", arxiv="0000.00000"),  # or "baseline"
        keeps="a running mean of its weights",
        sends="its weights",
    )
    linear: ClassVar[bool] = True  # `aggregate` needs only the weighted mean (law 3)

    def check(self) -> None:
        """Raise on a bad value: here and not in `__post_init__`, which JAX runs again on tracers."""
        at_least("kappa", self.kappa, 0)
        check_fields(self)

    def init_client(self, task: Task, down: Params, key: Key) -> Params | tuple[()]:
        del task, key
        return down if self.keeps else ()

    def client_update(
        self, task: Task, down: Params, client: Params | tuple[()], data: Shard, key: Key
    ) -> tuple[Params | tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        if isinstance(client, Params):
            drift = trees.sub(params.weights, client.weights)
            client = Params(trees.axpy(self.kappa, drift, client.weights), params.stats)  # eq. (7)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def personalise(self, task: Task, down: Params, client: Params | tuple[()], data: Shard, key: Key) -> Params:
        del task, data, key
        return client if isinstance(client, Params) else down
