"""The log and the status: what an operator reads, and what survives a crash of whoever writes it."""

import json
import os
import subprocess

import pytest

from priory.core.errors import UsageError
from priory.deploy.journal import Journal, read_events, read_status


def dead_process() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_events_are_read_as_they_were_told(tmp_path):
    journal = Journal(tmp_path)
    journal.tell("joined", client=1)
    journal.tell("round", round=0, refused={})
    first, second = read_events(tmp_path)
    assert (first["event"], first["client"]) == ("joined", 1)
    assert (second["event"], second["round"], second["refused"]) == ("round", 0, {})
    assert first["time"] <= second["time"]


@pytest.mark.parametrize("raw", [b'{"event": "cu', b"\xff\xfe", b"3", b"{}", b'{"event": 4}', b"[" * 99999])
def test_a_line_that_is_none_is_left_out(tmp_path, raw):
    journal = Journal(tmp_path)
    journal.tell("first")
    with (tmp_path / "events.jsonl").open("ab") as handle:
        handle.write(raw + b"\n")
    journal.tell("last")
    assert [one["event"] for one in read_events(tmp_path)] == ["first", "last"]


def test_a_line_that_was_cut_short_spoils_none_that_follows(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "cut')
    journal.tell("lost with it")
    journal.tell("last")
    assert [one["event"] for one in read_events(tmp_path)][-1] == "last"


def test_there_are_no_events_before_the_first(tmp_path):
    assert read_events(tmp_path) == []


@pytest.mark.parametrize("what", ["tell", "stand"])
def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path, caplog, what):
    journal = Journal(tmp_path / "absent")
    getattr(journal, what)("waiting")
    assert "cannot be written (No such file or directory)" in caplog.text


def test_a_status_keeps_what_it_was_told_before(tmp_path):
    journal = Journal(tmp_path)
    journal.stand("waiting", run="a", round=0)
    journal.stand("asking", round=1)
    told = read_status(tmp_path)
    assert (told["phase"], told["run"], told["round"], told["pid"]) == ("asking", "a", 1, os.getpid())


@pytest.mark.parametrize(
    ("phase", "alive"),
    [("waiting", True), ("asking", True), ("evaluating", True), ("finished", False), ("failed", False)],
)
def test_who_is_at_work_is_alive(tmp_path, phase, alive):
    Journal(tmp_path).stand(phase)
    assert read_status(tmp_path)["alive"] is alive


def test_a_server_that_was_killed_is_not_alive(tmp_path):
    Journal(tmp_path).stand("asking", pid=dead_process())
    assert not read_status(tmp_path)["alive"]


def test_a_status_that_is_absent_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"status\.json cannot be read \(No such file or directory\); name the"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"phase": 3, "pid": 1}', '{"phase": "asking"}', '{"phase": "a", "pid": "b"}', "[" * 99999],
)
def test_a_status_that_is_none_is_told(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(UsageError, match="is damaged; the next step of a running server replaces it"):
        read_status(tmp_path)


@pytest.mark.parametrize("pid", [0, -1, 10**30])
def test_no_number_of_a_process_breaks_the_reading(tmp_path, pid):
    (tmp_path / "status.json").write_text(json.dumps({"phase": "asking", "pid": pid}))
    assert "alive" in read_status(tmp_path)
