"""FedRep: a shared representation, and a head that never leaves its client.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021, arXiv:2102.07078.

Server keeps   body     the representation; broadcast as it is
Client keeps   head_k   its own last layer
Client sends   body_k   after its head was fitted under the old body, weighted equally

A round fits the head with the body fixed, then the body with the new head fixed. Personalisation fits the head once
more under the final body. There is no global model: a body without a head predicts nothing.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class FedRep(Method[Params, Params, Any, Params, Params]):
    """FedRep.

    Attributes:
        optimiser: Local solver of head and body.
        work: Local work on the body in a round.
        head_epochs: Passes that fit the head, in a round and when a client is personalised.
        finetune_step_size: Learning rate of the head when a client is personalised.
    """

    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    head_epochs: int = static(default=10)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Collins et al.",
            "Exploiting Shared Representations for Personalized Federated Learning",
            2021,
            venue="ICML",
            arxiv="2102.07078",
        ),
        keeps="its head (the last layer)",
        sends="its body (all layers below the head)",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        check_fields(self)
        at_least("head-epochs", self.head_epochs, 0)
        positive("finetune-step-size", self.finetune_step_size)

    def init_server(self, task: Task, key: Key) -> Params:
        drawn = task.init(key)
        return Params(trees.partition(drawn.weights, task.is_head)[1], drawn.stats)

    def init_client(self, task: Task, down: Params, key: Key) -> Any:
        del down
        return trees.partition(task.init(key).weights, task.is_head)[0]

    def client_update(
        self, task: Task, down: Params, client: Any, data: Shard, key: Key
    ) -> tuple[Any, Message[Params], Info]:
        key_head, key_body = jax.random.split(key)
        # Algorithm 1, client update of the head
        head = self._fit_head(task, down, client, data, self.optimiser, key_head)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return task.nll(Params(trees.merge(head, params.weights), params.stats), batch, key)

        # Algorithm 1, client update of the representation
        body, loss = fit(objective, down, data, self.optimiser, self.work, key_body)
        return head, Message(body, weight=jnp.float32(1)), {"loss": loss}

    def personalise(self, task: Task, down: Params, client: Any, data: Shard, key: Key) -> Params:
        optimiser = replace(self.optimiser, step_size=self.finetune_step_size)
        head = self._fit_head(task, down, client, data, optimiser, key)
        return Params(trees.merge(head, down.weights), down.stats)

    def _fit_head(self, task: Task, down: Params, head: Any, data: Shard, optimiser: Optimiser, key: Key) -> Any:
        """Return the head after `head_epochs` passes under the broadcast body, whose statistics stay as they are."""

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            nll, _ = task.nll(Params(trees.merge(params.weights, down.weights), down.stats), batch, key)
            return nll, params.stats

        work = Work(epochs=self.head_epochs, batch_size=self.work.batch_size)
        return fit(objective, Params(head), data, optimiser, work, key)[0].weights
