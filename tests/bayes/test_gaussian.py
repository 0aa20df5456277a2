"""Mean-field Gaussians: coordinates, divergence and its gradients, moments and draws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import integrate, stats

from priory.bayes import gaussian
from priory.bayes.gaussian import Free, Gaussian
from priory.fed.local import Optimiser

SHAPES = {"bias": (3,), "kernel": (2, 3), "scale": ()}


def tree_of(draw):
    """A tree of float32 arrays, filled by `draw(shape)`."""
    return {name: np.asarray(draw(shape), np.float32) for name, shape in SHAPES.items()}


def some(seed, spread=1.0):
    """A Gaussian of no particular kind, σ around 0.08."""
    draw = np.random.default_rng(seed)
    return Gaussian(
        tree_of(lambda shape: draw.normal(0, 0.1, shape)),
        tree_of(lambda shape: 0.08 * np.exp(spread * draw.normal(0, 0.5, shape))),
    )


def flat(tree):
    """All numbers of a tree in one row, in float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def kl64(q, w):
    """The divergence as the paper prints it, in float64."""
    m, s, m_w, s_w = flat(q.mean), flat(q.sd), flat(w.mean), flat(w.sd)
    return 0.5 * np.sum(np.log(s_w**2 / s**2) + (s**2 + (m - m_w) ** 2) / s_w**2 - 1)


Q, W = some(0), some(1)

# One program each, where an eager call is one for each operation.
of = jax.jit(gaussian.of)
chain = jax.jit(gaussian.chain)
kl = jax.jit(gaussian.kl)
slopes_of_kl = jax.jit(jax.grad(gaussian.kl, argnums=(0, 1)))
kl_gradient = jax.jit(gaussian.kl_gradient)
kl_gradient_of_prior = jax.jit(gaussian.kl_gradient_of_prior)
rho_of = jax.jit(partial(jax.tree.map, gaussian.rho_of))


@partial(jax.jit, static_argnames="num")
def draws(q, seed, num):
    return jax.vmap(lambda key: gaussian.draw(key, q))(jax.random.split(jax.random.key(seed), num))


def one(mean, sd):
    """A Gaussian of one weight."""
    return Gaussian(np.float32(mean), np.float32(sd))


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


# --- coordinates -----------------------------------------------------------------------------------------------------

RHO = np.linspace(-80, 80, 40_001, dtype=np.float32)


def test_softplus_has_seven_digits_from_minus_to_plus_eighty():
    expected = np.logaddexp(0, RHO.astype(np.float64))
    np.testing.assert_allclose(jax.jit(gaussian.softplus)(RHO), expected, rtol=3e-7)


def test_rho_of_inverts_softplus():
    sd = np.logaddexp(0, RHO.astype(np.float64)).astype(np.float32)
    exact = sd.astype(np.float64) + np.log(-np.expm1(-sd.astype(np.float64)))
    # 5e-7 for |ρ| < 1, and as much of |ρ| itself beyond.
    np.testing.assert_allclose(jax.jit(gaussian.rho_of)(sd), exact, rtol=5e-7, atol=5e-7)


def test_around_a_network_all_weights_have_the_same_width():
    free = gaussian.around(Q.mean, -2.5)
    assert free.mean is Q.mean
    np.testing.assert_allclose(flat(of(free).sd), 0.0788897, rtol=1e-5)
    assert jax.tree.map(jnp.shape, of(free).sd) == SHAPES


def test_join_with_the_width_is_the_gaussian():
    free = Free(Q.mean, rho_of(Q.sd))
    joined, whole = gaussian.join(free, jax.jit(gaussian.width)(free)), of(free)
    np.testing.assert_array_equal(flat(joined), flat(whole))
    np.testing.assert_allclose(flat(whole.sd), flat(Q.sd), rtol=1e-6)


def test_chain_is_the_derivative_through_softplus():
    free = Free(Q.mean, tree_of(lambda shape: np.random.default_rng(5).normal(-1, 3, shape)))

    def through(free):
        return gaussian.kl(Gaussian(free.mean, jax.tree.map(jax.nn.softplus, free.rho)), W)

    found = chain(free, slopes_of_kl(of(free), W)[0])
    np.testing.assert_allclose(flat(found), flat(jax.jit(jax.grad(through))(free)), rtol=2e-5)


# --- divergence ------------------------------------------------------------------------------------------------------


def test_the_divergence_is_the_printed_one():
    assert float(kl(Q, W)) == pytest.approx(kl64(Q, W), rel=1e-6)


