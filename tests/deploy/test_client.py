"""A deployed client: it answers what was asked, keeps its state before it does, and says why where it cannot."""

import dataclasses

import jax
import numpy as np
import pytest

import priory
from priory.core.errors import UsageError
from priory.core.struct import replace
from priory.deploy import wire
from priory.deploy.client import Client
from priory.deploy.client_states import ClientStateStore, forget
from priory.deploy.examples import of_client
from priory.fed import visit
from priory.fed.local import Optimiser, Work
from tests.deploy.conftest import asked, first_broadcast, range_of_squares, small_federation


def kept_by(made, client=0) -> ClientStateStore:
    return ClientStateStore(made.place / f"node-{client}", client, "run-1", made.charter.digest)


def changed_rows(made, **changed) -> Client:
    """Client 0 with other rows than the charter expects."""
    rows = dataclasses.replace(of_client(made.federation, 0), **changed)
    return Client(made.charter, 0, lambda: rows, made.place / "node-0")


def test_it_says_which_client_it_is_and_how_many_rows_it_learns_from(deployed):
    made = deployed()
    reply = made.clients[101].answer(asked(made.charter, "hello"))
    assert reply.error == ""
    assert (reply.config["client"], reply.config["kind"]) == (1, "hello")
    assert reply.config["examples"] == made.federation.rows(1, "train").stop - made.federation.rows(1, "train").start


def test_an_answer_tells_which_question_it_answers(deployed):
    made = deployed()
    reply = made.clients[100].answer(asked(made.charter, t=2, attempt=1))
    assert {name: reply.config[name] for name in ("kind", "run", "round", "attempt")} == {
        "kind": "train", "run": "run-1", "round": 2, "attempt": 1,
    }  # fmt: skip


def test_a_round_that_is_asked_twice_gives_the_same_bytes(deployed):
    made = deployed("ditto")
    for t in (0, 1):
        first = made.clients[100].answer(asked(made.charter, t=t))
    again = made.client(0).answer(asked(made.charter, t=1))
    assert first.error == ""
    assert (again.arrays, again.metrics, again.config) == (first.arrays, first.metrics, first.config)


def test_the_state_is_written_before_the_answer_leaves(deployed, monkeypatch):
    made = deployed("ditto")
    seen, real = [], wire.encode
    monkeypatch.setattr(wire, "encode", lambda tree: seen.append(kept_by(made).generations()) or real(tree))
    assert made.clients[100].answer(asked(made.charter)).arrays
    assert seen[-1] == [1]


def test_a_state_that_cannot_be_written_is_no_answer(deployed):
    made = deployed("ditto")
    made.place.joinpath("node-0").write_text("a file")
    reply = made.clients[100].answer(asked(made.charter))
    assert "Client 0 cannot keep its state" in reply.error
    assert not reply.arrays


@pytest.mark.parametrize(("epochs", "reason"), [(1, "norm"), (3, "not finite")])
def test_an_update_that_blew_up_keeps_the_old_state_and_says_so(deployed, epochs, reason):
    made = deployed(method=priory.Ditto(optimiser=Optimiser(step_size=1e38), work=Work(epochs=epochs)))
    reply = made.clients[100].answer(asked(made.charter))
    assert visit.reason_of(reply.config["status"]) == reason
    assert not reply.arrays
    assert kept_by(made).generations() == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"version": "0.0.1"}, r"The server is of priory 0.0.1 and here is .*; install the same on all sides"),
        ({"version": ""}, "The server is of priory unknown"),
        ({"charter": "another"}, "The server has charter another and client 0 has .*: their apps differ; submit"),
        ({"run": "../elsewhere"}, "run='../elsewhere' is no name of a run"),
        ({"down": {"weights": np.zeros(3)}}, "The message lacks .* sender and receiver run different methods"),
    ],
    ids=["version", "no version", "charter", "run", "broadcast"],
)
def test_a_request_that_does_not_fit_is_answered_by_one_sentence(deployed, changed, sentence):
    made = deployed()
    reply = made.clients[100].answer(asked(made.charter, **changed))
    assert reply.config["kind"] == "train"
    assert not reply.arrays
    with pytest.raises(UsageError, match=sentence):
        raise UsageError(reply.error)


