"""Mixed-effects regression from data to table, against closed forms and against integrals over σ."""

from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

import priory
from priory import FedPop, Optimiser
from priory.effects import Effects
from priory.fed.capabilities import AdviceWarning

COSINE = ("step-size=cosine", "prior-step-size=cosine")
CHAINS = {"kernel": "mala", "steps": 20, "burn_in": 10, "chains": 4, "warm_up": 200, "samples": 1000}
SHORTER = CHAINS | {"steps": 10, "burn_in": 5, "samples": 3000}  # rounds, and more draws: 85 counties have a table
LEARNING = {"score": "mixed", "optimiser": Optimiser("adam", 0.04), "prior_step_size": 0.04}
GAMMA = (2.0, 0.1)  # shape and rate


def mean_and_error(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over axis 0 of a chain, with its Monte Carlo standard error by batch means."""
    batches = np.array([part.mean(0) for part in np.array_split(draws, 40)])
    return draws.mean(0), batches.std(0, ddof=1) / np.sqrt(40)


@cache
def radon() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log radon, floor and number of the county of all houses."""
    data = priory.data.load("radon", drop=["log_uranium"]).partition("natural", test=0.0)
    county = np.repeat(np.arange(data.num_clients), np.asarray(data.train.count))
    return data.y, data.x[:, 0], county


@cache
def radon_effects() -> tuple[Effects, float, float, float, float]:
    """The table of a run, and (μ, slope, s, σ)."""
    data = priory.data.load("radon", drop=["log_uranium"]).partition("natural", test=0.0)
    settings = {"rounds": 300, "model": "linear", "head": "Dense_0/bias", "scale": "learned", "schedule": COSINE}
    run = priory.simulate(FedPop(**SHORTER, **LEARNING), data, eval_every=0, **settings)
    found = run.effects()
    slope, log_s = found.fixed["Dense_0"]["kernel"][0, 0], found.fixed["log_scale"]
    return found, found.population.mean[0, 0], slope, np.exp(log_s), found.population.sd[0, 0]


def best_radon() -> list[float]:
    """μ, slope, s and σ where the marginal likelihood of radon is largest."""
    y, floor, county = radon()
    count = np.bincount(county)

    def loss(theta):
        """−log N(y | mean + slope · floor, s² I + sd² 1 1ᵀ), whose eigenvalues are s², and s² + n sd² once."""
        mean, slope, s, sd = theta[0], theta[1], np.exp(theta[2]), np.exp(theta[3])
        rest = y - mean - slope * floor
        total, last = np.bincount(county, rest), s**2 + count * sd**2
        squares = (np.sum(rest**2) - np.sum(sd**2 / last * total**2)) / s**2
        return 0.5 * (squares + np.sum((count - 1) * np.log(s**2) + np.log(last)))

    best = optimize.minimize(loss, [1.0, 0.0, 0.0, -1.0], method="BFGS").x
    return [*best[:2], *np.exp(best[2:])]


@pytest.mark.slow  # 300 rounds of 85 counties; test_fedpop.py has the gradients in closed form
def test_radon_ends_where_the_marginal_likelihood_is_largest():
    np.testing.assert_allclose(radon_effects()[1:], best_radon(), atol=0.01)


@pytest.mark.slow
def test_county_intercepts_have_their_posterior_at_the_same_parameters():
    """Estimates within 0.02, widths of 90 % intervals within 5 %."""
    y, floor, county = radon()
    found, mean, slope, s, sd = radon_effects()
    count, total = np.bincount(county), np.bincount(county, y - slope * floor)
    precision = count / s**2 + 1 / sd**2
    np.testing.assert_allclose(found.mean[:, 0], (total / s**2 + mean / sd**2) / precision, atol=0.02)
    widths = 2 * stats.norm.ppf(0.95) / np.sqrt(precision)
    np.testing.assert_allclose((found.high - found.low)[:, 0], widths, rtol=0.05)


def schools():
    return priory.data.load("eight_schools").partition("natural", test=0.0)


@pytest.mark.slow  # a thousand rounds
def test_eight_schools_say_that_sigma_collapsed():
    """And every school has the pooled mean, Σ(y/s²)/Σ(1/s²)."""
    method = FedPop(**CHAINS, score="mixed", prior_step_size=0.05, prior_sd=5.0)
    data = schools()
    with pytest.warns(AdviceWarning, match="σ has collapsed to .* and leaves clients 0"):
        run = priory.simulate(method, data, rounds=1000, model="intercept", schedule=COSINE, eval_every=0)
    assert "--prior-sigma gamma:2,0.1" in run.extra["advice"]["collapse"]
    pooled = np.sum(data.y / data.scale**2) / np.sum(1 / data.scale**2)
    np.testing.assert_allclose(run.effects().mean[:, 0], pooled, atol=0.3)


@pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")  # sixty rounds are few
def test_outcomes_in_another_unit_give_the_same_answer_in_that_unit():
    """Chains and β are those of the other run times the unit, to rounding, if --prior-sd is given in it too."""
    data, ends = schools(), []
    for unit in (1.0, 1000.0):
        scale = np.asarray(data.scale, np.float32) * np.float32(unit)
        y = np.asarray(data.y, np.float32) * np.float32(unit)
        there = priory.data.from_arrays(data.x, y, np.arange(8), scale=scale, task="regression", test=0.0)
        method = FedPop(prior_sd=3 * unit, sigma_min=1e-3 * unit)
        run = priory.simulate(method, there, rounds=60, model="intercept", eval_every=0)
        found = run.effects()
        ends.append(np.stack([found.mean[:, 0], found.low[:, 0], found.high[:, 0]]) / unit)
        ends.append(np.array([found.population.mean.item(), found.population.sd.item()]) / unit)
    np.testing.assert_allclose(ends[2], ends[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(ends[3], ends[1], rtol=1e-4)
    assert ends[1][0] > 3  # and it has moved


@cache
def schools_at_the_mode() -> tuple[Effects, float, float]:
    method = FedPop(**CHAINS, score="mixed", prior_step_size=0.05, prior_sd=5.0, prior_sigma="gamma:2,0.1")
    found = priory.simulate(method, schools(), rounds=1000, model="intercept", schedule=COSINE, eval_every=0).effects()
    return found, found.population.mean[0, 0], found.population.sd[0, 0]


@pytest.mark.slow  # a thousand rounds
def test_a_gamma_prior_leaves_the_mode_of_the_penalised_likelihood():
    data = schools()

    def loss(theta):
        sd = np.exp(theta[1])
        fit = stats.norm.logpdf(data.y, theta[0], np.sqrt(data.scale**2 + sd**2)).sum()
        return -fit - stats.gamma.logpdf(sd, GAMMA[0], scale=1 / GAMMA[1])

    mean, log_sd = optimize.minimize(loss, [0.0, 1.0], method="BFGS").x
    _, found_mean, found_sd = schools_at_the_mode()
    np.testing.assert_allclose([found_mean, found_sd], [mean, np.exp(log_sd)], atol=0.1)  # effects have units of 10


def test_schools_have_their_posterior_at_the_same_mode():
    """3 Monte Carlo standard errors."""
    data = schools()
    found, mean, sd = schools_at_the_mode()
    expected = (data.y / data.scale**2 + mean / sd**2) / (1 / data.scale**2 + 1 / sd**2)
    assert np.all(np.abs(found.mean[:, 0] - expected) < 3 * found.sd[:, 0] / np.sqrt(found.ess[:, 0]))


def full_bayes(y: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    """Posterior moments under a flat prior of μ and a gamma prior of σ, by a sum over σ; the rest is Gaussian."""
    sd = np.linspace(1e-3, 200, 40_000)[:, None]
    weight = 1 / (scale**2 + sd**2)  # of each school, given σ
    variance = 1 / weight.sum(axis=1, keepdims=True)  # of μ, given σ
    mean = variance * np.sum(weight * y, axis=1, keepdims=True)
    log_p = stats.gamma.logpdf(sd, GAMMA[0], scale=1 / GAMMA[1]) + 0.5 * np.log(variance)
    log_p = log_p + 0.5 * np.sum(np.log(weight) - weight * (y - mean) ** 2, axis=1, keepdims=True)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    share = sd**2 * weight  # of a school's own result
    z = mean + share * (y - mean)
    spread = sd**2 * (1 - share) + (1 - share) ** 2 * variance
    average = np.sum(p * z, axis=0)
    width = np.sqrt(np.sum(p * (spread + z**2), axis=0) - average**2)
    return {"mean": np.sum(p * mean), "sd": np.sum(p * sd), "z": average, "width": width}


@pytest.mark.slow  # 4,500 rounds for 4,000 draws of the prior
def test_full_bayes_has_the_posterior_of_prior_and_schools():
    """μ, σ and every school within 4 Monte Carlo standard errors, and the schools' deviations within 7 %."""
    data = schools()
    method = FedPop(
        kernel="mala", steps=4, burn_in=0, chains=4, prior_sd=5.0, prior_sigma="gamma:2,0.1", prior_draws=4000
    )
    found = priory.simulate(method, data, rounds=4500, model="intercept", eval_every=0).effects()
    exact = full_bayes(np.asarray(data.y, float), np.asarray(data.scale, float))
    for ours, name in ((found.population.mean[:, 0], "mean"), (found.population.sd[:, 0], "sd")):
        value, error = mean_and_error(ours)
        assert abs(value - exact[name]) < 4 * error, (value, exact[name], error)
    # All chains of a client share the draws of the prior, so those count, and not the chains' own effective sizes.
    own_error = np.hypot(found.sd[:, 0] / np.sqrt(found.ess[:, 0]), mean_and_error(found.population.mean[:, 0])[1])
    assert np.all(np.abs(found.mean[:, 0] - exact["z"]) < 4 * own_error)
    np.testing.assert_allclose(found.sd[:, 0], exact["width"], rtol=0.07)
