"""Random groups: K networks, each trained by FedAvg within a fixed random group of clients.

Kim and Hospedales, A Hierarchical Bayesian Approach to Federated Learning, arXiv:2305.04979; appendix F.2, options
"preset" and "ensemble".

Server keeps   θ_1 … θ_K   a network for each group, broadcast as they are: Kd numbers
Client keeps   j           its group
Client sends   j and θ_k   its group, and the weights after local training from θ_j, weighted by n_k

A client predicts with the network of its group, fine-tuned on its own data ("preset"), or with all K networks, each
fine-tuned on its own data, whose probabilities count equally ("ensemble"). With one network this is FedAvg, to the key.

Differs from the paper: a client draws its group when it enrols, so that groups are equal in expectation and not
exactly; all K networks travel down in training, though a client reads one; means within a group are weighted by n_k, as
in FedAvg.

Choices that the paper leaves open: the first networks are independent; a group without uploaders keeps its
network; an ensemble averages probabilities, and not outputs; for a global prediction of "preset", where no group is
known, one is drawn. Statistics of a batch norm are one set for all groups, averaged plainly.
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
from priory.fed.method import Info, Message, Method, Predictive, Task, equally, point
from priory.fed.shard import Shard
from priory.methods._blocks import clustered
from priory.methods._blocks.clustered import Assigned
from priory.models.model import Params


@struct
class RandomGroups(Method[Params, Params, Array, Assigned, Params], SharedModel[Params, Params], Clustered[Array]):
    """Random groups with a network each.

    Attributes:
        num_networks: K, how many groups and networks there are.
        predict_with: What a client predicts with: the network of its `group`, or `all` networks, which count equally.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal networks; 0 keeps those of the server.
        finetune_step_size: Learning rate of those passes.
    """

    num_networks: int = static(default=2)
    predict_with: Literal["group", "all"] = static(default="group")
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

    def check(self) -> None:
        at_least("num-networks", self.num_networks, 1)
        check_fields(self)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Params:
        return clustered.fresh(task, key, self.num_networks, alike=False, name="num-networks")

    def init_client(self, task: Task, down: Params, key: Key) -> Array:
        del task, down
        return jax.random.randint(key, (), 0, self.num_networks, jnp.int32)

    def client_update(
        self, task: Task, down: Params, client: Array, data: Shard, key: Key
    ) -> tuple[Array, Message[Assigned], Info]:
        params, loss = fit(task.nll, clustered.pick(down, client), data, self.optimiser, self.work, key)
        sent = Assigned(client, params.weights, params.stats)
        return client, Message(sent, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Assigned], key: Key) -> tuple[Params, Info]:
        del task, key
        return clustered.aggregate(server, messages)

    def personalise(self, task: Task, down: Params, client: Array, data: Shard, key: Key) -> Params:
        if self.predict_with == "group":
            return finetune(self, task.nll, clustered.pick(down, client), data, key)  # appendix F.2, "preset"

        def tuned(network_and_key: tuple[Params, Key]) -> Params:
            network, key = network_and_key
            return finetune(self, task.nll, network, data, key)

        keys = key[None] if self.num_networks == 1 else jax.random.split(key, self.num_networks)
        return jax.lax.map(tuned, (clustered.several(down, jnp.arange(self.num_networks)), keys))

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Params:
        del data
        if self.predict_with == "group":
            return clustered.pick(down, self.init_client(task, down, key))
        return clustered.several(down, jnp.arange(self.num_networks))

    def predict(self, task: Task, posterior: Params, x: Array, key: Key) -> Predictive:
        del key
        if self.predict_with == "group":
            return point(task.model.apply(posterior, x)[0])
        return equally(task, posterior, x)  # appendix F.2, "ensemble"

    def reference(self, task: Task, down: Params, payload: Assigned) -> Assigned:
        del task
        return clustered.reference(down, payload)
