"""FedHB with a normal-inverse-Wishart prior: the federation learns how client networks are spread, in closed form.

Kim and Hospedales, A Hierarchical Bayesian Approach to Federated Learning, arXiv:2305.04979; section 3.1, appendix B,
algorithms 3, 6 and 9.

    φ = (μ, Σ) ~ NIW(0, s0² I, 1, d + 2),   θ_k | φ ~ N(μ, Σ),   D_k | θ_k ~ the likelihood of network θ_k
    q(φ) = NIW(m0, V0, |D| + 1, |D| + d + 2) with diagonal V0,   q_k(θ_k) = Π_l p N(m_k, ε²) + (1 − p) N(0, ε²)

Server keeps   (m0, V0)   broadcast as they are: 2d numbers (and the frozen head, where only the body is learned)
Client keeps   nothing, or m_k (`stateful`)
Client sends   m_k        d numbers, weighted equally; {δ, δ²} with δ = m_k − m0 for secure sums (`linear`), whose sum
                          hides a client, though a single message would not

Choices that the paper leaves open (docs/methods/fedhb.md has the measurements):

- Size of the penalty. With one joint Σ of dimension d (`dim="joint"`, printed) the penalty of an example is of the
  order of 10² to 10⁴ and clients hardly move. "V0 is diagonal" read as d independent one-dimensional priors replaces d
  by 1 in every formula (`dim="factorised"`). `kl_scale` multiplies the penalty, outside the model.
- Eq. (33) puts the mode V0/(n0 + d + 1) of Σ in place of q(φ) (`precision="mode"`); the expectation n0 V0⁻¹ is known,
  and is what the server's step minimises (`precision="expected"`).
- Eq. (18) shrinks m0 by p N/(N + 1) in every round. `prior_mean="learned"` is empirical Bayes: the prior mean that
  maximises the bound is m0 itself, which leaves the factor p. `"plain"` drops that too: m0 is the clients' mean, which
  maximises the bound for p = 1 only.
- The prior scale s0 is 1 in the paper; `learn_scale` maximises the bound over it, tensor by tensor.
- First q(φ): m0 is a fresh network, and V0 is what eq. (18) gives when all clients agree with it. A V0 that makes
  E[Σ] = s0² I lets clients go almost free in the first round, which costs the whole run (docs/methods/fedhb.md).
- Dropout zeroes columns, the weights that leave one input unit, once a minibatch; biases stay, so p = 1 for them;
  nothing is divided by p. ε is 1e-4, enters V0 and the bound, and is not sampled in training.
- The penalty is divided by |D_k| and the likelihood is a minibatch mean (below eq. (35)). It is taken implicitly.
- Global prediction: the mean m0, or `global_samples` draws of the Student-t. Personal prediction: the mean m
  (algorithm 9), or `personal_samples` draws of N(m, Σ*), because ε leaves a posterior without width. `draws` tells of
  q_k = N(m, ε²), columns not dropped, or of that N(m, Σ*).
- A head that is frozen in training has no prior; personalisation trains it without a penalty.
- A client without examples sends nothing.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from priory.bayes import gaussian, niw
from priory.bayes.gaussian import Gaussian
from priory.bayes.niw import NIW, Observed, StudentT
from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import replace, static, struct
from priory.fed.about import About, Paper
from priory.fed.capabilities import Certified, Certifies, Draws, Evidence, PosteriorCheck, SharedModel
from priory.fed.checks import at_least, check_fields, positive
from priory.fed.local import Optimiser, Pull, Work, check_finetune, finetune, fit, total_nll
from priory.fed.method import Info, Message, Method, Predictive, Task, equally, point
from priory.fed.shard import Batch, Shard
from priory.methods._blocks.certified import own_statistics, trained_head
from priory.models import columns
from priory.models.model import Params

Weights = Any


@struct
class Prior:
    """The state of the server, and what it broadcasts.

    Attributes:
        mean: m0, of the weights that are learned together.
        scale: V0, its diagonal.
        frozen: The head, where it is not learned; empty otherwise.
        stats: Statistics of a batch norm.
    """

    mean: Weights
    scale: Weights
    frozen: Weights
    stats: Any


@struct
class Moments:
    """The message of a client where only sums may be seen: δ = m_k − m0, and its square."""

    delta: Weights
    square: Weights
    stats: Any


@struct
class Posterior:
    """A distribution over networks.

    Attributes:
        params: Its centre.
        spread: What is drawn around the centre, None for a point.
        num_samples: Networks that predict together; 0 predicts with the centre.
    """

    params: Params
    spread: StudentT | None
    num_samples: int = static()


@struct
class FedHBNIW(
    Method[Prior, Prior, Weights, Any, Posterior],
    SharedModel[Prior, Posterior],
    Draws[Posterior],
    Certifies[Prior, Posterior],
    PosteriorCheck[Prior],
    Evidence[Prior, Any],
):
    """FedHB, normal-inverse-Wishart.

    Attributes:
        keep: p, the probability that dropout keeps a column.
        epsilon: ε, width of the components of q_k.
        prior_scale: s0, prior standard deviation of a client's weight around the mean; the prior is worth three
            clients, so that with N of them the learned one is about s0/√N where clients agree.
        kl_scale: Factor on the penalty; 1 is the model.
        dim: One joint covariance of all weights (printed), or an independent variance for each.
        precision: What the penalty takes for Σ⁻¹: at the mode of q (printed), or its expectation under q.
        prior_mean: Zero (printed), learned by empirical Bayes (m0 is p times the clients' mean), or their plain mean.
        learn_scale: Learn s0 by empirical Bayes, one number for each tensor.
        update: Learn the full network together, or the body under a frozen random head.
        stateful: Clients go on from their own last m_k instead of m0.
        linear: Send moments, which may be summed securely; twice the uplink.
        global_samples: Draws of the Student-t that predict for the population (for a small prior-scale); 0 predicts
            with m0.
        personal_samples: Draws of N(m, Σ*) that predict for a client (for a small prior-scale); 0 predicts with m.
        optimiser: Local solver.
        work: Local work of a round.
        finetune_epochs: Passes over a client's data that make its posterior, eq. (46).
        finetune_step_size: Learning rate of those passes.
    """

    keep: float = 0.999
    epsilon: float = 1e-4
    prior_scale: float = 2.0
    kl_scale: float = 1.0
    dim: Literal["factorised", "joint"] = static(default="factorised")
    precision: Literal["mode", "expected"] = static(default="mode")
    prior_mean: Literal["zero", "learned", "plain"] = static(default="plain")
    learn_scale: bool = static(default=False)
    update: Literal["full", "body"] = static(default="full")
    stateful: bool = static(default=False)
    linear: bool = static(default=False)
    global_samples: int = static(default=0)
    personal_samples: int = static(default=0)
    optimiser: Optimiser = Optimiser()
    work: Work = Work()
    finetune_epochs: int = static(default=5)
    finetune_step_size: float = 0.01

    about: ClassVar[About] = About(
        paper=Paper(
            "Kim and Hospedales", "A Hierarchical Bayesian Approach to Federated Learning", 2023, arxiv="2305.04979"
        ),
        keeps="nothing (its weights if stateful is on)",
        sends="its weights (their deviations and squares if linear is on)",
    )
    certifies: ClassVar[str] = "N(m, Σ*) around the client's network m, as with personal-samples, and not m itself"

    def check(self) -> None:
        check_fields(self)
        if not 0 < self.keep <= 1:
            raise UsageError(f"keep={self.keep} lies outside (0, 1]; choose a probability such as 0.999.")
        at_least("epsilon", self.epsilon, 0)
        if self.learn_scale and self.epsilon == 0:
            raise UsageError("epsilon=0.0 leaves learn-scale no scale above zero; choose a width such as 0.0001.")
        positive("prior-scale", self.prior_scale)
        at_least("kl-scale", self.kl_scale, 0)
        at_least("global-samples", self.global_samples, 0)
        at_least("personal-samples", self.personal_samples, 0)
        check_finetune(self)

    def init_server(self, task: Task, key: Key) -> Prior:
        drawn = task.init(key)
        frozen, learned = task.frozen_and_learned(drawn.weights, self.update)
        before = self._prior(learned)
        agreed = (task.num_examples + before.dof) / (task.num_clients + before.dof)  # eq. (18) without any spread
        return Prior(learned, trees.scale(agreed, before.scale), frozen, drawn.stats)

    def init_client(self, task: Task, down: Prior, key: Key) -> Weights:
        del task, key
        return down.mean if self.stateful else ()

    def client_update(
        self, task: Task, down: Prior, client: Weights, data: Shard, key: Key
    ) -> tuple[Weights, Message[Any], Info]:
        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return self._nll(task, params, down.frozen, batch, key)

        start = client if self.stateful else down.mean
        pull = Pull(lambda _: down.mean, self._strength(task, down, data))  # eq. (17), second term
        # eq. (17); Algorithm 3, step 3
        params, loss = fit(objective, Params(start, down.stats), data, self.optimiser, self.work, key, pull)
        delta = trees.sub(params.weights, down.mean)
        payload: Any = params
        if self.linear:
            payload = Moments(delta, jax.tree.map(jnp.square, delta), params.stats)
        kept = params.weights if self.stateful else ()
        weight = (data.count > 0).astype("float32")
        return kept, Message(payload, weight), {"loss": loss, "drift": trees.norm(delta)}

    def aggregate(self, task: Task, server: Prior, messages: Message[Any], key: Key) -> tuple[Prior, Info]:
        del key
        mean, spread, stats = self._moments(server, messages)
        keep = columns.keep_probabilities(mean, self.keep)
        # The participants stand for all N clients: N/N_f Σ_i is N times their mean.
        observed = Observed(mean, spread, keep, self.epsilon, task.num_clients)  # Algorithm 3, step 5
        prior = self._prior(mean)
        if self.prior_mean == "learned":
            prior = replace(prior, mean=jax.tree.map(jnp.multiply, keep, mean))
        elif self.prior_mean == "plain":
            prior = replace(prior, mean=mean)
        centre = mean if self.prior_mean == "plain" else niw.shrunk_mean(prior, observed)  # eq. (18)
        before = self._posterior(task, server)
        new = niw.update(prior, observed, before.dof, before.strength, centre, self.learn_scale)  # eqs. (18) and (41)
        proposed = Prior(new.mean, new.scale, server.frozen, stats)
        server = trees.select(jnp.sum(messages.weight) > 0, proposed, server)
        variance = niw.mode_variance(self._posterior(task, server))  # Σ* of eq. (34)
        rms = jnp.sqrt(sum(map(jnp.sum, jax.tree.leaves(variance))) / trees.size(variance))
        return server, {"client_sd": rms}

    def personalise(self, task: Task, down: Prior, client: Weights, data: Shard, key: Key) -> Posterior:
        start = trees.merge(down.frozen, client if self.stateful else down.mean)
        strength = self._strength(task, down, data)
        # A frozen head has no prior: nothing pulls it.
        strength = trees.merge(strength, jax.tree.map(jnp.zeros_like, down.frozen))

        def objective(params: Params, batch: Batch, key: Key) -> tuple[Array, Any]:
            return self._nll(task, params, jax.tree.map(lambda _: None, start), batch, key)

        centre = trees.merge(down.frozen, down.mean)
        pull = Pull(lambda _: centre, strength)
        params = finetune(self, objective, Params(start, down.stats), data, key, pull)  # eq. (46)
        if self.personal_samples == 0:
            sd = jax.tree.map(lambda leaf: jnp.full_like(leaf, self.epsilon), down.mean)  # q_k
        else:
            sd = jax.tree.map(jnp.sqrt, niw.mode_variance(self._posterior(task, down)))
        sd = trees.merge(sd, jax.tree.map(jnp.zeros_like, down.frozen))
        return Posterior(params, StudentT(params.weights, sd, float("inf"), True), self.personal_samples)

    def population(self, task: Task, down: Prior, data: Shard | None, key: Key) -> Posterior:
        del data, key
        params = Params(trees.merge(down.frozen, down.mean), down.stats)
        if self.global_samples == 0:
            return Posterior(params, None, 0)
        spread = niw.predictive(self._posterior(task, down))  # eq. (19)
        sd = trees.merge(spread.sd, jax.tree.map(jnp.zeros_like, down.frozen))
        return Posterior(params, replace(spread, mean=params.weights, sd=sd), self.global_samples)

    def predict(self, task: Task, posterior: Posterior, x: Array, key: Key) -> Predictive:
        if posterior.num_samples == 0:
            return point(task.model.apply(posterior.params, x)[0])
        return equally(task, self.draws(task, posterior, key, posterior.num_samples), x)

    def draws(self, task: Task, posterior: Posterior, key: Key, num: int) -> Params:
        """Draw networks from a posterior, on axis 0; all the same from a point."""
        del task

        def one(key: Key) -> Params:
            if posterior.spread is None:
                return posterior.params
            return Params(niw.draw(key, posterior.spread), posterior.params.stats)

        return jax.vmap(one)(jax.random.split(key, num))

    def knowing(self, task: Task, mean: Params, sd: Weights) -> Prior:
        """Return the V0 for which the Σ⁻¹ of the penalty is that of the population."""
        frozen, learned = task.frozen_and_learned(mean.weights, self.update)
        sd = task.frozen_and_learned(sd, self.update)[1]
        q = self._posterior(task, Prior(learned, sd, frozen, mean.stats))
        worth = q.dof + q.dim + 1 if self.precision == "mode" else q.dof
        return Prior(learned, jax.tree.map(lambda s: worth * s**2, sd), frozen, mean.stats)

    def calibrated(self, prior_sd: float, posterior_sd: float) -> "FedHBNIW":
        """Return the setting with ε, one number for all weights of all clients, as wide as the posterior."""
        del prior_sd
        return replace(self, epsilon=posterior_sd, personal_samples=0)

    def uncertified(self, task: Task) -> str | None:
        return trained_head(self.update) or own_statistics(task)

    def certified(self, task: Task, down: Prior, posterior: Posterior) -> Certified:
        """Return N(m, Σ*) against N(m0, Σ*); the printed q_k of width ε is thousands of nats from any wide prior."""
        sd = jax.tree.map(jnp.sqrt, niw.mode_variance(self._posterior(task, down)))
        mean = posterior.params.weights
        away = jax.tree.map(lambda m, m0, s: (m - m0) / s, mean, down.mean, sd)
        return Certified(
            lambda key: Params(gaussian.draw(key, Gaussian(mean, sd)), down.stats), 0.5 * trees.norm_squared(away)
        )

    def reference(self, task: Task, down: Prior, payload: Any) -> Any:
        del task
        if self.linear:
            return Moments(trees.zeros(payload.delta), trees.zeros(payload.square), down.stats)
        return Params(down.mean, down.stats)

    def server_evidence(self, task: Task, down: Prior) -> Array:
        q, prior = self._posterior(task, down), self._prior(down.mean)
        if self.prior_mean != "zero":
            prior = replace(prior, mean=down.mean)
        if self.learn_scale:
            prior = replace(prior, scale=niw.marginal_scale(q, prior.dof))
        return -niw.kl(q, prior)  # eq. (36), with every constant

    def client_evidence(self, task: Task, down: Prior, payload: Any, data: Shard, key: Key) -> Array:
        mean = trees.add(down.mean, payload.delta) if self.linear else payload.weights
        key_drop, key_noise = jax.random.split(key)
        width = jax.tree.map(lambda m: jnp.broadcast_to(jnp.float32(self.epsilon), m.shape), mean)
        dropped = columns.drop(mean, columns.draw_masks(key_drop, mean, self.keep))
        theta = niw.draw(key_noise, StudentT(dropped, width, float("inf"), True))
        network = Params(trees.merge(down.frozen, theta), payload.stats)
        keep = columns.keep_probabilities(mean, self.keep)
        # eq. (38), with every constant
        divergence = niw.expected_divergence(self._posterior(task, down), mean, keep, self.epsilon)
        return -total_nll(task, network, data, self.work.batch_size) - divergence

    def _nll(self, task: Task, params: Params, frozen: Weights, batch: Batch, key: Key) -> tuple[Array, Any]:
        """Return the likelihood term of eqs. (17) and (46), at the dropout version of the weights."""
        key_drop, key_net = jax.random.split(key)
        masks = columns.draw_masks(key_drop, params.weights, self.keep)  # m̃ of eqs. (17) and (46), a draw of eq. (16)
        return task.nll(Params(trees.merge(frozen, params.weights), params.stats), batch, key_net, masks)

    def _strength(self, task: Task, down: Prior, data: Shard) -> Weights:
        """Return the weights of the quadratic penalty of eq. (17), in units of the mean likelihood of one example."""
        q = self._posterior(task, down)
        if self.precision == "mode":
            precision = jax.tree.map(lambda variance: 1 / variance, niw.mode_variance(q))  # eq. (34)
        else:
            precision = niw.expected_precision(q)  # eq. (52)
        keep = columns.keep_probabilities(down.mean, self.keep)
        share = self.kl_scale / jnp.maximum(data.count, 1)
        # p (n0 + d + 1) V0⁻¹ of eq. (35); `Pull` has the factor ½
        return jax.tree.map(lambda inverse, kept: share * kept * inverse, precision, keep)

    def _posterior(self, task: Task, down: Prior) -> NIW:
        dim = self._dim(down.mean)
        return NIW(down.mean, down.scale, task.num_examples + 1.0, task.num_examples + dim + 2.0, dim)

    def _prior(self, like: Weights) -> NIW:
        """Return p(φ), with the prior mean at zero."""
        dim = self._dim(like)
        scale = jax.tree.map(lambda m: jnp.full_like(m, self.prior_scale**2), like)
        return NIW(trees.zeros(like), scale, 1.0, dim + 2.0, dim)

    def _dim(self, weights: Weights) -> int:
        return trees.size(weights) if self.dim == "joint" else 1

    def _moments(self, server: Prior, messages: Message[Any]) -> tuple[Weights, Weights, Any]:
        """Return the mean of the participants' m_k, their mean square around it, and the mean statistics."""
        payload, weight = messages.payload, messages.weight
        if self.linear:
            still = Moments(trees.zeros(server.mean), trees.zeros(server.mean), server.stats)
            sent = trees.weighted_mean(payload, weight, otherwise=still)
            spread = jax.tree.map(lambda s, d: jnp.maximum(s - d**2, 0), sent.square, sent.delta)
            return trees.add(server.mean, sent.delta), spread, sent.stats
        mean = trees.weighted_mean(payload, weight, otherwise=Params(server.mean, server.stats))

        def squares(m: Weights) -> Weights:
            return jax.tree.map(jnp.square, trees.sub(m, mean.weights))

        still = trees.zeros(server.mean)
        return mean.weights, trees.weighted_mean(payload.weights, weight, still, of=squares), mean.stats
