"""Flower's records and grid around the wire: what is sent comes back, and whatever arrives is only a reply."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.supercore.task_identity import TaskIdentity

from priory.core.errors import UsageError
from priory.deploy import flower, wire
from priory.deploy.app import write_app
from priory.deploy.app_hash import installed_hash, written_hash
from priory.deploy.examples import of_client
from priory.deploy.exchange import Reply, Request
from priory.deploy.node_log import NodeLog
from priory.methods import get
from tests.deploy.conftest import asked, small_charter, small_federation

TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.bool_(True), "c": np.zeros((0, 2), np.int8)}
PARTS = wire.encode(TREE)
REQUEST = Request("train", {"run": "r-1", "round": 2, "seed": 7, "uploads": True, "version": "1"}, PARTS)
REPLY = Reply({"kind": "train", "run": "r-1", "round": 2, "status": 1}, PARTS, {"loss": 0.5, "bits": 3})


class Grid:
    """A grid in this process: whatever is pushed is answered by a function, when it is next pulled."""

    def __init__(self, answer, nodes=(5, 3)) -> None:
        self.answer, self.nodes, self.pushed, self.pulled = answer, nodes, [], 0
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self):
        return iter(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            name = f"id-{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = name
            self.pushed.append(message)
            self._waiting[name] = message
            yield name

    def pull_messages(self, names):
        self.pulled += 1
        for name in list(names):
            found = self.answer(self._waiting[name]) if name in self._waiting else None
            if found is not None:
                del self._waiting[name]
                yield found


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch):
    """As if Flower had started this process, with little patience."""
    monkeypatch.setattr(flower, "PULL", 0.01)
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def answered(records: RecordDict | Error):
    return lambda message: Message(records, reply_to=message)


def asked_of(answer, *nodes, timeout=1.0):
    grid = Grid(answer)
    return grid, list(flower.GridLink(grid, timeout).ask(dict.fromkeys(nodes, REQUEST), timeout))


def as_dict(reply: Reply) -> dict:
    return {field.name: getattr(reply, field.name) for field in dataclasses.fields(reply)}


def test_a_request_is_the_same_on_the_other_side():
    heard = []
    asked_of(lambda message: heard.append(flower.request_of(message)) or answered(flower.to_records(REPLY))(message), 5)
    (request,) = heard
    assert (request.kind, request.config) == ("train", REQUEST.config)
    again = wire.decode(request.arrays, TREE)
    assert all(np.array_equal(again[name], TREE[name]) for name in TREE)


def test_a_reply_is_the_same_on_the_other_side():
    _, ((node, reply),) = asked_of(answered(flower.to_records(REPLY)), 5)
    assert node == 5
    assert as_dict(reply) == as_dict(REPLY)


def test_a_sentence_comes_back_as_one():
    _, ((_, reply),) = asked_of(answered(flower.to_records(Reply(error="My disk is full."))), 5)
    assert reply.error == "My disk is full."


@pytest.mark.parametrize(("kind", "name"), [("hello", "query"), ("train", "train"), ("evaluate", "evaluate")])
def test_every_kind_has_a_type_of_flowers(kind, name):
    grid = Grid(answered(RecordDict()))
    list(flower.GridLink(grid, 1.0).ask({5: Request(kind, {"round": 1})}, 1.0))
    assert grid.pushed[0].metadata.message_type == name
    assert flower.request_of(grid.pushed[0]).kind == kind


def test_arrays_are_readable_with_flowers_own_tools():
    record = flower.to_records(REPLY)["arrays"]
    np.testing.assert_array_equal(record["a"].numpy(), TREE["a"])
    assert (record["a"].dtype, tuple(record["a"].shape)) == ("float32", (2, 3))


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"arrays": ConfigRecord({"a": 1}), "config": MetricRecord({"b": 2.0}), "metrics": ArrayRecord()}),
        RecordDict({"something": ConfigRecord({"else": [1, 2]})}),
        RecordDict({"config": ConfigRecord(), "metrics": MetricRecord({"many": [1.0, 2.0]})}),
    ],
    ids=["none", "of other kinds", "of other names", "lists"],
)
def test_records_that_are_missing_or_wrong_count_as_empty(records):
    _, ((_, reply),) = asked_of(answered(records), 5)
    assert as_dict(reply) == as_dict(Reply())


def test_an_array_that_lies_about_itself_is_only_its_bytes():
    lying = ArrayRecord({"a": Array(dtype="float64", shape=(9, 9), stype="numpy.ndarray", data=b"garbage")})
    _, ((_, reply),) = asked_of(answered(RecordDict({"arrays": lying})), 5)
    assert reply.arrays == {"a": b"garbage"}


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(Error(code=4, reason="The node crashed."), "Flower: The node crashed."), (Error(3), "Flower: 3")],
)
def test_an_error_of_flowers_is_a_reply_with_a_sentence(error, sentence):
    _, ((node, reply),) = asked_of(answered(error), 5)
    assert (node, reply.error) == (5, sentence)


def test_nodes_are_those_that_are_connected():
    assert flower.GridLink(Grid(None), 1.0).nodes() == [3, 5]


def test_the_sender_is_the_node_that_was_asked_whatever_the_reply_says():
    def answer(message):
        reply = answered(flower.to_records(Reply({"client": 1, "node": 99})))(message)
        reply.metadata.__dict__["_src_node_id"] = 99
        return reply

    _, ((node, _),) = asked_of(answer, 5)
    assert node == 5


def test_what_flower_cannot_read_of_one_node_keeps_nobody_from_being_heard():
    def answer(message):
        if message.metadata.dst_node_id == 5:
            raise ValueError("a record of an unknown kind")
        return answered(flower.to_records(REPLY))(message)

    replies = dict(asked_of(answer, 5, 3)[1])
    assert replies[5].error == "Flower: the reply could not be read (ValueError)."
    assert replies[3].error == ""


def test_a_broken_way_to_the_superlink_is_nobodys_reply():
    def answer(message):
        raise ConnectionError("refused")

    with pytest.raises(ConnectionError):
        asked_of(answer, 5)


def test_replies_are_taken_as_they_come():
    def answer(message):
        late = message.metadata.dst_node_id == 5
        return None if late and grid.pulled < 3 else answered(flower.to_records(REPLY))(message)

    grid = Grid(answer)
    replies = flower.GridLink(grid, 5.0).ask({5: REQUEST, 3: REQUEST}, 5.0)
    assert [node for node, _ in replies] == [3, 5]


def test_who_does_not_answer_in_time_is_not_waited_for():
    grid, replies = asked_of(lambda message: None, 5, 3, timeout=0.05)
    assert replies == []
    assert len(grid.pushed) == 2


def test_a_request_that_could_not_be_sent_is_a_reply_with_a_sentence(monkeypatch):
    grid = Grid(answered(RecordDict()))
    monkeypatch.setattr(grid, "push_messages", lambda messages: [""])
    ((node, reply),) = flower.GridLink(grid, 1.0).ask({5: REQUEST}, 1.0)
    assert (node, reply.error) == (5, "Flower: the request could not be sent.")


def test_nothing_asked_is_nothing_waited_for():
    assert asked_of(None)[1] == []


# The run-config.


@pytest.fixture(scope="module")
def charter():
    return small_charter(get("fedavg")())


def test_a_run_config_sets_rounds_seed_and_operations(charter, tmp_path):
    config = {"rounds": 9, "seed": 4, "out": str(tmp_path), "min-replies": 1, "timeout": 5, "authenticated": True}
    changed, how = flower.configured(charter, config)
    assert (changed.settings.rounds, changed.settings.seed) == (9, 4)
    assert (how.out, how.min_replies, how.timeout, how.authenticated) == (tmp_path, 1, 5, True)
    assert changed.digest == charter.digest


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"round": 3}, "round is not a key of the run-config; choose from rounds, seed, out, min-replies"),
        ({"rounds": "3"}, "rounds='3' in the run-config should be of type int; correct it"),
        ({"rounds": 3.0}, "rounds=3.0 in the run-config should be of type int"),
        ({"rounds": True}, "rounds=True in the run-config should be of type int"),
        ({"timeout": True}, "timeout=True in the run-config should be of type float"),
        ({"timeout": "5"}, "timeout='5' in the run-config should be of type float"),
        ({"authenticated": 1}, "authenticated=1 in the run-config should be of type bool"),
        ({"out": ""}, "out='' names no directory for the server's state; give one, as an absolute path"),
        ({"rounds": -1}, "rounds=-1 is negative; choose 0 or more"),
        ({"seed": -1}, "seed=-1 is out of range"),
    ],
)
def test_a_run_config_that_makes_no_sense_is_told_in_one_sentence(charter, config, sentence):
    with pytest.raises(UsageError, match=sentence):
        flower.configured(charter, {"out": "/tmp/out"} | config)


def test_a_run_config_without_a_directory_is_told(charter):
    with pytest.raises(UsageError, match="out='' names no directory"):
        flower.configured(charter, {})


def test_home_is_found_in_the_directory(charter, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(flower.configured(charter, {"out": "~/runs"})[1].out) == "/home/somebody/runs"


@pytest.mark.parametrize(
    ("node", "place"),
    [
        ({"state": "/srv/priory"}, "/srv/priory"),
        ({"state": "~/mine"}, "/home/somebody/mine"),
        ({}, "/home/somebody/.local/state/priory"),
        ({"state": ""}, "/home/somebody/.local/state/priory"),
    ],
)
def test_a_node_keeps_its_state_where_its_node_config_says(monkeypatch, node, place):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert str(flower.state_directory(node)) == place


def test_a_relative_state_directory_is_refused():
    with pytest.raises(UsageError, match="state='priory' in the node-config must be an absolute path"):
        flower.state_directory({"state": "priory"})


def test_the_users_own_state_directory_is_respected(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert str(flower.state_directory({})) == "/var/state/priory"


# The apps.


@pytest.fixture
def node(tmp_path, charter, monkeypatch):
    """Asks a ClientApp, as Flower would."""
    monkeypatch.setattr(flower, "keep_compiled", lambda: None)
    (tmp_path / "app").mkdir()
    charter.save(tmp_path / "app")
    app = flower.client_app(tmp_path / "app", lambda node, charter: of_client(small_federation(), node["partition-id"]))

    def ask(request: Request, **config):
        content = {"arrays": flower.to_arrays(request.arrays), "config": ConfigRecord(dict(request.config))}
        message = Message(RecordDict(content), 5, flower.TYPES[request.kind])
        config = {"partition-id": 1, "state": str(tmp_path / "state")} | config
        context = Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={})
        return flower.reply_of(app(message, context))

    return ask


@pytest.mark.parametrize("kind", ["hello", "train", "evaluate"])
def test_a_client_app_answers_every_kind_of_message(node, charter, kind):
    reply = node(asked(charter, kind))
    assert reply.error == ""
    assert reply.config["kind"] == kind
    assert kind == "hello" or reply.arrays


@pytest.mark.parametrize(
    ("number", "sentence"),
    [("1", "partition-id='1' is not a client's number"), (7, "Client 7 does not fit a federation of 2")],
    ids=["text", "too large"],
)
def test_a_node_with_a_wrong_number_says_so(node, charter, number, sentence):
    reply = node(asked(charter, "hello"), **{"partition-id": number})
    assert sentence in reply.error
    assert reply.config["run"] == "run-1"


def test_an_app_whose_files_are_damaged_says_so(node, charter, tmp_path):
    (tmp_path / "app" / "problem.json").write_text("{")
    assert "problem.json is damaged" in node(asked(charter, "hello")).error


def logged(tmp_path, number=1):
    log = NodeLog(tmp_path / "state" / f"client-{number}", number)
    assert log.verify().holds
    return log.entries()


def test_a_node_logs_the_hash_of_the_app_that_answers(node, charter, tmp_path):
    for kind in ("hello", "train"):
        node(asked(charter, kind))
    assert [(one["kind"], one["app"]) for one in logged(tmp_path)] == [
        (kind, installed_hash(tmp_path / "app")) for kind in ("hello", "train")
    ]


def test_the_app_of_a_node_is_the_directory_around_its_package(tmp_path, charter, monkeypatch):
    monkeypatch.setattr(flower, "keep_compiled", lambda: None)
    write_app(tmp_path / "clinic", charter, {})
    package = install_from_fab(build_fab_from_disk(tmp_path / "clinic"), tmp_path, skip_prompt=True) / "clinic"
    app = flower.client_app(package, lambda node, charter: of_client(small_federation(), 0))
    content = RecordDict({"config": ConfigRecord(dict(asked(charter, "hello").config))})
    config = {"partition-id": 0, "state": str(tmp_path / "state")}
    context = Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={})
    assert flower.reply_of(app(Message(content, 5, "query"), context)).error == ""
    (one,) = logged(tmp_path, 0)
    assert one["app"] == written_hash(tmp_path / "clinic") != installed_hash(package)


@pytest.mark.parametrize("kind", ["hello", "train"])
def test_a_refusal_before_there_is_a_client_is_logged(node, charter, tmp_path, kind):
    assert "does not fit a federation of 2" in node(asked(charter, kind), **{"partition-id": 7}).error
    (tmp_path / "app" / "problem.json").write_text("{")
    errors = [node(asked(charter, kind), **{"partition-id": number, "more": 1}).error for number in (7, 1)]
    assert all("problem.json is damaged" in error for error in errors)
    first, second = logged(tmp_path, 7)
    (third,) = logged(tmp_path, 1)
    assert [first["reason"].split()[0], second["reason"], third["reason"]] == ["Client", *errors]
    for one in (first, second, third):
        assert (one["kind"], one["run"], one["outcome"], one["charter"]) == (kind, "run-1", "refused", None)
    assert second["app"] == third["app"] == installed_hash(tmp_path / "app") != first["app"]


@pytest.mark.parametrize("number", ["1", None, True, -1, 1.0], ids=str)
def test_a_node_without_a_clients_number_refuses_and_has_no_log(node, charter, tmp_path, caplog, number):
    with caplog.at_level("ERROR"):
        reply = node(asked(charter, "hello"), **{"partition-id": number})
    assert "not a client's number" in reply.error or "does not fit a federation" in reply.error
    assert f"a request is refused and no client has a log of it: {reply.error}" in caplog.text
    assert not (tmp_path / "state").exists()


def test_an_exception_is_logged_by_its_name_alone(tmp_path, charter, monkeypatch):
    def broken(node, charter):
        raise ZeroDivisionError("patient 17 is divided by zero")

    monkeypatch.setattr(flower, "keep_compiled", lambda: None)
    charter.save(tmp_path)
    app = flower.client_app(tmp_path, broken)
    message = Message(RecordDict({"config": ConfigRecord(dict(asked(charter, "hello").config))}), 5, "query")
    config = {"partition-id": 0, "state": str(tmp_path / "state")}
    app(message, Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={}))
    (one,) = logged(tmp_path, 0)
    assert one["reason"] == "ZeroDivisionError, of which the log of the node tells more."
    assert "patient" not in json.dumps(one)


def test_a_server_app_runs_a_federation_over_a_grid(tmp_path, charter, node):
    def answer(message):
        reply = node(flower.request_of(message), **{"partition-id": message.metadata.dst_node_id})
        return answered(flower.to_records(reply))(message)

    grid = Grid(answer, nodes=(0, 1))
    app = flower.server_app(tmp_path / "app")
    context = SimpleNamespace(run_config={"rounds": 1, "out": str(tmp_path / "out"), "wait": 1.0})
    app(grid, context)
    assert (tmp_path / "out" / "summary.json").exists()


def test_what_an_exception_says_stays_on_the_node(tmp_path, charter, monkeypatch, caplog):
    def broken(node, charter):
        raise ZeroDivisionError("patient 17 is divided by zero")

    monkeypatch.setattr(flower, "keep_compiled", lambda: None)
    charter.save(tmp_path)
    app = flower.client_app(tmp_path, broken)
    request = asked(charter, "hello")
    message = Message(RecordDict({"config": ConfigRecord(dict(request.config))}), 5, "query")
    node = {"partition-id": 0, "state": str(tmp_path)}
    reply = app(message, Context(run_id=1, node_id=5, node_config=node, state=RecordDict(), run_config={}))
    assert flower.reply_of(reply).error == "ZeroDivisionError, of which the log of the node tells more."
    assert "patient 17" in caplog.text


def test_a_private_run_keeps_the_rounds_and_the_seed_of_its_app(deployed):
    charter = deployed(dp="local", rounds=3, dp_noise=1.0, dp_delta=0.1).charter
    flower.configured(charter, {"out": "x", "rounds": 3, "seed": charter.settings.seed})
    with pytest.raises(
        UsageError, match="rounds=4 differ from the app's rounds=3, seed=1, on which its privacy depends"
    ):
        flower.configured(charter, {"out": "x", "rounds": 4})
