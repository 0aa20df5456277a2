"""FedHB with a mixture prior: K prototype networks, each client near one of them.

Kim and Hospedales, A Hierarchical Bayesian Approach to Federated Learning, arXiv:2305.04979; section 3.2, appendix C,
algorithms 4, 7 and 10.

    μ_j ~ N(0, I),   θ_k | μ ~ Σ_j 1/K N(μ_j, σ² I),   D_k | θ_k ~ the likelihood of network θ_k
    q(μ_j) = N(r_j, ε² I),   q_k(θ_k) = N(m_k, ε² I)

Server keeps   (r_1 … r_K, β)   prototypes and gate, broadcast as they are: (K + 1)d numbers
Client keeps   nothing, or m_k (`start="last"`)
Client sends   (m_k, β_k)       2d numbers, weighted equally; its shares of the K prototypes for secure sums (`linear`),
                                whose sum hides a client, though a single message would not

Choices that the paper leaves open (docs/methods/fedhb.md has the measurements):

- First prototypes: one fresh network, and others that are `separation` of the way from it to fresh networks of their
  own. All equal would stay equal for ever; far apart, one usually takes all clients (`share_…` in the metrics).
- Eq. (24) shrinks a prototype by 1/(1 + σ²/(N c̄_j)) in every round: 0.1 % for the paper's σ² = 0.1 and N = 100, which
  was not seen to matter, and 1 % for σ² = 1, which does. `prior_mean="learned"` is empirical Bayes: the prior mean that
  maximises the bound is r_j itself, and nothing shrinks.
- A prototype without clients would become the zero network by eq. (24) (`empty="zero"`); it keeps its place instead.
- Clients start from the prototype with the lowest loss on a sample of their own data (`"best"`), from the middle of
  all (`"centre"`, printed), or from their own last m_k (`"last"`, the first time as `"best"`).
- The penalty −log Σ_j exp(−‖m − r_j‖²/2σ²) is divided by |D_k| and the likelihood is a minibatch mean. Its gradient
  is a pull of strength 1/σ² to the blend of the prototypes by their responsibilities, taken implicitly.
- The gate has the network's architecture; its first K outputs are the logits (where there are fewer outputs than
  prototypes, the logits are −½‖outputs − a_j‖² with fixed anchors a_j). It learns, in the same steps, to tell the
  prototype that is nearest to the client's present m. With `update="body"` its head is random and frozen too.
- Without a gate the prototypes predict with equal weights. ε enters the bound alone.
- Statistics of a batch norm are one set for all prototypes, averaged over clients whatever prototype they are near.
- The `loss` in the metrics is that of network and gate together. A client without examples sends nothing.
"""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian, mixture
from priory.bayes.gaussian import Gaussian
from priory.bayes.mixture import Shares
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Certified, Certifies, Draws, Evidence, PosteriorCheck, SharedModel
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Pull, Work, check_finetune, finetune, fit, total_nll
from priory.fed.method import Info, Message, Method, Predictive, Task, even_mixture
from priory.fed.shard import Batch, Shard
from priory.methods._blocks.certified import own_statistics, trained_head
from priory.models.model import Params

Weights = Any
NOBODY = 1e-6  # mean responsibility below which a prototype counts as empty
NUM_TRIED = 256  # a client's examples, drawn at random, on which the prototypes are tried


@struct
class Prototypes:
    """The state of the server, and what it broadcasts.

    Attributes:
        networks: r_1 … r_K on axis 0, the part that is learned together.
        frozen: The head, where it is not learned; empty otherwise.
        stats: Statistics of a batch norm.
        gate: The gating network, None without one.
    """

    networks: Weights
    frozen: Weights
    stats: Any
    gate: Params | None


@struct
class Update:
    """The message of a client: m_k, or its shares of the prototypes where only sums may be seen, and its gate."""

    network: Weights
    stats: Any
    gate: Params | None


@struct
class Kept:
    """The state of a client: m_k, and whether it has one yet."""

    network: Weights
    is_own: Array


@struct
class Experts:
    """Networks on axis 0 that predict together, by a gate or with equal weights."""

    networks: Weights
    stats: Any
    gate: Params | None


