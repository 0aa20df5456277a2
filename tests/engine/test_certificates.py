"""Certificates of a run: of its newcomers, of who is onboarded, and of a client that took part under another prior."""

import copy
import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

import priory
from priory.core.errors import UsageError
from priory.core.sealed import unsealed
from priory.core.struct import replace
from priory.engine.run_log import RunLog
from tests.states import prepared_as

# One batch holds every client; few draws of a step, and a prior that a client may leave.
METHOD = priory.PFedBayes(zeta=1.0, work=priory.Work(steps=5, batch_size=16))


@jax.jit
def divergence(method, task, down, posterior):
    return method.certified(task, down, posterior).divergence


@pytest.fixture(scope="module")
def held_out(arrays):
    """The federation with a third of its clients kept as newcomers."""
    return priory.data.from_arrays(**arrays, test=0.2, newcomers=0.34, seed=0)


@pytest.fixture(scope="module")
def run(train, held_out, tmp_path_factory):
    """A run after four rounds, with a directory."""
    return train(METHOD, held_out, cohort=2, out=tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def everybody(begin):
    """A run in which all clients take part; certificates do not depend on how far it is."""
    return begin(METHOD)


@pytest.fixture(scope="module")
def found(run):
    """The certificates of its newcomers."""
    return run.certificates()


def test_every_newcomer_has_one_from_its_training_rows(run, found):
    federation = run.federation
    assert list(found) == list(federation.clients[federation.num_clients :])
    for name, one in found.items():
        assert one.rows == federation.train.count[federation.index(name)]
        assert (one.client, one.draws, one.delta) == (name, 1000, 0.05)
        assert one.sampled_error <= one.empirical_error <= one.kl_bound <= one.lambda_bound
        assert one.divergence > 0
        assert one.chance == 0.5


def test_they_are_kept_in_the_run_directory_and_a_loaded_run_finds_the_same(run, found):
    kept = unsealed((run.path / "certificates.json").read_text())
    assert kept == {name: one.to_json() for name, one in found.items()}
    name = next(iter(found))
    assert priory.load(run.path, federation=run.federation).certificate(name) == found[name]


def test_the_divergence_is_that_of_the_posterior_from_what_was_broadcast(run):
    own = run.federation.rows(run.federation.num_clients, "train")
    model = run.onboard(run.federation.x[own], run.federation.y[own])
    expected = divergence(METHOD, run.task, METHOD.broadcast(run.server), model.posterior)
    assert model.certificate().divergence == pytest.approx(float(expected), rel=1e-5)


def test_a_client_that_took_part_is_refused_with_the_reason(run):
    for ask in (lambda: run.certificate(0), lambda: run.client(0).certificate()):
        with pytest.raises(UsageError, match="took part in the training, so that the prior has seen its rows"):
            ask()


def test_rows_of_a_participant_that_come_back_as_a_newcomers_are_refused(run):
    new, old = (np.arange(len(run.federation.y))[run.federation.rows(client, "train")] for client in (4, 0))
    own = np.resize(old, len(new))  # so many as elsewhere
    model = run.onboard(run.federation.x[own], run.federation.y[own])
    with pytest.raises(UsageError, match="are among those that participants trained on"):
        model.certificate()


def test_a_few_rows_of_participants_are_told_and_more_are_refused(run):
    federation = run.federation
    places = np.arange(len(federation.y))
    new, old = (places[federation.rows(client, "train")] for client in (federation.num_clients, 0))
    for share, is_refused in ((0.1, False), (0.2, True)):
        known = int(share * len(new))
        rows = np.r_[new[known:], old[:known]]  # so many as elsewhere
        model = run.onboard(federation.x[rows], federation.y[rows])
        if is_refused:
            with pytest.raises(UsageError, match="are among those that participants trained on"):
                model.certificate()
        else:
            found = model.certificate()
            assert found.known == known > 0
            assert f"{found.known} of the rows equal ones that participants trained on" in "".join(found.lines())
            assert found.rounds == run.completed


def elsewhere(run, **changes):
    """The run without its directory, with other values in its federation."""
    run = prepared_as(run, federation=dataclasses.replace(run.federation, **changes))
    return dataclasses.replace(run, log=RunLog(None, None, None))


def with_rows_of_participants(run, newcomers):
    """The run, as if all rows of these newcomers were ones of the first client."""
    federation = run.federation
    x, y, places = federation.x.copy(), federation.y.copy(), np.arange(len(federation.y))
    for name in newcomers:
        rows = places[federation.rows(name, "train")]
        old = np.resize(places[federation.rows(0, "train")], len(rows))
        x[rows], y[rows] = x[old], y[old]
    return elsewhere(run, x=x, y=y)


def test_a_newcomer_with_rows_of_participants_is_refused_among_all_newcomers_too(run, found):
    names = list(found)
    with pytest.warns(UserWarning, match=f"of client {names[0]}'s .* rows are among those that participants trained"):
        left = with_rows_of_participants(run, names[:1]).certificates()
    assert list(left) == names[1:]
    with pytest.raises(UsageError, match="are among those that participants trained on"):
        with_rows_of_participants(run, names).certificates()
    with pytest.raises(UsageError, match="are among those that participants trained on"):
        with_rows_of_participants(run, names).certificate(names[-1])


def grouped(run, rows_each):
    """The run, as if so many rows after one another had one patient."""
    federation = run.federation
    group = np.arange(len(federation.y), dtype=np.int32) // rows_each
    spec = federation.spec | {"group": "patient"}
    return elsewhere(run, group=group, spec=spec)


def test_rows_of_groups_are_refused_with_the_column_the_reason_and_the_remedy(run, found):
    some, name = grouped(run, 2), list(found)[-1]
    words = (
        r"training rows have \d+ values of 'patient', rows with the same 'patient' are not independent, .* one row of"
    )
    for ask in (some.certificates, lambda: some.certificate(name)):
        with pytest.raises(UsageError, match=words):
            ask()
    rows = run.federation.rows(name, "train")
    x, y, group = run.federation.x[rows], run.federation.y[rows], some.federation.group[rows]
    with pytest.raises(UsageError, match=words):
        some.onboard(x, y, group=group).certificate()
    with pytest.raises(UsageError, match=r"not independent.*give `onboard` the 'patient' of each row"):
        some.onboard(x, y).certificate()


def test_one_row_of_each_group_has_the_bound_of_rows_with_groups_as_the_unit(run, found):
    each, name = grouped(run, 1), list(found)[-1]
    rows = run.federation.rows(name, "train")
    onboarded = each.onboard(run.federation.x[rows], run.federation.y[rows], group=np.arange(found[name].rows))
    plain = run.onboard(run.federation.x[rows], run.federation.y[rows]).certificate()
    for one, other in ((each.certificates()[name], found[name]), (onboarded.certificate(), plain)):
        assert dataclasses.replace(one, assumptions=other.assumptions) == other
        assert "groups are the unit: the client has one row of each 'patient'" in "".join(one.lines())


def test_a_group_for_each_row_is_needed(run):
    rows = run.federation.rows(0, "train")
    with pytest.raises(UsageError, match=r"group has shape \(3,\) and y \d+ rows; give one value for each"):
        run.onboard(run.federation.x[rows], run.federation.y[rows], group=[1, 2, 3])


def test_a_newcomer_without_a_certificate_costs_the_others_none(run, monkeypatch):
    whole = run.certificates()
    counts = run.evaluator.counts

    def diverged(_, ids, draws):
        found = counts(ids, draws)
        return replace(found, divergence=np.where(np.arange(len(ids)) == 0, np.inf, found.divergence))

    monkeypatch.setattr(type(run.evaluator), "counts", diverged)
    with pytest.warns(UserWarning, match="The divergence of .* from the prior is inf"):
        left = run.certificates()
    assert list(left) == list(whole)[1:]


def test_a_model_made_without_labels_is_refused_with_the_reason(run):
    with pytest.raises(UsageError, match="made without labels"):
        run.onboard().certificate()


def test_a_run_without_newcomers_has_none(everybody):
    with pytest.raises(UsageError, match="No client with training rows was held out"):
        everybody.certificates()


def test_a_client_that_took_part_has_one_under_the_prior_of_a_run_that_held_it_out(run, everybody):
    newcomer = run.federation.clients[-1]
    found = everybody.certificate(newcomer, prior=run)
    down = METHOD.broadcast(run.server)
    expected = divergence(METHOD, run.task, down, everybody.client(newcomer).posterior)
    assert found.divergence == pytest.approx(float(expected), rel=1e-5)
    assert found.rows == run.federation.train.count[-1]


def test_a_model_of_a_newcomer_does_not_keep_the_run(begin, arrays):
    run = begin(priory.PFedBayes(), priory.data.from_arrays(**arrays, test=0.2, seed=0))
    rows = run.federation.rows(0, "train")
    model = copy.deepcopy(run.onboard(run.federation.x[rows], run.federation.y[rows]))
    states = weakref.ref(run.evaluator.client_states)
    del run
    gc.collect()
    assert states() is None
    assert model.predict(arrays["x"][:2]).probabilities.shape == (2, 2)


def test_a_prior_that_is_none_is_refused(run, everybody, arrays):
    newcomer = run.federation.clients[-1]
    with pytest.raises(UsageError, match=r"is no newcomer of the run given as `prior`"):
        everybody.certificate(run.federation.clients[0], prior=run)
    with pytest.raises(UsageError, match="was held out of this run, which is prior enough"):
        run.certificate(newcomer, prior=run)
    other = replace(everybody.evaluator.ready.inputs, method=priory.SFedBayes())
    with pytest.raises(UsageError, match="another method, model or form of inputs"):
        prepared_as(everybody, inputs=other).certificate(newcomer, prior=run)
    turned = priory.data.from_arrays(**(arrays | {"y": 1 - arrays["y"]}), test=0.2, seed=0)
    with pytest.raises(UsageError, match="has other training rows in `prior`"):
        prepared_as(everybody, federation=turned).certificate(newcomer, prior=run)
