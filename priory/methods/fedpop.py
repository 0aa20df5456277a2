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

Choices that the paper leaves open (docs/methods/fedpop.md has the measurements):

- Sign of the drift: +γ∇ log p (algorithm 1), not − (section 2). The server sends (φ_k, β_k).
- Units. J sums over clients and examples, I over clients: the server steps along (b/|A|) ΣJ / |D| and (b/|A|) ΣI / b,
  which the paper leaves to the step sizes. Both go through one kind of optimiser; β has a step size of its own.
- σ is learned as log σ and kept above `sigma_min` (and φ in a ball of `radius`, if one is given). There is one σ for
  each coordinate as in the authors' code, or one for all as in the text (`prior`).
- `_blocks/learned_population.py` has the units of μ, full Bayes over β and the energy, `_blocks/effect_chain.py` γ and
  another form of I.
- The chain sees the network as it predicts (no dropout, running statistics); J is taken in training.
- `kernel="map"` takes iterates of Adam for samples, as the authors' code does for images. `sgld` and `psgld` see
  `batch_size` random examples a step, and J as many; all other kernels see all examples.
- Prediction for a newcomer without data: z ~ p(· | β); with data, its chain. Accuracies are those of the last round.
- A client without examples sends nothing.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from priory.bayes import gaussian, kernels, population
from priory.bayes.gaussian import Gaussian
from priory.bayes.population import Normal, Population
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Advises, Certified, Certifies, Draws, MixedEffects, PosteriorCheck, SharedModel
from priory.fed.checks import at_least, choices, positive
from priory.fed.local import Optimiser
from priory.fed.method import Info, Message, Method, Predictive, Task
from priory.fed.shard import Shard
from priory.methods._blocks.certified import fitted_to_draws
from priory.methods._blocks.effect_chain import Sampler, scores
from priory.methods._blocks.learned_population import Learner, ascend
from priory.methods._blocks.mixed_effects import Mixed
from priory.models.model import Params

Weights = Any