def test_the_divergence_of_one_weight_is_the_integral_of_its_definition():
    q, w = stats.norm(0.3, 0.5), stats.norm(-0.2, 0.8)
    expected, _ = integrate.quad(lambda z: q.pdf(z) * (q.logpdf(z) - w.logpdf(z)), -6, 6)
    assert float(kl(one(0.3, 0.5), one(-0.2, 0.8))) == pytest.approx(expected, rel=1e-6)


def test_the_divergence_is_the_mean_log_ratio_of_draws():
    num = 20_000
    theta = draws(Q, 0, num)
    rows = np.concatenate([np.reshape(leaf, (num, -1)) for leaf in jax.tree.leaves(theta)], axis=1)
    ratio = stats.norm.logpdf(rows, flat(Q.mean), flat(Q.sd)) - stats.norm.logpdf(rows, flat(W.mean), flat(W.sd))
    totals = ratio.sum(axis=1)
    error = totals.std() / np.sqrt(num)
    assert error < 0.01 * kl64(Q, W)
    assert abs(totals.mean() - float(kl(Q, W))) < 5 * error


def test_the_divergence_is_exactly_zero_at_equality():
    for seed in range(5):
        assert float(kl(some(seed), some(seed))) == 0.0


@pytest.mark.parametrize("log_nearness", [-6, -5, -4, -3, -2, -1])
def test_the_divergence_keeps_its_digits_where_q_is_near_w(log_nearness):
    draw, nearness = np.random.default_rng(3), 10.0**log_nearness
    near = Gaussian(W.mean, jax.tree.map(lambda s: s * np.float32(1 + nearness * draw.normal()), W.sd))
    # In long double, as x + ½x² − log(1 + x): the printed form has lost its digits here even in float64.
    excess = flat(near.sd).astype(np.longdouble) / flat(W.sd).astype(np.longdouble) - 1
    expected = float(np.sum(excess + 0.5 * excess**2 - np.log1p(excess)))
    assert float(kl(near, W)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ratio", [0.01, 0.4999, 0.5, 0.5001, 1.4999, 1.5, 1.5001, 50.0])
def test_the_divergence_is_right_on_both_sides_of_where_its_series_ends(ratio):
    q, w = one(1, ratio), one(1, 1)
    assert float(kl(q, w)) == pytest.approx(kl64(q, w), rel=5e-7)


def test_gradients_are_those_of_automatic_differentiation_away_from_equality():
    by_q, by_w = slopes_of_kl(Q, W)
    np.testing.assert_allclose(flat(kl_gradient(Q, W)), flat(by_q), rtol=2e-5)
    np.testing.assert_allclose(flat(kl_gradient_of_prior(Q, W)), flat(by_w), rtol=2e-5)


def test_gradients_have_their_printed_form():
    m, s, m_w, s_w = flat(Q.mean), flat(Q.sd), flat(W.mean), flat(W.sd)
    found = kl_gradient(Q, W), kl_gradient_of_prior(Q, W)
    np.testing.assert_allclose(flat(found[0].mean), (m - m_w) / s_w**2, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(flat(found[0].sd), s / s_w**2 - 1 / s, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(flat(found[1].mean), (m_w - m) / s_w**2, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(flat(found[1].sd), 1 / s_w - (s**2 + (m - m_w) ** 2) / s_w**3, rtol=1e-5, atol=1e-5)


def printed_kl(q, w):
    """½ (log σ_w²/σ² + (σ² + (μ − μ_w)²)/σ_w² − 1), as a program would write it down."""

    def of_leaf(m, s, m_w, s_w):
        ratio = jnp.log(jnp.square(s_w) / jnp.square(s))
        return 0.5 * jnp.sum(ratio + (jnp.square(s) + jnp.square(m - m_w)) / jnp.square(s_w) - 1)

    return sum(jax.tree.leaves(jax.tree.map(of_leaf, q.mean, q.sd, w.mean, w.sd)), jnp.float32(0))


@jax.jit
def after_one_adam_step(free, gradient):
    """The coordinates after a step of Adam along a gradient of the Gaussian there."""
    transform = Optimiser("adam", 0.001).build()
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam promotes
        moves, _ = transform.update(gaussian.chain(free, gradient), transform.init(free), free)
    return jax.tree.map(jnp.add, free, moves)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_adam_from_equality_moves_no_bit(seed):
    free = Free(some(seed).mean, rho_of(some(seed).sd))
    q = of(free)
    for gradient in (kl_gradient(q, q), kl_gradient_of_prior(q, q)):
        np.testing.assert_array_equal(flat(gradient), 0)
        np.testing.assert_array_equal(flat(after_one_adam_step(free, gradient)), flat(free))


def test_a_step_of_adam_along_an_automatic_gradient_leaves_equality():
    free = Free(Q.mean, rho_of(Q.sd))
    q = of(free)
    gradient = jax.jit(jax.grad(printed_kl))(q, q)
    assert 0 < np.abs(flat(gradient)).max() < 1e-5  # rounding, and nothing else
    # A good part of Adam's whole step.
    assert np.abs(flat(after_one_adam_step(free, gradient)) - flat(free)).max() > 0.0005


# --- moments ---------------------------------------------------------------------------------------------------------

MEMBERS = [some(seed) for seed in range(4)]


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@jax.jit
def matched(members, centre):
    """The w that fits all members, by the mean of their moments."""
    means = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *[gaussian.moments(q, centre) for q in members])
    return gaussian.matching(*means, centre)


def mean_kl(free):
    return jnp.mean(jax.vmap(gaussian.kl, in_axes=(0, None))(stacked(MEMBERS), gaussian.of(free)))


@jax.jit
def mean_kl_around(free, step):
    """The mean divergence, its gradient, and the mean divergences a step away in each direction and its opposite."""
    numbers, restore = ravel_pytree(free)
    moves = step * jnp.concatenate([jnp.eye(numbers.size), -jnp.eye(numbers.size)])
    away = jax.vmap(lambda move: mean_kl(restore(numbers + move)))(moves)
    return mean_kl(free), jax.grad(mean_kl)(free), away


@pytest.mark.parametrize("centre", [W.mean, Q.mean], ids=["elsewhere", "at-a-member"])
def test_matching_has_the_mean_and_the_variance_of_the_lemma(centre):
    means = np.stack([flat(q.mean) for q in MEMBERS])
    squares = np.stack([flat(q.sd) for q in MEMBERS]) ** 2 + (means - means.mean(axis=0)) ** 2
    found = matched(MEMBERS, centre)
    np.testing.assert_allclose(flat(found.mean), means.mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(flat(of(found).sd), np.sqrt(squares.mean(axis=0)), rtol=1e-5)


def test_matching_minimises_the_mean_divergence_in_every_direction():
    least, slope, away = mean_kl_around(matched(MEMBERS, W.mean), 0.02)
    np.testing.assert_allclose(flat(slope), 0, atol=2e-4)
    assert away.shape == (2 * len(flat(slope)),)
    assert np.all(np.asarray(away) > least)


def test_matching_one_member_gives_it_back():
    found = of(matched([Q], W.mean))
    np.testing.assert_allclose(flat(found.mean), flat(Q.mean), atol=1e-7)
    np.testing.assert_allclose(flat(found.sd), flat(Q.sd), rtol=1e-5)


def test_moments_around_its_own_mean_are_nothing_and_the_variance():
    offset, square = jax.jit(gaussian.moments)(Q, Q.mean)
    np.testing.assert_array_equal(flat(offset), 0)
    np.testing.assert_allclose(flat(square), flat(Q.sd) ** 2, rtol=1e-6)


def test_matching_stays_finite_where_rounding_leaves_no_variance():
    found = jax.jit(gaussian.matching)(*np.float32([0.1, 0.00999, 0]))
    assert np.isfinite(flat(found)).all()


# --- draws -----------------------------------------------------------------------------------------------------------


def test_draws_have_the_mean_and_the_spread_of_the_gaussian_and_are_independent():
    num = 20_000
    theta = draws(Q, 1, num)
    assert jax.tree.map(lambda leaf: leaf.shape[1:], theta) == SHAPES
    rows = np.concatenate([np.reshape(leaf, (num, -1)) for leaf in jax.tree.leaves(theta)], axis=1).astype(np.float64)
    standard = (rows - flat(Q.mean)) / flat(Q.sd)
    # Standard errors: 1/√n of a mean and of a correlation, 1/√(2n) of a standard deviation.
    np.testing.assert_allclose(standard.mean(axis=0), 0, atol=5 / np.sqrt(num))
    np.testing.assert_allclose(standard.std(axis=0), 1, atol=5 / np.sqrt(2 * num))
    apart = np.corrcoef(standard.T) - np.eye(standard.shape[1])
    np.testing.assert_allclose(apart, 0, atol=5 / np.sqrt(num))
