"""FedPA: federated averaging of posteriors; a client corrects its step by the covariance of its own samples.

Al-Shedivat, Gillenwater, Xing and Rostamizadeh, Federated Learning via Posterior Averaging: A New Perspective and
Practical Algorithms, ICLR 2021, arXiv:2010.05273.

    x_1 … x_ℓ   samples of the client's posterior: means of the iterates of SGD, one for each epoch after the burn-in
    Δ_k = Σ̂⁻¹(w^t − x̄),   Σ̂ = ρ_ℓ I + (1 − ρ_ℓ) S_ℓ,   ρ_ℓ = 1/(1 + (ℓ − 1)ρ),   S_ℓ the sample covariance
    w^{t+1} = w^t − η_s Σ_k n_k Δ_k / Σ_k n_k

Server keeps   w^t, the momentum of its step, and how many rounds it has seen
Server sends   w^t, and whether to sample yet
Client keeps   nothing
Client sends   w^t − Δ_k, weighted by n_k

Δ needs ℓ vectors and ℓ² inner products: (ℓ − 1)S_ℓ grows by one rank with each sample, so that the Sherman-Morrison
formula carries Δ along. Since Σ̂ ≥ ρ_ℓ I, it is at most 1 + (ℓ − 1)ρ times as long as w^t − x̄.

The paper leaves the server's optimiser open; here it is SGD, with or without momentum. `fedavg_rounds` is counted in
rounds that had messages; batch-norm statistics are those of the last iterate. Personalisation, which the paper does not
have, is fine-tuning from w^t.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Work, check_finetune, each_batch, finetune
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params

Weights = Any


@struct
class Server:
    """The state of the server: the global network, the state of its optimiser, rounds so far."""

    weights: Weights
    stats: Any
    optimiser: Any
    rounds: Array


@struct
class Down:
    """The broadcast: the global network, and whether clients sample or train as in FedAvg."""

    params: Params
    sampling: Array


@struct
class FedPA(Method[Server, Down, tuple[()], Params, Params], SharedModel[Down, Params]):
    """FedPA.

    Attributes:
        shrinkage: ρ, how much the sample covariance counts beside the identity; 0 ignores it.
        burn_in: Epochs of the local work before the first sample; each one after it gives a sample.
        fedavg_rounds: Rounds at the start in which clients send their last iterate, as in FedAvg.
        server_step_size: η_s, the step of the server.
        server_momentum: Momentum of the server.
        optimiser: Local solver, whose iterates are averaged to samples.
        work: Local work of a round, burn-in included, in epochs.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    shrinkage: float = 0.01
    burn_in: int = static(default=1)
    fedavg_rounds: int = static(default=0)
    server_step_size: float = 1.0
    server_momentum: float = static(default=0.0)
    optimiser: Optimiser = Optimiser()
    work: Work = Work(epochs=5)
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Al-Shedivat et al.",
            "Federated Learning via Posterior Averaging: A New Perspective and Practical Algorithms",
            2021,
            venue="ICLR",
            arxiv="2010.05273",
        ),
        keeps="nothing",
        sends="weights after a step corrected by its posterior covariance",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        at_least("shrinkage", self.shrinkage, 0)
        at_least("burn-in", self.burn_in, 0)
        at_least("fedavg-rounds", self.fedavg_rounds, 0)
        positive("server-step-size", self.server_step_size)
        if not 0 <= self.server_momentum < 1:
            raise UsageError(f"server-momentum={self.server_momentum} lies outside [0, 1); choose one such as 0.9.")
        check_fields(self)
        if self.work.steps is not None:
            raise UsageError(f"steps={self.work.steps} has no epochs, and fedpa takes a sample each; use epochs.")
        if self.work.epochs <= self.burn_in:
            raise UsageError(
                f"epochs={self.work.epochs} leaves none to sample after burn-in={self.burn_in}; choose "
                f"epochs={self.burn_in + 1} or more, or a shorter burn-in."
            )
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Server:
        drawn = task.init(key)
        return Server(drawn.weights, drawn.stats, self._server_optimiser().init(drawn.weights), jnp.int32(0))

    def broadcast(self, server: Server) -> Down:
        return Down(Params(server.weights, server.stats), server.rounds >= self.fedavg_rounds)

    def client_update(
        self, task: Task, down: Down, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        last, samples, loss = self._sampled(task, down.params, data, key)
        delta = trees.select(
            down.sampling,
            delta_of(down.params.weights, samples, self.shrinkage),  # Algorithm 3, client update of FedPA
            trees.sub(down.params.weights, last.weights),  # Algorithm 2, client update of FedAvg
        )
        sent = Params(trees.sub(down.params.weights, delta), last.stats)
        info = {"loss": loss, "drift": trees.norm(delta)}
        return client, Message(sent, weight=data.count.astype("float32")), info

    def aggregate(self, task: Task, server: Server, messages: Message[Params], key: Key) -> tuple[Server, Info]:
        del task, key
        before = Params(server.weights, server.stats)
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=before)
        delta = trees.sub(server.weights, mean.weights)
        # Algorithm 1, server update
        updates, state = self._server_optimiser().update(delta, server.optimiser, server.weights)
        moved = Server(trees.add(server.weights, updates), mean.stats, state, server.rounds + 1)
        return trees.select(jnp.sum(messages.weight) > 0, moved, server), {}

    def personalise(self, task: Task, down: Down, client: tuple[()], data: Shard, key: Key) -> Params:
        return finetune(self, task.nll, down.params, data, key)

    def population(self, task: Task, down: Down, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return down.params

    def reference(self, task: Task, down: Down, payload: Params) -> Params:
        del task, payload
        return down.params

    def _sampled(self, task: Task, start: Params, data: Shard, key: Key) -> tuple[Params, Weights, Array]:
        """Return the last iterate, the samples on axis 0, and the mean loss of the steps."""
        transform, num_samples = self.optimiser.build(), self.work.epochs - self.burn_in
        num_batches = jnp.maximum(data.num_batches(self.work.batch_size), 1)

        def step(carry: tuple, batch: Batch, key: Key) -> tuple:
            params, state, samples, total, steps = carry

            def loss(weights: Weights) -> tuple[Array, Any]:
                return task.nll(Params(weights, params.stats), batch, key)

            (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(params.weights)
            updates, state = transform.update(gradient, state, params.weights)
            weights = optax.apply_updates(params.weights, updates)
            # Epochs of the burn-in are averaged in the first place, where the first one that counts writes over them.
            place = jnp.maximum(steps // num_batches - self.burn_in, 0)
            share = 1 / (1 + steps % num_batches)
            samples = jax.tree.map(
                lambda all_, leaf: all_.at[place].set((1 - share) * all_[place] + share * leaf), samples, weights
            )
            return Params(weights, stats), state, samples, total + value, steps + 1

        samples = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_samples, *leaf.shape)), start.weights)
        carry = (start, transform.init(start.weights), samples, jnp.float32(0), jnp.int32(0))
        last, _, samples, total, steps = each_batch(step, carry, data, self.work, key)
        return last, samples, total / jnp.maximum(steps, 1)

    def _server_optimiser(self) -> optax.GradientTransformation:
        return Optimiser("sgd", self.server_step_size, self.server_momentum).build()


