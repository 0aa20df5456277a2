"""FedAvg: local training from the global weights, averaged by the server.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
arXiv:1602.05629.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing
Client sends   w_k   its weights after local training, weighted by n_k

Personalisation is fine-tuning from w^t, with a rate of its own that no schedule touches.
"""

from typing import ClassVar

from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import check_fields
from priory.fed.local import Optimiser, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class FedAvg(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
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
        check_fields(self)
        check_finetune(self)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)  # Algorithm 1, ClientUpdate
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        return finetune(self, task.nll, down, data, key)