def test_a_broadcast_of_other_shapes_is_answered_by_one_sentence(deployed):
    made = deployed()
    wrong = jax.tree.map(lambda leaf: np.zeros((*leaf.shape, 2), leaf.dtype), first_broadcast(made.charter))
    reply = made.clients[100].answer(asked(made.charter, down=wrong))
    assert "sender and receiver run different models" in reply.error


def test_an_unknown_kind_is_answered_by_one_sentence(deployed):
    made = deployed()
    reply = made.clients[100].answer(dataclasses.replace(asked(made.charter), kind="sleep"))
    assert reply.error == "kind='sleep' is no request; install the same priory on all sides."


def test_a_number_that_no_client_has_is_refused(deployed):
    made = deployed()
    with pytest.raises(UsageError, match="Client 2 does not fit a federation of 2; give its node a partition-id from"):
        Client(made.charter, 2, lambda: of_client(made.federation, 0), made.place)


ROWS = of_client(small_federation(), 0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"x": ROWS.x[:0], "y": ROWS.y[:0], "is_test": ROWS.is_test[:0]}, "Client 0 has no rows to learn from"),
        ({"is_test": np.ones(len(ROWS.x), bool)}, "Client 0 has no rows to learn from"),
        ({"x": ROWS.x[:, :4]}, r"Client 0 has examples of shape \(4,\) not \(5,\)"),
        ({"y": ROWS.y[:3]}, "Client 0 has .* inputs and 3 labels; give one label for each"),
        ({"is_test": np.zeros(len(ROWS.x))}, "Client 0 marks its held-out rows by float64"),
        ({"is_test": ROWS.is_test[:3]}, "Client 0 marks its held-out rows by bool"),
        ({"y": ROWS.y + 3}, "Client 0 has labels outside 0 to 2"),
        ({"y": ROWS.y - 9}, "Client 0 has labels outside 0 to 2"),
        ({"y": ROWS.y.astype(np.float32)}, "Client 0 has labels of type float32"),
        ({"x": ROWS.x * np.float32(np.nan)}, "Client 0 has inputs that are not finite numbers"),
        ({"x": ROWS.x.astype(str)}, "Client 0 has inputs that are not finite numbers"),
    ],
    ids=["none", "held out", "shape", "labels", "mask", "short mask", "large", "negative", "type", "NaN", "text"],
)
def test_rows_that_do_not_fit_are_told_in_one_sentence(deployed, changed, sentence):
    made = deployed()
    reply = changed_rows(made, **changed).answer(asked(made.charter, "hello"))
    with pytest.raises(UsageError, match=sentence):
        raise UsageError(reply.error)


def test_a_client_without_held_out_rows_takes_part_and_has_no_score(deployed):
    made = deployed()
    client = changed_rows(made, is_test=np.zeros(len(ROWS.x), bool))
    assert client.answer(asked(made.charter)).arrays
    assert client.answer(asked(made.charter, "evaluate", t=1)).error == ""


def test_who_does_not_upload_learns_and_sends_no_arrays(deployed):
    made = deployed("ditto")
    reply = made.clients[100].answer(asked(made.charter, uploads=False))
    assert reply.config["status"] == visit.KEPT
    assert not reply.arrays
    assert kept_by(made).generations() == [1]


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedbayes"])
def test_the_names_that_travel_are_those_of_the_methods_message_and_no_others(deployed, name):
    made = deployed(name)
    reply = made.clients[100].answer(asked(made.charter))
    message = made.charter.contact().message
    assert set(reply.arrays) == set(wire.pack(replace(jax.tree.map(lambda a: np.zeros(a.shape), message), sender=None)))


def test_the_posterior_of_pfedbayes_stays_where_it_is(deployed):
    made = deployed("pfedbayes")
    reply = made.clients[100].answer(asked(made.charter))
    record, _ = kept_by(made).read(1, made.charter.record(0))
    own = {np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(record.client)}
    assert own
    assert not any(secret in raw for raw in reply.arrays.values() for secret in own if len(secret) > 8)