def delta_of(centre: Weights, samples: Weights, shrinkage: Array | float) -> Weights:
    """Return Δ = Σ̂⁻¹(centre − x̄) of samples on axis 0, by rank-one updates.

    With A_ℓ = Σ̂_ℓ/ρ_ℓ = I + ρ(ℓ − 1)S_ℓ and u_ℓ = x_ℓ − x̄_{ℓ−1}, A_ℓ = A_{ℓ−1} + γ_ℓ u_ℓ u_ℓᵀ, γ_ℓ = ρ(ℓ − 1)/ℓ.
    """
    num_samples = jax.tree.leaves(samples)[0].shape[0]

    def add(k: Array, carry: tuple) -> tuple:
        mean, delta, rows, factors = carry
        u = jax.tree.map(lambda all_, x: all_[k] - x, rows, mean)
        # v_ℓ = A_{ℓ−1}⁻¹ u_ℓ. Row j < ℓ holds v_j by now; factors of the others are 0.
        along = factors * sum(jax.tree.leaves(jax.tree.map(lambda all_, x: jnp.tensordot(all_, x, x.ndim), rows, u)))
        v = jax.tree.map(lambda x, all_: x - jnp.tensordot(along, all_, 1), u, rows)
        gamma, inner = shrinkage * k / (k + 1), trees.dot(u, v)
        factor = gamma / (1 + gamma * inner)
        moved = 1 / (k + 1) + factor * (trees.dot(u, delta) - inner / (k + 1))
        delta = trees.axpy(-moved, v, delta)
        rows = jax.tree.map(lambda all_, x: all_.at[k].set(x), rows, v)
        return trees.axpy(1 / (k + 1), u, mean), delta, rows, factors.at[k].set(factor)

    first = jax.tree.map(lambda leaf: leaf[0], samples)
    start = (first, trees.sub(centre, first), samples, jnp.zeros(num_samples))
    delta = jax.lax.fori_loop(1, num_samples, add, start)[1]
    return trees.scale(1 + (num_samples - 1) * shrinkage, delta)  # 1/ρ_ℓ
