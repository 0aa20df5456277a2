"""FedBNN: clients with Bayesian networks of their own, which meet in what these say about inputs known to all.

Makhija, Ghosh and Ho, A Bayesian Approach for Personalized Federated Learning in Heterogeneous Settings, NeurIPS 2024,
arXiv:2306.07959. Algorithm 1 of its supplement.

    Φ_i(X)    mean over draws W ~ q_i of softmax outputs on the alignment set X, K inputs without labels
    target    Φ_i ← γ Φ̄(X) + (1 − γ) Φ_i(X)
    prior     ψ_i* = argmin_ψ CE(target, Φ_ψ(X)),   Φ_ψ the mean over W ~ p(·; ψ)                              eq. (4)
    posterior θ_i* = argmin_θ KL(q(W | θ) ‖ p(W; ψ*)) − E_q log p(D_i | W)                                      eq. (5)

Server keeps   Φ̄(X), K x C probabilities; with `cache` the last Φ_j of every client
Server sends   Φ̄(X): K·C numbers, whatever the networks
Client keeps   q_i = Π N(μ, σ²) over its own network, and Φ_i(X)
Client sends   Φ_i(X) under its new posterior: K·C numbers, weighted equally

Choices that the paper leaves open (docs/methods/fedbnn.md has the measurements):

- Printed, the prior's loss is CE(Φ_corrected, Φ̄) with Φ_corrected a mixture that Φ_ψ enters; then γ = 1 has no gradient
  and γ = 0 pulls to Φ̄ alone, the opposite of "the amount of global knowledge". Here the mixture is the target, without
  a gradient, and Φ_ψ the prediction. `prior_loss="printed"` is as printed.
- ψ starts at the means of q_i with the width `prior_sd` and both are fitted. Before anybody has sent anything there is
  no Φ̄: the prior is then N(0, prior_sd²), and nothing is fitted.
- The prior is fitted with `samples_per_step` draws a step; by Jensen's inequality the loss of few draws bounds that of
  many from above.
- The local work begins at the prior's means, with the widths that q_i had. From q_i's own means the little work of a
  round never reaches what the prior has learned of the others.
- Φ_i before the round is the one last sent, without noise that a channel added; uniform for a client that is new.
- Φ̄ sums over all clients though not all report: it is the mean over those that do, or with `cache` over the last
  words of all. Rows are cut at 0 and divided by their sums, which changes nothing without noise.
- The divergence counts ζ/n for a mean over examples, ζ = 1 as printed. Draws of the likelihood are as in pFedBayes.
- γ is called a noise parameter in the list of inputs; it is the mixing weight. Noise is the business of `--dp`.
- Sensitivity for privacy: rows of probabilities differ by √2 at most, K of them by √(2K), whether a record of a client
  changes or all of them. A row has a norm of at most 1, so adding or removing a client moves a sum by at most √K.
"""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from priory.bayes import gaussian
from priory.bayes.gaussian import Free
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Draws, PosteriorCheck
from priory.fed.checks import at_least, check_fields, finite, positive
from priory.fed.local import Optimiser, Work, each_batch, fit
from priory.fed.method import Info, Message, Method, Predictive, Task, equally
from priory.fed.shard import Batch, Shard
from priory.methods._blocks import coupled_vi, public_set
from priory.methods._blocks.coupled_vi import VariationalParams
from priory.models.likelihood import Categorical
from priory.models.model import Params


@struct
class Server:
    """The state of the server.

    Attributes:
        mean: Φ̄, (inputs, classes); zeros before anybody has reported.
        cache: The last Φ_j and weight of every client, and their weighted sum; None without `cache`.
    """

    mean: Array
    cache: "Cache | None" = None


@struct
class Cache:
    """The last report of every client.

    Attributes:
        said: Φ_j, (clients, inputs, classes).
        weight: (clients,); 0 for one that has not reported.
        total: Σ_j w_j Φ_j, kept up so that a round costs no more than its cohort.
    """

    said: Array
    weight: Array
    total: Array


@struct
class Client:
    """The state of a client.

    Attributes:
        q: Its posterior.
        phi: Φ_i, what it said last.
    """

    q: VariationalParams
    phi: Array


