"""Ditto: a personal model beside the global one, held to it by a quadratic pull.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, arXiv:2012.04221.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   v_k   its personal weights
Client sends   w_k   its copy of the global weights after local training, weighted by n_k

The personal steps v ← v − η(∇F_k(v) + λ(v − w^t)) of Algorithm 1 use as many minibatches as the global ones. λ = 0 is
local training from the first broadcast; λ → ∞ the global model.
"""

from typing import Any, ClassVar

import jax
from jax import Array

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.checks import at_least
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Predictive, Task, point
from priory.fed.shard import Batch, Shard
from priory.models.model import Params


@struct
class Ditto:
    """Ditto.

    Attributes:
        lam: λ in eq. (Ditto), the pull of the personal weights towards the global ones; keep η·λ below 2.
        optimiser: Local solver of both models.
        work: Local work of a round, done once for each model.
    """

    lam: float = 1.0
    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    linear: ClassVar[bool] = True

    def check(self) -> None:
        at_least("lam", self.lam, 0)
        self.optimiser.check()
        self.work.check()

    def init(self, task: Task, key: Key) -> Params:
        return task.init(key)

    def broadcast(self, server: Params) -> Params:
        return server

    def enrol(self, task: Task, down: Params, key: Key) -> Params:
        del task, key
        return down

    def client_update(
        self, task: Task, down: Params, client: Params, data: Shard, key: Key
    ) -> tuple[Params, Message[Params], Info]:
        key_global, key_personal = jax.random.split(key)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            nll, stats = task.nll(params, batch, key)
            drift = trees.norm_squared(trees.sub(params.weights, down.weights))
            return nll + 0.5 * self.lam * drift, stats  # h_k of eq. (Ditto)

        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key_global)
        personal, _ = fit(objective, client, data, self.optimiser, self.work, key_personal)
        drift = trees.norm(trees.sub(personal.weights, down.weights))
        return personal, Message(params, weight=data.count.astype("float32")), {"loss": loss, "drift": drift}

    def aggregate(self, task: Task, server: Params, messages: Message[Params], key: Key) -> tuple[Params, Info]:
        del task, key
        return trees.weighted_mean(messages.payload, messages.weight, otherwise=server), {}

    def personalise(self, task: Task, down: Params, client: Params, data: Shard, key: Key) -> Params:
        del task, down, data, key
        return client

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return down

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        return point(task.model.apply(posterior, x)[0])

    def reference(self, task: Task, down: Params, payload: Params) -> Params:
        del task, payload
        return down
