"""The same seeds in the simulator and behind the wire give the same server, and the same scores."""

import jax
import numpy as np
import pytest

import priory
from priory import FedPop, Optimiser
from priory.engine.evaluator import Evaluator

pytestmark = pytest.mark.xdist_group("several networks")  # tests/cli/test_architectures.py trains the same
ONE = {"model": "linear"}
# What each kind adds is its messages and what its clients keep; a network with one layer is enough for both.
KINDS = {
    "linear": ("fedavg", ONE),
    "not linear": ("fedhb-niw", ONE),
    "stateful": ("ditto", ONE),
    "function space, with several architectures": ("fedbnn", {"model": None, "models": "mlp:4,linear"}),
}


def assert_same_server(one, other, tolerance=1e-6):
    one, other = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


SLOW = ("not linear", "function space, with several architectures")  # the laws compare their servers


@pytest.mark.parametrize(
    ("name", "model"),
    [pytest.param(*kind, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, kind in KINDS.items()],
)
def test_simulator_and_wire_give_the_same_server_and_scores(deployed, name, model):
    made = deployed(name, num_clients=3, **model)
    server = made.server()
    summary = server.go()
    run = priory.simulate(made.charter.method, made.federation, rounds=3, seed=1, eval_every=0, **model)
    assert_same_server(server.server, run.server)
    assert summary["personal"]["accuracy"] == pytest.approx(run.personal.accuracy)
    assert summary["personal"]["nll"] == pytest.approx(run.personal.nll, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"cohort": 2, "schedule": ("step-size=cosine",), "compress": "top:0.3"},
        {"cohort": 1, "active": 3},
        pytest.param({"robust": "median"}, marks=pytest.mark.slow),
        pytest.param({"participation": "bernoulli", "cohort": 2}, marks=pytest.mark.slow),
    ],
    ids=["schedule and a channel with memory", "active clients that do not upload", "robust", "bernoulli"],
)
def test_so_they_do_with_every_setting_of_a_round(deployed, settings):
    made = deployed("fedavg", num_clients=3, **ONE, **settings)
    server = made.server(min_replies=0)
    server.go()
    with pytest.MonkeyPatch.context() as patch:  # the simulator without its scores, which are a program of their own
        patch.setattr(Evaluator, "scores", lambda *_: (None, None))
        options = {"rounds": 3, "seed": 1, "eval_every": 0, **ONE, **settings}
        run = priory.simulate(made.charter.method, made.federation, **options)
    assert_same_server(server.server, run.server)


@pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")
@pytest.mark.parametrize("form", ["central", "local"])
def test_parts_are_clipped_as_the_simulator_clips_them(deployed, form):
    """With next to no noise; the clips are below the norms of both parts, and above 1."""
    still = FedPop(optimiser=Optimiser("sgd", 1.0), prior_step_size=0.1)
    options = {"dp": form, "dp_clip": "2,3", "dp_noise": 1e-5, "dp_delta": 0.1, "rounds": 2}
    made = deployed(method=still, num_clients=3, **options)
    server = made.server()
    start = jax.tree.map(np.asarray, server.server)
    server.go()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "scores", lambda *_: (None, None))
        run = priory.simulate(still, made.federation, seed=1, eval_every=0, model="mlp:4", **options)
    moved = [jax.tree.map(np.subtract, end, start) for end in (server.server, run.server)]
    for part, least in (("phi", 1e-2), ("beta", 1e-2)):
        one, other = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(getattr(end, part))]) for end in moved)
        assert np.linalg.norm(one) > least
        assert np.linalg.norm(one - other) < 1e-2 * np.linalg.norm(one)
