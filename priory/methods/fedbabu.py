"""FedBABU: the body is learned together under a random head that nobody trains; the head is learned at the end.

Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, arXiv:2106.06042.

Server keeps   (body, head)   broadcast as they are; the head stays as it was drawn
Client keeps   nothing
Client sends   body_k         after local training under the fixed head, weighted equally (as the authors' code does)

Personalisation is fine-tuning, of everything or of the head alone.
"""

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.checks import at_least, choices, positive
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Predictive, Task, point
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class FedBABU:
    """FedBABU.

    Attributes:
        optimiser: Local solver.
        work: Local work of a round.
        finetune_part: What personalisation trains: everything, or the head.
        finetune_epochs: Passes over a client's data that make its personal model.
        finetune_step_size: Learning rate of those passes.
    """

    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_part: Literal["all", "head"] = static(default="all")
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Oh et al.",
            "FedBABU: Toward Enhanced Representation for Federated Image Classification",
            2022,
            venue="ICLR",
            arxiv="2106.06042",
        ),
        keeps="nothing",
        sends="its body (all layers below the head)",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        choices(self)
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
        head, body = trees.partition(down.weights, task.is_head)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return task.nll(Params(trees.merge(head, params.weights), params.stats), batch, key)

        trained, loss = fit(objective, Params(body, down.stats), data, self.optimiser, self.work, key)
        return client, Message(trained, weight=jnp.float32(1)), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Params], key: Key) -> tuple[Params, Info]:
        del key
        head, body = trees.partition(server.weights, task.is_head)
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=Params(body, server.stats))
        return Params(trees.merge(head, mean.weights), mean.stats), {}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        optimiser = replace(self.optimiser, step_size=self.finetune_step_size)
        work = Work(epochs=self.finetune_epochs, batch_size=self.work.batch_size)
        if self.finetune_part == "all":
            return fit(task.nll, down, data, optimiser, work, key)[0]
        head, body = trees.partition(down.weights, task.is_head)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return task.nll(Params(trees.merge(params.weights, body), params.stats), batch, key)

        tuned, _ = fit(objective, Params(head, down.stats), data, optimiser, work, key)
        return Params(trees.merge(tuned.weights, body), tuned.stats)

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return down

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        return point(task.model.apply(posterior, x)[0])

    def reference(self, task: Task, down: Params, payload: Params) -> Params:
        del payload
        return Params(trees.partition(down.weights, task.is_head)[1], down.stats)
