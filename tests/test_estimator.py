"""The scikit-learn face of a personal model: its conventions, a client that joins a run, and one that is there."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

import priory
from priory.engine.evaluator import Evaluator
from priory.estimator import PersonalClassifier, PersonalRegressor

QUICK = {  # the conventions that a change of this package is likeliest to break; the others take minutes together
    "check_estimators_unfitted",
    "check_estimator_cloneable",
    "check_no_attributes_set_in_init",
    "check_n_features_in_after_fitting",
    "check_classifiers_regression_target",
}
SKIPPED = {"check_array_api_input": "needs an environment variable that is set before SciPy is imported"}
SMALL = {"model": "linear", "rounds": 2, "seed": 0, "eval_every": 0}
UNTRAINED = SMALL | {"stop": lambda: True}  # a newcomer can join such a run, and no round is compiled


def name_of(check) -> str:
    return check.func.__name__ if hasattr(check, "func") else check.__name__


def checks():
    for estimator in (PersonalClassifier(rounds=30), PersonalRegressor(rounds=30)):
        for one, check in estimator_checks_generator(estimator):
            if name_of(check) not in SKIPPED:
                marks = [] if name_of(check) in QUICK else [pytest.mark.slow]
                yield pytest.param(one, check, id=f"{type(estimator).__name__}-{name_of(check)}", marks=marks)


@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_an_estimator_keeps_the_conventions_of_scikit_learn(estimator, check, monkeypatch):
    # A client that learns alone keeps no test rows, so an evaluation, a program for each shape, would score nothing.
    monkeypatch.setattr(Evaluator, "scores", lambda *_: (None, None))
    check(estimator)


@pytest.fixture(scope="module")
def rows():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 4)).astype(np.float32)
    return x, np.array([3, 5, 7])[np.argmax(x[:, :3], axis=1)], np.arange(90) % 3


@pytest.fixture(scope="module")
def run(rows):
    x, y, client = rows
    return priory.simulate(priory.FedAvg(), priory.data.from_arrays(x, y, client, seed=0), **SMALL)


@pytest.fixture(scope="module")
def regression(rows):
    x, _, client = rows
    federation = priory.data.from_arrays(x, x[:, 0] - x[:, 1], client, task="regression", seed=0)
    return priory.simulate(priory.FedAvg(), federation, **UNTRAINED)


def test_fitting_joins_the_run_as_a_newcomer(run, rows):
    x, y, _ = rows
    few = y[:20] != 7  # a class that the client lacks
    fitted = PersonalClassifier(run).fit(x[:20][few], y[:20][few])
    expected = run.onboard(x[:20][few], y[:20][few]).predict(x[20:])
    np.testing.assert_array_equal(fitted.predict_proba(x[20:]), expected.probabilities)
    assert fitted.classes_.tolist() == [3, 5, 7]
    assert fitted.predict(x[20:]).dtype == y.dtype
    assert fitted.score(x[20:], y[20:]) == np.mean(expected.name.astype(int) == y[20:])


@pytest.mark.parametrize("kind", ["names", "places", "truth values"])
def test_labels_come_back_as_they_were_given(rows, kind):
    x, client = rows[0], rows[2]
    is_true = x[:, 0] > 0
    names = is_true if kind == "truth values" else np.where(is_true, "ill", "fine")
    run = priory.simulate(priory.FedAvg(), priory.data.from_arrays(x, names, client, seed=0), **UNTRAINED)
    places = np.array([list(run.federation.classes).index(name) for name in names]) if kind == "places" else None
    y = names if places is None else places
    fitted = PersonalClassifier(run).fit(x[:40], y[:40])
    found = fitted.predict(x[40:])
    assert found.dtype == y.dtype
    best = fitted.predict_proba(x[40:]).argmax(axis=1)
    np.testing.assert_array_equal(found, fitted.classes_[best])
    assert set(fitted.classes_.tolist()) == set(y.tolist())


def test_a_model_that_is_there_is_a_fitted_estimator(run, rows, tmp_path):
    model = run.client(1)
    fitted = PersonalClassifier.from_model(priory.load_model(priory.save_model(model, tmp_path / "m")))
    np.testing.assert_array_equal(fitted.predict(rows[0][:9]), model.predict(rows[0][:9]).name)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(rows[0][:9]), fitted.predict_proba(rows[0][:9]))


def test_an_estimator_is_cloned_with_its_run_and_with_a_path(run):
    assert clone(PersonalClassifier(run)).run is run
    assert clone(PersonalClassifier("somewhere", rounds=3)).get_params()["run"] == "somewhere"


def test_a_regressor_tells_mean_and_deviation(regression, rows):
    x = rows[0]
    fitted = PersonalRegressor(regression).fit(x[:20], x[:20, 0])
    expected = regression.onboard(x[:20], x[:20, 0]).predict(x[20:])
    mean, deviation = fitted.predict(x[20:], return_std=True)
    np.testing.assert_array_equal(mean, expected.mean)
    np.testing.assert_array_equal(deviation, expected.sd)


def test_an_estimator_of_the_other_kind_is_refused(run, regression, rows):
    x, y, _ = rows
    with pytest.raises(priory.UsageError, match="the targets of arrays are classes; use PersonalClassifier"):
        PersonalRegressor(run).fit(x, y)
    with pytest.raises(priory.UsageError, match="the targets of arrays are numbers; use PersonalRegressor"):
        PersonalClassifier.from_model(regression.client(0))


def test_labels_that_the_run_never_saw_are_refused(run, rows):
    x = rows[0]
    with pytest.raises(priory.UsageError, match="y has the labels 8, 9, which the federation never saw"):
        PersonalClassifier(run).fit(x[:3], [3, 8, 9])
    with pytest.raises(ValueError, match="3 features, but PersonalClassifier is expecting 4"):
        PersonalClassifier.from_model(run.client(0)).predict(x[:, :3])


def test_a_table_is_fitted_by_its_columns():
    draw = np.random.default_rng(1)
    frame = pd.DataFrame({"age": draw.normal(size=60), "sex": draw.choice(["f", "m"], 60)})
    frame["ill"], frame["site"] = np.where(frame.age > 0, "yes", "no"), np.arange(60) % 3
    federation = priory.data.from_frame(frame, target="ill", client="site").partition(seed=0)
    run = priory.simulate(priory.FedAvg(), federation, **UNTRAINED)
    fitted = PersonalClassifier(run).fit(frame[["sex", "age"]], frame["ill"])
    assert fitted.feature_names_in_.tolist() == ["age", "sex"]
    assert set(fitted.predict(frame[["age", "sex"]])) <= {"no", "yes"}
    with pytest.raises(priory.UsageError, match="column 'sex' is absent, and column 'Sex' is unknown"):
        fitted.predict(frame.rename(columns={"sex": "Sex"})[["age", "Sex"]])


def test_digits_may_be_flat_as_scikit_learn_has_them():
    digits = priory.data.load("digits")
    run = priory.simulate(priory.FedAvg(), digits.partition("iid", clients=4, seed=0), **UNTRAINED)
    fitted = PersonalClassifier(run).fit(digits.x[:40].reshape(40, -1), digits.y[:40])
    expected = run.onboard(digits.x[:40], digits.y[:40]).predict(digits.x[40:60])
    np.testing.assert_array_equal(fitted.predict(digits.x[40:60].reshape(20, -1)), expected.label)
    np.testing.assert_array_equal(fitted.predict(digits.x[40:60]), expected.label)
