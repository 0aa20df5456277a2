import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import log_softmax
from sklearn.metrics import brier_score_loss, log_loss

from priory import metrics
from priory.metrics import RegressionTally, Tally

# One program each, where an eager call is one for each operation.
tally_classification = jax.jit(metrics.tally_classification)
tally_regression = jax.jit(metrics.tally_regression)
add = jax.jit(metrics.add)
confidence_bins = jax.jit(metrics.confidence_bins)
entropy = jax.jit(metrics.entropy)
mixture_log_probs = jax.jit(metrics.mixture_log_probs)
mixture_mean_and_sd = jax.jit(metrics.mixture_mean_and_sd)
mutual_information = jax.jit(metrics.mutual_information)


def stack(*tallies):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *tallies)


def everyone(num):
    return np.ones(num, dtype=bool)


def certain(classes):
    """Log probabilities of one class each."""
    return np.where(np.eye(classes, dtype=bool), np.float32(0), -np.float32(np.inf))


def constant_confidence(confidence, num, num_correct):
    log_probs = np.log(np.tile(np.float32([[confidence, 1 - confidence]]), (num, 1)))
    return tally_classification(log_probs, np.int32(np.arange(num) >= num_correct), everyone(num))


def random_predictions(num=64, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    log_probs = np.float32(log_softmax(rng.normal(size=(num, classes)), axis=-1))
    return log_probs, np.int32(rng.integers(0, classes, num))


def random_mixture(num=64, samples=3, seed=0):
    rng = np.random.default_rng(seed)
    mean = np.float32(rng.normal(size=(samples, num)))
    sd = np.float32(rng.uniform(0.5, 2.0, size=(samples, num)))
    log_weights = np.float32(log_softmax(rng.normal(size=(samples, num)), axis=0))
    return mean, sd, log_weights, np.float32(2 * rng.normal(size=num))


def regression_of(squared_errors):
    ones = np.ones(len(squared_errors), np.float32)
    return RegressionTally(
        count=ones, squared_error=np.float32(squared_errors), nll=ones, covered=ones, uncertainty=ones
    )


def classification_of(correct, count):
    """Clients with these numbers of correct answers, and nothing else of interest."""
    count = np.float32(count)
    bins = np.zeros((len(count), metrics.NUM_BINS, 3), np.float32)
    bins[:, 0, 0] = count
    return Tally(count, np.float32(correct), count, count, count, bins)


def test_constant_confidence_08_with_accuracy_06_has_calibration_errors_of_02():
    scores = metrics.summarise(stack(constant_confidence(0.8, num=10, num_correct=6)))
    assert_allclose([scores.ece, scores.mce, scores.accuracy], [0.2, 0.2, 0.6], atol=1e-6)


def test_calibration_error_weighs_bins_by_their_examples_and_the_maximum_does_not():
    scores = metrics.summarise(stack(constant_confidence(0.9, 30, 27), constant_confidence(0.7, 10, 3)))
    assert_allclose([scores.ece, scores.mce], [0.25 * 0.4, 0.4], atol=1e-6)


def test_calibration_error_is_taken_on_the_pooled_examples():
    # One client is over-confident by 0.2, the other under-confident by as much: together they are calibrated.
    scores = metrics.summarise(stack(constant_confidence(0.7, 10, 5), constant_confidence(0.7, 10, 9)))
    assert_allclose(scores.ece, 0.0, atol=1e-6)


def test_labels_drawn_from_the_predictive_are_calibrated_up_to_sampling_noise():
    num = 20_000
    draw = np.random.default_rng(0)
    log_probs = np.float32(log_softmax(draw.normal(size=(num, 5)), axis=-1))
    y = np.argmax(log_probs + draw.gumbel(size=(num, 5)), axis=-1).astype(np.int32)
    scores = metrics.summarise(stack(tally_classification(log_probs, y, everyone(num))))
    # A bin adds |N(0, Σ p(1−p))| / n to the ECE: a half-normal of mean √(2/π) s_b and variance (1 − 2/π) s_b².
    confidence = np.exp(np.asarray(log_probs, np.float64)).max(axis=-1)
    place = np.asarray(confidence_bins(np.float32(confidence)))
    variance = np.bincount(place, weights=confidence * (1 - confidence), minlength=metrics.NUM_BINS) / num**2
    expected, error = np.sqrt(2 / np.pi * variance).sum(), np.sqrt((1 - 2 / np.pi) * variance.sum())
    assert abs(scores.ece - expected) < 4 * error  # and `expected` is O(1/√n)
    assert abs(scores.accuracy - confidence.mean()) < 4 * np.sqrt(variance.sum())


def test_bins_are_closed_on_the_right():
    edges = np.asarray(jnp.arange(1, metrics.NUM_BINS + 1) / metrics.NUM_BINS)  # NumPy's differ in the last bit
    assert confidence_bins(edges).tolist() == list(range(15))
    above = np.nextafter(edges, np.float32(1))
    assert confidence_bins(above).tolist() == [*range(1, 15), 14]  # there is nothing above the last


def test_the_reliability_curve_has_examples_confidence_and_accuracy_of_each_bin():
    # Bins of 1/15 from 0: 0.9 falls in the 14th, 0.7 in the 11th, and the two clients are pooled there.
    clients = (constant_confidence(0.9, 30, 27), constant_confidence(0.7, 10, 3), constant_confidence(0.7, 10, 8))
    curve = metrics.summarise(stack(*clients)).reliability
    assert curve.shape == (15, 3)
    assert_allclose(curve[[10, 13]], [[20, 0.7, 0.55], [30, 0.9, 0.9]], rtol=1e-6)


def test_an_empty_bin_has_no_confidence_and_no_accuracy():
    curve = metrics.summarise(stack(constant_confidence(0.8, num=10, num_correct=6))).reliability
    empty = np.delete(curve, 11, axis=0)
    assert (empty[:, 0] == 0).all()
    assert np.isnan(empty[:, 1:]).all()


def test_calibration_errors_are_those_of_the_curve():
    log_probs, y = random_predictions(num=512)
    scores = metrics.summarise(stack(tally_classification(log_probs, y, everyone(512))))
    count, confidence, accuracy = scores.reliability[scores.reliability[:, 0] > 0].T
    assert len(count) > 5
    gaps = np.abs(confidence - accuracy)
    assert_allclose([scores.ece, scores.mce], [np.average(gaps, weights=count), gaps.max()], rtol=1e-12)


def test_the_reliability_curve_of_a_diverged_run_is_null_where_it_is_not_finite():
    tally = tally_classification(np.full((3, 3), np.nan, np.float32), np.arange(3, dtype=np.int32), everyone(3))
    curve = metrics.summarise(stack(tally)).to_json()["reliability"]
    assert [curve[name][0] for name in ("count", "confidence", "accuracy")] == [3, None, 0]


def test_confidence_zero_falls_in_the_first_bin():
    assert confidence_bins(np.zeros(15, np.float32)).tolist() == [0] * 15


def test_a_certain_and_right_prediction_scores_perfectly():
    scores = metrics.summarise(stack(tally_classification(certain(3), np.arange(3, dtype=np.int32), everyone(3))))
    assert (scores.accuracy, scores.nll, scores.ece, scores.mce, scores.brier) == (1, 0, 0, 0, 0)


def test_a_certain_and_wrong_prediction_has_brier_two_and_no_finite_nll():
    scores = metrics.summarise(stack(tally_classification(certain(2), np.int32([1, 0]), everyone(2))))
    assert scores.brier == 2
    assert scores.to_json()["nll"] is None


@pytest.mark.parametrize("size", [1.0, 30.0, 200.0])
def test_two_components_that_contradict_each_other_give_one_half(size):
    logits = np.float32(size * np.array([[[1.0, -1.0]], [[-1.0, 1.0]]]))
    log_probs = mixture_log_probs(logits, np.full((2, 1), np.log(0.5), np.float32))
    assert_allclose(np.exp(log_probs), [[0.5, 0.5]], rtol=1e-6)


def test_a_component_of_weight_zero_has_no_say():
    logits = np.float32([[[2.0, 0.0]], [[-5.0, 5.0]]])
    log_probs = mixture_log_probs(logits, np.float32([[0.0], [-np.inf]]))
    assert_allclose(log_probs, log_softmax(np.float64(logits[0]), axis=-1), rtol=1e-6)


def test_nll_brier_and_accuracy_agree_with_scikit_learn():
    log_probs, y = random_predictions()
    scores = metrics.summarise(stack(tally_classification(log_probs, y, everyone(64))))
    probs = np.exp(np.asarray(log_probs, np.float64))
    probs /= probs.sum(axis=1, keepdims=True)
    assert_allclose(scores.nll, log_loss(y, probs, labels=range(4)), rtol=1e-5)
    assert_allclose(scores.brier, brier_score_loss(y, probs, labels=range(4), scale_by_half=False), rtol=1e-5)
    assert scores.accuracy == np.mean(probs.argmax(axis=1) == np.asarray(y))


def test_classification_tallies_add_over_batches():
    log_probs, y = random_predictions()
    total = metrics.zero(Tally)
    for rows in (slice(0, 10), slice(10, 64)):
        part = tally_classification(log_probs[rows], y[rows], everyone(len(y[rows])))
        total = add(total, part)
    whole = tally_classification(log_probs, y, everyone(64))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5), total, whole)


