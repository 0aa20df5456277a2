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

What the paper leaves open, and what is done here (docs/methods/fedvi.md has the measurements):

- The first int(0.8 d) features are global, the others local (footnote 6; (24) has them the other way round).
- g has 2·d_local·|Y| + |Y| outputs; its last |Y| are the bias of the local classifier, a mean over the support like the
  others, since as printed, at x itself, it would be a second global classifier.
- σ₀ = √(2/(d_local + |Y|)), a standard deviation. b_θ is the bias of the global classifier.
- q sees the support, the likelihood the query: the halves of a minibatch, of an odd one the smaller for support; a
  minibatch of one example is skipped, and so is a client with no more. `overlap` uses all for both.
- (24) has a sum over the query beside τ/256 KL; it is read as a mean (per-datum bound, b = 256), the only reading in
  which 2.56 is not the true step size. `reduction="sum"` is as printed.
- One local epoch. The server's step: θ + η(mean θ_k − θ) with momentum; η = 1 without is FedAvg's.
- γ: the paper keeps θ a point under a flat prior and names more as future work. `gamma` makes q(θ) a Gaussian for each
  weight under t = N(0, prior_sd²), drawn once a minibatch; its divergence counts γ/|D| for a mean over examples.
- Prediction uses the mean of β (and of θ), or the mean over `samples` draws. A client's support is all of its training
  inputs; without any it has the prior, whose mean is the global classifier.
