"""Normal-inverse-Wishart: closed forms against Monte Carlo, the conjugate posterior, and stationary points.

The references are written here in float64 NumPy, from the equations. A Monte-Carlo test allows five standard errors; a
Kolmogorov-Smirnov test must not reject at 10⁻⁴.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import digamma

from priory.bayes import niw
from priory.bayes.niw import NIW, Observed
from priory.core import trees
from tests.monte_carlo import assert_mean

NUM = 20_000
BLOCKS = {"joint": 2, "factorised": 1}  # sizes of the covariance of two weights

each_dim = pytest.mark.parametrize("dim", BLOCKS.values(), ids=BLOCKS.keys())


def tree(*values):
    """Two weights in two leaves of different shapes; of NumPy, since each operation on JAX's is compiled."""
    return {"a": np.float32(values[0]), "b": np.array([[values[1]]], np.float32)}


def flat(weights):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(weights)])


def two(dim, mean=(0.5, -1.0), scale=(3.0, 0.7), strength=2.5, dof=6.5):
    return NIW(tree(*mean), tree(*scale), strength, dof, dim)


def draw_covariances(q, num=NUM, seed=0):
    """Draws of Σ, (num, d, d): inverse-Wishart blocks on the diagonal."""
    scale, draw = flat(q.scale), np.random.default_rng(seed)
    sigma = np.zeros((num, len(scale), len(scale)))
    for low in range(0, len(scale), q.dim):
        block = slice(low, low + q.dim)
        drawn = stats.invwishart(q.dof, np.diag(scale[block])).rvs(num, random_state=draw)
        sigma[:, block, block] = np.reshape(drawn, (num, q.dim, q.dim))
    return sigma


def draw_both(q, num=NUM, seed=0):
    """Draws of (μ, Σ)."""
    sigma = draw_covariances(q, num, seed)
    noise = np.random.default_rng(seed + 1).normal(size=sigma.shape[:2])
    return flat(q.mean) + np.einsum("nij,nj->ni", np.linalg.cholesky(sigma / q.strength), noise), sigma


def log_prob(p, mu, sigma):
    """log NIW(μ, Σ), of every draw."""
    mean, scale = flat(p.mean), flat(p.scale)
    total = np.zeros(len(mu))
    for low in range(0, len(scale), p.dim):
        block = slice(low, low + p.dim)
        s = sigma[:, block, block]
        total += stats.invwishart(p.dof, np.diag(scale[block])).logpdf(np.moveaxis(s, 0, -1))
        away = mu[:, block] - mean[block]
        mahalanobis = p.strength * np.einsum("ni,nij,nj->n", away, np.linalg.inv(s), away)
        total += -0.5 * (mahalanobis + p.dim * np.log(2 * np.pi / p.strength) + np.linalg.slogdet(s)[1])
    return total


@each_dim
def test_the_expected_precision_is_that_of_drawn_covariances(dim):
    q = two(dim)
    expected = np.diag(flat(niw.expected_precision(q)))
    np.testing.assert_allclose(np.diag(expected), q.dof / flat(q.scale), rtol=1e-6)  # eq. (52)
    precisions = np.linalg.inv(draw_covariances(q)).reshape(NUM, -1)
    if dim == 1:
        precisions, expected = precisions[:, [0, 3]], np.diag(expected)
    assert_mean(precisions, expected.ravel())


@each_dim
def test_the_expected_log_determinant_is_that_of_drawn_covariances(dim):
    q = two(dim)
    assert_mean(np.linalg.slogdet(draw_covariances(q))[1], float(niw.expected_log_det(q)))


@each_dim
def test_the_mode_has_the_highest_density_of_all_covariances(dim):
    q = two(dim)
    mode = flat(niw.mode_variance(q))
    np.testing.assert_allclose(mode, flat(q.scale) / (q.dof + dim + 1), rtol=1e-6)  # eq. (34)
    density = stats.invwishart(q.dof, np.diag(flat(q.scale))[:dim, :dim])
    best = density.logpdf(np.diag(mode)[:dim, :dim])
    for factor in (0.99, 1.01):
        assert density.logpdf(factor * np.diag(mode)[:dim, :dim]) < best


