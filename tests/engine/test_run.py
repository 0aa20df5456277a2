"""A finished run: its personal models, its newcomers, and its way to disk and back."""

import dataclasses
import json

import jax
import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax

import priory
from priory.store import RunDirectory
from tests.older import without_checksums
from tests.states import prepared_as

# One batch holds every client, so that the order of examples does not matter.
METHOD = priory.Ditto(lam=0.5, work=priory.Work(epochs=2, batch_size=64))


@pytest.fixture(scope="module")
def held_out(arrays):
    """The federation with a third of its clients kept as newcomers."""
    return priory.data.from_arrays(**arrays, test=0.2, newcomers=0.34, seed=0)


@pytest.fixture(scope="module")
def run(simulate, held_out):
    """A finished run on four clients and two newcomers."""
    return simulate(METHOD, held_out, cohort=2, eval_every=2)


@pytest.fixture(scope="module")
def regression(begin, arrays):
    """A run with real targets, before its first round."""
    y = arrays["x"] @ np.array([1.0, -2.0, 0.5], np.float32)
    data = priory.data.from_arrays(arrays["x"], y, arrays["client"], test=0.2, seed=0)
    return begin(priory.FedAvg(), data, scale=0.5)


def right(probabilities, federation, client):
    """The share of right answers on a client's test rows; all rows are predicted, so that every batch has one shape."""
    test = federation.rows(client, "test")
    return float(np.mean(probabilities[test].argmax(-1) == federation.y[test]))


def test_personal_scores_are_those_of_the_personal_models(run, held_out):
    for client in range(held_out.num_clients):
        found = run.predict(client, held_out.x)
        assert right(found.probabilities, held_out, client) == run.personal.per_client["accuracy"][client]
        np.testing.assert_allclose(found.probabilities.sum(axis=-1), 1, rtol=1e-6)
        np.testing.assert_array_equal(found.label, found.probabilities.argmax(-1))


def test_fine_tuned_models_score_as_they_predict(simulate, federation):
    tuned = simulate(priory.FedAvg(finetune_epochs=2), rounds=0)
    for client in range(3):
        found = tuned.predict(client, federation.x)
        assert right(found.probabilities, federation, client) == tuned.personal.per_client["accuracy"][client]


def test_a_client_is_found_by_name_too(run, held_out):
    x = held_out.x
    np.testing.assert_array_equal(run.predict(held_out.clients[1], x).probabilities, run.predict(1, x).probabilities)


def test_a_client_that_never_ran_predicts_with_what_was_broadcast_to_it(train, held_out):
    short = train(METHOD, held_out, cohort=2, rounds=1)
    joined = [bool(short.evaluator.slot(client).joined) for client in range(4)]
    assert 0 < sum(joined) < 4
    x = held_out.x
    expected = softmax(np.asarray(short.task.model.apply(short.server, x)[0]), axis=-1)
    for client in range(4):
        same = np.allclose(short.predict(client, x).probabilities, expected, atol=1e-6)
        assert same is not joined[client]


def test_newcomers_are_scored_after_onboarding_as_onboard_does_it(run, held_out):
    assert len(run.newcomers.per_client["accuracy"]) == held_out.num_newcomers == 2
    for place, client in enumerate(range(held_out.num_clients, 6)):
        own = held_out.rows(client, "train")
        model = run.onboard(held_out.x[own], held_out.y[own])
        found = model.predict(held_out.x)
        assert right(found.probabilities, held_out, client) == run.newcomers.per_client["accuracy"][place]


def test_onboarding_changes_nothing_in_the_run(run, held_out, state):
    before = state(run)
    own = held_out.rows(5, "train")
    run.onboard(held_out.x[own], held_out.y[own])
    for name, leaf in state(run).items():
        np.testing.assert_array_equal(leaf, before[name])


def test_without_labels_a_newcomer_gets_the_global_model(run, held_out):
    x = held_out.x
    expected = softmax(np.asarray(run.task.model.apply(run.server, x)[0]), axis=-1)
    np.testing.assert_allclose(run.onboard(x).predict(x).probabilities, expected, atol=1e-6)


