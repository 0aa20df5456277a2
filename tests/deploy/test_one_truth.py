"""The same seeds in the simulator and behind the wire give the same server, and the same scores."""

import jax
import numpy as np
import pytest

import priory
from tests.deploy.conftest import MODEL

KINDS = {"linear": "fedavg", "not linear": "fedhb-niw", "stateful": "pfedbayes", "function space": "fedbnn"}


def assert_same_server(one, other, tolerance=1e-6):
    one, other = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS.keys())
def test_simulator_and_wire_give_the_same_server_and_scores(deployed, name):
    made = deployed(name)
    server = made.server()
    summary = server.go()
    run = priory.simulate(made.charter.method, made.federation, rounds=3, seed=1, eval_every=0, model=MODEL)
    assert_same_server(server.server, run.server)
    assert summary["personal"]["accuracy"] == pytest.approx(run.personal.accuracy)
    assert summary["personal"]["nll"] == pytest.approx(run.personal.nll, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"cohort": 2, "schedule": ("step-size=cosine",), "compress": "top:0.3"},
        {"cohort": 1, "active": 3},
        {"robust": "median"},
        {"participation": "bernoulli", "cohort": 2},
    ],
    ids=["schedule and a channel with memory", "active clients that do not upload", "robust", "bernoulli"],
)
def test_so_they_do_with_every_setting_of_a_round(deployed, settings):
    made = deployed("fedavg", num_clients=3, **settings)
    server = made.server(min_replies=0)
    server.go()
    run = priory.simulate(made.charter.method, made.federation, rounds=3, seed=1, eval_every=0, model=MODEL, **settings)
    assert_same_server(server.server, run.server)


def test_clients_of_several_architectures_exchange_probabilities(deployed):
    made = deployed("fedbnn", num_clients=3, model=None, models="mlp:4,linear")
    server = made.server()
    server.go()
    run = priory.simulate(made.charter.method, made.federation, rounds=3, seed=1, eval_every=0, models="mlp:4,linear")
    assert_same_server(server.server, run.server)
