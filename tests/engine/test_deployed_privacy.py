"""What a deployment's noise costs: discrete Gaussian numbers on a grid, compared with what can be computed exactly."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm

from priory import methods
from priory.core.errors import UsageError
from priory.engine import accountants
from priory.engine.accountants import Concentrated, Counted, OnGrid, Poisson, WithoutReplacement
from tests.deploy.conftest import small_charter

DELTA = 1e-5


def discrete(scale: float, shift: int = 0) -> np.ndarray:
    """Return the probabilities of the discrete Gaussian on a range that holds all but 1e-30 of it."""
    values = np.arange(-math.ceil(13 * scale) - 20, math.ceil(13 * scale) + 21)
    law = np.exp(-((values - shift) ** 2) / (2 * scale**2))
    return law / law.sum()


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1), (3.0, 4), (8.0, 8)])
def test_zcdp_allows_at_least_the_exact_delta_of_the_discrete_gaussian(scale, shift):
    one, other = discrete(scale), discrete(scale, shift)
    epsilon = accountants.concentrated_epsilon((shift / scale) ** 2 / 2, DELTA)
    exact = np.maximum(one - math.exp(epsilon) * other, 0).sum()
    assert 0 < exact <= DELTA


@pytest.mark.parametrize("noise", [0.7, 3.0, 20.0])
def test_zcdp_costs_a_little_more_than_the_exact_gaussian(noise):
    exact, found = (kind((0, 1, 2)).epsilon(noise, 2, DELTA) for kind in (Counted, Concentrated))
    assert exact < found < 1.15 * exact


def test_no_rho_costs_nothing():
    assert Concentrated((0, 0)).epsilon(1.0, 1, DELTA) == 0


@pytest.mark.parametrize("scale", [2.0, 8.0, 64.0])
def test_the_discrete_gaussian_is_as_near_a_rounded_gaussian_as_is_claimed(scale):
    values = np.arange(-math.ceil(13 * scale) - 20, math.ceil(13 * scale) + 21)
    rounded = np.diff(norm.cdf(np.append(values - 0.5, values[-1] + 0.5) / scale))
    law = discrete(scale)
    chi2 = ((rounded - law) ** 2 / law).sum()
    assert chi2 == pytest.approx(1 / (288 * scale**4), rel=2 / scale**2)
    assert np.abs(rounded - law).sum() / 2 <= 1 / (32 * scale**2)  # total variation, of one number


@pytest.mark.parametrize("sampled", [Poisson(60, 0.1, 21), WithoutReplacement(60, 6)])
def test_sampled_rounds_cost_what_they_would_with_the_delta_that_is_left(sampled):
    found = OnGrid(sampled, 10**6).epsilon(2.0, 20, DELTA)
    assert found == sampled.epsilon(2.0, 20, 0.999 * DELTA)
    assert found == pytest.approx(sampled.epsilon(2.0, 20, DELTA), rel=1e-3)
    distance = 20 * 1000 / (32 * 4.0**accountants.GRID_BITS)
    assert (1 + math.exp(found)) * distance <= DELTA / 1000


def test_where_the_distance_to_the_gaussian_could_matter_nothing_is_claimed():
    assert OnGrid(WithoutReplacement(60, 6), 10**6).epsilon(0.05, 20, DELTA) == math.inf


@pytest.mark.parametrize("sd", [1e-9, 0.3, 1.0, 1.9999, 7e5])
def test_a_grid_is_a_power_of_two_and_fine_enough(sd):
    grid = accountants.grid_of(sd)
    assert math.frexp(grid)[0] == 0.5
    assert 2**accountants.GRID_BITS <= sd / grid < 2 ** (accountants.GRID_BITS + 1)


def charter(name="fedavg", **options):
    return small_charter(methods.get(name)(), 8, dp_delta=1e-3, **options)


@pytest.mark.parametrize("options", [{"dp": "local"}, {"dp": "central", "cohort": 2}, {"dp": "central"}])
def test_noise_that_is_solved_for_keeps_the_budget(options):
    ledger = charter(dp_epsilon=4.0, **options).ledger
    assert 3.98 < ledger.spent(3) <= 4.0
    assert ledger.spent_if_continuous <= ledger.spent(3)
    assert "discrete" in ledger.summary(3)["noise"]
    assert "discrete" in ledger.spending.accountant


def test_a_known_cohort_costs_what_its_busiest_client_pays():
    """1000 clients, 100 in a round, 200 rounds: a claim of ε = 4 is about 20 for who knows the cohorts."""
    sampled = Poisson(1000, 0.1, 180)
    noise = accountants.solve_noise(sampled, 4.0, DELTA, 200)
    opened = small_charter(methods.get("fedavg")(), 8, dp="central", dp_noise=1.0, dp_delta=DELTA).ledger
    ledger = dataclasses.replace(opened, spending=OnGrid(sampled, 10), rounds=200, noise=noise)
    assert ledger.spent(200) <= 4.01
    rng = np.random.default_rng(0)
    busiest = rng.binomial(200, 0.1, (20, 1000)).max()  # of 20 runs; the bound holds but for one in a million
    least = Concentrated(tuple(range(busiest + 1))).epsilon(ledger.noise, busiest, DELTA)
    known = ledger.spent_if_cohorts_are_known(200)
    assert 15 < least <= known < 1.3 * least
    assert ledger.summary(200)["epsilon_if_cohorts_known"] == known


@pytest.mark.parametrize("options", [{"dp": "local"}, {"dp": "central"}])
def test_without_amplification_nothing_rests_on_unknown_cohorts(options):
    assert charter(dp_noise=1.0, **options).ledger.spent_if_cohorts_are_known(3) is None


def test_a_method_that_bounds_its_message_pays_for_rounding():
    made = charter("fedbnn", dp="local", dp_noise=2.0)
    assert made.public is not None
    ledger, size = made.ledger, len(made.public) * 3  # probabilities of three classes for every input
    more = ledger.sensitivity - ledger.reach
    assert more == pytest.approx(ledger.grid * math.sqrt(size), rel=1e-6)
    assert ledger.sd == 2.0 * ledger.sensitivity


def test_a_deployment_asks_for_its_sampler_when_the_app_is_made(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opendp.prelude", None)
    with pytest.raises(UsageError, match=r"install priory\[privacy\]"):
        dataclasses.replace(charter(dp="local", dp_noise=1.0)).check()


@pytest.mark.parametrize("assumed", [1e-7, 2e12])
def test_an_assumed_sensitivity_is_for_simulations_alone(assumed):
    """A server could otherwise buy an answer with hardly any noise for a small ε, or with more than integers hold."""
    asked = {"dp": "local", "rounds": 1, "dp_noise": 1.0, "dp_delta": DELTA, "dp_sensitivity": assumed}
    with pytest.raises(UsageError, match=r"dp-sensitivity=.* is an assumption for simulations, since one client can"):
        _ = small_charter(methods.get("fedavg")(), **asked).ledger


def test_discrete_noise_that_is_too_far_from_a_rounded_gaussian_is_promised_nothing():
    sampled, size = Poisson(60, 0.1, 21), 10**16
    found = sampled.epsilon(2.0, 20, 0.999 * DELTA)
    assert (1 + math.exp(found)) * 20 * math.sqrt(size) / (32 * 4.0**accountants.GRID_BITS) < DELTA / 1000
    assert OnGrid(sampled, size).epsilon(2.0, 20, DELTA) == found
    more = math.ceil((DELTA / 1000 * 32 * 4.0**accountants.GRID_BITS / (20 * (1 + math.exp(found)))) ** 2)
    assert OnGrid(sampled, 2 * more).epsilon(2.0, 20, DELTA) == math.inf
