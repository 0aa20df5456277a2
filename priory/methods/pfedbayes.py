"""pFedBayes: Gaussian posteriors for the clients, and a Gaussian prior that follows them.

Zhang, Li, Li, Guo, Shao, Personalized Federated Learning via Variational Bayesian Inference, ICML 2022,
arXiv:2206.07977; with sFedBayes and cFedBayes in arXiv:2303.04345. Algorithm 1, equations (29) to (31).

    w = Π N(μ_w, σ_w²),   q_k = Π N(μ_k, σ_k²),   σ = softplus(ρ)
    min_w 1/N Σ_k F_k(w),   F_k(w) = min_q −E_q log p(D_k | θ) + ζ KL(q ‖ w)

Server keeps   w = (μ_w, ρ_w), broadcast as it is: 2d numbers
Client keeps   q_k and the state of its optimiser, or nothing (`stateful=False`)
Client sends   w_k, its own copy of w after R steps that follow q_k: 2d numbers, weighted equally; with
               `average="moments"` the first two moments of q_k around μ_w instead, which determine q_k: 2d numbers

Choices that the paper leaves open (docs/methods/pfedbayes.md has the measurements):

- Sent is w_k, as algorithm 1 and the text say; a footnote says that it is not.
- The server averages (μ, ρ) of w_k as printed. `average="moments"` is Lemma A.2, the w that minimises the mean
  KL(q_k ‖ w). There is then no w_k: q_k is fitted under w as it was broadcast, so client and server minimise the same
  objective in turn. The learned width is that of the population, where with Adam that of `params` is too small.
- q_k goes on from round to round with its optimiser, as the printed algorithm never resets it; w_k starts from what was
  broadcast, its optimiser at rest. `stateful=False` starts q_k there as well.
- The steps descend Ω/n with Ω as printed, (n/b) Σ −log p + ζ KL, and Ω_w/n without ζ: one step each, in turn.
- μ starts as the network draws its weights, the same for all; ρ at −2.5, so σ = 0.079.
- Noise in the likelihood is standard normal and drawn anew in each step (`samples_per_step` times). `draw="layers"`
  draws outputs of layers instead of weights where that is exact in expectation: less noise in the gradient.
- A client that comes later starts at w and does a round of its own. One without examples has w for its posterior.
- Prediction averages over `samples` networks; 0 takes the mean of the weights.
- Statistics of a batch norm are sent too and averaged plainly; a client's posterior keeps its own.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian
from priory.bayes.gaussian import Free
from priory.core import trees
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Certified, Certifies, Draws, PosteriorCheck, SharedModel
from priory.fed.checks import at_least
from priory.fed.local import Optimiser, Work
from priory.fed.method import Info, Message, Method, Predictive, Task, equally, point
from priory.fed.shard import Shard
from priory.methods._blocks import coupled_vi
from priory.methods._blocks.certified import own_statistics
from priory.methods._blocks.coupled_vi import ClientState, CoupledFit, VariationalParams, init_client_state
from priory.models.model import Params


@struct
class Moments:
    """The message for Lemma A.2: the first two moments of q_k around the broadcast mean, which may be averaged."""

    offset: Any
    square: Any
    stats: Any


@struct
class PFedBayes(
    Method[VariationalParams, VariationalParams, Any, Any, VariationalParams],
    SharedModel[VariationalParams, VariationalParams],
    Draws[VariationalParams],
    Certifies[VariationalParams, VariationalParams],
    PosteriorCheck[VariationalParams],
):
    """pFedBayes, Gaussian variational personalisation.

    Attributes:
        zeta: ζ, weight of the divergence from the prior.
        rho: ρ of all weights at the start; σ = softplus(ρ).
        beta: β, how far the server goes to the mean of what it receives.
        samples_per_step: a, Monte Carlo samples of the likelihood in a step.
        draw: Draw outputs of layers where that is exact in expectation, or always the weights.
        average: The server's mean of the (μ, ρ) of w_k (printed), or of the moments of q_k (Lemma A.2), which then
            leave the client; no w_k is computed.
        stateful: Clients go on from their own last posterior; otherwise each round starts from the prior.
        prior_rate: Step size of w_k, as a multiple of that of the posterior; not used with moments.
        samples: Networks that predict together; 0 predicts with the mean of the weights.
        optimiser: Local solver, of both distributions.
        work: Local work of a round.
    """

    zeta: float = 10.0
    rho: float = -2.5
    beta: float = 1.0
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
            "Personalized Federated Learning via Variational Bayesian Inference",
            2022,
            venue="ICML",
            arxiv="2206.07977",
        ),
        keeps="its Gaussian posterior and optimiser state (nothing if stateful is off)",
        sends="its copy of the Gaussian prior (the moments of its posterior if average is moments)",
    )
    linear: ClassVar[bool] = True
    certifies: ClassVar[str] = "the client's Gaussian"

    def check(self) -> None:
        coupled_vi.check(self)
        at_least("samples", self.samples, 0)

    def init_server(self, task: Task, key: Key) -> VariationalParams:
        drawn = task.init(key)
        return VariationalParams(gaussian.around(drawn.weights, self.rho), drawn.stats)  # σ = softplus(ρ), eq. (29)

    def init_client(self, task: Task, down: VariationalParams, key: Key) -> Any:
        del task, key
        return init_client_state(down, self.optimiser) if self.stateful else ()

    def client_update(
        self, task: Task, down: VariationalParams, client: Any, data: Shard, key: Key
    ) -> tuple[Any, Message[Any], Info]:
        fitted, localised, loss = self._fit(task, down, client, data, key)  # Algorithm 1, ClientUpdate
        payload: Any = localised if self.average == "params" else _moments(fitted.q, down)
        message = Message(payload, weight=(data.count > 0).astype("float32"))
        divergence = gaussian.kl(gaussian.of(fitted.q.weights), gaussian.of(down.weights))  # eq. (9)
        return fitted if self.stateful else (), message, {"loss": loss, "divergence": divergence}

    def aggregate(
        self, task: Task, server: VariationalParams, messages: Message[Any], key: Key
    ) -> tuple[VariationalParams, Info]:
        del task, key
        mean: Any = trees.weighted_mean(messages.payload, messages.weight)
        if self.average == "params":
            w = mean.weights
        else:
            w = gaussian.matching(mean.offset, mean.square, server.weights.mean)  # eqs. (A.6) and (A.7)
        w = trees.axpy(self.beta, trees.sub(w, server.weights), server.weights)  # Algorithm 1: (1 − β)v + β/S Σ_k v_k
        return trees.select(jnp.sum(messages.weight) > 0, VariationalParams(w, mean.stats), server), {}

    def personalise(self, task: Task, down: VariationalParams, client: Any, data: Shard, key: Key) -> VariationalParams:
        if self.stateful:
            # Without examples q_k only trails behind w.
            return trees.select(data.count > 0, client.q, down)
        return self._fit(task, down, client, data, key)[0].q

    def predict(self, task: Task, posterior: VariationalParams, x: Array, key: Key) -> Predictive:
        if self.samples == 0:
            return point(task.model.apply(Params(posterior.weights.mean, posterior.stats), x)[0])
        return equally(task, self.draws(task, posterior, key, self.samples), x)

    def draws(self, task: Task, posterior: VariationalParams, key: Key, num: int) -> Params:
        del task
        return coupled_vi.draw_networks(posterior, key, num)

    def uncertified(self, task: Task) -> str | None:
        return own_statistics(task)

    def certified(self, task: Task, down: VariationalParams, posterior: VariationalParams) -> Certified:
        del task
        q, w = gaussian.of(posterior.weights), gaussian.of(down.weights)
        return Certified(lambda key: Params(gaussian.draw(key, q), down.stats), gaussian.kl(q, w))

    def reference(self, task: Task, down: VariationalParams, payload: Any) -> Any:
        del task, payload
        return down if self.average == "params" else _moments(down, down)

    def knowing(self, task: Task, mean: Params, sd: Any) -> VariationalParams:
        del task
        return VariationalParams(Free(mean.weights, jax.tree.map(gaussian.rho_of, sd)), mean.stats)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "PFedBayes":
        """Return the setting with ζ = 1: any other tempers the likelihood."""
        del prior_sd, posterior_sd
        return replace(self, zeta=1.0)

    def _fit(
        self, task: Task, down: VariationalParams, client: Any, data: Shard, key: Key
    ) -> tuple[ClientState, VariationalParams, Array]:
        """Return the posterior and w_k after a round's work, and its mean loss."""
        nll = coupled_vi.likelihood(task, self.draw, self.samples_per_step)  # first term of eq. (30)
        start = client if self.stateful else init_client_state(down, self.optimiser)
        how = CoupledFit(self.optimiser, self.work, self.zeta, self.prior_rate, moves_prior=self.average == "params")
        # Algorithm 1, r = 0 … R − 1
        return coupled_vi.fit_posterior_and_prior(nll, gaussian, start, down, data, key, how)


def _moments(q: VariationalParams, w: VariationalParams) -> Moments:
    return Moments(*gaussian.moments(gaussian.of(q.weights), w.weights.mean), q.stats)
