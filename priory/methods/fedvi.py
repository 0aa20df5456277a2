"""FedVI: a client's posterior is one forward pass on its inputs, so it needs neither state nor labels.

Vedadi, Dillon, Mansfield, Singhal, Afkanpour and Morningstar, Federated Variational Inference: Towards Improved
Personalization and Generalization, 2023, arXiv:2305.13672.

    θ ~ t,   β_k ~ r = N(0, σ₀² I),   y | x ~ the likelihood of the network with parameters θ and β_k
    θ minimises   Σ_k Σ_i −E log p(y_ik | θ, β_k, x_ik) + τ Σ_k KL(q(β_k | x_k) ‖ r) + γ KL(q(θ) ‖ t)      eq. (8)

Server keeps   θ: the embedding h, the posterior constructor g and the global classifier; the momentum of its optimiser
Server sends   θ
Client keeps   nothing
Client sends   θ_k, its θ after local training, weighted by n_k

The last layer of the network sees features of two kinds: weights of the global ones are learned by the federation, and
those of the local ones are a client's β, drawn from a Gaussian that g computes from the global features of the client's
support inputs. A personal model is thus the network itself with a last layer of its own.

Choices that the paper leaves open (docs/methods/fedvi.md has the measurements):

- The first int(0.8 d) features are global, the others local (footnote 6; (24) has them the other way round).
- b_θ is the bias of the global classifier, b_β (`_blocks/local_classifier.py`) a function of the support and not drawn,
  so the divergence that is reported is that of β alone.
- q sees the support, the likelihood the query: the halves of a minibatch, of an odd one the smaller for support; a
  minibatch of one example is skipped, and so is a client with no more. `overlap` uses all for both.
- (24) has a sum over the query beside τ/256 KL; it is read as a mean (per-datum bound, b = 256), the only reading in
  which 2.56 is not the true step size. `reduction="sum"` is as printed.
- The server's step: θ + η(mean θ_k − θ) with momentum; η = 1 without is FedAvg's.
- γ: the paper keeps θ a point under a flat prior and names more as future work. `gamma` makes q(θ) a Gaussian for each
  weight under t = N(0, prior_sd²), drawn once a minibatch; its divergence counts γ/|D| for a mean over examples.
- Prediction uses the mean of β (and of θ), or the mean over `samples` draws. A client's support is all of its training
  inputs; without any it has the prior, whose mean is the global classifier.
- Labels of a client may refine its Gaussian by `refine_epochs` of its own objective, θ fixed.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from priory.bayes import gaussian
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Advises, Certified, Certifies, Draws, PosteriorCheck, SharedModel, Unlabelled
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Work, each_batch
from priory.fed.method import Info, Message, Method, Predictive, Task, equally, even_mixture, point
from priory.fed.shard import Batch, Shard
from priory.methods._blocks import local_classifier
from priory.methods._blocks.embedding import Embedding
from priory.methods._blocks.local_classifier import Local
from priory.models.model import Params
from priory.models.sets import SetNet

Weights = Any
Theta = dict[str, Any]  # weights of the embedding h, the constructor g and the global classifier
FIRST_SD = 0.01  # of q(θ)


@struct
class Server:
    """The state of the server: θ, or the free coordinates of q(θ); statistics; the state of its optimiser."""

    weights: Any
    stats: Any
    optimiser: Any


@struct
class Posterior:
    """A personal model: θ (or q(θ)) as it was broadcast, and the client's own Gaussian."""

    theta: Params
    local: Local


