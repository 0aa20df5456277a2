"""A local fleet: it comes up, works, turns strangers away, and leaves nothing behind."""

import datetime
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from priory.core.errors import UsageError
from priory.deploy import flower_processes
from priory.deploy.flower_processes import MARK, FlowerError
from priory.deploy.processes import Fleet, pairs, take_ports
from priory.deploy.tls import write_authority, write_node_key
from tests.deploy.conftest import kill_server_app

PROJECT = """
[project]
name = "doubling"
version = "1.0.0"
description = "Two rounds of doubling."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "priory"

[tool.flwr.app.components]
serverapp = "doubling.server:app"
clientapp = "doubling.client:app"

[tool.flwr.app.config]
rounds = 1
"""

SERVER = """
import time
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    value = np.ones(3)
    for t in range(context.run_config["rounds"]):
        asked = [
            Message(RecordDict({"x": ArrayRecord([value])}), dst_node_id=node, message_type="query", group_id=str(t))
            for node in grid.get_node_ids()
        ]
        waiting, replies = set(grid.push_messages(asked)), []
        while waiting:
            time.sleep(0.5)
            replies += (new := list(grid.pull_messages(waiting)))
            waiting -= {reply.metadata.reply_to_message_id for reply in new}
        values = [reply.content["x"].to_numpy_ndarrays()[0] for reply in replies]
        value = sum(values)
    print("result", len(values), *value, flush=True)
"""

CLIENT = """
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    (x,) = message.content["x"].to_numpy_ndarrays()
    return Message(RecordDict({"x": ArrayRecord([x * context.node_config["factor"]])}), reply_to=message)
"""

OWNER = ("PRIORY_TEST_OWNER", secrets.token_hex(8))  # inherited by whatever these tests start
NODES = [{"factor": 2.0, "name": "of the north"}, {"factor": 3.0}]