def test_regression_tallies_add_over_batches():
    mean, sd, log_weights, y = random_mixture()
    total = metrics.zero(RegressionTally)
    for rows in (slice(0, 10), slice(10, 64)):
        part = (mean[:, rows], sd[:, rows], log_weights[:, rows], y[rows])
        total = add(total, tally_regression(*part, everyone(len(y[rows]))))
    whole = tally_regression(mean, sd, log_weights, y, everyone(64))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5), total, whole)


@pytest.mark.parametrize("label", [0, -1, 99])
def test_a_masked_row_changes_no_classification_tally_even_if_nan(label):
    log_probs, y = random_predictions(num=8)
    padded = np.concatenate([log_probs, np.full((2, 4), np.nan, np.float32)])
    mask = np.arange(10) < 8
    with_padding = tally_classification(padded, np.append(y, np.full(2, label, np.int32)), mask)
    jax.tree.map(assert_allclose, with_padding, tally_classification(log_probs, y, everyone(8)))


def test_a_masked_row_changes_no_regression_tally_even_if_nan():
    rows = random_mixture(num=8)
    padded = [np.concatenate([a, np.full((*a.shape[:-1], 2), np.nan, np.float32)], axis=-1) for a in rows]
    with_padding = tally_regression(*padded, np.arange(10) < 8)
    expected = tally_regression(*rows, everyone(8))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-6), with_padding, expected)