def test_the_personal_model_can_be_loaded_and_predicts(deployed):
    made = deployed("ditto")
    client = made.clients[100]
    client.answer(asked(made.charter))
    assert not kept_by(made).model.exists()
    assert client.answer(asked(made.charter, "evaluate", t=1, final=True)).error == ""
    model = priory.load_model(kept_by(made).model)
    assert model.source.client == "0"
    x = made.federation.x[:4]
    probs = model.predict(x).probabilities
    assert probs.shape == (4, 3)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)


def test_an_evaluation_changes_no_state(deployed):
    made = deployed("ditto")
    made.clients[100].answer(asked(made.charter))
    before = {path.name: path.read_bytes() for path in kept_by(made).place.iterdir()}
    made.clients[100].answer(asked(made.charter, "evaluate", t=1))
    assert {path.name: path.read_bytes() for path in kept_by(made).place.iterdir()} == before


# One answer a round is what differential privacy pays for.


@pytest.fixture
def private(deployed):
    return deployed(dp="local", rounds=3, dp_noise=1.0, dp_delta=0.1)


def other_broadcast(charter):
    return jax.tree.map(lambda leaf: leaf + 1, first_broadcast(charter))


def test_a_private_client_answers_the_same_question_with_the_same_bytes(private):
    first = private.client(0).answer(asked(private.charter, t=1))
    again = private.client(0).answer(asked(private.charter, t=1, attempt=2))
    assert first.arrays
    assert again.arrays == first.arrays


@pytest.mark.parametrize(
    "question",
    [
        lambda charter: asked(charter, t=1, down=other_broadcast(charter)),
        lambda charter: asked(charter, t=1, seed=7),
        lambda charter: asked(charter, t=0),
    ],
    ids=["another broadcast", "another seed", "an earlier round"],
)
def test_a_private_client_answers_no_other_question_of_a_round(private, question):
    client = private.client(0)
    client.answer(asked(private.charter, t=1))
    reply = client.answer(question(private.charter))
    assert not reply.arrays
    assert "has answered round 1 and its privacy allows one answer a round; start a new run" in reply.error


def test_a_private_client_answers_no_round_that_its_budget_does_not_hold(private):
    reply = private.client(0).answer(asked(private.charter, t=3))
    assert not reply.arrays
    assert "Round 3 is beyond the 3 that the privacy of client 0 allows" in reply.error


def test_a_private_client_whose_promises_are_lost_answers_nothing(private):
    client = private.client(0)
    client.answer(asked(private.charter, t=0))
    (private.place / "node-0" / "client-0" / "budget.json").write_text("{")
    reply = client.answer(asked(private.charter, t=1))
    assert not reply.arrays
    assert "is damaged, so nothing is answered" in reply.error


def test_forgetting_gives_no_second_answer(private):
    first = private.client(0).answer(asked(private.charter, t=1))
    forget(private.place / "node-0", 0)
    replies = [private.client(0).answer(asked(private.charter, t=t)) for t in (0, 1, 1)]
    assert first.arrays
    assert not any(reply.arrays for reply in replies)
    assert "The answer that client 0 gave is no longer in" in replies[1].error
    assert private.client(0).answer(asked(private.charter, t=2)).arrays


def test_a_server_that_invents_runs_hears_one(private):
    client = private.client(0)
    answered = [bool(client.answer(asked(private.charter, run=f"run-{number}")).arrays) for number in range(10)]
    assert answered == [True] + [False] * 9


def test_asked_twice_at_once_a_private_client_gives_one_answer(private):
    """Both work on the question, each with noise of its own; what leaves is what was stored first."""
    client, twin = private.client(0), private.client(0)
    real, replies = client._trained, []

    def overtaken(request):
        replies.append(twin.answer(request))
        return real(request)

    client._trained = overtaken
    replies.append(client.answer(asked(private.charter)))
    assert replies[0].arrays
    assert replies[0].arrays == replies[1].arrays