@struct
class Server:
    """The state of the server.

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
    beta: Population
    stats: Any
    crowd: Any
    optimisers: Any
    count: Array
    projected: Array
    recent: Any = ()


@struct
class Down:
    """The broadcast."""

    phi: Weights
    beta: Population
    stats: Any
    crowd: Any


@struct
class Gradients:
    """The message of a client: I, J, and the statistics."""

    beta: Population
    phi: Weights
    stats: Any


@struct
class Samples:
    """A posterior: the fixed effects, and draws of z whose leaves are (chains, draws, ...)."""

    phi: Params
    z: Weights


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
        sizes = (
            "leapfrog",
            "steps",
            "batch_size",
            "width",
            "particles",
            "chains",
            "samples",
            "thin",
            "newcomer_draws",
        )
        for name in sizes:
            at_least(name.replace("_", "-"), getattr(self, name), 1)
        for name in ("burn_in", "warm_up", "prior_draws"):
            at_least(name.replace("_", "-"), getattr(self, name), 0)
        if self.burn_in >= self.steps:
            raise UsageError(
                f"burn-in={self.burn_in} leaves nothing of steps={self.steps}; choose fewer, or more steps."
            )
        for name in ("gamma", "radius"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        positive("prior-step-size", self.prior_step_size)
        self._learner.check()
        if self.score == "mixed" and (self.prior == "energy" or self.prior_draws):
            raise UsageError("score=mixed needs a Gaussian prior whose σ is maximised; choose score=auto.")
        self.optimiser.check()

    def init_server(self, task: Task, key: Key) -> Server:
        key_net, key_energy, key_crowd = jax.random.split(key, 3)
        drawn = task.init(key_net)
        z, phi = trees.partition(drawn.weights, task.is_head)
        learner = self._learner
        beta, crowd = learner.init_around(z, key_energy, key_crowd)
        optimisers = (self.optimiser.build().init(phi), learner.optimiser.build().init(beta))
        recent = population.base_of(beta) if learner.follows else ()
        return Server(phi, beta, drawn.stats, crowd, optimisers, jnp.int32(0), jnp.float32(0), recent)

    def broadcast(self, server: Server) -> Down:
        return Down(server.phi, server.beta, server.stats, server.crowd)

    def init_client(self, task: Task, down: Down, key: Key) -> Weights:
        del task
        return self._learner.draw(down.beta, down.crowd, key) if self.stateful else ()

    def client_update(
        self, task: Task, down: Down, client: Weights, data: Shard, key: Key
    ) -> tuple[Weights, Message[Gradients], Info]:
        key_start, key_size, key_chain, key_score, key_body = jax.random.split(key, 5)
        sampler, learner = self._sampler, self._learner
        # Algorithm 1, lines 5 to 8
        start = client if self.stateful else learner.draw(down.beta, down.crowd, key_start)
        model = Mixed(task, Params(down.phi, down.stats), start)
        key_rows, key_bound = jax.random.split(key_size)
        target = sampler.target(model, down.beta, data, start, sampler.rows(model, data, key_rows), key_bound)
        # Algorithm 1, lines 10 to 15
        chain = sampler.run(target, start, key_chain, num_steps=self.steps, burn_in=self.burn_in)
        # A Gibbs sampler needs one draw of each z_k, and not their mean.
        seen = jax.tree.map(lambda leaf: leaf[None], chain.last) if self.prior_draws else chain.kept
        score = scores(target, down.beta, seen, key_score, self._mixes)  # Algorithm 1, line 17
        # Algorithm 1, line 18
        body, phi = model.body_gradient(chain.kept, data, self.batch_size, not sampler.samples_data, key_body)
        payload = Gradients(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), score), body, phi.stats)
        message = Message(payload, weight=(data.count > 0).astype("float32"))
        info = {"accepted": chain.accepted, **sampler.figures(target, start)}
        return chain.last if self.stateful else (), message, info

    def aggregate(self, task: Task, server: Server, messages: Message[Gradients], key: Key) -> tuple[Server, Info]:
        mean: Gradients = trees.weighted_mean(messages.payload, messages.weight)
        # (b/|A|) Σ J is b times the mean, here for each example; lines 21 and 22.
        per_example = trees.scale(task.num_clients / task.num_examples, mean.phi)
        phi, state = ascend(self.optimiser, server.phi, per_example, server.optimisers[0])  # Algorithm 1, line 22
        if self.radius is not None:
            # Π_Φ of line 22
            phi = trees.scale(jnp.minimum(1.0, self.radius / jnp.maximum(trees.norm(phi), 1e-12)), phi)
        learner, before = self._learner, (server.beta, server.optimisers[1], server.crowd)
        beta, prior_state, crowd = learner.update(*before, mean.beta, task.num_clients, server.count, key)  # line 21
        beta, collapsed = population.project(beta, self.sigma_min, jnp.inf)  # Π_B of line 21
        count = server.count + 1
        recent = learner.followed(beta, server.recent, count)
        moved = Server(phi, beta, mean.stats, crowd, (state, prior_state), count, server.projected + collapsed, recent)
        server = trees.select(jnp.sum(messages.weight) > 0, moved, server)
        info = {"projected": server.projected, "participation": jnp.sum(messages.weight) / task.num_clients}
        return server, info | learner.figures(server.beta, server.recent, server.count, self._like(task))

    def personalise(self, task: Task, down: Down, client: Weights, data: Shard, key: Key) -> Samples:
        key_start, key_size, key_chain = jax.random.split(key, 3)
        starts = self._learner.draws(down.beta, down.crowd, jax.random.split(key_start, self.chains))
        if self.stateful:
            starts = jax.tree.map(lambda all_, own: all_.at[0].set(own), starts, client)
        phi, sampler = Params(down.phi, down.stats), self._sampler

        def chain(start: Weights, key_size: Key, key: Key) -> Weights:
            model = Mixed(task, phi, start)
            key_rows, key_bound = jax.random.split(key_size)
            rows = sampler.rows(model, data, key_rows)
            if self.prior_draws:
                return sampler.over_priors(model, rows, down.crowd, start, data, key_bound, key)
            target = sampler.target(model, down.beta, data, start, rows, key_bound)
            how = {"num_steps": self.warm_up + self.samples * self.thin, "burn_in": self.warm_up, "thin": self.thin}
            return sampler.run(target, start, key, **how).kept

        keys = (jax.random.split(one, self.chains) for one in (key_size, key_chain))
        return Samples(phi, jax.vmap(chain)(starts, *keys))

    def population(self, task: Task, down: Down, data: Shard | None, key: Key) -> Samples:
        del task, data
        zs = self._learner.draws(down.beta, down.crowd, jax.random.split(key, self.newcomer_draws))
        return Samples(Params(down.phi, down.stats), jax.tree.map(lambda leaf: leaf[None], zs))

    def predict(self, task: Task, posterior: Samples, x: Array, key: Key) -> Predictive:
        del key
        zs = _flat(posterior.z)
        return Mixed(task, posterior.phi, jax.tree.map(lambda leaf: leaf[0], zs)).predict(zs, x)

    def draws(self, task: Task, posterior: Samples, key: Key, num: int) -> Params:
        """Draw networks from a posterior with replacement, on axis 0."""
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
        """Return a Gaussian fitted to the draws against p(z | β), or the mixture of these over the draws of β."""
        q, nats = fitted_to_draws(_flat(posterior.z), Gaussian(*self.population_effects(task, down)))
        return Certified(lambda key: Params(trees.merge(gaussian.draw(key, q), down.phi), down.stats), nats)

    def knowing(self, task: Task, mean: Params, sd: Weights) -> Down:
        """Return β at the population, with a crowd from it; one σ for all is the geometric mean."""
        z, phi = trees.partition(mean.weights, task.is_head)
        log_sd = jax.tree.map(jnp.log, trees.partition(sd, task.is_head)[0])
        if self.prior == "scalar":
            log_sd = jnp.mean(ravel_pytree(log_sd)[0])
        key_energy, key_crowd = jax.random.split(jax.random.key(0))
        beta, crowd = self._learner.init(Normal(z, log_sd), key_energy, key_crowd)
        return Down(phi, beta, mean.stats, crowd)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "FedPop":
        """Return the method with a kernel that keeps the posterior, `mala` for Langevin's."""
        del prior_sd, posterior_sd
        return self if self.kernel in ("mala", "hmc", "nuts") else replace(self, kernel="mala")

    def compressible(self, path: str) -> bool:
        return path.startswith("phi")  # J

    def effects(self, task: Task, posterior: Samples) -> Weights:
        del task
        return posterior.z

    def population_effects(self, task: Task, down: Down) -> tuple[Weights, Weights]:
        if self.prior == "energy":  # neither is known but through the particles
            both = (jax.tree.map(lambda leaf, of=of: of(leaf, 0)[None], down.crowd) for of in (jnp.mean, jnp.std))
            return next(both), next(both)
        betas = down.crowd if self.prior_draws else jax.tree.map(lambda leaf: leaf[None], down.beta)
        return betas.mean, jax.vmap(lambda beta: population.sd(beta, self._like(task)))(betas)

    def fixed_effects(self, task: Task, down: Down) -> Weights:
        del task
        return down.phi

    def advice(self, task: Task, info: dict[str, float]) -> dict[str, str]:
        return self._learner.advice(info, trees.size(self._like(task))) | self._sampler.advice(info)

    @property
    def _mixes(self) -> bool:
        """Whether I is the mixture of two forms."""
        if self.score != "auto":
            return self.score == "mixed"
        is_maximised = self.prior != "energy" and not self.freeze_prior and not self.prior_draws
        return is_maximised and not self._sampler.samples_data

    @property
    def _sampler(self) -> Sampler:
        return Sampler(self.kernel, self.gamma, self.leapfrog, self.batch_size, self.steps)

    @property
    def _learner(self) -> Learner:
        prior = (self.prior, self.freeze_prior, self.prior_sd, self.prior_sigma, self.sigma_min, self.prior_draws)
        optimiser = replace(self.optimiser, step_size=self.prior_step_size, weight_decay=0.0)
        return Learner(*prior, self.prior_units, self.width, self.particles, self.steps, optimiser)

    def _like(self, task: Task) -> Weights:
        """Return the shapes of the random effects."""
        weights = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0))).weights
        return trees.partition(weights, task.is_head)[0]


def _flat(z: Weights) -> Weights:
    """Return the draws of all chains on one axis."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), z)
