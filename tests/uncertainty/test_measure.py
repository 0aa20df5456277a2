"""From rows to tables: constructed clients whose numbers are known."""

import json
import math

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

import priory
from priory.core.errors import UsageError
from priory.evaluate import LEVELS, ClassRows, ClientRows, TargetRows
from priory.uncertainty import Answers, Examples, ForeignInputs, Uncertainty, answers, collect, measure

HOW = {"rounds": 3, "level": 0.9, "bootstrap": 20}


def classes_of(probs: np.ndarray, y: np.ndarray, client: np.ndarray, epistemic: float = 0.0) -> Examples:
    """Examples of a mixture whose entropy is split as told."""
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.sum(np.where(probs > 0, probs * np.log(probs), 0.0), axis=1)
        rows = ClassRows(np.log(probs), entropy * (1 - epistemic), entropy * epistemic)
    return Examples(rows, y, client)


def answers_of(test: Examples, num: int, validation: Examples | None = None, foreign=None, train=None) -> Answers:
    sizes = np.arange(10, 10 + num) if train is None else np.asarray(train)
    return Answers(tuple(f"c{i}" for i in range(num)), sizes, test, validation, foreign)


def some_classes(sizes: tuple[int, ...], seed: int = 0) -> Examples:
    draw = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(sizes)), sizes)
    probs = draw.dirichlet(np.ones(3), size=len(client))
    return classes_of(probs, np.array([draw.choice(3, p=p) for p in probs]), client, 0.25)


def measured(test: Examples, num: int, inputs: ForeignInputs | None = None, **more) -> Uncertainty:
    names = ("a", "b", "c") if isinstance(test.rows, ClassRows) else ()
    return measure({"personal": answers_of(test, num, **more)}, inputs, classes=names, **HOW)


def some_targets(sizes: tuple[int, ...], sd: float = 2.0, seed: int = 0) -> Examples:
    """Targets that are what a normal predictive says they are."""
    draw = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(sizes)), sizes)
    mean = draw.normal(size=len(client))
    y = mean + sd * draw.normal(size=len(client))
    reach = norm.ppf(0.5 + np.array(LEVELS) / 2) * sd
    rows = TargetRows(
        mean,
        np.full(len(y), 0.6 * sd),
        np.full(len(y), 0.8 * sd),
        norm.cdf(y, mean, sd),
        -norm.logpdf(y, mean, sd),
        mean[:, None] - reach,
        mean[:, None] + reach,
    )
    return Examples(rows, y, client)


def test_entropy_is_the_sum_of_its_parts():
    pooled = measured(some_classes((20, 30)), 2).parts["personal"].pooled
    np.testing.assert_allclose(pooled["entropy"].value, pooled["aleatoric"].value + pooled["epistemic"].value)
    np.testing.assert_allclose(pooled["epistemic"].value, pooled["entropy"].value / 4)


def test_the_parts_of_the_brier_score_add_up_in_the_table():
    pooled = measured(some_classes((20, 30)), 2).parts["personal"].pooled
    parts = [pooled[f"brier_{name}"].value for name in ("reliability", "resolution", "uncertainty")]
    np.testing.assert_allclose(parts[0] - parts[1] + parts[2], pooled["brier"].value)


def test_a_client_without_test_rows_has_no_scores_and_changes_none():
    test = some_classes((20, 0, 30))
    with_it = measured(test, 3).parts["personal"]
    without = measured(Examples(test.rows, test.y, np.where(test.client == 2, 1, 0)), 2, train=[10, 12])
    assert np.isnan(with_it.clients["accuracy"]).tolist() == [False, True, False]
    assert with_it.clients["test"].tolist() == [20, 0, 30]
    assert with_it.pooled == without.parts["personal"].pooled
    assert with_it.spread == without.parts["personal"].spread


def test_a_single_client_has_standard_errors_from_its_examples():
    test = some_classes((400,))
    found = measure({"personal": answers_of(test, 1)}, None, classes=("a", "b", "c"), **HOW | {"bootstrap": 800})
    accuracy = found.parts["personal"].pooled["accuracy"]
    expected = math.sqrt(accuracy.value * (1 - accuracy.value) / 400)
    assert abs(accuracy.standard_error - expected) < 4 * expected / math.sqrt(2 * 800)


