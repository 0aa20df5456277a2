"""A linear mixed-effects model whose posterior, marginal likelihood and best prior are known in closed form.

y = x·(φ z) + N(0, s²),   z ~ N(μ, diag σ²):   with A = Xφ the posterior of z has precision AᵀA/s² + diag 1/σ² and mean
S(Aᵀy/s² + μ/σ²), and y ~ N(Aμ, s² I + A diag(σ²) Aᵀ).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from priory.bayes.population import Normal
from priory.fed.method import Task
from priory.fed.shard import Shards
from priory.methods.fedpop import Down, FedPop
from priory.models.likelihood import Gaussian
from priory.models.linen import Linen
from priory.models.model import Head
from tests.methods.problems import shards_from

DIM, RANK, NOISE = 4, 2, 0.5
COUNTS = (6, 3, 5, 4, 8)


class Factor(nn.Module):
    """y = (x φ) z, without biases."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(RANK, use_bias=False)(x)
        return nn.Dense(1, use_bias=False)(x)


def factor_task(counts: tuple[int, ...] = COUNTS) -> Task:
    """z is the last layer, so chains run on features."""
    return Task(Linen(Factor()), Gaussian(NOISE), (DIM,), len(counts), sum(counts), Head("Dense_1"))


def wrap(phi: Any, z: Any) -> tuple[Any, Any]:
    """Fixed and random effects as the network holds them."""
    return {"Dense_0": {"kernel": jnp.asarray(phi)}, "Dense_1": {"kernel": None}}, {
        "Dense_0": {"kernel": None},
        "Dense_1": {"kernel": jnp.asarray(z)[..., None]},
    }


def problem(counts: tuple[int, ...] = COUNTS, seed: int = 0) -> tuple[Shards, np.ndarray, np.ndarray, np.ndarray]:
    """Shards, φ, μ and σ; the data are drawn from the model with these."""
    draw = np.random.default_rng(seed)
    phi = np.linalg.qr(draw.normal(size=(DIM, RANK)))[0] * 1.5
    mean, sd = np.array([0.7, -0.4]), np.array([0.8, 0.5])
    z = mean + sd * draw.normal(size=(len(counts), RANK))
    client = np.repeat(np.arange(len(counts)), counts)
    x = draw.normal(size=(len(client), DIM))
    y = np.sum((x @ phi) * z[client], axis=1) + NOISE * draw.normal(size=len(client))
    return shards_from(x.astype(np.float32), y.astype(np.float32), counts), phi, mean, sd


def down_at(method: FedPop, task: Task, phi: Any, mean: Any, sd: Any) -> Down:
    """The broadcast with these parameters."""
    down = method.broadcast(method.init(task, jax.random.key(0)))
    fixed, centre = wrap(jnp.asarray(phi, jnp.float32), jnp.asarray(mean, jnp.float32))
    spread = wrap(phi, jnp.log(jnp.asarray(sd, jnp.float32)))[1]
    return Down(fixed, Normal(centre, spread), down.stats, down.crowd)


def rows_of(shards: Shards, client: int) -> tuple[np.ndarray, np.ndarray]:
    """One client's inputs and targets."""
    start, count = int(shards.start[client]), int(shards.count[client])
    return np.asarray(shards.pool.x[start : start + count], float), np.asarray(
        shards.pool.y[start : start + count], float
    )


def posterior(x: Any, y: Any, phi: Any, mean: Any, sd: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of z given the data of one client."""
    a = x @ phi
    covariance = np.linalg.inv(a.T @ a / NOISE**2 + np.diag(1 / sd**2))
    return covariance @ (a.T @ y / NOISE**2 + mean / sd**2), covariance


def log_marginal(x: Any, y: Any, phi: Any, mean: Any, log_sd: Any) -> jax.Array:
    """log p(D_k | φ, μ, σ) of one client, with jnp, so that it has gradients."""
    a = x @ phi
    covariance = NOISE**2 * jnp.eye(len(y)) + (a * jnp.exp(2 * log_sd)[None, :]) @ a.T
    residual = y - a @ mean
    return -0.5 * (
        residual @ jnp.linalg.solve(covariance, residual)
        + jnp.linalg.slogdet(covariance)[1]
        + len(y) * jnp.log(2 * jnp.pi)
    )


def best_prior(shards: Shards, phi: Any, rounds: int = 20000) -> tuple[np.ndarray, np.ndarray]:
    """The EM fixed point (μ*, σ*) at a given φ, where the marginal likelihood is largest."""
    mean, sd = np.zeros(RANK), np.ones(RANK)
    data = [rows_of(shards, k) for k in range(shards.count.shape[0])]
    for _ in range(rounds):
        known = [posterior(x, y, phi, mean, sd) for x, y in data]
        mean = np.mean([m for m, _ in known], axis=0)
        sd = np.sqrt(np.mean([(m - mean) ** 2 + np.diag(c) for m, c in known], axis=0))
    return mean, sd
