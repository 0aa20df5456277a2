"""The machinery of simulation-based calibration, on posteriors whose faults are known."""

import numpy as np
import pytest

from priory.calibration.problem import EXAMPLES, MEAN, NOISE, POSTERIOR_SD, PRIOR_SD, orthogonal
from priory.calibration.ranks import ALPHA, LEVELS, coverage_of, judge, places_of, smooth_test

CLIENTS, DRAWS = 1000, 99


def exact(seed, scale=1.0, shift=0.0):
    """Draws of the conjugate posterior, `scale` times as wide and `shift` of its widths beside, and the truth."""
    draw = np.random.default_rng(seed)
    truth = MEAN + PRIOR_SD * draw.standard_normal((CLIENTS, len(MEAN)))
    x = orthogonal(draw, CLIENTS)
    y = np.einsum("kni,ki->kn", x, truth) + NOISE * draw.standard_normal((CLIENTS, EXAMPLES))
    seen = np.einsum("kni,kn->ki", x, y) / NOISE**2 + MEAN / PRIOR_SD**2
    centre = POSTERIOR_SD**2 * seen + shift * POSTERIOR_SD
    noise = draw.standard_normal((CLIENTS, DRAWS, len(MEAN)))
    return centre[:, None] + scale * POSTERIOR_SD * noise, truth


def verdict(seed, **fault):
    draws, truth = exact(seed, **fault)
    return judge(draws, truth, POSTERIOR_SD, seed)


def test_the_columns_of_a_client_are_orthogonal_and_the_first_is_one():
    x = orthogonal(np.random.default_rng(0), 5)
    np.testing.assert_allclose(np.swapaxes(x, 1, 2) @ x, np.tile(EXAMPLES * np.eye(len(MEAN)), (5, 1, 1)), atol=1e-10)
    np.testing.assert_allclose(x[..., 0], 1.0)


def test_the_exact_posterior_passes():
    found = verdict(0)
    assert found.passes
    assert abs(found.width - 1) < 0.01
    for one in found.coverage:
        assert abs(one.held - one.level) < 4 * one.error, one


def test_right_posteriors_are_refuted_about_as_often_as_stated():
    """100 checks: of 1 % a Poisson number of 1 ± 1 fail, and 6 or more with probability 0.0006."""
    failed = sum(not verdict(seed).passes for seed in range(100))
    assert failed < 6, failed
    assert ALPHA == 0.01


FAULTS = [
    ({"scale": 0.5}, 1.0),
    ({"scale": 2.0}, 1.0),
    ({"scale": 0.9}, 0.9),
    ({"scale": 1.2}, 0.9),
    ({"shift": 0.2}, 0.9),
]


@pytest.mark.parametrize(("fault", "power"), FAULTS, ids=str)
def test_a_fault_of_known_size_is_found(fault, power):
    """As often as docs/calibration.md says, in 20 checks of 1000 clients."""
    assert np.mean([not verdict(seed, **fault).passes for seed in range(20)]) >= power


def test_posteriors_half_as_wide_are_told_as_too_narrow():
    found = verdict(0, scale=0.5)
    assert abs(found.width - 0.5) < 0.01
    # P(|z| < 1.645/2) = 0.589
    assert abs(found.at(0.9).held - 0.589) < 4 * found.at(0.9).error


def test_a_point_holds_nothing_and_fails():
    draws, truth = exact(0, scale=0.0)
    found = judge(draws, truth, POSTERIOR_SD, 0)
    assert not found.passes
    assert all(one.held == 0 for one in found.coverage if one.level <= 0.95)


def test_draws_that_are_not_numbers_fail():
    draws, truth = exact(0)
    assert not judge(np.full_like(draws, np.nan), truth, POSTERIOR_SD, 0).passes


def test_a_fault_in_one_weight_of_three_is_found():
    draws, truth = exact(0)
    centre = draws[..., 1].mean(1, keepdims=True)
    draws[..., 1] = centre + 0.3 * (draws[..., 1] - centre)
    assert not judge(draws, truth, POSTERIOR_SD, 0).passes


def test_truths_that_equal_their_draws_are_placed_by_lot():
    """A spike at zero that holds half of the truths and half of the draws: places are uniform for all that."""
    draw = np.random.default_rng(0)
    draws, truth = (draw.standard_normal(shape) * draw.integers(0, 2, shape) for shape in ((4000, 99, 1), (4000, 1)))
    assert smooth_test(places_of(draws, truth, 1)[:, 0]) > ALPHA


def test_the_coverage_of_uniform_places_is_its_level():
    places = (np.arange(10_000) + 0.5)[:, None] / 10_000
    for level in LEVELS:
        assert coverage_of(places, level).held == pytest.approx(level, abs=1e-3)