def test_a_newcomer_of_the_federation_is_sent_to_onboard(run, held_out):
    with pytest.raises(priory.UsageError, match=r"was held out as a newcomer; give its data to `onboard`"):
        run.client(held_out.num_clients)


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (np.zeros((4, 2)), np.zeros(4, int), r"Examples of shape \(2,\) do not fit; each has shape \(3,\)"),
        (np.zeros((0, 3)), np.zeros(0, int), r"x has shape \(0, 3\), which holds no numbers"),
        (np.full((4, 3), np.nan), np.zeros(4, int), r"x is NaN or infinite in 4 of 4 rows"),
        (np.zeros((4, 3)), np.zeros(3, int), r"3 labels do not fit 4 inputs"),
        (np.zeros((4, 3)), np.array([0, 1, 2, 0]), r"y has the labels 2, .*; label the rows with 0, 1"),
        (np.zeros((4, 3)), np.full(4, 0.5), r"y has the labels 0.5, which the federation never saw"),
    ],
)
def test_bad_data_for_onboarding_end_in_a_sentence(run, x, y, sentence):
    with pytest.raises(priory.UsageError, match=sentence):
        run.onboard(x, y)


def test_bad_inputs_for_a_prediction_end_in_a_sentence(run):
    with pytest.raises(priory.UsageError, match=r"Examples of shape \(5,\) do not fit.*3"):
        run.predict(0, np.zeros((2, 5)))
    with pytest.raises(priory.UsageError, match="client=9 is not one of 6"):
        run.predict(9, np.zeros((2, 3)))


def test_a_run_in_which_no_client_has_joined_can_be_saved(begin, federation, tmp_path):
    begin(METHOD).save(tmp_path / "run")
    assert priory.load(tmp_path / "run", federation=federation).completed == 0


def test_a_saved_run_comes_back_bit_for_bit(run, held_out, tmp_path, assert_same_bits):
    run.save(tmp_path / "run")
    again = priory.load(tmp_path / "run", federation=held_out)
    assert_same_bits(run, again)
    for client in range(held_out.num_clients):
        x = held_out.x
        np.testing.assert_array_equal(run.predict(client, x).probabilities, again.predict(client, x).probabilities)
    own = held_out.rows(5, "train")
    first, second = (one.onboard(held_out.x[own], held_out.y[own]).predict(held_out.x) for one in (run, again))
    np.testing.assert_array_equal(first.probabilities, second.probabilities)


def test_a_loaded_run_tells_what_the_run_told(run, held_out, tmp_path):
    run.save(tmp_path / "run")
    again = priory.load(tmp_path / "run", federation=held_out)
    for part in ("personal", "population", "newcomers", "newcomers_global"):
        first, second = getattr(run, part), getattr(again, part)
        assert first.to_json() == second.to_json()
        np.testing.assert_array_equal(first.per_client["accuracy"], second.per_client["accuracy"])
    assert again.history == run.history
    assert again.communication == run.communication
    assert (again.method, again.settings, again.completed) == (run.method, run.settings, run.completed)


def test_every_line_tells_how_uncertain_each_evaluated_client_is(simulate, held_out):
    run = simulate(METHOD, held_out, cohort=2, eval_every=2, eval_clients=2)
    names = held_out.clients[: held_out.num_clients]
    assert len(run.history[0]["uncertainty"]) == 2
    assert set(run.history[0]["uncertainty"]) < set(names)
    assert run.history[1]["uncertainty"] == dict(zip(names, run.personal.per_client["uncertainty"], strict=True))
    for client, name in enumerate(names):
        found = run.predict(client, held_out.x).probabilities[held_out.rows(client, "test")]
        entropy = -np.sum(found * np.log(found), axis=-1).mean()
        np.testing.assert_allclose(run.history[1]["uncertainty"][name], entropy, rtol=1e-5)


def test_a_client_without_test_examples_has_null_for_its_uncertainty(simulate, held_out):
    test = dataclasses.replace(held_out.test, count=held_out.test.count * (np.arange(6) != 1))
    line = simulate(METHOD, dataclasses.replace(held_out, test=test), cohort=2).history[-1]
    assert [value is None for value in line["uncertainty"].values()] == [False, True, False, False]