@struct
class FedVI(
    Method[Server, Params, tuple[()], Params, Posterior],
    SharedModel[Params, Posterior],
    Unlabelled[Params, Posterior],
    Draws[Posterior],
    Certifies[Params, Posterior],
    PosteriorCheck[Params],
    Advises,
):
    """FedVI, amortised variational inference.

    Attributes:
        tau: τ, weight of the divergence of a client's posterior from the prior.
        gamma: γ, weight of the divergence of a Gaussian over θ; None keeps θ a point.
        prior_sd: Standard deviation of θ's prior, with gamma.
        local_share: Share of the features that the local classifier sees.
        support: Share of a minibatch that the posterior is computed from; the others are predicted.
        overlap: Compute it from all of them, and predict all of them.
        width: Units of the two hidden layers of the posterior constructor.
        reduction: Whether the likelihood of a minibatch is a mean, or the sum that is printed.
        samples: Draws of the posterior that predict; 0 takes its mean.
        refine_epochs: Passes over a client's labelled examples that refine its posterior.
        refine_step_size: Learning rate of those passes.
        server_step_size: Step size of the server.
        server_momentum: Momentum of the server.
        optimiser: Local solver.
        work: Local work of a round.
    """

    tau: float = 1e-9
    gamma: float | None = None
    prior_sd: float = 1.0
    local_share: float = static(default=0.2)
    support: float = static(default=0.5)
    overlap: bool = static(default=False)
    width: int = static(default=256)
    reduction: Literal["mean", "sum"] = static(default="mean")
    samples: int = static(default=0)
    refine_epochs: int = static(default=0)
    refine_step_size: float = 0.1
    server_step_size: float = 3.0
    server_momentum: float = static(default=0.9)
    optimiser: Optimiser = Optimiser("sgd", 0.02)
    work: Work = Work(batch_size=256)

    about: ClassVar[About] = About(
        paper=Paper(
            "Vedadi et al.",
            "Federated Variational Inference: Towards Improved Personalization and Generalization",
            2023,
            arxiv="2305.13672",
        ),
        keeps="nothing",
        sends="its copy of the embedding, posterior constructor and classifier",
    )
    linear: ClassVar[bool] = True
    certifies: ClassVar[str] = "the client's Gaussian over β, and over the bias one of width σ₀ around its own"

    def check(self) -> None:
        check_fields(self)
        at_least("tau", self.tau, 0)
        if self.gamma is not None:
            at_least("gamma", self.gamma, 0)
        for name in ("local_share", "support"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(
                    f"{name.replace('_', '-')}={getattr(self, name)} lies outside (0, 1); choose a share such as "
                    f"{getattr(FedVI(), name)}."
                )
        at_least("width", self.width, 1)
        for name in ("samples", "refine_epochs"):
            at_least(name.replace("_", "-"), getattr(self, name), 0)
        for name in ("prior_sd", "refine_step_size", "server_step_size"):
            positive(name.replace("_", "-"), getattr(self, name))
        if not 0 <= self.server_momentum < 1:
            raise UsageError(f"server-momentum={self.server_momentum} lies outside [0, 1); choose one such as 0.9.")
        if self.work.batch_size < self._fewest:
            raise UsageError(
                f"batch-size={self.work.batch_size} has no room for support and query; choose {self._fewest} or more, "
                "or use --overlap."
            )

    def init_server(self, task: Task, key: Key) -> Server:
        key_network, key_classifier, key_constructor = jax.random.split(key, 3)
        embedding = Embedding(task)
        num_global, num_local = self._features(embedding)
        drawn, num_outputs = embedding.init(key_network), embedding.num_outputs
        kernel = jax.nn.initializers.lecun_normal()(key_classifier, (num_global, num_outputs), jnp.float32)
        theta = {
            "embedding": drawn.weights,
            "constructor": self._constructor(num_local, num_outputs).init(key_constructor, num_global),
            "classifier": {"kernel": kernel, "bias": jnp.zeros(num_outputs)},
        }
        start = theta if self.gamma is None else gaussian.around(theta, gaussian.rho_of(jnp.float32(FIRST_SD)))
        return Server(start, drawn.stats, self._server_optimiser().init(start))

    def broadcast(self, server: Server) -> Params:
        return Params(server.weights, server.stats)

    def client_update(
        self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        transform = self.optimiser.build()

        def step(carry: tuple, batch: Batch, key: Key) -> tuple:
            params, state, sums = carry

            def loss(weights: Any) -> tuple[Array, tuple[Any, Info]]:
                return self._loss(task, Params(weights, params.stats), batch, key)

            gradient, (stats, pieces) = jax.grad(loss, has_aux=True)(params.weights)
            updates, state = transform.update(gradient, state, params.weights)
            moved = Params(optax.apply_updates(params.weights, updates), stats), state, trees.add(sums, pieces)
            return trees.select(batch.mask.sum() >= self._fewest, moved, carry)

        sums = dict.fromkeys(("risk", "kl", "kl_global", "batches"), jnp.float32(0))
        start = (down, transform.init(down.weights), sums)
        params, _, sums = each_batch(step, start, data, self._work(data, down.stats), key)
        batches, trained = jnp.maximum(sums.pop("batches"), 1.0), data.count >= self._fewest
        info = {"skipped": 1.0 - trained.astype("float32"), **{name: total / batches for name, total in sums.items()}}
        return client, Message(params, weight=jnp.where(trained, data.count, 0).astype("float32")), info

    def aggregate(self, task: Task, server: Server, messages: Message[Params], key: Key) -> tuple[Server, Info]:
        del task, key
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=self.broadcast(server))
        pull, solver = trees.sub(server.weights, mean.weights), self._server_optimiser()
        updates, state = solver.update(pull, server.optimiser, server.weights)
        moved = Server(trees.add(server.weights, updates), mean.stats, state)
        return trees.select(jnp.sum(messages.weight) > 0, moved, server), {}

    def infer(self, task: Task, down: Params, data: Shard, key: Key) -> Posterior:
        """Return q(β | all of a client's inputs), whose labels are not read; the prior where there are none."""
        del key
        embedding, theta = Embedding(task), self._centre(down.weights)
        num_global, num_local = self._features(embedding)
        constructor = self._constructor(num_local, embedding.num_outputs)
        size, order = self._size(data), jnp.arange(data.capacity)

        def add(i: Array, total: Array) -> Array:
            batch = data.take(order, i, size)
            features, _ = embedding.features(Params(theta["embedding"], down.stats), batch.x)
            return total + batch.mask @ constructor.elements(theta["constructor"], features[:, :num_global])

        total = jax.lax.fori_loop(0, data.num_batches(size), add, jnp.zeros(self.width))
        mean = total / jnp.maximum(data.count, 1)
        found = local_classifier.of_outputs(constructor.whole(theta["constructor"], mean), num_local)
        return Posterior(down, trees.select(data.count > 0, found, local_classifier.prior(*found.mean.shape)))

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Posterior:
        del client
        key_infer, key_refine = jax.random.split(key)
        posterior = self.infer(task, down, data, key_infer)
        if self.refine_epochs > 0:
            posterior = Posterior(posterior.theta, self._refined(task, posterior, data, key_refine))
        return posterior

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Posterior:
        del data, key
        embedding = Embedding(task)
        return Posterior(down, local_classifier.prior(self._features(embedding)[1], embedding.num_outputs))

    def predict(self, task: Task, posterior: Posterior, x: Array, key: Key) -> Predictive:
        if self.samples > 0 and self.gamma is not None:
            return equally(task, self.draws(task, posterior, key, self.samples), x)
        embedding, theta = Embedding(task), self._centre(posterior.theta.weights)
        # θ is one network here, so all draws of β see the same features.
        features, _ = embedding.features(Params(theta["embedding"], posterior.theta.stats), x)

        def outputs(beta: Array) -> Array:
            return embedding.outputs(
                theta["embedding"],
                local_classifier.last_layer(theta["classifier"], beta, posterior.local.bias),
                features,
            )

        if self.samples == 0:
            return point(outputs(posterior.local.mean))
        keys = jax.random.split(key, self.samples)
        return even_mixture(jax.vmap(lambda key: outputs(self._both(posterior, key)[1]))(keys))

    def draws(self, task: Task, posterior: Posterior, key: Key, num: int) -> Params:
        """Draw networks with last layers from a client's posterior, on axis 0."""

        def one(key: Key) -> Weights:
            theta, beta = self._both(posterior, key)
            return Embedding(task).with_layer(
                theta["embedding"], local_classifier.last_layer(theta["classifier"], beta, posterior.local.bias)
            )

        stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), posterior.theta.stats)
        return Params(jax.vmap(one)(jax.random.split(key, num)), stats)

    def certified(self, task: Task, down: Params, posterior: Posterior) -> Certified:
        """Return q(β) N(b_β, σ₀²) against r(β) N(0, σ₀²): a bias that follows from the rows must have a width."""
        local, width = posterior.local, local_classifier.glorot(*posterior.local.mean.shape)

        def draw(key: Key) -> Params:
            key_network, key_bias = jax.random.split(key)
            theta, beta = self._both(Posterior(down, local), key_network)
            bias = local.bias + width * jax.random.normal(key_bias, local.bias.shape)
            network = Embedding(task).with_layer(
                theta["embedding"], local_classifier.last_layer(theta["classifier"], beta, bias)
            )
            return Params(network, down.stats)

        return Certified(draw, local_classifier.divergence(local) + 0.5 * jnp.sum(jnp.square(local.bias / width)))

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "FedVI":
        del prior_sd, posterior_sd
        # Any other τ tempers the likelihood, and without labels a posterior is nearly the prior.
        return replace(self, tau=1.0, refine_epochs=300, refine_step_size=0.05)

    def advice(self, task: Task, info: dict[str, float]) -> dict[str, str]:
        del task
        if not info.get("skipped", 0.0) > 0:
            return {}
        return {
            "skipped": f"{info['skipped']:.0%} of a round's clients have fewer than {self._fewest} examples and were "
            "skipped, since support and query need one each; leave such clients out with --min-examples 2, or use "
            "--overlap."
        }

    @property
    def _fewest(self) -> int:
        """Examples that a client needs to train."""
        return 1 if self.overlap else 2

    def _work(self, data: Shard, stats: Any) -> Work:
        """Return the local work, in minibatches no longer than a client has examples if rows beyond do nothing."""
        if self.work.steps is not None or jax.tree.leaves(stats):  # drawn with replacement, or seen by a batch norm
            return self.work
        return Work(epochs=self.work.epochs, batch_size=self._size(data))

    def _loss(self, task: Task, params: Params, batch: Batch, key: Key) -> tuple[Array, tuple[Any, Info]]:
        """Return eq. (24) for a minibatch, the new statistics and the terms of the loss."""
        key_theta, key_embed, key_beta = jax.random.split(key, 3)
        theta = self._drawn(params.weights, key_theta)
        embedding = Embedding(task)
        num_global, num_local = self._features(embedding)
        features, stats = embedding.features(Params(theta["embedding"], params.stats), batch.x, key_embed)
        support, query = self._halves(batch.mask)
        constructor = self._constructor(num_local, embedding.num_outputs)
        seen = constructor.elements(theta["constructor"], features[:, :num_global])  # g ∘ h of eqs. (27) to (29)
        mean = support @ seen / jnp.maximum(support.sum(), 1.0)
        local = local_classifier.of_outputs(constructor.whole(theta["constructor"], mean), num_local)
        layer = local_classifier.last_layer(theta["classifier"], local_classifier.draw(key_beta, local), local.bias)
        outputs = embedding.outputs(theta["embedding"], layer, features)
        risk = task.mean_nll(outputs, Batch(batch.x, batch.y, batch.scale, query))  # eq. (24), second line
        divergence, wide = local_classifier.divergence(local), self._global_divergence(params.weights)
        size = query.sum() if self.reduction == "sum" else 1.0
        loss = size * risk + self.tau / self.work.batch_size * divergence  # eq. (24)
        if self.gamma is not None:
            loss = loss + size * self.gamma / task.num_examples * wide  # γ KL(q(θ) ‖ t) of eq. (8)
        pieces = {"risk": risk, "kl": divergence, "kl_global": wide, "batches": jnp.float32(1)}
        return loss, (stats, pieces)

    def _halves(self, mask: Array) -> tuple[Array, Array]:
        """Return which rows of a minibatch are support and which query; the first of those that count are support."""
        if self.overlap:
            return mask, mask
        count = mask.sum()
        num = jnp.clip(jnp.floor(self.support * count), 1, jnp.maximum(count - 1, 1))
        first = (jnp.cumsum(mask) <= num).astype(mask.dtype)
        return mask * first, mask * (1 - first)

    def _refined(self, task: Task, posterior: Posterior, data: Shard, key: Key) -> Local:
        """Return the client's Gaussian after training on its labels, θ fixed."""
        embedding, theta = Embedding(task), self._centre(posterior.theta.weights)
        seen = embedding.embedded(Params(theta["embedding"], posterior.theta.stats), data, self._size(data))

        def mean_nll(local: Local, batch: Batch, key: Key) -> Array:
            layer = local_classifier.last_layer(theta["classifier"], local_classifier.draw(key, local), local.bias)
            return task.mean_nll(embedding.outputs(theta["embedding"], layer, batch.x), batch)

        solver = Optimiser("sgd", self.refine_step_size)
        work = Work(epochs=self.refine_epochs, batch_size=self._size(data))
        return local_classifier.fitted(mean_nll, posterior.local, seen, self.tau, solver, work, key)

    def _size(self, data: Shard) -> int:
        """Return the rows of a minibatch, no more than a client has examples."""
        return min(self.work.batch_size, data.capacity)

    def _features(self, embedding: Embedding) -> tuple[int, int]:
        """Return how many features are global and how many local."""
        width = embedding.width
        num_global = int((1 - self.local_share) * width + 1e-9)  # of 128, 102
        if num_global in (0, width):
            kind = "global" if num_global == 0 else "local"
            raise UsageError(
                f"local-share={self.local_share} of {width} features leaves no {kind} one; choose another share, or a "
                "model whose last layer sees more."
            )
        return num_global, width - num_global

    def _constructor(self, num_local: int, num_outputs: int) -> SetNet:
        return SetNet((self.width, self.width), (2 * num_local + 1) * num_outputs)

    def _server_optimiser(self) -> optax.GradientTransformation:
        return Optimiser("sgd", self.server_step_size, self.server_momentum).build()

    def _centre(self, weights: Any) -> Theta:
        """Return θ, or the mean of q(θ)."""
        return weights if self.gamma is None else weights.mean

    def _drawn(self, weights: Any, key: Key) -> Theta:
        """Return θ, or a draw of q(θ)."""
        return weights if self.gamma is None else gaussian.draw(key, gaussian.of(weights))

    def _both(self, posterior: Posterior, key: Key) -> tuple[Theta, Array]:
        """Return draws of θ and of β."""
        key_theta, key_beta = jax.random.split(key)
        return self._drawn(posterior.theta.weights, key_theta), local_classifier.draw(key_beta, posterior.local)

    def _global_divergence(self, weights: Any) -> Array:
        """Return KL(q(θ) ‖ t) in nats; 0 for a point, whose divergence is not counted."""
        if self.gamma is None:
            return jnp.float32(0)
        wide = jax.tree.map(lambda leaf: jnp.full(leaf.shape, self.prior_sd, leaf.dtype), weights.mean)
        return gaussian.kl(gaussian.of(weights), gaussian.Gaussian(trees.zeros(weights.mean), wide))
