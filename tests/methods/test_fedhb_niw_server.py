"""The server of FedHB-NIW: eq. (18), written again in float64 NumPy, and the objective that it minimises.

The method runs in double precision where a derivative must vanish.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import trees
from priory.core.struct import replace
from priory.fed.method import Message
from priory.methods.fedhb_niw import Moments
from priory.models import Params
from tests.methods.niw_problem import KEPT, constants, each_dim, flat, next_server, pinned, prior_at, weights_of
from tests.methods.problems import quadratic_task

NUM_CLIENTS, NUM_EXAMPLES = 5, 40
TASK = quadratic_task(NUM_CLIENTS, NUM_EXAMPLES)  # of which only these numbers matter

each_keep = pytest.mark.parametrize("keep", [1.0, 0.75])  # exact in float32
each_size = pytest.mark.parametrize("num_heard", [1, 3, 5])


def messages_of(thetas, num=NUM_CLIENTS):
    """What clients with these weights send; further places, up to `num`, are of clients that did not take part."""
    thetas = np.asarray(thetas)
    silent = np.full((num - len(thetas), 6), np.nan, thetas.dtype)
    weight = np.repeat([1, 0], [len(thetas), len(silent)]).astype(thetas.dtype)
    return Message(Params(weights_of(np.concatenate([thetas, silent]))), jnp.asarray(weight))


def some_thetas(num=NUM_CLIENTS, seed=0):
    draw = np.random.default_rng(seed)
    return draw.normal(0.3, 0.5, (num, 6))


def aggregated(method, thetas, dtype=np.float32):
    """The server after the given clients have spoken."""
    before = prior_at(weights_of(np.zeros(6, dtype)), weights_of(np.ones(6, dtype)))
    return next_server(method, TASK, before, messages_of(thetas.astype(dtype)))


@each_size
@each_keep
@each_dim
def test_the_server_is_eq_18(dim, keep, num_heard):
    thetas, s0, epsilon = some_thetas(num_heard), 0.5, 0.01
    method = pinned(keep=keep, epsilon=epsilon, prior_scale=s0, dim=dim, prior_mean="zero")
    found = aggregated(method, thetas)

    (d, n0, _), n, p = constants(dim, NUM_EXAMPLES), NUM_CLIENTS, np.where(KEPT, 1.0, keep)
    m0 = p / (n + 1) * n / num_heard * thetas.sum(axis=0)
    rho = p * thetas**2 - 2 * p * m0 * thetas + m0**2
    v0 = n0 / (n + d + 2) * (s0**2 + n * epsilon**2 + m0**2 + n / num_heard * rho.sum(axis=0))
    np.testing.assert_allclose(flat(found.mean), m0, rtol=1e-5)
    np.testing.assert_allclose(flat(found.scale), v0, rtol=1e-5)


def server_loss(m0, v0, mu0, sigma0, thetas, dim, keep, epsilon):
    """Eq. (37) with the log|Σ0| of eq. (50), and eq. (38) of every participant times N/N_f."""
    (d, n0, _), n, p = constants(dim, NUM_EXAMPLES), NUM_CLIENTS, np.where(KEPT, 1.0, keep)
    nu0 = d + 2
    own = n0 * np.sum(sigma0 / v0) + nu0 * np.sum(np.log(v0) - np.log(sigma0)) + n0 * np.sum((mu0 - m0) ** 2 / v0)
    rho = p * thetas**2 - 2 * p * m0 * thetas + m0**2
    clients = n0 * np.sum((rho + epsilon**2) / v0) + len(thetas) * np.sum(np.log(v0))
    return 0.5 * own + n / len(thetas) * 0.5 * clients


def derivative(loss, at):
    """The gradient by complex steps: exact to rounding."""
    return np.array([loss(at + 1e-30j * unit).imag / 1e-30 for unit in np.eye(len(at))])


def assert_stationary(loss, at):
    """The derivative at a point is 10⁻⁸ of what it is ten per cent beside it."""
    here, beside = derivative(loss, at), derivative(loss, 1.1 * at)
    assert np.all(np.abs(here) < 1e-8 * np.abs(beside))


@each_size
@each_keep
@each_dim
def test_the_server_is_a_stationary_point_of_its_objective(dim, keep, num_heard):
    thetas, s0, epsilon = some_thetas(num_heard), 0.5, 0.01
    with jax.enable_x64(True):
        method = pinned(keep=keep, epsilon=epsilon, prior_scale=s0, dim=dim, prior_mean="zero")
        found = aggregated(method, thetas, dtype=np.float64)
    m0, v0 = flat(found.mean), flat(found.scale)
    loss = partial(server_loss, thetas=thetas, dim=dim, keep=keep, epsilon=epsilon)
    assert_stationary(lambda m: loss(m, v0, 0.0, s0**2), m0)
    assert_stationary(lambda v: loss(m0, v, 0.0, s0**2), v0)
    assert np.all(v0 > 0)


@pytest.mark.parametrize("prior_mean", ["zero", "learned"])
@pytest.mark.parametrize("num_heard", [2, 5])
@each_keep
@each_dim
def test_a_learned_prior_is_a_stationary_point_too(dim, keep, num_heard, prior_mean):
    thetas, epsilon, tensors = some_thetas(num_heard), 0.01, np.array([0, 0, 1, 1, 1, 1])
    with jax.enable_x64(True):
        method = pinned(keep=keep, epsilon=epsilon, dim=dim, prior_mean=prior_mean, learn_scale=True)
        found = aggregated(method, thetas, dtype=np.float64)
    m0, v0 = flat(found.mean), flat(found.scale)
    mu0 = m0 if prior_mean == "learned" else np.zeros(6)
    # The learned prior scale is in nobody's state: eq. (41) solved for Σ0 tells it.
    (d, n0, _), n, p = constants(dim, NUM_EXAMPLES), NUM_CLIENTS, np.where(KEPT, 1.0, keep)
    rho = p * thetas**2 - 2 * p * m0 * thetas + m0**2
    sigma0 = (n + d + 2) / n0 * v0 - n * epsilon**2 - (m0 - mu0) ** 2 - n / num_heard * rho.sum(axis=0)
    scales = np.array([sigma0[:2].mean(), sigma0[2:].mean()])
    np.testing.assert_allclose(sigma0, scales[tensors], rtol=1e-7)  # one number for each tensor

    loss = partial(server_loss, thetas=thetas, dim=dim, keep=keep, epsilon=epsilon)
    assert_stationary(lambda m: loss(m, v0, mu0, sigma0), m0)
    assert_stationary(lambda v: loss(m0, v, mu0, sigma0), v0)
    assert_stationary(lambda scale: loss(m0, v0, mu0, scale[tensors]), scales)
    if prior_mean == "learned":
        assert_stationary(lambda mu: loss(m0, v0, mu, sigma0), m0)


@each_dim
def test_the_scale_is_the_scatter_of_clients_and_prior_around_the_mean(dim):
    thetas, s0, epsilon = some_thetas(), 0.5, 0.01
    found = aggregated(pinned(epsilon=epsilon, prior_scale=s0, dim=dim, prior_mean="zero"), thetas)
    (d, n0, _), n = constants(dim, NUM_EXAMPLES), NUM_CLIENTS
    points = np.concatenate([np.zeros((1, 6)), thetas])
    scatter = np.sum((points - points.mean(axis=0)) ** 2, axis=0)
    np.testing.assert_allclose(flat(found.scale) * (n + d + 2) / n0, s0**2 + n * epsilon**2 + scatter, rtol=1e-5)


@pytest.mark.parametrize(
    ("prior_mean", "keep", "factor"),
    [
        ("zero", 1.0, np.full(6, 5 / 6)),
        ("zero", 0.75, np.where(KEPT, 5 / 6, 0.75 * 5 / 6)),
        ("learned", 0.75, np.where(KEPT, 1.0, 0.75)),
        ("learned", 1.0, np.ones(6)),
        ("plain", 0.75, np.ones(6)),
    ],
)
@each_size
def test_the_mean_is_a_multiple_of_the_plain_mean_of_whoever_took_part(prior_mean, keep, factor, num_heard):
    thetas = some_thetas(num_heard)
    found = aggregated(pinned(keep=keep, prior_mean=prior_mean), thetas)
    np.testing.assert_allclose(flat(found.mean), factor * thetas.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("num_heard", [1, 2, 4])
@each_keep
def test_participants_speak_for_all_without_bias(keep, num_heard):
    thetas, epsilon, p, n = some_thetas(), 0.01, np.where(KEPT, 1.0, keep), NUM_CLIENTS
    method = pinned(keep=keep, epsilon=epsilon, prior_mean="zero")

    def told(heard):
        """m0*, and the second moment of the clients' weights that V0* tells."""
        server = aggregated(method, heard)
        m0, (_, n0, _) = flat(server.mean), constants("factorised", NUM_EXAMPLES)
        total = (n + 3) / n0 * flat(server.scale) - 1 - n * epsilon**2 - (n + 1) * m0**2
        return m0, (total + 2 * (n + 1) * m0**2) / (n * p)

    subsets = [told(thetas[list(chosen)]) for chosen in itertools.combinations(range(n), num_heard)]
    mean, second = (np.mean(values, axis=0) for values in zip(*subsets, strict=True))
    np.testing.assert_allclose(mean, told(thetas)[0], rtol=1e-5)
    np.testing.assert_allclose(second, np.mean(thetas**2, axis=0), rtol=1e-4)
    np.testing.assert_allclose(told(thetas)[1], np.mean(thetas**2, axis=0), rtol=1e-4)


