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
from tests.methods.verbs import broadcast, init_server

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
    return {"Dense_0": {"kernel": np.asarray(phi, np.float32)}, "Dense_1": {"kernel": None}}, {
        "Dense_0": {"kernel": None},
        "Dense_1": {"kernel": np.asarray(z, np.float32)[..., None]},
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
    # Of the settings only these have to do with it: methods that differ in others share a program.
    same = ("prior", "prior_draws", "particles", "width")
    like = FedPop(**{name: getattr(method, name) for name in same})
    down = broadcast(like, init_server(like, task, jax.random.key(0)))
    fixed, centre = wrap(phi, mean)
    spread = wrap(phi, np.log(np.asarray(sd, np.float32)))[1]
    return Down(fixed, Normal(centre, spread), down.stats, down.crowd)


def rows_of(shards: Shards, client: int) -> tuple[np.ndarray, np.ndarray]:
    """One client's inputs and targets."""
    start, count = np.asarray(shards.start)[client], np.asarray(shards.count)[client]
    rows = slice(start, start + count)
    return np.asarray(shards.pool.x, float)[rows], np.asarray(shards.pool.y, float)[rows]


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


def sufficient(shards: Shards, phi: Any) -> tuple[np.ndarray, np.ndarray]:
    """AᵀA/s² (clients, rank, rank) and Aᵀy/s² (clients, rank): what the data say of every z."""
    parts = [(x @ phi, y) for x, y in (rows_of(shards, k) for k in range(shards.count.shape[0]))]
    return np.stack([a.T @ a for a, _ in parts]) / NOISE**2, np.stack([a.T @ y for a, y in parts]) / NOISE**2


def posteriors(precision: Any, pull: Any, mean: Any, sd: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances of every z, from what `sufficient` returns."""
    covariance = np.linalg.inv(precision + np.diag(1 / sd**2))
    return np.einsum("kij,kj->ki", covariance, pull + mean / sd**2), covariance


def best_prior(shards: Shards, phi: Any) -> tuple[np.ndarray, np.ndarray]:
    """The EM fixed point (μ*, σ*) at a given φ, where the marginal likelihood is largest."""
    mean, sd = np.zeros(RANK), np.ones(RANK)
    said = sufficient(shards, phi)
    for _ in range(20000):
        before = mean, sd
        centre, covariance = posteriors(*said, mean, sd)
        mean = centre.mean(axis=0)
        sd = np.sqrt(np.mean((centre - mean) ** 2 + np.diagonal(covariance, axis1=1, axis2=2), axis=0))
        if np.allclose((mean, sd), before, rtol=0, atol=1e-13):
            return mean, sd
    raise AssertionError("EM has not converged")
