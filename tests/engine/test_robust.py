"""`robust`: a centre of the messages in place of their weighted mean, and where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.cli import main
from priory.core import rng
from priory.engine import devices
from priory.fed.privacy import NoisedSum
from priory.fed.visit import Record, RoundContext, visit
from priory.store import RunDirectory


@pytest.fixture(scope="module")
def sent(begin):
    """What the server has before the first round of FedAvg, and what each of the six clients sends in it, flat."""
    run = begin(priory.FedAvg())
    ready = run.evaluator.ready
    server, train = jax.tree.map(jnp.asarray, devices.to_host((run.server, ready.train), ready.plan.mesh))

    @jax.jit
    def message(client):
        context = RoundContext(run.method, run.task, None, server, rng.root(0), jnp.int32(0))
        return visit(context, train.of(client), Record(jnp.bool_(False), (), ()), client, jnp.bool_(True))[1].payload

    return flat(server), np.stack([flat(message(jnp.int32(client))) for client in range(6)])


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def median(server, x):
    return np.median(x, axis=0)


def trimmed(server, x):
    return np.sort(x, axis=0)[1:-1].mean(axis=0)


def krum(server, x):
    far = np.sort(np.sum((x[:, None] - x[None]) ** 2, axis=-1), axis=1)
    return x[far[:, 1:4].sum(axis=1).argmin()]  # 6 − 1 − 2 neighbours


def clipped(server, x):
    size = np.linalg.norm(x - server, axis=1, keepdims=True)
    assert (size > 0.1).any()
    return server + ((x - server) * np.minimum(1, 0.1 / size)).mean(axis=0)


RULES = {"median": median, "trimmed:0.2": trimmed, "krum": krum, "norm-clip:0.1": clipped}


RESIDENT, STORED, PAIRS = {}, {"resident_bytes": 0}, {"client_batch": 2}


# The rule sees the messages of all devices whatever the home, so one rule is tried in both.
@pytest.mark.parametrize(
    ("text", "how"),
    [("median", STORED), ("median", RESIDENT), ("trimmed:0.2", RESIDENT), ("krum", PAIRS), ("norm-clip:0.1", STORED)],
    ids=["median stored", "median resident", "trimmed resident", "krum in pairs", "norm-clip stored"],
)
def test_a_round_over_two_devices_is_the_centre_computed_by_hand(train, sent, text, how):
    run = train(priory.FedAvg(), rounds=1, cohort=6, robust=text, **how)
    assert run.evaluator.ready.plan.hands == 2
    np.testing.assert_allclose(flat(run.server), RULES[text](*sent), rtol=1e-5, atol=1e-6)


def test_a_round_without_anybody_leaves_the_server(begin, train):
    before = begin(priory.FedAvg()).server
    run = train(priory.FedAvg(), rounds=1, cohort=6, robust="median", max_norm=1e-9)
    assert run.extra["reasons"] == {"norm": 6}
    assert np.array_equal(flat(run.server), flat(before))


def test_a_wild_client_hardly_moves_the_median(begin, train, arrays):
    x = arrays["x"].copy()
    x[arrays["client"] == 5] *= 1e3
    wild = priory.data.from_arrays(x, arrays["y"], arrays["client"], test=0.2, seed=0)
    start = flat(begin(priory.FedAvg(), wild).server)
    moved = {
        text: np.linalg.norm(flat(train(priory.FedAvg(), wild, rounds=1, cohort=6, robust=text).server) - start)
        for text in (None, "median")
    }
    assert moved["median"] < 0.05 * moved[None]


@pytest.mark.slow  # a run that no other test shares
def test_a_linear_form_and_uncertain_clients_go_with_it(train, arrays):
    data = priory.data.from_arrays(**arrays, test=0.2, validation=0.2, seed=0)
    run = train(priory.FedHBNIW(linear=True), data, rounds=1, robust="krum", exclude_uncertain=0.4)
    assert run.completed == 1
    assert run.log.info["excluded"] == 1
    assert np.isfinite(flat(run.server)).all()


def test_the_manifest_holds_the_rule_and_a_stopped_run_ends_with_the_same_bits(
    simulate, federation, tmp_path, assert_same_bits, monkeypatch
):
    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
    asked = iter([False, False, True])
    options = {"cohort": 6, "robust": "trimmed:0.2"}
    whole = simulate(priory.FedAvg(), **options)
    half = simulate(priory.FedAvg(), **options, out=tmp_path / "run", stop=lambda: next(asked))
    assert half.completed == 2
    assert RunDirectory(tmp_path / "run").manifest()["run"]["robust"] == "trimmed:0.2"
    run = priory.resume(tmp_path / "run", federation=federation)
    assert run.settings.robust == "trimmed:0.2"
    assert_same_bits(whole, run)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"robust": "mean"}, r"robust='mean' is not understood; write median"),
        ({"robust": "krum:2"}, r"robust=krum:2 needs 7 clients a round \(2 FALSE \+ 3\), and the cohort has 3; choose"),
        ({"method": priory.Pooled()}, r"robust=median needs messages .*, but pooled pools their data; leave it out"),
        ({"method": priory.CFedBayes()}, r"cfedbayes is not linear: it needs them all; choose a linear method such"),
        ({"method": priory.FedHBNIW()}, r"use fedhb-niw in its linear form \(--linear\), or a linear method"),
        ({"dp": "central", "dp_noise": 1.0}, r"robust=median is no sum, .* the noise of dp=central .*; use --dp local"),
        ({"channel": NoisedSum()}, r"robust=median is no sum"),
        (
            {"weighting": "examples"},
            r"robust=median lets every message count once, so weighting=examples has no",
        ),
    ],
)
def test_where_there_is_no_centre_a_sentence_says_so_before_anything_is_written(simulate, tmp_path, options, sentence):
    chosen = {"method": priory.FedAvg(), "robust": "median"} | options
    with pytest.raises(priory.UsageError, match=sentence):
        simulate(out=tmp_path / "run", **chosen)
    assert not (tmp_path / "run").exists()


def test_the_command_line_has_the_flag(capsys):
    assert main(["run", "fedavg", "--data", "digits", "--clients", "4", "--robust", "trimmed:0.7"]) == 2
    assert "robust='trimmed:0.7' drops a share outside [0, 0.5) at each end; choose" in capsys.readouterr().err
