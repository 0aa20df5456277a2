"""Per-FedAvg: a global model that is good after one step on a client's own data, found by meta-learning.

Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning: A Meta-Learning Approach, NeurIPS 2020, arXiv:2002.07948.
Algorithm 1.

    min_w 1/N Σ_k F_k(w),   F_k(w) = f_k(w − α∇f_k(w))

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   nothing
Client sends   w_k   its weights after local steps on F_k, weighted equally

The default leaves the second derivative out, `order="second"` has it: this is Per-FedAvg (FO), and Per-FedAvg with the
Hessian. (HF), which approximates the product with the Hessian by differences, has no use where it is had exactly.

Differs from the paper: the outer minibatch D' is that of the local work, so that an epoch passes over all examples; the
inner one D is drawn beside it, with replacement and of the same size. The Hessian is that of D, so that a step follows
the exact gradient of f(w − α∇f(w; D); D'); Algorithm 1 draws a third minibatch for it. Statistics of a batch norm are
those of w, which they are sent with, not of w − α∇f.
"""

from typing import Any, ClassVar, Literal

import jax
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class PerFedAvg(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
    """Per-FedAvg.

    Attributes:
        alpha: α, step size of the adaptation to a client; 0 recovers averaging without it.
        order: Meta-gradients without (first) or with (second) the derivative of the adaptation.
        adapt_steps: Minibatches that adapt the global model to a client when it is personalised; the paper takes one.
        optimiser: Local solver of the meta-objective; its step size is the paper's β.
        work: Local work of a round.
    """

    alpha: float = 0.01
    order: Literal["first", "second"] = static(default="first")
    adapt_steps: int = static(default=1)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(
        paper=Paper(
            "Fallah et al.",
            "Personalized Federated Learning: A Meta-Learning Approach",
            2020,
            venue="NeurIPS",
            arxiv="2002.07948",
        ),
        keeps="nothing",
        sends="its weights",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        check_fields(self)
        at_least("alpha", self.alpha, 0)
        at_least("adapt-steps", self.adapt_steps, 1)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            key_draw, key_inner, key_outer = jax.random.split(key, 3)
            drawn = data.batch(key_draw, self.work.batch_size)

            def inner(weights: Any) -> tuple[Array, Any]:
                return task.nll(Params(weights, params.stats), drawn, key_inner)

            here = jax.lax.stop_gradient(params.weights) if self.order == "first" else params.weights
            slope, stats = jax.grad(inner, has_aux=True)(here)
            adapted = trees.axpy(-self.alpha, slope, params.weights)  # Algorithm 1: w − α∇f(w; D)
            # The gradient of this is (I − α∇²f(w; D)) ∇f(adapted; D'), or ∇f(adapted; D') alone.
            return task.nll(Params(adapted, params.stats), batch, key_outer)[0], stats

        params, loss = fit(objective, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=(data.count > 0).astype("float32")), {"loss": loss}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        work = Work(steps=self.adapt_steps, batch_size=self.work.batch_size)
        return fit(task.nll, down, data, Optimiser("sgd", self.alpha), work, key)[0]
