"""FedBE: the server makes an ensemble of networks drawn around those of its clients, and distils it into one.

Chen and Chao, FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021, arXiv:2009.01974.

    w̄ = Σ_k n_k w_k / Σ_k n_k,   σ² = Σ_k n_k (w_k − w̄)² / Σ_k n_k           for each weight
    M networks  w ~ N(w̄, s²σ²),  or  Σ_k γ_k w_k with γ ~ Dirichlet(α)
    target      the mean of what these, all w_k and w̄ say of an unlabelled input, as probabilities, sharpened: ∝ p^(1/T)
    w^{t+1}     w̄ after training on the targets; the mean of the iterates of the second half (SWA)

Server keeps   w^t   the distilled network; broadcast as it is
Client keeps   nothing
Client sends   w_k   its weights after local training, weighted by n_k

The unlabelled inputs are the alignment set of the federation, which only the server reads. Personalisation is
fine-tuning from w^t.

Where paper and authors' code differ, and what is done here:

- The code fits its Gaussian to steps w_k − w^t, each layer divided by its length; the paper to the weights, and so it
  is here. The factor s = 0.1 on the standard deviation is the code's, which calls it a scale of the variance.
- The averaging of iterates begins halfway and takes every step; the code takes each 25th after the 500th.
- The loss is a cross-entropy, a mean over inputs; the code divides it by the number of classes as well.
- The student runs with the mean of the clients' batch-norm statistics and without dropout. So do networks drawn around
  them; a client's own network has its own statistics.
- Dirichlet draws belong to clients by their number, so that the order of messages does not matter.
"""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import SharedModel
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Work, each_batch, finetune, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Batch, Shard
from priory.methods._blocks import public_set
from priory.models.likelihood import Categorical
from priory.models.model import Params

Weights = Any


