"""Mixed-effects regression from data to table, against closed forms and against NumPyro's NUTS."""

from functools import cache

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from scipy import optimize, stats

import priory
from priory import FedPop, Optimiser
from priory.effects import Effects
from priory.fed.method import AdviceWarning

COSINE = ("step-size=cosine", "prior-step-size=cosine")
CHAINS = {"kernel": "mala", "steps": 20, "burn_in": 10, "chains": 4, "warm_up": 200, "samples": 1000}
LEARNING = {"score": "mixed", "optimiser": Optimiser("adam", 0.02), "prior_step_size": 0.02}
GAMMA = (2.0, 0.1)  # shape and rate


def nuts(model, seed: int, draws: int = 4000):
    """Draws of one chain of NumPyro's NUTS, by name."""
    run = MCMC(NUTS(model), num_warmup=500, num_samples=draws, num_chains=1, progress_bar=False)
    with jax.debug_key_reuse(False):  # NumPyro splits a key that it has drawn from
        run.run(jax.random.key(seed))
    return {name: np.asarray(value) for name, value in run.get_samples().items()}


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
def radon_effects(data_dir) -> tuple[Effects, float, float, float, float]:
    """The table of a run, and (μ, slope, s, σ)."""
    del data_dir
    data = priory.data.load("radon", drop=["log_uranium"]).partition("natural", test=0.0)
    settings = {"rounds": 500, "model": "linear", "head": "Dense_0/bias", "scale": "learned", "schedule": COSINE}
    run = priory.simulate(FedPop(**CHAINS | {"samples": 10000}, **LEARNING), data, eval_every=0, **settings)
    found = run.effects()
    slope, log_s = found.fixed["Dense_0"]["kernel"][0, 0], found.fixed["log_scale"]
    return found, found.population.mean[0, 0], slope, np.exp(log_s), found.population.sd[0, 0]


def test_radon_ends_where_the_marginal_likelihood_is_largest(data_dir):
    y, floor, county = radon()

    def loss(theta):
        mean, slope, s, sd = theta[0], theta[1], np.exp(theta[2]), np.exp(theta[3])
        total = 0.0
        for k in range(county.max() + 1):
            rest = (y - mean - slope * floor)[county == k]
            covariance = s**2 * np.eye(len(rest)) + sd**2
            total += 0.5 * (rest @ np.linalg.solve(covariance, rest) + np.linalg.slogdet(covariance)[1])
        return total

    best = optimize.minimize(loss, [1.0, 0.0, 0.0, -1.0], method="BFGS").x
    np.testing.assert_allclose(radon_effects(data_dir)[1:], [*best[:2], *np.exp(best[2:])], atol=0.01)


def test_county_intercepts_are_those_of_nuts_at_the_same_parameters(data_dir):
    """Estimates within 0.02, widths of 90 % intervals within 5 %."""
    y, floor, county = radon()
    found, mean, slope, s, sd = radon_effects(data_dir)

    def model():
        with numpyro.plate("county", county.max() + 1):
            a = numpyro.sample("a", dist.Normal(float(mean), float(sd)))
        numpyro.sample("y", dist.Normal(a[county] + float(slope) * floor, float(s)), obs=y)

    theirs = nuts(model, seed=0, draws=20000)["a"]
    np.testing.assert_allclose(found.mean[:, 0], theirs.mean(0), atol=0.02)
    widths = np.diff(np.quantile(theirs, [0.05, 0.95], axis=0), axis=0)[0]
    np.testing.assert_allclose((found.high - found.low)[:, 0], widths, rtol=0.05)


def schools():
    return priory.data.load("eight_schools").partition("natural", test=0.0)