def moments_of(thetas, centre):
    delta = np.asarray(thetas - centre, np.float32)
    return Message(Moments(weights_of(delta), weights_of(delta**2), {}), jnp.ones(len(thetas)))


@pytest.mark.parametrize(("prior_mean", "learn_scale"), [("zero", False), ("learned", True), ("plain", False)])
@each_dim
def test_moments_tell_the_server_as_much_as_the_weights(dim, prior_mean, learn_scale):
    thetas, centre = 0.01 * some_thetas() + 1.0, np.full(6, 1.0)
    method = pinned(keep=0.75, epsilon=1e-3, prior_scale=1e-2, dim=dim, prior_mean=prior_mean)
    method = replace(method, learn_scale=learn_scale)
    server = prior_at(weights_of(np.float32(centre)), weights_of(np.ones(6, np.float32)))
    plain = next_server(method, TASK, server, messages_of(np.float32(thetas)))
    sums = next_server(replace(method, linear=True), TASK, server, moments_of(thetas, centre))
    np.testing.assert_allclose(flat(sums.mean), flat(plain.mean), rtol=1e-6)
    np.testing.assert_allclose(flat(sums.scale), flat(plain.scale), rtol=1e-4)


def test_a_stack_of_moments_and_its_weighted_mean_give_the_same_server():
    thetas, centre = some_thetas(), np.full(6, 0.2)
    method = pinned(linear=True, prior_mean="zero")
    server = prior_at(weights_of(np.float32(centre)), weights_of(np.ones(6, np.float32)))
    messages = replace(moments_of(thetas, centre), weight=jnp.array([1.0, 2.0, 0.0, 3.0, 1.0]))
    first = jax.tree.map(lambda leaf: leaf[0], messages.payload)
    mean = jax.jit(trees.weighted_mean)(messages.payload, messages.weight, first)
    one = Message(jax.tree.map(lambda leaf: np.asarray(leaf)[None], mean), jnp.array([7.0]))
    assert method.linear
    found = [flat(next_server(method, TASK, server, sent)) for sent in (messages, one)]
    np.testing.assert_allclose(*found, rtol=1e-5)