@struct
class FedHBMixture(
    Method[Prototypes, Prototypes, Any, Update, Experts],
    SharedModel[Prototypes, Experts],
    Draws[Experts],
    Certifies[Prototypes, Experts],
    PosteriorCheck[Prototypes],
    Evidence[Prototypes, Update],
):
    """FedHB, mixture of prototypes.

    Attributes:
        num_prototypes: K, how many prototype networks there are.
        variance: σ², of a client's weight around its prototype.
        epsilon: ε, width of the posteriors; enters the bound alone.
        separation: How far apart the prototypes begin; 1 draws independent networks.
        start: Where a client begins: the prototype that fits it best, the centre of all (printed), or its last m_k.
        prior_mean: Where prototypes are expected: at zero (printed), or where they are, by empirical Bayes.
        empty: What becomes of a prototype without clients: it is kept, or falls to a prior mean of zero (printed).
        gate: Train a gating network for global prediction; without one all prototypes count equally.
        update: Learn the full networks together, or their bodies under a frozen random head.
        linear: Send shares of the prototypes, which may be summed securely; K + 1 networks up instead of 2.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its personal network, eq. (84).
        finetune_step_size: Learning rate of those passes.
    """

    num_prototypes: int = static(default=2)
    variance: float = 0.05
    epsilon: float = 1e-4
    separation: float = static(default=1.0)  # read before the first round alone: no schedule can mean it
    start: Literal["best", "centre", "last"] = static(default="best")
    prior_mean: Literal["zero", "learned"] = static(default="learned")
    empty: Literal["keep", "zero"] = static(default="keep")
    gate: bool = static(default=True)
    update: Literal["full", "body"] = static(default="full")
    linear: bool = static(default=False)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Kim and Hospedales", "A Hierarchical Bayesian Approach to Federated Learning", 2023, arxiv="2305.04979"
        ),
        keeps="nothing (its weights if start is last)",
        sends="its weights and gate (its shares of the prototypes if linear is on)",
    )
    certifies: ClassVar[str] = "N(m, σ²) around the client's network m, σ² being `variance`, and not m itself"

    def check(self) -> None:
        check_fields(self)
        at_least("num-prototypes", self.num_prototypes, 1)
        positive("variance", self.variance)
        at_least("epsilon", self.epsilon, 0)
        at_least("separation", self.separation, 0)
        if self.empty == "zero" and self.prior_mean == "learned":
            raise UsageError(
                "empty=zero has no prior mean of zero to fall to under prior-mean=learned; add prior-mean=zero, or "
                "leave empty=keep."
            )
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Prototypes:
        if self.num_prototypes > task.num_clients:
            raise UsageError(
                f"num-prototypes={self.num_prototypes} exceeds the {task.num_clients} clients of this federation; "
                f"choose 1 to {task.num_clients}."
            )
        key_first, key_others, key_gate = jax.random.split(key, 3)
        first = task.init(key_first)
        frozen, common = task.frozen_and_learned(first.weights, self.update)
        others = jax.vmap(lambda k: task.frozen_and_learned(task.init(k).weights, self.update)[1])(
            jax.random.split(key_others, self.num_prototypes - 1)
        )

        def stack(one: Array, more: Array) -> Array:
            return jnp.concatenate([one[None], one[None] + self.separation * (more - one[None])])

        gate = task.init(key_gate) if self.gate else None
        return Prototypes(jax.tree.map(stack, common, others), frozen, first.stats, gate)

    def init_client(self, task: Task, down: Prototypes, key: Key) -> Any:
        del task, key
        if self.start != "last":
            return ()
        return Kept(mixture.pick(down.networks, jnp.int32(0)), jnp.bool_(False))

    def client_update(
        self, task: Task, down: Prototypes, client: Any, data: Shard, key: Key
    ) -> tuple[Any, Message[Update], Info]:
        frozen_gate, gate = self._gate_parts(task, down)

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            key_network, key_gate = jax.random.split(key)
            network = Params(trees.merge(down.frozen, params.weights["network"]), params.stats["network"])
            loss, stats = task.nll(network, batch, key_network)
            if down.gate is None:
                return loss, {**params.stats, "network": stats}
            own = Params(trees.merge(frozen_gate, params.weights["gate"]), params.stats["gate"])
            share = mixture.responsibilities(params.weights["network"], down.networks, self.variance)
            target = jnp.argmax(share)  # Algorithm 4, step 3: the nearest prototype, at every minibatch
            missed, gate_stats = self._gate_loss(task, own, batch, target, key_gate)
            return loss + missed, {"network": stats, "gate": gate_stats}

        key_start, key_fit = jax.random.split(key)
        weights = {"network": self._start(task, down, client, data, key_start), "gate": gate}
        stats = {"network": down.stats, "gate": None if down.gate is None else down.gate.stats}
        pull = self._pull(down, data, gate)
        # eq. (22); Algorithm 4, step 3
        trained, loss = fit(objective, Params(weights, stats), data, self.optimiser, self.work, key_fit, pull)
        network = trained.weights["network"]
        sent_gate = None if down.gate is None else Params(trained.weights["gate"], trained.stats["gate"])
        sent = mixture.share_out(network, down.networks, self.variance) if self.linear else network
        info = {"loss": loss, "drift": jnp.sqrt(jnp.min(mixture.squared_distances(network, down.networks)))}
        kept = Kept(network, jnp.bool_(True)) if self.start == "last" else ()
        update = Update(sent, trained.stats["network"], sent_gate)
        return kept, Message(update, weight=(data.count > 0).astype("float32")), info

    def aggregate(self, task: Task, server: Prototypes, messages: Message[Update], key: Key) -> tuple[Prototypes, Info]:
        del key

        def shares(sent: Update) -> Update:
            if self.linear:
                return sent
            # E-step, eq. (75)
            return replace(sent, network=mixture.share_out(sent.network, server.networks, self.variance))

        frozen_gate, gate = self._gate_parts(task, server)
        nobody = Shares(jnp.zeros(self.num_prototypes), trees.zeros(server.networks))
        old_gate = None if server.gate is None else Params(gate, server.gate.stats)
        mean = trees.weighted_mean(
            messages.payload, messages.weight, otherwise=Update(nobody, server.stats, old_gate), of=shares
        )
        empty = 0.0 if self.empty == "zero" else NOBODY
        shrinkage = self.variance / task.num_clients if self.prior_mean == "zero" else 0.0
        networks = mixture.maximise(mean.network, server.networks, shrinkage, empty)  # M-step, eqs. (24) and (77)
        # Algorithm 4, step 5: β is the mean of β_k
        new_gate = None if mean.gate is None else Params(trees.merge(frozen_gate, mean.gate.weights), mean.gate.stats)
        heard = jnp.sum(messages.weight) > 0
        info = {f"share_{j + 1}": mean.network.share[j] for j in range(self.num_prototypes)}
        return trees.select(heard, Prototypes(networks, server.frozen, mean.stats, new_gate), server), info

    def personalise(self, task: Task, down: Prototypes, client: Any, data: Shard, key: Key) -> Experts:
        key_start, key_fit = jax.random.split(key)
        start = {"network": self._start(task, down, client, data, key_start), "head": down.frozen}

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            weights = trees.merge(params.weights["head"], params.weights["network"])
            return task.nll(Params(weights, params.stats), batch, key)

        pull = self._pull(down, data, down.frozen, other="head")
        trained = finetune(self, objective, Params(start, down.stats), data, key_fit, pull)  # eq. (84)
        weights = trees.merge(trained.weights["head"], trained.weights["network"])
        return Experts(jax.tree.map(lambda leaf: leaf[None], weights), trained.stats, None)

    def population(self, task: Task, down: Prototypes, data: Shard | None, key: Key) -> Experts:
        del task, data, key
        shared = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.num_prototypes, *leaf.shape)), down.frozen)
        return Experts(trees.merge(shared, down.networks), down.stats, down.gate)

    def predict(self, task: Task, posterior: Experts, x: Array, key: Key) -> Predictive:
        del key
        outputs = jax.lax.map(lambda w: task.model.apply(Params(w, posterior.stats), x)[0], posterior.networks)
        if posterior.gate is None:
            return even_mixture(outputs)
        logits = self._logits(task.model.apply(posterior.gate, x)[0])
        return Predictive(outputs, jax.nn.log_softmax(logits).T)  # eq. (82)

    def uncertified(self, task: Task) -> str | None:
        return trained_head(self.update) or own_statistics(task)

    def certified(self, task: Task, down: Prototypes, posterior: Experts) -> Certified:
        """Return N(m, σ²) against Σ_j 1/K N(r_j, σ²): log Σ exp is convex, so KL ≤ log K − log Σ_j exp(−KL_j)."""
        mean = jax.tree.map(lambda leaf: leaf[0], posterior.networks)
        sd = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.sqrt(self.variance)), mean)
        divergence = math.log(self.num_prototypes) + mixture.penalty(mean, down.networks, self.variance)
        return Certified(lambda key: Params(gaussian.draw(key, Gaussian(mean, sd)), down.stats), divergence)

    def draws(self, task: Task, posterior: Experts, key: Key, num: int) -> Params:
        """Draw networks from the Gaussians of width ε around the experts, in turn, on axis 0; the gate is not read."""
        del task
        experts = jax.tree.leaves(posterior.networks)[0].shape[0]

        def one(place: tuple[Key, Array]) -> Params:
            key, turn = place
            centre = mixture.pick(posterior.networks, turn)
            width = jax.tree.map(lambda leaf: jnp.full_like(leaf, self.epsilon), centre)
            return Params(gaussian.draw(key, Gaussian(centre, width)), posterior.stats)

        return jax.lax.map(one, (jax.random.split(key, num), jnp.arange(num) % experts))

    def knowing(self, task: Task, mean: Params, sd: Weights) -> Prototypes:
        """Return prototypes that all are the mean; the spread around it is not broadcast, but the setting σ²."""
        del sd
        frozen, learned = task.frozen_and_learned(mean.weights, self.update)
        networks = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.num_prototypes, *leaf.shape)), learned)
        return Prototypes(networks, frozen, mean.stats, mean if self.gate else None)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "FedHBMixture":
        """Return the setting with σ² of the population, one prototype, and ε as wide as the posterior."""
        return replace(self, variance=prior_sd**2, epsilon=posterior_sd, num_prototypes=1)

    def reference(self, task: Task, down: Prototypes, payload: Update) -> Update:
        """Return the prototype nearest to the payload; no share moves."""
        gate = None if down.gate is None else Params(self._gate_parts(task, down)[1], down.gate.stats)
        if self.linear:
            return Update(trees.zeros(payload.network), down.stats, gate)
        near = jnp.argmax(mixture.responsibilities(payload.network, down.networks, self.variance))
        return Update(mixture.pick(down.networks, near), down.stats, gate)

    def server_evidence(self, task: Task, down: Prototypes) -> Array:
        del task
        num = trees.size(down.networks)
        widths = num * (self.epsilon**2 - 1 - 2 * jnp.log(self.epsilon))
        off_centre = trees.norm_squared(down.networks) if self.prior_mean == "zero" else 0.0
        return -0.5 * (off_centre + widths)  # eq. (71)

    def client_evidence(self, task: Task, down: Prototypes, payload: Update, data: Shard, key: Key) -> Array:
        mean = mixture.point_of(payload.network, down.networks) if self.linear else payload.network
        width = jax.tree.map(lambda m: jnp.full_like(m, self.epsilon), mean)
        theta = gaussian.draw(key, Gaussian(mean, width))
        network = Params(trees.merge(down.frozen, theta), payload.stats)
        entropy = 0.5 * trees.size(mean) * (1 + jnp.log(2 * jnp.pi) + 2 * jnp.log(self.epsilon))
        prior = mixture.expected_log_density(mean, down.networks, self.variance, self.epsilon)  # a bound on eq. (72)
        return entropy + prior - total_nll(task, network, data, self.work.batch_size)

    def _gate_parts(self, task: Task, down: Prototypes) -> tuple[Weights, Weights]:
        """Return the frozen and the learned part of the gate, None without one."""
        return (None, None) if down.gate is None else task.frozen_and_learned(down.gate.weights, self.update)

    def _start(self, task: Task, down: Prototypes, client: Any, data: Shard, key: Key) -> Weights:
        """Return the network that a client starts from."""
        if self.num_prototypes == 1 and self.start != "last":
            return mixture.pick(down.networks, jnp.int32(0))
        if self.start == "centre":
            return mixture.middle(down.networks)

        sample = data.batch(key, NUM_TRIED)

        def loss(network: Weights) -> Array:
            return task.nll(Params(trees.merge(down.frozen, network), down.stats), sample)[0]

        best = mixture.pick(down.networks, jnp.argmin(jax.lax.map(loss, down.networks)))
        return trees.select(client.is_own, client.network, best) if self.start == "last" else best

    def _pull(self, down: Prototypes, data: Shard, beside: Weights, other: str = "gate") -> Pull:
        """Return the penalty of eq. (22) in units of the mean likelihood of one example; nothing else is pulled."""
        strength = 1 / (self.variance * jnp.maximum(data.count, 1))

        def centre(weights: Weights) -> Weights:
            share = mixture.responsibilities(weights["network"], down.networks, self.variance)  # eq. (75)
            return {"network": mixture.blend(share, down.networks), other: weights[other]}

        networks = jax.tree.map(lambda _: strength, down.networks)
        return Pull(centre, {"network": networks, other: jax.tree.map(lambda _: jnp.float32(0), beside)})

    def _gate_loss(self, task: Task, gate: Params, batch: Batch, target: Array, key: Key) -> tuple[Array, Any]:
        """Return the mean cross-entropy of the gate that should name `target` on every example."""
        outputs, stats = task.model.apply(gate, batch.x, key=key)
        missed = -jax.nn.log_softmax(self._logits(outputs))[:, target]
        return jnp.sum(batch.mask * missed) / jnp.maximum(jnp.sum(batch.mask), 1.0), stats

    def _logits(self, outputs: Array) -> Array:
        """Return K logits from a network's outputs."""
        num = outputs.shape[-1]
        if num >= self.num_prototypes:
            return outputs[:, : self.num_prototypes]
        anchors = 2 * jax.random.normal(jax.random.key(0), (num, self.num_prototypes))
        return outputs @ anchors - 0.5 * jnp.sum(anchors**2, axis=0)[None]
