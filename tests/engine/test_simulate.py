"""The same run in every home, chunk and number of devices; what evaluation and bad data do to it."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy.special import softmax

import priory
from priory.core.errors import UsageError
from priory.engine import devices, settings
from priory.engine.rounds import AXIS

COHORT = 5  # of six clients: two devices cannot share them out evenly, nor in pairs


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def one_device(monkeypatch):
    """JAX sees the first device only."""
    monkeypatch.setattr(devices, "mesh_of_all", lambda: Mesh(np.array(jax.devices()[:1]), (AXIS,)))


def test_clients_kept_on_disk_give_the_same_bits_as_clients_kept_in_memory(simulate, assert_same_bits):
    here, there = simulate(cohort=COHORT), simulate(cohort=COHORT, resident_bytes=0)
    assert_same_bits(here, there)
    assert here.personal == there.personal


@pytest.mark.parametrize("client_batch", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_how_many_clients_run_at_once_does_not_matter(train, assert_close, client_batch):
    assert_close(train(cohort=COHORT), train(cohort=COHORT, client_batch=client_batch))


def test_one_device_and_two_devices_agree(simulate, assert_close, request):
    two = simulate(cohort=COHORT)
    request.getfixturevalue("one_device")
    one = simulate(cohort=COHORT)
    assert one.evaluator.ready.plan.hands == 1
    assert_close(two, one)
    assert one.personal.accuracy == two.personal.accuracy


@pytest.mark.slow  # two devices do so above
def test_one_device_keeps_the_same_bits_in_both_homes(train, assert_same_bits, one_device):
    assert_same_bits(train(cohort=COHORT), train(cohort=COHORT, resident_bytes=0))


def test_a_number_of_clients_that_the_devices_do_not_divide_is_no_obstacle(train, arrays, assert_close, request):
    five = {name: array[arrays["client"] < 5] for name, array in arrays.items()}
    federation = priory.data.from_arrays(**five, test=0.2, seed=0)
    two = train(data=federation)
    request.getfixturevalue("one_device")
    assert_close(two, train(data=federation))


def test_evaluating_never_perturbs_training(simulate, assert_same_bits):
    often, seldom = simulate(cohort=COHORT, eval_every=1, eval_clients=2), simulate(cohort=COHORT, eval_every=0)
    assert [line["round"] for line in often.history] == [1, 2, 3, 4]
    assert [line["round"] for line in seldom.history] == [4]
    assert_same_bits(often, seldom)
    assert often.personal == seldom.personal


def test_evaluation_on_the_way_sees_a_fixed_choice_of_clients_and_the_last_one_sees_all(simulate):
    run = simulate(cohort=COHORT, eval_every=1, eval_clients=2)
    everyone = run.personal.per_client["accuracy"]
    some = [run.evaluator.scores(2)[0].per_client["accuracy"].tolist() for _ in range(2)]
    assert len(everyone) == 6
    assert len(some[0]) == 2
    assert some[0] == some[1]
    assert set(some[0]) <= set(everyone.tolist())


def descended(bias, kernel, x, y):
    """The linear model after three steps of gradient descent on all examples, with a step size of 0.1."""
    for _ in range(3):
        error = (softmax(x @ kernel + bias, axis=1) - np.eye(2)[y]) / len(y)
        bias, kernel = bias - 0.1 * error.sum(axis=0), kernel - 0.1 * x.T @ error
    return bias, kernel


# A full batch is the same whatever the order of its rows.
DESCENT = priory.Work(epochs=3, batch_size=165)


def test_a_client_of_huge_numbers_is_left_out_and_the_others_are_as_without_it(train, begin, arrays):
    x = arrays["x"].copy()
    x[arrays["client"] == 5] = 1e38
    everyone = priory.data.from_arrays(x, arrays["y"], arrays["client"], test=0.0, seed=0)
    method = priory.FedAvg(work=DESCENT)  # the first step overflows, the second is not a number
    run, server = train(method, everyone, cohort=6), leaves(begin(method, everyone, cohort=6).server)
    assert run.extra["rejected"] == {everyone.clients[5]: 4}
    rows = [everyone.rows(client, "train") for client in range(5)]
    sizes = [own.stop - own.start for own in rows]
    for _ in range(4):
        found = [descended(*server, everyone.x[own], everyone.y[own]) for own in rows]
        server = [np.average(some, axis=0, weights=sizes) for some in zip(*found, strict=True)]
    for found, wanted in zip(leaves(run.server), server, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_pooling_one_client_is_fedavg_with_that_client(train):
    for pooled, averaged in zip(
        leaves(train(priory.Pooled(), cohort=1).server),
        leaves(train(priory.FedAvg(), cohort=1).server),
        strict=True,
    ):
        np.testing.assert_allclose(pooled, averaged, atol=1e-6)


def test_pooling_a_cohort_is_training_on_all_its_examples(train, begin, arrays):
    six = priory.data.from_arrays(**arrays, test=0.0, seed=0)
    method = priory.Pooled(work=DESCENT)
    run, server = train(method, six, cohort=6), leaves(begin(method, six, cohort=6).server)
    for _ in range(4):
        server = descended(*server, arrays["x"], arrays["y"])
    for found, wanted in zip(leaves(run.server), server, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_no_rounds_leave_the_server_as_it_was_drawn_and_are_evaluated(simulate):
    run = simulate(cohort=COHORT, rounds=0)
    assert run.completed == 0
    assert repr(run).startswith("<Run ditto, 0 rounds on arrays, personal accuracy 0.")
    assert [line["round"] for line in run.history] == [0]
    assert np.isfinite(run.personal.nll)


def test_a_listener_hears_of_every_block_and_line(simulate, monkeypatch):
    heard = []

    class Ears:
        def advanced(self, completed, rounds, info):
            heard.append((completed, rounds))

        def evaluated(self, line):
            heard.append(line["round"])

    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
    simulate(cohort=COHORT, eval_every=2, listener=Ears())
    assert heard == [(1, 4), (2, 4), 2, (3, 4), (4, 4), 4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounds": -1}, r"rounds=-1 is negative; choose 0 or more"),
        ({"cohort": 7}, r"cohort=7 does not fit the 6 clients"),
        ({"seed": -1}, r"seed=-1 is out of range"),
        ({"eval_clients": 0}, r"eval-clients=0 is too small"),
        ({"max_norm": 0.0}, r"max-norm=0.0 is not a positive number; choose one such as 1e8, or inf"),
        ({"max_norm": float("nan")}, r"max-norm=nan is not a positive number"),
        ({"exclude_uncertain": 1.0}, r"exclude-uncertain=1.0 lies outside \[0, 1\); choose a share such as 0.2"),
        ({"exclude_uncertain": -0.1}, r"exclude-uncertain=-0.1 lies outside \[0, 1\)"),
        ({"exclude_uncertain": float("nan")}, r"exclude-uncertain=nan lies outside \[0, 1\)"),
        ({"exclude_uncertain": "few"}, r"exclude-uncertain='few' lies outside \[0, 1\)"),
        ({"exclude_uncertain": 0.2}, r"exclude-uncertain=0.2 judges .* there are none; use --validation 0.1"),
        ({"exclude_uncertain": 0.2, "method": priory.Pooled()}, r"exclude-uncertain=0.2 .* pools the data; choose 0"),
        ({"eval_every": -2}, r"eval-every=-2 is negative"),
        ({"client_batch": 0}, r"client-batch=0 is too small"),
        ({"onboard_visits": -1}, r"onboard-visits=-1 is negative"),
        ({"round": 3}, r"round is not a setting of a run; choose from rounds"),
        ({"schedule": "rate=cosine"}, r"rate is not a number that can change during a run; choose from lam, step-size"),
        ({"scale": 1.0}, r"scale=1.0 belongs to a regression"),
        ({"method": priory.Ditto(lam=-1.0)}, r"lam=-1.0 is out of range; choose 0 or more"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence_before_anything_is_written(simulate, tmp_path, options, sentence):
    with pytest.raises(priory.UsageError, match=sentence):
        simulate(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_ends_in_a_sentence(simulate, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(priory.UsageError, match="cannot be written"):
        simulate(out=tmp_path / "file" / "run")


@pytest.mark.parametrize("wrong", [{"participation": "often"}, {"weighting": "fair"}, {"rounds": 1.5}, {"seed": "one"}])
def test_a_setting_that_is_no_choice_or_no_whole_number_is_refused(wrong):
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=f"{name}="):
        settings.make(wrong).check(3)


def test_a_head_that_names_no_parameter_is_refused(federation):
    with pytest.raises(priory.UsageError, match=r"head='nope' matches no parameter of the model; choose among Dense_0"):
        priory.simulate(priory.FedRep(), federation, rounds=1, model="linear", head="nope")


def test_two_schedules_of_one_number_are_refused(federation):
    schedules = ("step-size=cosine", "step-size=linear")
    with pytest.raises(priory.UsageError, match="step-size has 2 schedules; give one"):
        priory.simulate(priory.FedAvg(), federation, rounds=1, schedule=schedules)


def test_a_name_is_no_method(federation):
    with pytest.raises(priory.UsageError, match="'fedavg' is not a method"):
        priory.simulate("fedavg", federation, rounds=1)


def test_the_manifest_names_the_model_that_was_chosen_by_default(begin, tmp_path):
    begin(out=tmp_path / "run", model=None)
    assert priory.store.RunDirectory(tmp_path / "run").manifest()["run"]["model"] == "mlp:64"
