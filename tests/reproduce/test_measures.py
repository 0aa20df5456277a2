"""Figures that no summary has."""

import numpy as np
import pytest
import scipy
from scipy import stats

from priory.reproduce import definition, measures
from priory.reproduce.cells import Federations, cells_of

pytestmark = pytest.mark.xdist_group("command line")  # `test_cells` trains the same method


def test_density_is_the_inclusion_that_a_run_starts_with_but_for_the_steps_of_its_logit(table, tmp_path):
    settings = {"inclusion": 0.3, "step_size": 0.001, "steps": 1, "samples": 2}
    table |= {"measure": "density", "seeds": 1, "row": [{"key": "s", "method": "sfedbayes", "set": settings}]}
    table["block"], table["run"] = table["block"][:1], {"rounds": 2, "model": "linear"}
    found = cells_of(definition.parse("digits-table-0", table), tmp_path)[0].run(Federations())
    assert found is not None
    moved = 0.3 * 0.7 * 0.001  # of λ, by one step of Adam
    assert set(found["measured"]) == {"personal", "global"}
    for value in found["measured"].values():
        assert value == pytest.approx(0.3, abs=2.1 * moved)
        assert value != 0.3


def test_exact_posteriors_of_an_intercept_are_those_of_matrices_and_quadrature_over_sigma():
    means, variances, at = np.array([0.2, -0.5, 1.1, 0.4]), np.array([0.5, 0.5, 0.25, 1.0]), np.full(4, 0.3)
    contrasts = scipy.linalg.null_space(np.ones((1, 4))).T  # of which μ is no part

    def density(sigma: float) -> float:
        covariance = contrasts @ np.diag(sigma**2 + variances) @ contrasts.T
        return stats.multivariate_normal.pdf(contrasts @ means, cov=covariance)

    def below(sigma: float) -> np.ndarray:
        covariance = np.linalg.inv(np.diag(1 / variances) + contrasts.T @ contrasts / sigma**2)
        return stats.norm.cdf(at, covariance @ (means / variances), np.sqrt(np.diag(covariance)))

    def integral(of) -> float:
        return scipy.integrate.quad_vec(of, 1e-3, 1e6, points=(0.1, 1.0, 10.0, 1e3), epsrel=1e-8)[0]

    evidence = integral(density)
    found, sigma = measures.exact_effects(means, variances, at)
    assert found == pytest.approx(integral(lambda sigma: below(sigma) * density(sigma)) / evidence, abs=1e-5)
    assert sigma == pytest.approx(integral(lambda sigma: sigma * density(sigma)) / evidence, rel=1e-3)
