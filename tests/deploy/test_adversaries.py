"""Clients that lie: with a fifth of them false a robust rule keeps FedAvg on MNIST near what it is without them."""

import importlib
from functools import cache
from pathlib import Path

import pytest

import priory

CLIENTS, LIARS, ROUNDS, POINTS = 50, 10, 8, 0.03
SIZES = "1.0=200"  # images of a client


@pytest.fixture
def accuracy(data_dir, tmp_path_factory, monkeypatch):
    """The accuracy of the server's model under a rule, where liars multiply what they have learned."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    robust = importlib.import_module("robust")

    def reached(rule, factor):
        method = priory.FedAvg(finetune_epochs=0)
        settings = {"rounds": ROUNDS, "seed": 0, "eval_every": 0, "model": "mlp:32", "robust": rule}
        place = tmp_path_factory.mktemp("liars")
        return robust.deployed(images(), method, factor, LIARS, place, **settings)["global"]["accuracy"]

    return reached


@cache
def images():
    return priory.data.load("mnist").partition("iid", clients=CLIENTS, sizes=SIZES, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["median", "trimmed:0.25"])
def test_a_fifth_that_lies_costs_at_most_three_points(accuracy, rule):
    clean = accuracy(rule, None)
    assert clean > 0.8
    for factor in (-1.0, 100.0):
        assert accuracy(rule, factor) > clean - POINTS


@pytest.mark.slow
def test_without_a_rule_it_costs_most_of_what_was_learned(accuracy):
    assert accuracy(None, 100.0) < accuracy(None, None) - 0.3
