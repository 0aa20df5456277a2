"""FedAvgM: federated averaging with momentum on the server.

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019,
arXiv:1909.06335. Section 4.3.

    Δ = Σ_k n_k/n (w^t − w_k),   v ← β v + Δ,   w^{t+1} = w^t − v

Server keeps   w^t and v; broadcasts w^t
Client keeps   nothing
Client sends   w_k, its weights after local training, weighted by n_k

The paper has one global model; here a client's personal model is that model after fine-tuning on its own data.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from priory.core import trees
from priory.core.errors import UsageError
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
class Server:
    """State of the server.

    Attributes:
        weights: w^t.
        stats: Statistics of batch normalisation, which are averaged and get no momentum.
        velocity: v.
    """

    weights: Any
    stats: Any
    velocity: Any


@struct
class FedAvgM(Method[Server, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
    """FedAvgM.

    Attributes:
        beta: β, how much of the last step the server keeps; 0 is FedAvg.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    beta: float = 0.9
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Hsu et al.",
            "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
            2019,
            arxiv="1909.06335",
        ),
        keeps="nothing",
        sends="its weights",
    )
    linear: ClassVar[bool] = True  # `aggregate` needs only the weighted mean

    def check(self) -> None:
        """Raise on a bad value: here and not in `__post_init__`, which JAX runs again on tracers."""
        if not 0 <= self.beta < 1:
            raise UsageError(f"beta={self.beta} lies outside [0, 1); choose a number such as 0.9.")
        check_fields(self)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Server:
        params = task.init(key)
        return Server(params.weights, params.stats, trees.zeros(params.weights))

    def broadcast(self, server: Server) -> Params:
        return Params(server.weights, server.stats)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Server, messages: Message[Params], key: Key) -> tuple[Server, Info]:
        del task, key
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=self.broadcast(server))
        delta = trees.sub(server.weights, mean.weights)  # Δ = Σ_k n_k/n (w^t − w_k)
        velocity = trees.axpy(self.beta, server.velocity, delta)  # v ← β v + Δ
        new = Server(trees.sub(server.weights, velocity), mean.stats, velocity)  # w^{t+1} = w^t − v
        return trees.select(jnp.sum(messages.weight) > 0, new, server), {}  # a round without messages changes nothing

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        del client
        return finetune(self, task.nll, down, data, key)
