"""The log of a client: one line for each request, in a chain that shows whatever is changed but a cut at the end."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from priory.core.errors import UsageError
from priory.deploy import node_log, wire
from priory.deploy.client import Client
from priory.deploy.client_states import forget
from priory.deploy.exchange import ABOUT, Reply, Request, content_of
from priory.deploy.node_log import BLOCK, NAME, NodeLog, entry_of, start_of, verdict_on
from tests.deploy.conftest import asked
from tests.deploy.test_client import changed_rows

BOUNDED = settings(max_examples=200, deadline=None, derandomize=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path):
    return NodeLog(tmp_path / "client-3", 3)


def filled(log: NodeLog, count: int) -> list[bytes]:
    """Append entries and return the lines of the file."""
    for number in range(count):
        log.append({"number": number})
    return log.path.read_bytes().splitlines(keepends=True)


# The chain.


def test_every_line_names_the_hash_of_the_line_before_it(log):
    lines = filled(log, 3)
    found = [json.loads(line) for line in lines]
    assert [one["previous"] for one in found] == [start_of(3), found[0]["hash"], found[1]["hash"]]
    for line, one in zip(lines, found, strict=True):
        body = line.rpartition(b', "hash": ')[0]
        assert one["hash"] == hashlib.sha256(body).hexdigest()
    assert log.verify() == verdict_on(lines, 3)
    assert (log.verify().entries, log.verify().head, log.verify().holds) == (3, found[2]["hash"], True)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines of a log that nobody touched."""
    return filled(NodeLog(tmp_path_factory.mktemp("log"), 3), 6)


def first_difference(lines, other):
    return next((at for at, pair in enumerate(zip(lines, other, strict=False)) if pair[0] != pair[1]), len(lines))


def assert_found(lines, other):
    """The first line that differs is the one that is named, and no head helps."""
    for head in (None, verdict_on(lines, 3).head):
        verdict = verdict_on(other, 3, head)
        assert not verdict.holds
        assert verdict.fault.startswith(f"Line {first_difference(lines, other) + 1} ")


@BOUNDED
@given(data=st.data())
def test_a_line_that_was_changed_is_found(lines, data):
    at = data.draw(st.integers(0, len(lines) - 1))
    byte = data.draw(st.integers(0, len(lines[at]) - 2))
    new = data.draw(st.integers(0, 255).filter(lambda one: one not in (lines[at][byte], ord("\n"))))
    changed = lines[at][:byte] + bytes([new]) + lines[at][byte + 1 :]
    assert_found(lines, [*lines[:at], changed, *lines[at + 1 :]])


@BOUNDED
@given(data=st.data())
def test_a_line_that_was_removed_inserted_or_moved_is_found(lines, data):
    at, other = data.draw(st.integers(0, len(lines) - 2)), data.draw(st.integers(0, len(lines) - 1))
    without = [*lines[:at], *lines[at + 1 :]]
    match data.draw(st.sampled_from(["removed", "inserted", "moved"])):
        case "removed":
            assert_found(lines, without)
        case "inserted":
            assert_found(lines, [*lines[: other + 1], lines[at], *lines[other + 1 :]])
        case "moved" if other != at:
            assert_found(lines, [*without[:other], lines[at], *without[other:]])


def test_two_lines_that_were_joined_are_found(lines):
    assert_found(lines, [lines[0], lines[1][:-1] + lines[2], *lines[3:]])


@pytest.mark.parametrize("left", range(6))
def test_lines_that_were_cut_off_at_the_end_are_found_by_a_noted_head_alone(lines, left):
    head = verdict_on(lines, 3).head
    assert verdict_on(lines[:left], 3).holds
    assert not verdict_on(lines[:left], 3, head).holds
    assert verdict_on(lines, 3, verdict_on(lines[:left], 3).head).holds


def test_a_log_that_was_written_again_is_found_by_a_noted_head_alone(lines, tmp_path):
    other = NodeLog(tmp_path, 3)
    for number in range(7):
        other.append({"number": -number - 1})
    assert other.verify().holds
    assert not other.verify(verdict_on(lines, 3).head).holds


def test_the_log_of_another_client_is_found(lines):
    assert verdict_on(lines, 4).fault.startswith("Line 1 does not follow the start of the log of client 4")


# A crash, a full disk, two processes.


