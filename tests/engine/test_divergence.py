"""Training that diverges: what is kept, when it is said, and which cause is named."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.core.struct import struct
from priory.engine import divergence
from priory.engine.divergence import Progress
from priory.engine.rounds import Trace
from priory.fed.capabilities import AdviceWarning
from priory.fed.visit import COUNTED, EMPTY, KEPT, STATUSES
from tests.engine.test_rounds import Ledger

LOST, LARGE, WEIGHED = (STATUSES.index(reason) for reason in ("not finite", "norm", "weight"))
REFUSED = Progress(learned=False, lost=6)


@struct
class Bursting(Ledger):
    """A method whose server is not finite after so many rounds."""

    bound: float = 2.0

    def aggregate(self, task, server, messages, key):
        after, info = Ledger.aggregate(self, task, server, messages, key)
        return after | {"size": jnp.where(after["rounds"] > self.bound, jnp.inf, after["size"])}, info


def trace(*rounds, discarded=None):
    """The trace of rounds of so many places."""
    status = np.array(rounds, np.int8)
    return Trace(None, status, {}, np.zeros(len(rounds), bool) if discarded is None else np.array(discarded))


def test_a_server_that_is_not_finite_is_discarded_and_the_last_finite_one_kept(simulate, tmp_path, federation):
    """In memory and on disk, and the run says so."""
    with pytest.warns(AdviceWarning, match="^Training diverged: the last 12 updates of clients were not finite"):
        run = simulate(Bursting(), cohort=6, out=tmp_path / "run")
    loaded = priory.load(tmp_path / "run", federation=federation, method=Bursting())
    for one in (run, loaded):
        assert (one.completed, one.server["rounds"]) == (4, 2)
        assert np.isfinite(one.server["size"])
        assert one.diverged == run.summary()["extra"]["advice"]["diverged"]
    assert np.isfinite(loaded.predict(client=0, x=federation.x[:3]).probabilities).all()


def test_a_run_whose_clients_all_diverge_says_so_and_keeps_what_was_there(simulate, state):
    """Steps of 1e30 end above --max-norm in the first round; the server is the first one."""
    method = priory.FedAvg(optimiser=priory.Optimiser("sgd", 1e30))
    with pytest.warns(
        AdviceWarning, match=r"a step size that is too large, so choose a lower --step-size \(now 1e\+30\);"
    ):
        run = simulate(method, cohort=6)
    first = simulate(priory.FedAvg(), rounds=0, cohort=6)
    for name, leaf in state(first).items():
        if "server" in name:
            np.testing.assert_array_equal(state(run)[name], leaf)
    assert run.personal is not None


def test_a_run_that_learns_has_not_diverged(simulate):
    assert simulate(priory.FedAvg(), cohort=6).diverged is None


def test_lost_uploads_are_counted_from_the_last_round_that_changed_the_server():
    learned = Progress().after(trace([LOST, COUNTED, EMPTY], [LOST, LARGE, KEPT]))
    assert learned == Progress(learned=True, lost=2)
    assert learned.after(trace([LOST, KEPT, EMPTY])) == Progress(learned=True, lost=3)
    assert learned.after(trace([COUNTED, LOST, LOST])) == Progress(learned=True, lost=0)
    assert Progress().after(trace([WEIGHED, WEIGHED, EMPTY])) == Progress()


def test_uploads_of_a_server_that_was_discarded_are_lost():
    counted = [COUNTED] * 3
    assert Progress().after(trace(counted, counted, discarded=[False, True])) == Progress(learned=True, lost=3)


def test_few_bad_clients_in_the_last_rounds_do_not_stop_a_federation():
    """As many uploads as there are clients do, or all that there were."""
    assert not Progress(learned=True, lost=5).has_stopped(num_clients=6)
    assert Progress(learned=True, lost=6).has_stopped(num_clients=6)
    assert Progress(learned=False, lost=1).has_stopped(num_clients=6)
    assert not Progress(learned=False, lost=0).has_stopped(num_clients=6)


def test_a_resumed_run_remembers_what_was_lost(simulate, tmp_path, federation):
    method, asked = priory.FedAvg(optimiser=priory.Optimiser("sgd", 1e30)), iter([False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
        simulate(method, cohort=6, out=tmp_path / "run", stop=lambda: next(asked))
    with pytest.warns(AdviceWarning, match="the last 24 updates"):
        priory.resume(tmp_path / "run", federation=federation, method=method)


def said(federation, method=None):
    return divergence.sentence(method or priory.FedAvg(), federation, {}, REFUSED)


def regression(x=None, y=None):
    """Sixty rows of six clients, with other numbers where they are given."""
    draw = np.random.default_rng(0)
    inputs, targets = draw.normal(size=(60, 2)), draw.normal(size=60)
    for values, spoilt in ((inputs, x), (targets, y)):
        if spoilt is not None:
            values[13] = spoilt
    return priory.data.from_arrays(inputs, targets, np.arange(60) // 10, task="regression", test=0.0)


def test_the_farthest_number_is_named_with_its_client():
    assert "an outlier, the target = 1e+06 of client 1 (" in said(regression(y=1e6))
    assert "an outlier, input 1 = -1e+09 of client 1 (" in said(regression(x=[0, -1e9], y=1e6))


def test_numbers_that_are_all_large_are_said_to_need_another_scale():
    data = regression()
    large = dataclasses.replace(data, y=data.y + np.float32(3e5))
    assert "the likely cause is the scale of the target, which is around 3e+05, so divide it to be" in said(large)


def test_with_numbers_of_unit_size_the_step_sizes_are_named():
    assert "so choose a lower --step-size (now 0.1); the state after" in said(regression())
    assert "a lower --step-size (now 0.001) or --gamma (set by itself)" in said(regression(), priory.FedPop())


def test_labels_and_pixels_are_no_outliers():
    x = np.random.default_rng(0).integers(0, 255, size=(60, 4, 4, 1)).astype(np.uint8)
    pixels = priory.data.from_arrays(x, np.arange(60) % 2, np.arange(60) // 10, test=0.0)
    assert "a lower --step-size" in said(pixels)


def test_an_infinite_likelihood_alone_is_no_divergence(simulate):
    """A class that happened with probability 0 has it; NaN, or an error that is not finite, is."""
    scores = simulate(priory.FedAvg(), cohort=6).personal
    assert divergence.is_finite(None)
    assert divergence.is_finite(dataclasses.replace(scores, nll=np.inf))
    assert not divergence.is_finite(dataclasses.replace(scores, nll=np.nan))
