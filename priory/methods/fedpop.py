"""FedPop: mixed effects, learned by a federation of Markov chains.

Kotelevskii, Vono, Durmus and Moulines, FedPop: A Bayesian Approach for Personalised Federated Learning, NeurIPS 2022,
arXiv:2206.03611; algorithm 1 (FedSOUK), which with Langevin's kernel is FedSOUL.

    z_k ~ p(z | β),   D_k | z_k ~ the likelihood of the network with body φ and head z_k
    (φ, β) maximise   log p(β) + Σ_k log ∫ p(D_k | φ, z) p(z | β) dz

Server keeps   φ, β and the state of their optimisers; draws of β (`prior_draws`), particles of an energy's prior
Server sends   φ and β: d_φ + d_β numbers, and those draws or particles
Client keeps   z_k, the last state of its chain, or nothing (`stateful`)
Client sends   I = mean ∇_β log p(z | β) and J = mean ∇_φ log p(D_k | z, φ) over the kept states: d_φ + d_β numbers,
               weighted equally; J alone may be compressed, without bias (H3)

The random part z is what the head's predicate selects (the last layer, or `--head`), φ is the rest. Where z is a dense
last layer, the body's features are computed once a round, the chain runs on them, and J is one backward pass.

What the paper leaves open, and what is done here (docs/methods/fedpop.md has the measurements):

- Sign of the drift: +γ∇ log p (algorithm 1), not − (section 2). The server sends (φ_k, β_k).
- Units. J sums over clients and examples, I over clients: the server steps along (b/|A|) ΣJ / |D| and (b/|A|) ΣI / b,
  which the paper leaves to the step sizes. Both go through one kind of optimiser; β has a step size of its own.
- Scale of β: log σ has no unit, and μ moves in units u of its population, u = σ or σ at the start if that is larger:
  the optimiser sees u ∇_μ, and μ moves by u times its step (without momentum and with u = σ, along the natural gradient
  of p(z | β)). So outcomes in another unit, with `prior_sd` and `prior_sigma` in it, lead to the same answer in that
  unit. With `prior_units="outcome"`, u = 1.
- σ is learned as log σ and kept above `sigma_min` (and φ in a ball of `radius`, if one is given). There is one σ for
  each coordinate as in the authors' code, or one for all as in the text (`prior`).
- Burn-in: I and J average over the states after the first `burn_in` of `steps`.
- I has another form: with z = μ + σu, ∇_β log p(D | z(β, u)) has the same mean under the posterior, little noise where
  the prior rules and much where the data do; `score="mixed"` takes w I + (1 − w) of that, w = 1 − mean(1/σ²)/L being
  the share of the data in the posterior's curvature. Without it σ wanders where clients hardly differ. For a random
  intercept it is linear in z, so that the width that Langevin's bias adds to the draws leaves β alone.
- γ: 1/L, L being the largest eigenvalue of Σ_j c_j A_jᵀA_j + diag(1/σ²), with A_j the Jacobian in z of the outputs of
  example j and c_j a bound on the curvature of its likelihood: a global bound where the outputs are linear in z.
- The chain sees the network as it predicts (no dropout, running statistics); J is taken in training.
- `kernel="map"` takes iterates of Adam for samples, as the authors' code does for images. `sgld` and `psgld` see
  `batch_size` random examples a step, and J as many; all other kernels see all examples.
- Prediction for a newcomer without data: z ~ p(· | β); with data, its chain. Accuracies are those of the last round.
- Full Bayes over β (`prior_draws`): instead of a gradient step, β is drawn from p(β | z_1 … z_b), which with a kernel
  that keeps p(z | D, β) invariant and all clients in every round is a Gibbs sampler for (β, z); φ stays a point.
- The energy's ∇ log Z(β) is a mean over particles that the server moves by steps of `mala` under β, round after round.
- A client without examples sends nothing.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.bayes import gaussian, kernels, population
from priory.bayes.gaussian import Gaussian
from priory.bayes.population import Energy, Normal
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import (
    MOST_EFFECTS,
    Advises,
    Certified,
    Certifies,
    Draws,
    MixedEffects,
    PosteriorCheck,
    SharedModel,
)
from priory.fed.checks import at_least, choices, positive
from priory.fed.local import Optimiser
from priory.fed.method import Info, Message, Method, Predictive, Task
from priory.fed.shard import Batch, Shard
from priory.methods._blocks.mixed_effects import Mixed
from priory.models.model import Params

Weights = Any
Prior = Any  # Normal | Energy, by the static field `prior`
BOUND_BATCHES = 8  # minibatches that a bound on the curvature is taken from
RECENT = 4.0  # of t rounds, the recent average of β lags by t / (1 + RECENT) rounds: a fifth of them
SHORTEST = 100  # rounds; shorter runs are judged by their pace
SETTLED = 0.15  # the most that β may have moved in a fifth of the rounds, in units of σ and of log σ
SIGMA_MAX = 1e6  # where a draw of σ ends, for want of a prior


@struct
class Server:
    """What the server knows.

    Attributes:
        phi: The fixed effects.
        beta: The prior of the random effects.
        stats: Statistics of a batch norm.
        crowd: Draws of β on axis 0 (full Bayes), or particles of z (energy); empty otherwise.
        optimisers: State of the optimisers of φ and β.
        count: Rounds in which somebody sent something.
        projected: How often a σ was stopped at its bound.
        recent: An average of (μ, log σ) over the recent rounds; empty where they are not maximised.
    """

    phi: Weights
    beta: Prior
    stats: Any
    crowd: Any
    optimisers: Any
    count: Array
    projected: Array
    recent: Any = ()


@struct
class Down:
    """What is broadcast."""

    phi: Weights
    beta: Prior
    stats: Any
    crowd: Any


@struct
class Gradients:
    """What a client sends: I, J, and the statistics."""

    beta: Prior
    phi: Weights
    stats: Any


@struct
class Samples:
    """A posterior: the fixed effects, and draws of z whose leaves are (chains, draws, ...)."""

    phi: Params
    z: Weights


@dataclass(frozen=True)
class Target:
    """A client's posterior as a chain sees it; lives inside one trace.

    Attributes:
        log_likelihood: log p(D | φ, z).
        log_density: log p(z | D, φ, β) but for a constant.
        bound: A bound L on the curvature of −log_density.
        share: That of the data in it: 1 where they rule, 0 where the prior does.
    """

    log_likelihood: kernels.LogDensity
    log_density: kernels.LogDensity
    bound: Array
    share: Array


@struct
class FedPop(
    Method[Server, Down, Weights, Gradients, Samples],
    SharedModel[Down, Samples],
    Draws[Samples],
    Certifies[Down, Samples],
    PosteriorCheck[Down],
    MixedEffects[Down, Samples],
    Advises,
):
    """FedPop, mixed effects by federated Markov chains.

    Attributes:
        kernel: Markov kernel of the chains: Langevin (FedSOUL) or another; map takes optimiser iterates for samples.
        gamma: γ, step size of the chains; set from a bound on the curvature if it is not given.
        leapfrog: Leapfrog steps of hmc.
        steps: M, steps of a chain in a round.
        burn_in: Steps at the start of each round that I and J leave out.
        batch_size: Examples that go through the network at once; all that a step of sgld or psgld sees.
        stateful: Chains go on where they stopped; otherwise each round starts with a draw of the prior.
        prior: Population of the random effects: Gaussian with a σ for each coordinate, with one σ, or an energy.
        score: I as printed (centred), or mixed with another form of less noise where clients hardly differ; auto mixes
            where a Gaussian prior is maximised and chains see all examples.
        prior_sd: σ at the start.
        freeze_prior: Keep the prior at N(0, prior-sd²) instead of learning it.
        prior_sigma: Prior on σ: flat, gamma:SHAPE,RATE or half-normal:SCALE.
        prior_draws: Draws of (μ, σ) that are kept, for full Bayes over the prior; 0 maximises instead.
        sigma_min: Smallest σ.
        radius: Largest norm of the fixed effects; None leaves them free.
        width: Hidden units of the energy.
        particles: Particles that stand for the energy's prior.
        chains: Chains of a client's posterior.
        warm_up: Steps before the first draw of each.
        samples: Draws of each.
        thin: Steps between draws.
        newcomer_draws: L, draws of the prior that predict for a client without data.
        prior_step_size: Step size of β: of log σ, and of μ in its unit.
        prior_units: Unit of the steps of μ: σ, or prior-sd where that is larger (sd), or the unit of the outcome.
        optimiser: Server's optimiser, of φ and β.
    """

    kernel: kernels.Kind = static(default="ula")
    gamma: float | None = None
    leapfrog: int = static(default=10)
    steps: int = static(default=10)
    burn_in: int = static(default=5)
    batch_size: int = static(default=32)
    stateful: bool = static(default=True)
    prior: Literal["diagonal", "scalar", "energy"] = static(default="diagonal")
    score: Literal["auto", "centred", "mixed"] = static(default="auto")
    prior_sd: float = 1.0
    freeze_prior: bool = static(default=False)
    prior_sigma: str = static(default="flat")
    prior_draws: int = static(default=0)
    sigma_min: float = 1e-3
    radius: float | None = None
    width: int = static(default=16)
    particles: int = static(default=64)
    chains: int = static(default=2)
    warm_up: int = static(default=50)
    samples: int = static(default=50)
    thin: int = static(default=1)
    newcomer_draws: int = static(default=100)
    prior_step_size: float = 0.03
    prior_units: Literal["sd", "outcome"] = static(default="sd")
    optimiser: Optimiser = Optimiser("adam", 0.001)

    about: ClassVar[About] = About(
        paper=Paper(
            "Kotelevskii et al.",
            "FedPop: A Bayesian Approach for Personalised Federated Learning",
            2022,
            venue="NeurIPS",
            arxiv="2206.03611",
        ),
        keeps="the last state of its Markov chain (nothing if stateful is off)",
        sends="gradients for the body and for the prior",
    )
    linear: ClassVar[bool] = True
    legacy_settings: ClassVar[dict[str, str]] = {"prior_units": "outcome"}  # of runs from before the setting existed
    certifies: ClassVar[str] = "a Gaussian with the moments of the draws of z, and not the draws themselves"
    parts: ClassVar[tuple[str, ...]] = ("beta", "phi")  # I and J: sums over coordinates of z and over examples
    unbiased: ClassVar[str] = "the convergence theorem of FedPop (H3)"

    def check(self) -> None:
        choices(self)
        if self.gamma is not None:
            positive("gamma", self.gamma)
        for name in ("leapfrog", "steps", "batch_size", "width", "particles", "chains", "samples", "thin"):
            at_least(name.replace("_", "-"), getattr(self, name), 1)
        at_least("newcomer-draws", self.newcomer_draws, 1)
        for name in ("burn_in", "warm_up", "prior_draws"):
            at_least(name.replace("_", "-"), getattr(self, name), 0)
        if self.burn_in >= self.steps:
            raise UsageError(
                f"burn-in={self.burn_in} leaves nothing of steps={self.steps}; choose fewer, or more steps."
            )
        positive("prior-sd", self.prior_sd)
        positive("sigma-min", self.sigma_min)
        if self.radius is not None:
            positive("radius", self.radius)
        positive("prior-step-size", self.prior_step_size)
        hyper = population.parse(self.prior_sigma)
        if self.prior_draws and (self.prior == "energy" or self.freeze_prior):
            raise UsageError(
                f"prior-draws={self.prior_draws} needs a Gaussian prior that is learned; choose one, or 0 draws."
            )
        if self.prior == "energy" and hyper != population.parse("flat"):
            raise UsageError(f"prior-sigma={self.prior_sigma} belongs to a Gaussian prior; choose prior=diagonal.")
        if self.score == "mixed" and (self.prior == "energy" or self.prior_draws):
            raise UsageError("score=mixed needs a Gaussian prior whose σ is maximised; choose score=auto.")
        self.optimiser.check()

    def init_server(self, task: Task, key: Key) -> Server:
        key_net, key_energy, key_crowd = jax.random.split(key, 3)
        drawn = task.init(key_net)
        z, phi = trees.partition(drawn.weights, task.is_head)
        mean = trees.zeros(z) if self.freeze_prior else z
        normal = population.normal_around(mean, self.prior_sd, "scalar" if self.prior == "scalar" else "diagonal")
        beta, crowd = self._prior_at(normal, key_energy, key_crowd)
        optimisers = (self.optimiser.build().init(phi), self._prior_optimiser().build().init(beta))
        recent = population.base_of(beta) if self._follows else ()
        return Server(phi, beta, drawn.stats, crowd, optimisers, jnp.int32(0), jnp.float32(0), recent)

    def broadcast(self, server: Server) -> Down:
        return Down(server.phi, server.beta, server.stats, server.crowd)

    def init_client(self, task: Task, down: Down, key: Key) -> Weights:
        del task
        return self._from_prior(down, key) if self.stateful else ()

    def client_update(
        self, task: Task, down: Down, client: Weights, data: Shard, key: Key
    ) -> tuple[Weights, Message[Gradients], Info]:
        key_start, key_size, key_chain, key_score, key_body = jax.random.split(key, 5)
        start = client if self.stateful else self._from_prior(down, key_start)  # Algorithm 1, lines 5 to 8
        model = Mixed(task, Params(down.phi, down.stats), start)
        key_rows, key_bound = jax.random.split(key_size)
        target = self._target(model, self._rows(model, data, key_rows), down.beta, start, data, key_bound)
        gamma = self._step_size(target, start)
        how = {"num_steps": self.steps, "burn_in": self.burn_in, "leapfrog": self.leapfrog}
        # Algorithm 1, lines 10 to 15
        chain = kernels.sample(self.kernel, target.log_density, start, gamma, key_chain, **how)
        # A Gibbs sampler needs one draw of each z_k, and not their mean.
        seen = jax.tree.map(lambda leaf: leaf[None], chain.last) if self.prior_draws else chain.kept
        scores = self._scores(target, down.beta, seen, key_score)  # Algorithm 1, line 17
        # Algorithm 1, line 18
        body, phi = model.body_gradient(chain.kept, data, self.batch_size, not self._samples_data, key_body)
        payload = Gradients(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), scores), body, phi.stats)
        message = Message(payload, weight=(data.count > 0).astype("float32"))
        limit = kernels.stability_limit(self.kernel, target.bound)
        info = {"accepted": chain.accepted, "unstable": (gamma >= limit).astype("float32"), "gamma_limit": limit}
        info["own_share"] = target.share
        return chain.last if self.stateful else (), message, info

    def aggregate(self, task: Task, server: Server, messages: Message[Gradients], key: Key) -> tuple[Server, Info]:
        mean: Gradients = trees.weighted_mean(messages.payload, messages.weight)
        # (b/|A|) Σ J is b times the mean, here for each example; lines 21 and 22.
        per_example = trees.scale(task.num_clients / task.num_examples, mean.phi)
        phi, state = self._ascend(self.optimiser, server.phi, per_example, server.optimisers[0])  # Algorithm 1, line 22
        if self.radius is not None:
            # Π_Φ of line 22
            phi = trees.scale(jnp.minimum(1.0, self.radius / jnp.maximum(trees.norm(phi), 1e-12)), phi)
        beta, prior_state, crowd = self._next_prior(task, server, mean.beta, key)  # Algorithm 1, line 21
        beta, collapsed = population.project(beta, self.sigma_min, jnp.inf)  # Π_B of line 21
        recent, count = server.recent, server.count + 1
        if self._follows:
            share = RECENT / (count + RECENT)
            recent = trees.axpy(share, trees.sub(population.base_of(beta), recent), recent)
        moved = Server(phi, beta, mean.stats, crowd, (state, prior_state), count, server.projected + collapsed, recent)
        server = trees.select(jnp.sum(messages.weight) > 0, moved, server)
        sd = population.sd(server.beta, self._like(task))
        rms = jnp.sqrt(trees.norm_squared(sd) / max(1, trees.size(sd)))
        everyone = jnp.sum(messages.weight) / task.num_clients
        info = {"sigma": rms, "projected": server.projected, "participation": everyone}
        return server, info | self._movement(server)

    def personalise(self, task: Task, down: Down, client: Weights, data: Shard, key: Key) -> Samples:
        key_start, key_size, key_chain = jax.random.split(key, 3)
        starts = jax.vmap(lambda key: self._from_prior(down, key))(jax.random.split(key_start, self.chains))
        if self.stateful:
            starts = jax.tree.map(lambda all_, own: all_.at[0].set(own), starts, client)
        phi = Params(down.phi, down.stats)

        def chain(start: Weights, key_size: Key, key: Key) -> Weights:
            model = Mixed(task, phi, start)
            key_rows, key_bound = jax.random.split(key_size)
            rows = self._rows(model, data, key_rows)
            if self.prior_draws:
                return self._over_priors(model, rows, down.crowd, start, data, key_bound, key)
            target = self._target(model, rows, down.beta, start, data, key_bound)
            gamma = self._step_size(target, start)
            how = {"num_steps": self.warm_up + self.samples * self.thin, "burn_in": self.warm_up}
            how |= {"thin": self.thin, "leapfrog": self.leapfrog}
            return kernels.sample(self.kernel, target.log_density, start, gamma, key, **how).kept

        keys = (jax.random.split(one, self.chains) for one in (key_size, key_chain))
        return Samples(phi, jax.vmap(chain)(starts, *keys))

    def population(self, task: Task, down: Down, data: Shard | None, key: Key) -> Samples:
        del task, data
        keys = jax.random.split(key, (1, self.newcomer_draws))
        return Samples(Params(down.phi, down.stats), jax.vmap(jax.vmap(lambda key: self._from_prior(down, key)))(keys))

    def predict(self, task: Task, posterior: Samples, x: Array, key: Key) -> Predictive:
        del key
        zs = _flat(posterior.z)
        return Mixed(task, posterior.phi, self._one(zs)).predict(zs, x)

    def draws(self, task: Task, posterior: Samples, key: Key, num: int) -> Params:
        """Networks drawn from a posterior with replacement, on axis 0."""
        del task
        zs = _flat(posterior.z)
        chosen = jax.random.randint(key, (num,), 0, jax.tree.leaves(zs)[0].shape[0])
        one = jax.vmap(lambda i: trees.merge(jax.tree.map(lambda leaf: leaf[i], zs), posterior.phi.weights))
        stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), posterior.phi.stats)
        return Params(one(chosen), stats)

    def uncertified(self, task: Task) -> str | None:
        del task
        if self.prior == "energy":
            return "prior=energy has a density that is known but for its normaliser; choose prior=diagonal or scalar"
        if self.chains * (self.prior_draws or self.samples) < 2:
            return f"chains={self.chains} and samples={self.samples} leave one draw, which has no width; take more"
        return None

    def certified(self, task: Task, down: Down, posterior: Samples) -> Certified:
        """A Gaussian fitted to the draws against p(z | β), or the mixture of these over the draws of β."""
        zs = _flat(posterior.z)
        q = Gaussian(*(jax.tree.map(lambda leaf, of=of: of(leaf, axis=0), zs) for of in (jnp.mean, jnp.std)))

        def divergence(beta: Normal) -> Array:
            return gaussian.kl(q, Gaussian(beta.mean, population.sd(beta, self._like(task))))

        betas = down.crowd if self.prior_draws else jax.tree.map(lambda leaf: leaf[None], down.beta)
        each = jax.lax.map(divergence, betas)
        # The divergence from an equal mixture: log Σ exp is convex, so its mean is no less than at the means.
        nats = jnp.log(each.shape[0]) - jax.nn.logsumexp(-each)
        return Certified(lambda key: Params(trees.merge(gaussian.draw(key, q), down.phi), down.stats), nats)

    def knowing(self, task: Task, mean: Params, sd: Weights) -> Down:
        """β at the population, and draws or particles that are all of it; one σ for all is their geometric mean."""
        z, phi = trees.partition(mean.weights, task.is_head)
        log_sd = jax.tree.map(jnp.log, trees.partition(sd, task.is_head)[0])
        if self.prior == "scalar":
            log_sd = jnp.mean(ravel_pytree(log_sd)[0])
        key_energy, key_crowd = jax.random.split(jax.random.key(0))
        beta, crowd = self._prior_at(Normal(z, log_sd), key_energy, key_crowd)
        return Down(phi, beta, mean.stats, crowd)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "FedPop":
        """A kernel that keeps the posterior: Langevin's with the steps that would leave it refused."""
        del prior_sd, posterior_sd
        return self if self.kernel in ("mala", "hmc", "nuts") else replace(self, kernel="mala")

    def compressible(self, path: str) -> bool:
        """Only J is compressed."""
        return path.startswith("phi")

    def effects(self, task: Task, posterior: Samples) -> Weights:
        """Draws of the random effects, leaves (chains, draws, ...)."""
        del task
        return posterior.z

    def population_effects(self, task: Task, down: Down) -> tuple[Weights, Weights]:
        """Mean and standard deviation of the population, leaves (draws, ...); one draw where they are maximised."""
        betas = down.crowd if self.prior_draws else jax.tree.map(lambda leaf: leaf[None], down.beta)
        if self.prior == "energy":  # neither is known but through the particles
            return jax.tree.map(lambda leaf: jnp.mean(leaf, 0)[None], down.crowd), jax.tree.map(
                lambda leaf: jnp.std(leaf, 0)[None], down.crowd
            )
        return betas.mean, jax.vmap(lambda beta: population.sd(beta, self._like(task)))(betas)

    def fixed_effects(self, task: Task, down: Down) -> Weights:
        """φ."""
        del task
        return down.phi

    def advice(self, task: Task, info: dict[str, float]) -> dict[str, str]:
        """What the figures of a round say that somebody should hear."""
        said = {}
        is_over = info.get("progress", 1.0) == 1  # until then β may be small and on its way
        if is_over and info.get("own_share", 1.0) < 0.01:
            said["collapse"] = (
                f"σ has collapsed to {info['sigma']:.3g} (stopped {info['projected']:.0f} times at sigma-min="
                f"{self.sigma_min:g}) and leaves clients {info['own_share']:.1%} of their own: the likelihood is "
                "largest where they do not differ, which with few clients happens by chance; give a prior on σ, such "
                "as --prior-sigma gamma:2,0.1, or draw it with --prior-draws."
            )
        if info.get("unstable", 0.0) > 0:
            said["unstable"] = (
                f"gamma={self.gamma} is above the stability limit of {info['unstable']:.0%} of the clients (their mean "
                f"limit is {info['gamma_limit']:.3g}); choose less, or leave it out to have it set."
            )
        moved = [info.get(name, 0.0) for name in ("mean_moved", "sd_moved")]
        if is_over and max(moved) > SETTLED and trees.size(self._like(task)) <= MOST_EFFECTS:
            said["moving"] = (
                "The population has not settled, so its mean and standard deviation are not estimates yet: at the pace "
                f"of the last rounds, a fifth of all rounds (or {SHORTEST / 5:.0f}) moves the mean by {moved[0]:.2g} "
                f"standard deviations and the standard deviation by a factor of {math.exp(moved[1]):.2f}; take more "
                "--rounds or a larger --prior-step-size, or if it moves to and fro, --schedule prior-step-size=cosine."
            )
        if self.prior_draws and info.get("participation", 1.0) < 1:
            said["participation"] = (
                f"prior-draws={self.prior_draws} draws the prior given everybody's random effects, but "
                f"{info['participation']:.0%} of the clients took part; let all take part."
            )
        return said

    @property
    def _follows(self) -> bool:
        """Whether the server compares β with where it was."""
        return self.prior_units == "sd" and not self.freeze_prior and not self.prior_draws

    @property
    def _mixes(self) -> bool:
        """Whether I is the mixture of two forms."""
        if self.score != "auto":
            return self.score == "mixed"
        is_maximised = self.prior != "energy" and not self.freeze_prior and not self.prior_draws
        return is_maximised and not self._samples_data

    @property
    def _samples_data(self) -> bool:
        return self.kernel in ("sgld", "psgld")

    def _rows(self, model: Mixed, data: Shard, key: Key) -> Batch:
        """All examples of a client, or for a kernel that draws some, those that its curvature is bounded by."""
        if self._samples_data:
            return model.seen(data.batch(key, BOUND_BATCHES * self.batch_size))
        return model.seen_whole(data, self.batch_size)

    def _target(self, model: Mixed, rows: Batch, beta: Prior, z: Weights, data: Shard, key: Key) -> Target:
        """What a client's chain samples; its curvature is bounded at z."""
        factor = bound_factor = jnp.float32(1)
        if self._samples_data:
            factor = data.count / self.batch_size
            bound_factor = factor / BOUND_BATCHES

        def log_likelihood(z: Weights, key: Key) -> Array:
            seen = model.seen(data.batch(key, self.batch_size)) if self._samples_data else rows
            return factor * model.log_likelihood(z, seen)

        def log_density(z: Weights, key: Key) -> Array:
            return log_likelihood(z, key) + population.log_prob(beta, z)

        precision = population.precision(beta, z)
        bound = model.curvature(z, rows, bound_factor, precision, key)
        mean = sum(map(jnp.sum, jax.tree.leaves(precision)), jnp.float32(0)) / max(1, trees.size(precision))
        return Target(log_likelihood, log_density, bound, jnp.clip(1 - mean / bound, 0.0, 1.0))

    def _scores(self, target: Target, beta: Prior, zs: Weights, key: Key) -> Prior:
        """∇_β log p(z | β) of each z (axis 0), or an estimate with the same mean under the posterior."""
        centred = jax.vmap(jax.grad(population.log_prob), in_axes=(None, 0))(beta, zs)
        if not self._mixes:
            return centred

        def along(z: Weights, key: Key) -> Prior:
            u = jax.tree.map(lambda z, m, s: (z - m) / s, z, beta.mean, population.sd(beta, z))

            def log_likelihood(beta: Normal) -> Array:
                moved = jax.tree.map(lambda m, s, u: m + s * u, beta.mean, population.sd(beta, z), u)
                return target.log_likelihood(moved, key)

            return jax.grad(log_likelihood)(beta)

        num = jax.tree.leaves(zs)[0].shape[0]
        other = jax.vmap(along)(zs, jax.random.split(key, num))
        return jax.tree.map(lambda a, b: target.share * a + (1 - target.share) * b, centred, other)

    def _over_priors(
        self, model: Mixed, rows: Batch, betas: Normal, start: Weights, data: Shard, key_bound: Key, key: Key
    ) -> Weights:
        """One draw of z under each draw of β, the chain going on from one to the next."""

        def one(z: Weights, place: tuple[Any, Array]) -> tuple[Weights, Weights]:
            beta, i = place
            target = self._target(model, rows, beta, z, data, jax.random.fold_in(key_bound, i))
            how = {"num_steps": self.steps, "burn_in": self.steps - 1, "leapfrog": self.leapfrog}
            gamma = self._step_size(target, z)
            z = kernels.sample(self.kernel, target.log_density, z, gamma, jax.random.fold_in(key, i), **how).last
            return z, z

        return jax.lax.scan(one, start, (betas, jnp.arange(self.prior_draws)))[1]

    def _from_prior(self, down: Down, key: Key) -> Weights:
        """A draw of z from the population."""
        key_which, key_draw = jax.random.split(key)
        if self.prior == "energy":
            which = jax.random.randint(key_which, (), 0, self.particles)
            return jax.tree.map(lambda leaf: leaf[which], down.crowd)
        beta = down.beta
        if self.prior_draws:
            which = jax.random.randint(key_which, (), 0, self.prior_draws)
            beta = jax.tree.map(lambda leaf: leaf[which], down.crowd)
        return population.draw(beta, key_draw)

    def _prior_at(self, normal: Normal, key_energy: Key, key_crowd: Key) -> tuple[Prior, Any]:
        """β where the population is a normal one, and the crowd that goes with it."""
        if self.prior == "energy":
            crowd = jax.vmap(lambda key: population.draw(normal, key))(jax.random.split(key_crowd, self.particles))
            return population.energy_around(normal, self.width, key_energy), crowd
        if self.prior_draws:
            return normal, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.prior_draws, *leaf.shape)), normal)
        return normal, ()

    def _next_prior(self, task: Task, server: Server, score: Prior, key: Key) -> tuple[Prior, Any, Any]:
        """β after the round, the state of its optimiser, and the crowd; `score` is the clients' mean I."""
        beta, state, crowd = server.beta, server.optimisers[1], server.crowd
        hyper = population.parse(self.prior_sigma)
        if self.freeze_prior:
            return beta, state, crowd
        if self.prior_draws:
            bounds = (self.sigma_min, SIGMA_MAX)
            beta = population.draw_given_score(key, beta, score, task.num_clients, hyper, bounds)
            # The oldest place, and with it those that were never filled.
            places = jnp.arange(self.prior_draws)
            is_new = (places == server.count % self.prior_draws) | (places > server.count)
            return beta, state, jax.vmap(lambda is_new, old: trees.select(is_new, beta, old))(is_new, crowd)
        if self.prior == "energy":
            crowd = self._moved(beta, crowd, key)
            pull = jax.vmap(jax.grad(population.log_prob), in_axes=(None, 0))(beta, crowd)
            score = trees.sub(score, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), pull))
        else:
            hyper_score = jax.grad(lambda beta: hyper.log_density(population.sd_of(beta)))(beta)
            score = trees.axpy(1 / task.num_clients, hyper_score, score)
        unit = self._unit(beta)
        uphill = population.times_mean(unit, score)
        step, state = self._ascend(self._prior_optimiser(), trees.zeros(beta), uphill, state)
        return trees.add(beta, population.times_mean(unit, step)), state, crowd

    def _movement(self, server: Server) -> Info:
        """How far μ, in units of σ, and log σ moved in a fifth of the rounds, or would in a fifth of SHORTEST."""
        if not self._follows:
            return {}
        beta = population.base_of(server.beta)
        away = trees.scale(jnp.maximum(1.0, SHORTEST / jnp.maximum(server.count, 1)), trees.sub(beta, server.recent))
        mean = jax.tree.map(jnp.divide, away.mean, population.sd(beta, beta.mean))
        return {"mean_moved": _largest(mean), "sd_moved": _largest(away.log_sd)}

    def _moved(self, beta: Energy, particles: Weights, key: Key) -> Weights:
        """The particles after some steps of a chain on the energy's prior."""

        def log_density(z: Weights, key: Key) -> Array:
            del key
            return population.log_prob(beta, z)

        like = self._one(particles)
        steepest = jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(population.precision(beta, like))]).max()
        gamma = kernels.step_size_for("mala", steepest, trees.size(like))

        def one(z: Weights, key: Key) -> Weights:
            return kernels.sample("mala", log_density, z, gamma, key, num_steps=self.steps).last

        return jax.vmap(one)(particles, jax.random.split(key, self.particles))

    def _step_size(self, target: Target, z: Weights) -> Array:
        chosen = kernels.step_size_for(self.kernel, target.bound, trees.size(z)) if self.gamma is None else self.gamma
        return jnp.asarray(chosen, jnp.float32)

    def _ascend(self, optimiser: Optimiser, values: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimiser.build().update(trees.scale(-1.0, gradient), state, values)
        return trees.add(values, updates), state

    def _unit(self, beta: Prior) -> Weights:
        """The unit of the steps of μ, by coordinate."""
        mean = population.base_of(beta).mean
        if self.prior_units == "outcome":
            return jax.tree.map(jnp.ones_like, mean)
        # No less than at the start: a σ that collapses must not keep μ from where the data want it.
        return jax.tree.map(lambda sd: jnp.maximum(sd, self.prior_sd), population.sd(beta, mean))

    def _prior_optimiser(self) -> Optimiser:
        return replace(self.optimiser, step_size=self.prior_step_size, weight_decay=0.0)

    def _one(self, zs: Weights) -> Weights:
        return jax.tree.map(lambda leaf: leaf[0], zs)

    def _like(self, task: Task) -> Weights:
        """The shapes of the random effects."""
        weights = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0))).weights
        return trees.partition(weights, task.is_head)[0]


def _largest(tree: Any) -> Array:
    """The largest number of a tree in magnitude."""
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)]))


def _flat(z: Weights) -> Weights:
    """Draws of all chains on one axis."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), z)