@each_dim
def test_the_divergence_with_its_constants_is_that_of_draws(dim):
    q, p = two(dim), two(dim, mean=(0.1, 0.2), scale=(1.0, 1.5), strength=1.0, dof=4.0)
    mu, sigma = draw_both(q)
    assert_mean(log_prob(q, mu, sigma) - log_prob(p, mu, sigma), float(niw.kl(q, p)))


@each_dim
def test_the_divergence_of_equals_is_zero(dim):
    assert abs(float(niw.kl(two(dim), two(dim)))) < 1e-5


@pytest.mark.parametrize("changed", [{"mean": (0.5, -1.1)}, {"scale": (3.0, 0.8)}, {"strength": 3.0}, {"dof": 7.0}])
@each_dim
def test_the_divergence_of_different_ones_is_positive(dim, changed):
    assert float(niw.kl(two(dim, **changed), two(dim))) > 1e-3
    assert float(niw.kl(two(dim), two(dim, **changed))) > 1e-3


def test_the_divergence_of_many_weights_keeps_its_digits():
    # Terms of the order of 10¹⁰, of which less than 10⁵ remains: lost, were they summed as they are written.
    num, nu = 100_000, 100_002.0
    scale = np.linspace(0.999, 1.003, num).astype(np.float32)
    p = NIW(np.zeros(num, np.float32), np.ones(num, np.float32), 1.0, nu, num)
    ratio = 1 / scale.astype(np.float64)
    expected = 0.5 * nu * np.sum(ratio - 1 - np.log(ratio))
    assert expected < 1e5
    assert float(niw.kl(p, p)) == 0
    assert float(niw.kl(NIW(p.mean, scale, 1.0, nu, num), p)) == pytest.approx(expected, rel=1e-3)


def client_divergence(mu, sigma, m, width):
    """KL(N(m, width²) ‖ N(μ, Σ)), for every draw of (μ, Σ)."""
    precision, away = np.linalg.inv(sigma), m - mu
    trace = width**2 * np.trace(precision, axis1=1, axis2=2)
    mahalanobis = np.einsum("ni,nij,nj->n", away, precision, away)
    return 0.5 * (trace + mahalanobis - len(m) + np.linalg.slogdet(sigma)[1] - 2 * len(m) * np.log(width))


@each_dim
def test_the_expected_divergence_of_a_client_is_that_of_draws(dim):
    q, m, width = two(dim), np.array([1.0, 0.3]), 0.2
    value = niw.expected_divergence(q, tree(*m), {"a": np.float32(1), "b": np.float32(1)}, width)
    assert_mean(client_divergence(*draw_both(q), m, width), float(value))


@each_dim
def test_the_expected_divergence_of_a_mixture_is_the_mixture_of_divergences(dim):
    q, m, width, p = two(dim), np.array([1.0, 0.3]), 0.2, np.array([1.0, 0.75])
    value = niw.expected_divergence(q, tree(*m), {"a": np.float32(p[0]), "b": np.float32(p[1])}, width)
    mu, sigma = draw_both(q)
    there, gone = client_divergence(mu, sigma, m, width), client_divergence(mu, sigma, np.array([1.0, 0.0]), width)
    assert_mean(p[1] * there + (1 - p[1]) * gone, float(value))


@pytest.mark.parametrize("keep", [0.5, 0.999, 1.0])
def test_the_deviation_is_the_rho_of_the_paper(keep):
    draw = np.random.default_rng(0)
    m, centre = draw.normal(size=(2, 50)).astype(np.float32)
    rho = keep * m.astype(float) ** 2 - 2 * keep * m.astype(float) * centre + centre.astype(float) ** 2
    np.testing.assert_allclose(niw._deviation(m, centre, np.float32(keep)), rho, atol=1e-5)
    # Around a large value the printed form would cancel; the deviation of equals is exactly what dropout adds.
    np.testing.assert_array_equal(niw._deviation(np.float32(1e4), np.float32(1e4), np.float32(1)), 0)


def observed(thetas, keep=1.0, width=0.0, count=None):
    """The moments of rows of weights, in one leaf."""
    mean = np.mean(thetas, axis=0)
    spread = np.mean((thetas - mean) ** 2, axis=0)
    return Observed(mean, spread, np.asarray(keep, mean.dtype), width, count or len(thetas))