@pytest.mark.parametrize("before", [0, 2], ids=["first line", "later line"])
@pytest.mark.parametrize(
    "torn", [b"{", b'{"number": 2, "prev', b"\0" * 3 * BLOCK, None], ids=["start", "half", "zeros", "no end"]
)
def test_a_line_that_a_crash_cut_short_is_replaced_by_one_that_says_so(log, before, torn):
    filled(log, before + 1)
    whole = log.path.read_bytes().splitlines(keepends=True)
    torn = whole[-1][:-1] if torn is None else torn
    log.path.write_bytes(b"".join(whole[:-1]) + torn)
    assert (log.verify().holds, log.verify().entries, log.verify().torn) == (True, before, len(torn))
    log.append({"number": 9})
    verdict = log.verify()
    assert (verdict.holds, verdict.entries, verdict.torn, verdict.repairs) == (True, before + 2, 0, (before + 1,))
    repair, last = log.entries(2)
    assert (repair["kind"], repair["bytes"]) == ("repair", len(torn))
    assert repair["sha256"] == hashlib.sha256(torn).hexdigest()
    assert last["number"] == 9


def test_a_crash_during_a_repair_leaves_no_fewer_traces(log, monkeypatch):
    filled(log, 2)
    with log.path.open("ab") as handle:
        handle.write(b"x" * 2000)

    def crashed(handle, raw, offset):
        os.pwrite(handle, raw[: len(raw) // 3], offset)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(node_log, "write_all", crashed)
        with pytest.raises(UsageError):
            log.append({"number": 2})
    log.append({"number": 2})
    assert log.verify().repairs == (3,)
    assert log.verify().holds


@pytest.mark.parametrize("what", ["fsync", "pwrite"])
def test_what_is_not_on_the_disk_is_not_logged(log, monkeypatch, what):
    def full(*_):
        raise OSError(28, "No space left on device")

    filled(log, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, what, full)
        with pytest.raises(
            UsageError, match=r"log\.jsonl cannot be written \(No space left on device\), so nothing is"
        ):
            log.append({"number": 1})
    log.append({"number": 2})
    assert log.verify().holds


def test_a_damaged_log_goes_on_and_stays_damaged(log):
    filled(log, 3)
    log.path.write_bytes(log.path.read_bytes().replace(b'"number": 2', b'"number": 7'))
    filled(log, 2)
    assert log.verify().fault == "Line 3 was changed: its hash does not fit it."
    assert len(log.entries()) == 5


@pytest.mark.parametrize("length", [10, BLOCK - 200, BLOCK, 5 * BLOCK])
def test_only_the_end_of_the_file_is_read_before_a_line_is_added(log, monkeypatch, length):
    for _ in range(100):
        log.append({"text": "x" * length})
    read, real = [], os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, at: read.append(size) or real(handle, size, at))
    log.append({"text": ""})
    assert sum(read) <= length + 300 + BLOCK
    assert log.verify().entries == 101


def test_of_many_threads_none_tears_a_line(log):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: log.append({"number": number}), range(60)))
    assert (log.verify().entries, log.verify().holds) == (60, True)
    assert {one["number"] for one in log.entries()} == set(range(60))


WRITER = """
import pathlib, sys
from priory.deploy.node_log import NodeLog
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    NodeLog(pathlib.Path(sys.argv[1]), 3).append({"writer": sys.argv[2], "number": number})
"""


def test_two_processes_write_one_chain(log):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, "-c", WRITER, str(log.place)]
    with subprocess.Popen([*command, "a"], **pipes) as one, subprocess.Popen([*command, "b"], **pipes) as other:
        for process in (one, other):
            assert process.stdout.readline() == "ready\n"
        for process in (one, other):
            process.stdin.write("\n")
            process.stdin.flush()
    assert (one.returncode, other.returncode) == (0, 0)
    assert (log.verify().entries, log.verify().holds) == (100, True)
    for writer in "ab":
        assert [entry["number"] for entry in log.entries() if entry["writer"] == writer] == list(range(50))


def test_the_log_is_for_its_owner_alone(log, open_umask):
    filled(log, 1)
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.place.stat().st_mode) == 0o700


# Its entries.


def entries_of(made, number=0):
    log = made.clients[100 + number].log
    assert log.verify().holds
    return log.entries()


