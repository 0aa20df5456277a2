"""The three ways in of a client that never took part: with labels, with inputs alone, with nothing."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import priory
from priory.core.struct import replace, struct
from priory.engine.prepared import Prepared
from priory.evaluate import inputs_of
from priory.fed.capabilities import Unlabelled
from tests.older import without_checksums

PARTS = ("newcomers", "newcomers_unlabelled", "newcomers_global")


@struct
class Shifted(priory.FedAvg, Unlabelled):
    """FedAvg whose posterior from inputs alone moves the last bias by their mean; labels that it can see count too."""

    def infer(self, task, down, data, key):
        del task, key
        rows = data.padded()
        mean = jnp.sum(rows.mask[:, None] * rows.x) / data.count
        if rows.y is not None:
            mean += jnp.sum(rows.mask * rows.y) / data.count
        bias = down.weights["Dense_0"]["bias"]
        moved = {**down.weights["Dense_0"], "bias": bias + 3 * mean * jnp.arange(bias.size)}
        return replace(down, weights={**down.weights, "Dense_0": moved})


# One batch holds every client, so that the order of examples does not matter.
METHOD = Shifted(work=priory.Work(epochs=2, batch_size=64))


@struct
class Unwilling(priory.FedAvg, Unlabelled):
    """FedAvg that must not be asked."""

    def infer(self, task, down, data, key):
        raise AssertionError("asked to infer")


@pytest.fixture(scope="module")
def held_out(arrays):
    """The federation with a third of its clients kept as newcomers."""
    return priory.data.from_arrays(**arrays, test=0.2, newcomers=0.34, seed=0)


@pytest.fixture(scope="module")
def poisoned(held_out):
    """The same, but that the training labels of newcomers are all turned over."""
    y = held_out.y.copy()
    for client in range(held_out.num_clients, 6):
        y[held_out.rows(client, "train")] = 1 - y[held_out.rows(client, "train")]
    return dataclasses.replace(held_out, y=y)


@pytest.fixture(scope="module")
def run(simulate, held_out):
    """A finished run of a method that offers every way."""
    return simulate(METHOD, held_out, cohort=2)


def of_each(run, client):
    """What `onboard` gives a held-out client in each way, by the part that scores it."""
    own = run.federation.rows(client, "train")
    x, y = run.federation.x[own], run.federation.y[own]
    return dict(zip(PARTS, (run.onboard(x, y), run.onboard(x), run.onboard()), strict=True))


@pytest.mark.parametrize("part", PARTS)
def test_newcomers_are_scored_as_onboard_lets_them_in(run, held_out, part):
    for place, client in enumerate(range(held_out.num_clients, 6)):
        test = held_out.rows(client, "test")
        expected = of_each(run, client)[part].score(held_out.x[test], held_out.y[test])
        found = getattr(run, part).per_client
        assert found["accuracy"][place] == expected.accuracy
        np.testing.assert_allclose(found["nll"][place], expected.nll, rtol=1e-5)


def test_a_model_scores_as_it_predicts(run, held_out):
    test = held_out.rows(0, "test")
    x, y = held_out.x[test], held_out.y[test]
    p = run.client(0).predict(x).probabilities
    found = run.client(0).score(x, y)
    assert found.accuracy == np.mean(p.argmax(-1) == y)
    np.testing.assert_allclose(found.nll, -np.log(p[np.arange(len(y)), y]).mean(), rtol=1e-5)
    assert run.personal.per_client["nll"][0] == pytest.approx(found.nll, rel=1e-5)


def test_the_ways_differ(run):
    assert len({getattr(run, part).nll for part in PARTS}) == 3


def test_inputs_alone_move_the_bias_by_their_mean(run, held_out):
    x = held_out.x[held_out.rows(4, "train")]  # so many as elsewhere
    expected = run.server.weights["Dense_0"]["bias"] + 3 * np.float32(x.sum(axis=1).mean()) * np.arange(2)
    np.testing.assert_allclose(run.onboard(x).posterior.weights["Dense_0"]["bias"], expected, rtol=1e-5)


def test_nothing_but_inputs_reaches_a_method_that_infers(run):
    @jax.jit
    def seen(shards, scale):
        data = shards.of(jnp.int32(1))
        return inputs_of(replace(data, pool=replace(data.pool, scale=scale))).padded(), data.padded()

    train = run.evaluator.ready.train
    blind, whole = seen(train, np.ones(train.pool.y.shape, np.float32))
    assert (blind.y, blind.scale) == (None, None)
    np.testing.assert_array_equal(blind.x, whole.x)


def test_labels_have_no_part_in_what_inputs_alone_or_nothing_give(run, simulate, poisoned):
    again = simulate(METHOD, poisoned, cohort=2)
    for part in PARTS[1:]:
        for name, values in getattr(run, part).per_client.items():
            np.testing.assert_array_equal(values, getattr(again, part).per_client[name])
    assert again.newcomers.nll != run.newcomers.nll


def test_the_global_model_of_a_newcomer_is_not_chosen_by_its_labels(begin, held_out, poisoned):
    """IFCA lets a participant's data choose among the clusters, which differ from the start here."""
    method = priory.IFCA(clusters=2, first_networks="independent", finetune_epochs=0)
    runs = [begin(method, data, cohort=2) for data in (held_out, poisoned)]
    one, other = (run.evaluator.newcomer_scores()["newcomers_global"] for run in runs)
    assert one.to_json() == other.to_json()


