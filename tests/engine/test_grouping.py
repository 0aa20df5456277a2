"""Clusters in the summary: who is in which, and the adjusted Rand index."""

import dataclasses

import numpy as np

import priory
from priory.engine.grouping import clusters_of

FEDERATION = priory.data.load("synthetic:clusters:clients=5,examples=20,seed=0").partition("natural", newcomers=0.2)


def numbered(*numbers):
    """What a session would hand over: every client's number."""
    return lambda ids, function: np.array(numbers)[ids]


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
