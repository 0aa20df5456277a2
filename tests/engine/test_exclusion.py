"""Aggregation by confidence: who is left out of a round, seen through a method that is the surer the more it has."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import priory
from priory.core import rng, trees
from priory.core.rng import Stream
from priory.core.struct import static, struct
from priory.engine.cohort import Participation
from priory.fed.channel import TopK
from priory.fed.method import Message, point
from priory.fed.visit import COUNTED, KEPT

HOMES = {"resident": 1 << 30, "stored": 0}


@struct
class Surer:
    """A method without learning: a client with more training examples has smaller entropy, and sends its size.

    Attributes:
        whole: Whether the server wants all messages rather than their mean.
        bad: Clients with at most so many examples send NaN.
    """

    whole: bool = static(default=False)
    bad: float = 0.0

    pools: ClassVar[bool] = False

    @property
    def linear(self) -> bool:
        return not self.whole

    def check(self) -> None:
        pass

    def init(self, task: Any, key: Any) -> dict[str, Array]:
        return {"round": jnp.float32(0), "size": jnp.float32(0)}

    def broadcast(self, server: Any) -> Any:
        return server

    def enrol(self, task: Any, down: Any, key: Any) -> dict[str, Array]:
        return {"visits": jnp.int32(0), "size": jnp.float32(0)}

    def client_update(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> tuple:
        size = data.count.astype(jnp.float32)
        payload = {"round": down["round"] + 1, "size": jnp.where(size <= self.bad, jnp.nan, size)}
        return {"visits": client["visits"] + 1, "size": size}, Message(payload, jnp.float32(1)), {}

    def aggregate(self, task: Any, server: Any, messages: Any, key: Any) -> tuple:
        return trees.weighted_mean(messages.payload, messages.weight, otherwise=server), {}

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
    slots = Participation(6, cohort, active or cohort).draw(rng.key(rng.root(0), Stream.COHORT, t))
    return np.asarray(slots.ids)[np.asarray(slots.uploads)]


@pytest.mark.parametrize("client_batch", [1, 2])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("whole", [False, True], ids=["summed", "stacked"])
def test_the_least_sure_are_left_out_of_the_mean(simulate, validated, sizes, whole, home, client_batch):
    run = simulate(
        Surer(whole), validated, cohort=4, exclude_uncertain=0.5, resident_bytes=HOMES[home], client_batch=client_batch
    )
    np.testing.assert_allclose(run.server["size"], np.sort(sizes[heard(3, 4)])[2:].mean(), rtol=1e-6)
    assert run.server["round"] == 4
    assert run.history[-1]["info"]["excluded"] == 2


@pytest.mark.parametrize(("share", "num"), [(0.1, 0), (0.2, 1), (0.5, 3), (0.99, 5)])
def test_the_number_left_out_is_rounded_down(simulate, validated, sizes, share, num):
    run = simulate(Surer(), validated, cohort=6, rounds=1, exclude_uncertain=share)
    np.testing.assert_allclose(run.server["size"], np.sort(sizes)[num:].mean(), rtol=1e-6)
    assert run.history[-1]["info"]["excluded"] == num


@pytest.mark.parametrize("home", HOMES)
def test_who_is_left_out_keeps_what_it_learned(simulate, validated, state, home):
    run = simulate(Surer(), validated, cohort=6, exclude_uncertain=0.5, resident_bytes=HOMES[home])
    assert state(run)["['records'].client['visits']"].tolist() == [4] * 6


def test_who_is_left_out_counts_as_one_that_did_not_upload(simulate, validated, sizes, monkeypatch):
    traces = []
    monkeypatch.setattr(priory.engine.session.Session, "_note", lambda self, trace: traces.append(trace))
    simulate(Surer(), validated, cohort=6, rounds=1, exclude_uncertain=0.5)
    status = dict(zip(traces[0].ids[0].tolist(), traces[0].status[0].tolist(), strict=True))
    order = np.argsort(sizes).tolist()
    assert [status[client] for client in order] == [KEPT] * 3 + [COUNTED] * 3


def test_a_client_without_validation_examples_is_never_left_out(simulate, validated, sizes):
    order = np.argsort(sizes)
    data = without_validation(validated, *order[:2])
    run = simulate(Surer(), data, cohort=6, rounds=1, exclude_uncertain=0.5)
    kept = np.append(order[:2], order[4:])  # of the four that can be judged the least sure two go
    np.testing.assert_allclose(run.server["size"], sizes[kept].mean(), rtol=1e-6)
    assert run.history[-1]["info"]["excluded"] == 2


def test_only_uploaders_are_ranked(simulate, validated, sizes):
    run = simulate(Surer(), validated, cohort=2, active=6, exclude_uncertain=0.5)
    np.testing.assert_allclose(run.server["size"], sizes[heard(3, 2, 6)].max(), rtol=1e-6)
    assert run.history[-1]["info"]["excluded"] == 1


def test_a_client_that_was_rejected_takes_nobodys_place_among_those_left_out(simulate, validated, sizes):
    smallest = float(sizes.min())
    run = simulate(Surer(bad=smallest), validated, cohort=6, rounds=1, exclude_uncertain=0.4)
    np.testing.assert_allclose(run.server["size"], np.sort(sizes)[3:].mean(), rtol=1e-6)  # two of five, and the bad one
    assert run.extra["rejected"] == {validated.clients[int(sizes.argmin())]: 1}


def test_who_is_left_out_has_sent_nothing(simulate, validated, sizes, state):
    run = simulate(Surer(), validated, cohort=6, exclude_uncertain=0.5, channel=TopK(fraction=0.5))
    memory = state(run)["['records'].memory['round']"]  # the size is larger, so the round is what is held back
    assert np.flatnonzero(memory).tolist() == np.sort(np.argsort(sizes)[3:]).tolist()


@pytest.mark.parametrize("method", [priory.FedAvg(), priory.FedRep(head_epochs=1)], ids=["fedavg", "fedrep"])
def test_a_share_that_leaves_nobody_out_changes_only_the_order_of_a_sum(simulate, validated, assert_close, method):
    options: dict[str, Any] = {"cohort": 5, "model": "mlp:4"}
    off = simulate(method, validated, **options)
    on = simulate(method, validated, exclude_uncertain=0.1, **options)
    assert on.history[-1]["info"]["excluded"] == 0
    assert "excluded" not in off.history[-1]["info"]
    assert_close(off, on, atol=1e-6)


def test_validation_examples_alone_change_no_bit(simulate, validated, assert_same_bits):
    nobody = without_validation(validated, *range(6))
    assert_same_bits(simulate(data=validated), simulate(data=nobody, exclude_uncertain=0.0))


def test_a_round_of_fedavg_leaves_out_whom_its_own_verbs_find_uncertain(simulate, validated, sizes):
    method = priory.FedAvg(finetune_epochs=1)
    run = simulate(method, validated, cohort=6, rounds=1, exclude_uncertain=0.5)
    server = method.init(run.task, rng.key(run.root, Stream.INIT))
    sent, entropy = [], []
    for client in range(6):
        data = run.train.of(jnp.int32(client))
        key = rng.key(run.root, Stream.CLIENT, 0, client)
        kept, message, _ = method.client_update(run.task, server, (), data, key)
        key_post, key_predict = jax.random.split(rng.key(run.root, Stream.CONFIDENCE, 0, client))
        posterior = method.personalise(run.task, server, kept, data, key_post)
        x = jnp.asarray((validated.x[validated.rows(client, "validation")] - validated.shift) * validated.factor)
        p = jax.nn.softmax(method.predict(run.task, posterior, x, key_predict).outputs[0])
        sent.append(message.payload)
        entropy.append(float(-jnp.sum(p * jnp.log(p)) / len(x)))
    weight = jnp.where(jnp.argsort(jnp.argsort(jnp.asarray(entropy))) < 3, jnp.asarray(sizes, jnp.float32), 0.0)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
    expected = trees.weighted_mean(stacked, weight, otherwise=server)
    for found, wanted in zip(jax.tree.leaves(run.server), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_clients_on_disk_are_judged_as_clients_in_memory(simulate, validated, assert_same_bits):
    here = simulate(data=validated, cohort=4, exclude_uncertain=0.5)
    assert here.history[-1]["info"]["excluded"] == 2
    assert_same_bits(here, simulate(data=validated, cohort=4, exclude_uncertain=0.5, resident_bytes=0))


def test_a_regression_is_judged_by_its_spread(simulate, arrays):
    y = arrays["x"] @ np.array([1.0, -2.0, 0.5], np.float32)
    noise = np.where(arrays["client"] == 3, 5.0, 0.5).astype(np.float32)
    columns = (arrays["x"], y, arrays["client"])
    data = priory.data.from_arrays(*columns, scale=noise, test=0.2, validation=0.25, seed=0)
    options: dict[str, Any] = {"cohort": 6, "rounds": 1, "weighting": "uniform"}
    without = simulate(priory.FedAvg(), data, exclude_uncertain=0.2, **options)
    silent = jnp.asarray(np.arange(6) != 3, jnp.float32)
    method, server = priory.FedAvg(), priory.FedAvg().init(without.task, rng.key(without.root, Stream.INIT))
    sent = []
    for client in range(6):
        key = rng.key(without.root, Stream.CLIENT, 0, client)
        data_of = without.train.of(jnp.int32(client))
        sent.append(method.client_update(without.task, server, (), data_of, key)[1].payload)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
    expected = trees.weighted_mean(stacked, silent, otherwise=server)
    for found, wanted in zip(jax.tree.leaves(without.server), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_run_that_leaves_clients_out_resumes_with_the_same_bits(
    simulate, validated, tmp_path, monkeypatch, assert_same_bits
):
    options: dict[str, Any] = {"data": validated, "cohort": 4, "exclude_uncertain": 0.5}
    unbroken = simulate(**options)
    monkeypatch.setattr("priory.engine.session.LOOK_SECONDS", 0.0)
    asked = iter([False, False, True])
    assert simulate(out=tmp_path / "run", stop=lambda: next(asked), **options).completed == 2
    resumed = priory.resume(tmp_path / "run", federation=validated)
    assert resumed.settings.exclude_uncertain == 0.5
    assert resumed.history[-1]["info"]["excluded"] == 2
    assert_same_bits(unbroken, resumed)
