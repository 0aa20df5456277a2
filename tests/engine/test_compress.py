"""`compress`: a channel that a setting names, and that a manifest therefore holds."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import priory
from priory import tune as tuner
from priory.cli import main
from priory.core.struct import struct
from priory.engine import Settings, manifest, prepared
from priory.engine.rounds import run_block
from priory.fed.channel import Quantise, RandomK, TopK
from priory.store import RunDirectory
from priory.tune import Axis

KERNEL, BIAS = 640, 10  # numbers of a linear model of the digits
CHANNELS = {"qsgd:4": Quantise(4), "random:0.2": RandomK(0.2), "top:0.2": TopK(0.2)}


@struct
class KernelOnly(priory.FedAvg):
    """Federated averaging that lets its kernels be compressed."""

    def compressible(self, path: str) -> bool:
        return path.endswith("kernel")


@pytest.fixture(scope="module")
def federation():
    return priory.data.load("digits").partition("iid", clients=4, seed=0, validation=0.25)


def simulate(federation, method=None, **options):
    return priory.simulate(
        method or priory.FedAvg(), federation, **{"rounds": 2, "model": "linear", "eval_every": 0} | options
    )


def assert_same_bits(first, second):
    for a, b in zip(jax.tree.leaves(first.server), jax.tree.leaves(second.server), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        (None, 32 * (KERNEL + BIAS)),
        pytest.param("qsgd:4", 2 * 32 + (KERNEL + BIAS) * (1 + 3), marks=pytest.mark.slow),
        pytest.param("random:0.2", 32 * 130 + 32, marks=pytest.mark.slow),
        ("top:0.2", 130 * (32 + 10)),
    ],
)
def test_fewer_bytes_travel_by_as_much_as_computed(federation, text, bits):
    assert simulate(federation, compress=text).communication["up_bytes"] == bits // 8


def test_a_method_says_what_may_be_compressed(federation):
    run = simulate(federation, KernelOnly(), compress="qsgd:1")
    assert run.communication["up_bytes"] == (32 + KERNEL * 2 + 32 * BIAS) // 8


def test_what_may_be_compressed_is_the_same_program_for_all_values_of_a_method(federation):
    simulate(federation, KernelOnly(), compress="qsgd:1")
    before = run_block._cache_size()
    simulate(federation, KernelOnly(optimiser=priory.Optimiser(step_size=0.03)), compress="qsgd:1")
    assert run_block._cache_size() == before


@pytest.mark.parametrize(("text", "channel"), CHANNELS.items(), ids=CHANNELS)
def test_a_named_channel_does_what_a_given_one_does(federation, text, channel):
    assert_same_bits(simulate(federation, compress=text), simulate(federation, channel=channel))


@pytest.mark.parametrize("text", CHANNELS)
def test_a_stopped_run_goes_on_with_its_compression_untold(federation, tmp_path, text):
    options = {"compress": text, "rounds": 4, "eval_every": 2}
    whole = simulate(federation, **options)
    asked = iter([False, True])
    stopped = simulate(federation, **options, out=tmp_path / "run", stop=lambda: next(asked))
    assert 0 < stopped.completed < 4
    resumed = priory.resume(tmp_path / "run")
    assert_same_bits(whole, resumed)
    assert resumed.communication == whole.communication
    assert resumed.history[-1]["personal"] == whole.history[-1]["personal"]


def test_a_manifest_is_run_again_with_its_compression_untold(federation, tmp_path):
    run = simulate(federation, compress="random:0.2", out=tmp_path / "run")
    recipe = manifest.read(RunDirectory(tmp_path / "run").manifest())
    assert recipe.given == {}
    again = priory.simulate(recipe.method, recipe.federation, **dataclasses.asdict(recipe.settings))
    assert_same_bits(run, again)


def test_a_bad_compression_is_refused_before_anything_is_built(federation, monkeypatch):
    monkeypatch.setattr(prepared, "tasks_of", lambda *_: pytest.fail("the network was built"))
    with pytest.raises(priory.UsageError, match="compress='zip:3' is not understood"):
        simulate(federation, compress="zip:3")
    with pytest.raises(priory.UsageError, match="levels=0"):
        Settings(compress="qsgd:0").check(4)


def test_a_channel_beside_a_compression_is_refused(federation):
    with pytest.raises(priory.UsageError, match=r"compress=qsgd:4 and channel=TopK.*give one of them"):
        simulate(federation, compress="qsgd:4", channel=TopK(0.5))


def test_what_is_never_sent_is_not_compressed(federation):
    assert_same_bits(simulate(federation, priory.Pooled(), compress="qsgd:1"), simulate(federation, priory.Pooled()))
    assert simulate(federation, priory.Local(), compress="qsgd:1").communication["up_bytes"] == 0


@pytest.mark.slow  # a grid and two runs
def test_tuning_compresses_as_a_run_does(federation):
    settings = Settings(rounds=2, model="linear", compress="qsgd:4", eval_every=0)
    axis = Axis("step-size", ("optimiser", "step_size"), (0.1,), is_static=False)
    (found,) = tuner.tune(priory.FedAvg(), federation, [axis], seeds=1, settings=settings)
    compressed, plain = (validation_nll(simulate(federation, found.method, compress=text)) for text in ("qsgd:4", None))
    assert found.scores[0]["global"]["nll"] == pytest.approx(compressed, abs=1e-5)
    assert not math.isclose(compressed, plain, abs_tol=1e-3)


def validation_nll(run):
    """The negative log-likelihood of the global model on all validation rows."""
    data, (bias, kernel) = run.federation, map(np.asarray, jax.tree.leaves(run.server))
    rows = np.concatenate([np.arange(len(data.y))[data.rows(client, "validation")] for client in range(4)])
    x = (data.x[rows] - data.shift) * data.factor
    log_probs = log_softmax(x.reshape(len(rows), -1) @ kernel + bias, axis=1)
    return -np.mean(log_probs[np.arange(len(rows)), data.y[rows]])


@pytest.mark.slow  # three runs that no other test shares
def test_the_command_line_compares_compressed_runs(tmp_path, capsys):
    what = ["compare", "fedavg", "local", "pooled", "--data", "digits", "--clients", "4", "--validation", "0.25"]
    words = [*what, "--partition", "iid", "--model", "linear", "--rounds", "1", "--eval-every", "0", "--devices", "2"]
    assert main([*words, "--compress", "random:0.2", "--out", str(tmp_path)]) == 0
    assert RunDirectory(tmp_path / "fedavg-s0").manifest()["run"]["compress"] == "random:0.2"
    assert main([*words, "--compress", "random:2", "--out", str(tmp_path / "bad")]) == 2
    assert "fraction=2.0 lies outside (0, 1]" in capsys.readouterr().err
