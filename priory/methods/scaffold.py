"""SCAFFOLD: averaging whose local steps are corrected for the way in which a client's gradient differs from all.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, arXiv:1910.06378.
Algorithm 1 with option II.

Server keeps   x, c           the global weights and a control variate, an estimate of ∇f; broadcast as they are
Client keeps   c_k            its own control variate, an estimate of ∇f_k; zero at first
Client sends   y_k, Δc_k      its weights after corrected steps and the change of c_k, weighted equally

K in option II is the number of steps that a client took, which follows its number of examples.

The paper has plain SGD alone. With momentum the corrected gradient goes through the optimiser, and x − y_k is divided
not by Kη but by what a constant gradient of 1 would have moved, η Σ_j (1 − m^j)/(1 − m) over the K steps (Wang et al.,
FedNova, arXiv:2007.07481): Kη without momentum, and near Kη/(1 − m) for large K. Adam and RMSprop are refused, because
a path of theirs tells no gradient.

Differs from the paper: where weights are overridden, c moves by |S|/N times the weighted mean of Δc_k. Statistics of a
batch norm are averaged plainly, whatever η_g. Personalisation is fine-tuning without a correction.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import positive
from priory.fed.local import Optimiser, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class Control:
    """The state of the server, and the message of a client.

    Attributes:
        weights: x, or y_k.
        variate: c, or Δc_k; like the weights.
        stats: Statistics of a batch norm.
    """

    weights: Any
    variate: Any
    stats: Any


@struct
class Scaffold(Method[Control, Control, Any, Control, Params], SharedModel[Control, Params]):
    """SCAFFOLD.

    Attributes:
        server_step_size: η_g, how far the server goes to the mean of what it receives.
        optimiser: Local solver, sgd; the paper's has no momentum.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    server_step_size: float = 1.0
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Karimireddy et al.",
            "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
            2020,
            venue="ICML",
            arxiv="1910.06378",
        ),
        keeps="its control variate",
        sends="its weights and the change of its control variate",
    )
    linear: ClassVar[bool] = False  # c moves by the number of messages, which their total weight need not tell

    def check(self) -> None:
        positive("server-step-size", self.server_step_size)
        self.optimiser.check()
        if self.optimiser.kind != "sgd":
            raise UsageError(
                f"kind={self.optimiser.kind} takes steps that tell no gradient, which control variates are; use sgd."
            )
        if self.optimiser.clip is not None:
            raise UsageError(
                f"clip={self.optimiser.clip} cuts the corrected gradient, from which control variates are read; leave "
                "it out."
            )
        self.work.check()
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Control:
        drawn = task.init(key)
        return Control(drawn.weights, trees.zeros(drawn.weights), drawn.stats)

    def init_client(self, task: Task, down: Control, key: Key) -> Any:
        del task, key
        return trees.zeros(down.variate)

    def client_update(
        self, task: Task, down: Control, client: Any, data: Shard, key: Key
    ) -> tuple[Any, Message[Control], Info]:
        correction = trees.sub(down.variate, client)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            nll, stats = task.nll(params, batch, key)
            tilt = trees.dot(correction, params.weights)  # its gradient is c − c_k, eq. (3); its value is left out
            return nll + tilt - jax.lax.stop_gradient(tilt), stats

        local, loss = fit(objective, Params(down.weights, down.stats), data, self.optimiser, self.work, key)
        rate = self.optimiser.step_size * self._reach(data)
        moved = trees.scale(1 / jnp.where(rate > 0, rate, 1.0), trees.sub(down.weights, local.weights))
        change = trees.select(rate > 0, trees.sub(moved, down.variate), trees.zeros(client))  # eq. (4), option II
        message = Message(Control(local.weights, change, local.stats), weight=(data.count > 0).astype("float32"))
        return trees.add(client, change), message, {"loss": loss, "correction": trees.norm(correction)}

    def aggregate(self, task: Task, server: Control, messages: Message[Control], key: Key) -> tuple[Control, Info]:
        del key
        still = Control(server.weights, trees.zeros(server.variate), server.stats)
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=still)
        share = jnp.sum(messages.weight > 0) / task.num_clients  # |S|/N
        weights = trees.axpy(self.server_step_size, trees.sub(mean.weights, server.weights), server.weights)  # eq. (5)
        return Control(weights, trees.axpy(share, mean.variate, server.variate), mean.stats), {}

    def personalise(self, task: Task, down: Control, client: Any, data: Shard, key: Key) -> Params:
        return finetune(self, task.nll, Params(down.weights, down.stats), data, key)

    def population(self, task: Task, down: Control, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return Params(down.weights, down.stats)

    def reference(self, task: Task, down: Control, payload: Control) -> Control:
        del task, payload
        return Control(down.weights, trees.zeros(down.variate), down.stats)

    def _reach(self, data: Shard) -> Array:
        """Return how far, in step sizes, a client's steps go along a constant gradient of 1: K without momentum."""
        momentum, work = self.optimiser.momentum, self.work
        num = work.epochs * data.num_batches(work.batch_size) if work.steps is None else jnp.int32(work.steps)
        steps = num.astype(jnp.float32)
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
