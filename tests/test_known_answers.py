"""Commands of the documents, as they are written there, against answers that are known without the library.

Eight schools and radon have posteriors in closed form given (μ, σ), and the best (μ, σ) by numerical optimisation.
"""

import re
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import optimize, stats

import priory
from priory.cli import main
from priory.cli.effect_tables import ADVISED
from tests.methods.test_fedpop_regression import best_radon, full_bayes, mean_and_error

ROOT = Path(__file__).parents[1]
MIXED = "docs/mixed-effects.md"


def command_of(page: str, *patterns: str) -> list[str]:
    """Return the arguments of the one command of a page that matches all patterns, its lines joined."""
    text = re.sub(r" *\\\n *", " ", (ROOT / page).read_text())
    commands = re.findall(r"^\$ priory ([^#\n]*)", text, re.MULTILINE)
    [found] = [command for command in commands if all(re.search(one, command.strip()) for one in patterns)]
    return found.split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory of the runs, and what the commands that ran in it have printed."""
    return tmp_path_factory.mktemp("answers"), {}


@pytest.fixture
def answer(place, capsys, monkeypatch):
    """Return a function that returns what a command prints, which runs once."""
    directory, printed = place
    monkeypatch.chdir(directory)
    jax.devices()  # settles their number for the whole process

    def run(argv):
        if tuple(argv) not in printed:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                assert main(argv) == 0, capsys.readouterr().err
            printed[tuple(argv)] = capsys.readouterr()
        return printed[tuple(argv)]

    return run


SCHOOLS = priory.data.load("eight_schools")
RESULTS, ERRORS = np.asarray(SCHOOLS.y, float), np.asarray(SCHOOLS.scale, float)
README = command_of("README.md", "run fedpop")


def mode() -> tuple[float, float]:
    """(μ, σ) where Π N(y | μ, s² + σ²) p(σ) is largest, the schools' effects being integrated out in closed form."""
    prior = stats.gamma(2, scale=1 / 0.1)

    def loss(theta):
        sd = np.exp(theta[1])
        return -stats.norm.logpdf(RESULTS, theta[0], np.hypot(ERRORS, sd)).sum() - prior.logpdf(sd)

    mean, log_sd = optimize.minimize(loss, [0.0, 1.0], method="BFGS").x
    return mean, np.exp(log_sd)


def printed(shown: str) -> dict[str, list[float]]:
    """The numbers of each row of the tables of effects, by the row's first word."""
    rows = [line.split(maxsplit=1) for line in shown.splitlines() if re.match(r"(intercept|[A-H]) ", line)]
    return {name: [float(number) for number in re.findall(r"-?\d+\.?\d*", rest)] for name, rest in rows}


def test_the_mode_of_eight_schools_is_where_quadrature_puts_it():
    """The optimum, against the schools' effects integrated out by a sum, on a grid around it."""
    best = mode()
    effects = np.linspace(-150, 150, 6001)
    known = stats.norm.pdf(RESULTS[:, None], effects, ERRORS[:, None])
    means, sds = best[0] + np.linspace(-0.1, 0.1, 21), best[1] + np.linspace(-0.1, 0.1, 21)

    def log_posterior(mean, sd):
        each = known @ stats.norm.pdf(effects, mean, sd) * (effects[1] - effects[0])
        return np.log(each).sum() + stats.gamma.logpdf(sd, 2, scale=10)

    grid = np.array([[log_posterior(mean, sd) for sd in sds] for mean in means])
    i, j = np.unravel_index(grid.argmax(), grid.shape)
    assert (means[i], sds[j]) == pytest.approx(best, abs=0.006)  # half a cell of the grid, and rounding
    assert best == pytest.approx((7.83, 4.59), abs=0.005)  # as the documents print it


def test_the_eight_schools_of_the_readme_end_at_the_mode(answer):
    """The printed population within a tenth of σ, which is a fiftieth of its own standard error."""
    shown = answer(README)
    mean, sd = mode()
    assert printed(shown.out)["intercept"] == pytest.approx([mean, sd], abs=0.1 * sd)
    assert "warning" not in shown.err
    assert ADVISED not in shown.out