def test_too_many_clients_are_not_named_in_the_metrics(simulate, held_out, monkeypatch):
    monkeypatch.setattr("priory.engine.runner.NAMED", 3)
    lines = simulate(METHOD, held_out, cohort=2, eval_every=2, eval_clients=3).history
    assert len(lines[0]["uncertainty"]) == 3
    assert lines[1]["uncertainty"] is None  # the last evaluation is of all four


def test_a_run_written_without_uncertainty_can_be_loaded(run, held_out, tmp_path):
    run.save(tmp_path / "run")
    without_checksums(tmp_path / "run")
    for name in ("summary.json", "clients.json"):
        path = tmp_path / "run" / name
        table = json.loads(path.read_text())
        for part in ("personal", "global", "newcomers", "newcomers_global"):
            del table[part]["uncertainty"]
        path.write_text(json.dumps(table))
    manifest = tmp_path / "run" / "manifest.toml"
    manifest.write_text(manifest.read_text().replace("exclude_uncertain = 0.0\n", ""))
    again = priory.load(tmp_path / "run", federation=held_out)
    assert "exclude_uncertain" not in manifest.read_text()
    assert again.personal.nll == run.personal.nll
    assert np.isnan(again.personal.uncertainty)
    assert again.summary()["personal"]["uncertainty"] is None
    assert again.per_client()["personal"]["uncertainty"] == [None] * held_out.num_clients
    assert priory.resume(tmp_path / "run", federation=held_out).settings == run.settings


def test_a_run_that_was_stopped_can_be_saved_and_resumed(
    simulate, held_out, run, tmp_path, assert_same_bits, monkeypatch
):
    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
    asked = iter([False, False, True])
    half = simulate(METHOD, held_out, cohort=2, eval_every=2, stop=lambda: next(asked))
    half.save(tmp_path / "run")
    assert RunDirectory(tmp_path / "run").summary() is None
    assert_same_bits(run, priory.resume(tmp_path / "run", federation=held_out))


def test_a_run_is_never_saved_over_another(run, tmp_path):
    run.save(tmp_path / "run")
    with pytest.raises(priory.UsageError, match="holds a run already"):
        run.save(tmp_path / "run")


def test_other_data_than_the_runs_are_refused(run, federation, tmp_path):
    run.save(tmp_path / "run")
    with pytest.raises(priory.UsageError, match=r"The data have checksum .* where the manifest says"):
        priory.load(tmp_path / "run", federation=federation)


def test_a_directory_without_a_run_cannot_be_loaded(tmp_path, federation):
    with pytest.raises(priory.UsageError, match="holds no checkpoint; name a run directory"):
        priory.load(tmp_path / "nothing", federation=federation)


def test_the_summary_is_json_and_has_what_was_promised(run):
    summary = json.loads(json.dumps(run.summary(), allow_nan=False))
    assert {
        "method",
        "rounds",
        "personal",
        "global",
        "newcomers",
        "communication",
        "seconds",
        "extra",
    } <= summary.keys()
    assert (summary["method"], summary["rounds"]) == ("ditto", 4)
    assert summary["communication"] == {"down_bytes": 32, "up_bytes": 32}  # 3 x 2 weights and 2 biases
    assert {"accuracy", "nll", "ece", "brier", "uncertainty", "clients"} <= summary["personal"].keys()
    assert {"compile", "train", "evaluate"} == summary["seconds"].keys()


def test_a_regression_predicts_mean_and_spread(regression, federation):
    found = regression.predict(0, federation.x[:4])
    assert (found.probabilities, found.label) == (None, None)
    np.testing.assert_allclose(found.sd, 0.5, rtol=1e-5)
    low, high = found.interval(0.9)
    np.testing.assert_allclose(high - low, 2 * 1.6448536 * 0.5, rtol=1e-4)
    np.testing.assert_allclose((high + low) / 2, found.mean, atol=1e-6)


def test_classes_have_no_interval(run):
    with pytest.raises(priory.UsageError, match="An interval belongs to a regression"):
        run.predict(0, np.zeros((1, 3))).interval()


def test_a_method_without_a_global_model_needs_labels(simulate, federation):
    alone = simulate(priory.Local(), rounds=0)
    assert alone.population is None
    with pytest.raises(priory.UsageError, match=r"local has nothing for a client without labels, .* give y as well"):
        alone.onboard(federation.x[:3])
    with pytest.raises(priory.UsageError, match=r"local has nothing for a client without data, .* give x and y"):
        alone.onboard()


