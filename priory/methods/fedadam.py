"""FedAdam: federated averaging whose server takes Adam's step along what clients moved by.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, Adaptive Federated Optimization, ICLR 2021,
arXiv:2003.00295. Algorithm 2.

    Δ = Σ_k n_k (w_k − w^t) / Σ_k n_k
    m ← β₁ m + (1 − β₁) Δ,   v ← β₂ v + (1 − β₂) Δ²,   w^{t+1} = w^t + η_s m / (√v + τ)

Server keeps   w^t, m and v; broadcasts w^t
Client keeps   nothing
Client sends   w_k, its weights after local training, weighted by n_k

Unlike Adam as it is usually written there is no bias correction, and v begins at τ². Clients are weighted by their
examples; Algorithm 2 prints a plain mean. Personalisation is fine-tuning from w^t.
"""

from typing import ClassVar

from jax import Array

from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed import adaptive
from priory.fed.about import About, Paper
from priory.fed.adaptive import Server
from priory.fed.capabilities import SharedModel
from priory.fed.checks import check_fields
from priory.fed.local import Optimiser, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class FedAdam(Method[Server, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
    """FedAdam.

    Attributes:
        server_step_size: η_s, about how far a weight moves in a round.
        beta1: β₁, how much of the mean step is kept from round to round.
        beta2: β₂, how much of the mean square is.
        tau: τ, the scale of a step below which the server's own grows smaller with it.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    server_step_size: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper("Reddi et al.", "Adaptive Federated Optimization", 2021, venue="ICLR", arxiv="2003.00295"),
        keeps="nothing",
        sends="its weights",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        adaptive.check(self.server_step_size, self.beta1, self.beta2, self.tau)
        check_fields(self)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Server:
        return adaptive.start(task.init(key), self.tau)

    def broadcast(self, server: Server) -> Params:
        return Params(server.weights, server.stats)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Server, messages: Message[Params], key: Key) -> tuple[Server, Info]:
        del task, key

        def second(v: Array, squared: Array) -> Array:
            return self.beta2 * v + (1 - self.beta2) * squared  # Algorithm 2, FedAdam

        moved = adaptive.step(server, messages, second, step_size=self.server_step_size, beta1=self.beta1, tau=self.tau)
        return moved, {}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        return finetune(self, task, down, data, key)
