"""FedEM: every client's data are a mixture of a few distributions that all share, with a network for each.

Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021, arXiv:2108.10252.

    p_k(y | x) = Σ_m π_km p(y | x, θ_m),   q_k(z_i = m) ∝ π_km p(y_i | x_i, θ_m)

Server keeps   θ_1 … θ_M     the components, broadcast as they are: Md numbers
Client keeps   π_k           its mixture weights
Client sends   θ_k1 … θ_kM   its copies of the components after local training, weighted by n_k

Algorithm 1, round by round: responsibilities q_k of all examples under what was broadcast (E-step), π_k their mean, and
local training of each component on the loss weighted by them (M-step). With one component this is FedAvg, to the key.

Choices that the paper leaves open:

- The weighted loss of a minibatch is divided by its rows, as in the authors' code, and not by their responsibilities:
  a component that explains little of a client learns little from it. All learn M times slower than one network would
  at the same step size, as long as they share out the examples evenly.
- Components begin as independent networks, as in the authors' code; clients begin with equal weights.
- π_k is fitted `weight_steps` times more to the broadcast components before a client predicts, at no more than one pass
  over its data. The authors' code does so once for clients that took no part, and not for others.
- Comparisons of the FedHB paper fine-tune the network of every method to a client. With `finetune_epochs` the M-step is
  taken once more, on a client's own copies of the components; the paper's own personal models have none of it.
- Without π_k, for a global prediction, all components count equally.
- Statistics of a batch norm belong to their component; the E-step evaluates with those that were broadcast.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields
from priory.fed.local import Optimiser, Work, check_finetune, finetune_work, fit
from priory.fed.method import Info, Message, Method, Predictive, Task
from priory.fed.shard import Batch, Shard
from priory.models.model import Params

AT_ONCE = 250  # examples whose responsibilities are computed together
LEAST = 1e-30  # of a mixture weight, whose logarithm is to be finite


@struct
class Mixture:
    """Networks on axis 0, and the weight that each has in a prediction, (M,)."""

    components: Params
    weights: Array


@struct
class FedEM(Method[Params, Params, Array, Params, Mixture], SharedModel[Params, Mixture]):
    """FedEM.

    Attributes:
        num_components: M, how many networks all clients share.
        weight_steps: EM steps on a client's mixture weights before it predicts; 0 leaves them as training had them.
        optimiser: Local solver, of each component by itself.
        work: Local work of a round, done once for each component.
        finetune_epochs: Passes over a client's data that fit its own copies of the components; 0 keeps those of all.
        finetune_step_size: Learning rate of those passes.
    """

    num_components: int = static(default=3)
    weight_steps: int = static(default=5)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=0)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Marfoq et al.",
            "Federated Multi-Task Learning under a Mixture of Distributions",
            2021,
            venue="NeurIPS",
            arxiv="2108.10252",
        ),
        keeps="its mixture weights",
        sends="its copies of the M components",
    )
    linear: ClassVar[bool] = True

    def check(self) -> None:
        at_least("num-components", self.num_components, 1)
        at_least("weight-steps", self.weight_steps, 0)
        check_fields(self)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Params:
        drawn = [task.init(each) for each in self._split(key)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)

    def init_client(self, task: Task, down: Params, key: Key) -> Array:
        del task, down, key
        return self._equal()

    def client_update(
        self, task: Task, down: Params, client: Array, data: Shard, key: Key
    ) -> tuple[Array, Message[Params], Info]:
        share = _responsibilities(client, self._log_prob(task, down, data))  # Algorithm 1, E-step
        weights = _mean_share(share, data, otherwise=client)  # Algorithm 1, M-step of π_k
        # Algorithm 1, M-step of θ_km
        components, losses = self._train(task, down, share, data, self.optimiser, self.work, key)
        info = {f"share_{m + 1}": weights[m] for m in range(self.num_components)}
        message = Message(components, weight=data.count.astype("float32"))
        return weights, message, {"loss": jnp.sum(losses), **info}

    def personalise(self, task: Task, down: Params, client: Array, data: Shard, key: Key) -> Mixture:
        if self.weight_steps == self.finetune_epochs == 0:
            return Mixture(down, client)
        log_prob = self._log_prob(task, down, data)

        def step(_: Array, weights: Array) -> Array:
            return _mean_share(_responsibilities(weights, log_prob), data, otherwise=weights)

        weights = jax.lax.fori_loop(0, self.weight_steps, step, client)
        if self.finetune_epochs == 0:
            return Mixture(down, weights)
        optimiser, work = finetune_work(self)
        share = _responsibilities(weights, log_prob)
        return Mixture(self._train(task, down, share, data, optimiser, work, key)[0], weights)

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Mixture:
        del task, data, key
        return Mixture(down, self._equal())

    def predict(self, task: Task, posterior: Mixture, x: Array, key: Key) -> Predictive:
        del key
        outputs = jax.lax.map(lambda params: task.model.apply(params, x)[0], posterior.components)
        log_weights = jax.nn.log_softmax(_log(posterior.weights))
        return Predictive(outputs, jnp.broadcast_to(log_weights[:, None], outputs.shape[:2]))

    def _train(
        self, task: Task, components: Params, share: Array, data: Shard, optimiser: Optimiser, work: Work, key: Key
    ) -> tuple[Params, Array]:
        """Return each component after training on the loss weighted by its responsibilities: M-step of θ_1 … θ_M."""

        def train(place: tuple[Params, Array, Key]) -> tuple[Params, Array]:
            component, share, key = place

            def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
                outputs, stats = task.model.apply(params, batch.x, key=key)
                weighted = jnp.sum(batch.mask * share[batch.position] * task.log_prob(outputs, batch))
                return -weighted / jnp.maximum(jnp.sum(batch.mask), 1.0), stats

            return fit(objective, component, data, optimiser, work, key)

        return jax.lax.map(train, (components, share, self._split(key)))

    def _split(self, key: Key) -> Key:
        """Return a key for each component, (M,); a single one has all of it, as in FedAvg."""
        return key[None] if self.num_components == 1 else jax.random.split(key, self.num_components)

    def _equal(self) -> Array:
        return jnp.full(self.num_components, 1 / self.num_components)

    def _log_prob(self, task: Task, down: Params, data: Shard) -> Array:
        """Return the log-likelihood of each example under each component, (M, capacity), undefined past its count."""
        size = max(1, min(AT_ONCE, data.capacity))
        order = jnp.arange(data.capacity)

        def step(i: Array, found: Array) -> Array:
            batch = data.take(order, i, size)
            outputs = jax.lax.map(lambda params: task.model.apply(params, batch.x)[0], down)
            return jax.lax.dynamic_update_slice(found, task.log_prob(outputs, batch), (0, i * size))

        room = jnp.zeros((self.num_components, -(-data.capacity // size) * size))
        return jax.lax.fori_loop(0, data.num_batches(size), step, room)[:, : data.capacity]


def _responsibilities(weights: Array, log_prob: Array) -> Array:
    """Return q(z_i = m), (M, capacity)."""
    return jax.nn.softmax(_log(weights)[:, None] + log_prob, axis=0)


def _mean_share(share: Array, data: Shard, otherwise: Array) -> Array:
    """Return the mean responsibilities of a client's own examples, (M,), or `otherwise` if it has none."""
    own = jnp.arange(data.capacity) < data.count
    mean = jnp.sum(jnp.where(own[None], share, 0.0), axis=1) / jnp.maximum(data.count, 1)
    return jnp.where(data.count > 0, mean, otherwise)


def _log(weights: Array) -> Array:
    return jnp.log(jnp.maximum(weights, LEAST))