def test_the_worst_client_and_the_tenth_percentile_are_those_of_the_bad_end():
    part = measured(some_classes((20, 30, 25)), 3).parts["personal"]
    accuracy, nll = part.clients["accuracy"], part.clients["nll"]
    assert (part.spread["accuracy"].worst, part.spread["nll"].worst) == (accuracy.min(), nll.max())
    assert part.spread["nll"].p10 == pytest.approx(np.percentile(nll, 90))


def test_curves_are_of_the_best_the_median_and_the_worst_client():
    part = measured(some_classes((20, 30, 25)), 3).parts["personal"]
    order = np.argsort(part.clients["accuracy"])
    found = [part.reliability[name].client for name in ("worst", "median", "best")]
    assert found == [f"c{i}" for i in order]
    assert part.reliability["pooled"].count.sum() == 75


def test_groups_by_size_are_at_most_four_and_hold_everybody():
    part = measured(some_classes((5,) * 10), 10, train=[1, 1, 1, 1, 5, 6, 7, 8, 9, 100]).parts["personal"]
    assert len(part.by_size) <= 4
    assert (part.by_size[0].least, part.by_size[0].most, part.by_size[0].clients) == (1, 1, 4)
    assert sum(band.clients for band in part.by_size) == 10
    assert part.by_size[-1].most == 100
    weighted = sum(band.test * band.scores["nll"].value for band in part.by_size)
    assert weighted / 50 == pytest.approx(part.pooled["nll"].value)


def test_sets_are_calibrated_on_each_clients_own_rows():
    sure = np.tile([0.9, 0.05, 0.05], (20, 1))
    validation = classes_of(np.concatenate([sure, sure]), np.repeat([0, 1], 20), np.repeat([0, 1], 20))
    test = classes_of(np.concatenate([sure, sure]), np.repeat([0, 1], 20), np.repeat([0, 1], 20))
    part = measured(test, 2, validation=validation).parts["personal"]
    # The first client is always right, the second always wrong, so its sets need the unlikely classes.
    assert part.clients["set_size"].tolist() == [1.0, 3.0]
    assert part.clients["set_coverage"].tolist() == [1.0, 1.0]
    assert (part.sets.size.value, part.sets.calibration, part.sets.without) == (2.0, 40, 0)


def test_a_client_without_validation_rows_has_no_sets_and_is_counted():
    part = measured(some_classes((20, 30)), 2, validation=some_classes((20,))).parts["personal"]
    assert part.sets.without == 1
    assert np.isnan(part.clients["set_size"]).tolist() == [False, True]


def test_clients_with_too_few_validation_rows_are_counted_and_get_every_class():
    part = measured(some_classes((20, 30)), 2, validation=some_classes((8, 9))).parts["personal"]
    assert part.sets.too_few == 1
    assert part.clients["set_size"][0] == 3.0


def test_without_validation_rows_it_is_said_why_there_are_no_sets():
    part = measured(some_classes((20, 30)), 2).parts["personal"]
    assert part.sets is None
    assert "validation=0.2" in part.sets_missing


def test_newcomers_without_labels_have_no_sets():
    made = answers_of(some_classes((20, 30)), 2, validation=some_classes((20, 20)))
    parts = dict.fromkeys(("personal", "newcomers", "newcomers_unlabelled", "newcomers_global"), made)
    found = measure(parts, None, classes=("a", "b", "c"), **HOW)
    assert [name for name, part in found.parts.items() if part.sets] == ["personal", "newcomers"]
    assert "labels" in found.parts["newcomers_unlabelled"].sets_missing


def test_a_part_without_test_rows_is_left_out_and_a_run_without_any_refused():
    nobody = some_classes((0, 0))
    parts = {"personal": answers_of(some_classes((5, 5)), 2), "newcomers": answers_of(nobody, 2)}
    assert set(measure(parts, None, classes=("a", "b", "c"), **HOW).parts) == {"personal"}
    with pytest.raises(UsageError, match=r"test=0\.2"):
        measured(nobody, 2)