def test_a_nan_prediction_is_wrong_whatever_the_label():
    y = np.arange(3, dtype=np.int32)
    tally = tally_classification(np.full((3, 3), np.nan, np.float32), y, everyone(3))
    assert (float(tally.correct), float(tally.count)) == (0, 3)


def test_nan_predictions_become_null_in_json():
    tally = tally_classification(np.full((3, 3), np.nan, np.float32), np.arange(3, dtype=np.int32), everyone(3))
    scores = metrics.summarise(stack(tally)).to_json()
    assert (scores["accuracy"], scores["nll"], scores["ece"], scores["mce"], scores["brier"]) == (
        0,
        None,
        None,
        None,
        None,
    )


def test_regression_nll_and_coverage_agree_with_scipy():
    mean, sd, log_weights, y = random_mixture(num=256)
    tally = tally_regression(mean, sd, log_weights, y, everyone(256))
    weights = np.exp(np.asarray(log_weights, np.float64))
    density = (weights * stats.norm.pdf(y, mean, sd)).sum(axis=0)
    cdf = (weights * stats.norm.cdf(y, mean, sd)).sum(axis=0)
    inside = (cdf >= 0.05) & (cdf <= 0.95)
    assert 0 < inside.sum() < 256
    assert_allclose(tally.nll, -np.log(density).sum(), rtol=1e-5)
    assert float(tally.covered) == inside.sum()


