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

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Proximal, Pull, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class FedProx(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
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
        check_fields(self)
        at_least("mu", self.mu, 0)
        check_finetune(self)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        strength = jax.tree.map(lambda _: self.mu, down.weights)
        pull = Pull(lambda _: down.weights, strength, self.proximal)  # μ/2 ‖w − w^t‖² of eq. (2)
        # Algorithm 2, the inexact argmin of eq. (2)
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key, pull)
        drift = trees.norm(trees.sub(params.weights, down.weights))
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss, "drift": drift}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        return finetune(self, task.nll, down, data, key)
