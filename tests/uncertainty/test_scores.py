"""Scores as functions of sums: closed forms, and scikit-learn where it has the number."""

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, roc_auc_score

from priory.metrics import calibration_errors, confidence_bins, curve_of
from priory.uncertainty.bootstrap import Units, bootstrap, units_of
from priory.uncertainty.classes import Read, _classwise_sums
from priory.uncertainty.scores import (
    Binned,
    Order,
    accepted,
    brier_parts,
    classwise_ece,
    equal_mass_bins,
    interval_score,
    placement,
)


def forecasts(num: int = 500, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels that have something, but not everything, to do with them."""
    draw = np.random.default_rng(seed)
    probs = draw.dirichlet(np.full(classes, 0.5), size=num)
    tempered = probs**0.5 / np.sum(probs**0.5, axis=1, keepdims=True)
    return probs, np.array([draw.choice(classes, p=p) for p in tempered])


def classwise(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    hit = np.arange(probs.shape[1]) == y[:, None]
    return _classwise_sums(Read(probs, hit, {}), Units(np.zeros(len(y), int), 1)).total(np.ones(1))


def test_the_parts_of_the_brier_score_add_up():
    probs, y = forecasts()
    reliability, resolution, uncertainty = brier_parts(classwise(probs, y))
    brier = np.mean(np.sum((probs - np.eye(4)[y]) ** 2, axis=1))
    np.testing.assert_allclose(reliability - resolution + uncertainty, brier, rtol=1e-12)


def test_the_brier_score_of_classes_is_the_sum_of_scikit_learns_for_each():
    probs, y = forecasts()
    reliability, resolution, uncertainty = brier_parts(classwise(probs, y))
    expected = sum(brier_score_loss(y == c, probs[:, c]) for c in range(4))
    np.testing.assert_allclose(reliability - resolution + uncertainty, expected, rtol=1e-12)


def test_a_forecast_of_the_base_rates_has_neither_reliability_nor_resolution():
    y = np.repeat([0, 1, 2], [50, 30, 20])
    found = brier_parts(classwise(np.tile([0.5, 0.3, 0.2], (100, 1)), y))
    np.testing.assert_allclose(found, [0.0, 0.0, 0.25 + 0.21 + 0.16], atol=1e-12)


def test_classwise_ece_is_the_mean_over_classes_of_scikit_learns_curve():
    probs, y = forecasts()
    expected = []
    for c in range(4):
        rate, mean = calibration_curve(y == c, probs[:, c], n_bins=15)
        count = np.bincount(confidence_bins(probs[:, c]), minlength=15)
        expected.append(np.sum(count[count > 0] / len(y) * np.abs(rate - mean)))
    np.testing.assert_allclose(classwise_ece(classwise(probs, y)), np.mean(expected), rtol=1e-10)


@pytest.mark.parametrize("bins", [confidence_bins, equal_mass_bins], ids=["equal width", "equal mass"])
def test_a_confidence_of_08_with_an_accuracy_of_06_has_an_error_of_02(bins):
    confidence, right = np.full(100, 0.8), np.repeat([1.0, 0.0], [60, 40])
    sums = Binned.of(units_of(np.zeros(100)), bins(confidence), [np.ones(100), confidence, right], (15,))
    np.testing.assert_allclose(calibration_errors(curve_of(sums.total(np.ones(100)))), (0.2, 0.2))


@pytest.mark.parametrize("bins", [confidence_bins, equal_mass_bins], ids=["equal width", "equal mass"])
def test_a_perfectly_calibrated_model_has_an_error_of_the_order_of_sampling(bins):
    draw, num = np.random.default_rng(0), 20_000
    confidence = draw.uniform(0.2, 1.0, size=num)
    right = (draw.uniform(size=num) < confidence) * 1.0
    bin_of = bins(confidence)
    sums = Binned.of(units_of(np.zeros(num)), bin_of, [np.ones(num), confidence, right], (15,))
    ece = calibration_errors(curve_of(sums.total(np.ones(num))))[0]
    # n_b |gap_b| is about |N(0, Σ p(1 − p))|, with mean √(2/π) and variance 1 − 2/π times that.
    variance = np.bincount(bin_of, confidence * (1 - confidence), 15)
    expected = np.sum(np.sqrt(2 / np.pi * variance)) / num
    error = np.sqrt(np.sum((1 - 2 / np.pi) * variance)) / num
    assert abs(ece - expected) < 4 * error


def test_equal_mass_bins_hold_equally_many_and_equal_confidences_share_one():
    assert np.bincount(equal_mass_bins(np.random.default_rng(0).uniform(size=150))).tolist() == [10] * 15
    assert len(set(equal_mass_bins(np.ones(100)))) == 1


def test_bins_are_those_of_the_evaluation():
    import jax
    import jax.numpy as jnp

    edges = jax.jit(lambda: jnp.arange(1, 15) / 15)()  # i/15 as XLA rounds it
    values = np.concatenate([np.asarray(edges), np.float32([0.0, 0.03, 0.5, 0.99, 1.0, np.nan])])
    expected = jnp.sum(values[:, None] > edges[None], axis=1)
    np.testing.assert_array_equal(confidence_bins(values), expected)
    np.testing.assert_array_equal(jax.jit(confidence_bins)(values), expected)


def test_a_perfect_ranking_has_the_largest_rejection_area():
    right = np.repeat([1.0, 0.0], [600, 400])
    area = Order.by(np.arange(1000.0)).area(right, np.ones(1000))
    # ∫ min(1, a/κ) dκ = a (1 − log a); the sum over examples is a little off it.
    np.testing.assert_allclose(area, 0.6 * (1 - np.log(0.6)), atol=1e-3)


def test_a_ranking_that_says_nothing_has_the_accuracy_for_its_area_and_its_curve():
    right = np.repeat([1.0, 0.0], [600, 400])
    order = Order.by(np.full(1000, 0.3))
    np.testing.assert_allclose(order.area(right, np.ones(1000)), 0.6)
    np.testing.assert_allclose(order.accuracy(right, np.array([1.0, 0.5, 0.05])), 0.6)


def test_the_rejection_area_is_the_integral_of_its_curve():
    draw = np.random.default_rng(0)
    entropy, right = draw.integers(0, 40, size=300).astype(float), (draw.uniform(size=300) < 0.7) * 1.0
    order, share = Order.by(entropy), (np.arange(200_000) + 0.5) / 200_000
    np.testing.assert_allclose(order.area(right, np.ones(300)), order.accuracy(right, share).mean(), rtol=1e-6)


def test_a_weight_counts_an_example_so_often():
    draw = np.random.default_rng(0)
    entropy, right, weights = draw.uniform(size=50), (draw.uniform(size=50) < 0.7) * 1.0, draw.integers(0, 3, size=50)
    repeated = Order.by(np.repeat(entropy, weights)).area(np.repeat(right, weights), np.ones(weights.sum()))
    np.testing.assert_allclose(Order.by(entropy).area(right, weights.astype(float)), repeated)


def test_the_curve_of_kept_examples_counts_the_most_certain():
    order = Order.by(np.array([0.4, 0.1, 0.3, 0.2]))
    found = order.accuracy(np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 0.75, 0.5, 0.25]))
    np.testing.assert_allclose(found, [0.5, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize("ties", [False, True])
def test_the_mean_placement_is_scikit_learns_auroc(ties):
    draw = np.random.default_rng(0)
    own, foreign = draw.normal(size=80), draw.normal(1.0, size=120)
    if ties:
        own, foreign = own.round(), foreign.round()
    truth = np.repeat([0, 1], [80, 120])
    np.testing.assert_allclose(placement(own, foreign).mean(), roc_auc_score(truth, np.concatenate([own, foreign])))


def test_what_is_accepted_stays_below_what_95_of_100_own_inputs_keep_to():
    own, foreign = np.arange(100.0), np.array([93.0, 94.0, 94.5, 200.0])
    assert accepted(own, foreign, np.ones(100)) == 0.5  # the threshold is 94, the 95th smallest


def test_the_interval_score_is_the_width_and_a_fine_for_each_side():
    y, low, high = np.array([0.0, -2.0, 5.0]), np.full(3, -1.0), np.full(3, 3.0)
    np.testing.assert_allclose(interval_score(y, low, high, 0.9), [4.0, 4.0 + 20.0, 4.0 + 40.0])


def test_clients_are_what_is_resampled():
    draw = np.random.default_rng(0)
    client = np.repeat(np.arange(400), 5)
    values = draw.normal(size=400)[client]  # all examples of a client are alike
    units = units_of(client)
    sums = np.bincount(units.of, values)
    found = bootstrap(lambda weights: {"mean": weights @ sums / (5 * weights.sum())}, units.num, 1000)["mean"]
    expected = values.std() / np.sqrt(400)
    # The standard deviation of R replicates is off by 1/√(2R) of itself.
    assert abs(found.standard_error - expected) < 4 * expected / np.sqrt(2000)


def test_the_examples_of_a_single_client_are_what_is_resampled():
    assert units_of(np.full(30, 7)).num == 30
    assert units_of(np.repeat([3, 7], 15)).num == 2


def test_without_replicates_there_is_no_standard_error():
    assert np.isnan(bootstrap(lambda weights: {"sum": weights.sum()}, 5, 0)["sum"].standard_error)
