"""FedAdam and FedYogi: federated averaging whose server takes an adaptive step along the mean move of the clients.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, Adaptive Federated Optimization, ICLR 2021,
arXiv:2003.00295. Algorithm 2.

    Δ = Σ_k n_k (w_k − w^t) / Σ_k n_k
    m ← β₁ m + (1 − β₁) Δ
    v ← β₂ v + (1 − β₂) Δ²                       FedAdam
    v ← v − (1 − β₂) Δ² sign(v − Δ²)             FedYogi
    w^{t+1} = w^t + η_s m / (√v + τ)

Server keeps   w^t, m and v; broadcasts w^t
Client keeps   nothing
Client sends   w_k, its weights after local training, weighted by n_k

In FedYogi v falls by no more than (1 − β₂) Δ² in a round, so small steps after large ones do not soon make the server's
own larger. Unlike Adam as it is usually written there is no bias correction, τ is outside the root, and v begins at τ².
Clients are weighted by their examples; Algorithm 2 prints a plain mean. Personalisation is fine-tuning from w^t.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import check_fields, positive
from priory.fed.local import Optimiser, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params

Weights = Any


@struct
class Server:
    """The state of the server.

    Attributes:
        weights: w^t.
        stats: Batch-norm statistics, averaged plainly.
        first: m.
        second: v.
    """

    weights: Weights
    stats: Any
    first: Weights
    second: Weights


@struct
class FedOpt(Method[Server, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
    """FedAdam or FedYogi.

    Attributes:
        server_optimiser: The rule for v: `adam` averages Δ², `yogi` moves v towards Δ² by a bounded step.
        server_step_size: η_s, about how far a weight moves in a round.
        beta1: β₁, the part of the mean step that is kept from round to round.
        beta2: β₂; 1 − β₂ is the part of a new square by which v moves.
        tau: τ, the scale of a step below which the server's own grows smaller with it.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    server_optimiser: Literal["adam", "yogi"] = static(default="adam")
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
        positive("server-step-size", self.server_step_size)
        if not 0 <= self.beta1 < 1:
            raise UsageError(f"beta1={self.beta1} lies outside [0, 1); choose one such as 0.9.")
        if not 0 <= self.beta2 <= 1:
            raise UsageError(f"beta2={self.beta2} lies outside [0, 1]; choose one such as 0.99.")
        positive("tau", self.tau)
        check_fields(self)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Server:
        params = task.init(key)
        zero = trees.zeros(params.weights)
        first = jax.tree.map(lambda leaf: leaf + self.tau**2, zero)  # Algorithm 2, v₋₁ ≥ τ²
        return Server(params.weights, params.stats, zero, first)

    def broadcast(self, server: Server) -> Params:
        return Params(server.weights, server.stats)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Server, messages: Message[Params], key: Key) -> tuple[Server, Info]:
        """Return the next server; a round without messages leaves it, moments included."""
        del task, key

        def next_second(v: Array, delta: Array) -> Array:
            squared = jnp.square(delta)
            if self.server_optimiser == "adam":
                return self.beta2 * v + (1 - self.beta2) * squared  # Algorithm 2, FedAdam
            return v - (1 - self.beta2) * squared * jnp.sign(v - squared)  # Algorithm 2, FedYogi

        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=self.broadcast(server))
        delta = trees.sub(mean.weights, server.weights)  # Algorithm 2, Δ_t
        # Algorithm 2, m_t
        m = jax.tree.map(lambda old, d: self.beta1 * old + (1 - self.beta1) * d, server.first, delta)
        v = jax.tree.map(next_second, server.second, delta)
        weights = jax.tree.map(  # Algorithm 2, x_{t+1}
            lambda w, m, v: w + self.server_step_size * m / (jnp.sqrt(v) + self.tau), server.weights, m, v
        )
        moved = Server(weights, mean.stats, m, v)
        return trees.select(jnp.sum(messages.weight) > 0, moved, server), {}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        return finetune(self, task.nll, down, data, key)
