"""A linear-Gaussian problem for the tests of variational methods, with what they must reach in closed form.

y = Xθ + e,   e ~ N(0, s²),   prior w = N(μ_w, σ_w²),   minimised over q:  −E_q log p(y | X, θ) + ζ KL(q ‖ w)
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from priory import Optimiser, PFedBayes, Work
from priory.bayes.gaussian import Free
from priory.core import rng
from priory.core.struct import replace
from priory.fed.method import Task
from priory.methods._blocks.coupled_vi import VariationalParams, init_client_state
from priory.models import Head, Linen
from priory.models.likelihood import Gaussian
from tests.methods.problems import shards_from
from tests.methods.verbs import aggregated, updated

SD = 0.7
COUNTS = (10, 6)
NUM = 3  # weights

REGRESSION = Task(Linen(nn.Dense(1, use_bias=False)), Gaussian(SD), (NUM,), len(COUNTS), sum(COUNTS), Head("kernel"))

_draw = np.random.default_rng(0)
X = _draw.normal(size=(sum(COUNTS), NUM))
Y = X @ np.array([0.8, -0.5, 0.3]) + SD * _draw.normal(size=len(X))
SHARDS = shards_from(X.astype(np.float32), Y.astype(np.float32), COUNTS)
FIRST = SHARDS.of(jnp.int32(0))  # the first ten rows
M_W = np.array([0.2, 0.1, -0.4])
S_W = np.array([0.3, 0.5, 0.4])


def weights_of(vector):
    """Three numbers as the weights of the regression."""
    return {"kernel": np.asarray(vector, np.float32)[:, None]}


def flat(tree):
    """All numbers of a tree in one row, in float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def tempered(zeta, x=X[:10], y=Y[:10], mean_w=M_W, sd_w=S_W):
    """The mean and the standard deviation of the best q.

    (XᵀX/s² + ζ diag σ_w⁻²) μ = Xᵀy/s² + ζ diag σ_w⁻² μ_w,   σ⁻² = diag(XᵀX)/(ζs²) + σ_w⁻²
    """
    pull = zeta / sd_w**2
    mean = np.linalg.solve(x.T @ x / SD**2 + np.diag(pull), x.T @ y / SD**2 + pull * mean_w)
    return mean, 1 / np.sqrt(np.sum(x**2, axis=0) / (zeta * SD**2) + sd_w**-2)


def expected_nll(q, stats, batch, key):
    """The exact mean over a batch of −E_q log p(y | x, θ) but for a constant: a likelihood term without noise."""
    del key
    mean, sd = q.mean["kernel"][:, 0], q.sd["kernel"][:, 0]
    error = jnp.square(batch.y - batch.x @ mean) + jnp.square(batch.x) @ jnp.square(sd)
    return 0.5 * jnp.sum(batch.mask * error) / SD**2 / jnp.maximum(jnp.sum(batch.mask), 1), stats


HELD = 1e-30  # a rate at which w does not move
# Of most tests, so that they share compiled programs.
ADAM, TEN_STEPS = Optimiser("adam", 0.01), Work(steps=10, batch_size=4)


def pinned(**options):
    """The method with every field written down: the tests do not follow its defaults."""
    fields = {
        "zeta": 1.0, "rho": -2.5, "beta": 1.0, "samples_per_step": 1, "draw": "layers", "average": "params",
        "stateful": True, "prior_rate": 1.0, "samples": 10,
        "optimiser": Optimiser("sgd", 0.1), "work": Work(epochs=1, batch_size=10),
    }  # fmt: skip
    assert fields.keys() == {field.name for field in dataclasses.fields(PFedBayes)}
    return PFedBayes(**fields | options)


def belief(mean, sd):
    return VariationalParams(Free(weights_of(mean), weights_of(np.log(np.expm1(sd)))), {})  # sd = softplus(ρ)


DOWN = belief(M_W, S_W)
OWN = belief([0.5, -0.3, 0.0], [0.2, 0.1, 0.6])
EMPTY = replace(FIRST, lengths=np.array([0], np.int32))


def next_server(method, task, server, messages):
    return aggregated(method, task, server, messages, rng.root(0))[0]


def visited(method, down=DOWN, client=None, data=FIRST, seed=0):
    """A client's new state, its message and its info."""
    if client is None:
        client = init_client_state(down, method.optimiser) if method.stateful else ()
    return updated(method, REGRESSION, down, client, data, rng.root(seed))