def test_every_request_has_an_entry(deployed):
    made = deployed("ditto")
    requests = [asked(made.charter, "hello"), asked(made.charter), asked(made.charter, "evaluate", t=1)]
    replies = [made.clients[100].answer(request) for request in requests]
    found = entries_of(made)
    assert [one["kind"] for one in found] == ["hello", "train", "evaluate"]
    assert [one["round"] for one in found] == [0, 0, 1]
    for one, reply in zip(found, replies, strict=True):
        assert (one["run"], one["outcome"], one["reason"]) == ("run-1", "answered", None)
        assert (one["charter"], one["version"]) == (made.charter.digest, reply.config["version"])
        assert one["epsilon"] is None
        assert_describes(one["sent"], reply)
    assert found[1]["sent"]["norm"] > 0
    assert not (made.place / "node-1").exists()


def assert_describes(sent, reply):
    """What the log says of an answer is what the receiver finds in it."""
    said = b"".join(content_of(reply))
    arrays = [wire.from_bytes(*one).astype(np.float64) for one in reply.arrays.items() if one[0] != "weight"]
    assert (sent["bytes"], sent["sha256"]) == (len(said), hashlib.sha256(said).hexdigest())
    assert sent["norm"] == pytest.approx(sum(np.sum(one**2) for one in arrays) ** 0.5, rel=1e-5)


def test_the_hash_covers_all_that_is_said_and_not_which_request_is_answered():
    reply = Reply({"run": "r", "round": 1, "attempt": 0, "status": 1}, wire.encode({"a": np.ones(2)}), {"loss": 0.5})
    others = [
        Reply(reply.config | {"status": 2}, reply.arrays, reply.metrics),
        Reply(reply.config, wire.encode({"b": np.ones(2)}), reply.metrics),
        Reply(reply.config, wire.encode({"a": np.zeros(2)}), reply.metrics),
        Reply(reply.config, reply.arrays, {"loss": 0.25}),
        Reply(reply.config, {}, reply.metrics),
    ]
    said = [b"".join(content_of(one)) for one in (reply, *others)]
    assert len(set(said)) == 6
    assert b"".join(content_of(Reply(reply.config | {"attempt": 2}, reply.arrays, reply.metrics))) == said[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_whatever_leaves_can_be_written_down(log, value):
    reply = Reply({}, wire.encode({"a": np.array([value, 1.0]), "b": np.zeros((), bool)}))
    log.admit(Request("train", {}), reply, "answered", None, None)
    assert log.entries()[0]["sent"]["norm"] == ("nan" if np.isnan(value) else "inf")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"charter": "another"}, "The server has charter another and client 0 has"),
        ({"version": "0.0.1"}, "The server is of priory 0.0.1"),
        ({"run": "../elsewhere"}, "run='../elsewhere' is no name of a run"),
        ({"down": {"weights": np.zeros(3)}}, "The message lacks"),
    ],
    ids=["charter", "version", "run", "broadcast"],
)
def test_a_refusal_has_the_reason_that_is_sent(deployed, changed, reason):
    made = deployed()
    reply = made.clients[100].answer(asked(made.charter, **changed))
    (one,) = entries_of(made)
    assert (one["outcome"], one["sent"], one["reason"]) == ("refused", None, reply.error)
    assert one["reason"].startswith(reason)


@pytest.mark.parametrize("value", ["x" * 10_000, "line\nline\r\x1b[2J", 7, 1.5, True], ids=str)
def test_a_server_cannot_fill_the_log_or_break_its_lines(deployed, value):
    made = deployed()
    made.clients[100].answer(asked(made.charter, run=value, charter=value, t=value))
    (one,) = entries_of(made)
    assert one["outcome"] == "refused"
    assert one["round"] == (value if type(value) is int else None)
    (line,) = made.clients[100].log.path.read_bytes().splitlines()
    assert len(line) < 2000
    assert b"\x1b" not in line


def test_the_same_private_answer_has_the_same_hash_and_costs_nothing_more(deployed):
    made = deployed(dp="local", rounds=3, dp_noise=1.0, dp_delta=0.1)
    replies = [made.client(0).answer(asked(made.charter, t=1, attempt=attempt)) for attempt in (0, 1)]
    replies.append(made.client(0).answer(asked(made.charter, t=2)))
    found = entries_of(made)
    assert [one["outcome"] for one in found] == ["answered", "repeated", "answered"]
    assert found[0]["sent"] == found[1]["sent"] != found[2]["sent"]
    assert 0 < found[0]["epsilon"] == found[1]["epsilon"] < found[2]["epsilon"] == made.client(0).budget.spent()
    for one, reply in zip(found, replies, strict=True):
        assert_describes(one["sent"], reply)