def test_a_newcomer_without_data_draws_from_the_population(begin, held_out):
    run = begin(priory.FedPop(newcomer_draws=7), held_out, cohort=2)
    outputs = np.asarray(run.onboard().predict(held_out.x).predictive.outputs)
    assert len(np.unique(outputs[:, 0, 0])) == 7


def test_participants_are_never_asked_to_infer(simulate, held_out, monkeypatch):
    assert isinstance(Unwilling(), Unlabelled)
    asked, rehearse = [], Prepared._rehearse_tallies

    def spy(self, server, ids, **how):
        asked.append(ids.tolist())
        rehearse(self, server, ids, **how)

    monkeypatch.setattr(Prepared, "_rehearse_tallies", spy)
    with pytest.raises(AssertionError, match="asked to infer"):
        simulate(Unwilling(), held_out, cohort=2, rounds=1)
    assert asked == [[0, 1, 2, 3], [4, 5]]  # the rounds and the evaluation of participants were traced before


@pytest.mark.parametrize(
    ("method", "offered"),
    [(METHOD, (True, True, True)), (priory.FedAvg(), (True, False, True)), (priory.Local(), (True, False, False))],
    ids=["every way", "no inference", "labels alone"],
)
def test_a_part_is_there_where_the_method_offers_the_way(simulate, held_out, method, offered):
    run = simulate(method, held_out, cohort=2, rounds=0)
    for told in (run.summary(), run.per_client(), run.history[-1]):
        assert tuple(bool(told.get(part)) for part in PARTS) == offered
    assert list(run.per_client()["newcomers"]["client"]) == list(held_out.clients[held_out.num_clients :])


def test_every_part_comes_back_from_disk(run, held_out, tmp_path):
    run.save(tmp_path / "run")
    again = priory.load(tmp_path / "run", federation=held_out, method=run.method)
    for part in PARTS:
        assert getattr(again, part).to_json() == getattr(run, part).to_json()
        np.testing.assert_array_equal(getattr(again, part).per_client["nll"], getattr(run, part).per_client["nll"])
    assert again.summary() == run.summary() | {"peak_rss_bytes": again.peak_rss_bytes}


def test_a_directory_from_before_there_were_three_ways_can_be_loaded(run, held_out, tmp_path):
    run.save(tmp_path / "run")
    without_checksums(tmp_path / "run")
    for name in ("summary.json", "clients.json"):
        path = tmp_path / "run" / name
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in PARTS[1:]}))
    again = priory.load(tmp_path / "run", federation=held_out, method=run.method)
    assert again.newcomers.to_json() == run.newcomers.to_json()
    assert (again.newcomers_unlabelled, again.newcomers_global) == (None, None)


def test_a_stopped_run_has_no_scores_of_newcomers(simulate, held_out):
    run = simulate(METHOD, held_out, cohort=2, stop=lambda: True)
    assert [getattr(run, part) for part in PARTS] == [None, None, None]


def test_inputs_without_labels_leave_a_method_that_cannot_use_them_with_the_population(begin, held_out):
    run, x = begin(priory.FedAvg(), held_out, cohort=2), held_out.x
    np.testing.assert_array_equal(run.onboard(x).predict(x).probabilities, run.onboard().predict(x).probabilities)


def test_labels_without_inputs_are_refused(run):
    with pytest.raises(priory.UsageError, match=r"y was given without x, .* give both, or neither"):
        run.onboard(y=np.zeros(3, int))


def test_inputs_alone_are_checked(run):
    with pytest.raises(priory.UsageError, match=r"Examples of shape \(2,\) do not fit; each has shape \(3,\)"):
        run.onboard(np.zeros((4, 2)))


def test_onboarding_twice_gives_the_same_bits(run, held_out):
    x = held_out.x[held_out.rows(4, "train")]
    one, other = (run.onboard(x).posterior for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)
