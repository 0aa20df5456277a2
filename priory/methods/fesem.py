"""FeSEM: K centres, and each client in the cluster whose centre its weights are nearest to.

Xie et al., Multi-Center Federated Learning, arXiv 2020, arXiv:2005.01026.

    min Σ_k ‖w_k − c_{j(k)}‖²,   j(k) = argmin_j ‖w_k − c_j‖²

Server keeps   c_1 … c_K   the centres, broadcast as they are: Kd numbers
Client keeps   j           its cluster
Client sends   j and w_k   its cluster, and the weights after local training from the centre of its last one, weighted
                           by n_k

A round of the paper's stochastic EM: local training of w_k from the centre of the client's cluster, j(k) anew by the
distance of w_k to the centres (E-step), each centre to the mean of its members (M-step). With one cluster this is
FedAvg, to the key.

Choices that the paper leaves open:

- The client computes its own j, against the centres that it was sent, which are those the server still has. So it keeps
  j and need not keep w_k, and the server learns the number with the weights, as it would in the paper.
- A client begins, and so does a newcomer, at the centre with the lowest loss on its own examples (at most 1000 of
  them), by lot among equals.
- The first centres are all equal, so that chance parts the clients, and distances sort them from then on. Independent
  networks are so far apart that a w_k seldom leaves the one it started from (`first_networks="independent"`).
- Means are weighted by n_k. A centre without clients stays as it is.
- The personal model is the client's centre, fine-tuned as in FedAvg.
- For a global prediction the client's training data choose the centre, by their loss. Without any, all K count equally.
- Statistics of a batch norm are one set for all clusters, averaged plainly, and no part of a distance.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import mixture
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
class FeSEM(Method[Params, Params, Array, Assigned, Params], SharedModel[Params, Params], Clustered[Array]):
    """FeSEM.

    Attributes:
        clusters: K, how many centres there are.
        first_networks: Equal, so that chance parts the clients, or independent.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the centre.
        finetune_step_size: Learning rate of those passes.
    """

    clusters: int = static(default=2)
    first_networks: Literal["equal", "independent"] = static(default="equal")
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper("Xie et al.", "Multi-Center Federated Learning", 2020, arxiv="2005.01026"),
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
        before = self._placed(task, down, client, data, key_choice)
        params, loss = fit(task.nll, clustered.pick(down, before), data, self.optimiser, self.work, key_work)
        distances = mixture.squared_distances(params.weights, down.weights)
        stays = (jnp.arange(self.clusters) == before).astype("float32")  # among centres that are equally near
        nearest = clustered.least(distances, stays).astype("int32")  # Algorithm 1, E-step
        sent = Assigned(nearest, params.weights, params.stats)
        kept = jnp.where(data.count > 0, nearest, client)
        info = {"loss": loss, "distance": jnp.sqrt(distances[nearest])}
        return kept, Message(sent, weight=data.count.astype("float32")), info

    def aggregate(self, task: Task, server: Params, messages: Message[Assigned], key: Key) -> tuple[Params, Info]:
        del task, key
        return clustered.aggregate(server, messages)  # Algorithm 1, M-step

    def personalise(self, task: Task, down: Params, client: Array, data: Shard, key: Key) -> Params:
        key_choice, key_work = clustered.split(key, self.clusters)
        start = clustered.pick(down, self._placed(task, down, client, data, key_choice))
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

    def _placed(self, task: Task, down: Params, client: Array, data: Shard, key: Key) -> Array:
        """Return the client's cluster, or for one that has none yet that with the lowest loss on its own examples."""
        lots = clustered.draw_lots(key, self.clusters)
        return jax.lax.cond(client >= 0, lambda: client, lambda: clustered.choose(task, down, data, lots))