def test_a_refusal_under_privacy_is_logged_with_what_was_spent_before(deployed):
    made = deployed(dp="local", rounds=3, dp_noise=1.0, dp_delta=0.1)
    made.client(0).answer(asked(made.charter, t=1))
    made.client(0).answer(asked(made.charter, t=0))
    (made.place / "node-0" / "client-0" / "budget.json").write_text("{")
    made.client(0).answer(asked(made.charter, t=2))
    first, second, third = entries_of(made)
    assert (second["outcome"], second["epsilon"]) == ("refused", first["epsilon"])
    assert "its privacy allows one answer" in second["reason"]
    assert third["epsilon"] is None
    assert "is damaged, so nothing is answered" in third["reason"]


@pytest.mark.parametrize("kind", ["hello", "train", "evaluate"])
@pytest.mark.parametrize("dp", [None, "local"])
def test_what_cannot_be_logged_does_not_leave(deployed, kind, dp):
    how = {"dp": dp, "dp_noise": 1.0, "dp_delta": 0.1} if dp else {}
    made = deployed(rounds=3, **how)
    client = made.clients[100]
    client.log.path.mkdir(parents=True)
    reply = client.answer(asked(made.charter, kind))
    assert "log.jsonl cannot be written (Is a directory), so nothing is answered" in reply.error
    assert (reply.arrays, reply.metrics, set(reply.config) - set(ABOUT)) == ({}, {}, set())
    client.log.path.rmdir()
    again = made.client(0).answer(asked(made.charter, kind))
    assert again.error == ""
    assert [one["outcome"] for one in entries_of(made)] == ["repeated" if dp and kind == "train" else "answered"]


def test_a_refusal_that_cannot_be_logged_keeps_its_reason(deployed):
    made = deployed()
    made.clients[100].log.path.mkdir(parents=True)
    assert made.clients[100].answer(asked(made.charter, charter="another")).error.startswith("The server has charter")


def test_the_log_holds_no_data_and_no_secrets(deployed):
    made = deployed()
    odd = np.float32(8675.309)
    rows = made.clients[100]._read()
    x = rows.x.copy()
    x[:, 0] = odd

    def failing(error):
        def read():
            raise error

        return read

    clients = [changed_rows(made, x=x), changed_rows(made, x=x, y=np.full(len(x), 86753))]
    for error in (UsageError(f"Row 3 has {odd} in column age."), UsageError("password=hunter2")):
        clients.append(Client(made.charter, 0, failing(error), made.place / "node-0"))
    for client in clients:
        for kind in ("hello", "train", "evaluate"):
            client.answer(asked(made.charter, kind, seed=86753091 if kind == "hello" else 1))
    written = clients[0].log.path.read_text()
    assert [one["outcome"] for one in entries_of(made)] == ["answered"] * 3 + ["refused"] * 9
    for secret in ("8675", "hunter2", "age", odd.tobytes().hex()):
        assert secret not in written


def test_forgetting_and_the_states_of_a_run_leave_the_log_alone(deployed):
    made = deployed("ditto")
    for t in (0, 1):
        made.clients[100].answer(asked(made.charter, t=t))
    before = made.clients[100].log.path.read_bytes()
    place = made.place / "node-0" / "client-0"
    assert sorted(path.name for path in place.iterdir()) == [NAME, "run-1"]
    gone = forget(made.place / "node-0", 0)
    assert gone
    assert [path.name for path in place.iterdir()] == [NAME]
    assert made.clients[100].log.path.read_bytes() == before
    made.clients[100].answer(asked(made.charter, t=0))
    assert len(entries_of(made)) == 3


def test_an_entry_has_these_fields_and_no_others():
    one = entry_of(Request("hello", {}), Reply(), "answered", "a", "b", 1.5)
    assert list(one) == [
        "time", "kind", "run", "round", "outcome", "reason", "sent", "epsilon", "app", "charter", "version",
    ]  # fmt: skip
    assert list(one["sent"]) == ["bytes", "norm", "sha256"]
    assert one["time"].endswith("+00:00")