def test_a_private_client_killed_before_it_stored_its_answer_gives_one_later(private, monkeypatch):
    client = private.client(0)
    with monkeypatch.context() as patch:
        patch.setattr(ClientStateStore, "write_reply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            client.answer(asked(private.charter))
    assert private.client(0).answer(asked(private.charter)).arrays
    assert client.budget.read().runs["run-1"].answers == 1


@pytest.mark.parametrize("kind", ["hello", "train", "evaluate"])
def test_once_its_owner_has_set_a_total_a_client_answers_no_app_without_privacy(deployed, kind):
    made = deployed()
    client = made.client(0)
    client.budget.allow(8.0, 1e-5)
    reply = client.answer(asked(made.charter, kind))
    assert reply.error.startswith("The owner of client 0 allows ε = 8 over all runs, and this app has no differential ")
    assert (reply.arrays, reply.metrics, "examples" in reply.config) == ({}, {}, False)


def without_rows(made) -> Client:
    """Client 0, whose rows cannot be read."""

    def broken():
        raise UsageError("No rows.")

    return Client(made.charter, 0, broken, made.place / "node-0")


def test_rows_that_cannot_be_read_cost_what_an_answer_costs(private):
    """A server chooses the form of the data, so a refusal tells whether the rows fit it."""
    client = without_rows(private)
    for _ in range(2):
        assert "cannot read its rows" in client.answer(asked(private.charter)).error
        assert client.budget.read().runs["run-1"].answers == 1
    assert "allows one answer a round" in client.answer(asked(private.charter, seed=7)).error


@pytest.mark.parametrize(("kind", "changed"), [("hello", {}), ("train", {"uploads": False}), ("evaluate", {})])
def test_what_costs_nothing_does_not_reveal_whether_the_rows_can_be_read(private, kind, changed):
    replies = [
        client.answer(asked(private.charter, kind, **changed)) for client in (private.client(0), without_rows(private))
    ]
    assert replies[0] == replies[1]
    assert replies[0].error == ""


@pytest.mark.parametrize("uploads", [True, False])
def test_which_rounds_have_a_state_does_not_depend_on_the_rows_under_privacy(deployed, uploads):
    """A server can ask for a round and hear whether its state is there."""
    made = deployed(dp="local", rounds=3, dp_noise=1.0, dp_delta=0.1)
    whole = of_client(made.federation, 0)
    kept = []
    for name, factor in (("finite", 1.0), ("overflow", 1e30)):
        rows = dataclasses.replace(whole, x=whole.x * np.float32(factor))
        client = Client(made.charter, 0, lambda rows=rows: rows, made.place / name)
        down = jax.tree.map(lambda leaf: np.full_like(leaf, 1e30), first_broadcast(made.charter))
        client.answer(asked(made.charter, down=down, uploads=uploads))
        kept.append(ClientStateStore(made.place / name, 0, "run-1", made.charter.digest).generations())
    assert kept[0] == kept[1] == [1]


def test_a_private_client_does_not_report_how_many_rows_it_has(private):
    rows = of_client(private.federation, 0)
    error = changed_rows(private, y=rows.y[:-1]).answer(asked(private.charter)).error
    assert error == "Client 0 cannot read its rows; the log of its node says why."


def test_what_is_only_asked_to_learn_and_keeps_its_message_costs_nothing(private):
    client = private.client(0)
    assert not client.answer(asked(private.charter, uploads=False)).arrays
    assert client.budget.spent() is None
    assert client.answer(asked(private.charter)).arrays


def test_every_number_of_a_private_message_lies_on_the_grid(private):
    down = first_broadcast(private.charter)
    reply = private.client(0).answer(asked(private.charter))
    sent = wire.decode(reply.arrays, private.charter.uplink).payload
    ledger = private.charter.ledger
    for number, public in zip(jax.tree.leaves(sent), jax.tree.leaves(down), strict=True):
        multiples = (number.astype(np.float64) - public) / ledger.grid
        rounding = np.spacing(np.maximum(np.abs(number), np.abs(public))) / ledger.grid  # of float32
        assert np.all(np.abs(multiples - np.round(multiples)) <= rounding)
    noised = np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (sent, down)), strict=True)])
    size, squares = noised.size, float(np.sum(noised.astype(np.float64) ** 2))
    low, high = range_of_squares(size, signal=0.5)  # a difference of norm at most 1 = σ/2
    assert low < squares / ledger.sd**2 < high


def test_a_budget_that_the_owner_raised_pays_for_another_run(private):
    client = private.client(0)
    client.answer(asked(private.charter))
    client.budget.allow(100.0, 0.1)
    assert client.answer(asked(private.charter, run="run-2")).arrays