@struct
class FedBNN(Method[Server, Array, Client, Array, VariationalParams], Draws[VariationalParams], PosteriorCheck[Array]):
    """FedBNN, collaboration in function space.

    Attributes:
        gamma: γ, share of global knowledge in the target of the prior.
        zeta: ζ, weight of the divergence from the prior.
        rho: ρ of all weights at the start; σ = softplus(ρ).
        prior_sd: Standard deviation of the prior before it is fitted.
        prior_epochs: Passes over the alignment set that fit the prior.
        prior_rate: Step size of those passes, as a multiple of that of the posterior.
        prior_loss: Fit the prior to the mixed target, or minimise the loss that is printed.
        cache: The server remembers what every client said last; otherwise it averages over those that report.
        samples_per_step: Monte Carlo samples in a step, of the likelihood and of the prior's prediction.
        draw: Draw outputs of layers where that is exact in expectation, or always the weights.
        samples: Networks that speak for a client, on the alignment set and in predictions.
        optimiser: Local solver, of prior and posterior.
        work: Local work of a round; its batch size is also that of the passes over the alignment set.
    """

    gamma: float = 0.7
    zeta: float = 1.0
    rho: float = -4.0
    prior_sd: float = 0.1
    prior_epochs: int = static(default=1)
    prior_rate: float = 1.0
    prior_loss: Literal["target", "printed"] = static(default="target")
    cache: bool = static(default=False)
    samples_per_step: int = static(default=1)
    draw: Literal["layers", "weights"] = static(default="layers")
    samples: int = static(default=4)
    optimiser: Optimiser = Optimiser("adam", 0.001)
    work: Work = Work(batch_size=50)

    about: ClassVar[About] = About(
        paper=Paper(
            "Makhija et al.",
            "A Bayesian Approach for Personalized Federated Learning in Heterogeneous Settings",
            2024,
            venue="NeurIPS",
            arxiv="2306.07959",
        ),
        keeps="its Gaussian posterior and the probabilities it sent last",
        sends="class probabilities on the public inputs",
    )

    bounded: ClassVar[bool] = True  # rows of probabilities

    @property
    def linear(self) -> bool:
        return not self.cache

    def check(self) -> None:
        check_fields(self)
        if not 0 <= self.gamma <= 1:
            raise UsageError(f"gamma={self.gamma} lies outside [0, 1]; choose a share such as 0.7.")
        at_least("zeta", self.zeta, 0)
        finite("rho", self.rho)
        positive("prior-sd", self.prior_sd)
        at_least("prior-epochs", self.prior_epochs, 0)
        positive("prior-rate", self.prior_rate)
        for name in ("samples_per_step", "samples"):
            at_least(name.replace("_", "-"), getattr(self, name), 1)

    def init_server(self, task: Task, key: Key) -> Server:
        del key
        shape = _alignment(task).shape[0], _num_classes(task)
        mean = jnp.zeros(shape)
        if not self.cache:
            return Server(mean)
        return Server(mean, Cache(jnp.zeros((task.num_clients, *shape)), jnp.zeros(task.num_clients), mean))

    def broadcast(self, server: Server) -> Array:
        return server.mean

    def init_client(self, task: Task, down: Array, key: Key) -> Client:
        drawn = task.init(key)
        q = VariationalParams(gaussian.around(drawn.weights, self.rho), drawn.stats)
        return Client(q, jnp.full_like(down, 1 / down.shape[1]))

    def client_update(
        self, task: Task, down: Array, client: Client, data: Shard, key: Key
    ) -> tuple[Client, Message[Array], Info]:
        key_prior, key_posterior, key_say = jax.random.split(key, 3)
        prior, prior_loss = self._prior(task, down, client, key_prior)  # eq. (4)
        q, loss = self._posterior(task, _begin(client.q, prior, _heard(down)), prior, data, key_posterior)  # eq. (5)
        phi = self._says(task, q, key_say)  # Algorithm 1: Φ_i(X), the mean over K draws
        info = {
            "loss": loss,
            "prior_loss": prior_loss,
            "divergence": gaussian.kl(gaussian.of(q.weights), gaussian.of(prior)),
            # Before anybody has spoken there is nothing to agree with.
            "agreement": jnp.where(_heard(down), jnp.mean(jnp.argmax(phi, -1) == jnp.argmax(down, -1)), jnp.nan),
        }
        return Client(q, phi), Message(phi, weight=(data.count > 0).astype("float32")), info

    def aggregate(self, task: Task, server: Server, messages: Message[Array], key: Key) -> tuple[Server, Info]:
        del task, key
        if server.cache is None:
            mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=server.mean)  # Algorithm 1: Φ̄(X)
            return replace(server, mean=trees.select(jnp.sum(messages.weight) > 0, _rows(mean), server.mean)), {}
        assert messages.sender is not None
        old, sender = server.cache, messages.sender
        there = messages.weight > 0
        said = jnp.where(there[:, None, None], messages.payload, 0.0)
        before = old.weight[sender, None, None] * old.said[sender]
        change = jnp.where(there[:, None, None], messages.weight[:, None, None] * said - before, 0.0)
        target = jnp.where(there, sender, old.weight.shape[0])  # past the end: dropped
        cache = Cache(
            said=old.said.at[target].set(said, mode="drop"),
            weight=old.weight.at[target].set(messages.weight, mode="drop"),
            total=old.total + jnp.sum(change, axis=0),
        )
        weight = jnp.sum(cache.weight)
        mean = _rows(cache.total / jnp.where(weight > 0, weight, 1.0))
        return trees.select(jnp.any(there), Server(mean, cache), server), {}

    def personalise(self, task: Task, down: Array, client: Client, data: Shard, key: Key) -> VariationalParams:
        del task, down, data, key
        return client.q

    def predict(self, task: Task, posterior: VariationalParams, x: Array, key: Key) -> Predictive:
        return equally(task, self.draws(task, posterior, key, self.samples), x)

    def draws(self, task: Task, posterior: VariationalParams, key: Key, num: int) -> Params:
        del task
        return coupled_vi.draw_networks(posterior, key, num)

    def reference(self, task: Task, down: Array, payload: Array) -> Array:
        del task, down
        return jnp.zeros_like(payload)

    def uncertified(self, task: Task) -> str:
        del task
        return (
            "its prior ψ is fitted to what the client itself says on the alignment set, and is not independent of the "
            "client's rows; choose a method whose prior is broadcast, such as pfedbayes"
        )

    def sensitivity(self, task: Task, replaces: bool = True) -> float:
        """Return √(2K), the largest distance of two matrices of K rows of probabilities; √K, the largest norm."""
        return math.sqrt((2 if replaces else 1) * _alignment(task).shape[0])

    def knowing(self, task: Task, mean: Params, sd: Any) -> Array:
        """Return an empty report, which leaves clients the prior N(0, prior_sd²): there is no other to broadcast."""
        del mean, sd
        return jnp.zeros((_alignment(task).shape[0], _num_classes(task)))

    def local_baseline(self) -> "FedBNN":
        """Return the same training without the others: γ = 0."""
        return replace(self, gamma=0.0)

    def _prior(self, task: Task, down: Array, client: Client, key: Key) -> tuple[Free, Array]:
        """Return ψ*, and the mean of its loss; N(0, prior_sd²) until a client has reported."""
        wide = gaussian.rho_of(jnp.float32(self.prior_sd))
        heard = _heard(down)
        centre = jax.tree.map(lambda leaf: jnp.where(heard, leaf, 0.0), client.q.weights.mean)
        start = gaussian.around(centre, wide)
        target = self.gamma * down + (1 - self.gamma) * client.phi  # Algorithm 1: Φ_i^corrected
        inputs = public_set.as_shard(_alignment(task))
        solver = replace(self.optimiser, step_size=self.optimiser.step_size * self.prior_rate)
        work = Work(epochs=self.prior_epochs, batch_size=min(self.work.batch_size, inputs.capacity))

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            row = batch.y  # of the alignment set
            said = self._mean_softmax(task, VariationalParams(params.weights, client.q.stats), batch.x, key)
            return jnp.sum(batch.mask * self._distance(down[row], target[row], said)) / jnp.sum(batch.mask), ()

        fitted, loss = jax.lax.cond(
            heard,
            lambda start: fit(objective, start, inputs, solver, work, key),
            lambda start: (start, jnp.float32(0)),
            Params(start, ()),
        )
        return fitted.weights, loss

    def _distance(self, down: Array, target: Array, said: Array) -> Array:
        """Return the cross-entropy of each row, (batch,)."""
        if self.prior_loss == "printed":
            return -jnp.sum(down * _log(self.gamma * down + (1 - self.gamma) * said), axis=-1)
        return -jnp.sum(target * _log(said), axis=-1)

    def _posterior(
        self, task: Task, q: VariationalParams, prior: Free, data: Shard, key: Key
    ) -> tuple[VariationalParams, Array]:
        """Return the posterior after the local work under a fixed prior, and the mean of its likelihood term."""
        nll = coupled_vi.likelihood(task, self.draw, self.samples_per_step)
        transform, w = self.optimiser.build(), gaussian.of(prior)
        share = self.zeta / jnp.maximum(data.count, 1).astype(jnp.float32)

        def step(carry: tuple, batch: Batch, key: Key) -> tuple:
            free, stats, state, total, steps = carry
            at = gaussian.of(free)
            (value, stats), slope = jax.value_and_grad(nll, has_aux=True)(at, stats, batch, key)
            slope = gaussian.chain(free, trees.axpy(share, gaussian.kl_gradient(at, w), slope))  # eq. (5)
            moves, state = transform.update(slope, state, free)
            return optax.apply_updates(free, moves), stats, state, total + value, steps + 1

        start = (q.weights, q.stats, transform.init(q.weights), jnp.float32(0), jnp.int32(0))
        free, stats, _, total, steps = each_batch(step, start, data, self.work, key)
        return VariationalParams(free, stats), total / jnp.maximum(steps, 1)

    def _says(self, task: Task, q: VariationalParams, key: Key) -> Array:
        """Return Φ_i on the alignment set, (inputs, classes)."""
        x = _alignment(task)
        draws = self.draws(task, q, key, self.samples)
        said = jax.lax.map(lambda params: public_set.probabilities(task, params, x, self.work.batch_size), draws)
        return jnp.mean(said, axis=0)

    def _mean_softmax(self, task: Task, belief: VariationalParams, x: Array, key: Key) -> Array:
        """Return the mean over draws of the probabilities, with a gradient to the distribution."""
        at = gaussian.of(belief.weights)

        def one(i: Array) -> Array:
            params = Params(gaussian.draw(jax.random.fold_in(key, i), at), belief.stats)
            return jax.nn.softmax(task.model.apply(params, x)[0])

        return jnp.mean(jax.lax.map(one, jnp.arange(self.samples_per_step)), axis=0)