- Labels of a client that has them may refine its Gaussian by `refine_epochs` of its own objective, θ fixed.
- b_β is no draw but a function of the support, so the divergence that is told is that of β alone.
"""

import math
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
from priory.fed.local import Optimiser, Work, each_batch, fit
from priory.fed.method import Info, Message, Method, Predictive, Task, equally, even_mixture, point
from priory.fed.shard import Batch, Pool, Shard
from priory.methods._blocks.embedding import Embedding, Layer
from priory.models.model import Params
from priory.models.sets import SetNet

Weights = Any
Theta = dict[str, Any]  # weights of the embedding h, the constructor g and the global classifier
FLOOR = 1e-5  # least σ, eq. (28)
MEAN_SCALE, SD_SCALE = 0.1, 0.01  # of g's outputs, eqs. (27) and (28): q is nearly r at the start
FIRST_SD = 0.01  # of q(θ)


@struct
class Server:
    """What the server knows: θ, or the free coordinates of q(θ); statistics; the state of its optimiser."""

    weights: Any
    stats: Any
    optimiser: Any


@struct
class Local:
    """q(β | support), and the bias that goes with it.

    Attributes:
        mean: (d_local, outputs).
        sd: The same.
        bias: (outputs,).
    """

    mean: Array
    sd: Array
    bias: Array


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
        positive("prior-sd", self.prior_sd)
        for name in ("local_share", "support"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(
                    f"{name.replace('_', '-')}={getattr(self, name)} lies outside (0, 1); choose a share such as "
                    f"{getattr(FedVI(), name)}."
                )
        at_least("width", self.width, 1)
        for name in ("samples", "refine_epochs"):
            at_least(name.replace("_", "-"), getattr(self, name), 0)
        positive("refine-step-size", self.refine_step_size)
        positive("server-step-size", self.server_step_size)
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

        nothing = {name: jnp.float32(0) for name in ("risk", "kl", "kl_global", "batches")}
        start = (down, transform.init(down.weights), nothing)
        params, _, sums = each_batch(step, start, data, self._work(data, down.stats), key)
        batches = jnp.maximum(sums.pop("batches"), 1.0)
        trained = data.count >= self._fewest
        info = {name: total / batches for name, total in sums.items()}
        info["skipped"] = 1.0 - trained.astype("float32")
        return client, Message(params, weight=jnp.where(trained, data.count, 0).astype("float32")), info

    def aggregate(self, task: Task, server: Server, messages: Message[Params], key: Key) -> tuple[Server, Info]:
        del task, key
        mean = trees.weighted_mean(messages.payload, messages.weight, otherwise=self.broadcast(server))
        pull = trees.sub(server.weights, mean.weights)
        updates, state = self._server_optimiser().update(pull, server.optimiser, server.weights)
        moved = Server(trees.add(server.weights, updates), mean.stats, state)
        return trees.select(jnp.sum(messages.weight) > 0, moved, server), {}

    def infer(self, task: Task, down: Params, data: Shard, key: Key) -> Posterior:
        """q(β | all of a client's inputs), whose labels are not read; the prior where there are none."""
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
        found = _local(constructor.whole(theta["constructor"], mean), num_local)
        return Posterior(down, trees.select(data.count > 0, found, _prior(*found.mean.shape)))

    def personalise(self, task: Task, down: Params, client: tuple[()], data: Shard, key: Key) -> Posterior:
        del client
        key_infer, key_refine = jax.random.split(key)
        posterior = self.infer(task, down, data, key_infer)
        if self.refine_epochs == 0:
            return posterior
        return Posterior(posterior.theta, self._refined(task, posterior, data, key_refine))

    def population(self, task: Task, down: Params, data: Shard | None, key: Key) -> Posterior:
        del data, key
        embedding = Embedding(task)
        return Posterior(down, _prior(self._features(embedding)[1], embedding.num_outputs))

    def predict(self, task: Task, posterior: Posterior, x: Array, key: Key) -> Predictive:
        if self.samples > 0 and self.gamma is not None:
            return equally(task, self.draws(task, posterior, key, self.samples), x)
        embedding, theta = Embedding(task), self._centre(posterior.theta.weights)
        # θ is one network here, so all draws of β see the same features.
        features, _ = embedding.features(Params(theta["embedding"], posterior.theta.stats), x)

        def outputs(beta: Array) -> Array:
            return embedding.outputs(theta["embedding"], _last_layer(theta, beta, posterior.local.bias), features)

        if self.samples == 0:
            return point(outputs(posterior.local.mean))
        keys = jax.random.split(key, self.samples)
        return even_mixture(jax.vmap(lambda key: outputs(self._both(posterior, key)[1]))(keys))

    def draws(self, task: Task, posterior: Posterior, key: Key, num: int) -> Params:
        """Networks with last layers drawn from a client's posterior, on axis 0."""

        def one(key: Key) -> Weights:
            theta, beta = self._both(posterior, key)
            return Embedding(task).with_layer(theta["embedding"], _last_layer(theta, beta, posterior.local.bias))

        stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), posterior.theta.stats)
        return Params(jax.vmap(one)(jax.random.split(key, num)), stats)

    def uncertified(self, task: Task) -> str | None:
        del task
        return None

    def certified(self, task: Task, down: Params, posterior: Posterior) -> Certified:
        """q(β) N(b_β, σ₀²) against r(β) N(0, σ₀²): a bias that follows from the client's rows must have a width."""
        local = posterior.local
        width = glorot(*local.mean.shape)

        def draw(key: Key) -> Params:
            key_network, key_bias = jax.random.split(key)
            theta, beta = self._both(Posterior(down, local), key_network)
            bias = local.bias + width * jax.random.normal(key_bias, local.bias.shape)
            network = Embedding(task).with_layer(theta["embedding"], _last_layer(theta, beta, bias))
            return Params(network, down.stats)

        return Certified(draw, _divergence(local) + 0.5 * jnp.sum(jnp.square(local.bias / width)))

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "FedVI":
        """τ = 1, since any other tempers the likelihood, and labels, without which a posterior is nearly the prior."""
        del prior_sd, posterior_sd
        return replace(self, tau=1.0, refine_epochs=300, refine_step_size=0.05)

    def advice(self, task: Task, info: dict[str, float]) -> dict[str, str]:
        """What the figures of a round say that somebody should hear."""
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
        """The local work, in minibatches no longer than a client has examples where rows beyond cost and do nothing.

        They do something where they are drawn with replacement, and where a batch norm sees them.
        """
        if self.work.steps is not None or jax.tree.leaves(stats):
            return self.work
        return Work(epochs=self.work.epochs, batch_size=self._size(data))

    def _loss(self, task: Task, params: Params, batch: Batch, key: Key) -> tuple[Array, tuple[Any, Info]]:
        """Eq. (24) for a minibatch; the new statistics and the loss's pieces."""
        key_theta, key_embed, key_beta = jax.random.split(key, 3)
        theta = self._drawn(params.weights, key_theta)
        embedding = Embedding(task)
        num_global, num_local = self._features(embedding)
        features, stats = embedding.features(Params(theta["embedding"], params.stats), batch.x, key_embed)
        support, query = self._halves(batch.mask)
        constructor = self._constructor(num_local, embedding.num_outputs)
        seen = constructor.elements(theta["constructor"], features[:, :num_global])  # g ∘ h of eqs. (27) to (29)
        mean = support @ seen / jnp.maximum(support.sum(), 1.0)
        local = _local(constructor.whole(theta["constructor"], mean), num_local)
        layer = _last_layer(theta, _draw(key_beta, local), local.bias)
        outputs = embedding.outputs(theta["embedding"], layer, features)
        risk = task.mean_nll(outputs, Batch(batch.x, batch.y, batch.scale, query))  # eq. (24), second line
        divergence, wide = _divergence(local), self._global_divergence(params.weights)
        size = query.sum() if self.reduction == "sum" else 1.0
        loss = size * risk + self.tau / self.work.batch_size * divergence  # eq. (24)
        if self.gamma is not None:
            loss = loss + size * self.gamma / task.num_examples * wide  # γ KL(q(θ) ‖ t) of eq. (8)
        pieces = {"risk": risk, "kl": divergence, "kl_global": wide, "batches": jnp.float32(1)}
        return loss, (stats, pieces)

    def _halves(self, mask: Array) -> tuple[Array, Array]:
        """Which rows of a minibatch are support and which query; of those that count, the first ones are support."""
        if self.overlap:
            return mask, mask
        count = mask.sum()
        num = jnp.clip(jnp.floor(self.support * count), 1, jnp.maximum(count - 1, 1))
        first = (jnp.cumsum(mask) <= num).astype(mask.dtype)
        return mask * first, mask * (1 - first)

    def _refined(self, task: Task, posterior: Posterior, data: Shard, key: Key) -> Local:
        """The client's Gaussian after training on its labels, θ fixed."""
        embedding, theta = Embedding(task), self._centre(posterior.theta.weights)
        seen = self._embedded(embedding, Params(theta["embedding"], posterior.theta.stats), data)

        def local_at(weights: tuple[Array, Array, Array]) -> Local:
            mean, log_sd, bias = weights
            return Local(mean, jnp.exp(log_sd), bias)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            local = local_at(params.weights)
            layer = _last_layer(theta, _draw(key, local), local.bias)
            outputs = embedding.outputs(theta["embedding"], layer, batch.x)
            # The likelihood is a mean, and the divergence counts once for all of the client's examples.
            penalty = self.tau / jnp.maximum(data.count, 1) * _divergence(local)
            return task.mean_nll(outputs, batch) + penalty, params.stats

        start = Params((posterior.local.mean, jnp.log(posterior.local.sd), posterior.local.bias))
        work = Work(epochs=self.refine_epochs, batch_size=self._size(data))
        return local_at(fit(objective, start, seen, Optimiser("sgd", self.refine_step_size), work, key)[0].weights)

    def _embedded(self, embedding: Embedding, fixed: Params, data: Shard) -> Shard:
        """The client's examples, features in the place of inputs: the embedding runs once and not every epoch."""
        size, order, whole = self._size(data), jnp.arange(data.capacity), data.padded()

        def fill(i: Array, rows: Array) -> Array:
            found, _ = embedding.features(fixed, data.take(order, i, size).x)
            return jax.lax.dynamic_update_slice_in_dim(rows, found, i * size, axis=0)

        rows = jnp.zeros((-(-data.capacity // size) * size, embedding.width))
        rows = jax.lax.fori_loop(0, data.num_batches(size), fill, rows)[: data.capacity]
        pool = Pool(rows, whole.y, whole.scale, jnp.zeros(()), jnp.ones(()))
        return Shard(pool, jnp.zeros(1, jnp.int32), data.count[None], data.capacity)

    def _size(self, data: Shard) -> int:
        """Rows of a minibatch, no more than a client has examples."""
        return min(self.work.batch_size, data.capacity)

    def _features(self, embedding: Embedding) -> tuple[int, int]:
        """How many features are global and how many local."""
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
        """θ, or the mean of q(θ)."""
        return weights if self.gamma is None else weights.mean

    def _drawn(self, weights: Any, key: Key) -> Theta:
        """θ, or a draw of q(θ)."""
        return weights if self.gamma is None else gaussian.draw(key, gaussian.of(weights))

    def _both(self, posterior: Posterior, key: Key) -> tuple[Theta, Array]:
        """Draws of θ and of β."""
        key_theta, key_beta = jax.random.split(key)
        return self._drawn(posterior.theta.weights, key_theta), _draw(key_beta, posterior.local)

    def _global_divergence(self, weights: Any) -> Array:
        """KL(q(θ) ‖ t) in nats; 0 for a point, whose divergence is not counted."""
        if self.gamma is None:
            return jnp.float32(0)
        zeros = jax.tree.map(jnp.zeros_like, weights.mean)
        wide = jax.tree.map(lambda leaf: jnp.full(leaf.shape, self.prior_sd, leaf.dtype), weights.mean)
        return gaussian.kl(gaussian.of(weights), gaussian.Gaussian(zeros, wide))


def _local(outputs: Array, num_local: int) -> Local:
    """The Gaussian that the constructor's outputs describe, eqs. (27) to (29)."""
    num_outputs = outputs.shape[0] // (2 * num_local + 1)
    mean, log_ratio, bias = jnp.split(outputs, [num_local * num_outputs, 2 * num_local * num_outputs])
    sd = FLOOR + glorot(num_local, num_outputs) * jnp.exp(SD_SCALE * log_ratio)  # eq. (28)
    shape = (num_local, num_outputs)
    return Local(MEAN_SCALE * mean.reshape(shape), sd.reshape(shape), bias)  # eqs. (26), (27) and (29)


def glorot(num_local: int, num_outputs: int) -> float:
    """σ₀, Glorot's scale."""
    return math.sqrt(2 / (num_local + num_outputs))


def _prior(num_local: int, num_outputs: int) -> Local:
    """r(β), without a bias."""
    shape = (num_local, num_outputs)
    return Local(jnp.zeros(shape), jnp.full(shape, glorot(*shape)), jnp.zeros(num_outputs))  # eq. (25)


def _divergence(local: Local) -> Array:
    """KL(q(β) ‖ r) in nats."""
    prior = _prior(*local.mean.shape)
    return jnp.sum(gaussian.kl_of_each(local.mean, local.sd, prior.mean, prior.sd))


def _draw(key: Key, local: Local) -> Array:
    """β."""
    return local.mean + local.sd * jax.random.normal(key, local.mean.shape)


def _last_layer(theta: Theta, beta: Array, bias: Array) -> Layer:
    """A client's own last layer: the global classifier above, the local one below."""
    shared = theta["classifier"]
    return Layer(jnp.concatenate([shared["kernel"], beta]), shared["bias"] + bias)
