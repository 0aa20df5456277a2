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
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import check_fields
from priory.fed.local import Optimiser, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class FedBABU(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
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
        check_fields(self)
        check_finetune(self)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        head, body = trees.partition(down.weights, task.is_head)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return task.nll(Params(trees.merge(head, params.weights), params.stats), batch, key)

        # Algorithm 1, local update of the body
        trained, loss = fit(objective, Params(body, down.stats), data, self.optimiser, self.work, key)
        return client, Message(trained, weight=jnp.float32(1)), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Params], key: Key) -> tuple[Params, Info]:
        del key
        head, body = trees.partition(server.weights, task.is_head)  # Algorithm 1, the server averages bodies alone
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=Params(body, server.stats))
        return Params(trees.merge(head, mean.weights), mean.stats), {}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        if self.finetune_part == "all":
            return finetune(self, task.nll, down, data, key)
        head, body = trees.partition(down.weights, task.is_head)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return task.nll(Params(trees.merge(params.weights, body), params.stats), batch, key)

        tuned = finetune(self, objective, Params(head, down.stats), data, key)
        return Params(trees.merge(tuned.weights, body), tuned.stats)

    def reference(self, task: Task, down: Params, payload: Params) -> Params:
        del payload
        return Params(trees.partition(down.weights, task.is_head)[1], down.stats)
