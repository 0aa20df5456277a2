"""Aggregation by confidence: who is left out of a round, seen through a method that is the surer the more it has."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from scipy.special import softmax

import priory
from priory.core import rng, trees
from priory.core.rng import Stream
from priory.core.struct import static, struct
from priory.engine.cohort import Participation
from priory.fed.channel import TopK
from priory.fed.method import Message, Method, point
from priory.fed.visit import COUNTED, KEPT
from tests.methods import verbs

HOMES = {"resident": 1 << 30, "stored": 0}
TUNED = priory.FedAvg(finetune_epochs=1)  # judged by what it has after its own epoch


@struct
class Surer(Method):
    """A method without learning: a client with more training examples has smaller entropy, and sends its size.

    Attributes:
        whole: Whether the server wants all messages rather than their mean.
        bad: Clients with at most so many examples send NaN.
    """

    whole: bool = static(default=False)
    bad: float = 0.0

    @property
    def linear(self) -> bool:
        return not self.whole

    def init_server(self, task: Any, key: Any) -> dict[str, Array]:
        return {"round": jnp.float32(0), "size": jnp.float32(0)}

    def init_client(self, task: Any, down: Any, key: Any) -> dict[str, Array]:
        return {"visits": jnp.int32(0), "size": jnp.float32(0)}

    def client_update(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> tuple:
        size = data.count.astype(jnp.float32)
        payload = {"round": down["round"] + 1, "size": jnp.where(size <= self.bad, jnp.nan, size)}
        return {"visits": client["visits"] + 1, "size": size}, Message(payload, jnp.float32(1)), {}

    def reference(self, task: Any, down: Any, payload: Any) -> Any:
        return trees.zeros(payload)

    def personalise(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> Any:
        return client["size"]  # 0 unless `client_update` came first

    def predict(self, task: Any, posterior: Any, x: Array, key: Any) -> Any:
        return point(jnp.broadcast_to(jnp.stack([0.1 * posterior, jnp.float32(0)]), (x.shape[0], 2)))


@pytest.fixture(scope="module")
def validated(arrays):
    """The federation with a quarter of the training examples set aside."""
    return priory.data.from_arrays(**arrays, test=0.2, validation=0.25, seed=0)


@pytest.fixture(scope="module")
def sizes(validated):
    """Training examples of each client."""
    assert len(set(validated.train.count.tolist())) == 6
    return validated.train.count


def without_validation(federation, *clients):
    """The federation in which some clients have no validation examples."""
    count = np.where(np.isin(np.arange(6), clients), 0, federation.validation.count)
    return dataclasses.replace(federation, validation=dataclasses.replace(federation.validation, count=count))


def heard(t, cohort=6, active=None):
    """The uploaders of round t with seed 0."""
    part = Participation(6, cohort, active or cohort)
    slots = jax.jit(lambda root: part.draw(rng.key(root, Stream.COHORT, t)))(rng.root(0))
    return np.asarray(slots.ids)[np.asarray(slots.uploads)]


@pytest.mark.parametrize(
    ("whole", "home", "client_batch"),
    [
        (False, "resident", 1),
        (True, "stored", 1),
        pytest.param(False, "stored", 2, marks=pytest.mark.slow),
        pytest.param(True, "resident", 2, marks=pytest.mark.slow),
    ],
)
def test_the_least_sure_are_left_out_of_the_mean_and_keep_what_they_learned(
    train, validated, sizes, state, whole, home, client_batch
):
    options: dict[str, Any] = {"resident_bytes": HOMES[home], "client_batch": client_batch}
    run = train(Surer(whole), validated, cohort=6, exclude_uncertain=0.5, **options)
    np.testing.assert_allclose(run.server["size"], np.sort(sizes)[3:].mean(), rtol=1e-6)
    assert run.server["round"] == 4
    assert run.log.info["excluded"] == 3
    assert state(run)["['clients'].client['visits']"].tolist() == [4] * 6


def test_the_line_of_a_round_tells_how_many_were_left_out(simulate, validated):
    assert simulate(Surer(), validated, cohort=6, exclude_uncertain=0.5).history[-1]["info"]["excluded"] == 3


# `tests/fed/test_screen.py` has the numbers for more shares.
def test_the_number_left_out_is_rounded_down(train, validated, sizes):
    run = train(Surer(), validated, cohort=6, rounds=1, exclude_uncertain=0.99)
    np.testing.assert_allclose(run.server["size"], sizes.max(), rtol=1e-6)
    assert run.log.info["excluded"] == 5


def test_who_is_left_out_counts_as_one_that_did_not_upload(train, validated, sizes, monkeypatch):
    traces = []
    monkeypatch.setattr(priory.engine.runner.Runner, "_note", lambda self, trace: traces.append(trace))
    train(Surer(), validated, cohort=6, rounds=1, exclude_uncertain=0.5)
    status = dict(zip(traces[0].ids[0].tolist(), traces[0].status[0].tolist(), strict=True))
    order = np.argsort(sizes).tolist()
    assert [status[client] for client in order] == [KEPT] * 3 + [COUNTED] * 3


def test_a_client_without_validation_examples_is_never_left_out(train, validated, sizes):
    order = np.argsort(sizes)
    data = without_validation(validated, *order[:2])
    run = train(Surer(), data, cohort=6, rounds=1, exclude_uncertain=0.5)
    kept = np.append(order[:2], order[4:])  # of the four that can be judged the least sure two go
    np.testing.assert_allclose(run.server["size"], sizes[kept].mean(), rtol=1e-6)
    assert run.log.info["excluded"] == 2


def test_only_uploaders_are_ranked(train, validated, sizes):
    run = train(Surer(), validated, cohort=2, active=6, exclude_uncertain=0.5)
    np.testing.assert_allclose(run.server["size"], sizes[heard(3, 2, 6)].max(), rtol=1e-6)
    assert run.log.info["excluded"] == 1


def test_a_client_that_was_rejected_takes_nobodys_place_among_those_left_out(train, validated, sizes):
    order = np.argsort(sizes)
    run = train(Surer(bad=float(sizes[order[1]])), validated, cohort=6, rounds=1, exclude_uncertain=0.5)
    np.testing.assert_allclose(run.server["size"], sizes[order[4:]].mean(), rtol=1e-6)  # two of four, and the bad two
    assert run.extra["rejected"] == {validated.clients[client]: 1 for client in order[:2]}


def test_who_is_left_out_has_sent_nothing(train, validated, sizes, state):
    run = train(Surer(), validated, cohort=6, exclude_uncertain=0.5, channel=TopK(fraction=0.5))
    memory = state(run)["['clients'].memory['round']"]  # the size is larger, so the round is what is held back
    assert np.flatnonzero(memory).tolist() == np.sort(np.argsort(sizes)[3:]).tolist()


@pytest.mark.parametrize(
    ("method", "judged", "cohort", "share"),
    [
        pytest.param(TUNED, 1, 6, 0.5, id="fedavg"),
        pytest.param(priory.Ditto(), 6, 3, 0.3, id="ditto", marks=pytest.mark.slow),
    ],
)
def test_a_share_that_leaves_nobody_out_changes_only_the_order_of_a_sum(
    train, validated, assert_close, method, judged, cohort, share
):
    data = without_validation(validated, *range(judged, 6))
    off = train(method, data, cohort=cohort)
    on = train(method, data, cohort=cohort, exclude_uncertain=share)
    assert on.log.info["excluded"] == 0
    assert "excluded" not in off.log.info
    assert_close(off, on, atol=1e-6)


def test_validation_examples_alone_change_no_bit(train, validated, assert_same_bits):
    nobody = without_validation(validated, *range(6))
    assert_same_bits(train(data=validated), train(data=nobody, exclude_uncertain=0.0))


def test_a_round_of_fedavg_leaves_out_whom_its_own_verbs_find_uncertain(train, validated, sizes):
    method, run = TUNED, train(TUNED, validated, cohort=6, rounds=1, exclude_uncertain=0.5)
    inputs = (validated.x - validated.shift) * validated.factor

    @jax.jit
    def says(server, client):
        data = run.evaluator.ready.train.of(client)
        kept, message, _ = method.client_update(
            run.task, server, (), data, rng.key(run.evaluator.ready.root, Stream.CLIENT, 0, client)
        )
        key_post, key_predict = jax.random.split(rng.key(run.evaluator.ready.root, Stream.CONFIDENCE, 0, client))
        posterior = method.personalise(run.task, server, kept, data, key_post)
        return message.payload, method.predict(run.task, posterior, inputs, key_predict).outputs[0]

    server = first_server(run)
    sent, entropy = [], []
    for client in range(6):
        payload, logits = jax.tree.map(np.asarray, says(server, np.int32(client)))
        p = softmax(logits[validated.rows(client, "validation")].astype(np.float64), axis=-1)
        sent.append(payload)
        entropy.append(-np.sum(p * np.log(p)) / len(p))
    assert_mean(run.server, sent, np.where(np.argsort(np.argsort(entropy)) < 3, sizes, 0))


@pytest.mark.slow  # the least sure are left out above, in both homes
def test_clients_on_disk_are_judged_as_clients_in_memory(train, validated, assert_same_bits):
    here = train(TUNED, validated, cohort=6, exclude_uncertain=0.5)
    assert here.log.info["excluded"] == 3
    assert_same_bits(here, train(TUNED, validated, cohort=6, exclude_uncertain=0.5, resident_bytes=0))


@pytest.mark.slow  # a run of its own
def test_a_regression_is_judged_by_its_spread(train, arrays):
    y = arrays["x"] @ np.array([1.0, -2.0, 0.5], np.float32)
    noise = np.where(arrays["client"] == 3, 5.0, 0.5).astype(np.float32)
    columns = (arrays["x"], y, arrays["client"])
    data = priory.data.from_arrays(*columns, scale=noise, test=0.2, validation=0.25, seed=0)
    options: dict[str, Any] = {"cohort": 6, "rounds": 1, "weighting": "uniform"}
    run = train(priory.FedAvg(), data, exclude_uncertain=0.2, **options)

    @jax.jit
    def payload(server, client):
        key = rng.key(run.evaluator.ready.root, Stream.CLIENT, 0, client)
        return run.method.client_update(run.task, server, (), run.evaluator.ready.train.of(client), key)[1].payload

    server = first_server(run)
    assert_mean(run.server, [payload(server, np.int32(client)) for client in range(6)], np.arange(6) != 3)


def first_server(run):
    return verbs.init_server(run.method, run.task, jax.random.fold_in(run.evaluator.ready.root, int(Stream.INIT)))


def assert_mean(server, sent, weight):
    """Raises unless the server is the weighted mean of what was sent."""
    sent = zip(*map(jax.tree.leaves, sent), strict=True)
    for found, leaves in zip(jax.tree.leaves(server), sent, strict=True):
        np.testing.assert_allclose(found, np.average(np.stack(leaves), axis=0, weights=weight), atol=1e-6)


def test_a_run_that_leaves_clients_out_resumes_with_the_same_bits(
    simulate, validated, tmp_path, monkeypatch, assert_same_bits
):
    method = Surer()
    options: dict[str, Any] = {"method": method, "data": validated, "cohort": 6, "exclude_uncertain": 0.5}
    unbroken = simulate(**options)
    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
    asked = iter([False, False, True])
    assert simulate(out=tmp_path / "run", stop=lambda: next(asked), **options).completed == 2
    resumed = priory.resume(tmp_path / "run", federation=validated, method=method)
    assert resumed.settings.exclude_uncertain == 0.5
    assert resumed.history[-1]["info"]["excluded"] == 3
    assert_same_bits(unbroken, resumed)
