"""FedHB on a convex problem: the averaged iterates close in on the optimum as fast as 1/√T (theorems 4.1 and D.1).

Logistic regression with one prototype makes the negative bound jointly convex in x = (r, m_1, …, m_N):

    f(x) = ½‖r‖² + Σ_i [ Σ_{D_i} −log p(y | x, m_i) + ‖m_i − r‖² / 2σ² ]

The method's own verbs run with stateful clients, minibatches and the theorem's step sizes 1/(L + √t). Clients minimise
f/n_i, since a mean over examples, so a step of 1/(L + √t) on f is one of n_i/(L + √t) for them. The server takes its
closed form, from whoever took part.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory import FedHBMixture, Optimiser, Work
from priory.core import rng, trees
from priory.core.rng import Stream
from priory.core.struct import replace, struct
from priory.fed.method import Task
from priory.models import MLP, Head, Linen
from priory.models.likelihood import Categorical
from tests.methods.problems import shards_from

COUNTS, NUM_CLASSES, VARIANCE = (6, 8, 5, 7, 4), 3, 0.5
HORIZONS = (16, 64, 256, 1024, 4096)  # if the gap falls as 1/√T, each halves it
NUM_SEEDS, STEPS = 32, 2
NUM_CLIENTS = len(COUNTS)
# A random order of the clients for each seed and round: a cohort is the first ones of it.
PLACES = np.argsort(np.random.default_rng(1).random((NUM_SEEDS, HORIZONS[-1], NUM_CLIENTS)), axis=-1)


pytestmark = [pytest.mark.optimised, pytest.mark.slow]  # thousands of rounds


def problem():
    """Inputs of at most unit length, and labels that follow them differently in each client."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(COUNTS), 2))
    x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    own = np.repeat(draw.normal(0, 3, (NUM_CLIENTS, 2, NUM_CLASSES)), COUNTS, axis=0)
    scores = np.einsum("id,idc->ic", x, own) + draw.gumbel(size=(len(x), NUM_CLASSES))
    return x.astype(np.float32), np.argmax(scores, axis=1).astype(np.int32)


X, Y = problem()
SHARDS = shards_from(X, Y, COUNTS)
OWNER = np.repeat(np.arange(NUM_CLIENTS), COUNTS)
PHI = np.concatenate([np.ones((len(X), 1)), X], axis=1)  # with the constant that the bias belongs to
# The Hessian of a softmax is at most ½ and an input with its constant has ‖·‖² ≤ 2; the pull adds 1/σ².
SMOOTHNESS = max(COUNTS) * 0.5 * 2 + 1 / VARIANCE
MODEL = Linen(MLP((), NUM_CLASSES))
TASK = Task(MODEL, Categorical(NUM_CLASSES), (2,), NUM_CLIENTS, sum(COUNTS), Head(MODEL.last_layer((2,))))
METHOD = FedHBMixture(
    num_prototypes=1,
    variance=VARIANCE,
    start="last",
    gate=False,
    work=Work(steps=STEPS, batch_size=2),
)


def likelihood(m):
    """The class probabilities of all examples under weights m_i as rows (…, N, 9), biases first, and their NLL."""
    logits = np.einsum("jf,...jfc->...jc", PHI, m.reshape(*m.shape[:-1], 3, NUM_CLASSES)[..., OWNER, :, :])
    logits -= np.max(logits, axis=-1, keepdims=True)
    log_probs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return np.exp(log_probs), -np.sum(log_probs[..., np.arange(len(Y)), Y], axis=-1)


def objective(x, prior_mean):
    """f of r and all m_i as rows, (…, 1 + N, 9); a prior mean that is learned leaves out ½‖r‖²."""
    r, m = x[..., :1, :], x[..., 1:, :]
    off_centre = 0.5 * np.sum(r**2, axis=(-2, -1)) if prior_mean == "zero" else 0.0
    return off_centre + likelihood(m)[1] + np.sum((m - r) ** 2, axis=(-2, -1)) / (2 * VARIANCE)


def derivatives(x, prior_mean):
    """The gradient of f as one row, and its Hessian."""
    size = 3 * NUM_CLASSES
    r, m = x[0], x[1:]
    probs = likelihood(m)[0]
    slope, curvature = np.zeros_like(x), np.zeros((1 + NUM_CLIENTS, size, 1 + NUM_CLIENTS, size))
    slope[0] = (r if prior_mean == "zero" else 0.0) + np.sum(r - m, axis=0) / VARIANCE
    curvature[0, :, 0] = ((prior_mean == "zero") + NUM_CLIENTS / VARIANCE) * np.eye(size)
    for i in range(NUM_CLIENTS):
        mine, place = np.flatnonzero(np.equal(OWNER, i)), 1 + i
        off = probs[mine] - np.eye(NUM_CLASSES)[Y[mine]]
        slope[place] = np.ravel(PHI[mine].T @ off) + (m[i] - r) / VARIANCE
        spread = np.einsum("jc,ce->jce", probs[mine], np.eye(NUM_CLASSES)) - np.einsum(
            "jc,je->jce", probs[mine], probs[mine]
        )
        within = np.einsum("jf,jg,jce->fcge", PHI[mine], PHI[mine], spread).reshape(size, size)
        curvature[place, :, place] = within + np.eye(size) / VARIANCE
        curvature[place, :, 0] = curvature[0, :, place] = -np.eye(size) / VARIANCE
    return slope.ravel(), curvature.reshape(x.size, x.size)


