"""The recipe for one machine, followed word for word: it trains, and nothing but node traffic is admitted."""

import contextlib
import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from priory.deploy.gateway import find_nginx
from priory.deploy.journal import read_events, read_status

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.slow,  # a real SuperLink and two real nodes for some minutes
    pytest.mark.xdist_group("flower"),
    pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed"),
]
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
SUPERLINK, GATEWAY, NODES = 8000, 8443, (9094, 9095)
PATIENCE = 600.0  # seconds


def blocks():
    """The commands of the recipe as a shell reads them, block by block."""
    section = PAGE.read_text().split("## One machine")[1].split("\n## ")[0]
    texts = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    return [re.sub(r"^\$ ", "", text, flags=re.MULTILINE) for text in texts]


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def status(place, path, port=GATEWAY):
    context = ssl.create_default_context(cafile=place / "keys" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
        return connection.getresponse().status


def listening():
    """Addresses and ports on which something listens, as the kernel writes them."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(file).read_text().splitlines()[1:]
        found |= {tuple(line.split()[1].split(":")) for line in lines if line.split()[3] == "0A"}
    return {(address, int(port, 16)) for address, port in found}


@pytest.fixture
def shell(tmp_path):
    """A shell in an empty directory; what it started is gone afterwards."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PATH": tools, "PYTHONPATH": root, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with (tmp_path / "shell.log").open("wb") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        made = subprocess.Popen(["bash"], stdin=subprocess.PIPE, cwd=tmp_path, env=environment, text=True, **output)
    try:
        yield made
    finally:
        with contextlib.suppress(Exception):
            os.kill(int((tmp_path / "gateway" / "nginx.pid").read_text()), signal.SIGTERM)
        os.killpg(made.pid, signal.SIGTERM)
        made.stdin.close()
        made.wait()


def test_the_recipe_for_one_machine_trains_and_admits_node_traffic_alone(shell, tmp_path):
    before = listening()
    assert not any(is_open(port) for port in (SUPERLINK, GATEWAY, *NODES)), "the recipe's ports are taken"
    first, second = blocks()
    shell.stdin.write(first)
    shell.stdin.flush()
    deadline = time.monotonic() + PATIENCE
    while not is_open(SUPERLINK):
        assert time.monotonic() < deadline, (tmp_path / "shell.log").read_text()
        time.sleep(0.5)
    shell.stdin.write(f"{second}\ntouch done\n")
    shell.stdin.flush()
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline, (tmp_path / "shell.log").read_text()
        assert shell.poll() is None, (tmp_path / "shell.log").read_text()
        time.sleep(0.5)
    told = (tmp_path / "shell.log").read_text()
    assert read_status(tmp_path / "server")["phase"] == "finished", told
    rounds = [one for one in read_events(tmp_path / "server") if one["event"] == "round"]
    assert [one["usable"] for one in rounds] == [2, 2]

    for path in ("/v1/runtime/acquire-task", "/v1/control/start-run", "/v1/control/register-node", "/docs", "/"):
        assert status(tmp_path, path) == 404
    assert status(tmp_path, "/v1/fleet/pull-messages") == 401  # passed on, to a SuperLink that knows its nodes
    assert status(tmp_path, "/v1/runtime/acquire-task", SUPERLINK) == 401
    new = listening() - before
    assert {port for _, port in new} >= {SUPERLINK, GATEWAY, *NODES}
    assert {address for address, _ in new} <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1
    for name in ("state.db", "keys/superexec.secret", "keys/server.key", "keys/client-0"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name
