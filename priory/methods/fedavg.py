"""FedAvg: local training from the global weights, averaged by the server.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
arXiv:1602.05629.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing
Client sends   w_k   its weights after local training, weighted by n_k

Personalisation is fine-tuning from w^t, with a rate of its own that no schedule touches.
"""

from typing import ClassVar

from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.checks import at_least, positive
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Predictive, Task, point
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class FedAvg:
    """FedAvg.

    Attributes:
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "McMahan et al.",
            "Communication-Efficient Learning of Deep Networks from Decentralized Data",
            2017,
            venue="AISTATS",
            arxiv="1602.05629",
        ),
        keeps="nothing",
        sends="its weights",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        self.optimiser.check()
        self.work.check()
        at_least("finetune-epochs", self.finetune_epochs, 0)
        positive("finetune-step-size", self.finetune_step_size)

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
        optimiser = replace(self.optimiser, step_size=self.finetune_step_size)
        work = Work(epochs=self.finetune_epochs, batch_size=self.work.batch_size)
        return fit(task.nll, down, data, optimiser, work, key)[0]

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return down

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        return point(task.model.apply(posterior, x)[0])

    def reference(self, task: Task, down: Params, payload: Params) -> Params:
        del task, payload
        return down
