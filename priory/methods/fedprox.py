"""FedProx: federated averaging with a pull towards the global weights.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv:1812.06127.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing
Client sends   w_k   its weights after local training, weighted by n_k

Differs from the paper: clients are drawn uniformly and weighted by n_k; Algorithm 2 draws them with probability n_k/n
and averages plainly.
"""

from typing import Any, ClassVar

from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.checks import at_least, positive
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Predictive, Task, point
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class FedProx:
    """FedProx.

    Attributes:
        mu: μ in eq. (2), the pull towards the global weights; 0 recovers FedAvg.
        optimiser: Local solver. The paper leaves it open.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    mu: float = 0.01
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    linear: ClassVar[bool] = True

    def check(self) -> None:
        at_least("mu", self.mu, 0)
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
        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            nll, stats = task.nll(params, batch, key)
            drift = trees.norm_squared(trees.sub(params.weights, down.weights))
            return nll + 0.5 * self.mu * drift, stats  # eq. (2)

        params, loss = fit(objective, down, data, self.optimiser, self.work, key)
        drift = trees.norm(trees.sub(params.weights, down.weights))
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss, "drift": drift}

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