def _alignment(task: Task) -> Array:
    """Return the inputs known to all."""
    if task.public is None:
        raise UsageError(
            "fedbnn needs inputs that are known to all clients, and the federation has none; name them with --align, "
            "such as --align own:500."
        )
    return task.public


def _num_classes(task: Task) -> int:
    if not isinstance(task.likelihood, Categorical):
        raise UsageError(
            "fedbnn averages probabilities of classes, and the data are a regression; choose a method such as "
            "pfedbayes."
        )
    return task.likelihood.num_classes


def _heard(down: Array) -> Array:
    """Return whether any client has reported: probabilities add up to 1, and nothing to 0."""
    return jnp.sum(down) > 0


def _begin(q: VariationalParams, prior: Free, heard: Array) -> VariationalParams:
    """Return the start of the local work: the prior's means, with the client's own widths."""
    mean = trees.select(heard, prior.mean, q.weights.mean)
    return replace(q, weights=replace(q.weights, mean=mean))


def _rows(mean: Array) -> Array:
    """Return the rows cut at 0 and divided by their sums; a row that noise has cut to zeros becomes uniform."""
    kept = jnp.maximum(mean, 0.0)
    total = jnp.sum(kept, axis=-1, keepdims=True)
    return jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), 1 / mean.shape[-1])


def _log(probability: Array) -> Array:
    """Return the logarithm, finite where p is 0."""
    return jnp.log(jnp.maximum(probability, jnp.finfo(jnp.float32).tiny))
