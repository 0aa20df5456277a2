"""The evidence lower bound of FedHB-NIW: it never falls, and it is one."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from priory import Optimiser, Work
from priory.core import rng
from priory.core.struct import replace
from priory.fed.capabilities import Evidence
from priory.fed.method import Task
from priory.models import Head, Params, as_model
from priory.models.likelihood import Gaussian
from tests.methods.niw_problem import (
    COUNTS,
    DOWN,
    M0,
    REGRESSION,
    SD,
    V0,
    constants,
    each_dim,
    pinned,
    prior_at,
    regression_data,
    weights_of,
)
from tests.methods.problems import shards_from


@partial(jax.jit, static_argnames="rounds")
def bound_on_the_way(method, task, shards, server, kept, rounds):
    """The state after some rounds, and the ELBO after every half-step of them, (2 · rounds,)."""
    places = jnp.arange(task.num_clients)

    def bound(server, kept):
        def part(at):
            return method.client_evidence(task, server, Params(at[0]), shards.of(at[1]), rng.root(9))

        return method.server_evidence(task, server) + jnp.sum(jax.lax.map(part, (kept, places)))

    def a_round(state, key):
        server, kept = state

        def work(at):
            return method.client_update(task, server, at[0], shards.of(at[1]), jax.random.fold_in(key, at[1]))[:2]

        kept, messages = jax.lax.map(work, (kept, places))
        halfway = bound(server, kept)
        server, _ = method.aggregate(task, server, messages, rng.root(0))
        return (server, kept), jnp.stack([halfway, bound(server, kept)])

    state, bounds = jax.lax.scan(a_round, (server, kept), jax.random.split(rng.root(1), rounds))
    return state, jnp.ravel(bounds)


@each_dim
def test_the_bound_never_falls_where_client_and_server_maximise_the_same(dim):
    counts = (3, 2, 3, 4)  # |D| = 12 beside d = 6: the mode of Σ is far from its expectation
    task, (_, _, shards) = replace(REGRESSION, num_clients=4, num_examples=12), regression_data(counts)
    method = pinned(
        epsilon=1e-3, dim=dim, precision="expected", prior_mean="zero", stateful=True,
        optimiser=Optimiser(step_size=0.05), work=Work(epochs=20, batch_size=4),
    )  # fmt: skip
    assert isinstance(method, Evidence)
    far = weights_of(np.random.default_rng(4).normal(0, 3, (4, 6)).astype(np.float32))
    go_on = partial(bound_on_the_way, task=task, shards=shards, rounds=40)
    (server, kept), bounds = go_on(method, server=method.init_server(task, rng.root(0)), kept=far)
    # The bound is a sum of a dozen float32 terms, none larger than some hundreds.
    tolerance = 10 * np.finfo(np.float32).eps * np.max(np.abs(bounds))
    assert np.all(np.diff(bounds) > -tolerance)
    assert bounds[-1] - bounds[0] > 10
    # From here on any other pull loses, though the server does its best.
    rules = [replace(method, kl_scale=2.0), replace(method, kl_scale=0.5)]
    rules += [replace(method, precision="mode")] if dim == "joint" else []
    for other in rules:
        after = go_on(other, server=server, kept=kept)[1]
        assert after[1] < bounds[-1] - 100 * tolerance


@each_dim
def test_a_learned_prior_mean_saves_the_pull_of_eq_55(dim):
    zero = pinned(dim=dim, prior_mean="zero").server_evidence(REGRESSION, DOWN)
    _, n0, _ = constants(dim, sum(COUNTS))
    for prior_mean in ("learned", "plain"):
        found = pinned(dim=dim, prior_mean=prior_mean).server_evidence(REGRESSION, DOWN)
        assert float(found - zero) == pytest.approx(0.5 * n0 * np.sum(M0**2 / V0), rel=1e-4)


@each_dim
def test_a_learned_prior_scale_is_the_best_of_all(dim):
    even = prior_at(DOWN.mean, weights_of(np.full(6, 30.0, np.float32)))  # one scale is best for both tensors
    method = pinned(dim=dim, prior_mean="zero")
    found = float(replace(method, learn_scale=True).server_evidence(REGRESSION, even))
    d, n0, _ = constants(dim, sum(COUNTS))
    best = np.sqrt((d + 2) * 30.0 / n0)  # where E[Σ⁻¹] is the same under prior and posterior
    others = [float(replace(method, prior_scale=f * best).server_evidence(REGRESSION, even)) for f in (1.0, 0.9, 1.1)]
    assert found == pytest.approx(others[0], abs=1e-3)
    assert found > max(others[1:]) + 0.01


ONE_WEIGHT = Task(
    as_model((lambda key, shape: {"w": jnp.zeros(())}, lambda weights, x: weights["w"] * x)),
    Gaussian(SD), (1,), 3, 15, Head("w"),
)  # fmt: skip


def log_evidence(x, y, s0):
    """log p(D) of one weight a client, by summing over a grid of μ and log σ²."""
    log_variance, mu = np.meshgrid(np.linspace(-8, 8, 801), np.linspace(-8, 8, 801), indexing="ij")
    variance = np.exp(log_variance)
    log_prior = stats.invgamma(1.5, scale=s0**2 / 2).logpdf(variance) + log_variance  # IW(s0², 3), and the Jacobian
    log_joint = log_prior + stats.norm(0, np.sqrt(variance)).logpdf(mu)
    for own_x, own_y in zip(x, y, strict=True):  # y ~ N(xμ, SD² + σ² x xᵀ), by its determinant and its inverse
        square, cross, total = (
            own_x @ own_x,
            own_x @ own_y - (own_x @ own_x) * mu,
            np.sum((own_y[:, None, None] - own_x[:, None, None] * mu) ** 2, axis=0),
        )
        gain = variance / (SD**2 + variance * square)
        log_joint += -0.5 * ((total - gain * cross**2) / SD**2 + np.log1p(variance * square / SD**2))
        log_joint += -0.5 * len(own_y) * np.log(2 * np.pi * SD**2)
    step = 16 / 800
    return np.logaddexp.reduce(log_joint.ravel()) + 2 * np.log(step)


def test_the_bound_lies_below_the_evidence_and_not_far():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(3, 5))
    y = x * np.array([[0.8], [1.5], [-0.2]]) + SD * draw.normal(size=(3, 5))
    shards = shards_from(np.float32(x).reshape(15, 1), np.float32(y).ravel(), (5, 5, 5))
    sd = SD / np.sqrt(np.sum(x**2) / 3)  # about the width of a client's posterior
    method = pinned(epsilon=sd, precision="expected", prior_mean="zero", stateful=True)
    method = replace(method, optimiser=Optimiser(step_size=0.1), work=Work(epochs=20, batch_size=5))
    start = {"w": jnp.ones(3)}
    task, places = ONE_WEIGHT, jnp.arange(3)
    (server, kept), _ = bound_on_the_way(method, task, shards, method.init_server(task, rng.root(0)), start, rounds=30)

    @jax.jit
    def bound(key):
        def part(at):
            own = jax.random.fold_in(key, at[1])
            return method.client_evidence(task, server, Params(at[0]), shards.of(at[1]), own)

        return method.server_evidence(task, server) + jnp.sum(jax.lax.map(part, (kept, places)))

    bounds = np.asarray(jax.lax.map(bound, jax.random.split(rng.root(2), 2000)), np.float64)
    gap, error = log_evidence(x, y, s0=1.0) - bounds.mean(), bounds.std() / math.sqrt(len(bounds))
    assert gap > 5 * error
    assert gap < 5  # l0 and n0 count examples, not clients: q(φ) is far too sure of itself
