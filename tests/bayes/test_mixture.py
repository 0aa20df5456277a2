"""Mixtures of Gaussians: the equations written again in float64 NumPy, and EM, which only ever goes down.

A point is a tree of three leaves, `flat` its six numbers. Derivatives that must vanish are taken in double precision;
what float32 may lose is stated beside each tolerance.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from priory.bayes import mixture
from priory.core import trees

each_count = pytest.mark.parametrize("num", [1, 2, 5])
each_prior = pytest.mark.parametrize("flat_prior", [False, True])
ROUNDING = 2.0**-24  # of a float32, relative

# One program each, where an eager call is one for each operation.
squared_distances = jax.jit(mixture.squared_distances)
penalty = jax.jit(mixture.penalty)
responsibilities = jax.jit(mixture.responsibilities)
share_out = jax.jit(mixture.share_out)
expected_log_density = jax.jit(mixture.expected_log_density)


def tree(vector, dtype=np.float32):
    """Six numbers as a scalar, a vector and a kernel; rows of them as a stack."""
    vector = np.asarray(vector, dtype)
    front = vector.shape[:-1]
    parts = vector[..., 0], vector[..., 1:3], vector[..., 3:].reshape(*front, 3, 1)
    return dict(zip("abc", parts, strict=True))


def flat(weights, rows=None):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(weights)]
    front = () if rows is None else (rows,)
    return np.concatenate([leaf.reshape(*front, -1) for leaf in leaves], axis=-1)


def drawn(seed, num_points, num, spread=1.0):
    """Points and prototypes, as float64 rows that float32 holds exactly."""
    draw = np.random.default_rng(seed)
    points, prototypes = draw.normal(size=(num_points, 6)), spread * draw.normal(size=(num, 6))
    return np.float32(points).astype(np.float64), np.float32(prototypes).astype(np.float64)


def distances(points, prototypes):
    """‖m_i − r_j‖², (points, K)."""
    return np.sum((points[:, None] - prototypes) ** 2, axis=-1)


def em_step(points, prototypes, variance, empty=0.0, flat_prior=False):
    """One EM step over all points, in double precision: the new prototypes and the shares."""
    with jax.enable_x64(True):
        shrinkage = 0.0 if flat_prior else variance / len(points)
        stacks = tree(points, np.float64), tree(prototypes, np.float64)
        # Of one type whatever the caller has: a Python number would make another program.
        after, share = _em_step(*stacks, np.float64(variance), np.float64(shrinkage), np.float64(empty))
        return flat(after, len(prototypes)), np.asarray(share)


@jax.jit
def _em_step(points, prototypes, variance, shrinkage, empty):
    each = jax.vmap(lambda point: mixture.share_out(point, prototypes, variance))(points)
    mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)
    return mixture.maximise(mean, prototypes, shrinkage, empty), each.share


def objective(prototypes, points, variance, flat_prior=False):
    """Eq. (74); a flat prior leaves out ½‖r_j‖²."""
    penalties = -logsumexp(-distances(points, prototypes) / (2 * variance), axis=1)
    return 0.5 * np.sum(prototypes**2) * (not flat_prior) + np.sum(penalties)


def gradient(prototypes, points, variance, flat_prior=False):
    """The derivative of eq. (74) by each prototype, (K, 6)."""
    share = softmax(-distances(points, prototypes) / (2 * variance), axis=1)
    pull = np.einsum("ij,ijd->jd", share, prototypes - points[:, None]) / variance
    return prototypes * (not flat_prior) + pull


# --- one point -------------------------------------------------------------------------------------------------------


@each_count
def test_squared_distances_are_those_of_the_flat_vectors(num):
    points, prototypes = drawn(0, 1, num)
    found = squared_distances(tree(points[0]), tree(prototypes))
    np.testing.assert_allclose(found, distances(points, prototypes)[0], rtol=1e-6)


@each_count
def test_the_penalty_is_that_of_eq_70(num):
    points, prototypes = drawn(1, 1, num)
    found = penalty(tree(points[0]), tree(prototypes), 0.5)
    np.testing.assert_allclose(found, -logsumexp(-distances(points, prototypes)[0] / 1.0), rtol=1e-5)


@jax.jit
def pulled(point, networks, variance):
    """The gradient of the penalty, the shares of the prototypes, and their blend."""
    share = mixture.responsibilities(point, networks, variance)
    return jax.grad(mixture.penalty)(point, networks, variance), share, mixture.blend(share, networks)


@pytest.mark.parametrize("variance", [0.1, 2.0])
@each_count
def test_the_gradient_of_the_penalty_is_a_pull_to_the_blend_of_the_prototypes(num, variance):
    points, prototypes = drawn(2, 1, num, spread=0.3)
    point, networks = tree(0.3 * points[0]), tree(prototypes)
    found, share, blend = pulled(point, networks, variance)
    assert num == 1 or 0 < np.sort(share)[-2] < 0.5  # more than one pulls
    expected = (flat(point) - flat(blend)) / variance
    # The two forms of the exponent are rounded differently: an error of a few units in ‖·‖²/2σ² ≈ 10 moves a share.
    np.testing.assert_allclose(flat(found), expected, atol=100 * ROUNDING / variance)


def assert_shares(point, prototypes, variance):
    """The responsibilities are the softmax in float64, but for what the rounding of the exponent explains."""
    point, prototypes = np.float32(point).astype(np.float64), np.float32(prototypes).astype(np.float64)
    expected = softmax(-distances(point[None], prototypes)[0] / (2 * variance))
    found = np.asarray(responsibilities(tree(point), tree(prototypes), variance), np.float64)
    # Sums of at most twelve products of δ_j and the point, each rounded; d(softmax) ≤ ½ d(logit).
    away = np.linalg.norm(prototypes - prototypes.mean(axis=0), axis=1)
    reach = np.linalg.norm(point) + np.linalg.norm(prototypes.mean(axis=0)) + away
    logit_error = 12 * ROUNDING * np.max(away * reach) / variance
    np.testing.assert_allclose(found, expected, atol=logit_error / 2 + 4 * ROUNDING)
    np.testing.assert_allclose(found.sum(), 1, atol=1e-6)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [2, 3, 10])
def test_responsibilities_are_the_softmax_of_squared_distances(num, seed):
    points, prototypes = drawn(seed, 1, num)
    found = assert_shares(points[0], prototypes, 3.0)
    assert np.max(found) < 0.99  # soft: all digits count


def test_one_prototype_has_the_whole_share():
    points, prototypes = drawn(3, 1, 1)
    np.testing.assert_array_equal(responsibilities(tree(points[0]), tree(prototypes), 1e-3), [1.0])


def test_shares_survive_distances_at_which_every_exponential_underflows():
    point, prototypes = np.zeros(6), np.array([[50.0] * 6, [49.999] * 6, [-60.0] * 6])
    variance = 2.0
    assert np.all(np.exp(-distances(point[None], prototypes)[0] / (2 * variance)) == 0)
    found = assert_shares(point, prototypes, variance)
    np.testing.assert_allclose(found[:2], softmax([0.0, 3 * (50.0**2 - 49.999**2) / variance]), atol=1e-2)


def test_far_prototypes_leave_a_point_to_its_own():
    prototypes = 100.0 * np.eye(6)[:4]
    for j in range(4):
        np.testing.assert_array_equal(responsibilities(tree(prototypes[j] + 0.1), tree(prototypes), 0.1), np.eye(4)[j])


@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2])
def test_nearly_equal_prototypes_share_a_point_nearly_equally(apart):
    points, _ = drawn(4, 1, 1)
    prototypes = points + apart * np.eye(6)[:3] - 0.5
    found = assert_shares(points[0], prototypes, 1e-2)
    np.testing.assert_allclose(found, np.full(3, 1 / 3), atol=60 * apart)


def test_a_tiny_variance_gives_a_point_to_the_nearest_and_no_nan():
    points, prototypes = drawn(5, 1, 4)
    # One operation at a time: a compiled program may round the exponent in two ways, and their difference overflows.
    found = mixture.responsibilities(tree(points[0]), tree(prototypes), 1e-30)
    np.testing.assert_array_equal(found, np.eye(4)[np.argmin(distances(points, prototypes)[0])])


@each_count
def test_the_offsets_are_the_shares_of_the_way_from_each_prototype(num):
    points, prototypes = drawn(6, 1, num)
    found = share_out(tree(points[0]), tree(prototypes), 2.0)
    share = softmax(-distances(points, prototypes)[0] / 4.0)
    np.testing.assert_allclose(found.share, share, atol=1e-6)
    np.testing.assert_allclose(flat(found.offset, num), share[:, None] * (points - prototypes), atol=3e-6)


def test_pick_takes_one_prototype():
    _, prototypes = drawn(7, 1, 3)
    np.testing.assert_array_equal(flat(jax.jit(mixture.pick)(tree(prototypes), 1)), prototypes[1])


# --- EM --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [0.05, 1.0])
@each_count
def test_the_m_step_is_eq_77(num, variance):
    points, prototypes = drawn(9, 7, num)
    after, _ = em_step(points, prototypes, variance)
    share = softmax(-distances(points, prototypes) / (2 * variance), axis=1)
    expected = (share.T @ points / 7) / (variance / 7 + share.mean(axis=0)[:, None])
    np.testing.assert_allclose(after, expected, rtol=1e-9, atol=1e-12)


@each_prior
@pytest.mark.parametrize("variance", [0.05, 1.0])
@each_count
def test_the_m_step_is_the_minimum_of_eq_76(num, variance, flat_prior):
    points, prototypes = drawn(10, 7, num)
    after, share = em_step(points, prototypes, variance, flat_prior=flat_prior)

    def surrogate(r):
        spread = np.sum(share * np.sum((points[:, None] - r) ** 2, axis=-1)) / (2 * variance)
        return spread + 0.5 * np.sum(r**2) * (not flat_prior)

    def slope(r, unit, step=1e-3):  # central differences of a quadratic are exact
        return (surrogate(r + step * unit) - surrogate(r - step * unit)) / (2 * step)

    units = np.eye(num * 6).reshape(-1, num, 6)
    beside = max(abs(slope(prototypes, unit)) for unit in units)
    assert all(abs(slope(after, unit)) < 1e-9 * beside for unit in units)
    # Strictly convex, so that it is the only minimum.
    curvature = np.repeat(np.sum(share, axis=0) / variance + (not flat_prior), 6)
    risen = [surrogate(after + unit) - surrogate(after) for unit in units]
    np.testing.assert_allclose(risen, curvature / 2, rtol=1e-8, atol=1e-9)


@each_prior
@pytest.mark.parametrize(("num_points", "num"), [(3, 2), (8, 5), (20, 3)])
def test_an_em_step_never_raises_the_objective(num_points, num, flat_prior):
    """A hundred instances each: prototypes from close to far apart, variances over four decades."""
    draw, falls = np.random.default_rng(11), []
    for variance, spread in 10 ** draw.uniform([-3, -1.5], [1, 0.5], (100, 2)):
        points, prototypes = drawn(int(draw.integers(1 << 31)), num_points, num, spread)
        after, _ = em_step(points, prototypes, variance, empty=1e-300, flat_prior=flat_prior)
        before = objective(prototypes, points, variance, flat_prior)
        falls.append((before - objective(after, points, variance, flat_prior)) / abs(before))
    assert np.min(falls) > 1e-6  # none of them starts at its optimum, so each of them falls


@each_prior
def test_several_em_steps_end_at_a_stationary_point_and_never_rise_on_the_way(flat_prior):
    draw = np.random.default_rng(12)
    points = np.concatenate([draw.normal(centre, 0.5, (8, 6)) for centre in (-1.0, 0.5)])
    prototypes, variance = 0.1 * draw.normal(size=(3, 6)), 0.3
    values, slopes = [], []
    for _ in range(400):
        values.append(objective(prototypes, points, variance, flat_prior))
        slopes.append(np.linalg.norm(gradient(prototypes, points, variance, flat_prior)))
        prototypes, _ = em_step(points, prototypes, variance, flat_prior=flat_prior)
    assert np.all(np.diff(values) < 1e-10 * abs(values[0]))
    assert slopes[-1] < 1e-8 * slopes[0]
    # A fixed point too: nothing moves there.
    after, _ = em_step(points, prototypes, variance, flat_prior=flat_prior)
    np.testing.assert_allclose(after, prototypes, atol=1e-8)


def test_one_prototype_needs_one_step():
    points, prototypes = drawn(13, 7, 1)
    after, _ = em_step(points, prototypes, 0.7)
    np.testing.assert_allclose(after[0], points.sum(axis=0) / (7 + 0.7), rtol=1e-12)
    np.testing.assert_allclose(gradient(after, points, 0.7), 0, atol=1e-12)


def test_permuting_prototypes_permutes_an_em_step():
    points, prototypes = drawn(14, 8, 5)
    order = np.array([2, 0, 4, 3, 1])
    after, share = em_step(points, prototypes, 0.5)
    turned, turned_share = em_step(points, prototypes[order], 0.5)
    np.testing.assert_allclose(turned, after[order], rtol=1e-12)
    np.testing.assert_allclose(turned_share, share[:, order], rtol=1e-10)


@pytest.mark.parametrize(("empty", "flat_prior"), [(0.0, False), (1e-6, False), (1e-6, True)])
def test_a_prototype_that_nobody_is_near_falls_to_zero_or_stays(empty, flat_prior):
    points, _ = drawn(15, 7, 1)
    prototypes = np.array([np.zeros(6), np.full(6, 100.0)])
    after, share = em_step(points, prototypes, 0.5, empty, flat_prior)
    assert np.all(share[:, 1] == 0)
    np.testing.assert_allclose(after[0], points.sum(axis=0) / (7.0 if flat_prior else 7.5), rtol=1e-12)
    np.testing.assert_array_equal(after[1], prototypes[1] if empty else np.zeros(6))


# --- the bound -------------------------------------------------------------------------------------------------------


def log_densities(point, prototypes, variance, width, num_draws, seed=0):
    """Log p(θ | μ) at draws of θ ~ N(point, width²) and μ_j ~ N(r_j, width²)."""
    draw, (num, d) = np.random.default_rng(seed), prototypes.shape
    theta = point + width * draw.normal(size=(num_draws, 1, d))
    mu = prototypes + width * draw.normal(size=(num_draws, num, d))
    log_prob = -np.sum((theta - mu) ** 2, axis=-1) / (2 * variance) - 0.5 * d * np.log(2 * np.pi * variance)
    return logsumexp(log_prob, axis=1) - math.log(num)


@pytest.mark.parametrize("width", [0.05, 0.4])
@each_count
def test_the_expected_log_density_lies_below_that_of_draws(num, width):
    points, prototypes = drawn(16, 1, num, spread=0.3)
    draws = log_densities(0.3 * points[0], prototypes, 0.5, width, 20_000)
    error = np.std(draws) / math.sqrt(len(draws))
    found = float(expected_log_density(tree(0.3 * points[0]), tree(prototypes), 0.5, width))
    away = (np.mean(draws) - found) / error
    if num == 1:
        assert abs(away) < 4  # Jensen's inequality has nothing to lose
    else:
        assert away > -4
    if num == 5 and width == 0.4:
        assert away > 4  # the bound is strict where prototypes compete


def test_a_point_that_was_shared_out_can_be_put_together_again():
    points, prototypes = drawn(19, 1, 3)
    shares = share_out(tree(points[0]), tree(prototypes), 5.0)
    np.testing.assert_allclose(flat(jax.jit(mixture.point_of)(shares, tree(prototypes))), points[0], atol=3e-6)


def test_without_width_the_expected_log_density_is_the_log_density():
    points, prototypes = drawn(17, 1, 3)
    found = expected_log_density(tree(points[0]), tree(prototypes), 0.5, 0.0)
    np.testing.assert_allclose(found, log_densities(points[0], prototypes, 0.5, 0.0, 1)[0], rtol=1e-5)


def test_nothing_promotes():
    @jax.jit
    def numbers(points, prototypes):
        point = mixture.pick(points, jnp.int32(0))
        shares = mixture.share_out(point, prototypes, 0.1)
        moved = mixture.maximise(shares, prototypes, 0.025, 1e-6)
        blend = mixture.blend(shares.share, moved)
        return mixture.expected_log_density(point, moved, 0.1, 1e-4), trees.norm(blend)

    with jax.numpy_dtype_promotion("strict"):
        found = numbers(*(tree(rows) for rows in drawn(18, 4, 2)))
    assert {number.dtype for number in found} == {jnp.dtype(jnp.float32)}