def test_foreign_inputs_are_compared_client_by_client():
    test, draw = some_classes((20, 30)), np.random.default_rng(1)
    foreign = draw.uniform(0, 1.1, size=(2, 2, 40))
    inputs = ForeignInputs("noise", np.zeros((40, 3), np.float32), None)
    found = measured(test, 2, inputs=inputs, foreign=foreign)
    entropy = np.asarray(test.rows.aleatoric + test.rows.epistemic)
    expected = 0.0
    for client, share in ((0, 0.4), (1, 0.6)):
        own = entropy[test.client == client]
        truth = np.repeat([0, 1], [len(own), 40])
        expected += share * roc_auc_score(truth, np.concatenate([own, foreign[client, 0]]))
    np.testing.assert_allclose(found.ood.auroc.value, expected)
    assert (found.ood.data, found.ood.examples) == ("noise", 40)
    for name in ("entropy", "epistemic"):
        inside, outside = getattr(found.parts["personal"], name), getattr(found.ood, name)
        np.testing.assert_array_equal(inside.edges, outside.edges)
        assert (inside.count.sum(), outside.count.sum()) == (50, 80)


def test_a_model_without_epistemic_uncertainty_cannot_tell_by_it():
    foreign = np.stack([np.full((1, 40), 0.5), np.zeros((1, 40))], axis=1)
    draw = np.random.default_rng(0)
    test = classes_of(draw.dirichlet(np.ones(3), size=20), draw.integers(3, size=20), np.zeros(20, int), 0.0)
    inputs = ForeignInputs("noise", np.zeros((40, 3), np.float32), None)
    assert measured(test, 1, inputs=inputs, foreign=foreign).ood.auroc_epistemic.value == 0.5


def test_intervals_of_a_true_normal_cover_at_their_levels():
    num = 4000
    part = measured(some_targets((num,)), 1).parts["personal"]
    for level, reached in zip(part.coverage.level, part.coverage.reached, strict=True):
        assert abs(reached - level) < 4 * math.sqrt(level * (1 - level) / num)


def test_the_numbers_of_a_regression_are_those_of_its_rows():
    test = some_targets((30, 50))
    pooled = measured(test, 2).parts["personal"].pooled
    np.testing.assert_allclose(pooled["rmse"].value, np.sqrt(np.mean((test.y - test.rows.mean) ** 2)))
    np.testing.assert_allclose([pooled[name].value for name in ("sharpness", "aleatoric", "epistemic")], [2, 1.2, 1.6])
    low, high = test.rows.low[:, 2], test.rows.high[:, 2]
    fine = 20 * (np.maximum(low - test.y, 0) + np.maximum(test.y - high, 0))
    np.testing.assert_allclose(pooled["interval_score_90"].value, np.mean(high - low + fine))


def test_conformal_intervals_mend_a_model_that_is_too_sure():
    test, validation = some_targets((2000,)), some_targets((2000,), seed=1)
    shrunk = [
        Examples(
            TargetRows(r.mean, r.aleatoric / 4, r.epistemic / 4, norm.cdf(e.y, r.mean, 0.5), r.nll, r.low, r.high),
            e.y,
            e.client,
        )
        for e, r in ((test, test.rows), (validation, validation.rows))
    ]
    part = measured(shrunk[0], 1, validation=shrunk[1]).parts["personal"]
    assert part.pooled["coverage_90"].value < 0.5
    # Both the threshold and the test rows are a sample of 2000.
    assert abs(part.intervals.coverage.value - 0.9) < 4 * math.sqrt(0.09 * 2 / 2000)
    # Its width is that of the right interval: the sd of the quantile of |z| is √(0.09/n) over its density there.
    error = math.sqrt(0.09 / 2000) / (2 * norm.pdf(1.645))
    assert abs(part.intervals.width.value / 2 / 2.0 - norm.ppf(0.95)) < 4 * error


