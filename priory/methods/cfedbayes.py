"""cFedBayes: K Gaussian priors, and each client under the one that explains its data best.

Zhang, Li, Shao, Li, Federated Learning via Variational Bayesian Inference: Personalization, Sparsity and Clustering,
arXiv:2303.04345; section 5, algorithm 3, equations (54) to (57).

    w^j = Π N(μ_j, σ_j²),   q_k = Π N(μ_k, σ_k²),   σ = softplus(ρ)
    min_w 1/N Σ_k F_k(w),   F_k(w) = min_q −E_q log p(D_k | θ) + ζ KL(q ‖ w^c),   c = argmax_j E_{w^j} log p(D_k | θ)

Server keeps   w^1 … w^K, broadcast as they are: 2Kd numbers
Client keeps   q_k, the state of its optimiser and its last cluster; only the cluster with `stateful=False`
Client sends   c and w_k, its own copy of w^c after R steps that follow q_k: 2d numbers and one, weighted equally; with
               `average="moments"` the first two moments of q_k around μ_c instead of w_k, which determine q_k

Choices that the paper leaves open (docs/methods/pfedbayes.md has the measurements):

- σ = softplus(ρ) as in pFedBayes; eq. (54) prints another width, and the line below it a third.
- The choice (56) compares log-likelihoods averaged over the mean network and `choice_samples` draws, which share their
  noise over all K, on at most 1000 of the client's training examples, drawn once and for all.
- The first priors are all equal, and ties are broken at random: each cluster then learns from a random part of the
  clients, and those in the majority there find it the better one next time. Among independent networks
  (`first_priors="independent"`) one is often the best for everybody, and takes all clients for ever.
- The algorithm chooses by likelihood; the proof's choice by divergence is not used. With K = 1 there is nothing to
  choose, and all is as in pFedBayes, to the key.
- A cluster's mean is over the uploaders that chose it, where the printed divisor may count others; a cluster without
  any stays as it is.
- A client that changes its cluster takes its own q_k along; the first time, q_k starts at the w^c of its choice. One
  without examples sends nothing, is in no cluster, and has w^1 for its posterior.
- For a global prediction the client's training data choose the cluster. Without any, all K count equally.
- `average="moments"` is Lemma A.3, the w^j that minimises the mean KL(q_k ‖ w^j) over its cluster. As in pFedBayes
  there is then no w_k, and q_k is fitted under w^c as it was broadcast.
- Statistics of a batch norm are one set for all clusters, averaged plainly.
- The divergence of a posterior is KL(q_k ‖ w^c) + log K, a bound on that from the equal mixture of all that was
  broadcast: c was chosen with the data in hand.
"""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian
from priory.bayes.gaussian import Free
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Certified, Certifies, Clustered, Draws, PosteriorCheck, SharedModel
from priory.fed.checks import at_least
from priory.fed.local import Optimiser, Work
from priory.fed.method import Info, Message, Method, Predictive, Task, equally
from priory.fed.shard import Shard
from priory.methods._blocks import clustered, coupled_vi
from priory.methods._blocks.certified import own_statistics
from priory.methods._blocks.clustered import Assigned
from priory.methods._blocks.coupled_vi import ClientState, CoupledFit, VariationalParams, init_client_state
from priory.models.model import Params


@struct
class Member:
    """The state of a client: its posterior and optimiser, or nothing of them, and its last cluster, −1 for none."""

    personal: ClientState | tuple[()]
    cluster: Array


@struct
class Moments:
    """The first two moments of q_k around the broadcast mean of its cluster, which may be averaged (Lemma A.3)."""

    offset: Any
    square: Any


@struct
class Blend:
    """Gaussians over networks that count equally.

    Attributes:
        weights: Their free coordinates, stacked on axis 0.
        stats: Statistics of a batch norm.
        cluster: Whose posteriors they are, (number of Gaussians,).
    """

    weights: Free
    stats: Any
    cluster: Array


