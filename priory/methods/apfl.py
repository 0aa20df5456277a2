"""APFL: every client predicts with a mixture of the global model and one of its own.

Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, arXiv:2003.13461. Algorithm 1.

    v̄_k = α_k v_k + (1 − α_k) w,   min_v f_k(v̄_k)

Server keeps   w^t        the global weights; broadcast as they are
Client keeps   v_k, α_k   its own weights and their share in the mixture
Client sends   w_k        its copy of the global weights after local training, weighted equally

In a round w_k and v_k take their steps together on the same minibatches: w_k along ∇f_k(w_k) as in FedAvg, v_k along
the gradient of f_k(v̄_k) with respect to v_k, which is α_k∇f_k(v̄_k). Prediction mixes v_k with the last broadcast.
`adaptive=True` moves α_k once a round, at its first minibatch, along ⟨v_k − w_k, ∇f_k(v̄_k)⟩, and keeps it in [0, 1].

Differs from the authors' code, which mixes outputs in place of weights, steps v after w and adds 0.02 α to the gradient
of α. Statistics of a batch norm that a client predicts with are those of its mixture, and its own.
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
from priory.fed.checks import check_fields
from priory.fed.local import Optimiser, Work, each_batch
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class Own:
    """The state of a client.

    Attributes:
        network: v_k, with the statistics of the mixture.
        alpha: α_k.
    """

    network: Params
    alpha: Array


@struct
class APFL(Method[Params, Params, Own, Params, Params], SharedModel[Params, Params]):
    """APFL.

    Attributes:
        alpha: α, share of a client's own weights in its mixture (at first, if it is adaptive); 0 is the global model,
            1 training alone.
        adaptive: Clients learn their own share, by one gradient step a round.
        optimiser: Local solver of both models; its step size is also that of α.
        work: Local work of a round.
    """

    alpha: float = 0.5
    adaptive: bool = static(default=False)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(
        paper=Paper("Deng et al.", "Adaptive Personalized Federated Learning", 2020, arxiv="2003.13461"),
        keeps="its own weights and their share in the mixture",
        sends="its copy of the global weights",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"alpha={self.alpha} lies outside [0, 1]; choose one such as 0.5.")
        check_fields(self)

    def init_client(self, task: Task, down: Params, key: Key) -> Own:
        del task, key
        return Own(down, jnp.float32(self.alpha))

    def client_update(
        self, task: Task, down: Params, client: Own, data: Shard, key: Key
    ) -> tuple[Own, Message[Params], Info]:
        transform = self.optimiser.build()

        def step(carry: tuple, batch: Batch, key: Key) -> tuple:
            (shared, own), (state, own_state), alpha, total, steps = carry
            key_shared, key_own = jax.random.split(key)

            def loss(weights: Any) -> tuple[Array, Any]:
                return task.nll(Params(weights, shared.stats), batch, key_shared)

            def mixed_loss(weights: Any, alpha: Array) -> tuple[Array, Any]:
                mixed = _mixed(alpha, weights, shared.weights)  # Algorithm 1: v̄ = αv + (1 − α)w
                return task.nll(Params(mixed, own.stats), batch, key_own)

            slope, stats = jax.grad(loss, has_aux=True)(shared.weights)
            (value, own_stats), (own_slope, alpha_slope) = jax.value_and_grad(mixed_loss, (0, 1), has_aux=True)(
                own.weights, alpha
            )
            updates, state = transform.update(slope, state, shared.weights)
            own_updates, own_state = transform.update(own_slope, own_state, own.weights)
            if self.adaptive:
                moved = jnp.clip(alpha - self.optimiser.step_size * alpha_slope, 0.0, 1.0)
                alpha = jnp.where(steps == 0, moved, alpha)
            networks = (
                Params(optax.apply_updates(shared.weights, updates), stats),  # Algorithm 1, step of w
                Params(optax.apply_updates(own.weights, own_updates), own_stats),  # Algorithm 1, step of v
            )
            return networks, (state, own_state), alpha, total + value, steps + 1

        states = transform.init(down.weights), transform.init(client.network.weights)
        start = ((down, client.network), states, self._share(client), jnp.float32(0), jnp.int32(0))
        (shared, own), _, alpha, total, steps = each_batch(step, start, data, self.work, key)
        drift = trees.norm(trees.sub(own.weights, shared.weights))
        info = {"loss": total / jnp.maximum(steps, 1), "drift": drift, "alpha": alpha}
        return Own(own, alpha), Message(shared, weight=(data.count > 0).astype("float32")), info

    def personalise(self, task: Task, down: Params, client: Own, data: Shard, key: Key) -> Params:
        del task, data, key
        return Params(_mixed(self._share(client), client.network.weights, down.weights), client.network.stats)

    def _share(self, client: Own) -> Array:
        """Return α of a client: the learned one, or that of all clients, which a schedule may change."""
        return client.alpha if self.adaptive else jnp.float32(self.alpha)


def _mixed(alpha: Array, own: Any, shared: Any) -> Any:
    """Return α own + (1 − α) shared."""
    return jax.tree.map(lambda a, b: alpha * a + (1 - alpha) * b, own, shared)
