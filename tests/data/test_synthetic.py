"""Synthetic problems: the data were drawn from the truth they come with."""

import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.data import load


def test_linear_residuals_have_the_stated_noise():
    federation = load("synthetic:linear:clients=20,examples=100,dim=3,noise=0.5").partition(test=0.0)
    client = np.repeat(np.arange(20), federation.train.count)
    fitted = (federation.x * federation.truth["weights"][client]).sum(axis=1)
    residual = (federation.y - fitted) / 0.5
    assert abs((residual**2).mean() - 1.0) < 4 * np.sqrt(2 / len(residual))  # 4 standard errors
    assert set(federation.scale) == {0.5}


def test_client_weights_scatter_about_the_prior_mean():
    truth = load("synthetic:linear:clients=2000,examples=1,tau=2").truth
    scaled = (truth["weights"] - truth["prior_mean"]) / truth["prior_scale"][:, None]
    assert abs(scaled.mean()) < 4 / np.sqrt(scaled.size)  # 4 standard errors
    assert abs((scaled**2).mean() - 1.0) < 4 * np.sqrt(2 / scaled.size)


def test_quadratic_means_are_the_truth():
    data = load("synthetic:quadratic:clients=5,examples=1000,noise=2")
    mean = np.array([data.y[data.client == client].mean() for client in range(5)])
    assert np.abs(mean - data.truth["weights"][:, 0]).max() < 4 * 2 / np.sqrt(1000)  # 4 standard errors


def test_clusters_are_even_and_centre_the_classes():
    data = load("synthetic:clusters:clients=6,examples=3000,clusters=3,classes=2,dim=4")
    assert np.bincount(data.truth["cluster"]).tolist() == [2, 2, 2]
    for client in range(6):
        rows = (data.client == client) & (data.y == 1)
        error = data.x[rows].mean(axis=0) - data.truth["centre"][client, 1]
        assert np.abs(error).max() < 4.5 / np.sqrt(rows.sum())  # 4.5 standard errors, 24 comparisons


def test_representation_residuals_have_variance_a_tenth():
    data = load("synthetic:representation:clients=50,examples=100,dim=7,rank=3")
    residual = data.y - (data.x * data.truth["weights"][data.client]).sum(axis=1)
    assert abs((residual**2).mean() / 0.1 - 1.0) < 4 * np.sqrt(2 / len(residual))  # 4 standard errors
    assert np.allclose(data.scale**2, 0.1)


def test_clients_share_an_orthonormal_representation_and_have_directions_of_their_own():
    truth = load("synthetic:representation").truth
    representation, effects = truth["representation"], truth["effects"]
    assert (representation.shape, effects.shape) == ((100, 20, 2), (100, 2))
    assert (representation == representation[0]).all()
    assert np.allclose(representation[0].T @ representation[0], np.eye(2))
    assert np.allclose(np.linalg.norm(effects, axis=1), 1.0)
    assert np.allclose(truth["weights"], effects @ representation[0].T)
    assert np.abs(effects.mean(axis=0)).max() < 4 * np.sqrt(0.5 / 100)  # 4 standard errors, no preferred direction


def test_inputs_of_the_representation_are_standard_normal():
    x = load("synthetic:representation:clients=10,examples=1000,dim=4").x
    assert np.abs(x.T @ x / len(x) - np.eye(4)).max() < 4.5 * np.sqrt(2 / len(x))  # 4.5 standard errors, 16 comparisons


def test_nine_in_ten_clients_of_the_representation_may_have_five_examples():
    federation = load("synthetic:representation").partition(sizes="0.9=5,0.1=10")
    assert np.unique(federation.train.count, return_counts=True)[1].tolist() == [90, 10]
    assert set(federation.train.count) == {5, 10}
    assert set(federation.test.count) == {10}  # a fifth of the 50 examples, whatever is left for training


def test_truth_follows_its_client_when_newcomers_move():
    data = load("synthetic:linear:clients=10")
    federation = data.partition(newcomers=0.3)
    order = [int(name) for name in federation.clients]
    assert (federation.truth["weights"] == data.truth["weights"][order]).all()


def test_the_seed_is_an_argument():
    first, again, other = (load(f"synthetic:linear:seed={seed}").y for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("synthetic", "synthetic:linear"),
        ("synthetic:liner", "did you mean 'synthetic:linear'"),
        ("synthetic:linear:size=3", "'size=3'"),
        ("synthetic:linear:clients", "'clients'"),
        ("synthetic:linear:clients=0", "'0'"),
        ("synthetic:linear:noise=wide", "'wide'"),
        ("synthetic:linear:dim=2.5", "'2.5'"),
        ("synthetic:representation:dim=2,rank=3", "rank=3 exceeds dim=2"),
        ("synthetic:representation:tau=1", "noise=0.316228"),
    ],
)
def test_a_bad_problem_ends_in_one_sentence(name, words):
    with pytest.raises(UsageError) as caught:
        load(name)
    assert words in str(caught.value)