@struct
class FedBE(Method[Params, Params, tuple[()], Params, Params], SharedModel[Params, Params]):
    """FedBE.

    Attributes:
        distribution: What networks are drawn from: a Gaussian for each weight, or Dirichlet mixtures of the clients'.
        samples: M, networks that are drawn.
        spread: s, factor on the standard deviation of the Gaussian; 0 draws the mean.
        concentration: α of the Dirichlet distribution.
        temperature: T, below 1 sharpens what the ensemble says.
        distil_epochs: Passes over the unlabelled inputs that distil the ensemble; 0 keeps the mean, as FedAvg does.
        distil_step_size: Learning rate of those passes.
        distil_momentum: Their momentum.
        distil_batch_size: Their inputs in a minibatch.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal model; 0 keeps the global one.
        finetune_step_size: Learning rate of those passes.
    """

    distribution: Literal["gaussian", "dirichlet"] = static(default="gaussian")
    samples: int = static(default=10)
    spread: float = 0.1
    concentration: float = 1.0
    temperature: float = 0.5
    distil_epochs: int = static(default=20)
    distil_step_size: float = 0.01
    distil_momentum: float = static(default=0.9)
    distil_batch_size: int = static(default=128)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Chen and Chao",
            "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning",
            2021,
            venue="ICLR",
            arxiv="2009.01974",
        ),
        keeps="nothing",
        sends="its weights",
    )

    def check(self) -> None:
        check_fields(self)
        at_least("samples", self.samples, 1)
        at_least("spread", self.spread, 0)
        for name in ("concentration", "temperature", "distil_step_size", "finetune_step_size"):
            positive(name.replace("_", "-"), getattr(self, name))
        for name in ("distil_epochs", "finetune_epochs"):
            at_least(name.replace("_", "-"), getattr(self, name), 0)
        at_least("distil-batch-size", self.distil_batch_size, 1)
        if not 0 <= self.distil_momentum < 1:
            raise UsageError(f"distil-momentum={self.distil_momentum} lies outside [0, 1); choose one such as 0.9.")

    def init_server(self, task: Task, key: Key) -> Params:
        if self.distil_epochs > 0:
            _public(task)  # said before anything is trained
        return task.init(key)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        params, loss = fit(task.nll, down, data, self.optimiser, self.work, key)
        return client, Message(params, weight=data.count.astype("float32")), {"loss": loss}

    def aggregate(self, task: Task, server: Params, messages: Message[Params], key: Key) -> tuple[Params, Info]:
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=server)  # Algorithm 1, the mean w̄
        if self.distil_epochs == 0:
            return mean, {}
        key_draw, key_distil = jax.random.split(key)
        target = self._target(task, mean, messages, key_draw)  # Algorithm 1, networks drawn and pseudo-labels
        distilled, loss = self._distilled(task, mean, target, key_distil)  # Algorithm 1, SWA
        there = jnp.any(messages.weight > 0)
        return trees.select(there, distilled, server), {"distil_loss": jnp.where(there, loss, jnp.nan)}

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Params:
        return finetune(self, task.nll, down, data, key)

    def _target(self, task: Task, mean: Params, messages: Message[Params], key: Key) -> Array:
        """Return the probabilities of the ensemble on the unlabelled inputs, sharpened; (inputs, classes)."""
        x = _public(task)
        draw = self._gaussian(mean, messages) if self.distribution == "gaussian" else self._dirichlet(mean, messages)

        def says(params: Params) -> Array:
            return public_set.probabilities(task, params, x, self.distil_batch_size)

        def add(i: Array, total: Array) -> Array:
            return total + says(Params(draw(jax.random.fold_in(key, i)), mean.stats))

        there = (messages.weight > 0).astype(jnp.float32)
        total = says(mean) + trees.weighted_sum(messages.payload, there, of=says)
        total = jax.lax.fori_loop(0, self.samples, add, total)
        return _sharpened(total / (self.samples + 1 + jnp.sum(there)), self.temperature)

    def _gaussian(self, mean: Params, messages: Message[Params]) -> Any:
        """Return the function from a key to weights drawn from N(w̄, s²σ²)."""

        def squares(member: Params) -> Weights:
            return jax.tree.map(lambda w, centre: jnp.square(w - centre), member.weights, mean.weights)

        variance = trees.weighted_mean(
            messages.payload, messages.weight, otherwise=trees.zeros(mean.weights), of=squares
        )
        sd = jax.tree.map(lambda leaf: self.spread * jnp.sqrt(leaf), variance)

        def draw(key: Key) -> Weights:
            leaves, structure = jax.tree.flatten(mean.weights)
            keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
            return jax.tree.map(lambda k, w, s: w + s * jax.random.normal(k, w.shape), keys, mean.weights, sd)

        return draw

    def _dirichlet(self, mean: Params, messages: Message[Params]) -> Any:
        """Return the function from a key to a Dirichlet mixture of the clients' weights, Σ_k γ_k w_k."""
        assert messages.sender is not None
        sender = messages.sender

        def draw(key: Key) -> Weights:
            # Independent gamma variables over their sum are Dirichlet; each client's own does not know its place.
            gamma = jax.vmap(lambda who: jax.random.gamma(jax.random.fold_in(key, who), self.concentration))(sender)
            share = jnp.where(messages.weight > 0, jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny), 0.0)
            return trees.weighted_mean(messages.payload, share, otherwise=mean).weights

        return draw

    def _distilled(self, task: Task, mean: Params, target: Array, key: Key) -> tuple[Params, Array]:
        """Return the mean of the student's iterates after half of its work, and its mean loss; statistics stay."""
        inputs = public_set.as_shard(_public(task))
        work = Work(epochs=self.distil_epochs, batch_size=min(self.distil_batch_size, inputs.capacity))
        half = self.distil_epochs * math.ceil(inputs.capacity / work.batch_size) // 2
        transform = Optimiser("sgd", self.distil_step_size, self.distil_momentum).build()

        def loss(weights: Weights, batch: Batch) -> Array:
            outputs, _ = task.model.apply(Params(weights, mean.stats), batch.x)
            crosses = -jnp.sum(target[batch.y] * jax.nn.log_softmax(outputs), axis=-1)  # y: the row's number
            return jnp.sum(batch.mask * crosses) / jnp.sum(batch.mask)

        def step(carry: tuple, batch: Batch, key: Key) -> tuple:
            del key
            weights, state, average, total, steps = carry
            value, gradient = jax.value_and_grad(loss)(weights, batch)
            updates, state = transform.update(gradient, state, weights)
            weights = optax.apply_updates(weights, updates)
            share = 1 / jnp.maximum(steps + 1 - half, 1)  # until half the average is the iterate itself
            average = jax.tree.map(lambda a, w: (1 - share) * a + share * w, average, weights)
            return weights, state, average, total + value, steps + 1

        start = (mean.weights, transform.init(mean.weights), mean.weights, jnp.float32(0), jnp.int32(0))
        _, _, average, total, steps = each_batch(step, start, inputs, work, key)
        return Params(average, mean.stats), total / steps


def _public(task: Task) -> Array:
    """Return the unlabelled inputs."""
    if task.public is None:
        raise UsageError(
            "fedbe distils on inputs without labels, and the federation has none; name them with --align, such as "
            "--align own:500, or use --distil-epochs 0."
        )
    if not isinstance(task.likelihood, Categorical):
        raise UsageError(
            "fedbe averages probabilities of classes, and the data are a regression; choose a method such as fedavg."
        )
    return task.public


def _sharpened(probabilities: Array, temperature: Array | float) -> Array:
    """Return p^(1/T), divided by its sum; finite where p is 0."""
    logs = jnp.log(jnp.maximum(probabilities, jnp.finfo(jnp.float32).tiny))
    return jax.nn.softmax(logs / temperature, axis=-1)
