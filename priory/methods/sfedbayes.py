"""sFedBayes: pFedBayes with weights that may be zero, so that clients learn sparse networks and send less.

Zhang, Li, Shao, Li, Federated Learning via Variational Bayesian Inference: Personalization, Sparsity and Clustering,
arXiv:2303.04345; section 4, algorithm 2, equations (32) to (43).

    w, q_k = Π λ N(μ, σ²) + (1 − λ) δ_0,   σ = softplus(ρ)
    min_w 1/N Σ_k F_k(w),   F_k(w) = min_q −E_q log p(D_k | θ) + ζ Ω_w,   Ω_w ≥ KL(q ‖ w) the bound (34)

Server keeps   w = (μ_w, ρ_w, logit λ_w), broadcast as it is: 3d numbers
Client keeps   nothing, or q_k and the state of its optimiser (`stateful`)
Client sends   (μ, ρ, λ) of w_k, its own copy of w after R steps that follow q_k, weighted equally: 3d numbers, or with
               `tol` a bit for each weight and three numbers for those with λ ≥ tol

Choices that the paper leaves open (docs/methods/pfedbayes.md has the measurements):

- λ is learned through its logit and kept in [1e-6, 1 − 1e-6]. The paper reports an estimate of 1.01, so there it is
  free to be no probability at all; that is not offered. The server averages λ itself, as printed.
- What the paper calls sparsity is the density, the share of weights that are not zero; `density` reports it for the
  posterior, and sparsity is 1 − density.
- Each round starts q_k at what was broadcast, as algorithm 2 says. `stateful` goes on as pFedBayes does.
- The temperature τ of the gates is 0.5: the paper has no value.
- Gates are drawn once a minibatch (`samples_per_step` times). Given them the weights are Gaussian: `draw="layers"`
  draws outputs of layers instead of weights where that is exact in expectation, as in pFedBayes.
- A weight with λ < `tol` is not sent, and counts as λ = 0 with the μ and ρ that were broadcast.
- Prediction averages over `samples` networks, or takes the mean λμ of the weights, or the median model: μ where
  λ > ½, a network that is really sparse.
- The rest, from the order of steps to clients without examples, is as in pFedBayes.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian, spike_slab
from priory.bayes.gaussian import Gaussian
from priory.bayes.spike_slab import Free, SpikeSlab
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Certified, Certifies, Draws, PosteriorCheck, SharedModel, SparseUplink
from priory.fed.checks import at_least, positive
from priory.fed.local import Optimiser, Work
from priory.fed.method import Info, Message, Method, Predictive, Task, equally, point
from priory.fed.shard import Shard
from priory.fed.thin import Thin
from priory.methods._blocks import coupled_vi
from priory.methods._blocks.certified import own_statistics
from priory.methods._blocks.coupled_vi import ClientState, CoupledFit, VariationalParams, init_client_state
from priory.models.model import Params

Weights = Any


@struct
class Update:
    """The message: w_k with λ as a probability, which may be averaged."""

    mean: Weights
    rho: Weights
    inclusion: Weights
    stats: Any


@struct
class SFedBayes(
    Method[VariationalParams, VariationalParams, Any, Update, VariationalParams],
    SharedModel[VariationalParams, VariationalParams],
    Draws[VariationalParams],
    Certifies[VariationalParams, VariationalParams],
    PosteriorCheck[VariationalParams],
    SparseUplink[VariationalParams, Update],
):
    """sFedBayes, sparse variational personalisation.

    Attributes:
        zeta: ζ, weight of the divergence from the prior.
        rho: ρ of all weights at the start; σ = softplus(ρ).
        inclusion: λ of all weights at the start, the probability that a weight is not zero.
        temperature: τ, of the relaxed gates in the backward pass.
        tol: Weights with λ below this are not sent; 0 sends all.
        beta: β, how far the server goes to the mean of what it receives.
        samples_per_step: a, Monte Carlo samples of the likelihood in a step.
        draw: Draw outputs of layers where that is exact in expectation, or always the weights.
        stateful: Clients go on from their own last posterior; otherwise each round starts from the prior.
        prior_rate: Step size of the prior's copy, as a multiple of that of the posterior.
        prediction: Predict with networks drawn, with the mean of the weights, or with the median model.
        samples: Networks that predict together where they are drawn.
        optimiser: Local solver, of both distributions.
        work: Local work of a round.
    """

    zeta: float = 10.0
    rho: float = -2.5
    inclusion: float = 0.99
    temperature: float = 0.5
    tol: float = static(default=0.0)  # static: with 0 there is no bitmap
    beta: float = 1.0
    samples_per_step: int = static(default=1)
    draw: Literal["layers", "weights"] = static(default="layers")
    stateful: bool = static(default=False)
    prior_rate: float = 1.0
    prediction: Literal["sample", "mean", "median"] = static(default="sample")
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
        keeps="nothing (its posterior and optimiser state if stateful is on)",
        sends="its copy of the spike-and-slab prior",
    )
    linear: ClassVar[bool] = True
    certifies: ClassVar[str] = "the client's Gaussian with gates, whichever way `prediction` predicts"

    def check(self) -> None:
        coupled_vi.check(self)
        if not 0 < self.inclusion < 1:
            raise UsageError(f"inclusion={self.inclusion} lies outside (0, 1); choose a probability such as 0.99.")
        positive("temperature", self.temperature)
        if not 0 <= self.tol < 1:
            raise UsageError(f"tol={self.tol} lies outside [0, 1); choose a probability such as 0.1, or 0 to send all.")
        at_least("samples", self.samples, 1 if self.prediction == "sample" else 0)

    def init_server(self, task: Task, key: Key) -> VariationalParams:
        drawn = task.init(key)
        return VariationalParams(spike_slab.around(drawn.weights, self.rho, self.inclusion), drawn.stats)  # eq. (33)

    def init_client(self, task: Task, down: VariationalParams, key: Key) -> Any:
        del task, key
        return init_client_state(down, self.optimiser) if self.stateful else ()

    def client_update(
        self, task: Task, down: VariationalParams, client: Any, data: Shard, key: Key
    ) -> tuple[Any, Message[Update], Info]:
        fitted, localised, loss = self._fit(task, down, client, data, key)  # Algorithm 2, ClientUpdate
        q = spike_slab.of(fitted.q.weights)
        payload = self._thinned(_update(localised), down)
        message = Message(payload, weight=(data.count > 0).astype("float32"))
        divergence = spike_slab.kl(q, spike_slab.of(down.weights))  # eq. (34)
        info = {"loss": loss, "divergence": divergence, "density": spike_slab.density(q)}
        return fitted if self.stateful else (), message, info

    def aggregate(
        self, task: Task, server: VariationalParams, messages: Message[Update], key: Key
    ) -> tuple[VariationalParams, Info]:
        del task, key
        mean: Update = trees.weighted_mean(messages.payload, messages.weight)
        before = _update(server)
        now, then = (mean.mean, mean.rho, mean.inclusion), (before.mean, before.rho, before.inclusion)
        # Algorithm 2: (1 − β)v + β/S Σ_k v_k
        centre, rho, inclusion = trees.axpy(self.beta, trees.sub(now, then), then)
        moved = Free(centre, rho, jax.tree.map(spike_slab.logit_of, inclusion))
        return trees.select(jnp.sum(messages.weight) > 0, VariationalParams(moved, mean.stats), server), {}

    def thin(self, payload: Update) -> Thin:
        if self.tol == 0:
            return Thin(None, (), payload)
        kept = jax.tree.map(lambda inclusion: inclusion > 0, payload.inclusion)

        def part(tree: Weights) -> Weights:
            return jax.tree.map(lambda there, leaf: jnp.where(there, leaf, 0), kept, tree)

        return Thin(kept, (part(payload.mean), part(payload.rho), part(payload.inclusion)), payload.stats)

    def fill(self, task: Task, down: VariationalParams, thin: Thin) -> Update:
        del task
        if self.tol == 0:
            return thin.rest
        mean, rho, inclusion = thin.values

        def whole(tree: Weights, otherwise: Weights) -> Weights:
            return jax.tree.map(jnp.where, thin.kept, tree, otherwise)

        return Update(whole(mean, down.weights.mean), whole(rho, down.weights.rho), inclusion, thin.rest)

    def personalise(self, task: Task, down: VariationalParams, client: Any, data: Shard, key: Key) -> VariationalParams:
        if not self.stateful:
            return self._fit(task, down, client, data, key)[0].q
        return trees.select(data.count > 0, client.q, down)

    def predict(self, task: Task, posterior: VariationalParams, x: Array, key: Key) -> Predictive:
        if self.prediction != "sample":
            centre = spike_slab.mean_of if self.prediction == "mean" else spike_slab.median_of
            return point(task.model.apply(Params(centre(spike_slab.of(posterior.weights)), posterior.stats), x)[0])
        return equally(task, self.draws(task, posterior, key, self.samples), x)

    def draws(self, task: Task, posterior: VariationalParams, key: Key, num: int) -> Params:
        del task
        q = spike_slab.of(posterior.weights)

        def one(key: Key) -> Params:
            return Params(spike_slab.draw(key, q, self.temperature), posterior.stats)

        return jax.lax.map(one, jax.random.split(key, num))

    def uncertified(self, task: Task) -> str | None:
        return own_statistics(task)

    def certified(self, task: Task, down: VariationalParams, posterior: VariationalParams) -> Certified:
        del task
        q, w = spike_slab.of(posterior.weights), spike_slab.of(down.weights)
        return Certified(lambda key: Params(spike_slab.draw(key, q, self.temperature), down.stats), spike_slab.kl(q, w))

    def reference(self, task: Task, down: VariationalParams, payload: Update) -> Update:
        del task, payload
        return _update(down)

    def knowing(self, task: Task, mean: Params, sd: Weights) -> VariationalParams:
        """Return a slab without a spike, as near as λ comes to 1."""
        del task
        logit = jax.tree.map(lambda leaf: spike_slab.logit_of(jnp.ones_like(leaf)), sd)
        return VariationalParams(Free(mean.weights, jax.tree.map(gaussian.rho_of, sd), logit), mean.stats)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "SFedBayes":
        """Return the setting with ζ = 1, since any other tempers the likelihood, whose posterior goes on to the end."""
        del prior_sd, posterior_sd
        return replace(self, zeta=1.0, stateful=True)

    def _fit(
        self, task: Task, down: VariationalParams, client: Any, data: Shard, key: Key
    ) -> tuple[ClientState, VariationalParams, Array]:
        """Return the posterior and w_k after a round's work, and its mean loss."""

        def gated(key: Key, q: SpikeSlab) -> Gaussian:
            return spike_slab.gated(key, q, self.temperature)  # eq. (41)

        nll = coupled_vi.likelihood(task, self.draw, self.samples_per_step, gated)  # first term of eq. (43)
        start = client if self.stateful else init_client_state(down, self.optimiser)  # Algorithm 2: v_0 = v^t
        how = CoupledFit(self.optimiser, self.work, self.zeta, self.prior_rate)
        # Algorithm 2, r = 0 … R − 1, with eqs. (42) and (43)
        return coupled_vi.fit_posterior_and_prior(nll, spike_slab, start, down, data, key, how)

    def _thinned(self, update: Update, down: VariationalParams) -> Update:
        """Return the update as the server takes it: weights that are not sent stay where they were, with λ = 0."""
        if self.tol == 0:
            return update
        sent = jax.tree.map(lambda inclusion: inclusion >= self.tol, update.inclusion)
        return Update(
            jax.tree.map(jnp.where, sent, update.mean, down.weights.mean),
            jax.tree.map(jnp.where, sent, update.rho, down.weights.rho),
            jax.tree.map(lambda there, inclusion: jnp.where(there, inclusion, 0), sent, update.inclusion),
            update.stats,
        )


def _update(belief: VariationalParams) -> Update:
    q = spike_slab.of(belief.weights)
    return Update(q.mean, belief.weights.rho, q.inclusion, belief.stats)