@cache
def optimum(prior_mean):
    """The least value of f, by Newton's method in double precision."""
    x = np.zeros((1 + NUM_CLIENTS, 3 * NUM_CLASSES))
    for _ in range(20):
        slope, curvature = derivatives(x, prior_mean)
        # Least squares: without a prior mean, one constant added to all logits changes nothing.
        x = x - np.linalg.lstsq(curvature, slope, rcond=None)[0].reshape(x.shape)
    assert np.linalg.norm(derivatives(x, prior_mean)[0]) < 1e-10
    return float(objective(x, prior_mean))


@struct
class Setting:
    """What the theorem asks for, each part of which can be spoilt.

    Attributes:
        rate: Step sizes are rate / (L + decay · √t).
        decay: See `rate`.
        client: The variance that clients take for σ².
        server: The variance that the server takes for σ².
        cohort: Number of clients in a round.
    """

    rate: float = 1.0
    decay: float = 1.0
    client: float = VARIANCE
    server: float = VARIANCE
    cohort: float = NUM_CLIENTS


@partial(jax.jit, static_argnames="prior_mean")
def averages(settings, seeds, places, prior_mean):
    """x̄^T of each setting and seed at each horizon, (settings, seeds, horizons, 1 + N, 9)."""
    of_seeds = jax.vmap(partial(averages_of, prior_mean=prior_mean), (None, 0, 0))
    return jax.vmap(of_seeds, (0, None, None))(settings, seeds, places)


def averages_of(setting, seed, places, prior_mean):
    root, method = rng.root(seed), replace(METHOD, prior_mean=prior_mean)
    first = method.init_server(TASK, rng.key(root, Stream.INIT))
    enrolled = method.init_client(TASK, first, rng.key(root, Stream.ENROL))
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (NUM_CLIENTS, *leaf.shape)), enrolled)

    def update(t, down, state, client, present):
        step_size = SHARDS.count[client] * setting.rate / (SMOOTHNESS + setting.decay * jnp.sqrt(STEPS * t + 1.0))
        now = replace(method, variance=setting.client, optimiser=Optimiser(step_size=step_size))
        key = rng.key(root, Stream.CLIENT, t, client)
        moved, message, _ = now.client_update(TASK, down, state, SHARDS.of(client), key)
        # The others stay, eq. (86), and send nothing.
        return trees.select(present, moved, state), replace(message, weight=jnp.where(present, message.weight, 0.0))

    def a_round(t, carry):
        prior, states, mean = carry
        everyone, present = jnp.arange(NUM_CLIENTS), places[t] < setting.cohort
        states, messages = jax.vmap(update, (None, None, 0, 0, 0))(t, prior, states, everyone, present)
        now = replace(method, variance=setting.server)
        prior, _ = now.aggregate(TASK, prior, messages, rng.key(root, Stream.SERVER, t))
        return prior, states, mean + (rows(prior, states) - mean) / (t + 1)

    def until(carry, span):
        carry = jax.lax.fori_loop(*span, a_round, carry)
        return carry, carry[2]

    start = first, states, jnp.zeros((1 + NUM_CLIENTS, 3 * NUM_CLASSES))
    return jax.lax.scan(until, start, (jnp.array((0, *HORIZONS[:-1])), jnp.array(HORIZONS)))[1]


def rows(prior, states):
    """(r, m_1, …, m_N)."""
    both = jax.tree.map(lambda r, m: jnp.concatenate([r, m]), prior.networks, states.network)
    return jnp.concatenate([leaf.reshape(1 + NUM_CLIENTS, -1) for leaf in jax.tree.leaves(both)], axis=1)


THEOREM = Setting()
SPOILT = {
    "large steps that never shrink": Setting(rate=8.0, decay=0.0),
    "half the penalty": Setting(client=2 * VARIANCE),
    "a penalty that is not divided by the number of examples": Setting(client=VARIANCE / 6),
    "participants that do not speak for all": Setting(server=VARIANCE * NUM_CLIENTS / 2, cohort=2),
}
SETTINGS = {NUM_CLIENTS: THEOREM, 2: replace(THEOREM, cohort=2)} | SPOILT


@cache
def gaps(prior_mean):
    """f(x̄^T) − f(x*) of each setting by its name, (seeds, horizons); the spoilt ones where the prior mean is zero."""
    chosen = SETTINGS if prior_mean == "zero" else {name: SETTINGS[name] for name in (NUM_CLIENTS, 2)}
    settings = jax.tree.map(lambda *values: np.array(values, np.float32), *chosen.values())
    found = np.asarray(averages(settings, np.arange(NUM_SEEDS), PLACES, prior_mean), np.float64)
    return dict(zip(chosen, objective(found, prior_mean) - optimum(prior_mean), strict=True))


def growth(gap):
    """The change of gap · √T from each horizon to the next: its mean over seeds, in standard errors."""
    change = np.diff(gap * np.sqrt(HORIZONS), axis=1)
    return np.mean(change, axis=0) / (np.std(change, axis=0, ddof=1) / np.sqrt(len(change)))


@pytest.mark.parametrize("prior_mean", ["zero", "learned"])
@pytest.mark.parametrize("cohort", [NUM_CLIENTS, 2])
def test_the_gap_falls_at_least_as_fast_as_the_theorem_says(cohort, prior_mean):
    gap = gaps(prior_mean)[cohort]
    assert np.min(gap) > 0
    assert np.all(growth(gap) < 3)
    mean = gap.mean(axis=0)
    assert mean[-1] < 0.01 * mean[0]  # 1/√T would leave 1/16


@pytest.mark.parametrize("name", SPOILT)
def test_the_gap_stops_falling_under(name):
    """What makes the test above fail: the last two horizons differ by more than five standard errors."""
    assert growth(gaps("zero")[name])[-1] > 5