def test_a_table_is_predicted_from_its_raw_columns(train):
    """Raw rows and encoded rows of a numeric table have the same shape, so an array alone is refused."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"a": 1000 + 50 * draw.normal(size=240), "b": draw.normal(size=240)})
    frame["y"] = np.where(frame.a > 1000, "high", "low")
    frame["site"] = np.arange(240) % 3
    federation = priory.data.from_frame(frame, target="y", client="site").partition("natural", seed=0)
    run = train(priory.FedAvg(), federation, rounds=5)
    raw = frame[["a", "b"]]
    assert np.mean(run.predict("0", raw).name == frame.y) > 0.9
    with pytest.raises(priory.UsageError, match="give a data frame with a, b, or encoded=True"):
        run.predict("0", raw.to_numpy())
    again = run.predict("0", federation.x, encoded=True)
    assert again.probabilities.shape == (240, 2)


def test_a_newcomer_labels_its_data_as_the_federation_did(train):
    """Classes 1, 2, 3 are numbered from 0 inside; a newcomer's 1 is class 1 and not the second class."""
    draw = np.random.default_rng(0)
    y = draw.integers(1, 4, 300)
    x = np.eye(3, dtype=np.float32)[y - 1] + 0.1 * draw.normal(size=(300, 3)).astype(np.float32)
    federation = priory.data.from_arrays(x, y, np.arange(300) % 5)
    run = train(priory.FedAvg(), federation, rounds=60, cohort=5)
    x_own, y_own = x[y < 3], y[y < 3]
    newcomer = run.onboard(x_own[:40], y_own[:40])
    assert newcomer.predict(x_own[40:]).name.tolist() == [str(label) for label in y_own[40:]]
    with pytest.raises(priory.UsageError, match=r"y has the labels 0, .* label the rows with 1, 2, 3"):
        run.onboard(x[:2], np.array([0, 1]))


def test_a_method_that_is_not_registered_has_to_be_given_again(begin, held_out, tmp_path):
    @priory.core.struct.struct
    class FedAvg(priory.FedAvg):
        """A user's own, of a name that is taken."""

    own = FedAvg()
    begin(own, held_out, cohort=2, out=tmp_path / "own")
    with pytest.raises(priory.UsageError, match=r"which is not registered; pass method= again"):
        priory.load(tmp_path / "own", federation=held_out)
    assert priory.load(tmp_path / "own", federation=held_out, method=own).method == own


def test_data_from_memory_have_to_be_given_again(run, tmp_path):
    run.save(tmp_path / "run")
    with pytest.raises(priory.UsageError, match=r"came from memory.*; pass federation= again"):
        priory.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("method", "data", "sentence"),
    [
        (priory.FedAvg, None, r"FedAvg is a class; give a method with its hyper-parameters, FedAvg\(\)"),
        (priory.FedAvg(), priory.data.load("digits"), "Dataset is no federation; partition a data set first"),
    ],
    ids=["class", "data set"],
)
def test_what_is_no_method_or_no_federation_is_refused(held_out, method, data, sentence):
    with pytest.raises(priory.UsageError, match=sentence):
        priory.simulate(method, data or held_out)


def test_a_newcomer_updates_as_the_schedules_left_the_method(run, held_out):
    """After a step size of 0 a newcomer of Ditto stays at the global weights."""
    settings = dataclasses.replace(run.settings, schedule=("step-size=step:0@0.3",), onboard_visits=2)
    plan = dataclasses.replace(run.evaluator.ready.plan, schedules=settings.schedules(METHOD), rounds=4)
    run = prepared_as(run, settings=settings, plan=plan)
    newcomer = run.onboard(held_out.x[:8], held_out.y[:8])
    jax.tree.map(np.testing.assert_array_equal, newcomer.posterior.weights, run.server.weights)


def test_a_schedule_of_a_rate_that_no_round_reads_is_refused(held_out):
    with pytest.raises(priory.UsageError, match="has no effect, since personalisation knows no round"):
        priory.simulate(priory.FedAvg(), held_out, rounds=2, schedule="finetune-step-size=linear")
