"""IFCA: K networks, and each client trains the one that fits its data best.

Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, arXiv:2006.04088.

Server keeps   θ_1 … θ_K   a network for each cluster, broadcast as they are: Kd numbers
Client keeps   j           its last cluster, which nothing but reports read
Client sends   j and θ_k   its cluster, and the weights after local training from θ_j, weighted by n_k

Algorithm 1 with model averaging (option II): j = argmin_j F_k(θ_j), local training from θ_j, the mean within each
cluster. With one cluster this is FedAvg, to the key.

Choices that the paper leaves open:

- Losses are compared on at most 1000 of the client's training examples, drawn once and for all, ties broken by lot.
- The paper begins with independent networks, and restarts where that goes wrong: one of them may be the best for
  everybody and takes all clients for ever. Here the first networks are all equal, so that chance parts the clients, and
  those in the majority of a cluster find it the better one next time (`first_networks="independent"` for the paper's).
- Means within a cluster are weighted by n_k; the paper's clients all have the same number. A cluster without clients
  stays as it is.
- The personal model is the cluster's network, fine-tuned as in FedAvg; the paper's is not (`finetune_epochs=0`).
- For a global prediction the client's training data choose the cluster. Without any, all K count equally.
- Statistics of a batch norm are one set for all clusters, averaged plainly.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Clustered, SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Work, check_finetune, finetune, fit
from priory.fed.method import Info, Message, Method, Predictive, Task, equally
from priory.fed.shard import Shard
from priory.methods._blocks import clustered
from priory.methods._blocks.clustered import Assigned
from priory.models.model import Params


@struct
class IFCA(Method[Params, Params, Array, Assigned, Params], SharedModel[Params, Params], Clustered[Array]):
    """IFCA.

    Attributes:
        clusters: K, how many networks there are.
        first_networks: Equal, so that chance parts the clients, or independent, as printed.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps that of its cluster.
        finetune_step_size: Learning rate of those passes.
    """

    clusters: int = static(default=2)
    first_networks: Literal["equal", "independent"] = static(default="equal")
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Ghosh et al.",
            "An Efficient Framework for Clustered Federated Learning",
            2020,
            venue="NeurIPS",
            arxiv="2006.04088",
        ),
        keeps="the number of its cluster",
        sends="its weights and the number of its cluster",
    )

    def check(self) -> None:
        check_fields(self)
        at_least("clusters", self.clusters, 1)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Params:
        return clustered.fresh(task, key, self.clusters, alike=self.first_networks == "equal")

    def init_client(self, task: Task, down: Params, key: Key) -> Array:
        del task, down, key
        return jnp.int32(-1)

    def client_update(
        self, task: Task, down: Params, client: Array, data: Shard, key: Key
    ) -> tuple[Array, Message[Assigned], Info]:
        key_choice, key_work = clustered.split(key, self.clusters)
        chosen = self._choose(task, down, data, key_choice)  # Algorithm 1: ĵ = argmin_j F_k(θ_j)
        start = clustered.pick(down, chosen)
        params, loss = fit(task.nll, start, data, self.optimiser, self.work, key_work)
        sent = Assigned(chosen, params.weights, params.stats)
        kept = jnp.where(data.count > 0, chosen, client)
        return kept, Message(sent, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Assigned], key: Key) -> tuple[Params, Info]:
        del task, key
        return clustered.aggregate(server, messages)  # Algorithm 1, option II

    def personalise(self, task: Task, down: Params, client: Array, data: Shard, key: Key) -> Params:
        key_choice, key_work = clustered.split(key, self.clusters)
        start = clustered.pick(down, self._choose(task, down, data, key_choice))
        own = finetune(self, task.nll, start, data, key_work)
        return jax.tree.map(lambda leaf: leaf[None], own)

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        return clustered.population(task, down, data, key)

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        return equally(task, posterior, x)

    def reference(self, task: Task, down: Params, payload: Assigned) -> Assigned:
        del task
        return clustered.reference(down, payload)

    def _choose(self, task: Task, down: Params, data: Shard, key: Key) -> Array:
        """Return the cluster with the lowest loss on the client's own examples."""
        return clustered.choose(task, down, data, clustered.draw_lots(key, self.clusters))