@struct
class CFedBayes(
    Method[VariationalParams, VariationalParams, Member, Assigned, Blend],
    SharedModel[VariationalParams, Blend],
    Draws[Blend],
    Certifies[VariationalParams, Blend],
    PosteriorCheck[VariationalParams],
    Clustered[Member],
):
    """cFedBayes, clustered variational personalisation.

    Attributes:
        clusters: K, how many priors there are; auto chooses 1 to 4 on the validation rows before the run.
        zeta: ζ, weight of the divergence from the prior.
        rho: ρ of all weights at the start; σ = softplus(ρ).
        beta: β, how far the server goes to the mean of what it receives.
        first_priors: Equal, so that chance parts the clients, or independent, which the likelihood tells apart at once.
        choice_samples: Monte Carlo samples of each prior in the choice of a cluster, beside its mean.
        samples_per_step: a, Monte Carlo samples of the likelihood in a step.
        draw: Draw outputs of layers where that is exact in expectation, or always the weights.
        average: The server's mean of the (μ, ρ) of w_k (printed), or of the moments of q_k (Lemma A.3), which then
            leave the client; no w_k is computed.
        stateful: Clients go on from their own last posterior; otherwise each round starts from the prior.
        prior_rate: Step size of w_k, as a multiple of that of the posterior; not used with moments.
        samples: Networks that predict together; 0 predicts with the mean of the weights. The global model, with equal
            numbers from each cluster, rounds up to a multiple of K.
        optimiser: Local solver, of both distributions.
        work: Local work of a round.
    """

    clusters: int | Literal["auto"] = static(default=2)
    zeta: float = 10.0
    rho: float = -2.5
    beta: float = 1.0
    first_priors: Literal["equal", "independent"] = static(default="equal")
    choice_samples: int = static(default=1)
    samples_per_step: int = static(default=1)
    draw: Literal["layers", "weights"] = static(default="layers")
    average: Literal["params", "moments"] = static(default="params")
    stateful: bool = static(default=True)
    prior_rate: float = 1.0
    samples: int = static(default=30)
    optimiser: Optimiser = Optimiser("adam", 0.001)
    work: Work = Work(steps=20, batch_size=50)

    about: ClassVar[About] = About(
        paper=Paper(
            "Zhang et al.",
            "Federated Learning via Variational Bayesian Inference: Personalization, Sparsity and Clustering",
            2023,
            arxiv="2303.04345",
        ),
        keeps="its Gaussian posterior, optimiser state and cluster (the cluster only if stateful is off)",
        sends="its copy of the cluster's Gaussian prior (the moments of its posterior if average is moments) and the "
        "number of its cluster",
    )
    certifies: ClassVar[str] = "the client's Gaussian, under the equal mixture of all priors"

    def check(self) -> None:
        if self.clusters == "auto":
            raise UsageError(
                "clusters=auto is no number yet; let `priory run` or `priory compare` choose it on validation rows, or "
                "priory.tune.settle in Python, or give one."
            )
        if not isinstance(self.clusters, int):
            raise UsageError(f"clusters={self.clusters!r} is not understood; give a whole number, or auto.")
        at_least("clusters", self.clusters, 1)
        coupled_vi.check(self)
        at_least("choice-samples", self.choice_samples, 0)
        at_least("samples", self.samples, 0)

    @property
    def num_clusters(self) -> int:
        """Return K."""
        assert isinstance(self.clusters, int), "`check` lets no other pass"
        return self.clusters

    def init_server(self, task: Task, key: Key) -> VariationalParams:
        means = clustered.fresh(task, key, self.num_clusters, alike=self.first_priors == "equal")
        return VariationalParams(gaussian.around(means.weights, self.rho), means.stats)

    def init_client(self, task: Task, down: VariationalParams, key: Key) -> Member:
        del task, key
        return Member(init_client_state(_prior(down, 0), self.optimiser) if self.stateful else (), jnp.int32(-1))

    def client_update(
        self, task: Task, down: VariationalParams, client: Member, data: Shard, key: Key
    ) -> tuple[Member, Message[Assigned], Info]:
        key_choice, key_work = clustered.split(key, self.num_clusters)
        chosen = self._choose(task, down, data, key_choice)  # Algorithm 3: k̃, eq. (56)
        prior = _prior(down, chosen)
        fitted, localised, loss = self._fit(task, prior, client, data, key_work)  # Algorithm 3, ClientUpdate
        divergence = gaussian.kl(gaussian.of(fitted.q.weights), gaussian.of(prior.weights))
        sent = localised.weights if self.average == "params" else _moments(fitted.q.weights, prior.weights)
        message = Message(Assigned(chosen, sent, localised.stats), weight=(data.count > 0).astype("float32"))
        kept = Member(fitted if self.stateful else (), jnp.where(data.count > 0, chosen, client.cluster))
        return kept, message, {"loss": loss, "divergence": divergence}

    def aggregate(
        self, task: Task, server: VariationalParams, messages: Message[Assigned], key: Key
    ) -> tuple[VariationalParams, Info]:
        del task, key

        def move(mean: Any, old: Free) -> Free:
            # eqs. (A.28) and (A.29)
            new = mean if self.average == "params" else gaussian.matching(mean.offset, mean.square, old.mean)
            return trees.axpy(self.beta, trees.sub(new, old), old)  # Algorithm 3: (1 − β)u_k + β mean v_k

        return clustered.aggregate(server, messages, move)

    def personalise(self, task: Task, down: VariationalParams, client: Member, data: Shard, key: Key) -> Blend:
        key_choice, key_work = clustered.split(key, self.num_clusters)
        chosen = self._choose(task, down, data, key_choice)
        prior = _prior(down, chosen)
        if isinstance(client.personal, ClientState):
            is_placed = client.cluster >= 0
            q, chosen = trees.select(is_placed, client.personal.q, prior), jnp.where(is_placed, client.cluster, chosen)
        else:
            q = self._fit(task, prior, client, data, key_work)[0].q
        return Blend(jax.tree.map(lambda leaf: leaf[None], q.weights), q.stats, chosen[None])

    def population(self, task: Task, down: VariationalParams, data: Shard | None, key: Key) -> Blend:
        every = jnp.arange(self.num_clusters)
        # The shape cannot follow the data: K times the same prior where they choose one.
        index = every if data is None else jnp.where(data.count > 0, self._choose(task, down, data, key), every)
        return Blend(jax.tree.map(lambda leaf: leaf[index], down.weights), down.stats, index)

    def predict(self, task: Task, posterior: Blend, x: Array, key: Key) -> Predictive:
        num_parts = posterior.cluster.shape[0]
        if self.samples > 0:
            num = num_parts * math.ceil(self.samples / num_parts)
            return equally(task, self.draws(task, posterior, key, num), x)
        stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_parts, *leaf.shape)), posterior.stats)
        return equally(task, Params(posterior.weights.mean, stats), x)

    def draws(self, task: Task, posterior: Blend, key: Key, num: int) -> Params:
        """Draw networks of the parts in turn."""
        del task
        parts = gaussian.of(posterior.weights)

        def one(place: tuple[Key, Array]) -> Params:
            key, part = place
            return Params(gaussian.draw(key, jax.tree.map(lambda leaf: leaf[part], parts)), posterior.stats)

        turns = jnp.arange(num) % posterior.cluster.shape[0]
        return jax.lax.map(one, (jax.random.split(key, num), turns))

    def uncertified(self, task: Task) -> str | None:
        return own_statistics(task)

    def certified(self, task: Task, down: VariationalParams, posterior: Blend) -> Certified:
        del task
        parts = gaussian.of(posterior.weights)
        priors = jax.tree.map(lambda leaf: leaf[posterior.cluster], down.weights)
        divergence = jnp.mean(jax.vmap(gaussian.kl)(parts, gaussian.of(priors)))

        def draw(key: Key) -> Params:
            key_part, key_weights = jax.random.split(key)
            part = jax.random.randint(key_part, (), 0, posterior.cluster.shape[0])
            return Params(gaussian.draw(key_weights, jax.tree.map(lambda leaf: leaf[part], parts)), down.stats)

        return Certified(draw, divergence + math.log(self.num_clusters))  # log K, since the data chose the prior

    def reference(self, task: Task, down: VariationalParams, payload: Assigned) -> Assigned:
        del task
        prior = _prior(down, payload.cluster).weights
        return Assigned(payload.cluster, prior if self.average == "params" else _moments(prior, prior), down.stats)

    def cluster(self, client: Member) -> Array:
        return client.cluster

    def knowing(self, task: Task, mean: Params, sd: Any) -> VariationalParams:
        """Return K priors that all are the one population."""
        del task
        one = Free(mean.weights, jax.tree.map(gaussian.rho_of, sd))
        num = self.num_clusters
        return VariationalParams(jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), one), mean.stats)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "CFedBayes":
        """Return the setting with ζ = 1, since any other tempers the likelihood, and one cluster."""
        del prior_sd, posterior_sd
        return replace(self, zeta=1.0, clusters=1)

    def _choose(self, task: Task, down: VariationalParams, data: Shard, key: Key) -> Array:
        """Return the cluster whose prior expects the client's examples most, eq. (56), at random among equals."""
        if self.num_clusters == 1:
            return jnp.int32(0)
        priors = gaussian.of(down.weights)
        key_draw, key_tie = jax.random.split(key)

        def drawn(key: Key) -> Any:
            return jax.vmap(lambda prior: gaussian.draw(key, prior))(priors)  # the same noise for all

        keys = jax.random.split(key_draw, self.choice_samples)
        stacks = jax.tree.map(
            lambda mean, more: jnp.concatenate([mean[None], more]), priors.mean, jax.lax.map(drawn, keys)
        )
        tried = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacks)
        losses = clustered.total_nll(task, Params(tried, down.stats), data)  # eq. (56), all examples for a minibatch
        losses = jnp.sum(losses.reshape(-1, self.num_clusters), axis=0)
        best = clustered.least(losses, jax.random.uniform(key_tie, losses.shape))
        return jnp.where(data.count > 0, best, 0).astype("int32")

    def _fit(
        self, task: Task, prior: VariationalParams, client: Member, data: Shard, key: Key
    ) -> tuple[ClientState, VariationalParams, Array]:
        """Return the posterior and w_k after a round's work under a prior, and its mean loss."""
        nll = coupled_vi.likelihood(task, self.draw, self.samples_per_step)  # first term of eq. (55)
        start = init_client_state(prior, self.optimiser)
        if isinstance(client.personal, ClientState):
            start = trees.select(client.cluster >= 0, client.personal, start)
        how = CoupledFit(self.optimiser, self.work, self.zeta, self.prior_rate, moves_prior=self.average == "params")
        # Algorithm 3, with eqs. (55) and (57)
        return coupled_vi.fit_posterior_and_prior(nll, gaussian, start, prior, data, key, how)


def _prior(down: VariationalParams, number: Array | int) -> VariationalParams:
    """Return the prior that was broadcast for one cluster."""
    return VariationalParams(jax.tree.map(lambda leaf: leaf[number], down.weights), down.stats)


def _moments(q: Free, prior: Free) -> Moments:
    return Moments(*gaussian.moments(gaussian.of(q), prior.mean))
