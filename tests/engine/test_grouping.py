"""Clusters in the summary: who is in which, and the adjusted Rand index."""

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import priory
from priory.engine.grouping import adjusted_rand_index, clusters_of

FEDERATION = priory.data.load("synthetic:clusters:clients=5,examples=20,seed=0").partition("natural", newcomers=0.2)


def numbered(*numbers):
    """What a session would hand over: every client's number."""
    return lambda ids, function: np.array(numbers)[ids]


@pytest.mark.parametrize("seed", range(20))
def test_the_index_agrees_with_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    num = int(draw.integers(1, 30))
    one, other = (draw.integers(-3, draw.integers(-2, 6), num) for _ in range(2))
    assert adjusted_rand_index(one, other) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)


@pytest.mark.parametrize("names", [[0, 1, 2, 3], [5, 5, 5, 5], [0, 1, 0, 1]])
def test_the_index_of_the_same_partition_under_other_names_is_one(names):
    assert adjusted_rand_index(np.array(names), 7 - 2 * np.array(names)) == 1


def test_every_participant_is_named_and_newcomers_are_not():
    told = clusters_of(priory.CFedBayes(), FEDERATION, numbered(1, 0, 0, 1))
    assert told["clusters"] == dict(zip(FEDERATION.clients[:4], [1, 0, 0, 1], strict=True))


def test_a_client_in_no_cluster_is_left_out_of_the_index():
    truth = FEDERATION.truth["cluster"][:4]
    numbers = np.where(np.arange(4) == 2, -1, truth)
    told = clusters_of(priory.CFedBayes(), FEDERATION, numbered(*numbers))
    assert told["clusters"][FEDERATION.clients[2]] is None
    assert told["adjusted_rand_index"] == 1


def test_without_a_truth_there_is_no_index():
    blind = dataclasses.replace(FEDERATION, truth={})
    assert set(clusters_of(priory.CFedBayes(), blind, numbered(1, 0, 0, 1))) == {"clusters"}


def test_a_method_without_clusters_says_nothing_of_them():
    assert clusters_of(priory.PFedBayes(), FEDERATION, numbered(0, 0, 0, 0)) == {}
