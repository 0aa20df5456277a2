"""Populations of random effects: closed forms, an energy against quadrature, and the posterior of (μ, σ).

References are float64 NumPy and SciPy. A Monte-Carlo test allows five standard errors.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from priory.bayes import population
from priory.bayes.population import Energy, Normal
from priory.core import trees
from priory.core.errors import UsageError
from tests.monte_carlo import assert_mean

EFFECTS = {"a": jnp.array([0.5, -1.0]), "b": jnp.array([[2.0]])}
MEAN = {"a": jnp.array([0.0, 1.0]), "b": jnp.array([[1.5]])}
PRIORS = ("flat", "gamma:2,0.5", "half-normal:1.5")

each_shape = pytest.mark.parametrize("shape", ["diagonal", "scalar"])
each_prior = pytest.mark.parametrize("prior", PRIORS)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def normal(shape):
    """Effects around MEAN, with three widths or one."""
    sd = {"a": jnp.array([0.5, 2.0]), "b": jnp.array([[1.2]])} if shape == "diagonal" else jnp.float32(0.7)
    return Normal(MEAN, jax.tree.map(jnp.log, sd))


@each_shape
def test_the_density_of_a_normal_has_its_constants(shape):
    beta = normal(shape)
    widths = flat(population.sd(beta, EFFECTS))
    expected = np.sum(stats.norm(flat(MEAN), widths).logpdf(flat(EFFECTS)))
    np.testing.assert_allclose(population.log_prob(beta, EFFECTS), expected, rtol=1e-6)


@each_shape
def test_the_score_of_a_normal_is_the_closed_form(shape):
    beta = normal(shape)
    score = jax.grad(population.log_prob)(beta, EFFECTS)
    away, widths = flat(EFFECTS) - flat(MEAN), flat(population.sd(beta, EFFECTS))
    each = -1 + away**2 / widths**2
    np.testing.assert_allclose(flat(score.mean), away / widths**2, rtol=1e-5)
    np.testing.assert_allclose(flat(score.log_sd), each if shape == "diagonal" else [np.sum(each)], rtol=1e-5)


@each_shape
def test_draws_have_the_mean_and_the_widths_of_their_population(shape):
    beta = normal(shape)
    draws = jax.vmap(lambda key: population.draw(beta, key))(jax.random.split(jax.random.key(0), 20_000))
    draws = np.concatenate([np.asarray(leaf).reshape(20_000, -1) for leaf in jax.tree.leaves(draws)], axis=1)
    assert_mean(draws, flat(MEAN))
    away = draws - flat(MEAN)
    covariance = np.diag(flat(population.sd(beta, MEAN)) ** 2)
    assert_mean(away[:, :, None] * away[:, None, :], covariance)


@each_shape
def test_a_population_around_a_mean_has_the_width_asked_for(shape):
    beta = population.normal_around(MEAN, 0.3, shape)
    np.testing.assert_allclose(flat(population.sd(beta, MEAN)), 0.3, rtol=1e-6)
    assert trees.size(population.sd_of(beta)) == (3 if shape == "diagonal" else 1)


@each_shape
def test_projection_clips_widths_to_the_box_and_counts_those_at_its_bottom(shape):
    beta, collapsed = population.project(normal(shape), 0.7000001, 1.5)
    expected = [0.7, 1.5, 1.2] if shape == "diagonal" else [0.7] * 3
    np.testing.assert_allclose(flat(population.sd(beta, MEAN)), expected, rtol=1e-6)
    assert (collapsed, collapsed.dtype) == (1, jnp.float32)
    assert population.project(beta, 0.1)[1] == 0


def test_projection_of_an_energy_is_that_of_its_base():
    energy = population.energy_around(normal("diagonal"), 4, jax.random.key(0))
    projected, collapsed = population.project(energy, 0.6, 1.5)
    assert collapsed == 1
    np.testing.assert_allclose(flat(population.sd(projected, MEAN)), [0.6, 1.5, 1.2], rtol=1e-6)


# An energy


def bent(key=0):
    """One coordinate and two hidden units that matter."""
    w1, b1 = jax.random.normal(jax.random.key(key), (1, 2)) * 2, jnp.array([0.3, -0.8])
    return Energy(Normal(jnp.array([0.4]), jnp.log(jnp.array([0.9]))), w1, b1, jnp.array([1.5, -0.7]))


GRID = jnp.linspace(-9.0, 9.0, 4001)[:, None]


def log_density_on_grid(beta):
    """log p(z | β) on GRID, normalised by quadrature."""
    unnormalised = jax.vmap(lambda z: population.log_prob(beta, z))(GRID)
    return unnormalised - jax.nn.logsumexp(unnormalised) - jnp.log(GRID[1, 0] - GRID[0, 0])


def draw_from_grid(beta, num, seed=0):
    """Draws of a one-dimensional population, exact to the spacing of GRID."""
    weight = np.exp(np.asarray(log_density_on_grid(beta), np.float64))
    return GRID[np.random.default_rng(seed).choice(len(GRID), size=num, p=weight / np.sum(weight))]


def test_an_energy_begins_as_its_base():
    for shape in ("diagonal", "scalar"):
        base = normal(shape)
        energy = population.energy_around(base, 5, jax.random.key(0))
        ratio = [population.log_prob(energy, z) - population.log_prob(base, z) for z in (EFFECTS, MEAN)]
        np.testing.assert_allclose(*ratio, rtol=1e-6)
        assert jnp.std(energy.w1) > 0.1  # or else w2 would never have a gradient


def test_the_network_bends_an_energy_by_no_more_than_its_last_weights():
    beta = bent()
    plain = Energy(beta.base, beta.w1, beta.b1, jnp.zeros(2))
    far = jnp.linspace(-1e3, 1e3, 101)[:, None]
    bend = jax.vmap(lambda z: population.energy(beta, z) - population.energy(plain, z))(GRID)
    assert 0.5 < jnp.max(jnp.abs(bend)) <= jnp.sum(jnp.abs(beta.w2)) + 1e-4
    np.testing.assert_allclose(
        jax.vmap(lambda z: population.energy(beta, z) / population.energy(plain, z))(far[:10]), 1, atol=1e-4
    )


def test_the_score_of_an_energy_is_the_gradient_of_its_normalised_density():
    beta, place, num = bent(), 2345, 20_000
    exact = jax.grad(lambda beta: log_density_on_grid(beta)[place])(beta)
    draws = draw_from_grid(beta, num)
    found = flat(population.score(beta, GRID[place], draws))
    slopes = jax.vmap(jax.grad(population.energy), in_axes=(None, 0))(beta, draws)
    error = np.concatenate([np.std(np.asarray(leaf).reshape(num, -1), axis=0) for leaf in jax.tree.leaves(slopes)])
    error /= math.sqrt(num)
    assert np.all(error > 0)
    assert np.all(np.abs(found - flat(exact)) < 5 * error)
    # The draws matter: without them every part but one would be off by many standard errors.
    assert np.sum(np.abs(-flat(jax.grad(population.energy)(beta, GRID[place])) - flat(exact)) > 10 * error) >= 5


def test_the_score_of_an_energy_without_a_network_is_that_of_a_normal():
    base, num = normal("diagonal"), 20_000
    energy = population.energy_around(base, 3, jax.random.key(0))
    draws = jax.vmap(lambda key: population.draw(base, key))(jax.random.split(jax.random.key(1), num))
    found, exact = population.score(energy, EFFECTS, draws).base, jax.grad(population.log_prob)(base, EFFECTS)
    # Standard deviations of ∂E/∂μ = (z − μ)/σ² and of ∂E/∂log σ = (z − μ)²/σ², a χ² with one degree of freedom.
    widths = flat(population.sd(base, MEAN))
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
    sd = {"a": jnp.array([0.3, 2.0]), "b": jnp.float32(0.01)}
    expected = np.sum(density.logpdf(flat(sd)))
    np.testing.assert_allclose(population.parse(text).log_density(sd), expected, rtol=1e-5)


def test_no_prior_weighs_nothing():
    assert population.parse("flat").log_density(EFFECTS) == 0


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
    hyper, widths = population.parse(f"gamma:2,{rate}"), jnp.linspace(0.5, 3.0, 25_001)

    def posterior(sd):
        return population.log_prob(Normal(jnp.float32(0), jnp.log(sd)), jnp.float32(away)) + hyper.log_density(sd)

    mode = (away**2 / rate) ** (1 / 3)
    np.testing.assert_allclose(widths[jnp.argmax(jax.vmap(posterior)(widths))], mode, atol=5e-3)
    assert abs(jax.grad(posterior)(jnp.float32(mode))) < 1e-4


def test_a_gamma_of_shape_two_keeps_the_width_of_equal_effects_off_zero_only_for_one():
    # Vanishing like σ it balances one σ⁻¹ of the likelihood, and the pull of more effects wins as it should.
    hyper = population.parse("gamma:2,0.0001")

    def slope(sd, num):
        return jax.grad(lambda sd: -num * jnp.log(sd) + hyper.log_density(sd))(jnp.float32(sd))

    assert abs(slope(1e-3, 1)) < 1e-2
    assert slope(1e-3, 2) < -100


# The posterior of μ and σ


def statistics(z, centre):
    """What `sample_normal_given_effects` asks for, of effects (num, d) as one vector, and of a shared σ."""
    offset = jnp.asarray(np.sum(z - centre, axis=0), jnp.float32)
    square = np.sum((z - centre) ** 2, axis=0)
    return jnp.asarray(centre, jnp.float32), offset, jnp.asarray(square, jnp.float32)


def quadrature(scatter, dof, prior, low=1e-6, high=1e6):
    """E σ, Var σ, E log σ, Var log σ and E σ² for a density σ^{−dof} exp(−S/2σ²) p(σ) between two bounds."""
    log_sd = np.linspace(math.log(low), math.log(high), 2_000_001)
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
    centre, offset, square = statistics(z, np.array([2.9, -1.1]))
    hyper, draws = population.parse(prior), 20_000

    def one(key):
        return population.sample_normal_given_effects(key, centre, offset, square, num, hyper)

    drawn = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), draws))
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
    num, z = 8, np.random.default_rng(1).normal(size=(8, 1))
    hyper, args = population.parse("flat"), statistics(z, np.zeros(1))
    sample = jax.vmap(lambda key: population.sample_normal_given_effects(key, *args, num, hyper).log_sd[0])
    log_sd = np.asarray(jax.jit(sample)(jax.random.split(jax.random.key(0), 5000)), np.float64)
    # σ^{−(b−1)} in σ is (σ²)^{−b/2} in σ².
    exact = stats.invgamma(num / 2 - 1, scale=np.sum((z - np.mean(z)) ** 2) / 2)
    assert stats.kstest(np.exp(2 * log_sd), exact.cdf).pvalue > 1e-4


@each_prior
def test_draws_of_a_shared_width_follow_its_posterior(prior):
    num, size = 4, 3
    z = np.random.default_rng(2).normal(1.0, 0.5, size=(num, size))
    centre, offset, square = statistics(z, np.full(size, 0.8))
    hyper = population.parse(prior)

    def one(key):
        return population.sample_normal_given_effects(key, centre, offset, jnp.sum(square), num, hyper)

    drawn = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 20_000))
    scatter = np.sum((z - np.mean(z, axis=0)) ** 2)
    mean, variance, _, _, square_mean = quadrature(scatter, (num - 1) * size, prior)
    sd = np.exp(np.asarray(drawn.log_sd, np.float64))
    assert sd.shape == (20_000,)
    assert_mean(sd, mean)
    assert_variance(sd, mean, variance)
    assert_mean((np.asarray(drawn.mean, np.float64) - np.mean(z, axis=0)) ** 2, square_mean / num)


@each_shape
def test_the_mean_score_of_the_effects_tells_all_that_the_posterior_needs(shape):
    beta, num, hyper = normal(shape), 7, population.parse("gamma:2,0.1")
    draw = jax.vmap(lambda key: population.draw(beta, key))
    z = draw(jax.random.split(jax.random.key(0), num))
    scores = jax.vmap(jax.grad(population.log_prob), in_axes=(None, 0))(beta, z)
    score = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), scores)
    away = jax.tree.map(lambda x, m: x - m[None], z, MEAN)
    offset, square = (jax.tree.map(lambda x, p=p: jnp.sum(x**p, axis=0), away) for p in (1, 2))
    if shape == "scalar":
        square = sum(map(jnp.sum, jax.tree.leaves(square)))
    told = population.draw_given_score(jax.random.key(5), beta, score, num, hyper)
    known = population.sample_normal_given_effects(jax.random.key(5), MEAN, offset, square, num, hyper)
    assert jax.tree.structure(told) == jax.tree.structure(known) == jax.tree.structure(beta)
    np.testing.assert_allclose(flat(told), flat(known), rtol=1e-4, atol=1e-5)


def test_effects_that_are_all_alike_give_widths_within_the_bounds():
    def one(key):
        zero, hyper = jnp.zeros(2), population.parse("gamma:2,0.1")
        return population.sample_normal_given_effects(key, jnp.ones(2), zero, zero, 5, hyper, (0.01, 10.0))

    drawn = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 2000))
    sd = np.exp(np.asarray(drawn.log_sd, np.float64))
    assert np.all((sd >= 0.01 * (1 - 1e-5)) & (sd <= 10))
    assert_mean(sd[:, 0], quadrature(0.0, 4, "gamma:2,0.1", 0.01, 10.0)[0])
    assert np.all(np.isfinite(drawn.mean))