@pytest.mark.parametrize("dim", [1, 3])
def test_exact_observations_give_the_conjugate_posterior(dim):
    thetas = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    prior_mean, prior_scale, nu, lam, num = np.array([0.5, 0.0, -1.0]), np.array([0.5, 1.0, 2.0]), dim + 2.0, 1.0, 5
    prior = NIW(np.float32(prior_mean), np.float32(prior_scale), lam, nu, dim)
    seen = observed(thetas)
    found = niw.update(prior, seen, nu + num, lam + num, niw.shrunk_mean(prior, seen), learn_scale=False)

    mean = np.mean(thetas.astype(float), axis=0)
    scatter = np.sum((thetas - mean) ** 2, axis=0) + lam * num / (lam + num) * (mean - prior_mean) ** 2
    np.testing.assert_allclose(found.mean, (lam * prior_mean + num * mean) / (lam + num), rtol=1e-5)
    np.testing.assert_allclose(found.scale, prior_scale + scatter, rtol=1e-5)
    np.testing.assert_allclose(niw.expected_precision(found), (nu + num) / (prior_scale + scatter), rtol=1e-5)


@pytest.mark.parametrize("factor", [0.8, 1.25])
@each_dim
def test_the_marginal_scale_of_a_leaf_maximises_the_bound(dim, factor):
    weights = {"a": np.float32([0.3, -0.1]), "b": np.zeros((2, 1), np.float32)}
    scale = {"a": np.float32([0.5, 3.0]), "b": np.float32([[0.01], [0.02]])}
    q = NIW(weights, scale, 9.0, 10.0 + dim, 4 if dim > 1 else 1)
    best = niw.marginal_scale(q, q.dim + 2.0)

    def divergence(scale):
        return float(niw.kl(q, NIW(weights, scale, 1.0, q.dim + 2.0, q.dim)))

    for name in best:
        assert divergence(best) < divergence({**best, name: factor * best[name]}) - 1e-3


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("count", [2, 1000])
def test_a_learned_scale_is_the_one_that_its_own_result_asks_for(size, count):
    thetas = math.sqrt(size) * np.random.default_rng(1).normal(size=(7, 40)).astype(np.float32)
    prior = NIW(np.zeros(40, np.float32), np.ones(40, np.float32), 1.0, 3.0, 1)
    seen = observed(thetas, keep=0.75, width=1e-4, count=count)
    found = niw.update(prior, seen, count + 3.0, count + 1.0, niw.shrunk_mean(prior, seen), learn_scale=True)
    asked = niw.marginal_scale(found, prior.dof)
    fixed = niw.update(
        NIW(prior.mean, asked, 1.0, 3.0, 1), seen, found.dof, found.strength, found.mean, learn_scale=False
    )
    np.testing.assert_allclose(found.scale, fixed.scale, rtol=1e-4)


def test_no_scatter_at_all_leaves_a_learned_scale_finite_and_positive():
    prior = NIW(np.zeros(3, np.float32), np.ones(3, np.float32), 1.0, 3.0, 1)
    found = niw.update(prior, observed(np.zeros((4, 3), np.float32)), 9.0, 7.0, prior.mean, learn_scale=True)
    assert np.all(np.isfinite(found.scale))
    assert np.all(np.asarray(found.scale) > 0)


@partial(jax.jit, static_argnames="num")
def _draws_of(q, seed, num):
    t = niw.predictive(q)
    return jax.vmap(lambda key: niw.draw(key, t))(jax.random.split(jax.random.key(seed), num))


def draws_of(q, seed=0):
    """Draws of the predictive, (draws, weights)."""
    leaves = jax.tree.leaves(_draws_of(q, seed, NUM))
    return np.concatenate([np.reshape(leaf, (NUM, -1)) for leaf in leaves], axis=1)


@cache
def draws_of_three(dim):
    return draws_of(three(dim, dof=dim + 2.0))


def three(dim, dof):
    """A normal-inverse-Wishart of `dim` weights in as many leaves, or of three independent ones."""
    num = max(dim, 1)
    names, scale = [f"w{j}" for j in range(num)], [3.0, 0.7, 1.2]
    mean = {name: np.float32(0.5 * j) for j, name in enumerate(names)}
    return NIW(mean, {name: np.float32(scale[j]) for j, name in enumerate(names)}, 2.0, dof, dim)