def test_the_point_prediction_is_the_mean_of_the_mixture():
    mean, weights = np.float32([[1.0], [4.0]]), np.float32([[0.25], [0.75]])
    tally = tally_regression(mean, np.ones((2, 1), np.float32), np.log(weights), np.float32([0.0]), everyone(1))
    assert_allclose(tally.squared_error, (0.25 * 1 + 0.75 * 4) ** 2, rtol=1e-6)


def test_a_correct_gaussian_covers_90_per_cent():
    num = 10_000
    y = 2 + 3 * np.random.default_rng(0).standard_normal(num, np.float32)
    tally = tally_regression(*(np.full((1, num), value, np.float32) for value in (2, 3, 0)), y, everyone(num))
    scores = metrics.summarise(stack(tally))
    assert abs(scores.coverage_90 - 0.9) < 3 * np.sqrt(0.9 * 0.1 / num)  # three standard errors
    assert abs(scores.rmse - 3.0) < 3 * 3.0 / np.sqrt(2 * num)


def test_pooled_scores_count_examples_and_the_spread_counts_clients():
    scores = metrics.summarise(classification_of(correct=[90, 0], count=[90, 10]))
    assert scores.accuracy == 0.9
    assert (scores.clients.mean, scores.clients.worst) == (0.5, 0.0)


def test_worst_and_p10_are_the_low_end_of_accuracy():
    scores = metrics.summarise(classification_of(correct=np.arange(11), count=np.full(11, 10)))
    assert_allclose([scores.clients.mean, scores.clients.worst, scores.clients.p10], [0.5, 0.0, 0.1])


def test_worst_and_p10_are_the_high_end_of_rmse():
    scores = metrics.summarise(regression_of(np.arange(11.0) ** 2))
    assert_allclose([scores.clients.mean, scores.clients.worst, scores.clients.p10], [5.0, 10.0, 9.0])


def test_a_client_without_test_examples_is_left_out_of_every_mean():
    scores = metrics.summarise(classification_of(correct=[4, 0, 8], count=[10, 0, 10]))
    assert_allclose([scores.accuracy, scores.clients.mean, scores.clients.worst], [0.6, 0.6, 0.4])
    assert np.isnan(scores.per_client["accuracy"]).tolist() == [False, True, False]
    assert scores.per_client["count"].tolist() == [10, 0, 10]


@pytest.mark.parametrize("kind", [Tally, RegressionTally])
def test_a_federation_without_test_examples_has_no_scores(kind):
    assert metrics.summarise(stack(metrics.zero(kind), metrics.zero(kind))) is None


def test_an_infinite_client_becomes_null_without_hiding_the_others():
    scores = metrics.summarise(regression_of([1.0, np.inf]))
    assert scores.to_json()["clients"]["worst"] is None
    assert scores.per_client["rmse"].tolist() == [1.0, np.inf]


def test_summaries_have_the_keys_of_a_run_summary():
    classes = metrics.summarise(classification_of([1], [2])).to_json()
    numbers = metrics.summarise(regression_of([1.0])).to_json()
    assert set(classes) == {"accuracy", "nll", "ece", "mce", "brier", "uncertainty", "clients", "reliability"}
    assert set(numbers) == {"rmse", "nll", "coverage_90", "uncertainty", "clients"}
    assert set(classes["clients"]) == set(numbers["clients"]) == {"mean", "worst", "p10"}


def test_tallies_accumulate_inside_a_compiled_loop():
    log_probs, y = random_predictions()

    def body(total, rows):
        return metrics.add(total, tally_classification(*rows, everyone(16))), None

    batches = (log_probs.reshape(4, 16, 4), y.reshape(4, 16))
    total, _ = jax.jit(lambda b: jax.lax.scan(body, metrics.zero(Tally), b))(batches)
    whole = tally_classification(log_probs, y, everyone(64))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5), total, whole)


