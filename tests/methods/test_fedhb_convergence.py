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
from priory.core import rng
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


def objective(x, prior_mean="zero"):
    """f of r and all m_i as rows, (1 + N, 9), biases first; a prior mean that is learned leaves out ½‖r‖²."""
    r, m = x[0], x[1:]
    bias, kernel = m[:, :NUM_CLASSES], m[:, NUM_CLASSES:].reshape(NUM_CLIENTS, 2, NUM_CLASSES)
    logits = jnp.einsum("id,idc->ic", jnp.asarray(X, m.dtype), kernel[OWNER]) + bias[OWNER]
    nll = jnp.sum(jax.nn.logsumexp(logits, axis=1) - logits[np.arange(len(Y)), Y])
    off_centre = 0.5 * jnp.sum(r**2) if prior_mean == "zero" else 0.0
    return off_centre + nll + jnp.sum((m - r[None]) ** 2) / (2 * VARIANCE)


@cache
def optimum(prior_mean):
    """The least value of f, by Newton's method in double precision."""
    with jax.enable_x64(True):
        f = jax.jit(lambda v: objective(v.reshape(1 + NUM_CLIENTS, -1), prior_mean))
        slope, curvature = jax.jit(jax.grad(f)), jax.jit(jax.hessian(f))
        x = jnp.zeros((1 + NUM_CLIENTS) * 3 * NUM_CLASSES)
        for _ in range(20):
            # Least squares: without a prior mean, one constant added to all logits changes nothing.
            x = x - jnp.linalg.lstsq(curvature(x), slope(x))[0]
        assert float(jnp.linalg.norm(slope(x))) < 1e-10
        return float(f(x))


@struct
class Setting:
    """What the theorem asks for, each part of which can be spoilt.

    Attributes:
        rate: Step sizes are rate / (L + decay · √t).
        decay: See `rate`.
        client: The variance that clients take for σ².
        server: The variance that the server takes for σ².
    """

    rate: float = 1.0
    decay: float = 1.0
    client: float = VARIANCE
    server: float = VARIANCE


@partial(jax.jit, static_argnames=("cohort", "prior_mean"))
def averages(setting, seed, cohort, prior_mean):
    """x̄^T at each horizon, (horizons, 1 + N, 9)."""
    root, method = rng.root(seed), replace(METHOD, prior_mean=prior_mean)
    first = method.init(TASK, rng.key(root, Stream.INIT))
    enrolled = method.enrol(TASK, first, rng.key(root, Stream.ENROL))
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (NUM_CLIENTS, *leaf.shape)), enrolled)

    def update(t, down, state, client):
        step_size = SHARDS.count[client] * setting.rate / (SMOOTHNESS + setting.decay * jnp.sqrt(STEPS * t + 1.0))
        now = replace(method, variance=setting.client, optimiser=Optimiser(step_size=step_size))
        key = rng.key(root, Stream.CLIENT, t, client)
        state, message, _ = now.client_update(TASK, down, state, SHARDS.of(client), key)
        return state, message

    def a_round(carry, t):
        prior, states, mean = carry
        ids = jax.random.choice(rng.key(root, Stream.COHORT, t), NUM_CLIENTS, (cohort,), replace=False)
        present = jax.tree.map(lambda leaf: leaf[ids], states)
        moved, messages = jax.vmap(update, (None, None, 0, 0))(t, prior, present, ids)
        states = jax.tree.map(lambda leaf, new: leaf.at[ids].set(new), states, moved)  # the others stay, eq. (86)
        now = replace(method, variance=setting.server)
        prior, _ = now.aggregate(TASK, prior, messages, rng.key(root, Stream.SERVER, t))
        mean = mean + (rows(prior, states) - mean) / (t + 1)
        return (prior, states, mean), mean

    start = first, states, jnp.zeros((1 + NUM_CLIENTS, 3 * NUM_CLASSES))
    _, means = jax.lax.scan(a_round, start, jnp.arange(HORIZONS[-1]))
    return means[np.array(HORIZONS) - 1]


def rows(prior, states):
    """(r, m_1, …, m_N)."""
    both = jax.tree.map(lambda r, m: jnp.concatenate([r, m]), prior.networks, states.network)
    return jnp.concatenate([leaf.reshape(1 + NUM_CLIENTS, -1) for leaf in jax.tree.leaves(both)], axis=1)


THEOREM = Setting()


def gaps(setting=THEOREM, cohort=NUM_CLIENTS, prior_mean="zero"):
    """f(x̄^T) − f(x*), (seeds, horizons)."""
    setting = jax.tree.map(jnp.float32, setting)
    found = jax.vmap(lambda seed: averages(setting, seed, cohort, prior_mean))(jnp.arange(NUM_SEEDS))
    with jax.enable_x64(True):
        each = jnp.asarray(np.asarray(found, np.float64))
        values = jax.vmap(jax.vmap(lambda x: objective(x, prior_mean)))(each)
        return np.asarray(values) - optimum(prior_mean)


def growth(gap):
    """The change of gap · √T from each horizon to the next: its mean over seeds, in standard errors."""
    change = np.diff(gap * np.sqrt(HORIZONS), axis=1)
    return np.mean(change, axis=0) / (np.std(change, axis=0, ddof=1) / np.sqrt(len(change)))


@pytest.mark.parametrize("prior_mean", ["zero", "learned"])
@pytest.mark.parametrize("cohort", [NUM_CLIENTS, 2])
def test_the_gap_falls_at_least_as_fast_as_the_theorem_says(cohort, prior_mean):
    gap = gaps(THEOREM, cohort, prior_mean)
    assert np.min(gap) > 0
    assert np.all(growth(gap) < 3)
    mean = gap.mean(axis=0)
    assert mean[-1] < 0.01 * mean[0]  # 1/√T would leave 1/16


SPOILT = {
    "large steps that never shrink": (Setting(rate=8.0, decay=0.0), NUM_CLIENTS),
    "half the penalty": (replace(THEOREM, client=2 * VARIANCE), NUM_CLIENTS),
    "a penalty that is not divided by the number of examples": (replace(THEOREM, client=VARIANCE / 6), NUM_CLIENTS),
    "participants that do not speak for all": (replace(THEOREM, server=VARIANCE * NUM_CLIENTS / 2), 2),
}


@pytest.mark.parametrize("name", SPOILT)
def test_the_gap_stops_falling_under(name):
    """What makes the test above fail: the last two horizons differ by more than five standard errors."""
    setting, cohort = SPOILT[name]
    assert growth(gaps(setting, cohort))[-1] > 5