@pytest.mark.parametrize("dim", [1, 3])
def test_the_predictive_is_that_of_drawn_means_and_covariances(dim):
    q = three(dim, dof=dim + 2.0)
    found = draws_of_three(dim)
    mu, sigma = draw_both(q)
    noise = np.random.default_rng(5).normal(size=mu.shape)
    theta = mu + np.einsum("nij,nj->ni", np.linalg.cholesky(sigma), noise)
    for j in range(dim):
        assert stats.ks_2samp(found[:, j], theta[:, j]).pvalue > 1e-4


@pytest.mark.parametrize("dim", [1, 3])
def test_a_coordinate_of_the_predictive_is_a_student_t(dim):
    q = three(dim, dof=dim + 2.0)
    found, degrees = draws_of_three(dim), q.dof - dim + 1
    for j in range(dim):
        width = math.sqrt((q.strength + 1) * flat(q.scale)[j] / (q.strength * degrees))  # eq. (42)
        right = stats.t(degrees, flat(q.mean)[j], width)
        assert stats.kstest(found[:, j], right.cdf).pvalue > 1e-4
        # The same draws do reject a neighbour: the test has power.
        assert stats.kstest(found[:, j], stats.t(degrees, flat(q.mean)[j], 1.2 * width).cdf).pvalue < 1e-4


def correlation(found, one, other):
    """The correlation of log squares (all moments exist), in standard errors of independent coordinates."""
    logs = np.log(found**2)
    return math.sqrt(len(found)) * np.corrcoef(logs[:, one], logs[:, other])[0, 1]


@pytest.mark.parametrize("size", [(3,), (1, 3)], ids=["leaves", "one leaf"])
def test_a_joint_predictive_shares_one_draw_of_its_width_and_a_factorised_one_does_not(size):
    shapes = [()] * 3 if len(size) == 1 else [size]
    mean = {f"w{j}": np.zeros(shape, np.float32) for j, shape in enumerate(shapes)}
    scale = jax.tree.map(np.ones_like, mean)
    joint, factorised = (draws_of(NIW(mean, scale, 2.0, dim + 2.0, dim), seed=2) for dim in (3, 1))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert correlation(joint, one, other) > 10
        assert abs(correlation(factorised, one, other)) < 4


def test_a_student_t_without_end_to_its_degrees_is_normal():
    t = niw.StudentT(np.float32(1.0), np.float32(2.0), math.inf, True)
    drawn = jax.jit(jax.vmap(lambda key: niw.draw(key, t)))(jax.random.split(jax.random.key(3), NUM))
    assert stats.kstest(drawn, stats.norm(1.0, 2.0).cdf).pvalue > 1e-4


def test_one_weight_is_the_same_joint_and_factorised():
    q = two(1)
    joint = {"a": q.mean["a"]}, {"a": q.scale["a"]}
    assert trees.size(joint[0]) == 1
    # A covariance of size 1 is what both readings come to, so every formula is the scalar one.
    single = NIW(*joint, q.strength, q.dof, trees.size(joint[0]))
    assert float(niw.mode_variance(single)["a"]) == pytest.approx(3.0 / (q.dof + 2), rel=1e-6)
    assert float(niw.expected_log_det(single)) == pytest.approx(
        math.log(3.0) - math.log(2.0) - digamma(q.dof / 2), rel=1e-5
    )
    assert niw.predictive(single).dof == q.dof


@each_dim
def test_nothing_promotes_its_type(dim):
    def values(q, keep, key):
        seen = Observed(q.mean, q.scale, keep, 1e-4, 3)
        centre = niw.shrunk_mean(q, seen)
        fixed, updated = (niw.update(q, seen, q.dof, q.strength, centre, learn) for learn in (False, True))
        numbers = niw.kl(q, updated), niw.expected_divergence(q, q.mean, keep, 1e-4)
        return fixed, updated, numbers, niw.draw(key, niw.predictive(q)), niw.marginal_scale(q, 4.0)

    # Types are known without computing anything.
    with jax.numpy_dtype_promotion("strict"):
        keep = {"a": np.float32(1), "b": np.float32(0.5)}
        found = jax.eval_shape(values, two(dim), keep, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