def test_intervals_without_bound_are_left_out_of_the_width():
    part = measured(some_targets((30, 30)), 2, validation=some_targets((5, 20))).parts["personal"]
    assert part.intervals.too_few == 1
    assert part.clients["interval_width"][0] == math.inf
    assert part.intervals.width.value == pytest.approx(part.clients["interval_width"][1])


@pytest.mark.parametrize("kind", ["classes", "targets"])
def test_tables_survive_the_way_through_json(kind):
    some = some_classes if kind == "classes" else some_targets
    test = some((20, 0, 30))
    inputs = ForeignInputs("noise", np.zeros((40, 3), np.float32), None)
    foreign = np.random.default_rng(0).uniform(size=(3, 2, 40))
    found = measured(test, 3, inputs=inputs, foreign=foreign, validation=some((5, 0, 20)))
    text = json.dumps(found.to_json(), allow_nan=False)
    back = Uncertainty.from_json(json.loads(text))
    assert json.dumps(back.to_json(), allow_nan=False) == text
    assert type(back.parts["personal"]) is type(found.parts["personal"])
    assert back.parts["personal"].pooled == found.parts["personal"].pooled


def test_a_model_that_says_nothing_has_no_numbers_but_tables():
    test = some_classes((20, 30))
    broken = Examples(
        ClassRows(*(np.full(np.shape(leaf), np.nan) for leaf in vars(test.rows).values())), test.y, test.client
    )
    found = measured(broken, 2, validation=broken).to_json()["parts"]["personal"]
    assert found["pooled"]["accuracy"]["value"] == 0.0
    assert found["pooled"]["nll"]["value"] is None
    assert found["pooled"]["rejection_area"]["value"] is None
    assert found["sets"]["size"]["value"] == 3.0


def test_an_impossible_label_makes_the_nll_infinite_and_null():
    probs = np.tile([1.0, 0.0, 0.0], (20, 1))
    found = measured(classes_of(probs, np.repeat([0, 1], 10), np.repeat([0, 1], 10)), 2).to_json()
    assert found["parts"]["personal"]["pooled"]["nll"] == {"value": None, "standard_error": None}


@pytest.mark.parametrize(("level", "bootstrap"), [(0.0, 10), (1.0, 10), (90, 10), (0.9, 1), (0.9, -5)])
def test_arguments_that_mean_nothing_are_refused(level, bootstrap):
    with pytest.raises(UsageError, match=r"level=|bootstrap="):
        priory.uncertainty.check(level, bootstrap)


@pytest.mark.parametrize("most", [1, 1 << 28])
def test_every_example_comes_to_the_host_once_and_under_its_client(monkeypatch, most):
    monkeypatch.setattr(answers, "MOST_BYTES", most)  # a client at a time, or as many as are alike
    monkeypatch.setattr(priory.evaluate, "TEST_BATCH", 4)
    sizes, draw = [3, 40, 9, 17, 5], np.random.default_rng(0)
    client = np.repeat(np.arange(5), sizes)
    federation = priory.data.from_arrays(
        draw.normal(size=(74, 2)), draw.normal(size=74), client, task="regression", test=0.4, validation=0.3, seed=0
    )
    asked = []

    def of_each(ids, function):
        return function(None, ids)

    def ask(task, ids, *, batches):
        asked.append(batches)

        def rows(split):
            index = split.start[ids][:, None] + np.arange(batches * 4)  # the pool row, and nonsense past the end
            return {
                "personal": TargetRows(*(index * 1.0 for _ in range(5)), *(index[..., None] * 1.0 for _ in range(2)))
            }

        return ClientRows(rows(federation.test), rows(federation.validation), None)

    found = collect(federation, np.arange(5), of_each, ask)["personal"]
    for part in ("test", "validation"):
        split, examples = getattr(federation, part), getattr(found, part)
        expected = np.concatenate([np.arange(federation.num_examples)[federation.rows(i, part)] for i in range(5)])
        np.testing.assert_array_equal(examples.rows.mean, expected)
        np.testing.assert_array_equal(examples.y, federation.y[expected].astype(float))
        np.testing.assert_array_equal(np.bincount(examples.client, minlength=5), split.count)
    assert set(asked) == {1, 2, 4}  # the largest client has 16 test rows, others fewer batches
