"""Ditto: a personal model beside the global one, held to it by a quadratic pull.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, arXiv:2012.04221.

Server keeps   w^t   the global weights; broadcast as they are
Client keeps   v_k   its personal weights
Client sends   w_k   its copy of the global weights after local training, weighted by n_k

The personal steps of Algorithm 1 use as many minibatches as the global ones. λ = 0 is local training from the first
broadcast; λ → ∞ the global model.

Differs from the paper: with sgd the pull is an implicit step, as in FedHB and pFedMe; `proximal = "explicit"` is the
printed v ← v − η(∇F_k(v) + λ(v − w^t)).
"""

from typing import ClassVar

import jax

from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Proximal, Pull, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Ditto(Method[Params, Params, Params, Params, Params], SharedModel[Params, Params]):
    """Ditto.

    Attributes:
        lam: λ in eq. (Ditto), the pull of the personal weights towards the global ones.
        proximal: How sgd takes the pull: as an implicit step after that of the loss, or as part of the gradient, where
            momentum sums it and η·λ must stay below 2.
        optimiser: Local solver of both models.
        work: Local work of a round, done once for each model.
    """

    lam: float = 1.0
    proximal: Proximal = static(default="implicit")
    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(
        paper=Paper(
            "Li et al.",
            "Ditto: Fair and Robust Federated Learning Through Personalization",
            2021,
            venue="ICML",
            arxiv="2012.04221",
        ),
        keeps="its personal weights",
        sends="its copy of the global weights",
    )
    linear: ClassVar[bool] = True
    legacy_settings: ClassVar[dict[str, str]] = {"proximal": "explicit"}  # of runs from before the setting existed

    def check(self) -> None:
        check_fields(self)
        at_least("lam", self.lam, 0)

    def init_client(self, task: Task, down: Params, key: Key) -> Params:
        del task, key
        return down

    def client_update(
        self, task: Task, down: Params, client: Params, data: Shard, key: Key
    ) -> tuple[Params, Message[Params], Info]:
        key_global, key_personal = jax.random.split(key)

        strength = jax.tree.map(lambda _: self.lam, down.weights)
        pull = Pull(lambda _: down.weights, strength, self.proximal)  # λ/2 ‖v − w^t‖² of eq. (Ditto)
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key_global)
        # Algorithm 1, the personal steps
        personal, _ = fit(task.nll, client, data, self.optimiser, self.work, key_personal, pull)
        drift = trees.norm(trees.sub(personal.weights, down.weights))
        return personal, Message(params, weight=data.count.astype("float32")), {"loss": loss, "drift": drift}

    def personalise(self, task: Task, down: Params, client: Params, data: Shard, key: Key) -> Params:
        del task, down, data, key
        return client