@pytest.mark.parametrize("size", [0.0, 30.0, 200.0])
def test_two_components_that_contradict_each_other_leave_log_2_of_uncertainty(size):
    logits = np.float32(size * np.array([[[1.0, -1.0]], [[-1.0, 1.0]]]))
    log_probs = mixture_log_probs(logits, np.full((2, 1), np.log(0.5), np.float32))
    tally = tally_classification(log_probs, np.int32([0]), everyone(1))
    assert_allclose(tally.uncertainty, np.log(2), rtol=1e-6)


def test_entropy_agrees_with_scipy():
    log_probs, _ = random_predictions()
    assert_allclose(entropy(log_probs), stats.entropy(np.exp(np.float64(log_probs)), axis=1), rtol=1e-5)


def test_a_certain_prediction_has_no_entropy_even_where_a_class_is_impossible():
    assert entropy(certain(3)).tolist() == [0, 0, 0]


def test_a_probability_rounded_above_one_has_no_negative_entropy():
    assert entropy(np.float32([[1e-7, -40.0]])).tolist() == [0]


def test_the_entropy_of_a_nan_prediction_is_nan():
    assert np.isnan(entropy(np.full((3, 3), np.nan, np.float32))).all()


def test_uncertainty_does_not_depend_on_the_labels():
    log_probs, y = random_predictions()
    one, other = (tally_classification(log_probs, labels, everyone(64)) for labels in (y, (y + 1) % 4))
    assert float(one.uncertainty) == float(other.uncertainty)
    assert float(one.nll) != float(other.nll)


def test_the_variance_of_a_mixture_is_the_mean_of_variances_and_the_variance_of_means():
    mean, sd, weights = np.float32([[[1.0], [4.0]], [[0.5], [2.0]], [[0.25], [0.75]]])
    tally = tally_regression(mean, sd, np.log(weights), np.float32([0.0]), everyone(1))
    within, between = 0.25 * 0.5**2 + 0.75 * 2.0**2, 0.25 * 0.75 * (4.0 - 1.0) ** 2
    assert_allclose(tally.uncertainty, np.sqrt(within + between), rtol=1e-6)


def test_a_spread_far_from_zero_is_not_lost_to_rounding():
    mean, sd, half = np.float32([[[1e4 - 1.0], [1e4 + 1.0]], [[1e-3], [1e-3]], [[np.log(0.5)], [np.log(0.5)]]])
    _, spread = mixture_mean_and_sd(mean, sd, half)
    assert_allclose(spread, [1.0], rtol=1e-3)


def test_uncertainty_is_a_mean_over_examples_and_over_those_of_each_client():
    log_probs, y = random_predictions()
    parts = [
        tally_classification(log_probs[rows], y[rows], everyone(len(y[rows]))) for rows in (slice(16), slice(16, 64))
    ]
    scores = metrics.summarise(stack(*parts, metrics.zero(Tally)))
    each = np.asarray(entropy(log_probs))
    assert_allclose(scores.uncertainty, each.mean(), rtol=1e-5)
    assert_allclose(scores.per_client["uncertainty"], [each[:16].mean(), each[16:].mean(), np.nan], rtol=1e-5)


@pytest.mark.parametrize("tallies", [classification_of([1, 2], [2, 2]), regression_of([1.0, 2.0])])
def test_scores_come_back_from_json(tallies):
    scores = metrics.summarise(tallies)
    columns = {name: values.tolist() for name, values in scores.per_client.items()}
    again = metrics.from_json(scores.to_json(), {"client": ["a", "b"], **columns})
    assert again == scores
    assert_allclose(again.per_client["uncertainty"], scores.per_client["uncertainty"])


