"""Methods put to the test: what they reach is their own optimum, and the verdict follows from it."""

from dataclasses import replace
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory import Optimiser, methods
from priory.bayes import gaussian
from priory.calibration import Options, check, enough, passing, trial
from priory.calibration import problem as problems
from priory.calibration.ranks import judge
from priory.core.errors import UsageError
from priory.engine.problem import tasks_of
from priory.engine.settings import Settings

FEW = Options(clients=300, visits=50, rounds=0)


@cache
def problem():
    return problems.make(FEW.clients, FEW.seed)


UNDER_TRUTH, DRAWN = trial.under_truth, {}


@pytest.fixture(autouse=True)
def _draw_once(monkeypatch):
    """Keep draws under the true population: several tests look at those of one method."""

    def under_truth(method, problem, options):
        key = method, options.visits, options.seed, problem.federation.y.tobytes()
        if key not in DRAWN:
            DRAWN[key] = UNDER_TRUTH(method, problem, options)
        return DRAWN[key]

    monkeypatch.setattr(trial, "under_truth", under_truth)


def tempered(zeta):
    """Mean (clients, weights) and standard deviation of the best q of pFedBayes where XᵀX = n I."""
    data, pull = problems.EXAMPLES / problems.NOISE**2, zeta / problems.PRIOR_SD**2
    federation = problem().federation
    x = np.concatenate([np.ones((len(federation.x), 1)), federation.x], axis=1)
    rows = (x * federation.y[:, None]).reshape(FEW.clients, problems.EXAMPLES, -1)
    mean = (rows.sum(1) / problems.NOISE**2 + pull * problems.MEAN) / (data + pull)
    return mean, np.sqrt(zeta / (data + pull))


@pytest.mark.parametrize("zeta", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_pfedbayes_reaches_its_closed_form(zeta):
    """Local work has converged: within 0.1 of a width for each client, whose step noise and 99 draws add up to it."""
    method = enough(priory.PFedBayes(zeta=zeta))
    draws = trial.under_truth(method, problem(), FEW)
    mean, sd = tempered(zeta)
    off = (draws.mean(1) - mean) / sd
    assert np.abs(off.mean(0)).max() < 0.03
    assert off.std() < np.hypot(1 / np.sqrt(trial.DRAWS), 0.15)
    np.testing.assert_allclose(draws.std(1, ddof=1).mean(0), sd, rtol=0.03)


RIGHT = {
    "sfedbayes": priory.SFedBayes(),
    "cfedbayes": priory.CFedBayes(),
    "fedhb-niw": priory.FedHBNIW(),
    "fedhb-niw, expected": priory.FedHBNIW(precision="expected"),
    "fedhb-mixture": priory.FedHBMixture(),
    "fedpop": priory.FedPop(),
    "fedpop, scalar": priory.FedPop(prior="scalar", stateful=False),
}


AT_ONCE = ("fedhb-niw",)  # pFedBayes is above, and FedPop's chains are in test_fedpop.py


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in RIGHT]
)
def test_the_setting_that_a_method_names_has_the_exact_posterior_under_the_true_population(name):
    """Mean and width over clients, up to 99 draws of each."""
    method = passing(enough(RIGHT[name]))
    options = FEW
    if isinstance(method, priory.FedPop):  # its posterior is a chain of its own
        method, options = replace(method, samples=100, thin=3), replace(FEW, visits=1)
    draws = trial.under_truth(trial.with_work(method, problem().task), problem(), options)
    mean, sd = tempered(1.0)
    off = (draws.mean(1) - mean) / sd
    assert np.abs(off.mean(0)).max() < 0.03
    assert off.std() < np.hypot(1 / np.sqrt(trial.DRAWS), 0.15)
    np.testing.assert_allclose(draws.std(1, ddof=1).mean(0), sd, rtol=0.04)


@pytest.mark.parametrize("kind", [priory.PFedBayes, pytest.param(priory.CFedBayes, marks=pytest.mark.slow)])
def test_moments_of_posteriors_learn_the_width_of_the_population_with_adam(kind):
    """Within 5 % of the truth: 3.5 standard errors, since 1000 clients with 3 weights determine it up to 1.4 %."""
    method = replace(passing(enough(kind(average="moments"))), optimiser=Optimiser("adam", 0.01))
    federation, how = problems.make(1000, 0).federation, {"client_batch": 1000, "eval_every": 0}
    run = priory.simulate(method, federation, model="linear", rounds=60, seed=0, **how)
    sd = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gaussian.of(run.server.weights).sd)])
    assert np.sqrt(np.mean(sd**2)) == pytest.approx(problems.PRIOR_SD, rel=0.05)