@pytest.fixture
def app(tmp_path):
    package = tmp_path / "app" / "doubling"
    package.mkdir(parents=True)
    (tmp_path / "app" / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text(SERVER)
    (package / "client.py").write_text(CLIENT)
    return tmp_path / "app"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(monkeypatch):
    monkeypatch.setenv(*OWNER)
    yield
    assert running() == []


def running():
    """The processes of whatever fleet these tests have started; another's are none of our business."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if is_ours(path)]


def is_ours(path):
    try:
        return all(entry.encode() in path.read_bytes() for entry in (f"{MARK}=", "=".join(OWNER)))
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("secure", [True, False])
def test_two_rounds_reach_two_nodes_and_come_back(app, tmp_path, secure):
    with Fleet(tmp_path / "fleet", NODES, secure=secure) as fleet:
        assert len(set(fleet.node_ids)) == 2
        run = fleet.submit(app, {"rounds": 2})
        assert fleet.wait(run) == "finished"
        assert "result 2 25.0 25.0 25.0" in fleet.log_of(run)  # (2 + 3)², summed over the two nodes in each round
        assert running() != []


@pytest.mark.slow
def test_only_those_with_a_registered_key_and_the_right_certificate_come_in(tmp_path):
    write_node_key(tmp_path / "stranger")
    write_authority(tmp_path / "elsewhere")
    with Fleet(tmp_path / "fleet", NODES[:1]) as fleet:
        before, own, authority = fleet.node_ids, fleet.keys[0], fleet.authority
        fleet.kill_node(0, signal.SIGTERM)
        fleet.keys[0] = tmp_path / "stranger"
        with pytest.raises(FlowerError, match="Failed to activate SuperNode"):
            fleet.start_node(0)
        assert "No SuperNode found with the given public key" in fleet.log("superlink")
        fleet.keys[0], fleet.authority = own, tmp_path / "elsewhere" / "ca.crt"
        with pytest.raises(FlowerError, match="CERTIFICATE_VERIFY_FAILED"):
            fleet.start_node(0)
        fleet.authority = authority
        fleet.start_node(0)
        assert fleet.node_ids == before


@pytest.mark.slow
def test_an_expired_certificate_is_refused_by_the_nodes(tmp_path):
    with Fleet(tmp_path / "fleet", NODES[:1]) as fleet:
        fleet.kill_node(0, signal.SIGTERM)
        shutil.rmtree(tmp_path / "fleet" / "certificates")
        an_expired_authority(tmp_path / "fleet" / "certificates")
        fleet.restart_superlink()
        with pytest.raises(FlowerError, match="certificate has expired"):
            fleet.start_node(0)


def an_expired_authority(directory):
    write_authority(directory, days=1, start=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2))


@pytest.mark.slow
def test_a_server_app_that_is_killed_does_not_keep_the_next_run_from_working(app, tmp_path):
    with Fleet(tmp_path / "fleet", NODES) as fleet:
        first = fleet.submit(app, {"rounds": 100})
        while "Start `flwr-serverapp`" not in fleet.log_of(first):
            pass
        assert kill_server_app(fleet) == 1
        second = fleet.submit(app)
        assert fleet.wait(second) == "finished"


@pytest.mark.slow
def test_a_second_fleet_on_the_same_directory_has_the_same_nodes(tmp_path):
    with Fleet(tmp_path / "fleet", NODES) as fleet:
        before = fleet.node_ids
    with Fleet(tmp_path / "fleet", NODES) as fleet:
        assert fleet.node_ids == before


@pytest.mark.slow
@pytest.mark.parametrize("reason", [KeyboardInterrupt, ZeroDivisionError])
def test_everything_goes_down_whatever_the_reason(tmp_path, reason):
    def interrupted():
        with Fleet(tmp_path / "fleet", NODES[:1], secure=False):
            assert running() != []
            raise reason

    with pytest.raises(reason):
        interrupted()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for first in (port, port - 1):  # the SuperLink's, and the first node's
            with pytest.raises(UsageError, match="cannot be taken"):
                Fleet(tmp_path / "fleet", NODES, port=first)
    assert not (tmp_path / "fleet").exists()


def test_ports_are_different_and_free():
    ports = take_ports(20)
    assert len(set(ports)) == 20
    assert take_ports(1, ports[0]) == ports[:1]


def test_a_port_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="Port 70000"):
        take_ports(1, 70_000)


def test_expired_certificates_are_refused_before_anything_starts(tmp_path):
    pytest.importorskip("cryptography")
    an_expired_authority(tmp_path / "certificates")
    with pytest.raises(UsageError, match="expired on"), Fleet(tmp_path, NODES):
        pass
    assert not (tmp_path / "state.db").exists()


def test_a_node_config_is_written_as_flower_reads_it():
    config_module = pytest.importorskip("flwr.common.config")
    config = {"factor": 2.5, "name": "of the north = up", "on": True, "partition-id": 3}
    assert config_module.parse_config_args([pairs(config)]) == config


@pytest.mark.parametrize("value", ['say "no"', "back\\slash", "two\nlines", [1, 2], None])
def test_what_flower_would_misread_is_refused(value):
    with pytest.raises(UsageError, match="does not fit into a node config"):
        pairs({"key": value})


def test_a_directory_has_one_fleet_at_a_time(tmp_path):
    first, second = Fleet(tmp_path / "fleet", []), Fleet(tmp_path / "fleet", [])
    first._hold()
    with pytest.raises(UsageError, match="holds a fleet that is up; take it down"):
        second.__enter__()
    first.close()
    second._hold()
    second.close()


def test_what_flower_writes_is_for_its_owner_alone(tmp_path, open_umask, monkeypatch):
    monkeypatch.setattr(flower_processes, "_executable", lambda name: f"/bin/{name}")
    fleet = Fleet(tmp_path / "fleet", [])
    fleet._hold()
    (fleet.directory / "logs").mkdir()
    fleet._start("superlink", {}, "sh", "-c", "mkdir made; touch state.db").wait()
    fleet.close()
    modes = {name: stat.S_IMODE((fleet.directory / name).stat().st_mode) for name in ("", "made", "state.db")}
    assert modes == {"": 0o700, "made": 0o700, "state.db": 0o600}


def test_what_a_killed_owner_left_behind_is_found_again(tmp_path):
    first = Fleet(tmp_path / "fleet", [])
    orphan = subprocess.Popen(["sleep", "60"], env=first._environment("node-0"), start_new_session=True)
    deadline = time.monotonic() + 5
    while not Fleet(tmp_path / "fleet", []).processes() and time.monotonic() < deadline:
        time.sleep(0.01)  # a process that has only just started does not show its environment yet
    assert Fleet(tmp_path / "fleet", []).processes() == [orphan.pid]
    Fleet(tmp_path / "fleet", []).close()
    assert orphan.wait(5) == -signal.SIGTERM
