"""What a round does to server and clients, seen through a method that keeps books."""

import json
from functools import cache
from typing import Any

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
from priory.engine.rounds import run_block
from priory.fed.channel import TopK
from priory.fed.method import Message, Method, point
from tests.older import edit_json


@struct
class Ledger(Method):
    """A method without learning: the server counts rounds and knows the mean size of the clients that it heard.

    Attributes:
        bad: Clients with at least so many examples send NaN.
        bad_state: Clients with at least so many examples keep NaN, and send a number.
        claim: The weight that every client sends.
        whole: Whether the server wants all messages rather than their mean.
    """

    bad: float = 1e9
    bad_state: float = 1e9
    claim: float = 1.0
    whole: bool = static(default=False)

    @property
    def linear(self) -> bool:
        return not self.whole

    def init_server(self, task: Any, key: Any) -> dict[str, Array]:
        return {"rounds": jnp.float32(0), "size": jnp.float32(0)}

    def init_client(self, task: Any, down: Any, key: Any) -> dict[str, Array]:
        lot = jax.random.uniform(key)
        return {"since": down["rounds"], "visits": jnp.int32(0), "spoilt": jnp.float32(0), "lot": lot}

    def client_update(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> tuple:
        size = data.count.astype(jnp.float32)
        spoilt = jnp.where(size >= self.bad_state, jnp.nan, 0.0)
        client = client | {"visits": client["visits"] + 1, "spoilt": spoilt}
        payload = {"rounds": down["rounds"] + 1, "size": jnp.where(size >= self.bad, jnp.nan, size)}
        return client, Message(payload, weight=jnp.float32(self.claim)), {"size": size}

    def reference(self, task: Any, down: Any, payload: Any) -> Any:
        return trees.zeros(payload)

    def personalise(self, task: Any, down: Any, client: Any, data: Any, key: Any) -> Any:
        return down

    def predict(self, task: Any, posterior: Any, x: Array, key: Any) -> Any:
        return point(jnp.zeros((x.shape[0], 2)))


@cache
def drawn(num: int, cohort: int, active: int, kind: str = "fixed") -> list[Any]:
    """The places of each of four rounds of a run with seed 0."""
    part = Participation(num, cohort, active, kind)
    draw = jax.jit(lambda t: part.draw(rng.key(rng.root(0), Stream.COHORT, t)))
    return [jax.tree.map(np.asarray, draw(np.int32(t))) for t in range(4)]


@pytest.fixture(scope="module")
def sizes(federation):
    """Training examples of each client."""
    return federation.train.count[: federation.num_clients]


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "stacked"])
@pytest.mark.parametrize("home", [1 << 30, 0], ids=["resident", "stored"])
def test_the_server_hears_the_cohort_and_only_active_clients_run(train, state, sizes, whole, home):
    run = train(Ledger(whole=whole), cohort=2, active=4, resident_bytes=home)
    visits = np.zeros(6, int)
    for slots in drawn(6, 2, 4):
        visits[slots.ids] += 1
    heard = slots.ids[slots.uploads]
    kept = state(run)
    assert kept["['clients'].client['visits']"].tolist() == visits.tolist()
    assert kept["['clients'].joined"].tolist() == (visits > 0).tolist()
    np.testing.assert_allclose(run.server["size"], sizes[heard].mean(), rtol=1e-6)
    assert run.server["rounds"] == 4


def test_a_client_is_enrolled_with_what_is_broadcast_when_it_is_first_called(train, state):
    run = train(Ledger(), cohort=2, active=4)
    first: dict[int, int] = {}
    for t, slots in enumerate(drawn(6, 2, 4)):
        for client in slots.ids.tolist():
            first.setdefault(client, t)
    since = state(run)["['clients'].client['since']"]
    assert {client: int(since[client]) for client in first} == first
    assert len(set(first.values())) > 1  # the seed makes some join late


