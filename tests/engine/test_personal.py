"""A personal model: its doubts, sets and intervals are those of the mixture that it predicts with."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import priory
from priory.core import rng
from priory.core.struct import struct
from priory.data.form import Form
from priory.engine.personal import PersonalModel, Source
from priory.fed.method import Predictive, Task
from priory.models.likelihood import Categorical, Gaussian
from priory.models.model import Head
from priory.uncertainty import conformal
from tests.methods.problems import Location

NAMES = ("a", "b", "c")


@struct
class Said:
    """A method that predicts from nothing but its posterior and the input's first number."""

    def predict(self, task, posterior, x, key):
        del task, key
        outputs = posterior[:, None, :] * x[None, :, :1]
        weights = jnp.log(jnp.array([0.25, 0.75]))
        return Predictive(outputs, jnp.broadcast_to(weights[:, None], outputs.shape[:2]))


def a_model(likelihood, posterior, num_classes=None) -> PersonalModel:
    form = Form("rows", (1,), np.float32(0), np.float32(1), num_classes, NAMES[: num_classes or 0], None, {})
    task = Task(Location(), likelihood, (1,), 2, 8, Head("head"))
    source = Source("said", "personalise", None, "x", 1)
    return PersonalModel(Said(), task, jnp.asarray(posterior, jnp.float32), form, rng.root(0), source)


CLASSES = a_model(Categorical(3), [[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]], 3)
NUMBERS = a_model(Gaussian(0.5), [[-1.0], [2.0]])
X = np.linspace(-2, 2, 9, dtype=np.float32)[:, None]


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(axis=-1)


def test_the_entropy_splits_into_what_draws_agree_on_and_what_they_do_not():
    found = CLASSES.predict(X)
    logits = np.array([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])[:, None, :] * X[None]
    parts = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    mixed = 0.25 * parts[0] + 0.75 * parts[1]
    np.testing.assert_allclose(found.probabilities, mixed, rtol=1e-5)
    np.testing.assert_allclose(found.entropy, entropy(mixed), rtol=1e-5)
    epistemic = entropy(mixed) - 0.25 * entropy(parts[0]) - 0.75 * entropy(parts[1])
    np.testing.assert_allclose(found.epistemic, epistemic, atol=1e-6)
    np.testing.assert_allclose(found.epistemic_share, epistemic / entropy(mixed), atol=1e-6)


def test_the_interval_of_a_regression_is_the_mixtures():
    found = NUMBERS.predict(X)
    low, high = found.interval(0.8)
    for row, x in enumerate(X[:, 0]):
        centres = np.array([-x, 2 * x])

        def below(y, level, centres=centres):
            return 0.25 * stats.norm.cdf(y, centres[0], 0.5) + 0.75 * stats.norm.cdf(y, centres[1], 0.5) - level

        for level, end in ((0.1, low), (0.9, high)):
            assert end[row] == pytest.approx(optimize.brentq(below, -20, 20, args=(level,)), abs=1e-4)
    mean, between = 1.25 * X[:, 0], 0.25 * 0.75 * (3 * X[:, 0]) ** 2
    np.testing.assert_allclose(found.mean, mean, atol=1e-6)
    np.testing.assert_allclose(found.sd**2, 0.25 + between, rtol=1e-5)
    np.testing.assert_allclose(found.epistemic_share, between / (0.25 + between), atol=1e-6)


def test_sets_are_those_of_split_conformal_on_the_rows_held_out():
    draw = np.random.default_rng(0)
    held, labels = draw.normal(size=(30, 1)).astype(np.float32), draw.integers(0, 3, 30)
    found = CLASSES.calibrated(held, np.array(NAMES)[labels]).predict(X)
    for level in (0.5, 0.9):
        expected = conformal.sets(found.probabilities, CLASSES.predict(held).probabilities, labels, level)
        np.testing.assert_array_equal(found.sets(level), expected)
    few = CLASSES.calibrated(held[:5], np.array(NAMES)[labels[:5]]).predict(X)
    assert few.sets(0.9).all(), "five rows are too few for 0.9, so no class can be left out"


def test_a_conformal_interval_covers_what_it_promises():
    draw = np.random.default_rng(1)
    num, level, covered = 4000, 0.9, []
    test_x = draw.normal(size=(num, 1)).astype(np.float32)
    test_y = draw.normal(size=num) * 3  # the model is wrong, and the rows are exchangeable
    for _ in range(20):
        x = draw.normal(size=(200, 1)).astype(np.float32)
        model = NUMBERS.calibrated(x, draw.normal(size=200) * 3)
        low, high = model.predict(test_x).conformal_interval(level)
        covered.append(np.mean((low <= test_y) & (test_y <= high)))
    # The coverage given the held-out rows is Beta distributed around the level; three standard errors of 20 of them.
    error = np.sqrt(level * (1 - level) / 202 / 20 + level * (1 - level) / num)
    assert level - 3 * error < np.mean(covered) < level + 1 / 201 + 3 * error


def test_a_model_abstains_where_no_class_is_probable_enough():
    found = CLASSES.predict(X)
    np.testing.assert_array_equal(found.abstain(0.5), found.probabilities.max(axis=1) < 0.5)
    assert 0 < found.abstain(0.5).sum() < len(X)
    assert found.columns(abstain=0.5)["abstain"].tolist() == found.abstain(0.5).tolist()
    for least in (0.0, 1.01, float("nan")):
        with pytest.raises(priory.UsageError, match="is no probability"):
            found.abstain(least)


@pytest.mark.parametrize(
    ("model", "ask", "named"),
    [
        (CLASSES, lambda found: found.interval(), "An interval belongs to a regression"),
        (CLASSES, lambda found: found.conformal_interval(), "An interval belongs to a regression"),
        (CLASSES, lambda found: found.sets(), "no held-out rows to calibrate on"),
        (CLASSES, lambda found: found.sets(1.0), "level=1.0 is no probability"),
        (NUMBERS, lambda found: found.sets(), "A set belongs to classes"),
        (NUMBERS, lambda found: found.abstain(0.9), "abstain belongs to classes"),
        (NUMBERS, lambda found: found.interval(0), "level=0 is no probability"),
        (NUMBERS, lambda found: found.name, "A regression has no classes"),
    ],
)
def test_what_a_prediction_does_not_have_is_said(model, ask, named):
    with pytest.raises(priory.UsageError, match=named):
        ask(model.predict(X))
