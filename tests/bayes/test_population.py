"""Populations of random effects: closed forms, an energy against quadrature, and the posterior of (μ, σ).

References are float64 NumPy and SciPy. A Monte-Carlo test allows five standard errors.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from priory.bayes import population
from priory.bayes.population import Energy, HyperPrior, Normal
from priory.core import trees
from priory.core.errors import UsageError
from tests.monte_carlo import assert_mean

EFFECTS = {"a": np.float32([0.5, -1.0]), "b": np.float32([[2.0]])}
MEAN = {"a": np.float32([0.0, 1.0]), "b": np.float32([[1.5]])}
PRIORS = ("flat", "gamma:2,0.5", "half-normal:1.5")

each_shape = pytest.mark.parametrize("shape", ["diagonal", "scalar"])
each_prior = pytest.mark.parametrize("prior", PRIORS)


# One program each, where an eager call is one for each operation.
log_prob = jax.jit(population.log_prob)
score_of_normal = jax.jit(jax.grad(population.log_prob))
score = jax.jit(population.score)
sd_like = jax.jit(population.sd)
project = jax.jit(population.project)
energy_around = jax.jit(population.energy_around, static_argnums=1)
energies = jax.jit(jax.vmap(population.energy, in_axes=(None, 0)))
slopes_of_energy = jax.jit(jax.vmap(jax.grad(population.energy), in_axes=(None, 0)))
log_density = jax.jit(HyperPrior.log_density, static_argnums=0)


@partial(jax.jit, static_argnames="num")
def draws_of(beta, seed, num):
    return jax.vmap(lambda key: population.draw(beta, key))(jax.random.split(jax.random.key(seed), num))


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def normal(shape):
    """Effects around MEAN, with three widths or one."""
    sd = {"a": np.float32([0.5, 2.0]), "b": np.float32([[1.2]])} if shape == "diagonal" else np.float32(0.7)
    return Normal(MEAN, jax.tree.map(np.log, sd))


@each_shape
def test_the_density_of_a_normal_has_its_constants(shape):
    beta = normal(shape)
    widths = flat(sd_like(beta, EFFECTS))
    expected = np.sum(stats.norm(flat(MEAN), widths).logpdf(flat(EFFECTS)))
    np.testing.assert_allclose(log_prob(beta, EFFECTS), expected, rtol=1e-6)


@each_shape
def test_the_score_of_a_normal_is_the_closed_form(shape):
    beta = normal(shape)
    found = score_of_normal(beta, EFFECTS)
    away, widths = flat(EFFECTS) - flat(MEAN), flat(sd_like(beta, EFFECTS))
    each = -1 + away**2 / widths**2
    np.testing.assert_allclose(flat(found.mean), away / widths**2, rtol=1e-5)
    np.testing.assert_allclose(flat(found.log_sd), each if shape == "diagonal" else [np.sum(each)], rtol=1e-5)


@each_shape
def test_draws_have_the_mean_and_the_widths_of_their_population(shape):
    beta = normal(shape)
    draws = draws_of(beta, 0, 20_000)
    draws = np.concatenate([np.asarray(leaf).reshape(20_000, -1) for leaf in jax.tree.leaves(draws)], axis=1)
    assert_mean(draws, flat(MEAN))
    away = draws - flat(MEAN)
    covariance = np.diag(flat(sd_like(beta, MEAN)) ** 2)
    assert_mean(away[:, :, None] * away[:, None, :], covariance)


@each_shape
def test_a_population_around_a_mean_has_the_width_asked_for(shape):
    beta = population.normal_around(MEAN, 0.3, shape)
    np.testing.assert_allclose(flat(sd_like(beta, MEAN)), 0.3, rtol=1e-6)
    assert trees.size(population.sd_of(beta)) == (3 if shape == "diagonal" else 1)


@each_shape
def test_projection_clips_widths_to_the_box_and_counts_those_at_its_bottom(shape):
    beta, collapsed = project(normal(shape), 0.7000001, 1.5)
    expected = [0.7, 1.5, 1.2] if shape == "diagonal" else [0.7] * 3
    np.testing.assert_allclose(flat(sd_like(beta, MEAN)), expected, rtol=1e-6)
    assert (collapsed, collapsed.dtype) == (1, jnp.float32)
    assert project(beta, 0.1, math.inf)[1] == 0


def test_projection_of_an_energy_is_that_of_its_base():
    energy = energy_around(normal("diagonal"), 4, jax.random.key(0))
    projected, collapsed = project(energy, 0.6, 1.5)
    assert collapsed == 1
    np.testing.assert_allclose(flat(sd_like(projected, MEAN)), [0.6, 1.5, 1.2], rtol=1e-6)


# An energy


@cache
def bent():
    """One coordinate and two hidden units that matter."""
    w1 = 2 * np.asarray(jax.random.normal(jax.random.key(0), (1, 2)))
    base = Normal(np.float32([0.4]), np.log(np.float32([0.9])))
    return Energy(base, w1, np.float32([0.3, -0.8]), np.float32([1.5, -0.7]))


GRID = np.linspace(-9.0, 9.0, 4001, dtype=np.float32)[:, None]


@jax.jit
def log_density_on_grid(beta):
    """log p(z | β) on GRID, normalised by quadrature."""
    unnormalised = jax.vmap(lambda z: population.log_prob(beta, z))(GRID)
    return unnormalised - jax.nn.logsumexp(unnormalised) - np.log(GRID[1, 0] - GRID[0, 0])


def draw_from_grid(beta, num, seed=0):
    """Draws of a one-dimensional population, exact to the spacing of GRID."""
    weight = np.exp(np.asarray(log_density_on_grid(beta), np.float64))
    return GRID[np.random.default_rng(seed).choice(len(GRID), size=num, p=weight / np.sum(weight))]


def test_an_energy_begins_as_its_base():
    for shape in ("diagonal", "scalar"):
        base = normal(shape)
        energy = energy_around(base, 5, jax.random.key(0))
        ratio = [float(log_prob(energy, z)) - float(log_prob(base, z)) for z in (EFFECTS, MEAN)]
        np.testing.assert_allclose(*ratio, rtol=1e-6)
        assert np.std(energy.w1) > 0.1  # or else w2 would never have a gradient


def test_the_network_bends_an_energy_by_no_more_than_its_last_weights():
    beta = bent()
    plain = Energy(beta.base, beta.w1, beta.b1, np.zeros(2, np.float32))
    near, far = GRID, np.linspace(-1e3, 1e3, 101, dtype=np.float32)[:10, None]
    bent_energy, plain_energy = (np.asarray(energies(one, np.concatenate([near, far]))) for one in (beta, plain))
    bend = (bent_energy - plain_energy)[: len(near)]
    assert 0.5 < np.max(np.abs(bend)) <= np.sum(np.abs(beta.w2)) + 1e-4
    np.testing.assert_allclose((bent_energy / plain_energy)[len(near) :], 1, atol=1e-4)


def test_the_score_of_an_energy_is_the_gradient_of_its_normalised_density():
    beta, place, num = bent(), 2345, 20_000
    exact = flat(jax.jit(jax.grad(lambda beta: log_density_on_grid(beta)[place]))(beta))
    draws = draw_from_grid(beta, num)
    found = flat(score(beta, GRID[place], draws))
    slopes = slopes_of_energy(beta, np.concatenate([draws, GRID[place][None]]))
    slopes = np.concatenate([np.asarray(leaf).reshape(num + 1, -1) for leaf in jax.tree.leaves(slopes)], axis=1)
    error = np.std(slopes[:num], axis=0) / math.sqrt(num)
    assert np.all(error > 0)
    assert np.all(np.abs(found - exact) < 5 * error)
    # The draws matter: without them every part but one would be off by many standard errors.
    assert np.sum(np.abs(-slopes[num] - exact) > 10 * error) >= 5


def test_the_score_of_an_energy_without_a_network_is_that_of_a_normal():
    base, num = normal("diagonal"), 20_000
    energy = energy_around(base, 3, jax.random.key(0))
    found, exact = score(energy, EFFECTS, draws_of(base, 1, num)).base, score_of_normal(base, EFFECTS)
    # Standard deviations of ∂E/∂μ = (z − μ)/σ² and of ∂E/∂log σ = (z − μ)²/σ², a χ² with one degree of freedom.
    widths = flat(sd_like(base, MEAN))
    assert np.all(np.abs(flat(found.mean) - flat(exact.mean)) < 5 / widths / math.sqrt(num))
    assert np.all(np.abs(flat(found.log_sd) - flat(exact.log_sd)) < 5 * math.sqrt(2 / num))


# Priors of standard deviations


@pytest.mark.parametrize(
    ("text", "density"),
    [
        ("gamma:2,0.1", stats.gamma(2, scale=10)),
        ("gamma:3.5,2", stats.gamma(3.5, scale=0.5)),
        ("half-normal:0.4", stats.halfnorm(scale=0.4)),
    ],
)
def test_a_prior_is_a_normalised_density_in_the_standard_deviation(text, density):
    sd = {"a": np.float32([0.3, 2.0]), "b": np.float32(0.01)}
    expected = np.sum(density.logpdf(flat(sd)))
    np.testing.assert_allclose(log_density(population.parse(text), sd), expected, rtol=1e-5)


def test_no_prior_weighs_nothing():
    assert log_density(population.parse("flat"), EFFECTS) == 0


def test_one_text_gives_one_prior():
    assert hash(population.parse("gamma:2,0.1")) == hash(population.parse("gamma:2.0,1e-1"))
    assert population.parse("gamma:2,0.1") != population.parse("gamma:2,0.2")


MALFORMED = """gamma gamma: gamma:2 gamma:2,0 gamma:-1,1 gamma:2,x gamma:2,nan gamma:2,inf gamma:2,0.1, normal:1
    half-normal half-normal: half-normal:1,2 half-normal:0 flat: flat:1"""


@pytest.mark.parametrize("text", ["", *MALFORMED.split()])
def test_a_text_that_names_no_prior_is_refused_with_the_remedy(text):
    with pytest.raises(UsageError, match="write gamma:SHAPE,RATE") as error:
        population.parse(text)
    assert repr(text) in str(error.value)


def test_the_penalised_width_of_one_effect_is_the_root_of_its_equation():
    # One effect at distance r from μ under Gamma(2, λ): the posterior −log σ − r²/2σ² + log σ − λσ has its mode where
    # r²/σ³ = λ; without a prior it is at r.
    away, rate = 0.8, 0.1
    hyper, widths = population.parse(f"gamma:2,{rate}"), np.linspace(0.5, 3.0, 25_001, dtype=np.float32)

    def posterior(sd):
        return population.log_prob(Normal(jnp.float32(0), jnp.log(sd)), jnp.float32(away)) + hyper.log_density(sd)

    mode = (away**2 / rate) ** (1 / 3)
    np.testing.assert_allclose(widths[np.argmax(jax.jit(jax.vmap(posterior))(widths))], mode, atol=5e-3)
    assert abs(jax.jit(jax.grad(posterior))(np.float32(mode))) < 1e-4


def test_a_gamma_of_shape_two_keeps_the_width_of_equal_effects_off_zero_only_for_one():
    # Vanishing like σ it balances one σ⁻¹ of the likelihood, and the pull of more effects wins as it should.
    hyper = population.parse("gamma:2,0.0001")

    @jax.jit
    def slope(sd, num):
        return jax.grad(lambda sd: -num * jnp.log(sd) + hyper.log_density(sd))(sd)

    assert abs(slope(1e-3, 1)) < 1e-2
    assert slope(1e-3, 2) < -100


# The posterior of μ and σ


def statistics(z, centre):
    """What `sample_normal_given_effects` asks for, of effects (num, d) as one vector, and of a shared σ."""
    offset, square = np.sum(z - centre, axis=0), np.sum((z - centre) ** 2, axis=0)
    return np.float32(centre), np.float32(offset), np.float32(square)


def posterior_draws(seed, centre, offset, square, num, hyper, bounds=population.ANY):
    """5000 draws of β for `num` effects with these statistics; bounds are always given, so that programs are shared."""
    return _posterior_draws(seed, centre, offset, square, num, hyper, bounds)


@partial(jax.jit, static_argnames="hyper")
def _posterior_draws(seed, centre, offset, square, num, hyper, bounds):
    def one(key):
        return population.sample_normal_given_effects(key, centre, offset, square, num, hyper, bounds)

    return jax.vmap(one)(jax.random.split(jax.random.key(seed), 5000))


def quadrature(scatter, dof, prior, low=1e-6, high=1e6):
    """E σ, Var σ, E log σ, Var log σ and E σ² for a density σ^{−dof} exp(−S/2σ²) p(σ) between two bounds."""
    log_sd = np.linspace(math.log(low), math.log(high), 200_001)
    sd = np.exp(log_sd)
    names = {"gamma": lambda a, r: (a - 1) * log_sd - r * sd, "half-normal": lambda s: -0.5 * (sd / s) ** 2}
    kind, _, numbers = prior.partition(":")
    log_prior = names[kind](*map(float, numbers.split(","))) if numbers else 0.0
    log_density = -dof * log_sd - scatter / 2 / sd**2 + log_prior + log_sd
    weight = np.exp(log_density - np.max(log_density))
    weight /= np.sum(weight)
    mean, log_mean = weight @ sd, weight @ log_sd
    return mean, weight @ (sd - mean) ** 2, log_mean, weight @ (log_sd - log_mean) ** 2, weight @ sd**2


def assert_variance(draws, mean, variance):
    assert_mean((draws - mean) ** 2, variance)


@each_prior
@pytest.mark.parametrize("num", [6, 3000])
def test_draws_of_each_mean_and_width_follow_their_posterior(num, prior):
    z = np.random.default_rng(0).normal([3.0, -1.0], [0.2, 2.0], size=(num, 2))
    drawn = posterior_draws(1, *statistics(z, np.array([2.9, -1.1])), num, population.parse(prior))
    mu, log_sd = np.asarray(drawn.mean, np.float64), np.asarray(drawn.log_sd, np.float64)
    for j in range(2):
        scatter = np.sum((z[:, j] - np.mean(z[:, j])) ** 2)
        _, _, log_mean, log_variance, square_mean = quadrature(scatter, num - 1, prior)
        assert_mean(log_sd[:, j], log_mean)
        assert_variance(log_sd[:, j], log_mean, log_variance)
        # μ is a scale mixture around z̄ and, given σ, exactly normal.
        assert_mean(mu[:, j], np.mean(z[:, j]))
        assert_variance(mu[:, j], np.mean(z[:, j]), square_mean / num)
        standardised = (mu[:, j] - np.mean(z[:, j])) / np.exp(log_sd[:, j]) * math.sqrt(num)
        assert stats.kstest(standardised, "norm").pvalue > 1e-4


def test_without_a_prior_the_variance_is_inverse_gamma():
    num, z = 8, np.random.default_rng(1).normal(size=(8, 2))
    drawn = posterior_draws(0, *statistics(z, np.zeros(2)), num, population.parse("flat"))
    log_sd = np.asarray(drawn.log_sd, np.float64)
    for j in range(2):
        # σ^{−(b−1)} in σ is (σ²)^{−b/2} in σ².
        exact = stats.invgamma(num / 2 - 1, scale=np.sum((z[:, j] - np.mean(z[:, j])) ** 2) / 2)
        assert stats.kstest(np.exp(2 * log_sd[:, j]), exact.cdf).pvalue > 1e-4


@each_prior
def test_draws_of_a_shared_width_follow_its_posterior(prior):
    num, size = 4, 3
    z = np.random.default_rng(2).normal(1.0, 0.5, size=(num, size))
    centre, offset, square = statistics(z, np.full(size, 0.8))
    drawn = posterior_draws(1, centre, offset, np.sum(square), num, population.parse(prior))
    scatter = np.sum((z - np.mean(z, axis=0)) ** 2)
    mean, variance, _, _, square_mean = quadrature(scatter, (num - 1) * size, prior)
    sd = np.exp(np.asarray(drawn.log_sd, np.float64))
    assert sd.shape == (5000,)
    assert_mean(sd, mean)
    assert_variance(sd, mean, variance)
    assert_mean((np.asarray(drawn.mean, np.float64) - np.mean(z, axis=0)) ** 2, square_mean / num)


@jax.jit
def told_and_known(beta):
    """One draw of β for 7 effects, by their mean score and by their statistics."""
    num, hyper = 7, population.parse("gamma:2,0.1")
    z = draws_of(beta, 0, num)
    scores = jax.vmap(jax.grad(population.log_prob), in_axes=(None, 0))(beta, z)
    score = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), scores)
    away = jax.tree.map(lambda x, m: x - m[None], z, MEAN)
    offset, square = (jax.tree.map(lambda x, p=p: jnp.sum(x**p, axis=0), away) for p in (1, 2))
    if not isinstance(beta.log_sd, dict):  # one width for all
        square = sum(map(jnp.sum, jax.tree.leaves(square)))
    told = population.draw_given_score(jax.random.key(5), beta, score, num, hyper)
    return told, population.sample_normal_given_effects(jax.random.key(5), MEAN, offset, square, num, hyper)


@each_shape
def test_the_mean_score_of_the_effects_tells_all_that_the_posterior_needs(shape):
    told, known = told_and_known(normal(shape))
    assert jax.tree.structure(told) == jax.tree.structure(known) == jax.tree.structure(normal(shape))
    np.testing.assert_allclose(flat(told), flat(known), rtol=1e-4, atol=1e-5)


def test_effects_that_are_all_alike_give_widths_within_the_bounds():
    zero, hyper = np.zeros(2, np.float32), population.parse("gamma:2,0.5")
    drawn = posterior_draws(0, np.ones(2, np.float32), zero, zero, 5, hyper, bounds=(0.01, 10.0))
    sd = np.exp(np.asarray(drawn.log_sd, np.float64))
    assert np.all((sd >= 0.01 * (1 - 1e-5)) & (sd <= 10))
    assert_mean(sd[:, 0], quadrature(0.0, 4, "gamma:2,0.5", 0.01, 10.0)[0])
    assert np.all(np.isfinite(drawn.mean))