@pytest.mark.parametrize("client_batch", [1, 2])
def test_what_a_client_draws_at_enrolment_depends_on_its_id_alone(train, state, client_batch):
    lots = state(train(Ledger(), cohort=6, client_batch=client_batch))["['clients'].client['lot']"]
    expected = jax.jit(jax.vmap(lambda client: jax.random.uniform(rng.key(rng.root(0), Stream.ENROL, client))))
    np.testing.assert_array_equal(lots, expected(np.arange(6, dtype=np.int32)))


def test_a_client_that_sends_nan_is_left_out_counted_and_named(simulate, state, sizes):
    biggest = int(sizes.argmax())
    run = simulate(Ledger(bad=float(sizes.max())), cohort=6)
    np.testing.assert_allclose(run.server["size"], np.delete(sizes, biggest).mean(), rtol=1e-6)
    name = run.federation.clients[biggest]
    assert run.extra["rejected"] == {name: 4}
    assert run.history[-1]["rejected"] == {name: 4}
    assert run.extra["reasons"] == run.history[-1]["reasons"] == {"not finite": 4}
    assert run.history[-1]["info"]["size"] == pytest.approx(np.delete(sizes, biggest).mean())
    assert state(run)["['clients'].joined"].tolist() == [client != biggest for client in range(6)]


def test_a_client_whose_state_is_spoilt_keeps_the_old_one_and_is_left_out(simulate, state, sizes):
    run = simulate(Ledger(bad_state=float(sizes.max())), cohort=6)
    np.testing.assert_allclose(run.server["size"], np.delete(sizes, sizes.argmax()).mean(), rtol=1e-6)
    assert np.isfinite(state(run)["['clients'].client['spoilt']"]).all()
    assert run.extra["reasons"] == {"not finite": 4}


def test_an_update_above_max_norm_is_rejected_and_named_and_a_new_limit_compiles_nothing(simulate, state, sizes):
    biggest, norm = int(sizes.argmax()), float(np.sort(sizes)[-2:].mean())
    for _ in range(2):  # the first run of a process leaves an entry of its own, whatever the limits
        simulate(Ledger(), cohort=6)
    before = run_block._cache_size()
    run = simulate(Ledger(), cohort=6, max_norm=norm)
    assert run_block._cache_size() == before
    assert run.extra["rejected"] == {run.federation.clients[biggest]: 4}
    assert run.extra["reasons"] == {"norm": 4}
    np.testing.assert_allclose(run.server["size"], np.delete(sizes, biggest).mean(), rtol=1e-6)
    assert state(run)["['clients'].joined"].tolist() == [client != biggest for client in range(6)]


def test_reasons_are_kept_over_a_stop_and_by_whoever_had_none(simulate, sizes, tmp_path, federation, monkeypatch):
    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)
    method = Ledger(bad=float(sizes.max()))
    for kept, expected in ((True, 4), (False, 3)):
        asked, out = iter([False, True]), tmp_path / str(kept)
        assert simulate(method, cohort=6, out=out, stop=lambda asked=asked: next(asked)).completed == 1
        commit = next(out.rglob("commit.json"))
        table = json.loads(commit.read_text())
        assert table["extra"]["reasons"] == {"not finite": 1}
        if not kept:  # as an older version wrote it
            del table["extra"]["reasons"]
            edit_json(commit, extra=table["extra"])
        run = priory.resume(out, federation=federation, method=method)
        assert run.extra["reasons"] == {"not finite": expected}
        assert sum(run.extra["rejected"].values()) == 4


def test_a_weight_above_all_examples_is_rejected(train, federation):
    run = train(Ledger(claim=federation.train.total + 1.0), cohort=6, rounds=1)
    assert run.extra["reasons"] == {"weight": 6}
    assert run.server == {"rounds": 0, "size": 0}


@pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")  # nothing is learned
@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "stacked"])
def test_a_round_without_a_usable_client_leaves_the_server_as_it_was(simulate, whole):
    run = simulate(Ledger(bad=0.0, whole=whole), cohort=2, active=4)
    assert run.server == {"rounds": 0, "size": 0}
    assert sum(run.extra["rejected"].values()) == 4 * 4
    assert run.history[-1]["info"] == {"size": None, "bits": None}


@pytest.mark.parametrize("cohort", [1, 6])
def test_bernoulli_rounds_run_who_was_drawn(train, state, cohort):
    run = train(Ledger(), cohort=cohort, participation="bernoulli")
    visits, rounds = np.zeros(6, int), 0
    for slots in drawn(6, cohort, cohort, "bernoulli"):
        visits[slots.ids[slots.filled]] += 1
        rounds += bool(slots.filled.any())
    assert state(run)["['clients'].client['visits']"].tolist() == visits.tolist()
    assert run.server["rounds"] == rounds


def test_a_client_that_runs_without_uploading_has_sent_nothing(train, state):
    run = train(Ledger(), cohort=1, active=6, channel=TopK(fraction=0.5))
    uploaded = {int(slots.ids[0]) for slots in drawn(6, 1, 6)}
    memory = state(run)["['clients'].memory['rounds']"]
    assert set(np.flatnonzero(memory).tolist()) == uploaded  # the size is larger, so the round is what is held back
    assert len(uploaded) < 6


@pytest.mark.parametrize(("weighting", "weights"), [("method", "size"), ("uniform", "one"), ("examples", "size")])
def test_a_round_of_fedavg_is_what_its_verbs_say(train, sent, sizes, weighting, weights):
    run = train(priory.FedAvg(), rounds=1, cohort=6, weighting=weighting)
    weight = sizes if weights == "size" else np.ones(6)
    for found, leaf in zip(jax.tree.leaves(run.server), jax.tree.leaves(sent), strict=True):
        np.testing.assert_allclose(found, np.average(leaf, axis=0, weights=weight), atol=1e-6)


@pytest.fixture(scope="module")
def sent(begin):
    """The stacked messages of six clients in the first round of FedAvg."""
    run = begin(priory.FedAvg())

    @jax.jit
    def payload(server, client):
        key = rng.key(run.evaluator.ready.root, Stream.CLIENT, 0, client)
        return run.method.client_update(run.task, server, (), run.evaluator.ready.train.of(client), key)[1].payload

    messages = [payload(run.server, np.int32(client)) for client in range(6)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *messages)


def test_a_scheduled_rate_of_zero_stops_learning(train):
    frozen = train(priory.FedAvg(), cohort=6, schedule="step-size=step:0@0.2")  # of five rounds
    once = train(priory.FedAvg(), cohort=6, rounds=1)
    for found, wanted in zip(jax.tree.leaves(frozen.server), jax.tree.leaves(once.server), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.fixture(scope="module")
def compiled():
    """The functions that were compiled, as they are."""
    names: list[str] = []

    def heard(event: str, _: float, **more: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(heard)
    return names


def test_other_values_seeds_and_block_lengths_compile_nothing(simulate, monkeypatch, compiled):
    monkeypatch.setattr("priory.engine.compilation.MOST_MAPPINGS", 10**9)  # other tests may have filled memory
    for method, home in ((Ledger(), 1 << 30), (Ledger(), 0), (priory.FedAvg(), 1 << 30)):
        simulate(method, cohort=6, resident_bytes=home)
    jax.jit(lambda x: x + 1)(0)
    assert "jit(<lambda>)" in compiled
    compiled.clear()
    monkeypatch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)  # blocks of one round
    simulate(Ledger(bad=30.0), cohort=6, seed=5)
    simulate(Ledger(), cohort=6, eval_every=3)
    simulate(Ledger(bad_state=30.0), cohort=6, resident_bytes=0)
    simulate(priory.FedAvg(optimiser=priory.Optimiser(step_size=0.01)), cohort=6)
    assert compiled == []