def test_eight_schools_say_that_sigma_collapsed():
    """And every school has the pooled mean, Σ(y/s²)/Σ(1/s²)."""
    method = FedPop(**CHAINS, score="mixed", prior_step_size=0.05, prior_sd=5.0)
    data = schools()
    with pytest.warns(AdviceWarning, match="σ has collapsed to .* and leaves clients 0"):
        run = priory.simulate(method, data, rounds=2000, model="intercept", schedule=COSINE, eval_every=0)
    assert "--prior-sigma gamma:2,0.1" in run.extra["advice"]["collapse"]
    pooled = np.sum(data.y / data.scale**2) / np.sum(1 / data.scale**2)
    np.testing.assert_allclose(run.effects().mean[:, 0], pooled, atol=0.3)


@cache
def schools_at_the_mode() -> tuple[Effects, float, float]:
    method = FedPop(**CHAINS, score="mixed", prior_step_size=0.05, prior_sd=5.0, prior_sigma="gamma:2,0.1")
    found = priory.simulate(method, schools(), rounds=2000, model="intercept", schedule=COSINE, eval_every=0).effects()
    return found, found.population.mean[0, 0], found.population.sd[0, 0]


def test_a_gamma_prior_leaves_the_mode_of_the_penalised_likelihood():
    data = schools()

    def loss(theta):
        sd = np.exp(theta[1])
        fit = stats.norm.logpdf(data.y, theta[0], np.sqrt(data.scale**2 + sd**2)).sum()
        return -fit - stats.gamma.logpdf(sd, GAMMA[0], scale=1 / GAMMA[1])

    mean, log_sd = optimize.minimize(loss, [0.0, 1.0], method="BFGS").x
    _, found_mean, found_sd = schools_at_the_mode()
    np.testing.assert_allclose([found_mean, found_sd], [mean, np.exp(log_sd)], atol=0.1)  # effects have units of 10


def test_schools_are_those_of_nuts_at_the_same_mode():
    """3 combined Monte Carlo standard errors."""
    data = schools()
    found, mean, sd = schools_at_the_mode()

    def model():
        with numpyro.plate("school", 8):
            z = numpyro.sample("z", dist.Normal(float(mean), float(sd)))
            numpyro.sample("y", dist.Normal(z, data.scale), obs=data.y)

    theirs, error = mean_and_error(nuts(model, seed=1)["z"])
    own_error = found.sd[:, 0] / np.sqrt(found.ess[:, 0])
    assert np.all(np.abs(found.mean[:, 0] - theirs) < 3 * np.hypot(error, own_error))


def test_full_bayes_is_that_of_nuts():
    """μ, σ and every school within 4 combined Monte Carlo standard errors, and the schools' deviations within 7 %."""
    data = schools()
    method = FedPop(
        kernel="mala", steps=10, burn_in=0, chains=4, prior_sd=5.0, prior_sigma="gamma:2,0.1", prior_draws=4000
    )
    found = priory.simulate(method, data, rounds=4500, model="intercept", eval_every=0).effects()

    def model():
        mean = numpyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
        sd = numpyro.sample("sd", dist.Gamma(*GAMMA))
        with numpyro.plate("school", 8):
            unit = numpyro.sample("unit", dist.Normal(0, 1))
            z = numpyro.deterministic("z", mean + sd * unit)
            numpyro.sample("y", dist.Normal(z, data.scale), obs=data.y)

    theirs = nuts(model, seed=2, draws=20000)
    for ours, other in ((found.population.mean[:, 0], theirs["mean"]), (found.population.sd[:, 0], theirs["sd"])):
        (a, error_a), (b, error_b) = mean_and_error(ours), mean_and_error(other)
        assert abs(a - b) < 4 * np.hypot(error_a, error_b), (a, b, error_a, error_b)
    other, error = mean_and_error(theirs["z"])
    # All chains of a client share the draws of the prior, so those count, and not the chains' own effective sizes.
    own_error = np.hypot(found.sd[:, 0] / np.sqrt(found.ess[:, 0]), mean_and_error(found.population.mean[:, 0])[1])
    assert np.all(np.abs(found.mean[:, 0] - other) < 4 * np.hypot(error, own_error))
    np.testing.assert_allclose(found.sd[:, 0], theirs["z"].std(0), rtol=0.07)