def test_fedhb_draws_what_its_posterior_claims_and_predicts_with_its_centre():
    """q_k = N(m_k, ε²): 300 clients with 99 draws of 3 weights tell ε within 1 %."""
    method = enough(priory.FedHBNIW(epsilon=1e-2))
    draws = trial.under_truth(method, problem(), FEW)
    np.testing.assert_allclose(draws.std(1, ddof=1).mean(), 1e-2, rtol=0.01)


def test_a_method_whose_clients_share_weights_is_asked_about_the_others():
    found = trial.problem_for(enough(priory.FedVI()), FEW)
    assert found.random == (False, False, True)
    assert found.truth.shape == (FEW.clients, 1)


def test_a_method_that_refuses_a_regression_is_given_classes():
    found = trial.problem_for(enough(priory.FedBNN()), FEW)
    assert found.has_classes
    assert found.random == (True, True, True)


class OneRow(nn.Module):
    """A linear model of two classes whose first logit is 0."""

    @nn.compact
    def __call__(self, x):
        logit = nn.Dense(1)(x)
        return jnp.concatenate([jnp.zeros_like(logit), logit], axis=-1)


@pytest.mark.slow  # 500 steps of two lots of 300 clients
def test_fedbnn_is_too_wide_in_two_rows_of_which_the_difference_counts_and_right_in_one():
    """Under the true prior, from widths near the optimum; too wide by more than 4 standard errors at 90 %."""
    two = problems.make(FEW.clients, FEW.seed, has_classes=True)
    (task,) = tasks_of(two.federation, Settings(head="Dense_0"), OneRow())
    found = []
    for given, prior_sd in ((two, problems.prior_sd(has_classes=True)), (replace(two, task=task), problems.PRIOR_SD)):
        method = enough(priory.FedBNN(rho=-0.5, prior_sd=prior_sd))
        draws = trial.under_truth(trial.with_work(method, given.task), given, FEW)
        found.append(judge(draws, given.truth, None, FEW.seed))
    both, one = found
    (held,) = (of for of in both.coverage if of.level == 0.9)
    assert held.held - 4 * held.error > 0.9
    assert one.passes


def test_what_a_method_refuses_for_another_reason_is_told():
    with pytest.raises(UsageError, match="clusters=301 exceeds the 300 clients"):
        check(priory.CFedBayes(clusters=301), FEW)


def test_the_classes_follow_the_log_odds_of_the_truth():
    """Clients with a large intercept say yes more often: the share is within 4 standard errors of its mean."""
    made = problems.make(2000, 1, has_classes=True)
    said = made.federation.y.reshape(2000, problems.EXAMPLES)
    x = np.concatenate([np.ones((len(made.federation.x), 1)), made.federation.x], axis=1).reshape(2000, -1, 3)
    p = 1 / (1 + np.exp(-np.einsum("kni,ki->kn", x, made.truth)))
    for keep in (made.truth[:, 0] > 0, made.truth[:, 0] <= 0):
        error = np.sqrt(np.sum(p[keep] * (1 - p[keep]))) / said[keep].size
        assert abs(said[keep].mean() - p[keep].mean()) < 4 * error


def test_the_weights_that_are_read_are_those_of_the_truth():
    mean, sd = problem().population()
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[None, None], mean)
    np.testing.assert_allclose(trial.read(problem(), one)[0, 0], problems.MEAN, atol=1e-6)
    assert {float(leaf.min()) for leaf in jax.tree.leaves(sd)} == {problems.PRIOR_SD}


def test_pfedbayes_is_refuted_at_its_default_and_not_at_the_setting_that_it_names():
    method = enough(priory.PFedBayes())
    other = passing(method)
    assert (method.zeta, other.zeta) == (10.0, 1.0)
    assert not check(method, FEW).true.passes
    assert check(other, FEW).true.passes


def test_a_setting_that_is_the_right_one_names_no_other():
    assert passing(enough(priory.PFedBayes(zeta=1.0))) is None


@pytest.mark.slow  # a federation of 300 clients
def test_the_plug_in_verdict_is_about_what_a_federation_has_learned():
    """One round leaves the prior at its narrow start, which holds hardly a truth."""
    found = check(enough(priory.PFedBayes(zeta=1.0)), replace(FEW, rounds=1))
    assert found.true.passes
    assert not found.plug_in.passes
    assert found.plug_in.width < 0.5


@pytest.mark.parametrize("name", ["fedavg", "local", "pooled", "fedrep"])
def test_a_method_without_a_posterior_is_refused_in_a_sentence(name):
    with pytest.raises(UsageError, match=f"{name} claims no posterior"):
        check(methods.get(name)(), FEW)


@pytest.mark.parametrize(("field", "value"), [("clients", 99), ("visits", 0), ("rounds", -1), ("seed", -1)])
def test_options_that_cannot_be_meant_are_refused(field, value):
    with pytest.raises(UsageError, match=f"{field}={value}"):
        check(priory.PFedBayes(), replace(FEW, **{field: value}))