def test_the_reliability_curve_comes_back_from_json():
    log_probs, y = random_predictions()
    scores = metrics.summarise(stack(tally_classification(log_probs, y, everyone(64))))
    again = metrics.from_json(json.loads(json.dumps(scores.to_json(), allow_nan=False)), {})
    np.testing.assert_array_equal(again.reliability, scores.reliability)
    assert metrics.calibration_errors(again.reliability) == (scores.ece, scores.mce)


def test_scores_that_were_written_without_a_reliability_curve_read_as_nan():
    scores = metrics.summarise(classification_of([1, 2], [2, 2]))
    pooled = {name: value for name, value in scores.to_json().items() if name != "reliability"}
    again = metrics.from_json(pooled, {})
    assert again.accuracy == scores.accuracy
    assert again.reliability.shape == (15, 3)
    assert np.isnan(again.reliability).all()
    assert np.isnan(metrics.calibration_errors(again.reliability)).all()


@pytest.mark.parametrize("tallies", [classification_of([1, 2], [2, 2]), regression_of([1.0, 2.0])])
def test_scores_that_were_written_without_uncertainty_read_as_nan(tallies):
    scores = metrics.summarise(tallies)
    pooled = {name: value for name, value in scores.to_json().items() if name != "uncertainty"}
    columns = {name: values.tolist() for name, values in scores.per_client.items() if name != "uncertainty"}
    again = metrics.from_json(pooled, columns)
    assert again.nll == scores.nll
    assert np.isnan(again.uncertainty)
    assert np.isnan(again.per_client["uncertainty"]).tolist() == [True, True]
    assert again.to_json()["uncertainty"] is None


def a_mixture(samples: int = 5, batch: int = 7):
    draw = np.random.default_rng(0)
    weights = draw.dirichlet(np.ones(samples), size=batch).T
    mean, sd = draw.normal(size=(samples, batch)), draw.uniform(0.2, 2.0, size=(samples, batch))
    return tuple(map(np.float32, (mean, sd, np.log(weights))))


@pytest.mark.parametrize("level", [0.025, 0.05, 0.5, 0.95])
def test_a_quantile_of_a_mixture_is_where_its_distribution_function_has_the_level(level):
    mixture = a_mixture()
    found = jax.jit(metrics.mixture_quantile)(np.float32(level), *mixture)
    np.testing.assert_allclose(jax.jit(metrics.mixture_cdf)(found, *mixture), level, atol=1e-6)


def test_a_quantile_of_a_single_normal_is_the_normal_one():
    mean, sd = np.float32([[1.0, -2.0]]), np.float32([[0.5, 3.0]])
    found = jax.jit(metrics.mixture_quantile)(np.float32(0.95), mean, sd, np.zeros((1, 2), np.float32))
    np.testing.assert_allclose(found, mean[0] + 1.6448536 * sd[0], rtol=1e-5)


def test_the_squares_of_the_two_sds_add_up_to_the_variance():
    mixture = a_mixture()
    aleatoric, epistemic = map(np.asarray, jax.jit(metrics.mixture_sds)(*mixture))
    sd = np.asarray(mixture_mean_and_sd(*mixture)[1])
    np.testing.assert_allclose(aleatoric**2 + epistemic**2, sd**2, rtol=1e-5)


def test_mutual_information_is_the_entropy_of_the_mixture_less_that_of_its_components():
    logits = np.float32(np.random.default_rng(0).normal(size=(5, 7, 3)))
    log_weights = a_mixture()[2]
    own = np.asarray(entropy(np.float32(log_softmax(np.float64(logits), axis=-1))))
    mixed = np.asarray(entropy(mixture_log_probs(logits, log_weights)))
    expected = mixed - np.sum(np.exp(log_weights) * own, axis=0)
    np.testing.assert_allclose(mutual_information(logits, log_weights), expected, atol=1e-6)


def test_mutual_information_of_one_component_is_exactly_zero():
    logits = np.float32(np.random.default_rng(0).normal(size=(1, 50, 10)))
    np.testing.assert_array_equal(mutual_information(logits, np.zeros((1, 50), np.float32)), np.zeros(50))
