"""FedProx: federated averaging with a pull towards the global weights.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, arXiv:1812.06127.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing
Client sends   w_k   its weights after local training, weighted by n_k

Differs from the paper: clients are drawn uniformly and weighted by n_k; Algorithm 2 draws them with probability n_k/n
and averages plainly. The paper leaves the local solver open; here sgd takes the penalty as an implicit step, as FedHB
does, so that a comparison of the two compares priors and not solvers (`proximal`).
"""

from typing import ClassVar

import jax
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.checks import at_least, choices, positive
from priory.fed.local import Optimiser, Proximal, Pull, Work, fit
from priory.fed.method import Info, Message, Predictive, Task, point
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class FedProx:
    """FedProx.

    Attributes:
        mu: μ in eq. (2), the pull towards the global weights; 0 recovers FedAvg.
        proximal: How sgd takes the pull: as an implicit step after that of the loss, or as part of the gradient, where
            momentum sums it and η·μ must stay below 2.
        optimiser: Local solver. The paper leaves it open.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    mu: float = 0.01
    proximal: Proximal = static(default="implicit")
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Li et al.", "Federated Optimization in Heterogeneous Networks", 2020, venue="MLSys", arxiv="1812.06127"
        ),
        keeps="nothing",
        sends="its weights",
    )
    linear: ClassVar[bool] = True
    legacy_settings: ClassVar[dict[str, str]] = {"proximal": "explicit"}  # of runs from before the setting existed

    def check(self) -> None:
        choices(self)
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
        strength = jax.tree.map(lambda _: self.mu, down.weights)
        pull = Pull(lambda _: down.weights, strength, self.proximal)  # μ/2 ‖w − w^t‖² of eq. (2)
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key, pull)
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
