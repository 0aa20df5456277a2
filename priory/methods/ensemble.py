"""Ensemble: K networks, each averaged over a fixed random group of clients, that predict together.

Kim and Hospedales, A Hierarchical Bayesian Approach to Federated Learning, arXiv:2305.04979; appendix F.2, option
"ensemble".

Server keeps   θ_1 … θ_K   a network for each group, broadcast as they are: Kd numbers
Client keeps   j           its group
Client sends   j and θ_k   its group, and the weights after local training from θ_j, weighted by n_k

Training is that of `preset`: FedAvg within each group. A client predicts with all K networks, whose probabilities count
equally, each fine-tuned on its own data. With one network this is FedAvg, to the key.

Differs from the paper: a client draws its group when it enrols, so that groups are equal in expectation and not
exactly; all K networks travel down in training too; means within a group are weighted by n_k, as in FedAvg.

What the paper leaves open: the first networks are independent; a group without uploaders keeps its network;
probabilities are averaged, and not outputs. Statistics of a batch norm are one set for all groups, averaged plainly.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed import clusters
from priory.fed.about import About, Paper
from priory.fed.capabilities import Clustered, SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.clusters import Assigned
from priory.fed.local import Optimiser, Work, check_finetune, finetune_work, fit
from priory.fed.method import Info, Message, Method, Predictive, Task, equally
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Ensemble(Method[Params, Params, Array, Assigned, Params], SharedModel[Params, Params], Clustered[Array]):
    """An ensemble over random groups.

    Attributes:
        num_networks: K, how many groups and networks there are.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal networks; 0 keeps the global ones.
        finetune_step_size: Learning rate of those passes.
    """

    num_networks: int = static(default=2)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Kim and Hospedales", "A Hierarchical Bayesian Approach to Federated Learning", 2023, arxiv="2305.04979"
        ),
        keeps="the number of its group",
        sends="its weights and the number of its group",
    )
    linear: ClassVar[bool] = False

    def check(self) -> None:
        at_least("num-networks", self.num_networks, 1)
        check_fields(self)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Params:
        return clusters.fresh(task, key, self.num_networks, alike=False, name="num-networks")

    def init_client(self, task: Task, down: Params, key: Key) -> Array:
        del task, down
        return jax.random.randint(key, (), 0, self.num_networks, jnp.int32)

    def client_update(
        self, task: Task, down: Params, client: Array, data: Shard, key: Key
    ) -> tuple[Array, Message[Assigned], Info]:
        params, loss = fit(task.nll, clusters.pick(down, client), data, self.optimiser, self.work, key)
        sent = Assigned(client, params.weights, params.stats)
        return client, Message(sent, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Assigned], key: Key) -> tuple[Params, Info]:
        del task, key
        return clusters.aggregate(server, messages)

    def personalise(self, task: Task, down: Params, client: Array, data: Shard, key: Key) -> Params:
        del client
        optimiser, work = finetune_work(self)

        def tuned(place: tuple[Params, Key]) -> Params:
            network, key = place
            return fit(task.nll, network, data, optimiser, work, key)[0]

        keys = key[None] if self.num_networks == 1 else jax.random.split(key, self.num_networks)
        return jax.lax.map(tuned, (clusters.several(down, jnp.arange(self.num_networks)), keys))

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        del task, data, key
        return clusters.several(down, jnp.arange(self.num_networks))

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        return equally(task, posterior, x)

    def reference(self, task: Task, down: Params, payload: Assigned) -> Assigned:
        del task
        return clusters.reference(down, payload)

    def cluster(self, client: Array) -> Array:
        return client