def test_the_schools_of_the_readme_have_their_posteriors(answer):
    """Printed estimates within 4 Monte Carlo standard errors of those at the mode, and ends of 90 % intervals likewise.

    `priory effects` prints the same. The table's own (μ, σ) shift the schools a little, which is added to the error.
    """
    shown = answer(README)
    table = printed(shown.out)
    again = answer(["effects", "runs/schools"])
    assert printed(again.out) == table
    assert "warning" not in again.err

    def exact(mean, sd):
        precision = 1 / ERRORS**2 + 1 / sd**2
        width = 1 / np.sqrt(precision)
        middle = (RESULTS / ERRORS**2 + mean / sd**2) / precision
        return np.stack([middle, *(middle + stats.norm.ppf(end) * width for end in (0.05, 0.95))], axis=1), width

    (at_mode, width), (at_printed, _) = exact(*mode()), exact(*table["intercept"])
    rows = np.array([table[school] for school in "ABCDEFGH"])
    found, draws = rows[:, [1, 2, 3]], rows[:, -1]
    # Of a mean, and of a quantile at p, in units of sd/√draws: 1, and √(p(1 − p)) / density.
    error = np.array([1.0, *(np.sqrt(0.05 * 0.95) / stats.norm.pdf(stats.norm.ppf(0.05)) for _ in range(2))])
    allowed = 4 * error * (width / np.sqrt(draws))[:, None] + np.abs(at_mode - at_printed)
    assert np.all(np.abs(found - at_mode) < allowed), (found, at_mode, allowed)


def test_the_kernel_of_the_paper_ends_at_the_mode_too(answer):
    """Without --kernel and --samples: the width that Langevin's bias adds to the chains cancels in the mixed score."""
    argv = [word for word in README if word not in ("--kernel", "mala", "--samples", "1000")]
    mean, sd = mode()
    shown = answer([*argv[:-1], "runs/ula"])
    assert printed(shown.out)["intercept"] == pytest.approx([mean, sd], abs=0.1 * sd)
    assert "has not settled" not in shown.err


def test_a_population_that_has_not_settled_is_not_presented_as_the_answer(answer):
    """Neither by `priory run` nor by `priory effects`, after a tenth of the rounds of the README."""
    short = [{"200": "20", "runs/schools": "runs/short"}.get(word, word) for word in README]
    for shown in (answer(short), answer(["effects", "runs/short"])):
        assert shown.err.count("warning: The population has not settled, so its mean and standard deviation are") == 1
        assert ADVISED in shown.out


@pytest.mark.slow  # 500 rounds of 85 counties
def test_radon_ends_where_the_guide_says_that_the_likelihood_is_largest(answer, data_dir):
    """μ, slope, residual sd and σ as the guide prints them, to 0.01."""
    answer(command_of(MIXED, "--data radon"))
    found = priory.load("runs/radon").effects()
    slope, log_s = found.fixed["Dense_0"]["kernel"].item(), found.fixed["log_scale"].item()
    ours = [found.population.mean.item(), slope, np.exp(log_s), found.population.sd.item()]
    np.testing.assert_allclose(ours, best_radon(), atol=0.01)


@pytest.mark.slow  # 2000 rounds
def test_schools_without_a_prior_are_pooled_as_the_guide_says(answer):
    """μ at Σ(y/s²)/Σ(1/s²), the maximum at σ = 0, to a hundredth of its standard error; and σ is still sinking."""
    shown = answer([*command_of(MIXED, "--out runs/schools$")[:-1], "runs/pooled"])
    weight = 1 / ERRORS**2
    assert printed(shown.out)["intercept"][0] == pytest.approx(
        weight @ RESULTS / weight.sum(), abs=0.01 / np.sqrt(weight.sum())
    )
    assert "σ has collapsed" in shown.err


@pytest.mark.slow  # 2000 rounds
def test_schools_with_a_prior_end_at_the_mode_as_the_guide_says(answer):
    """To a fiftieth of σ."""
    shown = answer(command_of(MIXED, "--out runs/schools-gamma"))
    mean, sd = mode()
    assert printed(shown.out)["intercept"] == pytest.approx([mean, sd], abs=0.02 * sd)


@pytest.mark.slow  # 4500 rounds for 4000 draws of the prior
def test_schools_under_full_bayes_have_the_posterior_of_the_guide(answer):
    """μ and σ within 4 Monte Carlo standard errors."""
    answer(command_of(MIXED, "--out runs/schools-bayes"))
    found, exact = priory.load("runs/schools-bayes").effects().population, full_bayes(RESULTS, ERRORS)
    for draws, name in ((found.mean[:, 0], "mean"), (found.sd[:, 0], "sd")):
        value, error = mean_and_error(draws)
        assert abs(value - exact[name]) < 4 * error, (value, exact[name], error)
