"""pFedMe: a personal model for every client by a Moreau envelope around the global weights.

Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, arXiv:2006.08848. Algorithm 1.

    min_w 1/N Σ_k F_k(w),   F_k(w) = min_θ f_k(θ) + λ/2 ‖θ − w‖²,   ∇F_k(w) = λ(w − θ_k(w))

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing
Client sends   w_k   its copy of the global weights after R steps towards its personal ones, weighted equally

Choices that the paper leaves open:

- θ_k is not kept: it is a function of w, so personalisation does a client's work of a round from the last broadcast and
  takes the θ at its end. In the authors' code all clients work in every round and θ is scored before the server
  averages: the same steps, one round earlier. So a client that was not called for long is not scored with an old θ.
- A subproblem gets K steps, and starts where the last one ended (as the authors' code does), the first one at w^t.
- With sgd the pull is an implicit step, which has the optimum of the explicit one and is stable at any λ (`Pull`).

Differs from the authors' code, which shrinks θ by 0.001 times the step size in every step (`weight_decay=0.001`) and
weights clients by n_k (`--weighting examples`).
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Pull, Work, each_batch
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class PFedMe(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
    """pFedMe.

    Attributes:
        lam: λ, the pull of the personal weights towards the global ones; 0 leaves the global ones alone.
        eta: η, step size of the global weights; keep η·λ, their share of the way to θ, below 1.
        beta: β, how far the server goes to the mean of what it receives.
        inner_steps: K, steps on a minibatch that approximate the personal weights.
        optimiser: Solver of the personal weights.
        work: Local work of a round: R minibatches, with K steps on each.
    """

    lam: float = 15.0
    eta: float = 0.005
    beta: float = 1.0
    inner_steps: int = static(default=5)
    optimiser: Optimiser = Optimiser()
    work: Work = Work(steps=20, batch_size=20)

    about: ClassVar[About] = About(
        paper=Paper(
            "Dinh et al.",
            "Personalized Federated Learning with Moreau Envelopes",
            2020,
            venue="NeurIPS",
            arxiv="2006.08848",
        ),
        keeps="nothing",
        sends="its copy of the global weights",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        at_least("lam", self.lam, 0)
        at_least("eta", self.eta, 0)
        at_least("beta", self.beta, 0)
        at_least("inner-steps", self.inner_steps, 1)
        check_fields(self)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        theta, weights, loss = self._local(task, down, data, key)
        message = Message(Params(weights, theta.stats), weight=(data.count > 0).astype("float32"))
        return client, message, {"loss": loss, "drift": trees.norm(trees.sub(theta.weights, weights))}

    def aggregate(self, task: Task, server: Params, messages: Message[Params], key: Key) -> tuple[Params, Info]:
        del task, key
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=server)
        moved = trees.axpy(
            self.beta, trees.sub(mean.weights, server.weights), server.weights
        )  # (1 − β) w^t + β mean w_k
        return trees.select(jnp.sum(messages.weight) > 0, Params(moved, mean.stats), server), {}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        return self._local(task, down, data, key)[0]

    def _local(self, task: Task, down: Params, data: Shard, key: Key) -> tuple[Params, Any, Array]:
        """Return the personal network and w_k after a round's work, and the mean loss of its steps."""
        strength = jax.tree.map(lambda leaf: self.lam, down.weights)

        def solver(weights: Any) -> optax.GradientTransformation:
            return self.optimiser.build(Pull(lambda theta: weights, strength))  # of λ/2 ‖θ − w‖², Algorithm 1

        def outer(carry: tuple, batch: Batch, key: Key) -> tuple:
            theta, state, weights, total, steps = carry
            transform = solver(weights)

            def inner(i: Array, carry: tuple) -> tuple:
                theta, state, total = carry

                def loss(weights: Any) -> tuple[Array, Any]:
                    return task.nll(Params(weights, theta.stats), batch, jax.random.fold_in(key, i))

                (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(theta.weights)
                updates, state = transform.update(gradient, state, theta.weights)
                return Params(optax.apply_updates(theta.weights, updates), stats), state, total + value

            theta, state, total = jax.lax.fori_loop(0, self.inner_steps, inner, (theta, state, total))
            # Algorithm 1: w ← w − ηλ(w − θ)
            weights = trees.axpy(self.eta * self.lam, trees.sub(theta.weights, weights), weights)
            return theta, state, weights, total, steps + self.inner_steps

        start = (down, solver(down.weights).init(down.weights), down.weights, jnp.float32(0), jnp.int32(0))
        theta, _, weights, total, steps = each_batch(outer, start, data, self.work, key)
        return theta, weights, total / jnp.maximum(steps, 1)
