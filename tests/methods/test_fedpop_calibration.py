"""Simulation-based calibration: at the true (φ, β) a client's draws rank the truth uniformly, and intervals cover it.

Talts et al., Validating Bayesian Inference Algorithms with Simulation-Based Calibration, 2018, arXiv:1804.06788. Many
clients are drawn from the linear mixed-effects model; each runs its chain, of which 39 nearly independent draws are
compared with the z that its data came from.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from priory.methods.fedpop import FedPop
from tests.methods.mixed_problem import DIM, NOISE, RANK, down_at, factor_task, problem
from tests.methods.problems import shards_from

CLIENTS, EXAMPLES, DRAWS = 2000, 4, 39
TASK = factor_task((EXAMPLES,) * CLIENTS)
_, PHI, MEAN, SD = problem()
METHODS = {
    "mala": FedPop(kernel="mala", chains=1, warm_up=60, samples=DRAWS, thin=20),
    "ula": FedPop(kernel="ula", gamma=0.002, chains=1, warm_up=400, samples=DRAWS, thin=150),
}


pytestmark = pytest.mark.slow  # thousands of steps for thousands of clients
KERNELS = ["mala", "ula"]


@cache
def draws(kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """Draws (clients, draws, rank) of each client's posterior, and the truth (clients, rank)."""
    draw = np.random.default_rng(4)
    z = MEAN + SD * draw.normal(size=(CLIENTS, RANK))
    x = draw.normal(size=(CLIENTS, EXAMPLES, DIM))
    y = np.einsum("ced,dr,cr->ce", x, PHI, z) + NOISE * draw.normal(size=(CLIENTS, EXAMPLES))
    counts = (EXAMPLES,) * CLIENTS
    shards = shards_from(x.reshape(-1, DIM).astype(np.float32), y.reshape(-1).astype(np.float32), counts)
    method = METHODS[kernel]
    down = down_at(method, TASK, PHI, MEAN, SD)

    @jax.jit
    def everyone(keys):
        def one(client, key):
            key_enrol, key_chain = jax.random.split(key)
            state = method.init_client(TASK, down, key_enrol)
            return method.personalise(TASK, down, state, shards.of(client), key_chain).z

        return jax.vmap(one)(jnp.arange(CLIENTS), keys)

    found = everyone(jax.random.split(jax.random.key(0), CLIENTS))
    return np.asarray(found["Dense_1"]["kernel"])[:, 0, :, :, 0], z


@pytest.mark.parametrize("kernel", KERNELS)
def test_ranks_of_the_truth_are_uniform(kernel):
    """χ² of 20 bins of two ranks each at the level 0.01, for each random effect; 39 draws make 40 ranks."""
    found, truth = draws(kernel)
    for j in range(RANK):
        ranks = np.sum(found[:, :, j] < truth[:, None, j], axis=1)
        counts = np.bincount(ranks // 2, minlength=(DRAWS + 1) // 2)
        assert stats.chisquare(counts).pvalue > 0.01, counts


@pytest.mark.parametrize("kernel", KERNELS)
def test_ninety_percent_intervals_cover_ninety_percent(kernel):
    """From the 2nd to the 38th of 39 sorted draws lie 36/40 of the probability; 90 ± 2 %."""
    found, truth = draws(kernel)
    ordered = np.sort(found, axis=1)
    covered = (ordered[:, 1] < truth) & (truth < ordered[:, 37])
    assert np.all(np.abs(covered.mean(0) - 0.9) < 0.02), covered.mean(0)


def test_a_prior_that_is_too_narrow_does_not_pass():
    """The test can fail: with half the population's σ the ranks pile up at the ends."""
    found, truth = draws("mala")
    centre = found.mean(1, keepdims=True)
    narrow = centre + 0.5 * (found - centre)
    ranks = np.sum(narrow[:, :, 0] < truth[:, None, 0], axis=1)
    counts = np.bincount(ranks // 2, minlength=(DRAWS + 1) // 2)
    assert stats.chisquare(counts).pvalue < 1e-6
